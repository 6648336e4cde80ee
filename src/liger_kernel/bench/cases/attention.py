"""Benchmark cases of ``ops/attention``, and of attention and softmax in ``extra``."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from liger_kernel.bench.measured import Measured, Passing, real, timed
from liger_kernel.extra.neighborhood_attention import _qkv as neighbors
from liger_kernel.ops._core.operator import T
from liger_kernel.ops.attention.sink_attention import _heads as heads


def _neighborhood_attention_sdpa(q, k, v, kernel_size, dilation, scale):
    t = torch.arange(q.shape[2], device=q.device)
    apart = t[:, None] - t
    mask = (apart.abs() <= kernel_size // 2 * dilation) & (apart % dilation == 0)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)


@functools.cache
def _flex(length: int, window: int | None, device: torch.device) -> functools.partial:
    """Compiled attention with the mask of so many tokens, which is made once."""
    visible = lambda b, h, t, j: (t >= j) & (t - j < (window or length))
    mask = create_block_mask(visible, None, None, length, length, device=device)
    attention = torch.compile(flex_attention, dynamic=False)
    return functools.partial(attention, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))


def _sink_attention_flex(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None, scale: float | None):
    """As Transformers does it: flexible attention without sinks, whose output is scaled."""
    o, aux = _flex(q.shape[2], window, q.device)(q, k, v, scale=scale)
    return (o * torch.sigmoid(aux.lse - sinks[:, None].float())[..., None]).to(q.dtype)


ATTENTION = {
    "multi_token_attention": Measured(
        cases=[
            timed("paper", scores=T((1, 16, 2048, 2048)), weight=T((16, 1, 6, 11)), padding=(0, 5), groups=16),
            real("llama-heads", scores=T((2, 32, 1024, 1024)), weight=T((32, 32, 3, 3)), padding=1),
        ],
        rivals={"upstream": "scores weight bias stride padding dilation groups sparse"},
    ),
    "neighborhood_attention": Measured(
        cases=[
            real("vit-like", **neighbors(8, 12, 4096, 64)),
            timed("heads-128", **neighbors(2, 32, 8192, 128), kernel_size=63, dilation=2),
        ],
        rivals={
            "torch": Passing(_neighborhood_attention_sdpa),
            "upstream": Passing("liger_fused_neighborhood_attention", "q k v kernel_size dilation scale"),
        },
    ),
    "sink_attention": Measured(
        cases=[
            real("gpt-oss-20b", **heads(4, 64, 8, 2048, 64)),
            real("gpt-oss-20b-window", **heads(4, 64, 8, 2048, 64), window=128),
            timed("granite", **heads(4, 32, 8, 2048, 128)),
            timed("gpt-oss-20b-long", **heads(1, 64, 8, 16384, 64)),
        ],
        rivals={"torch": Passing(_sink_attention_flex)},
    ),
    "softmax": Measured(
        cases=[
            real("llama2-vocab", x=T((4096, 32000))),
            real("llama3-vocab", x=T((2048, 128256))),
            real("router", x=T((32768, 128))),
        ],
        rivals={"torch": Passing(torch.softmax, "x dim"), "upstream": "x"},
        sweeps={
            "columns": ((1024, 4096, 16384, 32768, 65536, 131072, 262144), lambda n: dict(x=T(((1 << 28) // n, n))))
        },
    ),
    "sparsemax": Measured(
        cases=[real("llama2-vocab", x=T((2048, 32000))), real("llama3-vocab", x=T((1024, 128256)))],
        rivals={"upstream": "x dim"},
        sweeps={"columns": ((128, 1024, 4096, 16384, 32768, 131072), lambda n: dict(x=T(((1 << 26) // n, n))))},
    ),
}
