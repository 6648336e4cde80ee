"""When a head is called: logits, losses and gradients of a patched model are those of the moment
at which the model called its head."""

import dataclasses
import functools
import os
import random
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from adapters import lora
from hf_models import DEVICE, assert_same_learning, make, step, tokens
from torch import nn
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput
from watching import noted

from liger_kernel.patch_options import PatchOptions
from liger_kernel.transformers import _apply_liger_kernel_to_instance, instance_patches
from liger_kernel.transformers.head import loss as head_loss
from liger_kernel.transformers.head.recipe import LogitsRecipe, LossRequest
from liger_kernel.transformers.head.stand_in import deferred

MOMENTS = int(os.environ.get("LIGER_TEST_PROGRAMS", 60))


pytestmark = pytest.mark.usefixtures("models_by_references")


def llama(cls: type = LlamaForCausalLM) -> nn.Module:
    model = make("llama", num_hidden_layers=1).train()
    model.__class__ = cls
    return model


def patched(model: nn.Module) -> nn.Module:
    instance_patches(model, "llama", {}, "fused").apply()
    return model


def both(change=lambda model: None, cls: type = LlamaForCausalLM):
    stock, ours = llama(cls), patched(llama(cls))
    for model in (stock, ours):
        torch.manual_seed(1)
        change(model)
    return stock, ours


def loss_of(logits, labels):
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), shifted)


@dataclasses.dataclass
class Own:
    """An output that no library knows."""

    loss: torch.Tensor
    logits: torch.Tensor


class Returning(LlamaForCausalLM):
    def forward(self, input_ids, labels=None, **_):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return Own(loss_of(logits, labels), logits)


class Keeping(LlamaForCausalLM):
    """Its loss function keeps the logits."""

    def forward(self, *args, **kwargs):
        def kept(logits, labels, vocab_size, **_):
            self.logits = logits
            return loss_of(logits, labels)

        self.loss_function = kept
        return Own(super().forward(*args, **kwargs).loss, self.logits)


@pytest.mark.parametrize("cls", [Returning, Keeping])
def test_logits_that_are_kept_are_those_of_the_call(cls):
    found = []
    for model in both(cls=cls):
        out = model(**tokens())
        out.loss.backward()
        torch.optim.SGD(model.parameters(), lr=5.0).step()
        found.append(out.logits * 1.0)
        assert isinstance(out.logits, torch.Tensor)
    torch.testing.assert_close(found[1], found[0])


def test_memory_of_the_head(monkeypatch):
    rows = noted(monkeypatch, head_loss, "linear_cross_entropy", lambda *_, chunk_rows, **__: chunk_rows)
    learned = []
    for memory in ("auto", "low", "0.02 MB"):
        model = llama()
        _apply_liger_kernel_to_instance(model, head_memory=memory)
        learned.append(step(model, tokens(length=150))[1])
    V = llama().config.vocab_size
    assert rows[0] is None and rows[2] == max(128, 20000 // (4 * V) // 128 * 128) and rows[1] is not None
    for each in learned[1:]:
        assert_same_learning(each, learned[0])
    for wrong in ("much", -1, True, "GB"):
        with pytest.raises(ValueError, match="head_memory: must be 'auto', 'low' or a number of bytes"):
            PatchOptions(head_memory=wrong)
    understood = [PatchOptions(head_memory=m).head_memory for m in (None, "2GB", "1500 mb", 7)]
    assert understood == ["auto", 2 * 10**9, 15 * 10**8, 7]


@dataclasses.dataclass
class Outer(ModelOutput):
    """As BLIP-2 returns it."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    language_model_outputs: ModelOutput | None = None


class Nesting(LlamaForCausalLM):
    def forward(self, input_ids, labels=None, **_):
        hidden = self.model(input_ids).last_hidden_state
        inner = CausalLMOutputWithPast(logits=self.lm_head(hidden), hidden_states=(hidden,))
        return Outer(loss_of(inner.logits, labels), inner.logits, inner)


def test_an_output_within_an_output(computed):
    stock, ours = ((model(**tokens()), model.eval()(**tokens())) for model in both(cls=Nesting))
    torch.testing.assert_close([out.loss for out in ours], [out.loss for out in stock])
    inner = ours[0].language_model_outputs
    assert ours[0].logits is None and inner.logits is None
    torch.testing.assert_close(inner.hidden_states, stock[0].language_model_outputs.hidden_states)
    for found in (ours[1].logits, ours[1].language_model_outputs.logits):
        torch.testing.assert_close(found, stock[1].logits)
    assert not computed


class Moments(LlamaForCausalLM):
    """Its forward calls the head, changes it, and computes losses, in the order of a program."""

    def forward(self, input_ids, labels=None, **_):
        hidden, logits, total = self.model(input_ids).last_hidden_state, [], 0.0
        for number, (do, at) in enumerate(self.program, 1):
            if do == "call":
                self.rows = hidden * (1 + 0.1 * number)
                logits.append(self.lm_head(self.rows))
            elif do == "call without gradient":
                with torch.no_grad():
                    logits.append(self.lm_head(hidden))
            elif do == "call with other weights":
                w = _base(self).weight
                name = next(name for name, p in self.lm_head.named_parameters() if p is w)
                other = (w * 2, w.flip(0).view(w.shape), w.detach() * 2)[at % 3]
                logits.append(torch.func.functional_call(self.lm_head, {name: other}, (hidden,)))
            elif do == "loss" and logits:
                total = total + number * loss_of(logits[at % len(logits)], labels)
            elif do == "look" and logits:
                total = total + 0.1 * number * logits[at % len(logits)].logsumexp(-1).mean()
            elif do in CHANGES:
                CHANGES[do](self, at)
        return (total + 0.01 * hidden.square().mean(), *logits)


def _with_bias(model):
    model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, device=DEVICE)


def _adapters(model):
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [m for m in model.modules() if isinstance(m, BaseTunerLayer)]


def _base(model):
    return getattr(model.lm_head, "base_layer", model.lm_head)


def _replace_weight(model, at):
    _base(model).weight = nn.Parameter(_base(model).weight.detach() * 1.5)


def exchange(t: torch.Tensor) -> torch.Tensor:
    """Give ``t`` other memory, of twice its values; its version does not tell."""
    there = t.data
    t.data = there * 2
    return there


def _exchange(model, at):
    used = [*model.lm_head.parameters(), model.rows]
    exchange(used[at % len(used)])


CHANGES = {
    "adapters off": lambda model, at: [m.enable_adapters(False) for m in _adapters(model)],
    "adapters on": lambda model, at: [m.enable_adapters(True) for m in _adapters(model)],
    "another adapter": lambda model, at: [m.set_adapter(["one", "two"][at % 2]) for m in _adapters(model)],
    "both adapters": lambda model, at: [m.set_adapter(["one", "two"]) for m in _adapters(model)],
    "scaled": lambda model, at: [m.set_scale("one", 0.5 + at) for m in _adapters(model)],
    "eval": lambda model, at: model.eval(),
    "train": lambda model, at: model.train(),
    "freeze": lambda model, at: _base(model).weight.requires_grad_(False),
    "thaw": lambda model, at: _base(model).weight.requires_grad_(True),
    "another weight": _replace_weight,
    "other memory": _exchange,
    "hook": lambda model, at: model.lm_head.register_forward_hook(lambda m, a, out: out * 1.5),
}


@pytest.mark.parametrize("adapted", [False, True])
def test_every_call_is_of_its_moment(adapted):
    """Random programs, with other states of the head between call, loss and backward."""
    plain = ["eval", "train", "freeze", "thaw", "another weight", "other memory", "hook"]
    usual = ["call", "call", "loss", "loss", "look", "call without gradient", "call with other weights"]
    for seed in range(MOMENTS // 2):
        rng = random.Random(1000 * adapted + seed)
        kinds = usual + list(CHANGES if adapted else plain)
        drawn = [(rng.choice(kinds), rng.randrange(6)) for _ in range(12)]
        program = [("call", 0), *drawn[: rng.randrange(2, 9)], ("loss", 0)]
        after = [(do, at) for do, at in drawn[8:] if do in CHANGES]
        found = []
        for model in both(lambda model: adapted or _with_bias(model), cls=Moments):
            model.program = program
            torch.manual_seed(2)
            run = lora(model, "one", "two", target_modules=["lm_head"]) if adapted else model
            if adapted:
                model.lm_head.base_layer.weight.requires_grad_(True)
            weights = dict(run.named_parameters())
            out = run(**tokens())
            for do, at in after:
                if do != "hook":
                    CHANGES[do](model, at)
            out[0].backward()
            learned = {n: p.grad for n, p in weights.items() if p.grad is not None}
            found.append((learned | {"loss": out[0].detach()}, [y.detach() + 0 for y in out[1:]]))
        told = f"program {seed}, adapted {adapted}: {program}, before the backward {after}"
        try:
            assert found[1][0].keys() == found[0][0].keys()
            if len(found[0][0]) > 1:  # something is learnt
                assert_same_learning(found[1][0], found[0][0], 1e-5)
            for ours, stock in zip(found[1][1], found[0][1], strict=True):
                torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)
        except AssertionError as error:
            raise AssertionError(told) from error


def _free(head):
    there = exchange(head.weight)
    there.untyped_storage().resize_(0)


LOST = {"in place": lambda head: torch.no_grad()(head.weight.mul_)(2.0), "exchanged, and the old memory freed": _free}


@pytest.mark.parametrize("kind", LOST)
def test_weights_changed_in_place_between_call_and_loss_raise(kind):
    """Their values of then are gone; logits would have been computed with them."""

    class Edited(LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **_):
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            LOST[kind](self.lm_head)
            return {"loss": loss_of(logits, labels)}

    _, ours = both(cls=Edited)
    with pytest.raises(RuntimeError, match=r"changed in place since it was called: take logits.value\(\) before"):
        ours(**tokens())


@pytest.mark.parametrize("where", ["forward", "loss function"])
def test_code_that_writes_to_data_between_call_and_loss(where):
    """No version tells, so the head of a model with such code runs when it is called."""

    class Writing(LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **_):
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            self.lm_head.weight.data.mul_(2.0)
            return {"loss": loss_of(logits, labels)}

    def custom(model):
        def loss(logits, labels, vocab_size, **_):
            model.lm_head.weight.data.mul_(2.0)
            return loss_of(logits, labels)

        model.loss_function = loss

    stock, ours = both(cls=Writing) if where == "forward" else both(custom)
    torch.testing.assert_close(ours(**tokens())["loss"], stock(**tokens())["loss"])


def _entering(context):
    """Hooks that enter a context before the call and leave it after, whatever happens."""

    def change(model):
        entered = []
        model.lm_head.register_forward_pre_hook(
            lambda *_: (entered.append(context()), entered[-1].__enter__(), None)[2]
        )
        model.lm_head.register_forward_hook(
            lambda *_: (entered.pop().__exit__(None, None, None), None)[1], always_call=True
        )

    return change


def _watch(model):
    """As trackers of parameters and activations do, with each form of hook."""
    counts = []
    for m in model.modules():
        m.register_forward_hook(lambda m, args, out: counts.append(len(args)))
        m.register_forward_hook(lambda m, args, kwargs, out: counts.append(len(kwargs)), with_kwargs=True)
        m.register_forward_pre_hook(lambda m, args, kwargs: None, with_kwargs=True)


def _scaled_for_the_call(model):
    model.lm_head.register_forward_pre_hook(lambda m, args: (m.weight.data.mul_(2), None)[1])
    model.lm_head.register_forward_hook(lambda m, *_: (m.weight.data.mul_(0.5), None)[1])


class Method:
    def seen(self, m, args, out):
        self.calls = getattr(self, "calls", 0) + 1


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def _hook(hook, **options):
    """Of the output head's call."""
    return lambda model: model.lm_head.register_forward_hook(hook, **options)


def _pre_hook(hook):
    return lambda model: model.lm_head.register_forward_pre_hook(hook)


def _saving(pack, unpack):
    return _entering(lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack))


# What hooks may do that leaves the result alone, or only casts it
QUIET = {
    "nothing": _hook(lambda *_: None, always_call=True),
    "upcast": _hook(lambda m, args, out: out.to(torch.float32)),
    "upcast by a method": _hook(lambda m, args, out: out.float()),
    "a method": _hook(Method().seen),
    "statistics of inputs": _hook(lambda m, args, out: (args[0].norm(), None)[1]),
    "every module": _watch,
    "offloading": _saving(lambda t: t, lambda t: t),
    "compressed": _saving(lambda t: t.bfloat16(), lambda t: t.float()),
    "autocast": _entering(lambda: torch.autocast(DEVICE, torch.bfloat16)),
    "other inputs": _pre_hook(lambda m, args: args[0] * 1.5),
    "inputs in place": _pre_hook(lambda m, args: (args[0].mul_(1.5), None)[1]),
}
# What hooks may do that needs the logits themselves
LOUD = {
    "statistics": _hook(lambda m, args, out: (out.abs().mean(), None)[1]),
    "all arguments": _hook(lambda *args: args[-1] * 1.5),
    "a function of autograd": _hook(lambda m, args, out: Twice.apply(out)),
    "a function of autograd, by a cell": (lambda f: _hook(lambda m, args, out: f(out)))(Twice.apply),
    "an object": _hook(functools.partial(lambda s, m, args, out: out * s, 1.5)),
    "gradients of logits": _hook(lambda m, args, out: (out.register_hook(lambda g: g * 2), None)[1]),
    "a backward hook": lambda m: m.lm_head.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,)),
    "weights for the call": _scaled_for_the_call,
    "inputs in place, after": _hook(lambda m, args, out: [a.data.mul_(1.5) for a in args][:0] or None),
    "a mode": _entering(lambda: torch.device("meta" if DEVICE == "cpu" else DEVICE)),
}


@pytest.mark.parametrize("kind", QUIET | LOUD)
def test_hooks_that_leave_the_result_alone_do_not_cost_the_fusion(kind, monkeypatch, computed):
    fused = noted(monkeypatch, head_loss, "linear_cross_entropy", lambda *_, **__: 1)
    stock, ours = both((QUIET | LOUD)[kind])
    expected = step(stock)[1]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [step(ours)[1] for _ in range(2)]
    for learned in found:
        assert_same_learning(learned, expected, 2e-2 if kind in ("autocast", "compressed") else 1e-5)
    said = [str(w.message) for w in said if "the output head" in str(w.message)]
    if kind in QUIET:
        assert len(fused) == 2 and not computed and not said
    else:
        assert not fused and len(said) == 1 and "GB in this call) because of a hook that " in said[0]


def _linears(function):
    return lambda m, *args: function(*args) if isinstance(m, nn.Linear) else None


MODULES, LINEAR, FORWARD = torch.nn.modules.module, F.linear, nn.Linear.forward
OF_ALL_MODULES = {
    "module hook": lambda: MODULES.register_module_forward_hook(_linears(lambda args, out: out * 1.5)),
    "module pre-hook": lambda: MODULES.register_module_forward_pre_hook(_linears(lambda args: (args[0] * 1.5,))),
    "F.linear": lambda: mock.patch.object(F, "linear", lambda *args: LINEAR(*args) * 1.5),
    "nn.Linear.forward": lambda: mock.patch.object(nn.Linear, "forward", lambda self, x: FORWARD(self, x) * 1.5),
}


@pytest.mark.parametrize("kind", OF_ALL_MODULES)
def test_what_is_changed_for_all_modules_reaches_the_head(kind):
    models = both()
    expected = step(models[0])[1]
    with OF_ALL_MODULES[kind]():
        with_it, ours = (step(m)[1] for m in models)
    assert not torch.equal(with_it["loss"], expected["loss"])
    assert_same_learning(ours, with_it)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) / x.norm(dim=-1, keepdim=True)


def _sequence_head(model):
    n, V = model.lm_head.in_features, model.lm_head.out_features
    parts = nn.Flatten(0, 1), nn.BatchNorm1d(n), nn.Linear(n, V), nn.Unflatten(0, (2, -1))
    model.lm_head = nn.Sequential(*parts).to(DEVICE)


OTHER_HEADS = {
    "batch norm": _sequence_head,
    "parametrised": lambda m: setattr(m, "lm_head", nn.utils.parametrizations.spectral_norm(m.lm_head)),
    "a class of its own": lambda m: setattr(m.lm_head, "__class__", Scaled),
}


@pytest.mark.parametrize("kind", OTHER_HEADS)
def test_heads_that_cannot_wait_are_called_at_once(kind):
    """Twice, because of statistics that a head keeps."""
    stock, ours = both(lambda model: (OTHER_HEADS[kind](model), model.double()))
    for _ in range(2):
        expected = step(stock)[1]
        assert_same_learning(step(ours)[1], expected)
    for (name, a), (_, b) in zip(stock.named_buffers(), ours.named_buffers(), strict=True):
        torch.testing.assert_close(b, a, msg=name)


def test_who_looks_for_the_head_during_a_forward_finds_it():
    seen = []

    class Looking(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            seen.append(
                (isinstance(self.lm_head, nn.Linear), [type(m) for m in self.modules()][-1], repr(self.lm_head))
            )
            return super().forward(*args, **kwargs)

    for model in both(cls=Looking):
        step(model)
    assert seen[0] == seen[1]


def test_a_recipe_below_autograd_raises():
    """What goes past ``__torch_function__`` would cut the graph."""
    x = deferred(nn.Linear(4, 5, device=DEVICE), torch.randn(2, 3, 4, device=DEVICE, requires_grad=True), LossRequest())
    assert isinstance(x, LogitsRecipe) and isinstance(x, torch.Tensor)
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match=r"give it logits.value\(\)"):
        torch.sum(x)
