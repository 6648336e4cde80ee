"""Calls that an operator must refuse: for each operator, the arguments of a call, and changes of these
with the text of the ``ValueError``, which begins with the operator's name."""

from __future__ import annotations

import torch

from liger_kernel.ops._core.operator import T
from liger_kernel.ops.recurrent.cu_seqlens import bounds

_EXPERTS = dict(
    x=T((4, 8)),
    gate_up=T((3, 16, 8)),
    down=T((3, 8, 8)),
    topk_index=T((4, 2), dtype=torch.int64),
    topk_weight=T((4, 2)),
)


def _layer(name: str, N: int, K: int, r: int = 2) -> dict[str, T]:
    """A linear layer with an adapter."""
    return {name: T((N, K)), f"{name}_a": T((r, K)), f"{name}_b": T((N, r))}


REFUSED = {
    "glu": (
        dict(gate=T((2, 4)), up=T((2, 4))),
        (dict(gate=T((2, 4), dtype=torch.int64)), "gate must be floating point, got torch.int64"),
        (dict(act="swish2"), "act must be one of ['gelu', 'gelu_tanh', 'relu2', 'sigmoid', 'silu'], got 'swish2'"),
        (dict(limit=0.0), "limit must be positive or None, got 0.0"),
        (dict(alpha=-1.0), "alpha must be positive, got -1.0"),
        (dict(up=T((2, 5))), "up must have shape (2, 4), got (2, 5)"),
        (dict(gate=T((2, 5)), up=None), "packed gate must have an even last dim, got 5"),
    ),
    "relu_squared": (dict(x=T((2, 4), dtype=torch.int64)), (dict(), "x must be floating point, got torch.int64")),
    "sink_attention": (
        dict(q=T((1, 2, 4, 8)), k=T((1, 1, 4, 8)), v=T((1, 1, 4, 8)), sinks=T((2,))),
        (dict(q=T((2, 4, 8))), "q must have shape (B, H, T, D), got torch.float32 (2, 4, 8)"),
        (
            dict(k=T((1, 1, 5, 8))),
            "k must have shape (1, H / G, 4, 8) and dtype torch.float32, got torch.float32 (1, 1, 5, 8)",
        ),
        (
            dict(q=T((1, 3, 4, 8)), k=T((1, 2, 4, 8)), v=T((1, 2, 4, 8)), sinks=T((3,))),
            "k must have a number of heads that divides q's, 3, got 2",
        ),
        (
            dict(v=T((1, 2, 4, 8))),
            "v must have k's shape and dtype, (1, 1, 4, 8) torch.float32, got (1, 2, 4, 8) torch.float32",
        ),
        (dict(sinks=T((3,))), "sinks must be floating point of shape (2,), got torch.float32 (3,)"),
        (dict(window=0), "window must be positive or None, got 0"),
        (dict(first=T((1, 4))), "first must be integers of shape (1, 4), got torch.float32 (1, 4)"),
        (dict(valid=T((4,), dtype=torch.bool)), "valid must be bool of shape (1, 4), got torch.bool (4,)"),
    ),
    "causal_conv1d": (
        dict(x=T((1, 4, 8)), w=T((8, 3))),
        (dict(x=T((4, 8))), "x must be floating point of shape (B, T, D), got torch.float32 (4, 8)"),
        (dict(w=T((8, 5))), "w must be floating point of shape (8, W), W one of (2, 3, 4), got torch.float32 (8, 5)"),
        (dict(act="gelu"), "act must be 'silu' or None, got 'gelu'"),
        (dict(bias=T((4,))), "bias must be floating point of shape (8,), got torch.float32 (4,)"),
        (dict(after=T((1, 3, 8))), "after must be floating point of shape (1, 4, 8), got torch.float32 (1, 3, 8)"),
        (
            dict(initial_state=T((1, 8, 3))),
            "initial_state must be floating point of shape (1, 8, 2), got torch.float32 (1, 8, 3)",
        ),
        (dict(x=T((2, 4, 8)), cu_seqlens=bounds(0, 4)), "x must have one row if cu_seqlens is given, got 2"),
        (
            dict(cu_seqlens=T((2,))),
            "cu_seqlens must be int32 or int64 of shape (documents + 1,), got torch.float32 (2,)",
        ),
    ),
    "gated_delta_rule": (
        dict(q=T((1, 4, 2, 16)), k=T((1, 4, 2, 16)), v=T((1, 4, 4, 16)), g=T((1, 4, 4)), beta=T((1, 4, 4))),
        (dict(q=T((4, 2, 16))), "q must be floating point of shape (B, T, HK, DK), got torch.float32 (4, 2, 16)"),
        (
            dict(k=T((1, 4, 1, 16))),
            "k must have q's shape and dtype, (1, 4, 2, 16) torch.float32, got (1, 4, 1, 16) torch.float32",
        ),
        (
            dict(v=T((1, 3, 4, 16))),
            "v must have shape (1, 4, HV, DV) and dtype torch.float32, got torch.float32 (1, 3, 4, 16)",
        ),
        (dict(v=T((1, 4, 3, 16))), "v must have a multiple of q's 2 heads, got 3"),
        (dict(g=T((1, 4, 2))), "g must be floating point of shape (1, 4, 4), got torch.float32 (1, 4, 2)"),
        (
            dict(initial_state=T((1, 4, 16, 8))),
            "initial_state must be floating point of shape (1, 4, 16, 16), got torch.float32 (1, 4, 16, 8)",
        ),
    ),
    "kda": (
        dict(q=T((1, 4, 2, 16)), k=T((1, 4, 2, 16)), v=T((1, 4, 2, 16)), g=T((1, 4, 2, 16)), beta=T((1, 4, 2))),
        (dict(v=T((1, 4, 4, 16))), "v must have q's 2 heads, got 4"),
        (dict(g=T((1, 4, 2))), "g must be floating point of shape (1, 4, 2, 16), got torch.float32 (1, 4, 2)"),
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
        dict(x=T((1, 4, 4, 8)), dt=T((1, 4, 4)), A=T((4,)), B=T((1, 4, 2, 16)), C=T((1, 4, 2, 16))),
        (dict(x=T((4, 4, 8))), "x must be floating point of shape (B, T, H, P), got torch.float32 (4, 4, 8)"),
        (
            dict(B=T((1, 3, 2, 16))),
            "B must have shape (1, 4, groups, N) and dtype torch.float32, got torch.float32 (1, 3, 2, 16)",
        ),
        (
            dict(C=T((1, 4, 1, 16))),
            "C must have B's shape and dtype, (1, 4, 2, 16) torch.float32, got (1, 4, 1, 16) torch.float32",
        ),
        (
            dict(B=T((1, 4, 3, 16)), C=T((1, 4, 3, 16))),
            "B must have a number of groups that divides x's heads, 4, got 3",
        ),
        (dict(dt=T((1, 4, 2))), "dt must be floating point of shape (1, 4, 4), got torch.float32 (1, 4, 2)"),
        (dict(D=T((8,))), "D must be floating point of shape (4,) or (4, 8), got torch.float32 (8,)"),
        (dict(dt_limit=(1.0, 0.5)), "dt_limit must be two numbers that do not fall, got (1.0, 0.5)"),
    ),
    "embedding": (
        dict(index=T((4,), dtype=torch.int64), w=T((5, 8))),
        (dict(index=T((4,))), "index must be integers, got torch.float32"),
        (dict(w=T((5,))), "w must have shape (V, N), got (5,)"),
        (dict(w=T((5, 8), dtype=torch.int64)), "w must be floating point, got torch.int64"),
        (dict(padding_idx=5), "padding_idx must be in [-5, 5), got 5"),
    ),
    "fused_add_rms_norm": (
        dict(x=T((4, 8)), residual=T((4, 8)), w=T((8,))),
        (dict(w=T((4,))), "w must have shape (8,), got (4,)"),
        (dict(residual=T((1, 8))), "residual must have shape (4, 8), got (1, 8)"),
        (dict(casting="bf16"), "casting must be one of ('llama', 'gemma', 'none'), got 'bf16'"),
        (dict(residual=T((4, 8), dtype=torch.int64)), "residual must be floating point, got torch.int64"),
    ),
    "gated_rms_norm": (
        dict(x=T((4, 8)), gate=T((4, 8)), w=T((8,))),
        (dict(w=T((4,))), "w must have shape (8,), got (4,)"),
        (dict(gate=T((1, 8))), "gate must have shape (4, 8), got (1, 8)"),
        (dict(act="swish"), "act must be one of ['gelu', 'gelu_tanh', 'relu2', 'sigmoid', 'silu'], got 'swish'"),
        (dict(casting="bf16"), "casting must be one of ('llama', 'gemma', 'none'), got 'bf16'"),
        (dict(x=T((4, 8), dtype=torch.int64)), "x must be floating point, got torch.int64"),
    ),
    "layer_norm": (
        dict(x=T((4, 8)), w=T((4,))),
        (dict(), "w must have shape (8,), got (4,)"),
        (dict(w=T((8,)), b=T((1, 8))), "b must have shape (8,), got (1, 8)"),
        (dict(x=T((4, 8), dtype=torch.int64)), "x must be floating point, got torch.int64"),
    ),
    "rms_norm": (
        dict(x=T((4, 8)), w=T((4,))),
        (dict(), "w must have shape (8,), got (4,)"),
        (dict(w=T((8,)), casting="bf16"), "casting must be one of ('llama', 'gemma', 'none'), got 'bf16'"),
        (dict(x=T((4, 8), dtype=torch.int64)), "x must be floating point, got torch.int64"),
    ),
    "mlp": (
        dict(x=T((2, 4)), gate=T((8, 4)), up=T((8, 4)), down=T((4, 8))),
        (dict(x=T((2, 4), dtype=torch.int64)), "x must be floating point, got torch.int64"),
        (dict(gate=T((8, 5))), "gate must have shape (I, 4), got (8, 5)"),
        (dict(gate=T((9, 4)), up=None), "gate must have shape (2 I, 4) where up is None, got (9, 4)"),
        (dict(up=T((9, 4))), "up must have shape (8, 4), got (9, 4)"),
        (dict(down=T((4, 9))), "down must have shape (4, 8), got (4, 9)"),
        (dict(down=T((4, 8), dtype=torch.float64)), "down must have x's dtype, torch.float32, got torch.float64"),
        (dict(act="swish2"), "act must be one of ['gelu', 'gelu_tanh', 'relu2', 'sigmoid', 'silu'], got 'swish2'"),
    ),
    "lora_linear": (
        dict(x=T((6, 8)), scale=0.5, weight=T((12, 8)), a=T((3, 8)), b=T((12, 3))),
        (dict(x=T((6, 8), dtype=torch.int64)), "x must be floating point, got torch.int64"),
        (dict(weight=T((12, 9))), "weight must have shape (N, 8), got (12, 9)"),
        (dict(a=T((0, 8)), b=T((12, 0))), "a must have shape (r >= 1, 8), got (0, 8)"),
        (dict(a=T((3, 9))), "a must have shape (r >= 1, 8), got (3, 9)"),
        (dict(b=T((12, 4))), "b must have shape (12, 3), got (12, 4)"),
        (dict(weight=T((12, 8), dtype=torch.float64)), "weight must have x's dtype, torch.float32, got torch.float64"),
        (dict(bias=T((11,))), "bias must have shape (12,), got (11,)"),
        (dict(magnitude=T((12, 1))), "magnitude must have shape (12,), got (12, 1)"),
    ),
    "lora_qkv": (
        dict(x=T((6, 8)), scale=0.5) | _layer("q", 12, 8) | _layer("k", 4, 8) | _layer("v", 4, 8, 3),
        (dict(x=T((6, 8), dtype=torch.int64)), "x must be floating point, got torch.int64"),
        (dict(k=T((4, 7))), "k must have shape (N, 8), got (4, 7)"),
        (dict(v_a=T((3, 7))), "v_a must have shape (r >= 1, 8), got (3, 7)"),
        (dict(q_b=T((12, 1))), "q_b must have shape (12, 2), got (12, 1)"),
    ),
    "lora_mlp": (
        dict(x=T((6, 8)), scale=0.5) | _layer("gate", 12, 8) | _layer("up", 12, 8) | _layer("down", 8, 12),
        (dict(x=T((6, 8), dtype=torch.int64)), "x must be floating point, got torch.int64"),
        (dict(up=T((11, 8))), "up must have shape (12, 8), got (11, 8)"),
        (dict(down=T((8, 11))), "down must have shape (8, 12), got (8, 11)"),
        (dict(down_a=T((2, 8))), "down_a must have shape (r >= 1, 12), got (2, 8)"),
        (dict(act="swish2"), "act must be one of ['gelu', 'gelu_tanh', 'relu2', 'sigmoid', 'silu'], got 'swish2'"),
    ),
    "moe": (
        _EXPERTS,
        (dict(x=T((4, 8), dtype=torch.int64)), "x must be floating point, got torch.int64"),
        (dict(x=T((1, 4, 8))), "x must have shape (T, H), got (1, 4, 8)"),
        (dict(gate_up=T((3, 16, 9))), "gate_up must have shape (E, 2 I, 8), got (3, 16, 9)"),
        (dict(down=T((3, 8, 9))), "down must have shape (3, 8, 8), got (3, 8, 9)"),
        (dict(topk_index=T((4, 2))), "topk_index must be integers of shape (4, K), got torch.float32 (4, 2)"),
        (dict(topk_weight=T((4, 3))), "topk_weight must be floating point of shape (4, 2), got torch.float32 (4, 3)"),
        (dict(down_bias=T((3, 9))), "down_bias must have shape (3, 8), got (3, 9)"),
        (dict(down=T((3, 8, 8), dtype=torch.float64)), "down must have x's dtype, torch.float32, got torch.float64"),
        (dict(limit=0.0), "limit must be positive or None, got 0.0"),
        (dict(alpha=0.0), "alpha must be positive, got 0.0"),
        (dict(act="swish2"), "act must be one of ['gelu', 'gelu_tanh', 'relu2', 'sigmoid', 'silu'], got 'swish2'"),
    ),
    "lora_moe": (
        _EXPERTS | dict(gate_up_a=T((3, 2, 8)), gate_up_b=T((3, 16, 2)), down_a=T((3, 2, 8)), down_b=T((3, 8, 2))),
        (dict(x=T((1, 4, 8))), "x must have shape (T, H), got (1, 4, 8)"),
        (dict(down=T((3, 8, 9))), "down must have shape (3, 8, 8), got (3, 8, 9)"),
        (dict(down_b=None), "down_b must be given with down_a, got None"),
        (dict(down_a=T((3, 2, 9))), "down_a must have shape (3, r >= 1, 8), got (3, 2, 9)"),
        (dict(down_a=T((3, 0, 8)), down_b=T((3, 8, 0))), "down_a must have shape (3, r >= 1, 8), got (3, 0, 8)"),
        (dict(gate_up_b=T((3, 16, 3))), "gate_up_b must have shape (3, 16, 2), got (3, 16, 3)"),
        (dict(gate_up_a=T((3, 2, 8), dtype=torch.int64)), "gate_up_a must be floating point, got torch.int64"),
    ),
    "rope": (
        dict(q=T((2, 4, 7, 16)), k=T((2, 2, 7, 16)), cos=T((1, 7, 8)), sin=T((1, 7, 8))),
        (dict(q=T((4, 7, 16)), k=T((2, 7, 16))), "q and k must be 4-dimensional, got (4, 7, 16) and (2, 7, 16)"),
        (dict(k=T((2, 2, 6, 16))), "q and k must agree but for the heads, got (2, 4, 7, 16) and (2, 2, 6, 16)"),
        (
            dict(cos=T((1, 6, 8)), sin=T((1, 6, 8))),
            "cos and sin must have shape (2 or 1, 7, at most 8), got (1, 6, 8) and (1, 6, 8)",
        ),
        (
            dict(
                q=T((2, 4, 5, 16)),
                k=T((2, 2, 5, 16)),
                position_ids=T((2, 5), dtype=torch.int64),
                cos=T((1, 11, 9)),
                sin=T((1, 11, 9)),
            ),
            "tables cos and sin must have shape (L, at most 8), got (1, 11, 9) and (1, 11, 9)",
        ),
        (
            dict(
                q=T((2, 4, 5, 16)),
                k=T((2, 2, 5, 16)),
                position_ids=T((2, 5), dtype=torch.int64),
                cos=T((2, 11, 8)),
                sin=T((2, 11, 8)),
            ),
            "tables cos and sin must have shape (L, at most 8), got (2, 11, 8) and (2, 11, 8)",
        ),
        (dict(casting="llama"), "casting must be one of ('none', 'back', 'fp32'), got 'llama'"),
        (dict(layout="thirds"), "layout must be one of ('halves', 'pairs'), got 'thirds'"),
    ),
    "qk_norm_rope": (
        dict(q=T((2, 4, 5, 16)), k=T((2, 2, 5, 16)), wq=T((16,)), wk=T((16,)), cos=T((1, 5, 8)), sin=T((1, 5, 8))),
        (dict(wk=T((8,))), "wq and wk must have shape (16,), got (16,) and (8,)"),
        (dict(casting="bf16"), "casting must be one of ('llama', 'gemma', 'none'), got 'bf16'"),
        (dict(rope_casting="llama"), "rope_casting must be one of ('none', 'back', 'fp32'), got 'llama'"),
        (
            dict(q=T((2, 4, 5, 16), dtype=torch.int64)),
            "q and k must be floating point, got torch.int64 and torch.float32",
        ),
        (dict(k=T((2, 2, 6, 16))), "q and k must agree but for the heads, got (2, 4, 5, 16) and (2, 2, 6, 16)"),
    ),
    "attn_res": (
        dict(v=T((4, 2, 8)), w_query=T((8,)), w_norm=T((8,))),
        (dict(w_query=T((4,))), "w_query must have shape (8,), got (4,)"),
        (dict(w_norm=T((4,))), "w_norm must have shape (8,), got (4,)"),
        (dict(v=T((8,))), "v must have shape (..., N, D), got (8,)"),
    ),
    "dyt": (
        dict(x=T((4, 8)), alpha=T((1,)), gamma=T((8,))),
        (dict(alpha=T((2,))), "alpha must have one element, got shape (2,)"),
        (dict(gamma=T((4,))), "gamma must have shape (8,), got (4,)"),
        (dict(beta=T((1,))), "beta must have shape (8,), got (1,)"),
        (dict(x=T((4, 8), dtype=torch.int64)), "x must be floating point, got torch.int64"),
    ),
    "group_norm": (
        dict(x=T((2, 4, 5)), num_groups=2, w=T((4,)), b=T((4,))),
        (dict(num_groups=3), "num_groups must divide the 4 channels of x, got 3"),
        (dict(w=T((5,))), "w must have shape (4,), got (5,)"),
        (dict(b=T((1, 4))), "b must have shape (4,), got (1, 4)"),
        (dict(x=T((4,))), "x must have shape (B, C, ...), got (4,)"),
        (dict(x=T((2, 4), dtype=torch.int64)), "x must be floating point, got torch.int64"),
    ),
    "mhc_coeffs": (
        dict(x=T((5, 2, 16)), phi=T((32, 8)), b=T((8,)), alpha_pre=T((1,)), alpha_post=T((1,)), alpha_res=T((1,))),
        (dict(phi=T((32, 9))), "phi must have shape (32, 8), got (32, 9)"),
        (dict(b=T((9,))), "b must have shape (8,), got (9,)"),
        (dict(alpha_pre=T((2,))), "alpha_pre must have one element, got shape (2,)"),
        (dict(tmax=0), "tmax must be at least 1, got 0"),
    ),
    "mhc_pre": (
        dict(x=T((5, 3, 8)), h_pre=T((5, 4))),
        (dict(), "h_pre must have shape (5, 3), got (5, 4)"),
        (dict(x=T((5,)), h_pre=T((5,))), "x must be floating point of shape (..., H, C), got torch.float32 (5,)"),
    ),
    "mhc_post_res": (
        dict(x=T((5, 3, 8)), f_out=T((5, 9)), h_post=T((5, 3)), h_res=T((5, 3, 3))),
        (dict(), "f_out must have shape (5, 8), got (5, 9)"),
        (dict(f_out=T((5, 8)), h_res=T((5, 3))), "h_res must have shape (5, 3, 3), got (5, 3)"),
    ),
    "modulated_rms_norm": (
        dict(x=T((4, 8)), scale=T((8,)), shift=T((8,)), w=T((8,))),
        (dict(w=T((4,))), "w must have shape (8,), got (4,)"),
        (
            dict(x=T((2, 4, 8)), scale=T((4, 8)), shift=T((4, 8))),
            "scale must have shape (8,) or (S, 8) with a row a sample or a token of x (2, 4, 8), got (4, 8)",
        ),
        (dict(x=T((2, 4, 8)), scale=T((2, 8))), "shift must have shape (2, 8), got (8,)"),
        (dict(casting="bf16"), "casting must be one of ('llama', 'gemma', 'none'), got 'bf16'"),
        (dict(scale=T((8,), dtype=torch.int64)), "scale must be floating point, got torch.int64"),
    ),
    "softmax": (
        dict(x=T((4, 8)), dim=2),
        (dict(), "dim must be in [-2, 1], got 2"),
        (dict(x=T((4, 8), dtype=torch.int64)), "x must be floating point, got torch.int64"),
    ),
    "sparsemax": (
        dict(x=T((4, 8)), dim=-3),
        (dict(), "dim must be in [-2, 1], got -3"),
        (dict(x=T((4, 8), dtype=torch.int64)), "x must be floating point, got torch.int64"),
    ),
    "multi_token_attention": (
        dict(scores=T((1, 4, 5, 5)), weight=T((3, 3, 1, 1))),
        (dict(scores=T((3, 4, 5))), "scores must have shape (B, C, L, L), got (3, 4, 5)"),
        (dict(weight=T((4, 4, 3, 3)), groups=2), "weight must have shape (C', 2, kh, kw), got (4, 4, 3, 3)"),
        (dict(weight=T((2, 4, 3, 3)), bias=T((4,))), "bias must have shape (2,), got (4,)"),
        (
            dict(weight=T((4, 4, 3, 3), dtype=torch.float64)),
            "weight must have the dtype of scores, torch.float32, got torch.float64",
        ),
    ),
    "neighborhood_attention": (
        dict(q=T((1, 1, 4, 8)), k=T((1, 1, 4, 8)), v=T((1, 1, 4, 8))),
        (dict(q=T((2, 3, 4)), k=T((2, 3, 4)), v=T((2, 3, 4))), "q must have shape (B, H, T, D), got (2, 3, 4)"),
        (
            dict(k=T((1, 1, 5, 8))),
            "k must have the shape and dtype of q, (1, 1, 4, 8) torch.float32, got (1, 1, 5, 8) torch.float32",
        ),
        (dict(kernel_size=4), "kernel_size must be odd and positive, got 4"),
        (dict(dilation=0), "dilation must be positive, got 0"),
    ),
    "poly_norm": (
        dict(x=T((4, 8)), w=T((3,)), b=T((1,))),
        (dict(w=T((4,))), "w must have shape (3,), got (4,)"),
        (dict(b=T((3,))), "b must have one element, got shape (3,)"),
        (dict(x=T((4, 8), dtype=torch.int64)), "x must be floating point, got torch.int64"),
    ),
}
