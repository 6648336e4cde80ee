"""Read the source of a forward, apply the rules, and compile the result.

The rest of the forward does not change, and a traceback shows the rewritten lines.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
import types
from collections.abc import Callable
from typing import Any

from liger_kernel.transformers.recognise.variant import LINEARS
from liger_kernel.transformers.rewrite import fused_norms, known_masks, linear_calls
from liger_kernel.transformers.rewrite.patterns import build, replace

NORMS, PROJECTIONS, MASKS = "norms", "projections", "masks"  # the rules
# what the source that they write calls
_HELPERS: dict[str, Any] = fused_norms.HELPERS | linear_calls.HELPERS | known_masks.HELPERS

Swap = tuple[str, Callable, Callable]  # a global's name, stock, ours


# forward, rules -> what they make of it, and those of them that find something
_FUSED: dict[tuple[Callable, frozenset[str]], tuple[types.FunctionType | None, frozenset[str]]] = {}


def fused(forward: types.FunctionType, parts: frozenset[str] = frozenset({NORMS})) -> types.FunctionType | None:
    """Return ``forward`` rewritten by the rules ``parts``; None if they find nothing, or if its
    source is not what runs (a wrapper, a closure, a changed function)."""
    return _fused(forward, parts)[0]


def parts_in(forward: Any, parts: frozenset[str]) -> frozenset[str]:
    """Those of the rules ``parts`` that find something in ``forward``."""
    return _fused(forward, parts)[1] if isinstance(forward, types.FunctionType) else frozenset()


def _fused(forward: types.FunctionType, parts: frozenset[str]) -> tuple[types.FunctionType | None, frozenset[str]]:
    if (forward, parts) not in _FUSED:
        tree = _tree(forward) if parts else None
        found, linears = _rewrite(tree, parts, forward) if tree is not None else (frozenset(), frozenset())
        new = _compiled(forward, tree, _HELPERS, linears) if tree is not None and found else None
        # rules that find nothing change nothing: who asks for the others alone gets the same function
        _FUSED[forward, parts] = _FUSED[forward, found] = new, found
    return _FUSED[forward, parts]


@functools.cache
def seeing(forward: types.FunctionType, swaps: tuple[Swap, ...], parts: frozenset[str]) -> types.FunctionType | None:
    """Return ``forward``, rewritten by the rules ``parts``, that reads each global of ``swaps`` as
    ours, while the module has stock under this name; None as for ``fused``.

    It reads all other globals from the module at each call, so it sees later replacements.
    """
    tree = _tree(forward)
    if tree is None:
        return None
    _, linears = _rewrite(tree, parts, forward)
    values = dict(_HELPERS)
    for name, stock, ours in swaps:
        values |= {f"_liger_stock_{name}": stock, f"_liger_{name}": ours}
    names = {name for name, *_ in swaps}

    def chosen(node: ast.Name) -> ast.expr:
        """``name`` becomes ``(ours if name is stock else name)``."""
        if node.id not in names or not isinstance(node.ctx, ast.Load):
            return node
        of = {"name": node.id, "stock": f"_liger_stock_{node.id}", "ours": f"_liger_{node.id}"}
        (statement,) = build("ours if name is stock else name", of)
        return statement.value  # type: ignore[attr-defined]  # an expression as a statement

    return _compiled(forward, replace(tree, ast.Name, chosen), values, linears)


def _rewrite(tree: ast.FunctionDef, parts: frozenset[str], forward: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Rewrite a function by these rules; returns the rules that found something, and the
    attributes that are called as linear layers."""
    masks = MASKS in parts and known_masks.rewrite(tree)
    norms = NORMS in parts and fused_norms.rewrite(tree)
    methods = _class_attributes(forward) if PROJECTIONS in parts else None
    linears = frozenset() if methods is None else linear_calls.rewrite(tree, methods)
    if norms:
        fused_norms.mark_last(tree.body)  # after the linear layers, which must be found as they are written
    found = {MASKS: masks, NORMS: norms, PROJECTIONS: bool(linears)}
    return frozenset(part for part, some in found.items() if some), linears


def _class_attributes(forward: types.FunctionType) -> frozenset[str] | None:
    """The names of all attributes of a method's class, such as methods and properties; None if
    the class cannot be found."""
    first, *rest = forward.__qualname__.split(".")[:-1] or [""]
    owner = forward.__globals__.get(first)
    for name in rest:
        owner = getattr(owner, name, None)
    return frozenset(dir(owner)) if isinstance(owner, type) else None


def _tree(forward: Any) -> ast.FunctionDef | None:
    """The source of ``forward`` without its decorators. None if it may not be the code that
    runs, or if it would mean something else outside its class."""
    if not inspect.isfunction(forward) or forward.__code__.co_freevars or hasattr(forward, "__wrapped__"):
        return None
    try:
        source = textwrap.dedent(inspect.getsource(forward))
        (tree,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(tree, ast.FunctionDef) or tree.name != forward.__name__:
        return None
    tree.decorator_list = []
    for node in ast.walk(tree):
        match node:
            case ast.Global() | ast.Nonlocal() | ast.Yield() | ast.YieldFrom():
                return None
            # Python mangles these names inside their class
            case ast.Attribute(attr=name) | ast.Name(id=name) if name.startswith("__") and not name.endswith("__"):
                return None
    return tree


def _compiled(
    forward: types.FunctionType, tree: ast.FunctionDef, values: dict[str, Any], linears: frozenset[str]
) -> types.FunctionType:
    """``tree`` compiled to a function like ``forward``. Its body sees ``values`` under their
    names. Its globals are the model's own, without new names:

        def factory(_liger_add_norm, _liger_linear, ...):
            def forward(self, hidden_states, attention_mask=None):
                ...
            return forward
    """
    of = tree.args
    tree.returns = None
    for a in filter(None, (*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg)):
        a.annotation = None
    # the values of defaults are those of ``forward``, set below: their source may mean another
    # thing now
    of.defaults = [ast.Constant(None) for _ in of.defaults]
    of.kw_defaults = [d and ast.Constant(None) for d in of.kw_defaults]
    factory: Any = ast.parse(f"def factory({', '.join(values)}):\n    return {tree.name}")
    factory.body[0].body.insert(0, tree)
    text = ast.unparse(ast.fix_missing_locations(factory))
    # the swaps are part of the name, as each has lines of its own for tracebacks
    names = [f"{forward.__module__}.{forward.__qualname__}", *values.keys() - _HELPERS.keys()]
    place = f"<liger_kernel: {', '.join(names)}>"
    linecache.cache[place] = len(text), None, text.splitlines(keepends=True), place
    scope: dict[str, Any] = {}
    exec(compile(text, place, "exec"), forward.__globals__, scope)
    new = scope["factory"](**values)
    for name in ("__defaults__", "__kwdefaults__", "__annotations__", "__module__", "__qualname__", "__doc__"):
        setattr(new, name, getattr(forward, name))
    if linears:
        LINEARS[new] = linears, lambda module: None
    return new
