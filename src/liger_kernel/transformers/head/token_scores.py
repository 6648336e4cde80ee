"""Log-probabilities of given tokens and means of logits, from the model's own ``forward`` and
without logits, for trainers whose losses need these.

``give_scores`` adds one keyword to a model's ``forward``:

    model(input_ids, attention_mask=mask, token_targets=(first, second))
        ->  TokenScores(logp, logp_of_others, mean_logit)

The trainer calls the model through whatever wraps it. So DDP, FSDP, autocast, PEFT, checkpointing,
and everything that a family does to its logits (scales, caps) act as in every other call. A
stand-in replaces the output head during that call, as in ``forward``. If the head is one linear
layer, or has LoRA, the logits of the batch are never stored. Every other head
computes them, and so does a compiled model.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import ModelOutput

from liger_kernel.ops._core.operator import on_gpu
from liger_kernel.ops.losses.chunks import Kept, auto_chunk_rows
from liger_kernel.parallel import VocabularyParallel
from liger_kernel.transformers.head.recipe import IGNORE, DeferredLogits, LossRequest
from liger_kernel.transformers.head.stand_in import Call, StandIn, enter, leave, place_of_head, this_thread


@dataclasses.dataclass
class TokenScores(ModelOutput):
    """What a scored ``forward`` returns instead of logits (B, T, V); all fields are fp32 (B, T).

    logp: log-probabilities of the targets, 0 for ignored targets. With two sets of targets there is
    one tensor for each; the second one holds the tokens whose target differs from that in the first
    set. mean_logit: mean over the vocabulary, without gradient. aux_loss: that of the model.
    """

    logp: Tensor | None = None
    logp_of_others: Tensor | None = None
    mean_logit: Tensor | None = None
    aux_loss: Tensor | None = None


_UNDER_WAY: dict[int, list[Any]] = {}  # thread -> the targets of its calls, and how to restore the head


def give_scores(model: nn.Module) -> None:
    """Let ``forward`` of ``model``, or of the model in a PEFT wrapper, accept ``token_targets``.
    It uses hooks, which stay if ``forward`` is replaced."""
    inner: Any = getattr(model, "get_base_model", lambda: model)()
    if _before not in inner._forward_pre_hooks.values():
        inner.register_forward_pre_hook(_before, with_kwargs=True)
        # before the hooks of FSDP2, which are registered later
        inner.register_forward_hook(_after, with_kwargs=True, always_call=True)


def _before(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    calls = _UNDER_WAY.setdefault(this_thread(), [])
    targets = kwargs.get("token_targets")
    place = None if targets is None or torch.compiler.is_compiling() else place_of_head(model)
    if targets is None or place is None:
        calls.append((targets, None, None))
    else:
        parent, name = place
        head: Any = parent._modules[name]
        head = head.head if isinstance(head, StandIn) else head
        # name the head as the caller: a patched model that is called without labels turns off only
        # stand-ins for its own calls
        stand_in = enter(parent, name, Call(head, LossRequest()))
        kept = Kept(torch.cat([t.flatten() for t in targets]), IGNORE)  # the GPU counts them while the model computes
        calls.append((targets, kept, functools.partial(leave, stand_in, parent, name)))
    return args, {k: v for k, v in kwargs.items() if k != "token_targets"}


def _after(model: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> Any:
    """Restore the head and return the scores. It also runs after an error, without an output
    then."""
    targets, kept, put_back = _UNDER_WAY[this_thread()].pop()
    if put_back is not None:
        put_back()
    return None if targets is None or out is None else scores(out, targets, kept)


def scores(out: Any, token_targets: tuple[Tensor, Tensor], kept: Kept | None = None) -> TokenScores:
    """Return the ``TokenScores`` of the output of a ``forward``, whose logits are a recipe or a
    tensor."""
    logits, (first, _) = out.logits, token_targets
    if tuple(logits.shape[:2]) != tuple(first.shape):
        raise ValueError(f"token_targets: logits must be of {tuple(first.shape)} tokens, got {tuple(logits.shape[:2])}")
    if isinstance(logits, DeferredLogits) and not _is_fusable(logits):
        logits = logits.value()
    targets = torch.cat([t.flatten() for t in token_targets]).to(logits.device)
    chosen = (Kept(targets, IGNORE) if kept is None else kept).rows()
    chosen = torch.arange(targets.shape[0], device=targets.device) if chosen is None else chosen
    nll = F.cross_entropy(
        logits.flatten(0, 1)[chosen % first.numel()], targets[chosen], reduction="none", ignore_index=IGNORE
    )
    logp = nll.new_zeros(targets.shape, dtype=torch.float32).index_copy(0, chosen, -nll.float())
    ours, others = logp.view(2, *first.shape).unbind()
    return TokenScores(ours, others, mean_logits(logits), getattr(out, "aux_loss", None))


def _is_fusable(logits: DeferredLogits) -> bool:
    """Whether the rows may be multiplied once for the means and once for the log-probabilities."""
    return logits.computed is None and logits.head is not None and logits.scale_and_cap() is not None


@torch.no_grad()
def mean_logits(logits: Tensor | DeferredLogits) -> Tensor:
    """Mean over the vocabulary, fp32 (B, T)."""
    if not isinstance(logits, DeferredLogits):
        return logits.mean(-1, dtype=torch.float32)
    head: Any = logits.head
    scale, cap = logits.scale_and_cap() or (1.0, None)  # never None if the head is fusable
    thin = None if logits.thin is None else logits.thin.flatten(0, -2)

    def means(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        if cap is None:  # the mean of linear functions is the function of mean weights
            return scale * _means(x, w, bias, thin, head.wb)
        return in_chunks(x, lambda x, thin: F.linear(x, w, bias) + (0 if thin is None else F.linear(thin, head.wb)))

    def in_chunks(x: Tensor, product: Any) -> Tensor:
        step = auto_chunk_rows(x.shape[0], head.classes, x.shape[1], x.element_size(), on_gpu(x))
        of_thin = [None] * -(-x.shape[0] // step) if thin is None else thin.split(step)
        parts = (scale * product(*chunk).float() for chunk in zip(x.split(step), of_thin))
        return torch.cat([(z if cap is None else cap * torch.tanh(z / cap)).mean(-1) for z in parts])

    rows = logits.rows.flatten(0, -2)
    with logits.as_called():
        if isinstance(head.module, VocabularyParallel):  # no rank has all weights
            found = in_chunks(rows, lambda x, _: head.module(x))
        else:
            found = head.multiply(means, rows)
    return found.view(logits.shape[:-1])


def _means(x: Tensor, w: Tensor, bias: Tensor | None, xa: Tensor | None = None, wb: Tensor | None = None) -> Tensor:
    """Means (M,) of the logits x w^T + xa wb^T + bias, computed as the logit of a class with the
    mean weights."""
    mean = 0 if bias is None else bias.float().mean()
    for rows, of in ((x, w), (xa, wb)):
        if rows is not None and of is not None:
            of = of.mean(0, dtype=torch.float32)
            mean = mean + torch.cat([c.float() @ of for c in rows.split(4096)])
    return mean
