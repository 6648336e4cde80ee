"""AdamW and its learning rate, the same for every trainer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from liger_kernel.parallel import by_sharding
from liger_kernel.train.config import TrainConfig, UserError


def adamw(parameters: Iterable[Tensor], config: TrainConfig) -> torch.optim.Optimizer:
    """PyTorch's fused AdamW for the trained parameters, or that of bitsandbytes with moments in 8 bits. Vectors have no weight decay."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": same, "weight_decay": config.weight_decay if matrices else 0.0}
        for matrices in (True, False)
        for same in by_sharding([p for p in trained if (p.ndim > 1) == matrices])  # fused kernels take one kind of tensor
    ]
    options: dict[str, Any] = {"lr": config.peak_lr, "betas": (0.9, config.beta2)}
    if config.optimizer == "adamw-8bit":
        try:
            from bitsandbytes.optim import AdamW8bit
        except ImportError as error:
            raise UserError("optimizer adamw-8bit needs bitsandbytes: pip install bitsandbytes") from error
        return AdamW8bit(groups, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


def scheduler(optimizer: torch.optim.Optimizer, config: TrainConfig) -> torch.optim.lr_scheduler.LambdaLR:
    """``learning_rate`` as a scheduler of PyTorch, for other trainers."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(config, min(step, config.steps - 1)) / config.peak_lr)


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of step 0, 1, ...: linear warm-up, then the schedule down to ``min_lr`` of the peak at the last step."""
    if step < config.warmup:
        return config.peak_lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
    falling = min(1.0, (config.steps - 1 - step) / max(1, config.steps * config.decay))
    high = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0, "wsd": falling}[config.schedule]
    return config.peak_lr * (config.min_lr + (1 - config.min_lr) * high)
