"""Rotary position embedding, as functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from liger_kernel.ops.rotary.qk_norm_rope import qk_norm_rope
from liger_kernel.ops.rotary.rope import in_place_of, of_complex, of_sections, once, rope


def liger_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k by tables (B or 1, T, R) or (T, R) as Transformers makes them: each angle
    twice, as in ``cat((angles, angles), -1)``; R <= D.

    q (B, Hq, T, D), k (B, Hk, T, D), or (B, T, H, D) with ``unsqueeze_dim=2``. ``position_ids`` has
    no effect. Returns new tensors in the dtypes of q and k. Products are rounded to the tensors'
    dtype, as in Transformers; if the tables have another dtype, they are computed in fp32.
    ``rotary_dim``: R, for tables (..., R/2) that hold each angle once.
    """
    return rope(
        q, k, once(cos, rotary_dim), once(sin, rotary_dim), unsqueeze_dim=unsqueeze_dim, casting=in_place_of(q, k, cos)
    )


liger_rotary_pos_emb = liger_rope


def liger_rotary_pos_emb_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``liger_rope`` of whole heads with gpt-oss's tables (B or 1, T, D/2), which hold each
    angle once."""
    return liger_rope(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``liger_rope`` in fp32 for the patches of all images in one row: q, k (T, H, D), or a
    batch of such rows, tables (T, R)."""
    if q.ndim == 4:
        return rope(q, k, once(cos), once(sin), unsqueeze_dim=2)
    q, k = rope(q[None], k[None], once(cos), once(sin), unsqueeze_dim=2)
    return q[0], k[0]


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """``liger_rope`` with tables (3, B, T, R) for positions in time, height and width; sections of
    the R/2 pairs belong to each of the three in turn.

    Models whose embedding has combined the sections, interleaved or not, call ``liger_rope``.
    """
    cos, sin = of_sections(cos, mrope_section), of_sections(sin, mrope_section)
    return rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, casting=in_place_of(q, k, cos))


liger_qwen2vl_mrope = liger_multimodal_rotary_pos_emb


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply neighbouring columns of xq, xk (B, T, H, D), as complex numbers, by freqs_cis (B
    or 1, T, D/2)."""
    return rope(xq, xk, *of_complex(freqs_cis), layout="pairs", unsqueeze_dim=2)


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
    """``liger_llama4_text_rotary_pos_emb``; freqs_ci may also be one table for all images, with
    T * D/2 numbers in any shape."""
    table = query.shape[1], query.shape[-1] // 2
    if freqs_ci.numel() == math.prod(table):
        freqs_ci = freqs_ci.reshape(1, *table)
    return liger_llama4_text_rotary_pos_emb(query, key, freqs_ci.to(query.device))


def liger_qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """``liger_rope`` of the ``liger_rms_norm`` of each head of q and k, in one pass; weights
    (D,), tables (B or 1, T, R)."""
    return qk_norm_rope(
        q,
        k,
        q_weight,
        k_weight,
        once(cos),
        once(sin),
        eps=eps,
        offset=offset,
        casting=casting_mode,
        unsqueeze_dim=unsqueeze_dim,
    )
