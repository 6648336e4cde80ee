"""The Trainer that is patching a model, and the reference model beside it.

Transformers' Trainer patches one model: the one that it trains. A reference policy beside it (``ref_model`` in TRL's trainers for DPO, KTO, GRPO, ...) would
keep stock norms, which add in another order on a GPU. The two would then differ by rounding before anything is learnt, and DPO would not begin at log 2.
The Trainer does not pass the reference on, nor its arguments, so it is looked up in the caller.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

CALLS = 6  # frames between a Trainer's method and this function: transformers' integration, and wrappers of frameworks


def trainer_of(model: nn.Module) -> Any:
    """Return the Trainer that is patching its ``model``; None for every other caller."""
    trainers = sys.modules.get("transformers.trainer")
    frame = sys._getframe(1) if trainers else None
    for _ in range(CALLS):
        if frame is None:
            return None
        trainer = frame.f_locals.get("self")
        if trainers is not None and isinstance(trainer, trainers.Trainer):
            return trainer if isinstance(trainer.model, nn.Module) and model in trainer.model.modules() else None
        frame = frame.f_back
    return None


def references_beside(model: nn.Module, trainer: Any) -> Iterator[nn.Module]:
    """Return the ``ref_model`` of a Trainer, or of None."""
    reference = getattr(trainer, "ref_model", None)
    if isinstance(reference, nn.Module) and reference is not model:
        yield getattr(reference, "module", reference)  # DeepSpeed's engine has it in this attribute
