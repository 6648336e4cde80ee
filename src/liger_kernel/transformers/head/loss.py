"""The loss of a recipe for logits, computed from hidden states and head in chunks."""

from __future__ import annotations

import functools
import itertools
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from liger_kernel import parallel
from liger_kernel.nn import liger_cross_entropy, token_accuracy
from liger_kernel.ops.losses.chunks import Kept
from liger_kernel.ops.losses.cross_entropy import cross_entropy, items
from liger_kernel.ops.losses.linear_cross_entropy import chunk_rows_of, linear_cross_entropy
from liger_kernel.parallel import VocabularyParallel
from liger_kernel.transformers.head import loss_functions
from liger_kernel.transformers.head.head_weights import HeadWeights
from liger_kernel.transformers.head.recipe import IGNORE, LOSSES, LogitsRecipe, LossOptions, LossRequest, materialised

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
    """``F.cross_entropy`` of a recipe: logits (M, V), target (M,)."""
    one_class_each = isinstance(input, LogitsRecipe) and input.ndim == 2 and target.ndim == 1
    if not one_class_each or size_average is not None or reduce is not None:
        args = (input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        return F.cross_entropy(*map(materialised, args))
    logits, wanted = input, input.loss
    logits.needs_graph()
    # what the call says goes before what the caller of the model said
    options = wanted.options.but(ignore_index=ignore_index, reduction=reduction, stats=wanted.statistics)
    options = options if weight is None else options.but(class_weight=weight)
    options = options.but(label_smoothing=label_smoothing) if label_smoothing else options
    # a no_grad between the head and this loss has cut the logits from the graph: the fused loss
    # would mend it
    cut = torch.is_grad_enabled() and not logits.learns
    transform = None if cut or logits.computed is not None else logits.scale_and_cap()
    head, rows = logits.head, logits.rows
    if transform is None or (transform[1] is not None and options.softcap is not None):
        head, rows = None, logits.value()
    else:
        scale, softcap = transform
        options = options.but(logit_scale=scale) if softcap is None else options.but(logit_scale=scale, softcap=softcap)
    if head is None:
        # the sums of a class's gradient, which accum_dtype is for, are the head's
        options = _in_16_bits(options, "other code reads its logits or sees its calls")
        found = cross_entropy(rows, target, **options.given("accum_dtype"))
    else:
        expected = _is_expected(wanted, options)  # before a sharded head is called, which adds frames
        with logits.as_called():
            if isinstance(head.module, VocabularyParallel):
                found = _of_shards(head.module, rows, target, wanted, options, expected)
            elif expected and logits.thin is None and _is_replaced(head, options):
                options = _in_16_bits(options, "other code has replaced its loss")
                found = head.multiply(lambda x, w, bias: _by_replaced(x, w, target, wanted, options), rows)
            else:
                options, kept, n = _of_whole_batch(logits, target, options, expected)
                how = dict(xa=logits.thin, wb=head.wb) | options.given()
                after = functools.partial(_of_caller, wanted.statistics, n, kept, target)

                def call(x: Tensor, w: Tensor, bias: Tensor | None) -> Any:
                    rows = chunk_rows_of(wanted.memory, x, w)
                    return after(linear_cross_entropy(x, w, target, bias, chunk_rows=rows, **how))

                if head.module is None:
                    head.check()
                    found = call(rows, head.w, head.bias)
                else:  # all of it within the call of the head, whose hooks may cast what it returns
                    found = head.multiply(call, rows)
        # from here on nobody can be given a gradient of these logits: there is none
        for recipe in logits.family():
            recipe.without_gradient = True
    wanted.computed = True
    if not wanted.statistics:
        return found
    loss, _, predicted = found
    if wanted.predicted_tokens is None:  # the first loss of a forward is the main one
        wanted.predicted_tokens = predicted
        wanted.token_accuracy = token_accuracy(predicted, target, options.ignore_index)
    return loss


LOSSES[F.cross_entropy] = _cross_entropy


def _liger_cross_entropy(input: Any, target: Any, *numbers: Any) -> Any:
    """``liger_cross_entropy`` of a recipe. It may stand where ``F.cross_entropy`` was; with
    options that this lacks, it reads the logits."""
    # the last three ask for the z-loss, the accuracy and the predictions of the call
    *numbers_of_both, lse_square_scale, softcap = numbers[:-3]
    if lse_square_scale or softcap or any(numbers[-3:]):
        return liger_cross_entropy(materialised(input), materialised(target), *numbers)
    return _cross_entropy(input, target, *numbers_of_both)


LOSSES[liger_cross_entropy] = _liger_cross_entropy


def _is_replaced(head: HeadWeights, options: LossOptions) -> bool:
    """Whether other code has replaced the function of this loss: it has no parameters for a bias
    or scale of the head, nor for losses of single tokens."""
    module: Any = head if head.module is None else parallel.bare(head.module)
    fits = module.bias is None and options.logit_scale == 1.0 and options.reduction != "none"
    return fits and loss_functions.replaced()


def _of_whole_batch(
    logits: LogitsRecipe, target: Tensor, options: LossOptions, expected: bool
) -> tuple[LossOptions, Kept | None, Tensor | None]:
    """The options with what was known when the forward began, if this is the loss that was
    ``expected`` then; the tokens that count, and the number by which the caller will divide."""
    wanted, kept, n = logits.loss, None, None
    # no compiler sees frames, so that there only a replaced function tells
    main = expected and (not torch.compiler.is_compiling() or _is_replaced(logits.head, options))
    options = options if logits.thin is None else _in_16_bits(options, "it has adapters")
    # tokens that do not count take part in no product
    if main and (kept := _kept(wanted, target)) is not None:
        options = options.but(compact=kept)
    # the caller will divide this sum: dividing in the forward saves the backward a pass over the
    # gradient of the head
    if main and options.reduction == "sum" and (n := items(wanted.num_items, logits.rows)) is not None:
        n = n.where(n != 0, 1)  # without tokens, the caller divides by 0, as with logits
        options = options.but(reduction="mean", num_items=n)
    return options, kept, n


def _of_caller(statistics: bool, n: Tensor | None, kept: Kept | None, target: Tensor, found: Any) -> Any:
    """The loss that the caller wants of what was ``found`` with the options of ``_of_whole_batch``:
    not divided by n, and NaN if the model's forward counts other tokens than its labels said."""
    loss, *more = found if statistics else (found,)
    if n is not None:
        loss, more = loss * n, [more[0] * n, *more[1:]] if more else more
    loss = _or_nan(loss, kept, target)
    return (loss, *more) if statistics else loss


def _of_shards(
    head: VocabularyParallel, x: Tensor, target: Tensor, wanted: LossRequest, options: LossOptions, expected: bool
) -> Any:
    """The loss of a head that is sharded by vocabulary, without the tokens that are known not to
    count."""
    if options.class_weight is not None or options.token_scaling:  # which it has no parameters for
        return cross_entropy(head(x), target, **_in_16_bits(options, "it is sharded").given("accum_dtype"))
    options = _in_16_bits(options, "it is sharded")
    kept = _kept(wanted, target) if expected and not torch.compiler.is_compiling() else None
    chosen = None if kept is None or options.reduction == "none" else kept.rows()
    given = options.given("compact", "token_scaling", "accum_dtype")
    if chosen is None:
        return head.cross_entropy(x, target, **given)
    found = head.cross_entropy(x.index_select(0, chosen), target[chosen], **given)
    if not options.stats:
        return _or_nan(found, kept, target)
    loss, z_loss, predicted = found
    every = predicted.new_full(target.shape, -1).index_copy_(0, chosen, predicted)
    return _or_nan(loss, kept, target), z_loss, every


def _is_expected(wanted: LossRequest, options: LossOptions) -> bool:
    """Whether this may be the loss that the model's forward expects: the first of its labels, by
    Transformers' function, as far as frames tell."""
    first = wanted.causal and not wanted.computed and options.ignore_index == IGNORE
    return first and (torch.compiler.is_compiling() or _inside(ForCausalLMLoss))


def _kept(wanted: LossRequest, target: Tensor) -> Kept | None:
    """The tokens that count, if the forward has begun with as many labels as there are now."""
    return wanted.kept if wanted.kept is not None and wanted.kept.total == target.numel() else None


def _or_nan(loss: Tensor, kept: Kept | None, target: Tensor) -> Tensor:
    """The loss of the tokens that were ``kept``: NaN rather than wrong if another token counts."""
    if kept is None or (chosen := kept.rows()) is None:
        return loss
    counts = target != IGNORE
    return torch.where(counts.sum() == counts[chosen].sum(), loss, float("nan"))


def _in_16_bits(options: LossOptions, why: str) -> LossOptions:
    """``options`` without FP8, which was asked for."""
    if options.fp8 is None:
        return options
    warnings.warn(f"fp8_head: the head stays in 16 bits, because {why}", stacklevel=2)
    return options.but(fp8=None)


def _inside(function: Callable) -> bool:
    """Whether a call of ``function`` is on the stack, a few frames up: some models have a loss
    function and do not use it."""
    # Transformers' function is 6 frames up, or more if other code wraps cross entropy
    frames = itertools.islice(traceback.walk_stack(sys._getframe(2)), 12)
    return any(frame.f_code is function.__code__ for frame, _ in frames)


def _by_replaced(x: Tensor, w: Tensor, target: Tensor, wanted: LossRequest, options: LossOptions) -> Any:
    """The result of the function that replaces one of ours in ``loss_functions``; it may be
    reduced or not."""
    n = wanted.num_items if options.reduction == "sum" else None  # the number by which the caller divides
    names = {ours: name for name, ours in LOSS_OPTIONS.items()} | {"softcap": "final_logit_softcapping"}
    given = {names[k]: v for k, v in options.given().items() if k in names}
    given |= dict.fromkeys(STATISTICS, True) if wanted.statistics else {}
    given |= dict(num_items_in_batch=n, ignore_index=options.ignore_index, shift_labels=target)
    found = loss_functions.LigerForCausalLMLoss(x, w, None, x.shape[-1], **given)
    loss, predicted = (found, None) if isinstance(found, Tensor) else (found.loss, found.predicted_tokens)
    loss = loss if n is None else loss * items(n, x)
    # a replacement of an older form returns the loss alone
    wanted.statistics = predicted is not None
    return (loss, None, predicted) if wanted.statistics else loss
