"""Python's syntax of a forward: read, matched and rebuilt by patterns, compiled again. This file
knows no rule.

    found = match("s = A + B; n = norm(s)", block, at)
    block[at : at + 2] = build("s, n = add_norm(norm, A, B)", found)

turns

    hidden_states = residual + self.mlp(hidden_states)
    normed = self.input_layernorm(hidden_states)

into

    hidden_states, normed = add_norm(self.input_layernorm, residual, self.mlp(hidden_states))

In a pattern, ``self`` is ``self``, and every other name is a placeholder: a capital letter for any
expression, a word of ``KINDS`` for a function of that kind, anything else for a name. A placeholder
that occurs twice stands for the same name.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import linecache
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Found = dict[str, Any]  # placeholder -> node


def attribute_of_self(node: ast.AST) -> str:
    """``name`` of ``self.name``; empty for anything else."""
    match node:
        case ast.Attribute(ast.Name("self"), name):
            return name
    return ""


KINDS: dict[str, Callable[[ast.AST], bool]] = {
    "module": lambda node: attribute_of_self(node) != "",
    "norm": lambda node: "norm" in attribute_of_self(node).lower(),
    "rope": lambda node: isinstance(node, ast.Name) and node.id.startswith("apply_rotary"),
}


@functools.cache
def _parsed(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


def match(pattern: str, block: list[ast.stmt], at: int = 0) -> Found | None:
    """What the placeholders stand for, if the statements from ``at`` on are those of
    ``pattern``."""
    wanted, found = _parsed(pattern), dict[str, Any]()
    part = block[at : at + len(wanted)]
    return found if [*map(type, wanted)] == [*map(type, part)] and _alike(wanted, part, found) else None


def _alike(pattern: object, node: object, found: Found) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id != "self":
        return isinstance(node, ast.expr) and _stands_for(pattern.id, node, found)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.AST):
        for name in reversed(pattern._fields):  # an assignment's value first: targets are alike everywhere
            # whether a name is read or written follows from its place
            if name != "ctx" and not _alike(getattr(pattern, name), getattr(node, name), found):
                return False
        return True
    if isinstance(pattern, list) and isinstance(node, list):
        return len(pattern) == len(node) and all(map(_alike, pattern, node, itertools.repeat(found)))
    return pattern == node


def _stands_for(placeholder: str, node: ast.expr, found: Found) -> bool:
    if placeholder in KINDS:
        fits = KINDS[placeholder](node)
    else:
        known = found.get(placeholder)
        fits = placeholder.isupper() or (
            isinstance(node, ast.Name) and (known is None or (isinstance(known, ast.Name) and known.id == node.id))
        )
    if fits:
        found[placeholder] = node
    return fits


def build(template: str, found: Mapping[str, Any]) -> list[ast.stmt]:
    """The statements of ``template``, in which each placeholder is what was found for it. Names
    that are no placeholders stay."""

    def filled(name: ast.Name) -> ast.expr:
        value = found.get(name.id, name)
        if isinstance(value, ast.Name):
            value = value.id
        return ast.Name(value, name.ctx) if isinstance(value, str) else value

    return [replace(statement, ast.Name, filled) for statement in ast.parse(template).body]


def replace(tree: Any, kind: type[ast.AST], new: Callable[[Any], Any]) -> Any:
    """Put ``new(node)`` in the place of each node of ``kind`` in ``tree``, those inside first."""
    # The nodes are listed before any is replaced, so that no new node is replaced again
    for parent in reversed(list(ast.walk(tree))):
        for name, value in ast.iter_fields(parent):
            if isinstance(value, kind):
                setattr(parent, name, new(value))
            elif isinstance(value, list):
                for i, each in enumerate(value):
                    if isinstance(each, kind):
                        value[i] = new(each)
    return tree


def names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def stored_in(node: ast.AST) -> set[str]:
    """The names that are assigned or deleted in it."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks inside a statement; a function or class defined there is not part of the
    forward."""
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        for part in ("body", "orelse", "finalbody"):
            if isinstance(inner := getattr(statement, part, None), list):
                yield inner


def each_statement(block: list[ast.stmt], rewrite: Callable[[list[ast.stmt], int], int]) -> None:
    """Call ``rewrite(block, at)`` for each statement of ``block`` and of the blocks inside. It may
    replace statements from ``at`` on, and returns where to go on."""
    at = 0
    while at < len(block):
        for inner in _blocks(block[at]):
            each_statement(inner, rewrite)
        at = rewrite(block, at)


def attributes_of_class(forward: types.FunctionType) -> frozenset[str] | None:
    """The names of all attributes of a method's class, such as methods and properties; None if
    the class cannot be found."""
    first, *rest = forward.__qualname__.split(".")[:-1] or [""]
    owner = forward.__globals__.get(first)
    for name in rest:
        owner = getattr(owner, name, None)
    return frozenset(dir(owner)) if isinstance(owner, type) else None


def tree_of(forward: Any) -> ast.FunctionDef | None:
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


def compiled(
    forward: types.FunctionType, tree: ast.FunctionDef, helpers: Mapping[str, Any], more: Mapping[str, Any]
) -> types.FunctionType:
    """``tree`` compiled to a function like ``forward``. Its body sees ``helpers`` and ``more``
    under their names. Its globals are the model's own, without new names:

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
    factory: Any = ast.parse(f"def factory({', '.join((*helpers, *more))}):\n    return {tree.name}")
    factory.body[0].body.insert(0, tree)
    text = ast.unparse(ast.fix_missing_locations(factory))
    # what only this function sees is part of the name, as each has lines of its own for tracebacks
    place = f"<liger_kernel: {', '.join((f'{forward.__module__}.{forward.__qualname__}', *more))}>"
    linecache.cache[place] = len(text), None, text.splitlines(keepends=True), place
    scope: dict[str, Any] = {}
    exec(compile(text, place, "exec"), forward.__globals__, scope)
    new = scope["factory"](**helpers, **more)
    for name in ("__defaults__", "__kwdefaults__", "__annotations__", "__module__", "__qualname__", "__doc__"):
        setattr(new, name, getattr(forward, name))
    return new
