"""Modules and functions over the operators, for models of your own; names and arguments as published users know them.

``in_place`` and ``row_mode`` are accepted and ignored: nothing here writes into a tensor that is not its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.ops.cross_entropy import cross_entropy
from liger_kernel.ops.glu import glu
from liger_kernel.ops.linear_cross_entropy import linear_cross_entropy
from liger_kernel.ops.rms_norm import rms_norm
from liger_kernel.ops.rope import rope

# -- functions -----------------------------------------------------------------------------


@dataclass
class CrossEntropyOutput:
    """A loss and what was asked for beside it. ``token_accuracy`` is over the tokens not ignored; ``predicted_tokens`` is -1 for those ignored."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def token_accuracy(predicted: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """Share of ``predicted`` that is ``target``, among the targets not ignored; NaN if there are none."""
    valid = target != ignore_index
    return ((predicted == target) & valid).sum() / valid.sum()


def _output(found: Any, target: Tensor, ignore_index: int, z_loss: bool, accuracy: bool, predictions: bool) -> Tensor | CrossEntropyOutput:
    if not (z_loss or accuracy or predictions):
        return found
    loss, z, predicted = found
    correct = token_accuracy(predicted, target, ignore_index) if accuracy else None
    return CrossEntropyOutput(loss, z if z_loss else None, correct, predicted if predictions else None)


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
    """``F.cross_entropy`` of logits (M, V) and class indices (M,), and what language models add to it. Logits are not overwritten.

    ``size_average`` and ``reduce`` mean what they mean there. Returns a ``CrossEntropyOutput`` if one of the ``return_*`` is set.
    """
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    stats = return_z_loss or return_token_accuracy or return_predicted_tokens
    found = cross_entropy(
        input,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=lse_square_scale,
        softcap=softcap,
        stats=stats,
    )
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
) -> Tensor | CrossEntropyOutput:
    """Cross entropy of ``input @ weight.T + bias`` and class indices, without the logits. input (M, H), weight (V, H), target (M,).

    ``ce_weight`` (V,) weighs classes; ``accum_dtype`` is that of the sum of the weight's gradient over chunks; ``use_token_scaling`` multiplies
    each loss by the detached probability of its target. ``chunk_mem_const`` is accepted and ignored: chunks are sized by memory.
    """
    stats = return_z_loss or return_token_accuracy or return_predicted_tokens
    found = linear_cross_entropy(
        input,
        weight,
        target,
        bias,
        ce_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=lse_square_scale,
        softcap=softcap,
        token_scaling=use_token_scaling,
        accum_dtype=accum_dtype,
        stats=stats,
    )
    return _output(found, target, ignore_index, return_z_loss, return_token_accuracy, return_predicted_tokens)


def liger_rms_norm(X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True) -> Tensor:
    """``x / rms(x) * (W + offset)`` over the last dim."""
    return rms_norm(X, W, eps=eps, offset=offset, casting=casting_mode)


def liger_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Turn q and k by tables (B or 1, T, R) as transformers makes them: each angle twice, as in ``cat((angles, angles), -1)``; R <= D.

    q (B, Hq, T, D), k (B, Hk, T, D), or (B, T, H, D) with ``unsqueeze_dim=2``. ``position_ids`` has no effect, as in transformers. Returns new tensors.
    """
    half = cos.shape[-1] // 2
    return rope(q, k, cos[..., :half], sin[..., :half], unsqueeze_dim=unsqueeze_dim)


liger_rotary_pos_emb = liger_rope


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """``silu(a) * b``."""
    return glu(a, b, act="silu")


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """``gelu(a) * b``, gelu by its tanh approximation."""
    return glu(a, b, act="gelu_tanh")


# -- modules -------------------------------------------------------------------------------

INIT = {"ones": torch.ones, "zeros": torch.zeros}


class LigerRMSNorm(nn.Module):
    """``rms_norm`` with a weight: ``x / rms(x) * (weight + offset)``. ``casting_mode``: "llama", "gemma" or "none"."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ):
        super().__init__()
        if init_fn not in INIT:
            raise ValueError(f"{type(self).__name__}: init_fn must be one of {tuple(INIT)}, got {init_fn!r}")
        self.register_parameter("weight", nn.Parameter(INIT[init_fn](hidden_size)) if elementwise_affine else None)
        self.hidden_size, self.variance_epsilon, self.offset, self.casting_mode = hidden_size, eps, offset, casting_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, eps=self.variance_epsilon, offset=self.offset, casting=self.casting_mode)

    def extra_repr(self) -> str:
        return f"({self.hidden_size},), eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerRMSNormForGemma(LigerRMSNorm):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = True,
        row_mode: bool | None = None,
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn)


class LigerRMSNormForGemma2(LigerRMSNormForGemma): ...


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma): ...


class LigerRMSNormForGemma3(LigerRMSNorm):
    def __init__(self, dim: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str = "gemma", init_fn: str = "zeros", in_place: bool = False):
        super().__init__(dim, eps, offset, casting_mode, init_fn)


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """As published, casting "llama"; transformers' Olmo2 rounds like "gemma", and its patched models do too."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
        row_mode: bool | None = None,
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn)


class LigerRMSNormForGlm4(LigerRMSNorm):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
        row_mode: bool | None = None,
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn)


def _activation(owner: Any, name: str, known: dict[str, str]) -> str:
    if name not in known:
        raise ValueError(f"{type(owner).__name__}: activation must be one of {tuple(known)}, got {name!r}")
    return known[name]


SILU = {"silu": "silu", "swish": "silu"}
GELU = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}


class _GatedMLP(nn.Module):
    def __init__(self, config: Any, act: str, bias: bool, intermediate_size: int | None = None):
        super().__init__()
        self.config, self.act = config, act
        self.hidden_size, self.intermediate_size = config.hidden_size, intermediate_size or config.intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(glu(self.gate_proj(x), self.up_proj(x), act=self.act))


class LigerSwiGLUMLP(_GatedMLP):
    """``down(silu(gate(x)) * up(x))``. ``config``: hidden_size, intermediate_size, hidden_act, and mlp_bias if it has one."""

    def __init__(self, config: Any, intermediate_size: int | None = None):
        super().__init__(config, _activation(self, config.hidden_act, SILU), getattr(config, "mlp_bias", False), intermediate_size)


class LigerGEGLUMLP(_GatedMLP):
    """``down(gelu(gate(x)) * up(x))`` with the gelu that ``config.hidden_act`` (or ``hidden_activation``) names, exact or by tanh."""

    def __init__(self, config: Any):
        name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or "gelu_pytorch_tanh"
        super().__init__(config, _activation(self, name, GELU), getattr(config, "mlp_bias", False))


class LigerPhi3SwiGLUMLP(nn.Module):
    """``down(silu(gate) * up)`` with gate and up of one projection, read where they lie."""

    def __init__(self, config: Any):
        super().__init__()
        self.config, self.act = config, _activation(self, config.hidden_act, SILU)
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(glu(self.gate_up_proj(hidden_states), act=self.act))


LOSS_OPTIONS = (
    "ignore_index",
    "lse_square_scale",
    "label_smoothing",
    "reduction",
    "softcap",
    "return_z_loss",
    "return_token_accuracy",
    "return_predicted_tokens",
)


class LigerCrossEntropyLoss(nn.Module):
    """Cross entropy of logits (M, V) and class indices (M,); the logits are not overwritten.

    Returns the loss, or a ``CrossEntropyOutput`` if one of the ``return_*`` is set.
    """

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
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)  # moves with the module, and is no part of its state
        self.ignore_index, self.lse_square_scale, self.label_smoothing = ignore_index, lse_square_scale, label_smoothing
        self.reduction, self.softcap = reduction, softcap
        self.return_z_loss, self.return_token_accuracy, self.return_predicted_tokens = return_z_loss, return_token_accuracy, return_predicted_tokens

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        return liger_cross_entropy(_input, target, self.weight, **{name: getattr(self, name) for name in LOSS_OPTIONS})


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """Cross entropy of ``_input @ lin_weight.T + bias`` and class indices (M,), without the logits. _input (M, H), lin_weight (V, H).

    ``accum_dtype``: of the sum of the weight's gradient; ``use_token_scaling``: times the detached probability of the target.
    Returns the loss, or a ``CrossEntropyOutput`` if one of the ``return_*`` is set.
    """

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
    ):
        super().__init__()
        self.register_buffer("ce_weight", ce_weight, persistent=False)
        self.ignore_index, self.lse_square_scale, self.label_smoothing = ignore_index, lse_square_scale, label_smoothing
        self.reduction, self.softcap, self.accum_dtype, self.use_token_scaling = reduction, softcap, accum_dtype, use_token_scaling
        self.return_z_loss, self.return_token_accuracy, self.return_predicted_tokens = return_z_loss, return_token_accuracy, return_predicted_tokens

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor | CrossEntropyOutput:
        return liger_fused_linear_cross_entropy(
            _input, lin_weight, target, bias, **{name: getattr(self, name) for name in ("ce_weight", "accum_dtype", "use_token_scaling", *LOSS_OPTIONS)}
        )
