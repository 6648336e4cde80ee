"""Let the projection engine run the linear layers of a forward. It looks at the layers at each
call, so adapters may be added, removed or changed any time.

The source of a forward is rewritten where it calls one of its own linear layers with one
positional argument, or its experts with three:

    y = self.o_proj(a)                ->   y = linear(self.o_proj, a)

    q = self.q_proj(x).view(s)        ->   _0 = shared(x, self.q_proj, self.k_proj)
    k = self.k_proj(x)                     q = _0.pop(0).view(s)
                                           k = _0.pop(1)

    y = self.experts(x, i, w)         ->   y = experts(self.experts, x, i, w)

The first and the last rewriting are safe for every module: ``linear`` and ``experts`` decide at
each call, and call a module that the engine cannot run. Linear layers with the same input are
computed together, before the first of them, only if the result is the same: all of them always run
(no condition, loop or lambda is between them), nothing assigns the name or may write to its tensor,
and nothing draws random numbers. ``pop`` releases each result as early as the source would.
"""

from __future__ import annotations

import ast
import itertools
import re
from typing import Any

from liger_kernel.transformers.recognise.adapted_experts import experts
from liger_kernel.transformers.recognise.projections import linear, shared
from liger_kernel.transformers.rewrite.patterns import attribute_of_self, build, each_statement, replace

LINEAR, SHARED, EXPERTS = "_liger_linear", "_liger_shared", "_liger_experts"
# How models name linear layers. A wrong guess costs a function call: a module decides by what it is
NAMED = re.compile(
    r"proj|dense|linear|query|key|value|qkv|^[qc]_attn$|^[qkvow]\d?$|^w[qkvo]$|^wi_?\d?$|^wo$|^fc_?\w*$|^lin\d?$|^c_\w+$|^[WV][iqkvo]$"
)
NOT_NAMED = re.compile(r"norm|drop|conv|embed|^ln_|act$|act_")
RANDOM = re.compile(r"drop|rand|noise")

_STRAIGHT = ast.Assign | ast.AnnAssign | ast.Return | ast.Expr  # statements that run as a whole
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
# what is inside of these may not run, or more than once
_MAYBE = ast.IfExp | ast.BoolOp | ast.Compare | ast.Lambda | _COMPREHENSIONS | ast.NamedExpr | ast.Await


def shared_once(x: Any, *modules: Any) -> dict[int, Any]:
    """``m(x)`` of each module, by index, for ``pop``."""
    return dict(enumerate(shared(x, *modules)))


HELPERS = {LINEAR: linear, SHARED: shared_once, EXPERTS: experts}


def rewrite(tree: ast.FunctionDef, methods: frozenset[str]) -> frozenset[str]:
    """Rewrite a forward and return the attributes that it calls as linear layers or experts.
    ``methods``: names that its class has as methods, not modules."""
    arguments = [*tree.args.posonlyargs, *tree.args.args]
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    if not arguments or arguments[0].arg != "self" or "self" in stored:
        return frozenset()
    rewriter = _Linears(methods)
    each_statement(tree.body, rewriter.statement)
    if "experts" not in methods:
        replace(tree, ast.Call, rewriter.of_experts)
    return frozenset(rewriter.found)


def _call(helper: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(helper, ast.Load()), [*arguments], [])


class _Linears:
    """The linear layers of one forward; ``found`` so far."""

    def __init__(self, methods: frozenset[str]):
        self.methods, self.numbers = methods, itertools.count()
        self.found: set[str] = set()

    def name_of(self, call: ast.AST) -> str:
        """``name``, if this is ``self.name(one argument)`` and ``name`` can be a linear layer;
        otherwise nothing."""
        match call:
            case ast.Call(function, [argument], []) if not isinstance(argument, ast.Starred):
                name = attribute_of_self(function)
                if name and name not in self.methods and NAMED.search(name) and not NOT_NAMED.search(name):
                    return name
        return ""

    def calls(self, statement: ast.stmt) -> list[ast.Call]:
        """The calls of linear layers that always run when the statement runs, in their order."""
        nodes = list(ast.walk(statement))
        maybe = {inside for node in nodes if isinstance(node, _MAYBE) for inside in ast.walk(node)}
        found = [n for n in nodes if isinstance(n, ast.Call) and n not in maybe and self.name_of(n)]
        # a call runs after the calls inside it, which end before it
        return sorted(found, key=lambda call: (call.end_lineno, call.end_col_offset))

    def statement(self, block: list[ast.stmt], at: int) -> int:
        """Rewrite the calls in the statement at ``at``; returns where to go on."""
        calls = self.calls(block[at]) if isinstance(block[at], _STRAIGHT) else []
        shared_calls: dict[ast.Call, ast.expr] = {}  # -> what stands in their place, in later statements, too
        before: list[ast.stmt] = []
        for name in dict.fromkeys(c.args[0].id for c in calls if isinstance(c.args[0], ast.Name)):
            together = self.together(block[at:], name)
            if len(together) < 2:
                continue
            results = f"_liger_{next(self.numbers)}"
            value = _call(SHARED, ast.Name(name, ast.Load()), *(c.func for c in together))
            before += build("results = A", {"results": results, "A": value})
            for i, call in enumerate(together):
                (pop,) = build(f"results.pop({i})", {"results": results})
                shared_calls[call] = pop.value  # type: ignore[attr-defined]  # an expression as a statement
        alone = set(calls) - shared_calls.keys()
        self.found |= {self.name_of(call) for call in (*shared_calls, *alone)}
        within = {call.args[0] for call in alone}  # ``self.b(self.a(x))``: only b goes to the engine
        own = lambda call: _call(LINEAR, call.func, *call.args) if call in alone - within else call
        new = lambda call: shared_calls[call] if call in shared_calls else own(call)
        for statement in block[at:] if shared_calls else block[at : at + 1] if alone else ():
            replace(statement, ast.Call, new)
        block[at:at] = before
        return at + len(before) + 1

    def together(self, statements: list[ast.stmt], name: str) -> list[ast.Call]:
        """The calls of linear layers with the argument ``name`` that may run before the first of
        these statements."""
        found: list[ast.Call] = []
        for statement in statements:
            if not self.leaves(statement, name):
                break
            found += [c for c in self.calls(statement) if isinstance(c.args[0], ast.Name) and c.args[0].id == name]
            stored = [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
            if name in stored or isinstance(statement, ast.Return):
                break
        return found

    def leaves(self, statement: ast.stmt, name: str) -> bool:
        """Whether ``statement`` leaves the tensor ``name`` as it is, passes it only to linear layers,
        and draws no random numbers."""
        if not isinstance(statement, _STRAIGHT):
            return False
        nodes = list(ast.walk(statement))
        # the tensor may be an argument of a linear layer, or give an attribute, such as ``x.shape``
        allowed = [n.args[0] for n in nodes if isinstance(n, ast.Call) and self.name_of(n)]
        allowed += [n.value for n in nodes if isinstance(n, ast.Attribute)]
        for node in nodes:
            match node:
                case ast.NamedExpr() | ast.Lambda() | ast.keyword("out"):
                    return False
                case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                    return False
                case ast.Attribute(attr=attribute):
                    in_place = attribute.endswith("_") and not attribute.endswith("__")
                    if in_place or RANDOM.search(attribute):
                        return False
                case ast.Name(id, context):
                    if RANDOM.search(id) or (id == name and isinstance(context, ast.Load) and node not in allowed):
                        return False
        return True

    def of_experts(self, call: ast.Call) -> ast.Call:
        match call:
            case ast.Call(ast.Attribute(ast.Name("self"), "experts"), [_, _, _] as arguments, []):
                if not any(isinstance(argument, ast.Starred) for argument in arguments):
                    self.found.add("experts")
                    return _call(EXPERTS, call.func, *arguments)
        return call
