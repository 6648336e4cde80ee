"""Calls that an operator must refuse: for each operator, the arguments of a call, and changes of these
with the text of the ``ValueError``, which begins with the operator's name."""

from __future__ import annotations

import torch

from liger_kernel.ops._core.operator import T
from liger_kernel.ops.losses.logprob_tiles import OUTPUTS
from liger_kernel.ops.recurrent.cu_seqlens import bounds


def F(*shape: int) -> T:
    return T(shape)


def integers(*shape: int) -> T:
    return T(shape, dtype=torch.int64)


def constant(*shape: int) -> T:
    return T(shape, grad=False)


_EXPERTS = dict(x=F(4, 8), gate_up=F(3, 16, 8), down=F(3, 8, 8), topk_index=integers(4, 2), topk_weight=F(4, 2))


def _layer(name: str, N: int, K: int, r: int = 2) -> dict[str, T]:
    """A linear layer with an adapter."""
    return {name: F(N, K), f"{name}_a": F(r, K), f"{name}_b": F(N, r)}


_NO_DIM = torch.tensor(1.0)
_TEACHER = dict(teacher_x=constant(4, 6), teacher_w=constant(10, 6))
_REDUCTION = "reduction must be one of ('mean', 'sum', 'none'), got 'avg'"
_TOP_K = dict(topk_log_probs=constant(4, 2), topk_indices=integers(4, 2), kind="forward_kl")

REFUSED = {
    "glu": (
        dict(gate=F(2, 4), up=F(2, 4)),
        (dict(gate=integers(2, 4)), "gate must be floating point, got torch.int64"),
        (dict(act="swish2"), "act must be one of ['gelu', 'gelu_tanh', 'relu2', 'sigmoid', 'silu'], got 'swish2'"),
        (dict(limit=0.0), "limit must be positive or None, got 0.0"),
        (dict(alpha=-1.0), "alpha must be positive, got -1.0"),
        (dict(up=F(2, 5)), "up must have shape (2, 4), got (2, 5)"),
        (dict(gate=F(2, 5), up=None), "packed gate must have an even last dim, got 5"),
    ),
    "relu_squared": (dict(x=integers(2, 4)), (dict(), "x must be floating point, got torch.int64")),
    "sink_attention": (
        dict(q=F(1, 2, 4, 8), k=F(1, 1, 4, 8), v=F(1, 1, 4, 8), sinks=F(2)),
        (dict(q=F(2, 4, 8)), "q must have shape (B, H, T, D), got torch.float32 (2, 4, 8)"),
        (
            dict(k=F(1, 1, 5, 8)),
            "k must have shape (1, H / G, 4, 8) and dtype torch.float32, got torch.float32 (1, 1, 5, 8)",
        ),
        (
            dict(q=F(1, 3, 4, 8), k=F(1, 2, 4, 8), v=F(1, 2, 4, 8), sinks=F(3)),
            "k must have a number of heads that divides q's, 3, got 2",
        ),
        (
            dict(v=F(1, 2, 4, 8)),
            "v must have k's shape and dtype, (1, 1, 4, 8) torch.float32, got (1, 2, 4, 8) torch.float32",
        ),
        (dict(sinks=F(3)), "sinks must be floating point of shape (2,), got torch.float32 (3,)"),
        (dict(window=0), "window must be positive or None, got 0"),
        (dict(first=F(1, 4)), "first must be integers of shape (1, 4), got torch.float32 (1, 4)"),
        (dict(valid=T((4,), dtype=torch.bool)), "valid must be bool of shape (1, 4), got torch.bool (4,)"),
    ),
    "causal_conv1d": (
        dict(x=F(1, 4, 8), w=F(8, 3)),
        (dict(x=F(4, 8)), "x must be floating point of shape (B, T, D), got torch.float32 (4, 8)"),
        (dict(w=F(8, 5)), "w must be floating point of shape (8, W), W one of (2, 3, 4), got torch.float32 (8, 5)"),
        (dict(act="gelu"), "act must be 'silu' or None, got 'gelu'"),
        (dict(bias=F(4)), "bias must be floating point of shape (8,), got torch.float32 (4,)"),
        (dict(after=F(1, 3, 8)), "after must be floating point of shape (1, 4, 8), got torch.float32 (1, 3, 8)"),
        (
            dict(initial_state=F(1, 8, 3)),
            "initial_state must be floating point of shape (1, 8, 2), got torch.float32 (1, 8, 3)",
        ),
        (dict(x=F(2, 4, 8), cu_seqlens=bounds(0, 4)), "x must have one row if cu_seqlens is given, got 2"),
        (dict(cu_seqlens=F(2)), "cu_seqlens must be int32 or int64 of shape (documents + 1,), got torch.float32 (2,)"),
    ),
    "gated_delta_rule": (
        dict(q=F(1, 4, 2, 16), k=F(1, 4, 2, 16), v=F(1, 4, 4, 16), g=F(1, 4, 4), beta=F(1, 4, 4)),
        (dict(q=F(4, 2, 16)), "q must be floating point of shape (B, T, HK, DK), got torch.float32 (4, 2, 16)"),
        (
            dict(k=F(1, 4, 1, 16)),
            "k must have q's shape and dtype, (1, 4, 2, 16) torch.float32, got (1, 4, 1, 16) torch.float32",
        ),
        (
            dict(v=F(1, 3, 4, 16)),
            "v must have shape (1, 4, HV, DV) and dtype torch.float32, got torch.float32 (1, 3, 4, 16)",
        ),
        (dict(v=F(1, 4, 3, 16)), "v must have a multiple of q's 2 heads, got 3"),
        (dict(g=F(1, 4, 2)), "g must be floating point of shape (1, 4, 4), got torch.float32 (1, 4, 2)"),
        (
            dict(initial_state=F(1, 4, 16, 8)),
            "initial_state must be floating point of shape (1, 4, 16, 16), got torch.float32 (1, 4, 16, 8)",
        ),
    ),
    "kda": (
        dict(q=F(1, 4, 2, 16), k=F(1, 4, 2, 16), v=F(1, 4, 2, 16), g=F(1, 4, 2, 16), beta=F(1, 4, 2)),
        (dict(v=F(1, 4, 4, 16)), "v must have q's 2 heads, got 4"),
        (dict(g=F(1, 4, 2)), "g must be floating point of shape (1, 4, 2, 16), got torch.float32 (1, 4, 2)"),
    ),
    "log_decay": (
        dict(a=T((3, 8)), A_log=T((4,)), dt_bias=T((8,))),
        (dict(a=T((3, 8), dtype=torch.int64)), "a must be floating point of shape (..., N), got torch.int64 (3, 8)"),
        (dict(A_log=T((3,))), "A_log must be floating point of shape (H,), 8 = H D, got torch.float32 (3,)"),
        (dict(dt_bias=T((4,))), "dt_bias must be floating point of shape (8,), got torch.float32 (4,)"),
        (dict(bound=0.5), "bound must be below 0 or None, got 0.5"),
        (dict(dtype=torch.int32), "dtype must be floating point or None, got torch.int32"),
    ),
    "ssd": (
        dict(x=F(1, 4, 4, 8), dt=F(1, 4, 4), A=F(4), B=F(1, 4, 2, 16), C=F(1, 4, 2, 16)),
        (dict(x=F(4, 4, 8)), "x must be floating point of shape (B, T, H, P), got torch.float32 (4, 4, 8)"),
        (
            dict(B=F(1, 3, 2, 16)),
            "B must have shape (1, 4, groups, N) and dtype torch.float32, got torch.float32 (1, 3, 2, 16)",
        ),
        (
            dict(C=F(1, 4, 1, 16)),
            "C must have B's shape and dtype, (1, 4, 2, 16) torch.float32, got (1, 4, 1, 16) torch.float32",
        ),
        (dict(B=F(1, 4, 3, 16), C=F(1, 4, 3, 16)), "B must have a number of groups that divides x's heads, 4, got 3"),
        (dict(dt=F(1, 4, 2)), "dt must be floating point of shape (1, 4, 4), got torch.float32 (1, 4, 2)"),
        (dict(D=F(8)), "D must be floating point of shape (4,) or (4, 8), got torch.float32 (8,)"),
        (dict(dt_limit=(1.0, 0.5)), "dt_limit must be two numbers that do not fall, got (1.0, 0.5)"),
    ),
    "embedding": (
        dict(index=integers(4), w=F(5, 8)),
        (dict(index=F(4)), "index must be integers, got torch.float32"),
        (dict(w=F(5)), "w must have shape (V, N), got (5,)"),
        (dict(w=integers(5, 8)), "w must be floating point, got torch.int64"),
        (dict(padding_idx=5), "padding_idx must be in [-5, 5), got 5"),
    ),
    "fused_add_rms_norm": (
        dict(x=F(4, 8), residual=F(4, 8), w=F(8)),
        *((dict(x=_NO_DIM, residual=r, w=None), "x must have at least one dim, got shape ()") for r in (_NO_DIM, None)),
        (dict(w=F(4)), "w must have shape (8,), got (4,)"),
        (dict(residual=F(1, 8)), "residual must have shape (4, 8), got (1, 8)"),
        (dict(casting="bf16"), "casting must be one of ('llama', 'gemma', 'none'), got 'bf16'"),
        (dict(residual=integers(4, 8)), "residual must be floating point, got torch.int64"),
    ),
    "gated_rms_norm": (
        dict(x=F(4, 8), gate=F(4, 8), w=F(8)),
        (dict(w=F(4)), "w must have shape (8,), got (4,)"),
        (dict(gate=F(1, 8)), "gate must have shape (4, 8), got (1, 8)"),
        (dict(groups=3, gate_first=True), "groups must divide 8, or be 1 without gate_first, got 3"),
        (dict(casting="none", gate_first=True), "casting must be 'llama' or 'gemma' with gate_first, got 'none'"),
        (dict(act="swish"), "act must be one of ['gelu', 'gelu_tanh', 'relu2', 'sigmoid', 'silu'], got 'swish'"),
        (dict(casting="bf16"), "casting must be one of ('llama', 'gemma', 'none'), got 'bf16'"),
        (dict(x=integers(4, 8)), "x must be floating point, got torch.int64"),
    ),
    "layer_norm": (
        dict(x=F(4, 8), w=F(4)),
        (dict(x=_NO_DIM, w=None), "x must have at least one dim, got shape ()"),
        (dict(), "w must have shape (8,), got (4,)"),
        (dict(w=F(8), b=F(1, 8)), "b must have shape (8,), got (1, 8)"),
        (dict(x=integers(4, 8)), "x must be floating point, got torch.int64"),
    ),
    "rms_norm": (
        dict(x=F(4, 8), w=F(4)),
        (dict(x=_NO_DIM, w=None), "x must have at least one dim, got shape ()"),
        (dict(), "w must have shape (8,), got (4,)"),
        (dict(w=F(8), casting="bf16"), "casting must be one of ('llama', 'gemma', 'none'), got 'bf16'"),
        (dict(x=integers(4, 8)), "x must be floating point, got torch.int64"),
    ),
    "mlp": (
        dict(x=F(2, 4), gate=F(8, 4), up=F(8, 4), down=F(4, 8)),
        (dict(x=_NO_DIM), "x must have at least one dim, got shape ()"),
        (dict(x=integers(2, 4)), "x must be floating point, got torch.int64"),
        (dict(gate=F(8, 5)), "gate must have shape (I, 4), got (8, 5)"),
        (dict(gate=F(9, 4), up=None), "gate must have shape (2 I, 4) where up is None, got (9, 4)"),
        (dict(up=F(9, 4)), "up must have shape (8, 4), got (9, 4)"),
        (dict(down=F(4, 9)), "down must have shape (4, 8), got (4, 9)"),
        (dict(down=T((4, 8), dtype=torch.float64)), "down must have x's dtype, torch.float32, got torch.float64"),
        (dict(act="swish2"), "act must be one of ['gelu', 'gelu_tanh', 'relu2', 'sigmoid', 'silu'], got 'swish2'"),
    ),
    "lora_linear": (
        dict(x=F(6, 8), scale=0.5, weight=F(12, 8), a=F(3, 8), b=F(12, 3)),
        (dict(x=integers(6, 8)), "x must be floating point, got torch.int64"),
        (dict(weight=F(12, 9)), "weight must have shape (N, 8), got (12, 9)"),
        (dict(a=F(0, 8), b=F(12, 0)), "a must have shape (r >= 1, 8), got (0, 8)"),
        (dict(a=F(3, 9)), "a must have shape (r >= 1, 8), got (3, 9)"),
        (dict(b=F(12, 4)), "b must have shape (12, 3), got (12, 4)"),
        (dict(weight=T((12, 8), dtype=torch.float64)), "weight must have x's dtype, torch.float32, got torch.float64"),
        (dict(bias=F(11)), "bias must have shape (12,), got (11,)"),
        (dict(magnitude=F(12, 1)), "magnitude must have shape (12,), got (12, 1)"),
    ),
    "lora_qkv": (
        dict(x=F(6, 8), scale=0.5) | _layer("q", 12, 8) | _layer("k", 4, 8) | _layer("v", 4, 8, 3),
        (dict(x=integers(6, 8)), "x must be floating point, got torch.int64"),
        (dict(k=F(4, 7)), "k must have shape (N, 8), got (4, 7)"),
        (dict(v_a=F(3, 7)), "v_a must have shape (r >= 1, 8), got (3, 7)"),
        (dict(q_b=F(12, 1)), "q_b must have shape (12, 2), got (12, 1)"),
    ),
    "lora_mlp": (
        dict(x=F(6, 8), scale=0.5) | _layer("gate", 12, 8) | _layer("up", 12, 8) | _layer("down", 8, 12),
        (dict(x=integers(6, 8)), "x must be floating point, got torch.int64"),
        (dict(up=F(11, 8)), "up must have shape (12, 8), got (11, 8)"),
        (dict(down=F(8, 11)), "down must have shape (8, 12), got (8, 11)"),
        (dict(down_a=F(2, 8)), "down_a must have shape (r >= 1, 12), got (2, 8)"),
        (dict(act="swish2"), "act must be one of ['gelu', 'gelu_tanh', 'relu2', 'sigmoid', 'silu'], got 'swish2'"),
    ),
    "moe": (
        _EXPERTS,
        (dict(x=integers(4, 8)), "x must be floating point, got torch.int64"),
        (dict(x=F(1, 4, 8)), "x must have shape (T, H), got (1, 4, 8)"),
        (dict(gate_up=F(3, 16, 9)), "gate_up must have shape (E, 2 I, 8), got (3, 16, 9)"),
        (dict(down=F(3, 8, 9)), "down must have shape (3, 8, 8), got (3, 8, 9)"),
        (dict(topk_index=F(4, 2)), "topk_index must be integers of shape (4, K), got torch.float32 (4, 2)"),
        (dict(topk_weight=F(4, 3)), "topk_weight must be floating point of shape (4, 2), got torch.float32 (4, 3)"),
        (dict(down_bias=F(3, 9)), "down_bias must have shape (3, 8), got (3, 9)"),
        (dict(down=T((3, 8, 8), dtype=torch.float64)), "down must have x's dtype, torch.float32, got torch.float64"),
        (dict(limit=0.0), "limit must be positive or None, got 0.0"),
        (dict(alpha=0.0), "alpha must be positive, got 0.0"),
        (dict(act="swish2"), "act must be one of ['gelu', 'gelu_tanh', 'relu2', 'sigmoid', 'silu'], got 'swish2'"),
    ),
    "lora_moe": (
        _EXPERTS | dict(gate_up_a=F(3, 2, 8), gate_up_b=F(3, 16, 2), down_a=F(3, 2, 8), down_b=F(3, 8, 2)),
        (dict(x=F(1, 4, 8)), "x must have shape (T, H), got (1, 4, 8)"),
        (dict(down=F(3, 8, 9)), "down must have shape (3, 8, 8), got (3, 8, 9)"),
        (dict(down_b=None), "down_b must be given with down_a, got None"),
        (dict(down_a=F(3, 2, 9)), "down_a must have shape (3, r >= 1, 8), got (3, 2, 9)"),
        (dict(down_a=F(3, 0, 8), down_b=F(3, 8, 0)), "down_a must have shape (3, r >= 1, 8), got (3, 0, 8)"),
        (dict(gate_up_b=F(3, 16, 3)), "gate_up_b must have shape (3, 16, 2), got (3, 16, 3)"),
        (dict(gate_up_a=integers(3, 2, 8)), "gate_up_a must be floating point, got torch.int64"),
    ),
    "rope": (
        dict(q=F(2, 4, 7, 16), k=F(2, 2, 7, 16), cos=F(1, 7, 8), sin=F(1, 7, 8)),
        (dict(q=F(4, 7, 16), k=F(2, 7, 16)), "q and k must be 4-dimensional, got (4, 7, 16) and (2, 7, 16)"),
        (dict(k=F(2, 2, 6, 16)), "q and k must agree but for the heads, got (2, 4, 7, 16) and (2, 2, 6, 16)"),
        (
            dict(cos=F(1, 6, 8), sin=F(1, 6, 8)),
            "cos and sin must have shape (2 or 1, 7, at most 8), got (1, 6, 8) and (1, 6, 8)",
        ),
        (
            dict(q=F(2, 4, 5, 16), k=F(2, 2, 5, 16), position_ids=integers(2, 5), cos=F(1, 11, 9), sin=F(1, 11, 9)),
            "tables cos and sin must have shape (L, at most 8), got (1, 11, 9) and (1, 11, 9)",
        ),
        (
            dict(q=F(2, 4, 5, 16), k=F(2, 2, 5, 16), position_ids=integers(2, 5), cos=F(2, 11, 8), sin=F(2, 11, 8)),
            "tables cos and sin must have shape (L, at most 8), got (2, 11, 8) and (2, 11, 8)",
        ),
        (dict(casting="llama"), "casting must be one of ('none', 'back', 'fp32'), got 'llama'"),
        (dict(layout="thirds"), "layout must be one of ('halves', 'pairs'), got 'thirds'"),
    ),
    "qk_norm_rope": (
        dict(q=F(2, 4, 5, 16), k=F(2, 2, 5, 16), wq=F(16), wk=F(16), cos=F(1, 5, 8), sin=F(1, 5, 8)),
        (dict(wk=F(8)), "wq and wk must have shape (16,), got (16,) and (8,)"),
        (dict(casting="bf16"), "casting must be one of ('llama', 'gemma', 'none'), got 'bf16'"),
        (dict(rope_casting="llama"), "rope_casting must be one of ('none', 'back', 'fp32'), got 'llama'"),
        (dict(q=integers(2, 4, 5, 16)), "q and k must be floating point, got torch.int64 and torch.float32"),
        (dict(k=F(2, 2, 6, 16)), "q and k must agree but for the heads, got (2, 4, 5, 16) and (2, 2, 6, 16)"),
    ),
    "attn_res": (
        dict(v=F(4, 2, 8), w_query=F(8), w_norm=F(8)),
        (dict(w_query=F(4)), "w_query must have shape (8,), got (4,)"),
        (dict(w_norm=F(4)), "w_norm must have shape (8,), got (4,)"),
        (dict(v=F(8)), "v must have shape (..., N, D), got (8,)"),
    ),
    "dyt": (
        dict(x=F(4, 8), alpha=F(1), gamma=F(8)),
        (dict(alpha=F(2)), "alpha must have one element, got shape (2,)"),
        (dict(gamma=F(4)), "gamma must have shape (8,), got (4,)"),
        (dict(beta=F(1)), "beta must have shape (8,), got (1,)"),
        (dict(x=integers(4, 8)), "x must be floating point, got torch.int64"),
    ),
    "group_norm": (
        dict(x=F(2, 4, 5), num_groups=2, w=F(4), b=F(4)),
        (dict(num_groups=3), "num_groups must divide the 4 channels of x, got 3"),
        (dict(w=F(5)), "w must have shape (4,), got (5,)"),
        (dict(b=F(1, 4)), "b must have shape (4,), got (1, 4)"),
        (dict(x=F(4)), "x must have shape (B, C, ...), got (4,)"),
        (dict(x=integers(2, 4)), "x must be floating point, got torch.int64"),
    ),
    "mhc_coeffs": (
        dict(x=F(5, 2, 16), phi=F(32, 8), b=F(8), alpha_pre=F(1), alpha_post=F(1), alpha_res=F(1)),
        (dict(phi=F(32, 9)), "phi must have shape (32, 8), got (32, 9)"),
        (dict(b=F(9)), "b must have shape (8,), got (9,)"),
        (dict(alpha_pre=F(2)), "alpha_pre must have one element, got shape (2,)"),
        (dict(tmax=0), "tmax must be at least 1, got 0"),
    ),
    "mhc_pre": (
        dict(x=F(5, 3, 8), h_pre=F(5, 4)),
        (dict(), "h_pre must have shape (5, 3), got (5, 4)"),
        (dict(x=F(5), h_pre=F(5)), "x must be floating point of shape (..., H, C), got torch.float32 (5,)"),
    ),
    "mhc_post_res": (
        dict(x=F(5, 3, 8), f_out=F(5, 9), h_post=F(5, 3), h_res=F(5, 3, 3)),
        (dict(), "f_out must have shape (5, 8), got (5, 9)"),
        (dict(f_out=F(5, 8), h_res=F(5, 3)), "h_res must have shape (5, 3, 3), got (5, 3)"),
    ),
    "modulated_rms_norm": (
        dict(x=F(4, 8), scale=F(8), shift=F(8), w=F(8)),
        (dict(w=F(4)), "w must have shape (8,), got (4,)"),
        (
            dict(x=F(2, 4, 8), scale=F(4, 8), shift=F(4, 8)),
            "scale must have shape (8,) or (S, 8) with a row a sample or a token of x (2, 4, 8), got (4, 8)",
        ),
        (dict(x=F(2, 4, 8), scale=F(2, 8)), "shift must have shape (2, 8), got (8,)"),
        (dict(casting="bf16"), "casting must be one of ('llama', 'gemma', 'none'), got 'bf16'"),
        (dict(scale=integers(8)), "scale must be floating point, got torch.int64"),
    ),
    "softmax": (
        dict(x=F(4, 8), dim=2),
        (dict(), "dim must be in [-2, 1], got 2"),
        (dict(x=integers(4, 8)), "x must be floating point, got torch.int64"),
    ),
    "sparsemax": (
        dict(x=F(4, 8), dim=-3),
        (dict(), "dim must be in [-2, 1], got -3"),
        (dict(x=integers(4, 8)), "x must be floating point, got torch.int64"),
    ),
    "multi_token_attention": (
        dict(scores=F(1, 4, 5, 5), weight=F(3, 3, 1, 1)),
        (dict(scores=F(3, 4, 5)), "scores must have shape (B, C, L, L), got (3, 4, 5)"),
        (dict(weight=F(4, 4, 3, 3), groups=2), "weight must have shape (C', 2, kh, kw), got (4, 4, 3, 3)"),
        (dict(weight=F(2, 4, 3, 3), bias=F(4)), "bias must have shape (2,), got (4,)"),
        (
            dict(weight=T((4, 4, 3, 3), dtype=torch.float64)),
            "weight must have the dtype of scores, torch.float32, got torch.float64",
        ),
    ),
    "neighborhood_attention": (
        dict(q=F(1, 1, 4, 8), k=F(1, 1, 4, 8), v=F(1, 1, 4, 8)),
        (dict(q=F(2, 3, 4), k=F(2, 3, 4), v=F(2, 3, 4)), "q must have shape (B, H, T, D), got (2, 3, 4)"),
        (
            dict(k=F(1, 1, 5, 8)),
            "k must have the shape and dtype of q, (1, 1, 4, 8) torch.float32, got (1, 1, 5, 8) torch.float32",
        ),
        (dict(kernel_size=4), "kernel_size must be odd and positive, got 4"),
        (dict(dilation=0), "dilation must be positive, got 0"),
    ),
    "poly_norm": (
        dict(x=F(4, 8), w=F(3), b=F(1)),
        (dict(w=F(4)), "w must have shape (3,), got (4,)"),
        (dict(b=F(3)), "b must have one element, got shape (3,)"),
        (dict(x=integers(4, 8)), "x must be floating point, got torch.int64"),
    ),
    "cross_entropy": (
        dict(logits=F(3, 5), target=integers(3)),
        (
            dict(target=F(3, 5)),
            "target must hold class indices, got torch.float32 (class probabilities are not supported)",
        ),
        (dict(target=integers(4)), "target must have shape (3,), got (4,)"),
        (dict(class_weight=F(4)), "class_weight must have shape (5,), got (4,)"),
        (dict(reduction="avg"), "reduction must be one of ('mean', 'sum', 'none'), got 'avg'"),
        (dict(logits=integers(3, 5)), "logits must be floating point, got torch.int64"),
        (dict(logits=F(3, 5, 2)), "logits must have shape (M, V), got (3, 5, 2)"),
    ),
    "fused_ce_tvd": (
        dict(student=F(3, 5), teacher=constant(3, 5), target=integers(3)),
        (
            dict(student=F(2, 3, 5), teacher=constant(2, 3, 5), target=integers(6)),
            "student must have shape (M, V), got (2, 3, 5)",
        ),
        (dict(teacher=constant(3, 6)), "teacher must have shape (3, 5), got (3, 6)"),
        (dict(target=integers(4)), "target must have shape (3,), got (4,)"),
        (dict(teacher=integers(3, 5)), "student and teacher must be floating point, got torch.float32 and torch.int64"),
    ),
    "linear_cross_entropy": (
        dict(x=F(4, 8), w=F(10, 8), target=integers(4)),
        (dict(x=integers(4, 8)), "x and w must be floating point, got torch.int64 and torch.float32"),
        (dict(w=F(10, 6)), "w must have shape (V, 8), got (10, 6)"),
        (dict(bias=F(4)), "bias must have shape (10,), got (4,)"),
        (dict(target=integers(5)), "target must have shape (4,), got (5,)"),
        (dict(xa=F(4, 2)), "xa and wb must have shapes (4, R) and (10, R), got (4, 2) and None"),
        (dict(xa=F(4, 2), wb=F(10, 3)), "xa and wb must have shapes (4, R) and (10, R), got (4, 2) and (10, 3)"),
        (dict(x=F(2, 4, 8), target=integers(8)), "x must have shape (M, H), got (2, 4, 8)"),
        (
            dict(x=F(4, 16), w=F(10, 16), fp8="blockwise"),
            "fp8 must be None or one of ('tensorwise', 'rowwise'), got 'blockwise'",
        ),
        (
            dict(x=F(4, 16), w=F(10, 16), fp8="rowwise", fp32_logits=True),
            "fp32_logits must be False with fp8, got True",
        ),
        (
            dict(x=F(4, 16), w=F(10, 16), fp8="rowwise", xa=F(4, 2), wb=F(10, 2)),
            "xa must be None with fp8, got a tensor",
        ),
    ),
    "linear_divergence": (
        dict(x=F(4, 8), w=F(10, 8)),
        (dict(w=F(10, 6)), "w must have shape (V, 8), got (10, 6)"),
        (
            dict(teacher_x=constant(4, 8)),
            "the teacher must be teacher_x and teacher_w, or teacher_logits, or teacher_probs, or "
            "topk_log_probs and topk_indices, got teacher_x",
        ),
        (
            dict(teacher_logits=constant(4, 10), teacher_bias=F(10)),
            "teacher_bias must be None without teacher_w, got (10,)",
        ),
        (dict(teacher_x=constant(4, 6), teacher_w=constant(11, 6)), "teacher_w must have shape (10, 6), got (11, 6)"),
        (
            dict(teacher_x=F(4, 6), teacher_w=constant(10, 6)),
            "teacher_x must not require a gradient (there is none for the teacher: detach it), got one that does",
        ),
        (_TEACHER | dict(weight_hard=0.5), "target must be given for a hard loss, got None"),
        (
            _TEACHER | dict(kind="kl"),
            "kind must be one of ('jsd', 'forward_kl', 'reverse_kl', 'tvd', 'cosine'), got 'kl'",
        ),
        (
            dict(topk_log_probs=constant(4, 2), topk_indices=integers(4, 2)),
            "kind must be 'forward_kl' for a top-k teacher, got 'jsd'",
        ),
        (dict(teacher_probs=constant(4, 10)), "kind must be 'forward_kl' for a teacher's probabilities, got 'jsd'"),
        (dict(teacher_probs=constant(4, 10), kind="forward_kl", eps=-1.0), "eps must not be negative, got -1.0"),
        (_TEACHER | dict(beta=2.0), "beta must be between 0 and 1, got 2.0"),
        (_TEACHER | dict(temperature=0.0), "temperature must be positive, got 0.0"),
        (dict(teacher_logits=constant(4, 10), softcap=0.0), "softcap must be positive or None, got 0.0"),
        (
            dict(teacher_logits=constant(4, 10), kind="cosine", entropy=True),
            "entropy must be False for kind 'cosine', got True",
        ),
        (_TOP_K | dict(entropy=True), "entropy must be False for a top-k teacher, got True"),
        (_TOP_K | dict(logit_scale=0.5), "logit_scale must be 1.0 for a top-k teacher, got 0.5"),
        (
            dict(teacher_probs=constant(4, 10), kind="forward_kl", teacher_softcap=2.0),
            "teacher_softcap must be None for a teacher's probabilities, got 2.0",
        ),
        (_TEACHER | dict(target=integers(5)), "target must have shape (4,), got (5,)"),
        *((_TEACHER | dict(target=y, reduction="avg"), _REDUCTION) for y in (None, integers(4))),
    ),
    "logit_divergence": (
        dict(student=F(3, 5), teacher=F(3, 5)),
        (dict(teacher=F(3, 4)), "teacher must have shape (3, 5), got (3, 4)"),
        (dict(kind="kl"), "kind must be one of ('jsd', 'forward_kl', 'reverse_kl', 'tvd'), got 'kl'"),
        (dict(beta=-0.5), "beta must be between 0 and 1, got -0.5"),
        (dict(temperature=0.0), "temperature must be positive, got 0.0"),
    ),
    "jsd": (
        dict(log_q=F(3, 5), log_p=F(3, 5)),
        (dict(log_p=F(3, 4)), "log_p must have shape (3, 5), got (3, 4)"),
        (dict(shift_labels=integers(4)), "shift_labels must have shape (3,), got (4,)"),
        (dict(shift_labels=F(3)), "shift_labels must hold integers, got torch.float32"),
        (dict(beta=1.5), "beta must be between 0 and 1, got 1.5"),
        (dict(reduction="mean"), "reduction must be one of ('none', 'sum', 'batchmean'), got 'mean'"),
    ),
    "kl_div": (
        dict(input=F(3, 5), target=F(3, 5)),
        (dict(input=_NO_DIM, target=_NO_DIM), "input must have at least one dim, got shape ()"),
        (dict(target=F(5)), "target must have shape (3, 5), got (5,)"),
        (dict(target=integers(3, 5)), "input and target must be floating point, got torch.float32 and torch.int64"),
        (dict(reduction="avg"), "reduction must be one of ('none', 'sum', 'mean', 'batchmean'), got 'avg'"),
        (dict(eps=-1.0), "eps must not be negative, got -1.0"),
    ),
    "tvd": (
        dict(p=F(3, 5), q=F(3, 4)),
        (dict(), "q must have shape (3, 5), got (3, 4)"),
        (dict(q=F(3, 5), shift_labels=integers(4)), "shift_labels must have shape (3,), got (4,)"),
    ),
    "linear_logprobs": (
        dict(x=F(4, 8), w=F(10, 6), target=integers(4)),
        (dict(), "w must have shape (V, 8), got (10, 6)"),
        (dict(w=F(10, 8), temperature=0.0), "temperature must be positive, got 0.0"),
        (dict(w=F(10, 8), temperature=constant(3)), "temperature must be a number or of shape (4,), got (3,)"),
        (dict(w=F(10, 8), temperature=F(4)), "temperature must need no gradient, got one that does"),
        (
            dict(w=F(10, 8), keep_ids=constant(6), keep_offsets=integers(5)),
            "keep_ids must be integers of one dim, got torch.float32 (6,)",
        ),
        (dict(w=F(10, 8), outputs=("perplexity",)), f"outputs must be some of {OUTPUTS}, got 'perplexity'"),
        (dict(w=F(10, 8), vocab_size=11), "vocab_size must be in [1, 10], got 11"),
        (dict(w=F(10, 8), target=integers(5)), "target must have shape (4,) or (4, K), got (5,)"),
        (dict(w=F(10, 8), keep_ids=integers(6)), "keep_ids and keep_offsets must have n and 5 numbers, got 6 and None"),
        (
            dict(w=F(10, 8), fp8="rowwise", outputs=("lse",)),
            "with fp8, only one target and the outputs 'entropy', 'mean_logit' and 'top1' are possible, "
            "got 1 targets and ('lse',)",
        ),
    ),
    "expert_load": (
        dict(logits=F(4, 8), index=integers(4, 2)),
        (dict(logits=F(1, 4, 8)), "logits must have shape (M, E), got (1, 4, 8)"),
        (dict(index=F(4, 2)), "index must be integers of shape (4, K), got torch.float32 (4, 2)"),
        (dict(weight=constant(5)), "weight must have shape (4,), got (5,)"),
        (dict(logits=integers(4, 8)), "logits must be floating point, got torch.int64"),
    ),
    "vocab_parallel_cross_entropy": (
        dict(logits=F(3, 5), target=integers(3)),
        (dict(target=integers(4)), "target must have shape (3,), got (4,)"),
        (dict(logits=integers(3, 5)), "logits must be floating point, got torch.int64"),
        (dict(formula="torch"), "formula must be one of ('pytorch', 'megatron'), got 'torch'"),
        (dict(mode="local"), "mode must be one of ('global', 'partition'), got 'local'"),
        (dict(sizes=(5, 5)), "sizes must be the classes of 1 ranks, 5 of rank 0, got (5, 5)"),
        (dict(logits=F(3, 0)), "every rank must have a class, got none"),
        (
            dict(logits=F(3, 1), formula="megatron", label_smoothing=0.1),
            "formula 'megatron' must smooth over two classes or more, got one",
        ),
    ),
    "vocab_parallel_linear_cross_entropy": (
        dict(x=F(4, 8), w=F(10, 8), target=integers(4)),
        (dict(x=integers(4, 8)), "x and w must be floating point, got torch.int64 and torch.float32"),
        (dict(w=F(10, 6)), "w must have shape (N, 8), got (10, 6)"),
        (dict(bias=F(4)), "bias must have shape (10,), got (4,)"),
        (dict(target=integers(5)), "target must have shape (4,), got (5,)"),
        (dict(x=F(2, 4, 8), target=integers(8)), "x must have shape (M, H), got (2, 4, 8)"),
        (dict(entropy=True), "reduction must be 'none' with entropy, got 'mean'"),
        (dict(chunk_rows=0), "chunk_rows must be positive, got 0"),
    ),
}
