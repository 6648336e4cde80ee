"""Experts with PEFT's adapters (``target_parameters``): what stock PEFT computes, whatever is
switched, at each call, without the sum of weight and adapter."""

from __future__ import annotations

import contextlib
import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", minversion="0.17")
pytest.importorskip("transformers.integrations.moe", reason="this version has one implementation of experts")

from adapters import assert_rounds_as, drawn, nodes_run  # noqa: E402
from hf_models import DEVICE, assert_same_learning, make, step, tokens  # noqa: E402

import liger_kernel.transformers as ours  # noqa: E402
from liger_kernel.ops._core import operator as _op  # noqa: E402
from liger_kernel.transformers import projections_report, restore  # noqa: E402
from liger_kernel.transformers.recognise import experts  # noqa: E402

pytestmark = pytest.mark.skipif(not _op._KERNEL_DEVICES, reason="Triton is not installed: references serve every call")
# what else is ours is tested elsewhere
ONLY = dict(rope=False, rms_norm=False, fused_linear_cross_entropy=False, rematerialise=False, swiglu=True)
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
BATCH = dict(batch=1, length=6, ignored=2)


@pytest.fixture
def ran(monkeypatch) -> list[tuple[int, int]]:
    """How many adapters gate_up and down had at each call of the node, from now on."""
    calls: list[tuple[int, int]] = []
    node = experts.adapted_moe
    monkeypatch.setattr(
        experts, "adapted_moe", lambda *args, **how: calls.append((len(args[5]), len(args[6]))) or node(*args, **how)
    )
    return calls


def adapted(
    family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, of=BOTH, targets=(), r: int = 3, base=None, **more
) -> nn.Module:
    dense_first = family in ("deepseek_v3", "glm4_moe", "llama4_text")
    sizes = dict(
        num_hidden_layers=2 if dense_first else 1,
        **(dict(layer_types=["full_attention"]) if family == "gpt_oss" else {}),
    )
    model = make(family, dtype, **sizes) if base is None else base
    if family == "aria_text" and not any(name.endswith("gate_up_proj") for name, _ in model.named_parameters()):
        pytest.skip("experts of this Transformers have other parameters")
    torch.manual_seed(3)
    return drawn(
        peft.get_peft_model(model, peft.LoraConfig(r=r, target_modules=list(targets), target_parameters=of, **more))
    ).to(DEVICE)


def patch(model: nn.Module, **flags) -> nn.Module:
    ours._apply_liger_kernel_to_instance(model, **ONLY | flags)
    return model


def wrappers(model: nn.Module) -> list:
    return [m for m in model.modules() if experts.is_wrapper(m)]


def assert_same(model: nn.Module, tolerance: float = 1e-5, run=step) -> nn.Module:
    """``model`` learns by the engine what it learns by PEFT. Returns it, patched."""
    expected = run(model, tokens(**BATCH))[1]
    found = run(patch(model), tokens(**BATCH))[1]
    assert_same_learning(found, expected, tolerance)
    return model


# -- families ------------------------------------------------------------------------------

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "aria_text"]


@pytest.mark.parametrize("family", [*FAMILIES, "llama4_text"])
def test_packing(family):
    """The factors are those of PEFT's own sum, for parameters (E, out, in), (E, in, out), and
    (E, in, out) that PEFT takes for (E, out, in)."""
    model = adapted(family)
    for wrapper in wrappers(model):
        lhs, rhs = experts.factors(wrapper, "default")
        torch.testing.assert_close(
            wrapper.scaling["default"] * lhs @ rhs, wrapper.get_delta_weight("default"), rtol=1e-5, atol=1e-6
        )
        assert lhs.shape[2] == rhs.shape[1] == 3
        assert (lhs.shape[0], lhs.shape[1], rhs.shape[2]) == wrapper.get_param().shape
    assert wrappers(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(ran, family):
    model = assert_same(adapted(family))
    assert {*ran} == {(1, 1)} and not projections_report(model).stock
    restore(model)
    ran.clear()
    step(model, tokens(**BATCH))
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


def test_experts_that_are_not_ours(ran):
    """Llama 4 multiplies all tokens by all experts in a module of its own."""
    model = assert_same(adapted("llama4_text"))
    assert not ran
    assert {layer.reason for layer in projections_report(model).stock} == {
        "Llama4TextMoe is not patched, or its forward does not call them as self.experts(x, index, weights)"
    }


@pytest.mark.parametrize("flags", [dict(swiglu=False, projections=True), dict(projections=False)], ids=str)
def test_flags(ran, flags):
    """Off means PEFT's own code."""
    model = adapted()
    expected = step(model, tokens(**BATCH))[1]
    assert_same_learning(step(patch(model, **flags), tokens(**BATCH))[1], expected, 1e-5)
    (layer,) = projections_report(model).stock
    block = (
        "Qwen3MoeSparseMoeBlock is not patched, or its forward does not call them as self.experts(x, index, weights)"
    )
    assert not ran and layer.reason == ("Qwen3MoeExperts is not patched" if "swiglu" in flags else block)


def test_the_sum_is_never_made(ran):
    """Neither the sum of weights and adapters nor a gradient of its size, nor the
    parametrisation of PEFT."""

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made = [
                t
                for t in (out if isinstance(out, tuple | list) else [out])
                if isinstance(t, torch.Tensor) and place(t) not in given
            ]
            shapes.extend(sorted(t.shape) for t in made if t.ndim == 3)
            return out

    place = lambda t: t.untyped_storage().data_ptr()
    model = adapted()
    given = {place(p) for p in model.parameters()}
    weights = [sorted(wrapper.get_param().shape) for wrapper in wrappers(model)]
    for patched in (False, True):
        shapes: list[list[int]] = []
        with Sizes():
            step(patch(model) if patched else model, tokens(**BATCH))
        assert any(shape in weights for shape in shapes) != patched
    assert ran == [(1, 1)]


# -- switches ------------------------------------------------------------------------------


@pytest.fixture
def twins():
    """The same model twice, with two adapters of different ranks and scales: one patched, one
    stock."""
    stock = adapted()
    stock.add_adapter(
        "second", peft.LoraConfig(r=2, target_modules=[], target_parameters=BOTH, lora_alpha=5, use_rslora=True)
    )
    drawn(stock)
    stock.set_adapter("default")
    return patch(copy.deepcopy(stock)), stock


def assert_alike(twins, ran, nodes, change=None) -> None:
    """``change`` of both models, and the same learning after it, by these nodes."""
    learned = []
    for model in twins:
        with contextlib.nullcontext() if change is None else change(model) or contextlib.nullcontext():
            ran.clear()
            learned.append(step(model, tokens(**BATCH))[1])
            assert ran == (nodes if model is twins[0] else [])
    assert_same_learning(*learned, 1e-5)


def on(model: nn.Module, parameter: str):
    return next(wrapper for wrapper in wrappers(model) if wrapper.parameter_name == parameter)


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_switched(twins, ran):
    assert_alike(twins, ran, [(1, 1)])
    with contextlib.ExitStack() as disabled:
        for model in twins:
            disabled.enter_context(model.disable_adapter())
            model.get_base_model().lm_head.requires_grad_(True)
        assert_alike(twins, ran, [])
        (layer,) = projections_report(twins[0]).layers
        assert layer.reason == "adapters are disabled, merged or not active: the experts run without them"
    for model in twins:
        model.get_base_model().lm_head.requires_grad_(False)
    assert_alike(twins, ran, [(1, 1)])
    assert_alike(twins, ran, [(1, 1)], lambda m: m.set_adapter("second"))
    assert_alike(twins, ran, [(2, 2)], lambda m: m.base_model.set_adapter(["default", "second"]))
    assert_alike(twins, ran, [(2, 2)], lambda m: on(m, "down_proj").scale_layer(3.0))
    assert_alike(twins, ran, [(2, 1)], lambda m: on(m, "down_proj").set_adapter("second"))
    assert_alike(twins, ran, [(2, 0)], lambda m: on(m, "down_proj").merge())
    assert_alike(twins, ran, [(2, 1)], lambda m: on(m, "down_proj").unmerge())


@pytest.mark.filterwarnings("ignore")
def test_merged_experts_run_alone(twins, ran):
    """Disabled while merged, they are taken out again by PEFT, at the next call."""

    def merge(model):
        for wrapper in wrappers(model):
            wrapper.merge()
        model.get_base_model().lm_head.requires_grad_(True)

    assert_alike(twins, ran, [], merge)
    with contextlib.ExitStack() as disabled:
        for model in twins:
            disabled.enter_context(model.disable_adapter())
            model.get_base_model().lm_head.requires_grad_(True)
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
    (layer,) = projections_report(twins[0]).stock
    assert "hooks" in layer.reason


def test_adapters_by_row_are_refused(twins, ran):
    """As PEFT does."""
    for model in twins:
        with torch.no_grad(), pytest.raises(ValueError, match="does not support mixed adapter batches"):
            model.eval()(**tokens(**BATCH), adapter_names=["second"])
    assert not ran


def test_what_learns_may_change(twins, ran):
    def freeze(model):
        on(model, "gate_up_proj").lora_A["default"].requires_grad_(False)
        on(model, "down_proj").lora_B["default"].requires_grad_(False)

    def learn(model):
        on(model, "down_proj").get_base_layer().down_proj.requires_grad_(True)
        model.get_base_model().model.layers[0].mlp.gate.requires_grad_(True)  # the router

    assert_alike(twins, ran, [(1, 1)], freeze)
    assert_alike(twins, ran, [(1, 1)], learn)


# -- adapters ------------------------------------------------------------------------------


@pytest.mark.parametrize(("of", "nodes"), [(BOTH[:1], [(1, 0)]), (BOTH[1:], [(0, 1)])])
def test_one_parameter_alone(ran, of, nodes):
    assert_same(adapted(of=of))
    assert ran == nodes


def test_beside_adapters_of_attention(ran, monkeypatch):
    linears = nodes_run(monkeypatch)
    model = assert_same(adapted(targets=["q_proj", "v_proj", "o_proj"]))
    assert ran == [(1, 1)] and linears == [3, 1] and len(projections_report(model).layers) == 4


def test_router_as_a_parameter(ran):
    """It is stock's, and said to be; the experts run beside it."""
    model = assert_same(adapted(of=[*BOTH, "mlp.gate.weight"]))
    assert ran == [(1, 1)]
    (layer,) = projections_report(model).stock
    assert layer.reason == "an adapter of the parameter weight of a Qwen3MoeTopKRouter"


def test_biases_as_parameters(ran):
    model = assert_same(adapted("gpt_oss", of=[*BOTH, "experts.down_proj_bias"]))
    (layer,) = projections_report(model).stock
    assert not ran and layer.reason == "an adapter of down_proj_bias"


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("thin", [torch.bfloat16, torch.float32])
def test_sixteen_bits(ran, autocast, thin):
    """Beside the truth, in fp64, at most twice as far from it as stock."""
    model = adapted("gpt_oss", torch.bfloat16)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = p.data.to(thin)
    exact = copy.deepcopy(model).double()
    exact.config._experts_implementation = "eager"  # grouped products have no fp64
    truth = step(exact, tokens(**BATCH))[1]
    with torch.autocast(DEVICE, torch.bfloat16) if autocast else contextlib.nullcontext():
        stock = step(model, tokens(**BATCH))[1]
        found = step(patch(model), tokens(**BATCH))[1]
    assert ran == [(1, 1)]
    for name, t in truth.items():
        assert found[name].dtype == stock[name].dtype
        error, theirs = ((g.double() - t).norm() / t.norm() for g in (found[name], stock[name]))
        assert error <= 2 * theirs + 2**-8, f"{name}: {error:.1e}, stock {theirs:.1e}"


@pytest.mark.parametrize("active", [1, 2])
def test_autocast_over_fp32(ran, active):
    """Adapters are multiplied in autocast's dtype, as the weights are. (PEFT 0.21.2: one adapter
    in the dtype of the weight, several in autocast's.)"""
    model = adapted()
    if active == 2:
        model.add_adapter("more", model.peft_config["default"])
        drawn(model).base_model.set_adapter(["default", "more"])
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    exact.config._experts_implementation = "eager"
    eager.set_experts_implementation("eager")
    truth = step(exact, tokens(**BATCH))[1]
    with torch.autocast(DEVICE, torch.bfloat16):
        stock, found = (step(m, tokens(**BATCH))[1] for m in (eager, patch(model)))
    assert ran == [(active, active)] and all(found[name].dtype == torch.float32 for name in truth)
    assert_rounds_as(found, stock, truth)


# -- ways of running -----------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(ran, reentrant):
    model = adapted()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same(model)
    assert ran == [(1, 1)] * 2


def test_rematerialised(ran):
    """With the norms and the activation of everything else."""
    model = adapted()
    expected = step(model, tokens(**BATCH))[1]
    assert_same_learning(step(patch(model, rms_norm=True, rematerialise=True), tokens(**BATCH))[1], expected, 1e-5)
    assert ran == [(1, 1)]


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


def test_saved_and_loaded(ran, tmp_path):
    model = patch(adapted())
    with torch.no_grad():
        expected = model.eval()(**tokens(**BATCH)).logits
        model.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(patch(make("qwen3_moe", num_hidden_layers=1)), tmp_path).eval()
        ran.clear()
        torch.testing.assert_close(loaded(**tokens(**BATCH)).logits, expected, rtol=1e-5, atol=1e-5)
        assert ran == [(1, 1)]
        merged = loaded.merge_and_unload()
        torch.testing.assert_close(merged(**tokens(**BATCH)).logits, expected, rtol=1e-4, atol=1e-4)
    assert ran == [(1, 1)] and not wrappers(merged)


def test_generates(twins, ran):
    """Every token by the engine: PEFT would add the adapters of all experts for each. On a GPU,
    Transformers chooses batched_mm after the first."""
    prompt = {"input_ids": tokens(**BATCH)["input_ids"]}
    found, expected = (
        m.eval().generate(**prompt, min_new_tokens=3, max_new_tokens=3, do_sample=False, pad_token_id=0) for m in twins
    )
    assert torch.equal(found, expected)
    assert ran == [(1, 1)] * (3 if DEVICE == "cpu" else 1)


# -- four bits -----------------------------------------------------------------------------


def in_four_bits(family: str, double: bool = True) -> tuple[nn.Module, nn.Module]:
    """A model whose experts bitsandbytes holds in 4 bits, and the same with what these bits
    mean."""
    bnb = pytest.importorskip("bitsandbytes.nn.parametrize", reason="could not import 'bitsandbytes'")
    sizes = (
        dict(layer_types=["full_attention"], intermediate_size=64)
        if family == "gpt_oss"
        else dict(moe_intermediate_size=64)
    )
    # on a CPU, bitsandbytes misreads rows that are shorter than its blocks of 64
    packed = make(family, num_hidden_layers=1, **sizes)
    dense = copy.deepcopy(packed)
    of_both = [m.model.layers[0].mlp.experts for m in (packed, dense)]
    for name in ("gate_up_proj", "down_proj"):
        bnb.replace_parameter_4bit(of_both[0], name, compress_statistics=double, quant_type="nf4")
        getattr(of_both[1], name).data.copy_(getattr(of_both[0], name))
    return packed, dense


@pytest.mark.parametrize(("family", "double"), [("qwen3_moe", True), ("qwen3_moe", False), ("gpt_oss", True)])
def test_four_bits(ran, family, double):
    """What PEFT learns with the dense weights, in every step: PEFT itself leaves its sum in
    place over 4 bits, and adds the next one to it."""
    packed, dense = in_four_bits(family, double)
    # PEFT finds computed parameters by their whole names, and nests their wrappers the other way
    of = [f"model.layers.0.mlp.{name}" for name in BOTH]
    model, other = patch(adapted(base=packed, of=of)), adapted(base=dense, of=of)
    for name in ("gate_up_proj", "down_proj"):
        on(model, name).lora_A.load_state_dict(on(other, name).lora_A.state_dict())
        on(model, name).lora_B.load_state_dict(on(other, name).lora_B.state_dict())
    sizes = {m.get_param().numel() for m in wrappers(model)}

    def learnt(model: nn.Module) -> dict[str, torch.Tensor]:
        loss = step(model, tokens(**BATCH))[1]["loss"]
        parts = {
            f"{m.parameter_name} {part}": getattr(m, part)["default"].weight.grad
            for m in wrappers(model)
            for part in ("lora_A", "lora_B")
        }
        return {"loss": loss} | parts

    expected, saved = learnt(other), []
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            assert_same_learning(learnt(model), expected, 1e-5)
    assert saved and not sizes & {*saved}
    assert ran == [(1, 1)] * 2 and not projections_report(model).stock


def test_four_bits_without_adapters(ran):
    """Adapters of attention alone: no dense experts are saved for the backward."""
    packed, dense = in_four_bits("qwen3_moe")
    expected = step(adapted(base=dense, of=None, targets=["q_proj"]), tokens(**BATCH))[1]
    model = patch(adapted(base=packed, of=None, targets=["q_proj"]))
    sizes = {p.numel() for p in dense.model.layers[0].mlp.experts.parameters()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        found = step(model, tokens(**BATCH))[1]
    assert_same_learning(found, expected, 1e-5)
    assert sizes and not sizes & {*saved}


# -- what stays stock ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda m: m.set_experts_implementation("batched_mm"),
            "Transformers' 'batched_mm', which the model's configuration names",
        ),
        (
            lambda m: setattr(on(m, "down_proj").get_base_layer(), "act_fn", nn.Softplus()),
            "an activation that is none of ours",
        ),
        (
            lambda m: on(m, "down_proj").scaling.update(default=torch.ones(3, 1, 1)),
            "adapter 'default' has a scaling that is sharded, or not of one element",
        ),
        (
            lambda m: setattr(on(m, "down_proj"), "forward", on(m, "down_proj").forward),
            "hooks, or a forward of its own",
        ),
        (
            lambda m: m.get_base_model().model.layers[0].mlp.experts.get_base_layer().double(),
            "there are no kernels for torch.float64 on",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_reasons(ran, change, reason):
    model = patch(adapted())
    change(model)
    (layer,) = projections_report(model).layers
    assert not layer.runs and re.match(re.escape(reason), layer.reason)
    if "float64" not in reason and "scaling" not in reason:  # PEFT itself cannot run such a scaling
        step(model, tokens(**BATCH))
    assert not ran


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_learnt_scalings(ran, shape):
    """They have the gradients of scalings beside which there is a second adapter: for one alone,
    PEFT's product takes no tensor with a gradient."""
    learned = []
    for patched in (False, True):
        model = adapted()
        model.add_adapter(
            "second", peft.LoraConfig(r=2, target_modules=[], target_parameters=BOTH, init_lora_weights=True)
        )
        model.base_model.set_adapter(["default", "second"])
        for m in wrappers(model):
            m.learnt = m.scaling["default"] = nn.Parameter(torch.full(shape, 0.7, device=DEVICE))
        learned.append(step(patch(model) if patched else model, tokens(**BATCH))[1])
    assert_same_learning(*reversed(learned), 1e-5)
    assert ran == [(2, 2)]


def test_a_single_expert(ran):
    """PEFT's sum for one expert is another product."""
    model = assert_same(
        adapted(base=make("qwen3_moe", num_hidden_layers=1, num_local_experts=1, num_experts_per_tok=1))
    )
    (layer,) = projections_report(model).stock
    assert not ran and "a single expert" in layer.reason


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="its model is on the CPU, where kernels are interpreted only without a GPU"
)
def test_the_document_is_right(capsys):
    """Its example runs, and prints what it says."""
    text = (Path(__file__).parents[2] / "docs" / "guides" / "moe.md").read_text()
    model, adapters = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:2]
    names = {"ids": tokens()["input_ids"]}
    exec(model, names)
    capsys.readouterr()
    exec(adapters, names)
    (printed,) = re.findall(r"```\n(the engine.*?)```", text, re.DOTALL)
    assert capsys.readouterr().out == printed
