"""The peak of memory of a training step, from shapes: the step itself runs on tensors without data,
and every storage counts from its first use to its end.

    peak = the most bytes that are held at one moment of a step whose optimizer has its states

The model of a run is built on the meta device, patched and given adapters by the code of ``liger
train``, and makes one step under PyTorch's ``FakeTensorMode``. Kernels are not launched; everything
else runs as on a GPU: autograd, checkpointing, recomputation, offloading, chunks of the head.
Several ranks are one, whose collectives return at once: PyTorch's FSDP2 gathers
weights and reduces gradients. So there is no formula for any part of a model, and whatever a family
or a switch keeps is counted.

Long models are cut. If all layers have the same form, models of 4 and of 5 layers make the step,
and the bytes of each phase are continued as a line:

    forward    head and loss    backward of the last layer, the last but one, the second, the first    optimizer

The CPU's memory counts, too: copies of offloaded activations, and what an optimizer on the CPU
needs. If it is short, activations of the last layers stay on the GPU.

What PyTorch's own operators hold while they run is not seen, but known: cuBLAS has two workspaces
(the forward and autograd have a thread each), and the backward of attention has the gradient of the
queries in fp32, and those of shared keys and values for each head. Not counted: fragmentation,
CUDA's own memory.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import math
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from liger_kernel import _private, memory
from liger_kernel._private import FakeTensor, FakeTensorMode
from liger_kernel.compile.architectures import TARGETS
from liger_kernel.memory import offload as offloading
from liger_kernel.ops._core import launch_config as launching
from liger_kernel.ops._core.operator import intercept_launches
from liger_kernel.ops.projections.adapted import Projection
from liger_kernel.ops.projections.float8 import E4
from liger_kernel.ops.projections.four_bits import four_bits
from liger_kernel.ops.projections.linear import linears
from liger_kernel.ops.projections.packed_weights import NVFP4, integer_rows, nvfp4_rows
from liger_kernel.ops.projections.weights import Weight
from liger_kernel.parallel import MODES, ULYSSES, layers_of, ulysses
from liger_kernel.parallel.distributed import DTensor
from liger_kernel.train.adamw import BLOCK, KINDS, LEAST
from liger_kernel.train.adapters import adapted
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.model import flags_for, mesh_of, options_of, patch, quantize_fp8, recompute, split
from liger_kernel.train.stored import method_of
from liger_kernel.transformers.recognise import storages
from liger_kernel.transformers.rewrite import joined_steps

# PyTorch's allocator hands out multiples of so many bytes
GRANULE = 512
# layers of the shorter of the two models that a long one is cut to
SHORT = 4
MIB = 2**20
# uses of the CPU's memory
COPIES, STATES = "activations", "weights, gradients and moments"
# phases in which the activations of the last layers are gone
LAST_PHASES = {"backward: second layer", "backward: first layer", "optimizer"}
# by which part of a step it is allocated, a storage counts as the last of these; gradients and
# casts are recognised
PARTS = (
    "weights",
    "gathered weights",
    "casts of weights",
    "gradients",
    "optimizer",
    "activations",
    "head and loss",
    "temporary",
    "libraries",
)


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes at the moment of a step that needs most, by ``PARTS``. ``phase``: when it is.
    ``cpu``: bytes of the CPU's memory, by what needs them."""

    parts: dict[str, int]
    phase: str
    cpu: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class _How(NamedTuple):
    """How a step is made: on one of ``world`` ranks with a GPU each.

    ``arch``: a key of ``TARGETS``. ``optimizer``: that of the config, or "sgd", which has no
    states. ``ignored``: the part of the targets that does not count. ``reduce_dtype``: in which
    FSDP2 reduces gradients.
    """

    config: TrainConfig
    precision: str
    world: int = 1
    arch: str = "sm90"
    optimizer: str | None = None
    ignored: float = 0.0
    reduce_dtype: torch.dtype | None = torch.float32


def simulated(form: Any, config: TrainConfig, precision: str, *, cpu_memory: float = math.inf, **more: Any) -> Peak:
    """The peak of one rank's step of ``config`` with a model of the transformers configuration
    ``form``. ``more``: fields of ``_How``. ``cpu_memory``: bytes that the rank may use. Raises
    ``UserError`` for what cannot be simulated."""
    if config.quantize == "int8" or (config.quantize and config.kernels == "off"):
        raise UserError(
            f"the memory of quantize {config.quantize}{' with kernels off' if config.quantize != 'int8' else ''} is "
            "not known: kernels of bitsandbytes run"
        )
    if config.parallel not in MODES:
        raise UserError(f"the memory of parallel {config.parallel} is not known: DeepSpeed holds the weights")
    how = _How(config, precision, **more)
    step = functools.partial(_phases, how=how)
    text = form.get_text_config()
    layers, some = text.num_hidden_layers, SHORT
    # so many layers' inputs can be on their way to the CPU or back at a time; a cut model must have
    # more layers
    if config.activation_offloading:
        some += -(-(offloading.LATE + offloading.AHEAD) // (config.batch * config.length * text.hidden_size * 2))
    if layers <= 2 * some + 1 or not _alike(form, config.trust_remote_code):
        phases, cpu = step(form)
        of_a_layer = max(1, cpu[COPIES] // layers)
    else:
        (short, cpu), (longer, cpu_of_longer) = step(_cut(form, some)), step(_cut(form, some + 1))
        continued = lambda parts, longer: {part: n + (longer[part] - n) * (layers - some) for part, n in parts.items()}
        of_a_layer = max(1, cpu_of_longer[COPIES] - cpu[COPIES])
        phases, cpu = (
            {name: continued(parts, longer[name]) for name, parts in short.items()},
            continued(cpu, cpu_of_longer),
        )
    if (beyond := sum(cpu.values()) - cpu_memory) > 0 and cpu[COPIES]:
        stay = min(cpu[COPIES], of_a_layer * math.ceil(beyond / of_a_layer))
        cpu[COPIES] -= stay
        for name in phases.keys() - LAST_PHASES:
            phases[name]["activations"] += stay
    phase, parts = max(phases.items(), key=lambda found: sum(found[1].values()))
    return Peak(
        parts | {"libraries": parts["libraries"] + workspaces(how.arch)},
        phase,
        {what: n for what, n in cpu.items() if n},
    )


def workspaces(arch: str) -> int:
    """Bytes of the workspaces of cuBLAS, one for the thread of the forward and one for
    autograd's, of the sizes that PyTorch chooses."""
    return 2 * (32 * MIB if arch in ("sm90", "sm100") or arch.startswith("gfx") else 8 * MIB + 128 * 1024)


_ALIKE: dict[str, bool] = {}


def _alike(form: Any, trust_remote_code: bool) -> bool:
    """Whether all layers of a model have parameters of the same shapes, and attention of one
    kind."""
    import transformers

    key = form.to_json_string()
    if key not in _ALIKE:
        with torch.device("meta"):
            layers = layers_of(transformers.AutoModelForCausalLM.from_config(form, trust_remote_code=trust_remote_code))
        shapes = {(type(layer), tuple((name, p.shape) for name, p in layer.named_parameters())) for layer in layers}
        text = form.get_text_config()
        _ALIKE[key] = (
            len(layers) == text.num_hidden_layers
            and len(shapes) == 1
            and len(set(getattr(text, "layer_types", None) or ())) <= 1
        )
    return _ALIKE[key]


def _cut(form: Any, layers: int) -> Any:
    form = copy.deepcopy(form)
    text = form.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return form


def _phases(form: Any, how: _How) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Bytes by part at the peak of each phase of a step, and those of the CPU's memory by what
    needs them."""
    config = how.config
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), fake_ranks(how) as spread:
        warnings.simplefilter("ignore")
        model = _on_meta(form, config, how.precision)
        with (
            _as_on_a_gpu(how.arch, how.ignored) as meter,
            followed(meter, config.optimizer_on_cpu) if config.fully_sharded else contextlib.nullcontext(),
        ):
            _step(model, how, spread, meter, _words(quantisation(form)))
    return meter.phases, meter.cpu


def _on_meta(form: Any, config: TrainConfig, precision: str) -> Any:
    import transformers

    how, plain = quantisation(form), copy.deepcopy(form)
    if how:
        del plain.quantization_config
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(plain, **options_of(config, precision)).train()
        if config.lora and how:
            _as_stored(model, how)
        if config.kernels == "on":
            patch(model, flags_for(config, form.model_type))
        if config.lora:
            model = adapted(model, config)
        if config.gradient_checkpointing != "none":
            recompute(model, config.gradient_checkpointing)
    return model


def _step(model: Any, how: _How, spread: Callable, meter: _Meter, words: tuple[int, int, bool] | None) -> None:
    config = how.config
    meter.begin("weights")
    model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"))
    getattr(model, "get_base_model", lambda: model)().tie_weights()
    if config.quantize == "fp8":
        quantize_fp8(model)
    elif config.quantize:
        _replaced(model, _in_four_bits)
    elif config.lora and words:
        _replaced(model, functools.partial(_in_words, how=words))
    replica = spread(model)
    for bucket in getattr(replica, "buckets", ()):
        meter.call(bucket, "gradients")
    if config.optimizer_on_cpu:
        for p in model.parameters():
            meter.leave(local(p))
            meter.cpu[STATES] += 2 * local(p).nbytes if p.requires_grad else 0
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.register_post_accumulate_grad_hook(lambda p: meter.call(local(p.grad), "gradients"))
        if config.optimizer_in_backward:
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    meter.begin("optimizer")
    states = (
        []
        if config.optimizer_on_cpu
        else [t for p in trained for t in _states(local(p), how.optimizer or config.optimizer)]
    )
    meter.begin("activations")
    ids = torch.zeros(config.batch, config.length, dtype=torch.int64)
    with _marks(layers_of(model), meter):
        for _ in range(min(config.accumulate, 2)):
            meter.begin("activations", "forward")
            with torch.autocast(
                "cpu", torch.bfloat16, enabled=how.precision == "bf16-mixed" and not config.fully_sharded
            ):
                loss = model(input_ids=ids, labels=ids, use_cache=False, num_items_in_batch=ids.numel()).loss
            loss.backward()
    # fused and compiled kernels need nothing but the states
    meter.begin("optimizer", "optimizer")
    del states, replica


def _states(p: Tensor, optimizer: str) -> list[Tensor]:
    """What an optimizer keeps of a parameter: AdamW two moments; in 8 bits with a scale for each
    block, but not those of small parameters."""
    if optimizer == "sgd":
        return []
    if KINDS[optimizer].moments is None or p.numel() < LEAST or p.numel() % BLOCK:
        return [torch.empty_like(p), torch.empty_like(p)]
    return [
        torch.empty(n, dtype=dtype) for n, dtype in 2 * ((p.numel(), torch.uint8), (p.numel() // BLOCK, torch.float32))
    ]


@contextlib.contextmanager
def _marks(layers: list[nn.Module], meter: _Meter) -> Iterator[None]:
    """Tell the meter which phase of a step begins. The head has no hook, because a head with
    hooks is not fused."""
    last = len(layers) - 1
    # of a place with two names, the last
    names = {last - 1: "last layer but one", 1: "second layer", last: "last layer", 0: "first layer"}

    def left(i: int, layer: nn.Module, args: Any, out: Any) -> None:
        if meter.label != "activations":
            # a checkpointed layer runs again in the backward
            return
        out = out[0] if isinstance(out, tuple) else out
        out.register_hook(lambda gradient: meter.begin("temporary", f"backward: {names.get(i, 'other layers')}"))
        if i == last:
            meter.begin("head and loss", "head and loss")

    with contextlib.ExitStack() as stack:
        for i, layer in enumerate(layers):
            stack.enter_context(layer.register_forward_hook(functools.partial(left, i)))
        yield


class _Storage(NamedTuple):
    """What the meter knows of a storage: what tells its end, its bytes, the part that it counts as."""

    reference: Any
    size: int
    label: str


class _Meter(FakeTensorMode):
    """Counts bytes of storages while they live. ``phases``: those by part at the peak of each
    phase; ``cpu``: the most that the CPU's memory has."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.live: dict[int, _Storage] = {}  # by the storage's address
        self.parts: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
        self.now, self.label, self.phase = 0, "weights", ""
        self.phases: dict[str, dict[str, int]] = {}
        self.cpu, self.copied = {COPIES: 0, STATES: 0}, 0
        self.nested = self.late = False
        self.watched: list[StorageWeakRef] = []

    def watch(self, storage: Any) -> StorageWeakRef:
        """A weak reference as PyTorch has them, which puts off the storage's own end: whether it
        has ended must be asked."""
        self.watched.append(StorageWeakRef(storage))
        return self.watched[-1]

    def begin(self, label: str, phase: str = "") -> None:
        self.label, self.phase = label, phase
        self.peak()

    def peak(self, more: int = 0) -> None:
        """Take note if there was never more in this phase. ``more``: what an operator holds
        besides while it runs."""
        self.late = False
        if self.phase and self.now + more > sum(self.phases.get(self.phase, {}).values()):
            self.phases[self.phase] = dict(self.parts) | {"libraries": more}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # more than half of all calls: nothing is allocated
        if func is torch.ops.prim.device.default:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        # PyTorch 2.11 does not know what it returns
        if func is torch.ops.aten.addmm.dtype_out:
            return (kwargs or {})["out"]
        # operators of PyTorch are one kernel, even where the fake ones consist of several; ours
        # call several
        if self.nested:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        for watched in [each for each in self.watched if each.expired()]:
            self.watched.remove(watched)
            self.count(watched.cdata, None)
        if self.late:
            self.peak()
        self.nested = func.namespace != "liger"
        # the cache's entry for set_ would keep the storage alive
        self.cache_enabled = func.overloadpacket is not torch.ops.aten.set_
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs or {})
        finally:
            self.nested = False
        label = self.label
        if func is torch.ops.aten._to_copy.default and (found := self.found(args[0])) and found[1].label == "weights":
            label = "casts of weights"
        before = self.now
        for t in tree_leaves(out):
            if isinstance(t, FakeTensor):
                self.see(t, label)
        if func is torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
            self.peak(_attention_workspace(args[1], args[2]))
        elif self.now > before:
            # autograd adds to the first of two gradients if nobody else holds it, which is then
            # gone before the next operator
            self.late = func is torch.ops.aten.add.Tensor and _private.backward_id() != -1
            if not self.late:
                self.peak()
        return out

    def found(self, t: Tensor | None) -> tuple[int, _Storage] | None:
        key = None if t is None else t.untyped_storage()._cdata
        return (key, self.live[key]) if key in self.live else None

    def count(self, key: int, storage: _Storage | None) -> None:
        """Count a storage as this from now on; None: no longer."""
        if (before := self.live.pop(key, None)) is not None:
            self.parts[before.label] -= before.size
            self.now -= before.size
        if storage is not None:
            self.live[key] = storage
            self.parts[storage.label] += storage.size
            self.now += storage.size

    def see(self, t: Tensor, label: str) -> None:
        storage = t.untyped_storage()
        if (key := storage._cdata) not in self.live:
            ended = weakref.ref(storage, lambda _: self.count(key, None))
            self.count(key, _Storage(ended, _granules(storage.nbytes()), label))

    def resizing(self, resize: Callable) -> Callable:
        """``resize`` of storages, which counts: FSDP2 frees what it gathered, and allocates it
        again, in the same storage."""

        def call(storage: Any, size: int) -> None:
            resize(storage, size)
            if (known := self.live.get(storage._cdata)) is not None:
                self.count(storage._cdata, known._replace(size=_granules(size)))
                self.peak()

        return call

    def call(self, t: Tensor | None, label: str) -> None:
        """Count a storage as another part from now on."""
        if found := self.found(t):
            self.count(found[0], found[1]._replace(label=label))

    def leave(self, t: Tensor | None) -> None:
        """Count a storage no longer: it is in the CPU's memory."""
        if found := self.found(t):
            self.cpu[STATES] += found[1].size
            self.count(found[0], found[1]._replace(size=0))

    def copy(self, size: int) -> None:
        """Count a copy in the CPU's memory; of a negative size, one that ends. The most that
        there were at a time stay pinned."""
        self.copied += size
        self.cpu[COPIES] = max(self.cpu[COPIES], self.copied)


def _granules(size: int) -> int:
    return -(-size // GRANULE) * GRANULE


def _attention_workspace(q: Tensor, k: Tensor) -> int:
    """Bytes of the gradient of the queries in fp32 and, where heads share keys and values, of
    these' gradients for each head."""
    return 4 * q.numel() + (2 * q.nbytes if q.shape[1] != k.shape[1] else 0)


def _attention(  # type: ignore[no-untyped-def]  # PyTorch's signature
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """The attention that PyTorch runs on a GPU: without a mask one of the flash kinds, else the
    memory-efficient one."""
    aten = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1] <= 256:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    bias = None if attn_mask is None else attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]


def _dropout(input, p=0.5, training=True, inplace=False):  # type: ignore[no-untyped-def]  # PyTorch's
    """Dropout as PyTorch has it on a GPU, whose mask is a byte for each value."""
    return torch.native_dropout(input, p, training)[0] if training and p else input


@contextlib.contextmanager
def _as_on_a_gpu(arch: str, ignored: float) -> Iterator[_Meter]:
    """Tensors without data, which the package treats like those of a GPU of that architecture."""
    import transformers.masking_utils as masks

    # once for the process: done by a forward below, it would end with this context
    joined_steps.answer_by_documents()
    plain, meter = (*offloading.PLAIN, FakeTensor), _Meter()
    with contextlib.ExitStack() as stack:
        for where, name, value in (
            (memory, "PLAIN", plain),
            (offloading, "PLAIN", plain),
            (offloading, "STAYS", ("meta",)),
            (offloading, "_lane", functools.partial(_Copies, meter)),
            (offloading, "StorageWeakRef", meter.watch),
            (torch.nn.functional, "scaled_dot_product_attention", _attention),
            (torch.nn.functional, "dropout", _dropout),
            (torch.nn.parallel, "DistributedDataParallel", Replica),
            (torch.UntypedStorage, "resize_", meter.resizing(torch.UntypedStorage.resize_)),
            # it would read the values of positions
            (masks, "find_packed_sequence_indices", lambda *args, **kwargs: None),
            (storages, "STORAGES", [lambda m, _: m.stored if type(m) is _StandIn else None, *storages.STORAGES]),
            (ulysses, "_attention_of", heads_of),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        stack.enter_context(launching.target(arch, TARGETS[arch].processors))
        stack.enter_context(intercept_launches(lambda *launch: None, "cpu", ignored))
        yield stack.enter_context(meter)


class _Copies:
    """Stands in for ``offloading.Lane``: copies are there at once, and the blocks are their
    sizes."""

    def __init__(self, meter: _Meter, device: torch.device):
        self.meter, self.device, self.event = meter, device, types.SimpleNamespace(wait_event=lambda event: None)

    def now(self) -> Any:
        return self.event

    def take(self, size: int) -> list[int]:
        blocks = offloading.pieces(size)
        self.meter.copy(sum(blocks))
        return blocks

    def give(self, blocks: list[int]) -> None:
        self.meter.copy(-sum(blocks))

    def out(self, data: Tensor, blocks: list[int]) -> Any:
        return self.event

    def back(self, blocks: list[int], data: Tensor) -> Any:
        return self.event


class _StandIn(nn.Module):
    """Of a linear layer that is quantised; without adapters its weight is dense for one product."""

    def __init__(self, linear: nn.Linear, stored: Weight):
        super().__init__()
        (self.out_features, self.in_features), self.bias, self.stored = linear.weight.shape, linear.bias, stored

    def forward(self, x: Tensor) -> Tensor:
        return linears(x, [Projection(self.stored, self.bias)])[0]


def _in_four_bits(w: Tensor) -> Weight:
    """As bitsandbytes stores it in NF4 with double quantisation."""
    fp32, uint8 = (functools.partial(torch.empty, dtype=dtype) for dtype in (torch.float32, torch.uint8))
    blocks = -(-w.numel() // 64)
    nested = types.SimpleNamespace(absmax=fp32(-(-blocks // 256)), code=fp32(256), blocksize=256)
    of = dict(dtype=w.dtype, shape=w.shape, blocksize=64, absmax=uint8(blocks), code=fp32(16))
    return four_bits(uint8(w.numel() // 2), types.SimpleNamespace(**of, offset=fp32(()), state2=nested))


def _in_words(w: Tensor, how: tuple[int, int, bool]) -> Weight:
    """As a checkpoint in packed integers or NVFP4 has it."""
    (bits, group, of_floats), (N, K) = how, w.shape
    if of_floats:
        scales = torch.empty(N, K // NVFP4, dtype=E4), torch.empty(1, dtype=torch.float32)
        return nvfp4_rows(torch.empty(N, K // 2, dtype=torch.uint8), *scales)
    group = group if 0 < group < K else K
    words, scale = torch.empty(N, K * bits // 32, dtype=torch.int32), torch.empty(N, K // group, dtype=torch.bfloat16)
    return integer_rows(words, scale, None, (N, K), group, bits)


def quantisation(form: Any) -> dict[str, Any]:
    """How the files of a model are quantised; empty if they are not, or in a form that is not known here."""
    how = getattr(form, "quantization_config", None) if method_of(form) else None
    return {} if how is None else how if isinstance(how, dict) else how.to_dict()


def _as_stored(model: Any, how: dict[str, Any]) -> None:
    """The layers of a model on the meta device as a loader makes them for a checkpoint that is quantised."""
    from transformers.quantizers.auto import AutoHfQuantizer

    if how["quant_method"] == "fp8":
        AutoHfQuantizer.from_config(how, pre_quantized=True).preprocess_model(model=model)
    elif how["quant_method"] == "mxfp4":
        from liger_kernel.transformers.load_mxfp4 import experts_in_mxfp4

        experts_in_mxfp4(model)


def _words(how: dict[str, Any]) -> tuple[int, int, bool] | None:
    """Bits, values with one scale, and whether they are NVFP4, of linear layers that are packed."""
    if how.get("quant_method") in (None, "fp8", "mxfp4"):
        return None
    # compressed-tensors has a scheme for each group of layers; the first stands for all
    groups = list(how.get("config_groups", {}).values())
    scheme: dict[str, Any] = (groups[0].get("weights") if groups else None) or how
    bits = scheme.get("num_bits") or scheme.get("bits") or 4
    return bits, scheme.get("group_size") or -1, scheme.get("type") == "float" or "nvfp4" in how.get("format", "")


def _replaced(model: Any, stored: Callable[[Tensor], Weight]) -> None:
    """All linear layers but the head and the adapters, as transformers does it while it loads a
    model."""
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module is not head and "lora_" not in name:
            model.set_submodule(name, _StandIn(module, stored(module.weight)))


@contextlib.contextmanager
def fake_ranks(how: _How) -> Iterator[Callable[[nn.Module], nn.Module]]:
    """One rank of many, of which the others are not there: collectives return at once. Gives what
    spreads a model over them, as ``liger train`` does. It makes no mesh, as that would read tensors.
    Raises ``UserError`` in a process that has joined others already."""
    config, of = how.config, functools.partial(split, precision=how.precision, reduce_dtype=how.reduce_dtype)
    if config.parallel == "none":
        yield lambda model: of(model, config, mesh=None).model
        return
    # defines what collectives return where tensors have no data
    import torch.distributed._tools.fake_collectives
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError("what several ranks need is not known in a process that is one of them")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=how.world)
    try:
        every, shared = init_device_mesh("cpu", (how.world,)), mesh_of(config, torch.device("cpu"), how.world)

        def spread(model: nn.Module) -> nn.Module:
            one = config
            if config.parallel in ULYSSES and shared is not None:
                ulysses.share_rows(model, shared.get_group(1))
                one = dataclasses.replace(config, parallel=ULYSSES[config.parallel], sequence_parallel_size=None)
            return of(model, one, mesh=every).model

        yield spread
    finally:
        dist.destroy_process_group()


class Replica(nn.Module):
    """Stands in for ``DistributedDataParallel``, of which only the buckets of gradients need
    memory."""

    def __init__(self, module: nn.Module, **_: Any):
        super().__init__()
        self.module, self.buckets = module, [torch.empty_like(p) for p in module.parameters() if p.requires_grad]


@contextlib.contextmanager
def followed(meter: Any, on_cpu: bool) -> Iterator[None]:
    """Tell the meter what FSDP2 gathers and what it reduces. ``on_cpu``: shards of gradients are
    not on the GPU."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    def labelled(method: Callable, label: str) -> Callable:
        @functools.wraps(method)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            before, meter.label = meter.label, label
            try:
                return method(group, *args, **kwargs)
            finally:
                meter.label = before
                for each in group.fsdp_params if on_cpu else ():
                    meter.leave(local(each.sharded_param.grad))

        return call

    with contextlib.ExitStack() as stack:
        for name in ("unshard", "wait_for_unshard", "post_backward"):
            label = "gradients" if name == "post_backward" else "gathered weights"
            wrapped = labelled(getattr(FSDPParamGroup, name), label)
            stack.enter_context(mock.patch.object(FSDPParamGroup, name, wrapped))
        yield


def local(t: Any) -> Tensor:
    """This rank's part of a tensor."""
    return t.to_local() if isinstance(t, DTensor) else t


def heads_of(model: Any) -> tuple[dict[nn.Module, tuple[int, int]], bool]:
    """Stands in for Ulysses' search for attention, which runs the model on data: modules that
    know how many queries share a head of keys are attention."""
    config = model.config
    heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return {m: heads for m in model.modules() if hasattr(m, "num_key_value_groups")}, False
