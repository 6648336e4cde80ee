"""Modules and functions over the operators, for models of your own; names and arguments as published users know them.

``in_place`` and ``row_mode`` are accepted and ignored: nothing here writes into a tensor that is not its own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel import functional, memory
from liger_kernel.ops.activations.glu import glu
from liger_kernel.ops.activations.relu_squared import relu_squared
from liger_kernel.ops.attention.multi_token_attention import multi_token_attention
from liger_kernel.ops.attention.neighborhood_attention import neighborhood_attention
from liger_kernel.ops.attention.softmax import softmax
from liger_kernel.ops.attention.sparsemax import sparsemax
from liger_kernel.ops.losses.chunks import Kept
from liger_kernel.ops.losses.cross_entropy import REDUCTIONS, cross_entropy
from liger_kernel.ops.losses.divergence.fused_ce_tvd import fused_ce_tvd
from liger_kernel.ops.losses.divergence.jsd import LigerJSDFunction as LigerJSDFunction
from liger_kernel.ops.losses.divergence.jsd import jsd
from liger_kernel.ops.losses.divergence.kl_div import kl_div
from liger_kernel.ops.losses.divergence.tvd import tvd
from liger_kernel.ops.losses.linear_cross_entropy import linear_cross_entropy
from liger_kernel.ops.losses.vocab_parallel.cross_entropy import validate_formula_and_mode, vocab_parallel_cross_entropy
from liger_kernel.ops.norms.dyt import dyt
from liger_kernel.ops.norms.fused_add_rms_norm import fused_add_rms_norm
from liger_kernel.ops.norms.group_norm import group_norm
from liger_kernel.ops.norms.layer_norm import layer_norm
from liger_kernel.ops.norms.modulated_rms_norm import modulated_rms_norm
from liger_kernel.ops.norms.poly_norm import poly_norm
from liger_kernel.ops.norms.rms_norm import LigerRMSNormFunction as LigerRMSNormFunction
from liger_kernel.ops.norms.rms_norm import rms_norm
from liger_kernel.ops.projections.mlp import mlp
from liger_kernel.ops.projections.moe import moe
from liger_kernel.ops.projections.tiled_mlp import apply_tiled_mlp
from liger_kernel.ops.published.fused_linear_jsd import LigerFusedLinearJSDFunction
from liger_kernel.ops.published.fused_linear_kl_div import LigerFusedLinearKLDivFunction
from liger_kernel.ops.published.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyTPFunction
from liger_kernel.ops.residual.attn_res import attn_res
from liger_kernel.ops.residual.mhc import mhc_coeffs, mhc_post_res, mhc_pre
from liger_kernel.ops.rotary.qk_norm_rope import qk_norm_rope
from liger_kernel.ops.rotary.rope import in_place_of, of_complex, of_sections, once, rope
from liger_kernel.ops.token_embedding import embedding

# as it was before any framework put another there
_stock_cross_entropy = torch.nn.functional.cross_entropy


# -- functions -----------------------------------------------------------------------------


@dataclass
class CrossEntropyOutput:
    """A loss and what was asked for beside it. ``token_accuracy`` is over the tokens not ignored; ``predicted_tokens`` is -1 for those ignored.

    ``correct_tokens`` and ``counted_tokens``, 0-dim int64, make up ``token_accuracy``: sums of these, not means of that, are right over micro-batches.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None
    correct_tokens: Tensor | None = None
    counted_tokens: Tensor | None = None


def token_counts(predicted: Tensor, target: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """How many of ``predicted`` are ``target``, among how many targets not ignored."""
    valid = target != ignore_index
    return ((predicted == target) & valid).sum(), valid.sum()


def token_accuracy(predicted: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """Share of ``predicted`` that is ``target``, among the targets not ignored; NaN if there are none."""
    correct, counted = token_counts(predicted, target, ignore_index)
    return correct / counted


def _output(found: Any, target: Tensor, ignore_index: int, z_loss: bool, accuracy: bool, predictions: bool) -> Tensor | CrossEntropyOutput:
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
    """``F.cross_entropy`` of logits (M, V) and class indices (M,), and what language models add to it. Logits are not overwritten.

    Other shapes and class probabilities are left to PyTorch, as frameworks put this function in the place of its own.
    ``size_average`` and ``reduce`` mean what they mean there. Returns a ``CrossEntropyOutput`` if one of the ``return_*`` is set.
    """
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    stats = return_z_loss or return_token_accuracy or return_predicted_tokens
    plain = isinstance(input, Tensor) and input.ndim == 2 and target.ndim == 1 and not target.is_floating_point()
    if not (plain or stats or lse_square_scale or softcap):
        return _stock_cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
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
    *,
    num_items: Tensor | float | None = None,
    compact: bool | Kept = False,
    chunk_rows: int | None = None,
    fp32_logits: bool = False,
) -> Tensor | CrossEntropyOutput:
    """Cross entropy of ``input @ weight.T + bias`` and class indices, without the logits. input (M, H), weight (V, H), target (M,).

    ``ce_weight`` (V,) weighs classes; ``accum_dtype`` is that of the sum of the weight's gradient over chunks; ``use_token_scaling`` multiplies
    each loss by the detached probability of its target. ``chunk_mem_const`` is accepted and ignored: chunks are sized by memory, or have
    ``chunk_rows`` tokens. ``num_items``, ``compact`` and ``fp32_logits``: see ``linear_cross_entropy``.
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
        num_items=num_items,
        compact=compact,
        chunk_rows=chunk_rows,
        fp32_logits=fp32_logits,
    )
    return _output(found, target, ignore_index, return_z_loss, return_token_accuracy, return_predicted_tokens)


def liger_rms_norm(X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True) -> Tensor:
    """``x / rms(x) * (W + offset)`` over the last dim."""
    return rms_norm(X, W, eps=eps, offset=offset, casting=casting_mode)


def liger_fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> tuple[Tensor, Tensor]:
    """The ``liger_rms_norm`` of ``X + R``, and that sum."""
    return fused_add_rms_norm(X, R, W, eps=eps, offset=offset, casting=casting_mode)


def liger_layer_norm(X: Tensor, W: Tensor | None, B: Tensor | None, eps: float) -> Tensor:
    """``F.layer_norm`` over the last dim."""
    return layer_norm(X, W, B, eps=eps)


def liger_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1, rotary_dim: int | None = None
) -> tuple[Tensor, Tensor]:
    """Turn q and k by tables (B or 1, T, R) or (T, R) as transformers makes them: each angle twice, as in ``cat((angles, angles), -1)``; R <= D.

    q (B, Hq, T, D), k (B, Hk, T, D), or (B, T, H, D) with ``unsqueeze_dim=2``. ``position_ids`` has no effect. Returns new tensors of the dtypes of
    q and k: products are rounded to the tensors' dtype, as in transformers, or, where tables are of another one, computed in fp32.
    ``rotary_dim``: R, for tables (..., R/2) that hold each angle once.
    """
    return rope(q, k, once(cos, rotary_dim), once(sin, rotary_dim), unsqueeze_dim=unsqueeze_dim, casting=in_place_of(q, k, cos))


liger_rotary_pos_emb = liger_rope


def liger_rotary_pos_emb_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``liger_rope`` of whole heads by gpt-oss's tables (B or 1, T, D/2), which hold each angle once."""
    return liger_rope(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``liger_rope``, in fp32, of the patches of all images in a row: q, k (T, H, D), or a batch of such rows, tables (T, R)."""
    if q.ndim == 4:
        return rope(q, k, once(cos), once(sin), unsqueeze_dim=2)
    q, k = rope(q[None], k[None], once(cos), once(sin), unsqueeze_dim=2)
    return q[0], k[0]


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """``liger_rope`` by tables (3, B, T, R) for positions in time, height and width, to each of which belong sections of the R/2 pairs, in turns.

    Models whose embedding puts the sections together, interleaved or not, call ``liger_rope``.
    """
    cos, sin = of_sections(cos, mrope_section), of_sections(sin, mrope_section)
    return rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, casting=in_place_of(q, k, cos))


liger_qwen2vl_mrope = liger_multimodal_rotary_pos_emb


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbouring columns of xq, xk (B, T, H, D), as complex numbers, times freqs_cis (B or 1, T, D/2)."""
    return rope(xq, xk, *of_complex(freqs_cis), layout="pairs", unsqueeze_dim=2)


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
    """``liger_llama4_text_rotary_pos_emb``; freqs_ci may also be one table for all images, of T * D/2 numbers in any shape."""
    table = query.shape[1], query.shape[-1] // 2
    if freqs_ci.numel() == math.prod(table):
        freqs_ci = freqs_ci.reshape(1, *table)
    return liger_llama4_text_rotary_pos_emb(query, key, freqs_ci.to(query.device))


def liger_qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, offset: float = 0.0,
    casting_mode: str = "llama", unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``liger_rope`` of the ``liger_rms_norm`` of each head of q and k, in one pass; weights (D,), tables (B or 1, T, R)."""
    return qk_norm_rope(q, k, q_weight, k_weight, once(cos), once(sin), eps=eps, offset=offset, casting=casting_mode, unsqueeze_dim=unsqueeze_dim)


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """``silu(a) * b``."""
    return glu(a, b, act="silu")


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """``gelu(a) * b``, gelu by its tanh approximation."""
    return glu(a, b, act="gelu_tanh")


def liger_jsd(input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100) -> Tensor:
    """Generalised Jensen-Shannon divergence of log-probabilities log q = input and log p = target, over the rows not ignored (none left: NaN)."""
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
    """``F.kl_div``: KL(target || exp(input)); ``reduce=False`` means "none", ``size_average=False`` "sum", and True leaves it to ``reduction``."""
    if reduce is False or size_average is False:
        reduction = "none" if reduce is False else "sum"
    return kl_div(input, target, reduction=reduction, log_target=log_target, eps=eps)


def liger_tvd(input: Tensor, target: Tensor, shift_labels: Tensor | None = None, reduction: str = "mean", ignore_index: int = -100) -> Tensor:
    """Total variation distance of probabilities, ``sum |input - target| / 2``."""
    return tvd(input, target, shift_labels, reduction=reduction, ignore_index=ignore_index)


# -- modules -------------------------------------------------------------------------------

INIT = {"ones": torch.ones, "zeros": torch.zeros}


def _arguments(self: nn.Module) -> str:
    """For ``extra_repr``: the arguments of its constructor that it keeps by their names."""
    kept = {name: self.__dict__[name] for name in inspect.signature(type(self).__init__).parameters if name in self.__dict__}
    return ", ".join(f"{name}={value!r}" for name, value in kept.items())


def _activation_of(self: nn.Module) -> str:
    """For ``extra_repr`` of MLPs: their activation."""
    return f"act={self.act!r}"


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
        return memory.cheap(rms_norm, hidden_states, self.weight, eps=self.variance_epsilon, offset=self.offset, casting=self.casting_mode)

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


class LigerRMSNormForGemma4(LigerRMSNorm):
    def __init__(
        self, dim: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "gemma", init_fn: str = "ones", in_place: bool = False,
        with_scale: bool = True,
    ):  # fmt: skip
        super().__init__(dim, eps, offset, casting_mode, init_fn, elementwise_affine=with_scale)


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4):
    """``dim`` None goes with ``with_scale=False``: there is no weight."""

    def __init__(
        self, dim: int | None = None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "gemma", init_fn: str = "ones", in_place: bool = False,
        with_scale: bool = True,
    ):  # fmt: skip
        if dim is None and with_scale:
            raise ValueError(f"{type(self).__name__}: dim must be the number of weights, got None")
        super().__init__(dim, eps, offset, casting_mode, init_fn, with_scale=with_scale)  # type: ignore[arg-type]


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma): ...


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


class LigerFusedAddRMSNorm(LigerRMSNorm):
    """``(norm(s), s)`` of ``s = hidden_states + residual``, in one kernel."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama", init_fn: str = "ones", in_place: bool = False):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return fused_add_rms_norm(hidden_states, residual, self.weight, eps=self.variance_epsilon, offset=self.offset, casting=self.casting_mode)


class LigerLayerNorm(nn.Module):
    """``layer_norm`` with a weight and a bias, which is there and begins at zero whatever ``bias`` says, as published state dicts have it.

    ``elementwise_affine=False``: with neither. ``impl`` (or ``backend``) and ``mode``: see ``liger_kernel.functional``.
    """

    impl: str | None = None
    mode: str | None = None

    def __init__(
        self, hidden_size: int | Sequence[int], eps: float = 1e-6, bias: bool = False, init_fn: str = "ones", impl: str | None = None,
        mode: str | None = None, backend: str | None = None, *, elementwise_affine: bool = True,
    ):  # fmt: skip
        super().__init__()
        if init_fn not in INIT:
            raise ValueError(f"{type(self).__name__}: init_fn must be one of {tuple(INIT)}, got {init_fn!r}")
        self.impl, self.mode = impl or backend, mode
        shape = (hidden_size,) if isinstance(hidden_size, int) else tuple(hidden_size)
        if len(shape) != 1:
            raise ValueError(f"{type(self).__name__}: hidden_size must be one dim, got {shape}")
        self.hidden_size, self.variance_epsilon = shape[0], eps
        self.register_parameter("weight", nn.Parameter(INIT[init_fn](shape)) if elementwise_affine else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(shape)) if elementwise_affine else None)

    @property
    def backend(self) -> str | None:
        """Another word for ``impl``."""
        return self.impl

    @backend.setter
    def backend(self, value: str | None) -> None:
        self.impl = value

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.impl or self.mode:
            return functional.layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon, impl=self.impl, mode=self.mode)
        return memory.cheap(layer_norm, hidden_states, self.weight, self.bias, eps=self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"({self.hidden_size},), eps={self.variance_epsilon}" + (f", impl={self.impl!r}" if self.impl else "")


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

    extra_repr = _activation_of

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(memory.cheap(glu, self.gate_proj(x), self.up_proj(x), act=self.act))


class LigerSwiGLUMLP(_GatedMLP):
    """``down(silu(gate(x)) * up(x))``. ``config``: hidden_size, intermediate_size, hidden_act, and mlp_bias if it has one."""

    def __init__(self, config: Any, intermediate_size: int | None = None):
        super().__init__(config, _activation(self, config.hidden_act, SILU), getattr(config, "mlp_bias", False), intermediate_size)

    def forward(self, x: Tensor) -> Tensor:  # also bound to MLPs of other classes, which have the projections and no more
        return self.down_proj(memory.cheap(glu, self.gate_proj(x), self.up_proj(x), act="silu"))


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    """``LigerSwiGLUMLP`` without biases, with the activation that ``config.hidden_activation`` (or ``hidden_act``) names."""

    def __init__(self, config: Any):
        name = getattr(config, "hidden_activation", None) or config.hidden_act
        _GatedMLP.__init__(self, config, _activation(self, name, SILU), False)


class LigerGEGLUMLP(_GatedMLP):
    """``down(gelu(gate(x)) * up(x))`` with the gelu that ``config.hidden_act`` (or ``hidden_activation``) names, exact or by tanh."""

    def __init__(self, config: Any):
        name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or "gelu_pytorch_tanh"
        super().__init__(config, _activation(self, name, GELU), getattr(config, "mlp_bias", False))


class LigerTiledSwiGLUMLP(LigerSwiGLUMLP):
    """``LigerSwiGLUMLP`` in ``num_shards`` tiles of the sequence, each recomputed in the backward; default: tiles of about hidden_size tokens."""

    def __init__(self, config: Any, num_shards: int | None = None):
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        return apply_tiled_mlp(LigerSwiGLUMLP.forward, self, x, self.num_shards)


class LigerTiledGEGLUMLP(LigerGEGLUMLP):
    """``LigerGEGLUMLP`` in ``num_shards`` tiles of the sequence, each recomputed in the backward; default: tiles of about hidden_size tokens."""

    def __init__(self, config: Any, num_shards: int | None = None):
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        return apply_tiled_mlp(LigerGEGLUMLP.forward, self, x, self.num_shards)


class LigerExperts(nn.Module):
    """The experts of a mixture, their weights packed as in transformers; the router is elsewhere.

    ``config``: hidden_size, hidden_act, num_experts (or num_local_experts, n_routed_experts), moe_intermediate_size (or intermediate_size).
    """

    def __init__(self, config: Any):
        super().__init__()
        first = lambda *names: next(getattr(config, n) for n in names if getattr(config, n, None) is not None)
        self.config, self.act = config, _activation(self, config.hidden_act, SILU | GELU)
        self.num_experts, self.hidden_dim = first("num_experts", "num_local_experts", "n_routed_experts"), config.hidden_size
        self.intermediate_dim = first("moe_intermediate_size", "intermediate_size")
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))
        for p in self.parameters():
            nn.init.normal_(p, std=getattr(config, "initializer_range", 0.02))

    extra_repr = _activation_of

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states (..., H); top_k_index and top_k_weights (..., K), for as many tokens."""
        index, weights = (t.reshape(-1, t.shape[-1]) for t in (top_k_index, top_k_weights))
        y = moe(hidden_states.reshape(-1, self.hidden_dim), self.gate_up_proj, self.down_proj, index, weights, act=self.act)
        return y.view(hidden_states.shape).to(hidden_states.dtype)


class LigerQwen3MoeSwiGLUMLP(_GatedMLP):
    """``LigerSwiGLUMLP`` without biases, of ``intermediate_size`` if it is given."""

    def __init__(self, config: Any, intermediate_size: int | None = None):
        super().__init__(config, _activation(self, config.hidden_act, SILU), False, intermediate_size)


class LigerHunyuanV1SwiGLUMLP(_GatedMLP):
    """``LigerSwiGLUMLP`` without biases; ``layer_idx`` is kept as an attribute."""

    def __init__(self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False):
        super().__init__(config, _activation(self, config.hidden_act, SILU), False)
        self.layer_idx = layer_idx


class LigerFalconH1SwiGLUMLP(_GatedMLP):
    """``down(silu(gate(x) m_gate) * up(x)) m_down`` with ``m_gate, m_down = config.mlp_multipliers``."""

    def __init__(self, config: Any):
        super().__init__(config, _activation(self, config.hidden_act, SILU), config.mlp_bias)
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers

    def forward(self, x: Tensor) -> Tensor:
        y = memory.cheap(glu, self.gate_proj(x), self.up_proj(x), act=self.act, gate_multiplier=self.gate_multiplier)
        return self.down_proj(y) * self.down_multiplier


class LigerMLP(_GatedMLP):
    """``LigerSwiGLUMLP`` without biases, in one operator that computes the activation again in the backward rather than keep it."""

    def __init__(self, config: Any):
        super().__init__(config, _activation(self, config.hidden_act, SILU), False)
        self.gate_multiplier, self.down_multiplier = 1.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        multipliers = dict(gate_multiplier=self.gate_multiplier, down_multiplier=self.down_multiplier)
        return mlp(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight, act=self.act, **multipliers)


class LigerFalconH1MLP(LigerMLP):
    """``LigerMLP`` with ``gate_multiplier, down_multiplier = config.mlp_multipliers``."""

    def __init__(self, config: Any):
        if getattr(config, "mlp_bias", False):
            raise ValueError("LigerFalconH1MLP: mlp_bias must be False, got True")
        super().__init__(config)
        self.gate_multiplier, self.down_multiplier = map(float, config.mlp_multipliers)


class LigerBlockSparseTop2MLP(nn.Module):
    """An expert of Mixtral: ``w2(silu(w1(x)) * w3(x))``."""

    def __init__(self, config: Any):
        super().__init__()
        self.config, self.act = config, _activation(self, config.hidden_act, SILU)
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    extra_repr = _activation_of

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(memory.cheap(glu, self.w1(x), self.w3(x), act=self.act))


class LigerGEGLUMLPForGemma4(_GatedMLP):
    """``LigerGEGLUMLP`` without biases; twice as wide in layers that reuse keys and values, if ``config.use_double_wide_mlp`` says so."""

    def __init__(self, config: Any, layer_idx: int | None = None):
        reuses = False
        if layer_idx is not None and getattr(config, "use_double_wide_mlp", False):
            modes = getattr(config, "kv_sharing_modes", None)
            first = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
            reuses = modes[layer_idx] == "reuse" if modes is not None else layer_idx >= first > 0
        super().__init__(config, _activation(self, config.hidden_activation, GELU), False, config.intermediate_size * (1 + reuses))


class LigerPhi3SwiGLUMLP(nn.Module):
    """``down(silu(gate) * up)`` with gate and up of one projection, read where they lie."""

    def __init__(self, config: Any):
        super().__init__()
        self.config, self.act = config, _activation(self, config.hidden_act, SILU)
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    extra_repr = _activation_of

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(memory.cheap(glu, self.gate_up_proj(hidden_states), act=self.act))


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

    extra_repr = _arguments

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        return liger_cross_entropy(_input, target, self.weight, **{name: getattr(self, name) for name in LOSS_OPTIONS})


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """Cross entropy of ``_input @ lin_weight.T + bias`` and class indices (M,), without the logits. _input (M, H), lin_weight (V, H).

    ``accum_dtype``: of the sum of the weight's gradient; ``use_token_scaling``: times the detached probability of the target; ``compact``,
    ``chunk_rows``, ``fp32_logits`` and the ``num_items`` of a call: see ``linear_cross_entropy``.

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
        *,
        compact: bool = False,
        chunk_rows: int | None = None,
        fp32_logits: bool = False,
    ):
        super().__init__()
        self.compact, self.chunk_rows, self.fp32_logits = compact, chunk_rows, fp32_logits
        self.register_buffer("ce_weight", ce_weight, persistent=False)
        self.ignore_index, self.lse_square_scale, self.label_smoothing = ignore_index, lse_square_scale, label_smoothing
        self.reduction, self.softcap, self.accum_dtype, self.use_token_scaling = reduction, softcap, accum_dtype, use_token_scaling
        self.return_z_loss, self.return_token_accuracy, self.return_predicted_tokens = return_z_loss, return_token_accuracy, return_predicted_tokens

    extra_repr = _arguments

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None, *, num_items: Tensor | float | None = None
    ) -> Tensor | CrossEntropyOutput:
        own = ("ce_weight", "accum_dtype", "use_token_scaling", "compact", "chunk_rows", "fp32_logits")
        options = {name: getattr(self, name) for name in (*own, *LOSS_OPTIONS)}
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, num_items=num_items, **options)


class LigerJSD(nn.Module):
    """Generalised Jensen-Shannon divergence of log-probabilities (M, V); ``beta=0`` is KL(p || q), ``beta=1`` KL(q || p)."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100):
        super().__init__()
        self.beta, self.ignore_index = beta, ignore_index

    extra_repr = _arguments

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return jsd(log_q, log_p, shift_labels, beta=self.beta, ignore_index=self.ignore_index)


class LigerKLDIVLoss(nn.KLDivLoss):
    """``nn.KLDivLoss`` with a floor ``eps`` under the probabilities whose logarithm is taken; the arguments after it are torch's."""

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.eps = eps

    extra_repr = _arguments

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        return kl_div(y_pred, y_true, reduction=self.reduction, log_target=self.log_target, eps=self.eps)


class LigerTVDLoss(nn.Module):
    """Total variation distance of probabilities (M, V)."""

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100):
        super().__init__()
        self.reduction, self.ignore_index = reduction, ignore_index

    extra_repr = _arguments

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return tvd(p, q, shift_labels, reduction=self.reduction, ignore_index=self.ignore_index)


class LigerVocabParallelCrossEntropy(nn.Module):
    """Cross entropy of this rank's slice of the logits (..., N) and indices among all classes (...), over the ranks of ``tp_group``.

    ``label_smoothing_formula`` "pytorch" or "megatron"; ``label_smoothing_mode``: over the "global" classes or this rank's "partition".
    """

    def __init__(
        self, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "none", label_smoothing_formula: str = "pytorch",
        label_smoothing_mode: str = "global",
    ):  # fmt: skip
        super().__init__()
        validate_formula_and_mode(label_smoothing_formula, label_smoothing_mode)
        if reduction not in REDUCTIONS:
            raise ValueError(f"{type(self).__name__}: reduction must be one of {REDUCTIONS}, got {reduction!r}")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"{type(self).__name__}: label_smoothing must be in [0, 1), got {label_smoothing}")
        self.ignore_index, self.label_smoothing, self.reduction = ignore_index, label_smoothing, reduction
        self.label_smoothing_formula, self.label_smoothing_mode = label_smoothing_formula, label_smoothing_mode

    def forward(self, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None) -> Tensor:
        return vocab_parallel_cross_entropy(
            vocab_parallel_logits,
            target,
            tp_group,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            formula=self.label_smoothing_formula,
            mode=self.label_smoothing_mode,
        )

    extra_repr = _arguments


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
    """Generalised JSD of two linear heads' tokens, without the logits, over the tokens that are not ignored. (M, Hs), (V, Hs), (M, Ht), (V, Ht), (M,)."""
    return LigerFusedLinearJSDFunction.apply(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index, temperature, accum_dtype
    )


class LigerFusedLinearJSD(nn.Module):
    """beta KL(p || m) + (1 - beta) KL(q || m) of student q and teacher p (arXiv:2306.13649), m = beta p + (1 - beta) q, without the logits of either.

    The mean over tokens that are not ignored. The teacher gets no gradient. ``accum_dtype``: of the sum of the weight's gradient.
    """

    def __init__(self, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0, accum_dtype: torch.dtype | None = None):
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"LigerFusedLinearJSD: temperature must be positive, got {temperature}")
        self.jsd_beta, self.ignore_index, self.temperature, self.accum_dtype = jsd_beta, ignore_index, temperature, accum_dtype

    extra_repr = _arguments

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor, shift_labels: Tensor | None = None
    ) -> Tensor:
        return liger_fused_linear_jsd(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels, self.jsd_beta, self.ignore_index, self.temperature, self.accum_dtype
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
    """KL divergence of a linear head from given probabilities, without the logits, as in ``LigerFusedLinearKLDivLoss``. (M, H), (V, H), (M, V), (M,)."""
    return LigerFusedLinearKLDivFunction.apply(student_input, student_weight, target, shift_labels, reduction, ignore_index, temperature, eps, accum_dtype)


def liger_fused_linear_scaled_cross_entropy_tp(
    input: Tensor, weight: Tensor, target: Tensor, tp_group: Any, temperature: float = 1.0, ignore_index: int = -100, tiles_per_reduce: int = 1,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Negative log-probability of each token, and with ``return_entropy`` the entropies, where ranks share the classes.

    input (..., H) and target (...) alike on all ranks of ``tp_group``, weight (N, H) the classes of this one; fp32, as of
    ``LigerFusedLinearScaledCrossEntropyTPFunction``.
    """
    return LigerFusedLinearScaledCrossEntropyTPFunction.apply(input, weight, target, tp_group, temperature, ignore_index, tiles_per_reduce, return_entropy)


class LigerFusedLinearKLDivLoss(nn.Module):
    """KL(p || q) of q = softmax(student_input student_weight^T / temperature) from a teacher's probabilities p, without the student's logits.

    ``forward(student_input, student_weight, target, shift_labels=None)``: (M, H), (V, H), p (M, V) in any floating-point dtype, and labels (M,), of which
    those that are ``ignore_index`` leave their row out. Returns 0-dim fp32: the sum of p (log max(p, eps) - log q), over the rows that count ("batchmean"),
    over their elements ("mean") or as it is ("sum"), as ``torch.nn.KLDivLoss`` has it, not multiplied by temperature^2; 0 where no row counts.
    p gets no gradient, and one that asks for it is refused. ``accum_dtype``: of the sum of the weight's gradient.
    """

    def __init__(
        self,
        reduction: str = "batchmean",
        ignore_index: int = -100,
        temperature: float = 1.0,
        eps: float = 1e-10,
        accum_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"LigerFusedLinearKLDivLoss: temperature must be positive, got {temperature}")
        self.reduction, self.ignore_index, self.temperature, self.eps, self.accum_dtype = reduction, ignore_index, temperature, eps, accum_dtype

    def forward(self, student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return liger_fused_linear_kl_div(
            student_input, student_weight, target, shift_labels, self.reduction, self.ignore_index, self.temperature, self.eps, self.accum_dtype
        )

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, temperature={self.temperature}, eps={self.eps}, accum_dtype={self.accum_dtype}"


class LigerFusedCETVDLoss(nn.Module):
    """Cross entropy and total variation distance from a teacher, of each token, in one pass over the logits.

    ``forward(student_logits, teacher_logits, target)``: (M, V), (M, V), (M,). Returns ``(ce, tvd)``, fp32 (M,) each, 0 where the target is
    ``ignore_index``; both differentiable in the student's logits. The teacher is constant.
    """

    def __init__(self, ignore_index: int = -100):
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return fused_ce_tvd(student_logits, teacher_logits, target, ignore_index=self.ignore_index)

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}"


def liger_softmax(x: Tensor) -> Tensor:
    """Softmax over the last dim."""
    return softmax(x)


def liger_sparsemax(input: Tensor, dim: int = -1) -> Tensor:
    """Euclidean projection onto the simplex along ``dim``."""
    return sparsemax(input, dim=dim)


def liger_dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """``tanh(alpha * x) * gamma + beta`` over the last dim; alpha has one element."""
    return dyt(x, alpha, gamma, beta)


class LigerSoftmax(nn.Module):
    """Softmax over the last dim."""

    def forward(self, x: Tensor) -> Tensor:
        return softmax(x)


class LigerSparsemax(nn.Module):
    """Euclidean projection onto the simplex along ``dim`` (arXiv:1602.02068)."""

    def __init__(self, dim: int = -1):
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return sparsemax(x, dim=self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class LigerDyT(nn.Module):
    """Dynamic tanh, in the place of a norm: ``tanh(alpha * x) * gamma + beta`` (arXiv:2503.10622). ``beta``: whether there is one."""

    def __init__(self, hidden_size: int, beta: bool = True, init_alpha: float = 0.5):
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self.alpha = nn.Parameter(torch.full((1,), float(init_alpha)))
        self.gamma = nn.Parameter(torch.ones(hidden_size))
        self.register_parameter("beta", nn.Parameter(torch.zeros(hidden_size)) if beta else None)

    def forward(self, x: Tensor) -> Tensor:
        return dyt(x, self.alpha, self.gamma, self.beta)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, beta={self.beta is not None}, init_alpha={self.init_alpha}"


def liger_multi_token_attention(
    scores: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1,
    sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Causal softmax, or sparsemax, of scores (B, C, L, L), convolved over neighbouring queries and keys; zero above the diagonal."""
    return multi_token_attention(scores, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups, sparse=sparse)


class LigerMultiTokenAttention(nn.Module):
    """``multi_token_attention`` of scores (B, in_channels, L, L), with the weights of an ``nn.Conv2d`` (arXiv:2504.00927)."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1,
        bias: bool = True, sparse: bool = False,
    ):  # fmt: skip
        super().__init__()
        conv = nn.Conv2d(in_channels, out_channels, kernel_size, groups=groups, bias=bias)
        self.weight, self.bias = conv.weight, conv.bias
        self.reset_parameters()
        self.options: dict[str, Any] = dict(stride=stride, padding=padding, dilation=dilation, groups=groups, sparse=sparse)

    def reset_parameters(self) -> None:
        """Weights as ``nn.Conv2d`` draws them, and a bias of zero."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, scores: Tensor) -> Tensor:
        return multi_token_attention(scores, self.weight, self.bias, **self.options)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, " + ", ".join(f"{k}={v}" for k, v in self.options.items())


def liger_modulated_rms_norm(
    X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = True,
) -> Tensor:  # fmt: skip
    """``(1 + scale) * liger_rms_norm(X, W) + shift``; scale and shift (H,), (1, H), (B, H), or with a row for each token."""
    return modulated_rms_norm(X, scale, shift, W, eps=eps, offset=offset, casting=casting_mode)


class LigerModulatedRMSNorm(LigerRMSNorm):
    """``modulated_rms_norm`` with a weight: ``(1 + scale) * norm(hidden_states) + shift``, as in diffusion transformers (AdaLN)."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama", init_fn: str = "ones", in_place: bool = True,
        elementwise_affine: bool = True,
    ):  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, elementwise_affine=elementwise_affine)

    def forward(self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return modulated_rms_norm(hidden_states, scale, shift, self.weight, eps=self.variance_epsilon, offset=self.offset, casting=self.casting_mode)


def liger_group_norm(
    X: Tensor, affine_scaling_weight: Tensor | None, affine_shifting_bias: Tensor | None, num_channels: int, num_groups: int, eps: float
) -> Tensor:
    """``F.group_norm`` of X (B, num_channels, ...)."""
    if X.shape[1] != num_channels:
        raise ValueError(f"liger_group_norm: X must have {num_channels} channels, got shape {tuple(X.shape)}")
    return group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps=eps)


class LigerGroupNorm(nn.Module):
    """``group_norm`` with a weight and a bias, which is there and begins at zero whatever ``bias`` says, as published state dicts have it."""

    def __init__(self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"):
        super().__init__()
        if init_fn not in INIT:
            raise ValueError(f"{type(self).__name__}: init_fn must be one of {tuple(INIT)}, got {init_fn!r}")
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(f"{type(self).__name__}: num_groups must divide the {num_channels} channels, got {num_groups}")
        self.num_channels, self.num_groups, self.variance_epsilon = num_channels, num_groups, eps
        self.weight = nn.Parameter(INIT[init_fn](num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_group_norm(hidden_states, self.weight, self.bias, self.num_channels, self.num_groups, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"num_channels={self.num_channels}, num_groups={self.num_groups}, eps={self.variance_epsilon}"


def liger_poly_norm(X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True) -> Tensor:
    """``W[0] n(X^3) + W[1] n(X^2) + W[2] n(X) + B``, ``n(z) = z / rms(z)`` over the last dim."""
    return poly_norm(X, W, B, eps=eps)


class LigerPolyNorm(nn.Module):
    """``poly_norm`` with three weights, 1/3 each at first, and a bias, 1 (arXiv:2411.03884).

    The bias has one dim, as what shards parameters wants; published state dicts, where it has none, load all the same.
    """

    def __init__(self, eps: float = 1e-6, in_place: bool = True):
        super().__init__()
        self.variance_epsilon = eps
        self.weight = nn.Parameter(torch.full((3,), 1 / 3))
        self.bias = nn.Parameter(torch.ones(1))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}bias" in state_dict:
            state_dict[f"{prefix}bias"] = state_dict[f"{prefix}bias"].reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return poly_norm(hidden_states, self.weight, self.bias, eps=self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"eps={self.variance_epsilon}"


def liger_relu_squared(x: Tensor) -> Tensor:
    """``relu(x)^2``."""
    return relu_squared(x)


class LigerReLUSquared(nn.Module):
    """``relu(x)^2``."""

    def forward(self, x: Tensor) -> Tensor:
        return relu_squared(x)


class LigerEmbedding(nn.Module):
    """``nn.Embedding`` whose gradient is the same bits every time, summed in fp32; names and initial values are torch's."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None):
        super().__init__()
        stock = nn.Embedding(num_embeddings, embedding_dim, padding_idx)
        self.num_embeddings, self.embedding_dim, self.padding_idx, self.weight = num_embeddings, embedding_dim, stock.padding_idx, stock.weight

    def forward(self, indices: Tensor) -> Tensor:
        return embedding(indices, self.weight, padding_idx=self.padding_idx)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}" + ("" if self.padding_idx is None else f", padding_idx={self.padding_idx}")


def liger_attn_res(V: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float = 1e-6) -> Tensor:
    """Average of the N blocks V (N, ..., D), or a list of them, weighted by the softmax of ``w_query . (rms_norm(v_n) * w_norm)`` (arXiv:2603.15031)."""
    blocks = V if isinstance(V, Tensor) else torch.stack(tuple(V))
    return attn_res(blocks.movedim(0, -2), w_query, w_norm, eps=eps)


def liger_mhc_coeffs(
    x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, *, allow_fp32: bool = False, tmax: int = 20,
    rms_eps: float = 1e-6, pre_eps: float = 0.0, sinkhorn_eps: float = 1e-6, post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """h_pre (..., H), h_post (..., H) and h_res (..., H, H) of streams x (..., H, C). ``allow_fp32`` is accepted and ignored: every dtype is served."""
    options = dict(tmax=tmax, rms_eps=rms_eps, pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_mult=post_mult)
    return mhc_coeffs(x, phi, b, alpha_pre, alpha_post, alpha_res, **options)  # type: ignore[arg-type]


def liger_mhc_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    """``sum_i h_pre_i x_i`` of streams x (..., H, C)."""
    return mhc_pre(x, h_pre)


def liger_mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """``y_o = sum_i h_res_oi x_i + h_post_o f_out`` of streams x (..., H, C)."""
    return mhc_post_res(x, f_out, h_post, h_res)


def liger_mhc_apply(
    x: Tensor, f_out: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, *, return_x_in: bool = False
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """``liger_mhc_post_res``, and ``liger_mhc_pre`` if ``return_x_in``."""
    x_out = mhc_post_res(x, f_out, h_post, h_res)
    return (x_out, mhc_pre(x, h_pre)) if return_x_in else x_out


def liger_mhc_forward(
    x: Tensor, layer: Any, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, *, allow_fp32: bool = False,
    tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0, sinkhorn_eps: float = 1e-6, post_mult: float = 2.0, return_coeffs: bool = False,
) -> Any:  # fmt: skip
    """Streams x (..., H, C) around ``layer``, which gets (..., C) in the dtype of its parameters. With ``return_coeffs`` also (h_pre, h_post, h_res)."""
    options = dict(tmax=tmax, rms_eps=rms_eps, pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_mult=post_mult)
    h_pre, h_post, h_res = mhc_coeffs(x, phi, b, alpha_pre, alpha_post, alpha_res, **options)  # type: ignore[arg-type]
    x_in = mhc_pre(x, h_pre)
    parameter = next(layer.parameters(), None) if isinstance(layer, nn.Module) else None
    x_out = mhc_post_res(x, layer(x_in if parameter is None else x_in.to(parameter.dtype)), h_post, h_res)
    return (x_out, (h_pre, h_post, h_res)) if return_coeffs else x_out


class LigerMHC(nn.Module):
    """``hc`` residual streams of ``c`` channels around ``layer``: x (..., hc, c) to the same shape (manifold-constrained hyper-connections).

    ``phi`` (hc c, hc hc + 2 hc), ``b`` and three alphas make the coefficients, h_res by ``tmax`` steps of Sinkhorn. ``allow_fp32`` is accepted and ignored.
    """

    def __init__(
        self, layer: nn.Module, *, hc: int, c: int, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0, sinkhorn_eps: float = 1e-6,
        post_mult: float = 2.0, phi_dtype: torch.dtype = torch.float16, allow_fp32: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.layer, self.hc, self.c = layer, hc, c
        self.options: dict[str, Any] = dict(tmax=tmax, rms_eps=rms_eps, pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_mult=post_mult)
        device = next((p.device for p in layer.parameters()), None)
        width = hc * hc + 2 * hc
        self.phi = nn.Parameter(0.02 * torch.randn(hc * c, width, dtype=phi_dtype, device=device))
        self.b = nn.Parameter(torch.zeros(width, device=device))
        self.alpha_pre, self.alpha_post, self.alpha_res = (nn.Parameter(torch.ones((), device=device)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != (self.hc, self.c):
            raise ValueError(f"LigerMHC: x must have shape (..., {self.hc}, {self.c}), got {tuple(x.shape)}")
        return liger_mhc_forward(x, self.layer, self.phi, self.b, self.alpha_pre, self.alpha_post, self.alpha_res, **self.options)

    def extra_repr(self) -> str:
        return f"hc={self.hc}, c={self.c}, tmax={self.options['tmax']}"


def liger_fused_neighborhood_attention(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: int = 7, dilation: int = 1, scale: float | None = None
) -> Tensor:  # fmt: skip
    """Attention of query (B, H, T, D) to the ``kernel_size`` keys around it, ``dilation`` apart, fewer at the borders."""
    return neighborhood_attention(query, key, value, kernel_size=kernel_size, dilation=dilation, scale=scale)


class LigerFusedNeighborhoodAttention(nn.Module):
    """Neighbourhood attention over hidden states (B, T, hidden_size), between its projections; dropout before the last one."""

    def __init__(
        self, hidden_size: int, num_heads: int, kernel_size: int = 7, dilation: int = 1, bias: bool = True, dropout: float = 0.0,
        scale: float | None = None,
    ):  # fmt: skip
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"{type(self).__name__}: hidden_size must be a multiple of num_heads, {num_heads}, got {hidden_size}")
        self.head_dim, self.kernel_size, self.dilation, self.scale = hidden_size // num_heads, kernel_size, dilation, scale
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is not None:
            raise ValueError(f"{type(self).__name__}: attention_mask must be None, got a tensor of shape {tuple(attention_mask.shape)}")
        q, k, v = (proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        o = neighborhood_attention(q, k, v, kernel_size=self.kernel_size, dilation=self.dilation, scale=self.scale)
        return self.out_proj(self.dropout(o.transpose(1, 2).flatten(-2)))

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, kernel_size={self.kernel_size}, dilation={self.dilation}, scale={self.scale}"


class LigerFusedNeighborhoodAttentionLayer(nn.Module):
    """``x + dropout(attention(layer_norm(x)))``."""

    def __init__(
        self, hidden_size: int, num_heads: int, kernel_size: int = 7, dilation: int = 1, bias: bool = True, dropout: float = 0.0,
        layer_norm_eps: float = 1e-5, scale: float | None = None,
    ):  # fmt: skip
        super().__init__()
        self.attention = LigerFusedNeighborhoodAttention(hidden_size, num_heads, kernel_size, dilation, bias, dropout, scale)
        self.layer_norm, self.dropout = LigerLayerNorm(hidden_size, layer_norm_eps), nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return hidden_states + self.dropout(self.attention(self.layer_norm(hidden_states), attention_mask))


@dataclass
class LigerFusedNeighborhoodAttentionConfig:
    """Arguments of ``LigerFusedNeighborhoodAttentionLayer``."""

    hidden_size: int = 768
    num_heads: int = 12
    kernel_size: int = 7
    dilation: int = 1
    bias: bool = True
    dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    scale: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
