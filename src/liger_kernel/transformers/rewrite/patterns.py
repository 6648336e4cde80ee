"""A small matcher of Python's syntax, whose patterns are Python.

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
import itertools
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
    """What the placeholders stand for, if the statements from ``at`` on are those of ``pattern``."""
    wanted = _parsed(pattern)
    found: Found = {}
    return found if _alike(wanted, block[at : at + len(wanted)], found) else None


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
    """The statements of ``template``, in which each placeholder is what was found for it. Names that
    are no placeholders stay."""

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


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks inside a statement; a function or class defined there is not part of the forward."""
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
