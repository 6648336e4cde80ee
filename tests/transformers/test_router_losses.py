"""The auxiliary loss of routers in patched models: stock's value, choices and gradients, without
what stock keeps for the backward."""

import importlib

import pytest
import torch
from hf_models import DEVICE, assert_same_bits, assert_same_learning, batch_of, make, recognised, step
from transformers.models.qwen3_moe import modeling_qwen3_moe
from watching import noted

from liger_kernel.ops._core import operator
from liger_kernel.testing import assert_as_accurate
from liger_kernel.transformers import _apply_liger_kernel_to_instance, class_patches, instance_patches, table
from liger_kernel.transformers.recognise import experts, slots
from liger_kernel.transformers.recognise.compare import recognise, references

STOCK = modeling_qwen3_moe.load_balancing_loss_func
OURS = slots.VARIANTS["load_balancing(softmax, top_k)"](STOCK)
SLOT = next(s for s in slots.SLOTS if any(isinstance(v, experts.LoadBalancing) for v in s.variants))
B, L, E = 3, 40, 8
MASK = (torch.arange(L) < torch.tensor([[L], [L - 7], [11]])).to(torch.int64)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """The number of layers in each call of our loss."""
    recognised("qwen3_moe")
    return noted(monkeypatch, experts, "load_balancing_loss", lambda logits, *_: len(logits))


def balanced() -> torch.Tensor:
    return torch.randn(B * L, E, device=DEVICE)


LOADS = {
    "balanced": balanced,
    # two experts get every token, and six get none
    "skewed": lambda: balanced() + torch.tensor([9.0, 8.0, *[0.0] * (E - 2)], device=DEVICE),
    # rows with many equal logits, some of them equal throughout
    "tied": lambda: torch.randint(0, 3, (B * L, E), device=DEVICE),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    "mask", [None, MASK, MASK.bool(), torch.zeros_like(MASK)], ids=["all", "padded", "bool", "nothing"]
)
def test_value_and_gradients(load, dtype, mask):
    """Of two layers with other loads. Without any token, both are NaN."""
    layers = [LOADS[load]().to(dtype), balanced().to(dtype)]
    mask = None if mask is None else mask.to(DEVICE)

    def learned(loss, dtype: torch.dtype, chosen=None) -> dict[str, torch.Tensor]:
        own = tuple(t.to(dtype, copy=True).requires_grad_() for t in layers)
        value = loss(own, E, 2, mask)
        return dict(zip(("loss", "d0", "d1"), (value.detach(), *torch.autograd.grad(value, own))))

    def exact(own, num_experts, top_k, mask):
        """The definition, in fp64, with the choices of stock."""
        w = torch.ones(B * L, device=DEVICE, dtype=torch.float64) if mask is None else mask.reshape(-1).double()
        index = [torch.topk(torch.softmax(t, -1), top_k, -1)[1] for t in layers]
        counts = sum((w[:, None, None] * torch.nn.functional.one_hot(i, num_experts)).sum((0, 1)) for i in index)
        probs = sum((w[:, None] * torch.softmax(t, -1)).sum(0) for t in own)
        return num_experts * (counts * probs).sum() / (len(own) * w.sum()) ** 2

    ours, theirs, truth = learned(OURS, dtype), learned(STOCK, dtype), learned(exact, torch.float64)
    assert {k: (t.dtype, t.shape) for k, t in ours.items()} == {k: (t.dtype, t.shape) for k, t in theirs.items()}
    assert_as_accurate(ours, theirs, truth)


@pytest.mark.skipif(not (operator.INTERPRET or torch.cuda.is_available()), reason="no kernels here")
def test_nothing_of_the_size_of_the_logits_is_kept():
    """Except the logits, which the model returns."""
    layers = tuple(balanced().bfloat16().requires_grad_() for _ in range(3))

    def kept(loss) -> int:
        found: dict[int, int] = {}
        note = lambda t: (found.update({t.data_ptr(): t.nbytes}), t)[1]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            loss(layers, E, 2, MASK.to(DEVICE))
        for t in layers:
            found.pop(t.data_ptr(), None)
        return sum(size for size in found.values() if size >= layers[0].nbytes)

    assert kept(STOCK) >= 3 * layers[0].nbytes and kept(OURS) == 0


def test_what_is_left_to_stock(calls):
    x = balanced()
    assert OURS(None, E) == OURS([x], E) == STOCK(None, E) == 0
    for arguments in (((x,), E + 1, 2), ((x,), E, 2, MASK[:2].to(DEVICE))):
        with pytest.raises(RuntimeError) as expected:
            STOCK(*arguments)
        with pytest.raises(RuntimeError) as found:
            OURS(*arguments)
        assert str(found.value) == str(expected.value)
    assert torch.equal(OURS((x, x[None]), E, 2), STOCK((x, x[None]), E, 2)) and not calls
    OURS((x, x), E, top_k=2)
    assert calls == [2]


LOOK_ALIKES = {
    "by layers": lambda z, E, k, mask: sum(STOCK((t,), E, k, mask) for t in z) / len(z),
    # the choice is made among probabilities that are not rounded to the dtype of the logits
    "in fp32": lambda z, E, k, mask: STOCK(tuple(t.float() for t in z), E, k, mask),
    "of all tokens": lambda z, E, k, mask: STOCK(z, E, k),
    "of a share": lambda z, E, k, mask: STOCK(z, E, k, mask) / k,
    "without a gradient": lambda z, E, k, mask: STOCK(tuple(t.detach() for t in z), E, k, mask),
}


@pytest.mark.parametrize("kind", LOOK_ALIKES)
def test_look_alikes_are_left_alone(kind):
    def other(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        return LOOK_ALIKES[kind](gate_logits, num_experts, top_k, attention_mask)

    with references():
        assert recognise(SLOT, modeling_qwen3_moe, other) == (None, "no variant computes the same")


@pytest.mark.parametrize("family", ["qwen3_moe", "nllb_moe"])
def test_both_forms_of_transformers_are_recognised(family):
    """That of Transformers 4, still in one family, makes masks of all layers together."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    with references():
        variant, _ = recognise(SLOT, module, module.load_balancing_loss_func)
    assert isinstance(variant, experts.LoadBalancing)


@pytest.mark.usefixtures("models_by_references")
@pytest.mark.parametrize("path", ["class", "instance"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("head", ["fused", "logits", None])
def test_models_learn_the_same(family, path, head, calls):
    model = make(family, output_router_logits=True, router_aux_loss_coef=0.1)
    batch = batch_of(model)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, :3] = 0
    stock, expected = step(model, batch)
    of = (family,) if path == "class" else (model, family)
    patches = (class_patches if path == "class" else instance_patches)(*of, table.EVERYTHING, head)
    with patches():
        assert not patches.apply()  # each is in place, once
        calls.clear()  # of the comparison with stock
        out, learned = step(model, batch)
    assert calls == [model.config.num_hidden_layers]
    torch.testing.assert_close((out.loss, out.aux_loss), (stock.loss, stock.aux_loss))
    assert out.aux_loss > 0 and (out.logits is None) == (head == "fused")
    assert_same_learning(learned, expected, 5e-5)
    assert_same_bits(step(model, batch)[1], expected)
    assert len(calls) == 1


@pytest.mark.usefixtures("models_by_references")
def test_the_flag_of_the_experts_decides(calls):
    model = make("qwen3_moe", output_router_logits=True)
    for swiglu in (False, True):
        _apply_liger_kernel_to_instance(model=model, swiglu=swiglu, fused_linear_cross_entropy=not swiglu)
        calls.clear()  # of the comparison with stock
        step(model)
        assert bool(calls) == swiglu
