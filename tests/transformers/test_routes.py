import peft
import pytest
import torch
from hf_models import assert_same_bits, step, tiny_model

from liger_kernel.transformers import _apply_liger_kernel_to_instance, record_routes, replay_routes

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
FAMILIES = str.split("qwen3_moe gpt_oss deepseek_v3 llama4_text ernie4_5_moe")


def made(family, patched=True):
    torch.manual_seed(0)
    model = tiny_model(family).train()
    model.config.output_router_logits = False
    if patched:
        _apply_liger_kernel_to_instance(model)
    return model


def learnt(model):
    return step(model, {"input_ids": IDS, "labels": IDS})[1]


def others(routes):
    """Experts that nobody chose, each once."""
    return [torch.arange(r.shape[-1]).expand(r.shape) for r in routes]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_recorded_is_chosen_again(family):
    model = made(family)
    with record_routes(model) as routes:
        live = learnt(model)
    with record_routes(model) as again, replay_routes(model, routes):
        assert_same_bits(learnt(model), live)
    assert [torch.equal(*pair) for pair in zip(routes, again)] == [True] * len(routes)
    given = others(routes)
    with record_routes(model) as again, replay_routes(model, given):
        moved = learnt(model)
    assert all(torch.equal(a, b) for a, b in zip(again, given))
    router = next(name for name in live if name.endswith(("gate.weight", "router.weight", "router.layer.weight")))
    assert moved[router].any() and not torch.equal(moved[router], live[router])
    with replay_routes(model, [torch.full_like(r, -1) for r in routes]):
        assert_same_bits(learnt(model), live)
    assert_same_bits(learnt(model), live)  # nothing is left


def test_weights_are_those_of_the_live_router():
    model = made("qwen3_moe")
    block, seen = model.model.layers[0].mlp, []
    x = torch.randn(1, 5, block.gate.weight.shape[1])
    given = torch.tensor([[3, 0], [1, 2], [2, 3], [0, 1], [1, 0]])
    block.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1:]))
    routes = [given, *([given] * (len(model.model.layers) - 1))]
    with replay_routes(model, routes):
        block(x)
    (index, weights), probabilities = seen[0], torch.softmax(x[0] @ block.gate.weight.T, -1)
    scores = probabilities.gather(1, given)
    expected = scores / scores.sum(-1, keepdim=True) if block.gate.norm_topk_prob else scores
    assert torch.equal(index, given)
    torch.testing.assert_close(weights, expected)


def test_experts_of_groups_that_are_not_chosen_have_scores():
    model = tiny_model("deepseek_v2", topk_method="group_limited_greedy", n_group=2, topk_group=1)
    weights = []
    with record_routes(model) as routes, torch.no_grad():
        model(IDS, use_cache=False)
    experts = next(m for m in model.modules() if type(m).__name__ == "DeepseekV2Experts")
    experts.register_forward_pre_hook(lambda _, args: weights.append(args[2]))
    with replay_routes(model, [experts.num_experts - 1 - r for r in routes]), torch.no_grad():
        model(IDS, use_cache=False)
    assert (weights[0] > 0).all()


def test_checkpointed_layers_choose_the_same_again():
    model = made("qwen3_moe")
    with record_routes(model) as routes:
        learnt(model)
    given = others(routes)
    with replay_routes(model, given):
        plain = learnt(model)
    model.gradient_checkpointing_enable()
    with record_routes(model) as once, replay_routes(model, given):
        assert_same_bits(learnt(model), plain)
    assert [r.shape for r in once] == [r.shape for r in routes]


def test_adapters_of_the_experts():
    model = made("qwen3_moe")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[], target_parameters=names))
    with record_routes(model) as routes:
        live = learnt(model)
    with replay_routes(model, routes):
        assert_same_bits(learnt(model), live)
    given = others(routes)
    with replay_routes(model, given), record_routes(model) as again:
        learnt(model)
    assert torch.equal(torch.stack(again), torch.stack(given))


def test_routes_of_a_generation_are_replayed_in_training():
    model = made("qwen3_moe").eval()
    with record_routes(model) as routes:
        tokens = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert [r.shape for r in routes] == [(2, tokens.shape[1] - 1, 2)] * 2
    of_sampler = torch.stack(routes, -2)  # as vLLM returns them
    with record_routes(model) as again, replay_routes(model, of_sampler):
        model(tokens[:, :-1], use_cache=False)
    assert torch.equal(torch.stack(again, -2), of_sampler)


def test_refused():
    model = made("qwen3_moe")
    routes = [torch.zeros(2, 9, 2, dtype=torch.int64)] * 2
    with pytest.raises(ValueError, match=r"^replay_routes: routes must be of 2 layers, got 1$"):
        replay_routes(model, routes[:1]).__enter__()
    for wrong in (torch.zeros(2, 8, 2), torch.zeros(2, 9, 1)):
        said = r"model.layers.0.mlp chooses 2 experts for 18 tokens, got routes of shape \(2, \d, \d\)"
        with pytest.raises(ValueError, match=said), replay_routes(model, [wrong.long()] * 2):
            model(IDS)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert_same_bits(learnt(model), learnt(made("qwen3_moe")))  # nor is a choice left open
    phimoe = made("phimoe")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp must choose its experts by topk"), record_routes(phimoe):
        phimoe(IDS)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM must have experts in packed weights, got none"):
        record_routes(made("llama")).__enter__()
