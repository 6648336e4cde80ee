"""The peak of memory that a run is expected to have, from shapes alone, before its first step.

    peak = weights + optimizer + max(activations + head, gradients)

Activations are largest when the forward ends; then the head has its buffers, and few gradients are there yet. A layer of a decoder keeps, for each token and
with H, A, K and I the widths of the hidden state, of queries, of keys, and of the gated MLP:

    patched            inputs of its norms, H each; q, k, v and attention's output, 2 A + 2 K; gate and up, 2 I
    rematerialise=off  and outputs of its norms, H each;   rematerialise=mlp   no gate and up
    stock              of each norm an fp32 copy, the normalised and the scaled hidden state; q, k, v, the output; four tensors of width I
    checkpointing      its input, H, and with keep_attention A; while its own backward runs, all of the above once
    offloading         nothing, but for the layer that runs and the one that the backward reads next

Beside peaks that were measured on one H200 (tests/train/test_summary.py) this is at most 3 % off, and up to 9 % too low under FSDP2. What is not counted:
caches of libraries, fragmentation, buffers of collectives. On a CPU the process holds up to a fifth more than this says: its matrix products pack their
operands, and freed memory goes back late.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from liger_kernel import memory
from liger_kernel.ops.losses.chunks import auto_chunk_rows
from liger_kernel.parallel import layers_of


@dataclass(frozen=True)
class Form:
    """How a model is trained: ``tokens`` of a forward pass on a rank, bytes of a value of an activation and of the hidden state between layers."""

    tokens: int
    activation: int
    residual: int
    patched: bool = True
    fused_head: bool = True
    level: str = "cheap"  # of ``liger_kernel.memory``
    tiles: int = 1  # of an MLP
    checkpointing: str = "none"
    keeps_attention: bool = False
    offloading: bool = False
    states: float = 2.0  # of the optimizer, in values of a trained parameter's size
    in_backward: bool = False  # one gradient at a time, or those of a layer that is reduced
    on_cpu: bool = False  # of the GPU, the optimizer needs nothing, and of weights and gradients there is what is gathered
    shards: int = 1  # into how many parts weights, gradients and states are split
    split_weights: bool = True  # else gradients and states alone, as ZeRO 2 has it
    buckets: bool = False  # gradients are copied into buckets, as DDP does
    casts: bool = False  # autocast keeps weights of linear layers in 16 bits, too
    gpu: bool = True


@dataclass(frozen=True)
class Expected:
    """Bytes of one rank. ``activations`` and ``head`` are None where the form of the layers is not known."""

    weights: float
    gradients: float
    optimizer: float
    activations: float | None
    head: float | None

    @property
    def peak(self) -> float | None:
        if self.activations is None or self.head is None:
            return None
        return self.weights + self.optimizer + max(self.activations + self.head, self.gradients)

    def __str__(self) -> str:
        return f"weights {gb(self.weights)}, {self.added}"

    @property
    def added(self) -> str:
        """What training needs beside weights, part by part."""
        parts = {"gradients": self.gradients, "optimizer state": self.optimizer}
        if self.activations is not None and self.head is not None:
            parts |= {"activations": self.activations, "head and loss": self.head}
        return ", ".join(f"{name} {gb(size)}" for name, size in parts.items())


def gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 5e7 else f"{size / 1e6:.1f} MB" if size else "0"


def expected(model: Any, form: Form) -> Expected:
    """Of a model that is there, with its adapters, before it is sharded; or of one on the meta device."""
    weights = float(sum(_bytes(t) for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values()))
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = sum(map(_bytes, trained)) / form.shards
    optimizer = 0.0 if form.on_cpu else form.states * gradients
    if form.casts:
        linear = (m.weight for m in model.modules() if isinstance(m, nn.Linear))
        weights += sum(2 * w.numel() for w in {id(w): w for w in linear}.values() if w.requires_grad and w.element_size() > 2)
    if form.buckets:
        weights += gradients
    layers = layers_of(model)
    whole = sum(_bytes(p) for p in model.parameters()) - sum(_bytes(p) for layer in layers for p in layer.parameters())
    if form.in_backward or form.on_cpu:
        gradients = _largest_gradient(trained, layers if form.shards > 1 or form.on_cpu else [])
    if (form.shards > 1 or form.on_cpu) and form.split_weights:
        # what is gathered for the forward: all outside of the layers, and a layer while the next one is fetched
        weights = (0.0 if form.on_cpu else weights / form.shards) + whole + (2 * sum(map(_bytes, layers[0].parameters())) if layers else 0)
    each = _of_layer(model, layers, form)
    activations = None if each is None else _activations(model, layers, form, each)
    return Expected(weights, gradients, optimizer, activations, _head(model, form))


def _largest_gradient(trained: list[nn.Parameter], layers: list[nn.Module]) -> float:
    """Bytes of the largest gradient; with ``layers``, of the largest group of FSDP2, whose gradients are reduced together."""
    if not layers:
        return max(map(_bytes, trained), default=0)
    groups = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
    inside = {id(p) for group in groups for p in group}
    return max(sum(map(_bytes, group)) for group in (*groups, [p for p in trained if id(p) not in inside]))


def _bytes(t: Any) -> int:
    return t.numel() * t.element_size()


def _width(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _norms(layer: nn.Module, hidden: int) -> tuple[int, bool]:
    """Norms of the hidden state, and whether there are norms of heads."""
    sizes = [p.numel() for m in layer.modules() if "Norm" in type(m).__name__ for p in m.parameters(recurse=False) if p.ndim == 1]
    return sizes.count(hidden), any(size != hidden for size in sizes)


def _of_layer(model: Any, layers: Iterable[nn.Module], form: Form) -> tuple[float, float] | None:
    """Bytes that a layer keeps for a token: of its inner, and of its input. None for layers of another form than attention and one MLP."""
    config = model.config.get_text_config()
    names = ("hidden_size", "intermediate_size", "num_attention_heads")
    layers = list(layers)
    if not layers or not all(isinstance(getattr(config, name, None), int) for name in names):
        return None
    inner = {name.rpartition(".")[2] for name, _ in layers[0].named_modules()}
    if not {"q_proj", "gate_proj"} <= inner and not {"qkv_proj", "gate_up_proj"} <= inner:
        return None
    if any(p.ndim > 2 for layer in layers for p in layer.parameters()) or any("expert" in name for name, _ in layers[0].named_modules()):
        return None
    H, I, width = config.hidden_size, config.intermediate_size, _width(config)
    A, K = config.num_attention_heads * width, (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * width
    norms, of_heads = _norms(layers[0], H)
    b, r = form.activation, form.residual
    attention = (2 * A + 2 * K + (A + K) * of_heads) * b
    if not form.patched:
        return norms * H * (4 + 2 * b) + attention + 4 * I * b, H * r
    small = form.tokens * H * b <= memory.SMALL
    outputs = norms * H * b if form.level == "off" or (form.level == "cheap" and small) else 0
    return norms * H * r + outputs + attention + (0 if form.level == "mlp" or form.tiles > 1 else 2 * I * b), H * r


def _activations(model: Any, layers: list[nn.Module], form: Form, each: tuple[float, float]) -> float:
    config = model.config.get_text_config()
    inside, inputs = each
    last = form.tokens * config.hidden_size * (form.residual + form.activation)  # the last norm's input and output
    there = min(len(layers), 2) if form.offloading else len(layers)
    wide = 3 / form.tiles if form.tiles > 1 else 2 if form.level == "mlp" and form.checkpointing == "none" else 0
    again = wide * config.intermediate_size * form.activation if form.patched else 0  # while a layer's own backward runs
    if form.checkpointing == "none":
        return form.tokens * (there * inside + again) + last
    results = 0
    if form.checkpointing == "full" and form.keeps_attention:
        inputs += config.num_attention_heads * (_width(config) * form.activation + 4)  # and the log-sum-exp in fp32
    if form.checkpointing == "selective":  # results of matrix products and of attention stay
        width, b = _width(config), form.activation
        heads, kv = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        results = ((2 * heads + 2 * kv) * width + 2 * config.hidden_size + 2 * config.intermediate_size) * b
    return form.tokens * (there * inputs + len(layers) * results + inside + again) + last


def _head(model: Any, form: Form) -> float | None:
    """Bytes of head and loss beside the head's weight: logits and their gradient, or, fused, a chunk of them and the gradients of weight and input."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None:
        return None
    (V, H), M, b = weight.shape, form.tokens, form.activation
    if not form.fused_head:
        return M * V * (12 if b < 4 or not form.patched else 8)  # in fp32: logits or their log-probabilities, and the gradient; in 16 bits once more
    rows = auto_chunk_rows(M, V, H, b, form.gpu, frozen=not weight.requires_grad)
    return rows * V * b + M * H * b + (_bytes(weight) + V * H * b * form.casts if weight.requires_grad else 0)
