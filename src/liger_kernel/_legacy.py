"""Import paths of LinkedIn's package.

A path in ``ALIASES`` gives the same module object as the module's own path, so a replacement at
one path has effect at the other. If such a module lacks a name, the name is looked up in
``liger_kernel.nn``, ``liger_kernel.ops`` and ``liger_kernel.compat``: LinkedIn's modules import
what they use by name, and users rely on that.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_OPS, _HERE, _COMPAT = "liger_kernel.ops", "liger_kernel.transformers", "liger_kernel.compat"


def _named(package: str, home: str, files: dict[str, str]) -> dict[str, str]:
    """Path below ``package`` -> module below ``home``, of module -> paths."""
    return {f"{package}.{path}": f"{home}.{file}" for file, paths in files.items() for path in paths.split()}


# below ``liger_kernel.ops``: folder -> files that are directly in ``ops`` in LinkedIn's package
_FOLDERS = {
    "activations": "relu_squared",
    "losses": "cross_entropy grpo_loss",
    "losses.divergence": "fused_ce_tvd",
    "norms": "fused_add_rms_norm layer_norm rms_norm",
    "projections": "mlp tiled_mlp",
    "rotary": "rope",
}
# and those that are in ``liger_kernel.extra``
_EXTRA = "attn_res dyt group_norm mhc modulated_rms_norm multi_token_attention poly_norm softmax sparsemax"
ALIASES = {
    **{f"{_OPS}.{file}": f"{_OPS}.{folder}.{file}" for folder, files in _FOLDERS.items() for file in files.split()},
    **{f"{_OPS}.{file}": f"liger_kernel.extra.{file}" for file in _EXTRA.split()},
    f"{_OPS}.fused_neighborhood_attention": "liger_kernel.extra.neighborhood_attention",
    f"{_OPS}.experimental": "liger_kernel.extra",
    f"{_OPS}.experimental.mm_int8int2": "liger_kernel.extra.mm_int8int2",
    **_named(
        _OPS,
        _OPS,
        {
            "_core.impl": "backends backends.registry",
            "activations.glu": "geglu swiglu",
            "losses.divergence.probabilities": "jsd kl_div tvd",
            "losses.vocab_parallel.cross_entropy": "vocab_parallel_cross_entropy",
            "projections.moe": "fused_moe",
            "rotary.rope": "llama4_rope qwen2vl_mrope",
            "token_embedding": "experimental.embedding",
        },
    ),
    **_named(
        _OPS,
        _COMPAT,
        {
            "host": "fused_linear_cross_entropy fused_linear_jsd fused_linear_kl_div fused_linear_scaled_cross_entropy",
            "helpers": "configure utils",
        },
    ),
    **_named(
        _HERE,
        "liger_kernel.nn",
        {
            "attention": "fused_neighborhood_attention multi_token_attention softmax sparsemax",
            "losses": "cross_entropy fused_ce_tvd fused_linear_cross_entropy fused_linear_jsd fused_linear_kl_div jsd "
            "kl_div tvd vocab_parallel_cross_entropy",
            "mlps": "geglu mlp moe relu_squared swiglu tiled_mlp",
            "norms": "dyt fused_add_rms_norm group_norm layer_norm modulated_rms_norm poly_norm rms_norm",
            "residual": "mhc",
            "token_embedding": "experimental experimental.embedding",
        },
    ),
    **_named(
        _HERE,
        _HERE,
        {
            "auto": "auto_model",
            "head.loss_functions": "model.loss_utils",
            "orpo_trainer": "fsdp trainer trainer.orpo_trainer",
            "patching.apply": "monkey_patch trainer_integration",
        },
    ),
    **_named(
        "liger_kernel",
        "liger_kernel",
        {
            "chunked_loss": "chunked_loss.functional",
            "compat.backends": "backends backends.capability backends.dispatch backends.registry",
            "compat.functional": "functional",
            "compat.functions": "transformers.functional transformers.qwen2vl_mrope transformers.rope",
            "compile.cache": "triton triton.monkey_patch",
            "megatron": "megatron.cross_entropy megatron.monkey_patch megatron.rms_norm megatron.swiglu",
            "ops.losses.grpo_loss": "transformers.grpo_loss",
        },
    ),
}
# where names are looked up that a module of this table lacks
_REST = "liger_kernel.nn", _OPS, f"{_COMPAT}.host", f"{_COMPAT}.helpers"

_MODELS = f"{_HERE}.model."
_CAUSAL = """
    deepseek_v2=DeepseekV2 deepseek_v3=DeepseekV3 deepseek_v4=DeepseekV4 exaone4=Exaone4 falcon_h1=FalconH1
    gemma=Gemma gemma2=Gemma2 glm4=Glm4
    gpt_oss=GptOss hunyuan_v1=HunYuanDenseV1 llama=Llama llama4=Llama4 ministral=Ministral mistral=Mistral
    mixtral=Mixtral mllama=Mllama nemotron=Nemotron
    olmo2=Olmo2 olmo3=Olmo3 phi3=Phi3 qwen2=Qwen2 qwen3=Qwen3 qwen3_5=Qwen3_5 qwen3_5_moe=Qwen3_5Moe
    qwen3_moe=Qwen3Moe qwen3_next=Qwen3Next smollm3=SmolLM3
"""
_CONDITIONAL = """
    glm4v=Glm4v glm4v_moe=Glm4vMoe internvl=InternVL llava=Llava muse_glimmer=MuseGlimmer paligemma=PaliGemma
    qwen2_vl=Qwen2VL qwen2_5_vl=Qwen2_5_VL
    qwen3_vl=Qwen3VL qwen3_vl_moe=Qwen3VLMoe smolvlm=SmolVLM
"""

# module of ``transformers.model`` -> function to assign to a class or bind to a model -> the class
# of transformers for it
FORWARDS: dict[str, dict[str, str]] = {
    **{_MODELS + m: {"lce_forward": f"{c}ForCausalLM"} for m, c in (pair.split("=") for pair in _CAUSAL.split())},
    **{
        _MODELS + m: {"lce_forward": f"{c}ForConditionalGeneration"}
        for m, c in (pair.split("=") for pair in _CONDITIONAL.split())
    },
    **{
        _MODELS + m.lower(): {"causal_forward": f"{m}ForCausalLM", "multimodal_forward": f"{m}ForConditionalGeneration"}
        for m in ("Gemma3", "Gemma4")
    },
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
    """Finds a module of ``ALIASES``, or creates one of ``FORWARDS``, when it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in ALIASES or fullname in FORWARDS else None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in FORWARDS:
            _add_forwards(module)
            return
        _put(module.__name__)
        alias(module.__name__)  # the module itself may have no folder in which Python finds those below


def alias(package: str) -> None:
    """Make the modules of ``ALIASES`` below ``package`` available. Names that the package already
    has do not change."""
    for path in ALIASES:
        if path.startswith(f"{package}."):
            _put(path)


def _put(path: str) -> None:
    """Make the module for ``path`` available under it, and in the module above: ``import a.b as
    c`` looks there."""
    module = importlib.import_module(ALIASES[path])
    vars(module).setdefault("__getattr__", functools.partial(_look_up, module.__name__, _REST))
    sys.modules[path] = module
    above, _, name = path.rpartition(".")
    vars(importlib.import_module(above)).setdefault(name, module)


def add_published(package: str) -> None:
    """Give ``liger_kernel.ops``, which may not import what lies above it, the published functions
    over its operators, and the modules of LinkedIn's that have an operator's name: imported only
    later, they would take the operator's place."""
    for source in (f"{_COMPAT}.function_classes", f"{_COMPAT}.host"):
        published = vars(importlib.import_module(source)).items()
        endings = "Function", "_forward", "_backward"
        vars(sys.modules[package]).update((n, v) for n, v in published if n[0] != "_" and n.endswith(endings))
    alias(package)


def _add_forwards(module: ModuleType) -> None:
    import transformers

    with_fused_head = importlib.import_module(f"{_HERE}.patching.apply").stock_with_fused_head
    module.__doc__ = "The ``forward`` that patched models have, as a function to assign to a class or bind to a model."
    for name, cls in FORWARDS[module.__name__].items():
        if not hasattr(transformers, cls):
            raise ImportError(f"{module.__name__}: transformers {transformers.__version__} has no {cls}")
        vars(module)[name] = with_fused_head(getattr(transformers, cls))
    beside = f"{_MODELS}loss_utils", f"{_MODELS}output_classes"
    vars(module)["__getattr__"] = functools.partial(_look_up, module.__name__, beside)


def _look_up(module: str, sources: Sequence[str], name: str) -> Any:
    """Our function or class ``name`` in one of the modules ``sources``."""
    if not name.startswith("_"):
        for source in sources:
            home = importlib.import_module(source)
            own = vars(home).get("__getattr__")  # not if it is this function, which would never end
            found = vars(home).get(name) if isinstance(own, functools.partial) else getattr(home, name, None)
            if getattr(found, "__module__", "").startswith("liger_kernel."):
                return found
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def install() -> None:
    if not any(type(f).__name__ == _Finder.__name__ and type(f).__module__ == __name__ for f in sys.meta_path):
        sys.meta_path.append(_Finder())
