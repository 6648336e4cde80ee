"""How linear layers and experts store their weights: dense, in 4 bits, in FP8, or as checkpoints in packed
integers, NVFP4 and FP8 blocks have them. ``weight_of`` reads a layer at each call, because hooks and
forwards come and go. This file imports no other package: if a package is not imported yet, no module can
be an instance of its classes.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.nn.float8 import LigerFloat8Linear
from liger_kernel.nn.float8_training import DTYPES, LigerFloat8TrainingLinear, trained
from liger_kernel.ops._core.operator import intercepted, is_recorded
from liger_kernel.ops._core.shards import is_sharded
from liger_kernel.ops.projections.adapted import Projection
from liger_kernel.ops.projections.float8 import lacking
from liger_kernel.ops.projections.float8_blocks import (
    Float8Blocks,
    Scales,
    float8_blocks,
    in_float8,
    multiplies,
    scales_of,
)
from liger_kernel.ops.projections.float8_training import RECIPES, Cast, float8_gathered
from liger_kernel.ops.projections.four_bits import four_bits
from liger_kernel.ops.projections.linear import linears
from liger_kernel.ops.projections.packed_weights import (
    PackedWeight,
    awq_columns,
    gptq_columns,
    integer_rows,
    nvfp4_rows,
)
from liger_kernel.ops.projections.weights import Weight, dense
from liger_kernel.transformers.recognise.variant import plain, runs_its_class, unhooked


class Fallback(str):
    """The reason why a module runs as it is."""

    __slots__ = ()


def loaded(module: str, *path: str) -> Any:
    """A class of a package, or None if the package is not imported yet."""
    found = sys.modules.get(module)
    for name in path:
        found = getattr(found, name, None)
    return found


def of_package(cls: type, package: str) -> bool:
    """Whether the forward of ``cls`` comes from ``package``."""
    forward: Any = getattr(cls, "forward", None)
    return isinstance(forward, types.FunctionType) and forward.__globals__.get("__name__", "").startswith(package)


# As PyTorch has it: a patch of somebody else would be passed over by a node that multiplies by
# itself
_FORWARD = nn.Linear.forward


def is_dense(m: Any) -> bool:
    """Whether a call of ``m`` multiplies by an ordinary weight and adds the bias."""
    # A subclass may do anything, so the class itself is asked for, not ``isinstance``
    if type(m) is not nn.Linear or nn.Linear.forward is not _FORWARD or not runs_its_class(m):
        return False
    bias = m.bias
    return plain(m.weight) and (bias is None or plain(bias))


def _is_whole(m: nn.Module, *tensors: Any) -> bool:
    """Whether a call of ``m`` runs its class and no hooks, and those of these tensors that there are
    are plain."""
    return runs_its_class(m) and all(t is None or plain(t) for t in tensors)


def _beside(w: Tensor, dtype: torch.dtype) -> Fallback | None:
    """Why a weight is not multiplied by inputs of this dtype: stock raises, or the base casts by itself."""
    alike = w.dtype == dtype or torch.is_autocast_enabled(w.device.type)
    return None if alike else Fallback(f"a weight of {w.dtype} beside an input of {dtype}")


def dense_weight(m: nn.Module, dtype: torch.dtype) -> Weight | Fallback | None:
    if type(m) is not nn.Linear:
        return None
    if not is_dense(m):
        return Fallback("a base that is sharded, hooked or quantised, or has a forward of its own")
    return _beside(m.weight, dtype) or dense(m.weight)


def _four_bits(m: Any, dtype: torch.dtype) -> Weight | Fallback | None:
    """The weight of a 4-bit layer (NF4 or FP4) of bitsandbytes."""
    # A package that nobody imported has no layers in this model, and importing it would take
    # seconds
    if type(m) is not loaded("bitsandbytes.nn.modules", "Linear4bit"):
        return None
    state = getattr(m.weight, "quant_state", None)
    if (
        not (_is_whole(m, m.bias) and of_package(type(m), "bitsandbytes."))
        or state is None
        or getattr(state, "packing_format_for_cpu", False)
    ):
        return Fallback("a hooked 4-bit base, one without its state, or packed for a CPU")
    # under autocast the product is in autocast's dtype, even after the cast of its input
    if m.compute_dtype not in (None, dtype) and not torch.is_autocast_enabled(m.weight.device.type):
        return Fallback(f"a 4-bit base that computes in {m.compute_dtype} beside {dtype}")
    if hasattr(m.weight, "ds_id"):
        return Fallback("a sharded base")
    return four_bits(m.weight, state)


def _float8(m: Any, dtype: torch.dtype) -> Weight | Fallback | None:
    """The weight of our frozen FP8 layers."""
    if type(m) is not LigerFloat8Linear:
        return None
    if not _is_whole(m, m.float8, m.float8_scale, m.bias):
        return Fallback("a sharded or hooked base in FP8")
    # without gradients the copy for the backward need not be made
    return m.stored(backward=torch.is_grad_enabled())


def in_blocks(m: Any) -> bool:
    """Whether ``m`` is a linear layer of a checkpoint in FP8 as Transformers loads it."""
    return type(m) is loaded(*_BLOCKS, "FP8Linear")


def experts_in_blocks(m: Any) -> bool:
    """Whether ``m`` holds experts of such a checkpoint."""
    return isinstance(m, loaded(*_BLOCKS, "FP8Experts") or ())


_BLOCKS = ("transformers.integrations.finegrained_fp8",)


def blocks_of(m: Any, name: str) -> Float8Blocks:
    """The parameter ``name`` of a layer or of experts of such a checkpoint. ``ValueError`` if its
    scales cannot be right."""
    w, scale = m._parameters[name].detach(), m._parameters[f"{name}_scale_inv"].detach()
    try:
        return float8_blocks(w, scale, m.block_size and (m.block_size[0], m.block_size[1]))
    except ValueError as error:
        raise ValueError(f"{type(m).__name__}.{name}_scale_inv: {error}") from None


# of each layer, the scales for products in FP8, and what they were made of
_SCALES: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Scales]] = weakref.WeakKeyDictionary()
# how layers multiply, by LIGER_FP8_BLOCKS: whether in FP8 in the forward, and in the backward
_PRODUCTS = {"fp8": (True, True), "forward": (True, False), "decoded": (False, False)}


def _float8_blocks(m: Any, dtype: torch.dtype) -> Weight | Fallback | None:
    if not in_blocks(m):
        return None
    w, scale = m.weight, m.weight_scale_inv
    if not (w.itemsize == 1 and _is_whole(m, w, scale, m.bias) and of_package(type(m), "transformers.")):
        return Fallback("a base in FP8 that is sharded, hooked or made dense")
    how = os.environ.get("LIGER_FP8_BLOCKS", "fp8")
    if how not in _PRODUCTS:
        raise ValueError(f"LIGER_FP8_BLOCKS must be one of {', '.join(_PRODUCTS)}, got {how!r}")
    forth, back = _PRODUCTS[how]
    weight = blocks_of(m, "weight")
    # a fixed scale of the input, as any other dtype, is for the decoded weight
    if not (forth and m.activation_scale is None and dtype == torch.bfloat16 and multiplies(w.device)):
        return weight
    seen = scale.data_ptr(), scale._version, scale.device
    kept = _SCALES.get(m)
    if (kept is None or kept[0] != seen) and not is_recorded(scale):
        kept = _SCALES[m] = seen, scales_of(weight)
    return in_float8(weight, kept[1] if kept is not None and kept[0] == seen else None, back)


def _float8_trained(m: Any, dtype: torch.dtype) -> Weight | Fallback | None:
    """The weight of our layers trained in FP8 and of torchao's."""
    recipe = None
    if type(m) is LigerFloat8TrainingLinear:
        recipe = m.recipe
    elif type(m) is loaded("torchao.float8.float8_linear", "Float8Linear"):
        recipe = _recipe_of(m.config)
        if recipe is None or (m.config.emulate and m.weight.is_cuda) or not of_package(type(m), "torchao."):
            return Fallback("a layer of torchao in FP8 by a config of its own")
        if m.in_features % 16 or m.out_features % 16 or lacking(m.weight.device):
            return Fallback("a layer of torchao in FP8 of a shape, or on a device, that cannot multiply so")
    if recipe is None:
        return None
    if dtype not in DTYPES:
        return Fallback(f"a layer in FP8 beside an input of {dtype}")
    w = m.weight
    # inside FSDP2 the weight may arrive as the FP8 values that were gathered
    gathered = type(w) is loaded("torchao.float8.float8_training_tensor", "Float8TrainingTensor")
    if not _is_whole(m, None if gathered else w, m.bias):
        return Fallback("a layer in FP8 that is sharded or hooked")
    return _beside(w, dtype) or (float8_gathered(w, _gathered_cast) if gathered else trained(w, recipe))


def _gathered_cast(w: Any) -> Cast:
    """What FSDP2 has gathered of a weight of torchao (``enable_fsdp_float8_all_gather``): values
    that were multiplied by a scale."""
    return Cast(w._data, w._scale.reciprocal().reshape(()))


def gathered_in_fp8(m: Any) -> bool:
    """Whether FSDP2 will gather the weight of a layer of torchao in FP8."""
    w = m._parameters.get("weight")
    waiting = loaded("torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor")
    return (
        waiting is not None
        and is_sharded(w)
        and type(w.to_local()) is waiting
        and sum(p.is_shard() for p in w.placements) == 1
    )


# options of torchao's config that do not change the result
_SAME_RESULT = dict.fromkeys(
    ("emulate", "force_recompute_fp8_weight_in_bwd", "pad_inner_dim", "enable_fsdp_float8_all_gather"), False
)


@functools.lru_cache(16)
def _recipe_of(config: Any) -> str | None:
    """The recipe that a torchao config describes, apart from options that do not change the
    result; None if it is none of ours."""
    of = type(config).from_recipe_name
    same = lambda recipe: dataclasses.replace(config, **_SAME_RESULT) == of(recipe)
    return next((recipe for recipe in RECIPES if not RECIPES[recipe].blocks and same(recipe)), None)


# -- checkpoints in packed integers or NVFP4, as Transformers loads them

# compressed-tensors keeps PyTorch's class, and each layer has a forward of its own, which needs the
# dense weight: the first call of the model makes all of them dense, by a hook. ``keep_packed`` takes
# this hook off and gives the layers ``decoding_forward``. GPT-QModel has a class for each kernel;
# those that keep GPTQ's and AWQ's published order are read here.
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
        try:
            why = spread or compressed_weight(m)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if isinstance(why, Fallback):
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
    if not (_is_whole(m, *parts) and of_package(type(m), "gptqmodel.")):
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


def packed_tensor(m: Any) -> Tensor | None:
    """What a packed layer stores instead of a weight in floating point."""
    return m._parameters.get("weight_packed") if is_compressed(m) else m._buffers.get("qweight")


STORAGES: list[Callable[[nn.Module, torch.dtype], Weight | Fallback | None]] = [
    compressed,  # first, because these are of PyTorch's class
    dense_weight,
    _float8_trained,
    _four_bits,
    _float8,
    _float8_blocks,
    packed_by_columns,
]


def weight_of(m: nn.Module, dtype: torch.dtype) -> Weight | Fallback:
    """What ``m`` multiplies an input of this dtype by, or why it has to run itself."""
    # None: not of this storage. A reason: of this storage, but not to be multiplied now
    for read in STORAGES:
        if (found := read(m, dtype)) is not None:
            return found
    return Fallback(f"a base of class {type(m).__name__}")


# -- are they right?


def check_stored(model: nn.Module) -> None:
    """``ValueError`` with the name of a layer of a checkpoint whose scales, or other parts, cannot be right."""
    for name, m in model.named_modules():
        try:
            _check_blocks(m)
            _check_packed(m)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def _check_blocks(m: nn.Module) -> None:
    of = m._parameters
    parts = [part for part in of if f"{part}_scale_inv" in of]
    if not parts or not (in_blocks(m) or experts_in_blocks(m)):
        return
    for part in parts:
        w, scale = of[part], of[f"{part}_scale_inv"]
        if not (plain(w) and plain(scale) and w.is_floating_point() and w.itemsize == 1):
            continue  # spread over ranks, or not in FP8
        found = blocks_of(m, part).scale
        if not found.is_meta and (wrong := int((~(found.isfinite() & (found >= 0))).sum())):
            raise ValueError(f"{part}_scale_inv must be finite and at least 0, got {wrong} other values")


def _check_packed(m: nn.Module) -> None:
    found = compressed_weight(m) if is_compressed(m) else packed_by_columns(m, torch.float32)
    if not isinstance(found, PackedWeight) or found.scale.is_meta:
        return
    if wrong := int((~found.scale.float().isfinite()).sum()):
        raise ValueError(f"scales must be finite, got {wrong} other values")
    stated = m._parameters.get("weight_shape")
    if stated is not None and tuple(stated.tolist()) != found.shape:
        raise ValueError(f"weight_shape must be {found.shape}, got {tuple(stated.tolist())}")
    index = m._buffers.get("g_idx")
    if index is not None and not 0 <= int(index.min()) <= int(index.max()) < found.scale.shape[0]:
        raise ValueError(f"g_idx must name one of {found.scale.shape[0]} groups")
