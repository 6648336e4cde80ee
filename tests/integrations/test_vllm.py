"""Our kernels in vLLM: in its own classes where it is installed (without a GPU), and in stand-ins
with their signatures where it is not."""

import collections
import importlib
import importlib.util
import json
import sys
import types
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_kernel.engines import vllm as engine, vllm_answers
from liger_kernel.ops import linear_logprobs

LAYERS = "vllm.model_executor.layers"
# Read in vLLM 0.33: names, parameters and attributes
STAND_INS = {
    f"{LAYERS}.layernorm": """
class RMSNorm(CustomOp):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden_size)), eps
        self.variance_size_override, self.pass_weight, self.pass_weight_add = None, True, True
    def forward_native(self, x, residual=None): raise NotImplementedError
    def forward_cuda(self, x, residual=None): raise NotImplementedError

class GemmaRMSNorm(CustomOp):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(hidden_size)), eps
    def forward_native(self, x, residual=None): raise NotImplementedError
    def forward_cuda(self, x, residual=None): raise NotImplementedError
""",
    f"{LAYERS}.activation": """
class SiluAndMul(CustomOp):
    @staticmethod
    def forward_native(x): raise NotImplementedError
    def forward_cuda(self, x): raise NotImplementedError

class GeluAndMul(CustomOp):
    def __init__(self, approximate="none"):
        super().__init__()
        self.approximate = approximate
    def forward_native(self, x): raise NotImplementedError
    def forward_cuda(self, x): raise NotImplementedError
""",
    f"{LAYERS}.rotary_embedding.base": """
class RotaryEmbedding(CustomOp):
    def __init__(self, head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype):
        super().__init__()
        self.head_size, self.rotary_dim, self.is_neox_style = head_size, rotary_dim, is_neox_style
        inverse = base ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
        angles = torch.arange(max_position_embeddings)[:, None] * inverse
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
    def _match_cos_sin_cache_dtype(self, query): return self.cos_sin_cache.to(query.dtype)
    def forward_native(self, positions, query, key=None): raise NotImplementedError
    def forward_cuda(self, positions, query, key=None): raise NotImplementedError
""",
    "vllm.model_executor.models.transformers.base": """
class Base(nn.Module):
    def _create_model(self): return "made"
""",
    "vllm.v1.sample.sampler": """
class Sampler(nn.Module):
    @staticmethod
    def compute_logprobs(logits): raise NotImplementedError
""",
    "vllm.v1.worker.gpu.sample.logprob": "def compute_token_logprobs(logits, token_ids): raise NotImplementedError",
    "vllm.v1.worker.gpu.sample.prompt_logprob": "from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs",
}


class CustomOp(nn.Module):
    def forward(self, *args):
        return self.forward_cuda(*args)


def stand_ins() -> dict[str, types.ModuleType]:
    made: dict[str, types.ModuleType] = {}
    with mock.patch.dict(sys.modules):
        for name, source in STAND_INS.items():
            for parent in [name[:i] for i, c in enumerate(name) if c == "."]:
                made.setdefault(parent, types.ModuleType(parent)).__path__ = []
                sys.modules[parent] = made[parent]
            sys.modules[name] = made[name] = types.ModuleType(name)
            vars(made[name]).update(torch=torch, nn=nn, CustomOp=CustomOp)
            exec(source, vars(made[name]))
    return made


@pytest.fixture(params=["stand-ins", "vllm"])
def sources(request, monkeypatch):
    """vLLM's modules, by name; what a test registers is undone."""
    if request.param == "stand-ins":
        made = stand_ins()
        monkeypatch.setattr(engine.importlib.metadata, "version", lambda name: "0.0")
        for name, module in made.items():
            monkeypatch.setitem(sys.modules, name, module)
    else:
        if importlib.util.find_spec("vllm") is None:
            pytest.skip("vllm is not installed: make test-integrations")
        from vllm.model_executor import custom_op

        settings = types.SimpleNamespace(
            custom_ops=["all"], enabled_custom_ops=collections.Counter(), disabled_custom_ops=collections.Counter()
        )
        monkeypatch.setattr(custom_op, "get_cached_compilation_config", lambda: settings)
    for name in STAND_INS:
        module = importlib.import_module(name)
        for owner in [module, *(v for v in vars(module).values() if isinstance(v, type) and v.__module__ == name)]:
            for attribute in ("forward_native", "forward_cuda", "_create_model", "compute_logprobs"):
                if attribute in vars(owner):
                    monkeypatch.setattr(owner, attribute, vars(owner)[attribute])
        if hasattr(module, "compute_token_logprobs"):
            monkeypatch.setattr(module, "compute_token_logprobs", module.compute_token_logprobs)
    monkeypatch.setenv("LIGER_VLLM", "1")
    return importlib.import_module


def values(*shape, dtype=torch.bfloat16):
    torch.manual_seed(sum(shape))
    return torch.randn(*shape).to(dtype)


def of_llama(x, w, eps=1e-6):
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return w * y.to(x.dtype)


def test_layers(sources):
    engine.register()
    engine.register()  # vLLM may call a plugin again
    x, r = values(5, 64), values(5, 65)[:, :64]
    norm = sources(f"{LAYERS}.layernorm").RMSNorm(64).bfloat16()
    norm.weight.data = values(64)
    assert torch.equal(norm(x), of_llama(x, norm.weight))
    y, total = norm(x, r)
    assert torch.equal(total, x + r) and torch.equal(y, of_llama(x + r, norm.weight))
    gemma = sources(f"{LAYERS}.layernorm").GemmaRMSNorm(64).bfloat16()
    gemma.weight.data = values(64)
    assert torch.equal(gemma(x), of_llama(x.float(), 1 + gemma.weight.float()).bfloat16())
    act = sources(f"{LAYERS}.activation")
    silu = F.silu(x[:, :32]) * x[:, 32:]
    assert torch.equal(act.SiluAndMul.forward_native(x), silu)
    assert torch.equal(act.SiluAndMul.forward_cuda(None, x), silu)
    gelu = act.GeluAndMul.forward_cuda(types.SimpleNamespace(approximate="tanh"), x)
    assert torch.equal(gelu, F.gelu(x[:, :32], approximate="tanh") * x[:, 32:])


@pytest.mark.parametrize("halves", [True, False])
def test_rotary_embedding_turns_in_place_as_transformers_does(sources, halves):
    engine.register()
    turn = sources(f"{LAYERS}.rotary_embedding.base").RotaryEmbedding(16, 16, 32, 1e4, halves, torch.bfloat16)
    qkv = values(6, 64)
    q, k = qkv[:, :32].clone(), qkv[:, 32:48]  # a view, as of a merged projection
    positions = torch.tensor([0, 1, 2, 0, 5, 31])
    cos, sin = turn.cos_sin_cache[positions][:, None].chunk(2, -1)

    def expected(x):
        x = x.view(6, -1, 16)
        a, b = x.chunk(2, -1) if halves else (x[..., ::2], x[..., 1::2])
        a, b = a * cos - b * sin, b * cos + a * sin
        return (torch.cat([a, b], -1) if halves else torch.stack([a, b], -1).flatten(-2)).flatten(1)

    wanted = expected(q), expected(k)
    found = turn.forward_cuda(positions, q, k)
    assert found[0] is q and torch.equal(q, wanted[0]) and torch.equal(k, wanted[1]) and torch.equal(qkv[:, 32:48], k)


def test_log_probabilities_have_the_bits_of_the_head(sources):
    engine.register()
    x, w = values(7, 16), values(50, 16)
    ids = torch.arange(14).view(7, 2) * 3
    logits, expected = F.linear(x, w), linear_logprobs(x, w, ids)
    for module in ("logprob", "prompt_logprob"):
        found = sources(f"vllm.v1.worker.gpu.sample.{module}").compute_token_logprobs(logits, ids.int())
        assert torch.equal(found, expected)
    of_all = sources("vllm.v1.sample.sampler").Sampler.compute_logprobs(logits)
    assert of_all.dtype == torch.float32 and torch.equal(of_all.gather(1, ids), expected)


def test_rope_of_models_that_run_as_transformers(sources, monkeypatch):
    engine.register()
    import transformers.models.qwen3.modeling_qwen3 as theirs

    base = sources("vllm.model_executor.models.transformers.base").Base
    stock, norm = theirs.apply_rotary_pos_emb, theirs.Qwen3RMSNorm.forward
    config = types.SimpleNamespace(get_text_config=lambda: types.SimpleNamespace(model_type="qwen3"))
    create = base._create_model
    monkeypatch.setattr(create.__wrapped__, "__code__", (lambda self: "made").__code__)
    assert create(types.SimpleNamespace(config=config)) == "made"
    assert theirs.apply_rotary_pos_emb is not stock and theirs.Qwen3RMSNorm.forward is norm


def test_nothing_happens_unless_asked_for_and_mistakes_are_named(sources, monkeypatch):
    sampler = sources("vllm.v1.sample.sampler").Sampler
    for wanted in ("", "0", "norms,glu"):
        monkeypatch.setenv("LIGER_VLLM", wanted)
        engine.register()
        assert not hasattr(sampler.compute_logprobs, "_liger")
    monkeypatch.setenv("LIGER_VLLM", "norm")
    with pytest.raises(ValueError, match="norms"):
        engine.register()
    monkeypatch.setenv("LIGER_VLLM", "logprobs")
    monkeypatch.setattr(sampler, "compute_logprobs", staticmethod(lambda logits, mode: None))
    with pytest.raises(ImportError, match=r"must have the parameters \(logits\), got \(logits mode\)"):
        engine.register()


def test_answers_for_the_bench(tmp_path, monkeypatch):
    asked = {}

    class LLM:
        def __init__(self, model, **options):
            asked.update(options, model=model)

        def generate(self, prompts, sampling_params, *, use_tqdm):
            asked.update(vars(sampling_params))
            score = lambda ids: [{t: types.SimpleNamespace(logprob=-float(t))} for t in ids]
            made = [[p["prompt_token_ids"][0], 3] for p in prompts]
            return [
                types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=t, logprobs=score(t))]) for t in made
            ]

    fake = types.SimpleNamespace(LLM=LLM, SamplingParams=types.SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    spec = dict(model="folder", dtype="bfloat16", batch=2, prompts=[[5, 6], [7, 8]], new=2, temperature=0.7)
    (tmp_path / "spec").write_text(json.dumps(spec | dict(model_impl="transformers")))
    vllm_answers.main(tmp_path / "spec", tmp_path / "result")
    assert json.loads((tmp_path / "result").read_text()) == {"ids": [[5, 3], [7, 3]], "logp": [[-5, -3], [-7, -3]]}
    assert (asked["max_num_seqs"], asked["max_model_len"], asked["temperature"]) == (2, 4, 0.7)


def test_answers_ask_vllm_for_what_it_has():
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed: make test-integrations")
    import inspect

    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams

    fields = {*inspect.signature(EngineArgs).parameters, "skip_tokenizer_init"}
    asked = dict(model=1, dtype=1, model_impl=1, seed=1, max_model_len=1, max_num_seqs=1, enable_prefix_caching=1)
    assert {*asked, "compilation_config"} <= fields
    SamplingParams(temperature=0.5, max_tokens=2, ignore_eos=True, detokenize=False, logprobs=0)
