"""200 steps of adapters on real text, under autocast: the engine's losses differ from stock's as
two stock runs of different rounding do."""

import contextlib
import copy
import sysconfig
from pathlib import Path

import pytest
import torch

peft = pytest.importorskip("peft")

import adapters
from hf_models import DEVICE, make
from torch import Tensor, nn

import liger_kernel.transformers as ours
from liger_kernel.ops._core import operator as _op
from liger_kernel.transformers import projections_report

STEPS, ROWS, LENGTH = 200, 4, 64


def text(first: str, last: str) -> Tensor:
    """Bytes of the modules of Python's standard library whose names lie between two letters."""
    files = sorted(p for p in Path(sysconfig.get_path("stdlib")).glob("*.py") if first <= p.name[0] < last)
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in files)), dtype=torch.uint8).long()


def batches(data: Tensor, steps: int, seed: int) -> list[Tensor]:
    at = torch.randint(len(data) - LENGTH, (steps, ROWS), generator=torch.Generator().manual_seed(seed))
    return [torch.stack([data[i : i + LENGTH] for i in row]).to(DEVICE) for row in at.tolist()]


def learn(
    model: nn.Module, data: list[Tensor], held_out: list[Tensor], lr: float, autocast: bool = False
) -> tuple[Tensor, float]:
    """The loss of each step, and in the end that of text held out."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    precision = lambda: torch.autocast(DEVICE, torch.bfloat16) if autocast else contextlib.nullcontext()
    losses = []
    for ids in data:
        with precision():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad(), precision():
        return torch.tensor(losses), sum(
            model(input_ids=ids, labels=ids, use_cache=False).loss.item() for ids in held_out
        ) / max(len(held_out), 1)


@pytest.mark.slow
@pytest.mark.skipif(not _op._KERNEL_DEVICES, reason="Triton is not installed: references serve every call")
def test_losses_of_real_text(monkeypatch):
    base = make("llama")
    learn(base, batches(text("a", "m"), STEPS, seed=0), [], lr=3e-3)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=adapters.EVERY))
    data, held_out = batches(text("m", "t"), STEPS, seed=1), batches(text("t", "{"), 16, seed=2)
    exact, rounded = (learn(copy.deepcopy(model), data, held_out, 3e-3, autocast) for autocast in (False, True))
    ran = adapters.nodes_run(monkeypatch)
    # interpreted, whatever else is ours would take eight minutes
    ours._apply_liger_kernel_to_instance(
        model, rope=False, rms_norm=False, fused_linear_cross_entropy=False, rematerialise=False
    )
    assert not projections_report(model).stock
    found = learn(model, data, held_out, 3e-3, autocast=True)
    assert ran == [3, 1, 3] * 2 * (STEPS + len(held_out))

    distance = lambda a, b: (a[0] - b[0]).abs()
    noise, beside_exact, beside_rounded = distance(rounded, exact), distance(found, exact), distance(found, rounded)
    for name, (losses, end) in (("fp32", exact), ("stock", rounded), ("ours", found)):
        print(f"{name}: {losses[0]:.4f}, the last 20 {losses[-20:].mean():.4f}, held out {end:.4f}")
    for name, d in (("stock - fp32", noise), ("ours - fp32", beside_exact), ("ours - stock", beside_rounded)):
        print(f"{name}: mean {d.mean():.1e}, largest {d.max():.1e}")
    assert exact[0][-20:].mean() < exact[0][:5].mean() - 0.1, "adapters learn"
    assert 0 < beside_exact.mean() <= 1.5 * noise.mean() and beside_exact.max() <= 2 * noise.max()
    assert beside_rounded.mean() <= 2 * noise.mean() and beside_rounded.max() <= 3 * noise.max()
    assert abs(found[1] - exact[1]) <= 2 * max(noise.mean().item(), abs(rounded[1] - exact[1]))
