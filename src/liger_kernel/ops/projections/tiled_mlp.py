"""A function of single tokens, such as an MLP, run one tile of the sequence at a time. The backward
recomputes its intermediates tile by tile.

Shapes: x (..., T, H), y (..., T, H'); a tile is (..., T / shards, H).

The gradient of a weight is a sum over tiles. The sum is in fp32, because a sum of 32 tiles in bf16
would have three times the error of one product. Autograd receives it once, so hooks also run once:
the tiles use an alias of the weight. In the backward, dropout draws the same numbers again.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from liger_kernel.ops._core import acc, once_differentiable
from liger_kernel.ops._core.operator import leaves, only_pytorch
from liger_kernel.ops._core.tl import cdiv

Slot = tuple[nn.Module, str]
TILE = 2048  # least number of tokens in a tile: products with fewer rows are slower
# tiles: then gate, up and their product in a tile are about as large as the MLP's input, if they
# are 4 or 5 times as wide
MOST = 16


def count_of(tiles: bool | int, tokens: int) -> int:
    """In how many tiles an MLP runs on so many tokens: ``tiles``, or with True as many as have
    ``TILE`` tokens, at most ``MOST``."""
    return max(1, min(tokens // TILE, MOST) if tiles is True else min(int(tiles), tokens))


def _weights(module: nn.Module) -> dict[Slot, Tensor]:
    """The tensors of ``module`` that require a gradient, by place: parameters, and the plain
    attributes that replace them while FSDP has gathered them."""
    # FSDP replaces parameters by plain attributes while it has gathered them
    stores = ((m, store) for m in module.modules() for store in (m._parameters, vars(m)))
    return {
        (m, name): t for m, store in stores for name, t in store.items() if isinstance(t, Tensor) and t.requires_grad
    }


_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_locking = threading.Lock()


def _alone(module: nn.Module) -> threading.RLock:
    """The lock of a module, whose weights the backward exchanges for a while."""
    with _locking:
        return _locks.setdefault(module, threading.RLock())


@contextlib.contextmanager
def _swapped(slots: Iterable[Slot], tensors: Iterable[Tensor]) -> Iterator[None]:
    stores: list[tuple[dict[str, Any], str]] = [
        (m._parameters if name in m._parameters else vars(m), name) for m, name in slots
    ]
    # put back even if the function raises
    before = [store.get(name) for store, name in stores]
    try:
        for (store, name), t in zip(stores, tensors):
            store[name] = t
        yield
    finally:
        for (store, name), old in zip(stores, before):
            store[name] = old


def _refuse_other_leaves(y: Tensor, inputs: Sequence[Tensor]) -> None:
    """Raise if ``y`` depends on other leaves than ``inputs``: these would silently get no
    gradient."""
    for leaf in leaves(y.grad_fn, {get_gradient_edge(t).node for t in inputs}):
        raise ValueError(
            "apply_tiled_mlp: fn must use no tensor outside mlp_module that asks for a gradient, got one of shape "
            f"{tuple(leaf.shape)}"
        )


class LigerTiledMLPFunction(torch.autograd.Function):
    """``apply(fn, mlp_module, x, shards, compute_params=None)``; the last one is accepted and
    ignored."""

    @classmethod
    def apply(cls, fn, mlp_module, x, shards, compute_params=None):
        with _alone(mlp_module):
            # under the lock: another thread may have exchanged them
            weights = _weights(mlp_module)
            return super().apply(fn, mlp_module, x, shards, [*weights], *weights.values())

    @staticmethod
    def forward(ctx, fn, mlp_module, x, shards, slots, *weights):
        ctx.save_for_backward(x, *weights)
        ctx.fn, ctx.module, ctx.shards, ctx.slots, device = fn, mlp_module, shards, slots, x.device.type
        # dropout draws the same numbers in the backward
        ctx.random = torch.get_rng_state(), *get_device_states(x)
        ctx.autocast = dict(
            device_type=device, enabled=torch.is_autocast_enabled(device), dtype=torch.get_autocast_dtype(device)
        )
        return torch.cat([fn(mlp_module, tile) for tile in x.chunk(shards, -2)], -2)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, *weights = ctx.saved_tensors
        # leaves of their own, so that hooks of the parameters run once and not for each tile
        aliases = [w.detach().requires_grad_() for w in weights]
        need_dx, device = ctx.needs_input_grad[2], x.device.type
        cpu_state, devices, states = ctx.random
        dx = []
        dweights = [None] * len(weights)
        with (
            _alone(ctx.module),
            torch.random.fork_rng(devices, device_type=device),
            _swapped(ctx.slots, aliases),
            torch.enable_grad(),
        ):
            torch.set_rng_state(cpu_state)
            set_device_states(devices, states, device_type=device)
            for n, (tile, d) in enumerate(zip(x.chunk(ctx.shards, -2), dy.chunk(ctx.shards, -2))):
                tile = tile.detach().requires_grad_(need_dx)
                inputs = [tile, *aliases] if need_dx else aliases
                with torch.autocast(**ctx.autocast):
                    y = ctx.fn(ctx.module, tile)
                # the graphs of all tiles are alike
                if n == 0:
                    _refuse_other_leaves(y, inputs)
                grads = list(torch.autograd.grad(y, inputs, d, allow_unused=True))
                if need_dx:
                    dx.append(grads.pop(0))
                for i, (dw, g) in enumerate(zip(dweights, grads)):
                    if g is not None:
                        # a copy: autograd may own the memory
                        dweights[i] = g.to(acc(g.dtype), copy=True) if dw is None else dw.add_(g)
        cast = (None if dw is None else dw.to(w.dtype) for dw, w in zip(dweights, weights))
        return None, None, torch.cat(dx, -2) if need_dx else None, None, None, *cast


def apply_tiled_mlp(
    fn: Callable[[nn.Module, Tensor], Tensor],
    mlp_module: nn.Module,
    x: Tensor,
    num_shards: int | None = None,
    compute_params: Iterable[Tensor] | None = None,
) -> Tensor:
    """``fn(mlp_module, x)`` in ``num_shards`` tiles of x (..., T, H), by default of about H tokens.
    ``fn`` must compute each token independently.

    Gradients go to x and to the parameters that ``mlp_module`` has (``compute_params`` is ignored).
    The parameters must be whole while it runs: ZeRO-3 must treat it as a leaf module. Inside
    ``torch.compile``, tiles are checkpoints, and autograd sums their gradients in the parameter's
    dtype.
    """
    if x.ndim < 2:
        raise ValueError(f"apply_tiled_mlp: x must have at least 2 dims, got {x.ndim}")
    shards = max(1, cdiv(x.shape[-2], x.shape[-1]) if num_shards is None else num_shards)
    if only_pytorch():
        return torch.cat([fn(mlp_module, tile) for tile in x.chunk(shards, -2)], -2)
    if torch.compiler.is_compiling():
        return torch.cat([checkpoint(fn, mlp_module, tile, use_reentrant=False) for tile in x.chunk(shards, -2)], -2)
    return LigerTiledMLPFunction.apply(fn, mlp_module, x, shards)
