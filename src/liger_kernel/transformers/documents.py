"""Layers in which the documents of a packed row depend on each other.

Attention ends where positions begin at 0 again. Recurrent layers and convolutions do not read
positions: what stock keeps of one document goes on into the next. Which layers do so is seen in a
tiny model of the same configuration, patched as the model is: if the first document of a row
changes, the second must not.

``B`` rows, ``T`` tokens per row.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from liger_kernel.ops._core.operator import is_recorded, only_pytorch
from liger_kernel.parallel import unsharded_class
from liger_kernel.transformers.recognise.families import undisturbed
from liger_kernel.transformers.recognise.tiny import model_of, tiny_config, tiny_of

FIRST, SECOND = 5, 7  # tokens of the two documents
# Part of the largest value that differs by rounding: experts add in another order for other tokens
NEAR = 2e-5
# attribute of the forward of a patched model whose layers get the bounds of documents
GIVES = "_liger_gives_bounds"
TOKENS = "input_ids", "inputs_embeds"
_ATTENDS = re.compile(r"softmax|scaled_dot_product|logsumexp|ALL_ATTENTION_FUNCTIONS")


@dataclass(frozen=True)
class Joining:
    """A layer in which documents depend on each other. A mask (B, 1, T, T) separates them in
    ``attention``."""

    layer: str
    attention: bool

    def __str__(self) -> str:
        if self.attention:
            return f"{self.layer} sees the documents before a token's own"
        return f"{self.layer} carries its state from one document to the next"


def joining(model: Any, numbered: bool = False) -> Joining | None:
    """The first layer of ``model`` in which the documents of a packed row depend on each other,
    attention last. ``numbered``: beside positions, the model is given ``seq_idx``.

    None if there is none, or if no tiny model of this configuration runs. The model itself is not
    called: it may be on the meta device.
    """
    found: list[nn.Module] = []
    # in fp32 on the CPU, whatever the caller has entered;
    # the second, of the type's default configuration, is for one that does not fit tiny sizes
    for tiny_form in (lambda: tiny_of(model.config), lambda: tiny_config(model.config.model_type)):
        with contextlib.suppress(Exception), undisturbed():
            form = tiny_form()
            # of weights as small as models begin with, a scan remembers less than rounding
            form.get_text_config().initializer_range = 0.2
            tiny = model_of(form, head=unsharded_class(model)).eval()
            _looks[tiny] = None
            patch_like(tiny, model)
            found = _joining_layers(tiny, numbered)
            break
    if numbered:
        # older versions of Transformers compute these on a GPU by another package, which reads it
        package = lambda c: getattr(sys.modules[c.__module__], "is_fast_path_available", False)
        found = [layer for layer in found if not any(map(package, _stock(layer)))]
    # Flash Attention reads positions itself
    flash = "flash" in str(getattr(model.config, "_attn_implementation", None))
    for attention in (False,) if flash else (False, True):
        classes = tuple({type(layer) for layer in found if _attends(layer) is attention})
        for name, m in model.named_modules():
            if isinstance(m, classes):
                return Joining(f"{name} ({unsharded_class(m).__name__})", attention)
    return None


def patch_like(tiny: nn.Module, model: nn.Module) -> None:
    """Give modules of ``tiny`` the classes of modules of ``model``, which are of the same name and
    derived from theirs if these are patched."""
    name = lambda cls: (cls.__module__, cls.__qualname__)
    classes = {name(cls): cls for cls in map(unsharded_class, model.modules())}
    for m in tiny.modules():
        if issubclass(cls := classes.get(name(type(m)), object), type(m)):
            object.__setattr__(m, "__class__", cls)


def _stock(layer: nn.Module) -> set[type]:
    return {c for m in layer.modules() for c in type(m).__mro__ if c.__module__.startswith("transformers.models.")}


def _attends(layer: nn.Module) -> bool:
    return any(_ATTENDS.search(inspect.getsource(c)) for c in _stock(layer))


def _joining_layers(tiny: Any, numbered: bool) -> list[nn.Module]:
    """The innermost modules whose output at the second document changes, while their input there
    does not."""
    # not from 0 on, which is often padding
    ids = torch.arange(3, 3 + FIRST + SECOND)[None]
    other = torch.cat((ids[:, :FIRST] + 40, ids[:, FIRST:]), 1)
    takes = inspect.signature(tiny.forward).parameters.values()
    positions = torch.cat((torch.arange(FIRST), torch.arange(SECOND)))[None]
    places = dict(position_ids=positions, seq_idx=(positions == 0).cumsum(1).int() if numbered else None)
    places = {name: t for name, t in places.items() if any(p.name == name or p.kind is p.VAR_KEYWORD for p in takes)}
    calls: list[dict[str, list[tuple[Tensor, Tensor]]]] = []

    def watch(name: str) -> Any:
        def hook(m: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            given, made = (_second(value) for value in ((args, kwargs), out))
            if given is not None and made is not None:
                calls[-1].setdefault(name, []).append((given, made))

        return hook

    modules = {name: m for name, m in tiny.named_modules() if not type(m).__module__.startswith("torch.")}
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name, m in modules.items():
            hooks.callback(m.register_forward_hook(watch(name), with_kwargs=True).remove)
        for tokens in (ids, other):
            calls.append({})
            tiny(input_ids=tokens, use_cache=False, **places)
    before, after = calls
    # equal inputs, and other outputs, of one of its calls
    differs = lambda a, b: _near(a[0], b[0]) and not _near(a[1], b[1])
    joined = [name for name in before if any(map(differs, before[name], after.get(name, [])))]
    # a layer joins if a module in it does: the innermost is the one to name
    holds_another = lambda name: any(inner.startswith(f"{name}." if name else "") for inner in joined if inner != name)
    return [modules[name] for name in joined if not holds_another(name)]


def _second(values: Any) -> Tensor | None:
    """The vectors of the second document's tokens in the first of these tensors that has one for
    each."""
    tensors = (t for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point() and t.ndim >= 3)
    return next((t[:, FIRST:].clone() for t in tensors if t.shape[:2] == (1, FIRST + SECOND)), None)


def _near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= NEAR * b.abs().max())


# How often a model's batches were looked at; None where nothing is left to say
_looks: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()


def warn_if_joined(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Warn once if the batch in ``given`` has several documents in a row that depend on each other
    in ``model``.

    To look at positions on a GPU, the host waits for it: only if a layer of the model can join
    documents at all, and then only at calls 1, 2, 4, 8 and so on with any.
    """
    positions, bounds = given.get("position_ids"), given.get("cu_seq_lens_q")
    if positions is None and bounds is None:
        return
    if torch.compiler.is_compiling() or only_pytorch() or _get_current_dispatch_mode() is not None:
        return
    if (looks := _looks.get(model, 0)) is None:
        return
    numbered = given.get("seq_idx") is not None
    tokens = tokens_of(given)
    found = None
    # of bounds, the host knows how many there are: more than rows?
    if not isinstance(bounds, Tensor) or tokens is None or len(bounds) - 1 <= len(tokens):
        if type(positions) is not Tensor or positions.is_meta or positions.shape[-1] < 2 or is_recorded(positions):
            return
        # on a CPU, a look costs less than the tiny model
        if looks == 0 and _waits(positions) and (found := joining(model, numbered)) is None:
            _looks[model] = None
            return
        _looks[model] = looks + 1
        if looks & (looks + 1) or not _packed(positions, given.get("attention_mask")):
            return
    _looks[model] = None
    found = joining(model, numbered) if found is None else found
    if found is not None and not (found.attention and getattr(given.get("attention_mask"), "ndim", 2) > 2):
        advice = "this batch has several documents in a row: give each a row of its own"
        warnings.warn(f"{unsharded_class(model).__name__}: {found}, and {advice}", stacklevel=3)


def _waits(t: Tensor) -> bool:
    """Whether the host waits for the value of ``t``."""
    return t.device.type != "cpu"


def tokens_of(given: Mapping[str, Any], otherwise: Any = None) -> Any:
    """The tokens of a batch, or their vectors; ``otherwise`` if there are none, which a model refuses."""
    return next((t for name in TOKENS if isinstance(t := given.get(name), Tensor)), otherwise)


def _packed(positions: Tensor, mask: Any) -> bool:
    """Whether positions (B, T), or the first of (A, B, T), begin at 0 in a row, at no padding of
    ``mask`` (B, T)."""
    positions = positions[0] if positions.ndim == 3 else positions
    begins = (positions[..., 1:] == 0) & (positions[..., :-1] > 1)  # on the left, padding often has 1
    if isinstance(mask, Tensor) and mask.shape == positions.shape:
        begins &= mask[..., 1:] != 0
    return bool(begins.any())
