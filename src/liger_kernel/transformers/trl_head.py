"""TRL's trainers, from TRL 1.13 on, compute log-probabilities by a head of their own, whatever the
model's forward is. For models that we patched, that head calls ours.

All of TRL's stable trainers go through ``apply`` of one ``torch.autograd.Function``. This ``apply``
becomes ours, which looks for the calling model, and calls TRL's own for a model that is not
patched. It is the only part of a framework that we patch. If TRL's parameters are others than those
known here, its own head runs, and one warning says so.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.ops.losses.linear_logprobs import linear_logprobs

_UTILS = "trl.trainer.utils"
_FIRST = ("hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale")
# parameters of TRL's Function after ctx -> the releases that have them
_KNOWN = {(*_FIRST, "outputs"): "1.15 and 1.16", ("last_hidden", *_FIRST[1:]): "1.13 and 1.14"}
# TRL's name of an output -> ours
_OUTPUTS = {"entropy": "entropy", "log_sum_sq_probs": "log_sum_sq", "mean_logits": "mean_logit", "is_top1": "top1"}

# models patched one by one, and classes of models
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_classes: set[type] = set()


def _functions() -> dict[str, Any]:
    """TRL's Functions that can be replaced, by where they are; none before TRL is imported."""
    found = {}
    for module, name in ((_UTILS, "_ChunkedLogProbFunction"),):
        function = getattr(sys.modules.get(module), name, None)
        if function is not None:
            found[f"{module}.{name}"] = function
    return found


def use(owner: nn.Module | type) -> None:
    """From now on TRL computes log-probabilities of this model, or of models of this class, with
    our head."""
    (_classes if isinstance(owner, type) else _models).add(owner)
    for function in _functions().values():
        if isinstance(function.__dict__.get("apply"), staticmethod):
            continue
        parameters = tuple(inspect.signature(function.forward).parameters)[1:]
        if parameters in _KNOWN:
            function.apply = staticmethod(_apply(function, "outputs" in parameters))
        else:
            warnings.warn(
                f"liger_kernel: TRL's head has parameters that this release does not know {parameters}; TRL's own runs",
                stacklevel=2,
            )


def stop(owner: nn.Module | type | None = None) -> None:
    """The opposite of ``use``, for all models if there is no ``owner``."""
    if owner is None:
        _classes.clear()
        _models.clear()
    else:
        (_classes if isinstance(owner, type) else _models).discard(owner)
    if not _classes and not len(_models):
        for function in _functions().values():
            if isinstance(function.__dict__.get("apply"), staticmethod):
                del function.apply


def state() -> str | None:
    """What ``liger env`` reports of TRL's head; None without TRL."""
    functions = _functions()
    if not functions:
        return None
    ours = any(isinstance(f.__dict__.get("apply"), staticmethod) for f in functions.values())
    return "liger_kernel for patched models" if ours else "TRL's own"


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
    if model is None:
        return False
    return any(m in _models or not _classes.isdisjoint(type(m).__mro__) for m in _inner(model))


def _inner(model: nn.Module) -> list[nn.Module]:
    """The model, and the one inside of what PEFT, DDP and FSDP put around it."""
    found = [model]
    for name in ("module", "get_base_model", "_orig_mod"):
        inner = getattr(found[-1], name, None)
        inner = inner() if callable(inner) and not isinstance(inner, nn.Module) else inner
        if isinstance(inner, nn.Module) and inner is not found[-1]:
            found.append(inner)
    return found


def _apply(function: Any, with_outputs: bool) -> Callable[..., tuple[Any, ...]]:
    trl = function.apply
    unchecked = [os.environ.get("LIGER_CHECKS") == "1"]

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
            hidden, weight, targets, bias, temperature=temperature, logit_scale=logit_scale,
            softcap=final_logit_softcapping, outputs=names,
        )  # fmt: skip
        logp, *others = found if names else (found,)
        by_name = dict(zip(names, others))
        if "top1" in by_name:
            by_name["top1"] = by_name["top1"] == targets
        results = (logp, *(by_name.get(name) for name in _OUTPUTS.values()))
        results = results if with_outputs else results[:2]
        if unchecked[0] and len(hidden):
            unchecked[0] = False
            some = slice(0, 64)
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
