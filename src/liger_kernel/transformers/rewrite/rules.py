"""Forwards whose source is rewritten where one kernel does several of its steps. Every rule is safe
for every module: the new functions decide at each call, and do what the source did if a kernel
cannot run.

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
import contextvars
import functools
import itertools
import re
import types
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import masking_utils

from liger_kernel import memory
from liger_kernel._private import apply_of, is_alias_of
from liger_kernel.ops._core.operator import use_kernels
from liger_kernel.ops.norms.fused_add_rms_norm import LigerFusedAddRMSNormFunction, rms_norm_of_sum
from liger_kernel.ops.recurrent.log_decay import log_decay
from liger_kernel.ops.rotary.qk_norm_rope import MAX_D, qk_norm_rope
from liger_kernel.transformers.recognise.attentions import MAKERS
from liger_kernel.transformers.recognise.experts import experts
from liger_kernel.transformers.recognise.projections import linear, shared
from liger_kernel.transformers.recognise.variant import (
    LINEARS,
    NORM_FORMS,
    ROPE_FORMS,
    are_numbers,
    decoding,
    plain,
    unhooked,
)
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
    tree_of,
)

ADD_NORM, NORM_ROPE, LAST = "_liger_add_norm", "_liger_norm_rope", "_liger_last"
RECOMPUTING = "_liger_recomputing"


# -- norms: what runs


def _form_of(norm: Any, x: Any) -> tuple[float, str, str] | None:
    """Offset, casting and the name of the attribute with the eps, if ``norm`` is our RMSNorm
    without hooks or wrappers and kernels can run it on ``x``."""
    if torch.compiler.is_compiling() or decoding(x) or not plain(x) or not use_kernels(x):
        return None
    function = getattr(getattr(norm, "forward", None), "__func__", None)
    form = NORM_FORMS.get(function) if function is not None and isinstance(norm, nn.Module) else None
    if form is None or not unhooked(norm) or not are_numbers(getattr(norm, form[2])):
        return None
    w = getattr(norm, "weight", None)
    return form if plain(w) and w.shape == x.shape[-1:] else None


def add_norm(norm: Any, a: Any, b: Any = None) -> tuple[Any, Any]:
    """Return ``(s, norm(s))`` with ``s = a + b``, or ``s = a`` without b."""
    form = _form_of(norm, a)
    # rows with other strides may be added in another order, and a separate kernel to recompute them
    # is not worth it
    if form is None or not a.shape[-1] or not a.is_contiguous() or not (b is None or _added_as_one(a, b)):
        s = a if b is None else a + b
        return s, norm(s)
    offset, casting, eps = form
    epsilon, w = getattr(norm, eps), norm.weight
    # not the public function: what it checks is known here
    args = a, b, w, epsilon, offset, casting
    y, s = apply_of(LigerFusedAddRMSNormFunction, args)(*args)
    memory.declare(y, rms_norm_of_sum, s, w, eps=epsilon, offset=offset, casting=casting)
    return s, y


def _added_as_one(a: Tensor, b: Any) -> bool:
    return plain(b) and b.is_contiguous() and (b.shape, b.dtype, b.device) == (a.shape, a.dtype, a.device)


def norm_rope(
    q_norm: Any, k_norm: Any, rope: Any, transposed: bool, q: Any, k: Any, cos: Any, sin: Any
) -> tuple[Any, Any]:
    """``rope(q_norm(q), k_norm(k), cos, sin)``. ``transposed``: q and k are (B, H, T, D), and
    the source normalises them before it exchanges dims 1 and 2."""
    turn = None if torch.compiler.is_compiling() else ROPE_FORMS.get(rope)
    form = None if turn is None else _form_of(q_norm, q)
    fits = (
        form is not None
        and form == _form_of(k_norm, k)
        and q.ndim == k.ndim == 4
        and 0 < q.shape[-1] <= MAX_D
        and q.dtype == k.dtype
        and plain(cos)
        and cos.ndim == 3
        and cos.shape[0] in (1, q.shape[0])
        # our kernels would return only a part of the gradient of tables
        and not ((cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled())
    )
    if turn is None or form is None or not fits or getattr(q_norm, form[2]) != getattr(k_norm, form[2]):
        if transposed:
            q, k = (norm(x.transpose(1, 2)).transpose(1, 2) for norm, x in ((q_norm, q), (k_norm, k)))
        else:
            q, k = q_norm(q), k_norm(k)
        return rope(q, k, cos, sin)
    memory.readers_done()  # the projections have read the value
    (layout, angles, rope_casting), (offset, casting, eps) = turn, form
    options = dict(eps=getattr(q_norm, eps), offset=offset, casting=casting, layout=layout, rope_casting=rope_casting)
    return qk_norm_rope(q, k, q_norm.weight, k_norm.weight, angles(cos), angles(sin), **options)


# -- norms: where it runs

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


def shared_once(x: Any, *modules: Any) -> dict[int, Any]:
    """``m(x)`` of each module, by index, for ``pop``."""
    return dict(enumerate(shared(x, *modules)))


def rewrite_linears(tree: ast.FunctionDef, methods: frozenset[str]) -> frozenset[str]:
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
        answer_by_documents()
        token = _documents.set((not several, positions))
        try:
            return make(*args, **arguments)
        finally:
            _documents.reset(token)

    return made


@functools.cache
def answer_by_documents() -> None:
    """Let Transformers take its answer from ``_documents``, while that knows these positions."""
    look = getattr(masking_utils, "find_packed_sequence_indices", None)
    if look is None:
        return

    @functools.wraps(look)
    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        known = None if torch.compiler.is_compiling() else _documents.get()
        # Only for these very positions, of which Transformers passes an expanded alias: another
        # model that a hook calls meanwhile has its own
        if known is None or not is_alias_of(position_ids, known[1]):
            return look(position_ids)
        if known[0]:
            return None
        return (position_ids.diff(prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)

    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices


# -- gates

DECAYS = "_liger_decays"
_GATE = "g = -self.A_log.float().exp() * F.softplus(A.float() + self.dt_bias)"


def decays(a: Any, A_log: Any, dt_bias: Any) -> Any:
    """What ``_GATE`` computes."""
    fits = all(map(plain, (a, A_log, dt_bias))) and a.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not fits or A_log.ndim != 1 or not a.shape[-1:] == A_log.shape == dt_bias.shape:
        return -A_log.float().exp() * F.softplus(a.float() + dt_bias)
    return log_decay(a, A_log, dt_bias)


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

# forward, rules, level -> what they make of it, and those of them that find something
_FUSED: dict[tuple[Callable, frozenset[str], str], tuple[types.FunctionType | None, frozenset[str]]] = {}


def fused(forward: Any, parts: frozenset[str] = frozenset({NORMS}), level: str = "off") -> types.FunctionType | None:
    """Return ``forward`` rewritten by the rules ``parts``, recomputing as ``level`` says; None if they
    find nothing, or if its source is not what runs (a wrapper, a closure, a changed function)."""
    return _fused(forward, parts, level)[0]


def parts_in(forward: Any, parts: frozenset[str], level: str = "off") -> frozenset[str]:
    """Those of the rules ``parts`` that find something in ``forward``."""
    return _fused(forward, parts, level)[1]


def _fused(forward: Any, parts: frozenset[str], level: str) -> tuple[types.FunctionType | None, frozenset[str]]:
    if not isinstance(forward, types.FunctionType):
        return None, frozenset()
    if (forward, parts, level) not in _FUSED:
        tree = tree_of(forward) if parts else None
        found, linears = _rewrite(tree, parts, forward) if tree is not None else (frozenset(), frozenset())
        if tree is not None and level != "off":
            (region,) = build(f"with {RECOMPUTING}({level!r}):\n    ...", {})
            region.body, tree.body = tree.body, [region]  # type: ignore[attr-defined]  # a with
        new = _compiled(forward, tree, {}, linears) if tree is not None and found else None
        # rules that find nothing change nothing: who asks for the others alone gets the same
        # function
        _FUSED[forward, parts, level] = _FUSED[forward, found, level] = new, found
    return _FUSED[forward, parts, level]


@functools.cache
def seeing(
    forward: types.FunctionType, swaps: tuple[tuple[str, Callable, Callable], ...], parts: frozenset[str]
) -> types.FunctionType | None:
    """``forward``, rewritten by the rules ``parts``, that reads each global of ``swaps`` (name,
    stock, ours) as ours, while the module has stock under this name; None as for ``fused``.

    It reads all other globals from the module at each call, so it sees later replacements.
    """
    tree = tree_of(forward)
    if tree is None:
        return None
    _, linears = _rewrite(tree, parts, forward)
    values: dict[str, Any] = {}
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
    masks = MASKS in parts and rewrite_masks(tree)
    norms = NORMS in parts and rewrite_norms(tree)
    gates = GATES in parts and rewrite_gates(tree)
    methods = attributes_of_class(forward) if PROJECTIONS in parts else None
    linears = frozenset() if methods is None else rewrite_linears(tree, methods)
    if norms:
        mark_last(tree.body)  # after the linear layers, which must be found as they are written
    found = {MASKS: masks, NORMS: norms, GATES: gates, PROJECTIONS: bool(linears)}
    return frozenset(part for part, some in found.items() if some), linears


def _compiled(
    forward: types.FunctionType, tree: ast.FunctionDef, values: dict[str, Any], linears: frozenset[str]
) -> types.FunctionType:
    new = compiled(forward, tree, _HELPERS, values)
    if linears:
        LINEARS[new] = linears, lambda module: None
    return new
