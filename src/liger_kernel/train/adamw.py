"""AdamW with fewer bytes for each parameter, by PyTorch's and torchao's optimizers, and its step in
the backward.

    name               optimizer                                     moments              weights in bf16 are rounded
    adamw              torch.optim.AdamW, fused                      dtype of the weight  to the nearest number
    adamw-bf16         torchao's AdamW, bf16_stochastic_round        dtype of the weight  stochastically
    adamw-8bit         torchao's AdamW8bit                           8 bits               to the nearest number
    adamw-8bit-bf16    torchao's AdamW8bit, bf16_stochastic_round    8 bits               stochastically

All 8-bit moments are torchao's, because the step of bitsandbytes 0.50 refuses DTensors (FSDP2) and
does not round stochastically. torchao compiles its step for each shape of a parameter
(torch.compile), which needs a C++ compiler, on GPUs too.

``bench/step_child.py`` loads this file by its path, where LinkedIn's package may be the only
``liger_kernel``: it imports nothing of ours, and torch only in functions, so that a configuration
can be checked without torch.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Kind(NamedTuple):
    """``moments``: bytes of one moment of a parameter, None for those of the weight's dtype.
    ``parallel``: modes in which it trains what it should."""

    by: str
    moments: int | None
    stochastic: bool
    parallel: tuple[str, ...]


FULLY_SHARDED = ("fsdp2", "ulysses-fsdp2")
# Replicas (ddp, ulysses, and what tp does not split) would each be rounded with other random
# numbers; blocks of 8-bit moments do not follow the shards of tp.
KINDS = {
    "adamw": Kind(
        "torch", None, False, ("none", "ddp", *FULLY_SHARDED, "tp", "ulysses", "deepspeed-z2", "deepspeed-z3")
    ),
    "adamw-bf16": Kind("torchao", None, True, ("none", *FULLY_SHARDED)),
    "adamw-8bit": Kind("torchao", 1, False, ("none", "ddp", "ulysses", *FULLY_SHARDED)),
    "adamw-8bit-bf16": Kind("torchao", 1, True, ("none", *FULLY_SHARDED)),
}
# torchao's: moments of fewer values, or of no whole number of blocks, stay in the weight's dtype
LEAST, BLOCK = (4096, 256)


def require(name: str) -> None:
    """``ImportError`` that says what to install, if the optimizer lacks something. It imports
    nothing."""
    if name not in KINDS or KINDS[name].by != "torchao":
        return
    if importlib.util.find_spec("torchao") is None:
        raise ImportError(f"optimizer {name} needs torchao: pip install torchao")
    compiler = os.environ.get("CXX", "g++")
    if sys.platform == "linux" and shutil.which(compiler.split()[0]) is None:
        raise ImportError(
            f"optimizer {name} needs a C++ compiler, because torchao compiles its step: install g++, or set CXX; "
            f"{compiler} was not found"
        )


def make(name: str, groups: list[Any], **options: Any) -> torch.optim.Optimizer:
    """The optimizer ``name`` of ``KINDS``, with PyTorch's options of AdamW."""
    import torch

    kind = KINDS[name]
    if kind.by == "torch":
        return torch.optim.AdamW(groups, **({"fused": True} | options))
    require(name)
    return _of_torchao(kind)(groups, bf16_stochastic_round=kind.stochastic, **options)


def _of_torchao(kind: Kind) -> Any:
    """torchao's class for ``kind``, around two faults of torchao 0.18 with PyTorch 2.13."""
    from torch._functorch import config
    from torchao import optim
    from torchao.optim.subclass_8bit import OptimState8bit

    class Uncached:
        # The cache on disk takes a shard in 8 bits for a plain one of the same shape: the step that
        # it returns writes beyond the moments.
        def step(self, closure: Any = None) -> Any:
            with config.patch(enable_autograd_cache=False):
                return super().step(closure)  # type: ignore[misc]  # of the optimizer beside it

    # the name in torchao's README
    class AdamW(Uncached, optim._AdamW):
        pass

    class AdamW8bit(Uncached, optim.AdamW8bit):
        # DTensor views its shard, and the view loses the dtype that moments of bf16 weights show:
        # they show fp32 here. Their content is the same.
        @staticmethod
        def _subclass_zeros(p: Tensor, signed: bool, block_size: int) -> Any:
            return OptimState8bit.zeros(p.shape, signed, block_size, p.device)

    return AdamW8bit if kind.moments == 1 else AdamW


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups. torchao has it as a tensor, as its compiled step
    would be compiled again for another number."""
    for group in optimizer.param_groups:
        if hasattr(group["lr"], "fill_"):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


class InBackward:
    """Makes the step of each parameter when the backward has its whole gradient, and frees that
    gradient: gradients are never all alive.

    Weights and moments are those of ``optimizer.step()`` after the backward, bit for bit, unless
    they are rounded stochastically, as random numbers are drawn in another order. ``optimizer``
    stays the one to save, to load and to schedule. A gradient must come from one backward, and
    nobody may
    need it later: there is no norm to clip by, and nothing can be accumulated. ``on`` is False while
    gradients are to be dropped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer, self.on = optimizer, True
        self._norms: dict[int, Tensor] = {}
        parameters = [(i, p) for i, group in enumerate(optimizer.param_groups) for p in group["params"]]
        for place, (i, p) in enumerate(parameters):
            p.register_post_accumulate_grad_hook(functools.partial(self._step, i, place))

    def _step(self, group: int, place: int, p: Tensor) -> None:
        import torch

        optimizer, gradient = self.optimizer, p.grad
        assert gradient is not None
        if self.on:
            local: Any = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            self._norms[place] = torch.linalg.vector_norm(local, dtype=torch.promote_types(local.dtype, torch.float32))
            groups = optimizer.param_groups
            optimizer.param_groups = [{**groups[group], "params": [p]}]
            try:
                optimizer.step()
            finally:
                optimizer.param_groups = groups
        p.grad = None

    def norm(self) -> Tensor:
        """The 2-norm of the gradients of the backward before, without the shards of other ranks."""
        import torch

        norms = [self._norms[place] for place in sorted(self._norms)]
        self._norms = {}
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
