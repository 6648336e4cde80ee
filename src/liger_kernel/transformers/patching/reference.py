"""The Trainer that is patching a model, and the reference model beside it.

Transformers' Trainer patches one model: the one that it trains. A reference policy beside it
(``ref_model`` in TRL's trainers for DPO, KTO, GRPO, ...) would keep stock norms, which add in
another order on a GPU. The two would then differ by rounding before anything is learnt, and DPO
would not begin at log 2. The Trainer does not pass the reference on, nor its arguments, so it is
looked up in the caller.

With ``precompute_ref_log_probs``, TRL runs the reference in the constructor, before the Trainer
patches.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from liger_kernel import __version__
from liger_kernel.transformers.patching import once

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


def compute_references_again(trainer: Any, flags: Mapping[str, Any]) -> None:
    """Replace reference log-probabilities that TRL computed with stock models by those of the
    patched models, once.

    TRL caches them on disk by a hash of the weights; to this hash we add what patched them.
    Raises ``ValueError`` if the reference is gone.
    """
    args = getattr(trainer, "args", None)
    data = getattr(trainer, "train_dataset", None)
    computed = [c for c in getattr(data, "column_names", None) or () if re.fullmatch("ref_.*logps", c)]
    if not (computed and getattr(args, "precompute_ref_log_probs", False)):
        return
    name, key, by_us = type(trainer).__name__, getattr(trainer, "_precompute_model_hash", None), " by liger_kernel "
    if key and by_us in key:
        return
    adapted = hasattr(trainer.model, "get_base_model")  # the reference is the model without its adapters
    gone = getattr(trainer, "ref_model", None) is None and not adapted and getattr(trainer, "is_fsdp_enabled", False)
    if gone or key is None or not hasattr(trainer, "_precompute_ref_logps"):
        raise ValueError(
            f"{name}: precompute_ref_log_probs must be False with use_liger_kernel=True, got True: the reference was "
            "computed before "
            "the Trainer patched the model, and it is gone, so it cannot be computed "
            f"again{'; or pass ref_model=...' if gone else ''}"
        )
    once.warn(
        name,
        "precompute_ref_log_probs",
        "the reference was computed before the Trainer patched the model, so it is computed again, and cached",
    )
    trainer._precompute_model_hash = f"{key}{by_us}{__version__} {sorted(flags.items())}"

    def again(dataset: Any, name: str, batch: int) -> Any:
        return trainer._precompute_ref_logps(
            dataset.remove_columns(computed), name, args.precompute_ref_batch_size or batch
        )

    trainer.train_dataset, rest = again(data, "train", args.per_device_train_batch_size), trainer.eval_dataset
    if isinstance(rest, dict):
        trainer.eval_dataset = {
            name: again(dataset, name, args.per_device_eval_batch_size) for name, dataset in rest.items()
        }
    elif rest is not None:
        trainer.eval_dataset = again(rest, "eval", args.per_device_eval_batch_size)
