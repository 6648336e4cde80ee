"""Helpers and settings of LinkedIn's package that other packages import; nothing here uses them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core import launch_config
from liger_kernel.ops._core.tl import next_power_of_2, tl
from liger_kernel.utils import infer_device

MAX_FUSED_SIZE = 65536


def is_hip() -> bool:
    """Whether PyTorch was built for AMD GPUs."""
    return torch.version.hip is not None


def ensure_contiguous(fn: Callable) -> Callable:
    """``fn(ctx, *tensors_and_more)`` with every tensor made contiguous."""

    @functools.wraps(fn)
    def wrapper(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        dense = lambda a: a.contiguous() if isinstance(a, Tensor) else a
        return fn(ctx, *map(dense, args), **{k: dense(v) for k, v in kwargs.items()})

    return wrapper


def get_num_warps(BLOCK_SIZE: int) -> int:
    """Warps for a block of so many columns."""
    return min(
        32 if BLOCK_SIZE >= 32768 else 16 if BLOCK_SIZE >= 8192 else 8 if BLOCK_SIZE >= 2048 else 4,
        launch_config.max_warps(),
    )


def calculate_settings(n: int) -> tuple[int, int]:
    """A block that holds n columns, and warps for it. ``RuntimeError`` above 65536 columns; our
    own operators have no such limit."""
    block = next_power_of_2(n)
    if block > MAX_FUSED_SIZE:
        raise RuntimeError(f"calculate_settings: n must be at most {MAX_FUSED_SIZE}, got {n}")
    return block, get_num_warps(block)


def compare_version(package: str, operator: Callable, target: str) -> bool:
    """``operator(version of package, target)``, such as ``compare_version("triton", operator.ge,
    "3.0.0")``; False if it is not installed."""
    from packaging.version import Version

    try:
        module = importlib.import_module(package)
    except ImportError:
        return False
    return operator(Version(module.__version__), Version(target))


def device_context(device: torch.device | str | int) -> contextlib.AbstractContextManager:
    """A context in which ``device`` is the current one of its kind; kernels are launched there."""
    kind = getattr(torch, torch.device(device).type)
    return kind.device(device) if hasattr(kind, "device") else contextlib.nullcontext()


def amp_custom_fwd(fwd: Callable | None = None, **options: Any) -> Callable:
    """``torch.amp.custom_fwd`` for the kind of device that is here, which is read when this is
    called: importing must not wake a GPU's driver."""
    return torch.amp.custom_fwd(fwd, device_type=infer_device(), **options)


def amp_custom_bwd(bwd: Callable | None = None, **options: Any) -> Callable:
    """``torch.amp.custom_bwd`` likewise."""
    return torch.amp.custom_bwd(bwd, device_type=infer_device(), **options)


def get_amp_custom_fwd_bwd() -> tuple[Callable, Callable]:
    """``amp_custom_fwd`` and ``amp_custom_bwd``."""
    return amp_custom_fwd, amp_custom_bwd


def get_npu_core_count(default: int = 20) -> int:
    """``default``: there are no kernels for Ascend's NPUs here."""
    return default


def set_large_grf_mode(kernel_args: dict[str, Any]) -> None:
    """Nothing: there are no kernels for Intel's GPUs here, whose registers it is about."""


torch_to_triton_dtype = (
    {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    if hasattr(tl, "float32")
    else {}
)


# Settings of native kernels that LinkedIn's package loads from another wheel: accepted, without effect
@dataclass(frozen=True)
class _Capacity:
    max_tokens: int
    hidden_size: int


@dataclass(frozen=True)
class FusedLinearCrossEntropyConfig(_Capacity):
    """How large a head's scaled cross entropy may be, and the group of ranks that share its
    vocabulary."""

    local_vocab_size: int
    group: str | None = None
    tiles_per_reduce: int = 1


@dataclass(frozen=True)
class MoEConfig(_Capacity):
    """How large a mixture of experts may be, and the ranks it is spread over."""

    num_experts: int
    top_k: int
    num_hosts: int
    gpus_per_host: int
    group: str | None = None
    max_inflight: int = 1


def configure(
    *,
    process_groups: Mapping[str, Any] | None = None,
    bootstrap_group: Any = None,
    device: Any = None,
    flsce: FusedLinearCrossEntropyConfig | None = None,
    moe: MoEConfig | None = None,
) -> bool:
    """False, and a warning: there are no native kernels (NVSHMEM, CuTe) to prepare. Ours
    allocate what they need when they are called."""
    warnings.warn(
        "liger_kernel.ops.configure: there are no native kernels here to configure; the Triton kernels need no setup",
        stacklevel=2,
    )
    return False
