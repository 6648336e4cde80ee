"""The blocks of docs/guides/rl-frameworks.md, called as the frameworks call what they replace: with
their arguments, dtypes and shapes, beside formulas in plain PyTorch."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hf_models import DEVICE, make
from torch import Tensor, nn

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "rl-frameworks.md").read_text()
M, H, V = 12, 16, 40


def names_of(*sections: str) -> dict[str, Any]:
    """What the blocks of these sections define; the first imports what the others use."""
    names: dict[str, Any] = {"torch": torch, "__name__": "page"}
    for section in sections:
        text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        for block in re.findall(r"```python\n(.*?)```", text, re.S):
            exec(compile(block, section, "exec"), names)
    return names


@pytest.fixture(autouse=True)
def plain():
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def head(dtype: torch.dtype = torch.float32, *lead: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(*(lead or (M,)), H, dtype=dtype, requires_grad=True)
    weight = (torch.randn(V, H) * 0.3).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, lead or (M,))


def expected(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Any = 1.0) -> tuple[Tensor, Tensor]:
    log_p = (hidden.float() @ weight.float().t() / temperature).log_softmax(-1)
    return log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def same(found: Any, want: Any, leaves: tuple[Tensor, ...], total: Callable[[Any], Tensor]) -> None:
    """Values, and gradients of a sum that weighs them, up to the rounding of the dtype."""
    low = leaves[0].dtype is torch.bfloat16
    close = dict(rtol=2e-2, atol=2e-2) if low else dict(rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, want, **close)
    grads = [torch.autograd.grad(total(each), leaves) for each in (found, want)]
    torch.testing.assert_close(*grads, **close)


def test_prompts_computed_once():
    call = names_of("Prompts computed once")
    model, real = make("llama", attention="sdpa"), torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0], [0, 1, 1, 1, 0]])
    ids = torch.randint(3, 90, (3, 5)) * real
    ids[2, :3] = ids[0, :3]
    logits = model(ids, attention_mask=real, use_cache=False).logits
    found = call["logits_of"](model, ids[:, :3], real[:, :3], ids[:, 3:], real[:, 3:])
    torch.testing.assert_close(found[real != 0], logits[real != 0], rtol=1e-4, atol=1e-5)
    batch = dict(input_ids=ids, attention_mask=real, responses=ids[:, 3:], position_ids=(real.cumsum(1) - 1).clamp(0))
    want = [t * real[:, 3:] for t in expected(logits[:, 2:-1], torch.eye(logits.shape[-1]), ids[:, 3:], 0.7)]
    torch.testing.assert_close(list(call["forward_micro_batch"](model, batch, 0.7)), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verl(group, dtype):
    call = names_of("verl")["linear_cross_entropy"]
    hidden, weight, labels = head(dtype, 3, 4)
    each = torch.rand(3, 4) + 0.5
    total = lambda found: found[0].sum() * 0.3 - found[1].sum()
    for temperature, divided in ((0.7, 0.7), (each, each[..., None])):
        found = call(hidden, weight, labels, temperature, "none", group)
        assert found[0].shape == found[1].shape == (12,) and found[0].dtype is torch.float32
        want = tuple(t.flatten() for t in expected(hidden, weight, labels, divided))
        same(tuple(found), want, (hidden, weight), total)


def test_verl_with_megatron(group):
    """``impl_backend="liger"``: configured first, then called with flat tokens and the group."""
    from liger_kernel.ops.configure import FusedLinearCrossEntropyConfig, configure

    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyTPFunction

    hidden, weight, labels = head()
    sizes = FusedLinearCrossEntropyConfig(max_tokens=M, hidden_size=H, local_vocab_size=V, group="verl_tp")
    with pytest.warns(UserWarning, match="no native kernels"):
        configure(process_groups={"verl_tp": group}, bootstrap_group=group, device=hidden.device, flsce=sizes)
    how = dict(temperature=0.7, ignore_index=-100, return_entropy=True)
    nll, entropy = LigerFusedLinearScaledCrossEntropyTPFunction.apply(hidden, weight, labels.long(), group, **how)
    found, want = (-nll, entropy), expected(hidden, weight, labels, 0.7)
    same(found, want, (hidden, weight), lambda both: both[0].sum() * 0.3 - both[1].sum())


def test_verl_several_targets(group):
    hidden, weight, _ = head(torch.float32, 3, 4)
    ids = torch.randint(0, V, (3, 4, 5))
    found = names_of("verl")["linear_topk_log_probs"](hidden, weight, ids, 1.3, group, 2)
    want = (hidden @ weight.t() / 1.3).log_softmax(-1).gather(-1, ids)
    same(found, want, (hidden, weight), lambda t: (t * torch.arange(5)).sum())


def test_prime_rl():
    hidden, weight, labels = head()
    inverse = torch.rand(M) + 0.5
    logp, entropy = names_of("verl", "prime-rl")["logprobs_and_entropy"](hidden, weight, labels, inverse, 4)
    want = expected(hidden, weight, labels, 1 / inverse[:, None])
    assert not entropy.requires_grad
    torch.testing.assert_close(entropy, want[1].detach(), rtol=1e-4, atol=1e-5)
    same(logp, want[0], (hidden, weight), lambda t: (t * inverse).sum())


def test_nemo_rl(group):
    call = names_of("verl", "NeMo-RL")["hidden_states_to_logprobs"]
    hidden, weight, labels = head(torch.float32, 2, 6)
    want = expected(hidden, weight, labels)[0]
    found = call(hidden, labels, weight=weight, vocab_start=0, vocab_end=V, chunk_size=4, tp_group=group)
    same(found, want, (hidden, weight), lambda t: (t**2).sum())
    old = call(hidden, labels, weight, 0, V, 4, group, True)
    assert not old.requires_grad and old.equal(found)
    with pytest.raises(ValueError, match="weight must have 39 rows, got 40"):
        call(hidden, labels, weight, 1, V, 4, group)


def test_slime():
    call = names_of("verl", "slime and miles")["calculate_log_probs_and_entropy"]
    hidden, weight, tokens = head()
    real = V - 7
    tokens = tokens % real
    nucleus = torch.rand(M, real) < 0.3
    nucleus.scatter_(1, tokens[:, None], True)
    ids = nucleus.nonzero()[:, 1]
    offsets = F.pad(nucleus.sum(1).cumsum(0), (1, 0))
    logits = (hidden @ weight.t())[:, :real]
    kept = logits.masked_fill(~nucleus, -float("inf")).log_softmax(-1).gather(1, tokens[:, None])
    entropy = expected(hidden, weight[:real], tokens)[1]
    sampled = dict(keep_ids=ids, keep_offsets=offsets, vocab_size=real)
    found = call(hidden, weight, tokens, None, True, **sampled)
    same(found, (kept, entropy), (hidden, weight), lambda both: both[0].sum() * 0.3 - both[1].sum())
    assert call(hidden, weight, tokens, None, **sampled)[1] is None
    assert not call(hidden, weight, tokens, None, True, **sampled, with_entropy_grad=False)[1].requires_grad


def test_ms_swift():
    names = names_of("ms-swift")
    hidden, weight, ids = head(torch.float32, 3, 4)
    layer = nn.Linear(H, V, bias=False)
    layer.weight = nn.Parameter(weight.detach())
    logp, entropies = expected(hidden, layer.weight, ids)
    mask = torch.ones(3, 4)
    mask[1, 2:] = 0
    ref, ratio, advantages = logp.detach() - 0.1, torch.rand(3, 4) + 0.5, torch.tensor([1.0, -0.5, 0.3])
    inputs = dict(completion_ids=ids, completion_mask=mask, advantages=advantages, ref_per_token_logps=ref)
    inputs |= dict(old_per_token_logps=logp.detach() - 0.05, rollout_is_weights=ratio)
    loss, metrics = names["compute_liger_loss"](hidden, layer, inputs)
    r = torch.exp(logp - inputs["old_per_token_logps"])
    a = advantages[:, None]
    kl = (ref - logp).exp() - (ref - logp) - 1
    each = -torch.min(r * a, r.clamp(0.8, 1.2) * a) * ratio + 0.04 * kl
    want = ((each * mask).sum(1) / mask.sum(1)).mean()
    same(loss, want, (hidden, layer.weight), lambda t: t)
    mean = lambda t: (t * mask).sum() / mask.sum()
    torch.testing.assert_close(metrics["entropy"], mean(entropies).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(metrics["kl"], mean(kl).detach(), rtol=1e-3, atol=1e-5)


# -- torchtitan ----------------------------------------------------------------------------


class Configurable:
    """Its configurations build what they belong to."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config: ...


class StockNorm(nn.RMSNorm, Configurable):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        normalized_shape: int
        eps: float | None = 1e-5

    def __init__(self, config: Config):
        super().__init__(config.normalized_shape, eps=config.eps)


class StockGLU(Configurable):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config): ...

    def __init__(self, config: Config):
        pass

    def __call__(self, gate: Tensor, up: Tensor, **kwargs: Any) -> Tensor:
        return F.silu(gate) * up


class StockLoss(Configurable):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_chunks: int = 8

    def __init__(self, config: Config, *, compile_config: Any = None):
        self.num_chunks, self.lm_head = config.num_chunks, None

    def set_lm_head(self, lm_head: nn.Module) -> None:
        self.lm_head = lm_head


@pytest.fixture
def torchtitan(monkeypatch) -> dict[str, Any]:
    """What the block defines, and the overrides that it registers as ``registered``."""
    registered = {}

    def override(*, target, fqns=None, exact=False, description=""):
        return lambda factory: registered.setdefault(target, factory)

    def derive(config, new, **changes):
        shared = {f.name for f in dataclasses.fields(config)} & {f.name for f in dataclasses.fields(new)}
        return new(**{name: getattr(config, name) for name in shared} | changes)

    names = {
        "config": dict(override=override, derive=derive),
        "components.loss": dict(ChunkedCELoss=StockLoss),
        "models.common.activation": dict(SwiGLU=StockGLU),
        "models.common.nn_modules": dict(RMSNorm=StockNorm),
    }
    for name in ("", "components", "models", "models.common", *names):
        path = f"torchtitan.{name}".rstrip(".")
        module = types.ModuleType(path)
        vars(module).update(names.get(name, {}), __path__=[])
        monkeypatch.setitem(sys.modules, path, module)
    return names_of("torchtitan") | {"registered": registered}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchtitan_norm(torchtitan, dtype):
    for eps in (1e-5, None):
        config = torchtitan["registered"][StockNorm.Config](StockNorm.Config(normalized_shape=H, eps=eps))
        norm = torchtitan["LigerNorm"](config).to(dtype)
        stock = StockNorm(StockNorm.Config(normalized_shape=H, eps=eps)).to(dtype)
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        stock.load_state_dict(norm.state_dict())
        x = (torch.randn(2, 3, H) * 0.05).to(dtype).requires_grad_()  # small, so that eps counts
        close = dict(rtol=1.6e-2, atol=1e-2) if dtype is torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(norm(x), stock(x), **close)
        along = torch.randn(2, 3, H)
        grads = [torch.autograd.grad((m(x).float() * along).sum(), [x, m.weight]) for m in (norm, stock)]
        torch.testing.assert_close(*grads, rtol=2e-2, atol=0.1 if dtype is torch.bfloat16 else 1e-4)


def test_torchtitan_experts(torchtitan):
    config = torchtitan["registered"][StockGLU.Config](StockGLU.Config())
    gate, up = (torch.randn(M, H, requires_grad=True) for _ in range(2))
    offsets = torch.tensor([3, 3, 9], dtype=torch.int32)
    glu = torchtitan["LigerGLU"](config)
    same(glu(gate, up, offsets=offsets)[:9], (F.silu(gate) * up)[:9], (gate, up), lambda t: t.square().sum())
    same(glu(gate, up), F.silu(gate) * up, (gate, up), lambda t: t.square().sum())


def test_torchtitan_head(torchtitan):
    config = torchtitan["registered"][StockLoss.Config](StockLoss.Config(num_chunks=3))
    loss = torchtitan["LigerHead"](config)
    assert loss.num_chunks == 3
    lm_head = nn.Linear(H, V, bias=False)
    loss.set_lm_head(lm_head)
    hidden, _, labels = head(torch.float32, 2, 6)
    labels[0, :3] = -100
    valid = (labels != -100).sum()
    found = loss(hidden, labels, valid)
    want = F.cross_entropy(lm_head(hidden).flatten(0, 1), labels.flatten(), reduction="sum") / valid
    same(found, want, (hidden, lm_head.weight), lambda t: 2 * t)
    with torch.no_grad():
        torch.testing.assert_close(loss(hidden, labels), want.detach() * valid)
    assert "forward" not in vars(lm_head)
