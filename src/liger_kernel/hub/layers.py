"""Layers without their own state, as ``kernels`` requires: each is a ``forward`` for other modules.

If none of our variants reproduces the rounding of a norm, the norm keeps its own ``forward``.

Besides the classes here, this module has the layers and layouts of ``layouts.py``, made when
somebody reads them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernel.hub.layouts import layer_or_layout
from liger_kernel.ops.activations.glu import glu
from liger_kernel.ops.losses.cross_entropy import cross_entropy
from liger_kernel.ops.norms.rms_norm import rms_norm
from liger_kernel.ops.rotary.rope import once, rope
from liger_kernel.transformers.recognise.compare import recognise, references
from liger_kernel.transformers.recognise.mlps import in_tiles
from liger_kernel.transformers.recognise.norms import RMSNorm
from liger_kernel.transformers.recognise.slots import SLOTS

_NORMS = next(s for s in SLOTS if s.flag == "rms_norm")
_FORMS: dict[type, tuple[float, str, str] | None] = {}


@torch.compiler.assume_constant_result
def _form(cls: Any) -> tuple[float, str, str] | None:
    """Offset, casting and the name of eps of the variant that reproduces the norm ``cls``; None
    if there is none."""
    if cls not in _FORMS:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), references():
            variant, _ = recognise(_NORMS, cls, cls.forward)
        plain = isinstance(variant, RMSNorm) and variant.weight == ""
        _FORMS[cls] = (variant.offset, variant.casting, variant.eps) if plain else None
    return _FORMS[cls]


class _Stateless(nn.Module):
    # what ``kernels`` asks of a layer before it uses it in training
    can_torch_compile = has_backward = True


class LigerRMSNorm(_Stateless):
    """``forward`` for a module with ``weight`` and eps: ``x / rms(x) * (weight + offset)``,
    rounded as the module's own class rounds."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        form = _form(type(self))
        if form is None:
            return type(self).forward(self, hidden_states)
        offset, casting, eps = form
        return rms_norm(hidden_states, self.weight, eps=getattr(self, eps), offset=offset, casting=casting)


class LigerRotaryPosEmb(_Stateless):
    """``forward(q, k, cos, sin)`` for tables that hold each angle twice, as in ``cat((angles,
    angles), -1)``."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        return rope(q, k, once(cos), once(sin), unsqueeze_dim=unsqueeze_dim, casting="none")


class LigerSwiGLUMLP(_Stateless):
    """``forward`` for a module with gate_proj, up_proj and down_proj: ``down(silu(gate(x)) *
    up(x))``."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(glu(self.gate_proj(x), self.up_proj(x), act="silu"))


class LigerGEGLUMLP(_Stateless):
    """``forward`` for a module with gate_proj, up_proj and down_proj: ``down(gelu(gate(x)) *
    up(x))``, with the tanh approximation of gelu."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(glu(self.gate_proj(x), self.up_proj(x), act="gelu_tanh"))


class LigerTiledSwiGLUMLP(_Stateless):
    """``LigerSwiGLUMLP`` in tiles of the tokens, which the backward pass recomputes."""

    def forward(self, x: Tensor) -> Tensor:
        return in_tiles(LigerSwiGLUMLP.forward, self, x, True)


class LigerTiledGEGLUMLP(_Stateless):
    """``LigerGEGLUMLP`` in tiles of the tokens, which the backward pass recomputes."""

    def forward(self, x: Tensor) -> Tensor:
        return in_tiles(LigerGEGLUMLP.forward, self, x, True)


class LigerLinear(_Stateless):
    """``forward`` for an ``nn.Linear``: PyTorch's, as one product leaves nothing to fuse."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


class LigerForCausalLMLossLayer(_Stateless):
    """``forward`` for Transformers' ``ForCausalLMLoss``: the cross entropy of each token's
    prediction of the next token, without a copy of the logits in fp32."""

    def forward(
        self, logits: Tensor, labels: Tensor | None, vocab_size: int, num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100, shift_labels: Tensor | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(logits.device)
        flat = logits.reshape(-1, vocab_size)
        return cross_entropy(flat, targets, ignore_index=ignore_index, num_items=num_items_in_batch)


def __getattr__(name: str) -> type[nn.Module]:
    # read by name, also by pickle, so that a saved model finds its layouts again
    if (made := layer_or_layout(__name__, name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return made
