"""Benchmark cases of ``ops/token_embedding``: shapes of real models, rivals and sweeps."""

from __future__ import annotations

import torch.nn.functional as F

from liger_kernel.bench.measured import Measured
from liger_kernel.ops._core.operator import Case, T
from liger_kernel.ops.token_embedding import tokens

MEASURED = {
    "embedding": Measured(
        cases=[
            Case("llama3-8b", dict(index=tokens(128256, 4, 8192), w=T((128256, 4096))), gpu=True),
            Case("gpt2", dict(index=tokens(50257, 64, 1024), w=T((50257, 768)), padding_idx=50256), gpu=True),
        ],
        rivals={"torch": lambda index, w, *, padding_idx=None: F.embedding(index, w, padding_idx)},
    )
}
