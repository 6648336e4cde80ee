"""A tiny random model of any family, with inputs, for tests and for the table of families. Its
scales and caps are not 1."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from liger_kernel.transformers.recognise.families import heads_of, modeling

VOCAB = 257
IMAGE = 16  # pixels on each side of an image; a patch has 4

# size -> its names in configurations, of text models, of vision towers and of what connects them
_OF_SIZE = {
    0: "pad_token_id",
    1: "bos_token_id n_group topk_group first_k_dense_replace moe_num_shared_experts mamba_n_groups "
    "num_global_layers resampler_depth",
    2: "eos_token_id num_hidden_layers num_key_value_heads num_experts_per_tok moe_k moe_topk n_layer "
    "n_layers num_global_key_value_heads encoder_layers decoder_layers altup_num_inputs "
    "linear_num_key_heads linear_num_heads index_n_heads swa_num_key_value_heads depth scale_factor",
    3: "num_channels",
    4: "num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts n_head n_heads "
    "encoder_attention_heads decoder_attention_heads linear_num_value_heads swa_num_attention_heads "
    "patch_size num_heads mm_tokens_per_image attention_heads resampler_n_latents resampler_n_heads",
    8: "qk_rope_head_dim qk_nope_head_dim mamba_d_state mamba_n_heads state_size sliding_window rotary_dim "
    "laurel_rank index_topk",
    16: "head_dim q_lora_rank kv_lora_rank v_head_dim mamba_d_head query_pre_attn_scalar global_head_dim "
    "hidden_size_per_layer_input linear_key_head_dim linear_value_head_dim index_head_dim swa_head_dim "
    "linear_head_dim window_size resampler_head_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "shared_intermediate_size base_channels",
    64: "hidden_size n_embd d_model word_embed_proj_dim embed_dim out_hidden_size projection_dim "
    "vision_output_dim projector_input_dim projector_output_dim text_hidden_size mlp_dim "
    "projector_hidden_size num_position_embeddings",
    96: "intermediate_size n_inner ffn_dim ffn_hidden_size dense_intermediate_size intermediate_size_mlp "
    "encoder_ffn_dim decoder_ffn_dim",
    128: "max_position_embeddings n_positions mamba_d_ssm",
    VOCAB: "vocab_size vocab_size_per_layer_input",
}
SIZES: dict[str, Any] = {name: size for size, names in _OF_SIZE.items() for name in names.split()}
SIZES |= dict(
    image_size=IMAGE, vision_use_head=False, image_grid_pinpoints=[[IMAGE, 2 * IMAGE]], pixel_shuffle_ratio=0.5
)

# Multipliers that are 1, or None, by default in at least one family
SCALES: dict[str, Any] = dict(
    logits_scaling=3.0,
    logit_scale=0.25,
    lm_head_multiplier=0.5,
    embedding_multiplier=2.0,
    residual_multiplier=0.5,
    attention_multiplier=0.3,
    final_logit_softcapping=1.5,
    attn_logit_softcapping=5.0,
    mlp_multipliers=[0.7, 1.3],
    router_aux_loss_coef=0.1,
    output_router_logits=True,
)


# Sizes to set even if their default is None, which means that they follow from other sizes
_ALWAYS = "num_key_value_heads head_dim pad_token_id bos_token_id eos_token_id num_experts_per_tok n_routed_experts"
ALWAYS = {*_ALWAYS.split(), "n_shared_experts"}

# Sizes that no name implies: they must fit each other in the models of one type
FITTING: dict[str, dict[str, Any]] = {
    "blip-2": dict(image_token_index=VOCAB - 1),
    "blt": dict(encoder_hash_byte_group_vocab=64),
    "blt_local_decoder": dict(hidden_size_global=64),
    "chameleon": dict(vocabulary_map={"<image>": VOCAB - 1}),
    "cohere_compass_text": dict(
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
            for kind in ("full_attention", "sliding_attention")
        }
    ),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2),
    ),
    "deepseek_ocr2_text": dict(mlp_layer_types=["dense", "sparse"]),
    "diffusion_gemma_text": dict(num_experts=4, top_k_experts=2, moe_intermediate_size=32),
    "dots1": dict(n_shared_experts=1),
    "emu3": dict(vocabulary_map={"<|extra_200|>": VOCAB - 2, "<image>": VOCAB - 1}),
    "emu3_vqgan": dict(channel_multiplier=[1, 1, 1, 2]),
    "ernie4_5_vl_moe_text": dict(
        moe_intermediate_size=[32, 32],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
    ),
    "flint": dict(mlp_only_layers=[0]),
    "florence_vision": dict(embed_dim=[32, 64], num_heads=[2, 4], num_groups=[2, 4], patch_size=[4, 2]),
    "gemma4_text": dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32),
    "gemma3n_text": dict(num_kv_shared_layers=0),
    "glm5_next_text": dict(index_kpool=4, qk_rope_head_dim=0),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "longcat_flash": dict(head_dim=8, zero_expert_num=2),
    "mamba2": dict(num_heads=8, n_groups=1),
    "mllama_text_model": dict(cross_attention_layers=[1]),
    "mistral_large4_text": dict(kv_source_layers=[0, 1]),
    "muse_spark_audio": dict(hidden_sizes=[16, 16], depths=[1, 1]),
    "prophetnet": dict(num_hidden_layers=None, num_decoder_layers=2, num_decoder_attention_heads=4),
    "qwen4_exp_text": dict(
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=2
    ),
    "radio": dict(video_temporal_patch_size=2),
    "reformer": dict(
        is_decoder=True,
        axial_pos_shape=[4, 3],
        axial_pos_embds_dim=[32, 32],
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        hash_seed=0,
        hidden_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
    ),
    "roc_bert": dict(shape_vocab_size=100, pronunciation_vocab_size=100),
    "step3p5": dict(layer_types=["full_attention", "sliding_attention"], sliding_window=8),
    "unlimited_ocr_text": dict(num_key_value_heads=4),
    "vipllava": dict(vision_feature_layers=[-2, -1, 1, 0, -2]),
    "xmod": dict(default_language="en_XX"),
    "xlnet": dict(max_position_embeddings=None),
    "zamba": dict(layers_block_type=["hybrid", "linear_attention", "hybrid"], num_hidden_layers=3),
    "zaya": dict(num_experts_per_tok=1),
}
_KINDS = "layer_types layers_block_type mlp_layer_types block_types attn_layer_indices hybrid_override_pattern"
LAYER_KINDS = tuple(_KINDS.split())


def tiny_config(model_type: str, **more: Any) -> PretrainedConfig:
    """A configuration with a few thousand parameters, in the sizes that this type has."""
    return _tiny(CONFIG_MAPPING[model_type], more)


def tiny_of(config: PretrainedConfig) -> PretrainedConfig:
    """A tiny configuration with one layer of each kind that ``config`` has."""
    return _tiny(type(config), {}, config)


def _tiny(
    cls: type[PretrainedConfig], more: dict[str, Any], default: PretrainedConfig | None = None, part: bool = False
) -> PretrainedConfig:
    default = default or cls()
    known = {*inspect.signature(cls.__init__).parameters, *getattr(cls, "__dataclass_fields__", ())}
    known |= {k for k in SIZES if _get(default, k) is not None}
    known -= {k for c in cls.__mro__ for k, v in vars(c).items() if isinstance(v, property) and v.fset is None}
    values = {
        k: _like(v, _get(default, k))
        for k, v in (SIZES | SCALES).items()
        if k in known and (k in ALWAYS or _get(default, k) is not None)
    }
    if "qk_rope_head_dim" in known:  # with latent attention, head_dim is this width
        values.pop("head_dim", None)
        values["num_key_value_heads"] = values["num_attention_heads"]
    if _get(default, "num_key_value_heads") is None and part:
        values.pop("num_key_value_heads", None)
    values |= _layers(default, values) | _tokens(default)
    for name in getattr(cls, "sub_configs", ()):
        sub = _get(default, name)
        if isinstance(sub, PretrainedConfig):
            values[name] = _tiny(type(sub), {}, sub, True).to_dict()
    values |= _sections(default, values) | FITTING.get(default.model_type, {})
    return cls(**{k: v for k, v in values.items() if v is not None or k in more} | more)


def _get(config: PretrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a value that differs from layer to layer has no single default
        return config.__dict__.get(name)


def _like(value: Any, default: Any) -> Any:
    """``value`` in the form of ``default``: one number, or a number for each side or layer."""
    if isinstance(default, (list, tuple)) and not isinstance(value, (list, tuple)) and len(set(map(str, default))) == 1:
        return type(default)(value for _ in default)
    return value


def _layers(default: PretrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind, at least two layers, with lists of values for each layer cut to
    that number."""
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth")
    name = next((n for n in names if isinstance(_get(default, n), int)), None)
    if name is None:
        return {}
    count = _get(default, name)
    own = {k: v for k, v in dict(default.__dict__).items() if count > 2 or k in LAYER_KINDS}
    lists = {k: v for k, v in own.items() if isinstance(v, (list, tuple)) and len(v) == count}
    kinds = next((lists[k] for k in LAYER_KINDS if k in lists), None)
    chosen = [0, count - 1]
    if kinds:
        chosen = sorted({list(kinds).index(k) for k in dict.fromkeys(kinds)})[:4]
        chosen = chosen if len(chosen) > 1 else [0, count - 1]
    cut = {k: [v[i] for i in chosen] for k, v in lists.items()}
    single = [k for k in cut.keys() & values.keys() if not isinstance(values[k], (list, tuple))]
    cut |= {k: [values[k]] * len(chosen) for k in single}
    return ({name: len(chosen)} if name in values or cut else {}) | cut


def _sections(default: PretrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Sections of multimodal rotary embeddings, cut to the width of the tiny heads."""
    # the second is the name before transformers 5
    name = "rope_parameters" if hasattr(default, "rope_parameters") else "rope_scaling"
    rope = _get(default, name) or {}
    sections = rope.get("mrope_section") or (16, 24, 24)
    named = False
    with contextlib.suppress(ImportError):
        module = importlib.import_module(type(default).__module__.replace("configuration_", "modeling_"))
        named = "mrope_section" in inspect.getsource(module)
    if not named or "num_attention_heads" not in values or any(isinstance(v, dict) for v in rope.values()):
        return {}
    width = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    width = int(width * (rope.get("partial_rotary_factor") or _get(default, "partial_rotary_factor") or 1.0)) // 2
    small = [max(1, width * n // sum(sections)) for n in sections[1:]]
    sections = [width - sum(small), *small]
    return {name: {"rope_type": "default", "rope_theta": 10000.0} | rope | {"mrope_section": sections}}


def _tokens(default: PretrainedConfig) -> dict[str, Any]:
    """Ids of special tokens, all different, that fit the vocabulary."""
    given = {k: v for k, v in default.__dict__.items() if k.endswith(("token_id", "token_index"))}
    large = [k for k in sorted(given) if isinstance(given[k], int) and given[k] >= VOCAB - 20]
    return {k: VOCAB - 20 + i for i, k in enumerate(large)}


def model_of(config: PretrainedConfig, attention: str = "eager", head: str | type | None = None) -> PreTrainedModel:
    """A model with a language model's head, or of another class ``head``, in training mode, in fp32,
    without dropout."""
    module = modeling(config.model_type)
    cls = head if isinstance(head, type) else getattr(module, head or heads_of(config.model_type, module)[0])
    try:
        model = cls._from_config(config, attn_implementation=attention)
    except (AttributeError, ValueError, TypeError):  # this part does not have that attention
        model = cls._from_config(config)
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
    return model.float().train()


def words(model: PreTrainedModel) -> dict[str, Tensor]:
    """Two sequences of tokens to learn."""
    ids = torch.randint(3, VOCAB - 30, (2, 12), device=model.device)
    return {"input_ids": ids, "labels": ids.clone()}


def images(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Inputs with two images, in each form that processors produce. The first form that the
    model accepts is the right one."""
    pixels = torch.randn(2, 3, IMAGE, IMAGE)
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    for channels in (3 * 2 * 4 * 4, 3 * 4 * 4):
        yield {"pixel_values": torch.randn(32, channels), "image_grid_thw": grid}
    yield {"pixel_values": pixels}
    yield {"pixel_values": pixels, "image_sizes": torch.tensor([[IMAGE, IMAGE]] * 2)}
    yield {"pixel_values": torch.randn(2, 3, 3, IMAGE, IMAGE), "image_sizes": torch.tensor([[IMAGE, 2 * IMAGE]] * 2)}
    yield {"pixel_values": pixels[:, None]}
    yield {"pixel_values": pixels, "image_num_patches": torch.tensor([1, 1])}
    yield {
        "pixel_values": torch.randn(2, 16, 48),
        "spatial_shapes": torch.tensor([[4, 4]] * 2),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
    }


def with_images(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Return ``batch`` (2 sequences) with an image in each; None if no form of images is
    understood."""
    configs = (model.config, getattr(model.config, "text_config", None))
    tokens = [getattr(c, n, None) for c in configs for n in ("image_token_id", "image_token_index")]
    token = next((t for t in tokens if t is not None), None)
    features = getattr(model, "get_image_features", None)
    features = features or getattr(getattr(model, "model", None), "get_image_features", None)
    if token is None or features is None:
        return _with_pictures(model, batch)
    for form in images(model):
        with contextlib.suppress(Exception), torch.no_grad():
            found = features(**form)
            found = getattr(found, "pooler_output", found)
            found = getattr(found, "last_hidden_state", found)
            rows = sum(t.shape[:-1].numel() for t in (found if isinstance(found, (list, tuple)) else [found]))
            if rows % 2 or not rows:
                continue
            ids = torch.full((2, rows // 2), token, device=batch["input_ids"].device)
            more = {"input_ids": torch.cat((batch["input_ids"][:, :3], ids, batch["input_ids"][:, 3:]), 1)}
            more["labels"] = torch.cat((batch["labels"][:, :3], torch.full_like(ids, -100), batch["labels"][:, 3:]), 1)
            types = (more["input_ids"] == token).long()
            takes = inspect.signature(model.forward).parameters
            more |= {n: types for n in ("token_type_ids", "mm_token_type_ids") if n in takes}
            given = batch | more | form | {"attention_mask": torch.ones_like(more["input_ids"])}
            model(**given, use_cache=False)
            return given
    return None


def _with_pictures(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """``batch`` with images as separate inputs, not as tokens of the sequences."""
    if "pixel_values" not in inspect.signature(model.forward).parameters:
        return None
    for form in images(model):
        with contextlib.suppress(Exception), torch.no_grad():
            if model(**batch, **form, use_cache=False).loss is not None:
                return batch | form
    return None
