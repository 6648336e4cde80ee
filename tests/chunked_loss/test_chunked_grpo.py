"""GRPO and its kin against the formulas, sequence by sequence on full logits."""

import importlib
import types

import pytest
import torch
import torch.nn.functional as F
from chunk_loop import multiplications, set_chunk_rows, watch_products
from devices import DEVICE, assert_beside
from quick import further, in_both_dtypes
from watching import Watch

from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from liger_kernel.chunked_loss.grpo_loss import (
    LigerFusedLinearGRPOFunction,
    LigerFusedLinearGRPOLoss,
    clip_coef_fn,
    k3_loss_fn,
    sapo_loss_fn,
)
from liger_kernel.ops.losses.grpo_loss import LOSS_TYPES, OF_TOKENS, fused_selective_log_softmax, triton_grpo_loss
from liger_kernel.testing import assert_same_bits

B, T, H, V = 5, 6, 16, 61
LEVELS = ("token", "sequence")
PAIRS = [(kind, level) for kind in LOSS_TYPES for level in LEVELS if level == "token" or kind not in OF_TOKENS]


@pytest.fixture(autouse=True)
def two_sequences_a_chunk(monkeypatch):
    set_chunk_rows(monkeypatch, 2 * T)


def batch(
    dtype=torch.float32, seed=0, level="token", advantages="sequence", ratio=None, old=True, ref="logps", bias=True
):
    """Arguments of the module's forward; ratios keep away from where clipping begins."""
    torch.manual_seed(seed)
    rand = lambda *s, k=1.0: k * torch.randn(*s, device=DEVICE, dtype=torch.float64)
    x, w, b = (t.to(dtype).requires_grad_() for t in (rand(B, T, H), rand(V, H, k=0.3), rand(V)))
    b = b if bias else None
    ids = torch.randint(0, V, (B, T), device=DEVICE)
    mask = torch.ones(B, T, dtype=torch.int64, device=DEVICE)
    mask[1, 2:4] = 0  # what a tool said
    mask[2] = 0
    mask[3, 1:] = 0
    logp = logprobs(*(t if t is None else t.detach().double() for t in (x, w, b)), ids, 0.9)[0]
    steps = torch.tensor([0.5, -0.5, 0.05, -0.05, 0.6], device=DEVICE, dtype=torch.float64)
    away = (
        steps[torch.randint(0, 5, (B, T), device=DEVICE)]
        if level == "token"
        else steps[torch.arange(B, device=DEVICE) % 5, None].expand(B, T)
    )
    args = dict(_input=x, lin_weight=w, selected_token_ids=ids, attention_mask=mask, bias=b)
    args["advantages"] = {"sequence": rand(B), "column": rand(B, 1), "token": rand(B, T)}[advantages].float()
    args["old_per_token_logps"] = (logp - away + rand(B, T, k=0.01)).float() if old else None
    if ref == "logps":
        args["ref_per_token_logps"] = (logp + rand(B, T, k=0.5)).float()
    elif ref == "hidden":
        args |= dict(
            ref_input=rand(B, T, H).to(dtype),
            ref_weight=rand(V, H, k=0.3).to(dtype),
            ref_bias=b if b is None else b.detach() * 0.5,
        )
    if ratio:
        args["vllm_is_ratio"] = rand(B, {"token": T, "sequence": 1}[ratio], k=0.3).exp().float()
    return args


def logprobs(x, w, b, ids, temperature):
    z = F.linear(x, w, b)
    log_p = (z.to(torch.promote_types(z.dtype, torch.float32)) / temperature).log_softmax(-1)
    return log_p.gather(-1, ids[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def sequence(o, lp, old, ref, A, ratio):
    """Losses, divergences and clipping of a sequence's own tokens, (n,) each."""
    log_r = lp - (lp.detach() if old is None else old)
    r = log_r.exp() if o.get("importance_sampling_level", "token") == "token" else log_r.mean().exp().expand_as(lp)
    kind, never = o.get("loss_type", "dapo"), torch.zeros_like(lp, dtype=torch.bool)
    low, high = o.get("epsilon_low", 0.2), o.get("epsilon_high", 0.2)
    if kind == "cispo":
        loss, clipped = -r.detach().minimum(torch.full_like(r, high)) * A * lp, (r > high) & (A > 0)
    elif kind == "sapo":
        t = torch.tensor(
            [o.get("sapo_temperature_pos", 1.0) if a > 0 else o.get("sapo_temperature_neg", 1.05) for a in A.tolist()],
            dtype=lp.dtype,
        )
        t = t.to(lp.device)
        loss, clipped = -A * 4 / t / (1 + torch.exp(-t * (r - 1))), never
    elif kind == "vespo":
        W = log_r.detach().exp().prod() * (
            1 if ratio is None else ratio[0] if o["ratio"] == "sequence" else ratio.prod()
        )
        phi = torch.stack(
            [W**k * torch.exp(rate * (1 - W)) for k, rate in ((2.0, 3.0) if a >= 0 else (3.0, 2.0) for a in A.tolist())]
        )
        loss, clipped = -phi * A * lp, never
    else:
        first = r if o.get("delta") is None else torch.where(r > o["delta"], o["delta"], r)
        second = torch.where(r < 1 - low, 1 - low, torch.where(r > 1 + high, 1 + high, r))
        loss = -torch.where(first * A < second * A, first * A, second * A)
        clipped = ((first < 1 - low) & (A < 0)) | ((first > 1 + high) & (A > 0))
    if ratio is not None and kind != "vespo":
        loss = loss * ratio
    kl = torch.zeros_like(lp)
    if o.get("beta", 0.04) and ref is not None:
        kl = (ref - lp).exp() - (ref - lp) - 1
        kl = kl * r if o.get("use_bias_correction_kl") else kl
    return loss + o.get("beta", 0.04) * kl, kl, clipped


def whole(o, args):
    """Loss and metrics, named, in the dtype of the arguments."""
    a = types.SimpleNamespace(**dict(ref_per_token_logps=None, vllm_is_ratio=None, num_items_in_batch=None) | args)
    logp, entropy = logprobs(a._input, a.lin_weight, a.bias, a.selected_token_ids, o.get("temperature", 1.0))
    wide = lambda t: t if t is None else (t if t.ndim == 2 else t[:, None]).to(logp.dtype).expand(B, T)
    ref = a.ref_per_token_logps
    if "ref_input" in args:
        ref = logprobs(a.ref_input, a.ref_weight, a.ref_bias, a.selected_token_ids, o.get("temperature", 1.0))[0]
    keep = [a.attention_mask[i] != 0 for i in range(B)]
    pick = lambda t, i: None if t is None else wide(t)[i][keep[i]]
    found = [
        sequence(o, *(pick(t, i) for t in (logp, a.old_per_token_logps, ref, a.advantages, a.vllm_is_ratio)))
        for i in range(B)
        if keep[i].any()
    ]
    tokens, kind = sum(len(f[0]) for f in found), o.get("loss_type", "dapo")
    total = sum(f[0].sum() for f in found)
    if kind in ("grpo", "sapo"):
        loss = sum(f[0].mean() for f in found) / B
    else:
        items = tokens if kind == "bnpo" or a.num_items_in_batch is None else a.num_items_in_batch
        loss = total / {"dr_grpo": B * o.get("max_completion_length", 1), "luspo": B}.get(kind, items)
    mean = lambda parts: torch.cat(parts).to(logp.dtype).sum() / tokens
    h, metrics = mean([entropy[i][keep[i]] for i in range(B)]), []
    if o.get("beta", 0.04):
        metrics.append(mean([f[1] for f in found]))
    if o.get("entropy_coef") or o.get("return_entropy"):
        metrics.append(h)
    return loss - o.get("entropy_coef", 0.0) * h, (*metrics, mean([f[2] for f in found]))


def flat(result):
    return result[0], *result[1]


def of_loss(outs):
    return {"out0": torch.full_like(outs["out0"], 3.0)}


def named(result, args):
    loss, metrics = result
    leaves = {k: t for k, t in args.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    grads = torch.autograd.grad(3 * loss, list(leaves.values()))
    return {
        "loss": loss.detach(),
        **{f"m{i}": m.detach() for i, m in enumerate(metrics)},
        **{f"d{k}": g for k, g in zip(leaves, grads)},
    }


def module(o, **more):
    return LigerFusedLinearGRPOLoss(**{k: v for k, v in o.items() if k not in DATA}, **more)


# Options of the module, and those of ``batch`` and of the call.
DATA = ("advantages", "ratio", "old", "ref", "bias", "num_items_in_batch")
CASES = {f"{kind}-{level}": dict(loss_type=kind, importance_sampling_level=level) for kind, level in PAIRS} | {
    "defaults": dict(),
    "asymmetric": dict(loss_type="dapo", epsilon_low=0.15, epsilon_high=0.28, temperature=0.7, bias=False),
    "two-sided": dict(loss_type="grpo", delta=1.5),
    "two-sided-tight": dict(loss_type="dapo", delta=1.05, epsilon_high=0.3),
    "ratio-token": dict(loss_type="dapo", ratio="token"),
    "ratio-sequence": dict(loss_type="grpo", ratio="sequence", importance_sampling_level="sequence"),
    "cispo-ratio": dict(loss_type="cispo", ratio="token", num_items_in_batch=70),
    "vespo-ratio-token": dict(loss_type="vespo", ratio="token"),
    "vespo-ratio-sequence": dict(loss_type="vespo", ratio="sequence", advantages="token"),
    "kl-corrected": dict(loss_type="grpo", use_bias_correction_kl=True, beta=0.3),
    "kl-corrected-sequence": dict(
        loss_type="bnpo", use_bias_correction_kl=True, beta=0.3, importance_sampling_level="sequence", delta=1.5
    ),
    "no-kl": dict(loss_type="dapo", beta=0.0, ref=None),
    "itself-as-reference": dict(loss_type="dapo", beta=0.5, ref=None, use_ref_model=False),
    "reference-model": dict(loss_type="bnpo", beta=0.5, ref="hidden", temperature=0.8),
    "on-policy": dict(loss_type="grpo", old=False),
    "on-policy-sequence": dict(loss_type="luspo", old=False, importance_sampling_level="sequence"),
    "advantages-of-tokens": dict(loss_type="dapo", advantages="token"),
    "advantages-of-tokens-sapo": dict(
        loss_type="sapo", advantages="token", sapo_temperature_pos=0.7, sapo_temperature_neg=2.0
    ),
    "advantages-column": dict(loss_type="grpo", advantages="column"),
    "num-items": dict(loss_type="dapo", num_items_in_batch=70),
    "entropy": dict(loss_type="grpo", entropy_coef=0.2),
    "entropy-no-kl": dict(loss_type="cispo", beta=0.0, return_entropy=True, epsilon_high=1.3, ref=None),
}
for _o in CASES.values():
    if _o.get("loss_type") == "dr_grpo":
        _o["max_completion_length"] = 9
    if _o.get("loss_type") == "cispo":
        _o["epsilon_high"] = 1.3


def inputs(o, dtype=torch.float32, seed=0):
    options = {k: o[k] for k in DATA if k in o and k != "num_items_in_batch"}
    args = batch(dtype, seed, o.get("importance_sampling_level", "token"), **options)
    if "num_items_in_batch" in o:
        args["num_items_in_batch"] = torch.tensor(o["num_items_in_batch"], device=DEVICE)
    return args


@pytest.mark.parametrize("case, dtype", in_both_dtypes(CASES, "defaults", "grpo-sequence", "entropy"))
def test_as_accurate_as_the_formula(case, dtype):
    o = CASES[case]
    ours, theirs = lambda **args: flat(module(o)(**args)), lambda **args: flat(whole(o, args))
    assert_beside(ours, theirs, lambda seed: inputs(o, dtype, seed), draws=5, grads=of_loss)


@pytest.mark.parametrize("case", ["defaults", "grpo-sequence", "vespo-token", "entropy", "reference-model"])
def test_compact_or_not(case):
    args = inputs(CASES[case])
    found, expected = (named(module(CASES[case], **how)(**args), args) for how in (dict(compact=False), {}))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_what_is_masked_has_no_effect(kind, compact):
    args = batch(ratio="token", advantages="token")
    out = args["attention_mask"] == 0
    poisoned = dict(args, selected_token_ids=args["selected_token_ids"].masked_fill(out, -100))
    for name in ("advantages", "old_per_token_logps", "ref_per_token_logps", "vllm_is_ratio"):
        poisoned[name] = args[name].masked_fill(out, float("nan"))
    poisoned["attention_mask"] = args["attention_mask"].to(torch.bool if compact else torch.bfloat16)
    loss = LigerFusedLinearGRPOLoss(loss_type=kind, max_completion_length=T, compact=compact, entropy_coef=0.1)
    assert_same_bits(named(loss(**poisoned), args), named(loss(**args), args))


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_all_masked(kind, compact):
    args = batch()
    args["attention_mask"] = torch.zeros_like(args["attention_mask"])
    loss = LigerFusedLinearGRPOLoss(loss_type=kind, max_completion_length=T, compact=compact, entropy_coef=0.1)
    assert all((t == 0).all() for t in named(loss(**args), args).values())


@pytest.mark.parametrize("shape", [(0, T), (B, 0)])
@pytest.mark.parametrize("level", LEVELS)
def test_empty(shape, level):
    x = torch.randn(*shape, H, device=DEVICE, requires_grad=True)
    w = torch.randn(V, H, device=DEVICE, requires_grad=True)
    ids = torch.zeros(shape, dtype=torch.int64, device=DEVICE)
    loss, metrics = LigerFusedLinearGRPOLoss(beta=0.0, importance_sampling_level=level)(
        x, w, ids, ids + 1, torch.ones(shape[0], device=DEVICE)
    )
    loss.backward()
    assert loss == 0 and metrics[-1] == 0 and not w.grad.any()


def test_only_the_head_is_differentiated():
    args = {
        k: t.detach().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for k, t in batch(ratio="token").items()
    }
    loss, metrics = module({})(**args)
    with torch.no_grad():
        constant, same = module({})(**args)
    assert not any(t.requires_grad for t in (*metrics, constant, *same))
    assert_same_bits(dict(enumerate((constant, *same))), dict(enumerate((loss.detach(), *metrics))))
    loss.backward()
    learns = {k for k, t in args.items() if isinstance(t, torch.Tensor) and t.grad is not None}
    assert learns == {"_input", "lin_weight", "bias"}


def test_no_full_logits_and_three_products(monkeypatch):
    args = batch(ref="hidden") | dict(attention_mask=torch.ones(B, T, dtype=torch.int64, device=DEVICE))
    products = watch_products(monkeypatch)
    with Watch() as seen:
        loss, _ = LigerFusedLinearGRPOLoss(entropy_coef=0.1)(**args)
        loss.backward()
    assert seen.largest <= max(2 * T * V, H * V)
    assert multiplications(products) == 4 * B * T * H * V  # one of them for the reference


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_waits_for_nothing(kind):
    args = batch(ratio="token")
    loss = LigerFusedLinearGRPOLoss(loss_type=kind, max_completion_length=T, compact=False, entropy_coef=0.1)
    with Watch() as seen:
        loss(**args)[0].backward()
    assert not {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"} & set(seen.names)


@pytest.mark.parametrize("kind, level", PAIRS)
def test_few_kernels_a_chunk(kind, level):
    """With divergence and metrics; each takes some microseconds, and a chunk some milliseconds."""
    args = batch()
    logp = torch.randn(B, T, device=DEVICE, requires_grad=True)
    names, mask = ("advantages", "ref_per_token_logps", "old_per_token_logps"), args["attention_mask"].float()
    options = dict(n=3, tokens=mask.sum(), loss_type=kind, importance_sampling_level=level)
    options |= {k: args[k] for k in names}
    with Watch() as seen:
        loss, _ = LigerFusedLinearGRPOFunction.ppo_loss_fn(logp, mask, full_attention_mask=mask, **options)
        torch.autograd.grad(loss, logp)
    views = ("view", "_unsafe_view", "slice", "detach", "alias", "expand", "unsqueeze", "empty", "_to_copy")
    assert len([name for name in seen.names if name not in views]) <= 60


@pytest.mark.parametrize("case", ["grpo-sequence", *further("entropy", "vespo-ratio-token", "reference-model")])
def test_compiles_whole(case):
    args, loss = inputs(CASES[case]), module(CASES[case])
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(named(compiled(**args), args), named(loss(**args), args))


def test_given_logits_compile():
    args, logits = given_logits()
    fn = lambda z: of_logits(args, z, reduce=True)
    eager, compiled = fn(logits), torch.compile(fn, fullgraph=True, backend="aot_eager")(logits)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(torch.autograd.grad(compiled[0], logits), torch.autograd.grad(eager[0], logits))


def test_tokens_of_all_ranks(monkeypatch):
    """Here of two, the other one of which has three times as many."""
    args = batch()
    alone = module({})(**args)[0]
    dist = importlib.import_module("liger_kernel.ops.grpo_loss").dist
    calls = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda t: calls.append(t.mul_(4)))
    torch.testing.assert_close(module({})(**args)[0], alone / 2)
    assert len(calls) == 1
    tokens = args["attention_mask"].sum()
    torch.testing.assert_close(module({})(**args, num_items_in_batch=tokens * 4)[0], alone / 2)
    torch.testing.assert_close(module({})(**args, num_items_in_batch=4 * tokens.item())[0], alone / 2)
    assert len(calls) == 1


class Reinforce(LigerFusedLinearPPOBase):
    @staticmethod
    def ppo_loss_fn(per_token_logps, attention_mask, advantages, full_attention_mask, **kwargs):
        loss = -(per_token_logps * advantages[:, None] * attention_mask).sum() / full_attention_mask.sum()
        return loss, [per_token_logps.sum(-1), (per_token_logps < -1).sum()]


class ReinforceWithForward(Reinforce):
    @classmethod
    def forward(cls, ctx, _input, weight, ids, mask, advantages, bias=None, temperature=1.0):
        own = dict(cls=cls, ctx=ctx, _input=_input, weight=weight, bias=bias, advantages=advantages)
        more = dict(temperature=temperature, beta=0.0, compiled=False)
        return super().forward(**own, selected_token_ids=ids, attention_mask=mask, **more)


@pytest.mark.parametrize("mine", [Reinforce, ReinforceWithForward])
def test_a_loss_of_the_users(mine):
    args = batch()
    names = ("_input", "lin_weight", "selected_token_ids", "attention_mask", "advantages", "bias")
    x, w, ids, mask, A, b = (args[k] for k in names)
    loss, (sums, few) = mine.apply(x, w, ids, mask, A, b)
    logp = logprobs(x, w, b, ids, 1.0)[0] * mask
    expected = -(logp * A[:, None]).sum() / mask.sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(sums, logp.sum(-1))
    assert few == (logp < -1).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, (x, w, b)), torch.autograd.grad(expected, (x, w, b)))


def test_base_has_no_loss():
    args = batch()
    names = ("_input", "lin_weight", "selected_token_ids", "attention_mask", "advantages")
    with pytest.raises(NotImplementedError, match="ppo_loss_fn"):
        LigerFusedLinearPPOBase.apply(*(args[k] for k in names))


def test_function_in_the_published_order():
    """Numbers by position, from beta on."""
    args = batch()
    names = ["_input", "lin_weight", "selected_token_ids", "attention_mask", "advantages", "bias"]
    first = [args[k] for k in (*names, "ref_per_token_logps", "old_per_token_logps")]
    numbers = (0.1, 0.15, 0.3, "luspo", 7, "sequence", 0.9, 1.2, 0.8, False, True, 1, None, None, True)
    loss, metrics = LigerFusedLinearGRPOFunction.apply(*first, None, None, None, *numbers)
    options = dict(beta=0.1, epsilon_low=0.15, epsilon_high=0.3, loss_type="luspo", temperature=0.8)
    options |= dict(importance_sampling_level="sequence", use_bias_correction_kl=True)
    same = LigerFusedLinearGRPOLoss(**options)(**args)
    assert_same_bits({"loss": loss.detach(), "kl": metrics[0]}, {"loss": same[0].detach(), "kl": same[1][0]})


def test_the_loss_of_some_sequences_is_its_own_function():
    """As the published ``ppo_loss_fn`` is called, which knows nothing of the whole batch."""
    args = batch()
    logp = logprobs(args["_input"], args["lin_weight"], args["bias"], args["selected_token_ids"], 1.0)[0]
    names = ("attention_mask", "advantages", "ref_per_token_logps", "old_per_token_logps")
    part = lambda s: LigerFusedLinearGRPOFunction.ppo_loss_fn(
        logp[s], full_attention_mask=args["attention_mask"], **{k: args[k][s] for k in names}
    )
    (a, (kl_a, _)), (b, (kl_b, _)) = part(slice(0, 2)), part(slice(2, B))
    loss, metrics = module({})(**args)
    torch.testing.assert_close((a + b, kl_a + kl_b), (loss, metrics[0]))


def test_pieces():
    r = torch.tensor([0.5, 0.9, 1.1, 2.0], dtype=torch.float64)
    first, last, none = [True, False, False, False], [False, False, False, True], [False] * 4
    for high, kind, expected in (
        (0.3, "grpo", [[0.8, 0.9, 1.1, 1.3], first, last]),
        (1.3, "cispo", [[0.5, 0.9, 1.1, 1.3], none, last]),
    ):
        assert [t.tolist() for t in clip_coef_fn(r, 0.2, high, kind)] == expected
    torch.testing.assert_close(k3_loss_fn(r.log(), torch.zeros_like(r)), r - r.log() - 1)
    torch.testing.assert_close(sapo_loss_fn(r, 2.0), 2 / (1 + torch.exp(-2 * (r - 1))))
    with pytest.raises(ValueError, match=r"sapo_loss_fn: temperature must be positive, got 0\.0"):
        sapo_loss_fn(r, 0.0)


@pytest.mark.parametrize(
    "change, options, argument, got",
    [
        (dict(), dict(loss_type="ppo"), "loss_type", "'ppo'"),
        *(
            (dict(), options | dict(importance_sampling_level=level), "importance_sampling_level", f"'{level}'")
            for options, level in [({}, "word"), *((dict(loss_type=kind), "sequence") for kind in OF_TOKENS)]
        ),
        (dict(), dict(loss_type="dr_grpo"), "max_completion_length", "None"),
        (dict(), dict(loss_type="sapo", sapo_temperature_neg=0.0), "sapo_temperature_neg", "0.0"),
        (dict(), dict(temperature=0.0), "temperature", "0.0"),
        (dict(ref_per_token_logps=None), dict(), "ref_input and ref_weight, or ref_per_token_logps,", "None"),
        (dict(advantages=torch.ones(3, device=DEVICE)), dict(), "advantages", r"\(3,\)"),
        (dict(attention_mask=torch.ones(5, 7, device=DEVICE)), dict(), "attention_mask", r"\(5, 7\)"),
        (dict(_input=torch.ones(30, H, device=DEVICE)), dict(), "_input", r"\(30, 16\)"),
    ],
)
def test_mistakes_are_named(change, options, argument, got):
    with pytest.raises(ValueError, match=f": {argument} must .*, got {got}$"):
        LigerFusedLinearGRPOLoss(**options)(**batch() | change)


def test_a_token_outside_the_vocabulary():
    args = batch()
    args["selected_token_ids"][0, 0] = -100
    assert module({})(**args)[0].isnan()


def given_logits(dtype=torch.float32, seed=0, **options):
    args = batch(dtype, seed, **options)
    head = F.linear(args["_input"], args["lin_weight"], args["bias"]).detach()
    return args, torch.cat([head, torch.randn(B, 1, V, device=DEVICE, dtype=dtype)], 1).requires_grad_()


def of_logits(args, logits, **options):
    names = ["old_per_token_logps", "ref_per_token_logps", "selected_token_ids", "advantages", "attention_mask"]
    return triton_grpo_loss(logits, *(args[k] for k in names), **options)


def on_logits(args, logits):
    """The same call with logits for hidden states, and no head to speak of."""
    return args | dict(_input=logits[:, :-1], lin_weight=torch.eye(V, device=DEVICE, dtype=logits.dtype), bias=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind, level", PAIRS)
def test_given_logits(kind, level, dtype):
    o = dict(loss_type=kind, importance_sampling_level=level, beta=0.1, max_completion_length=9)
    high = 1.3 if kind == "cispo" else 0.4

    def draw(seed):
        args, logits = given_logits(dtype, seed, level=level)
        return args | dict(logits=logits)

    def ours(logits, **args):
        before = logits.detach().clone()
        found = of_logits(args, logits, **o, eps_high=high, reduce=True)
        assert torch.equal(logits, before)
        return flat(found)

    formula = o | dict(temperature=0.9, epsilon_high=high)
    theirs = lambda logits, **args: flat(whole(formula, on_logits(args, logits)))
    assert_beside(ours, theirs, draw, draws=5, grads=of_loss)


def test_given_logits_unreduced():
    args, logits = given_logits()
    losses, kl, clipped = of_logits(args, logits, reduce=False)
    loss, (mean_kl, mean_clipped) = of_logits(args, logits, reduce=True)
    n = args["attention_mask"].sum()
    torch.testing.assert_close((losses.sum() / n, kl.sum() / n, clipped.sum() / n), (loss, mean_kl, mean_clipped))
    assert losses.shape == kl.shape == clipped.shape == (B, T) and not losses[args["attention_mask"] == 0].any()
    torch.testing.assert_close(torch.autograd.grad(losses.sum() / n, logits), torch.autograd.grad(loss, logits))
    assert of_logits(args | dict(ref_per_token_logps=None), logits, beta=0.0)[1] is None


@pytest.mark.parametrize("longer", [0, 3])
@pytest.mark.parametrize("masked", [True, False])
def test_selected_log_softmax(masked, longer):
    args, logits = given_logits()
    ids, mask = args["selected_token_ids"], args["attention_mask"]
    expected = (logits[:, :-1] / 0.9).log_softmax(-1).gather(-1, ids[..., None])[..., 0].detach()
    pad = lambda t: F.pad(t, (longer, 0))
    found = fused_selective_log_softmax(logits, pad(ids), mask=pad(mask) if masked else None)
    assert not found.requires_grad and found.dtype == torch.float32
    torch.testing.assert_close(found, expected * mask if masked else expected)


@pytest.mark.parametrize(
    "change, argument",
    [
        (dict(temperature=0.0), "temperature"),
        (dict(input_ids=torch.zeros(B, T - 1, dtype=torch.int64, device=DEVICE)), "input_ids"),
        (dict(logits=torch.zeros(B, V, device=DEVICE)), "logits"),
    ],
)
def test_mistakes_in_given_logits(change, argument):
    args = dict(logits=torch.zeros(B, T + 1, V, device=DEVICE))
    args["input_ids"] = torch.zeros(B, T, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=f"grpo_loss: {argument} must "):
        fused_selective_log_softmax(**args | change)
