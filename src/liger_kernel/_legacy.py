"""Import paths of the published package, and paths that modules had before they moved.

A path of ``ALIASES`` is the module that it names: one object, so that what somebody replaces there is replaced. A path of ``PATHS`` offers some names of a
module of ours. What it lacks is looked up in ``liger_kernel.nn`` and ``liger_kernel.ops``: published modules import what they use by name, and so do users.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# below ``liger_kernel.ops``: room -> files that lay beside the rooms
_ROOMS = {
    "activations": "glu relu_squared",
    "attention": "multi_token_attention neighborhood_attention softmax sparsemax",
    "losses": "cross_entropy grpo_loss linear_cross_entropy linear_logprobs linear_loss",
    "losses.divergence": "fused_ce_tvd jsd kl_div linear_divergence logit_divergence tvd",
    "norms": "dyt fused_add_rms_norm group_norm layer_norm modulated_rms_norm poly_norm rms_norm",
    "projections": "mlp moe tiled_mlp",
    "published": "fused_linear_cross_entropy fused_linear_jsd fused_linear_kl_div fused_linear_scaled_cross_entropy utils",
    "residual": "attn_res mhc",
    "rotary": "qk_norm_rope rope",
}

# below ``liger_kernel.ops``: path -> file of another name
_RENAMED = {
    "_config": "_core.config",
    "_configure": "published.configure",
    "_distillation": "losses.divergence.distillation",
    "_divergence": "losses.divergence.by_element",
    "_grouped_mm": "projections.grouped_mm",
    "_impl": "_core.impl",
    "_linear": "losses.chunks",
    "_op": "_core.operator",
    "_reduce": "_core.reduce",
    "_shards": "_core.shards",
    "_tl": "_core.tl",
    "backends": "_core.impl",
    "backends.registry": "_core.impl",
    "configure": "published.configure",
    "embedding": "token_embedding",
    "experimental.embedding": "token_embedding",
    "fused_moe": "projections.moe",
    "fused_neighborhood_attention": "attention.neighborhood_attention",
    "geglu": "activations.glu",
    "llama4_rope": "rotary.rope",
    "qwen2vl_mrope": "rotary.rope",
    "swiglu": "activations.glu",
    "vocab_parallel_cross_entropy": "losses.vocab_parallel.cross_entropy",
    "vocab_parallel_linear_cross_entropy": "losses.vocab_parallel.linear_cross_entropy",
}

_OPS = "liger_kernel.ops."
ALIASES = {
    **{_OPS + name: f"{_OPS}{room}.{name}" for room, names in _ROOMS.items() for name in names.split()},
    **{_OPS + old: _OPS + new for old, new in _RENAMED.items()},
    **{f"liger_kernel.backends.{part}": "liger_kernel.backends" for part in ("capability", "dispatch", "registry")},
}

_HERE = "liger_kernel.transformers."
_NORM_FAMILIES = ("Gemma", "Gemma2", "Gemma3", "Gemma4", "Olmo2", "Glm4", "Qwen3Next", "MuseGlimmer", "MuseGlimmerTextCentered")
_NORMS = ("LigerRMSNormFunction", "LigerRMSNorm", *(f"LigerRMSNormFor{m}" for m in _NORM_FAMILIES))

_SWIGLU = ("SwiGLU", "Phi3SwiGLU", "Qwen3MoeSwiGLU", "HunyuanV1SwiGLU", "FalconH1SwiGLU", "BlockSparseTop2")

_TRITON_CACHE = "liger_kernel._triton_cache", ("LigerTritonFileCacheManager", "apply_liger_triton_cache_manager")

PATHS: dict[str, tuple[str, tuple[str, ...]]] = {
    _HERE + "auto_model": (_HERE + "auto", ("AutoLigerKernelForCausalLM",)),
    _HERE + "cross_entropy": ("liger_kernel.nn", ("LigerCrossEntropyLoss",)),
    _HERE + "dyt": ("liger_kernel.nn", ("LigerDyT",)),
    _HERE + "experimental": ("liger_kernel.nn", ("LigerEmbedding",)),
    _HERE + "experimental.embedding": ("liger_kernel.nn", ("LigerEmbedding",)),
    _HERE + "fused_add_rms_norm": ("liger_kernel.nn", ("LigerFusedAddRMSNorm",)),
    _HERE + "fused_ce_tvd": ("liger_kernel.nn", ("LigerFusedCETVDLoss",)),
    _HERE + "fused_linear_cross_entropy": ("liger_kernel.nn", ("LigerFusedLinearCrossEntropyLoss",)),
    _HERE + "fused_linear_jsd": ("liger_kernel.nn", ("LigerFusedLinearJSD",)),
    _HERE + "fused_linear_kl_div": ("liger_kernel.nn", ("LigerFusedLinearKLDivLoss",)),
    _HERE + "fused_neighborhood_attention": (
        "liger_kernel.nn",
        tuple(f"LigerFusedNeighborhoodAttention{part}" for part in ("", "Layer", "Config")),
    ),
    _HERE + "geglu": ("liger_kernel.nn", ("LigerGEGLUMLP", "LigerGEGLUMLPForGemma4")),
    _HERE + "group_norm": ("liger_kernel.nn", ("LigerGroupNorm",)),
    _HERE + "grpo_loss": ("liger_kernel.ops.losses.grpo_loss", ("triton_grpo_loss", "_reduce_grpo_loss")),
    _HERE + "jsd": ("liger_kernel.nn", ("LigerJSD", "LigerJSDFunction")),
    _HERE + "kl_div": ("liger_kernel.nn", ("LigerKLDIVLoss",)),
    _HERE + "layer_norm": ("liger_kernel.nn", ("LigerLayerNorm",)),
    _HERE + "mlp": ("liger_kernel.nn", ("LigerMLP", "LigerFalconH1MLP")),
    _HERE + "modulated_rms_norm": ("liger_kernel.nn", ("LigerModulatedRMSNorm",)),
    _HERE + "mhc": ("liger_kernel.nn", ("LigerMHC",)),
    _HERE + "multi_token_attention": ("liger_kernel.nn", ("LigerMultiTokenAttention",)),
    _HERE + "monkey_patch": (_HERE + "patch", ()),
    _HERE + "poly_norm": ("liger_kernel.nn", ("LigerPolyNorm",)),
    _HERE + "qwen2vl_mrope": ("liger_kernel.nn", ("liger_multimodal_rotary_pos_emb",)),
    _HERE + "relu_squared": ("liger_kernel.nn", ("LigerReLUSquared",)),
    _HERE + "rms_norm": ("liger_kernel.nn", _NORMS),
    _HERE + "rope": ("liger_kernel.nn", tuple(f"liger_rotary_pos_emb{of}" for of in ("", "_vision", "_gpt_oss"))),
    _HERE + "softmax": ("liger_kernel.nn", ("LigerSoftmax",)),
    _HERE + "sparsemax": ("liger_kernel.nn", ("LigerSparsemax",)),
    _HERE + "swiglu": ("liger_kernel.nn", ("LigerExperts", "LigerSwiGLUMLPForMuseGlimmer", *(f"Liger{m}MLP" for m in _SWIGLU))),
    _HERE + "tiled_mlp": ("liger_kernel.nn", ("LigerTiledGEGLUMLP", "LigerTiledSwiGLUMLP")),
    _HERE + "trainer_integration": (_HERE + "patch", ("_apply_liger_kernel",)),
    _HERE + "trainer": (_HERE + "orpo_trainer", ("LigerORPOTrainer", "_FSDPForwardRedirection")),
    _HERE + "trainer.orpo_trainer": (_HERE + "orpo_trainer", ("LigerORPOTrainer", "_FSDPForwardRedirection")),
    _HERE + "tvd": ("liger_kernel.nn", ("LigerTVDLoss",)),
    _HERE + "vocab_parallel_cross_entropy": ("liger_kernel.nn", ("LigerVocabParallelCrossEntropy",)),
    "liger_kernel.triton": _TRITON_CACHE,
    "liger_kernel.triton.monkey_patch": _TRITON_CACHE,
}

_MODELS = _HERE + "model."
_CAUSAL = """
    deepseek_v2=DeepseekV2 deepseek_v3=DeepseekV3 deepseek_v4=DeepseekV4 exaone4=Exaone4 falcon_h1=FalconH1 gemma=Gemma gemma2=Gemma2 glm4=Glm4
    gpt_oss=GptOss hunyuan_v1=HunYuanDenseV1 llama=Llama llama4=Llama4 ministral=Ministral mistral=Mistral mixtral=Mixtral mllama=Mllama nemotron=Nemotron
    olmo2=Olmo2 olmo3=Olmo3 phi3=Phi3 qwen2=Qwen2 qwen3=Qwen3 qwen3_5=Qwen3_5 qwen3_5_moe=Qwen3_5Moe qwen3_moe=Qwen3Moe qwen3_next=Qwen3Next smollm3=SmolLM3
"""
_CONDITIONAL = """
    glm4v=Glm4v glm4v_moe=Glm4vMoe internvl=InternVL llava=Llava muse_glimmer=MuseGlimmer paligemma=PaliGemma qwen2_vl=Qwen2VL qwen2_5_vl=Qwen2_5_VL
    qwen3_vl=Qwen3VL qwen3_vl_moe=Qwen3VLMoe smolvlm=SmolVLM
"""

# module of ``transformers.model`` -> function to assign to a class or bind to a model -> that class of transformers
FORWARDS: dict[str, dict[str, str]] = {
    **{_MODELS + m: {"lce_forward": f"{c}ForCausalLM"} for m, c in (pair.split("=") for pair in _CAUSAL.split())},
    **{_MODELS + m: {"lce_forward": f"{c}ForConditionalGeneration"} for m, c in (pair.split("=") for pair in _CONDITIONAL.split())},
    **{_MODELS + m.lower(): {"causal_forward": f"{m}ForCausalLM", "multimodal_forward": f"{m}ForConditionalGeneration"} for m in ("Gemma3", "Gemma4")},
    _MODELS + "pixtral": {},
}
for _module in ("gemma", "gemma2", "llama", "mixtral", "phi3", "qwen2"):
    FORWARDS[_MODELS + _module]["lce_forward_deprecated"] = FORWARDS[_MODELS + _module]["lce_forward"]
for _module, _function, _class in (
    ("qwen3_5", "lce_forward_for_multimodal", "Qwen3_5ForConditionalGeneration"),
    ("qwen3_5_moe", "lce_forward_conditional_generation", "Qwen3_5MoeForConditionalGeneration"),
):
    FORWARDS[_MODELS + _module][_function] = _class


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes a module of ``PATHS`` or ``FORWARDS`` when it is imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        package = any(path.startswith(f"{fullname}.") for path in PATHS)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=package) if fullname in PATHS or fullname in FORWARDS else None

    def exec_module(self, module: ModuleType) -> None:
        _add_forwards(module) if module.__name__ in FORWARDS else _add_names(module)


def alias(package: str) -> None:
    """The modules of ``ALIASES`` below ``package``, under their other paths too; names that the package has already stay what they are."""
    for old, new in ALIASES.items():
        if old.startswith(f"{package}."):
            sys.modules[old] = importlib.import_module(new)
            room, _, name = old.rpartition(".")
            if not hasattr(parent := importlib.import_module(room), name):
                setattr(parent, name, sys.modules[old])


def _add_names(module: ModuleType) -> None:
    source, names = PATHS[module.__name__]
    new = importlib.import_module(source)
    module.__doc__ = f"An old path to ``{source}``."
    vars(module).update({n: v for n, v in vars(new).items() if (n in names if names else not n.startswith("__"))})

    def missing(name: str) -> Any:
        if not names or name in names:  # made by the new module when it is asked for
            with contextlib.suppress(AttributeError):
                return getattr(new, name)
        return _elsewhere(module.__name__, name, "liger_kernel.nn", "liger_kernel.ops")

    vars(module)["__getattr__"] = missing


def _add_forwards(module: ModuleType) -> None:
    import transformers

    from liger_kernel.transformers.patch import stock_with_fused_head

    module.__doc__ = "The ``forward`` that patched models have, as a function to assign to a class or bind to a model."
    for name, cls in FORWARDS[module.__name__].items():
        if not hasattr(transformers, cls):
            raise ImportError(f"{module.__name__}: transformers {transformers.__version__} has no {cls}")
        vars(module)[name] = stock_with_fused_head(getattr(transformers, cls))
    beside = _MODELS + "loss_utils", _MODELS + "output_classes"
    vars(module)["__getattr__"] = lambda name: _elsewhere(module.__name__, name, *beside)


def _elsewhere(module: str, name: str, *sources: str) -> Any:
    """The function or class of ours that ``name`` is in one of ``sources``."""
    if not name.startswith("_"):
        for source in sources:
            found = getattr(importlib.import_module(source), name, None)
            if getattr(found, "__module__", "").startswith("liger_kernel."):
                return found
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def install() -> None:
    if not any(type(f).__name__ == _Finder.__name__ and type(f).__module__ == __name__ for f in sys.meta_path):
        sys.meta_path.append(_Finder())
