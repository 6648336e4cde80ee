"""A variant is a value: it makes the replacement of a stock function, and the stand-ins that
show whether the replacement is right. What all variants ask of tensors and modules is here, too."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from liger_kernel._private import FakeTensor
from liger_kernel.ops._core.invariance import is_invariant
from liger_kernel.ops._core.operator import intercepted

# Attributes of a module (or options of a function), and inputs: tensors, or functions of (dtype,
# dtype of weights) that make an input
StandIns = Iterator[tuple[dict[str, Any], tuple[Any, ...]]]


@dataclass(frozen=True)
class Variant:
    """Our replacement for candidates of one form; the fields say which form. ``variant(stock)``
    replaces the stock function."""

    kind: ClassVar[str]  # how its label begins
    said: ClassVar[tuple[str, ...]] = ()  # the words of a label that does not follow from the fields
    results: ClassVar[int | None] = None  # how many of its results are compared with stock's; None: all
    rounds: ClassVar[bool] = False  # whether its results have the inputs' dtype where stock's are in fp32
    tables: ClassVar[int] = 0  # how many of its last inputs are tables of angles, which are cast like weights
    by_tables: ClassVar[bool] = False  # whether the variants of its slot differ in the form of their tables

    def __call__(self, stock: Callable) -> Callable:
        raise NotImplementedError

    def stand_ins(self) -> StandIns:
        """The attributes and inputs with which it is compared with stock functions. They differ
        in everything that may matter."""
        raise NotImplementedError

    def words(self) -> tuple[str, ...]:
        """The words of its label. Empty words and repeated words are allowed, and left out of
        the label."""
        return self.said or tuple(f"{v:g}" if isinstance(v, float) else str(v) for v in dataclasses.astuple(self))

    @property
    def exact(self) -> bool:
        """Whether its bf16 result must be bit-identical."""
        return True

    def fits(self, forms: set[str] | None) -> bool:
        """Whether a function that receives tables of these forms is compared with it."""
        return True

    @property
    def label(self) -> str:
        """Its name in the table of families."""
        return f"{self.kind}({', '.join(filter(None, dict.fromkeys(self.words())))})"


def are_numbers(*values: Any) -> bool:
    """Whether no value that a forward reads from its module is a tensor. A kernel takes a number,
    which has no gradient, and to read one from a tensor on a GPU makes the host wait."""
    return not any(isinstance(value, Tensor) for value in values)


# Replacements register here, not by attributes: functools.wraps would copy an attribute to every
# function that wraps them

# offset, casting, attribute with the eps
NORM_FORMS: weakref.WeakKeyDictionary[Callable, tuple[float, str, str]] = weakref.WeakKeyDictionary()
# layout, angles of a table, casting
ROPE_FORMS: weakref.WeakKeyDictionary[Callable, tuple[str, Callable, str]] = weakref.WeakKeyDictionary()
# The attributes that a forward calls as linear layers of the projection engine, and why a module
# runs its stock forward all the same, or None
LINEARS: weakref.WeakKeyDictionary[Callable, tuple[frozenset[str], Callable[[nn.Module], str | None]]] = (
    weakref.WeakKeyDictionary()
)
# the variant whose forward runs experts
OF_EXPERTS: weakref.WeakKeyDictionary[Callable, Variant] = weakref.WeakKeyDictionary()


class InFp32(nn.Linear):
    """A projection for a stand-in. It stays in fp32 when the stand-in is cast."""

    def _apply(self, fn: Callable, recurse: bool = True) -> InFp32:
        return self


class Halve(nn.Module):
    """An arbitrary module for a stand-in: it multiplies by 1/2."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x


def random_weight(n: int = 32) -> nn.Parameter:
    return nn.Parameter(torch.randn(n) * 0.3 + 0.5)


def random_linear(n: int, out: int, cls: type[nn.Linear] = nn.Linear) -> nn.Module:
    """An ``nn.Linear`` with random values, independent of replaced constructors and
    initialisers."""
    attributes = dict(in_features=n, out_features=out, weight=nn.Parameter((torch.rand(out, n) - 0.5) / n**0.5 * 2))
    return stand_in(cls, attributes | dict(bias=nn.Parameter((torch.rand(out) - 0.5) / n**0.5 * 2)))


def stand_in(cls: type, attributes: dict[str, Any]) -> nn.Module:
    """A ``cls`` with these attributes and no others. Its constructor is not called, and
    parameters are registered without hooks (accelerate)."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, value in attributes.items():
        if isinstance(value, nn.Parameter):
            module._parameters[name] = value
        else:
            setattr(module, name, value)
    return module


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


# Up to so many rows are a step of generation, and heads of so many
_FEW_ROWS, _HEADS = 64, 32


def decoding(x: Any) -> bool:
    """Whether ``x``, (..., C) or (..., heads, C) in any order of dims, is of a step of generation: few rows, without
    gradients. The host's time decides there, and modules as they were take less; some have kernels for it."""
    if torch.is_grad_enabled() or not isinstance(x, Tensor) or not x.ndim or torch.compiler.is_compiling():
        return False
    if is_invariant():  # the number of rows decides nothing
        return False
    return x.numel() <= _FEW_ROWS * x.shape[-1] * (_HEADS if x.ndim == 4 else 1)
