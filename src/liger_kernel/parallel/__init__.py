"""Models over several processes: PyTorch's modes (``modes``), the norm of sharded gradients
(``gradients``), what a loss needs of a sharded head (``heads``), and rows of which ranks share the
tokens (``ulysses``).

Only this package knows how FSDP, ZeRO and DTensor work. It does not need Transformers, except for
``ulysses``.
"""

from liger_kernel.parallel.gradients import by_sharding, clip_grad_norm_, grad_norm, in_blocks, plain_parts
from liger_kernel.parallel.modes import MODES, ULYSSES, Parallel, layers_of, parallelize, tensor_parallel
from liger_kernel.parallel.sharded_head import (
    VocabularyParallel,
    bare,
    call_instead,
    gathers_when_called,
    hooks_of_users,
    inputs_of,
    is_hooked,
    is_linear,
    is_own_linear,
    is_sharded,
    is_tensor_parallel,
    run_gathered,
    unsharded_class,
)

__all__ = [
    "MODES",
    "ULYSSES",
    "Parallel",
    "VocabularyParallel",
    "bare",
    "by_sharding",
    "call_instead",
    "clip_grad_norm_",
    "gathers_when_called",
    "grad_norm",
    "hooks_of_users",
    "in_blocks",
    "inputs_of",
    "is_hooked",
    "is_linear",
    "is_own_linear",
    "is_sharded",
    "is_tensor_parallel",
    "layers_of",
    "parallelize",
    "plain_parts",
    "run_gathered",
    "tensor_parallel",
    "unsharded_class",
]
