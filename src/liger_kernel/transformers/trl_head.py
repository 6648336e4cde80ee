"""TRL's trainers, from TRL 1.13 on, compute log-probabilities by a head of their own, whatever the
model's forward is. For models that we patched, that head calls ours.

All of TRL's stable trainers go through ``apply`` of one ``torch.autograd.Function``. This ``apply``
becomes ours, which looks for the calling model, and calls TRL's own for a model that is not
patched. It is the only part of a framework that we patch. If TRL's parameters are others than those
known here, its own head runs, and one warning says so.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.ops.losses.linear_logprobs import linear_logprobs

logger = logging.getLogger(__name__)

_FIRST = ("hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale")
# parameters of TRL's Function after ctx -> the releases that have them
_KNOWN = {(*_FIRST, "outputs"): "1.15 and 1.16", ("last_hidden", *_FIRST[1:]): "1.13 and 1.14"}
# TRL's name of an output -> ours
_OUTPUTS = {"entropy": "entropy", "log_sum_sq_probs": "log_sum_sq", "mean_logits": "mean_logit", "is_top1": "top1"}

# models patched one by one, and types of models whose classes are
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_types: set[str] = set()


def _function() -> Any:
    """TRL's Function; None before TRL is imported, or without TRL."""
    return getattr(sys.modules.get("trl.trainer.utils"), "_ChunkedLogProbFunction", None)


def _replaced(function: Any) -> bool:
    return isinstance(vars(function).get("apply"), staticmethod)


def use(owner: nn.Module | str) -> None:
    """From now on TRL computes log-probabilities of this model, or of models of this type, with our
    head. TRL must have been imported."""
    _types.add(owner) if isinstance(owner, str) else _models.add(owner)
    function = _function()
    if function is None or _replaced(function):
        return
    parameters = tuple(inspect.signature(function.forward).parameters)[1:]
    if parameters in _KNOWN:
        function.apply = staticmethod(_apply(function, "outputs" in parameters))
    else:
        why = f"its parameters are not those of TRL {' or '.join(_KNOWN.values())}: {', '.join(parameters)}"
        warnings.warn(f"liger_kernel: TRL computes log-probabilities itself, because {why}", stacklevel=2)


def stop(owner: nn.Module | str | None = None) -> None:
    """The opposite of ``use``; without ``owner`` for all models."""
    if owner is None:
        _types.clear()
        _models.clear()
    else:
        _types.discard(owner) if isinstance(owner, str) else _models.discard(owner)
    function = _function()
    if not _types and not len(_models) and function is not None and _replaced(function):
        del function.apply


def _calling_model() -> nn.Module | None:
    """The model whose log-probabilities TRL computes: of the frames that lead here, the first
    that is one of a model, or of a trainer, whose model it is."""
    frame = sys._getframe(2)
    for _ in range(3):
        if frame is None:
            break
        for name in ("inner_model", "model", "self"):
            value = frame.f_locals.get(name)
            value = value if isinstance(value, nn.Module) else getattr(value, "model", None)
            if isinstance(value, nn.Module):
                return value
        frame = frame.f_back
    return None


def _is_used(model: nn.Module | None) -> bool:
    """Whether the model, or one inside of what PEFT, DDP, FSDP and torch.compile put around it, is
    patched."""
    seen = 0
    while model is not None and seen < 8:
        if model in _models or getattr(getattr(model, "config", None), "model_type", None) in _types:
            return True
        inner = next((n for n in ("module", "_orig_mod", "base_model") if hasattr(model, n)), None)
        inside = getattr(model, inner) if inner else None
        # Transformers' ``base_model`` of a model without a head is the model itself
        model, seen = (inside if isinstance(inside, nn.Module) and inside is not model else None), seen + 1
    return False


def _apply(function: Any, with_outputs: bool) -> Callable[..., tuple[Any, ...]]:
    trl, calls = function.apply, itertools.count()

    def apply(
        hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0,
        outputs=("entropy",) if not with_outputs else tuple(_OUTPUTS),
    ):  # fmt: skip
        more = (outputs,) if with_outputs else ()
        given = (temperature, chunk_size, final_logit_softcapping, logit_scale, *more)
        known = [o for o in outputs if o in _OUTPUTS]
        if not _is_used(_calling_model()):
            return trl(hidden, weight, bias, targets, *given)
        names = tuple(_OUTPUTS[o] for o in known)
        found = linear_logprobs(
            hidden,
            weight,
            targets,
            bias,
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=final_logit_softcapping,
            outputs=names,
        )
        logp, *others = found if names else (found,)
        by_name = dict(zip(names, others))
        if "top1" in by_name:
            by_name["top1"] = by_name["top1"] == targets
        results = (logp, *(by_name.get(name) for name in _OUTPUTS.values()))
        results = results if with_outputs else results[:2]
        first, some = next(calls) == 0, slice(0, 64)
        if first:
            logger.info("liger_kernel: log-probabilities of TRL's trainers are computed by linear_logprobs")
        if first and os.environ.get("LIGER_CHECKS") == "1":
            _compare(results, trl(hidden[some].detach(), weight.detach(), bias, targets[some], *given), some)
        return results

    return apply


def _compare(ours: tuple[Tensor | None, ...], trl: tuple[Tensor | None, ...], some: slice) -> None:
    """Raise if numbers of the first call differ from TRL's by more than rounding."""
    for name, a, b in zip(("log-probabilities", *_OUTPUTS), ours, trl):
        if a is None or b is None or a.dtype == torch.bool:
            continue
        a = a.detach()[some]
        if not torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-2):
            worst = (a.float() - b.float()).abs().max().item()
            raise RuntimeError(f"liger_kernel: TRL's head and ours differ in {name} by {worst:.3g}")
