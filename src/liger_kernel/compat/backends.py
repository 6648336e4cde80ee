"""Which implementation of an operator runs: "nvidia-triton" (also "triton"), our kernels, or
"torch", plain PyTorch.

On AMD's GPUs the first is called "rocm-triton". A name is searched in this order: the argument
``impl`` (or ``backend``) of the call, the environment's ``LIGER_KERNEL_IMPL_<OPERATOR>``, its
``LIGER_KERNEL_IMPL``, ``set_impl``. Without a name, the operator decides as usual: kernels for
inputs that they support, PyTorch for others. A named implementation that cannot run raises
``ImplNotAvailableError``; no other one runs instead.

``register_impl`` adds implementations of your own. One with a lower ``preference_rank`` than ours
(50) runs if no implementation is named.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core import operator
from liger_kernel.ops._core.impl import ImplNotAvailableError

TRITON = f"{'rocm' if torch.version.hip else 'nvidia'}-triton"
TORCH = "torch"
RANKS = {TRITON: 50, TORCH: 1000}
OURS = "liger_kernel.compat.functional"  # registers our operators; imported at the first request
_ALIASES = {"triton": TRITON, "cutile": "nvidia-cutile", "cutedsl": "nvidia-cutedsl"}


class NoImplAvailableError(RuntimeError):
    """There is no operator with this name, or no implementation of it can run here."""


class LigerImplFallbackWarning(UserWarning):
    """An implementation has passed a call on to another one."""


BackendNotAvailableError, NoBackendAvailableError, LigerBackendFallbackWarning = (
    ImplNotAvailableError,
    NoImplAvailableError,
    LigerImplFallbackWarning,
)


@dataclass(frozen=True)
class Capability:
    """The needs of an implementation: a compute capability from ``min_cc`` to ``max_cc``,
    importable modules, a GPU, and a true ``predicate``."""

    min_cc: tuple[int, int] | None = None
    max_cc: tuple[int, int] | None = None
    modules: Sequence[str] = field(default_factory=list)
    requires_cuda: bool = False
    predicate: Callable[[], bool] | None = None

    def is_satisfied(self, device: Any = None) -> bool:
        return self.reason_if_unsatisfied(device) is None

    def reason_if_unsatisfied(self, device: Any = None) -> str | None:
        """The first need that ``device`` (default: the current GPU) does not meet; None if it
        meets all."""
        return next(self._lacks(device), None)

    def _lacks(self, device: Any) -> Iterator[str]:
        for name in self.modules:
            try:
                importlib.import_module(name)
            except Exception as error:  # a broken installation may raise anything
                yield f"module {name} does not import: {error!r}"
        if self.requires_cuda or self.min_cc or self.max_cc:
            if not torch.cuda.is_available():
                yield "there is no CUDA or ROCm GPU"
            capability = torch.cuda.get_device_capability(device)
            sm = lambda cc: f"sm_{cc[0]}{cc[1]}"
            if self.min_cc and capability < self.min_cc:
                yield f"the GPU must be at least {sm(self.min_cc)}, got {sm(capability)}"
            if self.max_cc and capability > self.max_cc:
                yield f"the GPU must be at most {sm(self.max_cc)}, got {sm(capability)}"
        try:
            holds = self.predicate is None or self.predicate()
        except Exception as error:
            yield f"its predicate raises {error!r}"
        else:
            if not holds:
                yield "its predicate does not hold"


PYTORCH_FALLBACK = Capability()


@dataclass(frozen=True)
class OpImpl:
    """An implementation of an operator: a function, or an autograd Function, that takes the
    arguments of LinkedIn's operator by position."""

    op_name: str
    impl_name: str
    capability: Capability = field(default_factory=Capability)
    forward: Callable[..., Any] | None = None
    autograd_function: type[torch.autograd.Function] | None = None
    modes: tuple[str, ...] = ()
    default_mode: str | None = None
    preference_rank: int = 100
    tolerances: Mapping[Any, Mapping[str, float]] = field(default_factory=dict)
    notes: str = ""

    @property
    def backend(self) -> str:
        return self.impl_name

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return its result. ``mode`` is one of ``modes`` (ours have none) or None. A Function
        takes no other keyword."""
        mode = kwargs.get("mode")
        if mode is not None and mode not in self.modes:
            raise ImplNotAvailableError(
                f"{self.op_name}: mode of {self.impl_name} must be one of {(*self.modes, None)}, got {mode!r}"
            )
        if mode is None or self.autograd_function is not None:
            kwargs.pop("mode", None)
        if self.autograd_function is not None:
            return self.autograd_function.apply(*args, **kwargs)
        if self.forward is None:
            raise RuntimeError(f"{self.op_name}: {self.impl_name} has neither forward nor autograd_function")
        return self.forward(*args, **kwargs)


_REGISTRY: dict[str, dict[str, OpImpl]] = {}
_LOCATIONS: dict[str, list[str]] = {}  # operator -> modules that are not imported yet
_FAILURES: dict[str, tuple[type, str]] = {}


def register_impl(
    op_name: str,
    *,
    impl_name: str | None = None,
    capability: Capability | None = None,
    modes: Sequence[str] = (),
    default_mode: str | None = None,
    preference_rank: int = 100,
    tolerances: Mapping[Any, Mapping[str, float]] | None = None,
    notes: str = "",
    backend: str | None = None,
) -> Callable[[Any], Any]:
    """Return a decorator for a function or an autograd Function that implements ``op_name``;
    ``backend`` is another name for ``impl_name``."""
    name = impl_name or backend
    if name is None:
        raise TypeError("register_impl: impl_name must be a name, got None")

    def register(it: Any) -> Any:
        if not callable(it):
            raise TypeError(
                f"register_impl: what is registered must be a function or a Function, got {type(it).__name__}"
            )
        kind = "autograd_function" if isinstance(it, type) else "forward"
        about: dict[str, Any] = dict(
            default_mode=default_mode, preference_rank=preference_rank, tolerances=tolerances or {}, notes=notes
        )
        _REGISTRY.setdefault(op_name, {})[name] = OpImpl(
            op_name, name, capability or Capability(), modes=tuple(modes), **about, **{kind: it}
        )
        return it

    return register


def register_ours(op_name: str, op: operator.Op, published: Callable[..., Any]) -> None:
    """Register both implementations of ``op_name``: ``published(run, *args)`` calls ``run``,
    which is our operator or its reference."""
    for name, run, capability in (
        (TRITON, op.fn, Capability(modules=["triton"], predicate=_have_kernels)),
        (TORCH, op.reference, PYTORCH_FALLBACK),
    ):
        register_impl(op_name, impl_name=name, capability=capability, preference_rank=RANKS[name])(
            functools.partial(published, run)
        )


def _have_kernels() -> bool:
    return bool(operator._KERNEL_DEVICES) and (operator.INTERPRET or torch.cuda.is_available())


def declare_op_locations(op_name: str, module_paths: Sequence[str]) -> None:
    """Declare modules that register implementations of ``op_name`` when they are imported, on
    the first call of the operator."""
    _LOCATIONS[op_name] = list(module_paths)


def get_discovery_failures() -> dict[str, tuple[type, str]]:
    """The modules of ``declare_op_locations`` that could not be imported, with the type and text
    of the error."""
    return dict(_FAILURES)


def _implementations(op_name: str) -> dict[str, OpImpl]:
    if op_name not in _REGISTRY:
        importlib.import_module(OURS)
    for path in _LOCATIONS.pop(op_name, ()):
        try:
            importlib.import_module(path)
        except Exception as error:
            _FAILURES[path] = type(error), str(error)
            warnings.warn(f"{op_name}: {path} does not import: {error!r}", stacklevel=3)
    return _REGISTRY.get(op_name, {})


def get_registered(op_name: str, backend: str) -> OpImpl | None:
    """The implementation with this name, whether or not it can run."""
    return _implementations(op_name).get(backend)


def list_registered(op_name: str) -> tuple[OpImpl, ...]:
    """All implementations of ``op_name``."""
    return tuple(_implementations(op_name).values())


def all_registered_ops() -> tuple[str, ...]:
    """Names of all operators that ``dispatch`` knows."""
    importlib.import_module(OURS)
    return tuple(sorted(_REGISTRY))


def all_impls(op_name: str) -> list[str]:
    """Names of all implementations of ``op_name``."""
    return sorted(_implementations(op_name))


def available_impls(op_name: str, device: Any = None) -> list[str]:
    """Names of the implementations of ``op_name`` that can run on ``device`` (default: the
    current one), the preferred one first."""
    on_cpu = device is not None and torch.device(device).type == "cpu" and not operator.INTERPRET
    found = sorted(list_registered(op_name), key=lambda impl: (impl.preference_rank, impl.impl_name))
    return [i.impl_name for i in found if i.capability.is_satisfied(device) and not (on_cpu and i.impl_name == TRITON)]


def clear_available_cache() -> None:
    """Does nothing: there is no cache, because each call checks again which implementations can
    run."""


_chosen: str | None = None


def set_impl(name: str | None) -> None:
    """Choose the implementation for the whole process, for calls without a name in the call or
    the environment; None: the operator decides."""
    global _chosen
    _chosen = name and _ALIASES.get(name, name)


def get_impl() -> str | None:
    """The name that ``set_impl`` has set, or None."""
    return _chosen


def _named(op_name: str, requested: str | None) -> str | None:
    """The name of the requested implementation: from the call, the environment or ``set_impl``;
    None without one."""
    variables = [
        f"LIGER_KERNEL_{word}{suffix}" for suffix in (f"_{op_name.upper()}", "") for word in ("IMPL", "BACKEND")
    ]
    name = requested or next((value for v in variables if (value := os.environ.get(v))), None) or _chosen
    return name and _ALIASES.get(name, name)


def resolve_impl(op_name: str, requested: str | None = None, device: Any = None) -> OpImpl:
    """Return the implementation that a call of ``op_name`` would run.

    Raises ``ImplNotAvailableError`` if it is named and cannot run, ``NoImplAvailableError`` if
    there is no such operator.
    """
    found = _implementations(op_name)
    if not found:
        raise NoImplAvailableError(f"dispatch: op_name must be one of {all_registered_ops()}, got {op_name!r}")
    name = _named(op_name, requested)
    if name is None:
        if not (available := available_impls(op_name, device)):
            raise NoImplAvailableError(f"{op_name}: none of {all_impls(op_name)} can run here")
        return found[available[0]]
    if name not in found:
        raise ImplNotAvailableError(f"{op_name}: impl must be one of {all_impls(op_name)}, got {name!r}")
    if reason := found[name].capability.reason_if_unsatisfied(device):
        raise ImplNotAvailableError(f"{op_name}: {name} cannot run here, {reason}")
    return found[name]


def dispatch(op_name: str, *args: Any, impl: str | None = None, backend: str | None = None, **kwargs: Any) -> Any:
    """Call ``op_name`` with positional arguments. ``impl`` (or ``backend``), the environment or
    ``set_impl`` may name the implementation."""
    named, found = _named(op_name, impl or backend), _implementations(op_name)
    if (
        named is None and found.keys() == RANKS.keys()
    ):  # no choice: call our operator, which handles more cases without kernels than its reference
        return found[TRITON].call(*args, **kwargs)
    x = next((a for a in args if isinstance(a, Tensor)), None)
    chosen = resolve_impl(op_name, named, x.device if x is not None and x.is_cuda else None)
    if chosen.impl_name == TRITON and named and x is not None and not operator.use_kernels(x):
        raise ImplNotAvailableError(
            f"{op_name}: {TRITON} needs a GPU and fp32, fp16 or bf16, got {x.dtype} on {x.device}"
        )
    if chosen.impl_name == TORCH and not named:
        chosen = found[TRITON]
    return chosen.call(*args, **kwargs)


def emit_fallback_warning(op_name: str, requested: str, actual: str, reason: str) -> None:
    """Warn once that ``requested`` passes ``op_name`` on to ``actual``; with
    ``LIGER_KERNEL_STRICT=1``, raise the warning as an error."""
    text = f"{op_name}: {requested} is left to {actual}: {reason}"
    if os.environ.get("LIGER_KERNEL_STRICT", "0") not in ("", "0", "false", "False"):
        raise ImplNotAvailableError(text)
    _say(text)


@functools.cache
def _say(text: str) -> None:
    warnings.warn(text, LigerImplFallbackWarning, stacklevel=4)


all_backends, available_backends, resolve_backend, set_backend, get_backend, register_op = (
    all_impls,
    available_impls,
    resolve_impl,
    set_impl,
    get_impl,
    register_impl,
)
