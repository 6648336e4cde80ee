"""Models with ``batch_invariant=True``: what a token has does not depend on its batch, and what could
not be so is refused by name."""

import gc
import weakref

import pytest
import torch
from hf_models import make
from transformers import CompileConfig

from liger_kernel.ops import linear_logprobs
from liger_kernel.ops._core.invariance import is_invariant
from liger_kernel.parallel import parallelize
from liger_kernel.transformers import _apply_liger_kernel_to_instance as patch, apply_liger_kernel_to_llama, restore

pytestmark = pytest.mark.usefixtures("exact_dots")
NEVER = [
    ("llama", dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)), "rope of the kind dynamic"),
    ("mixtral", dict(router_jitter_noise=0.5), "it draws .*: router_jitter_noise must be 0, got 0.5"),
    ("phimoe", {}, "router .* it draws"),
    ("gemma3n_text", {}, "altup .* its means"),
]
LENGTHS = [3, 17, 9]


def model_of(model_type="llama", attention="sdpa", **more):
    return make(model_type, attention=attention, vocab_size=96, **more).cpu().train()


@pytest.fixture(autouse=True)
def off_again():
    yield
    gc.collect()
    assert not is_invariant()


def results(model, ids, g, **more):
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    x = base.get_input_embeddings()(ids).detach().requires_grad_()
    h = base.model(inputs_embeds=x, use_cache=False, **more).last_hidden_state
    logp, entropy = linear_logprobs(h, base.lm_head.weight, ids, outputs=("entropy",))
    (logp * g).sum().backward()
    return h.detach(), logp.detach(), entropy.detach(), x.grad


def differing(model) -> int:
    """Numbers that differ between rows alone, padded and packed."""
    torch.manual_seed(1)
    rows = [(torch.randint(0, 96, (1, n)), torch.randn(1, n)) for n in LENGTHS]
    alone, T, count = [results(model, *row) for row in rows], max(LENGTHS) + 2, 0
    ids, g = (torch.stack([torch.nn.functional.pad(t[0], (0, T - t.shape[1])) for t in each]) for each in zip(*rows))
    mask = (torch.arange(T) < torch.tensor(LENGTHS)[:, None]).long()
    padded = results(model, ids, g, attention_mask=mask)
    packed = results(
        model, *(torch.cat(each, 1) for each in zip(*rows)),
        position_ids=torch.cat([torch.arange(n) for n in LENGTHS])[None],
    )  # fmt: skip
    parts = zip(*(t.split(LENGTHS, 1) for t in packed))
    for i, (n, expected, part) in enumerate(zip(LENGTHS, alone, parts)):
        for a, b, c in zip(expected, padded, part):
            count += int((a[0] != b[i, :n]).sum()) + int((a != c).sum())
    return count


def test_a_dense_model_with_adapters():
    peft = pytest.importorskip("peft")
    model = model_of()
    assert differing(model) > 0
    adapters = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(model, adapters)
    patch(model, batch_invariant=True)
    assert differing(model) == 0
    model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, do_sample=False, eos_token_id=None)
    restore(model)
    assert model.config._attn_implementation == "sdpa" and not is_invariant()


def test_experts():
    model = model_of("qwen3_moe", num_hidden_layers=1)
    with pytest.raises(
        ValueError, match=r"batch_invariant: model.layers.0.mlp.experts \(\w+\) cannot be so: its experts"
    ):
        patch(model, batch_invariant=True, swiglu=False)
    patch(model, batch_invariant=True, swiglu=True)
    assert differing(model) == 0


def test_what_is_refused():
    model = model_of()
    with pytest.raises(ValueError, match=r"input_layernorm \(LlamaRMSNorm\) cannot be so: its norm is stock"):
        patch(model, batch_invariant=True, rms_norm=False)
    assert type(model.model.layers[0].mlp).forward.__module__.startswith("transformers.")  # as it was
    with pytest.raises(ValueError, match="batch_invariant: it must be requested of a model that is built"):
        apply_liger_kernel_to_llama(batch_invariant=True)
    gemma = model_of("gemma2", "eager")
    with pytest.raises(ValueError, match=r"batch_invariant: (sdpa does not serve gemma2|.* no dropout, softcap)"):
        patch(gemma, batch_invariant=True)
        differing(gemma)  # by other releases of Transformers
    del gemma
    for model_type, more, why in NEVER:
        with pytest.raises(ValueError, match=rf"batch_invariant: .*{why}"):
            patch(model_of(model_type, **more), batch_invariant=True)
    model = model_of("gpt2")
    model.transformer.drop.p = 0.1
    with pytest.raises(ValueError, match=r"drop \(Dropout\) cannot be so: it draws .*: p must be 0, got 0.1"):
        patch(model, batch_invariant=True)
    model = model_of(attention_dropout=0.5)
    patch(model, batch_invariant=True)
    with pytest.raises(ValueError, match="layer 0's LlamaAttention must have no dropout"):
        model(torch.ones(1, 3, dtype=torch.long))
    del model


def test_the_switch_is_held_by_models():
    model, other = model_of(), model_of()
    for each in (model, model, other):
        patch(each, batch_invariant=True)
    restore(model)
    assert is_invariant()
    gone = weakref.ref(other)
    del each, other
    gc.collect()
    assert gone() is None, [(type(r), str(r)[:300]) for r in gc.get_referrers(gone())]
    assert not is_invariant()


def test_nobody_compiles_it():
    """Neither the caller, all or a layer of it, nor ``generate`` by itself."""
    model, ids = model_of(), torch.ones(1, 3, dtype=torch.long)
    patch(model, batch_invariant=True)
    with pytest.raises(ValueError, match=r"the model must run uncompiled, got torch\.compile"):
        torch.compile(model, backend="eager")(ids)
    layer = model.model.layers[0]
    layer.compile(backend="eager")
    with pytest.raises(ValueError, match=r"the model must run uncompiled, got torch\.compile"):
        model(ids)
    layer._compiled_call_impl = None
    compiled = CompileConfig()
    compiled._compile_all_devices = True  # as on a GPU
    static = dict(max_new_tokens=2, cache_implementation="static", eos_token_id=None, compile_config=compiled)
    with pytest.raises(ValueError, match="batch_invariant: generate must run uncompiled, got a compile_config"):
        model.generate(ids, **static)
    assert model.generate(ids, **static, disable_compile=True).shape == (1, 5)
    restore(model)
    assert "_valid_auto_compile_criteria" not in vars(model)


def test_ranks_have_whole_rows():
    model = model_of()
    model.config._attn_implementation_internal = "ulysses_sdpa"
    with pytest.raises(ValueError, match="batch_invariant: ranks must have whole rows, got mode ulysses"):
        patch(model, batch_invariant=True)
    model = model_of()
    patch(model, batch_invariant=True)
    for mode in ("tp", "ulysses", "ulysses-fsdp2"):
        with pytest.raises(ValueError, match=f"mode must be none, ddp or fsdp2 with batch invariance, got {mode}"):
            parallelize(model, mode)
    del model
