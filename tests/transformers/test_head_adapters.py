"""Output heads with PEFT's adapters: the loss engine takes them as a weight and thin products,
or the report has a reason why not."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from chunk_loop import watch_loop
from quick import further
from torch import Tensor, nn

peft = pytest.importorskip("peft")

from hf_models import DEVICE, assert_same_learning, make, step, tokens
from test_token_scores import of_logits, of_scores
from watching import Watch, noted

from liger_kernel.testing import assert_as_accurate
from liger_kernel.transformers import instance_patches
from liger_kernel.transformers.head import loss as head_loss
from liger_kernel.transformers.head.head_weights import held
from liger_kernel.transformers.head.recipe import LossRequest
from liger_kernel.transformers.head.stand_in import deferred
from liger_kernel.transformers.recognise.storages import Fallback

V = 263  # beside the hidden sizes of tiny models the largest of all


pytestmark = pytest.mark.usefixtures("models_by_references")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    for module in ("ops.losses.chunks", "ops.losses.linear_cross_entropy"):
        monkeypatch.setattr(importlib.import_module(f"liger_kernel.{module}"), "auto_chunk_rows", lambda *_, **__: 4)


@pytest.fixture
def losses(monkeypatch) -> list[bool]:
    """Of each loss that the engine computed: whether its head had a term of low rank."""
    return noted(monkeypatch, head_loss, "linear_cross_entropy", lambda *_, xa, **__: xa is not None)


def adapted(
    family: str = "llama",
    *adapters: str,
    patch: bool = False,
    model_options=(),
    change=lambda run: None,
    dtype=torch.float32,
    **config,
) -> nn.Module:
    """A tiny model in PEFT's wrapper, ``change``d."""
    model = make(family, dtype, vocab_size=V, **dict(model_options))
    options = dict(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM") | config
    torch.manual_seed(0)
    run = peft.get_peft_model(model, peft.LoraConfig(**options), adapter_name=adapters[0] if adapters else "default")
    for name in adapters[1:]:
        run.add_adapter(name, peft.LoraConfig(**options))
    torch.manual_seed(1)
    for name, p in run.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.2)
    change(run)
    if patch:
        instance_patches(run.get_base_model(), family, {}, "fused").apply()
    return run.train()


def both(*args, **kwargs):
    """Stock and patched."""
    return adapted(*args, **kwargs), adapted(*args, patch=True, **kwargs)


def assert_as_stock(*args, **kwargs) -> nn.Module:
    """A step of both learns the same; returns the patched model."""
    stock, ours = both(*args, **kwargs)
    expected = step(stock)[1]
    out, found = step(ours)
    assert_same_learning(found, expected, 1e-5)
    assert out.logits is None
    return ours


def _head(run):
    return run.get_base_model().lm_head


def _whole(run):
    _head(run).base_layer.weight.requires_grad_(True)


def _learning(learns):
    """What learns, by names."""

    def change(run):
        for name, p in run.named_parameters():
            p.requires_grad_(learns(name))

    return change


def _biased(run):
    _head(run).base_layer.bias = nn.Parameter(torch.linspace(-1, 1, V, device=DEVICE))


def _learnt_scaling(size: int):
    def change(run):
        layer = _head(run)
        layer.learnt = layer.scaling["default"] = nn.Parameter(torch.linspace(0.5, 2, size, device=DEVICE))

    return change


# and whether the head has a term of low rank
CONFIGS = {
    "lora": ({}, True),
    "tied lora": ({}, True),
    "gemma2": (dict(family="gemma2"), True),
    "tied gemma2": (dict(family="gemma2"), True),
    "embedding, too": (dict(target_modules=["embed_tokens", "lm_head"]), True),
    "embedding": (dict(target_modules=["embed_tokens"]), False),
    "tied embedding": (dict(target_modules=["embed_tokens"], ensure_weight_tying=True), True),
    "dropout": (dict(lora_dropout=0.5), True),
    "bias": (dict(lora_bias=True), True),
    "scales": (dict(use_rslora=True, lora_alpha=7), True),
    "pattern": (dict(rank_pattern={"lm_head": 5}, alpha_pattern={"lm_head": 3}), True),
    "copy": (dict(target_modules=["q_proj"], modules_to_save=["lm_head"]), False),
    "copies": (dict(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]), False),
    "tied copy": (dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True), False),
    "tokens": (dict(target_modules=["q_proj"], trainable_token_indices=[5, 260, 7]), False),
    "tied tokens": (dict(target_modules=["q_proj"], trainable_token_indices=[5, 260, 7]), True),
    "a bias of the base": (dict(change=_biased), True),
    "all of a tied head": (dict(change=_whole), True),
    "what is below learns": (dict(change=_learning(lambda name: "lora_" in name and "lm_head" not in name)), True),
    "B alone learns": (dict(change=_learning(lambda name: "lm_head.lora_B" in name)), True),
    "a scaling that learns": (dict(change=_learnt_scaling(1)), True),
    "scalings that learn": (dict(change=_learnt_scaling(V)), True),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("ignore")  # PEFT's, of ties and biases
def test_heads_with_adapters(name, losses, computed):
    config, low_rank = CONFIGS[name]
    assert_as_stock(model_options=dict(tie_word_embeddings="tied" in name), **config)
    assert losses == [low_rank] and not computed


SWITCHES = {
    "disabled": (lambda run: run.base_model.disable_adapter_layers(), False),
    "merged": (lambda run: run.merge_adapter(), False),
    "another": (lambda run: run.set_adapter("two"), True),
    "both": (lambda run: run.base_model.set_adapter(["one", "two"]), True),
    "deleted": (lambda run: run.delete_adapter("one"), True),
    "scaled": (
        lambda run: [m.set_scale("one", 3.0) for m in run.modules() if isinstance(m, peft.tuners.lora.LoraLayer)],
        True,
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_of_a_patched_model(name, losses, computed):
    """Turned after the patch, and after a step."""
    switch, low_rank = SWITCHES[name]
    stock, ours = both("llama", "one", "two", change=_whole, lora_dropout=0.5 if name == "both" else 0.0)
    assert_same_learning(step(ours)[1], step(stock)[1], 1e-5)
    for run in (stock, ours):
        switch(run)
        _learning(lambda name: "lora_" in name or "lm_head" in name)(run)
    assert_same_learning(step(ours)[1], step(stock)[1], 1e-5)
    assert losses == [True, low_rank] and not computed


def _moved(run):
    with torch.no_grad():
        for name, p in run.named_parameters():
            if "trainable_tokens_delta" in name:
                p.add_(torch.linspace(-1, 1, p.numel(), device=DEVICE).view_as(p))


@pytest.mark.parametrize("batch", [tokens(), tokens(length=200)], ids=["ignored", "all"])
def test_trained_tokens_of_a_tied_head(batch, losses, computed):
    """Rows of the head that are others than those of its frozen weight."""
    batch["labels"][:, 3:9] = torch.tensor([5, 260, 7, 5, 260, 7], device=DEVICE)
    tied = dict(model_options=dict(tie_word_embeddings=True), target_modules=["q_proj"])
    stock, ours = both("llama", **tied, trainable_token_indices=[5, 260, 7], change=_moved)
    expected = step(stock, batch)[1]
    assert_same_learning(step(ours, batch)[1], expected, 1e-5)
    for switch in ("merge_adapter", "unmerge_adapter", "disable_adapter_layers"):
        for run in (stock, ours):
            getattr(run.base_model, switch)()
        with torch.no_grad():
            torch.testing.assert_close(ours(**batch).loss, stock(**batch).loss)
    assert losses == [True, False, True, False] and not computed


def _hook(path: str = ""):
    hook = lambda m, args, out: out.clone() * 1.5
    return lambda run: _head(run).get_submodule(path).register_forward_hook(hook)


def _of_a_shape(run):
    _head(run).scaling["default"] = torch.ones(1, 1, device=DEVICE)


def _in_sequence(run):
    _head(run).lora_dropout["default"] = nn.Sequential(nn.Identity())


def _learnt_tokens(run):
    _head(run).token_adapter.base_layer.requires_grad_(True)


def _tokens(n: int) -> dict:
    tied = dict(tie_word_embeddings=True)
    return dict(target_modules=["q_proj"], trainable_token_indices=[*range(n)], model_options=tied)


COPY = dict(target_modules=["q_proj"], modules_to_save=["lm_head"])
BASE = "a base that is sharded, hooked or quantised"
STOCK = lambda run: None
REASONS = {
    "shape of scaling": ({}, _of_a_shape, "adapter 'default' has a scaling that is sharded, or"),
    "DoRA": (dict(use_dora=True), STOCK, "DoRA, which scales"),
    "hook": ({}, _hook(), "hooks, or a forward of its own"),
    "hook of A": ({}, _hook("lora_A.default"), "parts of adapter 'default' are sharded, hooked or replaced"),
    "hook of B": ({}, _hook("lora_B.default"), "parts of adapter 'default' are sharded, hooked or replaced"),
    "hook of the base": ({}, _hook("base_layer"), BASE),
    "dropout": ({}, _in_sequence, "the dropout of adapter 'default' is hooked, or a Sequential"),
    "learnt head": (_tokens(1), _learnt_tokens, "trained tokens of a weight that is no plain frozen one"),
    "too many tokens": (_tokens(60), STOCK, "60 trained tokens"),
    "copy with a hook": (COPY, _hook("modules_to_save.default"), BASE),
    "hook of a copy": (COPY, _hook(), "a base of class ModulesToSaveWrapper"),
}


@pytest.mark.parametrize("name", REASONS)
def test_other_heads_are_called_themselves(name, losses):
    config, change, reason = REASONS[name]
    ours = assert_as_stock(change=change, **config)
    found = held(_head(ours), torch.zeros(1, ours.config.hidden_size, device=DEVICE))
    assert isinstance(found, Fallback) and found.startswith(reason), found
    assert not losses


def test_thin_results_beyond_fp16():
    """Adapters in fp32 on a head in fp16: its own forward, which multiplies them in fp32."""
    torch.manual_seed(0)
    head = lora_head().half()
    for part, value in ((head.lora_A, 1e5), (head.lora_B, 1e-6)):
        part.float()["one"].weight.data.normal_(std=value)
    x = torch.randn(5, 32, device=DEVICE).half()
    assert held(head, x).startswith("adapters that are not in fp16")
    with torch.autocast(DEVICE, torch.float16):
        assert not isinstance(held(head, x), Fallback)


def head_cross_entropy(head: nn.Module, x: Tensor, target: Tensor, **options) -> Tensor:
    return F.cross_entropy(deferred(head, x, LossRequest()), target, **options)


def lora_head(dtype=torch.float32, H=32, V=65, r=3, names=("one",), **config) -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=r, init_lora_weights=False, **config)
    head = peft.tuners.lora.Linear(nn.Linear(H, V, bias=False), names[0], config=config, r=r, lora_alpha=2 * r)
    for name in names[1:]:
        head.update_layer(name, r, lora_alpha=r, config=config)
    head.set_adapter(list(names))
    head.base_layer.requires_grad_(False)
    return head.to(DEVICE, dtype)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_of_the_size_of_the_head_or_of_all_logits(reduction, dropout, monkeypatch):
    mode = Watch()
    watch_loop(monkeypatch, mode)
    head, x = lora_head(H=32, V=100, lora_dropout=dropout), torch.randn(24, 32, device=DEVICE, requires_grad=True)
    kept = []
    with mode, torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        loss = head_cross_entropy(head, x, torch.arange(24, device=DEVICE), reduction=reduction)
    with mode:
        loss.sum().backward()
    assert mode.largest == x.numel() < min(head.base_layer.weight.numel(), 24 * 100)
    own = {t.data_ptr() for t in (x, *head.parameters())}
    assert max(t.numel() for t in kept if t.data_ptr() not in own) <= x.numel()


@pytest.mark.parametrize("names", [("one",), ("one", "two")])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
def test_as_accurate_as_stock(adapters, autocast, names):
    """Adapters of 16 and 32 bits on a head of 16, with autocast and without."""
    dtype = torch.bfloat16 if autocast is None else autocast

    def draw(seed: int, of):
        head = lora_head(names=names)
        torch.manual_seed(seed)
        for p in head.parameters():
            nn.init.normal_(p, std=0.3)
        head.base_layer.to(dtype)
        for part in (head.lora_A, head.lora_B):
            part.to(adapters)
        x, target = torch.randn(11, 32, device=DEVICE).to(dtype), torch.randint(0, 65, (11,), device=DEVICE)
        target[::4] = -100
        if of is None:
            head, x = head.double(), x.double()
        x.requires_grad_()
        with torch.autocast(DEVICE, dtype=autocast or torch.bfloat16, enabled=autocast is not None and of is not None):
            loss = (of or stock)(head, x, target)
        loss.backward()
        return {"loss": loss.detach().float(), "x": x.grad} | {
            n: p.grad for n, p in head.named_parameters() if p.grad is not None
        }

    def stock(head, x, target):
        z = head(x)
        return F.cross_entropy(z if z.dtype == torch.float64 else z.float(), target)

    pairs = [(draw(seed, stock), draw(seed, None)) for seed in range(8)]
    found = draw(0, head_cross_entropy)
    assert found.keys() == pairs[0][0].keys() and len(found) == 2 + 2 * len(names)
    assert_as_accurate(found, *pairs[0], *pairs[1:], again=lambda seed: draw(seed, head_cross_entropy))


@pytest.mark.parametrize("config", [{}, COPY], ids=["lora", "copy"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_scores_without_logits(family, config, losses, computed):
    expected = of_logits(adapted(family, **config))
    assert_same_learning(of_scores(adapted(family, **config)), expected, 3e-5)
    assert losses == [not config] and not computed


@pytest.mark.parametrize("config", further({}, COPY), ids=["lora", "copy"])
def test_compiled(config):
    torch._dynamo.reset()
    stock, ours = both(**config, model_options=dict(num_hidden_layers=1))
    expected = step(stock)[1]
    found = step(torch.compile(ours, backend="eager"))[1]
    assert_same_learning({n.removeprefix("_orig_mod."): g for n, g in found.items()}, expected, 1e-5)
