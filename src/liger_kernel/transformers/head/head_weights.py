"""What an output head multiplies in one call, and which heads can multiply later than that.

    lm_head                                   x W^T + bias
    lm_head with LoRA, two adapters active    x W^T + [s_1 drop_1(x) A_1^T, s_2 drop_2(x) A_2^T]
                                              [B_1, B_2]^T + bias
    tied, with rows i trained as D            x W^T + x (D - W_i)^T E_i^T, E_i (V, n) of 0 and 1

Everything but the large products happens when the model calls its head: adapters are read, their
dropout is drawn, and the thin products with the A's are computed. A loss computes the rest in
chunks later (``ops/losses/chunks``), whatever has become of the modules meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernel import _private, parallel
from liger_kernel.ops._core.operator import intercepted
from liger_kernel.ops.projections.adapted import Projection, may_overflow
from liger_kernel.ops.projections.linear import dtypes_of
from liger_kernel.ops.projections.weights import Dense
from liger_kernel.transformers.recognise.projections import (
    base_of,
    copy_in_use,
    product_dtype,
    projection,
    trained_rows,
)
from liger_kernel.transformers.recognise.storages import Fallback

FP8 = "_liger_fp8"  # in the __dict__ of a model: the recipe by which its loss multiplies the head
_LINEAR_FORWARD, _LINEAR = nn.Linear.forward, F.linear


@dataclass(eq=False)
class HeadWeights:
    """The weights of one call: x (..., H), thin (..., R) -> x w^T + thin wb^T + bias (..., V).

    Or a ``module`` whose weights exist only during its calls (FSDP, ZeRO-3), or are spread over
    ranks (``VocabularyParallel``).
    """

    classes: int  # V
    w: Tensor | None = None
    bias: Tensor | None = None
    wb: Tensor | None = None
    module: nn.Module | None = None
    versions: tuple[tuple[Tensor, int], ...] = ()

    def tensors(self) -> tuple[Tensor, ...]:
        found = (self.w, self.bias, self.wb) if self.module is None else self.module.parameters()
        return tuple(t for t in found if t is not None)

    def logits(self, x: Tensor, thin: Tensor | None) -> Tensor:
        """All logits."""
        if self.module is not None:
            return self.module(x)
        self.check()
        assert self.w is not None
        z = F.linear(x, self.w, self.bias)
        return z if thin is None or self.wb is None else z + F.linear(thin, self.wb)

    def multiply(self, function: Callable[..., Any], x: Tensor) -> Any:
        """Return ``function(x, w, bias)``, run while the weights are whole: a sharded head is
        gathered once, and its gradients are reduced once."""
        if self.module is None:
            self.check()
            return function(x, self.w, self.bias)
        inner: Any = parallel.bare(self.module)
        # x is an argument of the call, because FSDP finds the begin of the backward by its inputs
        return parallel.run_gathered(self.module, lambda x: function(x, inner.weight, inner.bias), x)

    def check(self) -> None:
        """Raise ``RuntimeError`` if weights or rows were changed in place since the call: their
        values are lost."""
        for t, version in self.versions:
            if _version(t) != version or _is_freed(t):
                raise RuntimeError(
                    "the logits of a patched model are computed when they are needed, and the weights or inputs of its "
                    "head were changed in place since it was called: take logits.value() before, or patch the model "
                    "with fused_linear_cross_entropy=False"
                )


def held(head: nn.Module, x: Any) -> tuple[HeadWeights, Tensor, Tensor | None] | Fallback:
    """What ``head(x)`` multiplies: its weights, the rows, and the thin products of adapters; or the
    reason why the head has to run now.

    The caller has looked for hooks on the head.
    """
    if nn.Linear.forward is not _LINEAR_FORWARD or not (F.linear is _LINEAR or parallel.is_own_linear(F.linear)):
        return Fallback("a linear layer of PyTorch that is replaced")
    if not isinstance(x, Tensor):
        return Fallback("an input that is no tensor")
    spread = parallel.inputs_of(head, x)
    if spread is None:
        return Fallback("a product that is spread over ranks, and not by vocabulary")
    if spread[0] is not head:
        module, rows = spread
        return HeadWeights(module.out_features, module=module), rows, None  # type: ignore[arg-type]  # its own int
    # PEFT's modules_to_save: the copy that the wrapper would call
    inner: Any = copy_in_use(head)
    if is_plain(inner):
        return _of_call(inner.weight, inner.bias, x, classes=inner.weight.shape[0]), _alias(x), None
    bare: Any = parallel.bare(inner)
    if parallel.gathers_when_called(inner) and parallel.is_linear(bare) and "forward" not in bare.__dict__:
        return HeadWeights(bare.out_features, module=inner), x, None
    # the compiler cannot trace how PEFT's modules are read
    if torch.compiler.is_compiling():
        return Fallback("adapters, under torch.compile")
    found = trained_rows(inner, product_dtype(x)) or projection(inner, product_dtype(x))
    if why := left_out(found, x):
        return why
    assert isinstance(found, Projection)
    if found.weight.shape[1] != x.shape[-1]:
        return Fallback(f"a weight of {found.weight.shape[1]} columns beside {x.shape[-1]} of its input")
    return _with_adapters(found, x)


def _with_adapters(found: Projection, x: Tensor) -> tuple[HeadWeights, Tensor, Tensor | None]:
    dtype, bias = product_dtype(x), found.bias
    # two adapters are one term of twice the rank, so that the loss knows only one
    rows, thin, wb = x.to(dtype), [], []
    for adapter in found.adapters:
        # stock draws the mask in the adapter's dtype
        dropped = F.dropout(x.to(adapter.a.dtype), adapter.dropout).to(dtype) if adapter.dropout else rows
        thin.append(adapter.scale * F.linear(dropped, adapter.a.to(dtype)))
        wb.append(adapter.b.to(dtype))
        if adapter.bias is not None:
            bias = adapter.scale * adapter.bias if bias is None else bias + adapter.scale * adapter.bias
    weights = _of_call(found.weight.learnable, bias, x, classes=found.weight.shape[0])
    if not thin:
        return weights, _alias(rows), None
    weights.wb = torch.cat(wb, 1)
    return weights, _alias(rows), torch.cat(thin, -1)


def _of_call(w: Any, bias: Tensor | None, x: Tensor, classes: int) -> HeadWeights:
    if torch.compiler.is_compiling():  # nobody exchanges memory within a graph
        return HeadWeights(classes, w, bias)
    # aliases share the version of what they alias, and hold its memory of now
    own = _alias(w), None if bias is None else _alias(bias)
    versions = tuple((t, _version(t)) for t in (*own, x) if t is not None)
    return HeadWeights(classes, *own, versions=versions)


def _alias(t: Tensor) -> Tensor:
    """A view of all of ``t``. If somebody exchanges ``t.data`` later, it still has the values of
    now, and its gradient still reaches ``t``."""
    return t if torch.compiler.is_compiling() else t.view_as(t)


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _is_freed(t: Tensor) -> bool:
    # the wrappers of torch.func have no storage, and other classes of tensors keep their values
    # elsewhere
    if type(t) not in (Tensor, nn.Parameter) or not t.numel() or _private.transforms():
        return False
    return not t.untyped_storage().nbytes()


def is_plain(head: Any) -> bool:
    """Whether ``head`` has whole weights and computes ``x @ weight.T + bias`` and nothing else."""
    if not parallel.is_linear(head) or "forward" in head.__dict__ or parallel.is_hooked(head):
        return False
    if parallel.gathers_when_called(head) or not head.weight.numel():
        return False
    # other classes of tensors multiply in their own way, except those by which shapes are traced
    return all(p is None or type(p) in (Tensor, nn.Parameter) or intercepted() for p in (head.weight, head.bias))


def may_be_linear(head: nn.Module) -> Any:
    """Return the linear layer in ``head`` that holds its weight, or None."""
    inner = parallel.bare(head)
    base = inner if parallel.is_linear(inner) else base_of(copy_in_use(inner))
    return base if parallel.is_linear(base) else None


def left_out(found: Projection | Fallback, x: Tensor) -> Fallback | None:
    """Why a loss cannot treat a head as a weight plus terms of low rank. ``x``: of the dtype and
    on the device of its input."""
    if isinstance(found, Fallback):
        return found
    if not isinstance(found.weight, Dense):
        return Fallback(getattr(found.weight, "why", "a quantised weight"))
    if found.magnitude is not None:
        return Fallback("DoRA, which scales rows of the sum of weight and adapter")
    if may_overflow(*dtypes_of(x, (found,))):
        return Fallback(
            "adapters that are not in fp16 beside a weight in fp16, whose range their thin results may leave"
        )
    return None
