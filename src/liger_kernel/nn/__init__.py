"""Modules and functions over the operators, for models of your own, with the names and arguments of
LinkedIn's package.

``in_place`` and ``row_mode`` are accepted and ignored: nothing here writes to a tensor that it does
not own.
"""

# ruff: noqa: F403  names are those of ``__all__`` of each module

from __future__ import annotations

from liger_kernel.compat.functions import *
from liger_kernel.nn.attention import *
from liger_kernel.nn.float8 import LigerFloat8Linear as LigerFloat8Linear
from liger_kernel.nn.float8_training import LigerFloat8TrainingLinear as LigerFloat8TrainingLinear
from liger_kernel.nn.losses import *
from liger_kernel.nn.mlps import *
from liger_kernel.nn.norms import *
from liger_kernel.nn.residual import *
from liger_kernel.nn.token_embedding import LigerEmbedding as LigerEmbedding
