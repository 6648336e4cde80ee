"""Experts that are stored in FP8, beside the same experts with the weights that FP8 has left,
made dense."""

import copy
import io
import itertools
import warnings

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft", minversion="0.17")
pytest.importorskip("transformers.integrations.moe", reason="this version has one implementation of experts")

from adapters import drawn, learnt, patch
from hf_models import DEVICE, assert_same_learning, group_of_one, make, recognised
from watching import noted, saved

from liger_kernel.nn import float8 as stored
from liger_kernel.ops._core import operator as _op
from liger_kernel.ops.projections import float8
from liger_kernel.transformers import projections_report, quantize_base
from liger_kernel.transformers.recognise import experts
from liger_kernel.transformers.recognise.storages import Fallback

needs_kernels = pytest.mark.skipif(
    not _op._KERNEL_DEVICES, reason="Triton is not installed: references serve every call"
)
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and float8.lacking(torch.device(DEVICE)) is not None, reason="this GPU has no FP8"
)
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
NAMES = ("gate_up_proj", "down_proj")
LINEARS = ("lm_head", "q_proj", "k_proj", "v_proj", "o_proj")  # which cast their inputs


@pytest.fixture(autouse=True)
def cast_by_pytorch(monkeypatch):
    """Casts have tests of their own; interpreted, they would take most of the time of these."""
    if DEVICE == "cpu":
        monkeypatch.setattr(float8, "use_kernels", lambda x: False)


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """Which function multiplied at each call by the engine, from now on."""
    recognised("qwen3_moe", "mixtral", "gpt_oss")
    calls: list[str] = []
    for name in ("adapted_moe", "moe"):
        said = lambda *args, name=name, **_: f"{'adapted' if any(args[5:]) else 'alone'} {name}"
        noted(monkeypatch, experts, name, said, calls)
    return calls


def tiny(family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, **more) -> nn.Module:
    kinds = dict(layer_types=["full_attention"]) if family == "gpt_oss" else {}
    return make(family, dtype, num_hidden_layers=1, **kinds, **more)


def adapted(model: nn.Module, of=BOTH, targets=("q_proj",)) -> nn.Module:
    torch.manual_seed(3)
    config = peft.LoraConfig(r=3, target_modules=list(targets), target_parameters=of)
    return drawn(peft.get_peft_model(model, config)).to(DEVICE)


def in_fp8(model: nn.Module, recipe: str = "fp8") -> nn.Module:
    quantize_base(model, recipe, skip=LINEARS)
    return model


def experts_of(model: nn.Module) -> nn.Module:
    """The module with the parameters of experts."""
    return next(m for m in model.modules() if hasattr(m, "gate_up_proj") and not experts.is_wrapper(m))


def twins(
    family: str = "qwen3_moe", recipe: str = "fp8", dtype: torch.dtype = torch.float32, **more
) -> tuple[nn.Module, nn.Module]:
    """Experts in FP8, and dense ones of the same values; gradients go through to attention."""
    model, dense = (adapted(tiny(family, dtype), **more) for _ in range(2))
    for name in NAMES:
        before = getattr(experts_of(dense), name)
        if name == NAMES[0]:
            in_fp8(model, recipe)
        now = getattr(experts_of(model), name) + 0
        assert 0 < (now - before).norm() < 0.04 * before.norm() and now.dtype == dtype
        before.data.copy_(now)
    for each in (model, dense):
        mlp = each.get_base_model().model.layers[0].mlp
        mlp.get_submodule("router" if family == "gpt_oss" else "gate").requires_grad_(True)
    return model, dense


@needs_kernels
@pytest.mark.parametrize(
    ("family", "recipe", "of"),
    [
        *(("qwen3_moe", "fp8_rowwise", BOTH), ("mixtral", "fp8", BOTH)),
        *(("gpt_oss", "fp8_rowwise", BOTH), ("gpt_oss", "fp8", None)),  # it is transposed, biased
    ],
)
def test_the_engine_multiplies_by_what_fp8_has_left(ran, family, recipe, of):
    """Gradients of adapters, router and x; nothing dense is kept, which stock keeps."""
    model, dense = twins(family, recipe, of=of)
    sizes = {p.numel() for name, p in dense.named_parameters() if name.endswith(NAMES)}
    with saved() as by_peft:
        expected = learnt(dense)
    with saved() as kept:
        assert_same_learning(learnt(patch(model)), expected, 1e-5)
    assert len(sizes) == 2 and sizes <= {t.numel() for t in by_peft} and not sizes & {t.numel() for t in kept}
    assert ran == ["adapted adapted_moe" if of else "alone adapted_moe"] and not projections_report(model).stock
    assert any("gate" in n or "router" in n for n in expected)


@needs_kernels
def test_one_parameter_in_fp8_beside_one_that_is_trained(ran):
    model = adapted(tiny())
    experts_of(model).down_proj.requires_grad_(True)
    left = quantize_base(model, skip=LINEARS)
    (reason,) = (why for name, why in left.items() if name.endswith("experts.base_layer.base_layer.down_proj"))
    assert reason == "it is trained" and experts_of(model).down_proj.requires_grad
    assert experts_of(model)._parameters.keys() == {"down_proj"}
    expected = learnt(model)
    assert_same_learning(learnt(patch(model)), expected, 1e-5)
    assert ran == ["adapted adapted_moe"] and any(name.endswith("down_proj") for name in expected)


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_stock_code_reads_dense_weights(family, implementation):
    """With and without PEFT's sum, in every step: PEFT 0.21 takes it out only sometimes."""
    for of in (BOTH, None):
        both = model, dense = twins(family, "fp8_rowwise", of=of)
        for each in both:
            each.set_experts_implementation(implementation)
        expected = learnt(dense)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                assert_same_learning(learnt(model), expected, 1e-5)
        assert all(len(made) == 1 for made in experts_of(model).parametrizations.values())


def test_an_expert_alone_is_made_dense(monkeypatch):
    """For code that takes experts one by one."""
    w = tiny()
    model = in_fp8(copy.deepcopy(w), "fp8_rowwise")
    of, sizes = experts_of(model), []
    dense = of.gate_up_proj + 0
    make_dense = stored._OfExperts.dense
    spy = lambda self, some=None: sizes.append((found := make_dense(self, some)).shape) or found
    monkeypatch.setattr(stored._OfExperts, "dense", spy)
    for index in (1, torch.tensor(2), torch.tensor([2]), torch.tensor([[0, 1], [3, 3]])):
        assert torch.equal(of.gate_up_proj[index], dense[index])
        assert sizes.pop() == dense[index].shape and not sizes
    for index in (dense[:, 0, 0] > 0, (slice(None), 1)):
        assert torch.equal(of.gate_up_proj[index], dense[index])


def test_code_that_is_compiled_reads_plain_tensors(monkeypatch):
    of = experts_of(in_fp8(tiny()))
    expected = of.down_proj + 0
    assert type(of.down_proj) is stored.StoredView
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert type(of.down_proj) is torch.Tensor and torch.equal(of.down_proj, expected)


@pytest.mark.parametrize(("family", "recipe"), [("qwen3_moe", "fp8"), ("gpt_oss", "fp8_rowwise")])
def test_saved_copied_and_moved(family, recipe):
    model = in_fp8(tiny(family, torch.bfloat16), recipe)
    other = in_fp8(tiny(family, torch.bfloat16, seed=1), recipe)
    expected = {name: getattr(experts_of(model), name) + 0 for name in NAMES}
    assert not torch.equal(getattr(experts_of(other), NAMES[0]) + 0, expected[NAMES[0]])
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    keys = {key.partition("parametrizations.")[2] for key in model.state_dict()} - {""}
    assert keys == {f"{name}.{part}" for name in NAMES for part in ("original", "0.float8_scale")}
    copied = copy.deepcopy(model)
    experts_of(model).gate_up_proj.zero_()
    assert not (experts_of(model).gate_up_proj + 0).any()
    for same, name in itertools.product((other, copied), NAMES):
        w = getattr(experts_of(same), name)
        assert torch.equal(w + 0, expected[name]) and not w.requires_grad
    # of another dtype, all but the bits
    bits = {name: p.clone() for name, p in copied.named_parameters() if not p.is_floating_point()}
    copied.to(torch.float16)
    assert all(p.dtype == torch.float16 or torch.equal(p, bits.pop(name)) for name, p in copied.named_parameters())
    assert not bits
    found = experts_of(copied).down_proj
    assert found.dtype == torch.float16
    assert (found.float() - expected["down_proj"].float()).abs().max() <= 2**-8 * expected["down_proj"].abs().max()


@pytest.mark.parametrize(("family", "safe"), [("qwen3_moe", False), ("gpt_oss", True)])
def test_merging_is_a_cast_of_the_sum(family, safe):
    model, dense = twins(family, "fp8_rowwise")
    before = {name: getattr(experts_of(model), name) + 0 for name in NAMES}
    for each in (model, dense):
        each.merge_adapter(safe_merge=safe)
    near = lambda found, wanted, tolerance: (found - wanted).norm() < tolerance * wanted.norm()
    for name in NAMES:
        wanted = getattr(experts_of(dense), name)
        assert not near(before[name], wanted, 0.1) and near(getattr(experts_of(model), name) + 0, wanted, 0.03)
    model.unmerge_adapter()
    assert all(near(getattr(experts_of(model), name) + 0, w, 0.2) for name, w in before.items())
    merged = twins(family, "fp8_rowwise")[0].merge_and_unload(safe_merge=safe)
    assert not any(experts.is_wrapper(m) for m in merged.modules())
    assert all(near(getattr(experts_of(merged), name) + 0, getattr(experts_of(dense), name), 0.03) for name in NAMES)


def test_wrong_weights_are_refused():
    model, of = in_fp8(tiny()), experts_of(tiny())
    shape = r"LigerFloat8Experts: weights must have shape \(\d+, \d+, \d+\), got \(1, 2, 3\)"
    with pytest.raises(ValueError, match=shape):
        experts_of(model).down_proj.data = torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="store_experts: recipe must be one of fp8, fp8_rowwise, got 'int4'"):
        stored.store_experts(of, "down_proj", "int4")
    with pytest.raises(ValueError, match=r"store_experts: no must be a floating point parameter \(E, N, K\), got none"):
        stored.store_experts(of, "no", "fp8")


def reasons(model: nn.Module, **more) -> dict[str, str]:
    left = quantize_base(model, **dict(skip=LINEARS) | more)
    return {name.rpartition(".")[2]: why for name, why in left.items() if ".experts." in name}


class Other(nn.Module):
    def forward(self, w):
        return 2 * w


def test_what_is_left_and_why():
    model, places = tiny(), lambda: {name: p.data_ptr() for name, p in model.named_parameters()}
    assert reasons(model) == {}
    assert all(type(made[0]) is stored.LigerFloat8Experts for made in experts_of(model).parametrizations.values())
    before = places()
    assert reasons(model, recipe="fp8_rowwise") == {} and before == places(), "a second time"
    assert reasons(tiny(), skip=(*LINEARS, "experts")) == dict.fromkeys(NAMES, "skipped by name")
    assert reasons(tiny(), skip=(*LINEARS, "experts.down_proj")) == {"down_proj": "skipped by name"}
    hooked = tiny()
    experts_of(hooked).register_forward_hook(lambda *_: None)
    assert reasons(hooked) == dict.fromkeys(NAMES, "its module has hooks")
    made = tiny()
    nn.utils.parametrize.register_parametrization(experts_of(made), "down_proj", Other())
    assert reasons(made) == {"down_proj": "a Other makes it when it is read: it is quantised already, or adapted"}
    wide = tiny()
    experts_of(wide).down_proj = nn.Parameter(torch.zeros(4, 6, 10))
    layout = f"gate_up_proj {tuple(experts_of(wide).gate_up_proj.shape)}, down_proj (4, 6, 10)"
    assert reasons(wide) == dict.fromkeys(NAMES, f"experts of unknown layout: {layout}")
    double = tiny(dtype=torch.float64)
    assert {why.partition(" on ")[0] for why in reasons(double).values()} == {"a weight of torch.float64"}
    shared = tiny()
    shared.other = nn.Module()
    shared.other.down_proj = experts_of(shared).down_proj
    assert reasons(shared)["down_proj"] == "another module shares it"
    packed = nn.ParameterDict({"w1": torch.zeros(2, 1024, 512), "few": torch.zeros(2, 8, 8)})
    other = nn.ModuleDict({"experts": packed, "conv": nn.Conv1d(1024, 1024, 2)})
    assert reasons(nn.ModuleDict({"mlp": other})) == {
        "w1": "packed weights of another name than gate_up_proj and down_proj, whose layout is unknown"
    }
    assert {why.partition(" on ")[2] for why in reasons(tiny().to("meta")).values()} == {"meta"}


@pytest.mark.skipif(torch.__version__ < "2.12", reason="FSDP2 of PyTorch 2.11 asks gradients of integers")
def test_sharded():
    """By FSDP2, which gathers the bits for a layer; experts that are sharded already stay."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with group_of_one("cpu") as mesh:
        model = patch(adapted(in_fp8(tiny(dtype=torch.bfloat16)), of=None))
        expected = learnt(model)
        for layer in model.get_base_model().model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        x = torch.empty(0, dtype=torch.bfloat16)
        if _op._KERNEL_DEVICES:
            assert experts.weights_of(experts_of(model), False, x) == Fallback(experts.SPREAD), "between the steps"
        found = learnt(model)
        assert {name: g.shape for name, g in found.items()} == {name: g.shape for name, g in expected.items()}
        assert torch.equal(found["loss"], expected["loss"])
        other = tiny()
        fully_shard(other.model.layers[0], mesh=mesh)
        assert set(reasons(other).values()) == {"a DTensor that is not a plain parameter: sharded or quantised"}
