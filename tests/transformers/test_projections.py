"""Linear layers with PEFT's adapters run by the projection engine: what stock PEFT computes,
whatever is switched, at each call."""

import contextlib
import copy
import gc
import linecache
import pickle
import re
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from watching import Watch

peft = pytest.importorskip("peft")

from adapters import (
    BATCH,
    EVERY,
    assert_alike,
    assert_as_near_as_stock,
    assert_same,
    disabled,
    drawn,
    learnt,
    nodes_run,
    patch,
    recomputed,
)
from hf_models import DEVICE, assert_same_bits, assert_same_learning, make, step, tokens
from liger_kernel.transformers.monkey_patch import _patch_layer_norm_module, _patch_rms_norm_module
from peft.tuners.lora import layer as lora_layer
from quick import further
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import liger_kernel.transformers as ours
from liger_kernel.ops._core import operator as _op
from liger_kernel.ops.projections.weights import Dequantized, Weight
from liger_kernel.transformers import projections_report, restore
from liger_kernel.transformers.recognise import projections
from liger_kernel.transformers.rewrite import rules

pytestmark = pytest.mark.skipif(not _op._KERNEL_DEVICES, reason="Triton is not installed: references serve every call")


@pytest.fixture
def ran(monkeypatch) -> list[int]:
    return nodes_run(monkeypatch)


def adapted(
    family: str = "llama", dtype: torch.dtype = torch.float32, targets=EVERY, r: int = 4, base=None, **more
) -> nn.Module:
    sizes = dict(layer_types=["full_attention"]) if family.startswith(("qwen", "gemma2")) else {}
    base = make(family, dtype, num_hidden_layers=1, **sizes) if base is None else base
    return drawn(peft.get_peft_model(base, peft.LoraConfig(r=r, target_modules=targets, **more))).to(DEVICE)


def reasons(model: nn.Module, running: bool = False) -> set[str]:
    report = projections_report(model)
    return {layer.reason for layer in (report.layers if running else report.stock)}


@pytest.mark.parametrize(
    ("family", "targets", "nodes"),
    [
        ("llama", EVERY, [3, 1, 3]),
        ("llama", ["q_proj", "v_proj"], [3]),
        ("qwen2", EVERY, [3, 1, 3]),  # biases
        ("qwen3", EVERY, [3, 1, 3]),
        ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], [1, 1, 2]),
        ("arcee", ["up_proj", "down_proj"], [1, 1]),  # down(relu(up(x)) ** 2)
        ("opt", ["q_proj", "fc1", "fc2"], [3, 1, 1]),  # fc1 and fc2 in the layer itself
    ],
)
def test_families(ran, family, targets, nodes):
    model = assert_same(adapted(family, targets=targets))
    assert ran == nodes
    assert not projections_report(model).stock
    restore(model)
    ran.clear()
    step(model, tokens(**BATCH))
    assert not ran


def lora(model: nn.Module, name: str) -> lora_layer.LoraLayer:
    return next(m for n, m in model.named_modules() if n.endswith(name))


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_switched(ran):
    stock = adapted(target_parameters=None)
    patterns = dict(rank_pattern={"q_proj": 3}, alpha_pattern={"v_proj": 5})
    stock.add_adapter("second", peft.LoraConfig(r=2, target_modules=EVERY, use_rslora=True, **patterns))
    drawn(stock).set_adapter("default")
    twins = patch(copy.deepcopy(stock)), stock
    assert_alike(twins, ran, [3, 1, 3])
    with disabled(twins):
        assert_alike(twins, ran, [])
        assert reasons(twins[0], running=True) == {"adapters are disabled, merged or not active: its base runs"}
    for nodes, change in (
        ([3, 1, 3], None),
        ([3, 1, 3], lambda m: m.set_adapter("second")),
        ([3, 1, 3], lambda m: m.base_model.set_adapter(["default", "second"])),
        ([3, 1, 3], lambda m: lora(m, "q_proj").set_adapter("second")),
        ([3, 1, 3], lambda m: lora(m, "q_proj").scale_layer(3.0)),
        ([3, 3], lambda m: lora(m, "o_proj").merge()),
        ([3, 1, 3], lambda m: lora(m, "o_proj").unmerge()),
        ([3, 3], lambda m: lora(m, "o_proj").merge()),
    ):
        assert_alike(twins, ran, nodes, change)
    with disabled(twins):  # which takes it out again at the next call
        assert_alike(twins, ran, [])
    assert not lora(twins[0], "o_proj").merged


@pytest.mark.parametrize(
    ("hooked", "nodes"),
    [("", [3, 1, 3]), ("q_proj", [1, 1, 1, 3]), ("k_proj", [1, 1, 1, 3]), ("gate_proj", [3, 1, 1, 1])],
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(ran, reentrant, hooked, nodes):
    """With dropout, rows run alike with and without gradients: they draw the same masks."""
    model = recomputed(adapted(lora_dropout=0.5), reentrant)
    if hooked:
        lora(model, hooked).register_forward_hook(lambda *_: None)
    assert_same(model)
    assert ran == nodes * 2


def test_masks_of_sixteen_bits(ran):
    """Those of the forward are those of the recomputation, also where stock's are others."""
    models = [recomputed(patch(adapted(dtype=torch.bfloat16, lora_dropout=0.5)), way) for way in (False, True)]
    learned = [learnt(model) for model in models]
    assert_same_bits(*learned)
    assert ran == [3, 1, 3] * 4


def test_few_rows_without_gradients(ran):
    """They run their modules, unless dropout is active in one of them."""
    model = patch(adapted(lora_dropout=0.5))
    with torch.no_grad():
        model.eval()(**tokens(**BATCH))
        assert not ran
        lora(model, "v_proj").lora_dropout.train()
        model(**tokens(**BATCH))
    assert ran == [3]


@pytest.mark.parametrize(("family", "products"), [("llama", 7 + 4 + 2), ("gemma2", 7 + 7)])
def test_what_a_checkpointed_layer_multiplies_again(family, products, monkeypatch):
    """Its recomputation ends before an MLP that ends the layer; a norm behind needs all."""
    multiplied, product = [], Weight.forward
    monkeypatch.setattr(Weight, "forward", lambda self, x, y: multiplied.append(self.shape) or product(self, x, y))
    assert_same(recomputed(adapted(family), False), 1e-4, rms_norm=True)
    assert len(multiplied) == products


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", dict(lora_dropout=0.5)),
        ("qwen2", dict(use_dora=True)),
        ("qwen2", dict(bias="all")),
        ("qwen2", dict(lora_bias=True, targets=["q_proj", "v_proj"])),
        ("llama", dict(use_rslora=True, rank_pattern={"q_proj": 2, "gate_proj": 7}, alpha_pattern={"up_proj": 3})),
        ("llama", dict(layer_replication=[[0, 1], [0, 1]])),
        ("llama", dict(modules_to_save=["o_proj"], targets=["q_proj", "up_proj"])),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else v,
)
@pytest.mark.filterwarnings("ignore")
def test_adapters(ran, family, more):
    """Dropout draws the masks that it draws in stock."""
    assert_same(adapted(family, **more))
    assert ran in ([3, 1, 3], [3], [3, 3], [3, 1, 3] * 2)


def test_dora_of_which_little_is_left(ran):
    """The adapter takes nearly all of a row away."""
    model = adapted(targets=["o_proj", "up_proj"], use_dora=True, lora_alpha=4)
    for name in ("o_proj", "up_proj"):
        m = lora(model, name)
        m.lora_A["default"].weight.data[0] = m.base_layer.weight[5]
        m.lora_B["default"].weight.data[5] = torch.tensor([1e-3 - 1, 0, 0, 0])
    assert_same(model, tolerance=1e-4)
    assert ran == [1, 3]


def learnt_scaling(m: nn.Module, value: torch.Tensor) -> nn.Parameter:
    m.learnt_scaling = nn.Parameter(value.to(DEVICE))
    return m.learnt_scaling


SCALINGS = {
    "one": lambda m: torch.tensor(1.5, device=DEVICE),
    "learnt": lambda m: learnt_scaling(m, torch.tensor(1.5)),
    "learnt, (1,)": lambda m: learnt_scaling(m, torch.tensor([1.5])),
    "integer": lambda m: torch.tensor(2, device=DEVICE),
    "for each output": lambda m: torch.linspace(0.5, 2, m.out_features, device=DEVICE),
    "learnt for each output": lambda m: learnt_scaling(m, torch.linspace(0.5, 2, m.out_features)),
    "for each token": lambda m: learnt_scaling(m, torch.linspace(0.5, 2, BATCH["length"]).unsqueeze(-1)),
}


@pytest.mark.parametrize(
    ("more", "scaling"),
    [
        *(({}, scaling) for scaling in SCALINGS),
        *((dict(lora_bias=True), scaling) for scaling in ("learnt", "learnt for each output")),
        (dict(use_dora=True), "learnt"),  # its norms do not know one for each output
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_scalings_that_are_tensors(ran, scaling, more):
    """They get their gradients; with any other shape, the layer runs as it is."""
    model = adapted(**more, targets=["q_proj", "o_proj"] if more else EVERY)
    for m in scaled(model):
        m.scaling["default"] = SCALINGS[scaling](m)
    # the gradient of one number is a long sum, which may nearly cancel
    assert_same(model, {"learnt": 1e-3, "learnt for each output": 1e-4}.get(scaling, 1e-5))
    assert bool(ran) == (scaling != "for each token")
    other = "adapter 'default' has a scaling that is sharded, or of neither one element nor one for each output"
    assert reasons(model) == (set() if ran else {other})


def scaled(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if hasattr(m, "scaling") and hasattr(m, "lora_A")]


def test_no_number_is_read_from_a_tensor(ran):
    """The host would wait for a GPU."""
    hotswap = pytest.importorskip("peft.utils.hotswap")
    model = adapted()
    hotswap.prepare_model_for_compiled_hotswap(model, target_rank=8)
    for part in ("base_model.model.model.layers.0.self_attn", "base_model.model.model.layers.0.mlp"):
        patch(model)
        with Watch() as seen:
            module, x = model.get_submodule(part), torch.randn(1, 80, model.config.hidden_size, device=DEVICE)
            found = [projections.projection(m, x.dtype) for m in module.children() if hasattr(m, "lora_A")]
            projections.linears(x[..., : found[0].weight.shape[1]], found[:2])
        assert not seen.reads and len(found) > 2


NUMBERS = [("llama", "variance_epsilon", 0.01), ("falcon_h1", "gate_multiplier", 0.7), ("gpt_oss", "alpha", 1.5)]
NUMBERS += further(*((family, "variance_epsilon", 0.01) for family in ("qwen3", "qwen3_next")), ("gemma", "eps", 0.01))
NUMBERS += further(("falcon_h1", "down_multiplier", 0.7), ("gpt_oss", "limit", 2.0), ("gpt_oss", "scaling", 0.4))
NUMBERS += further(("granite", "residual_multiplier", 0.5), ("granite", "embedding_multiplier", 2.0))
NUMBERS += further(("cohere", "logit_scale", 0.3))


@pytest.mark.parametrize(("family", "name", "value"), NUMBERS)
def test_numbers_of_other_modules_that_are_learnt(family, name, value):
    """They get their gradients."""
    model = make(family)
    numbers = [m for m in model.modules() if isinstance(getattr(m, name, None), (int, float))]
    owners = [m for m in numbers if not isinstance(m, nn.LayerNorm)]
    for m in owners:
        delattr(m, name)
        m.register_parameter(name, nn.Parameter(torch.tensor(value, device=DEVICE)))
    expected = learnt(model)
    ours._apply_liger_kernel_to_instance(model)
    assert_same_learning(learnt(model), expected, 1e-4)
    assert owners and any(n.endswith(name) for n in expected)


class Normed(nn.LayerNorm):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.bias + self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


@pytest.mark.parametrize(
    ("norm", "patch_one"), [(LlamaRMSNorm, _patch_rms_norm_module), (Normed, _patch_layer_norm_module)]
)
def test_numbers_of_single_modules_that_are_learnt(norm, patch_one):
    m, x = norm(8).to(DEVICE), torch.randn(3, 8, device=DEVICE)
    with torch.no_grad():
        m.weight.normal_()
    m.variance_epsilon = nn.Parameter(torch.tensor(0.1, device=DEVICE))
    expected = torch.autograd.grad(m(x).square().sum(), [*m.parameters()])
    patch_one(m)
    for g, t in zip(torch.autograd.grad(m(x).square().sum(), [*m.parameters()]), expected):
        assert torch.equal(g, t)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (dict(use_dora=True, lora_dropout=0.5), "adapter 'default' has a magnitude and dropout"),
        (dict(lora_dropout=1.0), "the dropout of adapter 'default' drops everything"),
    ],
)
def test_adapters_that_are_stock(ran, more, reason):
    model = assert_same(adapted(**more))
    assert not ran and reasons(model, running=True) == {reason}
    assert not reasons(model.eval())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("thin", [torch.bfloat16, torch.float32])
def test_sixteen_bits(ran, autocast, thin):
    assert_as_near_as_stock(adapted(dtype=torch.bfloat16), thin, autocast)
    assert ran == [3, 1, 3]


def test_compiles(ran):
    """A layer with adapters is one graph, of stock's operations."""
    model = patch(adapted(), rms_norm=True)
    layer = model.get_base_model().model.layers[0]
    x = torch.randn(1, 5, model.config.hidden_size, device=DEVICE)
    tables = model.get_base_model().model.rotary_emb(x, torch.arange(5, device=DEVICE)[None])
    run = lambda f: (
        y := f(x, position_embeddings=tables),
        torch.autograd.grad(y.square().sum(), [p for p in layer.parameters() if p.requires_grad]),
    )
    expected = run(layer)
    ran.clear()
    torch._dynamo.reset()
    found = run(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    assert not ran
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Foreign(nn.Linear):
    """A Linear with a forward that nobody knows, as for weights in a format of their own."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.round(decimals=1), self.bias)


def foreign(model: nn.Module) -> None:
    for m in model.modules():
        if isinstance(m, lora_layer.Linear):
            m.base_layer.__class__ = Foreign


@pytest.mark.parametrize("more", [{}, dict(lora_dropout=0.5)], ids=str)
def test_unknown_bases_run_by_themselves(ran, more):
    model = adapted(**more)
    foreign(model)
    lora(model, "k_proj").base_layer.__class__ = nn.Linear
    assert_same(model)
    assert ran == [3, 1, 2, 1]
    said = [layer.reason for layer in projections_report(model).layers if layer.runs]
    assert said.count("beside its base, a Foreign, which runs by itself") == 6 and said.count("") == 1


@pytest.mark.parametrize("base", [nn.Linear, Foreign])
def test_no_cast_is_kept(base):
    """fp32 adapters under autocast keep the input itself, where PEFT keeps a cast of a cast."""
    layer = lora(adapted(dtype=torch.bfloat16, targets=["o_proj"]), "o_proj")
    layer.base_layer.__class__ = base
    x = torch.randn(50, layer.in_features, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for call in (projections.linear, lambda m, x: m(x)):
        kept: dict[int, torch.Tensor] = {}
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.setdefault(t.data_ptr(), t), lambda t: t
        )
        with torch.autocast(DEVICE, torch.bfloat16), hooks:
            call(layer, x)
        found.append([at == x.data_ptr() for at, t in kept.items() if t.shape == x.shape])
    assert found == [[True], [False]]


def test_dora_needs_its_base(ran):
    model = adapted(use_dora=True)
    foreign(model)
    patch(model)
    assert reasons(model, running=True) == {"a base of class Foreign"}


def quantised(kind: str) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    model = make("llama", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    int8 = bnb.nn.Linear8bitLt, bnb.nn.Int8Params, dict(has_fp16_weights=False)
    options = dict(quant_type=kind.split()[0], compress_statistics="double" in kind)
    layer, weight, options = int8 if kind == "int8" else (bnb.nn.Linear4bit, bnb.nn.Params4bit, options)
    for parent in list(model.model.layers.modules()):
        for name, m in list(parent.named_children()):
            if type(m) is nn.Linear:
                new = layer(m.in_features, m.out_features, bias=False, **options)
                new.weight = weight(m.weight.data, requires_grad=False, **options)
                setattr(parent, name, new.to(DEVICE))
    setattr(model, "is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit", True)
    return adapted(base=model)


@pytest.mark.parametrize("kind", ["nf4", "nf4 double", "fp4", "int8"])
@pytest.mark.filterwarnings("ignore")
def test_bitsandbytes(ran, kind):
    model = quantised(kind)
    assert_same(model, tolerance=1e-4)
    assert ran == ([3, 1, 2, 1] if kind == "int8" else [3, 1, 3])


@pytest.mark.filterwarnings("ignore")
def test_autocast_decides_over_the_dtype_of_four_bits(ran):
    """transformers' default for that is fp32, also where autocast then multiplies in 16 bits."""
    model = quantised("nf4 double")
    for m in model.modules():
        if hasattr(m, "compute_type_is_set"):
            m.compute_dtype, m.compute_type_is_set = torch.float32, True
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_same(model, tolerance=0.3)
    assert ran == [3, 1, 3]


def drops(dropout: nn.Module):
    return lambda m: m.lora_dropout.update({"default": dropout})


class Double(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def held_as_buffer(m: nn.Module, name: str, value: torch.Tensor) -> None:
    delattr(m, name)
    m.register_buffer(name, value)


def another_weight(m: nn.Module, cls: type = torch.Tensor) -> None:
    m.weight = nn.Parameter(m.weight.detach().clone().as_subclass(cls))


# of a linear layer, alone or below adapters
OF_LINEAR = {
    "bias": lambda m: setattr(m, "bias", nn.Parameter(torch.ones(m.out_features))),
    "bias that is a buffer": lambda m: held_as_buffer(m, "bias", torch.ones(m.out_features)),
    "weight": another_weight,
    "class of the weight": lambda m: another_weight(m, type("Own", (torch.Tensor,), {})),
    "shape": lambda m: setattr(m.weight, "data", m.weight.data[:2]),
    "dtype": lambda m: m.double(),
    "class": lambda m: setattr(m, "__class__", Double),
    "ZeRO": lambda m: setattr(m.weight, "ds_id", 1),
    "hook": lambda m: m.register_forward_hook(print),
    "forward": lambda m: setattr(m, "forward", print),
    "backward hook": lambda m: m.register_full_backward_pre_hook(print),
    "forward of linear layers": lambda m: mock.patch.object(nn.Linear, "forward", lambda self, x: x),
}
CHANGES = OF_LINEAR | {
    f"{name} of the base": lambda m, change=change: change(m.base_layer) for name, change in OF_LINEAR.items()
}
for part in ("lora_A", "lora_B", "lora_dropout"):
    CHANGES |= {
        f"{name} of {part}": lambda m, part=part, change=OF_LINEAR[name]: change(getattr(m, part)["default"])
        for name in ("hook", "forward")
    }
# of a layer with adapters
CHANGES |= {
    "off": lambda m: m.enable_adapters(False),
    "another": lambda m: m.set_adapter("other"),
    "both": lambda m: m.set_adapter(["default", "other"]),
    "gone": lambda m: m.delete_adapter("default"),
    "merged": lambda m: m.merge(),
    "scale": lambda m: m.scale_layer(0.5),
    "bias of B": lambda m: setattr(m.lora_B["default"], "bias", nn.Parameter(torch.ones(m.out_features))),
    "bias of A": lambda m: setattr(m.lora_A["default"], "bias", nn.Parameter(torch.ones(4))),
    "bias of A that is a buffer": lambda m: held_as_buffer(m.lora_A["default"], "bias", torch.ones(4)),
    "traced base": lambda m: setattr(
        m, "base_layer", torch.jit.trace(m.base_layer, m.weight.new_ones(1, m.in_features))
    ),
    "weight of A": lambda m: another_weight(m.lora_A["default"]),
    "dtype of A": lambda m: m.lora_A["default"].double(),
    "device of A": lambda m: m.lora_A["default"].to("meta"),
    "A": lambda m: m.lora_A.update({"default": nn.Linear(m.in_features, 4, bias=False)}),
    "class of B": lambda m: setattr(m.lora_B["default"], "__class__", Double),
    "dropout": drops(nn.Dropout(0.25)),
    "class of dropout": drops(nn.AlphaDropout(0.5)),
    "p": lambda m: setattr(m.lora_dropout["default"], "p", 0.75),
    "p that is a tensor": drops(nn.Dropout(torch.tensor(0.5))),
    "evaluation": lambda m: m.eval(),
    "casts": lambda m: (m.lora_A.double(), m.lora_B.double(), setattr(m, "cast_input_dtype_enabled", False)),
    "direction": lambda m: setattr(m, "fan_in_fan_out", True),
    "variant": lambda m: m.lora_variant.update({"default": peft.tuners.lora.variants.ALoraLinearVariant()}),
    "base": lambda m: setattr(m, "base_layer", nn.Linear(m.in_features, m.out_features, bias=False)),
    "ZeRO of B": lambda m: setattr(m.lora_B["default"].weight, "ds_id", 1),
    "hook of the layer": lambda m: m.register_forward_hook(print),
    "forward of the layer": lambda m: setattr(m, "forward", print),
    "class of the layer": lambda m: setattr(m, "__class__", type("Linear", (lora_layer.Linear,), {})),
    "hook of all modules": lambda m: nn.modules.module.register_module_forward_hook(lambda *a: None),
    "forward of the class": lambda m: mock.patch.object(type(m), "forward", lambda self, x: x),
}


def answer(found) -> tuple:
    if isinstance(found, projections.Fallback):
        return ("left", str(found))
    adapters = [(id(a.a), id(a.b), id(a.bias), a.a.device, a.scale, a.dropout) for a in found.adapters]
    learnable = id(found.weight.learnable)
    return type(found.weight), found.weight.shape, learnable, id(found.bias), id(found.magnitude), adapters


def found_by_a_node(m: nn.Module):
    """What a node would run now, as it is kept from call to call."""
    return projections.kept(first_of, torch.ones(1, m.in_features), [m])


def first_of(found, x):
    return found[0]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_layer_is_seen_at_the_next_call(change):
    m = nn.Linear(6, 8, bias=False)
    if change not in OF_LINEAR:
        model = adapted(targets=["q_proj"], lora_dropout=0.5)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
        m = lora(model, "q_proj")
    first = found_by_a_node(m)
    assert found_by_a_node(m) is first  # nothing has changed: kept
    undo = CHANGES[change](m)
    undo = undo if hasattr(undo, "__enter__") else None
    with undo or contextlib.nullcontext():
        changed = answer(found_by_a_node(m))
        assert changed != answer(first) and changed == answer(projections.projection(m, torch.float32))
    assert undo is None or answer(found_by_a_node(m)) == answer(first)


def test_who_learns_is_asked_at_each_call(ran):
    model = patch(adapted(targets=["q_proj"]))
    m = lora(model, "q_proj")
    learning = lambda: (step(model, tokens(**BATCH)), {n for n, p in m.named_parameters() if p.grad is not None})[1]
    before = learning()
    m.lora_A["default"].weight.requires_grad_(False)
    m.base_layer.weight.requires_grad_(True)
    model.zero_grad()
    assert learning() == before - {"lora_A.default.weight"} | {"base_layer.weight"}


def test_what_is_kept_of_a_layer_is_no_part_of_it():
    """Copies and pickles have no part in it, and it goes with its layer."""
    m = lora(adapted(targets=["q_proj"]), "q_proj")
    names = set(vars(m))
    first = found_by_a_node(m)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert vars(other).keys() == names
        assert found_by_a_node(other).adapters[0].a is other.lora_A["default"].weight
    kept, alive = len(projections.KEPT), weakref.ref(first)
    del m, first, other
    gc.collect()
    assert alive() is None and len(projections.KEPT) < kept


def test_weights_that_are_replaced_are_let_go_at_once(ran):
    """Not at the next call of their layer: until then a model would be there twice."""
    model = patch(adapted())
    step(model, tokens(**BATCH))
    replaced = [weakref.ref(p) for p in model.parameters()]
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    gc.collect()
    assert ran and not [p for p in replaced if p() is not None]
    step(model, tokens(**BATCH))
    assert len(projections.KEPT)
    restore(model)
    assert not len(projections.KEPT)


@pytest.mark.filterwarnings("ignore")
def test_a_change_of_a_layer_in_four_bits_is_seen_at_the_next_call():
    m = lora(quantised("nf4 double"), "q_proj")
    read = lambda: found_by_a_node(m).weight
    assert isinstance(read(), Dequantized) and read() is read()
    m.base_layer.compute_dtype = torch.bfloat16
    assert "computes in torch.bfloat16" in read().why
    m.base_layer.compute_dtype = torch.float32
    found = read()
    assert isinstance(found, Dequantized)
    memory = StorageWeakRef(m.base_layer.weight.untyped_storage())
    m.base_layer.weight.data = torch.zeros_like(m.base_layer.weight.data)  # as a model does that moves
    assert memory.expired() and read() is found and found.dense(torch.float32).unique().numel() <= 64
    m.base_layer.weight.quant_state.packing_format_for_cpu = True  # in place, by a step of generation
    assert "packed for a CPU" in read().why
    m.base_layer.weight.quant_state = None
    assert "without its state" in read().why


def test_tensors_elsewhere_stay():
    """An adapter on another device is PEFT's matter, an error of PyTorch's."""
    model = patch(adapted())
    lora(model, "o_proj").lora_A["default"].to("meta")
    (layer,) = projections_report(model).stock
    assert (layer.name.rpartition(".")[2], layer.reason) == ("o_proj", "an adapter on another device")
    with pytest.raises(RuntimeError):
        step(model, tokens(**BATCH))


def test_report():
    model = adapted(targets=["q_proj", "up_proj", "lm_head", "embed_tokens"])
    running = lambda: {layer.name.rpartition(".")[2] for layer in projections_report(model).layers if layer.runs}
    assert "runs 0 of 4 layers" in str(projections_report(model))
    patch(model)
    assert running() == {"q_proj", "up_proj"}
    assert reasons(model) == {"an embedding", "the head: LlamaForCausalLM is not patched"}
    patch(model, fused_linear_cross_entropy=True)
    assert running() == {"q_proj", "up_proj", "lm_head"}
    model.get_base_model().model.layers[0].mlp.act_fn = nn.Softplus()
    assert reasons(model) == {"an embedding", "LlamaMLP has an activation that is none of ours"}
    model = patch(adapted("falcon_h1", targets=["up_proj"]))
    assert running() == {"up_proj"}
    model.get_base_model().model.layers[0].feed_forward.gate_multiplier = torch.tensor(0.5)
    assert reasons(model) == {"FalconH1MLP has a factor or limit that is a tensor"}
    assert str(projections_report(make("llama"))) == "no linear layer has an adapter, a quantised weight or FP8"


def of_lora(tmp_path) -> dict:
    make("llama").save_pretrained(tmp_path)
    return {"name": tmp_path}


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="its model is on the CPU, where kernels are interpreted only without a GPU"
)
@pytest.mark.parametrize("page, given", [("lora", of_lora), ("moe", lambda _: {"ids": tokens()["input_ids"]})])
def test_the_document_is_right(page, given, tmp_path, capsys):
    """The example before its report runs, and prints it."""
    text = (Path(__file__).parents[2] / "docs" / "guides" / f"{page}.md").read_text()
    (printed,) = re.findall(r"```\n(the engine.*?)```", text, re.DOTALL)
    names = given(tmp_path)
    for example in re.findall(r"```python\n(.*?)```", text[: text.index(printed)], re.DOTALL):
        capsys.readouterr()
        exec(example, names)
    assert capsys.readouterr().out == printed


# what is between two calls with one input, or in the place of the second one, and a reason not to
# compute both together
APART = {
    "assigned": "x = x + 1",
    "written": "x.add_(1)",
    "written by another name": "y.mul_(2)",
    "written in part": "x[0] = 0",
    "given away": "self.change(x)",
    "given as out": "torch.exp(q, out=self.memory)",
    "conditional": "return q, self.k_proj(x) if y else None",
    "short circuit": "return q, y and self.k_proj(x)",
    "in a branch": "if y: return q, self.k_proj(x)\n    return q",
    "walrus": "return q, (x := x + 1) + self.k_proj(x)",
    "replaced": "self.k_proj = self.q_proj",
    "random": "q = self.dropout(q)",
    "in a lambda": "later = lambda: self.k_proj(x)\n    return q, later()",
    "in a loop": "for _ in range(2): q = q + self.k_proj(x)\n    return q",
    "method": "return q, self.key(x)",
    "another self": "self = y",
}


def written(change: str):
    """A forward that does this after the first of two calls."""
    lines = ["class Written:", "  def key(self, x): return x", "  def forward(self, x, y):", "    q = self.q_proj(x)"]
    lines += [f"    {change}", "" if "return" in change else "    return q, self.k_proj(x)"]
    source = "\n".join(lines) + "\n"
    linecache.cache["<written>"] = (len(source), None, source.splitlines(True), "<written>")
    exec(compile(source, "<written>", "exec"), names := {"torch": torch, "__name__": __name__})
    return names["Written"].forward


@pytest.mark.parametrize("name", APART)
def test_calls_that_stay_where_they_are(name):
    new = rules.fused(written(APART[name]), frozenset({rules.PROJECTIONS}))
    assert (new is None) == (name == "another self")
    assert new is None or "_liger_shared" not in new.__code__.co_freevars
    assert "_liger_shared" in rules.fused(written("y = x.shape"), frozenset({rules.PROJECTIONS})).__code__.co_freevars
