"""Gated linear unit: ``y = act(gate) * up``, the product of a gated MLP's two projections (Shazeer,
arXiv:2002.05202).

Shapes: gate, up, y (..., I). Packed: gate (..., 2 I) holds gate and up side by side, and neither is
copied.

act(gate) is rounded to the dtype of gate before the product, as in models that write ``act_fn(gate)
* up``.

What models add, in this order: ``gate * gate_multiplier``, rounded (Falcon-H1); gate at most
``limit``, up within +-limit (DeepSeek-V4, GLM-5); with ``alpha`` act(alpha gate) / alpha, which for
silu is gate sigmoid(alpha gate), and up + ``offset`` (gpt-oss); the product times
``down_multiplier``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, launch_config, nbytes, once_differentiable, op, typed_launcher
from liger_kernel.ops._core.operator import launch, rows_of, shaped, use_kernels
from liger_kernel.ops._core.tl import cdiv, div, exp_of, jit, load_tile, own_block, tl

# what models name in many ways: `transformers/recognise` finds out which of these a model has
ACTS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}


def check_act(op: str, act: str, limit: float | None = None, alpha: float = 1.0) -> None:
    """Raise ``ValueError`` if there is no such activation."""
    if act not in ACTS:
        raise ValueError(f"{op}: act must be one of {sorted(ACTS)}, got {act!r}")
    if limit is not None and not limit > 0:
        raise ValueError(f"{op}: limit must be positive or None, got {limit}")
    if not alpha > 0:
        raise ValueError(f"{op}: alpha must be positive, got {alpha}")


def reference(
    gate, up=None, *, act="silu", gate_multiplier=1.0, limit=None, alpha=1.0, offset=0.0, down_multiplier=1.0
):
    # in the order in which models do it, and rounded after each step as they are
    if up is None:
        gate, up = gate.chunk(2, -1)
    if gate_multiplier != 1:
        gate = gate * gate_multiplier
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    h = gate.to(acc(gate.dtype))
    # with the strides of gate: with others, PyTorch's gelu differs in the last bit
    h = ACTS[act](h) if alpha == 1 else ACTS[act](h * alpha) / alpha
    y = h.to(gate.dtype) * (up + offset if offset else up)
    return y if down_multiplier == 1 else y * down_multiplier


@jit
def _inverse(x, PRECISE: tl.constexpr):
    # the hardware's quotient is exact enough for what is rounded to 16 bits
    return div(tl.full(x.shape, 1.0, tl.float32), x) if PRECISE else 1.0 / x


@jit
def act_and_slope(x, ACT: tl.constexpr, PRECISE: tl.constexpr):
    """act(x) and its derivative, in fp32; silu as PyTorch's kernels compute it, so that values
    rounded to bf16 are the same. ``PRECISE``: for fp32 data."""
    if ACT == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        y = x * cdf
        dy = cdf + x * 0.3989422804014327 * exp_of(-0.5 * x * x, PRECISE)
    elif ACT == "relu2":
        # not a maximum: a NaN stays one
        r = tl.where(x <= 0, 0.0, x)
        y = r * r
        dy = 2.0 * r
    else:
        u = x
        # as a sigmoid, (1 + tanh u) / 2 = sigmoid(2 u): without the difference of two numbers that are
        # nearly one
        if ACT == "gelu_tanh":
            u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        e = exp_of(-u, PRECISE)
        s = _inverse(1.0 + e, PRECISE)
        # sigmoid(-u), accurate relative to its value, as s is: each form where it does not cancel
        c = tl.where(u >= 0, e * s, 1.0 - s)
        if ACT == "silu":
            y = div(x, 1.0 + e)
            dy = s * (1.0 + x * c)
        elif ACT == "gelu_tanh":
            y = x * s
            dy = s + x * s * c * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        else:
            y = s
            dy = s * c
    return y, dy


@jit
def act_of(x, ACT: tl.constexpr, PRECISE: tl.constexpr):
    # the compiler drops the slope
    y, _ = act_and_slope(x, ACT, PRECISE)
    return y


# parts of a tensor with a largest value of their own
MAXIMA = 16
_MAXIMA = tl.constexpr(MAXIMA)


@jit
def _largest(x, maxima_ptr):
    """Add the largest finite |x| of a tile to one of ``MAXIMA`` maxima: so many, because atomics
    on one address wait for each other."""
    # a value that is infinite would make zeros of all others in FP8
    size = tl.abs(x)
    size = tl.where(size < float("inf"), size, 0.0)
    tl.atomic_max(maxima_ptr + tl.program_id(0) % _MAXIMA, tl.max(tl.max(size, 1), 0), sem="relaxed")


@jit
def _fwd(
    gate_ptr, up_ptr, y_ptr, maxima_ptr,
    M, N, gate_stride, up_stride, y_stride, gate_multiplier, limit, alpha, offset, down_multiplier,
    ACT: tl.constexpr, SCALED: tl.constexpr, CLAMPED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``maxima``: (MAXIMA,) zeros that get the largest values of y; without it they are not
    searched."""
    row, col, mask = own_block(M, N, BLOCK_M, BLOCK_N)
    gate = tl.load(gate_ptr + row[:, None] * gate_stride + col[None, :], mask=mask, other=0.0)
    up = load_tile(up_ptr, row, col, up_stride, mask)
    # gate keeps its dtype, to which act(gate) is rounded
    g = gate.to(tl.float32)
    if SCALED:
        g = (g * gate_multiplier).to(gate.dtype).to(tl.float32)
    # not minimum and maximum, which lose a NaN
    if CLAMPED:
        g = tl.where(g > limit, limit, g)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    PRECISE: tl.constexpr = gate.dtype == tl.float32
    # each rounding is one of stock: act(gate) to its dtype, then the product
    if SCALED:
        y = (act_of(g * alpha, ACT, PRECISE) / alpha).to(gate.dtype).to(tl.float32) * (up + offset) * down_multiplier
    else:
        y = act_of(g, ACT, PRECISE).to(gate.dtype).to(tl.float32) * up
    y = y.to(y_ptr.dtype.element_ty)
    if maxima_ptr is not None:
        _largest(tl.where(mask, y.to(tl.float32), 0.0), maxima_ptr)
    tl.store(y_ptr + row[:, None] * y_stride + col[None, :], y, mask=mask)


@jit
def _bwd(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr, maxima_ptr,
    M, N, dy_stride, gate_stride, up_stride, dgate_stride, dup_stride, gate_multiplier, limit, alpha, offset,
    down_multiplier,
    ACT: tl.constexpr, SCALED: tl.constexpr, CLAMPED: tl.constexpr, NEED_DGATE: tl.constexpr, NEED_DUP: tl.constexpr,
    NEED_Y: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y, where needed, has dy's strides. Outputs may be what the inputs are: a program has loaded
    all of its tile before it stores.

    ``maxima``: (3, MAXIMA) zeros that get those of y, dgate and dup; without it they are
    not searched.
    """
    row, col, mask = own_block(M, N, BLOCK_M, BLOCK_N)
    dy = load_tile(dy_ptr, row, col, dy_stride, mask)
    gate = tl.load(gate_ptr + row[:, None] * gate_stride + col[None, :], mask=mask, other=0.0)
    g = gate.to(tl.float32)
    PRECISE: tl.constexpr = gate.dtype == tl.float32
    if SCALED:
        dy = dy * down_multiplier
        g = (g * gate_multiplier).to(gate.dtype).to(tl.float32)
    # dup alone does not depend on up
    if CLAMPED or NEED_DGATE or NEED_Y:
        up = load_tile(up_ptr, row, col, up_stride, mask)
    # names must exist in every variant, also where nothing is clamped
    free_gate = mask
    free_up = mask
    # a gradient flows where a clamp changed nothing, and where a NaN is
    if CLAMPED:
        free_gate = ~(g > limit)
        free_up = ~(tl.abs(up) > limit)
        g = tl.where(free_gate, g, limit)
        up = tl.where(free_up, up, tl.where(up > 0, limit, -limit))
    if SCALED:
        y, dact = act_and_slope(g * alpha, ACT, PRECISE)
        y = y / alpha
    else:
        y, dact = act_and_slope(g, ACT, PRECISE)
    # the product once more, bit for bit as in the forward, which did not save it
    if NEED_Y:
        whole = y.to(gate.dtype).to(tl.float32)
        whole = (whole * (up + offset) * down_multiplier if SCALED else whole * up).to(y_ptr.dtype.element_ty)
        if maxima_ptr is not None:
            _largest(tl.where(mask, whole.to(tl.float32), 0.0), maxima_ptr)
        tl.store(y_ptr + row[:, None] * dy_stride + col[None, :], whole, mask=mask)
    if NEED_DGATE:
        if SCALED:
            dgate = dy * (up + offset) * dact * gate_multiplier
        else:
            dgate = dy * up * dact
        if CLAMPED:
            dgate = tl.where(free_gate, dgate, 0.0)
        dgate = dgate.to(dgate_ptr.dtype.element_ty)
        if maxima_ptr is not None:
            _largest(tl.where(mask, dgate.to(tl.float32), 0.0), maxima_ptr + _MAXIMA)
        tl.store(dgate_ptr + row[:, None] * dgate_stride + col[None, :], dgate, mask=mask)
    if NEED_DUP:
        dup = dy * y
        if CLAMPED:
            dup = tl.where(free_up, dup, 0.0)
        dup = dup.to(dup_ptr.dtype.element_ty)
        if maxima_ptr is not None:
            _largest(tl.where(mask, dup.to(tl.float32), 0.0), maxima_ptr + 2 * _MAXIMA)
        tl.store(dup_ptr + row[:, None] * dup_stride + col[None, :], dup, mask=mask)


def _grid(M: int, N: int, itemsize: int) -> tuple[tuple[int], dict[str, int]]:
    # H200, 8192 x 14336 bf16: 2048 columns per program of 4 warps; wider tiles are not faster
    c = launch_config.tile("glu", N, itemsize, elements=2048, max_block_n=2048)
    return (cdiv(M, c.block_m) * cdiv(N, c.block_n),), c.tile


class Form(NamedTuple):
    """What models add to the product; see the module's docstring."""

    gate_multiplier: float = 1.0
    limit: float | None = None
    alpha: float = 1.0
    offset: float = 0.0
    down_multiplier: float = 1.0


@functools.cache
def _arguments(
    gate_multiplier: float, limit: float | None, alpha: float, offset: float, down_multiplier: float
) -> tuple[tuple[float, ...], dict[str, bool]]:
    """A ``Form`` as the kernels take it: arguments and constexprs."""
    scaled = (gate_multiplier, alpha, offset, down_multiplier) != (1, 1, 0, 1)
    # as floats: an integer would be compiled as another kernel
    numbers = tuple(map(float, (gate_multiplier, limit or 0.0, alpha, offset, down_multiplier)))
    return numbers, dict(SCALED=scaled, CLAMPED=limit is not None)


@typed_launcher
def glu_fwd(gate: Tensor, up: Tensor, act: str, *form: Form) -> Tensor:
    return glu_into(None, gate, up, act, *form)


def glu_into(maxima: Tensor | None, gate: Tensor, up: Tensor, act: str, *form: Any) -> Tensor:
    """The forward for a launcher. ``maxima`` (MAXIMA,), zeros in fp32, gets the largest finite sizes
    in parts of the output."""
    M, N = gate.shape
    y = gate.new_empty(M, N, dtype=torch.promote_types(gate.dtype, up.dtype))
    grid, tile = _grid(M, N, gate.itemsize)
    numbers, flags = _arguments(*form)
    numbers = M, N, gate.stride(0), up.stride(0), N, *numbers
    launch(_fwd, grid, gate, up, y, maxima, *numbers, ACT=act, **flags, **tile)
    return y


@typed_launcher
def glu_bwd(
    dy: Tensor, gate: Tensor, up: Tensor, act: str, packed: bool, need_dgate: bool, need_dup: bool, *form: Form
) -> tuple[Tensor, Tensor]:
    """dgate and dup; those that are not needed are empty; ``packed``: both side by side in the
    first, the second empty."""
    M, N = gate.shape
    dgate = gate.new_empty(M, 2 * N) if packed else gate.new_empty((M, N) if need_dgate else (0, 0))
    dup = up.new_empty((M, N) if need_dup and not packed else (0, 0))
    # halves of one tensor, for the one product of the backward of a packed projection
    d0, d1 = (dgate[:, :N], dgate[:, N:]) if packed else (dgate, dup)
    grid, tile = _grid(M, N, gate.itemsize)
    numbers, flags = _arguments(*form)
    strides = dy.stride(0), gate.stride(0), up.stride(0), d0.stride(0), d1.stride(0)
    # a packed gradient is one tensor: both halves are written, or neither
    needs = dict(NEED_DGATE=need_dgate or packed, NEED_DUP=need_dup or packed, NEED_Y=False)
    launch(_bwd, grid, dy, gate, up, d0, d1, None, None, M, N, *strides, *numbers, ACT=act, **flags, **needs, **tile)
    return dgate, dup


def glu_bwd_(
    dy: Tensor, gate: Tensor, up: Tensor, act: str, need_y: bool, *form: Any, maxima: Tensor | None = None
) -> None:
    """Overwrite gate and up with dgate and dup and, if needed, dy with the output of the forward.
    The calling launcher must own all three.

    ``maxima`` (3, MAXIMA), zeros in fp32, gets the largest finite sizes in parts of that output, of
    dgate and of dup.
    """
    M, N = gate.shape
    grid, tile = _grid(M, N, gate.itemsize)
    numbers, flags = _arguments(*form)
    # a program has loaded all of its tile before it stores
    args = gate, up, gate, up, dy if need_y else None, maxima, M, N, dy.stride(0), *(gate.stride(0), up.stride(0)) * 2
    needs = dict(NEED_DGATE=True, NEED_DUP=True, NEED_Y=need_y)
    launch(_bwd, grid, dy, *args, *numbers, ACT=act, **flags, **needs, **tile)


class GLUFunction(torch.autograd.Function):
    """``apply(gate, up or None, act="silu", form=Form())``."""

    @staticmethod
    def forward(ctx, gate, up, act="silu", form=Form()):  # noqa: B008
        ctx.shape, ctx.act, ctx.packed, ctx.form = gate.shape, act, up is None, form
        gate = rows_of(gate)
        gate, up = (gate[:, : gate.shape[1] // 2], gate[:, gate.shape[1] // 2 :]) if ctx.packed else (gate, rows_of(up))
        # views of a packed gate: neither half is copied
        ctx.save_for_backward(gate, up)
        return shaped(glu_fwd(gate, up, act, *form), (*ctx.shape[:-1], gate.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        need_dgate, need_dup, _, _ = ctx.needs_input_grad
        dgate, dup = glu_bwd(rows_of(dy), *ctx.saved_tensors, ctx.act, ctx.packed, need_dgate, need_dup, *ctx.form)
        return dgate.view(ctx.shape) if need_dgate else None, dup.view(ctx.shape) if need_dup else None, None, None


def _wide(*shape: int, dtype: torch.dtype) -> Tensor:
    return 4 * torch.randn(*shape, dtype=dtype)


@op(
    reference=reference,
    cases=[
        Case("llama", dict(gate=T((6, 96)), up=T((6, 96)))),
        Case("gemma", dict(gate=T((2, 5, 72)), up=T((2, 5, 72)), act="gelu_tanh")),
        Case("exact-gelu", dict(gate=T((5, 70)), up=T((5, 70)), act="gelu")),
        Case("relu2", dict(gate=T((5, 64)), up=T((5, 64)), act="relu2")),
        Case("sigmoid", dict(gate=T((5, 64)), up=T((5, 64)), act="sigmoid")),
        Case("phi3", dict(gate=T((2, 3, 128)), up=None)),
        Case("odd-packed", dict(gate=T((5, 66)), up=None, act="gelu_tanh")),
        Case("gpt-oss", dict(gate=T((5, 64), _wide), up=T((5, 64), _wide), limit=7.0, alpha=1.702, offset=1.0)),
        Case("deepseek-v4", dict(gate=T((3, 80), _wide), up=None, limit=5.0)),
        Case("falcon-h1", dict(gate=T((5, 64)), up=T((5, 64)), gate_multiplier=0.37, down_multiplier=1.9)),
        Case("one", dict(gate=T((1, 1)), up=T((1, 1)))),
    ],
    cost=lambda gate, up=None, **_: (
        Cost(nbytes(gate) * 3 // 2, nbytes(gate) * 5 // 2, flops=(gate.numel(), 2 * gate.numel()))
        if up is None
        else Cost(nbytes(gate, up, gate), nbytes(gate, up, gate, up, gate), flops=(2 * gate.numel(), 4 * gate.numel()))
    ),
)
def glu(
    gate: Tensor, up: Tensor | None = None, *,
    act: str = "silu", gate_multiplier: float = 1.0, limit: float | None = None, alpha: float = 1.0,
    offset: float = 0.0, down_multiplier: float = 1.0,
) -> Tensor:  # fmt: skip
    """``act(gate) * up``, with act silu, gelu (exact), gelu_tanh, relu2 or sigmoid.

    gate, up (..., I) in fp32, fp16, bf16 or fp64, any strides; or gate (..., 2 I) and no up, for
    projections that are one packed matrix.
    gpt-oss: ``limit=7.0, alpha=1.702, offset=1.0``.
    """
    if not gate.is_floating_point():
        raise ValueError(f"glu: gate must be floating point, got {gate.dtype}")
    check_act("glu", act, limit, alpha)
    if up is None and gate.shape[-1] % 2:
        raise ValueError(f"glu: packed gate must have an even last dim, got {gate.shape[-1]}")
    if up is not None and up.shape != gate.shape:
        raise ValueError(f"glu: up must have shape {tuple(gate.shape)}, got {tuple(up.shape)}")
    form = (gate_multiplier, limit, alpha, offset, down_multiplier)
    if not use_kernels(gate, fusible=True):
        return reference(gate, up, act=act, **Form(*form)._asdict())
    return GLUFunction.apply(gate, up, act, form)
