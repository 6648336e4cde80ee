"""Packed rows without a mask: the same as with one, and as separate rows."""

import ast
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_models import assert_same_bits, assert_same_learning, checkpointed, make, step
from quick import further
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from watching import Watch

from liger_kernel.testing import assert_as_accurate, run as run_op
from liger_kernel.train import loop, model as train_model
from liger_kernel.train.config import TrainConfig
from liger_kernel.train.loop import evaluate
from liger_kernel.train.token_rows import IGNORE, TokenRows
from liger_kernel.transformers import _apply_liger_kernel_to_instance, attention, lazy_mask
from liger_kernel.transformers.recognise.compare import references
from liger_kernel.transformers.rewrite import rules

if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("keeps sdpa under transformers older than 5", allow_module_level=True)

VOCAB = 100
SIZES = [[7, 1, 5], [3, 3], [13]]  # lengths of the documents of each row; the second one is padded
# model type -> what its tiny config gets: grouped heads, heads of their own, norms of queries and
# keys, windows narrower than documents, also of some layers
MODELS = {
    "llama": dict(num_key_value_heads=1),
    "phi": {},
    "qwen3": dict(num_key_value_heads=2),
    "mistral": dict(sliding_window=4, num_key_value_heads=2),
    "gemma3_text": dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
}


def rows(sizes: list[list[int]] = SIZES) -> TokenRows:
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(3, VOCAB, (n,), generator=generator).int() for row in sizes for n in row]
    starts = torch.tensor([0, *(len(d) for d in documents)]).cumsum(0)[:-1]
    ids = torch.cat(documents)
    bounds = torch.tensor([0, *(sum(row) for row in sizes)]).cumsum(0)
    packed = TokenRows(ids, ids, bounds).of_documents(starts)
    packed.bounded = True
    return packed


def on_device(batch: dict, device: str) -> dict:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def batches(device: str = "cpu") -> tuple[dict, dict]:
    """The rows as one batch of packed ones, and a row for each document; the same sum of losses."""
    packed = rows().batch([0, 1, 2], 0)
    lengths = torch.tensor([n for row in SIZES for n in row])[:, None]
    alone = rows([[n] for n in lengths.flatten().tolist()]).batch(list(range(len(lengths))), 0)
    alone["attention_mask"] = (torch.arange(alone["labels"].shape[1]) < lengths).long()
    both = packed, {k: alone[k] for k in ("input_ids", "labels", "attention_mask")}
    return tuple(on_device(b, device) | {"num_items_in_batch": 20} for b in both)


def documents_in_a_loop(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
    return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False,
):  # fmt: skip
    """``varlen_attn``, whose arguments it checks, in plain PyTorch."""
    assert query.ndim == 3 and cu_seq_q.dtype == torch.int32 and cu_seq_q[0] == 0 and cu_seq_q[-1] == len(query)
    assert max_q == max_k == cu_seq_q.diff().max() and window_size[1] == 0
    assert enable_gqa or query.shape[1] == key.shape[1]
    outs = []
    for begin, end in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:]):
        q, k, v = (t[begin:end].transpose(0, 1) for t in (query, key, value))
        at = torch.arange(end - begin, device=q.device)
        apart = at[:, None] - at
        seen = (apart >= 0) & ((apart <= window_size[0]) | (window_size[0] < 0))
        outs.append(F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=enable_gqa).transpose(0, 1))
    return torch.cat(outs)


def before_groups(query, key, value, *args, return_aux=None, scale=None, window_size=(-1, -1)):
    """``varlen_attn`` as PyTorch 2.11 has it."""
    return documents_in_a_loop(query, key, value, *args, scale=scale, window_size=window_size)


@pytest.fixture
def dense_masks(monkeypatch) -> list[tuple]:
    """Shapes of the masks that are made."""
    made = []

    def spied(function):
        @functools.wraps(function)
        def make(*args, **kwargs):
            mask = function(*args, **kwargs)
            if mask is not None:
                made.append(tuple(mask.shape))
            return mask

        return make

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", spied(attention.sdpa_mask))
    monkeypatch.setattr(attention, "sdpa_mask", spied(attention.sdpa_mask))
    monkeypatch.setattr(lazy_mask, "visible", spied(lazy_mask.visible))
    return made


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """``varlen_attn`` in plain PyTorch, for any tensor; the windows that it was called with."""
    serve(monkeypatch, documents_in_a_loop, windows := [])
    return windows


def serve(monkeypatch, function, windows: list | None = None) -> None:
    def varlen_attn(*args, **kwargs):
        if windows is not None:
            windows.append(kwargs.get("window_size"))
        return function(*args, **kwargs)

    monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "_TAKES", inspect.signature(function).parameters)
    monkeypatch.setattr(attention, "_lacks", lambda device, dtype: None)


def packing_model(model_type: str, patched: bool = False, attends: str = attention.NAME, **more) -> torch.nn.Module:
    model = make(model_type, attention="sdpa", **{**MODELS.get(model_type, {}), **more}).cpu()
    if patched:
        _apply_liger_kernel_to_instance(model)
    if attends == attention.NAME:
        assert attention.use(model) is None
    return model


def _learning_embedding(model):
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: out.requires_grad_())


def learnt(model: torch.nn.Module, batch: dict, **more) -> dict[str, Tensor]:
    with references():
        return step(model, batch, **more)[1]


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("model_type", MODELS)
def test_where_it_does_not_serve_it_is_sdpa_to_the_bit(model_type, patched, dense_masks):
    packed, _ = batches()
    expected = learnt(packing_model(model_type, patched, "sdpa"), packed)
    of_sdpa = dense_masks.copy()
    dense_masks.clear()
    assert_same_bits(learnt(packing_model(model_type, patched), packed), expected)
    assert dense_masks == of_sdpa  # as many, each made once for all layers


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("model_type", MODELS)
def test_documents_are_learnt_as_if_each_were_alone(model_type, patched, calls, dense_masks):
    packed, alone = batches()
    expected = learnt(packing_model(model_type, patched, "sdpa"), alone)
    dense_masks.clear()
    model = packing_model(model_type, patched)
    assert_same_learning(learnt(model, packed), expected)
    assert not dense_masks
    default = "sliding_attention" if getattr(model.config, "sliding_window", None) else "full_attention"
    kinds = getattr(model.config, "layer_types", None) or [default] * 2
    assert calls == [(3, 0) if kind == "sliding_attention" else (-1, 0) for kind in kinds]


def test_a_window_wider_than_any_document_is_none(calls):
    learnt(packing_model("mistral", sliding_window=13), batches()[0])
    assert calls == [(-1, 0)] * 2


def test_before_it_had_groups(monkeypatch):
    serve(monkeypatch, before_groups, called := [])
    packed, alone = batches()
    expected = learnt(packing_model("llama", attends="sdpa"), alone)
    assert_same_learning(learnt(packing_model("llama"), packed), expected)
    assert called


def far(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    return sum(float((found[name].float() - t).norm() / t.norm().clamp(min=1e-6)) for name, t in truth.items())


def no_bounds(batch: dict) -> dict:
    return {k: v for k, v in batch.items() if not k.startswith(("cu_", "max_"))}


@pytest.mark.parametrize(
    "change, more",
    [
        (no_bounds, {}),
        (lambda b: b | {"softcap": None, "position_bias": torch.zeros(1, 1, 13, 13)}, {}),
        (lambda b: b | {"attention_mask": (torch.arange(13) < 12).long().expand(3, 13)}, {}),
        (dict, dict(attention_dropout=0.5)),
    ],
)
def test_what_it_cannot_do_is_left_to_sdpa(change, more, calls):
    batch = change(batches()[0])
    expected = learnt(packing_model("llama", attends="sdpa", **more), batch)
    assert_same_bits(learnt(packing_model("llama", **more), batch), expected)
    assert not calls


def test_masks_of_other_patterns_are_made():
    """Not those that bounds and a window say all of."""
    config = transformers.LlamaConfig(hidden_size=8, num_attention_heads=2, attn_implementation=attention.NAME)
    of = dict(attention_mask=None, past_key_values=None)
    create = functools.partial(transformers.masking_utils.create_causal_mask, config, torch.zeros(2, 6, 8), **of)
    packed = torch.tensor([[0, 1, 2, 0, 1, 0]]).expand(2, 6)
    assert isinstance(mask := create(position_ids=packed), attention.LazyMask)
    block = torch.block_diag(*(torch.ones(n, n) for n in (3, 2, 1))).tril().bool()
    assert mask.shape == (2, 1, 6, 6) and mask.dtype == torch.bool and mask.made is None
    assert torch.equal(mask[1, 0], block) and torch.equal(mask | False, mask.dense()) and mask.detach() is mask
    assert create(position_ids=torch.arange(6)[None]) is None
    seen = create(position_ids=packed, or_mask_function=lambda b, h, q, k: k == 0)
    assert type(seen) is Tensor and bool(seen[0, 0, :, 0].any())


@pytest.mark.parametrize("backend", further("eager", "aot_eager"))
def test_compiled_layers(backend, calls, dense_masks):
    packed, alone = batches()
    expected = learnt(packing_model("llama", attends="sdpa", num_hidden_layers=1), alone)
    dense_masks.clear()
    model = packing_model("llama", num_hidden_layers=1)
    for layer in model.model.layers:
        layer.compile(backend=backend)
    assert_same_learning(learnt(model, packed), expected)
    assert not dense_masks


def have_masks(backend: CompileCounterWithBackend) -> list[bool]:
    """Whether attention has a mask, of each graph that has attention."""
    calls = [[n for n in g.graph.nodes if "scaled_dot_product" in str(n.target)] for g in backend.graphs]
    found = [{n.kwargs["attn_mask"] is not None for n in of_graph} for of_graph in calls if of_graph]
    return [masked for (masked,) in found]


def of_length(n: int, **more: Tensor) -> dict:
    ids = torch.arange(2 * n).view(2, n) % VOCAB
    return dict(input_ids=ids, labels=ids) | more


@pytest.fixture
def compiler():
    torch._dynamo.reset()  # it remembers which sizes changed in what other tests compiled
    yield CompileCounterWithBackend
    torch._dynamo.reset()


@pytest.mark.parametrize("by", ["eager", *further("aot_eager")])
def test_a_model_compiled_whole_has_the_mask_of_eager_mode(by, compiler):
    model, backend = packing_model("llama", patched=True, attends="sdpa", num_hidden_layers=1), compiler(by)
    expected = learnt(model, of_length(7))
    model.compile(backend=backend, fullgraph=True)
    assert_same_learning(learnt(model, of_length(7)), expected)
    for n in (8, 9):
        learnt(model, of_length(n))
    assert have_masks(backend) == [False, False]  # one graph for that length, one for any
    assert model.config._attn_implementation == "sdpa"


PADDED = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
DOCUMENTS = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(2, 7)


@pytest.mark.parametrize(
    "model_type, batch, expected",
    [
        ("llama", dict(position_ids=DOCUMENTS), True),
        *further(("qwen2", {}, False), ("gemma", {}, False), ("llama", dict(attention_mask=PADDED), True)),
        *further(("mistral", {}, True)),  # has a window
    ],
)
def test_masks_of_compiled_models(model_type, batch, expected, compiler):
    model, backend = packing_model(model_type, patched=True, attends="sdpa"), compiler("eager")
    torch.compile(model, backend=backend, fullgraph=True)(**of_length(7, **batch), use_cache=False)
    assert have_masks(backend) == [expected]


@pytest.mark.slow
def test_what_is_between_two_graphs_sees_sdpa(compiler):
    """A forward that compiles in parts is called as it is: another thread may read the config."""
    model, seen = packing_model("llama", patched=True, attends="sdpa", num_hidden_layers=1), []
    mlp = model.model.layers[0].mlp
    whole = mlp.forward
    look = torch._dynamo.disable(lambda: seen.append(model.config._attn_implementation))
    mlp.forward = lambda x: (look(), whole(x))[1]
    torch.compile(model, backend="eager")(**of_length(7), use_cache=False)
    assert seen == ["sdpa"]


def test_other_compiled_models_are_left_alone(compiler):
    packing_model("llama", patched=True, attends="sdpa")
    stock, backend = packing_model("llama", attends="sdpa"), compiler("eager")
    torch.compile(stock, backend=backend)(**of_length(7), use_cache=False)
    assert have_masks(backend) == [True], "transformers leaves the mask out by itself: attention.unmasked can go"


def scalars_read(model, **batch) -> int:
    """What the host reads of tensors, for which it waits on a GPU."""
    with Watch() as seen:
        model(**batch, use_cache=False).loss.backward()
    return seen.reads


@pytest.mark.parametrize("model_type", ["gemma3_text", *further(*(t for t in MODELS if t != "gemma3_text"))])
def test_the_host_reads_no_scalar(model_type):
    """A batch that says nothing of positions has none to compare; one that does is as in stock."""
    stock, patched = packing_model(model_type, attends="sdpa"), packing_model(model_type, patched=True, attends="sdpa")
    assert scalars_read(stock, **of_length(7)), "transformers asks no more: attention.unmasked need not answer"
    assert scalars_read(patched, **of_length(7)) == 0
    of_documents = scalars_read(patched, **of_length(7, position_ids=DOCUMENTS))
    assert of_documents == scalars_read(stock, **of_length(7, position_ids=DOCUMENTS)) > 0
    counted = of_length(7, position_ids=torch.arange(7).expand(2, 7))
    assert_same_bits(step(patched, of_length(7))[1], step(patched, counted)[1])


@pytest.mark.parametrize("model_type", ["llama", *further(*(t for t in MODELS if t != "llama"))])
def test_the_host_reads_no_scalar_of_documents(model_type, dense_masks):
    """Bounds say how many there are; with as many as rows, only positions say whose."""
    packed = rows().batch([0, 1, 2], 0)
    models = (packing_model(model_type, patched=True, attends=attends) for attends in (attention.NAME, "sdpa"))
    for model in models:
        assert scalars_read(model, **packed) == 0
    assert scalars_read(model, **{k: v for k, v in packed.items() if k != "cu_seq_lens_q"}) > 0
    alone = rows([[5], [5]]).batch([0, 1], 0)
    assert "cu_seq_lens_q" in alone and scalars_read(model, **alone) > 0


FORWARD = """
def forward(self, x, position_ids=None, **kwargs):
    if position_ids is None:
        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
        position_ids = position_ids.unsqueeze(0)
    CHANGE
    return create_causal_mask(config=self.config, position_ids=position_ids)
"""


@pytest.mark.parametrize(
    "change, numbers",
    [
        ("pass", True),
        ("x = self.rope(x, position_ids=position_ids)", True),
        ("position_ids, x = self.number(x)", False),
        ("position_ids += x", False),
        ("position_ids[:, 3] = 0", False),
        ("position_ids.masked_fill_(x, 1)", False),
        ("x = self.rope(x, position_ids=position_ids % 4)", False),
        ("for position_ids in x: pass", False),
    ],
)
def test_forwards_that_number_tokens_themselves(change, numbers):
    (tree,) = ast.parse(FORWARD.replace("CHANGE", change)).body
    assert rules.rewrite_masks(tree) == numbers
    assert ("_liger_given, kwargs)(config" in ast.unparse(tree)) == numbers


def positions_in_rows(model) -> Tensor:
    """What a model computes of rows that its positions divide into documents."""
    with torch.no_grad():
        return model(input_ids=of_length(7)["input_ids"], position_ids=DOCUMENTS, use_cache=False)[0].clone()


def _in_a_thread(function):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        context = contextvars.copy_context()  # as code does that goes on elsewhere for its caller
        pool.submit(context.run, function).result()


WHEN = {
    "a hook of a layer": lambda model, look: model.model.layers[-1].register_forward_hook(lambda *_: look()),
    "a hook of the embedding": lambda m, look: m.get_input_embeddings().register_forward_hook(lambda *_: look()),
    "the loss": lambda model, look: setattr(
        model, "loss_function", lambda logits, labels, **_: (look(), logits.float().mean())[1]
    ),
    "a thread": lambda model, look: model.model.layers[-1].register_forward_hook(lambda *_: _in_a_thread(look)),
    "a checkpointed layer": lambda model, look: (
        _learning_embedding(checkpointed(model, True)),
        model.model.layers[-1].mlp.register_forward_hook(lambda *_: look()),
    ),
}


OTHERS = ("the same", "the same configuration", "stock", "patched")
CALLED = [*((when, OTHERS[0]) for when in WHEN), *(("the loss", other) for other in OTHERS[1:])]


@pytest.mark.parametrize(
    "when, other", [*CALLED, *further(*(c for c in itertools.product(WHEN, OTHERS) if c not in CALLED))]
)
def test_a_model_called_by_another_sees_its_own_documents(when, other):
    """What a patched model knows of its rows is true of no other call, be it of the same body."""
    model = packing_model("llama", patched=True, attends="sdpa")
    if other == "the same":
        inner = model.model
    elif other == "the same configuration":
        inner = transformers.LlamaModel(model.config)
    else:
        inner = packing_model("qwen3", patched=other == "patched", attends="sdpa")
    found, busy = [], []

    def look():
        if not busy:  # the inner call runs the same hooks
            busy.append(True)
            found.append(positions_in_rows(inner))
            busy.clear()

    expected = positions_in_rows(inner)
    WHEN[when](model, look)
    model(**of_length(7), use_cache=False).loss.backward()
    assert found and all(torch.equal(y, expected) for y in found)


@pytest.mark.parametrize("where", ["a model inside", "adapters", "no gradient", "inference"])
def test_the_host_reads_no_scalar_wherever_the_model_is(where):
    model, batch = packing_model("llama", patched=True, attends="sdpa"), of_length(7)
    if where == "a model inside":
        model, batch = model.model, dict(input_ids=batch["input_ids"])
    elif where == "adapters":
        peft = pytest.importorskip("peft", reason="peft is not installed")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    mode = {"no gradient": torch.no_grad, "inference": torch.inference_mode}.get(where, contextlib.nullcontext)
    with mode(), Watch() as seen:
        model(**batch, use_cache=False)
    assert not seen.reads


# asks whether it is sdpa; its own; bounds are for its linear layers
@pytest.mark.parametrize("model_type", ["falcon", "bloom", "qwen3_next"])
def test_families_that_keep_what_they_have(model_type):
    model = make(model_type)
    before = model.config._attn_implementation
    assert attention.use(model) == f"{model_type} has attention of its own"
    assert model.config._attn_implementation == before


def settled(model, rows: TokenRows, device: str = "cpu", precision: str = "bf16", **config) -> str:
    return train_model.attend(TrainConfig(**config), rows, model, torch.device(device), precision)


PLAIN = TokenRows.of([([1, 2], [1, 2])])


def test_attention_that_sdpa_does_not_serve():
    """gpt-oss has sinks, which sdpa would leave out."""
    pytest.importorskip("transformers.models.gpt_oss")
    model = make("gpt_oss", attention="eager")
    assert attention.use(model) == "sdpa does not serve gpt_oss"
    assert settled(model, PLAIN) == "eager" and settled(model, rows()).startswith("eager with a mask, as ")
    assert model.config._attn_implementation == "eager"


def test_text_in_a_model_of_images():
    model = make("gemma3", attention="sdpa")
    assert attention.use(model) is None
    assert model.config.text_config._attn_implementation == attention.NAME
    assert model.config.vision_config._attn_implementation == "sdpa"


def test_auto_takes_it_where_it_serves(monkeypatch):
    model = packing_model("llama", attends="sdpa")
    settle = functools.partial(settled, model)
    assert settle(rows()) == "sdpa with a mask, as no GPU"
    assert settle(rows(), attention="eager") == "eager"
    assert settle(PLAIN) == "sdpa"
    monkeypatch.setattr(train_model, "varlen_lacks", lambda device, dtype: None if dtype == torch.bfloat16 else "fp32")
    assert settle(rows(), attention="sdpa") == settle(PLAIN) == "sdpa" and model.config._attn_implementation == "sdpa"
    assert settle(rows(), precision="fp32") == "sdpa with a mask, as fp32"
    packed = rows()
    packed.bounded = False
    assert settle(packed, precision="bf16-mixed") == "varlen_attn, each document by itself"
    assert packed.bounded and model.config._attn_implementation == attention.NAME
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert settle(rows(), trainer="hf").startswith("sdpa with a mask, as transformers' Trainer cuts")


@pytest.mark.usefixtures("models_by_references")
@pytest.mark.parametrize("trainer, checkpointing", [("torch", "none"), ("torch", "selective"), ("hf", "none")])
def test_a_run(trainer, checkpointing, calls, dense_masks, monkeypatch, tmp_path, capsys):
    """Each trainer's batches say where documents begin; losses are those of a mask."""
    texts = ("def add(a, b): return a + b " * (1 + i % 4) for i in range(40))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes = dict(hidden=32, heads=2, kv_heads=1, layers=2, vocab=300, length=64, batch=2, steps=3, warmup=1)
    how = dict(device="cpu", packing="documents", trainer=trainer, gradient_checkpointing=checkpointing)
    places = dict(data=str(tmp_path / "texts.jsonl"), out=str(tmp_path / "run"))
    config = TrainConfig(**sizes, **how, **places, eval_fraction=0.1, log_every=1)
    expected = loop.train(dataclasses.replace(config, attention="sdpa", save=str(tmp_path / "saved")))
    assert "attention: sdpa\n" in capsys.readouterr().out and dense_masks and not calls
    lacks = lambda device, dtype: None if dtype == torch.float32 else "fp32 here"
    monkeypatch.setattr(train_model, "varlen_lacks", lacks)
    dense_masks.clear()
    metrics = loop.train(dataclasses.replace(config, save=str(tmp_path / "other")))
    assert "attention: varlen_attn, each document by itself\n" in capsys.readouterr().out and calls and not dense_masks
    assert metrics["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert metrics["evaluations"][-1]["loss"] == pytest.approx(expected["evaluations"][-1]["loss"], rel=1e-4)
    assert attention.NAME not in (tmp_path / "other" / "config.json").read_text()
    scores = evaluate(dataclasses.replace(config, model=str(tmp_path / "other")))
    assert not dense_masks and scores["loss"] == pytest.approx(expected["evaluations"][-1]["loss"], rel=0.05)


def test_bounds_of_documents():
    batch = rows().batch([1, 0], 0)
    # what is padded is a document
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, *range(7)], [*range(7), 0, *range(5)]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 6, 13, 20, 21, 26]
    assert batch["cu_seq_lens_q"].dtype == torch.int32 and batch["max_length_q"] == batch["max_length_k"] == 7
    assert (batch["labels"][0, 6:] == IGNORE).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen_attn needs a GPU")
@pytest.mark.parametrize("sizes", [[[129, 1, 77, 49], [256]], [[1, 255], [33, 222, 1]], [[256]]], ids=str)
@pytest.mark.parametrize("heads, kv_heads, width", [(4, 4, 64), (8, 2, 128), (4, 1, 256)])
@pytest.mark.parametrize("window", [None, 16])
def test_as_accurate_as_sdpa(sizes, heads, kv_heads, width, window):
    """Output and gradients of the real kernel in bf16 against sdpa with a mask."""
    batch = on_device(rows(sizes).batch(list(range(len(sizes))), 0), "cuda")
    of = dict(num_attention_heads=heads, num_key_value_heads=kv_heads, sliding_window=window)
    config = transformers.MistralConfig(**of, attn_implementation=attention.NAME)
    create = getattr(transformers.masking_utils, f"create_{'sliding_window_' if window else ''}causal_mask")
    embeds = torch.zeros(*batch["input_ids"].shape, 8, device="cuda")
    mask = create(config, embeds, attention_mask=None, past_key_values=None, position_ids=batch["position_ids"])
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = heads // kv_heads, True
    B, T = batch["input_ids"].shape
    generator = lambda seed: torch.Generator("cuda").manual_seed(seed)
    normal = lambda n, seed: torch.randn(B, n, T, width, device="cuda", generator=generator(seed))
    draw = lambda n, seed: normal(n, seed).bfloat16().requires_grad_()
    args = dict(q=draw(heads, 0), k=draw(kv_heads, 1), v=draw(kv_heads, 2))
    wide = {name: t.detach().double().requires_grad_() for name, t in args.items()}
    bounds = {name: batch[name] for name in ("cu_seq_lens_q", "max_length_q")}
    by = lambda mask, **more: lambda q, k, v: attention.attention(module, q, k, v, mask, **more)[0]
    ours = run_op(by(mask, **bounds), args)
    if isinstance(mask, attention.LazyMask):  # else one document in each row: no mask is needed
        assert mask.made is None
        mask = mask.dense()
    assert_as_accurate(ours, run_op(by(mask), args), run_op(by(mask), wide))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen_attn needs a GPU")
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral"])
def test_a_model_on_a_gpu(model_type, dense_masks):
    """Losses and gradients in bf16 are as close to those in fp32 as sdpa's."""
    packed, _ = batches("cuda")
    model = lambda attends, dtype: packing_model(model_type, True, attends, head_dim=16).to("cuda", dtype)
    found = step(model(attention.NAME, torch.bfloat16), packed)[1]
    assert not dense_masks
    stock, truth = (step(model("sdpa", dtype), packed)[1] for dtype in (torch.bfloat16, torch.float32))
    assert far(found, truth) <= 2 * far(stock, truth)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_says_what_a_token_may_see(name):
    """It has the second name since Transformers 5.24."""
    config = transformers.LlamaConfig(attn_implementation="sdpa")
    assert attention.needs_no_mask(config, {})
    assert not attention.needs_no_mask(config, {name: transformers.DynamicCache()})
