"""The models whose training steps are measured, as configurations for random weights, and the
arithmetic a step of theirs needs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())


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
