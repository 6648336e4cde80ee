"""The vocabulary-parallel losses over real process groups: gloo on CPUs, NCCL where there is a GPU
for every rank.

A process costs seconds, so that each group runs all its checks in one go; every check is a test of
its own, which reads what the ranks said.
"""

from __future__ import annotations

import contextlib
import functools
import math
import tempfile
import traceback
from pathlib import Path

import interpreted  # noqa: F401  in a spawned rank, this sets up the interpreter, as pytest does for a test
import processes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException

from liger_kernel.nn import LigerVocabParallelCrossEntropy, liger_fused_linear_scaled_cross_entropy_tp
from liger_kernel.ops import (
    LigerFusedLinearScaledCrossEntropyFunction,
    LigerFusedLinearScaledCrossEntropyTPFunction,
    LigerVocabParallelCEFunction,
    cross_entropy,
    linear_cross_entropy,
    linear_logprobs,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from liger_kernel.ops._core import operator as _op
from liger_kernel.ops.losses.logprob_tiles import OUTPUTS
from liger_kernel.testing import assert_as_accurate, like, run

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = {2: (40, 40), 3: (17, 30, 9)}  # classes of each rank


def full(
    logits: Tensor, target: Tensor, lo: int, hi: int, *, label_smoothing=0.0, formula="pytorch", mode="global",
    reduction="mean", z_loss=0.0, logit_scale=1.0, softcap=None, entropy=False,
):  # fmt: skip
    """The loss over all classes, from its definition: a distribution over labels; and the entropy,
    if asked for.

    [lo, hi) are the classes that mode "partition" smooths over.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    V = z.shape[-1]
    y, valid = target.clamp(min=0), target != -100
    lo, hi = (lo, hi) if mode == "partition" else (0, V)
    K, e = hi - lo, label_smoothing
    e = e * K / (K - 1) if formula == "megatron" else e
    q = torch.zeros_like(z).scatter_(-1, y[..., None], 1 - e)
    q[..., lo:hi] += e / K
    if formula == "megatron" and mode == "global":  # a label keeps 1 - label_smoothing, the others share the rest
        torch.testing.assert_close(q.gather(-1, y[..., None]), torch.full_like(q[..., :1], 1 - label_smoothing))
    # a class without weight may have a logit of -inf
    log_p = z.log_softmax(-1)
    loss = -torch.where(q == 0, 0.0, q * log_p).sum(-1) + z_loss * z.logsumexp(-1).square()
    loss = loss.where(valid, 0)
    if entropy:
        return loss, -(log_p.exp() * log_p).sum(-1).where(valid, 0)
    return {"mean": lambda t: t.sum() / valid.sum(), "sum": torch.sum, "none": lambda t: t}[reduction](loss)


class Rank:
    """One process of the group, and the data that all of them draw alike."""

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks, self.group = rank, ranks, dist.group.WORLD
        self.device = "cuda" if ranks <= GPUS else "cpu"
        self.sizes = SIZES[ranks]
        self.even = len(set(self.sizes)) == 1
        self.V = sum(self.sizes)
        self.lo = sum(self.sizes[:rank])
        self.hi = self.lo + self.sizes[rank]
        self.slices = {} if self.even else {"sizes": self.sizes}

    def own(self, t: Tensor, dim: int = -1) -> Tensor:
        return t.narrow(dim, self.lo, self.hi - self.lo)

    def target(self, *shape: int) -> Tensor:
        y = torch.randint(0, self.V, shape, generator=torch.Generator().manual_seed(1))
        y.view(-1)[::4] = -100
        return y.to(self.device)

    def randn(self, *shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
        return drawn.to(dtype).to(self.device).requires_grad_()

    def leaf(self, t: Tensor, dim: int = -1) -> Tensor:
        """This rank's part of what all drew."""
        return self.own(t.detach(), dim).clone().requires_grad_(t.requires_grad)

    def beside(self, fn, stock, draw, parts: dict[str, int]) -> None:
        """This rank's results and gradients, and those over all classes. ``parts``: the arguments that
        ranks share, and in which dim."""
        own = lambda found: {k: self.own(v, parts[k[1:]]) if k[1:] in parts else v for k, v in found.items()}
        ours = run(fn, {k: self.leaf(v, parts[k]) if k in parts else v for k, v in draw(0).items()})
        theirs = lambda seed, dtype: own(run(stock, like(draw(seed), dtype)))
        draws = [(theirs(seed, None), theirs(seed, torch.float64)) for seed in range(8)]
        assert_as_accurate(ours, *draws[0], *draws[1:])

    def dense(self, shape: tuple[int, ...], dtype: torch.dtype, fn=vocab_parallel_cross_entropy, **options) -> None:
        target = self.target(*shape)
        draw = lambda seed: dict(logits=self.randn(*shape, self.V, dtype=dtype, seed=seed))
        ours = lambda logits: fn(logits, target, self.group, **self.slices, **options)
        self.beside(ours, lambda logits: full(logits, target, self.lo, self.hi, **options), draw, dict(logits=-1))

    def linear(self, M: int, H: int, dtype: torch.dtype, *, bias=False, frozen=(), chunk_rows=None, **options) -> None:
        def draw(seed: int) -> dict[str, Tensor]:
            x = self.randn(M, H, dtype=dtype, seed=10 * seed)
            args = dict(x=x, w=self.randn(self.V, H, dtype=dtype, seed=10 * seed + 1, scale=0.5))
            args |= dict(bias=self.randn(self.V, dtype=dtype, seed=10 * seed + 2)) if bias else {}
            return {k: v.detach().requires_grad_(k not in frozen) for k, v in args.items()}

        of = dict(target=self.target(M), group=self.group, chunk_rows=chunk_rows)
        ours = functools.partial(vocab_parallel_linear_cross_entropy, **of, **self.slices, **options)
        stock = lambda x, w, bias=None: full(F.linear(x, w, bias), of["target"], self.lo, self.hi, **options)
        self.beside(ours, stock, draw, dict(w=0, bias=0))


CHECKS = {}


def check(fn):
    CHECKS[fn.__name__] = fn
    return fn


@check
def dense(r: Rank) -> None:
    for dtype in (*DTYPES, torch.float64):
        r.dense((9,), dtype)
    r.dense((3, 4), torch.float32, reduction="none")
    r.dense((9,), torch.float32, reduction="sum", z_loss=1e-2, logit_scale=0.5, softcap=2.0)


@check
def label_smoothing(r: Rank) -> None:
    for formula in ("pytorch", "megatron"):
        for mode in ("global", "partition"):
            for dtype in (torch.bfloat16, torch.float64):  # by kernels, and by the reference
                r.dense((7,), dtype, reduction="none", label_smoothing=0.2, formula=formula, mode=mode)


@check
def a_slice_of_minus_infinity(r: Rank) -> None:
    """Classes that only pad the vocabulary: one whole rank of them, and a part of another."""
    logits = r.randn(6, r.V, dtype=torch.float32).detach()
    logits[:, : r.sizes[0] + 5] = -math.inf
    target = r.target(6).where(r.target(6) < 0, r.V - 1)
    for dtype in (torch.float32, torch.float64):
        mine = r.own(logits).to(dtype).requires_grad_()
        loss = vocab_parallel_cross_entropy(mine, target, r.group, **r.slices)
        loss.backward()
        expected = logits.double().requires_grad_()
        F.cross_entropy(expected, target).backward()
        torch.testing.assert_close(loss, F.cross_entropy(expected, target).to(dtype))
        torch.testing.assert_close(mine.grad.double(), r.own(expected.grad), rtol=1e-5, atol=1e-7)


@check
def labels_out_of_range_are_nan(r: Rank) -> None:
    logits = r.own(r.randn(6, r.V, dtype=torch.float32)).detach().requires_grad_()
    target = torch.tensor([0, r.V, -1, r.V - 1, 1 << 40, -100], device=r.device)
    wrong = [False, True, True, False, True, False]
    loss = vocab_parallel_cross_entropy(logits, target, r.group, reduction="none", **r.slices)
    loss.sum().backward()
    assert loss.isnan().tolist() == wrong and loss[-1] == 0
    assert logits.grad.isnan().all(-1).tolist() == wrong and not logits.grad[-1].any()
    loss = vocab_parallel_cross_entropy(logits.double(), target, r.group, reduction="none", **r.slices)
    assert loss.isnan().tolist() == wrong
    x, w = torch.ones(6, 4, device=r.device), torch.ones(r.hi - r.lo, 4, device=r.device)
    loss = vocab_parallel_linear_cross_entropy(x, w, target, r.group, reduction="none", chunk_rows=2, **r.slices)
    assert loss.isnan().tolist() == wrong


@check
def everything_ignored(r: Rank) -> None:
    logits, target = r.leaf(r.randn(3, r.V, dtype=torch.float32)), torch.full((3,), 7, device=r.device)
    loss = vocab_parallel_cross_entropy(logits, target, r.group, ignore_index=7, reduction="sum", **r.slices)
    loss.backward()
    assert loss == 0 and not logits.grad.any()


@check
def unequal_slices_are_refused(r: Rank) -> None:
    """Nothing tells before the collective: the loss is NaN, never a wrong number."""
    N = 5 + (r.rank == 0)
    given = torch.zeros(4, N, device=r.device, requires_grad=True), torch.arange(4, device=r.device), r.group
    for label_smoothing in (0.0, 0.1):
        loss = vocab_parallel_cross_entropy(*given, reduction="none", label_smoothing=label_smoothing)
        assert loss.isnan().all() and torch.autograd.grad(loss.sum(), given[0])[0].isnan().all()
    with pytest.raises(ValueError, match=f"sizes must be the classes of {r.ranks} ranks, {N} of rank {r.rank}, got"):
        vocab_parallel_cross_entropy(*given, sizes=(N + 1,) * r.ranks)


@check
def all_ranks_have_the_same_bits(r: Rank) -> None:
    logits = r.own(r.randn(50, r.V, dtype=torch.float32).detach())
    loss = vocab_parallel_cross_entropy(logits, r.target(50), r.group, reduction="none", **r.slices)
    everyone = [torch.empty_like(loss) for _ in range(r.ranks)]
    dist.all_gather(everyone, loss)
    assert all(torch.equal(loss, other) for other in everyone)


@check
def as_deepspeed_calls_it(r: Rank) -> None:
    if not r.even:
        return
    logits, target = r.randn(2, 3, r.V, dtype=torch.float32), r.target(2, 3)
    mine = r.leaf(logits)
    given = mine.reshape(-1, 1, mine.shape[-1]), target.reshape(-1, 1), r.group
    loss, guarded = LigerVocabParallelCEFunction.apply(*given, -100, 0.0, "pytorch", "global"), []
    assert loss.shape == (6, 1) and loss.dtype == torch.float32
    loss.register_hook(lambda g: guarded.append(g) or g)  # what it hangs on the loss
    loss.sum().backward()
    assert len(guarded) == 1
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    torch.testing.assert_close(loss[:, 0], expected)
    (dz,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(mine.grad, r.own(dz))


@check
def the_module(r: Rank) -> None:
    if not r.even:
        return
    for reduction in ("none", "mean", "sum"):
        module = lambda z, y, group, reduction: LigerVocabParallelCrossEntropy(reduction=reduction)(z, y, group)
        r.dense((4, 3), torch.float32, fn=module, reduction=reduction)


@check
def linear(r: Rank) -> None:
    for dtype in (*DTYPES, torch.float64):
        r.linear(11, 32, dtype, chunk_rows=4)
    r.linear(11, 32, torch.bfloat16)
    r.linear(10, 16, torch.float32, bias=True, reduction="none", chunk_rows=3, label_smoothing=0.1, formula="megatron")
    options = dict(reduction="sum", z_loss=1e-2, logit_scale=0.5, softcap=2.0)
    r.linear(10, 16, torch.float32, bias=True, chunk_rows=10, **options)
    r.linear(24, 16, torch.bfloat16, chunk_rows=2)


@check
def linear_entropy(r: Rank) -> None:
    for dtype in (*DTYPES, torch.float64):
        r.linear(11, 32, dtype, reduction="none", entropy=True, logit_scale=1 / 0.7, chunk_rows=4)
    r.linear(10, 16, torch.float32, bias=True, reduction="none", entropy=True, label_smoothing=0.1, chunk_rows=3)
    r.linear(7, 16, torch.float32, frozen=("w",), reduction="none", entropy=True)


@check
def scaled_cross_entropy_over_ranks(r: Rank) -> None:
    """As of all classes on one rank, by the reference in fp64; of two and three dims."""
    target = r.target(2, 5)
    for shape in ((10,), (2, 5)):
        x, w = r.randn(*shape, 16, dtype=torch.float32), r.randn(r.V, 16, dtype=torch.float32, seed=1)
        mine, y = r.leaf(w, 0), target.view(shape)
        apply = LigerFusedLinearScaledCrossEntropyTPFunction.apply
        loss, entropy = apply(x, mine, y, r.group, 0.7, -100, 1, True, **r.slices)
        a, b = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
        expected = LigerFusedLinearScaledCrossEntropyFunction.apply(a, b, y, 0.7, -100, 1, True)
        torch.testing.assert_close((loss.double(), entropy.double()), expected, rtol=1e-5, atol=1e-6)
        assert loss.shape == entropy.shape == shape
        g = tuple(r.randn(*shape, dtype=torch.float32, seed=seed).detach() for seed in (2, 3))
        dx, dw = torch.autograd.grad((loss, entropy), (x, mine), g)
        ex, ew = torch.autograd.grad(expected, (a, b), tuple(t.double() for t in g))
        torch.testing.assert_close((dx.double(), dw.double()), (ex, r.own(ew, 0)), rtol=1e-4, atol=1e-5)
        if r.even:
            torch.testing.assert_close(liger_fused_linear_scaled_cross_entropy_tp(x, mine, y, r.group, 0.7), loss)


@check
def linear_logprobs_over_ranks(r: Rank) -> None:
    """As over one rank that has all classes: every output, one and several targets, padding."""
    x, w = r.randn(2, 5, 16, dtype=torch.float32), r.randn(r.V, 16, dtype=torch.float32, seed=1).detach()
    mine, whole = r.own(w, 0).clone().requires_grad_(), w.clone().requires_grad_()
    slices = dict(group=r.group, **r.slices)
    several = torch.stack([r.target(2, 5), r.target(2, 5).flip(1)], -1)
    for y, options in (
        (r.target(2, 5), dict(outputs=OUTPUTS, temperature=0.7, chunk_classes=8)),
        (several, dict(outputs=("entropy", "top1"), softcap=4.0)),
        (r.target(2, 5).clamp(max=r.V - 4), dict(vocab_size=r.V - 3)),
    ):
        found, expected = linear_logprobs(x, mine, y, **options, **slices), linear_logprobs(x, whole, y, **options)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        sums = [sum((t * t).sum() for t in (f if isinstance(f, tuple) else (f,))[:2]) for f in (found, expected)]
        dx, dw = torch.autograd.grad(sums[0], (x, mine))
        ex, ew = torch.autograd.grad(sums[1], (x, whole))
        torch.testing.assert_close((dx, dw), (ex, r.own(ew, 0)), rtol=1e-4, atol=1e-5)


@check
def log_probabilities_are_not_positive_nor_entropies_negative(r: Rank) -> None:
    """Of certain, nearly certain and uncertain rows, slices of -inf among them."""
    for scale in (0.0, 1.0, 8.0, 40.0, 1000.0):
        x = r.randn(40, 16, dtype=torch.bfloat16, scale=scale)
        w = r.own(r.randn(r.V, 16, dtype=torch.bfloat16, seed=1).detach(), 0)
        best = likeliest(x, w, r)
        padding = torch.zeros(w.shape[0], device=r.device, dtype=torch.bfloat16)
        padding[: 5 if r.rank else w.shape[0]] = -math.inf
        for bias in (None, padding):
            how = dict(reduction="none", entropy=True, **r.slices)
            nll, entropy = vocab_parallel_linear_cross_entropy(x, w, best, r.group, bias, **how)
            assert (nll >= 0).all() and (entropy >= 0).all() and entropy.isfinite().all()
            assert torch.autograd.grad((nll.isfinite() * entropy).sum(), x)[0].isfinite().all()


def likeliest(x: Tensor, w: Tensor, r: Rank) -> Tensor:
    """The likeliest class of each row."""
    best = (x.detach() @ w.t()).float().max(-1)
    mine = torch.stack([best.values, (best.indices + r.lo).float()])
    ranks = [torch.empty_like(mine) for _ in range(r.ranks)]
    dist.all_gather(ranks, mine)
    of_all = torch.stack(ranks)
    return of_all[:, 1].gather(0, of_all[:, 0].argmax(0, keepdim=True))[0].long()


@check
def terms_of_dx_add_up(r: Rank) -> None:
    for dtype in (torch.float32, torch.float64):
        x, w = r.randn(7, 16, dtype=dtype), r.own(r.randn(r.V, 16, dtype=dtype, seed=1).detach(), 0)
        how = dict(target=r.target(7), group=r.group, chunk_rows=3, **r.slices)
        fn = functools.partial(vocab_parallel_linear_cross_entropy, x, w, **how)
        (whole,), (term,) = (torch.autograd.grad(fn(sum_dx=summed), x) for summed in (True, False))
        assert not torch.allclose(whole, term)
        dist.all_reduce(term)
        torch.testing.assert_close(term, whole)


@check
def a_group_that_is_part_of_the_world(r: Rank) -> None:
    """Ranks within the group count, and a group of one has all classes."""
    alone = [dist.new_group([rank]) for rank in range(r.ranks)][r.rank]
    pair = dist.new_group([r.ranks - 2, r.ranks - 1])
    logits, target = r.randn(6, 8, dtype=torch.float32).detach(), torch.arange(6, device=r.device)
    expected = F.cross_entropy(logits, target)
    torch.testing.assert_close(vocab_parallel_cross_entropy(logits, target, alone), expected)
    if r.rank >= r.ranks - 2:
        half = logits.chunk(2, -1)[r.rank - r.ranks + 2]
        torch.testing.assert_close(vocab_parallel_cross_entropy(half, target, pair), expected)


@check
def compiles_whole(r: Rank) -> None:
    logits, target = r.leaf(r.randn(6, r.V, dtype=torch.float32)), r.target(6)
    args = dict(x=r.randn(6, 16, dtype=torch.float32), w=r.leaf(r.randn(r.V, 16, dtype=torch.float32), 0))
    dense = lambda logits: vocab_parallel_cross_entropy(logits, target, r.group, label_smoothing=0.1, **r.slices)
    linear = lambda x, w: vocab_parallel_linear_cross_entropy(x, w, target, r.group, chunk_rows=4, **r.slices)
    for fn, tensors in ((dense, dict(logits=logits)), (linear, args)):
        compiled = torch.compile(fn, fullgraph=True, backend="inductor" if r.device == "cuda" else "aot_eager")
        torch.testing.assert_close(run(compiled, like(tensors)), run(fn, like(tensors)))


def _rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    if ranks <= GPUS:
        torch.cuda.set_device(rank)
    how = dict(init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    dist.init_process_group("nccl" if ranks <= GPUS else "gloo", **how)
    r = Rank(rank, ranks)
    for name, fn in CHECKS.items():
        said = Path(folder) / f"{name}.{rank}"
        try:
            fn(r)
            said.write_text("fine")
        except BaseException:  # the ranks no longer agree which collective is next
            said.write_text(traceback.format_exc())
            raise
    dist.destroy_process_group()


def outcome(ranks: int) -> dict[str, list[str]]:
    """What every rank said of every check; after the first failure they say nothing more."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(ProcessException):
            processes.start_ranks(_rank, (ranks, folder), ranks)
        said = lambda file: file.read_text() if file.exists() else "not reached"
        return {name: [said(Path(folder) / f"{name}.{rank}") for rank in range(ranks)] for name in CHECKS}


@pytest.mark.skipif(not _op._KERNEL_DEVICES, reason="Triton is not installed")
@pytest.mark.parametrize(
    "ranks", [pytest.param(r, marks=[pytest.mark.slow] * (not GPUS and r == 2)) for r in SIZES]
)  # 3 slices are of different sizes
@pytest.mark.parametrize("name", CHECKS)
def test_over_ranks(name, ranks, once):
    if torch.cuda.is_available() and ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs")
    said = once(f"vocab_parallel-{ranks}", lambda: outcome(ranks))[name]
    assert said == ["fine"] * ranks, "\n".join(said)


# -- one rank -------------------------------------------------------------------------------

DEVICE = "cuda" if GPUS else "cpu"


def test_one_rank_is_the_loss_itself():
    torch.manual_seed(0)
    logits, x, w = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((9, 50), (9, 16), (50, 16)))
    target = torch.randint(0, 50, (9,), device=DEVICE)
    target[2] = -100
    options = dict(label_smoothing=0.1, z_loss=1e-2, logit_scale=0.5, softcap=3.0, reduction="none")
    for ours, theirs, args in (
        (vocab_parallel_cross_entropy, cross_entropy, dict(logits=logits)),
        (vocab_parallel_linear_cross_entropy, linear_cross_entropy, dict(x=x, w=w)),
    ):
        found, expected = (run(functools.partial(fn, target=target, **options), args) for fn in (ours, theirs))
        torch.testing.assert_close(found, expected)
    deepspeeds = LigerVocabParallelCEFunction.apply(logits, target, None, -100, 0.0, "pytorch", "global")
    torch.testing.assert_close(deepspeeds, F.cross_entropy(logits, target, reduction="none"))


def test_the_module_refuses_what_it_does_not_know():
    for wrong in (dict(label_smoothing_formula="torch"), dict(label_smoothing_mode="local"), dict(reduction="avg")):
        with pytest.raises(ValueError, match="must be one of"):
            LigerVocabParallelCrossEntropy(**wrong)
