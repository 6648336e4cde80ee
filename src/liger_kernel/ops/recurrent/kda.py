"""Kimi Delta Attention (Kimi Team, arXiv:2510.26692; Kimi-Linear): the gated delta rule with a decay
for each channel of the keys,

    S_t = A_t S_{t-1} + beta_t k_t (v_t - (A_t S_{t-1})^T k_t)^T,  A = diag(e^g),  o_t = scale S_t^T q_t.

Shapes: q, k, g (B, T, H, DK), v, o (B, T, H, DV), beta (B, T, H), states (documents, H, DK, DV).

Formulas, launchers and the function of autograd are those of ``gated_delta_rule``, but E, which
becomes a tensor of three dimensions: with G the running sum of g in a chunk and i >= j,

    L_ij = sum_c k_ic k_jc e^(G_ic - G_jc) below the diagonal,  P_ij = sum_c q_ic k_jc e^(...),
    N = do d^T on the diagonal and below,   M = -z d^T below
    dq_ic = (e^G do S^T)_ic + sum_j N_ij k_jc e^(G_ic - G_jc)
    r_ic = -(e^G z S^T)_ic + sum_j M_ij k_jc e^(G_ic - G_jc)
    w_jc = (e^(G_C - G) d dS'^T)_jc + sum_i (N_ij q_ic + M_ij k_ic) e^(G_ic - G_jc),  dk = r + w
    dg_tc = sum_{i>=t} (q dq + k (r - w))_ic + sum_j (e^(G_C - G) k d dS'^T)_jc + e^G_C <S, dS'>_c

where r is what keys read and w what they write. How products have such decays without an overflow
is in ``kda_kernels``, ``gated_delta_rule`` has the rest. Memory: the backward needs 3 DK numbers
more for each token and head than that of ``gated_delta_rule``, and with ``qk_l2norm`` o.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_kernel.ops._core import Case, T, op
from liger_kernel.ops.recurrent.gated_delta_rule import PACKED, _cost, _decay, _gate, _states_of, recurrence, rule


def reference(
    q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, qk_l2norm, **how
):  # fmt: skip
    return recurrence(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, qk_l2norm)


def _tensors(B: int, length: int, H: int, DK: int, DV: int) -> dict[str, Any]:
    keys = T((B, length, H, DK))
    gates = dict(g=T((B, length, H, DK), _decay), beta=T((B, length, H), _gate))
    return dict(q=keys, k=keys, v=T((B, length, H, DV)), **gates, qk_l2norm=True)


@op(
    reference=reference,
    cases=[
        Case("kimi-linear", _tensors(2, 37, 2, 16, 16)),
        Case("packed", _tensors(1, 40, 1, 24, 16) | _states_of(6, 1, 24, 16) | PACKED),
    ],
    cost=_cost,
)
def kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, qk_l2norm: bool = False, recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Linear attention with a delta rule and a decay of each channel. Returns o (B, T, H, DV) in
    q's dtype, and the state behind each document, which is None unless ``output_final_state``.

    As ``gated_delta_rule``, but q, k and v have the same heads, and g (B, T, H, DK) has the
    logarithm of the decay of each channel, at most 0; below -88 it counts as -88.
    """
    how = dict(scale=scale, initial_state=initial_state, output_final_state=output_final_state)
    how |= dict(cu_seqlens=cu_seqlens, qk_l2norm=qk_l2norm, recompute=recompute)
    return rule("kda", reference, q, k, v, g, beta, **how, channels=True)
