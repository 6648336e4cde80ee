"""What every process of a test would do anew, and what takes a rank a third of its time: done
once, before processes are forked."""

from __future__ import annotations

import contextlib
import gc

from liger_kernel.transformers.recognise.compare import references
from liger_kernel.transformers.recognise.families import infer

with contextlib.suppress(ImportError):  # not in older versions
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # builds that of all models

with references():  # as whole models are served; by kernels this takes longer
    infer("llama")

gc.collect(), gc.freeze()  # processes need not look through all this, whose pages they would then have to copy
