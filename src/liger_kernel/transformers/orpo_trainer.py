"""TRL's trainer of odds ratio preference optimisation (ORPO), without logits. TRL is imported on
first use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernel.parallel import call_instead
from liger_kernel.transformers.head.recipe import IGNORE
from liger_kernel.transformers.head.token_scores import give_scores


class _FSDPForwardRedirection:
    """Calls a function while the parameters of a module, wrapped by FSDP1, are gathered, and
    lets their gradients be reduced."""

    def __call__(self, wrapper_module: nn.Module, method: Callable, *args: Any, **kwargs: Any) -> Any:
        """``method(*args, **kwargs)``, from within a call of ``wrapper_module``."""
        return call_instead(wrapper_module, wrapper_module.module, method, *args, **kwargs)


@functools.cache
def _trainer() -> type:
    try:
        from trl.experimental.orpo import ORPOTrainer
    except ImportError:
        from trl import ORPOTrainer

    class LigerORPOTrainer(ORPOTrainer):
        """TRL's ``ORPOTrainer`` without the logits of a batch, where the output head is one
        linear layer. Other heads, and compiled models, compute them."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            give_scores(self.model)

        def call_model_init(self, trial: Any = None) -> nn.Module:
            model = super().call_model_init(trial)
            give_scores(model)
            return model

        def concatenated_forward(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, ...]:
            """Mean log-probabilities of chosen and rejected answers, mean logits of their
            tokens, the NLL of what was chosen; the auxiliary loss, if any."""
            if self.is_encoder_decoder:
                return super().concatenated_forward(model, batch)
            inputs = self.concatenated_inputs(batch, padding_value=self.padding_value, device=self.accelerator.device)
            ids, mask, labels = (inputs[f"concatenated_{name}"] for name in ("input_ids", "attention_mask", "labels"))
            n = len(batch["chosen_labels"])
            learned = torch.where(mask == 1, ids, IGNORE)  # of what was chosen, the prompt is learned, too
            learned[n:] = IGNORE
            learned, labels = (F.pad(t, (0, 1), value=IGNORE)[:, 1:] for t in (learned, labels))
            targets = learned, torch.where(labels == learned, IGNORE, labels)
            aux = {"output_router_logits": True} if self.aux_loss_enabled else {}
            out = model(ids, attention_mask=mask, use_cache=False, token_targets=targets, **aux)
            nll = -out.logp.sum() / (learned != IGNORE).sum()
            counts = labels != IGNORE
            answers = torch.where(labels == learned, out.logp, out.logp_of_others).where(counts, 0).sum(1) / counts.sum(
                1
            )
            means = out.mean_logit[:, :-1]  # the last token predicts nothing
            return (answers[:n], answers[n:], means[:n], means[n:], nll, *([out.aux_loss] if aux else []))

    return LigerORPOTrainer


def __getattr__(name: str) -> Any:
    if name != "LigerORPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _trainer()
