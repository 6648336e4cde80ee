"""The variant of the auxiliary loss that balances the load of experts, and the stand-ins on
which it is compared with stock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_kernel.ops.losses.load_balancing import load_balancing_loss
from liger_kernel.transformers.recognise.plain import plain
from liger_kernel.transformers.recognise.variant import StandIns, Variant


@dataclass(frozen=True)
class LoadBalancing(Variant):
    """The loss of all layers' router logits together: experts chosen by softmax, in the dtype of
    the logits."""

    kind, exact = "load_balancing", False

    def words(self) -> tuple[str, ...]:
        return "softmax", "top_k"

    def __call__(self, stock: Callable) -> Callable:
        def load_balancing_loss_func(gate_logits, num_experts=None, top_k=2, attention_mask=None):
            # one tensor for each layer; a family without experts passes None
            fits = isinstance(gate_logits, tuple) and gate_logits and not torch.compiler.is_compiling()
            fits = fits and all(_fits(t, num_experts, top_k, attention_mask) for t in gate_logits)
            if not fits:
                return stock(gate_logits, num_experts, top_k, attention_mask)
            return load_balancing_loss(gate_logits, top_k, attention_mask)

        return load_balancing_loss_func

    def stand_ins(self) -> StandIns:
        B, L, E = 3, 40, 6
        # rows of several lengths
        mask = (torch.arange(L) < torch.tensor([[L], [L - 7], [11]])).to(torch.int64)
        random = lambda: 2 * torch.randn(B * L, E)
        # half of the rows prefer an expert by one step of bf16, and in bf16 its probability is that
        # of the next one; the other half prefer one by far
        close = torch.tensor([0.5, 0.50390625, *[-0.349609375] * (E - 2)]).repeat(B * L, 1)
        close[::2, 0] += 4.0
        for logits, top_k, attention_mask in (
            ((random(), random()), 2, None),
            ((random(), random() - 1, random()), 3, mask),
            ((random(),), 1, mask.bool()),
            ((random(), random()), E, torch.ones(B, L)),
            ((close, random()), 1, None),
            ((close.flip(1), random()), 1, mask),
            ((torch.zeros(B * L, E),), 2, mask),
        ):
            yield dict(num_experts=E, top_k=top_k, attention_mask=attention_mask), (logits,)


def _fits(logits: object, num_experts: object, top_k: object, mask: object) -> bool:
    """Whether stock would count the rows of this layer with this mask, each once."""
    if not (
        isinstance(logits, Tensor)
        and plain(logits)
        and logits.ndim == 2
        and logits.is_floating_point()
        and logits.shape[1] == num_experts
    ):
        return False
    # the rows of the mask are those of the logits, in the same order
    whole = mask is None or (
        isinstance(mask, Tensor)
        and plain(mask)
        and not mask.requires_grad
        and mask.ndim == 2
        and mask.numel() == len(logits)
    )
    return isinstance(top_k, int) and 0 < top_k <= logits.shape[1] and whole
