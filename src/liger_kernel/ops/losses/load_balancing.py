"""Load of experts, and the auxiliary loss that balances it: ``E sum_e f_e P_e`` (Switch
Transformer, Fedus et al., arXiv:2101.03961).

f_e is the share of tokens that choose expert e (with K experts per token, the f_e add up to K), P_e
the mean probability of e over tokens and layers.

Shapes: logits (M, E) of a router's layer, index (M, K) the experts of each token, weight (M,) what
each token counts, 0 for padding.
probs and counts (E,), in fp32:  probs_e = sum_m weight_m softmax(logits_m)_e,  counts_e = sum_m
weight_m [e in index_m].

The choice of experts is an argument, because it must be that of ``torch.topk``, ties included. From
it and the logits, one pass gives both sums. Nothing of shape (M, E) is stored: the backward
computes the softmax again, from the logits, which the router keeps anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, checks, launch_config, nbytes, op, typed_launcher
from liger_kernel.ops._core.operator import as_index, launch, once_differentiable, use_kernels
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.tl import cdiv, div, exp_of, jit, load_row, rows_at, tl

MAX_E = 2048  # experts whose logits and two sums one program holds; the reference computes more


def reference(logits: Tensor, index: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    dtype, (M, E), K = acc(logits.dtype), logits.shape, index.shape[1]
    w = logits.new_ones(M, dtype=dtype) if weight is None else weight.detach().to(dtype)
    # an index of no expert counts in a column of its own, which is cut off
    chosen = index.where((index >= 0) & (index < E), E).flatten()
    counts = w.new_zeros(E + 1).index_add(0, chosen, w[:, None].expand(M, K).flatten())[:E]
    return (w[:, None] * torch.softmax(logits.to(dtype), -1)).sum(0), counts


@jit
def _probabilities(logits_ptr, row, col, M, E, stride):
    """Softmax of some rows, in fp32; 0 in columns that do not exist."""
    x = tl.load(
        logits_ptr + row[:, None] * stride + col[None, :], mask=(row < M)[:, None] & (col < E)[None, :], other=0.0
    )
    # columns that do not exist have no probability
    x = tl.where((col < E)[None, :], x.to(tl.float32), float("-inf"))
    e = exp_of(x - tl.max(x, axis=1)[:, None], logits_ptr.dtype.element_ty == tl.float32)
    return div(e, tl.sum(e, axis=1)[:, None])


@jit
def _fwd(
    logits_ptr, index_ptr, weight_ptr, probs_ptr, counts_ptr, M, E, logits_stride, index_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK_N)
    # a persistent program: partial sums of many rows, one store each
    counts = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    probs = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = rows_at(tile, BLOCK_M)
        if weight_ptr is not None:
            weight = load_row(weight_ptr, row, M)[:, None]
        else:
            weight = tl.where(row < M, 1.0, 0.0)[:, None]
        p = weight * _probabilities(logits_ptr, row, col, M, E, logits_stride)
        probs += tl.where((row < M)[:, None], p, 0.0)
        # compared with all experts: K is small, and there are no atomics
        for k in range(K):
            chosen = tl.load(index_ptr + row * index_stride + k, mask=row < M, other=-1)[:, None]
            counts += tl.where(chosen == col[None, :], weight, 0.0)
    here = program.to(tl.int64) * E + col
    tl.store(probs_ptr + here, tl.sum(probs, axis=0), mask=col < E)
    tl.store(counts_ptr + here, tl.sum(counts, axis=0), mask=col < E)


@jit
def _bwd(
    dprobs_ptr, logits_ptr, weight_ptr, dlogits_ptr, M, E, logits_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = rows_at(tl.program_id(0), BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    g = tl.load(dprobs_ptr + col, mask=col < E, other=0.0)[None, :]
    p = _probabilities(logits_ptr, row, col, M, E, logits_stride)
    # the derivative of softmax, computed again from the logits
    d = p * (g - tl.sum(p * g, axis=1)[:, None])
    if weight_ptr is not None:
        d *= load_row(weight_ptr, row, M)[:, None]
    mask = (row < M)[:, None] & (col < E)[None, :]
    tl.store(dlogits_ptr + row[:, None] * E + col[None, :], d.to(dlogits_ptr.dtype.element_ty), mask=mask)


@typed_launcher
def expert_load_fwd(logits: Tensor, index: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    (M, E), K = logits.shape, index.shape[1]
    c = launch_config.tile("expert_load_fwd", E, logits.itemsize, elements=2048)
    # few rows of partial sums, which one more kernel adds in a fixed order
    programs = max(1, min(4 * launch_config.processors() * c.per_sm, cdiv(M, c.block_m)))
    probs, counts = (logits.new_empty(programs, E, dtype=torch.float32) for _ in range(2))
    strides = logits.stride(0), index.stride(0)
    launch(_fwd, (programs,), logits, index, weight, probs, counts, M, E, *strides, K=K, **c.tile)
    return column_sum(probs, torch.float32), column_sum(counts, torch.float32)


@typed_launcher
def expert_load_bwd(dprobs: Tensor, logits: Tensor, weight: Tensor | None) -> Tensor:
    M, E = logits.shape
    dlogits = logits.new_empty(M, E)
    c = launch_config.tile("expert_load_bwd", E, logits.itemsize, elements=2048)
    launch(_bwd, (cdiv(M, c.block_m),), dprobs, logits, weight, dlogits, M, E, logits.stride(0), **c.tile)
    return dlogits


class ExpertLoadFunction(torch.autograd.Function):
    """``apply(logits, index, weight or None)``."""

    @staticmethod
    def forward(ctx, logits, index, weight):
        unit = lambda t: t if t.stride(1) == 1 else t.contiguous()
        logits, weight = unit(logits), None if weight is None else weight.contiguous()
        probs, counts = expert_load_fwd(logits, unit(index), weight)
        # a choice has no derivative
        ctx.mark_non_differentiable(counts)
        ctx.save_for_backward(logits, weight)
        return probs, counts

    @staticmethod
    @once_differentiable
    def backward(ctx, dprobs, _):
        return expert_load_bwd(dprobs.contiguous(), *ctx.saved_tensors), None, None


def _choices(E: int):
    return lambda *shape, dtype: torch.rand(shape[0], E, dtype=dtype).argsort(-1)[:, : shape[1]]


def _some_invalid(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-1, 7, shape).to(dtype)


def _padding(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.rand(shape, dtype=dtype) > 0.3).to(dtype)


def _tensors(M: int, E: int, K: int, *, padded: bool = False) -> dict[str, T]:
    weight = dict(weight=T((M,), _padding, grad=False, dtype=torch.float32)) if padded else {}
    return dict(logits=T((M, E)), index=T((M, K), _choices(E), dtype=torch.int64)) | weight


@op(
    reference=reference,
    cases=[
        Case("qwen3-moe", _tensors(37, 16, 4)),
        Case("mixtral-padded", _tensors(40, 8, 2, padded=True)),
        Case("odd", _tensors(5, 13, 3, padded=True)),
        Case("one-expert", _tensors(9, 1, 1)),
        Case("no-expert", dict(_tensors(9, 6, 2), index=T((9, 2), _some_invalid, dtype=torch.int64))),
        Case(
            "skewed",
            dict(
                _tensors(33, 8, 2),
                index=T((33, 2), lambda *shape, dtype: torch.arange(2).expand(shape), dtype=torch.int64),
            ),
        ),
        Case("many-experts", _tensors(3, MAX_E + 5, 2)),
    ],
    cost=lambda logits, index, weight=None: Cost(
        nbytes(logits, index, weight), nbytes(logits, weight, logits), flops=(5 * logits.numel(), 8 * logits.numel())
    ),
)
def expert_load(logits: Tensor, index: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The sums over tokens of the experts' probabilities, and how many tokens chose each expert.

    logits (M, E) in fp32, fp16, bf16 or fp64; index (M, K) integers, those outside 0 ... E - 1
    counting for no expert; weight (M,) without gradient, or None for ones. Returns probs (E,), and
    counts (E,), exact and without gradient, both in fp32 (fp64 for logits in fp64).
    """
    checks.floating("expert_load", logits=logits)
    if logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"expert_load: logits must have shape (M, E), got {tuple(logits.shape)}")
    M = len(logits)
    checks.integers("expert_load", (M, "K"), index=index)
    checks.shape("expert_load", (M,), weight=weight)
    index = as_index(index)
    if not use_kernels(logits, fusible=True) or logits.shape[1] > MAX_E:
        return reference(logits, index, weight)
    return ExpertLoadFunction.apply(logits, index, weight)


def load_balancing_loss(logits: Sequence[Tensor], top_k: int, mask: Tensor | None = None) -> Tensor:
    """The auxiliary loss of the layers with these router logits (tokens, E), each token choosing
    the ``top_k`` largest softmax values.

    ``mask``, with an element for each token, is 0 for padding. The choice is made in the dtype of
    the logits. Returns a number in fp32.
    """
    device, E = logits[0].device, logits[0].shape[-1]
    weight = None if mask is None else mask.reshape(-1).to(device=device, dtype=torch.float32)
    loads = []
    for layer in (t.to(device) for t in logits):
        with torch.no_grad():
            # as the router does it, ties included
            _, index = torch.topk(F.softmax(layer, dim=-1), top_k, dim=-1)
        loads.append(expert_load(layer, index, weight))
    probs, counts = (torch.stack(sums).sum(0) for sums in zip(*loads))
    tokens = sum(map(len, logits)) if weight is None else weight.sum() * len(logits)
    return E * torch.sum(counts / tokens * (probs / tokens))
