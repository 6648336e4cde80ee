"""What each rank does in test_parallel.py: every way of running over several processes, compared
with one process of the stock model.

``CHECKS`` are the ways. ``run(folder)`` starts the ranks, which write what they found of each.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import importlib.util
import os
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hf_models
import interpreted  # noqa: F401  in a spawned rank, this sets up the interpreter, as pytest does for a test
import processes
import pytest
import torch
import torch.distributed as dist
from hf_models import assert_same_learning, checkpointed, served_by_kernels_or_references, step, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import ProcessException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from liger_kernel import memory
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from liger_kernel.ops._core.operator import OPS
from liger_kernel.ops.projections.float8 import lacking
from liger_kernel.ops.projections.float8_training import RECIPES
from liger_kernel.parallel import Parallel, VocabularyParallel, by_sharding, call_instead, clip_grad_norm_, parallelize
from liger_kernel.patch_options import PatchOptions
from liger_kernel.transformers import _apply_liger_kernel_to_instance, class_patches, projections_report, restore
from liger_kernel.transformers.head import loss as head_loss
from liger_kernel.transformers.recognise import experts as experts_module, mlps, projections as recognised, storages

memory.SMALL = 0  # tensors of tests are small
RANKS = int(os.environ.get("LIGER_TEST_RANKS", 2))
ROWS, LENGTH, IGNORED = 2 * RANKS, 12, 3  # of the batch of all ranks together
TIED = dict(tie_word_embeddings=True)
TOLERANCE = 1e-5  # sums of other terms, in another order
GPUS = torch.cuda.device_count()
HEADS = dict(num_attention_heads=RANKS, num_key_value_heads=RANKS) if RANKS > 2 else {}  # some for every rank
make = functools.partial(hf_models.make, **HEADS)


def batch() -> dict[str, Tensor]:
    """Of unequal numbers of learnt tokens in the halves."""
    found = tokens(ROWS, LENGTH, ignored=IGNORED)
    found["labels"][0, :9] = -100
    return found


@functools.cache
def expected(model_type: str = "llama", **more: Any) -> dict[str, Tensor]:
    """Loss and gradients of the stock model in one process, on the whole batch."""
    return step(make(model_type, **more), batch())[1]


def patched(model_type: str = "llama", flags: dict[str, Any] | None = None, **more: Any) -> nn.Module:
    model = make(model_type, **more)
    _apply_liger_kernel_to_instance(model=model, **flags or {})
    return model


def trained(run: nn.Module, given: dict[str, Any] | None = None, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """The output of a step on the batch of all ranks, and its loss and whole gradients."""
    out = run(**(given or batch()), **options)
    out.loss.backward()
    return out, {"loss": out.loss.detach()} | gradients(run)


def by_layers(model: nn.Module, own: nn.Module | None = None) -> nn.Module:
    """Under FSDP2, its decoder layers, and ``own``, units by themselves."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    for module in [*causal.model.layers, *([own] if own else [])]:
        fully_shard(module, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by the names of one process."""
    found = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            for extra in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module."):
                name = name.replace(extra, "")
            found[name] = whole(p.grad).clone()
    return found


def learn(run: nn.Module, ranks: int = RANKS, rank: int | None = None, parts: int = 1,
          seen: Collectives | None = None, fused: bool = True, **kwargs: Any) -> dict[str, Tensor]:  # fmt: skip
    """Of the mean over all ranks' tokens, this rank learning its share in ``parts``."""
    rank = dist.get_rank() if rank is None and ranks > 1 else rank or 0
    mine = {k: v.chunk(ranks)[rank] for k, v in batch().items()}
    n = (batch()["labels"][:, 1:] != -100).sum() / ranks
    total = torch.zeros((), device=mine["labels"].device)
    with seen or contextlib.nullcontext():
        for i in range(parts):
            micro = {k: v.chunk(parts)[i] for k, v in mine.items()}
            with contextlib.nullcontext() if i + 1 == parts or not hasattr(run, "no_sync") else run.no_sync():
                out = run(**micro, use_cache=False, num_items_in_batch=n, **kwargs)
                assert not fused or out.logits is None, "the head was not fused"
                out.loss.backward()
                total += whole(out.loss.detach())
    if ranks > 1:
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return {"loss": total} | gradients(run)


class Collectives(TorchDispatchMode):
    """The number of elements of every tensor that a collective sends or receives."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            out = func(*args, **(kwargs or {}))
            tensors = [t for t in torch.utils._pytree.tree_leaves((args, out)) if isinstance(t, Tensor)]
            sent = {t.data_ptr(): t for t in tensors}  # in place: what is sent is returned
            self.sizes += [(str(func), t.numel()) for t in sent.values()]
            return out
        return func(*args, **(kwargs or {}))

    def largest(self) -> int:
        return max((n for _, n in self.sizes), default=0)


CHECKS: dict[str, Callable[[], None]] = {}
# further forms of a way whose other checks every run makes
FURTHER = {
    *("ddp_static_graph", "ddp_unused_parameters", "fsdp2_head_with_the_norm", "fsdp2_tied_in_one_group"),
    *("fsdp1_layers", "fsdp1_accumulates", "lora_ddp", "lora_fsdp1", "fp8_accumulates", "fp8_fsdp2_every_linear"),
    *("fp8_fsdp2_checkpointed", "fp8_fsdp2_steps", "fp8_fsdp1", "tp_compiled", "tp_compiled_with_logits"),
    *("tp_sequence_parallel_compiled", "ulysses_compiled_layers_of_two_kinds", "ulysses_compiled"),
    *("experts_of_qwen3_moe_instance", "experts_of_gpt_oss_class", "fp8_of_torchao_gathered_in_fp8"),
    *("ddp_tied", "fsdp2_accumulates", "fp8_fsdp2_mixed_precision"),
}
FURTHER = set() if GPUS else FURTHER
# interpreted; whole models would take minutes so
BY_KERNELS = {"norms_of_dtensors", "a_sharded_head_by_kernels", "lora_by_the_engine", "lora_on_experts"}
BY_KERNELS |= {"fp8_of_torchao_gathered_in_fp8"}


def check(fn: Callable[[], None]) -> Callable[[], None]:
    CHECKS[fn.__name__] = fn
    return fn


@contextlib.contextmanager
def calls_of_heads() -> Iterator[list[str]]:
    """Whether losses were fused with the head's weight, or are of logits of a head that was called."""
    said: list[str] = []
    ways = {"fused": (head_loss, "linear_cross_entropy"), "called": (head_loss, "cross_entropy")}
    with contextlib.ExitStack() as stack:
        for way, (owner, name) in (ways | {"sliced": (VocabularyParallel, "cross_entropy")}).items():
            call = getattr(owner, name)
            spy = lambda *a, call=call, way=way, **k: (said.append(way), call(*a, **k))[1]
            stack.enter_context(mock.patch.object(owner, name, spy))
        yield said


@contextlib.contextmanager
def counted(owner: Any, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of every call of a function of ``owner``."""
    calls: list[tuple[Any, ...]] = []
    function = getattr(owner, name)
    with mock.patch.object(owner, name, lambda *a, **k: (calls.append(a), function(*a, **k))[1]):
        yield calls


def same(
    run: nn.Module, truth: dict[str, Tensor] | None = None, head: str = "fused", times: int = 1, **kwargs: Any
) -> None:
    """Each time the learning of one process, by the way that the head should take."""
    for _ in range(times):
        run.zero_grad()
        with calls_of_heads() as said:
            found = learn(run, **kwargs)
        assert set(said) == {head}, f"the head was {said}, should be {head}"
        assert_same_learning(found, truth or expected(), TOLERANCE)


def mesh() -> Any:
    return init_device_mesh(hf_models.DEVICE, (RANKS,))


# those that are one expression
CHECKS |= {
    "ddp": lambda: same(parallelize(patched(), "ddp").model),
    "ddp_static_graph": lambda: same(parallelize(patched(), "ddp", static_graph=True).model, times=2),
    "ddp_tied": lambda: same(parallelize(patched(**TIED), "ddp").model, expected(**TIED)),
    "fsdp2_head_in_the_roots_group": lambda: same(parallelize(patched(), "fsdp2").model),
    "fsdp2_head_with_the_norm": lambda: same(one_group(patched(), "model.norm", "lm_head")),  # as accelerate does
    "fsdp2_tied": lambda: same(parallelize(patched(**TIED), "fsdp2").model, expected(**TIED)),
    "fsdp2_tied_in_one_group": lambda: same(
        one_group(patched(**TIED), "model.embed_tokens", "model.norm", "lm_head"), expected(**TIED)
    ),
    "fsdp2_accumulates": lambda: same(parallelize(patched(), "fsdp2", own_head=True).model, parts=2),
    "fsdp2_checkpointed": lambda: same(parallelize(checkpointed(patched()), "fsdp2", own_head=True).model),
    "fsdp1_accumulates": lambda: same_under_fsdp1(fsdp1(patched()), expected(), parts=2),
    # the hidden states leave the graph in which a rank's term of their gradient would be summed
    "tp_compiled": lambda: learns_compiled(with_split_head(patched(**ONE_LAYER))),
    "tp_compiled_with_logits": lambda: learns_compiled(with_split_head(patched(flags=UNFUSED, **ONE_LAYER))),
    "tp_sequence_parallel_compiled": lambda: learns_compiled(
        by_sequence(patched(**ONE_LAYER)), position_ids=torch.arange(LENGTH, device=hf_models.DEVICE)[None]
    ),
    "ulysses_compiled": lambda: same_rows(
        "gemma3_text",
        "ulysses-fsdp2",
        documents(),
        change=compiled,
        **WINDOWS,
        layer_types=["sliding_attention"],
        num_hidden_layers=1,
    ),
    "ulysses_compiled_layers_of_two_kinds": lambda: same_rows(
        "gemma3_text", "ulysses-fsdp2", documents(), change=compiled, **WINDOWS
    ),
    "lora_ddp": lambda: same(parallelize(adapted_alike(), "ddp").model, adapted_learning()),
}


@check
def ddp_unused_parameters() -> None:
    model = patched()
    model.unused = nn.Linear(3, 3).to(model.device)
    run = parallelize(model, "ddp", find_unused_parameters=True).model
    found = learn(run)
    assert_same_learning({k: v for k, v in found.items() if "unused" not in k}, expected(), TOLERANCE)


@check
def ddp_no_sync() -> None:
    seen = Collectives()
    same(parallelize(patched(), "ddp").model, parts=2, seen=seen)
    reduced = sum(n for name, n in seen.sizes if "allreduce" in name)
    assert reduced < 2 * sum(p.numel() for p in patched().parameters()), "gradients were reduced more than once"


@check
def fsdp2_head_on_its_own() -> None:
    p = parallelize(patched(), "fsdp2", own_head=True)
    for _ in range(2):
        p.model.zero_grad()
        seen = Collectives()
        same(p.model, seen=seen)
    V, H = p.module.lm_head.weight.shape
    gathers = [n for name, n in seen.sizes if "allgather" in name.replace("_", "") and n == V * H + V % 2 * H]
    assert len(gathers) <= 2 * 2, f"the head was gathered for every chunk: {seen.sizes}"


def one_group(model: nn.Module, *names: str) -> nn.Module:
    """Under FSDP2, modules of these names as one unit."""
    fully_shard([model.get_submodule(name) for name in names], mesh=mesh())
    return fully_shard(model, mesh=mesh())


@check
def fsdp2_mixed_precision() -> None:
    """Compared with the stock model in the same precision."""
    truth = learn(parallelize(make("llama"), "fsdp2", param_dtype=torch.bfloat16).model, fused=False)
    for own_head in (False, True):
        found = learn(parallelize(patched(), "fsdp2", param_dtype=torch.bfloat16, own_head=own_head).model, fused=False)
        assert_same_learning(found, truth, 3e-2)


@check
def evaluates() -> None:
    """With logits, and without a backward."""
    stock = make("llama").eval()
    for mode, head, more in (("fsdp2", "fused", {}), ("tp", "sliced", {"ranks": 1})):
        run = parallelize(patched(), mode).model.eval()
        with torch.no_grad():
            out, truth = run(**batch()), stock(**batch())
        torch.testing.assert_close(whole(out.logits), truth.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(whole(out.loss), truth.loss, rtol=1e-5, atol=1e-5)
        same(run.train(), head=head, **more)


def fsdp1(
    model: nn.Module, *leaves: type, layers: bool = True, use_orig_params: bool = True
) -> FullyShardedDataParallel:
    """Its units are the decoder layers and modules of classes ``leaves``."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    units = {*leaves, *([type(causal.model.layers[0])] if layers else [])}
    device = torch.device("cuda", dist.get_rank()) if GPUS else torch.device("cpu")
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy(units), use_orig_params=use_orig_params, device_id=device
    )


def same_under_fsdp1(run: nn.Module, truth: dict[str, Tensor], head: str = "fused", **kwargs: Any) -> None:
    """Gradients are what a step changes: FSDP1 shows them only with ``use_orig_params``."""

    def weights() -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(run):
            return {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in run.named_parameters()}

    before, rate = weights(), 1e3  # so large that what is lost in the sum is small
    with calls_of_heads() as said:
        loss = learn(run, **kwargs)["loss"]
    assert set(said) == {head}, f"the head was {said}, should be {head}"
    torch.optim.SGD(run.parameters(), lr=rate).step()
    found = {name: (before[name] - w) / rate for name, w in weights().items()}
    with FullyShardedDataParallel.summon_full_params(run), torch.no_grad():
        for name, p in run.named_parameters():
            p.copy_(before[name.replace("_fsdp_wrapped_module.", "")])
    assert not any(g.any() for name, g in found.items() if name not in truth)
    assert_same_learning({"loss": loss} | {name: g for name, g in found.items() if name in truth}, truth, TOLERANCE)


@check
def fsdp1_layers() -> None:
    for tied in (False, True):
        for use_orig_params in (True, False):
            run = fsdp1(patched(tie_word_embeddings=tied), use_orig_params=use_orig_params)
            same_under_fsdp1(run, expected(tie_word_embeddings=tied))


@check
def fsdp1_every_linear() -> None:
    """The head, too, is a unit of its own."""
    for use_orig_params in (True, False):
        run = fsdp1(patched(), nn.Linear, layers=False, use_orig_params=use_orig_params)
        for _ in range(2):
            run.zero_grad()
            same_under_fsdp1(run, expected())


WIDE = dict(vocab_size=2050)  # so that logits would be the largest thing sent
WINDOWS = dict(sliding_window=4)
UNFUSED = dict(fused_linear_cross_entropy=False)


def with_split_head(model: nn.Module, style: ColwiseParallel | None = None) -> nn.Module:
    return parallelize_module(model, mesh(), {"lm_head": style or ColwiseParallel(output_layouts=Replicate())})


def logits_stay(seen: Collectives) -> None:
    """What is sent is smaller than one rank's share of the logits."""
    most = ROWS * LENGTH * WIDE["vocab_size"] // RANKS // 4
    assert 0 < seen.largest() < most, sorted(set(seen.sizes), key=lambda x: -x[1])[:5]


@check
def tp_by_plan() -> None:
    for more in (WIDE, WIDE | TIED):
        model = parallelize(patched(**more), "tp").model
        with Collectives() as seen:
            out = model(**batch(), use_cache=False)
            out.loss.backward()
        logits_stay(seen)
        assert out.logits is None
        learnt = {"loss": out.loss.detach()} | gradients(model)
        assert_same_learning(learnt, expected(**more), TOLERANCE)


@check
def tp_of_families() -> None:
    """Soft-capped logits, norms of heads, and classes that ranks share unequally."""
    untied, uneven = dict(tie_word_embeddings=False), dict(vocab_size=257)
    for model_type, more in (("gemma2", untied), ("qwen3", {}), ("llama", uneven)):
        same(parallelize(patched(model_type, **more), "tp").model, expected(model_type, **more), head="sliced", ranks=1)


@check
def tp_options_of_the_loss() -> None:
    """What needs whole logits has one chunk of them at a time."""
    run, one = parallelize(patched(), "tp").model, patched()
    smoothed = dict(label_smoothing=0.1, lse_square_scale=1e-2)
    smoothed |= dict(return_token_accuracy=True, return_predicted_tokens=True)
    for options, head in ((smoothed, {"sliced"}), (dict(use_token_scaling=True), {"called"})):
        run.zero_grad()
        truth, wanted = step(one, batch(), **options)
        with calls_of_heads() as said:
            out, learnt = trained(run, use_cache=False, **options)
        assert set(said) == head
        assert_same_learning(learnt, wanted, TOLERANCE)
        if "return_predicted_tokens" in options:
            assert torch.equal(out.predicted_tokens, truth.predicted_tokens)
            torch.testing.assert_close(out.token_accuracy, truth.token_accuracy)


@check
def tp_default_head() -> None:
    """``ColwiseParallel()`` as it is: this rank's logits, of which stock's loss would be wrong."""
    local, replicated = dict(use_local_output=False), dict(output_layouts=Replicate())
    for style in (ColwiseParallel(), ColwiseParallel(**local), ColwiseParallel(**replicated)):
        model = with_split_head(patched(**WIDE), style)
        seen = Collectives()
        same(model, expected(**WIDE), head="sliced", ranks=1, seen=seen)
        logits_stay(seen)


def learns_compiled(model: nn.Module, **kwargs: Any) -> None:
    """As one process, with the gradients' placements of eager mode."""
    torch._dynamo.reset()
    placements = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        assert_same_learning(trained(run, use_cache=False, **kwargs)[1], expected(**ONE_LAYER), TOLERANCE)
        of = [(name, p.grad.placements) for name, p in model.named_parameters() if isinstance(p.grad, DTensor)]
        placements.append(dict(of))
    assert placements[0] == placements[1] and placements[0]["lm_head.weight"] == (Shard(0),), placements


ONE_LAYER = dict(num_hidden_layers=1)


@check
def parts_of_dtensors_in_graphs() -> None:
    """Gradients of what a graph returns of a DTensor are the sum of the ranks' terms."""
    from liger_kernel.ops._core.shards import on_own_rows
    from liger_kernel.parallel import inputs_of

    group, device = mesh(), "cuda" if GPUS else "cpu"
    head = parallelize_module(nn.Linear(3, 2 * RANKS, device=device), group, ColwiseParallel())

    def rows(x: Tensor) -> tuple[Tensor, ...]:
        """Those of a sharded head, beside the hidden states."""
        h = x.sin()
        found = inputs_of(head, h)
        assert found is not None
        return found[1], h

    def norm(x: Tensor) -> tuple[Tensor, ...]:
        """A function that leaves the graph between the norm's weight and its use."""
        w = DTensor.from_local(x.sin(), group, [Replicate()], run_check=False)
        apart = lambda x, w: (torch._dynamo.graph_break(), x * w)[1]
        rows = distribute_tensor(torch.ones(RANKS, 3, device=device), group, [Shard(0)])
        y: Any = on_own_rows(apart, rows, w)
        return (y.to_local(),)

    for fn in (rows, norm):
        found = []
        for run in (fn, torch.compile(fn, backend="aot_eager")):
            x = torch.arange(3.0, device=device).requires_grad_()
            (run(x)[0] * (dist.get_rank() + 1)).sum().backward()
            found.append(x.grad)
        assert torch.equal(found[0], torch.arange(3.0, device=device).cos() * sum(range(1, RANKS + 1)))
        assert torch.equal(*found)


@check
def operators_given_dtensors() -> None:
    """They compute what they compute of plain tensors, or say what to give them."""
    group = mesh()
    spread = lambda t: distribute_tensor(t.detach(), group, [Replicate()]) if isinstance(t, Tensor) else t
    right = set()
    for name, op in OPS.items():
        args = next(case for case in op.cases if not (case.gpu or case.timed)).make(torch.float32, group.device_type)
        tensors = [k for k, v in args.items() if any(isinstance(t, Tensor) for t in tree_leaves(v))]
        for names in (tensors, tensors[:1], tensors[1:]):
            try:
                found = op.fn(**args | {k: tree_map(spread, args[k]) for k in names})
            except ValueError as error:
                assert "DTensor" in str(error), f"{name}: {error}"
                continue
            right.add(name)
            for ours, theirs in zip(tree_leaves(found), tree_leaves(op.fn(**args)), strict=True):
                said = lambda message, name=name: f"{name}: {message}"
                torch.testing.assert_close(whole(ours), theirs, equal_nan=True, msg=said)
    assert right >= {"rms_norm", "layer_norm", "glu", "cross_entropy", "softmax"}, right


@check
def logits_sharded_by_classes() -> None:
    """The unfused cross entropy in ``loss_parallel``, and without it, which gathers the logits."""
    model = patched(flags=dict(cross_entropy=True) | UNFUSED)
    with_split_head(model, ColwiseParallel(use_local_output=False))
    with loss_parallel():
        learnt = trained(model, use_cache=False)[1]
    assert_same_learning(learnt, expected(), TOLERANCE)
    z, target = torch.randn(5, 2 * RANKS, device=model.device), torch.arange(5, device=model.device) % RANKS
    dist.broadcast(z, 0)
    split = distribute_tensor(z, mesh(), [Shard(1)])
    loss = OPS["cross_entropy"].fn(split, distribute_tensor(target, mesh(), [Replicate()]))
    torch.testing.assert_close(whole(loss), nn.functional.cross_entropy(z, target))


@check
def tp_sequence_parallel() -> None:
    """Norms on DTensors that are sharded by sequence, and a head that gathers it."""
    model = by_sequence(patched(**WIDE))
    seen = Collectives()
    # positions: models count them on the embedding, of which each rank would see its part
    positions = torch.arange(LENGTH, device=model.device)[None]
    same(model, expected(**WIDE), head="sliced", ranks=1, seen=seen, position_ids=positions)
    logits_stay(seen)


def by_sequence(model: nn.Module) -> nn.Module:
    sequence = dict(input_layouts=Shard(1), desired_input_layouts=Replicate())
    scattered = dict(output_layouts=Shard(1), use_local_output=False)
    hidden = lambda layout: {"hidden_states": layout}
    gathered = dict(input_kwarg_layouts=hidden(Shard(1)), desired_input_kwarg_layouts=hidden(Replicate()))
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **scattered),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1)),
    }
    for i in range(len(model.model.layers)):
        at = f"model.layers.{i}."
        plan |= {
            at + "input_layernorm": SequenceParallel(),
            at + "post_attention_layernorm": SequenceParallel(),
            at + "self_attn": PrepareModuleInput(**gathered),
            at + "mlp": PrepareModuleInput(**sequence),
            **{at + f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"},
            **{at + f"mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")},
            at + "self_attn.o_proj": RowwiseParallel(**scattered),
            at + "mlp.down_proj": RowwiseParallel(**scattered),
        }
    return parallelize_module(model, mesh(), plan)


@check
def norms_of_dtensors() -> None:
    """By kernels, on the rows of each rank, which are not gathered."""
    from liger_kernel.ops import glu, layer_norm, rms_norm
    from liger_kernel.ops._core import operator as _op

    group = mesh()
    x, w, b = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(5)).to(group.device_type)
        for shape in ((RANKS, 3 * RANKS - 1, 64), (64,), (64,))
    )
    with counted(_op, "_start") as kernels:
        for fn, weights in ((rms_norm, (w,)), (layer_norm, (w, b))):
            one = [t.clone().requires_grad_() for t in (x, *weights)]
            truth = fn(*one)
            truth.square().sum().backward()
            for placement in (Shard(1), Shard(0), Replicate()):
                kernels.clear()
                whole_x, *mine = (DTensor.from_local(t.clone(), group, [Replicate()]) for t in (x, *weights))
                mine = [t.requires_grad_() for t in (whole_x.redistribute(placements=[placement]).detach(), *mine)]
                with Collectives() as seen:
                    y = fn(*mine)
                    y.to_local().square().sum().backward()
                assert y.placements == (placement,) and y.shape == x.shape and len(kernels) >= 2
                assert seen.largest() <= 64, "more than the gradients of the weights was sent"
                for ours, theirs in zip((y, *(t.grad for t in mine)), (truth, *(t.grad for t in one))):
                    torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-5, atol=1e-5)
    part = x.chunk(RANKS, -1)[dist.get_rank()].contiguous()
    columns = DTensor.from_local(part, group, [Shard(2)])
    late = columns.redistribute(placements=[Replicate()], async_op=True)  # on its way when the kernel is asked for
    torch.testing.assert_close(rms_norm(late).to_local(), rms_norm(x))
    near = dict(rtol=1e-5, atol=1e-5)  # rows in pieces: by PyTorch's own operators
    found = rms_norm(columns, DTensor.from_local(w, group, [Replicate()])).full_tensor()
    torch.testing.assert_close(found, rms_norm(x, w), **near)
    torch.testing.assert_close(glu(columns, columns).full_tensor(), glu(x, x), **near)


@check
def a_sharded_head_by_kernels() -> None:
    """Of hidden states that are spread over the ranks by sequence, and classes shared unequally."""
    from liger_kernel.parallel import inputs_of

    group = mesh()
    torch.manual_seed(6)
    one = nn.Linear(16, 71).to(group.device_type)
    head = parallelize_module(copy.deepcopy(one), group, ColwiseParallel(input_layouts=Shard(1)))
    x = torch.randn(2, 3 * RANKS, 16).to(group.device_type)
    target = torch.randint(0, 71, (6 * RANKS,)).to(group.device_type)
    target[3] = -100
    all_x, own_x = x.clone().requires_grad_(), x.chunk(RANKS, 1)[dist.get_rank()].clone().requires_grad_()
    truth = nn.functional.cross_entropy(one(all_x).flatten(0, 1), target)
    truth.backward()
    sliced, rows = inputs_of(head, own_x)
    loss = sliced.cross_entropy(rows.flatten(0, 1), target)
    loss.backward()
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(own_x.grad, all_x.grad.chunk(RANKS, 1)[dist.get_rank()])
    for ours, theirs in zip(head.parameters(), one.parameters()):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    torch.testing.assert_close(sliced(rows), one(x))


@check
def tp_by_transformers() -> None:
    """transformers shards a checkpoint while it loads it."""
    from transformers import AutoModelForCausalLM

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        make("llama", **WIDE).save_pretrained(folder[0])
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(folder[0], tp_plan="auto", device_mesh=mesh()).train()
    assert isinstance(model.lm_head.weight, DTensor)
    _apply_liger_kernel_to_instance(model=model)
    seen = Collectives()
    same(model, expected(**WIDE), head="sliced", ranks=1, seen=seen)
    logits_stay(seen)


@check
def tp_in_fsdp2() -> None:
    """Two dims: classes over ``tp``, and everything over ``dp``."""
    for shape in dict.fromkeys([(RANKS, 1), (1, RANKS), (RANKS // 2, 2)]):
        for own_head in (False, True):
            dims = init_device_mesh(hf_models.DEVICE, shape, mesh_dim_names=("dp", "tp"))
            model = patched()
            parallelize_module(model, dims["tp"], {"lm_head": ColwiseParallel()})
            if own_head:
                fully_shard(model.lm_head, mesh=dims["dp"])
            fully_shard(model, mesh=dims["dp"])
            same(model, head="sliced", ranks=shape[0], rank=dims["dp"].get_local_rank())
            full = torch.linalg.vector_norm(torch.stack([g.norm() for n, g in expected().items() if n != "loss"]))
            torch.testing.assert_close(clip_grad_norm_(model, None), full, rtol=1e-5, atol=1e-6)


def documents(length: int = LENGTH) -> dict[str, Tensor]:
    """Rows of two and three documents; one begins where a rank's part does."""
    found = tokens(ROWS, length, ignored=IGNORED)
    at = torch.arange(length, device=found["labels"].device).expand(ROWS, -1)
    odd = (torch.arange(ROWS, device=at.device) % 2 == 1)[:, None]
    begins = (at == 0) | (at == (length + 1) // 2) | ((at == 4) & odd)
    positions = at - torch.where(begins, at, 0).cummax(1).values
    return found | {"labels": found["labels"].masked_fill(begins, -100), "position_ids": positions}


def padded(length: int = LENGTH, left: bool = False) -> dict[str, Tensor]:
    found = tokens(ROWS, length, ignored=IGNORED)
    at, lengths = torch.arange(length), length - 5 * (torch.arange(ROWS) % 2)[:, None]
    mask = (at >= length - lengths if left else at < lengths).long().to(found["labels"].device)
    return found | {"labels": found["labels"].masked_fill(mask == 0, -100), "attention_mask": mask}


def same_rows(model_type: str, mode: str, given: dict[str, Tensor], attention: str = "sdpa",
              change: Callable = lambda model: None, **more: Any) -> None:  # fmt: skip
    """Every rank is given the whole batch, and has the loss and the gradients of one process."""

    def build(flags: dict[str, Any] | None) -> nn.Module:
        model = make(model_type, **more)
        model.config._attn_implementation = attention
        if flags is not None:
            _apply_liger_kernel_to_instance(model=model, **flags)
        return model

    truth = step(build(None), given)[1]
    model = build(getattr(change, "flags", {}))
    change(model)
    p = parallelize(model, mode)
    with calls_of_heads() as said:
        out, learnt = trained(p.model, given)
    assert said == ["fused"] and out.logits is None
    assert_same_learning(learnt, truth, TOLERANCE)


@check
def ulysses_families() -> None:
    """Heads, windows, caps, sinks, experts, and lengths that ranks do not share equally."""
    same_rows("llama", "ulysses", tokens(ROWS, LENGTH), num_attention_heads=2 * RANKS, num_key_value_heads=RANKS)
    same_rows("llama", "ulysses-fsdp2", tokens(ROWS, LENGTH + 1), num_attention_heads=2 * RANKS, num_key_value_heads=1)
    same_rows("qwen3", "ulysses-fsdp2", tokens(ROWS, LENGTH))
    same_rows("gemma2", "ulysses", tokens(ROWS, LENGTH), "eager", sliding_window=4)
    same_rows("gemma3_text", "ulysses-fsdp2", tokens(ROWS, LENGTH - 1), sliding_window=4)
    same_rows("mixtral", "ulysses", tokens(ROWS, LENGTH), output_router_logits=False)
    one = dict(output_router_logits=False, sliding_window=4)
    same_rows("gpt_oss", "ulysses", documents(), "eager", **one)  # stock's masks know no documents
    same_rows("deepseek_v3", "ulysses", tokens(ROWS, LENGTH))  # values of another width than keys


@check
def ulysses_documents_and_padding() -> None:
    for length in (LENGTH, LENGTH + 1):
        for model_type, attention in (
            *(("llama", "sdpa"), ("llama", "eager")),
            *(("gemma3_text", "sdpa"), ("llama4_text", "sdpa")),
        ):
            more = WINDOWS if "gemma" in model_type else {}
            same_rows(model_type, "ulysses", documents(length), attention, **more)
            same_rows(model_type, "ulysses", padded(length, left=length > LENGTH), attention)
    bounds = (documents()["position_ids"].flatten() == 0).nonzero().flatten().int()
    bounds = torch.cat((bounds, bounds.new_tensor([ROWS * LENGTH])))
    import liger_kernel.transformers.attention  # noqa: F401  "liger_varlen"

    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 8, "max_length_k": 8}
    same_rows("llama", "ulysses", documents() | packed, "liger_varlen")


@check
def ulysses_beside_what_saves_memory() -> None:
    def with_flags(change: Callable = lambda model: None, **flags: Any) -> Callable:
        change = functools.partial(change)
        change.flags = flags  # type: ignore[attr-defined]  # for same_rows
        return change

    for change in (
        checkpointed,
        functools.partial(checkpointed, reentrant=True),
        with_flags(checkpointed, keep_attention=True, activation_offloading=True, tiled_mlp=2),
        with_flags(activation_offloading=True),
    ):
        same_rows("gemma3_text", "ulysses-fsdp2", documents(), change=change, sliding_window=4)


def compiled(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


@check
def ulysses_gives_attention_whole_rows() -> None:
    """As it takes them itself: no mask, whole positions, bounds as given, its own name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import flash_attention_mask

    calls: list[dict[str, Any]] = []

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
        calls.append(kwargs | {"mask": mask, "name": module.config._attn_implementation, "shapes": [q.shape, k.shape]})
        return sdpa_attention_forward(module, q, k, v, mask, **{name: kwargs[name] for name in ("dropout", "scaling")})

    AttentionInterface.register("flash_of_test", attention)
    AttentionMaskInterface.register("flash_of_test", flash_attention_mask)
    ones = torch.ones(ROWS, LENGTH, dtype=torch.long).to(hf_models.DEVICE)
    for given in (tokens(ROWS, LENGTH), documents(), tokens(ROWS, LENGTH) | {"attention_mask": ones}):
        model = patched(num_attention_heads=2 * RANKS, num_key_value_heads=RANKS)
        model.config._attn_implementation = "flash_of_test"
        p = parallelize(model, "ulysses")
        calls.clear()
        p.model(**given)
        assert len(calls) == len(model.model.layers)
        positions = given.get("position_ids")
        for call in calls:
            assert call["mask"] is None and call["name"] == "flash_of_test"
            assert [shape[:3] for shape in call["shapes"]] == [(ROWS, 2, LENGTH), (ROWS, 1, LENGTH)]
            found = call["position_ids"]
            assert found is None if positions is None else torch.equal(found, positions)


@check
def ulysses_beside_other_ranks() -> None:
    """Groups with other rows than other groups: sums, micro-batches, clipping are one process's."""
    device = "cuda" if GPUS else "cpu"
    one = make("llama")
    step(one, batch())
    norm = nn.utils.get_total_norm([p.grad for p in one.parameters() if p.grad is not None])
    for mode in ("ulysses", "ulysses-fsdp2"):
        for shape in dict.fromkeys([(1, RANKS), (RANKS, 1), (RANKS // 2, 2)]):
            p = parallelize(patched(), mode, mesh=init_device_mesh(device, shape, mesh_dim_names=("data", "sequence")))
            assert (p.data_ranks, p.sequence_ranks) == shape
            assert p.data_rank * shape[1] + p.sequence_rank == dist.get_rank()
            mine = {k: v.chunk(p.data_ranks)[p.data_rank] for k, v in batch().items()}
            items, total = p.items((mine["labels"][:, 1:] != -100).sum()), torch.zeros((), device=device)
            for i in range(2):
                with p.accumulating(last=i == 1):
                    loss = p.model(**{k: v.chunk(2)[i] for k, v in mine.items()}, num_items_in_batch=items).loss
                    loss.backward()
                    total += loss.detach()
            loss = (p.total(total) / p.data_ranks).float()
            assert_same_learning({"loss": loss} | gradients(p.module), expected(), TOLERANCE)
            torch.testing.assert_close(p.clip_grad_norm_(None), norm, rtol=1e-5, atol=1e-6)
            if mode == "ulysses-fsdp2":  # as a step in the backward has it
                squares = sum(w.grad.to_local().square().sum() for w in p.module.parameters() if w.grad is not None)
                torch.testing.assert_close(p.total(squares, sequences=True).sqrt().float(), norm, rtol=1e-5, atol=1e-6)


@check
def ulysses_stock_and_lora() -> None:
    p = parallelize(make("qwen3"), "ulysses-fsdp2")
    out, learnt = trained(p.model)
    assert out.logits.shape[:2] == (ROWS, LENGTH // RANKS)
    assert_same_learning(learnt, expected("qwen3"), TOLERANCE)
    assert "ulysses" not in p.module.config.to_json_string()
    with torch.no_grad():
        torch.testing.assert_close(p.model.eval()(**batch()).loss, out.loss.detach())
    assert_same_learning(trained(parallelize(adapted_alike(), "ulysses").model)[1], adapted_learning(), TOLERANCE)


@check
def ulysses_refuses() -> None:
    def refused(call: Callable[[], Any], why: str) -> None:
        with pytest.raises(ValueError, match=re.escape(why)):
            call()

    meeting = "layers in which tokens meet without Transformers' attention interface"
    counts = "counts positions by its attention mask or its tokens"
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    one_head = {"num_attention_heads": 1, "num_key_value_heads": 1}
    for model_type, more, why in (
        ("qwen3_next", {}, f"{meeting}: model.layers.0.linear_attn (Qwen3NextGatedDeltaNet)"),
        ("rwkv", {}, meeting),
        ("opt", {}, counts),
        ("roberta", {"is_decoder": True}, counts),
        ("bert", {}, "is not causal"),
        ("mixtral", {"output_router_logits": True}, "set output_router_logits to False"),
        ("llama", dynamic, "rotary embeddings dynamic"),
        ("llama", one_head, f"must be a multiple of the {RANKS} ranks that share rows, got 1"),
    ):
        before = make(model_type, **more)
        name, hooks = before.config._attn_implementation, len(before._forward_pre_hooks)
        refused(functools.partial(parallelize, before, "ulysses"), why)
        assert before.config._attn_implementation == name and before.training
        assert len(before._forward_pre_hooks) == hooks
    kinds = {"layer_types": ["mamba", "attention"]}
    for model_type, more, layer in (
        ("kimi_linear", {}, "self_attn (KimiLinearDeltaAttention)"),
        ("granitemoehybrid", kinds, "mamba (GraniteMoeHybridMambaLayer)"),
    ):
        hybrid = make(model_type, **more)
        _apply_liger_kernel_to_instance(model=hybrid)
        refused(functools.partial(parallelize, hybrid, "ulysses"), f"model.layers.0.{layer}")
    refused(lambda: parallelize(nn.Linear(2, 2), "ulysses"), "is no model of Transformers")
    refused(lambda: parallelize(make("llama").to("meta"), "ulysses", mesh=mesh()), "has no weights yet")
    p = parallelize(patched(), "ulysses")
    refused(lambda: parallelize(p.module, "ulysses"), "is under mode ulysses already")
    given = batch()
    refused(lambda: p.module(given["input_ids"]), "must be called with keyword arguments")
    refused(lambda: p.model(**given, use_cache=True), "use_cache must be left out")
    refused(lambda: p.model(**given, logits_to_keep=1), "logits_to_keep must be left out")
    refused(lambda: p.model(**given, pixel_values=given["labels"]), "no tensors but")
    mask = torch.ones(ROWS, 1, LENGTH, LENGTH, device=p.module.device)
    refused(lambda: p.model(**given, attention_mask=mask), "attention_mask must be a tensor (B, T)")
    bounds = torch.tensor([0, ROWS * (LENGTH - 1)], dtype=torch.int32, device=p.module.device)
    short = {name: value[:, 1:] for name, value in given.items()}
    refused(lambda: p.model(**short, cu_seq_lens_q=bounds), f"must have a multiple of {RANKS} tokens, got {LENGTH - 1}")
    out = p.model(**given)  # a call that was refused leaves nothing behind
    torch.testing.assert_close(out.loss.detach(), expected()["loss"])


def adapted(use: bool, model_type: str = "llama", targets: Any = ("q_proj", "lm_head"), **flags: Any) -> nn.Module:
    """With adapters of the same draw, by default in attention and on the head."""
    import peft

    torch.manual_seed(4)
    experts = [name for name in targets if "experts" in name]
    layers = [name for name in targets if name not in experts]
    of = dict(target_modules=layers) | (dict(target_parameters=experts) if experts else {})
    model = peft.get_peft_model(make(model_type), peft.LoraConfig(r=4, init_lora_weights=False, **of))
    if use:
        _apply_liger_kernel_to_instance(model=model.get_base_model(), **flags)
    return model


def adapted_alike() -> nn.Module:
    return adapted(True)


@functools.cache
def adapted_learning() -> dict[str, Tensor]:
    return step(adapted(False), batch())[1]


@check
def lora_fsdp2() -> None:
    for own_head in (False, True):
        model = adapted_alike()
        head = model.get_base_model().lm_head if own_head else None
        same(by_layers(model, head), adapted_learning(), head="called" if own_head else "fused")


def learnt_by_adapters(ours: bool, mode: str, *how: Any) -> dict[str, Tensor]:
    """What the adapters that ``adapted`` makes of ``how`` learn in a mode, the engine on or off."""
    off = dict(rope=False, rms_norm=False, fused_linear_cross_entropy=False, rematerialise=False)
    model = adapted(ours, *how, **off)
    if mode == "ddp":
        return learn(parallelize(model, "ddp").model, fused=False)
    if mode == "fsdp1":
        run = fsdp1(model)
        loss = learn(run, fused=False)["loss"]
        with FullyShardedDataParallel.summon_full_params(run, with_grads=True):  # zeros for what is frozen
            return {"loss": loss} | {name: g for name, g in gradients(run).items() if "lora_" in name}
    if mode == "checkpointed":
        checkpointed(model).enable_input_require_grads()
    return learn(by_layers(model), fused=False)


def by_the_engine(how: tuple, nodes: dict[tuple[Any, str], int], *modes: str) -> None:
    """What has adapters is nodes of the engine in every mode, so many a layer, and learns what stock's learns."""
    truth = learnt_by_adapters(False, "ddp", *how)
    with contextlib.ExitStack() as stack:
        calls = [stack.enter_context(counted(*function)) for function in nodes]
        for mode in modes:
            for found in calls:
                found.clear()
            assert_same_learning(learnt_by_adapters(True, mode, *how), truth, TOLERANCE)
            layers = 4 if mode == "checkpointed" else 2
            assert [len(found) for found in calls] == [layers * n for n in nodes.values()], mode


LINEARS = "llama", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERTS = "qwen3_moe", ("experts.gate_up_proj", "experts.down_proj")
OF_LINEARS = {(recognised, "linears"): 2, (mlps, "adapted_mlp"): 1}
OF_EXPERTS = {(experts_module, "adapted_moe"): 1}
CHECKS |= {
    "lora_by_the_engine": lambda: by_the_engine(LINEARS, OF_LINEARS, "ddp", "fsdp1", "fsdp2", "checkpointed"),
    "lora_on_experts": lambda: by_the_engine(EXPERTS, OF_EXPERTS, "ddp", "fsdp2", "checkpointed"),
}


@check
def lora_fsdp1() -> None:
    for leaves in ((), (nn.Linear,)):
        run = fsdp1(adapted_alike(), *leaves)
        same_under_fsdp1(run, adapted_learning(), head="called" if leaves else "fused")


@check
def lora_on_a_head_of_tp() -> None:
    """The adapter is whole on every rank; logits are those that the layers give."""
    truth = step(adapted(False, "llama", ("lm_head",)), batch())[1]
    model = adapted(False, "llama", ("lm_head",))
    replicated = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh(), {"base_model.model.lm_head.base_layer": replicated})
    _apply_liger_kernel_to_instance(model=model.get_base_model())
    assert_same_learning(learn(model, ranks=1), truth, TOLERANCE)


def recipes() -> list[str]:
    """Those that this machine can run."""
    return [name for name, recipe in RECIPES.items() if not lacking(torch.device(hf_models.DEVICE), recipe.capability)]


def running(model: nn.Module) -> list[str]:
    return [layer.reason for layer in projections_report(model).layers if layer.runs]


def in_fp8(recipe: str = "tensorwise") -> nn.Module:
    return patched(flags=dict(fp8=recipe, fp8_filter=lambda m, name: name != "lm_head"))


@functools.cache
def expected_in_fp8(recipe: str = "tensorwise", parts: int = 1) -> dict[str, Tensor]:
    """The mean of what one process learns from each share: every rank has its own scales."""
    shares = [learn(in_fp8(recipe), rank=rank, parts=parts) for rank in range(RANKS)]
    return {name: sum(share[name] for share in shares) / RANKS for name in shares[0]}  # type: ignore[misc]  # a sum of tensors


def same_in_fp8(found: dict[str, Tensor], recipe: str = "tensorwise", parts: int = 1) -> None:
    assert_same_learning(found, expected_in_fp8(recipe, parts), TOLERANCE)
    errors = [(g - expected()[name]).norm() / expected()[name].norm() for name, g in found.items()]
    assert max(errors) > 1e-2, "nothing is in FP8"


@check
def fp8_ddp() -> None:
    for recipe in recipes():
        same_in_fp8(learn(parallelize(in_fp8(recipe), "ddp").model), recipe)


@check
def fp8_accumulates() -> None:
    for mode in ("ddp", "fsdp2"):
        same_in_fp8(learn(parallelize(in_fp8(), mode).model, parts=2), parts=2)


@check
def fp8_fsdp2() -> None:
    for recipe in recipes():
        p = parallelize(in_fp8(recipe), "fsdp2", own_head=True)
        same_in_fp8(learn(p.model), recipe)
        assert running(p.module) == [f"in FP8, {recipe}"] * 14


@check
def fp8_fsdp2_every_linear() -> None:
    model = in_fp8()
    for m in model.modules():
        if isinstance(m, nn.Linear):
            fully_shard(m, mesh=mesh())
    same_in_fp8(learn(fully_shard(model, mesh=mesh())))


@check
def fp8_fsdp2_checkpointed() -> None:
    for use_reentrant in (False, True):
        same_in_fp8(learn(parallelize(checkpointed(in_fp8(), use_reentrant), "fsdp2").model))


@check
def fp8_fsdp2_mixed_precision() -> None:
    """Each rank learns what a model with parameters in bf16 learns from its share."""
    model = in_fp8()
    for p in model.parameters():
        p.data = p.data.bfloat16()
    shares = []
    for rank in range(RANKS):
        model.zero_grad()
        shares.append(learn(model, rank=rank))
    truth = {name: sum(share[name].float() for share in shares) / RANKS for name in shares[0]}
    assert_same_learning(learn(parallelize(in_fp8(), "fsdp2", param_dtype=torch.bfloat16).model), truth, 2**-7)


@check
def fp8_fsdp2_steps() -> None:
    """Weights that an optimizer changes are cast again."""
    both = [parallelize(in_fp8(), mode).model for mode in ("ddp", "fsdp2")]
    optimizers = [(run, torch.optim.SGD(run.parameters(), lr=0.1)) for run in both]
    losses: list[list[float]] = []
    for run, optimizer in optimizers:
        losses.append([])
        for _ in range(3):
            losses[-1].append(learn(run)["loss"].item())
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0][2] < losses[0][0]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=0)


@check
def fp8_fsdp1() -> None:
    for use_orig_params in (True, False):
        same_under_fsdp1(fsdp1(in_fp8(), use_orig_params=use_orig_params), expected_in_fp8())


@check
def fp8_tp() -> None:
    """Weights that are multiplied sharded stay in 16 or 32 bits, and the report says so."""
    p = parallelize(in_fp8(), "tp")
    same(p.model, head="sliced", ranks=1)
    stock = {layer.name: layer.reason for layer in projections_report(p.module).stock}
    assert stock.pop("lm_head") and len(stock) == 14
    assert set(stock.values()) == {"its weight is quantised, or sharded while it is multiplied"}


def fp8_of_torchao_gathered_in_fp8() -> None:
    """Our nodes multiply what FSDP2 gathered, and learn what torchao's own code learns."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    def learnt(ours: bool, checkpointing: bool = False) -> dict[str, Tensor]:
        model = make("llama", num_hidden_layers=1, hidden_size=32, intermediate_size=64, head_dim=16)
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=not GPUS, pad_inner_dim=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "lm_head")
        if ours:
            _apply_liger_kernel_to_instance(model=model)
        by_layers(model)
        if ours:
            assert running(model) == ["in FP8, tensorwise, gathered in FP8"] * 7
        if checkpointing:
            checkpointed(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        multiplied.clear()
        for _ in range(2):
            optimizer.zero_grad()
            found = learn(model, fused=False)
            optimizer.step()
            precompute_float8_dynamic_scale_for_fsdp(model)
        assert len(multiplied) == 7 * 2 * ours * (1 + checkpointing)  # layers and steps, and forwards of each
        return found

    # a value that lies on the border between two numbers of FP8 may fall to either side, which
    # moved a gradient by 8e-5 of the largest
    with counted(storages, "float8_gathered") as multiplied:
        theirs = learnt(False)
        assert_same_learning(learnt(True), theirs, 1e-3)
        assert_same_learning(learnt(True, checkpointing=True), theirs, 1e-3)


if importlib.util.find_spec("torchao"):
    check(fp8_of_torchao_gathered_in_fp8)


def policy_loss(model: nn.Module, ids: Tensor, advantages: Tensor) -> Tensor:
    """Of hidden states and the head's weight, as TRL computes it, beside ``forward``."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = causal.model(ids[:, :-1], use_cache=False).last_hidden_state
    loss = LigerFusedLinearGRPOLoss(beta=0.0, loss_type="grpo")
    return loss(hidden, causal.lm_head.weight, ids[:, 1:], torch.ones_like(ids[:, 1:]), advantages)[0]


def after_steps(run: nn.Module, call: Callable[..., Tensor], rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
    """Whole weights after three steps."""
    ids = batch()["input_ids"]
    mine = [t.chunk(ranks)[rank] for t in (ids, torch.linspace(-1, 2, ROWS, device=ids.device))]
    optimizer = torch.optim.SGD([p for p in run.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        call(*mine).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name.removeprefix("module."): whole(p.detach()) for name, p in run.named_parameters()}


@check
def losses_beside_the_forward() -> None:
    """Through the wrapper: every rank has the weights that one process has."""
    for mode, build in (("ddp", patched), ("fsdp2", lambda: adapted(True, "llama", ("q_proj",)))):
        one = build()
        before = {name: p.detach().clone() for name, p in one.named_parameters()}
        truth = after_steps(one, functools.partial(policy_loss, one))
        p = parallelize(build(), mode)
        loss = functools.partial(call_instead, p.model, p.module, policy_loss, p.module)
        found = after_steps(p.model, loss, dist.get_rank(), RANKS)
        assert found.keys() == truth.keys()
        for name, w in found.items():
            first = w.clone()
            dist.broadcast(first, 0)
            assert torch.equal(w, first), f"{mode}: {name} differs between ranks"
            moved, expected_move = w - before[name], truth[name] - before[name]
            torch.testing.assert_close(moved, expected_move, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert any(not torch.equal(w, before[name]) for name, w in found.items())


@check
def a_sharded_head_outside_its_forward_is_named() -> None:
    model = parallelize(patched(), "fsdp2").module
    x = torch.randn(2, 3, model.config.hidden_size, device=model.device)
    target = torch.zeros(2, 3, dtype=torch.int64, device=model.device)
    weights = torch.ones_like(target), torch.ones(2, device=model.device)
    with pytest.raises(
        ValueError, match="w must be whole, as x is, got a DTensor: gather a sharded head before its loss"
    ):
        LigerFusedLinearGRPOLoss(beta=0.0)(x, model.lm_head.weight, target, *weights)


@check
def norms_are_those_of_one_process() -> None:
    one = make("llama")
    step(one, batch())
    norm = nn.utils.clip_grad_norm_(one.parameters(), 0.5)
    clipped = gradients(one)
    for mode in ("ddp", "fsdp2", "tp"):
        p: Parallel = parallelize(patched(), mode)
        learn(p.model, p.data_ranks)
        torch.testing.assert_close(p.clip_grad_norm_(None), norm, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(p.clip_grad_norm_(0.5), norm, rtol=1e-5, atol=1e-6)
        assert_same_learning(gradients(p.module), clipped, TOLERANCE)
    run = fsdp1(patched())
    learn(run)
    torch.testing.assert_close(clip_grad_norm_(run, 0.5), norm, rtol=1e-5, atol=1e-6)


@check
def optimizers_of_mixed_shardings() -> None:
    """Kernels that update many parameters at once, of sharded layers and whole norms."""
    updated = []
    for mode in ("none", "tp"):
        p = parallelize(patched(), mode)
        learn(p.model, ranks=1)
        groups = [{"params": same} for same in by_sharding(p.module.parameters())]
        torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, foreach=True).step()
        updated.append({name: whole(w.detach()) for name, w in p.module.named_parameters()})
    for name, w in updated[0].items():
        torch.testing.assert_close(updated[1][name], w, rtol=1e-4, atol=1e-4)


@check
def tokens_are_counted_over_ranks() -> None:
    p = parallelize(patched(), "ddp")
    share = 3 + dist.get_rank()
    shares = 3 * RANKS + sum(range(RANKS))
    assert p.total(share).item() == shares and p.items(share).item() == shares / RANKS
    assert (p.data_rank, p.data_ranks) == (dist.get_rank(), RANKS)
    p = parallelize(patched(), "tp")
    assert p.total(share).item() == share and p.data_ranks == 1


def deepspeed_check(stage: int, adapters: bool) -> None:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    model = adapted_alike() if adapters else patched()
    truth = adapted_learning() if adapters else expected()
    config = {"train_micro_batch_size_per_gpu": ROWS // RANKS, "gradient_accumulation_steps": 1}
    # every parameter comes and goes
    config |= {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    config |= {"zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    mine = {k: v.chunk(RANKS)[dist.get_rank()] for k, v in batch().items()}
    n = (batch()["labels"][:, 1:] != -100).sum() / RANKS
    with calls_of_heads() as said:
        out = engine(**mine, use_cache=False, num_items_in_batch=n)
        engine.backward(out.loss)
    loss = out.loss.detach().clone()
    dist.all_reduce(loss)
    learnt = {n: safe_get_full_grad(p) for n, p in model.named_parameters() if p.requires_grad}
    found = {"loss": loss / RANKS} | {n: g for n, g in learnt.items() if g is not None}
    engine.step()
    engine.destroy()
    assert out.logits is None and set(said) == {"called" if adapters and stage == 3 else "fused"}, said
    assert_same_learning(found, truth, TOLERANCE)


if importlib.util.find_spec("deepspeed"):
    for _stage in (1, 2, 3):
        for _adapters in (False, True):
            _check = functools.partial(deepspeed_check, _stage, _adapters)
            CHECKS[f"{'lora_' * _adapters}deepspeed_zero{_stage}"] = _check


def spread(model: nn.Module, families: str = "auto", shared: bool = True) -> None:
    """Spread experts by Transformers' plan; ``shared``: whether the ranks share their batch."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    kind = "cuda" if GPUS else "cpu"
    mesh = tp = init_device_mesh(kind, (RANKS,))
    if not shared:
        both = init_device_mesh(kind, (RANKS, 1), mesh_dim_names=("ep", "tp"))
        mesh, tp = both["ep"], both["tp"]
    plan: dict[str, str] = {}
    every = [*dict(model.named_parameters()), *dict(model.named_modules())]
    for pattern, style in model.config.base_model_ep_plan.items():
        form = "model." + pattern.replace(".", r"\.").replace("*", r"\d+")
        plan |= {name: style for name in every if re.fullmatch(form, name)}
    apply_expert_parallelism(model, mesh, tp, plan, families)


def learns_over_ranks(model_type: str, by_class: bool) -> None:
    truth = step(make(model_type), batch())[1]
    with torch.no_grad():
        logits = make(model_type)(**batch(), use_cache=False).logits
    patches = class_patches(model_type, PatchOptions().parts, "fused")
    with contextlib.ExitStack() as stack:
        calls = stack.enter_context(counted(experts_module, "moe"))
        stack.callback(patches.restore)
        if by_class:
            patches.apply()
        model = make(model_type)
        spread(model)
        if not by_class:
            _apply_liger_kernel_to_instance(model=model, swiglu=True)
            _apply_liger_kernel_to_instance(model=model, swiglu=True)  # changes nothing
        layers = model.config.num_hidden_layers
        out, learnt = trained(model, use_cache=False)
        assert out.logits is None and len(calls) == layers
        assert {len(gate_up) for _, gate_up, *_ in calls} == {truth_experts(model_type) // RANKS}
        assert_same_learning(learnt, truth, TOLERANCE)
        calls.clear()
        with torch.no_grad():
            torch.testing.assert_close(model(**batch(), skip_logits=False, use_cache=False).logits, logits)
        assert len(calls) == layers
        restore(model)
        restore()
        calls.clear()
        model.zero_grad()
        model(**batch(), use_cache=False).loss.backward()
        assert by_class or not calls  # the exchange took the experts of a patched class when the model was spread
        assert_same_learning(gradients(model), {n: g for n, g in truth.items() if n != "loss"}, TOLERANCE)


def learns_from_own_batches() -> None:
    """Checkpointed. (The auxiliary loss is no sum over ranks.)"""
    truth = step(make("qwen3_moe", output_router_logits=False), batch())[1]
    model = make("qwen3_moe", output_router_logits=False)
    spread(model, "all_to_all", shared=False)
    _apply_liger_kernel_to_instance(model=checkpointed(model), swiglu=True)
    mine = {k: v.chunk(RANKS)[dist.get_rank()] for k, v in batch().items()}
    items = (batch()["labels"][:, 1:] != -100).sum()
    found = {name: t.clone() for name, t in trained(model, mine, use_cache=False, num_items_in_batch=items)[1].items()}
    for name, t in found.items():
        if not name.endswith(("gate_up_proj", "down_proj")) or "experts" not in name:
            dist.all_reduce(t)
    assert_same_learning(found, truth, TOLERANCE)


def learns_beside_a_rank_without_tokens() -> None:
    """All tokens choose the same experts, of one rank."""

    def of_one_rank() -> nn.Module:
        model = make("qwen3_moe")
        for name, p in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                nn.init.zeros_(p)  # top-k of equal values: the first experts
        return model

    chosen: list[Tensor] = []
    model = of_one_rank()
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda m, args: chosen.append(args[1]))
    truth = step(model, batch())[1]
    assert len({e // (truth_experts("qwen3_moe") // RANKS) for e in torch.cat(chosen).unique().tolist()}) == 1
    model = of_one_rank()
    spread(model, "all_reduce")
    _apply_liger_kernel_to_instance(model=model, swiglu=True)
    assert_same_learning(trained(model, use_cache=False)[1], truth, TOLERANCE)


def learns_beside_recurrent_layers() -> None:
    for model_type in ("qwen3_next", "kimi_linear"):
        truth = step(make(model_type), batch())[1]
        model = make(model_type)
        spread(model)
        _apply_liger_kernel_to_instance(model=model)
        assert_same_learning(trained(model, use_cache=False)[1], truth, 1e-4)  # stock's decays are rounded more


def truth_experts(model_type: str) -> int:
    return next(len(p) for n, p in make(model_type).named_parameters() if n.endswith("experts.gate_up_proj"))


_DISTRIBUTED = importlib.util.find_spec("transformers.distributed")
if _DISTRIBUTED and importlib.util.find_spec("transformers.distributed.expert_parallel"):
    for _type in ("qwen3_moe", "gpt_oss"):  # gpt_oss: transposed weights, biases
        for _by_class in (True, False):
            _check = functools.partial(learns_over_ranks, _type, _by_class)
            CHECKS[f"experts_of_{_type}_{'class' if _by_class else 'instance'}"] = _check
    check(learns_from_own_batches)
    check(learns_beside_a_rank_without_tokens)
    check(learns_beside_recurrent_layers)


def _rank(rank: int, folder: str, port: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if GPUS else "cpu")
    if GPUS:
        torch.cuda.set_device(rank)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("nccl" if GPUS else "gloo", rank=rank, world_size=RANKS, timeout=limit)
    for name in names:
        said = Path(folder) / f"{name}.{rank}"
        try:
            with contextlib.nullcontext() if name in BY_KERNELS else served_by_kernels_or_references():
                CHECKS[name]()
            said.write_text("fine")
        except BaseException:  # the ranks no longer agree which collective is next
            said.write_text(traceback.format_exc())
            raise
    dist.barrier()
    dist.destroy_process_group()


def run(names: list[str]) -> dict[str, list[str]]:
    """What every rank said of every check. After a failure the ranks are started anew."""
    left, found = names, {}
    for _ in range(6):
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.suppress(ProcessException):
                processes.start_ranks(_rank, (folder, processes.free_port(), left), RANKS)
            read = lambda file: file.read_text() if file.exists() else "not reached"
            found |= {name: [read(Path(folder) / f"{name}.{rank}") for rank in range(RANKS)] for name in left}
        left = [name for name in left if set(found[name]) == {"not reached"}]
        if not left:
            break
    return found
