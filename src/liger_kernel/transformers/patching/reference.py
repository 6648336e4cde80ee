"""The reference beside a model that a Trainer is about to train.

transformers' Trainer has one model patched: the one that it trains. A reference policy beside it (``ref_model`` of TRL's trainers of DPO, KTO, GRPO ...) would
go on with stock norms, which add in another order on a GPU: then the two differ by rounding before anything is learnt, and DPO begins at another
value than log 2. The Trainer does not name the reference, so it is looked up where the request comes from.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

CALLS = 6  # between a Trainer's method and us: transformers' integration, and wrappers of frameworks


def references_beside(model: nn.Module) -> Iterator[nn.Module]:
    """The ``ref_model`` of the Trainer of ``model`` that is patching it; nothing where somebody else asks."""
    trainers = sys.modules.get("transformers.trainer")
    frame = sys._getframe(1) if trainers else None
    for _ in range(CALLS):
        if frame is None:
            return
        trainer = frame.f_locals.get("self")
        if trainers is not None and isinstance(trainer, trainers.Trainer):
            reference = getattr(trainer, "ref_model", None)
            if isinstance(reference, nn.Module) and reference is not model and isinstance(trainer.model, nn.Module) and model in trainer.model.modules():
                yield getattr(reference, "module", reference)  # DeepSpeed's engine has it in this attribute
            return
        frame = frame.f_back
