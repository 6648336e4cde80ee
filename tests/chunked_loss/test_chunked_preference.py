"""Preference losses against their formulas over all logits."""

import functools
import importlib
import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from chunk_loop import multiplications, set_chunk_rows, watch_products
from quick import in_both_dtypes

import liger_kernel.chunked_loss as losses
from liger_kernel.chunked_loss import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearSimPOLoss,
    LigerFusedLinearUnpairedPreferenceBase,
    functional,
)
from liger_kernel.testing import assert_as_accurate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, T, H, V = 3, 5, 16, 61
BETA, KL = 0.3, 0.7


def inputs(dtype=torch.float32, seed=0):
    """Policy (x, w, bias), labels with prompts, paddings and short sequences, reference, marks."""
    torch.manual_seed(seed)
    new = lambda *s, k=1.0: (k * torch.randn(*s, dtype=torch.float64)).to(DEVICE, dtype)
    target = torch.randint(0, V, (2 * B, T), device=DEVICE)
    for i in range(2 * B):
        target[i, : i % 3], target[i, T - i % 2 :] = -100, -100
    marks = torch.tensor([1, 0, 0, 1, 0, 1], dtype=torch.bool, device=DEVICE)
    leaves = (new(2 * B, T, H), new(V, H, k=0.3), new(V))
    reference = (new(2 * B, T, H), new(V, H, k=0.3), new(V))
    return tuple(t.requires_grad_() for t in leaves), target, reference, marks


def log_sigmoid(z):
    return -F.softplus(-z)


def sequences(x, w, bias, target):
    """Sums of log-probabilities (2B,), numbers of tokens (2B,), mean logits (2B, T)."""
    z = F.linear(x, w, bias)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    logp = z.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    counted = target != -100
    return logp.where(counted, 0).sum(1), counted.sum(1), z.mean(-1).where(counted, 0)


def smooth(z, e=0.2):
    return -((1 - e) * log_sigmoid(z) + e * log_sigmoid(-z))


def exo(z, e=0.2):
    q = torch.stack((log_sigmoid(z), log_sigmoid(-z)))
    p = torch.tensor([[1 - e], [e]], dtype=z.dtype, device=z.device).log()
    return (q.exp() * (q - p)).sum(0)


def popped(z, tau=0.05):
    m = torch.sigmoid(z / tau)
    return -(1 - m) * log_sigmoid(z) + m * torch.exp(-z)


# name: losses of pairs, given log-ratios of chosen and rejected
DPO = {
    "sigmoid": lambda c, r: smooth(BETA * (c - r)),
    "hinge": lambda c, r: (1 - BETA * (c - r)).clamp(min=0),
    "ipo": lambda c, r: (c - r - 1 / (2 * BETA)) ** 2,
    "sigmoid_norm": lambda c, r: smooth(BETA * (c - r)),
    "exo_pair": lambda c, r: exo(BETA * (c - r)),
    "nca_pair": lambda c, r: -log_sigmoid(BETA * c) - log_sigmoid(-BETA * c) / 2 - log_sigmoid(-BETA * r) / 2,
    "robust": lambda c, r: (-0.8 * log_sigmoid(BETA * (c - r)) + 0.2 * log_sigmoid(BETA * (r - c))) / 0.6,
    "bco_pair": lambda c, r: -log_sigmoid(BETA * c) - log_sigmoid(-BETA * r),
    "sppo_hard": lambda c, r: (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2,
    "aot": None,
    "aot_unpaired": lambda c, r: smooth(BETA * (c.sort().values - r.sort().values)),
    "apo_zero": lambda c, r: 1 - torch.sigmoid(BETA * c) + torch.sigmoid(BETA * r),
    "apo_down": lambda c, r: torch.sigmoid(BETA * c) + 1 - torch.sigmoid(BETA * (c - r)),
    "discopop": lambda c, r: popped(BETA * (c - r)),
    "sft": lambda c, r: 0 * c,
}
SMOOTHED = ("sigmoid", "sigmoid_norm", "exo_pair", "robust", "aot", "aot_unpaired")
MEANS = ("ipo", "sigmoid_norm")


def pairs(leaves, target, nll_target=None, means=False):
    logps, n, mean_logit = sequences(*leaves, target)
    own = logps / n if means else logps
    nll = -logps[:B].sum() / n[:B].sum()
    if nll_target is not None:
        other, m, _ = sequences(*leaves, nll_target)
        nll = -other[:B].sum() / m[:B].sum()
    logits = [mean_logit[half].sum() / n[half].sum() for half in (slice(0, B), slice(B, None))]
    return own[:B], own[B:], nll, logits


def dpo_formula(loss_type, alpha):
    def whole(leaves, target, reference, marks):
        means = loss_type in MEANS
        c, r, nll, logits = pairs(leaves, target, means=means)
        ref_c, ref_r, *_ = pairs(reference, target, means=means)
        if loss_type == "aot":
            each = smooth(BETA * ((c - r).sort().values - (ref_c - ref_r).sort().values))
        else:
            each = DPO[loss_type](c - ref_c, r - ref_r)
        weight = 1 if loss_type == "sft" else alpha
        rewards = BETA * (c - ref_c), BETA * (r - ref_r)
        return each.mean() + weight * nll, (c, r, *logits, nll if weight else 0 * nll, *rewards)

    return whole


def orpo(leaves, target, reference, marks, nll_target=None):
    c, r, nll, logits = pairs(leaves, target, nll_target, means=True)
    odds = (c - torch.log1p(-c.exp())) - (r - torch.log1p(-r.exp()))
    ratio = log_sigmoid(odds).mean()
    return nll - BETA * ratio, (c, r, *logits, nll, BETA * c, BETA * r, ratio, odds.mean())


def other_nll(target):
    """Other labels of the chosen: two that differ, one more, one less."""
    y = target.clone()
    y[0, :2], y[2, 0], y[1, 2] = 7, 9, -100
    return y


def cpo(leaves, target, reference, marks):
    c, r, nll, logits = pairs(leaves, target)
    return smooth(BETA * (c - r)).mean() + 0.5 * nll, (c, r, *logits, nll, BETA * c, BETA * r)


def simpo(leaves, target, reference, marks):
    c, r, nll, logits = pairs(leaves, target, means=True)
    return smooth(BETA * (c - r) - 0.4).mean() + nll, (c, r, *logits, nll, BETA * c, BETA * r)


def kto(leaves, target, reference, marks, with_reference=True):
    logps, _, mean_logit = sequences(*leaves, target)
    ratio = logps - sequences(*reference, target)[0] if with_reference else logps
    each = [
        2.0 * (1 - torch.sigmoid(BETA * (q - KL))) if good else 0.5 * (1 - torch.sigmoid(BETA * (KL - q)))
        for q, good in zip(ratio, marks.tolist())
    ]
    both = lambda t: (t[marks].sum(), t[~marks].sum())
    return torch.stack(each).mean(), (*both(logps), *both(mean_logit * V), *both(BETA * ratio))


def dpo(loss_type, **options):
    smoothing = 0.2 if loss_type in SMOOTHED else 0.0
    module = LigerFusedLinearDPOLoss(beta=BETA, loss_type=loss_type, label_smoothing=smoothing, **options)
    formula = dpo_formula(loss_type, options.get("alpha", 1.0) if options.get("compute_nll_loss") else 0)
    return module, lambda m, x, w, b, t, ref, marks: m(w, x, t, b, *ref), formula


def plain(module, formula):
    return module, lambda m, x, w, b, t, ref, marks: m(w, x, t, b), formula


CASES = {f"dpo-{loss_type}": dpo(loss_type) for loss_type in DPO} | {
    "dpo-nll": dpo("sigmoid", compute_nll_loss=True, alpha=0.7),
    "orpo": plain(LigerFusedLinearORPOLoss(beta=BETA), orpo),
    "orpo-nll_target": (
        LigerFusedLinearORPOLoss(beta=BETA),
        lambda m, x, w, b, t, ref, marks: m(w, x, t, b, other_nll(t)),
        lambda leaves, target, *rest: orpo(leaves, target, *rest, nll_target=other_nll(target)),
    ),
    "cpo": plain(LigerFusedLinearCPOLoss(beta=BETA, alpha=0.5, label_smoothing=0.2), cpo),
    "simpo": plain(LigerFusedLinearSimPOLoss(beta=BETA, gamma=0.4, label_smoothing=0.2), simpo),
    "kto": (
        LigerFusedLinearKTOLoss(beta=BETA, use_ref_model=True, desirable_weight=2.0, undesirable_weight=0.5),
        lambda m, x, w, b, t, ref, marks: m(x, w, t, b, marks, *ref, torch.full((1,), KL, device=DEVICE)),
        kto,
    ),
    "kto-no-reference": (
        LigerFusedLinearKTOLoss(beta=BETA, desirable_weight=2.0, undesirable_weight=0.5),
        lambda m, x, w, b, t, ref, marks: m(x, w, t, b, marks, kl=KL),
        lambda *args: kto(*args, with_reference=False),
    ),
}


def named(result, leaves):
    loss, metrics = result
    grads = torch.autograd.grad(3 * loss, leaves)
    found = {"out": loss.detach()} | {f"metric{i}": m.detach() for i, m in enumerate(metrics)}
    return found | {f"d{k}": g for k, g in zip(("x", "w", "bias"), grads)}


def ours(case, dtype=torch.float32, seed=0, compact=True):
    module, call, _ = CASES[case]
    module.compact = compact
    (x, w, bias), target, reference, marks = inputs(dtype, seed)
    return named(call(module, x, w, bias, target, reference, marks), (x, w, bias))


def expected(case, dtype, seed=0):
    """PyTorch's results in ``dtype``, the true ones."""
    formula = CASES[case][2]
    leaves, target, reference, marks = inputs(dtype, seed)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    truth = named(formula(exact, target, [t.double() for t in reference], marks), exact)
    return named(formula(leaves, target, reference, marks), leaves), truth


@pytest.fixture
def chunks(monkeypatch):
    """Chunks of so many tokens."""
    return lambda rows: set_chunk_rows(monkeypatch, rows)


@pytest.mark.parametrize("case, dtype", in_both_dtypes(CASES, "dpo-sigmoid", "orpo-nll_target"))
def test_as_accurate_as_the_formula(case, dtype, chunks):
    chunks(2 * T)
    draws = [expected(case, dtype, seed) for seed in range(8)]
    (pytorch, truth), *others = draws
    assert_as_accurate(ours(case, dtype), pytorch, truth, *others, again=lambda seed: ours(case, dtype, seed))


def short(*cases: str, slow: tuple[str, ...]) -> list:
    """``cases``, and those that are slow in the interpreter."""
    return [*cases, *(pytest.param(c, marks=[pytest.mark.slow] * (DEVICE == "cpu")) for c in slow)]


@pytest.mark.parametrize("case", ["dpo-sigmoid", "dpo-aot", "orpo", "orpo-nll_target", "kto"])
def test_ignored_tokens_may_hold_anything(case):
    module, call, _ = CASES[case]
    module.compact = True
    results = []
    for fill in (0.0, float("nan")):
        (x, w, bias), target, reference, marks = inputs()
        ignored = (target == -100) & (other_nll(target) == -100) if "nll_target" in case else target == -100
        x = x.detach().masked_fill(ignored[..., None], fill).requires_grad_()
        reference = (reference[0].masked_fill(ignored[..., None], fill), *reference[1:])
        results.append(named(call(module, x, w, bias, target, reference, marks), (x, w, bias)))
    for a, b in zip(results[0].values(), results[1].values()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case, products", [("dpo-sigmoid", 4), ("cpo", 3), ("kto-no-reference", 3), ("dpo-aot", 5)])
def test_products_and_no_full_logits(case, products, chunks, monkeypatch):
    """Three, one for the reference, one for a loss of the whole batch; of counted tokens alone."""
    chunks(2 * T)
    seen = watch_products(monkeypatch)
    ours(case)
    counted = int((inputs()[1] != -100).sum())
    assert multiplications(seen) == products * counted * H * V
    assert max(rows for rows, _, columns in seen if columns == V) <= 2 * T < counted


@pytest.mark.parametrize("case", short("orpo-nll_target", slow=("dpo-sigmoid", "dpo-aot", "simpo", "kto")))
def test_compiles_whole(case):
    module, call, _ = CASES[case]
    leaves, target, reference, marks = inputs()
    compiled = torch.compile(lambda *args: call(module, *args), fullgraph=True, backend="aot_eager")
    found = named(compiled(*leaves, target, reference, marks), leaves)
    torch.testing.assert_close(found, ours(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "aot"])
def test_reference_log_probabilities_known_before(loss_type):
    (x, w, bias), target, reference, marks = inputs()
    module = LigerFusedLinearDPOLoss(beta=BETA, loss_type=loss_type)
    with torch.no_grad():
        known = sequences(*reference, target)[0]
    a = named(module(w, x, target, bias, ref_chosen_logps=known[:B], ref_rejected_logps=known[B:]), (x, w, bias))
    torch.testing.assert_close(a, named(module(w, x, target, bias, *reference), (x, w, bias)))
    module = functools.partial(LigerFusedLinearKTOLoss(beta=BETA, use_ref_model=True), x, w, target, bias, marks)
    torch.testing.assert_close(module(ref_logps=known), module(*reference))


def test_a_reference_given_is_used():
    """Under KTO's default as with ``use_ref_model=True``; DPO leaves it out where it is told to."""
    (x, w, bias), target, reference, marks = inputs()
    kto = [LigerFusedLinearKTOLoss(beta=BETA, use_ref_model=used) for used in (False, True)]
    first, second = (loss(x, w, target, bias, marks, *reference)[0] for loss in kto)
    assert first == second
    alone = LigerFusedLinearDPOLoss(beta=BETA, use_ref_model=False)
    assert alone(w, x, target, bias, *reference)[0] == alone(w, x, target, bias)[0]


def test_sequences_without_tokens():
    leaves, target, reference, _ = inputs()
    target[0] = target[B + 1] = -100
    x, w, bias = leaves
    ipo = functools.partial(LigerFusedLinearDPOLoss(loss_type="ipo"), ref_input=reference[0])
    ipo = functools.partial(ipo, ref_weight=reference[1], ref_bias=reference[2])
    for module in (LigerFusedLinearORPOLoss(), LigerFusedLinearSimPOLoss(), ipo):
        result = named(module(w, x, target, bias), leaves)
        assert all(t.isfinite().all() for t in result.values())
        assert not result["dx"][target == -100].any()
    loss, (chosen, *_) = LigerFusedLinearCPOLoss()(w, x[:0], target[:0])
    assert loss == 0 and chosen.shape == (0,)


def test_strides_and_mixed_dtypes():
    (x, w, bias), target, reference, _ = inputs()
    wide = torch.cat((x, x), 1)[:, :T].transpose(1, 2).contiguous().transpose(1, 2)
    module = LigerFusedLinearDPOLoss(beta=BETA)
    torch.testing.assert_close(module(w, wide, target, bias, *reference), module(w, x, target, bias, *reference))
    mixed = module(w.bfloat16(), x, target, bias, reference[0], *reference[1:])[0]
    torch.testing.assert_close(mixed, module(w.bfloat16().float(), x, target, bias, *reference)[0])
    low = [t.bfloat16() for t in (w, x, bias, *reference)]
    with torch.autocast(DEVICE, torch.bfloat16):
        under_autocast = module(w, x, target, bias, *reference)[0]
    assert under_autocast == module(low[0], low[1], target, *low[2:])[0]


def test_function_and_module_agree():
    for name in ("ORPO", "DPO", "CPO", "SimPO", "KTO"):
        function, module = (getattr(losses, f"LigerFusedLinear{name}{kind}") for kind in ("Function", "Loss"))
        of = lambda f: {k: p.default for k, p in inspect.signature(f).parameters.items() if p.default is not p.empty}
        options = of(module.__init__)
        assert vars(module()).items() >= options.items()
        if name == "SimPO":  # published so
            assert options.pop("compute_nll_loss") and not of(function.forward)["compute_nll_loss"]
        assert options == {k: v for k, v in of(function.forward).items() if k in options}
        assert getattr(functional, f"liger_fused_linear_{name.lower()}") == function.apply
    (x, w, bias), target, reference, _ = inputs()
    by_function = functional.liger_fused_linear_dpo(x, w, target, bias, *reference, -100, BETA)
    torch.testing.assert_close(by_function, LigerFusedLinearDPOLoss(beta=BETA)(w, x, target, bias, *reference))


DPO_, ORPO_, CPO_, KTO_ = (getattr(losses, f"LigerFusedLinear{name}Loss") for name in ("DPO", "ORPO", "CPO", "KTO"))


@pytest.mark.parametrize(
    "call, argument, got",
    [
        (lambda x, w, t: ORPO_()(w, x[0], t), "_input", "(5, 16)"),
        (lambda x, w, t: ORPO_()(w, x[1:], t[1:]), "_input", "5"),
        (lambda x, w, t: CPO_()(w, x, t[1:]), "target", "(5, 5)"),
        (lambda x, w, t: ORPO_()(w, x, t, None, t[:1]), "nll_target", "(1, 5)"),
        (lambda x, w, t: DPO_()(w, x, t), "ref_chosen_logps and ref_rejected_logps,", "None"),
        (lambda x, w, t: DPO_()(w, x, t, None, x[1:], w), "ref_input", "(5, 5, 16)"),
        (lambda x, w, t: DPO_(loss_type="best"), "loss_type", "'best'"),
        (lambda x, w, t: DPO_(loss_type="hinge", label_smoothing=0.1), "label_smoothing", "0.1"),
        (lambda x, w, t: DPO_(loss_type="robust", label_smoothing=0.5), "label_smoothing", "0.5"),
        (lambda x, w, t: DPO_(loss_type="exo_pair"), "label_smoothing", "0.0"),
        (lambda x, w, t: KTO_()(x, w, t), "preference_labels", "None"),
        (lambda x, w, t: KTO_()(x, w, t, None, t[:, 0], kl=x[0, 0]), "kl", "shape (16,)"),
        (lambda x, w, t: KTO_(use_ref_model=True)(x, w, t, None, t[:, 0]), "ref_logps,", "None"),
    ],
)
def test_mistakes_are_named(call, argument, got):
    (x, w, _), target, *_ = inputs()
    said = rf"^LigerFusedLinear\w+: .*{re.escape(argument)} must .*, got {re.escape(got)}$"
    with pytest.raises(ValueError, match=said):
        call(x, w, target)


class Squared(LigerFusedLinearPreferenceBase):
    """As users wrote theirs: options by position, gradients padded."""

    @staticmethod
    def preference_loss_fn(
        chosen_logps, rejected_logps, full_target, ref_chosen_logps=None, ref_rejected_logps=None, beta=0.1, shift=0.0
    ):
        gap = chosen_logps - rejected_logps - (ref_chosen_logps - ref_rejected_logps)
        return (beta * gap - shift).square().sum() / (full_target.shape[0] // 2), gap, gap.sum()

    @classmethod
    def forward(cls, ctx, _input, weight, target, bias, ref_input, ref_weight, ref_bias, shift):
        reference = dict(use_ref_model=True, ref_input=ref_input, ref_weight=ref_weight, ref_bias=ref_bias)
        own = dict(cls=cls, ctx=ctx, _input=_input, weight=weight, target=target, bias=bias)
        options = dict(chunk_size=1, beta=BETA, compute_nll_loss=False, compiled=False, average_log_prob=False)
        return super().forward(**own, **reference, **options, shift=shift)

    @staticmethod
    def backward(ctx, *grad_output):
        return *LigerFusedLinearPreferenceBase.backward(ctx, grad_output)[:4], None, None, None, None


class Likelihood(LigerFusedLinearUnpairedPreferenceBase):
    @staticmethod
    def preference_loss_fn(log_prob_chunk, preference_labels_chunk, full_target, scale=1.0):
        signed = log_prob_chunk.where(preference_labels_chunk, -log_prob_chunk)
        return -scale * signed.sum() / full_target.shape[0], signed.sum(), signed


def test_losses_of_users(chunks):
    chunks(2 * T)
    (x, w, bias), target, reference, marks = inputs()
    (c, r, *_), (ref_c, ref_r, *_) = pairs((x, w, bias), target), pairs(reference, target)
    gap = c - r - ref_c + ref_r
    loss, (chosen, *_, each, total) = Squared.apply(x, w, target, bias, *reference, 0.5)
    torch.testing.assert_close((chosen, each, total), (c.detach(), gap.detach(), gap.sum().detach()))
    truth = (BETA * gap - 0.5).square().mean()
    leaves, near = (x, w, bias), dict(rtol=1e-4, atol=1e-6)
    expected = torch.autograd.grad(truth, leaves, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), expected, **near)

    logps = sequences(x, w, bias, target)[0]
    signed = torch.where(marks, logps, -logps)
    loss, (chosen, rejected, _, _, total, each) = Likelihood.apply(x, w, target, marks, bias, scale=2.0)
    torch.testing.assert_close((chosen - rejected, total, each), (total, signed.sum().detach(), signed.detach()))
    torch.testing.assert_close(torch.autograd.grad(loss, w), torch.autograd.grad(-2 * signed.mean(), w), **near)


@pytest.mark.parametrize(
    ("kind", "whole"), [("dpo", False), ("dpo", True), ("kto", False), ("kto", True), ("grpo", False)]
)
def test_a_reference_equal_to_the_policy_has_its_log_probabilities_in_every_bit(kind, whole, monkeypatch):
    """Otherwise a run does not begin at a loss of log 2, and its first rewards are noise."""
    set_chunk_rows(monkeypatch, lambda M, *_: max(1, min(M, 7)))
    linear = importlib.import_module("liger_kernel.ops.losses.chunks")
    product = linear.add_mm

    def of_these_rows(total, a, b, first):
        """A GPU's product: what a row of it is rounded to may depend on the rows beside it."""
        product(total, a, b, first)
        total += a.mean() * torch.arange(total.shape[1], device=DEVICE)

    monkeypatch.setattr(linear, "add_mm", of_these_rows)
    torch.manual_seed(0)
    x, w = torch.randn(8, 5, 256, device=DEVICE).bfloat16(), torch.randn(301, 256, device=DEVICE).bfloat16()
    target = torch.randint(0, 301, (8, 5), device=DEVICE)
    target[torch.rand(8, 5, device=DEVICE) < 0.4] = -100
    same, seen = dict(ref_input=x, ref_weight=w, use_ref_model=True), []

    class Pairs(LigerFusedLinearPreferenceBase):
        @staticmethod
        def preference_loss_fn(chosen, rejected, target, ref_chosen_logps, ref_rejected_logps, **_):
            seen.extend(((chosen, ref_chosen_logps), (rejected, ref_rejected_logps)))
            return chosen.sum()

    class Alone(LigerFusedLinearUnpairedPreferenceBase):
        @staticmethod
        def preference_loss_fn(logp, labels, target, ref_log_prob_chunk, **_):
            seen.append((logp, ref_log_prob_chunk))
            return logp.sum()

    if kind == "dpo":
        Pairs.apply(x, w, target, whole_batch=whole, **same)
    elif kind == "kto":
        Alone.apply(x, w, target, preference_labels=[True, False] * 4, whole_batch=whole, **same)
    else:
        grpo = losses.LigerFusedLinearGRPOLoss(beta=0.1, use_ref_model=True)
        given = x, w, target.clamp(min=0), target != -100, torch.randn(8, device=DEVICE)
        _, (divergence, *_) = grpo(*given, ref_input=x, ref_weight=w)
        seen.append((divergence, torch.zeros_like(divergence)))
    assert seen
    for policy, reference in seen:
        assert torch.equal(policy, reference)


@pytest.mark.parametrize("shape", [(0,), (0, 8)], ids=["zero-3", "fsdp2"])
@pytest.mark.parametrize("name", ["DPO", "ORPO", "CPO", "SimPO", "KTO", "GRPO", "JSD"])
def test_the_empty_shard_of_a_head_is_named(name, shape):
    """What ZeRO-3, or a rank of FSDP2 that has no rows, leaves of a head outside its forward."""
    x, y = torch.randn(4, 5, 8, device=DEVICE), torch.zeros(4, 5, dtype=torch.int64, device=DEVICE)
    w, marks = torch.empty(shape, device=DEVICE), torch.tensor([True, False] * 2, device=DEVICE)
    loss = getattr(losses, f"LigerFusedLinear{name}Loss")
    calls = {
        "KTO": lambda: loss(use_ref_model=False)(x, w, y, preference_labels=marks),
        "GRPO": lambda: loss(beta=0.0)(x, w, y, torch.ones(4, 5, device=DEVICE), torch.ones(4, device=DEVICE)),
        "JSD": lambda: loss()(x.flatten(0, 1), w, x.flatten(0, 1), w, y.flatten()),
        "DPO": lambda: loss(use_ref_model=False)(w, x, y),
    }
    said = r"w must have shape \(V, 8\), got \(0,.*\): gather a sharded head before its loss"
    with pytest.raises(ValueError, match=said):
        calls.get(name, lambda: loss()(w, x, y))()
