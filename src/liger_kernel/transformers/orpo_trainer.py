"""TRL's trainer of odds ratio preferences, without logits. TRL is imported when the trainer is asked for."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from liger_kernel.ops.linear_cross_entropy import linear_cross_entropy
from liger_kernel.ops.linear_logprobs import linear_logprobs
from liger_kernel.transformers.deferred import IGNORE, is_plain
from liger_kernel.transformers.fsdp import _FSDPForwardRedirection


def _without_logits(model: nn.Module, inputs: dict[str, Tensor], chosen: int) -> tuple[Tensor, ...]:
    """What ``concatenated_forward`` returns, the first ``chosen`` sequences being those; for logits, their means over the vocabulary."""
    ids, mask = inputs["concatenated_input_ids"], inputs["concatenated_attention_mask"]
    x = model.base_model(ids, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1]  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    flat, labels = x.flatten(0, 1), inputs["concatenated_labels"][:, 1:]
    logp: Any = linear_logprobs(flat, head.weight, labels.flatten(), head.bias, ignore_index=IGNORE, compact=True)
    mean = logp.view(labels.shape).sum(1) / (labels != IGNORE).sum(1)
    everything = torch.where(mask == 1, ids, IGNORE)[:chosen, 1:]  # of what was chosen, the prompt is learnt, too
    nll = linear_cross_entropy(x[:chosen].flatten(0, 1), head.weight, everything.flatten(), head.bias)
    with torch.no_grad():
        means = x.float() @ head.weight.float().mean(0) + (0 if head.bias is None else head.bias.float().mean())
    return mean[:chosen], mean[chosen:], means[:chosen], means[chosen:], nll  # type: ignore[return-value]


@functools.cache
def _trainer() -> type:
    try:
        from trl.experimental.orpo import ORPOTrainer
    except ImportError:
        from trl import ORPOTrainer

    class LigerORPOTrainer(ORPOTrainer):
        """TRL's ``ORPOTrainer`` with the head fused into its losses; models whose head is more than a linear layer take TRL's own way."""

        def concatenated_forward(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, ...]:
            inner = self.accelerator.unwrap_model(model)
            scaled = any(getattr(inner.config, name, None) not in (None, 1, 1.0) for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"))
            sharded = isinstance(model, FullyShardedDataParallel)
            head = inner.get_output_embeddings()
            if self.is_encoder_decoder or self.aux_loss_enabled or scaled or hasattr(inner, "peft_config") or not (sharded or is_plain(head)):
                return super().concatenated_forward(model, batch)
            inputs = self.concatenated_inputs(batch, padding_value=self.padding_value, device=self.accelerator.device)
            args = inner, inputs, len(batch["chosen_labels"])
            return _FSDPForwardRedirection()(model, _without_logits, *args) if sharded else _without_logits(*args)

    return LigerORPOTrainer


def __getattr__(name: str) -> Any:
    if name != "LigerORPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _trainer()
