"""Without a GPU, kernels run in Triton's interpreter: this has to be imported before any kernel
is defined."""

from __future__ import annotations

import importlib.util
import os

import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter

    interpreter.install()
