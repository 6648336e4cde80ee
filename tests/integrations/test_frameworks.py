"""Frameworks that are installed, run or asked themselves: their own integration code is what
calls the package."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_models import DEVICE, assert_same_learning, make, step, tokens
from torch import nn

import liger_kernel.transformers as liger
from liger_kernel.transformers import functional

HOW = "is not installed: make test-integrations"


def needs(module: str) -> Any:
    """A module of a framework, or a skip that says how to get it."""
    return pytest.importorskip(module, reason=f"{module} {HOW}", exc_type=ImportError)


def assert_learns(model: nn.Module, expected: dict[str, torch.Tensor], fused: bool = True, batch: Any = None) -> None:
    """What the stock model learns, with logits or without."""
    out, learned = step(model, batch)
    assert (out.logits is None) == fused
    assert_same_learning(learned, expected)


# -- axolotl -------------------------------------------------------------------------------


def config(**keys: Any) -> Any:
    return needs("axolotl.utils.dict").DictDefault(keys)


KEYS = dict(liger_rope=True, liger_rms_norm=True, liger_glu_activation=True, liger_fused_linear_cross_entropy=True)


@pytest.fixture
def axolotl_plugin(monkeypatch):
    """The plugin, and what it puts into other packages taken back."""
    plugin = needs("axolotl.integrations.liger.plugin").LigerPlugin()
    trainer = needs("trl.trainer")
    monkeypatch.setattr(trainer, "ORPOTrainer", getattr(trainer, "ORPOTrainer", None), raising=False)
    from liger_kernel.compat import host as module

    pair = [(module, f"fused_linear_cross_entropy_{way}") for way in ("forward", "backward")]
    fused = (functional, "liger_fused_linear_cross_entropy"), (liger.LigerFusedLinearCrossEntropyLoss, "__init__")
    for owner, name in (*pair, *fused):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    return plugin


@pytest.mark.parametrize(
    "keys", [KEYS, {"liger_rms_norm": True}, {**KEYS, "torch_compile": True}], ids=["all", "norms", "compile"]
)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3", "mixtral"])
def test_axolotl(axolotl_plugin, model_type, keys):
    expected = step(make(model_type))[1]
    cfg = config(model_config_type=model_type, **keys)
    axolotl_plugin.register(cfg)
    axolotl_plugin.pre_model_load(cfg)
    assert_learns(make(model_type), expected, "liger_rope" in keys)


def test_axolotl_token_scaling(axolotl_plugin):
    axolotl_plugin.pre_model_load(config(model_config_type="llama", liger_use_token_scaling=True, **KEYS))
    model = make("llama").train()
    batch = tokens()
    scaled = model(**batch).loss
    with torch.no_grad():
        logp = model.eval()(batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    picked = logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0][labels != -100]
    torch.testing.assert_close(scaled, -(picked * picked.exp()).mean())


def test_axolotl_distillation():
    """Its KD plugin subclasses the base of our distillation losses."""
    from liger_kernel.chunked_loss.fused_linear_distillation import LigerFusedLinearDistillationBase

    module = needs("axolotl.integrations.kd.kernels.liger")
    derived = lambda c: isinstance(c, type) and issubclass(c, LigerFusedLinearDistillationBase)
    assert [c for c in vars(module).values() if derived(c) and c.__module__ == module.__name__]
    torch.manual_seed(0)
    B, T, H, V, K = 2, 6, 8, 30, 4
    x, w = torch.randn(B, T, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    ids = torch.randint(0, V, (B, T, K))
    logp = torch.randn(B, T, K).log_softmax(-1)
    soft = dict(weight_hard_loss=0.0, weight_soft_loss=1.0)
    loss = module.LigerFusedLinearKLTopKLogprobLoss(**soft, temperature=1.0, beta=0.0, compiled=False)
    found = loss(w, x, ids, logp, torch.ones(B, T, K), torch.randint(0, V, (B, T)))
    assert torch.isfinite(found) and all(torch.isfinite(g).all() for g in torch.autograd.grad(found, (x, w)))


# -- LLaMA-Factory -------------------------------------------------------------------------


@pytest.mark.parametrize("require_logits", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3", "qwen3_moe", "phi3", "granite"])
def test_llama_factory(model_type, require_logits):
    """Before the model is made; stages other than supervised ones need logits."""
    module = needs("llamafactory.model.model_utils.liger_kernel")
    expected = step(make(model_type))[1]
    module.apply_liger_kernel(make(model_type).config, SimpleNamespace(enable_liger_kernel=True), True, require_logits)
    assert_learns(make(model_type), expected, not require_logits)


# -- ms-swift ------------------------------------------------------------------------------


def test_ms_swift(monkeypatch):
    """Its wrapper of the loss, which it puts in place before models are patched."""
    from liger_kernel.transformers.model import loss_utils

    module = needs("swift.trainers.arguments")
    monkeypatch.setattr(loss_utils, "LigerForCausalLMLoss", loss_utils.LigerForCausalLMLoss)
    ours = loss_utils.LigerForCausalLMLoss
    module.TrainArgumentsMixin._patch_liger_kernel()
    assert loss_utils.LigerForCausalLMLoss is not ours
    model, batch = make("qwen2"), tokens() | {"num_items_in_batch": torch.tensor(11)}
    liger._apply_liger_kernel_to_instance(model=model)
    assert_learns(model, step(make("qwen2"), batch)[1], batch=batch)


# -- frameworks around the auto class ------------------------------------------------------


@pytest.fixture
def saved(tmp_path) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    make("llama").save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3}, unk_token="a"))
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(tmp_path)
    return tmp_path


def test_mini_trainer(saved, monkeypatch):
    """Its losses are of single tokens, with our head and without."""
    module = needs("mini_trainer.setup_model_for_training")
    import transformers.loss.loss_utils as hf

    from liger_kernel.transformers.model import loss_utils

    monkeypatch.setattr(hf, "fixed_cross_entropy", hf.fixed_cross_entropy)
    monkeypatch.setattr(loss_utils, "fixed_fused_linear_cross_entropy", loss_utils.fixed_fused_linear_cross_entropy)
    monkeypatch.setenv("TESTING", "true")
    stock, ours = (module.setup_model(str(saved), use_liger_kernels=use).to(DEVICE).train() for use in (False, True))
    losses = [model(**tokens(), use_cache=False).loss for model in (ours, stock)]
    assert losses[0].ndim == 1 and ours(**tokens()).logits is None
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.sum().backward()
    for (name, p), q in zip(ours.named_parameters(), stock.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_instructlab(saved):
    module = needs("instructlab.training.model")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(saved)
    made = module.LigerModel(str(saved), str(saved), module.DistributedBackend.FSDP, None, tokenizer)
    out, learned = step(made.model.float().to(DEVICE).train())
    assert out.logits is not None  # it asks for them
    loaded = type(made.model).from_pretrained(saved, dtype=made.model.dtype).float().to(DEVICE)
    liger.restore()
    assert_same_learning(learned, step(loaded.train())[1])


@pytest.mark.parametrize(
    "module, function",
    [
        ("nemo_automodel._transformers.kernel_patches", "_patch_liger_kernel"),
        ("oumi.builders.models", "_patch_model_for_liger_kernel"),
    ],
)
def test_models_that_are_patched_by_one_function(module, function):
    patch, model = getattr(needs(module), function), make("llama")
    expected = step(make("llama"))[1]
    assert patch(model) in (None, model)
    assert_learns(model, expected)


def test_verl():
    module = needs("verl.utils.experimental.torch_functional")
    torch.manual_seed(0)
    hidden, w = torch.randn(2, 7, 16, requires_grad=True), torch.randn(31, 16, requires_grad=True)
    ids = torch.randint(0, 31, (2, 7))
    of = lambda backend: module.FusedLinearForPPO(impl_backend=backend)(hidden, w, ids, 0.7)
    ours, theirs = of("liger"), of("torch")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    grad = lambda pair: torch.autograd.grad((pair[0].exp() + 0.1 * pair[1]).sum(), (hidden, w))
    torch.testing.assert_close(grad(ours), grad(theirs), rtol=1e-4, atol=1e-5)


# -- LitGPT --------------------------------------------------------------------------------


def test_litgpt():
    """A model of plain PyTorch: norms patched one by one, and the loss taken of hidden states."""
    litgpt = needs("litgpt")
    from liger_kernel.transformers.monkey_patch import _patch_rms_norm_module
    from litgpt.utils import chunked_cross_entropy

    torch.manual_seed(0)
    sizes = dict(n_layer=2, n_head=4, n_embd=32, intermediate_size=64, padded_vocab_size=50, block_size=16)
    kinds = dict(norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP")
    config = litgpt.Config(**sizes, **kinds, bias=False, norm_eps=1e-5)
    stock = litgpt.GPT(config).to(DEVICE)
    ours = copy.deepcopy(stock)
    ids = torch.randint(0, 50, (2, 12), device=DEVICE)
    expected = chunked_cross_entropy(stock(ids[:, :-1]), ids[:, 1:])
    for m in ours.modules():
        if type(m).__name__ == "RMSNorm":
            _patch_rms_norm_module(m, casting_mode="gemma")
    head, ours.lm_head = ours.lm_head, nn.Identity()
    loss = liger.LigerFusedLinearCrossEntropyLoss()(head.weight, ours(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected, list(stock.transformer.parameters()))
    found = torch.autograd.grad(loss, list(ours.transformer.parameters()))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


# -- DeepSpeed -----------------------------------------------------------------------------


def test_deepspeed_finds_the_loss():
    module = needs("deepspeed.sequence.cross_entropy")
    assert module._load_liger_vocab_ce().__name__ == "LigerVocabParallelCEFunction"


# -- quantised models ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_bitsandbytes(kind):
    """LoRA on quantised projections, on a CPU as far as bitsandbytes has kernels for it."""
    bnb, peft = needs("bitsandbytes"), needs("peft")

    def quantised() -> nn.Module:
        model = make("llama")
        make_new = {
            "nf4": lambda *s: bnb.nn.Linear4bit(*s, bias=False, quant_type="nf4", compute_dtype=torch.float32),
            "int8": lambda *s: bnb.nn.Linear8bitLt(*s, bias=False, has_fp16_weights=False),
        }[kind]
        for path, linear in [(n, m) for n, m in model.model.named_modules() if isinstance(m, nn.Linear)]:
            new = make_new(linear.in_features, linear.out_features)
            new.load_state_dict(linear.state_dict())
            model.model.set_submodule(path, new)
        torch.manual_seed(0)
        named = dict(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        lora = peft.LoraConfig(r=2, init_lora_weights=False, **named)
        return peft.get_peft_model(model.to(DEVICE), lora)

    expected = step(quantised())[1]
    model = quantised()
    liger._apply_liger_kernel_to_instance(model=model.get_base_model())
    out, learned = step(model)
    assert out.logits is None and any("lora_A" in n for n in learned)
    assert_same_learning(learned, expected, 1e-4)
