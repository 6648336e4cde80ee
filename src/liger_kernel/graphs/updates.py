"""Steps of an optimizer that replay: one CUDA graph for each set of places where gradients lie.

Recorded micro-steps leave their gradients where they did before, and steps that allocate alike get the
same memory. The graph reads what is there. The learning rates, and what a GradScaler has found, are
copied to fixed places; all else that parameter groups say is a part of the recording.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel import _private
from liger_kernel.graphs.recorder import CudaGraphs, Recordings, recorder_of, uncollected
from liger_kernel.graphs.snapshot import is_plain

TRIED, PAYS = 4, 8  # so many recordings are made at once; another one for so many replays of each
PLAIN = {Tensor, nn.Parameter}
SCALER = ("grad_scale", "found_inf")  # what a GradScaler tells an optimizer

Numbers = list[tuple[Any, Any, Any]]  # a key, the dictionary of the optimizer that has the number, its name there


def counts_on_gpu(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it counts its steps on the GPU, and reads learning rates there."""
    return all(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


class Updates:
    """The recorded steps of ``optimizer``. ``before`` is called and recorded before each of them, as to
    clip the gradients, and a step returns what it returned, a tensor."""

    def __init__(self, optimizer: torch.optim.Optimizer, before: Callable[[], Tensor] | None = None):
        # weak, as schedulers hold it: otherwise it and its moments would stay until Python looks for cycles
        self.optimizer: Any = weakref.proxy(optimizer)
        step, of = optimizer.step, weakref.ref(optimizer)
        own: Any = getattr(step, "__func__", None)  # a scheduler's function knows its optimizer
        self._step: Any = step if own is None else lambda *closure: own(of(), *closure)
        self._before = before
        self.replays, self.reasons = 0, Counter[str]()
        self.forget()

    def forget(self) -> None:
        self.steps = Recordings()
        self._recorder: CudaGraphs | None = None
        self._refused, self._made, self._earlier = "", 0, self.replays
        # by the number of a group, or the name of an attribute: what is there, and its last value
        self._places: dict[Any, tuple[Tensor, Any]] = {}

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        if why := self._unfit(closure):
            self.reasons[why] += 1
            return self._run(closure)
        numbers = self._numbers()
        self._tell(numbers)
        key = self._key(numbers)
        if key is None or (found := self.steps.used(key) or self._recorded(key, numbers)) is None:
            with self._fixed(numbers):  # the learning rate is rounded alike in every step
                return self._run()
        replay, out = found
        replay()
        self.replays += 1
        # what others keep of weights is out of date, as casts to FP8
        torch.autograd.graph.increment_version([p for p in self._params() if p.grad is not None])
        return None if out[0] is None else out[0].clone()

    def _params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _run(self, closure: Any = None) -> Any:
        if self._before is None:
            return self._step(closure)
        out = self._before()
        self._step()
        return out

    def _unfit(self, closure: Any) -> str:
        """Why a step runs as it was."""
        if closure is not None:
            return "step has a closure"
        if _private.observes_steps(self.optimizer):
            return "hooks see its steps"
        if not counts_on_gpu(self.optimizer):
            return "it is neither fused nor capturable, as a state says that was loaded"
        if self._recorder is None and not self._refused:
            device, *others = {p.device if type(p) in PLAIN else None for p in self._params()} or {None}
            self._recorder = None if others or device is None else recorder_of(device)
            self._refused = "" if self._recorder else "CUDA graphs need all of its tensors whole on one GPU"
        return self._refused

    def _numbers(self) -> Numbers:
        """What is read at fixed places."""
        own = vars(self.optimizer)
        told = [] if self._before else [name for name in SCALER if own.get(name) is not None]
        return [
            *((i, group, "lr") for i, group in enumerate(self.optimizer.param_groups)),
            *((n, own, n) for n in told),
        ]

    def _tell(self, numbers: Numbers) -> None:
        for key, owner, name in numbers:
            value, (place, last) = owner[name], self._places.get(key, (None, None))
            if place is None:
                place = torch.empty((), dtype=torch.float32, device=self._params()[0].device)
            if isinstance(value, Tensor):
                place.copy_(value.reshape(()), non_blocking=True)
            elif value != last:
                place.fill_(value)
            self._places[key] = place, None if isinstance(value, Tensor) else value

    @contextlib.contextmanager
    def _fixed(self, numbers: Numbers, recording: bool = False) -> Iterator[None]:
        """Meanwhile the optimizer reads ``numbers`` at their places."""
        changed: list[Any] = [(owner, name, owner[name], self._places[key][0]) for key, owner, name in numbers]
        if recording:  # a fused step computes the same
            changed += [(group, "capturable", group["capturable"], True) for group in self.optimizer.param_groups]
        try:
            for owner, name, _, value in changed:
                owner[name] = value
            yield
        finally:
            for owner, name, value, _ in changed:
                owner[name] = value

    def _key(self, numbers: Numbers) -> Any:
        """What a recording depends on. None if there is none, as before the first step, which makes the
        moments."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        params = self._params()
        updated = [p for p in params if p.grad is not None]
        states = [optimizer.state.get(p) or {} for p in updated]
        if not updated or not all(states):
            return None
        tensors = [*params, *[p.grad for p in updated], *[t for state in states for t in state.values()]]
        if not {type(t) for t in tensors} <= PLAIN or len({t.device for t in tensors}) > 1:
            self._refused = "its tensors are sharded, or on several devices"
        said = [[len(g["params"]), *[g[name] for name in optimizer.defaults if name != "lr"]] for g in groups]
        if not all(map(is_plain, said)):
            self._refused = "a number of its groups, beside the learning rate, is a tensor"
        if self._refused:
            return None
        places = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors]
        return repr(said), tuple([n for n, *_ in numbers]), tuple([p.grad is None for p in params]), tuple(places)

    def _recorded(self, key: Any, numbers: Numbers) -> Any:
        """A recording, at the second time that all lies where it does; None if the step has to run."""
        new = self.steps.first(key)
        replays = self.replays - self._earlier
        seldom = len(self.steps.asked) > TRIED if new else self._made >= TRIED and replays < PAYS * self._made
        if seldom:
            self.reasons["its gradients seldom lie where they did, or numbers of its groups change"] += 1
        if new or seldom:
            return None
        assert self._recorder is not None
        out: list[Any] = []

        def run() -> None:
            with self._fixed(numbers, recording=True):
                out[:] = [self._run()]

        try:
            with uncollected():
                replay = self._recorder.record(run)
        except Exception as error:
            why = str(error).partition("\n")[0][:200]
            self._refused = f"it cannot be recorded: {type(error).__name__}: {why}"
            self.reasons[self._refused] += 1
            return None
        self._made += 1
        self.steps.add(key, (replay, out))
        return self.steps[key]

    def __str__(self) -> str:
        lines = [f"graphs: {len(self.steps)} optimizer steps recorded, {self.replays} replayed"]
        return "\n".join(lines + [f"  {n} as it was: {why}" for why, n in self.reasons.most_common()])
