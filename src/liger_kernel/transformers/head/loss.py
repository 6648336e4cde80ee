"""The loss of a recipe for logits, computed from hidden states and head in chunks."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss

from liger_kernel import parallel
from liger_kernel.nn import liger_cross_entropy, token_accuracy
from liger_kernel.ops._core.operator import on_gpu
from liger_kernel.ops.losses.chunks import Kept, auto_chunk_rows
from liger_kernel.ops.losses.cross_entropy import cross_entropy, items
from liger_kernel.ops.losses.cross_entropy_rows import Loss as LossNumbers
from liger_kernel.ops.losses.cross_entropy_rows import normaliser
from liger_kernel.ops.losses.linear_cross_entropy import linear_cross_entropy
from liger_kernel.transformers.head import loss_functions
from liger_kernel.transformers.head.linear import terms, with_adapters
from liger_kernel.transformers.head.recipe import DEFAULTS, IGNORE, LOSSES, Loss, LossOptions, Recipe, materialised
from liger_kernel.transformers.head.state import HeadState, is_plain, out_features
from liger_kernel.transformers.recognise.projections import Left

# Keywords of a patched ``forward`` for its loss -> their names in the operators.
LOSS_OPTIONS = {
    "label_smoothing": "label_smoothing",
    "lse_square_scale": "z_loss",
    "softcap": "softcap",
    "use_token_scaling": "token_scaling",
    "ce_weight": "class_weight",
    "accum_dtype": "accum_dtype",
}
STATISTICS = ("return_token_accuracy", "return_predicted_tokens")


def head_cross_entropy(
    head: nn.Module, x: Tensor, target: Tensor, options: LossOptions = DEFAULTS, *, within: bool = False
) -> Any:
    """Cross entropy of ``head(x)`` and ``target`` without storing all logits; returns the results
    of ``linear_cross_entropy``.

    x (M, H), target (M,). A plain ``nn.Linear`` is fused, also if FSDP or ZeRO shards its
    parameters, which are then gathered once; so is one with PEFT's LoRA. Every other head
    (quantised, DoRA, ...) is called on one chunk of tokens at a time, and again in the backward
    pass, in the state of this call. ``within``: the caller has entered ``head``.
    """
    if not within and parallel.needs_entering(head):
        return parallel.entered(
            head, lambda x: head_cross_entropy(parallel.bare(head), x, target, options, within=True), x
        )
    if is_plain(head, within):
        return linear_cross_entropy(x, head.weight, target, head.bias, **options.given())
    if not isinstance(found := with_adapters(head, x), Left):
        own = terms(found, x)
        options = _in_16_bits(options, "it has adapters") if "xa" in own else options
        return linear_cross_entropy(target=target, **own, **options.given())
    options = _in_16_bits(options, "it is sharded, quantised or of a form of its own")
    if isinstance(head, parallel.VocabularyParallel) and options.class_weight is None and not options.token_scaling:
        return _vocabulary_parallel_loss(head, x, target, options)
    class_weight, reduction = options.class_weight, options.reduction
    class_weight = class_weight if class_weight is None else class_weight.detach()
    # the head accumulates its own gradients, and may need the target of every token
    rest = options.given("accum_dtype", "compact", "class_weight", "reduction", "stats")
    call = head.forward if within else head
    state = None if torch.compiler.is_compiling() else HeadState(head)

    def part(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with contextlib.nullcontext() if state is None else state.restored():
            logits = call(x[None])
        return cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            target,
            class_weight,
            reduction="none" if reduction == "none" else "sum",
            stats=True,
            **rest,
        )

    rows = auto_chunk_rows(x.shape[0], out_features(head, x, call), x.shape[1], x.element_size(), on_gpu(x))
    run = functools.partial(checkpoint, part, use_reentrant=False) if torch.is_grad_enabled() else part
    parts = [run(*chunk) for chunk in zip(x.split(rows), target.split(rows))]
    losses, z_losses, predicted = ([p[i] for p in parts] for i in range(3))
    if reduction == "none":
        loss, z_loss = torch.cat(losses), torch.cat(z_losses)
    else:
        loss, z_loss = torch.stack(losses).sum(), torch.stack(z_losses).sum()
    if reduction == "mean":
        n = normaliser(target, class_weight, LossNumbers(ignore_index=options.ignore_index))
        loss, z_loss = loss / n, z_loss / n
    return (loss, z_loss, torch.cat(predicted)) if options.stats else loss


def _in_16_bits(options: LossOptions, why: str) -> LossOptions:
    """``options`` without FP8, which was asked for."""
    if options.fp8 is None:
        return options
    warnings.warn(f"fp8_head: the head stays in 16 bits, because {why}", stacklevel=2)
    return options.but(fp8=None)


def _vocabulary_parallel_loss(
    head: parallel.VocabularyParallel, x: Tensor, target: Tensor, options: LossOptions
) -> Any:
    """The loss of a head that is sharded by vocabulary, without the tokens that are known not to
    count."""
    kept = options.compact.rows() if isinstance(options.compact, Kept) and options.reduction != "none" else None
    given = options.given("compact", "token_scaling")
    if kept is None:
        return head.cross_entropy(x, target, **given)
    found = head.cross_entropy(x.index_select(0, kept), target[kept], **given)
    if not options.stats:
        return found
    loss, z_loss, predicted = found
    return loss, z_loss, predicted.new_full(target.shape, -1).index_copy_(0, kept, predicted)


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = IGNORE,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of a recipe."""
    if isinstance(input, Recipe) and input.ndim == 2 and target.ndim == 1 and size_average is None and reduce is None:
        options = input.loss.options.but(ignore_index=ignore_index, reduction=reduction)
        options = options if weight is None else options.but(class_weight=weight)
        return _loss(input, target, options.but(label_smoothing=label_smoothing) if label_smoothing else options)
    args = (
        materialised(a) for a in (input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    )
    return F.cross_entropy(*args)


LOSSES[F.cross_entropy] = _cross_entropy


def _liger_cross_entropy(input: Any, target: Any, *numbers: Any) -> Any:
    """``liger_cross_entropy`` of a recipe. It may stand where ``F.cross_entropy`` was; with
    options that this lacks, it reads the logits."""
    *numbers_of_both, lse_square_scale, softcap = numbers[:-3]
    if lse_square_scale or softcap or any(numbers[-3:]):
        return liger_cross_entropy(materialised(input), materialised(target), *numbers)
    return _cross_entropy(input, target, *numbers_of_both)


LOSSES[liger_cross_entropy] = _liger_cross_entropy


def _loss(logits: Recipe, target: Tensor, options: LossOptions) -> Tensor:
    logits.not_in_a_function()
    asked = logits.loss
    options = options.but(stats=asked.statistics)
    cut = (
        torch.is_grad_enabled() and not logits.learns
    )  # whether a no_grad before this loss has cut the logits from the graph
    transform = logits.scale_and_cap() if logits.computed is None and not cut and not logits.exchanged() else None
    if transform is not None and (transform[1] is None or options.softcap is None):
        scale, softcap = transform
        options = options.but(logit_scale=scale) if softcap is None else options.but(logit_scale=scale, softcap=softcap)
        head, rows = logits.head, logits.rows
    else:
        head, rows = None, logits.value()
    if head is None:
        options = _in_16_bits(options, "other code reads its logits or sees its calls")
        found = cross_entropy(rows, target, **options.given("accum_dtype"))
    else:
        with logits.as_called(), logits.in_state():
            found = _head_loss(head, rows, target, asked, options)
        root = logits if logits.root is None else logits.root
        for recipe in (root, *(other() for other in root.others)):
            if recipe is not None:
                recipe.learnt = True
    asked.taken = True
    if not asked.statistics:
        return found
    loss, _, predicted = found
    if asked.predicted_tokens is None:  # the first loss of a forward is the main one
        asked.predicted_tokens, asked.token_accuracy = (
            predicted,
            token_accuracy(predicted, target, options.ignore_index),
        )
    return loss


def _inside(function: Callable) -> bool:
    """Whether a call of ``function`` is on the stack, a few frames up: some models have a loss
    function and do not use it."""
    frame = sys._getframe(1)
    for _ in range(12):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code is function.__code__:
            return True
    return False


def _head_loss(head: nn.Module, rows: Tensor, target: Tensor, asked: Loss, options: LossOptions) -> Any:
    """``head_cross_entropy`` with what was known when the forward began, if this is the loss
    that was expected then."""
    main = asked.causal and not asked.taken and options.ignore_index == IGNORE
    # the replaced function has no parameters for a bias or scale of the head, or for losses of
    # single tokens
    plain = (
        getattr(parallel.bare(head), "bias", None) is None
        and options.logit_scale == 1.0
        and options.reduction != "none"
    )
    hooked = main and plain and loss_functions.replaced()
    main = main and (hooked if torch.compiler.is_compiling() else _inside(ForCausalLMLoss))
    within, inner = parallel.needs_entering(head), parallel.bare(head)
    return parallel.entered(
        head, lambda rows: _entered_loss(inner, rows, target, asked, options, within, main, hooked), rows
    )


def _entered_loss(
    head: nn.Module,
    rows: Tensor,
    target: Tensor,
    asked: Loss,
    options: LossOptions,
    within: bool,
    main: bool,
    hooked: bool,
) -> Any:
    """The rest of ``_head_loss``, which runs while the parameters of the head are gathered."""
    sliced, linear = isinstance(head, parallel.VocabularyParallel), is_plain(head, within)
    if main and hooked and linear:
        options = _in_16_bits(options, "other code has replaced its loss")
        return _replaced_loss(head, rows, target, asked, options)
    linear = linear or (main and not sliced and not isinstance(with_adapters(head, rows), Left))
    kept = (
        asked.kept
        if main and (linear or sliced) and asked.kept is not None and asked.kept.total == target.numel()
        else None
    )
    if kept is not None:
        options = options.but(compact=kept)
    # the caller will divide this sum: dividing in the forward saves the backward a pass over the
    # gradient of the head
    n = (
        items(asked.num_items, rows)
        if main and linear and asked.num_items is not None and options.reduction == "sum"
        else None
    )
    if n is not None:
        n = n.where(n != 0, 1)  # without tokens, the caller divides by 0, as with logits
        options = options.but(reduction="mean", num_items=n)
    found = head_cross_entropy(head, rows, target, options, within=within)
    loss, *more = found if asked.statistics else (found,)
    if n is not None:
        loss, more = loss * n, [more[0] * n, *more[1:]] if more else more
    if kept is not None and (chosen := kept.rows()) is not None:
        # if a token counts unexpectedly, the loss is NaN rather than wrong
        counts = target != IGNORE
        loss = torch.where(counts.sum() == counts[chosen].sum(), loss, float("nan"))
    return (loss, *more) if asked.statistics else loss


def _replaced_loss(head: nn.Module, rows: Tensor, target: Tensor, asked: Loss, options: LossOptions) -> Any:
    """The result of the function that replaces one of ours in ``loss_functions``; it may be
    reduced or not."""
    n = asked.num_items if options.reduction == "sum" else None  # the number by which the caller divides
    names = {ours: name for name, ours in LOSS_OPTIONS.items()} | {"softcap": "final_logit_softcapping"}
    said = {names[k]: v for k, v in options.given().items() if k in names}
    said |= dict.fromkeys(STATISTICS, True) if asked.statistics else {}
    found = loss_functions.LigerForCausalLMLoss(
        rows,
        head.weight,
        None,
        rows.shape[-1],
        num_items_in_batch=n,
        ignore_index=options.ignore_index,
        shift_labels=target,
        **said,
    )
    loss, predicted = (found, None) if isinstance(found, Tensor) else (found.loss, found.predicted_tokens)
    loss = loss if n is None else loss * items(n, rows)
    asked.statistics = predicted is not None
    return (loss, None, predicted) if asked.statistics else loss
