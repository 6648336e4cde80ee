"""What forwards that ``rewrite/rules.py`` has rewritten call: neighbouring steps as one kernel. Each function
decides at each call, and does what the source did if a kernel cannot run."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Mapping
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
from liger_kernel.transformers.recognise.projections import shared
from liger_kernel.transformers.recognise.variant import NORM_FORMS, ROPE_FORMS, are_numbers, decoding, plain, unhooked


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


def shared_once(x: Any, *modules: Any) -> dict[int, Any]:
    """``m(x)`` of each module, by index, for ``pop``."""
    return dict(enumerate(shared(x, *modules)))


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


def decays(a: Any, A_log: Any, dt_bias: Any) -> Any:
    """The logarithms of the decays of a gated delta rule."""
    fits = all(map(plain, (a, A_log, dt_bias))) and a.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not fits or A_log.ndim != 1 or not a.shape[-1:] == A_log.shape == dt_bias.shape:
        return -A_log.float().exp() * F.softplus(a.float() + dt_bias)
    return log_decay(a, A_log, dt_bias)
