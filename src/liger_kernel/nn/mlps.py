"""MLPs and experts, and their activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel import memory
from liger_kernel.ops._core.impl import ImplNotAvailableError
from liger_kernel.ops.activations.glu import glu
from liger_kernel.ops.activations.relu_squared import relu_squared
from liger_kernel.ops.projections.mlp import mlp
from liger_kernel.ops.projections.moe import moe
from liger_kernel.ops.projections.tiled_mlp import apply_tiled_mlp

__all__ = [
    "LigerBlockSparseTop2MLP",
    "LigerExpertParallelFusedMoe",
    "LigerExperts",
    "LigerFalconH1MLP",
    "LigerFalconH1SwiGLUMLP",
    "LigerGEGLUMLP",
    "LigerGEGLUMLPForGemma4",
    "LigerHunyuanV1SwiGLUMLP",
    "LigerMLP",
    "LigerPhi3SwiGLUMLP",
    "LigerQwen3MoeSwiGLUMLP",
    "LigerReLUSquared",
    "LigerSwiGLUMLP",
    "LigerSwiGLUMLPForMuseGlimmer",
    "LigerTiledGEGLUMLP",
    "LigerTiledSwiGLUMLP",
]


def _of(owner: nn.Module, config: Any, *names: str) -> Any:
    """The first of these attributes that ``config`` has and that is not None."""
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return value
    example = "types.SimpleNamespace(hidden_size=64, intermediate_size=256, hidden_act='silu')"
    got = type(config).__name__
    raise ValueError(
        f"{type(owner).__name__}: config must have {' or '.join(names)}, as a model's configuration or {example}, "
        f"got {got}"
    )


def _activation(owner: Any, name: str, known: dict[str, str]) -> str:
    if name not in known:
        raise ValueError(f"{type(owner).__name__}: activation must be one of {tuple(known)}, got {name!r}")
    return known[name]


SILU = {"silu": "silu", "swish": "silu"}
GELU = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def _silu(owner: nn.Module, config: Any) -> str:
    """The activation of an MLP that has only one."""
    return _activation(owner, _of(owner, config, "hidden_act"), SILU)


class _WithActivation(nn.Module):
    def __init__(self, config: Any, act: str):
        super().__init__()
        self.config, self.act = config, act

    def extra_repr(self) -> str:
        return f"act={self.act!r}"


class _GatedMLP(_WithActivation):
    def __init__(self, config: Any, act: str, bias: bool, intermediate_size: int | None = None):
        super().__init__(config, act)
        self.hidden_size, self.intermediate_size = (
            _of(self, config, "hidden_size"),
            intermediate_size or _of(self, config, "intermediate_size"),
        )
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(memory.cheap(glu, self.gate_proj(x), self.up_proj(x), act=self.act))


class LigerSwiGLUMLP(_GatedMLP):
    """``down(silu(gate(x)) * up(x))``. ``config`` has hidden_size, intermediate_size and
    hidden_act, and may have mlp_bias."""

    def __init__(self, config: Any, intermediate_size: int | None = None):
        super().__init__(config, _silu(self, config), getattr(config, "mlp_bias", False), intermediate_size)

    def forward(
        self, x: Tensor
    ) -> Tensor:  # also bound to MLPs of other classes, which have the projections and no more
        return self.down_proj(memory.cheap(glu, self.gate_proj(x), self.up_proj(x), act="silu"))


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    """``LigerSwiGLUMLP`` without biases, with the activation of ``config.hidden_activation`` (or
    ``hidden_act``)."""

    def __init__(self, config: Any):
        _GatedMLP.__init__(
            self, config, _activation(self, _of(self, config, "hidden_activation", "hidden_act"), SILU), False
        )


class LigerGEGLUMLP(_GatedMLP):
    """``down(gelu(gate(x)) * up(x))`` with the gelu of ``config.hidden_act`` (or
    ``hidden_activation``): exact, or its tanh approximation."""

    def __init__(self, config: Any):
        name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or "gelu_pytorch_tanh"
        super().__init__(config, _activation(self, name, GELU), getattr(config, "mlp_bias", False))


class _Tiled:
    def __init__(self, config: Any, num_shards: int | None = None):
        super().__init__(config)  # type: ignore[call-arg]  # of the MLP
        self.num_shards = num_shards

    def forward(self: Any, x: Tensor) -> Tensor:
        return apply_tiled_mlp(_GatedMLP.forward, self, x, self.num_shards)


class LigerTiledSwiGLUMLP(_Tiled, LigerSwiGLUMLP):
    """``LigerSwiGLUMLP`` in ``num_shards`` tiles of the sequence, which the backward pass
    recomputes; default: tiles of about hidden_size tokens."""


class LigerTiledGEGLUMLP(_Tiled, LigerGEGLUMLP):
    """``LigerGEGLUMLP`` in ``num_shards`` tiles of the sequence, which the backward pass
    recomputes; default: tiles of about hidden_size tokens."""


class LigerExperts(_WithActivation):
    """The experts of a mixture, without its router. The weights are packed as in Transformers.

    ``config`` has hidden_size, hidden_act, num_experts (or num_local_experts, n_routed_experts) and
    moe_intermediate_size (or intermediate_size).
    """

    def __init__(self, config: Any):
        super().__init__(config, _activation(self, _of(self, config, "hidden_act"), SILU | GELU))
        self.num_experts, self.hidden_dim = (
            _of(self, config, "num_experts", "num_local_experts", "n_routed_experts"),
            _of(self, config, "hidden_size"),
        )
        self.intermediate_dim = _of(self, config, "moe_intermediate_size", "intermediate_size")
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))
        for p in self.parameters():
            nn.init.normal_(p, std=getattr(config, "initializer_range", 0.02))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states (..., H); top_k_index and top_k_weights (..., K) for the same tokens.
        Returns the shape and dtype of hidden_states."""
        index, weights = (t.reshape(-1, t.shape[-1]) for t in (top_k_index, top_k_weights))
        y = moe(
            hidden_states.reshape(-1, self.hidden_dim), self.gate_up_proj, self.down_proj, index, weights, act=self.act
        )
        return y.view(hidden_states.shape).to(hidden_states.dtype)


class LigerQwen3MoeSwiGLUMLP(_GatedMLP):
    """``LigerSwiGLUMLP`` without biases, with ``intermediate_size`` if it is given."""

    def __init__(self, config: Any, intermediate_size: int | None = None):
        super().__init__(config, _silu(self, config), False, intermediate_size)


class LigerHunyuanV1SwiGLUMLP(_GatedMLP):
    """``LigerSwiGLUMLP`` without biases; ``layer_idx`` becomes an attribute."""

    def __init__(self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False):
        super().__init__(config, _silu(self, config), False)
        self.layer_idx = layer_idx


class LigerFalconH1SwiGLUMLP(_GatedMLP):
    """``down(silu(gate(x) m_gate) * up(x)) m_down`` with ``m_gate, m_down =
    config.mlp_multipliers``."""

    def __init__(self, config: Any):
        super().__init__(config, _silu(self, config), _of(self, config, "mlp_bias"))
        self.gate_multiplier, self.down_multiplier = _of(self, config, "mlp_multipliers")

    def forward(self, x: Tensor) -> Tensor:
        y = memory.cheap(glu, self.gate_proj(x), self.up_proj(x), act=self.act, gate_multiplier=self.gate_multiplier)
        return self.down_proj(y) * self.down_multiplier


class LigerMLP(_GatedMLP):
    """``LigerSwiGLUMLP`` without biases, as one operator that recomputes the activation in the
    backward pass."""

    def __init__(self, config: Any):
        super().__init__(config, _silu(self, config), False)
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
        self.gate_multiplier, self.down_multiplier = map(float, _of(self, config, "mlp_multipliers"))


class LigerBlockSparseTop2MLP(_WithActivation):
    """An expert of Mixtral: ``w2(silu(w1(x)) * w3(x))``."""

    def __init__(self, config: Any):
        super().__init__(config, _silu(self, config))
        self.ffn_dim, self.hidden_dim = _of(self, config, "intermediate_size"), _of(self, config, "hidden_size")
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(memory.cheap(glu, self.w1(x), self.w3(x), act=self.act))


class LigerGEGLUMLPForGemma4(_GatedMLP):
    """``LigerGEGLUMLP`` without biases. If ``config.use_double_wide_mlp`` is set, it is twice as
    wide in layers that reuse keys and values."""

    def __init__(self, config: Any, layer_idx: int | None = None):
        reuses = False
        if layer_idx is not None and getattr(config, "use_double_wide_mlp", False):
            modes = getattr(config, "kv_sharing_modes", None)
            first = _of(self, config, "num_hidden_layers") - (getattr(config, "num_kv_shared_layers", 0) or 0)
            reuses = modes[layer_idx] == "reuse" if modes is not None else layer_idx >= first > 0
        super().__init__(
            config,
            _activation(self, _of(self, config, "hidden_activation"), GELU),
            False,
            _of(self, config, "intermediate_size") * (1 + reuses),
        )


class LigerPhi3SwiGLUMLP(_WithActivation):
    """``down(silu(gate) * up)`` with gate and up from one projection, which are read without a
    copy."""

    def __init__(self, config: Any):
        super().__init__(config, _silu(self, config))
        hidden_size, intermediate_size = _of(self, config, "hidden_size"), _of(self, config, "intermediate_size")
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(memory.cheap(glu, self.gate_up_proj(hidden_states), act=self.act))


class LigerReLUSquared(nn.Module):
    """``relu(x)^2``."""

    def forward(self, x: Tensor) -> Tensor:
        return relu_squared(x)


class LigerExpertParallelFusedMoe(nn.Module):
    """``sum_k weight_k A (silu(B x) * (C x))`` over the experts of each token, with weights of each
    call. All experts must be on this rank.

    Raises ``ImplNotAvailableError`` for a ``process_group`` of several ranks, because that needs
    native kernels over NVSHMEM, which do not exist here. Use Transformers' own expert parallelism
    with ``LigerExperts`` instead.
    """

    def __init__(self, process_group: Any = None):
        super().__init__()
        if process_group is not None and process_group.size() > 1:
            raise ImplNotAvailableError(
                "LigerExpertParallelFusedMoe: process_group must be None or of one rank, got "
                f"{process_group.size()}: NVSHMEM is needed"
            )
        self.process_group = process_group

    def forward(
        self, hidden_states: Tensor, expert_indices: Tensor, expert_weights: Tensor, all_B: Tensor, all_C: Tensor,
        all_A: Tensor, num_experts: int,
    ) -> Tensor:  # fmt: skip
        """hidden_states (M, H), expert_indices and expert_weights (M, K), all_B and all_C (E, I,
        H), all_A (E, H, I)."""
        if all_B.shape[0] != num_experts:
            raise ValueError(
                f"LigerExpertParallelFusedMoe: all_B must hold {num_experts} experts, got {all_B.shape[0]}"
            )
        return moe(hidden_states, torch.cat((all_B, all_C), 1), all_A, expert_indices, expert_weights)
