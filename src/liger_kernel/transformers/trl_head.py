"""TRL computes log-probabilities and divergences by heads of its own, whatever the model's forward is. For
models that we patched, ours compute them. TRL is the only framework of which we patch something.

From TRL 1.13 on, all stable trainers go through ``apply`` of one of two ``torch.autograd.Function``s
(``_FUNCTIONS``). This ``apply`` becomes ours, which looks for the calling model, and calls TRL's own
for a model that is not patched. If TRL's parameters are others than those known here, its own head
runs, and one warning says so.

Experimental trainers call a model without labels and read its logits. Of patched models these are
recipes, and what the trainers compute of them stores no logits.

    ORPOTrainer.concatenated_forward(model, batch)      a stand-in replaces the head meanwhile
      model(ids).logits                                 a recipe: hidden states, lm_head.weight
      selective_log_softmax(logits[:, :-1], labels)     linear_logprobs(hidden, weight, labels)
      logits.detach().mean()                            the mean of mean_logits(logits)

A recipe reads the head's weights later than the call. So only methods that are known to be followed
by their reader in the same step get one (``_CALLERS``), and only if the weights are whole then (no
FSDP, no ZeRO). These methods become ours, and so do the functions of TRL by which they read logits,
if we know all their parameters. Whatever a function here cannot compute (``NotImplemented``), and
all other code, gets logits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import logging
import os
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernel import parallel
from liger_kernel.ops.losses.chunks import regathered
from liger_kernel.ops.losses.divergence.linear_divergence import linear_divergence
from liger_kernel.ops.losses.linear_logprobs import linear_logprobs
from liger_kernel.transformers.head.recipe import IGNORE, READERS, LogitsRecipe, of_tensors
from liger_kernel.transformers.head.stand_in import has_hooks, outliving
from liger_kernel.transformers.head.token_scores import mean_logits

logger = logging.getLogger(__name__)

_UTILS = "trl.trainer.utils"
_FIRST = ("hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale")
_HEADS = ("hidden", "weight", "bias")
_TRANSFORMS = ("logit_scale", "final_logit_softcapping")
# parameters of TRL's Functions after ctx -> the releases that have them
_LOGPROBS = {(*_FIRST, "outputs"): "1.15 and 1.16", ("last_hidden", *_FIRST[1:]): "1.13 and 1.14"}
_of_both = lambda names: tuple(f"{model}_{name}" for model in ("student", "teacher") for name in names)
_DIVERGENCES = {(*_of_both(_HEADS), "beta", "temperature", *_of_both(_TRANSFORMS)): "1.15 and 1.16"}
# TRL's name of an output -> ours
_OUTPUTS = {"entropy": "entropy", "log_sum_sq_probs": "log_sum_sq", "mean_logits": "mean_logit", "is_top1": "top1"}

# models patched one by one, which have the mark so that their copies have it, too; and types of
# models whose classes are patched
_MARK = "_liger_trl_heads"
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_types: set[str] = set()


@dataclasses.dataclass(frozen=True)
class _Function:
    """A Function of TRL: where it is, the parameters that we know, and what makes our ``apply`` of it
    and these."""

    what: str
    module: str
    name: str
    known: dict[tuple[str, ...], str]
    make: Callable[[Any, tuple[str, ...]], Callable[..., tuple[Any, ...]]]

    def find(self) -> Any:
        """None before TRL is imported, or without TRL."""
        if _UTILS in sys.modules:
            # TRL imports that of divergences late, and releases before 1.15 do not have it
            with contextlib.suppress(ImportError):
                return getattr(importlib.import_module(self.module), self.name, None)
        return None


def _replaced(function: Any) -> bool:
    return isinstance(vars(function).get("apply"), staticmethod)


def _replaced_functions() -> list[Any]:
    found = (trl.find() for trl in _FUNCTIONS)
    return [function for function in found if function is not None and _replaced(function)]


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function.forward).parameters)[1:]


def _other_parameters(trl: _Function, function: Any) -> str:
    releases, got = " or ".join(trl.known.values()), ", ".join(_parameters(function))
    return f"parameters of its {function.__name__} must be those of TRL {releases}, got {got}"


def heads() -> str:
    """What `liger env` says of TRL, which is imported for it: which of its Functions were found,
    whether their parameters are known, and whose code runs in this process."""
    importlib.import_module(_UTILS)
    return "; ".join(f"{each.what}: {_state(each)}" for each in _FUNCTIONS)


def _state(trl: _Function) -> str:
    function = trl.find()
    if function is None:
        return "TRL's, no function of its own was found"
    if (parameters := _parameters(function)) not in trl.known:
        return f"TRL's, {_other_parameters(trl, function)}"
    whose = "ours for patched models" if _replaced(function) else "TRL's, ours once a model is patched"
    return f"{whose} ({function.__name__} as in TRL {trl.known[parameters]})"


def use(owner: nn.Module | str) -> None:
    """From now on TRL computes log-probabilities and divergences of this model, or of models of
    this type, with our heads, and its trainers get recipes of their logits. The package ``trl`` must
    have been imported."""
    if isinstance(owner, str):
        _types.add(owner)
    else:
        _models.add(owner)
        for model in layers(owner):
            model.__dict__[_MARK] = True
    if "trl" in sys.modules:  # which imports its modules when they are needed; one that fails has no head
        with contextlib.suppress(Exception):
            importlib.import_module(_UTILS)
    for trl in _FUNCTIONS:
        function = trl.find()
        if function is None or _replaced(function):
            continue
        parameters = _parameters(function)
        if parameters in trl.known:
            # in a compiled model, too: in a graph, frames do not tell who calls
            function.apply = staticmethod(torch.compiler.disable(trl.make(function, parameters)))
        else:
            why = _other_parameters(trl, function)
            warnings.warn(f"liger_kernel: TRL computes {trl.what} itself: {why}", stacklevel=2)
    for module in [m for name, m in list(sys.modules.items()) if name.startswith("trl.experimental.") and m]:
        _give_recipes(module)


def stop(owner: nn.Module | str | None = None) -> None:
    """The opposite of ``use``; without ``owner`` for all models."""
    _types.difference_update(list(_types) if owner is None else [owner])
    for model in list(_models) if owner is None else [owner]:
        for each in layers(model) if isinstance(model, nn.Module) else ():
            _models.discard(each)
            each.__dict__.pop(_MARK, None)
    if in_use():
        return
    for function in _replaced_functions():
        del function.apply
    while _replaced_readers:
        of, name, theirs = _replaced_readers.pop()
        if _is_ours(getattr(of, name, None)):
            setattr(of, name, theirs)


def in_use() -> bool:
    """Whether any model is patched."""
    return bool(_types) or len(_models) > 0


def _calling_model() -> nn.Module | None:
    """The model that TRL trains or scores: of the frames that lead here, the first
    that is one of a model, or of a trainer, whose model it is."""
    # one of `torch.compiler.disable`, two of TRL, and the trainer's
    for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(2)), 4):
        for name in ("inner_model", "model", "self"):
            value = frame.f_locals.get(name)
            value = value if isinstance(value, nn.Module) else getattr(value, "model", None)
            if isinstance(value, nn.Module):
                return value
    return None


def layers(model: nn.Module | None) -> list[nn.Module]:
    """The model, and those inside of what PEFT, DDP, FSDP and torch.compile put around it."""
    found: list[nn.Module] = []
    while model is not None and len(found) < 8:
        found.append(model)
        # PEFT has adapters between itself and the model, whose own ``base_model`` has no head
        name = next((n for n in ("get_base_model", "module", "_orig_mod") if hasattr(model, n)), None)
        inside = getattr(model, name) if name else None
        model = inside if inside is None or isinstance(inside, nn.Module) else inside()
    return found


def is_used(model: nn.Module | None) -> bool:
    """Whether the model, or one inside of it, is patched."""
    types = lambda m: getattr(getattr(m, "config", None), "model_type", None)
    return any(_MARK in m.__dict__ or types(m) in _types for m in layers(model))


def uses(model: nn.Module) -> bool:
    """Whether TRL, which must have been imported, trains ``model`` with a head of ours."""
    return bool(_replaced_functions()) and is_used(model)


def _logprobs(function: Any, parameters: tuple[str, ...]) -> Callable[..., tuple[Any, ...]]:
    trl, first, with_outputs = function.apply, _First("log-probabilities", "linear_logprobs"), "outputs" in parameters

    def apply(
        hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0,
        outputs=("entropy",) if not with_outputs else tuple(_OUTPUTS),
    ):  # fmt: skip
        more = (outputs,) if with_outputs else ()
        given = (temperature, chunk_size, final_logit_softcapping, logit_scale, *more)
        if not is_used(_calling_model()):
            return trl(hidden, weight, bias, targets, *given)
        names = tuple(_OUTPUTS[o] for o in outputs if o in _OUTPUTS)
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
        theirs = lambda: trl(hidden[_SOME], weight, bias, targets[_SOME], *given)
        first.check(("log-probabilities", *_OUTPUTS), results, theirs)
        return results

    return apply


def _divergences(function: Any, parameters: tuple[str, ...]) -> Callable[..., tuple[Any, ...]]:
    trl, first = function.apply, _First("divergences", "linear_divergence")

    def apply(
        hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, beta, temperature=1.0,
        logit_scale=1.0, softcap=None, teacher_logit_scale=1.0, teacher_softcap=None,
    ):  # fmt: skip
        given = beta, temperature, logit_scale, softcap, teacher_logit_scale, teacher_softcap
        if not is_used(_calling_model()):
            return trl(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, *given)
        # beta 0 and 1 are the same KLs as TRL's, and between them the mixture has the same weights
        options: dict[str, Any] = dict(kind="jsd", beta=beta, temperature=temperature)
        options |= dict(logit_scale=logit_scale, softcap=softcap, reduction="none", entropy=True)
        options |= dict(teacher_logit_scale=teacher_logit_scale, teacher_softcap=teacher_softcap)
        heads = hidden, weight, teacher_hidden, teacher_weight, None, bias, teacher_bias
        # TRL does not gather what ZeRO-3 has divided before this call. fp32_logits as in TRL's head:
        # rounded logits of two models that are nearly equal have other divergences
        with regathered(weight, bias, teacher_weight, teacher_bias):
            results = linear_divergence(*heads, **options, fp32_logits=True)
        few = hidden[_SOME], weight, bias, teacher_hidden[_SOME], teacher_weight, teacher_bias
        first.check(("divergences", "entropy"), results, lambda: trl(*few, *given))
        return results

    return apply


_SOME = slice(0, 64)


class _First:
    """What happens at the first call: a line in the log, and with LIGER_CHECKS a comparison."""

    def __init__(self, what: str, operator: str):
        self.what, self.operator, self.calls = what, operator, itertools.count()

    def check(self, names: tuple[str, ...], ours: tuple[Tensor | None, ...], theirs: Callable) -> None:
        """Raise if the first numbers differ from TRL's, ``theirs()``, by more than rounding."""
        if next(self.calls):
            return
        logger.info("liger_kernel: %s of TRL's trainers are computed by %s", self.what, self.operator)
        if os.environ.get("LIGER_CHECKS") != "1":
            return
        with torch.no_grad():
            pairs = zip(names, ours, theirs())
        for name, a, b in pairs:
            if a is None or b is None or a.dtype == torch.bool:
                continue
            a, b = a.detach()[_SOME].float(), b.float()
            if not torch.allclose(a, b, rtol=1e-2, atol=1e-2):
                worst = (a - b).abs().max().item()
                raise RuntimeError(f"liger_kernel: TRL's head and ours differ in {name} by {worst:.3g}")


_FUNCTIONS = (
    _Function("log-probabilities", _UTILS, "_ChunkedLogProbFunction", _LOGPROBS, _logprobs),
    _Function("divergences", "trl.kernels.chunked_divergence", "ChunkedDivergenceFunction", _DIVERGENCES, _divergences),
)


# -- trainers that read logits

_SELECTED, _BOTH, _JSD = "selective_log_softmax", "selective_log_softmax_and_entropy", "generalized_jsd_loss"
# the method of a trainer that calls a model -> the function by which the trainer reads logits
_CALLERS = {
    "concatenated_forward": _SELECTED,  # ORPO, CPO
    "_get_sequence_logps": _SELECTED,  # A2PO
    "_forward_logits": _SELECTED,  # SDPO, SDFT
    "_compute_loss": _BOTH,  # TPO
    "compute_loss": _JSD,  # GKD, GOLD
    "_forward": None,  # Online DPO
}
_replaced_readers: list[tuple[Any, str, Any]] = []  # owner, name, and what TRL has there


def _give_recipes(module: Any) -> None:
    """Let the trainers in a module of TRL get recipes of patched models, and read them."""
    classes = [c for c in list(vars(module).values()) if isinstance(c, type) and c.__module__ == module.__name__]
    for of in (module, *classes):
        for name in _READERS.keys() & vars(of).keys():
            theirs = getattr(of, name)
            if inspect.signature(_READERS[name]).parameters.keys() >= inspect.signature(theirs).parameters.keys():
                _put(of, name, _reader(theirs, _READERS[name]))
    for cls in classes:
        for name in _CALLERS.keys() & vars(cls).keys():
            reader = _CALLERS[name]
            if reader is None or _is_ours(vars(module).get(reader, getattr(cls, reader, None))):
                _put(cls, name, _caller(getattr(cls, name)))


def _put(owner: Any, name: str, ours: Any) -> None:
    theirs = vars(owner)[name]
    if not _is_ours(getattr(owner, name)):
        ours.of_recipes = True
        setattr(owner, name, staticmethod(ours) if isinstance(theirs, staticmethod) else ours)
        _replaced_readers.append((owner, name, theirs))


def _is_ours(function: Any) -> bool:
    return hasattr(function, "of_recipes")


def _caller(theirs: Callable) -> Callable:
    @functools.wraps(theirs)
    def caller(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        used = is_used(model) and _keeps_weights(self, model)
        with outliving(layers(model)[-1], _is_alone) if used else contextlib.nullcontext():
            return theirs(self, model, *args, **kwargs)

    return caller


def _is_alone(head: nn.Module) -> bool:
    """Whether nobody else sees the calls of ``head``, or has parts of it."""
    return not (has_hooks(head) or parallel.is_sharded(head) or parallel.is_tensor_parallel(head))


def _keeps_weights(trainer: Any, model: Any) -> bool:
    """Whether weights are whole after a call, and nobody but the trainer looks at its output."""
    kind = getattr(getattr(trainer, "accelerator", None), "distributed_type", "")
    if getattr(kind, "value", kind) not in ("NO", "MULTI_CPU", "MULTI_GPU") or isinstance(model, nn.DataParallel):
        return False
    # DDP follows the graph of the output then
    return not any(getattr(model, name, False) for name in ("find_unused_parameters", "static_graph"))


def _reader(theirs: Callable, ours: Callable) -> Callable:
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def reader(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        found = ours(**given) if is_unread(next(iter(given.values()))) else NotImplemented
        return theirs(*of_tensors(args), **of_tensors(kwargs)) if found is NotImplemented else found

    return reader


# -- what they compute of a recipe


def is_unread(logits: Any) -> bool:
    """Whether these are logits that may outlive their ``forward`` and that nobody has computed."""
    if not isinstance(logits, LogitsRecipe) or not logits.loss.outlives or logits.computed is not None:
        return False
    return logits.head is not None and logits.head.w is not None and logits.scale_and_cap() is not None


def _of_head(logits: Any, function: Callable[..., Any], **how: Any) -> Any:
    """``function(rows, w, bias)``, as if it read the logits."""
    logits.needs_graph()
    scale, cap = logits.scale_and_cap()
    learns = logits.learns and torch.is_grad_enabled()
    with torch.set_grad_enabled(learns), logits.as_called():
        found = logits.head.multiply(functools.partial(function, logit_scale=scale, softcap=cap, **how), logits.rows)
    for recipe in logits.family() if learns else ():
        recipe.without_gradient = True
    return found


def _logprobs_of(logits: Any, target: Tensor, **how: Any) -> Any:
    function = lambda x, w, bias, **how: linear_logprobs(x, w, target, bias, **how)
    return _of_head(logits, function, xa=logits.thin, wb=logits.head.wb, **how)


def both(
    logits: Any,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> Any:
    index = index if row_mask is None else index.masked_fill(row_mask == 0, IGNORE)
    how = dict(temperature=temperature, outputs=("entropy",), entropy_grad=entropy_requires_grad)
    logp, entropy = _logprobs_of(logits, index, **how)
    return logp, entropy if entropy_requires_grad else entropy.detach()


def _selected(logits: Any, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None) -> Any:
    return both(logits, index, False, temperature, row_mask)[0]


def _jsd(
    student_logits: Any, teacher_logits: Tensor, labels: Tensor | None = None, beta: float = 0.5,
    temperature: float = 1.0, reduction: str = "batchmean", logits_are_probs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:  # fmt: skip
    other = labels is None or logits_are_probs or (num_items_in_batch is None and reduction != "batchmean")
    if other or student_logits.thin is not None or teacher_logits.requires_grad:
        return NotImplemented
    how: dict[str, Any] = dict(target=labels.flatten(), beta=beta, temperature=temperature, reduction="sum")
    how |= dict(teacher_logits=of_tensors(teacher_logits).flatten(0, -2), kind="jsd", fp32_logits=True)
    total = _of_head(
        student_logits, lambda x, w, bias, **how: linear_divergence(x.flatten(0, -2), w, bias=bias, **how), **how
    )
    n = (labels != IGNORE).sum().clamp_min(1) if num_items_in_batch is None else num_items_in_batch
    return total / (n.to(total.device) if isinstance(n, Tensor) else n)


_READERS: dict[str, Callable[..., Any]] = {_SELECTED: _selected, _BOTH: both, _JSD: _jsd}


def _log_softmax(x: LogitsRecipe, dim: Any = None, dtype: Any = None, **_: Any) -> Any:
    if not is_unread(x) or dim not in (-1, x.ndim - 1) or dtype is not None:
        return NotImplemented
    return x.derived(lambda y: y.log_softmax(-1), tail=(("log_softmax", x),))


def _gather(x: LogitsRecipe, dim: Any, index: Tensor) -> Any:
    """Log-probabilities, fp32 as from TRL's own kernels."""
    name, logits = x.tail[-1] if x.tail else ("", x)
    # no tokens were selected since
    whole = name == "log_softmax" and logits.rows is x.rows and is_unread(logits)
    if not whole or dim not in (-1, x.ndim - 1) or index.shape[:-1] != x.shape[:-1]:
        return NotImplemented
    with torch.set_grad_enabled(x.learns and torch.is_grad_enabled()):
        return _logprobs_of(logits, index)


def _detach(x: LogitsRecipe) -> Any:
    with torch.no_grad():
        return x.derived(Tensor.detach, Tensor.detach)


def _chunk(x: LogitsRecipe, chunks: int, dim: int = 0) -> Any:
    return tuple(x[i[0] : i[-1] + 1] for i in torch.arange(len(x)).chunk(chunks)) if dim == 0 else NotImplemented


def _mean(x: LogitsRecipe, dim: Any = None) -> Any:
    if x.requires_grad or not is_unread(x) or dim not in (None, -1):
        return NotImplemented
    found = mean_logits(x).to(x.dtype)
    return found.mean() if dim is None else found


def _argmax(x: LogitsRecipe, dim: Any = None) -> Any:
    if not is_unread(x) or dim != -1:
        return NotImplemented
    with torch.no_grad():
        any_class = x.rows.new_zeros((), dtype=torch.int64).expand(x.shape[:-1])
        return _logprobs_of(x, any_class, outputs=("top1",))[1]


_OF_TORCH: dict[str, Callable[..., Any]] = {
    "log_softmax": _log_softmax,
    "gather": _gather,
    "take_along_dim": lambda x, indices, dim=None: _gather(x, dim, indices),
    "detach": _detach,
    "chunk": _chunk,
    "mean": _mean,
    "argmax": _argmax,
}
READERS.update({getattr(of, name): ours for of in (torch, Tensor) for name, ours in _OF_TORCH.items()})
READERS[F.log_softmax] = _log_softmax
