"""Parts of stand-ins: modules that have exactly the attributes that a variant reads, filled with
numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


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
