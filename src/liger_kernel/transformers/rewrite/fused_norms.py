"""Steps around a norm that one kernel does with it: the residual addition before it, or, of the
norms of heads, the rotation after them. x, n, q, k are names; A and B any expressions:

    s = A + B; r = s; n = self.norm(s)   ->   r, n = add_norm(self.norm, A, B); s = r
    r = x; n = self.norm(x)              ->   r, n = add_norm(self.norm, x); x = r

    q = self.q_norm(A).transpose(1, 2)   ->   q = A.transpose(1, 2)
    k = self.k_norm(B).transpose(1, 2)   ->   k = B.transpose(1, 2)
    q, k = apply_rotary(q, k, c, s)      ->   q, k = norm_rope(self.q_norm, self.k_norm, q, k, c, s)

    x = self.mlp(n); x = r + x; return x   ->   x = last(self.mlp, n); x = r + x; return x

The third form also without ``transpose``. In the last one, only sums and tuples of names may
follow. In the second one, the norm's backward adds the gradients of r and of the norm's input, for
which autograd would need another pass over memory.
"""

from __future__ import annotations

import ast
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel import memory
from liger_kernel.ops._core.operator import use_kernels
from liger_kernel.ops.norms.fused_add_rms_norm import fused_add_rms_norm, rms_norm_of_sum
from liger_kernel.ops.rotary.qk_norm_rope import MAX_D, qk_norm_rope
from liger_kernel.transformers.recognise.plain import plain, unhooked
from liger_kernel.transformers.recognise.variant import NORM_FORMS, ROPE_FORMS, are_numbers
from liger_kernel.transformers.rewrite.patterns import Found, build, each_statement, match, names_in

ADD_NORM, NORM_ROPE, LAST = "_liger_add_norm", "_liger_norm_rope", "_liger_last"


# -- what runs -------------------------------------------------------------------------------------


def _form_of(norm: Any, x: Any) -> tuple[float, str, str] | None:
    """Offset, casting and the name of the attribute with the eps, if ``norm`` is our RMSNorm
    without hooks or wrappers and kernels can run it on ``x``."""
    if torch.compiler.is_compiling() or not plain(x) or not use_kernels(x) or not x.is_floating_point():
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
    if (
        form is None
        or not a.shape[-1]
        or not a.is_contiguous()
        or (b is not None and not (_alike(a, b) and b.is_contiguous()))
    ):
        s = a if b is None else a + b
        return s, norm(s)
    offset, casting, eps = form
    options = dict(eps=getattr(norm, eps), offset=offset, casting=casting)
    y, s = fused_add_rms_norm(a, b, norm.weight, **options)
    memory.declare(y, rms_norm_of_sum, s, norm.weight, **options)
    return s, y


def _alike(a: Tensor, b: Any) -> bool:
    return plain(b) and b.shape == a.shape and b.dtype == a.dtype and b.device == a.device


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
    memory.taken()  # the projections have read the value
    (layout, angles, rope_casting), (offset, casting, eps) = turn, form
    options = dict(eps=getattr(q_norm, eps), offset=offset, casting=casting, layout=layout, rope_casting=rope_casting)
    return qk_norm_rope(q, k, q_norm.weight, k_norm.weight, angles(cos), angles(sin), **options)


HELPERS = {ADD_NORM: add_norm, NORM_ROPE: norm_rope, LAST: memory.last}


# -- where it runs ---------------------------------------------------------------------------------

# s: the sum, or what is only kept; r: its other name; n: the normed rows. The longest come first
_RESIDUAL = (
    "s = A + B; r = s; n = norm(s)",
    "s = A + B; r = s; n = norm(r)",
    "s = A + B; n = norm(s)",
    "r = s; n = norm(s)",
    "r = s; n = norm(r)",
)


def rewrite(tree: ast.FunctionDef) -> bool:
    """Rewrite the norms of a forward; returns whether there are any to rewrite."""
    # ``x += y`` would also change what has x's tensor by another name. ``outputs += (weights,)`` is
    # a tuple's
    in_place = [node for node in ast.walk(tree) if isinstance(node, ast.AugAssign)]
    if not all(isinstance(node.value, ast.Tuple) for node in in_place):
        return False
    # rotations first: a norm of heads may follow an assignment, too, and gains more with its rotation
    each_statement(tree.body, _with_rotation)
    each_statement(tree.body, _with_residual)
    return bool(names_in(tree) & HELPERS.keys())


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
