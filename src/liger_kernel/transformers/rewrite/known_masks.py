"""Masks for positions that the call itself knows: on a GPU, the host does not wait for them.

Transformers looks in the positions of a batch without a mask whether a row has several documents.
In the forward of a model that numbers the tokens itself, if it is given no positions,

    mask = create_causal_mask(config=..., position_ids=position_ids)

becomes

    _liger_given = position_ids is not None        # as the first statement
    ...
    mask = informed(create_causal_mask, _liger_given, kwargs)(config=..., position_ids=position_ids)
"""

from __future__ import annotations

import ast
import contextvars
import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from liger_kernel import _private
from liger_kernel.transformers.rewrite.patterns import replace

INFORMED = "_liger_informed"
_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask"}
_POSITIONS = {"position_ids", "text_position_ids", "cache_position"}
# How models number the tokens of a batch: from 0 on, or after those in a cache; for rotations of
# several axes once for each
_NUMBERED = re.compile(
    r"torch\.arange\((past_seen_tokens, past_seen_tokens \+ )?inputs_embeds\.shape\[1\], "
    r"device=inputs_embeds\.device\)( \+ past_seen_tokens)?"
    r"|(position_ids|cache_position)\.unsqueeze\(0\)"
    r"|position_ids\.view\(1, 1, -1\)\.expand\(\d, inputs_embeds\.shape\[0\], -1\)"
    r"|position_ids\[None, \.\.\.\]\.expand\(\d, position_ids\.shape\[0\], -1\)"
    r"|position_ids\[0\]|position_ids\[1:\]|None"
)


def rewrite(tree: ast.FunctionDef) -> bool:
    """Rewrite the forward of a model that numbers its tokens; returns whether it does."""
    masks = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in _MASKS]
    if not masks or not _numbers_tokens(tree):
        return False
    of = tree.args
    more = of.kwarg.arg if of.kwarg else "{}"
    call = lambda name: ast.parse(f"{INFORMED}({name.id}, _liger_given, {more})", mode="eval").body
    replace(tree, ast.Name, lambda name: call(name) if name.id in _MASKS else name)
    # the first statement finds out what the caller gave, before the forward replaces None
    names = sorted({a.arg for a in (*of.posonlyargs, *of.args, *of.kwonlyargs)} & _POSITIONS)
    given = " or ".join(f"{name} is not None" for name in names) or "False"
    tree.body[:0] = ast.parse(f"_liger_given = {given}").body
    return True


def _numbers_tokens(tree: ast.FunctionDef) -> bool:
    """Whether a forward that is given no positions numbers the tokens of each row one by one: all
    that it assigns to positions is known, nothing writes into them, and no others are passed on."""
    values, stored = [], 0
    passed: list[ast.AST] = []
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), _, ast.expr() as value):
                values += [ast.unparse(value)] * (name in _POSITIONS)
            case ast.Name(name, ast.Store() | ast.Del()):
                stored += name in _POSITIONS
            case ast.keyword(name, value) if name in _POSITIONS:
                passed.append(value)
            case ast.Dict(keys, of_keys):
                passed += [v for k, v in zip(keys, of_keys) if isinstance(k, ast.Constant) and k.value in _POSITIONS]
            case ast.Attribute(ast.Name(name), attribute) if name in _POSITIONS and attribute.endswith("_"):
                return False
            case ast.Subscript(ast.Name(name), _, ast.Store() | ast.Del()) if name in _POSITIONS:
                return False
    # a name in a loop or a tuple is stored without a value that is understood
    known = len(values) == stored and all(map(_NUMBERED.fullmatch, values))
    numbered = any([value.startswith("torch.arange(") for value in values])
    return known and numbered and all([isinstance(p, ast.Name) and p.id in _POSITIONS for p in passed])


# Inside one call of a function that makes masks: whether no row has several documents, and the
# positions of the batch
_documents: contextvars.ContextVar[tuple[bool, Tensor] | None] = contextvars.ContextVar("liger_documents", default=None)


def informed(make: Callable, given: bool, more: Mapping[str, Any]) -> Callable:
    """``make``, a function that makes masks, for one call in a model's forward. ``given``: whether
    the forward was given positions; ``more``: its other arguments.

    Each row has one document, if the model numbers the tokens itself. Some row has several, if
    ``cu_seq_lens_q`` has more documents than the batch has rows.
    """
    if torch.compiler.is_compiling():  # a compiler sees no context
        return make

    def made(*args: Any, **arguments: Any) -> Any:
        positions, bounds = arguments.get("position_ids"), more.get("cu_seq_lens_q")
        several = given and isinstance(bounds, Tensor) and positions is not None and len(bounds) - 1 > len(positions)
        if positions is None or (given and not several):
            return make(*args, **arguments)
        _answer()
        token = _documents.set((not several, positions))
        try:
            return make(*args, **arguments)
        finally:
            _documents.reset(token)

    return made


HELPERS = {INFORMED: informed}


@functools.cache
def _answer() -> None:
    """Let Transformers take its answer from ``_documents``, while that knows these positions."""
    look = getattr(masking_utils, "find_packed_sequence_indices", None)
    if look is None:
        return

    @functools.wraps(look)
    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        known = None if torch.compiler.is_compiling() else _documents.get()
        # Only for these very positions, of which Transformers passes an expanded alias: another model
        # that a hook calls meanwhile has its own
        if known is None or not _private.is_alias_of(position_ids, known[1]):
            return look(position_ids)
        if known[0]:
            return None
        return (position_ids.diff(prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)

    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices


_SPECIAL = {"or_mask_function", "and_mask_function", "block_sequence_ids", "allow_is_causal_skip"}


def by_interface(source: str) -> bool:
    """Whether models of this source compute attention by transformers' interface, and do not ask
    whether it is sdpa."""
    return "ALL_ATTENTION_FUNCTIONS" in source and '"sdpa"' not in source


@functools.cache
def masks_by_arguments(module: types.ModuleType) -> bool:
    """Whether the models of a Python module use Transformers' attention interface, and mask only
    by causality, a window and their arguments."""
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):  # not from a file
        return False
    nodes = list(ast.walk(ast.parse(source)))
    names = {n.id for n in nodes if isinstance(n, ast.Name)}
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    makers = {name for name in names if name.startswith("create_") and "mask" in name}
    special = {n.arg for n in nodes if isinstance(n, ast.keyword)} & _SPECIAL
    plain = "create_causal_mask" in makers <= _MASKS and not special and "attention_mask" not in stored
    return plain and by_interface(source)
