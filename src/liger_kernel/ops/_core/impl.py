"""The registry of LinkedIn's package for other sets of operators. We have none, and a registered
set runs only if its owner selects it.

``LIGER_KERNEL_IMPL=torch`` runs everything in plain PyTorch, which shows whether a kernel causes a
problem; ``triton`` is the default.
"""

from __future__ import annotations

from dataclasses import dataclass

LIGER_KERNEL_IMPL_ENV = "LIGER_KERNEL_IMPL"
OURS = ("triton", "nvidia-triton", "rocm-triton", "torch")


@dataclass(frozen=True)
class ImplInfo:
    """A set of operators: the kinds of devices that it supports, those on which it is the
    default, and the module with its Functions."""

    name: str
    devices: tuple[str, ...]
    default_devices: tuple[str, ...] = ()
    module_path: str = ""

    def __post_init__(self) -> None:
        if not self.devices or not self.module_path or set(self.default_devices) - set(self.devices):
            raise ValueError(
                f"ImplInfo: {self.name} must have devices, default_devices among them, and a module_path, got {self}"
            )


class ImplNotAvailableError(RuntimeError):
    """An implementation that was requested by name cannot run here."""


def only_ours(op: str, impl: str | None, mode: str | None) -> None:
    """Raise ``ImplNotAvailableError`` if a call requests another implementation than our
    kernels."""
    if impl not in (None, *OURS[:-1]) or mode is not None:
        raise ImplNotAvailableError(
            f"{op}: impl must be one of {(*OURS[:-1], None)} and mode None, got {impl!r} and {mode!r}"
        )


IMPL_REGISTRY: dict[str, ImplInfo] = {}


def register_impl(info: ImplInfo) -> None:
    """Register a set of operators under its name."""
    IMPL_REGISTRY[info.name] = info


def select_impl(device: str, explicit: str | None = None) -> ImplInfo | None:
    """The set named ``explicit``, or the default on ``device``; None means ours. Raises
    ``RuntimeError`` for an unknown name, or one that lacks the device."""
    if explicit in OURS:
        return None
    if explicit:
        if explicit not in IMPL_REGISTRY:
            raise RuntimeError(f"{LIGER_KERNEL_IMPL_ENV} must be one of {(*OURS, *IMPL_REGISTRY)}, got {explicit!r}")
        if device not in IMPL_REGISTRY[explicit].devices:
            raise RuntimeError(
                f"{LIGER_KERNEL_IMPL_ENV}: {explicit} is for {IMPL_REGISTRY[explicit].devices}, got {device!r}"
            )
        return IMPL_REGISTRY[explicit]
    return next((info for info in IMPL_REGISTRY.values() if device in info.default_devices), None)
