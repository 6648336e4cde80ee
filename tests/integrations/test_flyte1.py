"""The Flyte 1 workflow: from end to end on this machine with a rank killed, by the entry point
of its containers, and as Flyte serialises it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("flytekit", reason="tests/integrations/environments.py flyte1")

from workflows import STEPS, environment, job_file, kill_a_rank, large_job, pod_of_elastic_training, started

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
HEAD = """
import asyncio, dataclasses, json, sys
from pathlib import Path
from liger_kernel.deploy import flyte1
here = Path(sys.argv[1])
config = dataclasses.replace(flyte1.job.config, out=str(here / "run"), cache=str(here / "cache"), metrics_port=0)
if __name__ == "__main__":  # spawned ranks import this, too
"""
INPUTS = """
    from flytekit.core import context_manager, type_engine
    from flytekit.types.directory import FlyteDirectory
    from liger_kernel.deploy import steps
    rows, kernels = steps.prepare(config, here / "rows"), steps.warm(config, None, here / "kernels")
    context = context_manager.FlyteContextManager.current_context()
    given = {"config": config, "data": FlyteDirectory(str(rows)), "kernels": FlyteDirectory(str(kernels))}
    literals = type_engine.TypeEngine.dict_to_literal_map(context, given, flyte1.train.python_interface.inputs)
    (here / "train.pb").write_bytes(literals.to_flyte_idl().SerializeToString())
"""


def script(folder, code):
    path = folder / "script.py"
    path.write_text(code)
    return path


def test_the_workflow_runs_here_and_a_killed_rank_costs_nothing(tmp_path):
    job = job_file(tmp_path)
    code = HEAD + '    print("SCORES", flyte1.pipeline(config=config, target=(here / "export").as_uri()))\n'
    process = started(sys.executable, script(tmp_path, code), tmp_path, env=environment(tmp_path, job))
    kill_a_rank(process, tmp_path / "store")
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert "resuming after step" in output, output
    scores = json.loads(output.partition("SCORES ")[2].splitlines()[0])
    assert json.loads((tmp_path / "export" / "evaluation.json").read_text()) == scores
    metrics = json.loads((tmp_path / "export" / "metrics.json").read_text())
    assert metrics["restarts"] == 1 and metrics["ranks"] == 2 and len(metrics["losses"]) == STEPS
    assert scores["loss"] == pytest.approx(metrics["evaluations"][-1]["loss"], rel=1e-4)


def test_the_entry_point_of_pods_trains_elastically(tmp_path):
    job = job_file(tmp_path)
    env = environment(tmp_path, job)
    done = started(sys.executable, script(tmp_path, HEAD + INPUTS), tmp_path, env=env)
    output = done.communicate(timeout=120)[0]
    assert done.returncode == 0, output
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    argv = ["--inputs", tmp_path / "train.pb", "--output-prefix", outputs]
    argv += ["--raw-output-data-prefix", tmp_path / "raw", "--checkpoint-path", tmp_path / "checkpoints"]
    argv += ["--prev-checkpoint", '""', "--resolver", "flytekit.core.python_auto_container.default_task_resolver"]
    argv += ["--", "task-module", "liger_kernel.deploy.flyte1", "task-name", "train"]
    training = started(BIN / "pyflyte-execute", *argv, env=env, cwd=tmp_path)
    kill_a_rank(training, tmp_path / "store")
    output = training.communicate(timeout=300)[0]
    assert training.returncode == 0 and "resuming after step" in output, output
    assert (outputs / "outputs.pb").stat().st_size and not (outputs / "error.pb").exists(), output
    assert list((tmp_path / "raw").rglob("model.safetensors")) and list((tmp_path / "raw").rglob("metrics.json"))


SPECS = """
    from flytekit.configuration import FastSerializationSettings, Image, ImageConfig, SerializationSettings
    from flytekit.tools.translator import get_serializable
    from google.protobuf.json_format import MessageToDict
    from collections import OrderedDict
    settings = SerializationSettings(image_config=ImageConfig.auto(img_name="registry.test/liger:1"), project="p", domain="d", version="v")
    names = "prepare", "warm", "train", "evaluate", "export"
    specs = {name: MessageToDict(get_serializable(OrderedDict(), settings, getattr(flyte1, name)).to_flyte_idl())["template"] for name in names}
    print("SPECS", json.dumps(specs))
"""  # noqa: E501


def test_what_flyte_is_given(tmp_path):
    env = environment(tmp_path, large_job(tmp_path))
    done = started(sys.executable, script(tmp_path, HEAD + SPECS), tmp_path, env=env)
    output = done.communicate(timeout=120)[0]
    assert done.returncode == 0, output
    specs = json.loads(output.partition("SPECS ")[2])
    pod = pod_of_elastic_training(specs["train"])
    (container,) = pod["containers"]
    names = [e["name"] for e in container["env"]]
    assert len(names) == len(set(names)) and {"LIGER_JOB", "TRITON_CACHE_DIR"} <= set(names)
    assert container["resources"]["limits"]["gpu"] == "8" and container["securityContext"]["readOnlyRootFilesystem"]
    assert {v["name"] for v in pod["volumes"]} >= {"cache", "tmp", "shared"}

    flags = ["--image", "registry.test/liger:1", "-o", tmp_path / "w.tgz", "-f"]
    module = ["--pkgs", "liger_kernel.deploy.flyte1"]
    package = started(BIN / "pyflyte", *module, "package", *flags, env=env, cwd=ROOT / "src")
    output = package.communicate(timeout=120)[0]
    assert package.returncode == 0 and (tmp_path / "w.tgz").stat().st_size, output
