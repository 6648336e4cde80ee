"""Whether a tensor is an ordinary tensor, and whether a call of a module runs only its forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from liger_kernel._private import FakeTensor
from liger_kernel.ops._core.operator import intercepted

PLAIN = (Tensor, nn.Parameter)


def unhooked(m: nn.Module) -> bool:
    """Whether a call of ``m`` runs its forward and no hooks."""
    own = m.__dict__
    return not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or _has_any_global_hook()
    )


def runs_its_class(m: nn.Module) -> bool:
    """Whether a call of ``m`` runs the forward of its class and no hooks."""
    return "forward" not in m.__dict__ and unhooked(m)


def of_a_subclass(t: Any) -> bool:
    """Whether ``t`` is a tensor whose class decides what operations on it do, such as torchao's.
    ZeRO's parameters and tensors of a warm-up are not."""
    return isinstance(t, Tensor) and type(t) not in PLAIN and not isinstance(t, FakeTensor)


def plain(t: Any) -> bool:
    """Whether ``t`` is a whole tensor: not sharded, not quantised, without the attributes of
    ZeRO; or a tensor that represents such a tensor in a warm-up."""
    return (type(t) in PLAIN or (intercepted() and isinstance(t, FakeTensor))) and not hasattr(t, "ds_id")
