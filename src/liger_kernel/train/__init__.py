"""The runtime layer: one config, one ``train(config)``. Importing it loads nothing heavy, so that ``--help`` is instant."""

from liger_kernel.train.config import TrainConfig, UserError

__all__ = ["TrainConfig", "UserError"]
