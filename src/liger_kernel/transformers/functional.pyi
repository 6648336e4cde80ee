"""For type checkers: at run time the path is one of ``liger_kernel._legacy``."""

from liger_kernel.compat.functions import *  # noqa: F403
