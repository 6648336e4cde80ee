"""The installed packages, the GPU, and whether kernels or PyTorch code runs: the information
that a bug report needs first."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "peft",
    "bitsandbytes",
    "trl",
    "deepspeed",
    "lightning",
)


def environment() -> dict[str, str]:
    """Label -> value, in the order for printing."""
    import liger_kernel
    from liger_kernel._others import others

    found = {
        "liger-kernel": f"{liger_kernel.__version__} (not LinkedIn's package) in {Path(liger_kernel.__file__).parent}",
        "also installed": ", ".join(others(liger_kernel.__version__)) or "no other package named liger_kernel",
        "Python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    if importlib.util.find_spec("torch") is None:
        return {**found, "operators": "none: PyTorch is not installed"}
    import torch

    found["torch"] = torch.__version__  # includes the build, which the metadata may lack
    found["CUDA of PyTorch"] = torch.version.cuda or "none"
    found["HIP of PyTorch"] = torch.version.hip or "none"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found["GPU"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
    found["driver"] = _driver()
    found["operators"] = _implementation(bool(names))
    found["attention"] = _attention("cuda" if names else "cpu")
    if importlib.util.find_spec("trl"):
        found["TRL's heads"] = _trl()
    return found


def _trl() -> str:
    # whatever is wrong with TRL, or with what it imports, must not end the report of it
    try:
        from liger_kernel.transformers.trl_head import heads

        return heads()
    except Exception as error:
        return f"unknown: {error!r}"


def _driver() -> str:
    if not shutil.which("nvidia-smi"):
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    query = subprocess.run(command, capture_output=True, text=True, check=False)
    return query.stdout.split("\n")[0].strip() if query.returncode == 0 and query.stdout.strip() else "unknown"


def _implementation(gpu: bool) -> str:
    if importlib.util.find_spec("triton") is None:
        return "PyTorch references: Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton kernels, interpreted on the CPU (TRITON_INTERPRET=1)"
    return "Triton kernels on the GPU, PyTorch references on the CPU" if gpu else "PyTorch references: no GPU"


def _attention(device: str) -> str:
    """The backend that PyTorch uses for causal attention in bf16, its alternatives, and the
    packages that transformers could use instead."""
    import torch
    from torch.nn.attention import SDPBackend

    from liger_kernel.utils import varlen_lacks

    q = torch.empty(1, 8, 128, 128, dtype=torch.bfloat16, device=device)
    chosen = SDPBackend(torch._fused_sdp_choice(q, q, q, None, 0.0, True)).name.lower().replace("_", " ")
    may = {
        name: getattr(torch.backends.cuda, f"{name.replace(' ', '_')}_sdp_enabled")()
        for name in ("flash", "cudnn", "mem efficient", "math")
    }
    lacking = varlen_lacks(q.device, q.dtype)
    installed = []
    for name in ("flash-attn", "flash-attn-3", "flash-attn-4", "kernels"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed.append(f"{name} {importlib.metadata.version(name)}")
    return (
        f"sdpa by {chosen} (enabled: {', '.join(name for name, on in may.items() if on)}); packed documents by "
        f"{f'sdpa with a mask: {lacking}' if lacking else 'varlen_attn'}; "
        f"{', '.join(installed) or 'no other package'} installed"
    )


def print_env_report() -> None:
    found = environment()
    width = max(map(len, found))
    for label, value in found.items():
        print(f"{label:<{width}}  {value}")


if __name__ == "__main__":
    print_env_report()
