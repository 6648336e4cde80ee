"""Layers and layouts for classes of Transformers that we replace, named by model type and class:
``llama__LlamaMLP`` is a ``forward``, as ``kernels`` requires, and ``llama__LlamaMLPLayout`` what
Transformers constructs in the place of ``LlamaMLP``."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from liger_kernel.transformers.patching.patches import original
from liger_kernel.transformers.patching.select import made, replacement
from liger_kernel.transformers.recognise.families import family, modeling, with_parts

LAYOUT = "Layout"
# the form of tables and pairs that LigerRotaryPosEmb rotates
ROTATED = "rope(none, halves, twice)"


def classes_of(model_type: str) -> dict[str, str]:
    """The classes that we replace in models of this type, each as a pattern that matches only
    its name, and our layers for them."""
    found: dict[str, dict[Any, str]] = {}
    rotated = False
    for part, row in with_parts([model_type]).items():
        for name in row.swapped:
            cls = getattr(modeling(part), name, None)
            if isinstance(cls, type):
                found.setdefault(f"^{name}$", {}).setdefault(cls, f"{part}__{name}")
        rotated |= row.swapped.get("apply_rotary_pos_emb") == ROTATED
    # Transformers replaces by name: two classes of one name would both become the same
    names = {name: next(iter(layers.values())) for name, layers in found.items() if len(layers) == 1}
    return names | ({"rotary_pos_emb": "LigerRotaryPosEmb"} if names and rotated else {})


def layer_or_layout(module: str, name: str) -> type[nn.Module] | None:
    """What ``name`` means as an attribute of ``module``; None if it means nothing."""
    model_type, _, of = name.partition("__")
    row = family(model_type) if model_type and of else None
    label = row.swapped.get(of.removesuffix(LAYOUT)) if row else None
    cls = getattr(modeling(model_type), of.removesuffix(LAYOUT), None) if label else None
    return _made(module, name, cls, label) if label is not None and isinstance(cls, type) else None


@functools.cache
def _made(module: str, name: str, cls: Any, label: str) -> type[nn.Module]:
    if not name.endswith(LAYOUT):
        forward = made(replacement, original(cls, "forward"), label)
        own = dict(__module__=module, forward=forward, can_torch_compile=True, has_backward=True)
        return type(name, (nn.Module,), own)
    # The layout runs our forward also where ``kernels`` leaves it alone. It keeps the name of the
    # stock class, by which Transformers initialises weights
    layer = _made(module, name.removesuffix(LAYOUT), cls, label)
    return type(cls)(cls.__name__, (cls,), dict(__module__=module, __qualname__=name, forward=layer.forward))
