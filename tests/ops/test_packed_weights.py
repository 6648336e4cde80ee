"""Weights in packed integers and NVFP4: packed here as the formats are documented, and decoded value by
value in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICE, needs_kernels

from liger_kernel.ops.projections import packed_weights as packed
from liger_kernel.ops.projections.float8 import E4


def words(values: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Values packed along ``dim``, the first of a word in its lowest bits, or in this order of them."""
    values, each = values.movedim(dim, -1), 32 // bits
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % each)).unflatten(-1, (-1, each))
    together = sum(values[..., of].long() << bits * place for place, of in enumerate(order or range(each)))
    return (together - (together >> 31 << 32)).int().movedim(-1, dim).contiguous()


def drawn(N: int, K: int, group: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (N, K), z and s (N, K / group)."""
    generator = torch.Generator().manual_seed(0)
    q, z = (torch.randint(0, 2**bits, (N, n), generator=generator) for n in (K, K // group))
    return q, z, 10 ** (2 * torch.rand(N, K // group, generator=generator) - 2)


def on_device(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [t if t is None else t.to(DEVICE) for t in tensors]


def assert_decodes(weight: packed.PackedWeight, truth: torch.Tensor) -> None:
    """To the bit, as the truth in fp32 is rounded once; by the kernel and, where words hold more than
    the rows, without."""
    assert weight.shape == truth.shape
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(weight.dense(dtype).cpu(), truth.to(dtype))


@needs_kernels
@pytest.mark.parametrize(("bits", "K", "group"), [(4, 64, 32), (4, 30, 10), (8, 96, 96)])
def test_rows_of_integers(bits, K, group):
    q, z, s = drawn(21, K, group, bits)
    s = s.bfloat16()
    middle = torch.full_like(z, 2 ** (bits - 1))
    for zero in (z, middle):
        truth = (q - zero.repeat_interleave(group, 1)) * s.float().repeat_interleave(group, 1)
        stored = None if zero is middle else words(z, bits, 0)
        of = on_device(words(q, bits, 1), s, stored)
        assert_decodes(packed.integer_rows(*of, (21, K), group, bits), truth)
    with pytest.raises(ValueError, match=r"integer_rows: scale must have shape \(21, \d\), got \(\d, 21\)"):
        packed.integer_rows(of[0], of[1].t(), None, (21, K), group, bits)
    with pytest.raises(ValueError, match=r"integer_rows: packed must be torch.int32, got torch.int64"):
        packed.integer_rows(of[0].long(), of[1], None, (21, K), group, bits)
    with pytest.raises(ValueError, match=r"integer_rows: group must divide the \d+ columns, got 7"):
        packed.integer_rows(*of, (21, K), 7, bits)


@needs_kernels
def test_nvfp4():
    generator = torch.Generator().manual_seed(0)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    code = torch.randint(0, 16, (7, 48), generator=generator)
    scale, divisor = (100 * torch.rand(7, 3, generator=generator)).to(E4), torch.tensor([37.0])
    scale[0] = torch.tensor([2**-9, 7 * 2**-9, 448.0]).to(E4)  # the least, the last without an exponent, the largest
    stored = (code[:, ::2] | code[:, 1::2] << 4).to(torch.uint8)
    weight = packed.nvfp4_rows(*on_device(stored, scale, divisor))
    assert_decodes(weight, table[code] * (scale.float() / divisor).repeat_interleave(16, 1))
    with pytest.raises(ValueError, match=r"nvfp4_rows: scale must be torch.float8_e4m3fn, got torch.float32"):
        packed.nvfp4_rows(stored, scale.float(), divisor)
    with pytest.raises(ValueError, match=r"divisor must have shape \(1,\), got \(2,\)"):
        packed.nvfp4_rows(stored, scale, divisor.expand(2))


@needs_kernels
@pytest.mark.parametrize(("bits", "N", "group"), [(4, 40, 32), (8, 12, 16), (2, 33, 64)])
def test_gptq(bits, N, group):
    """Zeros of the first version are less 1; columns in order, or with the group of each."""
    q, z, s = drawn(N, 64, group, bits)
    for index in (torch.arange(64) // group, torch.randperm(64, generator=torch.Generator().manual_seed(1)) // group):
        in_order = torch.equal(index, torch.arange(64) // group)
        for version in (1, 2):
            truth = (q - z[:, index] - (2 - version)) * s[:, index]
            of = on_device(words(q, bits, 1).t().contiguous(), words(z.t(), bits, 1), s.t().contiguous())
            by = None if in_order else index.int().to(DEVICE)
            assert_decodes(packed.gptq_columns(*of, by, (N, 64), group, bits, version), truth)
    with pytest.raises(ValueError, match=r"gptq_columns: words must have shape .*, got"):
        packed.gptq_columns(of[0].t(), *of[1:], None, (N, 64), group, bits)
    with pytest.raises(ValueError, match=r"gptq_columns: bits must be one of \(2, 4, 8\), got 3"):
        packed.gptq_columns(*of, None, (N, 64), group, 3)


@needs_kernels
def test_awq():
    order = 0, 2, 4, 6, 1, 3, 5, 7
    q, z, s = drawn(40, 24, 12, 4)
    of = on_device(words(q.t(), 4, 1, order), words(z.t(), 4, 1, order), s.half().t().contiguous())
    truth = (q - z.repeat_interleave(12, 1)) * s.half().float().repeat_interleave(12, 1)
    assert_decodes(packed.awq_columns(*of, (40, 24), 12), truth)
    with pytest.raises(ValueError, match=r"awq_columns: zeros must have shape \(2, 5\), got \(5, 2\)"):
        packed.awq_columns(of[0], of[1].t(), of[2], (40, 24), 12)
