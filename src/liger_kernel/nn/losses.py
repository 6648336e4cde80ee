"""Losses of logits and of a linear head, as functions and modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from liger_kernel.nn.options import WithOptions
from liger_kernel.ops._core.operator import as_index
from liger_kernel.ops.losses.chunks import Kept
from liger_kernel.ops.losses.cross_entropy import cross_entropy
from liger_kernel.ops.losses.cross_entropy_rows import REDUCTIONS
from liger_kernel.ops.losses.divergence.fused_ce_tvd import fused_ce_tvd
from liger_kernel.ops.losses.divergence.probabilities import LigerJSDFunction as LigerJSDFunction
from liger_kernel.ops.losses.divergence.probabilities import jsd, kl_div, tvd
from liger_kernel.ops.losses.linear_cross_entropy import linear_cross_entropy
from liger_kernel.ops.losses.vocab_parallel.cross_entropy import validate_formula_and_mode, vocab_parallel_cross_entropy
from liger_kernel.ops.published.fused_linear_jsd import LigerFusedLinearJSDFunction
from liger_kernel.ops.published.fused_linear_kl_div import LigerFusedLinearKLDivFunction
from liger_kernel.ops.published.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyTPFunction

# as it was before any framework put another there
_stock_cross_entropy = torch.nn.functional.cross_entropy


@dataclass
class CrossEntropyOutput:
    """A loss and the requested results. ``token_accuracy`` counts only tokens that are not ignored;
    ``predicted_tokens`` is -1 for ignored tokens.

    ``token_accuracy`` is ``correct_tokens`` / ``counted_tokens`` (0-dim int64). Over several
    micro-batches, add up these two; a mean of accuracies is wrong.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None
    correct_tokens: Tensor | None = None
    counted_tokens: Tensor | None = None


def token_counts(predicted: Tensor, target: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Return how many of ``predicted`` equal ``target``, and how many targets are not ignored."""
    valid = as_index(target) != ignore_index
    return ((predicted == target) & valid).sum(), valid.sum()


def token_accuracy(predicted: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """Fraction of ``predicted`` that equals ``target``, among the targets that are not ignored;
    NaN if there are none."""
    correct, counted = token_counts(predicted, target, ignore_index)
    return correct / counted


def _output(
    found: Any, target: Tensor, ignore_index: int, z_loss: bool, accuracy: bool, predictions: bool
) -> Tensor | CrossEntropyOutput:
    if not (z_loss or accuracy or predictions):
        return found
    loss, z, predicted = found
    correct, counted = token_counts(predicted, target, ignore_index) if accuracy else (None, None)
    share = None if correct is None else correct / counted
    return CrossEntropyOutput(loss, z if z_loss else None, share, predicted if predictions else None, correct, counted)


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:
    """``F.cross_entropy`` of logits (M, V) and class indices (M,), with the options of language
    models. Logits are not overwritten.

    Inputs of other shapes and class probabilities go to PyTorch, because frameworks replace
    PyTorch's function by this one. ``size_average`` and ``reduce`` have PyTorch's meaning. Returns
    a ``CrossEntropyOutput`` if one of the ``return_*`` is set.
    """
    if has_torch_function_unary(
        input
    ):  # as PyTorch's function does: the logits of a patched model have a cross entropy of their own
        numbers = weight, size_average, ignore_index, reduce, reduction, label_smoothing, lse_square_scale, softcap
        said = return_z_loss, return_token_accuracy, return_predicted_tokens
        return handle_torch_function(liger_cross_entropy, (input,), input, target, *numbers, *said)
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    stats = return_z_loss or return_token_accuracy or return_predicted_tokens
    plain = isinstance(input, Tensor) and input.ndim == 2 and target.ndim == 1 and not target.is_floating_point()
    if not (plain or stats or lse_square_scale or softcap):
        return _stock_cross_entropy(
            input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    options: dict[str, Any] = dict(
        ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, z_loss=lse_square_scale
    )
    found = cross_entropy(input, target, weight, **options, softcap=softcap, stats=stats)
    return _output(found, target, ignore_index, return_z_loss, return_token_accuracy, return_predicted_tokens)


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: float = 1,
    *,
    num_items: Tensor | float | None = None,
    compact: bool | Kept = False,
    chunk_rows: int | None = None,
    fp32_logits: bool = False,
    fp8: str | None = None,
) -> Tensor | CrossEntropyOutput:
    """Cross entropy of ``input @ weight.T + bias`` and class indices, without storing the logits.
    input (M, H), weight (V, H), target (M,).

    ``ce_weight`` (V,) weighs classes. ``accum_dtype`` is the dtype in which the weight's gradient
    is summed over chunks. ``use_token_scaling`` multiplies each loss by the detached probability of
    its target. ``chunk_mem_const`` is accepted and ignored: chunks have a size that follows from
    memory, or ``chunk_rows`` tokens. ``num_items``, ``compact``, ``fp32_logits`` and ``fp8``: see
    ``linear_cross_entropy``.
    """
    stats = return_z_loss or return_token_accuracy or return_predicted_tokens
    options: dict[str, Any] = dict(
        ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, z_loss=lse_square_scale
    )
    options |= dict(softcap=softcap, token_scaling=use_token_scaling, num_items=num_items, stats=stats)
    how: dict[str, Any] = dict(
        accum_dtype=accum_dtype, compact=compact, chunk_rows=chunk_rows, fp32_logits=fp32_logits, fp8=fp8
    )
    found = linear_cross_entropy(input, weight, target, bias, ce_weight, **options, **how)
    return _output(found, target, ignore_index, return_z_loss, return_token_accuracy, return_predicted_tokens)


def liger_jsd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """Generalised Jensen-Shannon divergence of log-probabilities log q = input and log p =
    target, over the rows that are not ignored (none: 0)."""
    return jsd(input, target, shift_labels, beta=beta, ignore_index=ignore_index)


def liger_kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool = True,
    reduce: bool = True,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> Tensor:
    """``F.kl_div``: KL(target || exp(input)). ``reduce=False`` means "none",
    ``size_average=False`` means "sum"; with True, ``reduction`` decides."""
    if reduce is False or size_average is False:
        reduction = "none" if reduce is False else "sum"
    return kl_div(input, target, reduction=reduction, log_target=log_target, eps=eps)


def liger_tvd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, reduction: str = "mean", ignore_index: int = -100
) -> Tensor:
    """Total variation distance of probabilities, ``sum |input - target| / 2``."""
    return tvd(input, target, shift_labels, reduction=reduction, ignore_index=ignore_index)


class LigerCrossEntropyLoss(WithOptions):
    """Cross entropy of logits (M, V) and class indices (M,); the logits are not overwritten.

    Returns the loss, or a ``CrossEntropyOutput`` if one of the ``return_*`` is set.
    """

    buffers_of = ("weight",)

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ):
        super().__init__(locals())

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        return liger_cross_entropy(_input, target, **self.options())


class LigerFusedLinearCrossEntropyLoss(WithOptions):
    """Cross entropy of ``_input @ lin_weight.T + bias`` and class indices (M,), without storing the
    logits. _input (M, H), lin_weight (V, H).

    ``accum_dtype``: the dtype in which the weight's gradient is summed. ``use_token_scaling``:
    multiply by the detached probability of the target. ``compact``, ``chunk_rows``,
    ``fp32_logits``, ``fp8``, and ``num_items`` of a call: see ``linear_cross_entropy``.

    Returns the loss, or a ``CrossEntropyOutput`` if one of the ``return_*`` is set.
    """

    buffers_of = ("ce_weight",)

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        *,
        compact: bool = False,
        chunk_rows: int | None = None,
        fp32_logits: bool = False,
        fp8: str | None = None,
    ):
        super().__init__(locals())

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        num_items: Tensor | float | None = None,
    ) -> Tensor | CrossEntropyOutput:
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, num_items=num_items, **self.options())


class LigerJSD(WithOptions):
    """Generalised Jensen-Shannon divergence of log-probabilities (M, V); ``beta=0`` is KL(p ||
    q), ``beta=1`` KL(q || p)."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100):
        super().__init__(locals())

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return jsd(log_q, log_p, shift_labels, **self.options())


class LigerKLDIVLoss(nn.KLDivLoss):
    """``nn.KLDivLoss`` with a lower bound ``eps`` for the probabilities inside the logarithm;
    the other arguments are those of PyTorch."""

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.eps = eps

    def extra_repr(self) -> str:
        return f"eps={self.eps!r}"

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        return kl_div(y_pred, y_true, reduction=self.reduction, log_target=self.log_target, eps=self.eps)


class LigerTVDLoss(WithOptions):
    """Total variation distance of probabilities (M, V)."""

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100):
        super().__init__(locals())

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return tvd(p, q, shift_labels, **self.options())


class LigerVocabParallelCrossEntropy(WithOptions):
    """Cross entropy of this rank's slice of the logits (..., N) and indices among all classes
    (...), over the ranks of ``tp_group``.

    ``label_smoothing_formula``: "pytorch" or "megatron". ``label_smoothing_mode``: over the
    "global" classes or over this rank's "partition".
    """

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "none",
        label_smoothing_formula: str = "pytorch",
        label_smoothing_mode: str = "global",
    ):
        super().__init__(locals())
        validate_formula_and_mode(label_smoothing_formula, label_smoothing_mode)
        if reduction not in REDUCTIONS:
            raise ValueError(f"{type(self).__name__}: reduction must be one of {REDUCTIONS}, got {reduction!r}")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"{type(self).__name__}: label_smoothing must be in [0, 1), got {label_smoothing}")

    def forward(self, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None) -> Tensor:
        options = {name.removeprefix("label_smoothing_"): value for name, value in self.options().items()}
        return vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group, **options)


def liger_fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """Generalised JSD of the tokens of two linear heads without storing logits, over tokens not
    ignored. (M, Hs), (V, Hs), (M, Ht), (V, Ht), (M,)."""
    return LigerFusedLinearJSDFunction.apply(
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        shift_labels,
        jsd_beta,
        ignore_index,
        temperature,
        accum_dtype,
    )


class LigerFusedLinearJSD(WithOptions):
    """beta KL(p || m) + (1 - beta) KL(q || m) of student q and teacher p (arXiv:2306.13649), with m
    = beta p + (1 - beta) q, without storing logits.

    Returns the mean over the tokens that are not ignored. The teacher gets no gradient.
    ``accum_dtype``: the dtype in which the weight's gradient is summed.
    """

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
    ):
        super().__init__(locals())
        if not temperature > 0:
            raise ValueError(f"LigerFusedLinearJSD: temperature must be positive, got {temperature}")

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        return liger_fused_linear_jsd(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels, **self.options()
        )


def liger_fused_linear_kl_div(
    student_input: Tensor,
    student_weight: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    temperature: float = 1.0,
    eps: float = 1e-10,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """KL divergence of a linear head from given probabilities without storing logits, as
    ``LigerFusedLinearKLDivLoss``. (M, H), (V, H), (M, V), (M,)."""
    return LigerFusedLinearKLDivFunction.apply(
        student_input, student_weight, target, shift_labels, reduction, ignore_index, temperature, eps, accum_dtype
    )


def liger_fused_linear_scaled_cross_entropy_tp(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    tp_group: Any,
    temperature: float = 1.0,
    ignore_index: int = -100,
    tiles_per_reduce: int = 1,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Negative log-probability of each token, and with ``return_entropy`` the entropies, for
    classes that are spread over ranks.

    input (..., H) and target (...) are equal on all ranks of ``tp_group``; weight (N, H) has the
    classes of this rank. Results are fp32, as in ``LigerFusedLinearScaledCrossEntropyTPFunction``.
    """
    return LigerFusedLinearScaledCrossEntropyTPFunction.apply(
        input, weight, target, tp_group, temperature, ignore_index, tiles_per_reduce, return_entropy
    )


class LigerFusedLinearKLDivLoss(WithOptions):
    """KL(p || q) of q = softmax(student_input student_weight^T / temperature) from a teacher's
    probabilities p, without storing the student's logits.

    ``forward(student_input, student_weight, target, shift_labels=None)``: (M, H), (V, H), p (M, V)
    in any floating-point dtype, and labels (M,). Rows whose label is ``ignore_index`` are omitted.
    Returns 0-dim fp32: the sum of p (log max(p, eps) - log q), divided by the number of counted
    rows ("batchmean"), by the number of their elements ("mean"), or not divided ("sum"), as in
    ``torch.nn.KLDivLoss``. It is not multiplied by temperature^2, and 0 if no row counts. Raises
    ``ValueError`` if p requires a gradient, because it gets none. ``accum_dtype``: the dtype in
    which the weight's gradient is summed.
    """

    def __init__(
        self,
        reduction: str = "batchmean",
        ignore_index: int = -100,
        temperature: float = 1.0,
        eps: float = 1e-10,
        accum_dtype: torch.dtype | None = None,
    ):
        super().__init__(locals())
        if not temperature > 0:
            raise ValueError(f"LigerFusedLinearKLDivLoss: temperature must be positive, got {temperature}")

    def forward(
        self, student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None
    ) -> Tensor:
        return liger_fused_linear_kl_div(student_input, student_weight, target, shift_labels, **self.options())


class LigerFusedCETVDLoss(WithOptions):
    """Cross entropy, and total variation distance from a teacher, of each token in one pass over
    the logits.

    ``forward(student_logits, teacher_logits, target)``: (M, V), (M, V), (M,). Returns ``(ce,
    tvd)``, fp32 (M,) each, 0 where the target is ``ignore_index``. Both are differentiable in the
    student's logits; the teacher is constant.
    """

    def __init__(self, ignore_index: int = -100):
        super().__init__(locals())

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return fused_ce_tvd(student_logits, teacher_logits, target, **self.options())
