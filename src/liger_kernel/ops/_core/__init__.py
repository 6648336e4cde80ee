"""The declaration of operators, their launches and configurations, and functions that kernels
share. What a declaration needs is imported from here."""

from liger_kernel.ops._core.operator import Case as Case
from liger_kernel.ops._core.operator import Cost as Cost
from liger_kernel.ops._core.operator import T as T
from liger_kernel.ops._core.operator import acc as acc
from liger_kernel.ops._core.operator import launcher as launcher
from liger_kernel.ops._core.operator import nbytes as nbytes
from liger_kernel.ops._core.operator import once_differentiable as once_differentiable
from liger_kernel.ops._core.operator import op as op
