"""Neighbouring steps of a forward that one kernel can do: a residual addition and the norm after
it; norms of heads and their rotation.

The source of a forward is read, and rewritten where it has literally one of these patterns. x, n,
q, k are names; a and b are any expressions:

    s = a + b; r = s; n = self.norm(s)   ->   r, n = add_norm(self.norm, a, b); s = r
    r = x; n = self.norm(x)              ->   r, n = add_norm(self.norm, x); x = r

    q = self.q_norm(a).transpose(1, 2); k = self.k_norm(b).transpose(1, 2); q, k = apply_rotary_pos_emb(q, k, cos, sin)     (also without transpose)
        ->   q = a.transpose(1, 2); k = b.transpose(1, 2); q, k = qk_norm_rope(self.q_norm, self.k_norm, apply_rotary_pos_emb, q, k, cos, sin)

    create_causal_mask(...)   ->   informed(create_causal_mask, given, kwargs)(...)      (see ``transformers/attention.py``)

    x = self.mlp(n); x = r + x; return x   ->   x = last(self.mlp, n); x = r + x; return x      (only sums and tuples of names may follow)

In the second pattern, the norm's backward adds the gradients of r and of the norm's input, for
which autograd would need another pass over memory. The new function decides at each call: if a
module is not simply our RMSNorm, or the rope function is not ours, it does what the source did. The
rest of the forward does not change, and a traceback shows the rewritten lines.
"""  # noqa: E501

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel import memory
from liger_kernel.ops._core.operator import use_kernels
from liger_kernel.ops.norms.fused_add_rms_norm import fused_add_rms_norm, rms_norm_of_sum
from liger_kernel.ops.rotary.qk_norm_rope import MAX_D, qk_norm_rope
from liger_kernel.transformers import attention
from liger_kernel.transformers.patching import projections
from liger_kernel.transformers.recognise.plain import plain, unhooked
from liger_kernel.transformers.recognise.variant import LINEARS, NORM_FORMS, ROPE_FORMS, are_numbers


def _form_of(norm: Any, x: Any) -> tuple[float, str, str] | None:
    """Offset, casting and the name of the attribute with the eps, if ``norm`` is our RMSNorm
    without hooks or wrappers and kernels can run it on ``x``."""
    if (
        torch.compiler.is_compiling()
        or not plain(x)
        or not use_kernels(x)
        or not x.is_floating_point()
        or not isinstance(norm, nn.Module)
    ):
        return None
    function, w = getattr(norm.forward, "__func__", None), getattr(norm, "weight", None)
    form = None if function is None else NORM_FORMS.get(function)
    fits = (
        form is not None
        and unhooked(norm)
        and plain(w)
        and w.shape == x.shape[-1:]
        and are_numbers(getattr(norm, form[2]))
    )
    return form if fits else None


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
    )
    fits = fits and plain(cos) and cos.ndim == 3 and cos.shape[0] in (1, q.shape[0])
    fits = fits and not (
        (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled()
    )  # our kernels would return only a part of their gradient
    if turn is None or form is None or not fits or getattr(q_norm, form[2]) != getattr(k_norm, form[2]):
        q, k = (
            norm(x.transpose(1, 2)).transpose(1, 2) if transposed else norm(x) for norm, x in ((q_norm, q), (k_norm, k))
        )
        return rope(q, k, cos, sin)
    memory.taken()  # the projections have read the value
    (layout, angles, rope_casting), (offset, casting, eps) = turn, form
    options = dict(eps=getattr(q_norm, eps), offset=offset, casting=casting, layout=layout, rope_casting=rope_casting)
    return qk_norm_rope(q, k, q_norm.weight, k_norm.weight, angles(cos), angles(sin), **options)


def _name(node: Any) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _assigned(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """Name and value of ``name = value``."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and (name := _name(statement.targets[0])):
        return name, statement.value
    return None


def _norm_of(value: ast.expr) -> tuple[ast.expr, str] | None:
    """Module and argument of ``self.some_norm(name)``."""
    if not (
        isinstance(value, ast.Call)
        and len(value.args) == 1
        and not value.keywords
        and (argument := _name(value.args[0]))
    ):
        return None
    module = value.func
    if isinstance(module, ast.Attribute) and _name(module.value) == "self" and "norm" in module.attr.lower():
        return module, argument
    return None


def _assignment(targets: list[str], value: ast.expr, at: ast.stmt) -> ast.stmt:
    names: list[ast.expr] = [ast.Name(t, ast.Store()) for t in targets]
    target = names[0] if len(names) == 1 else ast.Tuple(names, ast.Store())
    return ast.copy_location(ast.Assign([target], value), at)


ADD_NORM, NORM_ROPE = "_liger_add_norm", "_liger_norm_rope"
LAST = "_liger_last"
HELPERS = {ADD_NORM: add_norm, NORM_ROPE: norm_rope, LAST: memory.last} | projections.HELPERS | attention.HELPERS
NORMS, PROJECTIONS, MASKS = "norms", "projections", "masks"  # the parts that may be fused


def _normed(value: Any) -> tuple[ast.expr, ast.expr, bool] | None:
    """Module and argument of ``self.some_norm(anything)`` or
    ``self.some_norm(anything).transpose(1, 2)``, and whether it is transposed."""
    transposed = (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "transpose"
    )
    if transposed and ast.unparse(value).endswith(".transpose(1, 2)"):
        value = value.func.value
    elif transposed:
        return None
    if not (
        isinstance(value, ast.Call)
        and len(value.args) == 1
        and not value.keywords
        and isinstance(value.func, ast.Attribute)
    ):
        return None
    module = value.func
    return (
        (module, value.args[0], transposed) if _name(module.value) == "self" and "norm" in module.attr.lower() else None
    )


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _norm_before(block: list[ast.stmt], end: int, name: str) -> tuple[int, tuple[ast.expr, ast.expr, bool]] | None:
    """Where ``name`` was last assigned before ``end``, if its value was a norm and no statement
    has read it since."""
    for at in range(end - 1, -1, -1):
        if (assigned := _assigned(block[at])) is not None and assigned[0] == name:
            found = _normed(assigned[1])
            return None if found is None else (at, found)
        if name in _names(block[at]):
            return None
    return None


def _fuse_ropes(block: list[ast.stmt]) -> int:
    """Fuse the norms of queries and keys in ``block`` with the rotations; returns how many."""
    count = 0
    for i, statement in enumerate(block):
        if not (
            isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.value, ast.Call)
        ):
            continue
        target, call = statement.targets[0], statement.value
        function = _name(call.func) or ""
        if not (
            isinstance(target, ast.Tuple)
            and function.startswith("apply_rotary")
            and len(call.args) == 4
            and not call.keywords
        ):
            continue
        names = [_name(e) for e in target.elts]
        if len(names) != 2 or None in names or names != [_name(a) for a in call.args[:2]] or names[0] == names[1]:
            continue
        norms = [_norm_before(block, i, name) for name in filter(None, names)]
        if norms[0] is None or norms[1] is None or norms[0][1][2] != norms[1][1][2]:
            continue
        for at, (_, argument, transposed) in filter(None, norms):
            value = (
                ast.Call(ast.Attribute(argument, "transpose", ast.Load()), [ast.Constant(1), ast.Constant(2)], [])
                if transposed
                else argument
            )
            normed: Any = block[at]
            block[at] = ast.copy_location(ast.Assign(normed.targets, value), normed)
        modules = [norm[1][0] for norm in filter(None, norms)]
        arguments = [*modules, call.func, ast.Constant(norms[0][1][2]), *call.args]
        block[i] = ast.copy_location(
            ast.Assign([target], ast.Call(ast.Name(NORM_ROPE, ast.Load()), arguments, [])), statement
        )
        count += 1
    return count


def _fused(block: list[ast.stmt], at: int) -> tuple[int, list[ast.stmt]] | None:
    """If a pattern begins at ``at``: how many statements it has, and the statements that replace
    them."""
    here = [_assigned(s) for s in block[at : at + 3]]
    if not here or here[0] is None:
        return None
    (first, value), n = here[0], 1
    added = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
    names = {first}
    if added:
        if len(here) > 1 and here[1] and _name(here[1][1]) == first:
            names.add(here[1][0])
            n = 2
    elif source := _name(value):
        names.add(source)
    else:
        return None
    if len(here) <= n or (last := here[n]) is None or (norm := _norm_of(last[1])) is None or norm[1] not in names:
        return None
    module, normed = norm[0], last[0]
    left = sorted(names - {normed})  # names that hold the sum afterwards
    if not left:
        return None  # only the norm needs the sum
    operands = [value.left, value.right] if isinstance(value, ast.BinOp) else [value]
    call = ast.Call(ast.Name(ADD_NORM, ast.Load()), [module, *operands], [])
    new = [_assignment([left[0], normed], call, block[at])]
    new += [_assignment([name], ast.Name(left[0], ast.Load()), block[at]) for name in left[1:]]
    return n + 1, new


def _rewrite(block: list[ast.stmt]) -> tuple[list[ast.stmt], int]:
    """``block`` with the patterns in it and in nested blocks fused, and their number."""
    out: list[ast.stmt] = []
    found, at = _fuse_ropes(block), 0
    while at < len(block):
        if (match := _fused(block, at)) is not None:
            taken, new = match
            out += new
            found += 1
            at += taken
            continue
        statement = block[at]
        for part in ("body", "orelse", "finalbody"):
            inner = getattr(statement, part, None)
            if isinstance(inner, list) and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                new, n = _rewrite(inner)
                setattr(statement, part, new)
                found += n
        out.append(statement)
        at += 1
    return out, found


def _keeps_nothing(statement: ast.stmt) -> bool:
    """Whether a statement only adds names or puts them in a tuple, so that it saves nothing for
    the backward."""
    if isinstance(statement, ast.If):
        return isinstance(statement.test, ast.Name) and all(map(_keeps_nothing, (*statement.body, *statement.orelse)))
    if not isinstance(statement, ast.Assign | ast.AugAssign | ast.Return) or statement.value is None:
        return False
    if isinstance(statement, ast.AugAssign) and not isinstance(statement.value, ast.Tuple):
        return False
    plain = ast.Name | ast.Load | ast.Tuple
    added = statement.value
    names = [added.left, added.right] if isinstance(added, ast.BinOp) and isinstance(added.op, ast.Add) else [added]
    return all(isinstance(node, plain) for name in names for node in ast.walk(name))


def _mark_last(body: list[ast.stmt]) -> None:
    """Mark the module after which a forward saves nothing for the backward."""
    for statement in reversed(body):
        if _keeps_nothing(statement):
            continue
        assigned = _assigned(statement)
        call = None if assigned is None else assigned[1]
        one = (
            isinstance(call, ast.Call)
            and len(call.args) == 1
            and not call.keywords
            and isinstance(call.args[0], ast.Name)
        )
        if (
            one
            and isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and _name(call.func.value) == "self"
        ):
            call.func, call.args = ast.Name(LAST, ast.Load()), [call.func, *call.args]
        return


def _fuse(tree: ast.FunctionDef, parts: frozenset[str], methods: frozenset[str] | None) -> tuple[bool, frozenset[str]]:
    """Fuse the patterns of these parts in a function; returns whether there are any but linear
    layers, and the attributes that are called as such."""
    found, masks = 0, MASKS in parts and attention.rewrite(tree)
    if NORMS in parts:
        in_place = [node for node in ast.walk(tree) if isinstance(node, ast.AugAssign)]
        if all(isinstance(node.value, ast.Tuple) for node in in_place):  # ``outputs += (weights,)``
            tree.body, found = _rewrite(tree.body)
    linears = projections.rewrite(tree, methods) if PROJECTIONS in parts and methods is not None else frozenset()
    if found:
        _mark_last(tree.body)  # after the linear layers, which must be found as they are written
    return bool(found) or masks, linears


def _class_attributes(forward: types.FunctionType) -> frozenset[str] | None:
    """The names of all attributes of a method's class, such as methods and properties; None if
    the class cannot be found."""
    first, *rest = forward.__qualname__.split(".")[:-1] or [""]
    owner = forward.__globals__.get(first)
    for name in rest:
        owner = getattr(owner, name, None)
    return frozenset(dir(owner)) if isinstance(owner, type) else None


@functools.cache
def fused(forward: types.FunctionType, parts: frozenset[str] = frozenset({NORMS})) -> types.FunctionType | None:
    """Return ``forward`` with its patterns fused; None if it has none, or if its source is not
    what runs (a wrapper, a closure, a changed function)."""
    tree = _tree(forward)
    if tree is None:
        return None
    found, linears = _fuse(tree, parts, _class_attributes(forward))
    return _compiled(forward, tree, HELPERS, linears) if found or linears else None


@functools.cache
def seeing(
    forward: types.FunctionType, swaps: tuple[tuple[str, Callable, Callable], ...], parts: frozenset[str]
) -> types.FunctionType | None:
    """Return ``forward`` that reads each global (name, stock, ours) of ``swaps`` as ours, while the
    module has stock under this name; None as for ``fused``.

    It reads all other globals from the module at each call, so it sees later replacements.
    ``parts``: the patterns to fuse as well.
    """
    tree = _tree(forward)
    if tree is None:
        return None
    _, linears = _fuse(tree, parts, _class_attributes(forward))
    values: dict[str, Any] = dict(HELPERS)
    for name, stock, ours in swaps:
        values |= {f"_liger_stock_{name}": stock, f"_liger_{name}": ours}
    return _compiled(forward, _Choice({name for name, *_ in swaps}).visit(tree), values, linears)


class _Choice(ast.NodeTransformer):
    """``name`` becomes ``(ours if name is stock else name)``."""

    def __init__(self, names: set[str]):
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.names or not isinstance(node.ctx, ast.Load):
            return node
        load = lambda name: ast.copy_location(ast.Name(name, ast.Load()), node)
        stands = ast.Compare(load(node.id), [ast.Is()], [load(f"_liger_stock_{node.id}")])
        return ast.copy_location(ast.IfExp(stands, load(f"_liger_{node.id}"), load(node.id)), node)


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
    if any(isinstance(node, (ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom)) for node in ast.walk(tree)):
        return None
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(tree)
        if isinstance(node, (ast.Attribute, ast.Name))
    }
    if any(
        name.startswith("__") and not name.endswith("__") for name in names
    ):  # Python mangles these names inside their class
        return None
    return tree


def _compiled(
    forward: types.FunctionType, tree: ast.FunctionDef, values: dict[str, Any], linears: frozenset[str]
) -> types.FunctionType:
    """``tree`` compiled to a function like ``forward``. Its body sees ``values`` under their
    names. Its globals are the model's own, without new names."""
    arguments = tree.args
    tree.returns = None
    for a in (
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        *filter(None, (arguments.vararg, arguments.kwarg)),
    ):
        a.annotation = None
    nothing = lambda: ast.Constant(None)  # a place for the values, which are set below
    arguments.defaults, arguments.kw_defaults = (
        [nothing() for _ in arguments.defaults],
        [d and nothing() for d in arguments.kw_defaults],
    )
    factory: Any = ast.parse(f"def factory({', '.join(values)}):\n    return {tree.name}")
    factory.body[0].body.insert(0, tree)
    text = ast.unparse(ast.fix_missing_locations(factory))
    place = (
        "<liger_kernel: "
        f"{', '.join([f'{forward.__module__}.{forward.__qualname__}', *values.keys() - HELPERS.keys()])}>"
    )
    linecache.cache[place] = len(text), None, text.splitlines(keepends=True), place
    scope: dict[str, Any] = {}
    exec(compile(text, place, "exec"), forward.__globals__, scope)
    new = scope["factory"](**values)
    new.__defaults__, new.__kwdefaults__, new.__annotations__ = (
        forward.__defaults__,
        forward.__kwdefaults__,
        forward.__annotations__,
    )
    for name in ("__module__", "__qualname__", "__doc__"):
        setattr(new, name, getattr(forward, name))
    if linears:
        LINEARS[new] = linears, lambda module: None
    return new
