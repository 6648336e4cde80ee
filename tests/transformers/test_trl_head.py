"""TRL's heads and ours, without TRL: modules stand in that have the names, the parameters and the
calling side of TRL's."""

import copy
import functools
import sys
import types
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_models import make
from torch import Tensor, nn

import liger_kernel
import liger_kernel.transformers as liger
from liger_kernel.transformers import trl_head
from liger_kernel.transformers.patching.patches import is_patched

LOGPROBS, DIVERGENCES = "trl.trainer.utils", "trl.kernels.chunked_divergence"


class _ChunkedLogProbFunction(torch.autograd.Function):
    """By all logits: what TRL's computes."""

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
    ):
        TRL_CALLS.append("log-probabilities")
        logp = (F.linear(hidden, weight, bias) * logit_scale / temperature).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        top1 = logp.argmax(-1) == targets if "is_top1" in outputs else None
        of_target = logp.gather(-1, targets[:, None])[:, 0]
        return of_target + OFF[0], entropy if "entropy" in outputs else None, None, None, top1


class ChunkedDivergenceFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias, beta,
        temperature=1.0, student_logit_scale=1.0, student_final_logit_softcapping=None, teacher_logit_scale=1.0,
        teacher_final_logit_softcapping=None,
    ):  # fmt: skip
        TRL_CALLS.append("divergences")
        s, t = (
            (F.linear(x, w, b) * scale / temperature).log_softmax(-1)
            for x, w, b, scale in (
                (student_hidden, student_weight, student_bias, student_logit_scale),
                (teacher_hidden, teacher_weight, teacher_bias, teacher_logit_scale),
            )
        )
        assert beta in (0.0, 1.0)
        kl = (t.exp() * (t - s)).sum(-1) if beta == 0 else (s.exp() * (s - t)).sum(-1)
        return kl + OFF[0], -(s.exp() * s).sum(-1)


TRL_CALLS: list[str] = []
OFF = [0.0]  # what is wrong with TRL's numbers


@pytest.fixture(autouse=True)
def trl(monkeypatch) -> Any:
    """Modules in the places of TRL's."""
    utils, kernels = (types.ModuleType(name) for name in (LOGPROBS, DIVERGENCES))
    # classes of their own for each test, because a patch is an attribute of them
    utils._ChunkedLogProbFunction = type("_ChunkedLogProbFunction", (_ChunkedLogProbFunction,), {})
    kernels.ChunkedDivergenceFunction = type("ChunkedDivergenceFunction", (ChunkedDivergenceFunction,), {})
    for module in (utils, kernels):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys.modules[__name__], "OFF", [0.0])
    TRL_CALLS.clear()
    yield types.SimpleNamespace(
        logprobs=utils._ChunkedLogProbFunction, divergences=kernels.ChunkedDivergenceFunction, utils=utils
    )
    trl_head.stop()


def score(trl: Any, inner_model: nn.Module, x: Tensor, outputs: tuple[str, ...] = ("entropy", "is_top1")) -> Any:
    """As the forward that TRL gives to models does."""
    w, y = inner_model.lm_head.weight, torch.arange(len(x), device=x.device) % 7
    return trl.logprobs.apply(x, w, None, y, 0.7, 256, None, 0.5, outputs)


class Distillation:
    """Asks for the loss of its model as TRL's trainers do."""

    def __init__(self, model: nn.Module):
        self.model = model

    def loss(self, trl: Any, x: Tensor, beta: float, teacher: Tensor | None = None) -> Any:
        w = self.model.lm_head.weight
        t = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x.device)
        teacher = w.detach().flip(0) if teacher is None else teacher
        return trl.divergences.apply(x, w, None, t, teacher, None, beta, 0.7, 0.5, None, 0.25, None)


@pytest.fixture
def model() -> nn.Module:
    return make("llama", vocab_size=64)


def hidden(model: nn.Module) -> Tensor:
    x = torch.randn(9, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    return x.to(model.lm_head.weight.device)


def test_a_patched_model_runs_our_heads(trl, model):
    x = hidden(model)
    wanted = score(trl, model, x), Distillation(model).loss(trl, x, 0.0), Distillation(model).loss(trl, x, 1.0)
    liger.apply_liger_kernel_to_llama(model=model)
    TRL_CALLS.clear()
    found = score(trl, model, x), Distillation(model).loss(trl, x, 0.0), Distillation(model).loss(trl, x, 1.0)
    assert not TRL_CALLS
    for ours, theirs in zip(found, wanted):
        assert [t is None for t in ours] == [t is None for t in theirs]
        assert [t.dtype for t in ours if t is not None] == [t.dtype for t in theirs if t is not None]
        torch.testing.assert_close(ours, theirs)
    kl, entropy = found[1]
    assert kl.requires_grad and not entropy.requires_grad
    kl.sum().backward()
    assert model.lm_head.weight.grad.abs().max() > 0


def test_only_models_that_are_patched(trl, model):
    other, x = make("llama", vocab_size=64), hidden(model)
    liger.apply_liger_kernel_to_llama(model=model)
    score(trl, other, x)
    Distillation(other).loss(trl, x, 0.0)
    assert TRL_CALLS == ["log-probabilities", "divergences"]
    wrapped = nn.Module()
    wrapped.module, wrapped.lm_head = model, model.lm_head  # as DDP has it
    score(trl, wrapped, x)
    peft = nn.Module()
    peft.get_base_model = lambda: model  # as PEFT has it
    wrapped.module = peft
    Distillation(wrapped).loss(trl, x, 0.0)
    assert len(TRL_CALLS) == 2


def test_a_model_that_is_compiled(trl, model):
    """In a graph no frame tells which model calls; what is patched is what was compiled."""
    compiled, x = torch.compile(model, backend="eager"), hidden(model)
    model.forward = functools.partial(score, trl, model)
    expected = compiled(x)
    liger.apply_liger_kernel_to_llama(model=compiled)
    TRL_CALLS.clear()
    torch.testing.assert_close(compiled(x), expected)
    assert not TRL_CALLS
    liger.restore(compiled)
    compiled(x)
    assert TRL_CALLS == ["log-probabilities"]


def test_a_compiled_reference_is_patched_with_the_policy(trl, model):
    class Trains(transformers.Trainer):
        def __init__(self, model: nn.Module, ref_model: nn.Module):
            self.model, self.ref_model = model, ref_model

        def train(self) -> None:
            liger._apply_liger_kernel_to_instance(model=self.model)

    reference = make("llama", vocab_size=64)
    Trains(model, torch.compile(reference, backend="eager")).train()
    assert is_patched(model) and is_patched(reference)
    score(trl, reference, hidden(model))
    assert not TRL_CALLS


def test_a_copy_of_a_patched_model_is_patched(trl, model):
    """As the reference that is copied from a policy."""
    liger.apply_liger_kernel_to_llama(model=model)
    copied = copy.deepcopy(model)
    score(trl, copied, hidden(model))
    assert not TRL_CALLS
    liger.restore(copied)
    score(trl, copied, hidden(model))
    assert TRL_CALLS == ["log-probabilities"]
    before = vars(make("llama", vocab_size=64)).keys()
    liger.restore(model)
    assert vars(model).keys() == before


def test_restore_gives_back_the_very_object(trl, model):
    stock = [(f, vars(f).get("apply"), f.apply.__func__) for f in (trl.logprobs, trl.divergences)]
    liger.apply_liger_kernel_to_llama(model=model)
    assert all("apply" in vars(f) for f, _, _ in stock)
    liger.restore(model)
    for function, own, method in stock:
        assert vars(function).get("apply") is own and function.apply.__func__ is method
    liger.apply_liger_kernel_to_llama()
    score(trl, model, hidden(model))  # models of this type, from now on
    liger.restore()
    assert not TRL_CALLS and not any("apply" in vars(f) for f, _, _ in stock)


def test_the_flag_and_the_line_of_the_report(trl, model):
    assert liger_kernel.apply(model, fused_logprobs=False).line.endswith("rope, head and loss")
    score(trl, model, hidden(model))
    assert TRL_CALLS == ["log-probabilities"] and "apply" not in vars(trl.logprobs)
    assert liger_kernel.apply(model).line.endswith("rope, head and loss, head through TRL")


def test_other_parameters_run_trls_own(trl, model):
    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, something_new):
            return hidden

    trl.utils._ChunkedLogProbFunction = Changed
    with pytest.warns(UserWarning, match=r"must be those of TRL 1.15 and 1.16 or 1.13 and 1.14, got .*something_new"):
        liger.apply_liger_kernel_to_llama(model=model)
    assert "apply" not in vars(Changed) and "apply" in vars(trl.divergences)


def test_the_report_says_whose_heads_run(trl, model, monkeypatch):
    for package in ("trl", "trl.trainer"):  # `heads` imports from them, and finds the stand-ins
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    assert trl_head.heads().startswith("log-probabilities: TRL's, ours once a model is patched (_Chunked")
    liger.apply_liger_kernel_to_llama(model=model)
    assert trl_head.heads().count("ours for patched models") == 2
    trl.logprobs.forward = lambda ctx, something_new: None
    monkeypatch.setitem(sys.modules, DIVERGENCES, None)
    said = trl_head.heads()
    assert "TRL's, parameters of its _ChunkedLogProbFunction must be those of TRL 1.15" in said
    assert said.endswith("got something_new; divergences: TRL's, no function of its own was found")


def test_divided_heads_are_gathered(trl, model, monkeypatch):
    liger.apply_liger_kernel_to_llama(model=model)
    x, w, gathered = hidden(model), model.lm_head.weight, []
    wanted, whole = Distillation(model).loss(trl, x, 0.0), w.data
    teacher = whole.flip(0)

    @contextmanager
    def gathering(parts):
        gathered.extend(parts)
        w.data = whole
        yield

    zero = types.SimpleNamespace(GatheredParameters=gathering)
    monkeypatch.setitem(sys.modules, "deepspeed", types.SimpleNamespace(zero=zero))
    w.ds_id, w.data = 0, w.data.new_empty(0)  # as ZeRO-3 leaves and marks what it divides
    torch.testing.assert_close(Distillation(model).loss(trl, x, 0.0, teacher), wanted)
    assert len(gathered) == 1 and gathered[0] is w and not TRL_CALLS


@pytest.mark.parametrize("what", ["log-probabilities", "divergences"])
@pytest.mark.parametrize("wrong", [False, True])
def test_checks_compare_the_first_call(trl, model, monkeypatch, what, wrong):
    monkeypatch.setenv("LIGER_CHECKS", "1")
    OFF[0] = 0.5 * wrong
    liger.apply_liger_kernel_to_llama(model=model)
    x = hidden(model)
    call = lambda: score(trl, model, x) if what[0] == "l" else Distillation(model).loss(trl, x, 0.0)
    if wrong:
        with pytest.raises(RuntimeError, match=f"TRL's head and ours differ in {what} by 0.5"):
            call()
    else:
        call()
    assert [what] == TRL_CALLS
    call()
    assert [what] == TRL_CALLS
