"""What a recorded step depends on beside its inputs: the model, and PyTorch's settings."""

from __future__ import annotations

import copy
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from liger_kernel.parallel.sharded_head import HOOKS

_SCALARS = (bool, int, float, str, type(None), torch.dtype)
# what may change in modules of PyTorch itself; those of others have more
_OF_TORCH = {"training", "p"}


class Snapshot:
    """The state of ``model``, in the order in which a look at it is cheap: every step takes one.

    Seen are modules and their classes, tensors by identity, address and ``requires_grad``, numbers and
    texts that modules and the configuration have as attributes (``training``, active adapters, their
    scales), hooks, and forwards that others have put in modules.
    """

    def __init__(self, model: nn.Module):
        modules = list(model.modules())
        self._children = [m._modules for m in modules]
        self._stores = [d for m in modules for d in (m._parameters, m._buffers)]
        self._tensors = [t for d in self._stores for t in d.values() if t is not None]
        self._addressed = [t for t in self._tensors if not hasattr(t, "__tensor_flatten__")]
        self._modules, self._dicts = modules, [vars(m) for m in modules]
        self._hooks = [getattr(m, name) for m in modules for name in HOOKS]
        config = getattr(model, "config", None)
        dicts = [*zip(modules, self._dicts), *([(None, vars(config))] if hasattr(config, "__dict__") else [])]
        seen = lambda m, name: name in _OF_TORCH or not type(m).__module__.startswith("torch.nn.")
        named = [(d, [n for n, v in d.items() if seen(m, n) and is_plain(v)]) for m, d in dicts]
        self._plain = [(itemgetter(*names), d, names) for d, names in named if names]
        self._before = copy.deepcopy([read(d) for read, d, _ in self._plain])
        self._fixed = self._identities()

    def _identities(self) -> tuple[Any, ...]:
        return (
            [m for d in self._children for m in d.values()],
            [type(m) for m in self._modules],
            [id(t) for d in self._stores for t in d.values()],
            [t.data_ptr() for t in self._addressed] + [t.requires_grad for t in self._tensors],
            [d.get("forward") for d in self._dicts],
            [len(hooks) for hooks in self._hooks],
            _has_any_global_hook(),
        )

    def change(self) -> str:
        """What has changed since; "" if nothing has."""
        try:
            now = [read(d) for read, d, _ in self._plain]
        except KeyError as gone:
            return f"the attribute {gone} of a module"
        for (_, _, names), a, b in zip(self._plain, now, self._before) if now != self._before else ():
            if a != b:
                changed = names if len(names) == 1 else [n for n, x, y in zip(names, a, b) if x != y]
                return f"the attribute {changed[0]!r} of a module"
        kinds = "modules", "classes", "parameters", "storage or requires_grad of tensors", "forwards", "hooks", "hooks"
        pairs = zip(kinds, self._identities(), self._fixed)
        return next((kind for kind, a, b in pairs if a != b), "")


def is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) < 64 and all(map(is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return len(value) < 64 and all(map(is_plain, value))
    return isinstance(value, _SCALARS)


def settings(device: str) -> tuple[Any, ...]:
    """What PyTorch's settings say now of how it computes."""
    cuda = torch.backends.cuda
    return (
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        *(f() for f in (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled)),
        cuda.cudnn_sdp_enabled(),
    )
