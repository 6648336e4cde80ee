"""The declaration of operators, their launches and configurations, and functions that operators
share: what an operator needs is imported from here, and what its kernels call from ``tl``."""

from liger_kernel.ops._core.invariance import hold, is_invariant, is_over_tokens, over_tokens
from liger_kernel.ops._core.operator import (
    KERNEL_DTYPES,
    Case,
    Cost,
    T,
    acc,
    as_index,
    autocast_dtype,
    computed,
    counted,
    descriptor,
    free_to_write,
    host_can_read,
    intercepted,
    is_fake,
    launch,
    launcher,
    leaves,
    nbytes,
    on_gpu,
    once_differentiable,
    only_pytorch,
    op,
    refuse_graphs,
    results_are_kept,
    rows_of,
    shaped,
    swapped,
    tracing,
    unlike,
    use_kernels,
)
from liger_kernel.ops._core.products import add_mm
from liger_kernel.ops._core.reduce import column_sum, scale_, scaled, scaled_rows
from liger_kernel.ops._core.schema import SymInt, fields_of, typed_launcher
from liger_kernel.ops._core.shards import has_split_rows, is_sharded, on_own_rows
