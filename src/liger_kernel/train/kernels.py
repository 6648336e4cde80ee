"""The kernels of a run: each node compiles them once, before the first step; later compilations
are counted."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from liger_kernel.train.config import TrainConfig
from liger_kernel.train.model import flags_for
from liger_kernel.train.ranks import Ranks, local_rank
from liger_kernel.train.redact import in_a_line


class Compilations:
    """The number of kernels that Triton has compiled, and not found in its cache, since this
    object was made."""

    def __init__(self) -> None:
        self.count = 0
        self._tell(self._compiled)

    def _compiled(self, *, cache_hit: bool, **_: Any) -> None:
        self.count += not cache_hit

    def close(self) -> None:
        self._tell(None)

    @staticmethod
    def _tell(listener: Any) -> None:
        if importlib.util.find_spec("triton"):
            from triton import knobs

            knobs.compilation.listener = listener


def training_launches(config: TrainConfig, model_config: Any, precision: str) -> list[Any]:
    """The launches of a run of ``config`` in ``precision``."""
    # needs Triton
    from liger_kernel.compile.ahead import model_launches

    # FSDP2 casts weights, autocast arithmetic; a frozen base is in bf16
    half = precision == "bf16" or (precision == "bf16-mixed" and (config.fully_sharded or config.lora > 0))
    return model_launches(
        model_config,
        batch=config.batch,
        seq=config.length,
        dtype=torch.bfloat16 if half else torch.float32,
        autocast=torch.bfloat16 if precision == "bf16-mixed" and not half else None,
        flags=flags_for(config, model_config.model_type),
    )


def compile_ahead(config: TrainConfig, model_config: Any, precision: str, ranks: Ranks) -> None:
    """One rank of each node compiles what a training step needs, as `liger warmup` does; jobs
    that share a cache take turns, the other ranks wait."""
    if local_rank() == 0:
        try:
            # these need Triton
            from triton import knobs

            from liger_kernel.compile.ahead import compile_launches

            folder = Path(knobs.cache.dir)
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / "liger-warmup.lock"):
                compiled, needed = compile_launches(training_launches(config, model_config, precision))
            if ranks.first:
                print(
                    f"kernels: {needed} needed, {compiled} compiled, {needed - compiled} found in the cache", flush=True
                )
        # a model that cannot be built without data compiles in its first step
        except Exception as error:
            print(
                f"kernels compile during the first step, as they could not be compiled before it: {in_a_line(error)}",
                flush=True,
            )
    # a barrier on the CPU
    ranks.any(False)


def use_cache() -> None:
    """Triton's cache through our manager, whose directories may be copied and read only, unless
    the user has one of his own. Before the first kernel."""
    if importlib.util.find_spec("triton") and "TRITON_CACHE_MANAGER" not in os.environ:
        os.environ["TRITON_CACHE_MANAGER"] = "liger_kernel.compile.cache:LigerTritonFileCacheManager"
