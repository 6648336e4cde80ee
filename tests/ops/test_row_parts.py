"""Rows that are split among programs: what the order of the two sweeps may not change."""

import pytest
import torch
from devices import DEVICE

from liger_kernel.ops import cross_entropy, softmax
from liger_kernel.ops._core import launch_config, parts


def learned(function, *shapes):
    torch.manual_seed(0)
    xs = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    y = function(*xs)
    return [y.detach(), *torch.autograd.grad(y, xs, torch.randn_like(y))]


@pytest.mark.parametrize(
    "function, shapes",
    [
        (lambda z: cross_entropy(z, torch.tensor([1, -100, 8195, 3], device=DEVICE)), [(4, 8200)]),
        (softmax, [(3, 32776)]),
    ],
)
def test_results_do_not_depend_on_the_lag(function, shapes, monkeypatch):
    found = []
    for share in (1e-9, 1e9):
        monkeypatch.setattr(parts, "SHARE", share)
        found.append(learned(function, *shapes))
    for one, other in zip(*found):
        assert torch.equal(one, other)


def test_programs_of_several_caches_split_no_logits(monkeypatch):
    x = torch.empty(2, 9000, device="meta")
    monkeypatch.setattr(parts, "INTERPRET", False)
    monkeypatch.setattr(launch_config, "arch", lambda: "gfx942")
    assert not parts.splits_rows(x, 8192)
    monkeypatch.setattr(launch_config, "arch", lambda: "sm80")
    assert parts.splits_rows(x, 8192) and not parts.splits_rows(x, 9000)
