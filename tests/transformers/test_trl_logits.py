"""Recipes for TRL's trainers that read logits, without TRL: modules stand in that have its names,
and the plain form of its functions."""

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adapters import lora
from hf_models import DEVICE, make
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import liger_kernel
import liger_kernel.transformers as liger
from liger_kernel.transformers import trl_head
from liger_kernel.transformers.head.recipe import DeferredLogits

V, GKD = 48, "trl.experimental.gkd.gkd_trainer"


def selective_log_softmax(logits, index, temperature=1.0, row_mask=None):
    one = index.ndim < logits.ndim
    logp = (logits / temperature).log_softmax(-1).gather(-1, index.unsqueeze(-1) if one else index)
    logp = logp.squeeze(-1) if one else logp
    return logp if row_mask is None else logp.masked_fill(row_mask == 0, 0.0)


def selective_log_softmax_and_entropy(logits, index, entropy_requires_grad=True, temperature=1.0, row_mask=None):
    logp = (logits / temperature).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    entropy = entropy if row_mask is None else entropy.masked_fill(row_mask == 0, 0.0)
    of_index = selective_log_softmax(logits, index, temperature, row_mask)
    return of_index, entropy if entropy_requires_grad else entropy.detach()


def _jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    m = ((1 - beta) * s.exp() + beta * t.exp()).log()
    kl = lambda p, q: p.exp() * (p - q)
    return kl(t, s) if beta == 0 else kl(s, t) if beta == 1 else beta * kl(t, m) + (1 - beta) * kl(s, m)


def generalized_jsd_loss(
    student_logits, teacher_logits, labels=None, beta=0.5, temperature=1.0, reduction="batchmean",
    num_items_in_batch=None,
):  # fmt: skip
    jsd = _jsd(student_logits / temperature, teacher_logits / temperature, beta)
    jsd = jsd if labels is None else jsd[labels != -100]
    if num_items_in_batch is not None:
        return jsd.sum() / num_items_in_batch
    n = len(jsd) if labels is None else (labels != -100).sum()
    return {"batchmean": jsd.sum() / n, "sum": jsd.sum(), "mean": jsd.mean()}.get(reduction, jsd)


class Trainer:
    """As TRL's: whatever ``read`` computes of the model's logits."""

    def __init__(self, read: Any, teacher: nn.Module | None = None, kind: str = "NO"):
        self.read, self.teacher_model = read, teacher
        self.accelerator = types.SimpleNamespace(distributed_type=types.SimpleNamespace(value=kind))


@pytest.fixture(autouse=True)
def trl(monkeypatch) -> Any:
    """Two modules in the places of TRL's: trainers that call functions of theirs, and of a class."""

    def concatenated_forward(self, model, ids):
        return self.read(model(ids).logits)

    def compute_loss(self, model, ids):
        with torch.no_grad():
            teacher = self.teacher_model(ids).logits
        return self.read(self.generalized_jsd_loss, model(ids).logits, teacher)

    orpo = "trl.experimental.orpo.orpo_trainer"
    trainer = type("ORPOTrainer", (Trainer,), {"concatenated_forward": concatenated_forward, "__module__": orpo})
    its = {"compute_loss": compute_loss, "generalized_jsd_loss": staticmethod(generalized_jsd_loss)}
    functions = selective_log_softmax, selective_log_softmax_and_entropy
    for name in [name for name in sys.modules if name.startswith("trl.")]:
        monkeypatch.delitem(sys.modules, name)
    modules = types.ModuleType(orpo), types.ModuleType(GKD)
    vars(modules[0]).update({f.__name__: f for f in functions}, ORPOTrainer=trainer)
    modules[1].GKDTrainer = type("GKDTrainer", (Trainer,), {**its, "__module__": GKD})
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield modules[0]
    liger.restore()


def ids_of(model: nn.Module) -> Tensor:
    return torch.randint(V, (2, 7), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def trained(trl: Any, model: nn.Module, read: Any) -> tuple[Any, dict[str, Tensor]]:
    """What ``read`` returns, and the gradients of all that has one."""
    model.zero_grad()
    found = trl.ORPOTrainer(read).concatenated_forward(model, ids_of(model))
    sum((x.float() ** 2).sum() for x in found if x.requires_grad).backward()
    return [x.detach() for x in found], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def of_preferences(trl: Any, logits: Tensor) -> tuple[Tensor, ...]:
    """What ORPO, CPO and TPO compute."""
    ids = torch.arange(14, device=logits.device).view(2, 7)[:, 1:]
    chosen, rejected = logits[..., :-1, :].detach().chunk(2, dim=0)
    masked = dict(row_mask=ids % 3, temperature=0.7)
    logp = trl.selective_log_softmax(logits[:, :-1], ids)
    both = trl.selective_log_softmax_and_entropy(logits[:, :-1, :], ids, entropy_requires_grad=False, **masked)
    nll = F.cross_entropy(logits[:1, :-1].contiguous().view(-1, logits.shape[-1]), ids[:1].reshape(-1))
    of_mask = rejected[(ids % 3 > 0)[1:]].mean(-1)
    return logp, *both, nll, chosen.mean(), of_mask, chosen.argmax(dim=-1)


def of_rewards(trl: Any, logits: Tensor) -> tuple[Tensor, ...]:
    """What Online DPO, A2PO and SDPO compute."""
    logits = logits[:, :-1][:, -4:] / 0.7
    ids = torch.arange(8, device=logits.device).view(2, 4)
    taken = torch.take_along_dim(logits.log_softmax(dim=-1), ids.unsqueeze(-1), dim=2).squeeze(-1)
    some = torch.gather(torch.log_softmax(logits, dim=-1), dim=-1, index=ids[..., None] + torch.arange(3).to(ids))
    with torch.no_grad():
        old = trl.selective_log_softmax(logits, ids)
    more = trl.selective_log_softmax_and_entropy(logits.float(), ids)
    return taken, some, old, *more, F.log_softmax(logits, -1).gather(-1, ids[..., None])


def assert_alike(ours: Any, stock: Any) -> None:
    """Equal but for rounding, which follows the largest number of a tensor."""
    for a, b in zip(tree_leaves(ours), tree_leaves(stock), strict=True):
        assert (a.float() - b.float()).abs().max() <= 2e-5 * b.float().abs().max() + 1e-7


def patched(model: nn.Module, **flags: Any) -> None:
    """Without other kernels, so that only the head rounds."""
    none = dict.fromkeys(("rope", "rms_norm", "projections"), False)
    liger_kernel.apply(model, **none, **{"swiglu" if "Llama" in str(model) else "geglu": False}, **flags)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "lora"])
def test_what_trainers_compute(trl, monkeypatch, model_type):
    """Without logits, the same; also with a softcap, and with adapters of the head."""
    model = make("llama" if model_type == "lora" else model_type, vocab_size=V)
    if model_type == "lora":
        model = lora(model, target_modules=["q_proj", "lm_head"])
    run = lambda: [trained(trl, model, lambda z: read(trl, z)) for read in (of_preferences, of_rewards)]  # noqa: B023
    stock = run()
    patched(model)
    monkeypatch.setattr(DeferredLogits, "value", None)
    assert_alike(run(), stock)


def test_distillation(trl, monkeypatch):
    student, teacher = make("llama", vocab_size=V), make("llama", seed=5, vocab_size=V)
    ids = ids_of(student)
    labels = ids.masked_fill(ids % 3 == 0, -100)[:, 1:]

    def jsd(**how: Any) -> Tensor:
        how |= {"labels": labels} if "labels" in how else {}
        trainer = sys.modules[GKD].GKDTrainer(lambda jsd, s, t: jsd(s[:, :-1], t[:, :-1], **how), teacher)
        return trainer.compute_loss(student, ids)

    def loss(**how: Any) -> tuple[Tensor, Tensor]:
        student.zero_grad()
        found = jsd(**how)
        found.backward()
        return found.detach(), student.lm_head.weight.grad

    trained = {"labels": True}, {"labels": True, "beta": 1.0}
    trained += ({"labels": True, "beta": 0.0, "temperature": 0.7, "num_items_in_batch": 3},)
    stock = [loss(**how) for how in trained]
    more = {"reduction": "mean"}, {"beta": 0.3, "reduction": "none"}  # which trainers do not ask for
    others = [jsd(**how).detach() for how in more]
    patched(student, fused_linear_cross_entropy=False)
    assert_alike([jsd(**how).detach() for how in more], others)
    monkeypatch.setattr(DeferredLogits, "value", None)
    assert_alike([loss(**how) for how in trained], stock)


def is_recipe(trl: Any, model: nn.Module, kind: str = "NO") -> bool:
    found = trl.ORPOTrainer(lambda z: z, kind=kind).concatenated_forward(model, ids_of(model))
    return isinstance(found, DeferredLogits)


def test_who_gets_recipes(trl):
    """Patched models whose weights stay whole and whose heads' calls nobody sees."""
    model, other = make("llama", vocab_size=V), make("llama", vocab_size=V)
    stock = [(o, dict(vars(o))) for o in (trl, trl.ORPOTrainer, sys.modules[GKD].GKDTrainer)]
    patched(model)
    assert is_recipe(trl, model) and is_recipe(trl, model, "MULTI_GPU")
    assert not is_recipe(trl, other) and not is_recipe(trl, model, "FSDP") and not is_recipe(trl, model, "DEEPSPEED")
    assert not is_recipe(trl, nn.DataParallel(model))
    assert type(model(ids_of(model)).logits) is Tensor and type(model._modules["lm_head"]) is nn.Linear
    hook = model.lm_head.register_forward_hook(lambda *_: None)
    assert not is_recipe(trl, model)
    hook.remove()
    liger.restore(model)
    assert not is_recipe(trl, model) and all(vars(o)[name] is it for o, its in stock for name, it in its.items())
    patched(model, fused_logprobs=False)
    assert not is_recipe(trl, model)
    liger.apply_liger_kernel_to_llama()
    assert is_recipe(trl, other)


@pytest.mark.parametrize("unused, static", [(False, False), (True, False), (False, True)])
def test_ddp_that_follows_the_graph_gets_logits(trl, unused, static):
    ddp = types.SimpleNamespace(find_unused_parameters=unused, static_graph=static)
    assert trl_head._keeps_weights(trl.ORPOTrainer(None, kind="MULTI_GPU"), ddp) is not (unused or static)


def test_functions_with_other_parameters_stay(trl):
    trl.selective_log_softmax = lambda logits, index, something_new: logits
    model = make("llama", vocab_size=V)
    patched(model)
    assert not hasattr(trl.selective_log_softmax, "of_recipes") and not is_recipe(trl, model)


def test_other_readers_compute_logits(trl):
    """Once, with the gradients of the stock model; changed weights raise."""
    model = make("llama", vocab_size=V)
    ids = torch.zeros(2, 7, dtype=torch.int64, device=DEVICE)

    def read(z: Tensor) -> list[Tensor]:
        normalised = z.log_softmax(-1)
        some = normalised[:, 2:].gather(-1, ids[:, 2:, None])  # tokens selected after it was normalised
        return [z.logsumexp(-1), some, z.mean(-1), z.detach().mean(1), trl.selective_log_softmax(z, ids), normalised]

    stock = trained(trl, model, read)
    patched(model)
    assert_alike(trained(trl, model, read), stock)
    logits = trl.ORPOTrainer(lambda z: z).concatenated_forward(model, ids)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place since it was called"):
        trl.selective_log_softmax(logits, ids)


def test_compiled_models_compute_logits(trl):
    model = make("llama", vocab_size=V, num_hidden_layers=1)
    patched(model)
    assert not is_recipe(trl, torch.compile(model, backend="eager"))
