"""Other packages named ``liger_kernel`` in this environment, LinkedIn's above all: which of them
Python loads depends on the order of ``sys.path``.

Every import of ours looks for them, so this module reads names of folders only, in 0.2 ms of the 30
ms that Python and the import take. ``importlib.metadata`` takes longer to import than all of ours.
"""

from __future__ import annotations

import os
import sys

MARK = "+independent"  # the local label of our versions: no release on a package index can have one (PEP 440)
NAMES = ("liger_kernel", "liger_kernel_nightly")  # of distributions, as their metadata's folders spell them


def others(version: str) -> list[str]:
    """Name, version and folder of each installed package named ``liger_kernel`` that is not this
    one, of version ``version``."""
    return list(dict.fromkeys(each for folder in sys.path for each in _in(folder or os.curdir, version)))


def _in(folder: str, version: str) -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError:  # a zip file, or a folder that is not there
        return []
    installed = [
        name.removesuffix(".dist-info").partition("-")[::2]
        for name in names
        if name.startswith("liger_kernel") and name.endswith(".dist-info")
    ]
    found = [
        f"{name.replace('_', '-')} {found} in {folder}"
        for name, found in sorted(installed)
        if name in NAMES and found != version
    ]
    has = lambda file: os.path.exists(f"{folder}/liger_kernel/{file}")
    # a folder of that name without Python in it is somebody's data
    unpacked = "liger_kernel" in names and not installed and has("__init__.py") and not has(os.path.basename(__file__))
    return found or [f"a liger_kernel without metadata in {folder}"] * unpacked


def warning(version: str, folder: str) -> str | None:
    """What to tell someone who has two of them: which one is loaded, and how to keep one."""
    if os.environ.get("LOCAL_RANK", "0") != "0" or not (found := others(version)):  # one process of a machine is enough
        return None
    return (
        f"liger_kernel {version} is loaded from {folder}, but there is also {', '.join(found)}; the order of "
        "sys.path decides which one Python loads. "
        "Keep one: run `pip uninstall liger-kernel liger-kernel-nightly` until neither is left and install the one "
        "you want, "
        "or take the other's folder off PYTHONPATH."
    )
