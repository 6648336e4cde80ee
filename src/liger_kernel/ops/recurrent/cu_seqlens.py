"""Packed documents: one row of tokens, in which document n has those from ``cu_seqlens[n]`` up to
``cu_seqlens[n + 1]``. A document may be empty."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from liger_kernel.ops._core.operator import T, host_can_read, use_kernels


def checked(name: str, cu_seqlens: Tensor | None, x: Tensor, what: str) -> int:
    """The number of documents of ``x`` (B, T, ...), called ``what``: its rows, without
    ``cu_seqlens``. On a CPU, where nobody waits for values, those of ``cu_seqlens`` are checked
    too; kernels read no token that does not exist, whatever these are."""
    if cu_seqlens is None:
        return x.shape[0]
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.shape[0] < 1:
        raise ValueError(
            f"{name}: cu_seqlens must be int32 or int64 of shape (documents + 1,), got {cu_seqlens.dtype} "
            f"{tuple(cu_seqlens.shape)}"
        )
    if x.shape[0] > 1:
        raise ValueError(f"{name}: {what} must have one row if cu_seqlens is given, got {x.shape[0]}")
    if x.numel() and not cu_seqlens.is_cuda and not use_kernels(x) and host_can_read(cu_seqlens):
        bounds = cu_seqlens.tolist()
        if (bounds[0], bounds[-1]) != (0, x.shape[1]) or sorted(bounds) != bounds:
            raise ValueError(f"{name}: cu_seqlens must rise from 0 to {x.shape[1]}, got {bounds}")
    return cu_seqlens.shape[0] - 1


def places(B: int, length: int, cu_seqlens: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each of B T tokens its document, and the first token of that."""
    t = torch.arange(B * length, device=device)
    if cu_seqlens is None:
        document = t // max(length, 1)
        return document, document * length
    # equal bounds are those of empty documents: the last of them begins where a token is
    document = (torch.searchsorted(cu_seqlens, t, right=True) - 1).clamp(0, max(cu_seqlens.shape[0] - 2, 0))
    return document, cu_seqlens[document].long().clamp(min=0).minimum(t)


def token_by_token(
    step: Callable[[int, Tensor], tuple[Tensor, Tensor]], x: Tensor, shape: tuple[int, ...],
    initial_state: Tensor | None, cu_seqlens: Tensor | None, output_final_state: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Results (B, T, ...) of a recurrence over the tokens of x (B, T, ...), None if there are none, and the
    state behind each document. ``step(t, state)`` returns the next states (B, *shape) and results of token t."""
    B, length = x.shape[:2]
    document, first = places(B, length, cu_seqlens, x.device)
    documents = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = x.new_zeros(documents, *shape) if initial_state is None else initial_state.to(x.dtype)
    S, out = states if cu_seqlens is None else x.new_zeros(B, *shape), []
    for t in range(length if B else 0):
        if cu_seqlens is not None:
            S = torch.where(first[t] == t, states[document[t]], S)
        S, y = step(t, S)
        out.append(y)
        if cu_seqlens is not None and output_final_state:
            states = torch.where((torch.arange(documents, device=x.device) == document[t]).view(-1, 1, 1, 1), S, states)
    results = torch.stack(out, 1) if out else None
    if not output_final_state:
        return results, None
    wide = torch.promote_types(torch.float32, x.dtype)
    final = S if cu_seqlens is None else states
    return results, final.to(wide if initial_state is None else initial_state.dtype)


def bounds(*at: int) -> T:
    """``cu_seqlens`` of a case."""
    return T((len(at),), lambda *_, dtype: torch.tensor(at, dtype=dtype), dtype=torch.int64)
