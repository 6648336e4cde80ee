"""Models whose linear layers are trained in FP8: by ``train_in_fp8``, and by torchao's
``convert_to_float8_training``."""

import copy
import types

import pytest
import torch
import transformers
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from hf_models import DEVICE, assert_untouched, everything_of, make, snapshot, step, tokens
from quick import further
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from watching import noted

from liger_kernel import transformers as liger
from liger_kernel.nn import float8_training
from liger_kernel.nn.float8_training import LigerFloat8TrainingLinear
from liger_kernel.ops.projections import float8
from liger_kernel.ops.projections.float8_training import RECIPES
from liger_kernel.ops.projections.linear import LinearsFunction
from liger_kernel.ops.projections.mlp import AdaptedMLPFunction
from liger_kernel.transformers import _apply_liger_kernel_to_instance as patch, fp8, projections_report, train_in_fp8
from liger_kernel.transformers.head import loss as head_loss, loss_functions
from liger_kernel.transformers.head.forward import fused
from liger_kernel.transformers.head.head_weights import FP8

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and float8.lacking(torch.device(DEVICE)) is not None, reason="this GPU has no FP8"
)
LINEARS = 7  # of a Llama layer
RUN = [name for name, recipe in RECIPES.items() if float8.lacking(torch.device(DEVICE), recipe.capability) is None]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(fp8, "SMALL", 0)


@pytest.fixture
def nodes(monkeypatch):
    """Names of the nodes that ran."""
    ran: list[str] = []
    for cls in (LinearsFunction, AdaptedMLPFunction):
        noted(monkeypatch, cls, "forward", lambda *_, cls=cls: cls.__name__, ran)
    return ran


SIZES = dict(num_hidden_layers=1, hidden_size=32, intermediate_size=64, head_dim=16)


def llama(**more) -> nn.Module:
    return make("llama", torch.bfloat16, **SIZES | more)


def patched(flags: dict | str, **more) -> nn.Module:
    """A Llama with layers in FP8, by a recipe or flags."""
    model = llama(**more).train()
    patch(model, **({"fp8": flags} if isinstance(flags, str) else flags))
    return model


def stock_reasons(model: nn.Module) -> set[str]:
    return {layer.reason for layer in projections_report(model).stock}


def by_torchao(model: nn.Module, recipe: str) -> nn.Module:
    training = pytest.importorskip("torchao.float8")
    config = training.Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", DEVICE != "cuda")
    no_head = lambda m, name: "lm_head" not in name
    return training.convert_to_float8_training(model, config=config, module_filter_fn=no_head)


def in_fp8(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, LigerFloat8TrainingLinear)]


def assert_bits(found: dict, expected: dict) -> None:
    """On a GPU nearly: graphs may call other kernels, and FP8 rounds to 2 or 3 bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        near = DEVICE == "cuda" and (found[name] - value).norm() < 0.1 * value.norm()
        assert near or torch.equal(found[name], value), name


ONE_LAYER = ["LinearsFunction", "LinearsFunction", "AdaptedMLPFunction"]  # q, k and v; o; the MLP


OF_TORCHAO = [name for name, recipe in RECIPES.items() if not recipe.blocks]


@pytest.mark.parametrize("recipe", [*OF_TORCHAO[:1], *further(*OF_TORCHAO[1:])])
def test_learning_is_that_of_torchao(recipe, nodes):
    """Ours or torchao's layers, patched before or after, within the rounding of FP8."""
    stock = llama()
    theirs = by_torchao(copy.deepcopy(stock), recipe)
    batch = tokens(length=16)  # products of torchao need multiples of 16 tokens
    expected = step(theirs, batch)[1]
    full = step(copy.deepcopy(stock), batch)[1]
    assert not nodes
    for first in ("patch", "convert"):
        for convert in (lambda m: by_torchao(m, recipe), lambda m: train_in_fp8(m, recipe) and m):
            model = copy.deepcopy(stock)
            for what in ("patch", "convert") if first == "patch" else ("convert", "patch"):
                patch(model=model) if what == "patch" else convert(model)
            nodes.clear()
            found = step(model, batch)[1]
            assert nodes == ONE_LAYER
            assert abs(found["loss"] - expected["loss"]) < 0.02 * abs(expected["loss"])
            for name, wanted in expected.items():
                if name != "loss":
                    error = lambda t, name=name: (t.float() - full[name].float()).norm() / full[name].float().norm()
                    assert error(found[name]) < 1.5 * error(wanted) + 0.02, name


def test_parameters_stay(models_by_references):
    """Names, dtypes and state do not change; a deepcopy has gradients of its own."""
    model = llama()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    left = train_in_fp8(model, "tensorwise")
    assert list(left) == ["lm_head"] and "head" in left["lm_head"]
    assert len(in_fp8(model)) == LINEARS and "tensorwise" in repr(model)
    after = model.state_dict()
    assert list(before) == list(after) and all(torch.equal(v, after[k]) for k, v in before.items())
    copied = copy.deepcopy(model)
    step(copied)
    assert all(p.grad is None for p in model.parameters()) and all(p.grad is not None for p in copied.parameters())


@pytest.fixture
def graphs():
    """A backend that runs graphs as they are, and the forward and backward graphs it has got."""
    found = []

    def seen(graph, inputs):
        found.append(graph)
        return make_boxed_func(graph)

    torch._dynamo.reset()
    yield aot_autograd(fw_compiler=seen, bw_compiler=seen, partition_fn=min_cut_rematerialization_partition), found
    torch._dynamo.reset()


def called(graph: torch.fx.GraphModule, name: str) -> int:
    return sum(name in str(node.target) for node in graph.graph.nodes)


def saved_by(graph: torch.fx.GraphModule) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and shapes of what a forward graph returns, but for its inputs and views of them."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    made = [n for n in output.args[0] if isinstance(n, torch.fx.Node) and n.op != "placeholder"]
    values = [n.meta["val"] for n in made if "detach" not in n.name]
    return [(t.dtype, tuple(t.shape)) for t in values if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize(
    "recipe, part",
    [
        ("tensorwise", "layer"),
        *further(*((recipe, "layer") for recipe in RUN if recipe != "tensorwise"), ("tensorwise", "model")),
    ],
)
def test_compiled_without_graph_breaks(recipe, part, models_by_references, graphs):
    """Learning is that without compiling, and steps of an optimizer compile nothing."""
    backend, found = graphs
    model = patched(recipe)
    expected = step(model)[1]
    (model.model.layers[0] if part == "layer" else model).compile(backend=backend, fullgraph=True)
    first = step(model)[1]
    assert len(found) == 2
    if part == "layer":
        assert_bits(first, expected)
    # a compiled head adds in another order, without FP8 as well
    torch.testing.assert_close(first["loss"], expected["loss"], rtol=2e-7, atol=0)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), [first["loss"]]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            optimizer.step()
            losses.append(step(model)[1]["loss"])
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("autocast", further(True, False))
def test_what_a_compiled_layer_saves(autocast, models_by_references, graphs):
    """Weights and inputs are searched once, and no cast of a weight outlives the forward."""
    backend, found = graphs
    model = llama(hidden_size=48).train()
    model = model.float() if autocast else model
    patch(model=model, fp8="tensorwise")
    expected = copy.deepcopy(model)
    model.model.layers[0].compile(backend=backend, fullgraph=True)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        assert_bits(*(step(m, tokens(6))[1] for m in (model, expected)))
    forward, backward = found
    # a search, and the largest of its parts
    assert called(forward, "aten.amax") == 2 * (LINEARS + 4) and called(backward, "aten.amax") == 2 * LINEARS
    assert called(forward, "float8_transposed") == 0 and called(backward, "float8_transposed") == LINEARS
    weights = {tuple(p.shape) for p in model.model.layers[0].parameters() if p.ndim == 2}
    saved = saved_by(forward)
    in_8_bits = sorted(sorted(shape) for dtype, shape in saved if dtype == float8.E4)
    assert in_8_bits == [[48, 80]] * 2 + [[64, 80]] * 2  # of 72 tokens
    assert not [t for t in saved if t[1] in weights]


@pytest.fixture
def unrecorded(monkeypatch):
    monkeypatch.setattr(float8_training, "_recorded", [False])


def test_nothing_is_kept_while_a_graph_is_recorded_and_after_it(unrecorded, monkeypatch):
    """Memory of the graph has no values yet, and replayed optimizer steps are seen by nobody."""
    w = torch.nn.Parameter(torch.ones(32, 16, dtype=torch.bfloat16, device=DEVICE))
    kept = lambda: float8_training.trained(w, "tensorwise").kept
    before = kept()
    assert kept() is before
    monkeypatch.setattr(float8_training, "is_recorded", lambda t: True)
    assert kept() is not before and kept() is not kept()
    monkeypatch.setattr(float8_training, "is_recorded", lambda t: False)
    assert kept() is not before and kept() is not kept()


def test_what_is_left(models_by_references):
    model = llama()
    left = train_in_fp8(model, filter=["o_proj"])
    assert "model.layers.0.self_attn.o_proj" in left and len(left) == 2
    model = llama()
    left = train_in_fp8(model, filter=lambda m, name: "mlp" in name)
    assert len(in_fp8(model)) == 3 and left["lm_head"] == "the filter leaves it"
    for recipe, width, said in (
        ("tensorwise", 72, "72 x 32 are not multiples of 16"),
        ("mxfp8_rceil", 48, "48 x 32 are not multiples of 32"),
    ):
        if recipe in RUN:
            model = llama(intermediate_size=width)
            assert train_in_fp8(model, recipe)["model.layers.0.mlp.up_proj"] == said
            assert said in stock_reasons(model)
    with pytest.warns(UserWarning, match="fp8: no linear layer is in FP8"):
        train_in_fp8(llama(), filter=lambda m, name: False)


WRONG = [
    (dict(fp8="tensorwize"), r"^fp8: must be one of .* got 'tensorwize'; did you mean tensorwise\?$"),
    (dict(fp8="mxfp8"), r", got 'mxfp8'; did you mean mxfp8_rceil\?$"),
    (dict(fp8=True), "^fp8: must be one of tensorwise, rowwise, rowwise_with_gw_hp, mxfp8_rceil, or False, got True$"),
    (dict(fp8="blockwise"), "^fp8: blockwise is refused, because"),
    (dict(fp8="rowwise", fp8_filter="o_proj"), "^fp8_filter: must be names of layers, or .*, got 'o_proj'$"),
    (dict(fp8="rowwise", fp8_filter=[3]), r"^fp8_filter: must be names of layers, or .*, got \[3\]$"),
    (dict(fp8_filter=["o_proj"]), "^fp8_filter: needs fp8, a recipe$"),
    (dict(fp8_head=True), "^fp8_head: needs fp8, a recipe$"),
    (dict(fp8="rowwise_with_gw_hp", fp8_head=True), "^fp8_head: needs fp8 to be tensorwise or rowwise, got "),
    (dict(fp8="rowwise", fp8_head=True, fused_linear_cross_entropy=False), "^fp8_head: the head of 'llama' cannot"),
]


@pytest.mark.parametrize("flags, message", WRONG, ids=str)
def test_wrong_flags(flags, message, models_by_references):
    """Every door says so, before it changes anything."""
    stock = llama()
    untouched = snapshot(stock, *everything_of("llama"))
    for door in (
        lambda: patch(stock, **flags),
        lambda: liger.apply_liger_kernel_to_llama(model=stock, **flags),
        lambda: liger.apply_liger_kernel_to_llama(**flags),
        lambda: liger._apply_liger_kernel("llama", **flags),
        lambda: liger.AutoLigerKernelForCausalLM.from_config(stock.config, **flags),
        lambda: liger.AutoLigerKernelForCausalLM.from_pretrained("/nowhere", config=stock.config, **flags),
    ):
        with pytest.raises(ValueError, match=message):
            door()
    assert_untouched(untouched)
    assert not in_fp8(stock)


def test_wrong_arguments(monkeypatch):
    for call, said in (
        (lambda: train_in_fp8(llama(), None), "fp8: must be one of .*, got None"),
        (lambda: train_in_fp8(llama().half()), "fp8: the model must have weights in bfloat16 or float32, got float16"),
        (lambda: LigerFloat8TrainingLinear.of(nn.Linear(24, 16)), "weight must have sizes that are multiples of 16"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    monkeypatch.setattr(fp8, "lacking", lambda device, capability=None: f"FP8 needs {capability}")
    with pytest.raises(ValueError, match=r"fp8: FP8 needs \(10, 0\)"):
        train_in_fp8(llama(), "mxfp8_rceil")


def by_trainer(model: nn.Module, flags: dict, folder, **more) -> nn.Module:
    quiet = dict(save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=DEVICE == "cpu")
    ours = dict(use_liger_kernel=True, liger_kernel_config=flags)
    args = transformers.TrainingArguments(str(folder), max_steps=1, learning_rate=0.0, **quiet, **ours, **more)
    transformers.Trainer(model, args, train_dataset=[{k: v[0].cpu() for k, v in tokens(1).items()}]).train()
    return model


def of_classes(make_one) -> nn.Module:
    model = make_one()
    liger.restore()
    return model


def loaded(auto, folder, **flags) -> nn.Module:
    return auto.from_pretrained(folder / "saved", dtype=torch.bfloat16, attn_implementation="eager", **flags)


STOCK, AUTO = transformers.LlamaForCausalLM, liger.AutoLigerKernelForCausalLM
DOORS = {
    "instance": lambda stock, flags, folder: patch(stock, **flags) or stock,
    "function": lambda stock, flags, folder: liger.apply_liger_kernel_to_llama(model=stock, **flags) or stock,
    "classes": lambda stock, flags, folder: of_classes(
        lambda: liger.apply_liger_kernel_to_llama(**flags) or loaded(STOCK, folder)
    ),
    "auto": lambda stock, flags, folder: of_classes(lambda: loaded(AUTO, folder, **flags)),
    "trainer": by_trainer,
}


@pytest.fixture
def heads(monkeypatch):
    """The recipes with which losses multiplied their heads."""
    return noted(monkeypatch, head_loss, "linear_cross_entropy", lambda *_, fp8=None, **__: fp8)


@pytest.mark.parametrize("door", DOORS)
def test_doors(door, models_by_references, heads, tmp_path):
    """lead to the same model, its copies, and the same report; with ``restore`` it is stock again."""
    flags = {"fp8": "rowwise", "fp8_filter": ["o_proj"], "fp8_head": True}
    llama().save_pretrained(tmp_path / "saved")
    stock = loaded(STOCK, tmp_path).to(DEVICE).train()
    weights, expected = {k: v.clone() for k, v in stock.state_dict().items()}, step(copy.deepcopy(stock))[1]
    plain = copy.deepcopy(stock)
    patch(plain, **flags)
    names = in_fp8(plain)
    assert len(names) == LINEARS - 1
    wanted = step(plain)[1]
    model = DOORS[door](stock, flags, tmp_path).to(DEVICE).train()
    assert in_fp8(model) == names and all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    report = projections_report(model)
    if door in ("classes", "auto"):  # their classes are stock again, as they would not be for a user
        patch(model)
        report = projections_report(model)
    of_head = ("lm_head", "the head, in FP8 as part of the loss")
    assert [(layer.name, layer.reason) for layer in report.layers if layer.runs] == [
        *((n, "in FP8, rowwise") for n in names),
        of_head,
    ]
    left = [("model.layers.0.self_attn.o_proj", "left by the filter of fp8")]
    assert [(layer.name, layer.reason) for layer in report.stock] == left
    patch(model)  # as a Trainer does it a second time
    assert in_fp8(model) == names
    heads.clear()
    for each in (model, copy.deepcopy(model)):
        assert_bits(step(each)[1], wanted)
    assert heads == ["rowwise"] * 2
    liger.restore(model)
    assert not in_fp8(model)
    assert_bits(step(model)[1], expected)


def test_the_last_call_decides(models_by_references, heads):
    model = patched("tensorwise")
    patch(model, fp8="rowwise", fp8_filter=["mlp"])
    assert [model.get_submodule(name).recipe for name in in_fp8(model)] == ["rowwise"] * 4
    patch(model, fp8=False)
    assert len(in_fp8(model)) == 4, "only restore undoes a patch"
    heads.clear()
    for flags in (dict(fp8="rowwise", fp8_head=True), dict(fp8="rowwise"), dict(fp8="tensorwise", fp8_head=True)):
        patch(model, **flags)
        step(model)
    liger.restore(model)
    patch(model)
    step(model)
    assert heads == ["rowwise", None, "tensorwise", None]


def test_classes(models_by_references):
    """Models that are made later, and within others, are in FP8; before and after, not."""
    before = llama()
    liger.apply_liger_kernel_to_llama(fp8="tensorwise", fp8_filter=lambda m, name: name != "lm_head")
    with torch.device("meta"):
        empty = STOCK(before.config)
    others = transformers.LlamaForSequenceClassification(before.config), transformers.LlamaModel(before.config)
    assert [len(in_fp8(model)) for model in (empty, *others, llama())] == [LINEARS] * 4
    with pytest.raises(ValueError, match="fp8: the model must have weights in bfloat16 or float32, got float16"):
        transformers.AutoModelForCausalLM.from_config(before.config, dtype=torch.float16)
    quantised = copy.deepcopy(before.config)
    # as from_pretrained has it when it makes the model
    quantised.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.warns(UserWarning, match="fp8='tensorwise' has no effect, because the model is quantised"):
        assert not in_fp8(STOCK(quantised))
    fails = {"post_init": lambda self: (_ for _ in ()).throw(RuntimeError("no model"))}
    with pytest.raises(RuntimeError, match="no model"):  # whatever happens to one model, the next is in FP8
        type("Broken", (transformers.LlamaModel,), fails)(before.config)
    assert len(in_fp8(transformers.LlamaModel(before.config))) == LINEARS
    assert not in_fp8(before) and not in_fp8(make("mistral", torch.bfloat16))
    liger.restore()
    assert not in_fp8(llama()) and "__init__" not in vars(transformers.LlamaForSequenceClassification)


def test_auto_classes_leave_other_models_alone(models_by_references):
    model = AUTO.from_config(llama().config, fp8="rowwise")
    assert len(in_fp8(model)) == LINEARS and not in_fp8(STOCK(llama().config))


def test_the_report_of_a_model_of_torchao(nodes):
    model = llama()
    by_torchao(model, "rowwise")
    assert "LlamaAttention is not patched" in str(projections_report(model))
    patch(model)
    layers = projections_report(model).layers
    assert [(layer.runs, layer.reason) for layer in layers] == [(True, "in FP8, rowwise")] * LINEARS


@pytest.mark.parametrize("by", ["models_by_references", "nodes"])
def test_float16_is_refused(by, tmp_path, request):
    """under autocast, too, and beside a Trainer's gradient scaler."""
    model = llama().float()
    patch(model, fp8="tensorwise")
    said = r"input must be of bfloat16 or float32, under autocast, too, got torch\.float"
    with pytest.raises(ValueError, match=said + "16"), torch.autocast(DEVICE, torch.float16):
        model(**tokens())
    with pytest.raises(ValueError, match=said + "64"):
        layer = LigerFloat8TrainingLinear.of(nn.Linear(32, 16, device=DEVICE))
        layer(torch.ones(2, 32, dtype=torch.float64, device=DEVICE))
    with pytest.raises(ValueError, match=r"fp8: fp16 of the Trainer must be False, got True: .* pass bf16=True"):
        by_trainer(llama().float(), {"fp8": "tensorwise"}, tmp_path, fp16=True)


def test_weights_that_are_sharded_or_quantised(models_by_references):
    """are multiplied as they are, and the report says so."""
    stock = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 16)).to(DEVICE, torch.bfloat16)
    model = copy.deepcopy(stock)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    train_in_fp8(model)
    in_8_bits = model(x)
    assert not torch.equal(in_8_bits, stock(x))
    for m in model:
        m.weight.ds_id = 0  # as ZeRO-3 marks its parameters
    assert torch.equal(model(x), stock(x))
    assert stock_reasons(model) == {"its weight is quantised, or sharded while it is multiplied"}
    quantise = pytest.importorskip("torchao.quantization")
    for each in (stock, model):
        for m in each:
            vars(m.weight).pop("ds_id", None)
        quantise.quantize_(each, quantise.Int8WeightOnlyConfig(version=2))
    assert type(model[0]) is LigerFloat8TrainingLinear and torch.equal(model(x), stock(x))
    assert not torch.equal(model(x), in_8_bits)


def adapted(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False))
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data *= 0.3
    return model


@pytest.mark.parametrize("by", ["models_by_references", "nodes"])
def test_adapters(by, request):
    """Over layers in FP8, whichever came first, they stay in 16 bits; merged, they are cast."""
    ran = request.getfixturevalue(by)
    first, later = adapted(patched("rowwise")), adapted(llama())
    patch(later.get_base_model(), fp8="rowwise")
    assert in_fp8(first) == in_fp8(later) and len(in_fp8(first)) == LINEARS
    assert all(name.endswith(".base_layer") for name in in_fp8(first))
    expected, found = step(first)[1], step(later)[1]
    assert ran is None or ran[: len(ONE_LAYER)] == ONE_LAYER
    assert_bits(found, expected)
    dense = step(adapted(llama()))[1]
    for name, g in dense.items():
        assert "lora_" in name or name == "loss"
        assert 0 < (found[name] - g).norm() < 0.25 * g.norm() + 1e-3, name
    if by == "nodes":
        assert {layer.reason for layer in projections_report(first).layers if layer.runs} == {"in FP8, rowwise"}
    before = later(**tokens()).logits
    later.merge_adapter()
    after = later(**tokens()).logits
    fresh, merged = llama(), later.get_base_model().state_dict().items()
    fresh.load_state_dict({k.replace(".base_layer", ""): v for k, v in merged if "lora_" not in k})
    patch(fresh, fp8="rowwise")
    with torch.no_grad():
        assert torch.equal(later.eval()(**tokens()).logits, fresh.eval()(**tokens()).logits)
    assert before is after is None  # both were trained


def with_head(model: nn.Module, recipe: str | None) -> nn.Module:
    model.forward = types.MethodType(fused(type(model).forward), model)
    if recipe is not None:
        model.__dict__[FP8] = recipe
    return model.train()


OF_CALLS = {}, dict(num_items_in_batch=torch.tensor(18)), dict(return_token_accuracy=True, label_smoothing=0.1)


@pytest.mark.parametrize("options", OF_CALLS, ids=str)
# gemma2: tied embeddings, soft-capped logits
@pytest.mark.parametrize("family, recipe", [("llama", "tensorwise"), ("gemma2", "rowwise")])
def test_a_head_alone_learns_almost_the_same(family, recipe, options, models_by_references, heads):
    exact_out, exact = step(with_head(make(family, torch.bfloat16), None), **options)
    ours_out, ours = step(with_head(make(family, torch.bfloat16), recipe), **options)
    assert heads == [None, recipe] and ours.keys() == exact.keys() and ours_out.logits is None
    assert 0 < (ours["loss"] - exact["loss"]).abs() < 5e-3 * exact["loss"]
    for name, g in exact.items():
        assert (ours[name].float() - g.float()).norm() < 0.1 * g.float().norm() + 1e-4, name
    if "return_token_accuracy" in options:
        assert (ours_out.token_accuracy - exact_out.token_accuracy).abs() <= 1 / 18


def test_heads_that_stay_in_16_bits(models_by_references, heads, monkeypatch):
    """say why."""
    in_rowwise = dict(fp8="rowwise", fp8_head=True)
    model = adapted(llama())
    patch(model.get_base_model(), **in_rowwise)
    step(model)
    assert heads == ["rowwise"]
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["lm_head"]))
    patch(model.get_base_model(), **in_rowwise)
    stays = "fp8_head: the head stays in 16 bits, because "
    with pytest.warns(UserWarning, match=f"{stays}it has adapters"):
        step(model)
    model = patched(in_rowwise)
    for more in (dict(skip_logits=False, return_token_accuracy=True), {}):
        with pytest.warns(UserWarning, match=f"{stays}other code reads its logits or sees its calls"):
            step(model, **more)
        model.lm_head.register_forward_hook(lambda m, args, out: out.clone())
    model, ours = patched(in_rowwise), loss_functions.LigerForCausalLMLoss
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    with pytest.warns(UserWarning, match=f"{stays}the loss is not one cross entropy of its logits"):
        step(model)
    monkeypatch.setattr(loss_functions, "LigerForCausalLMLoss", lambda *args, **kw: ours(*args, **kw))
    with pytest.warns(UserWarning, match=f"{stays}other code has replaced its loss"):
        step(patched(in_rowwise))
    assert heads == ["rowwise"] + [None] * (len(heads) - 1)
    for other, said in (
        (transformers.LlamaModel(llama().config), "LlamaModel has no output head"),
        (nn.Linear(16, 16), "the head of '' cannot be in FP8: liger_kernel has no kernels for this type of model"),
    ):
        with pytest.raises(ValueError, match=f"fp8_head: {said}"):
            patch(other, **in_rowwise)
