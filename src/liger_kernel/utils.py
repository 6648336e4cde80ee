"""Which devices and packages are available here, under the names of LinkedIn's package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any


def is_peft_available() -> bool:
    """Whether peft is installed."""
    return importlib.util.find_spec("peft") is not None


PEFT_AVAILABLE = is_peft_available()


def _available(kind: str) -> bool:
    import torch

    return hasattr(torch, kind) and getattr(torch, kind).is_available()


def is_npu_available() -> bool:
    """Whether PyTorch sees an Ascend NPU."""
    return _available("npu")


def infer_device() -> str:
    """The kind of device that PyTorch sees here: "cuda" (AMD's too), "npu", "xpu" or "cpu"."""
    return next((kind for kind in ("cuda", "npu", "xpu") if _available(kind)), "cpu")


def infer_comm_backend() -> str:
    """The backend of torch.distributed for ``infer_device()``."""
    return {"cuda": "nccl", "npu": "hccl", "xpu": "xccl", "cpu": "gloo"}[infer_device()]


def infer_device_arch(device_id: int = 0) -> str:
    """The architecture of a GPU, such as ``sm90`` or ``gfx942``; for other devices the name of
    the kind of device."""
    import torch

    kind = infer_device()
    if kind != "cuda":
        return kind
    p = torch.cuda.get_device_properties(device_id)
    return _infer_amd_arch(device_id) if torch.version.hip else f"sm{p.major}{p.minor}"


def _infer_amd_arch(device_id: int) -> str:
    """The architecture of an AMD GPU without its features, such as ``gfx942``."""
    import torch

    return torch.cuda.get_device_properties(device_id).gcnArchName.split(":")[0]


def varlen_lacks(device: Any, dtype: Any) -> str | None:
    """The reason why PyTorch's ``varlen_attn`` does not support a ``torch.device`` and dtype;
    None if it does."""
    import torch

    if device.type != "cuda":
        return "no GPU"
    if torch.version.hip or torch.cuda.get_device_properties(device).major < 8:
        return "varlen_attn does not support this GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"varlen_attn does not support {str(dtype).removeprefix('torch.')}"
    return None


def get_total_gpu_memory() -> int:
    """The memory of the current device in GB, rounded down. Raises ``RuntimeError`` on a CPU."""
    import torch

    kind = infer_device()
    if kind == "cpu":
        raise RuntimeError("get_total_gpu_memory: there must be a GPU, got a CPU only")
    device = getattr(torch, kind)
    return device.get_device_properties(device.current_device()).total_memory // (1024**3)


def transformers_version_dispatch(
    required_version: str,
    before_fn: Callable,
    after_fn: Callable,
    before_args: tuple = (),
    after_args: tuple = (),
    before_kwargs: Mapping[str, Any] | None = None,
    after_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """``after_fn`` with its arguments if transformers is at least ``required_version``, else
    ``before_fn`` with its own."""
    from packaging.version import Version
    from transformers import __version__

    if Version(__version__) >= Version(required_version):
        return after_fn(*after_args, **(after_kwargs or {}))
    return before_fn(*before_args, **(before_kwargs or {}))
