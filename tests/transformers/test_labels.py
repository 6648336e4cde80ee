"""Random programs on labels: none to learn in a micro-batch, a row, a packed document or a whole step.

What stock learns of them a patched model learns.
A program is a seed: labels, how they are masked, and what the sum of the losses is divided by.
"""

import functools
import itertools
import random
from typing import Any

import pytest
import torch
from adapters import lora
from hf_models import DEVICE, assert_same_learning, make, tokens
from quick import further
from torch import Tensor, nn

from liger_kernel.transformers import _apply_liger_kernel_to_instance

IGNORE = -100
B, T = 2, 12


pytestmark = pytest.mark.usefixtures("models_by_references")


def micro_batch(r: random.Random, packed: bool) -> dict[str, Tensor]:
    """Masked in one of the ways of data; ``packed``: documents told apart by positions."""
    batch = tokens(B, T, seed=r.randrange(1 << 30), ignored=0)
    labels = batch["labels"]
    ends = sorted(r.sample(range(2, T - 1), 2))
    match r.choice(["all", "none", "none", "row", "prompt", "holes", "one", "document", "first"]):
        case "none":
            labels[:] = IGNORE
        case "row":
            labels[r.randrange(B)] = IGNORE
        case "prompt":
            for row in labels:
                row[: r.randrange(T + 1)] = IGNORE
        case "holes":
            at_random = torch.Generator().manual_seed(r.randrange(1 << 30))
            labels[torch.rand(labels.shape, generator=at_random).to(DEVICE) < 0.5] = IGNORE
        case "one":
            labels[:], labels[0, T - 1] = IGNORE, labels[0, T - 1].clone()
        case "document":
            labels[:, ends[0] : ends[1]] = IGNORE
        case "first":  # which predicts nothing: no label is left after the shift
            labels[:, 1:] = IGNORE
    if packed:
        bounds = [0, *ends, T]
        positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(bounds)]).to(DEVICE)
        batch["position_ids"] = positions.expand(B, T)
    return batch


def divisors(r: random.Random, batches: list[dict[str, Tensor]]) -> Any:
    """What ``num_items_in_batch`` may be, counted as transformers' Trainer does; nothing at all, too."""
    n = sum(int((b["labels"] != IGNORE).sum()) for b in batches)
    numbers = None, n, float(n), torch.tensor(n), torch.tensor([n]), torch.tensor(float(n)), 0, torch.tensor(0)
    return r.choice([{}, *({"num_items_in_batch": v} for v in numbers)])


def learned(model: nn.Module, batches: list[dict[str, Tensor]], scale: float = 1.0, **more: Any) -> dict[str, Tensor]:
    """Losses of micro-batches, and the gradient of their sum."""
    model.zero_grad()
    total = torch.zeros((), device=DEVICE)
    more = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in more.items()}
    for batch in batches:
        loss = model(**batch, use_cache=False, **more).loss * scale
        loss.backward()
        total += loss.detach().sum()  # divided by a tensor (1,) it has that shape
    return {"loss": total} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: dict[str, Tensor], stock: dict[str, Tensor]) -> None:
    """As numbers where they are finite; and NaN, or infinite, wherever stock is."""
    assert ours.keys() == stock.keys()
    for name, t in stock.items():
        found = ours[name].isfinite()
        assert torch.equal(found, t.isfinite()), f"{name}: {found.sum()} finite values, stock {t.isfinite().sum()}"
    finite = {name: t for name, t in stock.items() if t.isfinite().all()}
    if finite.keys() - {"loss"}:
        assert_same_learning({name: ours[name] for name in finite}, finite)


@functools.cache
def models(kind: str) -> list[nn.Module]:
    found = []
    for ours in (True, False):
        model = make("gemma2", tie_word_embeddings=True) if kind == "tied" else make("llama")
        if ours:
            _apply_liger_kernel_to_instance(model)
        if kind == "lora":
            model = lora(model, target_modules=["q_proj", "lm_head"])
        found.append(model.train())
        if kind == "compiled":
            found[-1] = torch.compile(model, backend="aot_eager")
    return found


@pytest.mark.parametrize("kind", ["llama", "tied", "lora", *further("compiled")])
@pytest.mark.parametrize("seed", range(25))
def test_forward(seed, kind):
    r = random.Random(seed)
    ours, stock = models(kind)
    batches = [micro_batch(r, packed=r.random() < 0.3) for _ in range(r.choice([1, 1, 2, 4]))]
    how = dict(scale=r.choice([1.0, 1 / len(batches)]), **divisors(r, batches))
    assert_same(learned(ours, batches, **how), learned(stock, batches, **how))
