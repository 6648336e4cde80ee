"""The configuration by which Transformers builds a model with our layouts. Only for releases of
Transformers that have layouts: importing it raises ``ImportError`` with others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers.integrations.hub_kernels import register_kernel_replacements_and_fusions as _  # noqa: F401
from transformers.monkey_patching import get_patch_mapping, unregister_patch_mapping
from transformers.utils.kernel_config import KernelConfig, infer_device


class LigerKernelConfig(KernelConfig):  # type: ignore[misc]  # untyped
    """``names``: what a model has -> its layer in the folder ``path``, as ``layouts.classes_of``
    returns them."""

    def __init__(self, path: Path, names: dict[str, str]):
        super().__init__({name: f"{path}:{layer}" for name, layer in names.items()}, use_local_kernel=True)
        _list_nothing_that_is_missing()
        self.path, self.names = path, names

    def sanitize_kernel_mapping(self, model: Any) -> None:
        # Called as soon as the model is built. Transformers would build all models to come by our
        # layouts, too, also those for which nobody asked for them
        unregister_patch_mapping([name for name in self.names if name in get_patch_mapping()])

    def create_compatible_mapping(self, model: Any, compile: bool = False) -> None:
        from kernels import LocalLayerRepository, Mode

        # Stock's would hold only for the mode in which the model is now, evaluation; and for a CPU, or
        # for a local repository whose layouts it has just registered, it raises
        device = infer_device(model)
        self.kernel_mapping = {
            layer if name.startswith("^") else name: {
                device: {Mode.FALLBACK: LocalLayerRepository(self.path, layer_name=layer)}
            }
            for name, layer in self.names.items()
        }


def _list_nothing_that_is_missing() -> None:
    """Transformers lists the names of all its modules when it builds a model by layouts. In 5.17,
    some are other names of modules that need torchvision, and listing them raises without it."""
    for module in [m for name, m in sys.modules.items() if name.startswith("transformers.models.")]:
        try:
            dir(module)
        except ImportError:
            vars(module)["__dir__"] = lambda: []
