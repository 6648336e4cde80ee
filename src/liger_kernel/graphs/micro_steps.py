"""Micro-steps that replay: the forward of a model with its loss as one CUDA graph, and the backward
as another, with the upstream gradient as an input.

    model(**batch)     known sizes: copies the batch to fixed inputs, replays the forward, and
                       returns copies of what it computed
    loss.backward()    replays the backward, and hands copies of the gradients to autograd, which
                       adds them to ``.grad``, calls hooks, and so on, as it does without graphs

Sizes are recorded when they come for the second time. What cannot be replayed runs as it was, and
the report says why.
"""

from __future__ import annotations

import functools
import inspect
import random
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from liger_kernel import _private
from liger_kernel.graphs.batches import LABELS, Batch, PackedRow, batch_of, is_packed
from liger_kernel.graphs.recorder import (
    Clock,
    CudaGraphs,
    FilledNumbers,
    Recordings,
    other_leaves,
    recorder_of,
    uncollected,
)
from liger_kernel.graphs.snapshot import Snapshot, settings
from liger_kernel.ops._core.operator import leaves
from liger_kernel.ops._core.shards import is_sharded
from liger_kernel.ops.losses.chunks import counting_at_most
from liger_kernel.parallel.sharded_head import is_compiled, observed_inside

MARK = "_liger_recorded"  # of a forward whose steps are replayed
KEY = "_liger_graphs"  # the attribute of a model that has its ``Graphs``
MOST_TOKENS = 16384  # in a batch; larger ones keep the GPU busy, and padding them costs more than it gives
CHANGES = 8  # so often a model may change before it runs as it was
LARGE = 1 << 21  # bytes of a gradient that is copied alone: H200, 2.5 GB of a 1B model: foreach 1.64 ms, alone 1.17
WAITS = 1.1  # times of the host's time: what the GPU needs in a step in which it waits for the host
LARGEST = 1 << 26  # bytes of an output, which each step copies


lenders: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose gradients are not copied


class Gradients:
    """Makes copies of the gradients of ``params``, all in one new buffer for each dtype."""

    def __init__(self, params: list[nn.Parameter]):
        self.params, self._sizes = params, Counter[torch.dtype]()
        self._places = []
        for p in params:
            self._places.append(self._sizes[p.dtype])
            self._sizes[p.dtype] += -(-p.numel() // 64) * 64  # aligned, for kernels that load several values at once

    def copies(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        device = self.params[0].device
        flat = {dtype: torch.empty(n, dtype=dtype, device=device) for dtype, n in self._sizes.items()}
        found = [
            None if g is None else flat[p.dtype][at : at + p.numel()].view(p.shape)
            for p, at, g in zip(self.params, self._places, grads, strict=True)
        ]
        pairs = [(t, g) for t, g in zip(found, grads) if t is not None and g is not None]
        for t, g in pairs:
            if t.nbytes >= LARGE:
                t.copy_(g)
        if small := [pair for pair in pairs if pair[0].nbytes < LARGE]:
            torch._foreach_copy_([t for t, _ in small], [g for _, g in small])
        return found


class MicroStep:
    """One recorded forward and backward, for batches of one shape."""

    def __init__(self, call: Callable[..., Any], batch: Batch, most: int, gradients: Gradients, leaves: list[Tensor]):
        device = gradients.params[0].device
        self.gradients, self.leaves, self.most, self.tokens = gradients, leaves, most, batch.tokens
        self.inputs = {
            n: torch.empty(shape, dtype=batch.tensors[n].dtype, device=device) for n, shape in batch.shapes.items()
        }
        self._call = functools.partial(call, **batch.constants)
        self.outputs: list[Tensor] = []
        self.upstream: list[Tensor | None] = []
        self.grads: list[Tensor | None] = []
        self.draws = False
        batch.copy_to(self.inputs)

    def rehearse(self, recorder: CudaGraphs) -> None:
        before = random.getstate(), recorder.host_draws()
        self.draws = recorder.rehearse(self._both)
        if before != (random.getstate(), recorder.host_draws()):
            raise Unfit("its forward draws random numbers on the host")  # such as which layers it leaves out
        self.outputs, self.grads = [], []

    def record(self, recorder: CudaGraphs) -> None:
        torch.clear_autocast_cache()  # casts of before are not part of the recording
        try:
            with uncollected():
                self._replay_forward = recorder.record(self.forward)
                self._replay_backward = recorder.record(self.backward)
        finally:
            torch.clear_autocast_cache()  # casts within are made anew by each replay
        self.learns = [o.requires_grad for o in self.outputs]
        self.leaves = list(self.gradients.params)  # a function that is called again sees the real ones
        # what autograd has saved is not needed any more, and gradients are copied before another replay:
        # their memory is free for other recordings
        self.outputs = [o.detach() for o in self.outputs]
        self.grads = [g if g is None else recorder.unowned(g, self._replay_backward) for g in self.grads]

    def _both(self) -> None:
        self.forward()
        known = set(map(id, self.leaves))
        beyond = (t for o in self.outputs for t in leaves(o.grad_fn) if isinstance(t, nn.Parameter))
        if any(id(t) not in known for t in beyond):
            raise Unfit("parameters are used outside of their modules")
        self.backward()

    def forward(self) -> None:
        with counting_at_most(self.most), FilledNumbers():
            out = self._call(**self.inputs)
        self.outputs, self.structure = tree_flatten(out)
        if strange := [type(o).__name__ for o in self.outputs if not isinstance(o, Tensor)]:
            raise Unfit(f"its output has a {strange[0]}")
        if not self.upstream:
            self.upstream = [torch.ones_like(o.detach()) if o.requires_grad else None for o in self.outputs]

    def backward(self) -> None:
        learning = [o for o in self.outputs if o.requires_grad]
        upstream = [g for g in self.upstream if g is not None]
        if not learning:
            raise Unfit("its output has no gradient")
        # the forward's caller has autocast on, that of a backward has not
        with torch.autocast(learning[0].device.type, enabled=False):
            self.grads = list(torch.autograd.grad(learning, self.leaves, upstream, allow_unused=True))

    def replayed(self, batch: Batch, current: Pass) -> Any:
        """The output of the model for ``batch``."""
        batch.copy_to(self.inputs)
        self._replay_forward()
        found: Any = _Replayed.apply(self, current, *self.gradients.params)
        if batch.added:
            found = [o[:, : o.shape[1] - batch.added] if self._has_tokens(o) else o for o in found]
        if (row := batch.row) is not None:
            found = [row.restore(o) if kept.ndim else o for o, kept in zip(found, self.outputs)]
        return tree_unflatten(list(found), self.structure)

    def _has_tokens(self, o: Tensor) -> bool:
        rows, T = self.inputs["input_ids"].shape
        # the last token may have no score
        return o.ndim > 1 and o.shape[0] == rows and o.shape[1] in (T, T - 1)

    @property
    def can_be_padded(self) -> bool:
        return all(o.ndim == 0 or self._has_tokens(o) for o in self.outputs)

    def gradients_for(self, upstream: tuple[Tensor | None, ...], lend: bool) -> list[Tensor | None]:
        for place, g in zip(self.upstream, upstream):
            if place is not None:
                place.zero_() if g is None else place.copy_(g)
        self._replay_backward()
        return self._in_place() if lend else self.gradients.copies(self.grads)

    def _in_place(self) -> list[Tensor | None]:
        """The gradients themselves; one that is that of several parameters is copied, as clipping would
        scale it more than once."""
        places = Counter(g.data_ptr() for g in self.grads if g is not None)
        lent = lambda g: g.clone() if places[g.data_ptr()] > 1 else g.detach()
        return [None if g is None else lent(g) for g in self.grads]

    def take_back(self) -> None:
        """Let what is still in ``.grad`` be a copy: a replay will write over what was lent."""
        for p, g in zip(self.gradients.params, self.grads):
            if p.grad is not None and g is not None and p.grad.data_ptr() == g.data_ptr():
                p.grad = p.grad.clone()


class Unfit(Exception):
    """Why a model cannot be recorded."""


class Pass:
    """One replayed forward, until its backward: while it lives, its memory is in use. ``lent`` notes the
    step if its gradients are not copied, else it is None."""

    def __init__(self, lent: list[MicroStep] | None):
        self.done, self.lent = False, lent


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: MicroStep, current: Pass, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.step, ctx.current = step, current
        ctx.set_materialize_grads(False)
        outs = tuple([o.detach().clone() for o in step.outputs])
        ctx.mark_non_differentiable(*[o for o, learns in zip(outs, step.learns) if not learns])
        return outs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.current.done:
            raise RuntimeError("graphs: the backward of a recorded step runs once; switch graphs off to run it again")
        step, ctx.step, ctx.current.done = ctx.step, None, True  # the loss may live on, without its memory
        if (lent := ctx.current.lent) is not None:
            lent.append(step)
        return None, None, *step.gradients_for(upstream, lent is not None)


Recording = Callable[[Any, Mapping[str, Any]], AbstractContextManager[str]]


Packs = Callable[[Mapping[str, Any]], PackedRow | None]


class Graphs:
    """The recorded steps of one model. ``pads(model, packed)`` says why tokens that are added on the
    right might change a loss, as a document of their own if rows are packed; "" if they do not.
    ``recording(model, given)``: a context around what is recorded, for such inputs; it yields why a
    model that draws random numbers is not, or "". ``packer(model)`` makes packed rows of padded
    batches, None if the model does not. ``auto``: recorded are sizes for which the GPU waits for the
    host."""

    def __init__(
        self,
        pads: Callable[[Any, bool], str] | None = None,
        recording: Recording | None = None,
        packer: Callable[[Any], Packs | None] | None = None,
        auto: bool = False,
    ):
        self.pads, self.recording, self.packer, self.auto = pads, recording, packer, auto
        # the GPU waits for the host in steps of so many tokens at most, and does not from so many on
        self._waits, self._busy, self._measured = 0, 1 << 62, list[str]()
        self._timed: tuple[int, Clock] | None = None
        self._begun: Clock | None = None
        self._packs: Packs | None = None
        self._padded = ""  # why padded batches are not packed
        self._uncounted = False  # whether a recording computes the whole head for labels on the GPU
        self.replays, self.reasons = 0, Counter[str]()
        self._lent: list[MicroStep] = []  # their gradients may be in ``.grad``
        # why rows are not padded, by whether they are packed
        self._exact = {} if pads else dict.fromkeys((False, True), "nobody knows what padding does in it")
        self._changes = 0
        self._forget()

    def __reduce__(self) -> Any:  # a copy of a model records its own
        return type(self), (self.pads, self.recording, self.packer, self.auto)

    def _forget(self) -> None:
        self.steps = Recordings()
        # why it is not recorded as it is now, and not for batches of a kind or of a size
        self._refused, self._kinds = "", dict[Any, str]()
        self._rehearsed: dict[Any, list[Tensor | None]] = {}
        self._snapshot: Snapshot | None = None
        self._gradients: Gradients | None = None
        # anew, as memory of graphs that are gone cannot be shared with others
        self.recorder: CudaGraphs | None = None
        self._last: Callable[[], Pass | None] = lambda: None

    def _drop(self) -> None:
        """Free what is recorded: it is recorded again when its size comes."""
        self.steps.clear()
        if self.recorder is not None:
            self.recorder.free()

    def output(self, model: Any, forward: Callable, given: Mapping[str, Any]) -> Any:
        """The output of a replayed step; None if the model has to run."""
        while self._lent:
            self._lent.pop().take_back()
        found = self._found(model, forward, given)
        if isinstance(found, tuple):
            step, batch = found
            current = Pass(self._lent if model in lenders else None)
            self._last, self.replays = weakref.ref(current), self.replays + 1
            return step.replayed(batch, current)
        if found is not None:
            self.reasons[found] += 1
            if self.reasons[found] == 1 and not self.auto:
                warnings.warn(f"graphs: {type(model).__name__} runs as it was: {found}", stacklevel=3)
        return None

    def _found(self, model: Any, forward: Callable, given: Mapping[str, Any]) -> tuple[MicroStep, Batch] | str | None:
        if self._changes >= CHANGES:
            return self._refused
        if (last := self._last()) is not None and not last.done:
            return "a second forward before the backward of the first"
        if given.get("use_cache"):
            return "use_cache is True, so that keys and values are kept"
        if _private.saved_tensors_hooks(True) is not None or torch.is_anomaly_enabled():
            return "hooks for saved tensors, or anomaly detection, see its graph"
        if self._snapshot is None or (change := self._snapshot.change()):
            self._changes += self._snapshot is not None
            self._forget()
            self._snapshot = Snapshot(model)
            if self._changes >= CHANGES:
                self._refused = f"it changes too often: {change}"
            elif not (why := self._unfit(model)):
                self._gradients = Gradients([p for p in model.parameters() if p.requires_grad])
                self._packs = self.packer and self.packer(model)
            else:
                self._refused = why
        if self._gradients is None:
            return self._refused
        device = self._gradients.params[0].device
        row = None
        if self._packs and not (self._padded or is_packed(given) or self._changed_by_padding(model, True)):
            row = self._packs(given)
            given = given if row is None else row.given
        longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        pads = not self._changed_by_padding(model, is_packed(given))
        batch = batch_of(given, pads, longest if row is None else None, device, row)
        if isinstance(batch, str):
            return batch
        key = batch.key, settings(device.type)
        if refused := self._kinds.get(batch.kind) or self._kinds.get(key):
            return refused
        if batch.tokens > MOST_TOKENS:
            return f"more than {MOST_TOKENS} tokens in a batch"
        bounds = batch.bounds()
        for most in bounds:
            if (step := self.steps.used((key, most))) is not None:
                return step, batch
        place = key, bounds[0]
        if self.steps.first(place) or (self.auto and not self._waits_for_the_host(batch.tokens)):
            return None
        return self._recorded(model, forward, batch, place, self._gradients)

    def _changed_by_padding(self, model: Any, packed: bool) -> str:
        if self.pads and packed not in self._exact:
            self._exact[packed] = self.pads(model, packed)
        return self._exact[packed]

    def _waits_for_the_host(self, tokens: int) -> bool:
        """Whether the GPU does in steps of such a size. If it is not known yet, this step is timed."""
        if self._timed is not None and (times := self._timed[1].times()) is not None:
            size, (host, device) = self._timed[0], times
            if waits := device < WAITS * host:
                self._waits = max(self._waits, size)
            else:
                self._busy = min(self._busy, size)
            self._measured.append(
                f"{size} tokens: host {host:.1f} ms, GPU {device:.1f} ms: {'' if waits else 'not '}recorded"
            )
        self._timed = None
        if self._waits < tokens < self._busy and self.recorder is not None:
            self._begun = self.recorder.clock()
            self._timed = tokens, self._begun
        return tokens <= self._waits

    def after_forward(self) -> None:
        """Let the clock of this step, if it has one, stop after its backward."""
        if self._begun is not None and self._gradients is not None:
            self._begun.stop_after(self._gradients.params)
        self._begun = None

    def _recorded(
        self, model: Any, forward: Callable, batch: Batch, key: Any, gradients: Gradients
    ) -> tuple[MicroStep, Batch] | str | None:
        keeps = getattr(getattr(model, "config", None), "use_cache", False)
        # nobody continues a text from a training step
        call: Callable[..., Any] = functools.partial(forward, model, **{"use_cache": False} if keeps else {})
        if batch.row is not None:
            call = functools.partial(batch.row.run, call)
        if keeps:
            batch.constants.pop("use_cache", None)
        assert self.recorder is not None
        if self.steps and batch.tokens > max(step.tokens for step in self.steps.values()):
            self._drop()  # the largest first: the others fit into its memory
        versions = [b._version for b in model.buffers()]
        known = self._rehearsed.get(key)
        try:
            around = nullcontext("") if self.recording is None else self.recording(model, batch.tensors)
            with around as refused, other_leaves(model, gradients.params) as own:
                step = MicroStep(call, batch, key[1], gradients, own)
                if known is None:
                    step.rehearse(self.recorder)
                    if step.draws and refused:
                        raise Unfit(refused)
                    self._rehearsed[key] = step.upstream
                else:
                    step.upstream = known
                step.record(self.recorder)
            if [b._version for b in model.buffers()] != versions:
                raise Unfit("its forward changes buffers")
            if max(o.nbytes for o in step.outputs) > LARGEST:
                raise Unfit("its output is large")
            if batch.row is not None and not step.can_be_padded:
                raise Unfit("its output has another shape than its tokens")
            if batch.added and not step.can_be_padded:
                self._exact = dict.fromkeys(self._exact, "its output has another shape than its tokens")
                return None
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold the graph of autograd
            of: Any = batch.kind
            if isinstance(error, torch.OutOfMemoryError):
                if self.steps:  # without the memory of the others
                    self._drop()
                    return self._recorded(model, forward, batch, key, gradients)
                of = key[0]  # a smaller batch may have enough memory
            why = str(error).partition("\n")[0][:200]
            why = why if isinstance(error, Unfit) else f"{type(error).__name__}: {why}"
            if batch.row is not None and not isinstance(error, torch.OutOfMemoryError):
                self._padded = why
                return None
            self._kinds[of] = f"it cannot be recorded: {why}"
            return self._kinds[of]
        self.steps.add(key, step)
        of_tokens = batch.shapes["input_ids"] in map(batch.shapes.get, LABELS)
        self._uncounted |= batch.counts is None and of_tokens
        return step, batch

    def _unfit(self, model: nn.Module) -> str:
        """Why the model, as it is now, is not recorded."""
        tensors = [*model.parameters(), *model.buffers()]
        devices = {t.device for t in tensors}
        self.recorder = recorder_of(devices.pop()) if len(devices) == 1 else None
        world = torch.distributed
        if world.is_available() and world.is_initialized() and world.get_world_size() > 1:
            return "several processes train it (DDP, FSDP, DeepSpeed, tensor parallelism)"
        if any(is_sharded(t) or hasattr(t, "ds_id") for t in tensors):
            return "its weights are sharded"
        if self.recorder is None:
            return "CUDA graphs need all of its weights on one GPU"
        if not any(p.requires_grad for p in tensors):
            return "nothing of it is trained"
        if any("_hf_hook" in vars(m) for m in model.modules()):
            return "accelerate moves its weights"
        if any(map(is_compiled, model.modules())):
            return "its layers are compiled"
        if observed_inside(model):
            return "hooks see what its layers compute"
        return ""

    def __str__(self) -> str:
        lines = [f"graphs: {len(self.steps)} recorded, {self.replays} steps replayed"]
        lines += [f"  {n} as it was: {why}" for why, n in self.reasons.most_common()]
        reasons = {why: packed for packed, why in sorted(self._exact.items(), reverse=True) if why}
        lines += [f"  {'packed ' * packed}rows are not padded: {why}" for why, packed in reasons.items()]
        lines += [f"  padded rows are not packed: {self._padded}"] * bool(self._padded)
        lines += ["  the whole head is computed: labels are on the GPU, and nobody counted them"] * self._uncounted
        lines += [f"  {text}" for text in self._measured]
        return "\n".join(lines)


def recorded(forward: Callable, *how: Any) -> Callable:
    """Wrap ``forward``, of a model with its loss, so that training steps are replayed; ``how``: what
    ``Graphs`` takes."""
    names = list(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = torch.compiler.is_compiling() or _private.dispatch_modes() or _private.observed()
        plain = plain or getattr(self, "_is_replica", False)  # of DataParallel, which shares what is recorded
        if plain or not (self.training and torch.is_grad_enabled()) or len(args) > len(names):
            return forward(self, *args, **kwargs)
        if (graphs := vars(self).get(KEY)) is None:
            graphs = vars(self)[KEY] = Graphs(*how)
        out = graphs.output(self, forward, dict(zip(names, args)) | kwargs)
        if out is not None:
            return out
        try:
            out = forward(self, *args, **kwargs)
        except torch.OutOfMemoryError:
            if not graphs.steps:
                raise
            graphs._drop()  # their memory is what a step that runs may lack
            out = forward(self, *args, **kwargs)
        graphs.after_forward()
        return out

    vars(call)[MARK] = True
    return call
