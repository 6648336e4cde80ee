"""gpt-oss with its experts in MXFP4, as published, to be trained with adapters:
``load_in_mxfp4("openai/gpt-oss-20b")``.

Transformers' own loader reads the checkpoint. Its layer in MXFP4 needs kernels from the hub and
refuses training, and its dequantised experts are four times as large. Here the experts keep
Transformers' class; their two parameters hold the published tensors (``nn/mxfp4_experts.py``).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from liger_kernel.nn.float8 import parametrization
from liger_kernel.nn.mxfp4_experts import LigerMXFP4Experts, store_mxfp4
from liger_kernel.ops.projections import mxfp4
from liger_kernel.transformers.patching.patches import give_methods, methods_of, remove_methods
from liger_kernel.transformers.recognise.experts import DOWN, GATE_UP

METHOD = "liger_mxfp4"
# names in the checkpoint -> names in the model
RENAMED = {f"{name}_blocks": f"parametrizations.{name}.original" for name in (GATE_UP, DOWN)}
RENAMED |= {f"{name}_scales": f"parametrizations.{name}.0.mxfp4_scale" for name in (GATE_UP, DOWN)}


def load_in_mxfp4(name: str, **options: Any) -> nn.Module:
    """``AutoModelForCausalLM.from_pretrained(name, **options)`` for a checkpoint of gpt-oss in
    MXFP4, whose experts stay in MXFP4 and are frozen.

    Everything else is as Transformers loads it, in ``dtype``, which is bfloat16 unless it is given.
    Patch the model, and give it adapters, as any other; PEFT adapts these experts only by the whole
    names of their parameters in ``target_parameters``: ``model.layers.0.mlp.experts.gate_up_proj``.
    ``save_pretrained`` writes the published format, and ``model.dequantize()`` makes the experts
    dense, for example to merge adapters without rounding. Raises ``ValueError`` for another checkpoint,
    and for blocks and scales that are missing or wrong, with their layer.
    """
    if importlib.util.find_spec("transformers.core_model_loading") is None:
        raise ImportError(f"load_in_mxfp4: needs transformers 5, got {transformers.__version__}")
    of_hub = ["cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token"]
    given = {option: options[option] for option in of_hub if option in options}
    config = options.pop("config", None) or transformers.AutoConfig.from_pretrained(name, **given)
    published = getattr(config, "quantization_config", None)
    if not in_mxfp4(config):
        raise ValueError(
            f"load_in_mxfp4: {name} must be a gpt_oss whose quantization_config has quant_method 'mxfp4', got "
            f"{config.model_type} with {published}"
        )
    if options.get("quantization_config") is not None:
        raise ValueError(f"load_in_mxfp4: quantization_config must be left out, got {options['quantization_config']}")
    _register()
    config.quantization_config = {"quant_method": METHOD}
    options = {"dtype": torch.bfloat16, **options, "key_mapping": RENAMED | options.get("key_mapping", {})}
    wants_info = options.pop("output_loading_info", False)
    # tensors of other shapes are named below
    options |= dict(config=config, output_loading_info=True, ignore_mismatched_sizes=True)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(name, **options)
    model, info = loaded
    for key, found, expected in sorted(info["mismatched_keys"]):
        raise ValueError(f"load_in_mxfp4: {_published(key)} must have shape {tuple(expected)}, got {tuple(found)}")
    if missing := sorted(key for key in info["missing_keys"] if ".experts." in key):
        raise ValueError(f"load_in_mxfp4: {name} must have {_published(missing[0])}, got none")
    E, H, I = config.num_local_experts, config.hidden_size, config.intermediate_size
    for layer, m, parameter in _stored(model):
        stored, shape = parametrization(m, parameter), (E, 2 * I, H) if parameter == GATE_UP else (E, H, I)
        mxfp4.check("load_in_mxfp4", f"{layer}.{parameter}", stored.original, stored[0].mxfp4_scale, shape)
    # what ``save_pretrained`` writes is the published format
    model.config.quantization_config = published
    return (model, info) if wants_info else model


def in_mxfp4(config: Any) -> bool:
    """Whether this is the configuration of a checkpoint for ``load_in_mxfp4``."""
    found = getattr(config, "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return config.model_type == "gpt_oss" and method == "mxfp4"


def _published(key: str) -> str:
    """The name in the checkpoint of a name in the model."""
    for there, here in RENAMED.items():
        key = key.replace(here, there)
    return key


def experts_in_mxfp4(model: nn.Module) -> None:
    """Let the two parameters of all experts of a gpt-oss on the meta device hold MXFP4, still on the
    meta device, so that ``load_state_dict(assign=True)`` or a loader may fill them."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    for layer, m in list(model.named_modules()):
        if not isinstance(m, GptOssExperts):
            continue
        for name in (GATE_UP, DOWN):
            E, K, N = m._parameters[name].shape
            if K % mxfp4.BLOCK:
                raise ValueError(f"load_in_mxfp4: {layer}.{name} must have inputs in {mxfp4.BLOCK}s, got {K}")
            empty = functools.partial(torch.empty, dtype=torch.uint8, device="meta")
            blocks, scales = empty(E, N, K // mxfp4.BLOCK, mxfp4.BLOCK // 2), empty(E, N, K // mxfp4.BLOCK)
            store_mxfp4(m, name, blocks, scales, transposed=True, layer=f"{layer}.")
        # else Transformers, to which the view is no loaded parameter, would draw new weights
        m._is_hf_initialized = True


def _stored(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The modules with experts in MXFP4, with their names and those of their parameters."""
    for layer, m in list(model.named_modules()):
        for name in (GATE_UP, DOWN):
            if (made := parametrization(m, name)) and isinstance(made[0], LigerMXFP4Experts):
                yield layer, m, name


class _Config(QuantizationConfigMixin):
    def __init__(self, **_: Any):
        self.quant_method: Any = METHOD


class _Quantizer(HfQuantizer):
    """What Transformers' loader asks about a checkpoint in MXFP4."""

    is_trainable = True

    def is_serializable(self, **_: Any) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        experts_in_mxfp4(model)

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        """Of ``model.dequantize()``: also below PEFT's wrappers, to merge adapters afterwards."""
        for _, m, name in _stored(model):
            w, ours = getattr(m, name).data, methods_of(m)
            # PyTorch takes the property from the class of the module, which a patch puts under its own
            remove_methods(m)
            parametrize.remove_parametrizations(m, name, leave_parametrized=False)
            setattr(m, name, nn.Parameter(w if dtype is None else w.to(dtype), requires_grad=False))
            if ours:
                give_methods(m, ours)
        return model


@functools.cache
def _register() -> None:
    auto.register_quantization_config(METHOD)(_Config)
    auto.register_quantizer(METHOD)(_Quantizer)
