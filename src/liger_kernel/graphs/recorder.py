"""The one place that records CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from liger_kernel import _private


class Recordings(OrderedDict[Any, Any]):
    """What is recorded, by what it depends on, and what was asked for."""

    most = 48  # beyond, the one that was not used for the longest time goes

    def __init__(self) -> None:
        super().__init__()
        self.asked: OrderedDict[Any, None] = OrderedDict()

    def used(self, key: Any) -> Any:
        if key in self:
            self.move_to_end(key)
        return self.get(key)

    def add(self, key: Any, recording: Any) -> None:
        self[key] = recording
        if len(self) > self.most:
            self.popitem(last=False)

    def first(self, key: Any) -> bool:
        """Whether this is asked for now for the first time: what comes twice is recorded."""
        if key in self.asked:
            return False
        self.asked[key] = None
        if len(self.asked) > 4 * self.most:
            self.asked.popitem(last=False)
        return True


@contextlib.contextmanager
def other_leaves(model: nn.Module, params: list[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Meanwhile the model has other parameters, on the same memory: the node of autograd that adds up
    the gradients of a real one may be in somebody's graph, and then it belongs to another stream."""
    own = {id(p): nn.Parameter(p.detach()) if type(p) is nn.Parameter else p for p in params}
    for p in params:
        vars(own[id(p)]).update(vars(p))
    stores: list[dict[str, Any]] = [m._parameters for m in model.modules()]
    places = [(store, name, p) for store in stores for name, p in store.items() if id(p) in own]
    try:
        for store, name, p in places:
            store[name] = own[id(p)]
        yield [own[id(p)] for p in params]
    finally:
        for store, name, p in places:
            store[name] = p


class FilledNumbers(TorchFunctionMode):
    """Meanwhile ``torch.tensor`` of a number is filled on its device: a recording cannot copy it from the
    host, as Transformers' masks of some releases do."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = function is torch.tensor and args and kwargs.keys() <= {"dtype", "device"}
        if plain and isinstance(args[0], int | float):
            return torch.full((), args[0], **kwargs)
        return function(*args, **kwargs)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Meanwhile Python frees no cycles: models are some, and CUDA ends a recording in which the graph of a
    model that is gone is freed."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


class Clock:
    """Times a step that is not recorded: on the host until its last kernel is started, and on the GPU, which
    has nothing else to do."""

    def __init__(self, device: torch.device):
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        self._begin.record(torch.cuda.current_stream(device))
        self._started, self._host = time.perf_counter(), 0.0
        self._hook: RemovableHandle | None = None

    def stop_after(self, params: list[nn.Parameter]) -> None:
        """Stop when the gradients of ``params`` are there."""
        self._hook = torch.autograd.graph.register_multi_grad_hook(params, lambda grads: self._stop(), mode="all")

    def _stop(self) -> None:
        if not self._host:
            self._end.record()
            self._host = time.perf_counter() - self._started

    def times(self) -> tuple[float, float] | None:
        """Of host and GPU, in ms; None if it was not stopped. The host waits for the step's end."""
        if self._hook is not None:
            self._hook.remove()
        if not self._host:
            return None
        self._end.synchronize()
        return self._host * 1e3, self._begin.elapsed_time(self._end)


class _Pool:
    """Memory that recordings share, and that stays while there are none yet."""

    def __init__(self, device: torch.device):
        self.id, self.used = torch.cuda.graph_pool_handle(), False
        self._index, self._held = device.index or 0, False

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """What the current stream allocates is a part of it."""
        if _private.begin_allocating is None:
            yield
            return
        _private.begin_allocating(self._index, self.id)
        try:
            yield
        finally:
            _private.end_of_allocating(self._index, self.id)
            if self._held:  # once is enough
                _private.release_pool(self._index, self.id)
            self._held = self.used = True

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # as at the end of the process
            if self._held:
                _private.release_pool(self._index, self.id)


_failed: list[torch.cuda.CUDAGraph] = []  # the allocator may ask them for ever


class CudaGraphs:
    """Records functions as CUDA graphs that share memory: what one needs while it runs is free for
    the next. So a recorded forward and its backward must run before another forward."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._needs = 0  # bytes of what was last tried in memory of its own
        self.renew()

    def renew(self) -> None:
        """Memory of its own for what follows: that of graphs that are gone cannot be shared."""
        self.pool = _Pool(self.device)

    def free(self) -> None:
        """Give the memory of recordings that are gone back."""
        self.renew()
        torch.cuda.empty_cache()

    def host_draws(self) -> list[int]:
        return torch.get_rng_state().tolist()

    def clock(self) -> Clock:
        return Clock(self.device)

    def rehearse(self, run: Callable[[], None]) -> bool:
        """Run it as usual, so that kernels are compiled and libraries loaded: a recording cannot do
        that. Return whether it draws random numbers, which are given back. It runs in the memory of
        recordings, or there would be twice as much."""
        before, current = torch.cuda.get_rng_state(self.device), torch.cuda.current_stream(self.device)
        torch.cuda.empty_cache()  # of steps that ran before
        alone, reserved = not self.pool.used, torch.cuda.memory_reserved(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream), self.pool.allocating():
            run()
        current.wait_stream(self.stream)
        draws = not torch.equal(before, torch.cuda.get_rng_state(self.device))
        torch.cuda.set_rng_state(before, self.device)
        if alone and _private.begin_allocating is not None:
            self._needs = torch.cuda.memory_reserved(self.device) - reserved
            self.renew()
        return draws

    def _reserve(self) -> None:
        """Make the memory of the largest recording, which is the first one, a single block: pieces that
        fit into its tensors would not fit into those of smaller recordings."""
        torch.cuda.empty_cache()
        if not self._needs or "max_split_size" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            return  # such blocks are not divided
        out_of_memory = contextlib.suppress(torch.OutOfMemoryError)
        with out_of_memory, torch.cuda.stream(self.stream), self.pool.allocating():
            torch.empty(self._needs, dtype=torch.uint8, device=self.device)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record ``run``, and return what replays it."""
        if not self.pool.used:
            self._reserve()
        self.pool.used = True
        graph = torch.cuda.CUDAGraph()
        # threads of data loaders may allocate pinned memory meanwhile
        recording = torch.cuda.graph(graph, self.pool.id, self.stream, capture_error_mode="thread_local")
        try:
            with torch.cuda.device(self.device), recording:
                run()
        except Exception as error:
            self._mend(graph)
            # the end of a failed recording raises another error, which says less
            raise error.__context__ or error from None
        return graph.replay

    def _mend(self, graph: torch.cuda.CUDAGraph) -> None:
        """After a failed recording the allocator and the generator wait for its end. The one is told,
        the other learns it from a recording that does not fail."""
        _failed.append(graph)
        with contextlib.suppress(Exception):
            _private.end_of_allocating(self.device.index or 0, self.pool.id)
        self.stream = torch.cuda.Stream(self.device)
        self.renew()
        with contextlib.suppress(Exception), torch.cuda.device(self.device):
            nothing = torch.zeros(1, device=self.device)
            other, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
            with torch.cuda.graph(other, stream=stream, capture_error_mode="thread_local"):
                nothing.zero_()

    @staticmethod
    def unowned(t: Tensor, owner: Any) -> Tensor:
        """``t``, of which the allocator does not know that it is there: what is recorded later may use its
        memory, which is not given back while ``owner`` lives."""
        if not t.numel():
            return t
        memory = torch.as_tensor(_Bytes(t.untyped_storage(), owner), device=t.device).view(t.dtype)
        return memory.as_strided(t.shape, t.stride(), t.storage_offset())


class _Bytes:
    def __init__(self, storage: torch.UntypedStorage, owner: Any):
        self.owner = owner
        where = dict(shape=(storage.nbytes(),), typestr="|u1", data=(storage.data_ptr(), False), version=2)
        self.__cuda_array_interface__ = where


def recorder_of(device: torch.device) -> CudaGraphs | None:
    return CudaGraphs(device) if device.type == "cuda" else None
