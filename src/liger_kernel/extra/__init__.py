"""Operators that no patch, loss or trainer of this package calls. Like all others they are
public in ``liger_kernel.ops``, tested and measured."""

# `liger_kernel.ops` imports the files of this folder: whoever imports one of them first starts there
import liger_kernel.ops  # noqa: F401
