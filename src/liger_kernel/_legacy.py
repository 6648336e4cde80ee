"""Import paths of LinkedIn's package, and paths that modules had before they moved.

A path in ``ALIASES`` gives the same module object as the module's present path, so a replacement at
one path has effect at the other. If such a module lacks a name, the name is looked up in
``liger_kernel.nn`` and ``liger_kernel.ops``: LinkedIn's modules import what they use by name, and
users rely on that.
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

# below ``liger_kernel.ops``: folder -> files that were directly in ``ops`` before
_ROOMS = {
    "activations": "glu relu_squared",
    "attention": "multi_token_attention neighborhood_attention softmax sparsemax",
    "losses": "cross_entropy grpo_loss linear_cross_entropy linear_logprobs linear_loss",
    "losses.divergence": "fused_ce_tvd linear_divergence logit_divergence",
    "norms": "dyt fused_add_rms_norm group_norm layer_norm modulated_rms_norm poly_norm rms_norm",
    "projections": "mlp moe tiled_mlp",
    "published": "fused_linear_cross_entropy fused_linear_jsd fused_linear_kl_div fused_linear_scaled_cross_entropy "
    "utils",
    "residual": "attn_res mhc",
    "rotary": "qk_norm_rope rope",
}

# below ``liger_kernel.ops``: path -> file with another name now
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
    "jsd": "losses.divergence.probabilities",
    "kl_div": "losses.divergence.probabilities",
    "llama4_rope": "rotary.rope",
    "qwen2vl_mrope": "rotary.rope",
    "swiglu": "activations.glu",
    "tvd": "losses.divergence.probabilities",
    "vocab_parallel_cross_entropy": "losses.vocab_parallel.cross_entropy",
    "vocab_parallel_linear_cross_entropy": "losses.vocab_parallel.linear_cross_entropy",
}

_OPS, _HERE = "liger_kernel.ops.", "liger_kernel.transformers."
# below ``liger_kernel.transformers``: file of ``liger_kernel.nn`` -> paths in LinkedIn's package
_NN = {
    "attention": "fused_neighborhood_attention multi_token_attention softmax sparsemax",
    "losses": "cross_entropy fused_ce_tvd fused_linear_cross_entropy fused_linear_jsd fused_linear_kl_div jsd kl_div "
    "tvd vocab_parallel_cross_entropy",
    "mlps": "geglu mlp relu_squared swiglu tiled_mlp",
    "norms": "dyt fused_add_rms_norm group_norm layer_norm modulated_rms_norm poly_norm rms_norm",
    "residual": "mhc",
    "rotary": "qwen2vl_mrope rope",
    "token_embedding": "experimental experimental.embedding",
}
# below ``liger_kernel.transformers``: path -> file with its main subject
_MOVED = {
    "bound": "patching.bound",
    "deferred": "head.forward",
    "families": "recognise.families",
    "fusions": "rewrite.source",
    "heads": "head.linear",
    "model.loss_utils": "head.loss_functions",
    "monkey_patch": "patching.apply",
    "patch": "patching.apply",
    "reference": "patching.reference",
    "slots": "recognise.slots",
    "tiny": "recognise.tiny",
    "token_scores": "head.token_scores",
    "trainer_integration": "patching.apply",
}
# file -> other files that now have parts of its old path
_SPLIT = {
    **{
        _OPS + file: [_OPS + part for part in parts.split()]
        for file, parts in {
            "attention.softmax": "attention.rows",
            "attention.sparsemax": "attention.rows",
            "losses.cross_entropy": "losses.cross_entropy_rows",
            "losses.divergence.probabilities": "losses.divergence.by_element",
            "norms.rms_norm": "norms.rows",
            "residual.mhc": "residual.mhc_mixing",
        }.items()
    },
    **{
        _HERE + file: [_HERE + part for part in parts.split()]
        for file, parts in {
            "head.forward": "head.loss head.outputs head.recipe head.stand_in head.linear",
            "patching.apply": "patching.bound patching.flags patching.select patching.single patching.values "
            "recognise.families",
            "rewrite.source": "patching.wrappers recognise.plain rewrite.fused_norms",
            "recognise.slots": """recognise.activations recognise.compare recognise.experts recognise.family
            recognise.infer recognise.mlps
                                  recognise.norms recognise.ropes recognise.variant""",
        }.items()
    },
}
ALIASES = {
    **{_OPS + name: f"{_OPS}{room}.{name}" for room, names in _ROOMS.items() for name in names.split()},
    **{_OPS + old: _OPS + new for old, new in _RENAMED.items()},
    **{f"liger_kernel.backends.{part}": "liger_kernel.backends" for part in ("capability", "dispatch", "registry")},
    **{_HERE + name: f"liger_kernel.nn.{file}" for file, names in _NN.items() for name in names.split()},
    **dict.fromkeys(
        ("liger_kernel.triton", "liger_kernel.triton.monkey_patch", "liger_kernel._triton_cache"),
        "liger_kernel.compile.cache",
    ),
    **{_HERE + old: _HERE + new for old, new in _MOVED.items()},
    **dict.fromkeys((_HERE + "trainer", _HERE + "trainer.orpo_trainer"), _HERE + "orpo_trainer"),
    "liger_kernel.bench.models": "liger_kernel.model_sizes",
    "liger_kernel.chunked_loss.functional": "liger_kernel.chunked_loss",
    _HERE + "auto_model": _HERE + "auto",
    _HERE + "grpo_loss": _OPS + "losses.grpo_loss",
}

_MODELS = _HERE + "model."
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
        else:
            for path in ALIASES:
                if path == module.__name__ or path.startswith(
                    f"{module.__name__}."
                ):  # a module has no folder in which Python could find the modules below it
                    _put(path)


def _named(path: str) -> ModuleType:
    """The module for the alias ``path``. From now on it has all the names of LinkedIn's module."""
    module = importlib.import_module(ALIASES[path])
    rest = _SPLIT.get(module.__name__, [])
    if rest and type(module) is ModuleType:
        module.__class__ = _Split
    beside = (*rest, "liger_kernel.nn", "liger_kernel.ops", _OPS + "published.launchers")
    vars(module).setdefault("__getattr__", functools.partial(_elsewhere, module.__name__, beside=beside))
    return module


_REPLACED: dict[tuple[str, str], list[Any]] = {}  # module and name -> its value before each replacement


class _Split(ModuleType):
    """A module that was larger. If it lacks a constant or a private name, the name is read and
    replaced in all the parts that have it now.

    Deleting such a name restores its value before the replacement: pytest and mock delete names
    that the module itself did not have.
    """

    def __getattr__(self, name: str) -> Any:
        if parts := _having(self, name):
            return vars(parts[0])[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        parts = _having(self, name) or [self]
        if parts[0] is not self:
            _REPLACED.setdefault((self.__name__, name), []).append(vars(parts[0])[name])
        for part in parts:
            vars(part)[name] = value

    def __delattr__(self, name: str) -> None:
        before = None if name in vars(self) else _REPLACED.get((self.__name__, name))
        if not before:
            return super().__delattr__(name)
        value = before.pop()
        for part in _having(self, name):
            vars(part)[name] = value


def _having(module: ModuleType, name: str) -> list[ModuleType]:
    """The modules that have ``name``: ``module`` itself, or else those of its parts that have
    the same value as the first part with the name."""
    if name in vars(module) or name.startswith("__"):
        return [module] if name in vars(module) else []
    parts = [part for path in _SPLIT[module.__name__] if name in vars(part := importlib.import_module(path))]
    return [part for part in parts if vars(part)[name] is vars(parts[0])[name]]


def alias(package: str) -> None:
    """Make the modules of ``ALIASES`` below ``package`` available under these paths, too. Names
    that the package already has do not change."""
    for path in ALIASES:
        if path.startswith(f"{package}."):
            _put(path)


def _put(path: str) -> None:
    """Make the module for ``path`` available under it, and in the module above: ``import a.b as
    c`` looks there."""
    sys.modules[path] = _named(path)
    above, _, name = path.rpartition(".")
    vars(importlib.import_module(above)).setdefault(name, sys.modules[path])


def _add_forwards(module: ModuleType) -> None:
    import transformers

    with_fused_head = importlib.import_module(_HERE + "patching.apply").stock_with_fused_head
    module.__doc__ = "The ``forward`` that patched models have, as a function to assign to a class or bind to a model."
    for name, cls in FORWARDS[module.__name__].items():
        if not hasattr(transformers, cls):
            raise ImportError(f"{module.__name__}: transformers {transformers.__version__} has no {cls}")
        vars(module)[name] = with_fused_head(getattr(transformers, cls))
    vars(module)["__getattr__"] = functools.partial(
        _elsewhere, module.__name__, beside=(_MODELS + "loss_utils", _MODELS + "output_classes")
    )


def _elsewhere(module: str, name: str, beside: Sequence[str]) -> Any:
    """Our function or class ``name`` in one of the modules ``beside``."""
    if not name.startswith("_"):
        for source in beside:
            found = getattr(importlib.import_module(source), name, None)
            if getattr(found, "__module__", "").startswith("liger_kernel."):
                return found
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def install() -> None:
    if not any(type(f).__name__ == _Finder.__name__ and type(f).__module__ == __name__ for f in sys.meta_path):
        sys.meta_path.append(_Finder())
