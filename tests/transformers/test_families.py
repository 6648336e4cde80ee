"""Patched models of many families learn what stock models learn."""

import copy
import inspect
import runpy
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import (
    DEVICE,
    KERNELS,
    SMOKE,
    assert_learns_the_same,
    assert_same_bits,
    assert_same_learning,
    assert_untouched,
    batch_of,
    everything_of,
    exact_parts,
    make,
    snapshot,
    step,
    stock,
    tokens,
)
from quick import words

import liger_kernel.transformers as transformers_of_ours
from liger_kernel.ops._core import operator as _op
from liger_kernel.patch_options import HEADS
from liger_kernel.testing import assert_as_accurate
from liger_kernel.transformers import class_patches, instance_patches, restore, table
from liger_kernel.transformers.patching import patches as patching
from liger_kernel.transformers.patching.apply import MODEL_TYPE_TO_APPLY_LIGER_FN
from liger_kernel.transformers.patching.patches import _STOCK, is_ours
from liger_kernel.transformers.recognise import activations, families, slots
from liger_kernel.transformers.recognise.compare import recognise, references
from liger_kernel.transformers.recognise.families import CAUSAL, IMAGE_TEXT_TO_TEXT, infer, tables_of
from liger_kernel.transformers.recognise.tiny import tiny_config

EVERY = sorted(t for t, row in families.FAMILIES.items() if row.heads)
LISTED = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "granite", "olmo2", "smollm3"]
# other kinds of heads (scaled, biased, of a mixture of experts), norms (none of ours) and rope
# (pairs, partial, tables without duplicates)
FURTHER = words("cohere cohere2 glm4 phi gpt_oss qwen3_moe falcon_h1 nemotron gpt2 deepseek_v3 olmo3 starcoder2")
EVERYTHING = table.EVERYTHING
TOLERANCE = 5e-5  # of the largest value of each gradient


pytestmark = pytest.mark.usefixtures("models_by_references")


def patch(path: str, model: torch.nn.Module, model_type: str, parts: dict = EVERYTHING, head: str | None = "fused"):
    return (
        class_patches(model_type, parts, head) if path == "class" else instance_patches(model, model_type, parts, head)
    )


def stock_of(
    family: str, dtype: torch.dtype = torch.float32, **more: Any
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A tiny model that has made a step, as some settle then how they attend, and its batch."""
    with stock(family):
        model = make(family, dtype, **more)
        batch = batch_of(model)
        step(model, batch)
    return model, batch


def some(names: list[str], every: list[str] = EVERY) -> list:
    """``names`` always, and the rest of ``every`` with ``pytest -m families``."""
    marks = lambda t: [*([] if t in names else [pytest.mark.families]), *([pytest.mark.smoke] if t in SMOKE else [])]
    return [pytest.param(t, marks=marks(t)) for t in [*names, *(t for t in every if t not in names)]]


# of text and images: pairs of a tower and a text model, sections, LayerNorms and flat rope in
# towers, experts, deep features, cross attention, tiles
IMAGES = words("""
    llava qwen2_vl qwen2_5_vl qwen3_vl_moe gemma3 paligemma glm4v llama4 mllama smolvlm mistral3 internvl qwen3_5
""")
USUALLY = words("""
    llama granite cohere gpt_oss nemotron deepseek_v3 llava qwen2_vl gptj gemma4_text deepseek_v4 florence2
""")


@pytest.mark.parametrize("path", ["class", "instance"])
@pytest.mark.parametrize("family", some(USUALLY))
def test_learns_the_same_and_is_undone(family, path):
    model, batch = stock_of(family)
    other, _ = stock_of(family)  # not a copy: what some keep between steps cannot be copied
    with stock(family):
        _, expected = step(model, batch)
    model.zero_grad(set_to_none=True)
    before = snapshot(*everything_of(family))
    modules = snapshot(model)
    patches = patch(path, model, family)
    assert patches or path == "class"  # where all that is swapped is of PyTorch's classes
    patches.apply()
    out, learned = step(model, batch)
    assert bool(families.FAMILIES[family].fused) or (out.logits is None and "logits" not in out)
    assert_same_learning(learned, expected, TOLERANCE)
    if path == "instance":
        assert_untouched(before)
        stock_out, untouched = step(other, batch)
        assert_same_bits(untouched, expected)
        assert stock_out.logits is not None
    patches.restore()
    assert_untouched(before)
    assert_untouched(modules)
    out, again = step(model, batch)
    assert out.logits is not None
    assert_same_bits(again, expected)


@pytest.mark.parametrize("family", some(["llama", "gemma", "qwen3_moe", "nemotron"], LISTED + FURTHER))
def test_bf16_is_as_accurate_as_stock(family):
    # a token whose experts change by rounding has another gradient altogether: all experts are used
    experts = {"num_experts_per_tok": 4} if family in ("gpt_oss", "qwen3_moe", "deepseek_v3") else {}
    model, _ = stock_of(family, torch.bfloat16, **experts)
    exact = copy.deepcopy(model).double()
    exact.config._experts_implementation = "eager"  # grouped products have no fp64
    batches = [tokens(seed=seed) for seed in range(8)]  # together: the error of one loss is luck

    def together(m: torch.nn.Module) -> dict[str, torch.Tensor]:
        results = [step(m, batch)[1] for batch in batches]
        return {name: torch.stack([r[name] for r in results]) for name in results[0]}

    with stock(family):
        truth, theirs = together(exact), together(model)
    with instance_patches(model, family, EVERYTHING, "fused")():
        ours = together(model)
    assert_as_accurate(ours, theirs, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", some(["llama", "gemma2", "cohere", "gpt_oss", "gpt2", *IMAGES[:2]]))
def test_eval_logits(family, dtype):
    try:
        model, batch = stock_of(family, dtype)
        model.eval()(**batch, use_cache=False)
    except RuntimeError as error:  # before anything is patched
        pytest.skip(f"stock: {error}")
    with torch.no_grad():
        expected = model(**batch, use_cache=False)
        with instance_patches(model, family, exact_parts(model), "fused")():
            out = model(**batch, use_cache=False)
        # in fp32, others divide by a root
        if DEVICE == "cpu" and (dtype is torch.bfloat16 or transformers.__version__ == families.VERSION):
            assert torch.equal(out.logits, expected.logits) and torch.equal(out.loss, expected.loss)
        assert type(out) is type(expected)
        if dtype is torch.float32:
            with instance_patches(model, family, EVERYTHING, "fused")():
                logits = model(**batch, use_cache=False).logits
            torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", LISTED)
def test_generate(family):
    model = make(family).eval()
    prompt = tokens()["input_ids"]
    arguments = dict(max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(prompt), eos_token_id=None)
    expected = model.generate(prompt, **arguments)
    with instance_patches(model, family, EVERYTHING, "fused")():
        assert torch.equal(model.generate(prompt, **arguments), expected)


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are used everywhere there")
def test_llama_with_interpreted_kernels():
    if not _op.INTERPRET:
        pytest.skip("without Triton")
    _op._KERNEL_DEVICES.add("cpu")
    patch_all = lambda model: instance_patches(model, "llama", EVERYTHING, "fused").apply()
    model, batch = make("llama", num_hidden_layers=1), tokens(1, 5, ignored=1)
    assert assert_learns_the_same(model, patch_all, 1e-5, batch=batch).logits is None


def test_named_activations_are_looked_at_once(monkeypatch):
    model = make("qwen3_next")
    transformers_of_ours._apply_liger_kernel_to_instance(model)
    step(model)
    monkeypatch.setattr(activations, "unset_fake_temporarily", None)  # what looking at one begins with
    step(model)


def test_rounding_is_recognised_not_assumed():
    found = {f: infer(f).swapped for f in ("llama", "gemma", "olmo2", "gpt_oss", "glm4", "cohere")}
    assert found["llama"]["LlamaRMSNorm"] == "rms_norm(0, llama, variance_epsilon)"
    assert found["gemma"]["GemmaRMSNorm"] == "rms_norm(1, gemma, eps)"
    assert found["olmo2"]["Olmo2RMSNorm"] == found["gpt_oss"]["GptOssRMSNorm"] == "rms_norm(0, gemma, variance_epsilon)"
    tables = {f: row["apply_rotary_pos_emb"] for f, row in found.items()}
    assert tables["llama"] == "rope(none, halves, twice)" and tables["gpt_oss"] == "rope(none, halves, once)"
    assert tables["glm4"] == "rope(none, pairs, twice)" and tables["cohere"] == "rope(fp32, pairs, repeated)"
    assert infer("gptj").swapped["apply_rotary_pos_emb"] == "rope(alone, sin first, none, pairs, once)"
    if "gemma4_text" in transformers.CONFIG_MAPPING:
        assert infer("gemma4_text").swapped["apply_rotary_pos_emb"] == "rope(alone, none, halves, twice)"


def look_alikes() -> dict[str, list]:
    """Label of a variant -> candidates that differ from what it computes in one respect: functions, or
    forwards of a class."""
    from transformers.activations import ACT2FN
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as pairs
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, rotate_half
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    norm, rstd = LlamaRMSNorm.forward, lambda x, eps: torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    normed = lambda self, x: x.float() * rstd(x, self.variance_epsilon)
    centred = lambda self, x: (
        (x - x.mean(-1, keepdim=True))
        * torch.rsqrt(x.float().var(-1, keepdim=True) + self.variance_epsilon).to(x.dtype)
    )
    unweighted = lambda self, x, index, weights: MixtralExperts.forward(self, x, index, torch.ones_like(weights))

    def other_way(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos - rotate_half(q) * sin, k * cos - rotate_half(k) * sin

    def of_class(cls: type, *forwards: Any, **more: Any) -> list[type]:
        return [type("Other", (cls,), {"forward": forward, **more}) for forward in forwards]

    found = {
        "rms_norm(0, llama, eps)": of_class(
            LlamaRMSNorm,
            lambda self, x: self.weight * (x.float() * rstd(x, 1e-6)).to(x.dtype),
            lambda self, x: norm(self, x) + self.bias,
            lambda self, x, gate=None: norm(self, x),
            lambda self, x: self.weight * (x.float() * rstd(x, self.variance_epsilon).detach()).to(x.dtype),
        ),
        "glu(gate_proj, up_proj, down_proj, act_fn)": of_class(
            LlamaMLP,
            lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=1.0)) * self.up_proj(x)),
            lambda self, x: self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x)),
            lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * self.multiplier,
        ),
        "layer_norm(torch, eps)": of_class(CohereLayerNorm, lambda self, x: self.weight * centred(self, x)),
        "gated_rms_norm(norm first, eps)": of_class(
            Qwen3NextRMSNormGated,
            lambda self, x, gate: norm(self, x) * torch.sigmoid(gate),
            # Kimi-Linear's but for the gate, which it activates in fp32
            lambda self, x, gate: (self.weight.float() * normed(self, x) * ACT2FN[self.activation](gate).float()).to(
                x.dtype
            ),
        ),
        "moe(act_fn)": of_class(MixtralExperts, unweighted),
        "rope(none, halves, twice)": [other_way],
        "rope(none, flat)": [lambda q, k, cos, sin: other_way(q, k, cos, sin, -2)],
        "rope(alone, none, halves, once)": [
            lambda x, cos, sin, unsqueeze_dim=1: other_way(x, x, cos, sin, unsqueeze_dim)[0]
        ],
        "rope(alone, sin first, none, halves, once)": [
            lambda tensor, sin, cos: pairs(pairs(tensor, sin, cos), sin, cos)
        ],
    }
    if "deepseek_v4" in transformers.CONFIG_MAPPING:
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts as Experts

        def limited_after(self, gate_up):
            gate, up = gate_up.chunk(2, -1)
            return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)

        stock = lambda self, x, index, weights: Experts.forward(self, x, index, weights)
        found["moe(act_fn)"] += of_class(Experts, stock, _apply_gate=limited_after)
    return found


def test_tables_of_configurations_that_do_not_name_a_scaling():
    """As the default ones of transformers 4, whose embeddings read it all the same."""

    class Rotary(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.sections = config.rope_scaling.get("mrope_section", [4])

        def forward(self, x, position_ids):
            angles = position_ids[..., None].float().expand(*position_ids.shape, 8)
            return angles.cos(), angles.sin()

    module, config = types.ModuleType(Rotary.__module__), types.SimpleNamespace(rope_scaling=None)
    module.Rotary = Rotary
    assert tables_of(module, config) == {"twice"}
    assert config.rope_scaling is None
    assert tables_of(module, types.SimpleNamespace()) == set()


def test_look_alikes_are_left_alone():
    with references():
        for label, candidates in look_alikes().items():
            slot = next(slot for slot in slots.SLOTS if slots.VARIANTS[label] in slot.variants)
            for candidate in candidates:
                stock = candidate.__dict__["forward"] if isinstance(candidate, type) else candidate
                variant, reason = recognise(slot, candidate, stock, {"twice"})
                assert variant is None and reason, candidate


WITH_EXPERTS = {
    t: row for t, row in families.FAMILIES.items() if "moe(" in str(row.swapped) and t in transformers.CONFIG_MAPPING
}


def test_experts_are_replaced_by_default():
    """In every family in which they can be."""
    assert WITH_EXPERTS and [t for t, row in WITH_EXPERTS.items() if not families.flags_of(t)[row.glu]] == []


@pytest.mark.parametrize(
    "family", some(["flint", "gemma4", "gemma4_text"], [t for t, row in WITH_EXPERTS.items() if row.heads])
)
def test_tiny_models_have_experts(family):
    """So that what the other tests train with them are the experts, too."""
    if transformers.__version__ != families.VERSION:
        pytest.skip(f"stock of {transformers.__version__}: experts have other names")
    swapped = families.FAMILIES[family].swapped
    with stock(family):
        assert {name for name, label in swapped.items() if label.startswith("moe(")} & {
            type(m).__name__ for m in make(family).modules()
        }


GATED = "kimi_linear", "glm5_next_text", "bailing_hybrid", "qwen3_next", "olmo_hybrid", "qwen4_exp_text"


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", GATED)
def test_norms_with_a_gate(family, weight_dtype):
    """The family's own module and ours, with a gate that is part of a wider tensor."""
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    row = infer(family)
    ((name, label),) = [(name, label) for name, label in row.swapped.items() if label.startswith("gated_rms_norm")]
    cls = getattr(families.modeling(family), name)
    torch.manual_seed(0)
    norm = cls(32, eps=1e-5).to(DEVICE)
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.3)
    norm = norm.to(weight_dtype)
    exact = copy.deepcopy(norm).float()
    x, gate = torch.randn(2, 7, 4, 32, device=DEVICE).bfloat16(), torch.randn(2, 7, 4, 64, device=DEVICE).bfloat16()

    def learned(forward: Any, module: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, gate)]
        y = forward(module, leaves[0], leaves[1][..., 32:])
        weighted = (y.float() * torch.linspace(-1, 1, 32, device=DEVICE)).sum()
        grads = torch.autograd.grad(weighted, [*leaves, module.weight])
        return dict(zip(("y", "dx", "dgate", "dw"), (y.detach(), *grads)))

    theirs = learned(cls.forward, norm, torch.bfloat16)
    ours = learned(slots.VARIANTS[label](cls.forward), norm, torch.bfloat16)
    assert ours["y"].dtype == theirs["y"].dtype and (KERNELS or torch.equal(ours["y"], theirs["y"]))
    assert_as_accurate(ours, theirs, learned(cls.forward, exact, torch.float32))


@pytest.mark.skipif(transformers.__version__ != families.VERSION, reason="the table is of another version")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.families)])
def test_the_table_is_that_of_the_installed_transformers(every):
    """Recognises again, and tries on tiny models, some families of each kind, or all of the table."""
    some_of_each = ["afmoe", "gemma3n_text", "internlm3", "llava", "minimax_m3_vl", "mixtral"]
    assert table.check(None if every else some_of_each) == ""


@pytest.mark.skipif(transformers.__version__ != families.VERSION, reason="the table is of another version")
def test_what_is_written_of_families_is_what_would_be_written():
    docs = Path(__file__).parents[2] / "docs"
    page = runpy.run_path(str(docs / "_ext" / "model_families.py"))
    assert (docs / "models.md").read_text() == page["document"]()
    groups = {name: page["group_of"](name) for name in ("llama", "qwen3_vl", "whisper", "bert", "qwen3_next")}
    assert [*groups.values()] == [*page["GROUPS"]]
    assert page["marks"](families.FAMILIES["mixtral"]) == {"head", "norms", "experts", "rotary"}
    assert page["stays_stock"]("falcon").startswith("The MLP has one activation")
    assert families.TABLE.read_text("utf-8") == families.text_of(families.FAMILIES, families.UNVERIFIED)
    assert [*families.FAMILIES] == sorted(families.FAMILIES)
    assert table.STUB.read_text() == table.stub()


def test_an_interrupted_write_leaves_the_old_table(tmp_path, monkeypatch):
    path = tmp_path / "families.json"
    table._exchange(path, "old")
    monkeypatch.setattr(table.os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        table._exchange(path, "new")
    assert path.read_text() == "old"


def test_what_the_table_must_show():
    rows, none = families.FAMILIES, "transformers has no model"
    text = [t for t in CAUSAL if t not in IMAGE_TEXT_TO_TEXT and none not in families.UNVERIFIED.get(t, "")]
    if transformers.__version__ == families.VERSION:
        # those without a model to try them on are listed with the reason
        assert all(t in rows or t in families.UNVERIFIED for t in [*CAUSAL, *IMAGE_TEXT_TO_TEXT])
        assert sum(t in rows and bool(rows[t].heads) and not rows[t].fused for t in text) >= 0.95 * len(text)
    swapped = lambda row: bool(row.swapped or any(rows[p].swapped for p in row.parts if p in rows))
    assert sum(swapped(row) for row in rows.values() if row.heads) >= 150


# Every type that the published package has a function for
@pytest.mark.parametrize("family", some(LISTED, LISTED))
def test_a_live_model_gets_what_its_classes_get(family):
    """In every version of transformers, however its forwards are decorated there."""
    parts = EVERYTHING | {"rematerialise": True}
    of_classes, of_instance = (
        {p.label for p in patches}
        for patches in (class_patches(family, parts, "fused"), instance_patches(make(family), family, parts, "fused"))
    )
    # in a live model, these go with the patches of functions that the same forward calls
    assert of_classes - {"norm_rope", "masks"} == of_instance - {"masks"}
    assert {"rms_norm", "rope", "glu"} <= {slots.SLOT_OF.get(label) for label in of_instance}
    assert any(label.startswith("add_norm") for label in of_instance) or family == "olmo2"  # which norms before it adds


@pytest.mark.parametrize("family", ["glm_ocr", "ernie4_5_vl_moe"])
def test_classes_get_the_rope_of_their_parts(family):
    """Whose tables are told by a type in the same module."""
    model, batch = stock_of(family)
    ropes = lambda patches: {p.label for p in patches if slots.SLOT_OF.get(p.label) == "rope"}
    patches = class_patches(family, EVERYTHING, "fused")
    assert ropes(patches) == ropes(instance_patches(model, family, EVERYTHING, "fused")) and len(ropes(patches)) == 2
    assert not ropes(class_patches(family, EVERYTHING | {"rope": False}, "fused"))
    expected = step(model, batch)[1]
    with patches():
        assert_same_learning(step(model, batch)[1], expected, TOLERANCE)


PUBLISHED = [*families._PUBLISHED, *families._HANDING_ON]


@pytest.mark.skipif(transformers.__version__ != families.VERSION, reason="other versions have other families")
@pytest.mark.parametrize("family", PUBLISHED)
def test_published_functions_serve_all_that_they_have_flags_for(family):
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[family]
    parameters = inspect.signature(apply).parameters
    assert apply is getattr(transformers_of_ours, apply.__name__) and parameters["model"].default is None
    served = families.swapped_slots(family)
    names = {"swiglu": "glu", "geglu": "glu"}
    # rope, rms_norm and the MLP are in every signature of the published package: where there is
    # none, or of a form without a kernel, that is said
    missing = {f for f in parameters if f not in ("model", *HEADS) and names.get(f, f) not in served}
    assert missing <= {"nemotron": {"rms_norm", "swiglu"}}.get(family, set())


def test_flags_are_strict():
    """What is unknown raises and patches nothing; what has no effect is said once, if asked for."""
    for apply in MODEL_TYPE_TO_APPLY_LIGER_FN.values():
        assert apply.__name__.isidentifier() and getattr(transformers_of_ours, apply.__name__) is apply
        with pytest.raises(TypeError, match=r"apply_liger_kernel_to_\w+\(\): .*'no_such_flag'; it takes .*model"):
            apply(rope=False, no_such_flag=True) if "rope" in inspect.signature(apply).parameters else apply(
                no_such_flag=True
            )
        taken = [f for f in inspect.signature(apply).parameters if f != "model"]
        with pytest.raises(TypeError, match="too many positional arguments"):
            apply(*[False] * len(taken), None, False)
    assert not _STOCK and "apply_liger_kernel_to_llama" in dir(transformers_of_ours)
    asked = [("chameleon", flag, f"chameleon: {flag}=True has no effect") for flag in HEADS]  # its head is not fused
    asked += [("gpt2", "rms_norm", "gpt2: rms_norm=True has no effect"), ("olmo", "swiglu", None)]
    asked += [("gpt2", "layer_norm", "patched only in a live model")]
    patching.WARNED.clear()
    for family, flag, said in asked:
        apply = MODEL_TYPE_TO_APPLY_LIGER_FN[family]
        rest = dict.fromkeys((f for f in families.flags_of(family) if f != flag), False)
        for first in (True, False):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                apply(**rest | {flag: False})
                apply(**rest | {flag: None})
                assert not caught
                apply(**rest | {flag: True})
            assert [said in str(w.message) for w in caught] == ([True] if said and first else [])
        restore()


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_reward_models(family):
    """Heads that are not a language model's stay what they are; what is below them is swapped."""
    batch = {"input_ids": tokens()["input_ids"], "labels": torch.tensor([0.3, -0.7], device=DEVICE)}
    results = []
    auto = transformers.AutoModelForSequenceClassification
    for cls in (auto, transformers_of_ours.AutoLigerKernelForSequenceClassification):
        torch.manual_seed(0)
        config = tiny_config(family, num_labels=1, pad_token_id=0)
        model = cls.from_config(config, attn_implementation="eager").to(DEVICE).eval()
        results.append(step(model, batch)[1])
    assert any(is_ours(m.forward) for m in model.modules())
    assert_same_learning(results[1], results[0], TOLERANCE)
