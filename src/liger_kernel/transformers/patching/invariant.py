"""What of a model cannot be batch-invariant, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from liger_kernel import parallel
from liger_kernel.ops._core.operator import KERNEL_DTYPES, use_kernels
from liger_kernel.parallel.sharded_head import is_compiled
from liger_kernel.transformers.patching.patches import is_patched, stock_class, wraps_ours
from liger_kernel.transformers.patching.unpad import rope_of_rows

_DRAWS = "it draws a token's numbers by its place in the batch"
_OTHERS = {  # classes whose own arithmetic depends on the batch
    "Gemma3nTextAltUp": "its means over columns are PyTorch's",
    "PhimoeTopKRouter": _DRAWS,
}
_STOCK = nn.LayerNorm | nn.GroupNorm | _NormBase | nn.RMSNorm


def check(model: nn.Module, quantised: Callable[[nn.Module], bool]) -> None:
    """``ValueError`` with the first module of a patched ``model`` whose results would depend on the
    batch. ``quantised``: whether a layer's weight is stored by another package."""
    some = next((p for p in model.parameters() if p.is_cuda and p.dtype in KERNEL_DTYPES), None)
    if some is not None and not use_kernels(some):
        raise ValueError(f"batch_invariant: kernels must run on {some.device}, got none: LIGER_KERNEL_IMPL is torch")
    if rope := rope_of_rows(model):
        raise ValueError(f"batch_invariant: {type(model).__name__} cannot be so: {rope}")
    for name, m in model.named_modules():
        if why := _why(m, quantised):
            raise ValueError(f"batch_invariant: {name or 'the model'} ({type(m).__name__}) cannot be so: {why}")


def _why(m: Any, quantised: Callable[[nn.Module], bool]) -> str | None:
    if isinstance(m, _ConvNd):
        return "convolutions, and recurrent layers, sum in an order that depends on the batch"
    if isinstance(m, _DropoutNd) and m.p > 0:
        return f"{_DRAWS}: p must be 0, got {m.p:g}"
    if getattr(m, "jitter_noise", 0):
        return f"{_DRAWS}: router_jitter_noise must be 0, got {m.jitter_noise:g}"
    if why := _OTHERS.get(stock_class(m).__name__):
        return why
    if is_compiled(m):
        return "it is compiled"
    if parallel.is_linear(m) and parallel.is_tensor_parallel(m):
        return "its ranks have parts of a sum"
    recipe = getattr(m, "recipe", None)
    if recipe is not None and not getattr(recipe, "by_rows", False):
        return f"{recipe} is not FP8 with a scale for each row; fp8='rowwise' is"
    if is_patched(m) or wraps_ours(getattr(type(m), "forward", None)):
        return None
    if quantised(m):
        return "its quantised weight is multiplied by its own package"
    if isinstance(m, _STOCK) or type(m).__name__.endswith("Norm"):
        return "its norm is stock; switch rms_norm and layer_norm on"
    if any(p.ndim == 3 for p in m.parameters(recurse=False)):
        return "its experts are stock; switch swiglu (or geglu) on"
    return None
