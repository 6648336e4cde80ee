"""The Flyte 2 workflow: from end to end on this machine with a rank killed, by the entry point
of its containers, and as Flyte serialises it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("flyte", reason="tests/integrations/environments.py flyte")

from workflows import STEPS, environment, job_file, kill_a_rank, large_job, pod_of_elastic_training, started

ROOT = Path(__file__).parents[2]
HEAD = """
import asyncio, dataclasses, json, sys
from pathlib import Path
import flyte
from flyte.io import Dir
from liger_kernel.deploy import flyte2
here = Path(sys.argv[1])
config = dataclasses.replace(flyte2.job.config, out=str(here / "run"), cache=str(here / "cache"), metrics_port=0)
"""
PIPELINE = """
run = flyte.with_runcontext(mode="local", raw_data_path=str(here / "raw")).run(flyte2.pipeline, config=config, target=(here / "export").as_uri())
print("SCORES", run.outputs()[0])
"""  # noqa: E501
# what a pod is given: inputs in a file, outputs and reports into a folder
INPUTS = """
from flyte._internal.runtime.convert import convert_from_native_to_inputs
def write(task, **values):
    inputs = asyncio.run(convert_from_native_to_inputs(task.native_interface, **values))
    (here / f"{task.func.__name__}.pb").write_bytes(inputs.proto_inputs.SerializeToString())
"""


def python(code, *argv, env):
    return started(sys.executable, "-c", code, *argv, env=env)


def test_the_workflow_runs_here_and_a_killed_rank_costs_nothing(tmp_path):
    job = job_file(tmp_path)
    process = python(HEAD + PIPELINE, tmp_path, env=environment(tmp_path, job))
    kill_a_rank(process, tmp_path / "store")
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert "resuming after step" in output, output
    scores = json.loads(output.partition("SCORES ")[2])
    exported = json.loads((tmp_path / "export" / "evaluation.json").read_text())
    assert exported == scores and scores["loss"] == pytest.approx(scores["loss_without_kernels"], rel=1e-5)
    metrics = json.loads((tmp_path / "export" / "metrics.json").read_text())
    assert metrics["restarts"] == 1 and metrics["ranks"] == 2 and len(metrics["losses"]) == STEPS
    assert metrics["losses"][-1] < metrics["losses"][0]
    assert scores["loss"] == pytest.approx(metrics["evaluations"][-1]["loss"], rel=1e-4)
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert model.num_parameters() == metrics["parameters"]


def a0(task, folder, env, name):
    """The command in Flyte's containers, on files."""
    (folder / name).mkdir()
    argv = ["--inputs", folder / f"{task}.pb", "--outputs-path", folder / name, "--raw-data-path", folder / "raw"]
    argv += ["--version", "v1", "--run-name", "r1", "--project", "p", "--domain", "d", "--org", "o"]
    argv += ["--name", name, "--run-base-dir", folder / "base"]
    argv += ["--resolver", "flyte._internal.resolvers.default.DefaultTaskResolver"]
    argv += ["mod", "liger_kernel.deploy.flyte2", "instance", task]
    return started(Path(sys.executable).parent / "a0", *argv, env=env, cwd=ROOT / "src")


def test_the_entry_point_of_pods_trains_elastically_and_reports(tmp_path):
    job = job_file(tmp_path)
    env = environment(tmp_path, job) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    prepared = """
from liger_kernel.deploy import steps
rows, kernels = steps.prepare(config, here / "rows"), steps.warm(config, None, here / "kernels")
local = lambda path: Dir(path=str(path))
write(flyte2.train, config=config, data=local(rows), kernels=local(kernels))
write(flyte2.evaluate, config=config, data=local(rows), run=local(here / "run" / "model"))
"""
    done = python(HEAD + INPUTS + prepared, tmp_path, env=env)
    assert done.wait(120) == 0, done.stdout.read()
    training = a0("train", tmp_path, env, "training")
    kill_a_rank(training, tmp_path / "store")
    output = training.communicate(timeout=300)[0]
    assert training.returncode == 0 and "resuming after step" in output, output
    outputs = tmp_path / "training" / "outputs.pb"
    assert outputs.is_file() and outputs.stat().st_size and not outputs.with_name("error.pb").exists(), output
    assert json.loads((tmp_path / "run" / "model" / "metrics.json").read_text())["ranks"] == 2

    evaluation = a0("evaluate", tmp_path, env, "evaluation")
    output = evaluation.communicate(timeout=300)[0]
    assert evaluation.returncode == 0 and not (tmp_path / "evaluation" / "error.pb").exists(), output
    (report,) = tmp_path.rglob("report.html")
    html = report.read_text()
    assert html.count("<svg") == 2 and 'id="loss"' in html and 'id="tokens-per-second"' in html
    assert len(re.search(r'id="loss">\s*<path d="([^"]+)"', html).group(1).split("L")) > 10  # a curve, not a frame


SPECS = """
from flyte.models import SerializationContext
from flyte._internal.runtime.task_serde import translate_task_to_wire
from google.protobuf.json_format import MessageToDict
context = SerializationContext(project="p", domain="d", version="v1", org="o", root_dir=Path(sys.argv[2]), image_cache=None, code_bundle=None)
names = "prepare", "warm", "train", "evaluate", "export", "pipeline"
tasks = {name: MessageToDict(translate_task_to_wire(getattr(flyte2, name), context))["taskTemplate"] for name in names}
print("SPECS", json.dumps(tasks))
"""  # noqa: E501


def test_what_flyte_is_given(tmp_path):
    done = python(HEAD + SPECS, tmp_path, ROOT / "src", env=environment(tmp_path, large_job(tmp_path)))
    output = done.communicate(timeout=120)[0]
    assert done.returncode == 0, output
    specs = json.loads(output.partition("SPECS ")[2])
    pod = pod_of_elastic_training(specs["train"])
    (container,) = pod["containers"]
    variables = {e["name"]: e.get("value") for e in container["env"]}
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1" and variables["TRITON_CACHE_DIR"] == "/cache/triton"
    assert json.loads(variables["LIGER_JOB"])["nodes"] == 4
    assert len(container["env"]) == len(variables)  # none twice
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["securityContext"]["runAsNonRoot"]
    assert container["envFrom"] == [{"secretRef": {"name": "tokens"}}]
    names = lambda found: {each["name"] for each in found}
    assert names(pod["volumes"]) == {"cache", "tmp", "shared"} == names(container["volumeMounts"])
    gpus = {}
    for name, spec in specs.items():
        if "k8sPod" in spec:
            requests = spec["k8sPod"]["podSpec"]["containers"][0]["resources"]["requests"]
            gpus[name] = next((count for resource, count in requests.items() if "gpu" in resource), "0")
    assert gpus == {"prepare": "0", "warm": "0", "train": "8", "evaluate": "1", "export": "0"}
    assert specs["evaluate"]["metadata"]["generatesDeck"] is True and not specs["train"]["metadata"]["generatesDeck"]
