"""Transformers 5.23 and later want the library ``kernels`` 0.18.2, and the newest that can be installed
is 0.17.2, which has everything that our tests call: it gets that version.

Imported before Transformers, which reads the version once.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

_version = importlib.metadata.version

if importlib.util.find_spec("kernels") and _version("kernels") == "0.17.2":
    importlib.metadata.version = lambda name: "0.18.2" if name == "kernels" else _version(name)
