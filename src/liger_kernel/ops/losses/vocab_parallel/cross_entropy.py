"""Cross entropy of logits with classes sharded over the ranks of a process group (tensor
parallelism: Megatron-LM, arXiv:1909.08053).

Shapes: logits (..., N), the N classes of this rank; target (...) of class indices among all V. M =
rows = product of the leading dims.
With z = softcap * tanh(logit_scale * logits / softcap), or z = logit_scale * logits, and lse over
all V classes, a row's loss is

    (1 - e) (lse - z_y)  +  e / K * sum_j (lse - z_j)  +  z_loss * lse^2

formula  "pytorch": e = label_smoothing; "megatron": e = label_smoothing * K / (K - 1), which leaves
         y exactly 1 - label_smoothing if K = V
mode     "global": j runs over all classes, K = V; "partition": j runs over this rank's classes, K =
         N, so that each rank has its own loss

With ``entropy`` (for the linear loss), also the distribution's entropy H = -sum_j p_j log p_j. Its
gradient with respect to z is -p_j (log p_j + H).

The gradient of this rank's loss is  p_j (1 + 2 z_loss lse) - [j = y] (1 - e) - e / K,  and needs no
communication. Rows whose target is
``ignore_index`` have loss and gradient 0; a target outside [0, V) makes its row's loss and gradient
NaN.

There is one collective: every rank gathers every rank's maximum, sum of exponentials and target
logit (for smoothing also the sum of logits, for the entropy their sum weighted by exponentials), 12
to 20 bytes per row and rank, and merges them in the same order. Reductions would need two
collectives, because sums wait for the maximum, and such small messages cost their latency. p is
exp(z - top) / total with separate top and total: their lse is rounded relative to its own size,
which would be an error of p. ``bench/cases/losses.py`` has the shapes of real models and
the rivals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, checks, launch_config, nbytes, once_differentiable, op, typed_launcher
from liger_kernel.ops._core.operator import computed, launch, rows_of, shaped, tracing, use_kernels
from liger_kernel.ops._core.tl import cdiv, jit, log, rows_at, tl
from liger_kernel.ops.losses.cross_entropy import targets
from liger_kernel.ops.losses.cross_entropy_rows import check, transformed, transformed_logits

if dist.is_available():
    from torch.distributed._functional_collectives import all_gather_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FORMULAS = ("pytorch", "megatron")
MODES = ("global", "partition")


class Part(NamedTuple):
    """The numbers that define this rank's part of the loss, apart from its tensors. Launchers
    pass them on."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    formula: str = "pytorch"
    mode: str = "global"
    z_loss: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    first: int = 0  # this rank's first class
    V: int = 0
    group: str = ""  # the process group's name; empty: one rank has all classes
    entropy: bool = False

    @property
    def parts(self) -> int:
        """How many numbers per row ranks exchange."""
        return 3 + (self.label_smoothing != 0.0) + self.entropy

    def smoothing(self, N: int) -> tuple[float, int]:
        """e and K of the formula."""
        K = N if self.mode == "partition" else self.V
        return self.label_smoothing * (K / (K - 1) if self.formula == "megatron" and self.label_smoothing else 1.0), K


def validate_formula_and_mode(label_smoothing_formula: str, label_smoothing_mode: str) -> None:
    """Raise ``ValueError`` unless both names are known."""
    checks.one_of("vocab_parallel_cross_entropy", FORMULAS, label_smoothing_formula=label_smoothing_formula)
    checks.one_of("vocab_parallel_cross_entropy", MODES, label_smoothing_mode=label_smoothing_mode)


def part_of(
    name: str, N: int, group: ProcessGroup | None, sizes: Sequence[int] | None, ignore_index: int,
    label_smoothing: float, formula: str, mode: str, z_loss: float = 0.0, logit_scale: float = 1.0,
    softcap: float | None = None, entropy: bool = False,
) -> Part:  # fmt: skip
    """This rank's. Raises ``ValueError`` for arguments that have no
    meaning."""
    checks.one_of(name, FORMULAS, formula=formula)
    checks.one_of(name, MODES, mode=mode)
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    if N < 1:
        raise ValueError(f"{name}: every rank must have a class, got none")
    if sizes is not None and (len(sizes) != ranks or sizes[rank] != N):
        raise ValueError(f"{name}: sizes must be the classes of {ranks} ranks, {N} of rank {rank}, got {tuple(sizes)}")
    # equal slices, or what the caller knows of all ranks
    first, V = (rank * N, ranks * N) if sizes is None else (sum(sizes[:rank]), sum(sizes))
    if label_smoothing and formula == "megatron" and (N if mode == "partition" else V) < 2:
        raise ValueError(f"{name}: formula 'megatron' must smooth over two classes or more, got one")
    # a name and no object: launchers take strings, and torch.compile knows groups by them
    shared = group.group_name if group is not None and ranks > 1 else ""
    return Part(ignore_index, label_smoothing, formula, mode, z_loss, logit_scale, softcap, first, V, shared, entropy)


def process_group(name: str) -> ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


def gathered(t: Tensor, group: str, async_op: bool = False) -> tuple[Tensor, Any]:
    """``t`` (n,) of every rank, as (ranks, n), and with ``async_op`` the handle to wait for
    before reading it."""
    if not group:
        return t[None], None
    if torch.compiler.is_compiling():  # which knows no groups but by name, and would leave the graph here
        return all_gather_tensor(t[None], 0, group), None
    ranks = process_group(group)
    out = t.new_empty(ranks.size(), t.shape[0])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it
    return out, gather(out.view(-1), t, group=ranks, async_op=async_op)


def reference(
    logits, target, group, *,
    ignore_index, reduction, label_smoothing, formula, mode, z_loss, logit_scale, softcap, sizes,
):  # fmt: skip
    numbers = ignore_index, label_smoothing, formula, mode, z_loss, logit_scale, softcap
    part = part_of("reference", logits.shape[-1], group, sizes, *numbers)
    return of_slice(logits, target, part, reduction)[0]


def of_slice(logits: Tensor, target: Tensor, s: Part, reduction: str) -> tuple[Tensor, Tensor | None]:
    """The loss, and with ``s.entropy`` the entropies (...), in torch."""
    N = logits.shape[-1]
    z, _ = transformed(logits, None, s)
    valid, inside, y = target != s.ignore_index, (target >= 0) & (target < s.V), target - s.first
    mine = (y >= 0) & (y < N)
    z_y = z.gather(-1, y.where(mine, 0)[..., None])[..., 0].where(mine, 0)
    mean = lambda p: (p * z.masked_fill(p == 0, 0)).sum(-1)
    # one message; what other ranks know of a row is constant here
    local = torch.stack([z.logsumexp(-1), z_y, z.sum(-1), *([mean(z.softmax(-1))] if s.entropy else [])]).detach()
    ranks = gathered(local.reshape(-1), s.group)[0]
    ranks = ranks.view(ranks.shape[0], *local.shape)
    # the values of other ranks are constants here
    constant = ranks[:, 0].logsumexp(0)
    p = (z - constant[..., None]).exp()
    # the value of all ranks, with the derivative of this rank's part
    own = p.sum(-1)
    lse = constant + (own - own.detach())
    # added up over ranks: 0 on those that have not the target
    z_y = z_y + (ranks[:, 1].sum(0) - local[1])
    sum_z = z.sum(-1)
    if s.mode == "global":
        sum_z = sum_z + (ranks[:, 2].sum(0) - local[2])
    e, K = s.smoothing(N)
    loss = (1 - e) * (lse - z_y) + s.z_loss * lse * lse
    if e:
        loss = loss + e * (lse - sum_z / K)
    poison = z.new_ones(()).where(inside | ~valid, float("nan"))  # a factor, so that the gradient is NaN, too
    picked = lambda t: (t * poison).where(valid, 0)
    loss, entropy = picked(loss), None
    if s.entropy:
        of_all = ((ranks[:, 0] - constant).exp() * ranks[:, 3]).sum(0)
        own_mean = mean(p)
        # the last factor is 1, and says how p depends on lse
        entropy = lse - (own_mean + (of_all - own_mean.detach())) * (constant - lse).exp()
        entropy = picked(entropy + (entropy.clamp(min=0) - entropy).detach())
    return {"mean": lambda t: t.sum() / valid.sum(), "sum": torch.sum, "none": lambda t: t}[reduction](loss), entropy


@jit
def _moved(weighted, total, top, shift):
    """The sum of (z - top) exp(z - top), whose exponentials add up to ``total``, counted from
    ``shift`` instead of ``top``."""
    return tl.where(total == 0.0, 0.0, (weighted + total * (top - shift)) * tl.exp(top - shift))


@jit
def _stats(
    z_ptr, bias_ptr, target_ptr, out_ptr, M, N, z_stride, first, V, ignore_index, logit_scale, softcap,
    SUM: tl.constexpr, ENTROPY: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one row a program: maximum, sum of exponentials, the target's logit (inf on ranks that
    have it not), sum of logits, that of logits less the maximum weighted by exponentials; after all
    rows, V."""
    row = tl.program_id(0).to(tl.int64)
    M = tl.cast(M, tl.int64)
    z_ptr += row * z_stride
    target = tl.load(target_ptr + row).to(tl.int64)
    # an index among this rank's classes
    y = target - first
    mine = (y >= 0) & (y < N)
    ignored = target == ignore_index
    z_y, _t_y = transformed_logits(z_ptr, bias_ptr, y, mine, logit_scale, softcap, "")
    top = -float("inf")
    total = 0.0
    sum_z = 0.0
    weighted = 0.0
    for start in range(0, tl.where(ignored, 0, N), BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < N
        z, _t = transformed_logits(z_ptr, bias_ptr, col, mask, logit_scale, softcap, "")
        if SUM:
            sum_z += tl.sum(tl.where(mask, z, 0.0), axis=0)
        z = tl.where(mask, z, -float("inf"))
        new_top = tl.maximum(top, tl.max(z, axis=0))
        # a row of -inf only has no maximum to subtract
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        e = tl.exp(z - shift)
        if ENTROPY:
            weighted = _moved(weighted, total, top, shift) + tl.sum(tl.where(e == 0.0, 0.0, e * (z - shift)), axis=0)
        total = total * tl.exp(top - shift) + tl.sum(e, axis=0)
        top = new_top
    tl.store(out_ptr + row, top)
    tl.store(out_ptr + M + row, total)
    # the smallest over ranks is the logit; all inf says that no rank has it
    tl.store(out_ptr + 2 * M + row, tl.where(mine, z_y, float("inf")))
    if SUM:
        tl.store(out_ptr + 3 * M + row, sum_z)
    if ENTROPY:
        tl.store(out_ptr + (PARTS - 1) * M + row, weighted)
    # every rank sends the number of classes that it assumes, to find ranks that do not agree
    if row == 0:
        tl.store(out_ptr + PARTS * M, tl.cast(V, tl.float32))


@jit
def _merge(
    parts_ptr, own_ptr, target_ptr, loss_ptr, top_ptr, total_ptr, entropy_ptr, M, RANKS, V, ignore_index, e, K, z_loss,
    SUM: tl.constexpr, PARTITION: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss, top, total and entropy of rows from the ``_stats`` of all ranks. NaN where no rank
    has the target, or they do not agree on V: unequal slices."""
    row = rows_at(tl.program_id(0), BLOCK)
    mask = row < M
    M = tl.cast(M, tl.int64)
    size = PARTS * M + 1
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    z_y = tl.full((BLOCK,), float("inf"), tl.float32)
    sum_z = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for rank in range(RANKS):
        part = parts_ptr + rank * size
        part_top = tl.load(part + row, mask=mask, other=0.0)
        # 1 outside, so that no logarithm of 0 appears
        part_total = tl.load(part + M + row, mask=mask, other=1.0)
        z_y = tl.minimum(z_y, tl.load(part + 2 * M + row, mask=mask, other=0.0))
        if SUM and not PARTITION:
            sum_z += tl.load(part + 3 * M + row, mask=mask, other=0.0)
        new_top = tl.maximum(top, part_top)
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        if entropy_ptr is not None:
            part_weighted = tl.load(part + (PARTS - 1) * M + row, mask=mask, other=0.0)
            weighted = _moved(weighted, total, top, shift) + _moved(part_weighted, part_total, part_top, shift)
        total = total * tl.exp(top - shift) + part_total * tl.exp(part_top - shift)
        total += tl.where(tl.load(part + size - 1) == tl.cast(V, tl.float32), 0.0, float("nan"))
        top = new_top
    # smoothing over this rank's classes alone: the sum that it sent itself
    if SUM and PARTITION:
        sum_z = tl.load(own_ptr + 3 * M + row, mask=mask, other=0.0)
    log_total = log(total)
    lse = top + log_total
    e = tl.cast(e, tl.float32)
    loss = (1.0 - e) * (top - z_y + log_total) + tl.cast(z_loss, tl.float32) * lse * lse
    if SUM:
        loss += e * (lse - sum_z / K)
    ignored = tl.load(target_ptr + row, mask=mask, other=0) == ignore_index
    loss = tl.where(z_y == float("inf"), float("nan"), loss)
    tl.store(loss_ptr + row, tl.where(ignored, 0.0, loss), mask=mask)
    if entropy_ptr is not None:
        entropy = log_total - weighted / total
        entropy = tl.where(entropy < 0.0, 0.0, entropy)  # which is rounding
        entropy = tl.where(z_y == float("inf"), float("nan"), entropy)
        tl.store(entropy_ptr + row, tl.where(ignored, 0.0, entropy), mask=mask)
    tl.store(top_ptr + row, tl.where(ignored, 0.0, top), mask=mask)
    tl.store(total_ptr + row, tl.where(ignored, 1.0, total), mask=mask)


@jit
def _grad(
    z_ptr, bias_ptr, target_ptr, top_ptr, total_ptr, entropy_ptr, g_ptr, g_entropy_ptr, norm_ptr, dz_ptr,
    N, z_stride, dz_stride, g_stride, first, V, ignore_index, on, off, z_loss, logit_scale, softcap,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one row's gradient a program, which may be written where z was read."""
    # all rows are known, so that blocks need no order
    blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row).to(tl.int64)
    ignored = target == ignore_index
    top = tl.load(top_ptr + row)
    total = tl.load(total_ptr + row)
    mask = (col < N) & (not ignored)
    z, t = transformed_logits(z_ptr + row * z_stride, bias_ptr, col, mask, logit_scale, softcap, "")
    spread = (1.0 + 2.0 * tl.cast(z_loss, tl.float32) * (top + log(total))) / total
    dz = tl.exp(z - top) * spread - tl.cast(off, tl.float32)
    dz = tl.where(col == target - first, dz - tl.cast(on, tl.float32), dz)
    # NaN for a target outside of all classes, on every rank alike
    scale = tl.where((target >= 0) & (target < V), 1.0, float("nan"))
    if logit_scale is not None:
        scale *= tl.cast(logit_scale, tl.float32)
    if norm_ptr is not None:
        scale /= tl.load(norm_ptr)
    if g_entropy_ptr is not None:
        slope = scale * tl.load(g_entropy_ptr + row).to(tl.float32)
    if g_ptr is not None:
        scale *= tl.load(g_ptr + row * g_stride).to(tl.float32)
    dz *= scale
    if g_entropy_ptr is not None:
        less_log_p = (top - tl.maximum(z, -3e38)) + log(total)  # finite where p is 0
        dz += slope * (tl.exp(z - top) / total) * (less_log_p - tl.load(entropy_ptr + row))
    if softcap is not None:
        dz *= 1.0 - t * t
    tl.store(dz_ptr + row * dz_stride + col, tl.where(ignored, 0.0, dz).to(dz_ptr.dtype.element_ty), mask=col < N)


def _scale(s: Part) -> float | None:
    return None if s.logit_scale == 1.0 else s.logit_scale


def row_stats(z: Tensor, target: Tensor, s: Part, bias: Tensor | None = None) -> Tensor:
    """The statistics of this rank's logits z (M, N) and bias (N,) that other ranks need: a
    vector for ``gathered``."""
    M, N = z.shape
    stats = z.new_empty(s.parts * M + 1, dtype=torch.float32)
    # one row a program; blocks of 16384 spill
    c = launch_config.tile("vocab_parallel_stats", N, z.itemsize, elements=1, max_block_n=8192)
    numbers = M, N, z.stride(0), s.first, s.V, s.ignore_index, _scale(s), s.softcap
    flags = dict(SUM=s.label_smoothing != 0.0, ENTROPY=s.entropy, PARTS=s.parts)
    launch(_stats, (M,), z, bias, target, stats, *numbers, **flags, **c.row)
    return stats


def merge(parts, own, target, s: Part, N: int, loss, top, total, entropy=None) -> None:
    """Fill loss, top and total (M,), and with ``s.entropy`` that, from the ``row_stats`` of all
    ranks, and of this one."""
    e, K = s.smoothing(N)
    M = target.shape[0]
    tensors = own, target, loss, top, total, entropy if s.entropy else None
    numbers = M, parts.shape[0], s.V, s.ignore_index, e, K, s.z_loss
    flags = dict(SUM=s.label_smoothing != 0.0, PARTITION=s.mode == "partition", PARTS=s.parts)
    launch(_merge, (cdiv(M, 256),), parts, *tensors, *numbers, **flags, BLOCK=256, num_warps=4)


def row_grad(z, target, s: Part, top, total, dz, *, bias=None, g=None, norm=None, g_entropy=None, entropy=None) -> None:
    """Fill dz (M, N), which may be z, times g (M,), divided by the 0-dim norm; with
    ``g_entropy`` (M,) also of the ``entropy`` (M,) times that."""
    M, N = z.shape
    e, K = s.smoothing(N)
    c = launch_config.tile("vocab_parallel_grad", N, z.itemsize, elements=4096, max_block_n=4096)
    tensors = bias, target, top, total, entropy, g, g_entropy, norm, dz
    strides = z.stride(0), dz.stride(0), 0 if g is None else g.stride(0)
    numbers = s.first, s.V, s.ignore_index, 1.0 - e, e / K, s.z_loss, _scale(s), s.softcap
    launch(_grad, (M * cdiv(N, c.block_n),), z, *tensors, N, *strides, *numbers, **c.row)


@typed_launcher
def vocab_parallel_cross_entropy_fwd(z: Tensor, target: Tensor, *numbers: Part) -> tuple[Tensor, Tensor, Tensor]:
    loss, top, total = (z.new_empty(z.shape[0], dtype=torch.float32) for _ in range(3))
    if not tracing(z):
        s = Part(*numbers)
        stats = row_stats(z, target, s)
        merge(gathered(stats, s.group)[0], stats, target, s, z.shape[1], loss, top, total)
    return loss, top, total


@typed_launcher
def vocab_parallel_cross_entropy_bwd(
    g: Tensor, z: Tensor, target: Tensor, top: Tensor, total: Tensor, *numbers: Part
) -> Tensor:
    dz = z.new_empty(z.shape)
    if not tracing(z):
        row_grad(z, target, Part(*numbers), top, total, dz, g=g)
    return dz


class LigerVocabParallelCEFunction(torch.autograd.Function):
    """Loss per row, fp32: ``apply(logits, target, tp_group, ignore_index, label_smoothing, formula,
    mode, z_loss=0, logit_scale=1, softcap=None, sizes=None)``.

    logits (..., N), target (...). The logits do not change, and the backward may run again.
    """

    @staticmethod
    def forward(
        ctx, vocab_parallel_logits, target, tp_group, ignore_index, label_smoothing, label_smoothing_formula,
        label_smoothing_mode, z_loss=0.0, logit_scale=1.0, softcap=None, sizes=None,
    ):  # fmt: skip
        z, y = rows_of(vocab_parallel_logits), target.reshape(-1).contiguous()
        smoothing = label_smoothing, label_smoothing_formula, label_smoothing_mode
        numbers = ignore_index, *smoothing, z_loss, logit_scale, softcap
        ctx.numbers = part_of("vocab_parallel_cross_entropy", z.shape[1], tp_group, sizes, *numbers)
        loss, *sums = vocab_parallel_cross_entropy_fwd(z, y, *ctx.numbers)
        ctx.save_for_backward(z, y, *sums)
        ctx.shape = vocab_parallel_logits.shape
        return shaped(loss, target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        if not ctx.needs_input_grad[0]:
            return (None,) * 11
        dz = vocab_parallel_cross_entropy_bwd(g.reshape(-1), *ctx.saved_tensors, *ctx.numbers)
        return dz.view(ctx.shape), *(None,) * 10


def _rows(M: int, N: int, **options: Any) -> dict[str, Any]:
    return dict(logits=T((M, N)), target=targets(M, N), **options)


@op(
    reference=reference,
    cases=[
        Case("mean", _rows(9, 130)),
        Case(
            "megatron",
            dict(
                logits=T((5, 2, 61)),
                target=targets((5, 2), 61),
                reduction="none",
                label_smoothing=0.1,
                formula="megatron",
                mode="partition",
            ),
        ),
        Case("smoothing", _rows(6, 99, label_smoothing=0.1, reduction="sum")),
        Case("gemma2", _rows(6, 99, softcap=2.0)),
        Case(
            "everything",
            _rows(
                6,
                99,
                label_smoothing=0.2,
                formula="megatron",
                z_loss=1e-2,
                logit_scale=1.5,
                softcap=3.0,
                reduction="none",
            ),
        ),
        Case("two-blocks", _rows(2, 8500, label_smoothing=0.1)),
        Case("all-ignored", _rows(1, 20, reduction="sum")),
    ],
    cost=lambda logits, target, *_, **__: Cost(
        nbytes(logits, target), nbytes(logits, logits, target), flops=(4 * logits.numel(), 4 * logits.numel())
    ),
)
def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, group: ProcessGroup | None = None, *, ignore_index: int = -100,
    reduction: str = "mean", label_smoothing: float = 0.0, formula: str = "pytorch", mode: str = "global",
    z_loss: float = 0.0, logit_scale: float = 1.0, softcap: float | None = None, sizes: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Cross entropy of logits (..., N), this rank's slice of the classes, and indices among all
    classes (...), the same on all ranks of ``group``.

    Slices follow the ranks and are of equal size, or ``sizes`` lists the classes of every rank; the
    loss is NaN if they are unequal without it.
    Returns the fp32 loss, 0-dim or like target with ``reduction="none"``, the same on all ranks
    unless ``mode`` is "partition". No ``group``: one rank.
    """
    name, logits = "vocab_parallel_cross_entropy", computed(logits)
    checks.floating(name, logits=logits)
    checks.shape(name, logits.shape[:-1], target=target)
    smoothing = dict(label_smoothing=label_smoothing, formula=formula, mode=mode)
    numbers = dict(ignore_index=ignore_index) | smoothing | dict(z_loss=z_loss, logit_scale=logit_scale)
    numbers["softcap"] = softcap
    V = part_of(name, logits.shape[-1], group, sizes, *numbers.values()).V
    flat = check(name, (target.numel(), V), target.reshape(-1), None, reduction, ignore_index)
    target = flat.view(target.shape)
    if not use_kernels(logits):
        return reference(logits, target, group, reduction=reduction, sizes=sizes, **numbers)
    loss = LigerVocabParallelCEFunction.apply(logits, target, group, *numbers.values(), sizes)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (target != ignore_index).sum()
