"""The fp32 functions that kernels share are as accurate as they say."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICE

pytest.importorskip("triton")

from liger_kernel.ops._core import tl as _tl
from liger_kernel.ops._core.tl import cdiv, jit, tl


@jit
def _all(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=1.0)
    tl.store(y_ptr + at, _tl.exp(x), mask=at < n)
    tl.store(y_ptr + n + at, _tl.log(x), mask=at < n)
    tl.store(y_ptr + 2 * n + at, _tl.rsqrt(x), mask=at < n)
    tl.store(y_ptr + 3 * n + at, _tl.div(x, 3.0 + tl.abs(x)), mask=at < n)
    tl.store(y_ptr + 4 * n + at, _tl.tanh(x), mask=at < n)
    tl.store(y_ptr + 5 * n + at, _tl.tanh_slope(x), mask=at < n)


FUNCTIONS = {  # and the units in the last place by which they may be off; a slope is at most one, and one's units count
    "exp": (torch.exp, 2.0),
    "log": (torch.log, 1.5),
    "rsqrt": (torch.rsqrt, 1.5),
    "div": (lambda x: x / (3.0 + x.abs().float()).double(), 0.51),
    "tanh": (torch.tanh, 8.0),
    "tanh_slope": (lambda x: 1 / torch.cosh(x) ** 2, 2.0),
}


def test_accurate_functions():
    ranges = (-87, 87, 40001), (0.5, 2, 9999), (-1, 1, 9999)
    x = torch.cat([torch.logspace(-37, 38, 20001), *(torch.linspace(*each) for each in ranges)]).to(DEVICE)
    y = torch.empty(len(FUNCTIONS), len(x), device=DEVICE)
    _all[(cdiv(len(x), 1024),)](x, y, len(x), BLOCK=1024)
    found = {}
    for (name, (function, _)), ours in zip(FUNCTIONS.items(), y):
        true = function(x.double())
        normal = true.isfinite() & (true.abs() > 2e-38) & (true.abs() < 5e37)
        unit = 2.0**-23 if name == "tanh_slope" else torch.exp2(true.abs().log2().floor() - 23)
        ulps = ((ours.double() - true) / unit)[normal].abs()
        found[name] = ulps.max().item()
    assert all(found[name] <= allowed for name, (_, allowed) in FUNCTIONS.items()), found


def test_special_values():
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -1.0, 1e-44], device=DEVICE)
    y = torch.empty(len(FUNCTIONS), len(x), device=DEVICE)
    _all[(1,)](x, y, len(x), BLOCK=8)
    assert y[0, :2].tolist() == [float("inf"), 0.0] and y[0, 2].isnan() and y[0, 3] == 1.0
    assert y[1, 0] == float("inf") and y[1, [1, 2, 4]].isnan().all() and y[1, 3] == -float("inf")
