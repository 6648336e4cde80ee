"""The optimizer of a config and its learning rate, the same for every trainer."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from liger_kernel.parallel import by_sharding, in_blocks
from liger_kernel.train import adamw
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.mistakes import mistaken


def optimizer_of(parameters: Iterable[Tensor], config: TrainConfig) -> torch.optim.Optimizer:
    """The config's optimizer of the trained parameters. Vectors have no weight decay."""
    trained = [p for p in parameters if p.requires_grad]
    # fused kernels take one kind of tensor
    groups = [
        {"params": same, "weight_decay": config.weight_decay if matrices else 0.0}
        for matrices in (True, False)
        for same in by_sharding([p for p in trained if (p.ndim > 1) == matrices])
    ]
    if adamw.KINDS[config.optimizer].moments == 1:
        for p in trained:
            if in_blocks(p, adamw.LEAST, adamw.BLOCK) is False:
                raise UserError(
                    f"optimizer {config.optimizer} cannot cut a weight of shape {tuple(p.shape)} into blocks of "
                    f"{adamw.BLOCK} values on every rank: "
                    "take another number of ranks, or optimizer adamw"
                )
    return adamw.make(config.optimizer, groups, lr=config.peak_lr, betas=(0.9, config.beta2))


def require(config: TrainConfig) -> None:
    """``UserError`` if what the config's optimizer needs is not installed: better known before
    data and model are loaded."""
    with mistaken("", ImportError):
        adamw.require(config.optimizer)
    if adamw.KINDS[config.optimizer].by == "torchao":
        import torchao.optim  # noqa: F401  # from here on, torch.load(weights_only=True) reads its moments


def scheduler(optimizer: torch.optim.Optimizer, config: TrainConfig) -> torch.optim.lr_scheduler.LambdaLR:
    """``learning_rate`` as a scheduler of PyTorch, for other trainers."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(config, min(step, config.steps - 1)) / config.peak_lr
    )


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of step 0, 1, ...: linear warm-up, then the schedule down to ``min_lr``
    of the peak at the last step."""
    if step < config.warmup:
        return config.peak_lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
    falling = min(1.0, (config.steps - 1 - step) / max(1, config.steps * config.decay))
    high = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "constant": 1.0,
        "wsd": falling,
    }[config.schedule]
    return config.peak_lr * (config.min_lr + (1 - config.min_lr) * high)
