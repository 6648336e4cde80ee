"""Import paths of the published package: old module -> (new module, names; all names of the new one if none are listed)."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_HERE = "liger_kernel.transformers."
_NORMS = ("LigerRMSNormFunction", "LigerRMSNorm", *(f"LigerRMSNormFor{m}" for m in ("Gemma", "Gemma2", "Gemma3", "Gemma4", "Olmo2", "Glm4", "Qwen3Next")))

_SWIGLU = ("SwiGLU", "Phi3SwiGLU", "Qwen3MoeSwiGLU", "HunyuanV1SwiGLU", "FalconH1SwiGLU", "BlockSparseTop2")

_TRITON_CACHE = "liger_kernel._triton_cache", ("LigerTritonFileCacheManager", "apply_liger_triton_cache_manager")

PATHS: dict[str, tuple[str, tuple[str, ...]]] = {
    "liger_kernel.ops.backends": ("liger_kernel.utils", ("IMPL_REGISTRY",)),
    "liger_kernel.ops.backends.registry": ("liger_kernel.utils", ("IMPL_REGISTRY",)),
    "liger_kernel.ops.fused_linear_scaled_cross_entropy": ("liger_kernel.ops.linear_logprobs", ("LigerFusedLinearScaledCrossEntropyFunction",)),
    "liger_kernel.ops.fused_moe": ("liger_kernel.ops.moe", ("LigerFusedMoEFunction",)),
    "liger_kernel.ops.fused_neighborhood_attention": ("liger_kernel.ops.neighborhood_attention", ("LigerFusedNeighborhoodAttentionFunction",)),
    "liger_kernel.ops.llama4_rope": ("liger_kernel.ops.rope", ("LigerLlama4RopeFunction",)),
    "liger_kernel.ops.qwen2vl_mrope": ("liger_kernel.ops.rope", ("LigerQwen2VLMRopeFunction",)),
    "liger_kernel.ops.swiglu": ("liger_kernel.ops.glu", ("LigerSiLUMulFunction", "LigerFusedGateUpSiLUMulFunction", "swiglu_forward", "swiglu_backward")),
    "liger_kernel.ops.geglu": ("liger_kernel.ops.glu", ("LigerGELUMulFunction",)),
    _HERE + "auto_model": (_HERE + "auto", ("AutoLigerKernelForCausalLM",)),
    _HERE + "cross_entropy": ("liger_kernel.nn", ("LigerCrossEntropyLoss",)),
    _HERE + "dyt": ("liger_kernel.nn", ("LigerDyT",)),
    _HERE + "experimental": ("liger_kernel.nn", ("LigerEmbedding",)),
    _HERE + "experimental.embedding": ("liger_kernel.nn", ("LigerEmbedding",)),
    _HERE + "fused_add_rms_norm": ("liger_kernel.nn", ("LigerFusedAddRMSNorm",)),
    _HERE + "fused_linear_cross_entropy": ("liger_kernel.nn", ("LigerFusedLinearCrossEntropyLoss",)),
    _HERE + "fused_linear_jsd": ("liger_kernel.nn", ("LigerFusedLinearJSD",)),
    _HERE + "fused_neighborhood_attention": (
        "liger_kernel.nn",
        tuple(f"LigerFusedNeighborhoodAttention{part}" for part in ("", "Layer", "Config")),
    ),
    _HERE + "geglu": ("liger_kernel.nn", ("LigerGEGLUMLP", "LigerGEGLUMLPForGemma4")),
    _HERE + "group_norm": ("liger_kernel.nn", ("LigerGroupNorm",)),
    _HERE + "grpo_loss": ("liger_kernel.ops.grpo_loss", ("triton_grpo_loss",)),
    _HERE + "jsd": ("liger_kernel.nn", ("LigerJSD",)),
    _HERE + "kl_div": ("liger_kernel.nn", ("LigerKLDIVLoss",)),
    _HERE + "layer_norm": ("liger_kernel.nn", ("LigerLayerNorm",)),
    _HERE + "llama4_rope": ("liger_kernel.nn", ("liger_llama4_text_rotary_pos_emb", "liger_llama4_vision_rotary_pos_emb")),
    _HERE + "mlp": ("liger_kernel.nn", ("LigerMLP", "LigerFalconH1MLP")),
    _HERE + "modulated_rms_norm": ("liger_kernel.nn", ("LigerModulatedRMSNorm",)),
    _HERE + "mhc": ("liger_kernel.nn", ("LigerMHC",)),
    _HERE + "multi_token_attention": ("liger_kernel.nn", ("LigerMultiTokenAttention",)),
    _HERE + "monkey_patch": (_HERE + "patch", ()),
    _HERE + "poly_norm": ("liger_kernel.nn", ("LigerPolyNorm",)),
    _HERE + "qwen2vl_mrope": ("liger_kernel.nn", ("liger_multimodal_rotary_pos_emb",)),
    _HERE + "relu_squared": ("liger_kernel.nn", ("LigerReLUSquared",)),
    _HERE + "rms_norm": ("liger_kernel.nn", _NORMS),
    _HERE + "rope": ("liger_kernel.nn", ("liger_rotary_pos_emb", "liger_rotary_pos_emb_vision")),
    _HERE + "softmax": ("liger_kernel.nn", ("LigerSoftmax",)),
    _HERE + "sparsemax": ("liger_kernel.nn", ("LigerSparsemax",)),
    _HERE + "swiglu": ("liger_kernel.nn", ("LigerExperts", *(f"Liger{m}MLP" for m in _SWIGLU))),
    _HERE + "tiled_mlp": ("liger_kernel.nn", ("LigerTiledGEGLUMLP", "LigerTiledSwiGLUMLP")),
    _HERE + "trainer_integration": (_HERE + "patch", ("_apply_liger_kernel",)),
    _HERE + "trainer": (_HERE + "orpo_trainer", ("LigerORPOTrainer", "_FSDPForwardRedirection")),
    _HERE + "trainer.orpo_trainer": (_HERE + "orpo_trainer", ("LigerORPOTrainer", "_FSDPForwardRedirection")),
    _HERE + "tvd": ("liger_kernel.nn", ("LigerTVDLoss",)),
    _HERE + "vocab_parallel_cross_entropy": ("liger_kernel.nn", ("LigerVocabParallelCrossEntropy",)),
    "liger_kernel.triton": _TRITON_CACHE,
    "liger_kernel.triton.monkey_patch": _TRITON_CACHE,
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes a module of ``PATHS`` when it is imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        package = any(path.startswith(f"{fullname}.") for path in PATHS)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=package) if fullname in PATHS else None

    def exec_module(self, module: ModuleType) -> None:
        source, names = PATHS[module.__name__]
        new = vars(importlib.import_module(source))
        module.__doc__ = f"An old path to ``{source}``."
        wanted = names or [n for n in new if not n.startswith("__")]
        vars(module).update({n: new[n] for n in wanted if n in new})
        if not new.keys() >= set(wanted):  # the rest is made when it is asked for
            vars(module)["__getattr__"] = new["__getattr__"]


def install() -> None:
    if not any(type(f).__name__ == _Finder.__name__ and type(f).__module__ == __name__ for f in sys.meta_path):
        sys.meta_path.append(_Finder())
