"""Linear layers of checkpoints in packed integers or NVFP4, as Transformers loads them.

compressed-tensors keeps PyTorch's class, and each layer has a forward of its own, which needs the dense
weight: the first call of the model makes all of them dense, by a hook. ``keep_packed`` takes this hook
off and gives the layers ``decoding_forward``. GPT-QModel has a class for each kernel; those that keep
GPTQ's and AWQ's published order are read here.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.ops._core.operator import intercepted
from liger_kernel.ops.projections.adapted import Projection
from liger_kernel.ops.projections.linear import linears
from liger_kernel.ops.projections.packed_weights import (
    PackedWeight,
    awq_columns,
    gptq_columns,
    integer_rows,
    nvfp4_rows,
)
from liger_kernel.transformers.recognise.variant import Fallback, loaded, of_package, plain, runs_its_class, unhooked

DENSE_FORWARD = "_liger_dense_forward"  # where a layer stores the forward that needs the dense weight

_HANDLE, _HOOK = "ct_decompress_hook", "_liger_decompress_hook"  # compressed-tensors' handle; where we keep its hook


def is_compressed(m: Any) -> bool:
    """Whether ``m`` is a layer of compressed-tensors that is not decompressed yet."""
    return "weight_packed" in m._parameters and "quantization_scheme" in m.__dict__


def compressed(m: Any, dtype: torch.dtype) -> PackedWeight | Fallback | None:
    """The weight of a layer of compressed-tensors."""
    if not is_compressed(m):
        return None
    if getattr(m.__dict__.get("forward"), "__func__", None) is not decoding_forward:
        return Fallback("a base that compressed-tensors makes dense in the first call of the model")
    if not unhooked(m):
        return Fallback("a hooked base of compressed-tensors")
    if m.__dict__["weight"].numel():  # PEFT has asked: from now on it holds no memory that FSDP frees
        m.__dict__["weight"] = m.weight_packed.new_empty(0)
    return compressed_weight(m)


def compressed_weight(m: Any) -> PackedWeight | Fallback:
    """The weight of such a layer, or why it cannot be decoded. ``ValueError`` for shapes and dtypes
    that are not those of its scheme."""
    held, form = m._parameters, m.quantization_scheme
    how, stored = form.weights, getattr(form.format, "value", form.format)
    parts = [held.get(name) for name in ("weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale")]
    if type(m) is not nn.Linear or not all(plain(t) for t in (*parts, m.bias) if t is not None):
        return Fallback(f"a {type(m).__name__} of compressed-tensors that is no Linear, sharded or offloaded")
    if form.output_activations is not None or "weight_g_idx" in held:
        return Fallback("a base of compressed-tensors whose outputs are rounded, or whose columns are reordered")
    packed, scale, zero, divisor = (t if t is None else t.detach() for t in parts)
    if packed is None or scale is None:
        raise ValueError("weight_packed or weight_scale is missing")
    if stored == "nvfp4-pack-quantized" and divisor is not None and zero is None:
        return nvfp4_rows(packed, scale, divisor)
    if stored != "pack-quantized" or how.num_bits not in (4, 8):
        return Fallback(f"a base of compressed-tensors stored as {stored} in {how.num_bits} bits")
    shape = m.out_features, m.in_features
    if how.symmetric == (zero is not None):
        raise ValueError(f"weight_zero_point is {'missing' if zero is None else 'there, and the scheme is symmetric'}")
    # one scale for each row has no group; one for all is each row's
    rows = scale.expand(shape[0], 1).contiguous() if scale.numel() == 1 and zero is None else scale
    group = how.group_size if (how.group_size or 0) > 0 else shape[1]
    return integer_rows(packed, rows, zero, shape, group, how.num_bits)


def decoding_forward(self: Any, x: Tensor) -> Tensor:
    """x W^T of a packed layer, where no adapter makes it part of a node, such as in generation."""
    if not is_compressed(self):  # compressed-tensors made it dense meanwhile, for example while it saved it
        return self.__dict__[DENSE_FORWARD](x)
    weight = compressed_weight(self)
    assert isinstance(weight, PackedWeight)  # or the layer would not have this forward
    return linears(x, [Projection(weight, self.bias)])[0]


def keep_packed(model: nn.Module) -> str | None:
    """Let the layers of compressed-tensors in ``model`` decode themselves in each call. Returns why
    not: if we cannot decode one, all stay as they are, because compressed-tensors makes all dense at
    once."""
    layers = [(name, m) for name, m in model.named_modules() if is_compressed(m)]
    for name, m in layers:
        # accelerate's hook, around the forward of a layer, moves its input to another device
        spread = Fallback("a layer of compressed-tensors in a hook of accelerate") if "_hf_hook" in m.__dict__ else None
        if isinstance(why := spread or _read(name, m), Fallback):
            return f"{name}: {why}. So compressed-tensors makes all layers dense in the first call"
    for _, m in layers:
        own: dict[str, Any] = m.__dict__
        own.setdefault(DENSE_FORWARD, own.get("forward", m.forward))
        own["forward"] = types.MethodType(decoding_forward, m)
        own["weight"] = m.weight_packed  # of which PEFT asks the device, and that it is there
    for m in model.modules() if layers else ():
        if (handle := m.__dict__.get(_HANDLE)) and handle.id in m._forward_pre_hooks:
            m.__dict__[_HOOK] = m._forward_pre_hooks.pop(handle.id)
    return None


def give_packed_back(model: nn.Module) -> None:
    """Undo ``keep_packed``."""
    for m in model.modules():
        own: dict[str, Any] = m.__dict__
        if DENSE_FORWARD in own:
            own["forward"] = own.pop(DENSE_FORWARD)
            own.pop("weight", None)
        if _HOOK in own:
            m._forward_pre_hooks[own[_HANDLE].id] = own.pop(_HOOK)


# classes of GPT-QModel that keep the published order, by Python module
_QLINEAR = "gptqmodel.nn_modules.qlinear."
_GPTQ = (("torch", "TorchLinear"), ("tritonv2", "TritonV2Linear"))
_AWQ = (("gemm_awq", "AwqGEMMLinear"), ("gemm_awq_triton", "AwqGEMMTritonLinear"), ("torch_awq", "AwqTorchLinear"))


def packed_by_columns(m: Any, dtype: torch.dtype) -> PackedWeight | Fallback | None:
    """The weight of a layer of GPT-QModel."""
    held = m._buffers
    if "qweight" not in held or not type(m).__module__.startswith(_QLINEAR):
        return None
    is_one_of = lambda names: any(type(m) is loaded(_QLINEAR + module, name) for module, name in names)
    gptq = is_one_of(_GPTQ)
    if not (gptq or is_one_of(_AWQ)):
        return Fallback(f"a {type(m).__name__}, whose order of values is its kernel's")
    parts = [held.get(name) for name in ("qweight", "qzeros", "scales", "g_idx", "bias")]
    if not (runs_its_class(m) and of_package(type(m), "gptqmodel.") and all(plain(t) for t in parts if t is not None)):
        return Fallback(f"a {type(m).__name__} that is sharded or hooked")
    if getattr(m, "adapter", None) is not None or getattr(m, "planar", False):
        return Fallback(f"a {type(m).__name__} with an adapter of its own, or with bits in planes")
    if getattr(m, "online_full_had", False) or getattr(m, "online_partial_had", False):
        return Fallback(f"a {type(m).__name__} that rotates its input")
    if m.bits not in ((2, 4, 8) if gptq else (4,)):
        return Fallback(f"a {type(m).__name__} of {m.bits} bits")
    words, zeros, scale, index, _ = parts
    if words is None or zeros is None or scale is None:
        raise ValueError(f"{type(m).__name__}: qweight, qzeros or scales are missing")
    shape, group = (m.out_features, m.in_features), m.group_size if m.group_size > 0 else m.in_features
    if not gptq:
        return awq_columns(words, zeros, scale, shape, group)
    index = None if index is None or _in_order(index, group) else index
    return gptq_columns(words, zeros, scale, index, shape, group, m.bits, m.qzero_format())


def _in_order(index: Any, group: int) -> bool:
    """Whether columns are in the order of their groups. The host waits for the answer once for each
    layer."""
    if index.is_meta or intercepted():
        return False
    if (found := getattr(index, "_liger_in_order", None)) is None:
        expected = torch.arange(index.numel(), device=index.device) // group
        index._liger_in_order = found = bool((index == expected).all())
    return found


def _read(name: str, m: nn.Module) -> PackedWeight | Fallback | None:
    """The weight of a packed layer. ``ValueError`` with its name."""
    try:
        return compressed_weight(m) if is_compressed(m) else packed_by_columns(m, torch.float32)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def check_packed(model: nn.Module) -> None:
    """``ValueError`` with the name of a packed layer whose parts cannot be right."""
    for name, m in model.named_modules():
        found = _read(name, m)
        if not isinstance(found, PackedWeight) or found.scale.is_meta:
            continue
        if wrong := int((~found.scale.float().isfinite()).sum()):
            raise ValueError(f"{name}: scales must be finite, got {wrong} other values")
        stated = m._parameters.get("weight_shape")
        if stated is not None and tuple(stated.tolist()) != found.shape:
            raise ValueError(f"{name}: weight_shape must be {found.shape}, got {tuple(stated.tolist())}")
        index = m._buffers.get("g_idx")
        if index is not None and not 0 <= int(index.min()) <= int(index.max()) < found.scale.shape[0]:
            raise ValueError(f"{name}: g_idx must name one of {found.scale.shape[0]} groups")


def packed_tensor(m: Any) -> Tensor | None:
    """What a packed layer stores instead of a weight in floating point."""
    return m._parameters.get("weight_packed") if is_compressed(m) else m._buffers.get("qweight")
