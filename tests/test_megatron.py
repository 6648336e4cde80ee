"""What we put into Megatron-core, tried on a small stand-in for it: modules of the same names, with
the signatures that it has.

Megatron-core itself is no dependency; what its own code computes is written out here where it
matters.
"""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE

from liger_kernel.megatron import (
    LigerMegatronCrossEntropy,
    LigerMegatronRMSNorm,
    LigerMegatronSwiGLU,
    apply_liger_kernel_to_megatron,
)
from liger_kernel.testing import assert_as_accurate, like, run

CONFIG = SimpleNamespace(normalization="RMSNorm", layernorm_zero_centered_gamma=False, sequence_parallel=False)


def stock_cross_entropy(vocab_parallel_logits, target, label_smoothing=0.0, tp_group=None):
    raise AssertionError("stock")


def stock_fused_cross_entropy(vocab_parallel_logits, target, tp_group):
    raise AssertionError("stock")


def stock_swiglu(input, bias, fp8_input_store=False, cpu_offload_input=False):
    gate, up = (input if bias is None else input + bias).chunk(2, -1)
    return F.silu(gate) * up


@pytest.fixture
def megatron(monkeypatch) -> SimpleNamespace:
    """The stand-in in ``sys.modules``; some of its modules import functions by name."""

    class WrappedTorchNorm:
        """What it builds is no instance of it."""

        def __new__(cls, config, hidden_size, eps=1e-5, persist_layer_norm=False, zero_centered_gamma=False,
                    normalization="LayerNorm"):  # fmt: skip
            kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
            return kinds[config.normalization](hidden_size, eps=eps)

    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1, asked=0)

    def get_tensor_model_parallel_group():
        group.asked += 1
        return group

    contents = {
        "megatron": {},
        "megatron.core": {},
        "megatron.core.parallel_state": dict(get_tensor_model_parallel_group=get_tensor_model_parallel_group),
        "megatron.core.tensor_parallel": dict(vocab_parallel_cross_entropy=stock_cross_entropy),
        "megatron.core.tensor_parallel.cross_entropy": dict(vocab_parallel_cross_entropy=stock_cross_entropy),
        "megatron.core.fusions": {},
        "megatron.core.fusions.fused_cross_entropy": dict(fused_vocab_parallel_cross_entropy=stock_fused_cross_entropy),
        "megatron.core.fusions.fused_bias_swiglu": dict(bias_swiglu_impl=stock_swiglu),
        "megatron.core.transformer": {},
        "megatron.core.transformer.mlp": dict(bias_swiglu_impl=stock_swiglu),
        "megatron.core.transformer.torch_norm": dict(WrappedTorchNorm=WrappedTorchNorm),
        "megatron.core.models.gpt": dict(LNImpl=WrappedTorchNorm, fused=stock_fused_cross_entropy),
        "mine": dict(bias_swiglu_impl=stock_swiglu),
    }
    for name, values in contents.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(group=group, **{name.rpartition(".")[2]: sys.modules[name] for name in contents})


def test_without_megatron():
    with pytest.raises(ImportError, match="megatron"):
        apply_liger_kernel_to_megatron()


def test_what_is_asked_for_is_patched_wherever_it_was_imported_once(megatron):
    apply_liger_kernel_to_megatron(rms_norm=False)
    assert type(megatron.torch_norm.WrappedTorchNorm(CONFIG, 8)) is torch.nn.RMSNorm
    apply_liger_kernel_to_megatron()
    assert type(megatron.torch_norm.WrappedTorchNorm(CONFIG, 8)) is LigerMegatronRMSNorm
    assert megatron.mlp.bias_swiglu_impl is stock_swiglu
    assert megatron.tensor_parallel.vocab_parallel_cross_entropy is stock_cross_entropy
    everything = dict(rms_norm=True, cross_entropy=True, swiglu=True)
    apply_liger_kernel_to_megatron(**everything)
    swiglu, loss = megatron.mlp.bias_swiglu_impl, megatron.tensor_parallel.vocab_parallel_cross_entropy
    patched = [swiglu, loss, megatron.gpt.fused, megatron.gpt.LNImpl]
    assert all(p.__liger_patched__ is True for p in patched)
    assert swiglu is megatron.fused_bias_swiglu.bias_swiglu_impl and swiglu.fallback_impl is stock_swiglu
    assert loss is megatron.cross_entropy.vocab_parallel_cross_entropy and loss.__wrapped__ is stock_cross_entropy
    assert megatron.gpt.fused is megatron.fused_cross_entropy.fused_vocab_parallel_cross_entropy
    assert megatron.gpt.fused.__wrapped__ is stock_fused_cross_entropy and swiglu.__wrapped__ is stock_swiglu
    assert megatron.mine.bias_swiglu_impl is stock_swiglu
    new = megatron.gpt.LNImpl.__new__
    assert "WrappedTorchNorm" in new.__wrapped__.__qualname__
    apply_liger_kernel_to_megatron(**everything)
    assert swiglu is megatron.mlp.bias_swiglu_impl and swiglu.fallback_impl is stock_swiglu
    assert megatron.gpt.LNImpl.__new__ is new


def test_norms(megatron):
    apply_liger_kernel_to_megatron()
    build = megatron.gpt.LNImpl
    assert type(build(SimpleNamespace(normalization="LayerNorm"), 8)) is torch.nn.LayerNorm
    ours = build(config=CONFIG, hidden_size=48, eps=1e-4).to(DEVICE)
    for how in (
        dict(config=CONFIG, normalization="LayerNorm"),
        dict(config=SimpleNamespace(normalization="LayerNorm")),
    ):
        with pytest.raises(ValueError, match="normalization must be 'RMSNorm', got 'LayerNorm'"):
            LigerMegatronRMSNorm(hidden_size=8, **how)
    named = build(CONFIG, 8, normalization="LayerNorm"), build(CONFIG, 8, 1e-5, False, False, "LayerNorm")
    assert [type(norm) for norm in named] == [LigerMegatronRMSNorm] * 2
    assert isinstance(ours, LigerMegatronRMSNorm) and ours.eps == 1e-4 and ours.weight.sequence_parallel is False
    assert build(SimpleNamespace(normalization="RMSNorm", sequence_parallel=True), 8).weight.sequence_parallel is True
    torch.manual_seed(0)
    x = torch.randn(5, 2, 48, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    args = dict(x=x, w=torch.randn(48, device=DEVICE).bfloat16().requires_grad_())
    ours.bfloat16()
    theirs = lambda x, w: F.rms_norm(x, (48,), w, 1e-4)
    values = run(lambda x, w: torch.func.functional_call(ours, dict(weight=w), (x,)), like(args))
    assert_as_accurate(values, run(theirs, like(args)), run(theirs, like(args, torch.float64)))


def test_zero_centered_norms_begin_as_the_identity_weight():
    x = torch.randn(3, 16, device=DEVICE)
    plain = LigerMegatronRMSNorm(CONFIG, 16).to(DEVICE)
    for zero in (
        LigerMegatronRMSNorm(CONFIG, 16, zero_centered_gamma=True),
        LigerMegatronRMSNorm(SimpleNamespace(layernorm_zero_centered_gamma=True), 16),
    ):
        assert not zero.weight.any() and torch.equal(zero.to(DEVICE)(x), plain(x))
        torch.nn.init.normal_(zero.weight)
        torch.testing.assert_close(zero(x), F.rms_norm(x, (16,), 1 + zero.weight, 1e-5))
        zero.reset_parameters()
        assert not zero.weight.any()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy(megatron, label_smoothing):
    """A label keeps 1 - label_smoothing; the K - 1 other classes share the rest."""
    apply_liger_kernel_to_megatron(cross_entropy=True)
    torch.manual_seed(0)
    logits = torch.randn(5, 2, 31, device=DEVICE, requires_grad=True)
    labels = torch.randint(0, 31, (5, 2), device=DEVICE)
    labels[0] = -100

    def megatrons(logits):
        rest = torch.full_like(logits, label_smoothing / 30)
        q = rest.scatter(-1, labels.clamp(min=0)[..., None], 1 - label_smoothing)
        return -(q * logits.log_softmax(-1)).sum(-1).where(labels != -100, 0)

    loss = megatron.tensor_parallel.vocab_parallel_cross_entropy(logits, labels, label_smoothing)
    assert megatron.group.asked == 1 and loss.dtype == torch.float32
    torch.testing.assert_close(loss, megatrons(logits))
    torch.testing.assert_close(*(torch.autograd.grad(v.sum(), logits)[0] for v in (loss, megatrons(logits))))
    if not label_smoothing:
        torch.testing.assert_close(megatron.gpt.fused(logits, labels, megatron.group), loss)
        assert megatron.group.asked == 1


def test_swiglu(megatron):
    apply_liger_kernel_to_megatron(swiglu=True)
    torch.manual_seed(0)
    args = dict(input=torch.randn(5, 2, 48, device=DEVICE, requires_grad=True))
    values = run(lambda input: megatron.mlp.bias_swiglu_impl(input, None, False, False), like(args))
    stock = lambda input: stock_swiglu(input, None)
    assert_as_accurate(values, run(stock, like(args)), run(stock, like(args, torch.float64)))


def test_swiglu_leaves_to_megatron_what_it_has_not(caplog):
    x = torch.ones(2, 8, device=DEVICE)
    seen = []
    ours = LigerMegatronSwiGLU(fallback_impl=lambda *args: (seen.append(args), args[0])[1])
    calls = {
        "a bias": (x, torch.ones(8, device=DEVICE), False, False),
        "fp8_input_store": (x, None, True, False),
        "cpu_offload_input": (x, None, False, True),
    }
    for reason, args in calls.items():
        with caplog.at_level(logging.WARNING):
            assert ours(*args) is x and ours(*args) is x
        assert seen[-1] == args and len([m for m in caplog.messages if reason in m]) == 1
        with pytest.raises(ValueError, match=f"{reason} needs a fallback_impl"):
            LigerMegatronSwiGLU()(*args)
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *((dict(reduction=wrong), "reduction must be 'none', got") for wrong in ("mean", "sum")),
        *((dict(label_smoothing=wrong), "label_smoothing must be in") for wrong in (-0.1, 1.0, 2.0)),
        (dict(label_smoothing_formula="pyTorch"), "label_smoothing_formula must be one of"),
        (dict(label_smoothing_mode="world"), "label_smoothing_mode must be one of"),
        *(({"shape": shape}, "logits must be 3-D") for shape in ((4, 16), (2, 2, 4, 16))),
    ],
)
def test_what_the_loss_refuses(options, said):
    options = dict(options)
    shape = options.pop("shape", (2, 4, 16))
    with pytest.raises(ValueError, match=said):
        LigerMegatronCrossEntropy(**options)(torch.randn(shape), torch.zeros(shape[:-1], dtype=torch.long))


def test_a_name_that_megatron_has_moved(megatron):
    del megatron.fused_cross_entropy.fused_vocab_parallel_cross_entropy
    moved = "megatron.core.fusions.fused_cross_entropy.fused_vocab_parallel_cross_entropy"
    with pytest.raises(ImportError, match=f"requires megatron-core with {moved}"):
        apply_liger_kernel_to_megatron(rms_norm=False, cross_entropy=True)


def test_modules_say_what_they_are():
    assert "zero_centered_gamma=False" in repr(LigerMegatronRMSNorm(CONFIG, 8))
    said = repr(LigerMegatronCrossEntropy(label_smoothing=0.07))
    assert "label_smoothing=0.07" in said and "label_smoothing_mode='partition'" in said
