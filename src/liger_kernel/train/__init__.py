"""The runtime layer: one configuration, and one ``train(config)``. Importing it loads nothing
heavy, so that ``--help`` is fast."""

from liger_kernel.train.config import TrainConfig, UserError

__all__ = ["TrainConfig", "UserError"]
