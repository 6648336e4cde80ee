"""Files that are there whole, whatever ends a run, and nowhere else.

What is written has a fresh name first, so that no link is followed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import Any, BinaryIO

# Windows has neither flag
NOFOLLOW, NONBLOCK = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)
# largest file of JSON that is read, in bytes
MOST = 1 << 28


def create(path: Path) -> BinaryIO:
    """Open ``path``, empty. What had the name is unlinked, not written to."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NOFOLLOW, 0o666), "w+b")


def reopen(path: Path) -> BinaryIO:
    """Open a file that is there, to go on with it."""
    return os.fdopen(os.open(path, os.O_RDWR | NOFOLLOW), "r+b")


def append(path: Path, text: str) -> None:
    """Add ``text`` to the end of a file."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NOFOLLOW, 0o666), "ab") as file:
        file.write(text.encode())


def fresh(folder: Path) -> Path:
    """Make ``folder``, empty. What had the name goes; if it is a link, ``OSError``."""
    # rmtree leaves links alone, and mkdir then fails
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


# a number of a run in a file; sums and products of such numbers are exact
COUNT = range(1 << 53)
# whole numbers beyond these are no floats
NUMBER = (float, range(-(10**300), 10**300))


def fits(value: Any, form: Any) -> bool:
    """Whether a value of JSON has a form: a type, a range of whole numbers, one of a tuple of
    forms, or a list or dict of forms. ``[form, ...]`` is a list of any length; a dict may have
    other names, too."""
    if isinstance(form, tuple):
        return any(fits(value, each) for each in form)
    if isinstance(form, list) and form[-1] is ...:
        return isinstance(value, list) and all(fits(each, form[0]) for each in value)
    if isinstance(form, list):
        return isinstance(value, list) and len(value) == len(form) and all(map(fits, value, form))
    if isinstance(form, dict):
        return isinstance(value, dict) and all(fits(value.get(name), each) for name, each in form.items())
    return type(value) is int and value in form if isinstance(form, range) else type(value) is form


def read_object(path: str | Path, **form: Any) -> dict[str, Any]:
    """The JSON object that is all of a regular file, whose values have the given forms;
    ``ValueError`` for anything else.

    A pipe keeps nobody waiting.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is no regular file")
        if found.st_size > MOST:
            raise ValueError(f"{path} is too large: {found.st_size} bytes")
        try:
            values = json.loads(file.read())
        except RecursionError:
            raise ValueError(f"{path} is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold names and values, got a {type(values).__name__}")
    for name, each in form.items():
        if not fits(values.get(name), each):
            raise ValueError(f"{path}: {name} cannot be {values.get(name)!r:.40}")
    return values


def aside(path: Path) -> Path:
    """A new name beside ``path``, for what is to replace it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def write(path: str | Path, content: str | bytes) -> None:
    """All of ``content`` is in ``path``, on the disk, or what was there before."""
    path = Path(path)
    new = aside(path)
    try:
        with create(new) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    # the new name is on the disk when the directory is
    if os.name == "posix":
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def special(path: str | Path) -> bool:
    """Whether ``path`` is a pipe or a device, such as /dev/stdout, which is written to and not
    replaced."""
    path = Path(path)
    named = str(path).startswith(("/dev/std", "/dev/fd/", "/proc/"))
    return named or (path.exists() and not path.is_file() and not path.is_dir())


def export(path: str | Path, content: str | bytes) -> None:
    """Write a file that a user has named."""
    if special(path):
        with open(path, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
    else:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write(path, content)
