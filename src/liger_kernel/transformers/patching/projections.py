"""Let the projection engine run the linear layers of a forward. It looks at the layers at each
call, so adapters may be added, removed or changed any time.

The source of a forward is read, and rewritten where it calls one of its own linear layers with one
positional argument:

    y = self.o_proj(a)                                  ->   y = linear(self.o_proj, a)
    q = self.q_proj(x).view(s); k = self.k_proj(x)      ->   _0 = shared(x, self.q_proj, self.k_proj); q = _0.pop(0).view(s); k = _0.pop(1)
    y = self.experts(x, i, w)                           ->   y = experts(self.experts, x, i, w)

The first and the last rewriting are safe for every module: ``linear`` and ``experts`` decide at
each call, and call a module that the engine cannot run. Linear layers with the same input are
computed together, before the first of them, only if the result is the same: all of them always run
(no condition, loop or lambda is between them), nothing assigns the name or may write to its tensor,
and nothing draws random numbers. ``pop`` releases each result as early as the source would.
"""  # noqa: E501

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from typing import Any

from liger_kernel.transformers.recognise.adapted_experts import experts
from liger_kernel.transformers.recognise.projections import linear, shared

LINEAR, SHARED, EXPERTS = "_liger_linear", "_liger_shared", "_liger_experts"
NAMED = re.compile(
    r"proj|dense|linear|query|key|value|qkv|^[qc]_attn$|^[qkvow]\d?$|^w[qkvo]$|^wi_?\d?$|^wo$|^fc_?\w*$|^lin\d?$|^c_\w+$|^[WV][iqkvo]$"
)
NOT_NAMED = re.compile(r"norm|drop|conv|embed|^ln_|act$|act_")
RANDOM = re.compile(r"drop|rand|noise")

_STRAIGHT = ast.Assign | ast.AnnAssign | ast.Return | ast.Expr  # statements that run as a whole
_MAYBE = (
    ast.IfExp
    | ast.BoolOp
    | ast.Compare
    | ast.Lambda
    | ast.ListComp
    | ast.SetComp
    | ast.DictComp
    | ast.GeneratorExp
    | ast.NamedExpr
    | ast.Await
)


def rewrite(tree: ast.FunctionDef, methods: frozenset[str]) -> frozenset[str]:
    """Rewrite a forward and return the attributes that it calls as linear layers or experts.
    ``methods``: names that its class has as methods, not modules."""
    arguments = [*tree.args.posonlyargs, *tree.args.args]
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    if not arguments or arguments[0].arg != "self" or "self" in stored:
        return frozenset()
    rewriter = _Rewriter(methods)
    rewriter.block(tree.body)
    return frozenset(rewriter.found | ({"experts"} if "experts" not in methods and _rewrite_experts(tree) else set()))


def _rewrite_experts(tree: ast.FunctionDef) -> bool:
    """Rewrite the calls of experts with three positional arguments; returns whether there are
    any."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "self.experts"
        and len(node.args) == 3
        and not node.keywords
        if not any(isinstance(argument, ast.Starred) for argument in node.args)
    ]
    for call in calls:
        call.func, call.args = ast.copy_location(ast.Name(EXPERTS, ast.Load()), call.func), [call.func, *call.args]
    return bool(calls)


class _Replace(ast.NodeTransformer):
    def __init__(self, new: dict[ast.Call, ast.expr]):
        self.new = new

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        return self.new.get(node, node)


class _Rewriter:
    def __init__(self, methods: frozenset[str]):
        self.methods, self.numbers = methods, itertools.count()
        self.found: set[str] = set()

    def attribute(self, node: ast.AST) -> str | None:
        """The name of the linear layer, if ``node`` is ``self.name(one argument)`` and ``name``
        can be a linear layer."""
        if not (
            isinstance(node, ast.Call)
            and len(node.args) == 1
            and not node.keywords
            and not isinstance(node.args[0], ast.Starred)
        ):
            return None
        f = node.func
        if not (isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and f.value.id == "self"):
            return None
        return f.attr if NAMED.search(f.attr) and not NOT_NAMED.search(f.attr) and f.attr not in self.methods else None

    def calls(self, node: ast.AST) -> Iterator[ast.Call]:
        """The calls of linear layers in an expression that always run when the expression runs."""
        if isinstance(node, _MAYBE):
            return
        for child in ast.iter_child_nodes(node):
            yield from self.calls(child)
        if isinstance(node, ast.Call) and self.attribute(node) is not None:
            yield node

    def of_name(self, statement: ast.stmt, name: str) -> list[ast.Call]:
        return [c for c in self.calls(statement) if isinstance(c.args[0], ast.Name) and c.args[0].id == name]

    def quiet(self, statement: ast.stmt, name: str) -> bool:
        """Whether ``statement`` passes the tensor ``name`` only to linear layers, does not
        change it, and draws no random numbers."""
        if not isinstance(statement, _STRAIGHT):
            return False
        given = {
            id(c.args[0]) for c in ast.walk(statement) if isinstance(c, ast.Call) and self.attribute(c) is not None
        }
        given |= {id(n.value) for n in ast.walk(statement) if isinstance(n, ast.Attribute)}
        for node in ast.walk(statement):
            if isinstance(node, ast.NamedExpr | ast.Lambda) or (isinstance(node, ast.keyword) and node.arg == "out"):
                return False
            if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
                return False
            if isinstance(node, ast.Attribute) and (
                (node.attr.endswith("_") and not node.attr.endswith("__")) or RANDOM.search(node.attr)
            ):
                return False
            if isinstance(node, ast.Name) and (
                RANDOM.search(node.id) or (node.id == name and isinstance(node.ctx, ast.Load) and id(node) not in given)
            ):
                return False
        return True

    def block(self, block: list[ast.stmt]) -> None:
        """Rewrite ``block`` and the blocks in it."""
        at = 0
        while at < len(block):
            statement = block[at]
            for part in ("body", "orelse", "finalbody"):
                inner = getattr(statement, part, None)
                if isinstance(inner, list) and not isinstance(
                    statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
                ):
                    self.block(inner)
            if isinstance(statement, _STRAIGHT):
                at += self.straight(block, at)
            at += 1

    def straight(self, block: list[ast.stmt], at: int) -> int:
        """Rewrite the calls in the statement at ``at``; returns the number of statements that
        were inserted before it."""
        statement = block[at]
        calls, first, new = list(self.calls(statement)), [], dict[ast.Call, ast.expr]()
        for name in dict.fromkeys(c.args[0].id for c in calls if isinstance(c.args[0], ast.Name)):
            together = self.together(block, at, name)
            if len(together) < 2:
                continue
            results = f"_liger_{next(self.numbers)}"
            value = ast.Call(
                ast.Name(SHARED, ast.Load()), [ast.Name(name, ast.Load()), *(c.func for _, c in together)], []
            )
            first.append(ast.copy_location(ast.Assign([ast.Name(results, ast.Store())], value), statement))
            for i, (_, c) in enumerate(together):
                new[c] = ast.copy_location(
                    ast.Call(ast.Attribute(ast.Name(results, ast.Load()), "pop", ast.Load()), [ast.Constant(i)], []), c
                )
            for each in dict.fromkeys(s for s, _ in together):
                _Replace(new).visit(each)
        alone = [c for c in calls if c not in new]
        _Replace(
            {c: ast.copy_location(ast.Call(ast.Name(LINEAR, ast.Load()), [c.func, *c.args], []), c) for c in alone}
        ).visit(statement)
        self.found |= {attribute for c in (*new, *alone) if (attribute := self.attribute(c)) is not None}
        block[at:at] = first
        return len(first)

    def together(self, block: list[ast.stmt], at: int, name: str) -> list[tuple[ast.stmt, ast.Call]]:
        """The calls of linear layers with the argument ``name`` that may run before the
        statement at ``at``, each with its statement."""
        found: list[tuple[ast.stmt, ast.Call]] = []
        for statement in block[at:]:
            if not self.quiet(statement, name):
                break
            found += [(statement, c) for c in self.of_name(statement, name)]
            assigned = any(
                isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load)
                for n in ast.walk(statement)
            )
            if assigned or isinstance(statement, ast.Return):
                break
        return found


def shared_once(x: Any, *modules: Any) -> dict[int, Any]:
    """``m(x)`` of each module, by index, for ``pop``."""
    return dict(enumerate(shared(x, *modules)))


HELPERS = {LINEAR: linear, SHARED: shared_once, EXPERTS: experts}
