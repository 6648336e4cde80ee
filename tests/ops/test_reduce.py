"""The second stages that operators share."""

import pytest
import torch

from liger_kernel.ops import _op
from liger_kernel.ops._reduce import column_sum, scale_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.skipif(not _op._KERNEL_DEVICES, reason="Triton is not installed")
@pytest.mark.parametrize("P, N", [(1, 1), (32, 32), (33, 31), (70, 45)])
def test_column_sum_takes_every_row(P, N):
    """As many partial sums as a large GPU has processors, where the machine has few."""
    torch.manual_seed(0)
    x = torch.randn(P, N, device=DEVICE)
    torch.testing.assert_close(column_sum(x, torch.float32), x.double().sum(0).float())


@pytest.mark.parametrize("s, expected", [(1.0, 3.0), (0.5, 1.5), (float("nan"), float("nan")), (float("inf"), float("inf"))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scale_by_any_number(s, expected, dtype):
    """Of an upstream gradient that is not a number, too: anomalies and loss scalers look for it."""
    x = torch.full((9001,), 3.0, device=DEVICE, dtype=dtype)
    scale_(x, torch.tensor(s, device=DEVICE))
    torch.testing.assert_close(x, torch.full_like(x, expected), equal_nan=True)
