"""Import paths of LinkedIn's package.

A path in ``aliases`` gives the same module object as the module's own path, so a replacement at
one path has effect at the other. If such a module lacks a name, the name is looked up in
``liger_kernel.nn``, ``liger_kernel.ops`` and ``liger_kernel.compat``: LinkedIn's modules import
what they use by name, and users rely on that.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_COMPAT, _HERE = "liger_kernel.compat", "liger_kernel.transformers"
# where names are looked up that a module of ``aliases`` lacks
_REST = "liger_kernel.nn", "liger_kernel.ops", f"{_COMPAT}.host", f"{_COMPAT}.helpers"


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    # for paths that have no file: importing this package needs neither
    import json
    from pathlib import Path

    return json.loads(Path(__file__).with_suffix(".json").read_text())


def aliases() -> dict[str, str]:
    """LinkedIn's path -> module."""
    return _tables()["aliases"]


def forwards() -> dict[str, dict[str, str]]:
    """Module of ``transformers.model`` -> function to assign to a class or bind to a model -> the
    class of transformers for it."""
    return _tables()["forwards"]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module of ``aliases``, or creates one of ``forwards``, when it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        known = fullname.startswith("liger_kernel.") and (fullname in aliases() or fullname in forwards())
        return importlib.machinery.ModuleSpec(fullname, self) if known else None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in forwards():
            _add_forwards(module)
            return
        _put(module.__name__)
        alias(module.__name__)  # the module itself may have no folder in which Python finds those below


def alias(package: str) -> None:
    """Make the modules of ``aliases`` below ``package`` available. Names that the package already
    has do not change."""
    for path in aliases():
        if path.startswith(f"{package}."):
            _put(path)


def _put(path: str) -> None:
    """Make the module for ``path`` available under it, and in the module above: ``import a.b as
    c`` looks there."""
    module = importlib.import_module(aliases()[path])
    vars(module).setdefault("__getattr__", functools.partial(_look_up, module.__name__, _REST))
    sys.modules[path] = module
    above, _, name = path.rpartition(".")
    vars(importlib.import_module(above)).setdefault(name, module)


def add_published(package: str) -> None:
    """Give ``liger_kernel.ops``, which may not import what lies above it, the published functions
    over its operators, and the modules of LinkedIn's that have an operator's name: imported only
    later, they would take the operator's place."""
    for source in (f"{_COMPAT}.function_classes", f"{_COMPAT}.host"):
        published = vars(importlib.import_module(source)).items()
        endings = "Function", "_forward", "_backward"
        vars(sys.modules[package]).update((n, v) for n, v in published if n[0] != "_" and n.endswith(endings))
    alias(package)


def _add_forwards(module: ModuleType) -> None:
    import transformers

    with_fused_head = importlib.import_module(f"{_HERE}.patching.apply").stock_with_fused_head
    module.__doc__ = "The ``forward`` that patched models have, as a function to assign to a class or bind to a model."
    for name, cls in forwards()[module.__name__].items():
        if not hasattr(transformers, cls):
            raise ImportError(f"{module.__name__}: transformers {transformers.__version__} has no {cls}")
        vars(module)[name] = with_fused_head(getattr(transformers, cls))
    beside = f"{_HERE}.model.loss_utils", f"{_HERE}.model.output_classes"
    vars(module)["__getattr__"] = functools.partial(_look_up, module.__name__, beside)


def _look_up(module: str, sources: Sequence[str], name: str) -> Any:
    """Our function or class ``name`` in one of the modules ``sources``."""
    if not name.startswith("_"):
        for source in sources:
            home = importlib.import_module(source)
            own = vars(home).get("__getattr__")  # not if it is this function, which would never end
            found = vars(home).get(name) if isinstance(own, functools.partial) else getattr(home, name, None)
            if getattr(found, "__module__", "").startswith("liger_kernel."):
                return found
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def install() -> None:
    if not any(type(f).__name__ == _Finder.__name__ and type(f).__module__ == __name__ for f in sys.meta_path):
        sys.meta_path.append(_Finder())
