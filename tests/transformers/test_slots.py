"""What a patched model computes follows its modules as they are at each call: activations that
are more than their values, dtypes, choices of the user."""

import contextlib
import copy
import functools
import importlib
import inspect
import random
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_models import (
    DEVICE,
    KERNELS,
    assert_same_bits,
    assert_same_learning,
    batch_of,
    exact_parts,
    make,
    recognised,
    step,
)
from quick import words
from torch import nn
from transformers.activations import ACT2FN
from watching import noted

from liger_kernel.testing import assert_as_accurate
from liger_kernel.transformers import _apply_liger_kernel_to_instance, instance_patches, projections_report, restore
from liger_kernel.transformers.recognise import experts as experts_module, slots
from liger_kernel.transformers.recognise.activations import activation
from liger_kernel.transformers.recognise.families import CAUSAL, IMAGE_TEXT_TO_TEXT, configs_of, modeling

TOLERANCE = 5e-5  # of the largest value of each gradient


pytestmark = pytest.mark.usefixtures("models_by_references")


def pair(family: str, dtype: torch.dtype = torch.float32, **more) -> tuple[nn.Module, nn.Module]:
    theirs, ours = make(family, dtype, **more), make(family, dtype, **more)
    _apply_liger_kernel_to_instance(model=ours)
    return theirs, ours


class Gained(nn.Module):
    """silu with a gain that is learnt, and begins at 1."""

    def __init__(self, gain: float = 1.0):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain, device=DEVICE))

    def forward(self, x):
        return F.silu(x) * self.gain


def _with(fn: nn.Module, **attributes) -> nn.Module:
    for name, value in attributes.items():
        setattr(fn, name, value)
    return fn


KNOWN = {
    "silu": [nn.SiLU(), ACT2FN["silu"], F.silu],
    "gelu": [nn.GELU(), ACT2FN["gelu"], F.gelu],
    "gelu_tanh": [nn.GELU("tanh"), ACT2FN["gelu_pytorch_tanh"]],
    "relu2": [ACT2FN["relu2"]],
    "sigmoid": [nn.Sigmoid()],
    None: [
        *(nn.Softplus(), nn.ReLU(), Gained(), nn.Sequential(nn.SiLU()), nn.SiLU(inplace=True)),
        *(lambda x: F.silu(x), functools.partial(F.silu), type("Mine", (nn.SiLU,), {})()),
        _with(ACT2FN["gelu"], act=lambda x: F.gelu(x)),
    ],
}


@pytest.mark.parametrize("name", KNOWN)
def test_activations_are_known_by_what_they_are(name):
    for fn in KNOWN[name]:
        assert activation(fn) == activation(fn) == name, fn


def _approximate(m: nn.Module) -> None:
    m.act_fn = nn.GELU()
    activation(m.act_fn)
    m.act_fn.approximate = "tanh"


def _function(m: nn.Module) -> None:
    del m.act_fn
    m.act_fn = torch.tanh


ACTIVATIONS = {
    "a gain": lambda m: setattr(m, "act_fn", Gained()),
    "a loaded gain": lambda m: setattr(m, "act_fn", Gained(3.0)),
    "dropout": lambda m: setattr(m, "act_fn", nn.Sequential(m.act_fn, nn.Dropout(0.5))),
    "another": lambda m: setattr(m, "act_fn", nn.Tanh()),
    "a function": _function,
    "an approximation": _approximate,
    "a hook": lambda m: m.act_fn.register_forward_hook(lambda m, args, y: 0.5 * y),
    "a forward": lambda m: setattr(m.act_fn, "forward", lambda x: x),
    "a class": lambda m: setattr(m.act_fn, "__class__", nn.Softsign),
}


@pytest.mark.parametrize("family", ["llama", "gemma", "nemotron", "mixtral"])
@pytest.mark.parametrize("change", ACTIVATIONS)
def test_a_changed_activation_counts(family, change):
    """After a step in which it was what it had been; first looked at while evaluating."""
    models = pair(family, num_hidden_layers=1)
    for m in models:
        step(m)
        for part in [p for p in m.modules() if hasattr(p, "act_fn")]:
            ACTIVATIONS[change](part)
    batch = batch_of(models[0])
    with torch.no_grad():
        theirs, ours = ({"logits": m.eval()(**batch, use_cache=False).logits} for m in models)
    # GELU by tanh rounds by where its numbers lie, on some CPUs
    assert_same_learning(ours, theirs, TOLERANCE)
    theirs, ours = (step(m.train(), batch)[1] for m in models)
    assert_same_learning(ours, theirs, TOLERANCE)


def test_global_hooks_see_activations():
    seen = []
    models = pair("llama", num_hidden_layers=1)
    step(models[1])
    with torch.nn.modules.module.register_module_forward_hook(lambda m, args, y: seen.append(type(m).__name__)):
        for m in models:
            seen.append(m)
            step(m)
    theirs, ours = seen[1 : seen.index(models[1])], seen[seen.index(models[1]) + 1 :]
    assert theirs.count(type(ACT2FN["silu"]).__name__) == ours.count(type(ACT2FN["silu"]).__name__) == 1


moe_integration = pytest.importorskip("transformers.integrations.moe")
interface = getattr(moe_integration, "ALL_EXPERTS_FUNCTIONS", None)
choices = pytest.mark.skipif(interface is None, reason="this version has one implementation of experts")


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """Which implementations of experts have run."""
    recognised("qwen3_moe", "qwen3_vl_moe", "deepseek_v3", "deepseek_v4", "gpt_oss")
    calls = noted(monkeypatch, experts_module, "moe", lambda *_, **__: "ours")
    eager_like = moe_integration.batched_mm_experts_forward  # some need hardware: what counts is who is called
    for name in interface:
        fn = eager_like if name in ("sonicmoe", "deepgemm") else interface[name]
        said = lambda *args, fn=fn, name=name, **kwargs: calls.append(name) or fn(*args, **kwargs)
        monkeypatch.setitem(interface._global_mapping, name, said)
    return calls


@choices
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
@pytest.mark.parametrize("named", ["grouped_mm", "eager", "batched_mm", "sonicmoe", "deepgemm"])
def test_named_experts_are_respected(family, named, ran):
    """By the user before the model is made or afterwards; ours take the place of the default."""
    if named not in ("eager", *interface):
        pytest.skip("this version does not know it")
    experts_module._say_chosen.cache_clear()
    model = make(family)
    _apply_liger_kernel_to_instance(model=model)
    step(model)
    assert {*ran} == {"ours"}
    ran.clear()
    model.set_experts_implementation(named)
    ours = named == experts_module.DEFAULT_EXPERTS
    said = pytest.warns(UserWarning, match=f"experts run Transformers' '{named}'")
    with contextlib.nullcontext() if ours else said:
        found = step(model)[1]
    assert {*ran} == ({"ours"} if ours else set() if named == "eager" else {named})
    with warnings.catch_warnings():  # it is said once
        warnings.simplefilter("error")
        step(model)
    restore(model)
    assert_same_learning(found, step(model)[1], TOLERANCE)
    _apply_liger_kernel_to_instance(model=model)
    ran.clear()
    model.set_experts_implementation(experts_module.DEFAULT_EXPERTS)
    step(model)
    assert {*ran} == {"ours"}


@choices
def test_generation_may_name_experts_without_a_word(ran):
    model = make("qwen3_moe").eval()
    _apply_liger_kernel_to_instance(model=model)
    experts_module._say_chosen.cache_clear()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model.set_experts_implementation("batched_mm")
        model(**batch_of(model))
    assert {*ran} == {"batched_mm"}


def of_three_tokens() -> tuple[torch.Tensor, ...]:
    index = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    return torch.randn(3, 64, device=DEVICE), index, torch.rand(3, 2, device=DEVICE)


def test_experts_that_are_not_ours(ran):
    """In 8 bits, whose numbers count only with their scales, be they floats; or with the group of ranks
    that Transformers passes to implementations that exchange tokens in their kernel."""
    called = []
    variant = slots.VARIANTS["moe(act_fn)"](lambda self, *args, **more: called.append(more))
    experts = next(m for m in make("qwen3_moe").modules() if type(m).__name__ == "Qwen3MoeExperts")
    variant(experts, *of_three_tokens(), process_group="ranks")
    for name in ("gate_up_proj", "down_proj"):
        in_8_bits = getattr(experts, name).detach().to(torch.float8_e4m3fn)
        setattr(experts, name, nn.Parameter(in_8_bits, requires_grad=False))
    variant(experts, *of_three_tokens())
    assert called == [{"process_group": "ranks"}, {}] and not ran


class Counted(torch.Tensor):
    """A weight that sees its products, as torchao's weights do, which replace them."""

    seen: list[str] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@choices
@pytest.mark.parametrize(
    ("family", "name"), [("qwen3_moe", "gate_up_proj"), ("qwen3_moe", "down_proj"), ("gpt_oss", "down_proj_bias")]
)
def test_experts_of_a_subclass_multiply_as_it_says(family, name, ran):
    model = make(family)
    _apply_liger_kernel_to_instance(model=model)
    experts = next(m for m in model.modules() if hasattr(m, "gate_up_proj"))
    setattr(experts, name, nn.Parameter(getattr(experts, name).detach().as_subclass(Counted)))
    Counted.seen.clear()
    experts(*of_three_tokens())
    assert ran == ["grouped_mm"] and Counted.seen
    said = "weights of the class Counted, which has products of its own"
    reasons = [layer.reason for layer in projections_report(model).stock]
    assert reasons == [said] * (name in ("gate_up_proj", "down_proj"))


@choices
def test_experts_beside_an_input_of_another_dtype(ran):
    """As Transformers' grouped products, which cast it: without autocast they run."""
    model = make("qwen3_moe")
    experts = next(m for m in model.modules() if type(m).__name__ == "Qwen3MoeExperts").to(torch.bfloat16)
    arguments = of_three_tokens()
    expected = experts(*arguments)
    _apply_liger_kernel_to_instance(model=model)
    ran.clear()
    assert torch.equal(experts(*arguments), expected) and ran == ["grouped_mm"]
    with torch.autocast(DEVICE, torch.bfloat16):
        experts(*arguments)
    assert ran == ["grouped_mm", "ours"]


HALVES = torch.float16, torch.bfloat16


def evaluated(model: nn.Module, batch: dict) -> torch.Tensor:
    with torch.no_grad():
        logits = model.eval()(**batch, use_cache=False).logits
    model.train()
    return logits


def learned(
    model: nn.Module, batches: list[dict], scale: float, context=contextlib.nullcontext
) -> dict[str, torch.Tensor]:
    """Losses, and gradients of each times ``scale``."""
    found = []
    for batch in batches:
        model.zero_grad()
        torch.manual_seed(2)
        with context():
            loss = model(**batch, use_cache=False).loss
        (scale * loss).backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach()} | grads)
    return {name: torch.stack([f[name] for f in found]) for name in found[0]}


def exact(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model).double()
    for c in configs_of(model.config):
        c._experts_implementation = "eager"  # grouped products have no fp64
    return model


def with_kept_modules() -> dict[str, str | None]:
    """Families some of whose modules stay in fp32, and their head, if not the usual."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    of_pairs = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    place = Path(transformers.__file__).parent / "models"
    found = {}
    for t in sorted({*CAUSAL, *IMAGE_TEXT_TO_TEXT, *of_pairs}):
        name = transformers.models.auto.configuration_auto.model_type_to_module_name(t)
        file = place / name / f"modeling_{name}.py"
        if file.exists() and re.search(r"_keep_in_fp32_modules(_strict)? = \[\s*\S", file.read_text()):
            found[t] = None if t in CAUSAL or t in IMAGE_TEXT_TO_TEXT else of_pairs[t]
    return found


KEPT = with_kept_modules()
USUALLY = ["t5", "gpt_oss", "ernie4_5_moe", "afmoe"]  # a projection, norms, routers, norms of heads


@pytest.mark.parametrize(
    "family, dtype",
    [
        pytest.param(
            t, dtype, marks=[] if t in USUALLY and (t != "t5" or dtype is torch.float16) else pytest.mark.families
        )
        for t in KEPT
        for dtype in HALVES
    ],
    ids=str,
)
def test_modules_that_stay_in_fp32(family, dtype, tmp_path):
    """Loaded in 16 bits: the same logits, and learning as near the truth."""
    try:
        more = dict(feed_forward_proj="gated-gelu", decoder_start_token_id=0, dropout_rate=0.0) if KEPT[family] else {}
        model = make(family, head=KEPT[family], **more)
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager").to(DEVICE).train()
        for m in model.modules():
            if isinstance(m, nn.Dropout):
                m.p = 0.0
        batch = batch_of(model)
        if "bbox" in inspect.signature(model.forward).parameters:
            batch["bbox"] = torch.zeros(*batch["input_ids"].shape, 4, dtype=torch.int64, device=DEVICE)
        expected = evaluated(model, batch)
    except Exception as error:  # before anything is patched
        if family in USUALLY:
            raise
        pytest.skip(f"stock: {type(error).__name__}: {error}"[:200])
    if dtype is torch.float16:
        assert any(p.dtype is torch.float32 for p in [*model.parameters(), *model.buffers()])
    parts, scale = exact_parts(model), 4096.0  # as fp16 is trained
    pixels = lambda i: {k: v * 0.5**i for k, v in batch.items() if v.is_floating_point()}
    # together: the error of one is luck
    batches = [batch | pixels(i) | {"labels": batch["labels"].roll(i, 1)} for i in range(8)]
    truth, theirs = learned(exact(model), batches, scale), learned(model, batches, scale)
    with instance_patches(model, model.config.model_type, parts, "fused")():
        found = evaluated(model, batch)
        # which sum in an order of their own
        assert found.dtype == expected.dtype and (torch.equal(found, expected) or KERNELS)
        assert_as_accurate(learned(model, batches, scale), theirs, truth)


AUTOCAST = words(
    "llama gemma2 gemma3_text qwen3 cohere glm4 phi3 olmo2 gptj gpt_oss mixtral nemotron qwen2_vl deepseek_v3"
)
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# of weights, and of autocast
KINDS = [(FP32, BF16), (FP32, FP16), (BF16, BF16), (BF16, FP16), (FP16, BF16), (BF16, None), (FP16, None)]


def programs(count: int, seed: int) -> list[tuple]:
    """Random families, dtypes of weights, and kinds of autocast."""
    draw = random.Random(seed)
    families = [f for f in AUTOCAST for _ in KINDS]
    attention = (draw.choice(("eager", "sdpa")) for _ in families)
    return draw.sample([*zip(families, KINDS * len(AUTOCAST), attention)], count)


@pytest.mark.parametrize(
    ("family", "dtypes", "attention"),
    [pytest.param(*p, marks=[] if i < 12 else pytest.mark.families) for i, p in enumerate(programs(98, 0))],
    ids=str,
)
def test_autocast(family, dtypes, attention):
    """Turned q and k have stock's dtypes, so that bits follow; the rest is as near the truth."""
    dtype, autocast = dtypes
    context = functools.partial(torch.autocast, DEVICE, autocast) if autocast else contextlib.nullcontext
    try:
        model = make(family, dtype, attention=attention)
        batch = batch_of(model)
        with context():
            expected = evaluated(model, batch)
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"stock: {error}"[:200])
    # together: the error of one is luck
    scale, batches = 256.0, [batch | {"labels": batch["labels"].roll(i, 1)} for i in range(4)]
    theirs = learned(model, batches, scale, context)
    if not KERNELS:
        with instance_patches(model, family, {"rope": True}, None)():
            assert_same_bits(learned(model, batches, scale, context), theirs)
    double = lambda batch: {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    truth = learned(exact(model), [double(b) for b in batches], scale)
    with instance_patches(model, family, exact_parts(model), "fused")():
        with context():
            found = evaluated(model, batch)
        assert found.dtype == expected.dtype and (KERNELS or torch.equal(found, expected))
        assert_as_accurate(learned(model, batches, scale, context), theirs, truth)


@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4", "cohere", "gptj", "qwen2_vl"])
def test_learnt_frequencies(family, monkeypatch):
    """Tables that ask for a gradient get it, fused with norms or not."""
    module, factor = modeling(family), nn.Parameter(torch.ones((), device=DEVICE))
    models = pair(family)
    # whose tables are a buffer, before Transformers 5.24
    if family == "gptj" and hasattr(module.GPTJAttention, "_get_embed_positions"):
        was = module.GPTJAttention._get_embed_positions
        monkeypatch.setattr(module.GPTJAttention, "_get_embed_positions", lambda self, *args: was(self, *args) * factor)
    for name, cls in vars(module).items():
        if isinstance(cls, type) and name.endswith("RotaryEmbedding") and cls.__module__ == module.__name__:
            scaled = lambda self, *args, was=cls.forward, **more: tuple(t * factor for t in was(self, *args, **more))
            monkeypatch.setattr(cls, "forward", scaled)
    found = []
    for model in models:
        factor.grad = None
        found.append(step(model, batch_of(model))[1] | {"factor": factor.grad})
    assert_same_learning(*reversed(found), TOLERANCE)


def test_layers_of_the_hub_know_plain_norms_alone():
    """A norm that may have no weight is not served by a layer that reads one."""
    from liger_kernel.hub.layers import _form

    forms = {
        "llama": (0.0, "llama", "variance_epsilon"),
        "gemma": (1.0, "gemma", "eps"),
        "gemma3n_text": None,
        "gemma4_text": None,
    }
    for family, form in forms.items():
        if family in transformers.CONFIG_MAPPING:
            classes = (c for name, c in vars(modeling(family)).items() if re.fullmatch(r"\w+[a-z0-9]RMSNorm", name))
            assert _form(next(classes)) == form
