"""Attention of answers that share prompts, in a row that has each prompt once.

    p p p q q | a a b | c c c      prompts p and q; answers a and b to p, c to q

A prompt sees itself. An answer sees its prompt and itself, which are two calls of Flash Attention:

    1. all of the row, causal within each prompt and each answer
    2. the answers to a prompt over its keys, not causal; of a single prompt by cuDNN, where PyTorch
       has it on Hopper and later GPUs: in half of Flash Attention's time

Their outputs are joined by the log-sum-exp of each: with L = log(exp(L1) + exp(L2)),

    o = exp(L1 - L) o1 + exp(L2 - L) o2

In the backward, the gradient of a score is p (do . v - do . o) with p = exp(score - L): it needs of
all other scores only o and L. So each call's backward with the joined o and L is exact.

``N`` tokens, of which the first ``P`` are of prompts; ``H`` heads, ``D`` width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from liger_kernel.transformers.attention import cast, is_more_than_softmax, supports


@dataclass(frozen=True)
class Span:
    """Sequences of queries and keys, by their bounds (sequences + 1,) int32, and the longest ones."""

    of_q: Tensor
    of_k: Tensor
    longest_q: int
    longest_k: int
    causal: bool

    def arguments(self) -> tuple[Any, ...]:
        # Flash Attention computes single queries in another layout, which has another log-sum-exp
        return self.of_q, self.of_k, max(self.longest_q, 2), max(self.longest_k, 2), 0.0, self.causal


@dataclass(frozen=True)
class Branches:
    """``own``: prompts and answers, of the whole row; ``shared``: the answers to each prompt, of the row
    from ``P`` on, over the prompts that have any, from ``first`` to ``P``."""

    own: Span
    shared: Span
    first: int
    P: int

    def to(self, device: torch.device) -> Branches:
        own, shared = (replace(s, of_q=s.of_q.to(device), of_k=s.of_k.to(device)) for s in (self.own, self.shared))
        return replace(self, own=own, shared=shared)


def _batch(t: Tensor) -> Tensor:
    """(1, H, N, D) of (N, H, D)"""
    return t.transpose(0, 1)[None]


def _is_for_cudnn(q: Tensor, k: Tensor, v: Tensor, span: Span) -> bool:
    if span.causal or len(span.of_q) != 2 or torch.cuda.get_device_capability(q.device) < (9, 0):
        return False
    return can_use_cudnn_attention(SDPAParams(_batch(q), _batch(k), _batch(v), None, 0.0, False, True))


def _forward(q: Tensor, k: Tensor, v: Tensor, span: Span, scale: float | None) -> tuple[Tensor, Tensor]:
    """Output (N, H, D) and log-sum-exp (H, N)."""
    if _is_for_cudnn(q, k, v, span):
        call, all_of = torch.ops.aten._scaled_dot_product_cudnn_attention, (_batch(q), _batch(k), _batch(v))
        o, lse = call(*all_of, None, True, scale=scale)[:2]
        return o[0].transpose(0, 1), lse.view(q.shape[1], -1)
    return torch.ops.aten._flash_attention_forward(q, k, v, *span.arguments(), False, scale=scale)[:2]


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, span: Span, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    # state of the dropout that there is not
    if _is_for_cudnn(q, k, v, span):
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        call = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        given = *map(_batch, (do, q, k, v, o)), lse[None, ..., None].contiguous(), state, state, None, None, None
        dq, dk, dv = call(*given, len(q), len(k), 0.0, False, scale=scale)
        return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)
    state, unused = (torch.zeros(n, dtype=torch.uint64, device=q.device) for n in (2, 0))
    return torch.ops.aten._flash_attention_backward(do, q, k, v, o, lse, *span.arguments(), state, unused, scale=scale)


class _Joined(torch.autograd.Function):
    """``apply(q (N, H, D), k, v, Branches, scale)`` -> (N, H, D)"""

    @staticmethod
    def forward(ctx, q, k, v, of, scale):
        keys = slice(of.first, of.P)
        own, lse_of_own = _forward(q, k, v, of.own, scale)
        of_prompt, lse_of_prompt = _forward(q[of.P :], k[keys], v[keys], of.shared, scale)
        lse = torch.logaddexp(lse_of_own[:, of.P :], lse_of_prompt)
        part = lambda of_one: (of_one - lse).exp().t()[..., None]
        # products of 16 bits and fp32 are fp32: rounded once
        joined = (own[of.P :] * part(lse_of_own[:, of.P :])).add_(of_prompt * part(lse_of_prompt))
        # not in place: with ``keep_attention``, the outputs of both calls are kept
        out, lse = torch.cat((own[: of.P], joined.to(own.dtype))), torch.cat((lse_of_own[:, : of.P], lse), 1)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.of, ctx.scale = of, scale
        return out

    @staticmethod
    def backward(ctx, do):
        (q, k, v, out, lse), of, do = ctx.saved_tensors, ctx.of, do.contiguous()
        keys, answers = slice(of.first, of.P), slice(of.P, None)
        dq, dk, dv = _backward(do, q, k, v, out, lse, of.own, ctx.scale)
        some = do[answers], q[answers], k[keys], v[keys], out[answers], lse[:, answers].contiguous()
        for d, more, at in zip((dq, dk, dv), _backward(*some, of.shared, ctx.scale), (answers, keys, keys)):
            d[at] += more
        return dq, dk, dv, None, None


def prefix_attention(q: Tensor, k: Tensor, v: Tensor, of: Branches, more: Mapping[str, Any]) -> Tensor | None:
    """Attention of a row (1, H, N, D), (1, N, H, D); None where Flash Attention does not run. ``more``:
    dropout, scaling, and what other attention needs."""
    q, k, v = (cast(t) for t in (q, k, v))
    N = q.shape[2]
    if is_more_than_softmax(more) or not supports(q, k, v, (1, 1, N, N)):
        return None
    q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
    return _Joined.apply(q, k, v, of.to(q.device), more.get("scaling"))[None]
