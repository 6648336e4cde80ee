"""Benchmark cases of ``ops/token_embedding``: shapes of real models, rivals and sweeps."""

from __future__ import annotations

import torch.nn.functional as F

from liger_kernel.bench.measured import Measured, real
from liger_kernel.ops._core.operator import T
from liger_kernel.ops.token_embedding import tokens

MEASURED = {
    "embedding": Measured(
        cases=[
            real("llama3-8b", index=tokens(128256, 4, 8192), w=T((128256, 4096))),
            real("gpt2", index=tokens(50257, 64, 1024), w=T((50257, 768)), padding_idx=50256),
        ],
        rivals={"torch": lambda index, w, *, padding_idx=None: F.embedding(index, w, padding_idx)},
    )
}
