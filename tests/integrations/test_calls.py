"""What frameworks do with the package, call by call: their own arguments, in their own order, and
what they expect back.

The versions are those whose sources the calls were read from.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_models import DEVICE, assert_same_learning, make, step, tokens
from torch import nn

import liger_kernel.transformers as liger
from liger_kernel.transformers.model import loss_utils
from liger_kernel.transformers.patching.patches import is_patched


@pytest.fixture(autouse=True)
def _given_back():
    """What frameworks have put in place of ours is gone after each test."""
    owners = [loss_utils, liger.functional, liger.LigerFusedLinearCrossEntropyLoss]
    before = [dict(vars(o)) for o in owners]
    yield
    for owner, attributes in zip(owners, before):
        for name, value in attributes.items():
            if vars(owner)[name] is not value:
                setattr(owner, name, value)


def patched(model_type: str = "llama", **flags: Any) -> nn.Module:
    model = make(model_type)
    liger._apply_liger_kernel_to_instance(model=model, **flags)
    return model


def dft(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(logits, target, reduction="none")
    return (loss * (-loss.detach()).exp()).sum() / (target != -100).sum()


def assert_learns(model: nn.Module, like: nn.Module) -> None:
    """What the stock model learns, without its logits."""
    out, learned = step(model)
    assert out.logits is None
    assert_same_learning(learned, step(like)[1])


# -- losses wrapped and replaced -----------------------------------------------------------


@pytest.mark.parametrize("items", [None, 37])
def test_ms_swift_4_6_wraps_the_loss(items):
    """Models patched before see the wrapper; keywords of padding-free batches do no harm."""
    model, stock, seen = patched(), make("llama"), []
    batch = tokens() | ({} if items is None else {"num_items_in_batch": torch.tensor(items)})
    origin = loss_utils.LigerForCausalLMLoss

    def LigerForCausalLMLoss(hidden_states, *args, **kwargs):
        seen.append(hidden_states.contiguous())
        for key in ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"]:
            kwargs.pop(key, None)
        return origin(hidden_states, *args, **kwargs)

    expected = step(stock, batch)[1]
    loss_utils.LigerForCausalLMLoss = LigerForCausalLMLoss
    out, learned = step(model, batch)
    assert len(seen) == 1 and out.logits is None
    assert_same_learning(learned, expected)
    accuracy = step(model, batch, return_token_accuracy=True)[0].token_accuracy
    loss_utils.LigerForCausalLMLoss = origin
    assert accuracy == step(model, batch, return_token_accuracy=True)[0].token_accuracy and len(seen) == 2
    kwargs = dict(cu_seq_lens_q=torch.tensor([0, 24]), max_length_q=24)  # tolerated without the wrapper as well
    given = torch.randn(2, 12, 64, device=DEVICE), stock.lm_head.weight, batch["labels"], 64
    torch.testing.assert_close(origin(*given, **kwargs), origin(*given))


def test_axolotl_0_19_forces_token_scaling(monkeypatch):
    """It wraps the function and the class; both, and patched models, follow, compiled ones too."""
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    from liger_kernel.transformers import functional

    old, old_init = functional.liger_fused_linear_cross_entropy, LigerFusedLinearCrossEntropyLoss.__init__
    forced = dict(use_token_scaling=True)
    functional.liger_fused_linear_cross_entropy = lambda *args, **kwargs: old(*args, **(kwargs | forced))
    LigerFusedLinearCrossEntropyLoss.__init__ = lambda self, *a, **k: old_init(self, *a, **(k | forced))
    logits = make("llama")(tokens()["input_ids"]).logits.flatten(0, 1)
    labels = F.pad(tokens()["labels"], (0, 1), value=-100)[:, 1:].flatten()
    expected = dft(logits, labels)
    x, w = torch.randn(24, 64, device=DEVICE), torch.randn(50, 64, device=DEVICE)
    few = labels.clamp(max=49)
    torch.testing.assert_close(LigerFusedLinearCrossEntropyLoss()(w, x, few), dft(x @ w.t(), few))
    torch.testing.assert_close(patched().train()(**tokens()).loss, expected)
    model = make("llama", num_hidden_layers=1)
    expected = dft(model(tokens()["input_ids"]).logits.flatten(0, 1), labels)
    liger._apply_liger_kernel_to_instance(model=model)
    torch.testing.assert_close(torch.compile(model, backend="eager")(**tokens(), use_cache=False).loss, expected)


def test_axolotl_0_19_wraps_the_pair_under_compile():
    """``torch_compile: true`` asks for two names by getattr, and puts wrappers in their place."""
    from liger_kernel.compat import host as module

    for name in ("fused_linear_cross_entropy_forward", "fused_linear_cross_entropy_backward"):
        original = getattr(module, name)
        apart = torch.compiler.disable(lambda *a, original=original, **k: original(*a, **k))
        setattr(module, name, functools.wraps(original)(apart))
        try:
            torch.testing.assert_close(patched().train()(**tokens()).loss, make("llama").train()(**tokens()).loss)
        finally:
            setattr(module, name, original)


def test_axolotl_0_19_and_lmms_engine_0_1_4_replace_torchs_own(monkeypatch):
    """For models we were not asked about; whatever else uses it goes on as before."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    stock = F.cross_entropy
    calls = [
        ((torch.randn(3, 5), torch.tensor([0, -100, 4])), {}),
        ((torch.randn(2, 5, 3), torch.randint(0, 5, (2, 3))), {"reduction": "sum"}),
        ((torch.randn(3, 5), torch.rand(3, 5)), {"label_smoothing": 0.1}),
        ((torch.randn(5), torch.tensor(2)), {}),
    ]
    expected = [stock(*args, **kwargs) for args, kwargs in calls]
    losses = [step(model)[1] for model in (make("llama"), patched())]
    monkeypatch.setattr("transformers.loss.loss_utils.nn.functional.cross_entropy", liger_cross_entropy)
    assert F.cross_entropy is liger_cross_entropy
    torch.testing.assert_close([F.cross_entropy(*args, **kwargs) for args, kwargs in calls], expected)
    for model, loss in zip((make("llama"), patched()), losses):
        assert_same_learning(step(model)[1], loss)
    monkeypatch.undo()


# -- flags by signature --------------------------------------------------------------------


EVERY = dict(rope=True, rms_norm=True, swiglu=True, fused_linear_cross_entropy=True)
OF_LOGITS = dict(fused_linear_cross_entropy=False, cross_entropy=True)
NORMS_ALONE = dict(rope=None, cross_entropy=None, fused_linear_cross_entropy=None, rms_norm=True, swiglu=None)
V1 = dict(rope=False, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, swiglu=False)
# framework, family, flags, and what it patches: classes "before" or "after" the model is made, or the "model"
FLAGS = [
    ("axolotl 0.19, what the YAML leaves out is None", "llama", dict.fromkeys(NORMS_ALONE), "before"),
    ("axolotl 0.19", "qwen3_moe", NORMS_ALONE, "before"),
    ("axolotl 0.19", "gemma2", dict(rope=True, geglu=True, rms_norm=None, fused_linear_cross_entropy=True), "before"),
    ("LLaMA-Factory 0.9.5, for losses that need logits", "gemma2", OF_LOGITS, "before"),
    ("Oumi 0.9", "llama", {}, "after"),
    ("LLaMA-Factory 0.9.5, v1", "qwen3", V1, "model"),
    ("RLinf 0.3", "qwen3_moe", EVERY, "model"),
    ("NeMo AutoModel 0.7", "mistral", OF_LOGITS | dict(rope=False, cross_entropy=False), "model"),
]


@pytest.mark.parametrize("framework, model_type, flags, patched", FLAGS)
def test_flags(framework, model_type, flags, patched):
    apply, model = getattr(liger, f"apply_liger_kernel_to_{model_type}"), make(model_type)
    assert flags.keys() <= inspect.signature(apply).parameters.keys()
    apply(**flags, **({"model": model} if patched == "model" else {}))
    if patched == "before":
        model = make(model_type)
        norm = next(m for m in model.modules() if "RMSNorm" in type(m).__name__)
        assert hasattr(type(norm).forward, "_liger") == bool(flags.get("rms_norm", True))
    out, learned = step(model)
    assert (out.logits is None) == bool(flags.get("fused_linear_cross_entropy", True))
    liger.restore()
    liger.restore(model)
    assert_same_learning(learned, step(make(model_type))[1])


def test_axolotl_0_19_generic_forward():
    """A forward of its own around ``LigerForCausalLMLoss``, for any model type."""
    from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss
    from liger_kernel.transformers.trainer.orpo_trainer import _FSDPForwardRedirection

    from liger_kernel.utils import PEFT_AVAILABLE

    assert callable(_FSDPForwardRedirection()) and isinstance(PEFT_AVAILABLE, bool)
    stock = make("llama")
    for kwargs in ({}, {"num_items_in_batch": 5}):
        logits, hidden = stock(tokens()["input_ids"]).logits, stock.model(tokens()["input_ids"])[0]
        expected = stock.loss_function(logits, tokens()["labels"], stock.config.vocab_size, **kwargs)
        given = dict(hidden_states=hidden, lm_head_weight=stock.lm_head.weight, labels=tokens()["labels"])
        more = dict(hidden_size=64, shift_labels=None, use_cache=False)
        torch.testing.assert_close(LigerForCausalLMLoss(**given, **more, **kwargs), expected)
    ignored = torch.full_like(tokens()["labels"], -100)
    assert LigerForCausalLMLoss(hidden, stock.lm_head.weight, ignored, 64) == 0
    rest = stock.lm_head.weight, tokens()["labels"], 64
    both = LigerForCausalLMLoss(hidden, *rest, return_token_accuracy=True, return_predicted_tokens=True)
    assert both.token_accuracy.ndim == 0 and both.predicted_tokens.shape == (24,)
    transposed = hidden.transpose(0, 1).contiguous().transpose(0, 1)  # not contiguous
    torch.testing.assert_close(LigerForCausalLMLoss(transposed, *rest), both.loss)


# -- models from the auto class ------------------------------------------------------------


AUTO = {
    "OpenRLHF 0.11": dict(trust_remote_code=True, attn_implementation="eager", torch_dtype=torch.float32),
    "ArcticTraining 0.8": dict(config=True, attn_implementation="sdpa", dtype=torch.float32, swiglu=False),
    "instructlab-training 0.16": dict(quantization_config=None, **OF_LOGITS),
}


@pytest.mark.parametrize("framework", AUTO)
def test_the_auto_class(framework, tmp_path):
    make("llama").save_pretrained(tmp_path)
    given = dict(AUTO[framework])
    if "config" in given:
        given["config"] = transformers.AutoConfig.from_pretrained(tmp_path)
    model = liger.AutoLigerKernelForCausalLM.from_pretrained(str(tmp_path), device_map=None, **given).to(DEVICE)
    assert type(model) is transformers.LlamaForCausalLM
    out, learned = step(model.train())
    assert (out.logits is None) == given.get("fused_linear_cross_entropy", True)
    liger.restore()
    assert_same_learning(learned, step(make("llama"))[1])


def test_skyrl_0_3_without_memory():
    config = make("llama").config
    with torch.device("meta"):
        model = liger.AutoLigerKernelForCausalLM.from_config(config, trust_remote_code=True)
    model.to_empty(device=DEVICE).load_state_dict(make("llama").state_dict())
    for name, buffer in make("llama").named_buffers():
        model.get_buffer(name).copy_(buffer)
    assert_learns(model.train(), patched())


# -- functions and modules -----------------------------------------------------------------


def test_verl_0_9_1():
    """At import, when patching, and as the head: NLL and entropy, both differentiable."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 16, device=DEVICE, requires_grad=True) for n in (9, 31))
    ids = torch.randint(0, 31, (9,), device=DEVICE)
    found = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, ids, 0.7, -100, 1, True)
    log_p = (hidden @ weight.t() / 0.7).log_softmax(-1)
    want = -log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(found, want)
    grads = (torch.autograd.grad((nll * 0.3 - entropy).sum(), (hidden, weight)) for nll, entropy in (found, want))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)

    model = make("llama")
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, swiglu=True)
    own = types.MethodType(lambda self, **batch: transformers.LlamaForCausalLM.forward(self, **batch), model)
    model.forward = own  # verl puts a forward of its own there afterwards: norms, ropes and MLPs do not depend on ours
    assert_same_learning(step(model)[1], step(make("llama"))[1])
    assert any(is_patched(m) for m in model.model.modules())


def test_lmms_engine_0_1_4():
    """It walks the model itself and patches module by module; wrappers of PEFT are looked into."""
    from liger_kernel.transformers.model.qwen2 import lce_forward_deprecated
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

    from liger_kernel.transformers import monkey_patch as m

    model = make("qwen2")
    for _ in range(2):  # again changes nothing
        m._patch_rms_norm_module(model.model.norm)
        for layer in model.model.layers:
            m._patch_swiglu_module(layer.mlp, LigerSwiGLUMLP)
            m._patch_rms_norm_module(layer.input_layernorm, offset=0.0, casting_mode="llama")
            m._patch_rms_norm_module(layer.post_attention_layernorm)
    model.forward = types.MethodType(lce_forward_deprecated, model)
    assert_learns(model, make("qwen2"))
    norm = nn.LayerNorm(8, eps=1e-3).to(DEVICE)
    x = torch.randn(3, 8, device=DEVICE)
    want = norm(x)
    m._patch_layer_norm_module(norm, eps=7.0)  # it has an eps of its own
    assert type(norm) is not nn.LayerNorm
    torch.testing.assert_close(norm(x), want)
    liger.restore(norm)
    liger.restore(model.model)
    assert type(norm) is nn.LayerNorm and not any(is_patched(m) for m in model.model.modules())


def test_lmms_engine_0_1_4_and_peft():
    peft = pytest.importorskip("peft", reason="peft is not installed: make setup")
    from liger_kernel.transformers.monkey_patch import _patch_rms_norm_module

    model = peft.get_peft_model(make("qwen2"), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]))
    wrapper = model.base_model.model.model.norm
    x = torch.randn(3, 64, device=DEVICE)
    expected = wrapper(x)
    _patch_rms_norm_module(wrapper)
    assert is_patched(wrapper.original_module) and is_patched(wrapper.modules_to_save["default"])
    torch.testing.assert_close(wrapper(x), expected)


def test_unsloth_2026_10_sets_options_of_a_made_loss():
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    torch.manual_seed(0)
    x, w, t = torch.randn(1, 6, 8), torch.randn(20, 8), torch.randint(0, 20, (1, 6))
    made = LigerFusedLinearJSDLoss(beta=0.3, temperature=2.0, compiled=False)
    assert (made.weight_hard_loss, made.weight_soft_loss) == (0.5, 0.5)
    made.weight_hard_loss, made.weight_soft_loss, made.temperature = 0.0, 1.0, 1.0
    hard = dict(weight_hard_loss=0.0, weight_soft_loss=1.0)
    fresh = LigerFusedLinearJSDLoss(**hard, beta=0.3, ignore_index=-100, temperature=1.0, compiled=False)
    given = dict(student_input=x, student_weight=w, teacher_input=x + 1, teacher_weight=w, true_labels=t)
    call = lambda loss: loss(**given, student_bias=None, teacher_bias=None)
    assert torch.equal(call(made), call(fresh))


def test_heads_that_are_gathered_for_the_forward_alone():
    """TRL gathers a ZeRO-3 head around a chunked loss: its gradient is there before it goes."""
    from liger_kernel import chunked_loss

    torch.manual_seed(0)
    x, ref, y = torch.randn(4, 5, 8), torch.randn(4, 5, 8), torch.randint(0, 20, (4, 5))
    drawn = torch.randn(4)
    marks = dict(preference_labels=torch.arange(4) % 2 == 0, kl=torch.zeros(1))
    losses = {
        "dpo": lambda x, w: chunked_loss.LigerFusedLinearDPOLoss()(w, x, y, None, ref, w.detach().clone(), None)[0],
        "orpo": lambda x, w: chunked_loss.LigerFusedLinearORPOLoss()(w, x, y)[0],
        "kto": lambda x, w: chunked_loss.LigerFusedLinearKTOLoss()(x, w, y, **marks)[0],
        "grpo": lambda x, w: chunked_loss.LigerFusedLinearGRPOLoss(beta=0.0)(x, w, y, torch.ones(4, 5), drawn)[0],
        "jsd": lambda x, w: chunked_loss.LigerFusedLinearJSDLoss()(x, w, ref, w.detach().clone(), y),
    }
    for name, loss in losses.items():
        found = []
        for gone in (False, True):
            torch.manual_seed(1)
            leaf, w = x.clone().requires_grad_(), torch.randn(20, 8, requires_grad=True)
            out = loss(leaf, w)
            if gone:
                w.data.fill_(float("nan"))  # what a released parameter holds is nobody's business
            out.backward()
            found.append((out.detach(), leaf.grad, w.grad))
        torch.testing.assert_close(*found, rtol=0, atol=0, msg=name)


# -- accelerate ----------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False], ids=["patched-then-prepared", "prepared-then-patched"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_1_15_prepares(first, precision):
    """Its autocast wrapper goes around a bound method, and can be taken off."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: make setup")

    def run(use: bool) -> tuple[Any, dict[str, torch.Tensor]]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=DEVICE == "cpu")
        model = make("llama")
        if use and first:
            liger._apply_liger_kernel_to_instance(model=model)
        prepared = accelerator.prepare(model)
        if use and not first:
            liger._apply_liger_kernel_to_instance(model=accelerator.unwrap_model(prepared))
        out, learned = step(prepared)
        assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False).forward.__self__ is model
        return out, learned

    (out, learned), (_, expected) = run(True), run(False)
    assert out.logits is None
    if precision == "no":
        assert_same_learning(learned, expected)
    else:
        torch.testing.assert_close(learned["loss"], expected["loss"], rtol=1e-2, atol=1e-2)
