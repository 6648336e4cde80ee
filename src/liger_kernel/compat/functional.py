"""Operators as functions, under the names of LinkedIn's package, with a choice of the
implementation.

Each function takes ``impl`` (or ``backend``), a name of ``liger_kernel.backends`` such as "triton"
or "torch", and ``mode``, a variant of an implementation; ours have no modes. ``in_place`` and
``row_mode`` are accepted and ignored. They are differentiable like the operators of
``liger_kernel.ops``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_kernel.compat.backends import declare_op_locations as declare_op_locations, dispatch, register_ours
from liger_kernel.compat.functions import token_accuracy
from liger_kernel.ops._core.operator import OPS
from liger_kernel.ops.rotary.rope import in_place_of, once

# the operators that it has, by name: a list to scan, so fmt: skip
__all__ = [
    "cross_entropy", "fused_add_rms_norm", "fused_linear_cross_entropy", "fused_linear_jsd", "geglu", "jsd",
    "kl_div", "layer_norm", "rms_norm", "rope", "softmax", "swiglu",
]  # fmt: skip

Run = Callable[..., Any]
OF_OPERATOR: dict[str, Callable[..., Any]] = {}  # the functions without a choice
_CHOICE = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None")
    for name in ("impl", "mode", "backend")
]


def _over(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers ``fn(run, ...)``, which calls ``run``, the operator ``op`` or its reference, and
    returns ``fn(..., impl=, mode=, backend=)``."""

    def make(fn: Callable[..., Any]) -> Callable[..., Any]:
        register_ours(fn.__name__, OPS[op], fn)
        OF_OPERATOR[fn.__name__] = functools.partial(fn, OPS[op].fn)
        arguments = inspect.signature(OF_OPERATOR[fn.__name__])

        @functools.wraps(fn)
        def call(
            *args: Any, impl: str | None = None, mode: str | None = None, backend: str | None = None, **kwargs: Any
        ) -> Any:
            given = arguments.bind(*args, **kwargs)
            given.apply_defaults()
            return dispatch(fn.__name__, *given.arguments.values(), impl=impl or backend, mode=mode)

        vars(call).update(
            operator=op, __signature__=arguments.replace(parameters=[*arguments.parameters.values(), *_CHOICE])
        )
        return call

    return make


@_over("rms_norm")
def rms_norm(
    run: Run, x: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = False, row_mode: bool | None = None,
) -> Tensor:  # fmt: skip
    """``x / rms(x) * (weight + offset)`` over the last dim; ``casting_mode``: "llama", "gemma"
    or "none"."""
    return run(x, weight, eps=eps, offset=offset, casting=casting_mode)


@_over("fused_add_rms_norm")
def fused_add_rms_norm(
    run: Run, X: Tensor, R: Tensor, W: Tensor | None, eps: float = 1e-6, offset: float = 0.0,
    casting_mode: str = "llama", in_place: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``rms_norm`` of ``X + R``, and that sum."""
    return run(X, R, W, eps=eps, offset=offset, casting=casting_mode)


@_over("layer_norm")
def layer_norm(run: Run, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """``F.layer_norm`` over the last dim."""
    return run(x, weight, bias, eps=eps)


@_over("softmax")
def softmax(run: Run, x: Tensor) -> Tensor:
    """``softmax`` over the last dim."""
    return run(x)


@_over("glu")
def swiglu(run: Run, a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    """``silu(a gate_multiplier) b down_multiplier``."""
    return run(a, b, act="silu", gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)


@_over("glu")
def geglu(run: Run, a: Tensor, b: Tensor) -> Tensor:
    """``gelu(a) * b``, with the tanh approximation of gelu."""
    return run(a, b, act="gelu_tanh")


@_over("rope")
def rope(
    run: Run, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate q (B, Hq, T, D) and k (B, Hk, T, D) by tables (B or 1, T, D) as Transformers makes
    them; ``position_ids`` has no effect."""
    return run(q, k, once(cos), once(sin), unsqueeze_dim=unsqueeze_dim, casting=in_place_of(q, k, cos))


@_over("jsd")
def jsd(
    run: Run, _input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5,
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Generalised Jensen-Shannon divergence of log-probabilities, the student's first, over the
    rows that are not ignored."""
    return run(_input, target, shift_labels, beta=beta, ignore_index=ignore_index)


@_over("kl_div")
def kl_div(
    run: Run, y_pred: Tensor, y_true: Tensor, reduction: str = "batchmean", log_target: bool = False, eps: float = 1e-10
) -> Tensor:
    """``F.kl_div`` of log-probabilities ``y_pred`` and probabilities ``y_true``, or their
    logarithm with ``log_target``."""
    return run(y_pred, y_true, reduction=reduction, log_target=log_target, eps=eps)


Four = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _four(
    run: Run, tensors: tuple[Tensor | None, ...], target: Tensor, requested: tuple[bool, ...], **options: Any
) -> Four:
    """Loss, z-loss, token accuracy and predicted classes, None where not requested."""
    if not any(requested):
        return run(*tensors, **options), None, None, None
    z_loss, accuracy, predictions = requested
    loss, z, predicted = run(*tensors, **options, stats=True)
    share = token_accuracy(predicted, target, options["ignore_index"]) if accuracy else None
    return loss, z if z_loss else None, share, predicted if predictions else None


@_over("cross_entropy")
def cross_entropy(
    run: Run, input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100,
    lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Four:  # fmt: skip
    """Cross entropy of logits (M, V) and class indices (M,): loss, z-loss, token accuracy,
    predicted classes; None for what is not requested."""
    options: dict[str, Any] = dict(ignore_index=ignore_index, z_loss=lse_square_scale, reduction=reduction)
    options |= dict(label_smoothing=label_smoothing, softcap=softcap)
    requested = return_z_loss, return_token_accuracy, return_predicted_tokens
    return _four(run, (input, target, weight), target, requested, **options)


@_over("linear_cross_entropy")
def fused_linear_cross_entropy(
    run: Run, _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
    ce_weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None, return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None, use_token_scaling: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Four:  # fmt: skip
    """``cross_entropy`` of ``_input @ weight.T + bias``, which our kernels never store as a
    whole; "torch" does."""
    options: dict[str, Any] = dict(ignore_index=ignore_index, z_loss=lse_square_scale, reduction=reduction)
    options |= dict(label_smoothing=label_smoothing, softcap=softcap)
    options |= dict(accum_dtype=accum_dtype, token_scaling=use_token_scaling)
    requested = return_z_loss, return_token_accuracy, return_predicted_tokens
    return _four(run, (_input, weight, target, bias, ce_weight), target, requested, **options)


@_over("linear_divergence")
def fused_linear_jsd(
    run: Run, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """``jsd`` of the softmax of two heads' logits over ``temperature``."""
    options = dict(beta=jsd_beta, ignore_index=ignore_index, temperature=temperature)
    return run(student_input, student_weight, teacher_input, teacher_weight, shift_labels, **options)
