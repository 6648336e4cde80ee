"""Ternary weights: packing, and exact products."""

import pytest
import torch
from devices import DEVICE

from liger_kernel.extra.mm_int8int2 import matmul, pack_weights, unpack_weights


def operands(M: int, K: int, N: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randint(-128, 128, (M, K), dtype=torch.int8, device=DEVICE), torch.randint(
        -1, 2, (K, N), dtype=torch.int8, device=DEVICE
    )


@pytest.mark.parametrize("M, K, N", [(1, 4, 1), (5, 12, 7), (70, 516, 130), (3, 0, 4), (0, 8, 4), (4, 8, 0)])
def test_products_are_exact(M, K, N):
    a, w = operands(M, K, N)
    c = matmul(a, pack_weights(w))
    assert c.dtype == torch.int32 and torch.equal(c, (a.double() @ w.double()).int())


def test_largest_values_and_any_strides():
    a, w = torch.full((1024, 3), -128, dtype=torch.int8, device=DEVICE).T, torch.full((1024, 2), -1, device=DEVICE)
    assert matmul(a, pack_weights(w).T.contiguous().T).eq(128 * 1024).all()


@pytest.mark.parametrize("shape", [(8,), (7,), (8, 3), (5, 3), (1, 2), (9, 2, 2), (0, 3)])
def test_packing(shape):
    torch.manual_seed(0)
    w = torch.randint(-1, 2, shape, device=DEVICE)
    before = w.clone()
    packed = pack_weights(w)
    assert packed.dtype == torch.uint8 and packed.shape == (-(-shape[0] // 4), *shape[1:]) and torch.equal(w, before)
    unpacked = unpack_weights(packed)
    assert unpacked.dtype == torch.int32 and torch.equal(unpacked[: shape[0]], w.int())
    assert unpacked[shape[0] :].eq(-1).all()


def test_layout():
    """Row 2 of 4 packed rows, from its lowest bits: rows 2, 6, 10 and 14."""
    w = torch.zeros(16, 1, dtype=torch.int8, device=DEVICE)
    w[2], w[6], w[14] = -1, 1, 1
    assert pack_weights(w).flatten().tolist() == [0b01010101, 0b01010101, 0b10011000, 0b01010101]


def test_says_what_is_wrong():
    a, packed = torch.zeros(2, 8, dtype=torch.int8), torch.zeros(2, 3, dtype=torch.uint8)
    for args, message in [
        ((a.float(), packed), r"matmul: a must be int8 of shape \(M, K\), got torch.float32 \(2, 8\)"),
        ((a, packed[:1]), r"matmul: b must be uint8 of shape \(2, N\), got torch.uint8 \(1, 3\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            matmul(*args)
    with pytest.raises(ValueError, match="pack_weights: bits must be 2, got 4"):
        pack_weights(a, 4)
