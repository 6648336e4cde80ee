"""The doors through which users and frameworks come in: auto classes, apply functions, modules
and functions, and the frameworks themselves."""

import contextlib
import inspect
import subprocess
import sys
import types
import warnings
from pathlib import Path

import processes
import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_models import DEVICE, assert_same_bits, assert_same_learning, make, step, tokens
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama import modeling_llama
from watching import noted

import liger_kernel.transformers as liger
from liger_kernel import nn as lnn, ops
from liger_kernel.transformers import functional
from liger_kernel.transformers.patching import patches as patching
from liger_kernel.transformers.patching.select import _named_as
from liger_kernel.transformers.recognise import families, ropes, slots
from liger_kernel.transformers.recognise.families import infer


@pytest.fixture(autouse=True)
def _served(models_by_references):
    stock = F.cross_entropy, nn.CrossEntropyLoss, nn.LayerNorm, nn.Linear.forward
    yield
    liger.restore()
    assert stock == (F.cross_entropy, nn.CrossEntropyLoss, nn.LayerNorm, nn.Linear.forward)


def test_auto_from_pretrained(tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path)
    expected = step(model)[1]
    auto = liger.AutoLigerKernelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", rope=False, swiglu=None
    )
    assert type(auto) is type(model)
    assert str(liger.class_patches("llama", {"rms_norm": True}, "fused")) and modeling_llama.LlamaRMSNorm.forward._liger
    for stock in (modeling_llama.LlamaMLP.forward, modeling_llama.apply_rotary_pos_emb):
        assert not hasattr(stock, "_liger")
    out, learned = step(auto.to(DEVICE).train())
    assert out.logits is None
    assert_same_learning(learned, expected)


def test_auto_from_an_adapter(tmp_path):
    """Of PEFT, which has no configuration of the model beside it."""
    peft = pytest.importorskip("peft")
    make("llama").save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    for name in (tmp_path / "adapter", str(tmp_path / "adapter")):
        model = liger.AutoLigerKernelForCausalLM.from_pretrained(name, rope=False)
        assert any("lora_A" in n for n, _ in model.named_parameters()) and model.model.norm.forward._liger
    assert model.to(DEVICE).train()(**tokens()).logits is None


def test_a_star_brings_the_functions_of_families_too():
    names: dict = {}
    exec("from liger_kernel.transformers import *", names)
    assert {"LigerRMSNorm", "AutoLigerKernelForCausalLM", "apply_liger_kernel_to_llama"} <= names.keys()


def test_auto_unknown_type_is_plain_with_one_warning():
    class NobodyConfig(transformers.PretrainedConfig):
        model_type = "nobody-knows"

    class Nobody(transformers.PreTrainedModel):
        config_class = NobodyConfig

    transformers.AutoModelForCausalLM.register(NobodyConfig, Nobody)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = liger.AutoLigerKernelForCausalLM.from_config(NobodyConfig(), rope=True, geglu=False)
    assert type(model) is Nobody
    assert len([w for w in seen if "nobody-knows" in str(w.message)]) == 1


def test_what_cannot_be_done_is_said():
    both, model = dict(cross_entropy=True, fused_linear_cross_entropy=True), make("llama", num_hidden_layers=1)
    with pytest.raises(TypeError, match="geglu"):
        liger.apply_liger_kernel_to_llama(geglu=True)
    with pytest.raises(AssertionError, match="cannot both be True"):
        liger.apply_liger_kernel_to_llama(**both)
    with pytest.warns(UserWarning, match="cohere: rms_norm=True has no effect"):
        liger.apply_liger_kernel_to_cohere(rms_norm=True)
    with pytest.raises(AttributeError):
        liger.apply_liger_kernel_to_nobody  # noqa: B018
    with pytest.raises(AssertionError):
        liger._apply_liger_kernel_to_instance(model=model, **both)


def test_classes_of_other_families_are_said(monkeypatch):
    """transformers 4's qwen2_vl has its norms of qwen2; here any version's has."""
    from transformers.models.qwen2 import modeling_qwen2
    from transformers.models.qwen2_vl import modeling_qwen2_vl

    row = families.family("qwen2_vl")
    norms = {n for n, label in row.swapped.items() if slots.SLOT_OF[label] == "rms_norm"}
    for n in norms:
        monkeypatch.setattr(modeling_qwen2_vl, n, modeling_qwen2.Qwen2RMSNorm)
    monkeypatch.setattr(patching, "WARNED", set())
    with pytest.warns(UserWarning, match="qwen2_vl: rms_norm=True is of another family's Qwen2RMSNorm"):
        liger.apply_liger_kernel_to_qwen2_vl(rms_norm=True, swiglu=True)
    assert norms and not hasattr(modeling_qwen2.Qwen2RMSNorm.forward, "_liger")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        liger.apply_liger_kernel_to_qwen2_vl(rms_norm=True)
        liger.apply_liger_kernel_to_llama(rms_norm=True, swiglu=True)


def test_cross_entropy_stays_in_the_family():
    """One flag named is enough, and nobody else's cross entropy changes."""
    model, other = make("granite"), make("llama")
    expected, elsewhere = step(model)[1], step(other)[1]
    liger.apply_liger_kernel_to_granite(cross_entropy=True)
    out, learned = step(model)
    assert out.logits is not None
    assert_same_learning(learned, expected)
    assert_same_bits(step(other)[1], elsewhere)


@pytest.mark.parametrize("interleave", [False, True])
def test_a_method_that_calls_one_of_two_rope_functions(interleave, monkeypatch):
    """Gets both in a live model, as in its classes."""
    model = make("deepseek_v3", rope_interleave=interleave)
    liger.apply_liger_kernel_to_deepseek_v3(model=model, rope=True)
    calls = noted(monkeypatch, ropes, "rope", lambda *_, **__: None)
    step(model)
    assert len(calls) == model.config.num_hidden_layers


def test_names_of_parameters_that_are_those_of_locals():
    def variant(self, x):
        h = x + 1
        return (lambda: h * x)()

    assert _named_as(variant, lambda self, h: None)(None, h=3) == 12
    assert [*inspect.signature(variant).parameters] == ["self", "h"]


def test_what_somebody_else_put_over_ours_stays():
    model = make("llama", num_hidden_layers=1)
    liger._apply_liger_kernel_to_instance(model=model)
    ours = model.forward
    model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.warns(UserWarning, match="other code replaced it after the patch"):
        liger.restore(model)
    assert model(**tokens()).loss is not None


def test_day_zero_families(monkeypatch):
    """A type that the table does not know is recognised when it is asked for."""
    family = families.family
    others = {t: row for t, row in families.FAMILIES.items() if t != "deepseek_v2"}  # in the same order
    monkeypatch.setattr(families, "FAMILIES", others)
    family.cache_clear()
    row = family("deepseek_v2")
    assert row.swapped["DeepseekV2RMSNorm"] == "rms_norm(0, llama, variance_epsilon)"
    assert family("nobody") is None


def test_modules_need_no_transformers():
    code = (
        "import sys; import liger_kernel.transformers; assert 'transformers' not in sys.modules; "
        "sys.modules['transformers'] = None; "
        "from liger_kernel.transformers import LigerRMSNorm, functional; LigerRMSNorm(4)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


of_gemma = lnn.LigerRMSNormForGemma, lnn.LigerRMSNormForGemma2, lnn.LigerRMSNormForGemma3, lnn.LigerRMSNormForQwen3Next
NORMS = dict.fromkeys((lnn.LigerRMSNorm, lnn.LigerRMSNormForOlmo2, lnn.LigerRMSNormForGlm4), (0.0, "llama"))
NORMS |= dict.fromkeys(of_gemma, (1.0, "gemma"))


@pytest.mark.parametrize("cls", NORMS)
def test_norm_modules(cls):
    norm, (offset, casting) = cls(32, eps=0.1).to(DEVICE), NORMS[cls]
    assert (norm.weight == 1 - offset).all() and [*norm.state_dict()] == ["weight"]
    norm, x = norm.bfloat16(), torch.randn(3, 5, 32, device=DEVICE).bfloat16()
    nn.init.normal_(norm.weight)
    assert torch.equal(norm(x), ops.rms_norm(x, norm.weight, eps=0.1, offset=offset, casting=casting))


def test_norm_options():
    plain = lnn.LigerRMSNorm(8, elementwise_affine=False).to(DEVICE)
    x = torch.randn(4, 8, device=DEVICE)
    assert plain.weight is None and not plain.state_dict()
    torch.testing.assert_close(plain(x), F.rms_norm(x, (8,), eps=1e-6))
    lnn.LigerRMSNorm(8, 1e-6, 0.0, "llama", "ones", False, None, True)
    with pytest.raises(ValueError, match="init_fn must be one of"):
        lnn.LigerRMSNorm(8, init_fn="random")


def config(act="silu", **more):
    return types.SimpleNamespace(**dict(hidden_size=8, intermediate_size=12, hidden_act=act) | more)


def test_mlp_modules():
    x = torch.randn(2, 3, 8, device=DEVICE)
    gelu_tanh = lambda t: F.gelu(t, approximate="tanh")
    for cls, act, fn in (
        (lnn.LigerSwiGLUMLP, "silu", F.silu),
        (lnn.LigerSwiGLUMLP, "swish", F.silu),
        (lnn.LigerGEGLUMLP, "gelu", F.gelu),
        (lnn.LigerGEGLUMLP, "gelu_pytorch_tanh", gelu_tanh),
    ):
        mlp = cls(config(act)).to(DEVICE)
        torch.testing.assert_close(mlp(x), mlp.down_proj(fn(mlp.gate_proj(x)) * mlp.up_proj(x)))
        assert mlp.gate_proj.bias is None
    assert lnn.LigerSwiGLUMLP(config(), intermediate_size=20).up_proj.weight.shape == (20, 8)
    assert lnn.LigerSwiGLUMLP(config(mlp_bias=True)).down_proj.bias is not None
    gemma = config("gelu", hidden_activation="gelu_pytorch_tanh")
    assert lnn.LigerGEGLUMLP(gemma).act == "gelu_tanh"
    phi3 = lnn.LigerPhi3SwiGLUMLP(config()).to(DEVICE)
    gate, up = phi3.gate_up_proj(x).chunk(2, -1)
    torch.testing.assert_close(phi3(x), phi3.down_proj(up * F.silu(gate)))
    for cls, other in ((lnn.LigerSwiGLUMLP, "gelu"), (lnn.LigerGEGLUMLP, "silu")):
        with pytest.raises(ValueError, match=f"{cls.__name__}: activation must be one of"):
            cls(config(other))
    classes = [cls for cls in vars(lnn).values() if isinstance(cls, type)]
    configured = [cls for cls in classes if "config" in inspect.signature(cls).parameters]
    assert len(configured) > 10
    for cls in configured:
        for wrong in (64, dict(hidden_size=8), types.SimpleNamespace()):
            with pytest.raises(ValueError, match=rf"{cls.__name__}: config must have .*, got {type(wrong).__name__}$"):
                cls(wrong)
    for wrong, lacks in (
        ((64, 256), "hidden_act"),
        ((types.SimpleNamespace(hidden_act="silu", hidden_size=8),), "intermediate_size"),
    ):
        with pytest.raises(ValueError, match=f"config must have {lacks}, "):
            lnn.LigerSwiGLUMLP(*wrong)


def test_mlp_modules_are_those_of_transformers():
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
    from transformers.models.llama.modeling_llama import LlamaMLP

    x = torch.randn(2, 3, 8, device=DEVICE)
    falcon = config(mlp_bias=True, mlp_multipliers=(0.3, 1.7))
    for ours, stock in (
        (lnn.LigerFalconH1SwiGLUMLP(falcon), FalconH1MLP(falcon)),
        (lnn.LigerQwen3MoeSwiGLUMLP(config(), 20), LlamaMLP(config(mlp_bias=False, intermediate_size=20))),
        (lnn.LigerHunyuanV1SwiGLUMLP(config(), layer_idx=3), LlamaMLP(config(mlp_bias=False))),
    ):
        ours.load_state_dict(stock.state_dict())
        torch.testing.assert_close(ours.to(DEVICE)(x), stock.to(DEVICE)(x))
    expert = lnn.LigerBlockSparseTop2MLP(config()).to(DEVICE)
    torch.testing.assert_close(expert(x), expert.w2(F.silu(expert.w1(x)) * expert.w3(x)))
    gemma = config(hidden_activation="gelu_pytorch_tanh", use_double_wide_mlp=True)
    del gemma.hidden_act
    gemma.num_hidden_layers, gemma.num_kv_shared_layers = 4, 1
    assert [lnn.LigerGEGLUMLPForGemma4(gemma, i).intermediate_size for i in (None, 2, 3)] == [12, 12, 24]


OPTIONS = [{}, *(dict(reduction=r) for r in ("sum", "none")), dict(ignore_index=2), dict(label_smoothing=0.1)]
OPTIONS += [dict(lse_square_scale=0.01, return_z_loss=True), dict(softcap=1.5), dict(use_token_scaling=True)]
OPTIONS += [dict(weights=True, label_smoothing=0.1), dict(return_token_accuracy=True, return_predicted_tokens=True)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_losses(options):
    """Modules and functions hand their options on to the operators."""
    torch.manual_seed(0)
    x, w, b = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((9, 8), (13, 8), (13,)))
    target = torch.randint(0, 13, (9,), device=DEVICE)
    target[:3] = F.linear(x[:3], w, b).argmax(-1)  # some predictions are right
    target[4] = options.get("ignore_index", -100)
    names = {"lse_square_scale": "z_loss", "use_token_scaling": "token_scaling"}
    asked = [name for name in options if name.startswith("return_")]
    given = {name: value for name, value in options.items() if name != "weights"}
    of_operator = {names.get(name, name): value for name, value in given.items() if name not in asked}
    weights = nn.Parameter(torch.rand(13, device=DEVICE), requires_grad=False) if "weights" in options else None
    linear = x, w, target, b, weights
    wanted = ops.linear_cross_entropy(*linear, **of_operator, stats=bool(asked))
    found = [
        lnn.LigerFusedLinearCrossEntropyLoss(weights, **given)(w, x, target, b),
        functional.liger_fused_linear_cross_entropy(*linear, **given),
        lnn.LigerFusedLinearCrossEntropyLoss(ce_weight=weights, accum_dtype=torch.float32, **given)(w, x, target, b),
    ]
    if "use_token_scaling" not in options:
        logits = F.linear(x, w, b)
        found += [
            lnn.LigerCrossEntropyLoss(weights, **given)(logits, target),
            functional.liger_cross_entropy(logits, target, weights, **given),
        ]
    loss, z_loss, predicted = wanted if asked else (wanted, None, None)
    g = torch.rand_like(loss)
    expected = torch.autograd.grad(loss, (x, w, b), g)
    for out in found:
        if asked:
            assert isinstance(out, functional.CrossEntropyOutput)
            share = (predicted == target)[target != -100].float().mean()
            for name, value in (("z_loss", z_loss), ("token_accuracy", share), ("predicted_tokens", predicted)):
                assert (getattr(out, name) is not None) == (f"return_{name}" in asked)
                if f"return_{name}" in asked:
                    torch.testing.assert_close(getattr(out, name), value)
            out = out.loss
        torch.testing.assert_close(out, loss)
        torch.testing.assert_close(torch.autograd.grad(out, (x, w, b), g, retain_graph=True), expected)


def test_the_order_of_arguments_is_pytorchs():
    x, target = torch.randn(9, 8, device=DEVICE), torch.randint(0, 8, (9,), device=DEVICE)
    ours, stock = functional.liger_cross_entropy, F.cross_entropy
    assert [*inspect.signature(ours).parameters][:8] == [*inspect.signature(stock).parameters]
    for arguments in ((None, None, 2), (None, False), (None, None, -100, False), (None, None, -100, None, "sum", 0.1)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(ours(x, target, *arguments), stock(x, target, *arguments))


def test_rope_and_gated_functions():
    torch.manual_seed(0)
    angles = torch.randn(1, 5, 6, device=DEVICE)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    q, k = torch.randn(2, 4, 5, 12, device=DEVICE), torch.randn(2, 1, 5, 12, device=DEVICE)
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    kept = q.clone(), k.clone()
    torch.testing.assert_close(liger.liger_rotary_pos_emb(q, k, cos, sin), expected)
    torch.testing.assert_close(functional.liger_rope(q, k, cos, sin, None, 1), expected)
    swapped = liger.liger_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(tuple(t.transpose(1, 2) for t in swapped), expected)
    assert torch.equal(q, kept[0]) and torch.equal(k, kept[1])  # unlike the published function
    a, b, w = torch.randn(2, 3, 8, device=DEVICE), torch.randn(2, 3, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    assert torch.equal(functional.liger_swiglu(a, b), ops.glu(a, b, act="silu"))
    assert torch.equal(functional.liger_geglu(a, b), ops.glu(a, b, act="gelu_tanh"))
    torch.testing.assert_close(functional.liger_rms_norm(a, w, 1e-5, 1.0, "gemma"), F.rms_norm(a, (8,), w + 1, 1e-5))


@pytest.mark.parametrize("script", sorted(p.name for p in Path(__file__).parents[2].joinpath("examples").glob("*.py")))
def test_examples_run(script, user_env, tmp_path):
    path = Path(__file__).parents[2] / "examples" / script
    code, printed = processes.forked([str(path)], user_env, tmp_path / "said")
    assert code == 0 and "loss" in printed, printed


@contextlib.contextmanager
def nothing_initialised():
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        from transformers.modeling_utils import no_init_weights
    with no_init_weights(), pytest.MonkeyPatch.context() as patch:
        # what memory held before decides otherwise whether that is seen
        patch.setattr(nn.init, "kaiming_uniform_", lambda t, *args, **kwargs: t.data.fill_(float("nan")))
        yield


SURROUNDINGS = {
    "empty weights": lambda: pytest.importorskip("accelerate").init_empty_weights(),
    "empty weights and buffers": lambda: pytest.importorskip("accelerate").init_empty_weights(include_buffers=True),
    "no initialisation": nothing_initialised,
    "fake tensors": FakeTensorMode,
    "device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_recognition_is_the_same_in_any_surroundings(name, monkeypatch):
    """And draws none of the user's random numbers: ``manual_seed`` reaches the generators of all devices."""
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("torch.manual_seed was called"))
    expected, before = infer("llama"), torch.get_rng_state()
    with SURROUNDINGS[name]():
        assert infer("llama") == expected
    assert len(expected.swapped) == 3 and torch.equal(torch.get_rng_state(), before)
