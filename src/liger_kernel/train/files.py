"""Files that are there whole, whatever ends a run."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, text: str) -> None:
    """All of ``text`` is in ``path``, on the disk, or what was there before."""
    aside = path.with_name(path.name + ".tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the name is a part of the directory
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
