"""Offloading: large tensors that are saved for the backward pass wait in the CPU's memory. Values
do not change by a bit.

While an ``offloaded`` forward runs, every large tensor that autograd saves is copied to pinned
memory, on a stream of its own, and leaves the GPU when its copy is done. In a checkpointed model
these are the inputs of the layers; in any other model they are the larger activations. The backward
pass reads them in reverse order: while it works with one, the next ones are on their way back. With
layers 1, 2, 3:

    forward    1 runs, its input is copied
               2 runs, its input is copied, that of 1 leaves the GPU
               3 runs, its input stays, that of 2 leaves the GPU
    backward   3 runs, the input of 2 comes back
               2 runs, the input of 1 comes back
               1 runs

Saving is observed by ``torch.autograd.graph.saved_tensors_hooks``, so both kinds of checkpointing
work, and every layer does. A storage is copied once, however many views of it are saved. What stays
on the GPU: parameters, buffers and casts of parameters, tensors of fewer than ``LEAST`` bytes,
sharded and quantised tensors, and what the host has no room for. Nothing is lost if a copy is late:
whoever reuses the memory or reads the values waits for it, on the GPU. Offloading steps aside, with
a warning, for hooks of other code, ``torch.compile`` around the model, ``torch.func``, and CUDA
graphs.

This file needs nothing but PyTorch: ``offloaded`` works for the forward of any module.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import sys
import threading
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from liger_kernel import _private

__all__ = ["offloaded"]

LEAST = 2**20  # bytes of a tensor that is worth a copy
AHEAD = 2**28  # bytes that come back before they are needed: 5 ms of copies; one tensor, if it is larger
# bytes that are copied while the forward goes on, and are still on the device; one tensor, if it is larger
LATE = 2**28
BLOCK = 2**26  # bytes of a piece of pinned memory: PyTorch rounds what it pins up to a power of two
RESERVE = 2**32  # bytes of the host's memory that are left to others
STAYS = ("cpu", "meta")  # devices with nothing to gain

PLAIN = (Tensor, nn.Parameter)
# Nodes of views, which lie between a cast and who saves it
VIEWS = {
    f"{name}Backward0"
    for name in ("View", "UnsafeView", "ReshapeAlias", "T", "Transpose", "Permute", "Unsqueeze", "Slice", "Alias")
}


def top_hooks() -> Any:
    """The hooks for saved tensors that are in place now, or None."""
    return _private.saved_tensors_hooks(True)


def hooks_allowed() -> bool:
    """Whether hooks may be pushed: not within ``torch.func``."""
    return _private.saved_tensors_hooks_are_enabled() and _private.transforms() is None


def saved_by() -> Callable[[Tensor], Any] | None:
    """What saves a tensor now, if nobody's hooks but those of this file are in place; None if
    others' are."""
    top = top_hooks()
    return as_it_is if top is None else top[0] if top[1] is unpack else None


def modified(t: Tensor, version: int) -> RuntimeError:
    """PyTorch's own error for a saved tensor that is at another ``version`` than when it was
    saved."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{t.type()} {list(t.shape)} is at version {t._version}; expected version {version} instead"
    )


@functools.cache
def _warn(text: str) -> None:
    warnings.warn(f"liger_kernel: activation_offloading: {text}", stacklevel=4)


_pages: list[mmap.mmap] = []  # what the driver knows, which must stay where it is


def _pinned(size: int, device: torch.device) -> Tensor:
    """``size`` bytes of pinned memory, for the life of the process. Raises an ``OSError`` or a
    ``RuntimeError`` if there are none."""
    block = _registered(size, device) if device.type == "cuda" else None
    return torch.empty(size, dtype=torch.uint8, pin_memory=True) if block is None else block


def _registered(size: int, device: torch.device) -> Tensor | None:
    """The same from pages that PyTorch's threads make, or None if the system or the driver refuses.

    The driver's own allocation takes 0.6 s a GB, almost all of it to make pages, one by one in one
    thread. Here all threads make them, huge ones if the system lets them, and the driver only
    registers them: 0.04 s a GB (H200, 16 cores).
    """
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_DONTFORK)  # after a fork, writing would move a page away from where the device knows it
    except (OSError, AttributeError):  # no address space is left, or the system is not Linux
        return None
    with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    block, runtime = torch.frombuffer(pages, dtype=torch.uint8).zero_(), torch.cuda.cudart()
    _pages.append(pages)  # before the driver knows them: an exception may come at any moment
    with torch.cuda.device(device):
        refused = runtime.cudaHostRegister(block.data_ptr(), size, 0) != runtime.cudaError.success
    if not refused:
        return block
    _pages.remove(pages)
    # PyTorch's next kernel would report this error. The failure of an allocation of its own takes
    # it away
    with contextlib.suppress(RuntimeError):
        torch.empty(2**62, dtype=torch.uint8, pin_memory=True)
    return None


def host_memory_left(root: Path = Path("/")) -> int:
    """Bytes of the host's memory that are free; in a container, or under a limit of systemd or
    SLURM, those up to the limit."""
    proc, limits = root / "proc", [sys.maxsize]
    with contextlib.suppress(OSError, KeyError, ValueError):  # not Linux
        fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        limits.append(1024 * int(fields["MemAvailable"].split()[0]))
    groups = [("", "/")]
    with contextlib.suppress(OSError, ValueError):
        groups = [
            (kinds, path)
            for _, kinds, path in (line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines())
        ]
    for kinds, path in groups:
        if kinds and "memory" not in kinds.split(","):
            continue
        top = root / "sys" / "fs" / "cgroup" / ("memory" if kinds else "")
        # every group above it has a limit of its own, up to the top, which may be the container's
        own = top / path.lstrip("/")
        limits += (
            _left_in(folder, *(_GROUP_V1 if kinds else _GROUP))
            for folder in (own, *own.parents)
            if folder.is_relative_to(top)
        )
    return min(limits)


# files of a control group's limit and use, and what its memory.stat calls the pages that the system
# takes back first
_GROUP, _GROUP_V1 = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _left_in(group: Path, limit: str, used: str, cached: str) -> int:
    try:
        left = int((group / limit).read_text()) - int((group / used).read_text())
    except (OSError, ValueError):  # no such group, or no limit: the word "max"
        return sys.maxsize
    with contextlib.suppress(OSError, ValueError):
        left += next(
            (
                int(line.split()[1])
                for line in (group / "memory.stat").read_text().splitlines()
                if line.startswith(f"{cached} ")
            ),
            0,
        )
    return left


def pieces(size: int) -> list[int]:
    """The sizes of the blocks for ``size`` bytes."""
    return [1 << max(min(BLOCK, size - start) - 1, LEAST - 1).bit_length() for start in range(0, size, BLOCK)]


class Lane:
    """The copies between one device and the host: a stream, on which they run in order, and the
    pinned blocks, which are used again and again.

    A block may be taken again while a copy of it is still to run: the next one runs after that, on
    the same stream.
    """

    def __init__(self, device: torch.device):
        self.device, self.api = device, torch.get_device_module(device)
        self.side = self.api.Stream(device)
        self.free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def now(self) -> Any:
        """The stream on which this thread computes."""
        return self.api.current_stream(self.device)

    def take(self, size: int) -> list[Tensor] | None:
        """Blocks for ``size`` bytes, or None if the host has no room for them."""
        blocks: list[Tensor] = []
        for wide in pieces(size):
            block = self.free[wide].pop() if self.free[wide] else self._pin(wide)
            if block is None:
                self.give(blocks)
                return None
            blocks.append(block)
        return blocks

    def _pin(self, size: int) -> Tensor | None:
        left = host_memory_left()
        if left - size < RESERVE:
            _warn(
                f"the host has {max(left, 0) / 1e9:.1f} GB of memory left, so the activations that do not fit stay "
                "on the GPU"
            )
            return None
        try:
            return torch.empty(size, dtype=torch.uint8) if self.device.type == "cpu" else _pinned(size, self.device)
        except (RuntimeError, OSError) as error:  # the system limits how much may be pinned
            _warn(
                f"no more memory can be pinned ({str(error).splitlines()[0]}), so the activations that do not fit "
                "stay on the GPU"
            )
            return None

    def give(self, blocks: list[Tensor]) -> None:
        for block in blocks:
            self.free[block.numel()].append(block)

    def out(self, data: Tensor, blocks: list[Tensor]) -> Any:
        """Copy ``data`` to the blocks, after everything that computes now; returns the event
        after it."""
        return self._copy((block[: len(part)], part) for block, part in zip(blocks, data.split(BLOCK)))

    def back(self, blocks: list[Tensor], data: Tensor) -> Any:
        """Copy the blocks to ``data``, whose memory may still be in use by what computes now;
        returns the event after it."""
        return self._copy((part, block[: len(part)]) for block, part in zip(blocks, data.split(BLOCK)))

    def _copy(self, pairs: Iterator[tuple[Tensor, Tensor]]) -> Any:
        self.side.wait_stream(self.now())
        with self.api.stream(self.side):
            for there, here in pairs:
                there.copy_(here, non_blocking=True)
            return self.side.record_event()


_lane = functools.cache(Lane)


class _Moved:
    """A storage of ``size`` bytes that was copied to the host. ``here``: its bytes on the device,
    while they are there; ``event``: after their last copy.

    ``saved``: the tensor that was saved, while its own storage is here. ``users``: how often it was
    saved, ``left``: how often it will be read until the device's memory is freed. Only that depends
    on the counts: who reads more often gets another copy.
    """

    def __init__(self, run: _OffloadedRun, lane: Lane, t: Tensor, blocks: list[Tensor]):
        storage = t.untyped_storage()
        self.run, self.lane, self.blocks, self.size, self.version = run, lane, blocks, storage.nbytes(), t._version
        # while it is held, no other storage gets this address, by which this one is found
        self.source = StorageWeakRef(storage)
        self.saved: Tensor | None = t.detach()
        self.here: Tensor | None = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
        self.stream, self.event = lane.now(), lane.out(self.here, blocks)
        self.changed: RuntimeError | None = None
        self.users = self.left = 0
        self.index, self.task = len(run.order), -1  # place in the order of saving; the backward pass that read it last

    def fetch(self) -> None:
        """Start the copy back, unless the bytes are here."""
        if self.here is None:
            self.here = torch.empty(self.size, dtype=torch.uint8, device=self.lane.device)
            self.stream, self.event = self.lane.now(), self.lane.back(self.blocks, self.here)

    def read(self) -> Tensor:
        """The bytes, for one of the readers."""
        self.intact()
        if self.changed is not None:
            raise self.changed
        self.fetch()
        self.run.fetch_ahead(self)
        assert self.here is not None
        data, now = self.here, self.lane.now()
        if self.saved is None:
            now.wait_event(self.event)
        if now != self.stream and self.lane.device.type != "cpu":
            data.record_stream(now)
        self.task, self.left = _private.backward_id(), self.left - 1
        if self.left <= 0:
            self.left = self.users
            self.let_go()
        return data

    def let_go(self) -> None:
        """Free the device's memory. What computes there next waits for a copy that is late."""
        if self.here is not None:
            self.intact()
            self.stream.wait_event(self.event)
            self.here = self.saved = self.event = None

    def intact(self) -> bool:
        """Whether the saved tensor was not changed in place, as far as it is here: the copy may
        have part of a change."""
        if self.saved is not None and self.saved._version != self.version:
            self.changed = modified(self.saved, self.version)
        return self.changed is None

    def __del__(self) -> None:
        self.let_go()
        self.lane.give(self.blocks)


class _View(NamedTuple):
    """What the graph holds in the place of a saved tensor."""

    moved: _Moved
    dtype: torch.dtype
    layout: tuple[Any, torch.Size, tuple[int, ...]]  # offset, sizes and strides in the storage


class _OffloadedRun:
    """One offloaded forward. ``order``: what was copied, in the order of saving."""

    def __init__(self, module: nn.Module):
        self.owned = {
            t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers()) if isinstance(t, PLAIN)
        }
        self.order: list[weakref.ref[_Moved]] = []
        self.by_storage: dict[int, weakref.ref[_Moved]] = {}
        self.leaving: deque[_Moved] = deque()  # what is still on the device, the newest last
        self.lock = threading.Lock()  # each device has a thread of its own in the backward

    @torch._disable_dynamo  # layers that are compiled save tensors, too
    def pack(self, t: Tensor) -> Any:
        moved = self._moved(t) if self._worth(t) else None
        if moved is None:
            return as_it_is(t)
        moved.users, moved.left = moved.users + 1, moved.left + 1
        return _View(moved, t.dtype, (t.storage_offset(), t.size(), t.stride()))

    def _worth(self, t: Tensor) -> bool:
        if (
            type(t) not in PLAIN
            or isinstance(t, nn.Parameter)
            or t.device.type in STAYS
            or t.layout is not torch.strided
            or t.nbytes < LEAST
            or t.is_conj()
            or t.is_neg()
        ):
            return False
        storage = t.untyped_storage()
        return storage.nbytes() <= 4 * t.nbytes and storage._cdata not in self.owned and not _of_parameter(t)

    def _moved(self, t: Tensor) -> _Moved | None:
        storage = t.untyped_storage()
        there = self.by_storage.get(storage._cdata)
        moved = None if there is None else there()
        if moved is not None and moved.version == t._version:
            return moved
        lane = _lane(t.device)
        blocks = lane.take(storage.nbytes())
        if blocks is None:
            return None
        moved = _Moved(self, lane, t, blocks)
        self.by_storage[storage._cdata] = weakref.ref(moved)
        self.order.append(self.by_storage[storage._cdata])
        self.leaving.append(moved)
        # the newest stays, which the backward reads first. Whether copies are done is not asked:
        # the host is far ahead of them, and the device waits
        while len(self.leaving) > 1 and sum(each.size for each in self.leaving) > LATE:
            self.leaving.popleft().let_go()
        return moved

    def end(self) -> None:
        self.leaving.clear()
        self.by_storage.clear()

    def fetch_ahead(self, read: _Moved) -> None:
        """Start the copies back of what this backward pass reads after ``read``."""
        task, size = _private.backward_id(), 0
        for i in range(read.index - 1, -1, -1):
            moved = self.order[i]()
            if moved is not None and moved.task != task:
                moved.fetch()
                size += moved.size
                if size >= AHEAD:
                    return


def _of_parameter(t: Tensor) -> bool:
    """Whether ``t`` is a view of a parameter, or a cast of one, as autocast makes them for
    linear layers."""
    if t._is_view() and isinstance(t._base, nn.Parameter):
        return True
    node = t.grad_fn
    while type(node).__name__ in VIEWS:
        node = node.next_functions[0][0]  # type: ignore[union-attr]  # None is in no set of names
    cast = node.next_functions[0][0] if node is not None and type(node).__name__ == "ToCopyBackward0" else None
    return isinstance(getattr(cast, "variable", None), nn.Parameter)


def as_it_is(t: Tensor) -> tuple[Tensor, int]:
    """What the graph holds of a tensor that stays where it is. A leaf is held itself, because
    its owner may change its data meanwhile (ZeRO)."""
    # detached: it may be the output of the node that saves it
    return t if t.grad_fn is None else t.detach(), t._version


def held(saved: Any) -> Tensor | None:
    """The tensor in what the graph holds; None if there is none, or if it was copied to the
    host."""
    return None if saved is None or type(saved) is _View else saved[0]


def intact(saved: Any) -> bool:
    """Whether the saved tensor was not changed in place."""
    if type(saved) is _View:
        return saved.moved.intact()
    t, version = saved
    return t._version == version


@torch._disable_dynamo
def unpack(saved: Any) -> Tensor:
    """Undo ``pack`` or ``as_it_is``."""
    if type(saved) is not _View:
        t, version = saved
        if t._version != version:
            raise modified(t, version)
        return t
    moved = saved.moved
    with moved.run.lock:
        data = moved.read()
    return torch.empty(0, dtype=saved.dtype, device=data.device).set_(data.untyped_storage(), *saved.layout)


def offloaded(forward: Callable) -> Callable:
    """Wrap the ``forward`` of a module: large tensors that are saved for the backward pass wait
    in the host's memory. Gradients are bit-identical."""

    compiled = torch.compiler.assume_constant_result(
        lambda: _warn(f"{ASIDE} torch.compile, which chooses what it keeps: compile the layers, not the model")
    )

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            compiled()
            return forward(self, *args, **kwargs)
        if not torch.is_grad_enabled() or _private.backward_node() is not None:
            return forward(self, *args, **kwargs)
        if (why := _in_the_way()) is not None:
            if why:
                _warn(f"{ASIDE} {why}")
            return forward(self, *args, **kwargs)
        run = _OffloadedRun(self)
        with saved_tensors_hooks(run.pack, unpack):
            try:
                return forward(self, *args, **kwargs)
            finally:
                run.end()

    return wrapper


ASIDE = "it steps aside for"


def _in_the_way() -> str | None:
    """What forbids hooks, or has its own: None if nothing, and "" if it is of this package."""
    if (top := top_hooks()) is not None:
        owner = getattr(top[1], "__module__", "other code")
        return "" if owner.startswith("liger_kernel.") else f"the hooks for saved tensors of {owner}"
    if not hooks_allowed():
        return "torch.func"
    return (
        "a CUDA graph that is recorded"
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        else None
    )
