"""The one place that records CUDA graphs, and what does the same by calling functions again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel import _private


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


_failed: list[torch.cuda.CUDAGraph] = []  # the allocator may ask them for ever


class CudaGraphs:
    """Records functions as CUDA graphs that share memory: what one needs while it runs is free for
    the next. So a recorded forward and its backward must run before another forward."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.renew()

    def renew(self) -> None:
        """Memory of its own for what follows: that of graphs that are gone cannot be shared."""
        self.pool = torch.cuda.graph_pool_handle()

    def host_draws(self) -> list[int]:
        return torch.get_rng_state().tolist()

    def rehearse(self, run: Callable[[], None]) -> bool:
        """Run it as usual, so that kernels are compiled and libraries loaded: a recording cannot do
        that. Return whether it draws random numbers, which are given back."""
        before, current = torch.cuda.get_rng_state(self.device), torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            run()
        current.wait_stream(self.stream)
        draws = not torch.equal(before, torch.cuda.get_rng_state(self.device))
        torch.cuda.set_rng_state(before, self.device)
        return draws

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record ``run``, and return what replays it."""
        graph = torch.cuda.CUDAGraph()
        # threads of data loaders may allocate pinned memory meanwhile
        recording = torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local")
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
            _private.end_of_allocating(self.device.index or 0, self.pool)
        self.stream = torch.cuda.Stream(self.device)
        self.renew()
        with contextlib.suppress(Exception), torch.cuda.device(self.device):
            nothing = torch.zeros(1, device=self.device)
            other, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
            with torch.cuda.graph(other, stream=stream, capture_error_mode="thread_local"):
                nothing.zero_()


class _Bytes:
    def __init__(self, storage: torch.UntypedStorage):
        where = dict(shape=(storage.nbytes(),), typestr="|u1", data=(storage.data_ptr(), False), version=2)
        self.__cuda_array_interface__ = where


def unowned(t: Tensor) -> Tensor:
    """``t``, of which nobody knows that it is there: what is recorded later may use its memory."""
    if not t.numel():
        return t
    memory = torch.as_tensor(_Bytes(t.untyped_storage()), device=t.device).view(t.dtype)
    return memory.as_strided(t.shape, t.stride(), t.storage_offset())


class Repeated:
    """In place of ``CudaGraphs`` where there is no GPU: a replay calls the function again."""

    def host_draws(self) -> list[int]:
        return []  # the model is on the host

    def rehearse(self, run: Callable[[], None]) -> bool:
        before = torch.get_rng_state()
        run()
        draws = not torch.equal(before, torch.get_rng_state())
        torch.set_rng_state(before)
        return draws

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        before = torch.get_rng_state()
        run()
        torch.set_rng_state(before)  # recording computes nothing
        return run


def recorder_of(device: torch.device) -> CudaGraphs | Repeated | None:
    return CudaGraphs(device) if device.type == "cuda" else None
