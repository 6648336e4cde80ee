"""The declaration of operators, their launches and configurations, and functions that kernels
share. What a declaration needs is imported from here."""

from liger_kernel.ops._core.operator import (
    Case as Case,
    Cost as Cost,
    T as T,
    acc as acc,
    launcher as launcher,
    nbytes as nbytes,
    once_differentiable as once_differentiable,
    op as op,
)
from liger_kernel.ops._core.schema import typed_launcher as typed_launcher
