"""The recipe for logits, the heads it can hold, and the contract of a patched ``forward``."""

import copy
import importlib
import inspect
import pickle
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import transformers
from hf_models import DEVICE, assert_same_learning, make, step, tokens
from quick import further
from torch import nn
from transformers import LlamaForCausalLM
from watching import noted

from liger_kernel import ops
from liger_kernel.nn import LigerCrossEntropyLoss, liger_cross_entropy
from liger_kernel.ops._core import operator as _op
from liger_kernel.ops.losses.grpo_loss import triton_grpo_loss
from liger_kernel.transformers import class_patches, instance_patches, restore
from liger_kernel.transformers.head import forward as head_forward
from liger_kernel.transformers.head.recipe import DeferredLogits, LossRequest
from liger_kernel.transformers.head.stand_in import deferred, place_of_head, standing

pytestmark = pytest.mark.usefixtures("models_by_references")


def patched(model: nn.Module, head: str = "fused") -> nn.Module:
    instance_patches(model, model.config.model_type, {}, head).apply()
    return model


B, T, H, V = 2, 5, 8, 11


def recipe(loss: LossRequest | None = None, bias: bool = False):
    torch.manual_seed(0)
    head = nn.Linear(H, V, bias=bias, device=DEVICE)
    hidden = torch.randn(B, T, H, device=DEVICE, requires_grad=True)
    return deferred(head, hidden, loss or LossRequest()), head(hidden), (hidden, head.weight)


TARGET = torch.tensor([1, 4, -100, 7, 0, 10, -100, 2, 3, 5], device=DEVICE)


def _divided(x):
    x /= 2.0
    return x


# what models and losses do between head and cross entropy, without the logits ever being computed
RECORDED = {
    "float, view": lambda x: F.cross_entropy(x.float().view(-1, V), TARGET),
    "reshape to given sizes": lambda x: F.cross_entropy(x.reshape(B * T, V), TARGET, reduction="sum"),
    "reshape to a tuple": lambda x: F.cross_entropy(x.reshape((B * T, -1)), TARGET),
    "flatten": lambda x: F.cross_entropy(x.flatten(0, 1), TARGET, reduction="none").sum(),
    "size and shape": lambda x: F.cross_entropy(x.view(-1, x.size(-1)), TARGET[: x.shape[0] * x.shape[1]]),
    "module": lambda x: nn.CrossEntropyLoss(label_smoothing=0.1)(x.contiguous().view(-1, V), TARGET),
    "class weights": lambda x: F.cross_entropy(x.view(-1, V), TARGET, weight=torch.arange(1.0, V + 1, device=DEVICE)),
    "ignore index": lambda x: F.cross_entropy(x.view(-1, V), TARGET.where(TARGET >= 0, 3), ignore_index=3),
    "shift": lambda x: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, V), TARGET.view(B, T)[:, 1:].reshape(-1)),
    "slices": lambda x: F.cross_entropy(x[:, 1:].reshape(-1, V), TARGET.view(B, T)[:, 1:].reshape(-1)),
    "mask": lambda x: F.cross_entropy(x[TARGET.view(B, T) > 2], TARGET[TARGET > 2]),
    "positions": lambda x: F.cross_entropy(
        x[:, torch.tensor([3, 0])].view(-1, V), TARGET.view(B, T)[:, [3, 0]].view(-1)
    ),
    "one sequence": lambda x: F.cross_entropy(x[1], TARGET[T:]),
    "scale": lambda x: F.cross_entropy((x * 0.5 / 3.0).view(-1, V), TARGET),
    "scale from the left": lambda x: F.cross_entropy((2 * x).view(-1, V), TARGET),
    "cap": lambda x: F.cross_entropy((torch.tanh(x / 2.0) * 2.0).view(-1, V), TARGET),
    "scale and cap": lambda x: F.cross_entropy(((x * 3.0 / 2.0).tanh() * 2.0).view(-1, V), TARGET),
    "cap of another size": lambda x: F.cross_entropy((x.float().tanh() * 4.0).view(-1, V), TARGET),
    "divided in place": lambda x: F.cross_entropy(_divided(x * 1.5).view(-1, V), TARGET),
    "the logits divided in place": lambda x: F.cross_entropy(_divided(x).view(-1, V), TARGET),
    "cast back": lambda x: F.cross_entropy(
        (torch.tanh(x.to(torch.float32) / 2.0) * 2.0).to(x.dtype).view(-1, V), TARGET
    ),
}

# and where they are
COMPUTED = {
    "log softmax": lambda x: F.nll_loss(F.log_softmax(x.float(), -1).view(-1, V), TARGET),
    "channels second": lambda x: F.cross_entropy(x.transpose(1, 2), TARGET.view(B, T)),
    "class probabilities": lambda x: F.cross_entropy(x.view(-1, V), torch.full((B * T, V), 1 / V, device=DEVICE)),
    "a cap of nothing": lambda x: F.cross_entropy((x.tanh() * 0.0).view(-1, V), TARGET),
    "whole numbers": lambda x: (x % 1).sum() + (x // 1 > 0).sum(),
    "two caps": lambda x: F.cross_entropy(torch.tanh(torch.tanh(x)).view(-1, V), TARGET),
    "in place, then scaled": lambda x: (x.mul_(0.5), F.cross_entropy((x / 2.0).float().view(-1, V), TARGET))[1],
    "assignment": lambda x: (x.__setitem__((..., 0), -10.0), F.cross_entropy(x.view(-1, V), TARGET))[1],
    "columns": lambda x: F.cross_entropy(x[..., :10].reshape(-1, 10), TARGET.clamp(max=9)),
    "columns first": lambda x: x[..., 3].sum(),
    "another shape": lambda x: x.view(B, T * V).square().sum(),
    "matmul": lambda x: (x @ torch.ones(V, device=DEVICE)).sum(),
}


EVEN = torch.zeros(B, T, V, device=DEVICE)
# our own functions, which kernels serve where there is a GPU; the first two run together with the
# head
OURS = {
    "liger_cross_entropy": lambda x: liger_cross_entropy(x.view(-1, V), TARGET, label_smoothing=0.1),
    "LigerCrossEntropyLoss": lambda x: LigerCrossEntropyLoss(reduction="sum")(x.view(-1, V), TARGET),
    "with a z-loss": lambda x: LigerCrossEntropyLoss(lse_square_scale=0.1)(x.view(-1, V), TARGET),
    "with an accuracy": lambda x: liger_cross_entropy(x.view(-1, V), TARGET, return_token_accuracy=True).loss,
    "of channels": lambda x: liger_cross_entropy(x.transpose(1, 2), TARGET.view(B, T)),
    "cross_entropy": lambda x: ops.cross_entropy(x.view(-1, V), TARGET),
    "logit_divergence": lambda x: ops.logit_divergence(x, EVEN) + ops.logit_divergence(EVEN, x, kind="forward_kl"),
    "fused_ce_tvd": lambda x: torch.stack(ops.fused_ce_tvd(x.view(-1, V), EVEN.view(-1, V), TARGET)).sum(),
    "vocab_parallel_cross_entropy": lambda x: ops.vocab_parallel_cross_entropy(x, TARGET.view(B, T)),
    "triton_grpo_loss": lambda x: triton_grpo_loss(
        x, None, None, TARGET.view(B, T)[:, 1:].clamp(min=0), torch.ones(B, device=DEVICE), beta=0.0
    )[0].sum(),
    "softmax": lambda x: ops.softmax(x)[..., 0].sum(),
    "sparsemax": lambda x: ops.sparsemax(x).square().sum(),
}
RECORDED |= {name: OURS[name] for name in list(OURS)[:2]}
COMPUTED |= {name: OURS[name] for name in list(OURS)[2:]}


@pytest.mark.skipif(not _op.HAS_TRITON, reason="Triton is not installed: references serve every call")
@pytest.mark.parametrize("name", OURS)
def test_our_functions_take_a_recipe(name, computed):
    """Also where kernels serve them, which are functions of autograd."""
    _op._KERNEL_DEVICES.add(DEVICE)
    test_a_recipe_is_its_logits(name, computed)


@pytest.mark.parametrize("name", RECORDED | COMPUTED)
def test_a_recipe_is_its_logits(name, computed):
    """The same loss and gradients as with the logits."""
    use = (RECORDED | COMPUTED)[name]
    deferred_logits, logits, (hidden, weight) = recipe()
    expected = use(logits if "place" not in name and name != "assignment" else logits + 0)
    truth = torch.autograd.grad(expected, (hidden, weight))
    found = use(deferred_logits)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(found, (hidden, weight)), truth, rtol=1e-5, atol=1e-6)
    assert bool(computed) == (name in COMPUTED)


ASKED = {
    "register_hook": lambda logits, loss: logits.register_hook(lambda g: g * 2),
    "retain_grad": lambda logits, loss: logits.retain_grad(),
    "grad": lambda logits, loss: torch.autograd.grad(loss, logits, retain_graph=True),
    "grad, the attribute": lambda logits, loss: logits.grad,
}


@pytest.mark.parametrize("kind", ASKED)
def test_gradients_of_logits_are_asked_for_before_their_loss(kind):
    x, _, _ = recipe()
    loss = F.cross_entropy(x.view(-1, V), TARGET)
    said = f"^{kind.split(',')[0]}: a loss of these logits was computed without them, so that they get no gradient: ask"
    with pytest.raises(RuntimeError, match=said):
        ASKED[kind](x, loss)
    x, logits, (hidden, _) = recipe()
    x.register_hook(lambda g: g * 2)
    of_logits, twice = torch.autograd.grad(F.cross_entropy(x.view(-1, V), TARGET), (x, hidden))
    expected = torch.autograd.grad(F.cross_entropy(logits.view(-1, V), TARGET), (logits, hidden))
    torch.testing.assert_close((of_logits, twice / 2), expected)


def test_what_is_known_without_computing(computed):
    x, logits, _ = recipe()
    known = lambda t: (t.shape, t.dtype, t.device, t.ndim, t.dim(), len(t), t.size(0))
    assert known(x) == known(logits)
    assert x.to(torch.float64).dtype == torch.float64 and x.to(x.device) is x and (x / 2).shape == logits.shape
    assert x.requires_grad
    with torch.no_grad():
        assert not recipe()[0].requires_grad
    assert not computed


def test_what_is_cut_from_the_graph_stays_cut():
    x, logits, _ = recipe()
    with torch.no_grad():
        y = x / 2.0
    assert not y.requires_grad
    found = F.cross_entropy(y.view(-1, V), TARGET)
    assert not found.requires_grad
    torch.testing.assert_close(found, F.cross_entropy(logits.view(-1, V) / 2.0, TARGET).detach())


def test_recipes_go_without_the_garbage_collector():
    x, *_ = recipe()
    gone = weakref.ref(x)
    y = x.float().view(-1, V)
    F.cross_entropy(y, TARGET)
    del x, y
    assert gone() is None


def test_a_head_multiplies_under_the_autocast_of_its_call():
    """A loss function that turns autocast off does not turn it off for the head."""
    head, hidden = nn.Linear(H, V, device=DEVICE), torch.randn(B, T, H, device=DEVICE)
    fused_loss = lambda x: F.cross_entropy(x.float().view(-1, V), TARGET)
    with torch.autocast(DEVICE, torch.bfloat16):
        x, logits = deferred(head, hidden, LossRequest()), head(hidden)
        expected = fused_loss(x)
    assert x.dtype == torch.bfloat16
    assert torch.equal(fused_loss(x), expected)
    assert torch.equal(x.float() + 0, logits.float())
    assert torch.equal(x + 0, logits)


def test_heads_of_models_are_found_wherever_they_are():
    model = make("llama", num_hidden_layers=1)
    assert place_of_head(model) == (model, "lm_head")
    outer = nn.Module()
    outer.model, outer.get_output_embeddings = model, model.get_output_embeddings
    assert place_of_head(outer) == (model, "lm_head")
    outer.get_output_embeddings = lambda: None
    assert place_of_head(outer) is None
    assert place_of_head(nn.Linear(1, 1)) is None


@pytest.mark.parametrize("kwargs", [{}, dict(num_items_in_batch=17)])
def test_ignored_tokens_stay_out_of_the_head(kwargs, monkeypatch):
    """The head computes only the tokens that labels count."""
    model, batch = make("llama", num_hidden_layers=1), tokens(ignored=6)
    expected = step(model, batch, **kwargs)[1]
    products = noted(monkeypatch, torch, "mm", lambda a, b, **_: (a.shape[0], b.shape[1]))
    assert_same_learning(step(patched(model), batch, **kwargs)[1], expected)
    rows = [rows for rows, columns in products if columns == model.config.vocab_size]
    assert rows == [(batch["labels"][:, 1:] != -100).sum()]


def test_a_loss_that_counts_unforeseen_tokens_is_nan_not_wrong(monkeypatch):
    model, batch, kept = patched(make("llama", num_hidden_layers=1)), tokens(ignored=6), head_forward._kept_early
    fewer = lambda given: {"labels": given["labels"].index_fill(1, torch.tensor([8], device=DEVICE), -100)}
    monkeypatch.setattr(head_forward, "_kept_early", lambda given, head: kept(fewer(given), head))
    assert model(**batch).loss.isnan()


def test_the_gradient_of_the_head_is_scaled_in_the_forward(monkeypatch):
    """``num_items_in_batch``: what reaches the backward is 1, to rounding."""
    seen = []
    module = importlib.import_module("liger_kernel.ops.losses.linear_cross_entropy")
    scaled = module.scaled
    noted = lambda grads, g, norm: (seen.append((g.item(), norm)), scaled(grads, g, norm))[1]
    monkeypatch.setattr(module, "scaled", noted)
    monkeypatch.setattr(module, "auto_chunk_rows", lambda *_, **__: 5)
    model, batch = make("llama", num_hidden_layers=1), tokens(length=40)
    expected = step(model, batch, num_items_in_batch=49)[1]
    assert_same_learning(step(patched(model), batch, num_items_in_batch=49)[1], expected)
    assert seen == [(pytest.approx(1, abs=2e-7), None)]


def test_when_logits_are_left_out(computed):
    model = patched(make("llama", num_hidden_layers=1))
    batch = tokens()
    present = lambda **kwargs: model(**kwargs).logits is not None
    assert not present(**batch)
    assert not present(**batch, skip_logits=True)
    assert present(**batch, skip_logits=False)
    assert present(input_ids=batch["input_ids"])
    assert present(input_ids=batch["input_ids"], skip_logits=True)  # a trainer with a loss of its own needs them
    model.eval()
    assert present(**batch)
    assert present(**batch, skip_logits=False)
    assert not present(**batch, skip_logits=True)
    assert not computed


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_loss_arguments(training, skip):
    model = make("llama", num_hidden_layers=1).train(training)
    ours, batch = patched(copy.deepcopy(model)), tokens()
    for case in (
        dict(num_items_in_batch=7),
        dict(num_items_in_batch=torch.tensor(11)),
        dict(num_items_in_batch=torch.tensor([5.0])),
        dict(shift_labels=F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()),
        dict(labels=batch["input_ids"], ignore_index=int(batch["labels"][0, -1])),
    ):
        found, expected = ours(**batch | case, skip_logits=skip).loss, model(**batch | case).loss
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6)


def test_shift_labels_alone_and_not_contiguous():
    model, batch = make("llama", num_hidden_layers=1), tokens()
    expected = step(model, batch)[1]
    wide = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].repeat_interleave(2, 1)
    out, learned = step(patched(model), {"input_ids": batch["input_ids"], "shift_labels": wide[:, ::2]})
    assert out.logits is None
    assert_same_learning(learned, expected)


def test_positional_arguments_and_tuples():
    model = make("llama", num_hidden_layers=1)
    ids, labels = tokens().values()
    call = lambda **more: model(ids, None, None, None, None, labels, return_dict=False, use_cache=False, **more)
    expected = call()
    patched(model)
    torch.testing.assert_close(call(), expected[:1])
    torch.testing.assert_close(call(skip_logits=False), expected)
    asked = dict(return_token_accuracy=True, return_predicted_tokens=True)
    assert [o.shape for o in model(ids, labels=labels, return_dict=False, use_cache=False, **asked)] == [(), (), (24,)]


@pytest.mark.parametrize("skip", [True, False])
def test_statistics(skip):
    model = make("llama", num_hidden_layers=1)
    batch = tokens()
    predicted = model(**batch).logits[:, :-1].argmax(-1)
    batch["labels"][:, 5:8] = predicted[:, 4:7]  # some must be right
    target = batch["labels"][:, 1:]
    ours = patched(model)
    out = ours(**batch, skip_logits=skip, return_token_accuracy=True, return_predicted_tokens=True)
    assert (out.logits is None) == skip
    assert out.token_accuracy.ndim == 0 and not out.token_accuracy.requires_grad
    torch.testing.assert_close(out.token_accuracy, (predicted == target)[target != -100].float().mean())
    assert torch.equal(out.predicted_tokens.view(2, -1)[:, :-1], predicted.where(target != -100, -1))
    out = ours(**batch)
    assert out.token_accuracy is None and out.predicted_tokens is None and "token_accuracy" not in out


@pytest.mark.parametrize("skip", [True, False])
def test_loss_options_reach_the_loss(skip):
    model = make("llama", num_hidden_layers=1)
    batch = tokens()
    logits = model(**batch).logits[:, :-1].flatten(0, 1).float()
    target = batch["labels"][:, 1:].reshape(-1)
    logp = F.log_softmax(logits, -1).gather(-1, target.clamp(min=0)[:, None])[:, 0]
    scaled = -(logp * logp.detach().exp())[target != -100].mean()
    smooth = F.cross_entropy(logits, target, label_smoothing=0.2)
    squared = F.cross_entropy(logits, target) + 0.1 * logits.logsumexp(-1)[target != -100].square().mean()
    weights = torch.rand(logits.shape[-1], device=DEVICE)
    ours = patched(model)
    found = lambda **kwargs: ours(**batch, **kwargs, skip_logits=skip).loss
    torch.testing.assert_close(found(use_token_scaling=True), scaled)
    torch.testing.assert_close(found(label_smoothing=0.2), smooth)
    torch.testing.assert_close(found(lse_square_scale=0.1), squared)
    torch.testing.assert_close(found(ce_weight=weights), F.cross_entropy(logits, target, weights))
    torch.testing.assert_close(found(accum_dtype=torch.float32), F.cross_entropy(logits, target))


def test_custom_losses():
    """On what they know as logits; if it is no cross entropy, options had no effect."""
    model = make("llama", num_hidden_layers=1)

    def smoothed(logits, labels, vocab_size, **kwargs):
        return nn.CrossEntropyLoss(label_smoothing=0.3)(
            logits[..., :-1, :].reshape(-1, vocab_size), labels[..., 1:].reshape(-1)
        )

    def margin(logits, labels, vocab_size, **kwargs):
        return F.multi_margin_loss(logits.float().view(-1, vocab_size), labels.clamp(min=0).view(-1))

    for custom in (smoothed, margin):
        model.loss_function = custom
        expected = step(model)[1]
        with instance_patches(model, "llama", {}, "fused")():
            out, learned = step(model)
            assert out.logits is None
            assert_same_learning(learned, expected)
            if custom is margin:
                with pytest.warns(UserWarning, match="not one cross entropy"):
                    model(**tokens(), use_token_scaling=True)


class Penalised(LlamaForCausalLM):
    """Adds to the loss of its base, and to its output."""

    def forward(self, *args, labels=None, **kwargs):
        out = super().forward(*args, labels=labels, **kwargs)
        if labels is not None:
            out.loss = out.loss + self.lm_head.weight.square().mean()
        out.penalised, out["twice"] = True, 2 * out.logits
        return out


class Unmasked(LlamaForCausalLM):
    """Learns what its labels ignore, too."""

    def forward(self, input_ids, labels=None, **kwargs):
        return super().forward(input_ids, labels=labels if labels is None else input_ids, **kwargs)


class Shifting(LlamaForCausalLM):
    """Computes the loss by itself, and returns a tuple or a dictionary."""

    def forward(self, input_ids, labels=None, as_dict=False, **kwargs):
        logits = super().forward(input_ids=input_ids, **kwargs).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return {"loss": loss, "found": [logits]} if as_dict else (loss, logits)


class Alone(LlamaForCausalLM):
    """Calls no forward of its base."""

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids, **kwargs).last_hidden_state)
        given = dict(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        loss = None if labels is None else self.loss_function(**given)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


@pytest.mark.parametrize("cls", [Penalised, Unmasked, Shifting, Alone])
def test_subclasses_of_users(cls, computed):
    """With a forward of their own: the head is fused, and what they return stays."""
    model = make("llama", num_hidden_layers=1)
    model.__class__ = cls
    stock, expected = step(model)
    before = dict(model.__dict__)
    patched(model).train()
    out, learned = step(model)
    assert_same_learning(learned, expected)
    assert type(out) is type(stock) and len(computed) == (cls in (Penalised, Shifting))  # who return them
    if cls is Penalised:
        assert out.penalised and out.logits is None and "logits" not in out
        torch.testing.assert_close(out["twice"], stock["twice"])
        found = model(**tokens(), return_token_accuracy=True)
        assert 0 <= found.token_accuracy <= 1 and found.penalised
    elif cls is Shifting:
        for logits in (out[1], model(**tokens(), as_dict=True)["found"][0]):
            torch.testing.assert_close(logits, stock[1])
    else:
        assert out.logits is None
        torch.testing.assert_close(model(**tokens(), skip_logits=False).logits, stock.logits)
    restore(model)
    assert model.__dict__ == before
    with class_patches("llama", {}, "fused")():
        assert not any("head" in p.label for p in instance_patches(model, "llama", {}, "fused"))  # its base has it


def test_signature_says_what_it_takes():
    model = make("llama", num_hidden_layers=1)
    stock = [*inspect.signature(model.forward).parameters]
    assert [*inspect.signature(patched(model).forward).parameters] == [*stock[:-1], "skip_logits", stock[-1]]
    assert model.forward.__self__ is model and model.forward.__func__.__name__ == model.forward.__name__ == "forward"


def test_outputs_travel():
    """Outputs survive pickling and pytrees, as DDP, FSDP and accelerate put them through."""
    out = patched(make("llama", num_hidden_layers=1))(**tokens(), return_token_accuracy=True)
    out.loss, out.past_key_values = out.loss.detach(), None
    assert type(out).__name__ == "LigerCausalLMOutputWithPast" and isinstance(
        out, transformers.modeling_outputs.CausalLMOutputWithPast
    )
    copied = pickle.loads(pickle.dumps(out))
    assert type(copied) is type(out) and torch.equal(copied.token_accuracy, out.token_accuracy)
    mapped = torch.utils._pytree.tree_map(lambda t: t * 2 if isinstance(t, torch.Tensor) else t, out)
    assert type(mapped) is type(out) and torch.equal(mapped.token_accuracy, out.token_accuracy * 2)
    assert mapped.logits is None


def test_the_head_is_back_after_an_exception():
    model = patched(make("llama", num_hidden_layers=1))
    head = model.lm_head
    with pytest.raises((ValueError, RuntimeError)):
        model(input_ids=tokens()["input_ids"], labels=torch.zeros(2, 5, dtype=torch.long, device=DEVICE))
    assert model.lm_head is head


def assert_called(out, labels, loss, logits):
    """A call with labels trains; one without has logits that are real."""
    if labels:
        assert out.logits is None
        torch.testing.assert_close(out.loss.detach(), loss.detach())
    else:
        assert type(out.logits) is torch.Tensor
        torch.testing.assert_close(out.logits, logits)


@pytest.mark.parametrize("labels", [False, True])
def test_a_model_called_in_another_thread(labels):
    """While it trains in this one: for logits, or to train, too."""
    model, given = make("llama", num_hidden_layers=1), tokens() if labels else {"input_ids": tokens()["input_ids"]}
    expected, logits = model(**tokens()).loss, model(tokens()["input_ids"]).logits
    head, stock, found = model.lm_head, model.loss_function, {}
    done, entered = threading.Event(), {"one": threading.Event(), "two": threading.Event()}

    def loss(**kwargs):
        entered[name := threading.current_thread().name].set()
        # until another call is in the middle of its own
        (entered["two"] if labels and name == "one" else done).wait(30)
        return stock(**kwargs)

    def one():
        found["one"] = model(**tokens())
        done.set()

    def two():
        entered["one"].wait(30)
        found["two"] = model(**given)
        if not labels:
            done.set()

    patched(model).train()
    model.loss_function = loss
    threads = [threading.Thread(target=f, name=f.__name__) for f in (one, two)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert_called(found["one"], True, expected, logits)
    assert_called(found["two"], labels, expected, logits)
    assert model.lm_head is head and not standing


@pytest.mark.parametrize("labels", [False, True])
def test_a_model_called_in_its_own_loss(labels):
    model = make("llama", num_hidden_layers=1)
    expected, logits = step(model)[1], model(tokens()["input_ids"]).logits
    head, stock, seen, names = model.lm_head, model.loss_function, [], [*model.state_dict()]

    def loss(**kwargs):
        if not seen:
            assert [*model.state_dict()] == names  # as for a checkpoint that another thread makes then
            seen.append(None)
            seen[0] = model(**tokens()) if labels else model(tokens()["input_ids"])
        return stock(**kwargs)

    patched(model).train()
    model.loss_function = loss
    assert_same_learning(step(model)[1], expected)
    assert_called(seen[0], labels, expected["loss"], logits)
    assert model.lm_head is head and not standing


class _Same(torch.autograd.Function):
    """``copy`` is computed, or recorded for later."""

    @staticmethod
    def forward(ctx, logits, copy):
        return copy(logits)

    @staticmethod
    def backward(ctx, g):
        return g, None


FUNCTIONS = {
    "computed": lambda x, target: F.cross_entropy(_Same.apply(x, lambda x: x + 0.0), target),
    "recorded": lambda x, target: F.cross_entropy(_Same.apply(x, lambda x: x * 1.0), target),
    "checkpoint": lambda x, target: torch.utils.checkpoint.checkpoint(F.cross_entropy, x, target, use_reentrant=True),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_of_autograd_need_tensors(function):
    """They would pass no gradient, and another loss beside would hide that."""

    def loss(logits, labels, vocab_size, **_):
        target = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
        flat = logits.view(-1, vocab_size)
        return FUNCTIONS[function](flat.value() if given and isinstance(flat, DeferredLogits) else flat, target)

    given = False
    model = make("qwen3_moe", num_hidden_layers=1).train()
    model.loss_function = loss
    expected = step(model, output_router_logits=True)[1]
    patched(model)
    with pytest.raises(
        RuntimeError,
        match=r"apply: the logits of a patched model are computed when they are needed.*: give it logits.value\(\)",
    ):
        step(model, output_router_logits=True)
    given = True
    assert_same_learning(step(model, output_router_logits=True)[1], expected)


@pytest.mark.skipif(DEVICE == "cpu", reason="the default is another device only where there is one")
def test_a_default_device_does_not_matter():
    """Of ``torch.set_default_device``: labels are counted in the host's memory all the same."""
    model, batch = patched(make("llama")), tokens()
    expected = step(model, batch)[1]
    with torch.device(DEVICE):
        assert_same_learning(step(model, batch)[1], expected)


@pytest.mark.parametrize("looks", [False, *further(True)])
def test_compiles_without_graph_breaks(looks):
    """Also with a loss that looks at logits."""
    torch._dynamo.reset()
    model = make("llama", num_hidden_layers=1)
    if looks:
        model.loss_function = lambda logits, labels, **_: (
            F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) + logits.square().mean()
        )
    expected = step(model)[1]
    instance_patches(model, "llama", {} if looks else dict(rope=True, rms_norm=True, glu=True), "fused").apply()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    given = {"num_items_in_batch": torch.tensor(18, device=DEVICE)}, {"return_token_accuracy": True}
    for kwargs in [{}] if looks else given:
        out, learned = step(compiled, **kwargs)
        assert (out.logits is None or looks) and (out.token_accuracy is not None) == ("return_token_accuracy" in kwargs)
        assert_same_learning({n.removeprefix("_orig_mod."): g for n, g in learned.items()}, expected)
    assert looks or compiled.eval()(**tokens(), use_cache=False).logits is not None
    torch._dynamo.reset()
