"""TRL's experimental trainers call a model without labels and read its logits. For models that we
patched, these are recipes, and what the trainers compute of them stores no logits.

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
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernel import parallel
from liger_kernel.ops.losses.divergence.linear_divergence import linear_divergence
from liger_kernel.ops.losses.linear_logprobs import linear_logprobs
from liger_kernel.transformers import trl_head
from liger_kernel.transformers.head.recipe import IGNORE, READERS, LogitsRecipe, of_tensors
from liger_kernel.transformers.head.stand_in import has_hooks, outliving
from liger_kernel.transformers.head.token_scores import mean_logits

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
_replaced: list[tuple[Any, str, Any]] = []  # owner, name, and what TRL has there


def use(owner: nn.Module | str) -> None:
    """``trl_head.use``, and from now on TRL's trainers get recipes of this model, or of models of
    this type."""
    trl_head.use(owner)
    for module in [m for name, m in list(sys.modules.items()) if name.startswith("trl.experimental.") and m]:
        values = list(vars(module).values())
        classes = [c for c in values if isinstance(c, type) and c.__module__ == module.__name__]
        for of in (module, *classes):
            for name in _READERS.keys() & vars(of).keys():
                theirs = getattr(of, name)
                if _parameters(_READERS[name]) >= _parameters(theirs):
                    _put(of, name, _reader(theirs, _READERS[name]))
        for cls in classes:
            for name in _CALLERS.keys() & vars(cls).keys():
                reader = _CALLERS[name]
                if reader is None or _is_ours(vars(module).get(reader, getattr(cls, reader, None))):
                    _put(cls, name, _caller(getattr(cls, name)))


def stop(owner: nn.Module | str | None = None) -> None:
    """The opposite of ``use``; without ``owner`` for all models."""
    trl_head.stop(owner)
    while _replaced and not trl_head.in_use():
        of, name, theirs = _replaced.pop()
        if _is_ours(getattr(of, name, None)):
            setattr(of, name, theirs)


def _parameters(function: Callable) -> Any:
    return inspect.signature(function).parameters.keys()


def _put(owner: Any, name: str, ours: Any) -> None:
    theirs = vars(owner)[name]
    if not _is_ours(getattr(owner, name)):
        ours.of_recipes = True
        setattr(owner, name, staticmethod(ours) if isinstance(theirs, staticmethod) else ours)
        _replaced.append((owner, name, theirs))


def _is_ours(function: Any) -> bool:
    return hasattr(function, "of_recipes")


def _caller(theirs: Callable) -> Callable:
    @functools.wraps(theirs)
    def caller(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        used = trl_head.is_used(model) and _keeps_weights(self, model)
        with outliving(trl_head.layers(model)[-1], _is_alone) if used else contextlib.nullcontext():
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


# -- what is computed of a recipe


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


def _logprobs(logits: Any, target: Tensor, **how: Any) -> Any:
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
    logp, entropy = _logprobs(logits, index, **how)
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
        return _logprobs(logits, index)


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
        return _logprobs(x, x.rows[..., 0].new_zeros((), dtype=torch.int64).expand(x.shape[:-1]), outputs=("top1",))[1]


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
