"""Class indices of every integer dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liger_kernel import ops
from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss, LigerFusedLinearKTOLoss
from liger_kernel.compat.functions import token_counts


def _labelled(y: torch.Tensor) -> dict[str, Any]:
    """What takes class indices, by name, of ten rows and 200 classes."""
    torch.manual_seed(0)
    x, w, z, t = torch.randn(10, 8), torch.randn(200, 8), torch.randn(10, 200), torch.randn(10, 200)
    q, p = z.log_softmax(-1), t.log_softmax(-1)
    pairs = torch.randn(4, 5, 8)
    return {
        "cross_entropy": ops.cross_entropy(z, y, stats=True),
        "linear_cross_entropy": ops.linear_cross_entropy(x, w, y, label_smoothing=0.1, stats=True),
        "linear_logprobs": ops.linear_logprobs(x, w, y),
        "jsd": ops.jsd(q, p, y),
        "tvd": ops.tvd(q.exp(), p.exp(), y),
        "logit_divergence": ops.logit_divergence(z, t, y),
        "linear_divergence": ops.linear_divergence(x, w, teacher_logits=t, target=y, weight_hard=0.5),
        "fused_ce_tvd": ops.fused_ce_tvd(z, t, y),
        "embedding": ops.embedding(y.clamp(min=0), w),
        "moe": ops.moe(x, torch.randn(4, 4, 8), torch.randn(4, 8, 2), (y % 4)[:, None], torch.ones(10, 1)),
        "expert_load": ops.expert_load(z, y[:, None]),
        "dpo": LigerFusedLinearDPOLoss(use_ref_model=False)(w, pairs, y.repeat(2).view(4, 5)),
        "kto": LigerFusedLinearKTOLoss(use_ref_model=False)(
            pairs, w, y.repeat(2).view(4, 5), preference_labels=torch.tensor([True, False, True, False])
        ),
        "counts": token_counts(y.long(), y),
    }


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_integers_of_any_dtype_are_class_indices(dtype):
    """-100 is 156 in uint8, which is a class here."""
    y = torch.tensor([1, 156, 3, 156, 100, 5, 199 if dtype is torch.uint8 else -100, 7, 8, 9])
    narrow, wide = _labelled(y.to(dtype)), _labelled(y)
    for name in wide:
        torch.testing.assert_close(narrow[name], wide[name], rtol=0, atol=0, equal_nan=True, msg=name)
