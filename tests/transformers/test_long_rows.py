"""The flags for long rows, ``activation_offloading`` and ``tiled_mlp``, at every door: what
changes, what does not, and what steps aside."""

import contextlib
import copy
import math
import re
import warnings
from collections.abc import Iterator

import pytest
import torch
import transformers
from adapters import lora
from hf_models import (
    DEVICE,
    assert_same_bits,
    assert_same_learning,
    assert_untouched,
    batch_of,
    checkpointed,
    everything_of,
    group_of_one,
    make,
    served_by_kernels_or_references,
    snapshot,
    step,
    tokens,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from watching import noted

import liger_kernel.transformers as liger
from liger_kernel import memory
from liger_kernel.memory import offload as offloading
from liger_kernel.ops.projections import tiled_mlp
from liger_kernel.ops.projections.mlp import AdaptedMLPFunction
from liger_kernel.transformers import _apply_liger_kernel_to_instance as patch, restore
from liger_kernel.transformers.patching import patches
from liger_kernel.transformers.patching.report import patches_report
from liger_kernel.transformers.recognise import mlps

FAMILIES = ["llama", "gemma2", "phi3", "mixtral", "nemotron", "gpt_neox", "opt", "qwen2_vl", "whisper"]


@pytest.fixture(autouse=True)
def _around(monkeypatch) -> Iterator[None]:
    """Every tensor is worth a copy, and on a CPU, too."""
    monkeypatch.setattr(offloading, "LEAST", 1)
    monkeypatch.setattr(offloading, "LATE", 1)
    monkeypatch.setattr(offloading, "STAYS", ("meta",))
    offloading._warn.cache_clear()
    mlps._say_in_one_piece.cache_clear()
    with served_by_kernels_or_references():
        yield
    restore()
    offloading._lane.cache_clear()


@pytest.fixture
def moved(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of what is copied to the host."""
    return noted(monkeypatch, offloading._Moved, "__init__", lambda self, run, lane, t, blocks: tuple(t.shape))


@pytest.fixture
def tiles(monkeypatch) -> list[int]:
    """How many tiles each MLP ran in, forward."""
    found = noted(monkeypatch, tiled_mlp.LigerTiledMLPFunction, "apply", lambda fn, m, x, n, *_: n)
    of_node = AdaptedMLPFunction.forward
    monkeypatch.setattr(
        AdaptedMLPFunction, "forward", lambda *args: (args[10] > 1 and found.append(args[10])) or of_node(*args)
    )
    return found


def moved_by_layers(moved: list[tuple[int, ...]], model: nn.Module) -> bool:
    """Whether only the layers' inputs were moved, and what the last norm saves."""
    found = sum(math.prod(shape) == 2 * 12 * model.config.hidden_size for shape in moved)
    return found in range(model.config.num_hidden_layers + 1, model.config.num_hidden_layers + 3)


def learned(model: nn.Module, batch: dict[str, Tensor] | None = None, **flags) -> dict[str, Tensor]:
    restore(model)
    patch(model, **flags)
    return step(model, batch)[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, moved, tiles):
    model = make(family)
    batch = batch_of(model)
    before = snapshot(*everything_of(family), model)
    expected = learned(model, batch)
    assert_same_bits(learned(model, batch, activation_offloading=True), expected)
    assert moved and not tiles
    assert "offloading" in ", ".join(patches_report(model, {"activation_offloading": True}).patched)
    assert "offloading" not in str(patches_report(model))  # without the flag it is no part that is missing
    ours = learned(model, batch, tiled_mlp=3)
    # experts; MLPs that are no module of their own
    assert (set(tiles) == {3}) == (family not in ("mixtral", "opt", "whisper"))
    assert_same_learning(ours, expected)
    restore(model)
    assert_untouched(before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant, moved, tiles):
    model = checkpointed(make("llama"), reentrant)
    expected = learned(model)
    whole = learned(model, tiled_mlp=3)
    assert_same_learning(whole, expected)
    assert not moved
    assert_same_bits(learned(model, activation_offloading=True), expected)
    assert moved_by_layers(moved, model)
    assert_same_bits(learned(model, activation_offloading=True, tiled_mlp=3), whole)


def test_of_ours_nothing_changes_without_the_flags():
    model = make("llama")
    before = snapshot(*everything_of("llama"), model)
    patch(model, rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=False, rematerialise=False)
    assert_untouched(before)


def test_classes_and_live_models(moved, tiles):
    expected = learned(make("llama"), tiled_mlp=3)
    before = snapshot(*everything_of("llama"))
    liger.apply_liger_kernel_to_llama(activation_offloading=True, tiled_mlp=3)
    model = make("llama")
    count = len(tiles)
    assert_same_bits(step(model)[1], expected)
    assert moved and len(tiles) > count
    patched = snapshot(model)
    patch(model, activation_offloading=True, tiled_mlp=3)  # nothing is left to patch
    assert_untouched(patched)
    restore()
    assert_untouched(before)
    liger.apply_liger_kernel_to_llama(model=model, activation_offloading=True, tiled_mlp=3)
    assert_same_bits(step(model)[1], expected)
    assert_same_bits(step(copy.deepcopy(model))[1], expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [("activation_offloading", 2), ("keep_attention", 0), *(("tiled_mlp", wrong) for wrong in (0, -3, 2.0, "4"))],
)
def test_bad_values(name, value):
    for model in ({}, {"model": make("llama")}):
        with pytest.raises(ValueError, match=f"{name}: must be True.*, got {re.escape(repr(value))}"):
            liger.apply_liger_kernel_to_llama(**model, **{name: value})


def test_nothing_to_offload():
    model = make("llama")
    model.model.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(model.model.layers)})
    patches.WARNED.clear()
    with pytest.warns(UserWarning, match="it has no layers that can be checkpointed, so nothing is offloaded"):
        patch(model, activation_offloading=True)


def test_fsdp2(moved):
    """Weights that FSDP gathers are parameters, too."""
    from torch.distributed.fsdp import fully_shard

    found = []
    with group_of_one() as mesh:
        for flags in ({}, {"activation_offloading": True}, {"activation_offloading": True, "tiled_mlp": 3}):
            model = checkpointed(make("llama"), False)
            patch(model, **flags)
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            fully_shard(model, mesh=mesh)
            learnt = step(model)[1]
            found.append({n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in learnt.items()})
    assert_same_bits(found[1], found[0])
    assert_same_learning(found[2], found[0])
    shapes = {tuple(p.shape) for p in make("llama").parameters() if p.ndim > 1}
    assert moved and not shapes & {*moved, *(shape[::-1] for shape in moved)}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora(checkpointing, moved, tiles):
    model = make("llama")
    if checkpointing:
        checkpointed(model)
    model.enable_input_require_grads()
    inner = lora(model).train().base_model.model
    expected = learned(inner)
    assert_same_bits(learned(inner, activation_offloading=True), expected)
    assert moved and not tiles
    assert_same_learning(learned(inner, tiled_mlp=3), expected)
    assert set(tiles) == {3}


class Attentions(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in memory.attention_operators()
        return function(*args, **(kwargs or {}))


@pytest.fixture
def without_masks(monkeypatch):
    """Attention as in a batch without padding, which is an operator on a CPU, too."""
    stock = torch.nn.functional.scaled_dot_product_attention

    def causal(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        return stock(q, k, v, None, 0.0, True, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", causal)


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_attention_is_kept(family, offloads, without_masks, moved):
    # on a GPU, groups of heads in fp32 are no operator
    model = checkpointed(make(family, num_key_value_heads=4), False)
    model.set_attn_implementation("sdpa")
    counts, found = [], []
    for keeps in (False, True):
        with Attentions() as attentions:
            found.append(learned(model, keep_attention=keeps, activation_offloading=offloads))
        counts.append(attentions.count)
    assert_same_bits(found[1], found[0])
    layers = model.config.num_hidden_layers
    assert counts == [2 * layers, layers]
    assert not any("context_fn" in layer._gradient_checkpointing_func.keywords for layer in model.model.layers)
    report = str(patches_report(model, {"keep_attention": True, "activation_offloading": offloads}))
    assert ("offloading, keeping attention" if offloads else "keeping attention") in report


@pytest.mark.parametrize(
    ("attention", "options", "said"),
    [
        ("sdpa", dict(use_reentrant=True), "another kind of checkpointing than PyTorch's with use_reentrant=False"),
        ("sdpa", dict(use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(),) * 2), "another context_fn"),
        ("eager", dict(use_reentrant=False), "eager attention"),
    ],
)
def test_what_cannot_keep_attention(attention, options, said):
    model = make("llama", **(dict(attn_implementation="eager") if attention == "eager" else {}))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    expected = learned(model)
    patches.WARNED.clear()
    with pytest.warns(UserWarning, match=f"keep_attention: it steps aside for {said}"):
        ours = learned(model, keep_attention=True)
    assert_same_bits(ours, expected)


def test_attention_without_checkpointing():
    model = make("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_bits(learned(model, keep_attention=True), learned(model))


def test_how_many_tiles():
    asked = [(False, 10**6), (True, 2047), (True, 4096), (True, 10**6), (5, 10**6), (5, 3), (1, 100), (4, 0), (True, 0)]
    assert [tiled_mlp.count_of(*each) for each in asked] == [1, 1, 2, 16, 5, 3, 1, 1, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda mlp: mlp.down_proj.register_forward_hook(lambda *_: None), "hooks on its layers expect to see all"),
        (lambda mlp: setattr(mlp.up_proj.weight, "ds_id", 0), "ZeRO-3 gathers its weights"),
    ],
)
def test_mlps_that_run_in_one_piece(change, said, tiles):
    model = make("llama")
    change(model.model.layers[0].mlp)
    expected = learned(model)
    with pytest.warns(UserWarning, match=f"tiled_mlp: LlamaMLP runs in one piece, because {said}"):
        ours = learned(model, tiled_mlp=3)
    assert_same_learning(ours, expected)
    assert tiles == [3]  # of the other layer


def test_generation(tiles):
    model = make("llama").eval()
    prompt = tokens(batch=6)["input_ids"]  # more rows than a step of generation has
    options = dict(max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(prompt), eos_token_id=None)
    expected = model.generate(prompt, **options)
    patch(model, tiled_mlp=3, activation_offloading=True)
    assert torch.equal(model.generate(prompt, **options), expected)
    assert tiles


@pytest.mark.slow
def test_compiled_with_tiles():
    torch._dynamo.reset()
    model = make("llama", num_hidden_layers=1)
    expected = learned(model)
    restore(model)
    patch(model, tiled_mlp=3)
    model.zero_grad()
    torch.compile(model, backend="aot_eager")(**tokens(), use_cache=False).loss.backward()
    assert_same_learning({"loss": expected["loss"]} | {n: p.grad for n, p in model.named_parameters()}, expected)


@pytest.mark.parametrize(
    "length",
    [2**11, pytest.param(2**20, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_one_long_row(length, monkeypatch):
    """Its first tokens learn what they do in a shorter row, its documents what they do alone."""
    monkeypatch.undo()  # copies of small tensors would take long
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, vocab_size=32000, use_cache=False)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=length)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()
    model = checkpointed(model.to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32), False)
    patch(model, activation_offloading=True, keep_attention=True, tiled_mlp=True)
    ids, part = torch.randint(0, 32000, (1, length), device=DEVICE), length // 16
    tolerance = 2e-2 if DEVICE == "cuda" else 1e-5
    whole = step(model, {"input_ids": ids, "labels": ids})[1]
    assert all(t.isfinite().all() for t in whole.values()) and abs(whole["loss"].item() - 10.4) < 0.3  # log 32000

    labels = torch.where(torch.arange(length, device=DEVICE) < part, ids, -100)
    of_first = step(model, {"input_ids": ids, "labels": labels})[1]
    assert_same_learning(of_first, step(model, {"input_ids": ids[:, :part], "labels": ids[:, :part]})[1], tolerance)

    if DEVICE == "cuda":
        import liger_kernel.transformers.attention  # noqa: F401  "liger_varlen"

        model.config._attn_implementation = "liger_varlen"
        at = torch.arange(length, device=DEVICE)
        bounds = torch.arange(0, length + 1, part, device=DEVICE).int()
        packed = {"input_ids": ids, "labels": torch.where(at % part == 0, -100, ids), "position_ids": (at % part)[None]}
        of_documents = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": part, "max_length_k": part}
        found = step(model, packed | of_documents)[1]
        each = [step(model, {"input_ids": row[None], "labels": row[None]})[1] for row in ids.view(16, part)]
        mean = lambda name: torch.stack([one[name].float() for one in each]).mean(0)
        assert_same_learning(found, {name: mean(name).to(t.dtype) for name, t in found.items()}, tolerance)
