"""Linear layers of a forward that the projection engine runs: what they are is looked at in each call, so adapters may come, go and change at any time.

The source of a forward is read and rewritten where it calls a linear layer of its own, of one positional argument:

    y = self.o_proj(a)                                            ->   y = linear(self.o_proj, a)
    q = self.q_proj(x).view(s); k = self.k_proj(x).view(s)        ->   q_, k_ = shared(x, self.q_proj, self.k_proj); q = q_.view(s); k = k_.view(s)

the second for calls of one name that nothing assigns or writes into meanwhile. What a forward does only under a condition stays where it is.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from liger_kernel.transformers.recognise.projections import linear, shared

LINEAR, SHARED = "_liger_linear", "_liger_shared"
NAMED = re.compile(r"proj|dense|linear|query|key|value|qkv|attn$|^[qkvow]\d?$|^w[qkvo]$|^wi_?\d?$|^wo$|^fc_?\w*$|^lin\d?$|^c_\w+$|^[WV][iqkvo]$")


def _call(node: ast.AST) -> ast.Call | None:
    """``node`` if it is ``self.name(one argument)`` with the name of a linear layer."""
    if not (isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)):
        return None
    f = node.func
    own = isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and f.value.id == "self" and NAMED.search(f.attr)
    return node if own else None


_STRAIGHT = ast.Assign | ast.AnnAssign | ast.Return | ast.Expr  # statements that run as a whole
_MAYBE = ast.IfExp | ast.BoolOp | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.NamedExpr | ast.Await | ast.Yield


def _calls(node: ast.AST) -> list[ast.Call]:
    """Calls of linear layers in an expression that run whenever it does."""
    if isinstance(node, _MAYBE):
        return []
    found = [call for child in ast.iter_child_nodes(node) for call in _calls(child)]
    return found + ([call] if (call := _call(node)) is not None else [])


def _argument(call: ast.Call) -> str | None:
    return call.args[0].id if isinstance(call.args[0], ast.Name) else None


def _changes(statement: ast.stmt, name: str) -> bool:
    """Whether a statement assigns ``name`` or may write into it."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            return True
        if not isinstance(node, ast.Attribute | ast.Subscript) or not isinstance(node.value, ast.Name) or node.value.id != name:
            continue
        if not isinstance(node.ctx, ast.Load) or (isinstance(node, ast.Attribute) and node.attr.endswith("_")):
            return True
    return not isinstance(statement, _STRAIGHT)


class _Replace(ast.NodeTransformer):
    def __init__(self, new: dict[ast.Call, ast.expr]):
        self.new = new

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        return self.new.get(node, node)


def rewrite(block: list[ast.stmt], names: Any = None) -> int:
    """Rewrite ``block`` and the blocks in it; returns how many calls."""
    count, at = 0, 0
    numbers = names if names is not None else iter(range(10**6))
    while at < len(block):
        statement = block[at]
        for part in ("body", "orelse", "finalbody"):
            inner = getattr(statement, part, None)
            if isinstance(inner, list) and not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                count += rewrite(inner, numbers)
        if isinstance(statement, _STRAIGHT):
            count += _straight(block, at, numbers)
            at += block[at] is not statement  # one was put before it
        at += 1
    return count


def _straight(block: list[ast.stmt], at: int, numbers: Any) -> int:
    statement = block[at]
    new: dict[ast.Call, ast.expr] = {}
    first: list[ast.stmt] = []
    calls = _calls(statement)
    by_name: dict[str, list[tuple[ast.stmt, ast.Call]]] = {}
    for call in calls:
        if (name := _argument(call)) is not None:
            by_name.setdefault(name, []).append((statement, call))
    for name, found in by_name.items():
        if not _changes(statement, name):
            for later in block[at + 1 :]:
                found += [(later, c) for c in (_calls(later) if isinstance(later, _STRAIGHT) else []) if _argument(c) == name]
                if _changes(later, name):
                    break
        if len(found) > 1:
            targets = [f"_liger_{next(numbers)}" for _ in found]
            value = ast.Call(ast.Name(SHARED, ast.Load()), [ast.Name(name, ast.Load()), *(c.func for _, c in found)], [])
            target = ast.Tuple([ast.Name(t, ast.Store()) for t in targets], ast.Store())
            first.append(ast.copy_location(ast.Assign([target], value), statement))
            new |= {c: ast.copy_location(ast.Name(t, ast.Load()), c) for t, (_, c) in zip(targets, found)}
            for later in dict.fromkeys(s for s, _ in found):
                _Replace(new).visit(later)
    alone = [c for c in calls if c not in new]
    _Replace({c: ast.copy_location(ast.Call(ast.Name(LINEAR, ast.Load()), [c.func, *c.args], []), c) for c in alone}).visit(statement)
    block[at:at] = first
    return len(new) + len(alone)


HELPERS = {LINEAR: linear, SHARED: shared}
