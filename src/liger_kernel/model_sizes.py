"""The models whose training steps are measured, as configurations for random weights, and the
arithmetic a step of theirs needs."""

from __future__ import annotations

import math
from typing import Any

LLAMA3 = dict(model_type="llama", vocab_size=128256, rope_theta=500000.0, rms_norm_eps=1e-5, num_key_value_heads=8)
LLAMA32 = LLAMA3 | dict(tie_word_embeddings=True, max_position_embeddings=131072)
LLAMA3_8B = LLAMA3 | dict(head_dim=128, max_position_embeddings=8192)
QWEN = dict(rope_theta=1000000.0, max_position_embeddings=32768)
QWEN3 = QWEN | dict(model_type="qwen3", num_key_value_heads=8, head_dim=128, vocab_size=151936)
QWEN3["max_position_embeddings"] = 40960
# the heads of gated delta rules
DELTA = dict(linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128)
GEMMA = dict(
    model_type="gemma", head_dim=256, vocab_size=256000, hidden_act="gelu_pytorch_tanh", max_position_embeddings=8192
)


def _sized(hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return dict(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads, **more
    )


def _with_attention(layers: int, most: str, some: str, *at: int) -> list[str]:
    """Kinds of layers: ``some`` at those indices, ``most`` elsewhere."""
    return [some if i in at else most for i in range(layers)]


KIMI = _with_attention(27, "linear_attention", "full_attention", 3, 7, 11, 15, 19, 23, 26)
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": LLAMA32 | _sized(2048, 8192, 16, 32, head_dim=64),
    "llama-3.2-3b": LLAMA32 | _sized(3072, 8192, 28, 24, head_dim=128),
    "llama-3-8b": LLAMA3_8B | _sized(4096, 14336, 32, 32),
    "llama-3-70b": LLAMA3_8B | _sized(8192, 28672, 80, 64),
    "llama-3-8b-4layers": LLAMA3_8B | _sized(4096, 14336, 4, 32),
    "qwen2.5-7b-4layers": QWEN
    | _sized(3584, 18944, 4, 28, model_type="qwen2", num_key_value_heads=4, vocab_size=152064),
    "qwen3-0.6b": QWEN3 | _sized(1024, 3072, 28, 16, tie_word_embeddings=True),
    "qwen3-1.7b": QWEN3 | _sized(2048, 6144, 28, 16, tie_word_embeddings=True),
    "qwen3-8b": QWEN3 | _sized(4096, 12288, 36, 32),
    "qwen3-14b": QWEN3 | _sized(5120, 17408, 40, 40),
    "qwen3-30b-a3b": QWEN3
    | _sized(2048, 6144, 48, 32, model_type="qwen3_moe", num_key_value_heads=4)
    | dict(moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True),
    "mixtral-8x7b": QWEN
    | _sized(4096, 14336, 32, 32, model_type="mixtral", num_key_value_heads=8, vocab_size=32000)
    | dict(num_local_experts=8, num_experts_per_tok=2),
    "gpt-oss-20b": _sized(2880, 2880, 24, 64, model_type="gpt_oss", num_key_value_heads=8, head_dim=64)
    | dict(vocab_size=201088, max_position_embeddings=131072)
    | dict(num_local_experts=32, num_experts_per_tok=4, sliding_window=128),
    "qwen3-next-80b": _sized(2048, 5120, 48, 16, model_type="qwen3_next", num_key_value_heads=2, head_dim=256)
    | dict(moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=512, num_experts_per_tok=10)
    | DELTA,
    "qwen3.5-9b": _sized(4096, 12288, 32, 16, model_type="qwen3_5_text", num_key_value_heads=4, head_dim=256)
    | dict(vocab_size=248320)
    | DELTA,
    "lfm2-1.2b": _sized(2048, 12288, 16, 32, model_type="lfm2", num_key_value_heads=8)
    | dict(vocab_size=65536, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
    "kimi-linear": _sized(2304, 9216, 27, 32, model_type="kimi_linear", num_key_value_heads=32)
    | dict(vocab_size=163840, moe_intermediate_size=1024, num_experts=256, num_experts_per_token=8)
    | dict(linear_num_heads=32, linear_head_dim=128, layer_types=KIMI),
    "granite-4-h": _sized(1536, 512, 40, 12, model_type="granitemoehybrid", num_key_value_heads=4)
    | dict(vocab_size=100352, tie_word_embeddings=True, shared_intermediate_size=1024, num_local_experts=64)
    | dict(num_experts_per_tok=6, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128)
    | dict(layer_types=_with_attention(40, "mamba", "attention", 5, 15, 25, 35)),
    "gemma-2b": GEMMA | _sized(2048, 16384, 18, 8, num_key_value_heads=1),
    "gemma-7b": GEMMA | _sized(3072, 24576, 28, 16, num_key_value_heads=16),
    "gemma-3-1b": _sized(1152, 6912, 26, 4, model_type="gemma3_text", num_key_value_heads=1, head_dim=256)
    | dict(vocab_size=262144, sliding_window=512, max_position_embeddings=32768),
    "tiny": _sized(64, 128, 2, 4, model_type="llama", num_key_value_heads=2)
    | dict(vocab_size=500, max_position_embeddings=4096),
}


def config_of(values: dict[str, Any]) -> Any:
    """The transformers configuration of an entry of ``MODELS``."""
    import transformers

    values = dict(values)
    # a measurement may take fewer layers than the model has
    if kinds := values.get("layer_types"):
        values["layer_types"] = kinds[: values["num_hidden_layers"]]
    return transformers.AutoConfig.for_model(values.pop("model_type"), **values)


def step_flops(values: dict[str, Any], batch: int, seq: int, causal: bool = True) -> float:
    """Model FLOPs of one training step on ``batch`` rows of ``seq`` tokens, recomputation not
    counted.

    Per token 6 N + 6 H V + 12 A C summed over the layers: N the weights of the matrices in the
    layers (of a mixture, the router's and those of the
    experts of a token), H V those of the output head (looking up an embedding is free), A heads x
    head size, and C the mean number of tokens attended
    to: T / 2 under a causal mask, W - W^2 / 2T under a sliding window W < T, T without ``causal``.
    A delta rule needs 18 K V for each head, with K x V the size of its state, a scan 12 K V.
    Each multiply-add is 2 in the forward and 4 in the backward.
    """
    import torch
    import transformers

    config = config_of(values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return batch * seq * token_flops(model, seq, causal)


def token_flops(model: Any, seq: int, causal: bool = True) -> float:
    """The same of one token of a model that is there, whole or on the meta device."""
    import torch

    config, head = model.config.get_text_config(), model.get_output_embeddings()
    experts = getattr(config, "num_experts_per_tok", 0) or getattr(config, "num_experts_per_token", 0)

    def weights(m: torch.nn.Module) -> int:
        """Those in the matrices of ``m`` itself that multiply a token."""
        matrices, kind = [p for p in m.parameters(recurse=False) if p.ndim > 1], type(m).__name__
        if kind.endswith("Experts"):
            return sum(experts * p[0].numel() for p in matrices if p.ndim == 3)
        return sum(p.numel() for p in matrices) if isinstance(m, torch.nn.Linear) or kind.endswith("Router") else 0

    matrices = sum(weights(m) for m in model.modules() if m is not head)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # of latent attention, queries and keys are wider than values
    width = (config.qk_head_dim + config.v_head_dim) / 2 if hasattr(config, "qk_nope_head_dim") else width
    width *= config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = min(getattr(config, "sliding_window", None) or seq, seq)
    context = {"sliding_attention": window - window**2 / (2 * seq), "full_attention": seq / 2, "attention": seq / 2}
    context |= dict.fromkeys(("linear_attention", "conv", "mamba"), 0)
    attended = sum(context[kind] if causal else seq * (context[kind] > 0) for kind in kinds)
    state = lambda *names: math.prod(getattr(config, name, 0) for name in names)
    rule = state("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    rule += state("linear_num_heads", "linear_head_dim", "linear_head_dim")
    scan = state("mamba_n_heads", "mamba_d_head", "mamba_d_state")
    recurrent = 18 * rule * list(kinds).count("linear_attention") + 12 * scan * list(kinds).count("mamba")
    return 6 * (matrices + head.weight.numel()) + 12 * width * attended + recurrent
