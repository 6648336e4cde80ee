"""Bounds of packed documents for recurrent layers: where the state of one document ends.

Attention finds documents in positions, or in a mask of pairs of tokens. Recurrent layers get neither,
but all other arguments of the model; so the forward that calls the layers is given
``cu_seq_lens_q``, if it has none:

    position_ids  0 1 2 0 1   ->   cu_seq_lens_q  0 3 5
                  0 1 0 1 2                       7 10

To find out how many documents there are, the host waits once for the GPU. A caller who knows the
bounds gives them, so that it does not.

``B`` rows, ``T`` tokens per row.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernel.ops._core.operator import host_can_read, is_recorded, only_pytorch
from liger_kernel.transformers.documents import GIVES, tokens_of
from liger_kernel.transformers.patching.patches import methods_of
from liger_kernel.transformers.recognise.recurrences import KNOWN

BOUNDS, INDEX = "cu_seq_lens_q", "seq_idx"
_CACHES = ("past_key_values", "cache", "cache_params")


def gives_bounds(model: nn.Module) -> bool:
    """Whether ``model``, which calls layers, gives them bounds of packed documents."""
    return hasattr(methods_of(model).get("forward", type(model).forward), GIVES)


def bounded(forward: Callable) -> Callable:
    """Wrap ``forward``, of the module that calls a model's layers, so that they get the bounds of
    packed documents."""
    names = list(inspect.signature(forward).parameters)[1:]
    if not {"input_ids", "position_ids"} <= {*names}:
        return forward
    reads_index = _names_index(forward)

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args)) | kwargs
        continues = any(given.get(name) is not None for name in _CACHES)
        bounds = given.get(BOUNDS)
        if bounds is None and not continues and not only_pytorch():
            bounds = bounds_of(given)
        if bounds is not None:
            if continues or given.get("use_cache"):
                text = "packed documents have no state to continue: set use_cache=False, and give no cache"
                raise ValueError(f"{type(self).__name__}: {text}")
            # as checkpointing does, where the configuration wants a cache
            more = {BOUNDS: bounds} | ({"use_cache": False} if "use_cache" in names else {})
            kwargs |= {name: value for name, value in more.items() if name not in names[: len(args)]}
            if reads_index:
                kwargs[INDEX] = _numbered(given, bounds)
        return forward(self, *args, **kwargs)

    vars(call)[GIVES] = True
    return call


def _names_index(forward: Callable) -> bool:
    """Whether the file of ``forward`` has layers that read ``seq_idx``, and maybe no bounds."""
    with contextlib.suppress(OSError, TypeError):
        return INDEX in inspect.getsource(sys.modules[forward.__module__])
    return False


def _numbered(given: Mapping[str, Any], bounds: Tensor) -> Tensor:
    """The document (B, T) of each token, of which the bounds are known."""
    index = given.get(INDEX)
    if index is None:
        size = tokens_of(given, bounds[None]).shape[:2]
        at = torch.arange(size.numel(), device=bounds.device)
        index = (torch.searchsorted(bounds, at, right=True) - 1).int().view(size)
    setattr(index, KNOWN, bounds)
    return index


def bounds_of(given: Mapping[str, Any]) -> Tensor | None:
    """The bounds of documents (documents + 1,) in the flattened batch; None if each row has one."""
    begins = _begins(given)
    # what is given for one row is that of all
    return None if begins is None else _of_begins(begins.expand(len(tokens_of(given, begins)), -1))


def _begins(given: Mapping[str, Any]) -> Tensor | None:
    """Whether a token (B, T) begins a document, as far as the batch says it."""
    index, positions, mask = (given.get(name) for name in (INDEX, "position_ids", "attention_mask"))
    if isinstance(index, Tensor) and index.ndim == 2:
        changes = index.diff(dim=-1) != 0
    elif isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[2] == mask.shape[3] > 1:
        seen = mask[:, 0].diagonal(-1, 1, 2)  # the token before it
        changes = ~seen if mask.dtype == torch.bool else seen < 0
    elif isinstance(positions, Tensor) and positions.ndim in (2, 3):
        # with several axes, the first of four is that of text
        positions = positions[0] if positions.ndim == 3 and len(positions) == 4 else positions
        if positions.ndim == 3:
            return None
        changes = positions.diff(dim=-1) != 1
        if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape == positions.shape:
            # padding is no document, and has any position
            changes = changes & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    else:
        return None
    return F.pad(changes, (1, 0), value=True)


@torch.compiler.disable
def _of_begins(begins: Tensor) -> Tensor | None:
    if is_recorded(begins):
        raise ValueError(f"{BOUNDS} must be given while a CUDA graph is recorded, if there are position_ids or seq_idx")
    if begins.shape[1] < 2 or not host_can_read(begins):
        return None
    at = begins.flatten().nonzero().flatten()
    if len(at) == len(begins):
        return None
    return F.pad(at, (0, 1), value=begins.numel()).int()
