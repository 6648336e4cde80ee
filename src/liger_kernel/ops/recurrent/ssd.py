"""State space duality (Dao and Gu, arXiv:2405.21060; Mamba-2, Granite 4, Nemotron-H): a layer whose
state decays by how long a token's time step is,

    S_t = e^(A dt_t) S_{t-1} + dt_t x_t B_t^T,      y_t = S_t C_t + D x_t.

Shapes: x, y (B, T, H, P), dt (B, T, H), B, C (B, T, groups, N), A (H,), D (H,) or (H, P), states
(documents, H, P, N). Each group of B and C belongs to H / groups successive heads. dt can be given
before its bias, its softplus and its limits.

The reference goes from token to token. The kernels go from chunk to chunk: with G the running sum of
A dt in a chunk, G_L the last of G, E_ij = e^(G_i - G_j) for i >= j, and S the state before the chunk,

    P_ij = <C_i, B_j> E_ij dt_j,   y = P x + e^G C S^T + D x
    S' = e^G_L S + (dt e^(G_L - G) x)^T B.

And in the backward, with dS' the gradient of S', W_ij = <dy_i, x_j> E_ij dt_j, and
r = <C_i, B_j> W_ij below the diagonal,

    dx = dt u + D dy,   u_j = sum_i <C_i, B_j> E_ij dy_i + e^(G_L - G) dS' B,   dD = sum dy x
    dS = e^G_L dS' + (e^G dy)^T C
    dC = W B + e^G dy S,   dB = W^T C + dt e^(G_L - G) x dS',   both summed over a group's heads
    da_t = sum_{i>=t} (sum_j (r_ij - r_ji) + <C_i, e^G dy S>) + sum_{j<t} dt_j <x_j, e^(G_L - G) dS' B>
           + e^G_L <S, dS'>,   where a = A dt
    ddt = A da + <x, u>,   dA = sum dt da.

Memory: the backward needs the inputs, dt and G, and the state before each chunk, P N / L numbers for
each token and head, or with ``recompute`` nothing but the inputs. Products have operands of x's
dtype and sums in fp32: in 16 bits, states and gradients in fp32 are as exact as that.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._core import Case, Cost, T, acc, checks, launch_config, nbytes, op, typed_launcher
from liger_kernel.ops._core.operator import launch, once_differentiable, rows_of, shaped, use_kernels
from liger_kernel.ops._core.reduce import column_sum
from liger_kernel.ops._core.schema import SymInt
from liger_kernel.ops._core.tl import cdiv, next_power_of_2
from liger_kernel.ops.recurrent.cu_seqlens import bounds, checked, token_by_token
from liger_kernel.ops.recurrent.gated_delta_rule import _dense, _states_of, chunks_of
from liger_kernel.ops.recurrent.ssd_kernels import _dsteps, _outputs, _readers, _steps, _walk_states, _writers

# heads and states that kernels have registers for, in 16 bits and in fp32; the reference computes others
MAX_P, MAX_N, MAX_N_PRECISE = 128, 256, 128


def reference(
    x, dt, A, B, C, D, *, dt_bias, dt_softplus, dt_limit, initial_state, output_final_state, cu_seqlens, **how
):  # fmt: skip
    (H, P), N, dtype = x.shape[2:], B.shape[-1], acc(x.dtype)
    given, (x, dt, A, B, C) = x.dtype, (t.to(dtype) for t in (x, dt, A, B, C))
    dt = dt if dt_bias is None else dt + dt_bias.to(dtype)
    dt = (torch.nn.functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    B, C = (t.repeat_interleave(H // max(t.shape[2], 1), 2) for t in (B, C))

    def step(t: int, S: Tensor) -> tuple[Tensor, Tensor]:
        S = S * (A * dt[:, t]).exp()[..., None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        return S, torch.einsum("bhpn,bhn->bhp", S, C[:, t])

    y, final = token_by_token(step, x, (H, P, N), initial_state, cu_seqlens, output_final_state)
    y = x if y is None else y
    if D is not None:
        y = y + x * (D.to(dtype) if D.ndim == 2 else D.to(dtype)[:, None])
    return y.to(given), final


# kernel -> warps and stages; the same where heads or states are wide, which one stage and the registers
# of more threads have room for
TILES = {"states": (4, 3), "outputs": (4, 2), "readers": (4, 2), "writers": (4, 2)}
WIDE = {"states": (4, 3), "outputs": (4, 1), "readers": (8, 1), "writers": (8, 1)}
# columns of a state that a program of the walk has, and heads of a group that a program of the others
# has: more of them need programs for fewer processors
STATE_COLUMNS, HEADS = 64, 16


def _precise(x: Tensor) -> bool:
    return x.dtype == torch.float32


def has_kernel(x: Tensor, columns: int) -> bool:
    """Whether kernels compute the scan of ``x`` with states of so many columns."""
    most = MAX_N_PRECISE if _precise(x) else MAX_N
    return use_kernels(x) and x.shape[-1] <= MAX_P and columns <= most


def _is_wide(x: Tensor, N: int) -> bool:
    return x.shape[-1] > 64 or N > 128


def _chunk(x: Tensor, N: int) -> tuple[int, int]:
    """Tokens of a chunk, and of a program: fewer where fp32 or wide heads would not leave registers or
    shared memory for more, or heads or states are narrow (see ``gated_delta_rule``)."""
    if _precise(x):
        return 16, 16
    if launch_config.arch() == "cpu":
        return 32, 16
    small = _is_wide(x, N) and launch_config.shared_memory() < 160 << 10
    return (32, 32) if small or min(x.shape[-1], N) < 64 else (64, 64)


def _tile(kernel: str, x: Tensor, N: int) -> dict[str, Any]:
    """The meta parameters of a kernel."""
    warps, stages = (WIDE if _is_wide(x, N) else TILES)[kernel]
    arch = launch_config.arch()
    if arch == "cpu" or arch.startswith("gfx") or _precise(x):
        warps, stages = 4, 1
    # three products in tf32 would pass twice the error of the token-by-token scan
    exact = not arch.startswith("sm") or torch.get_float32_matmul_precision() == "highest"
    precision = "ieee" if exact or not _precise(x) else "tf32"
    P, width = x.shape[-1], max(16, next_power_of_2(N))
    found = dict(
        PRECISION=precision,
        PRECISE=_precise(x),
        DP=P,
        DN=N,
        BLOCK_P=max(16, next_power_of_2(P)),
        BLOCK_N=width,
        STAGES=stages,
    )
    own = dict(BLOCK_S=min(width, STATE_COLUMNS)) if kernel == "states" else dict()
    return found | own | dict(num_warps=warps, num_stages=stages)


@typed_launcher
def ssd_fwd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    state: Tensor | None, cu_seqlens: Tensor | None, length: SymInt, softplus: bool, low: float, high: float,
    outputs: bool, final: bool, keep: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """y (M, H, P) of M tokens in rows of ``length``, and if they are asked for, the final state and
    what the backward needs."""
    x, B, C = map(_dense, (x, B, C))
    (H, P), (groups, N), (chunk, rows) = x.shape[1:], B.shape[1:], _chunk(x, B.shape[2])
    begins, places_of = chunks_of(x, cu_seqlens, length, chunk)
    documents, chunks, new = begins.shape[0] - 1, places_of.shape[0], x.new_empty
    steps, S = new(chunks, H, 2 + _precise(x), chunk, dtype=torch.float32), new(chunks, H, P, N)
    y = new(x.shape if outputs else 0)
    end = new((documents, H, P, N) if final else 0, dtype=torch.float32 if state is None else state.dtype)
    sx, sB, sC = x.stride(0), B.stride(0), C.stride(0)
    how = dict(SOFTPLUS=softplus, PRECISE=_precise(x), CHUNK=chunk, BLOCK_H=16, num_warps=4)
    launch(_steps, (chunks * cdiv(H, 16),), dt, dt_bias, A, places_of, steps, dt.stride(0), H, low, high, **how)
    how = dict(GROUP=H // groups, BACK=False, CHUNK=chunk, **_tile("states", x, N))
    grid, found = (documents * H * (how["BLOCK_N"] // how["BLOCK_S"]),), end if final else None
    launch(_walk_states, grid, x, B, steps, begins, state, S, found, None, None, sx, sB, H, **how)
    if outputs:
        how = dict(GROUP=H // groups, HEADS=HEADS, CHUNK=chunk, ROWS=rows, **_tile("outputs", x, N))
        how["WIDE"] = D is not None and D.ndim == 2
        grid = (chunks * (chunk // rows) * groups * cdiv(H // groups, HEADS),)
        launch(_outputs, grid, x, B, C, D, steps, S, places_of, y, sx, sB, sC, groups, **how)
    return y, end, [begins, places_of, steps, S] if keep else []


@typed_launcher
def ssd_bwd(
    dy: Tensor | None, dfinal: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    dt_bias: Tensor | None, state: Tensor | None, saved: list[Tensor], softplus: bool, low: float, high: float,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients; those that are not ``needed`` are empty."""
    begins, places_of, steps, S = saved
    (M, H, P), (groups, N), (chunks, *_, chunk), rows = x.shape, B.shape[1:], steps.shape, _chunk(x, B.shape[2])[1]
    # without a gradient, only the final state has one
    x, B, C, dy = map(_dense, (x, B, C, x.new_zeros(x.shape) if dy is None else dy.flatten(0, 1)))
    GROUP, fp32 = H // groups, dict[str, Any](dtype=torch.float32)
    of_dt, parts, wide = needed[1] or needed[2] or needed[6], cdiv(GROUP, HEADS), D is not None and D.ndim == 2
    strides = x.stride(0), B.stride(0), C.stride(0), dy.stride(0)
    shared = dict(GROUP=GROUP, HEADS=HEADS, CHUNK=chunk, ROWS=rows)
    tiles = chunk // rows
    grid = (chunks * tiles * groups * parts,)
    dense = lambda t, need: x.new_empty(
        t.shape if need and t is not None else 0, dtype=x.dtype if t is None else t.dtype
    )
    # of the heads of one program, or of parts of them that are added up
    group_sums = lambda: x.new_empty(parts, M, groups, N, dtype=x.dtype if parts == 1 else torch.float32)
    summed = lambda t: t[0] if parts == 1 else t.sum(0).to(x.dtype)
    how = dict(GROUP=GROUP, BACK=True, CHUNK=chunk, **_tile("states", x, N))
    slices = how["BLOCK_N"] // how["BLOCK_S"]
    of_rows, cols, carried = (
        x.new_empty(chunks, H, *s, **fp32) if of_dt else None for s in ((1 + _precise(x), chunk), (3, chunk), (slices,))
    )
    dstate, dS = dense(state, needed[7]), S
    args: tuple[Any, ...]
    if of_dt or needed[0] or needed[3] or needed[7]:
        dS, walks = torch.empty_like(S), ((begins.shape[0] - 1) * H * slices,)
        args = dy, C, steps, begins, dfinal, dS, dstate if needed[7] else None, S, carried, strides[3], strides[2], H
        launch(_walk_states, walks, *args, **how)
    dC = dB = x.new_empty(0)
    if needed[4] or of_dt:
        dC = group_sums()
        args = x, B, C, dy, steps, S, places_of, dC, of_rows, *strides, groups, M
        launch(_readers, grid, *args, **shared, **_tile("readers", x, N))
        dC = summed(dC) if needed[4] else x.new_empty(0)
    dx, dD = x.new_empty(0), dense(D, needed[5])
    if of_dt or needed[0] or needed[3] or needed[5]:
        dx, dB = x.new_empty(x.shape), group_sums()
        parts_of_D = x.new_zeros(chunks * tiles, H * P, **fp32) if needed[5] else None
        args = x, B, C, dy, D, steps, dS, places_of, dx, dB, parts_of_D, cols, *strides, groups, M
        launch(_writers, grid, *args, WIDE=wide, **shared, **_tile("writers", x, N))
        dx, dB = dx if needed[0] else x.new_empty(0), summed(dB) if needed[3] else x.new_empty(0)
        if needed[5]:
            dD = column_sum(parts_of_D, torch.float32).view(H, P)
            dD = (dD if wide else dD.sum(1)).to(D.dtype)
    ddt, dA, dbias = dense(dt, needed[1]), dense(A, needed[2]), dense(dt_bias, needed[6])
    if of_dt:
        all_ddt, sums = x.new_empty(M, H, dtype=dt.dtype), x.new_empty(chunks, 2 * H, **fp32)
        args = dt, dt_bias, A, places_of, steps, of_rows, cols, carried, all_ddt, sums, dt.stride(0), H, low, high
        how = dict(SOFTPLUS=softplus, PRECISE=_precise(x), SLICES=slices, CHUNK=chunk, BLOCK_H=16, num_warps=4)
        launch(_dsteps, (chunks * cdiv(H, 16),), *args, **how)
        ddt = all_ddt if needed[1] else ddt
        if needed[2] or needed[6]:
            sums = column_sum(sums, torch.float32)
            dA = sums[:H].to(A.dtype) if needed[2] else dA
            dbias = sums[H:].to(dt_bias.dtype, copy=True) if needed[6] else dbias
    return dx, ddt, dA, dB, dC, dD, dbias, dstate


class SSDFunction(torch.autograd.Function):
    """``apply(x, dt, A, B, C, D, dt_bias, state, cu_seqlens, softplus, low, high, final, keep)``: y and
    the final state, or an empty tensor. Without ``keep``, a backward computes again what it needs."""

    @staticmethod
    def forward(ctx, x, dt, A, B, C, D, dt_bias, state, cu_seqlens, softplus, low, high, final, keep):
        ctx.set_materialize_grads(False)
        dense = lambda t: None if t is None else t.contiguous()
        x_rows, B_rows, C_rows = (t.flatten(0, 1) for t in (x, B, C))
        given = x_rows, rows_of(dt), dense(A), B_rows, C_rows, dense(D), dense(dt_bias), dense(state)
        cu_seqlens = dense(cu_seqlens)
        how = softplus, low, high
        y, end, saved = ssd_fwd(*given, cu_seqlens, x.shape[1], *how, True, final, keep)
        ctx.save_for_backward(*given, cu_seqlens, *saved)
        ctx.how, ctx.length, ctx.final = how, x.shape[1], final
        return shaped(y, x.shape), end

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dfinal):
        needed = list(ctx.needs_input_grad[:8])
        x, dt, A, B, C, D, dt_bias, state, cu_seqlens, *saved = ctx.saved_tensors
        given = x, dt, A, B, C, D, dt_bias, state
        if not saved:
            _, _, saved = ssd_fwd(*given, cu_seqlens, ctx.length, *ctx.how, False, False, True)
        dfinal = dfinal.contiguous() if ctx.final and dfinal is not None else None
        grads = ssd_bwd(dy, dfinal, *given, list(saved), *ctx.how, needed)
        # x, dt, B and C have tokens
        rows = lambda i, d: d.unflatten(0, (-1, ctx.length)) if i in (0, 1, 3, 4) else d
        found = [rows(i, d) if need else None for i, (d, need) in enumerate(zip(grads, needed))]
        return *found, None, None, None, None, None, None


def _step(*shape: int, dtype: torch.dtype) -> Tensor:
    """Time steps before their softplus, which is about 0.05."""
    return torch.randn(*shape, dtype=dtype) - 3


def _rate(*shape: int, dtype: torch.dtype) -> Tensor:
    return -torch.rand(*shape, dtype=dtype) * 8 - 0.5


def _tensors(B: int, length: int, H: int, P: int, groups: int, N: int) -> dict[str, Any]:
    of_groups = T((B, length, groups, N))
    given = dict(x=T((B, length, H, P)), dt=T((B, length, H), _step), A=T((H,), _rate), B=of_groups, C=of_groups)
    return given | dict(D=T((H,)), dt_bias=T((H,)), dt_softplus=True)


def _cost(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, **more: Any) -> Cost:
    (_, _, H, P), N, state = x.shape, B.shape[-1], more.get("initial_state")
    small = A, D, more.get("dt_bias"), more.get("cu_seqlens")
    given, out = nbytes(x, dt, B, C, state, *small), nbytes(x)
    if more.get("output_final_state"):
        out += 4 * x.shape[0] * H * P * N if state is None else state.nbytes
    # token by token, where what a token adds to the state is no product
    product = [(x.numel() // max(P, 1), P, N)]
    return Cost(given + out, 2 * given + out, gemms=(product, product * 2))


@op(
    reference=reference,
    cases=[
        Case("granite-4", _tensors(2, 37, 4, 16, 1, 32)),
        Case(
            "packed",
            _tensors(1, 40, 4, 24, 2, 16) | _states_of(6, 4, 24, 16) | dict(cu_seqlens=bounds(0, 0, 1, 34, 34, 37, 40)),
        ),
        Case(
            "limits",
            _tensors(2, 39, 3, 16, 3, 24)
            | _states_of(2, 3, 16, 24)
            | dict(dt_limit=(0.02, 0.2), D=T((3, 16)), recompute=True),
        ),
        Case("plain", _tensors(3, 1, 2, 16, 2, 16) | dict(D=None, dt_bias=None, dt_softplus=False, dt=T((3, 1, 2)))),
    ],
    cost=_cost,
)
def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The scan of Mamba-2: each head has a state that decays over a token's time step ``dt``, adds
    ``dt x B^T``, and is read by C. Returns y (B, T, H, P) in x's dtype, and the state behind each
    document, which is None unless ``output_final_state``.

    x (B, T, H, P), B and C (B, T, groups, N): one dtype, any strides; the number of groups divides H.
    dt (B, T, H): ``dt_bias`` (H,) is added, the softplus is taken if ``dt_softplus``, and the result
    limited to ``dt_limit``, all in fp32. A (H,): negative; models have its logarithm, -exp(A_log). D
    (H,) or (H, P): how much of x is added to y. States (documents, H, P, N); the final one has the
    dtype of the initial one, or fp32. ``cu_seqlens`` (documents + 1,), integers that rise from 0 to
    T: where documents begin in the only row; without it, each row is a document. Differentiable in
    all floating-point tensors, and through the final state. ``recompute``: the backward computes
    states again instead of saving them.

    In 16 bits, fp32 gradients of dt, A and the bias and states in fp32 come from products of 16-bit
    operands, too. Kernels have heads of up to 128 values and states of up to 256 columns, 128 in fp32.
    """
    name = "ssd"
    if x.ndim != 4 or not x.is_floating_point():
        raise ValueError(f"{name}: x must be floating point of shape (B, T, H, P), got {x.dtype} {tuple(x.shape)}")
    rows, length, H, P = x.shape
    if B.ndim != 4 or B.shape[:2] != x.shape[:2] or B.dtype != x.dtype:
        raise ValueError(
            f"{name}: B must have shape ({rows}, {length}, groups, N) and dtype {x.dtype}, got {B.dtype} "
            f"{tuple(B.shape)}"
        )
    if C.shape != B.shape or C.dtype != B.dtype:
        raise ValueError(
            f"{name}: C must have B's shape and dtype, {tuple(B.shape)} {B.dtype}, got {tuple(C.shape)} {C.dtype}"
        )
    groups, N = B.shape[2:]
    if H and (not groups or H % groups):
        raise ValueError(f"{name}: B must have a number of groups that divides x's heads, {H}, got {groups}")
    documents = checked(name, cu_seqlens, x, "x")
    checks.floating_shape(name, (rows, length, H), dt=dt)
    checks.floating_shape(name, (H,), A=A, dt_bias=dt_bias)
    if D is not None:
        checks.floating_shape(name, (H,) if D.ndim == 1 else (H, P), D=D)
    checks.floating_shape(name, (documents, H, P, N), initial_state=initial_state)
    low, high = dt_limit
    if not low <= high:
        raise ValueError(f"{name}: dt_limit must be two numbers that do not fall, got {dt_limit}")
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(x.device)
    if not (has_kernel(x, N) and x.numel() and N):
        how = dict(initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
        return reference(x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit, **how)
    given = x, dt, A, B, C, D, dt_bias, initial_state
    keep = not recompute and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    # what no fp32 number is beyond
    low, high = max(float(low), -3.4e38), min(float(high), 3.4e38)
    y, end = SSDFunction.apply(*given, cu_seqlens, dt_softplus, low, high, output_final_state, keep)
    return y, end if output_final_state else None
