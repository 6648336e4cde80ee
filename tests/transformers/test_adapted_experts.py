"""Experts with PEFT's adapters (``target_parameters``): what stock PEFT computes, whatever is
switched, at each call, without the sum of weight and adapter."""

import copy
import itertools

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft", minversion="0.17")
pytest.importorskip("transformers.integrations.moe", reason="this version has one implementation of experts")

from adapters import (
    BATCH,
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
from hf_models import DEVICE, assert_same_learning, make, step, tokens
from watching import Watch, noted, saved

from liger_kernel.ops._core import operator as _op
from liger_kernel.transformers import projections_report, restore
from liger_kernel.transformers.recognise import experts

pytestmark = pytest.mark.skipif(not _op._KERNEL_DEVICES, reason="Triton is not installed: references serve every call")
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
ONE_LAYER = dict(num_hidden_layers=1)


@pytest.fixture
def ran(monkeypatch) -> list[tuple[int, int]]:
    """How many adapters gate_up and down had at each call of the node, from now on."""
    return noted(monkeypatch, experts, "adapted_moe", lambda *args, **_: (len(args[5]), len(args[6])))


def adapted(
    family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, of=BOTH, targets=(), base=None, **more
) -> nn.Module:
    if base is None:
        more_layers = family in ("deepseek_v3", "glm4_moe", "llama4_text")  # the first of them is dense
        more |= dict(layer_types=["full_attention"]) if family == "gpt_oss" else {}
        base = make(family, dtype, num_hidden_layers=1 + more_layers, **more)
    if family == "aria_text" and not any(name.endswith("gate_up_proj") for name, _ in base.named_parameters()):
        pytest.skip("experts of this Transformers have other parameters")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=3, target_modules=list(targets), target_parameters=of)
    return drawn(peft.get_peft_model(base, config)).to(DEVICE)


def wrappers(model: nn.Module) -> list:
    return [m for m in model.modules() if experts.is_wrapper(m)]


def reasons(model: nn.Module) -> list[str]:
    return [layer.reason for layer in projections_report(model).stock]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "aria_text"])
def test_families(ran, family):
    model = assert_same(adapted(family))
    assert {*ran} == {(1, 1)} and not reasons(model)
    restore(model)
    ran.clear()
    learnt(model)
    assert not ran


def test_a_layout_that_peft_mistakes(ran):
    """Of parameters (E, in, out) whose module does not say so, A belongs to the output."""
    base = make("gpt_oss", num_hidden_layers=1, layer_types=["full_attention"])
    experts = base.model.layers[0].mlp.experts
    experts.is_transposed = False
    model = adapted(base=base)
    experts.is_transposed = True
    assert on(model, "gate_up_proj").in_features == experts.gate_up_proj.shape[2]
    assert_same(model)
    assert ran == [(1, 1)]


UNPATCHED = "is not patched, or its forward does not call them as self.experts(x, index, weights)"
# what is adapted, and flags of the patch: adapters of gate_up and down at each call, and why others
# stay PEFT's
PARTS = {
    "Llama 4, which multiplies all tokens by all experts": (
        *(dict(family="llama4_text"), {}),
        *([], {f"Llama4TextMoe {UNPATCHED}"}),
    ),
    "swiglu off": ({}, dict(swiglu=False, projections=True), [], {"Qwen3MoeExperts is not patched"}),
    "projections off": ({}, dict(projections=False), [], {f"Qwen3MoeSparseMoeBlock {UNPATCHED}"}),
    "gate_up": (dict(of=BOTH[:1]), {}, [(1, 0)], set()),
    "down": (dict(of=BOTH[1:]), {}, [(0, 1)], set()),
    "a router beside": (
        *(dict(of=[*BOTH, "mlp.gate.weight"]), {}),
        *([(1, 1)], {"an adapter of the parameter weight of a Qwen3MoeTopKRouter"}),
    ),
    "a bias": (
        *(dict(family="gpt_oss", of=[*BOTH, "experts.down_proj_bias"]), {}),
        *([], {"an adapter of down_proj_bias"}),
    ),
    "one expert, for which PEFT's sum is another product": (
        *(dict(num_local_experts=1, num_experts_per_tok=1), {}),
        *([], {"a single expert, to whose weight PEFT adds another product"}),
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_parts(ran, part):
    what, flags, nodes, said = PARTS[part]
    assert {*reasons(assert_same(adapted(**what), **flags))} == said and ran == nodes


def test_the_sum_is_never_made(ran):
    """Neither of weights and adapters, nor a gradient of its size."""
    model = adapted()
    size = min(wrapper.get_param().numel() for wrapper in wrappers(model))
    for patched in (False, True):
        with Watch() as seen:
            step(patch(model) if patched else model, tokens(**BATCH))
        assert (seen.largest < size) == patched
    assert ran == [(1, 1)]


@pytest.fixture
def twins():
    """The same model twice, patched and stock, with two adapters of different ranks and scales."""
    stock = adapted()
    second = peft.LoraConfig(r=2, target_modules=[], target_parameters=BOTH, lora_alpha=5, use_rslora=True)
    stock.add_adapter("second", second)
    drawn(stock).set_adapter("default")
    return patch(copy.deepcopy(stock)), stock


def on(model: nn.Module, parameter: str):
    return next(wrapper for wrapper in wrappers(model) if wrapper.parameter_name == parameter)


def experts_of(model: nn.Module) -> nn.Module:
    return on(model, "down_proj").get_base_layer()


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_switched(twins, ran):
    assert_alike(twins, ran, [(1, 1)])
    with disabled(twins):
        assert_alike(twins, ran, [])
        (layer,) = projections_report(twins[0]).layers
        assert layer.reason == "adapters are disabled, merged or not active: the experts run without them"
    for nodes, change in (
        ((1, 1), None),
        ((1, 1), lambda m: m.set_adapter("second")),
        ((2, 2), lambda m: m.base_model.set_adapter(["default", "second"])),
        ((2, 2), lambda m: on(m, "down_proj").scale_layer(3.0)),
        ((2, 1), lambda m: on(m, "down_proj").set_adapter("second")),
        ((2, 0), lambda m: on(m, "down_proj").merge()),
        ((2, 1), lambda m: on(m, "down_proj").unmerge()),
    ):
        assert_alike(twins, ran, [nodes], change)


@pytest.mark.filterwarnings("ignore")
def test_merged_experts_run_alone(twins, ran):
    """Disabled while merged, they are taken out again by PEFT, at the next call."""

    def merge(model):
        for wrapper in wrappers(model):
            wrapper.merge()
        model.get_base_model().lm_head.requires_grad_(True)

    assert_alike(twins, ran, [], merge)
    with disabled(twins):
        assert_alike(twins, ran, [])
    assert not any(wrapper.merged for wrapper in wrappers(twins[0]))


@pytest.mark.parametrize("part", ["", "base_layer", "base_layer.base_layer"])
def test_hooks_run(twins, ran, part):
    """On a wrapper or on the experts: PEFT's code runs."""
    seen = []
    for model in twins:
        on(model, "down_proj").get_submodule(part).register_forward_hook(
            lambda m, args, out, model=model: seen.append(model)
        )
    assert_alike(twins, ran, [])
    assert seen == [*twins]
    assert "hooks" in reasons(twins[0])[0]


def test_what_learns_may_change(twins, ran):
    def freeze(model):
        on(model, "gate_up_proj").lora_A["default"].requires_grad_(False)
        on(model, "down_proj").lora_B["default"].requires_grad_(False)

    def learn(model):
        experts_of(model).down_proj.requires_grad_(True)
        model.get_base_model().model.layers[0].mlp.gate.requires_grad_(True)  # the router

    assert_alike(twins, ran, [(1, 1)], freeze)
    assert_alike(twins, ran, [(1, 1)], learn)


def test_beside_adapters_of_attention(ran, monkeypatch):
    linears = nodes_run(monkeypatch)
    model = assert_same(adapted(targets=["q_proj", "v_proj", "o_proj"]))
    assert ran == [(1, 1)] and linears == [3, 1] and len(projections_report(model).layers) == 4


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("thin", [torch.bfloat16, torch.float32])
def test_sixteen_bits(ran, autocast, thin):
    assert_as_near_as_stock(adapted("gpt_oss", torch.bfloat16), thin, autocast)
    assert ran == [(1, 1)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(ran, reentrant):
    assert_same(recomputed(adapted(), reentrant))
    assert ran == [(1, 1)] * 2


@pytest.mark.slow
def test_compiles(ran):
    """The block is what stock's is under torch.compile: PEFT's own operations."""
    model = patch(adapted())
    block = model.get_base_model().model.layers[0].mlp
    x = torch.randn(1, 5, model.config.hidden_size, device=DEVICE)
    expected = block(x)
    assert ran == [(1, 1)]
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(block, backend="aot_eager")(x), expected, rtol=1e-4, atol=1e-5)
    assert ran == [(1, 1)]


def in_four_bits(family: str, double: bool = True) -> tuple[nn.Module, nn.Module]:
    """A model with experts in 4 bits of bitsandbytes, and the same with what these bits mean."""
    bnb = pytest.importorskip("bitsandbytes.nn.parametrize", reason="could not import 'bitsandbytes'")
    sizes = dict(layer_types=["full_attention"], intermediate_size=64)
    # on a CPU, bitsandbytes misreads rows that are shorter than its blocks of 64
    packed = make(family, **ONE_LAYER, **(sizes if family == "gpt_oss" else dict(moe_intermediate_size=64)))
    dense = copy.deepcopy(packed)
    of_both = [m.model.layers[0].mlp.experts for m in (packed, dense)]
    for name in ("gate_up_proj", "down_proj"):
        bnb.replace_parameter_4bit(of_both[0], name, compress_statistics=double, quant_type="nf4")
        getattr(of_both[1], name).data.copy_(getattr(of_both[0], name))
    return packed, dense


@pytest.mark.parametrize(("family", "double"), [("qwen3_moe", True), ("qwen3_moe", False), ("gpt_oss", True)])
def test_four_bits(ran, family, double):
    """In every step what PEFT learns with dense weights; over 4 bits it leaves its sum in place."""
    packed, dense = in_four_bits(family, double)
    # PEFT finds computed parameters by their whole names, and nests their wrappers the other way
    of = [f"model.layers.0.mlp.{name}" for name in BOTH]
    model, other = patch(adapted(base=packed, of=of)), adapted(base=dense, of=of)
    for name in ("gate_up_proj", "down_proj"):
        for part in ("lora_A", "lora_B"):
            getattr(on(model, name), part).load_state_dict(getattr(on(other, name), part).state_dict())
    sizes = {m.get_param().numel() for m in wrappers(model)}

    def by_parameter(model: nn.Module) -> dict[str, torch.Tensor]:
        loss, parts = learnt(model)["loss"], itertools.product(wrappers(model), ("lora_A", "lora_B"))
        return {f"{m.parameter_name} {part}": getattr(m, part)["default"].weight.grad for m, part in parts} | {
            "loss": loss
        }

    expected = by_parameter(other)
    for _ in range(2):
        with saved() as kept:
            assert_same_learning(by_parameter(model), expected, 1e-5)
        assert kept and not sizes & {t.numel() for t in kept}
    assert ran == [(1, 1)] * 2 and not reasons(model)


def test_four_bits_without_adapters(ran):
    """Adapters of attention alone: no dense experts are saved for the backward."""
    packed, dense = in_four_bits("qwen3_moe")
    expected = learnt(adapted(base=dense, of=None, targets=["q_proj"]))
    model = patch(adapted(base=packed, of=None, targets=["q_proj"]))
    sizes = {p.numel() for p in dense.model.layers[0].mlp.experts.parameters()}
    with saved() as kept:
        found = learnt(model)
    assert_same_learning(found, expected, 1e-5)
    assert sizes and not sizes & {t.numel() for t in kept}


REASONS = {
    "Transformers' 'batched_mm', which": lambda m: m.set_experts_implementation("batched_mm"),
    "an activation that is none of ours": lambda m: setattr(experts_of(m), "act_fn", nn.Softplus()),
    "adapter 'default' has a scaling": lambda m: on(m, "down_proj").scaling.update(default=torch.ones(3, 1, 1)),
    "hooks, or a forward of its own": lambda m: setattr(on(m, "down_proj"), "forward", on(m, "down_proj").forward),
    "there are no kernels for torch.float64 on": lambda m: experts_of(m).double(),
}


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.filterwarnings("ignore")
def test_reasons(ran, reason):
    model = patch(adapted())
    REASONS[reason](model)
    (layer,) = projections_report(model).layers
    assert not layer.runs and layer.reason.startswith(reason)
    if "float64" not in reason and "scaling" not in reason:  # PEFT itself cannot run such a scaling
        step(model, tokens(**BATCH))
    assert not ran
