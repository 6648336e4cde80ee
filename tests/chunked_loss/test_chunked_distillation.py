"""Distillation losses of linear heads against the formulas over all logits, in fp64 the truth."""

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE, assert_beside

from liger_kernel.chunked_loss.cosine_similarity_loss import (
    LigerFusedLinearCosineSimilarityFunction,
    LigerFusedLinearCosineSimilarityLoss,
)
from liger_kernel.chunked_loss.fused_linear_distillation import LigerFusedLinearDistillationBase
from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction, LigerFusedLinearJSDLoss
from liger_kernel.nn import LigerFusedLinearJSD, liger_fused_linear_jsd

M, H, G, V = 14, 16, 24, 53
NAMES = "x", "w", "tx", "tw", "target", "bias", "teacher_bias"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
fp16 = pytest.param(torch.float16, marks=[pytest.mark.slow] * (not torch.cuda.is_available()))
in_every_dtype = pytest.mark.parametrize("dtype", [*DTYPES[:2], fp16], ids=lambda d: str(d)[6:])


def inputs(dtype=torch.float32, seed=0, bias=True):
    """Of a student and a teacher, in the order of the modules' arguments."""
    torch.manual_seed(seed)
    new = lambda *s, k=1.0, grad=True: (
        (k * torch.randn(*s, device=DEVICE, dtype=torch.float64)).to(dtype).requires_grad_(grad)
    )
    x, w, tx, tw = new(M, H), new(V, H, k=0.4), new(M, G, grad=False), new(V, G, k=0.4, grad=False)
    target = torch.randint(0, V, (M,), device=DEVICE)
    target[::3] = -100
    return x, w, tx, tw, target, *((new(V), new(V, grad=False)) if bias else (None, None))


def soft_rows(s, t, beta, cosine=False):
    """Per row, of logits already divided by the temperature."""
    if cosine:
        return beta * (1 - F.cosine_similarity(s, t, dim=-1))
    q, p = s.softmax(-1), t.softmax(-1)
    kl = lambda a, b: (a * (a / b).log()).sum(-1)
    if beta in (0.0, 1.0):
        return kl(p, q) if beta == 0 else kl(q, p)
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def plain(x, w, tx, tw, target, bias=None, teacher_bias=None, hard=0.5, soft=0.5, beta=0.5, temperature=1.0, rows=None):
    """loss, soft and hard; ``rows``: another formula for the soft loss."""
    z, t = F.linear(x, w, bias), F.linear(tx, tw, teacher_bias)
    z, t = (a if a.dtype == torch.float64 else a.float() for a in (z, t))
    valid = target != -100
    softs = (rows or soft_rows)(z / temperature, t / temperature, beta)[valid].sum() / valid.sum()
    hards = F.cross_entropy(z, target)
    return hard * hards + soft * softs, softs, hards


def named(found, args):
    """Results and gradients for an upstream gradient of 3."""
    loss, *others = found if isinstance(found, tuple) else (found,)
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    return {f"out{i}": a.detach() for i, a in enumerate((loss, *others))} | {
        f"d{i}": g for i, g in enumerate(torch.autograd.grad(3 * loss, leaves))
    }


def of_loss(outs):
    return {"out0": torch.full_like(outs["out0"], 3.0)}


def assert_accurate(fn, dtype, bias=True, **options):
    draw = lambda seed: dict(zip(NAMES, inputs(dtype, seed, bias)))
    ours, theirs = (lambda **args: fn(*args.values())), lambda **args: plain(*args.values(), **options)
    assert_beside(ours, theirs, draw, draws=6, grads=of_loss)


@in_every_dtype
@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("beta, temperature", [(0.5, 1.0), (0.1, 2.0), (0.0, 1.0), (1.0, 0.7)])
def test_jsd(beta, temperature, compact, dtype):
    options = dict(beta=beta, temperature=temperature)
    loss = LigerFusedLinearJSDLoss(0.3, 0.6, **options, return_soft_hard_loss=True, compact=compact)
    assert_accurate(loss, dtype, hard=0.3, soft=0.6, **options)


@in_every_dtype
@pytest.mark.parametrize("compact", [True, False])
def test_cosine(compact, dtype):
    loss = LigerFusedLinearCosineSimilarityLoss(beta=0.8, temperature=3.0, return_soft_hard_loss=True, compact=compact)
    assert_accurate(loss, dtype, beta=0.8, temperature=3.0, rows=lambda s, t, beta: soft_rows(s, t, beta, cosine=True))


class Squares(LigerFusedLinearDistillationBase):
    """A user's formula, with the arguments of the base alone and an option of its own."""

    @staticmethod
    def distillation_loss_fn(student_logits, teacher_logits, scale=1.0):
        return scale * (student_logits - teacher_logits).square().mean(-1).sum()

    @classmethod
    def forward(cls, ctx, student_input, student_weight, teacher_input, teacher_weight, true_labels,
                student_bias=None, teacher_bias=None, scale=1.0):  # fmt: skip
        student = dict(student_input=student_input, student_weight=student_weight, student_bias=student_bias)
        teacher = dict(teacher_input=teacher_input, teacher_weight=teacher_weight, teacher_bias=teacher_bias)
        options = dict(temperature=1.5, return_soft_hard_loss=True, scale=scale)
        return super().forward(cls=cls, ctx=ctx, **student, **teacher, target=true_labels, **options)


class Published(Squares):
    """With a backward, as subclasses of the published base have."""

    @staticmethod
    def backward(ctx, *grads):
        return *LigerFusedLinearDistillationBase.backward(ctx, *grads)[:6], None, None


class Masked(LigerFusedLinearJSDFunction):
    """A subclass of a loss with a kernel, whose formula is its own."""

    @staticmethod
    def distillation_loss_fn(student_logits, teacher_logits, target, ignore_index, beta):
        assert beta == 0.7 and (target != ignore_index).all()
        return 2 * LigerFusedLinearJSDFunction.distillation_loss_fn(student_logits, teacher_logits, beta)


@in_every_dtype
@pytest.mark.parametrize("cls", [Squares, Published])
def test_a_formula_of_ones_own(cls, dtype):
    rows = lambda s, t, beta: 2 * (s - t).square().mean(-1)
    assert_accurate(lambda *args: cls.apply(*args, 2.0), dtype, temperature=1.5, rows=rows)
    assert_accurate(lambda *args: cls.apply(*args[:5], None, None, 2.0), dtype, bias=False, temperature=1.5, rows=rows)


@pytest.mark.parametrize("cls", [LigerFusedLinearJSDFunction, LigerFusedLinearCosineSimilarityFunction])
def test_kernel_and_formula_agree(cls):
    options = (0.2, 0.7, 0.7, -100, 2.0, True, 1024, True)
    formula = staticmethod(lambda *args, **kwargs: cls.distillation_loss_fn(*args, **kwargs))
    own = type("Own", (cls,), {"distillation_loss_fn": formula})
    args = inputs()
    found, expected = (named(of.apply(*args, *options), args) for of in (own, cls))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Twice(LigerFusedLinearJSDFunction):
    @classmethod
    def forward(cls, ctx, *args):
        return 2 * super().forward(ctx, *args)


class Again(Twice): ...


@pytest.mark.parametrize("cls, options", [(Masked, (0.0, 1.0, 0.7)), (Again, ())])
def test_a_subclass_of_a_kernels_function_is_heard(cls, options):
    """Be it of its formula or of its forward."""
    args = inputs()
    with torch.no_grad():
        torch.testing.assert_close(cls.apply(*args, *options), 2 * LigerFusedLinearJSDFunction.apply(*args, *options))


@in_every_dtype
@pytest.mark.parametrize("labels", [True, False])
def test_fused_linear_jsd(labels, dtype):
    module = LigerFusedLinearJSD(jsd_beta=0.2, temperature=1.3, accum_dtype=torch.float32)
    options = dict(hard=0.0, soft=1.0, temperature=1.3, rows=lambda s, t, beta: soft_rows(s, t, 0.2))
    target = inputs()[4] if labels else torch.zeros(M, dtype=torch.int64, device=DEVICE)
    draw = lambda seed: dict(zip(NAMES, inputs(dtype, seed)[:4]))
    ours = lambda **args: module(*args.values(), *([target] if labels else []))
    theirs = lambda **args: plain(*args.values(), target, **options)[0]
    assert_beside(ours, theirs, draw, draws=6, grads=of_loss)
    found = liger_fused_linear_jsd(*draw(0).values(), target, 0.2, -100, 1.3)
    torch.testing.assert_close(found, ours(**draw(0)), rtol=1e-4, atol=1e-4)


LOSSES = [LigerFusedLinearJSDLoss(), LigerFusedLinearCosineSimilarityLoss(), lambda *args: Squares.apply(*args)[0]]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=["jsd", "cosine", "own"])


@every_loss
def test_frozen_parts_and_no_grad(loss):
    args = inputs()
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    full = torch.autograd.grad(loss(*args), leaves)
    for i, leaf in enumerate(leaves):
        some = tuple(a if a is leaf or not isinstance(a, torch.Tensor) else a.detach() for a in args)
        torch.testing.assert_close(torch.autograd.grad(loss(*some), [leaf])[0], full[i])
    with torch.no_grad():
        value = loss(*args)
    assert not value.requires_grad
    torch.testing.assert_close(value, loss(*args).detach())


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_all_labels_ignored(loss, dtype):
    x, w, tx, tw, target, *biases = inputs(dtype)
    value = loss(x, w, tx, tw, torch.full_like(target, -100), *biases)
    value.backward()
    assert value == 0 and not x.grad.any() and not w.grad.any()


@every_loss
def test_the_ignored_may_be_anything(loss):
    x, w, tx, tw, target, *biases = inputs()
    wild = lambda t: t.detach().masked_fill((target == -100)[:, None], 1e30).requires_grad_(t.requires_grad)
    torch.testing.assert_close(loss(wild(x), w, wild(tx), tw, target, *biases), loss(x, w, tx, tw, target, *biases))


@every_loss
def test_a_teacher_that_learns_is_refused(loss):
    args = list(inputs())
    args[2] = args[2].requires_grad_()
    with pytest.raises(ValueError, match="teacher_x must not require a gradient"):
        loss(*args)
    args[2], args[3] = args[2].detach(), args[3].requires_grad_()  # a module's parameter, say
    loss(*args).backward()
    assert args[3].grad is None


@pytest.mark.parametrize("loss", LOSSES[:2], ids=["jsd", "cosine"])
def test_compiles_whole(loss):
    args = inputs()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(named(compiled(*args), args), named(loss(*args), args))


def test_sequences_of_tokens():
    x, w, tx, tw, target, *biases = inputs()
    flat = LOSSES[0](x, w, tx, tw, target, *biases)
    torch.testing.assert_close(LOSSES[0](x.view(2, 7, H), w, tx.view(2, 7, G), tw, target.view(2, 7), *biases), flat)


def test_a_cold_student_is_refused():
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        LigerFusedLinearJSDLoss(temperature=0)
