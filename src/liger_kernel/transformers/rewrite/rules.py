"""Forwards whose source is rewritten where one kernel does several of its steps. Every rule is safe
for every module: the new functions (``rewrite/joined_steps.py``) decide at each call.

``NORMS``, steps around a norm: the residual addition before it, or, of the norms of heads, the
rotation after them. x, n, q, k are names; A and B any expressions:

    s = A + B; r = s; n = self.norm(s)   ->   r, n = add_norm(self.norm, A, B); s = r
    r = x; n = self.norm(x)              ->   r, n = add_norm(self.norm, x); x = r

    q = self.q_norm(A).transpose(1, 2)   ->   q = A.transpose(1, 2)
    k = self.k_norm(B).transpose(1, 2)   ->   k = B.transpose(1, 2)
    q, k = apply_rotary(q, k, c, s)      ->   q, k = norm_rope(self.q_norm, self.k_norm, q, k, c, s)

    x = self.mlp(n); x = r + x; return x   ->   x = last(self.mlp, n); x = r + x; return x

The third form also without ``transpose``. In the last one, only sums and tuples of names may
follow. In the second one, the norm's backward adds the gradients of r and of the norm's input, for
which autograd would need another pass over memory.

``PROJECTIONS``, calls of own linear layers with one positional argument, or of experts with three.
The engine looks at the layers at each call, so adapters may be added, removed or changed any time:

    y = self.o_proj(a)                   ->   y = linear(self.o_proj, a)

    q = self.q_proj(x).view(s)           ->   _0 = shared(x, self.q_proj, self.k_proj)
    k = self.k_proj(x)                        q = _0.pop(0).view(s)
                                              k = _0.pop(1)

    y = self.experts(x, i, w)            ->   y = experts(self.experts, x, i, w)

Linear layers with the same input are computed together, before the first of them, only if the
result is the same: all of them always run (no condition, loop or lambda is between them), nothing
assigns the name or may write to its tensor, and nothing draws random numbers. ``pop`` releases each
result as early as the source would.

``MASKS``, masks for positions that the call itself knows. Transformers looks in the positions of a
batch without a mask whether a row has several documents, for which the host waits for the GPU. In
the forward of a model that numbers the tokens itself, if it is given no positions,

    mask = create_causal_mask(config=..., position_ids=position_ids)

becomes

    _liger_given = position_ids is not None        # as the first statement
    ...
    mask = informed(create_causal_mask, _liger_given, kwargs)(config=..., position_ids=position_ids)

``GATES``, the decays of a gated delta rule:

    g = -self.A_log.float().exp() * F.softplus(A.float() + self.dt_bias)

becomes

    g = decays(A, self.A_log, self.dt_bias)

What is rewritten of a layer that recomputes cheap values runs in ``with recomputing(level):``.
"""

from __future__ import annotations

import ast
import itertools
import re
import types
from collections.abc import Callable
from itertools import repeat
from typing import Any

from liger_kernel import memory
from liger_kernel.transformers.recognise.attentions import MAKERS
from liger_kernel.transformers.recognise.experts import experts
from liger_kernel.transformers.recognise.projections import linear
from liger_kernel.transformers.recognise.variant import LINEARS
from liger_kernel.transformers.rewrite.joined_steps import add_norm, decays, informed, norm_rope, shared_once
from liger_kernel.transformers.rewrite.source import (
    Found,
    attribute_of_self,
    attributes_of_class,
    build,
    compiled,
    each_statement,
    match,
    names_in,
    replace,
    stored_in,
    tree_of,
)

ADD_NORM, NORM_ROPE, LAST = "_liger_add_norm", "_liger_norm_rope", "_liger_last"
RECOMPUTING = "_liger_recomputing"


# -- norms

# s: the sum, or what is only kept; r: its other name; n: the normed rows. The longest come first
_RESIDUAL = (
    "s = A + B; r = s; n = norm(s)",
    "s = A + B; r = s; n = norm(r)",
    "s = A + B; n = norm(s)",
    "r = s; n = norm(s)",
    "r = s; n = norm(r)",
)


def rewrite_norms(tree: ast.FunctionDef) -> bool:
    """Rewrite the norms of a forward; returns whether there are any to rewrite."""
    # ``x += y`` would also change what has x's tensor by another name. ``outputs += (weights,)`` is
    # a tuple's
    in_place = [node for node in ast.walk(tree) if isinstance(node, ast.AugAssign)]
    if not all(isinstance(node.value, ast.Tuple) for node in in_place):
        return False
    # rotations first: a norm of heads may follow an assignment, too, and gains more with its
    # rotation
    each_statement(tree.body, _with_rotation)
    each_statement(tree.body, _with_residual)
    return bool(names_in(tree) & {ADD_NORM, NORM_ROPE})


def _with_residual(block: list[ast.stmt], at: int) -> int:
    found = next(filter(None, map(match, _RESIDUAL, repeat(block), repeat(at))), None)
    if found is None:
        return at + 1
    count = 3 if {"A", "r"} <= found.keys() else 2
    # names that hold the sum afterwards: sorted, so that each run of Python writes the same source
    names = {found[name].id for name in ("r", "s") if name in found}
    first, *others = sorted(names - {found["n"].id}) or [None]
    if first is None:  # only the norm needs the sum
        return at + 1
    call = f"first, n = {ADD_NORM}(norm, A, B)" if "A" in found else f"first, n = {ADD_NORM}(norm, s)"
    new = build(call, found | {"first": first})
    for other in others:
        new += build("other = first", {"other": other, "first": first})
    block[at : at + count] = new
    return at + len(new)


def _with_rotation(block: list[ast.stmt], at: int) -> int:
    found = match("q, k = rope(q, k, C, S)", block, at)
    if found is None or found["q"].id == found["k"].id:
        return at + 1
    q, k = (_norm_before(block, at, found[name].id) for name in ("q", "k"))
    if q is None or k is None or q[2] != k[2]:
        return at + 1
    for where, norm, transposed in (q, k):
        block[where : where + 1] = build("n = A.transpose(1, 2)" if transposed else "n = A", norm)
    of_norms = {"q_norm": q[1]["norm"], "k_norm": k[1]["norm"], "T": ast.Constant(q[2])}
    block[at : at + 1] = build(f"q, k = {NORM_ROPE}(q_norm, k_norm, rope, T, q, k, C, S)", found | of_norms)
    return at + 1


def _norm_before(block: list[ast.stmt], end: int, name: str) -> tuple[int, Found, bool] | None:
    """Where ``name`` was last assigned before ``end``, the norm that is its value, and whether that
    is transposed; None if it is no norm, or if a statement has read it since."""
    for at in range(end - 1, -1, -1):
        for pattern in ("n = norm(A)", "n = norm(A).transpose(1, 2)"):
            if (found := match(pattern, block, at)) is not None and found["n"].id == name:
                return at, found, "transpose" in pattern
        if name in names_in(block[at]):
            return None
    return None


def mark_last(body: list[ast.stmt]) -> None:
    """Mark the module after which a forward saves nothing for the backward."""
    at = len(body) - 1
    while at >= 0 and _saves_nothing(body[at]):
        at -= 1
    if at >= 0 and (found := match("y = module(x)", body, at)) is not None:
        body[at : at + 1] = build(f"y = {LAST}(module, x)", found)


def _saves_nothing(statement: ast.stmt) -> bool:
    """Whether a statement only adds names or puts them in a tuple."""
    match statement:
        case ast.If(ast.Name()):
            return all(map(_saves_nothing, (*statement.body, *statement.orelse)))
        case ast.Assign(value=ast.BinOp(a, ast.Add(), b)) | ast.Return(ast.BinOp(a, ast.Add(), b)):
            parts = [a, b]
        case ast.AugAssign(value=ast.Tuple() as value) | ast.Assign(value=value) | ast.Return(ast.expr() as value):
            parts = [value]
        case _:
            return False
    return all(isinstance(node, ast.Name | ast.Load | ast.Tuple) for part in parts for node in ast.walk(part))


# -- linear layers

LINEAR, SHARED, EXPERTS = "_liger_linear", "_liger_shared", "_liger_experts"
# How models name linear layers. A wrong guess costs a function call: a module decides by what it is
NAMED = re.compile(
    r"proj|dense|linear|query|key|value|qkv|^[qc]_attn$|^[qkvow]\d?$|^w[qkvo]$|^wi_?\d?$|^wo$|^fc_?\w*$|^lin\d?$"
    r"|^c_\w+$|^[WV][iqkvo]$"
)
NOT_NAMED = re.compile(r"norm|drop|conv|embed|^ln_|act$|act_")
RANDOM = re.compile(r"drop|rand|noise")

_STRAIGHT = ast.Assign | ast.AnnAssign | ast.Return | ast.Expr  # statements that run as a whole
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
# what is inside of these may not run, or more than once
_MAYBE = ast.IfExp | ast.BoolOp | ast.Compare | ast.Lambda | _COMPREHENSIONS | ast.NamedExpr | ast.Await


def rewrite_linears(tree: ast.FunctionDef, methods: frozenset[str]) -> frozenset[str]:
    """Rewrite a forward and return the attributes that it calls as linear layers or experts.
    ``methods``: names that its class has as methods, not modules."""
    arguments = [*tree.args.posonlyargs, *tree.args.args]
    if not arguments or arguments[0].arg != "self" or "self" in stored_in(tree):
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
            if name in stored_in(statement) or isinstance(statement, ast.Return):
                break
        return found

    def leaves(self, statement: ast.stmt, name: str) -> bool:
        """Whether ``statement`` leaves the tensor ``name`` as it is, passes it only to linear
        layers, and draws no random numbers."""
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


# -- masks

INFORMED = "_liger_informed"
_POSITIONS = {"position_ids", "text_position_ids", "cache_position"}
# How models number the tokens of a batch: from 0 on, or after those in a cache; for rotations of
# several axes once for each
_NUMBERED = re.compile(
    r"torch\.arange\((past_seen_tokens, past_seen_tokens \+ )?(inputs_embeds|hidden_states)\.shape\[1\], "
    r"device=(inputs_embeds|hidden_states)\.device\)( \+ past_seen_tokens)?(\.unsqueeze\(0\))?"
    r"|(position_ids|cache_position|\(position_ids \+ past_seen_tokens\))\.unsqueeze\(0\)"
    r"|position_ids\.view\(1, 1, -1\)\.expand\(\d, inputs_embeds\.shape\[0\], -1\)"
    r"|position_ids\[None, \.\.\.\]\.expand\(\d, position_ids\.shape\[0\], -1\)"
    r"|position_ids\[0\]|position_ids\[1:\]|None"
)


def rewrite_masks(tree: ast.FunctionDef) -> bool:
    """Rewrite the forward of a model that numbers its tokens; returns whether it does."""
    masks = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in MAKERS]
    if not masks or not _numbers_tokens(tree):
        return False
    of = tree.args
    more = of.kwarg.arg if of.kwarg else "{}"
    call = lambda name: ast.parse(f"{INFORMED}({name.id}, _liger_given, {more})", mode="eval").body
    replace(tree, ast.Name, lambda name: call(name) if name.id in MAKERS else name)
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


# -- gates

DECAYS = "_liger_decays"
_GATE = "g = -self.A_log.float().exp() * F.softplus(A.float() + self.dt_bias)"


def rewrite_gates(tree: ast.FunctionDef) -> bool:
    """Rewrite the decays of a forward; returns whether there are any."""
    each_statement(tree.body, _with_decays)
    return DECAYS in names_in(tree)


def _with_decays(block: list[ast.stmt], at: int) -> int:
    if (found := match(_GATE, block, at)) is not None and ast.unparse(found["F"]) == "F":
        block[at : at + 1] = build(f"g = {DECAYS}(A, self.A_log, self.dt_bias)", found)
    return at + 1


# -- the rules

NORMS, PROJECTIONS, MASKS, GATES = "norms", "projections", "masks", "gates"
# what the source that the rules write calls
_HELPERS: dict[str, Any] = {ADD_NORM: add_norm, NORM_ROPE: norm_rope, INFORMED: informed, DECAYS: decays}
_HELPERS |= {LINEAR: linear, SHARED: shared_once, EXPERTS: experts}
_HELPERS |= {RECOMPUTING: memory.recomputing, LAST: memory.last}

Swaps = tuple[tuple[str, Callable, Callable], ...]  # name of a global, stock, ours
# forward, rules, level, swaps -> what they make of it, and those of the rules that find something
_REWRITTEN: dict[tuple[Any, ...], tuple[types.FunctionType | None, frozenset[str]]] = {}


def fused(
    forward: Any, parts: frozenset[str] = frozenset({NORMS}), level: str = "off", swaps: Swaps = ()
) -> types.FunctionType | None:
    """Return ``forward`` rewritten by the rules ``parts``, recomputing as ``level`` says; None if they
    find nothing, or if its source is not what runs (a wrapper, a closure, a changed function).

    It reads each global of ``swaps`` as ours, while the module has stock under this name. It reads all
    other globals from the module at each call, so it sees later replacements.
    """
    return _rewritten(forward, parts, level, swaps)[0]


def parts_in(forward: Any, parts: frozenset[str], level: str = "off") -> frozenset[str]:
    """Those of the rules ``parts`` that find something in ``forward``."""
    return _rewritten(forward, parts, level, ())[1]


def _rewritten(
    forward: Any, parts: frozenset[str], level: str, swaps: Swaps
) -> tuple[types.FunctionType | None, frozenset[str]]:
    if (known := _REWRITTEN.get((forward, parts, level, swaps))) is not None:
        return known
    tree = tree_of(forward) if parts or swaps else None
    found, linears = (frozenset(), frozenset()) if tree is None else _rewrite(tree, parts, forward)
    new = None
    if tree is not None and (found or swaps):
        if level != "off":
            (region,) = build(f"with {RECOMPUTING}({level!r}):\n    ...", {})
            region.body, tree.body = tree.body, [region]  # type: ignore[attr-defined]  # a with
        new = compiled(forward, tree, _HELPERS, _swap(tree, swaps))
        if linears:
            LINEARS[new] = linears, lambda module: None
    # rules that find nothing change nothing: who asks for the others alone gets the same function
    _REWRITTEN[forward, parts, level, swaps] = _REWRITTEN[forward, found, level, swaps] = new, found
    return new, found


def _swap(tree: ast.FunctionDef, swaps: Swaps) -> dict[str, Callable]:
    """Let ``tree`` read ours: ``name`` becomes ``(ours if name is stock else name)``. Returns what it
    then sees besides."""
    values: dict[str, Callable] = {}
    expressions: dict[str, str] = {}
    for name, stock, ours in swaps:
        values |= {f"_liger_stock_{name}": stock, f"_liger_{name}": ours}
        expressions[name] = f"_liger_{name} if {name} is _liger_stock_{name} else {name}"
    read = lambda node: node.id in expressions and isinstance(node.ctx, ast.Load)
    replace(tree, ast.Name, lambda node: ast.parse(expressions[node.id], mode="eval").body if read(node) else node)
    return values


def _rewrite(tree: ast.FunctionDef, parts: frozenset[str], forward: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Rewrite a function by these rules; returns the rules that found something, and the
    attributes that are called as linear layers."""
    masks = MASKS in parts and rewrite_masks(tree)
    norms = NORMS in parts and rewrite_norms(tree)
    gates = GATES in parts and rewrite_gates(tree)
    methods = attributes_of_class(forward) if PROJECTIONS in parts else None
    linears = frozenset() if methods is None else rewrite_linears(tree, methods)
    if norms:
        mark_last(tree.body)  # after the linear layers, which must be found as they are written
    found = {MASKS: masks, NORMS: norms, GATES: gates, PROJECTIONS: bool(linears)}
    return frozenset(part for part, some in found.items() if some), linears
