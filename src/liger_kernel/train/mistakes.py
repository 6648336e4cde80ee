"""Mistakes of users, each in one line: ``UserError``, a parser of flags that raises it, and
checks of files before work begins."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from liger_kernel.nearest import ALIAS, did_you_mean, flag_form, meant, nearest, no_such
from liger_kernel.train.files import special
from liger_kernel.train.redact import in_a_line, redacted


class UserError(ValueError):
    """A mistake in what the user asked for: shown as one line, without a traceback or
    credentials."""

    def __init__(self, text: object = ""):
        super().__init__(redacted(str(text)))


def why(error: BaseException, most: int | None = 300) -> str:
    """What other packages say of an error, in a line."""
    if "trust_remote_code" in str(error):
        return (
            "it comes with Python code of its own, which runs on this machine, with your rights, only if you give "
            "--trust-remote-code"
        )
    return in_a_line(error, most)


@contextlib.contextmanager
def mistaken(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """An error inside, of these kinds, is a ``UserError`` whose text begins with ``what``. Without
    kinds, of any: transformers, PEFT and the hub raise many."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if kinds and not isinstance(error, kinds):
            raise
        raise UserError(what + why(error, None if kinds else 300)) from error


@contextlib.contextmanager
def needs(what: str, package: str) -> Iterator[None]:
    """Imports inside are of a package that only ``what`` needs."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"{what} needs {package}: pip install {package}") from error


def sentence(error: BaseException) -> str | None:
    """One for an error that is the machine's and has many forms: the packages below raise their
    own where no file can be opened. None for others."""
    found: BaseException | None = error
    while found is not None:
        if getattr(found, "errno", None) in (errno.EMFILE, errno.ENFILE) or os.strerror(errno.EMFILE) in str(found):
            return (
                "this process may not open as many files as it needs: `ulimit -n` shows the limit, and `ulimit -n "
                "4096` raises it"
            )
        found = found.__cause__ or found.__context__
    return None


METAVAR = {int: "N", float: "X"}


class Parser(argparse.ArgumentParser):
    """``argparse``'s parser, which raises ``UserError`` for a mistake, with the nearest right
    name, instead of printing its usage and exiting."""

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """A number's type and letter, and what help says of a default, follow from the default."""
        default, help = options.get("default"), options.get("help", argparse.SUPPRESS)
        if type(default) in METAVAR:
            options = {"type": type(default), "metavar": METAVAR[type(default)]} | options
        if default and argparse.SUPPRESS not in (default, help) and "(default" not in help:
            options["help"] = f"{help} (default: {f'{default:g}' if isinstance(default, float) else default})"
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        wrong = re.fullmatch(r"argument (?:.*/)?(--[\w-]+): invalid (int|float) value: (.*)", message)
        if empty := re.fullmatch(r"argument (?:.*/)?(--[\w-]+): expected one argument", message):
            action = self._option_string_actions[empty[1]]
            values = action.choices or [action.metavar or action.dest.upper()]
            raise UserError(f"{empty[1]} needs a value: {', '.join(map(str, values))}")
        raise UserError(
            f"{wrong[1]} must be a {'whole ' * (wrong[2] == 'int')}number, got {wrong[3]}" if wrong else message
        )

    def as_ours(self, args: list[str]) -> list[str]:
        """``args`` with our names of flags, where other packages' names, or underscores, stand."""
        found, flags = [], self._option_string_actions
        for arg in args:
            flag, sign, value = arg.partition("=")
            name = flag_form(flag)
            ours = next((f"--{each}" for each in (name, ALIAS.get(name)) if f"--{each}" in flags), flag)
            found.append(f"{ours}{sign}{value}" if flag.startswith("--") and flag not in flags else arg)
        return found

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            if flag.lower() in ("true", "false"):
                raise UserError(f"unexpected argument {flag!r}: a flag that is on or off has no value; --no-... is off")
            if not flag.startswith("-"):
                raise UserError(f"unexpected argument {flag!r}; {self.prog} --help lists what it takes")
            flags = [name for name in self._option_string_actions if name.startswith("--")]
            names = {f"--{theirs}": f"--{ours}" for theirs, ours in ALIAS.items() if f"--{ours}" in flags}
            names |= zip(flags, flags)
            # a flag that other packages have and we do not ("") is like none of ours
            near = names.get(nearest(flag, names) or "") if (right := meant(flag, flags)) is None else right
            raise UserError(
                f"no flag {flag}; {f'did you mean {near}?' if near else f'{self.prog} --help lists the flags'}"
            )
        return found

    def _get_option_tuples(self, option_string: str) -> Any:
        """Flags that this abbreviates: none if it is another package's name, as ``--seq`` is no
        ``--sequence-parallel-size``."""
        return (
            []
            if meant(option_string.partition("=")[0], self._option_string_actions)
            else super()._get_option_tuples(option_string)
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            if isinstance(action, argparse._SubParsersAction):
                raise UserError(no_such("command", str(value), names))
            flag = max(action.option_strings, key=len, default=action.dest)
            raise UserError(f"{flag} must be one of {', '.join(names)}; got {value!r}{did_you_mean(str(value), names)}")


def note(text: object) -> None:
    """Tell the user something beside the results, at once."""
    print(text, file=sys.stderr, flush=True)


def aligned(lines: list[list[str]], words: set[int]) -> str:
    """Lines of cells in columns; those of ``words`` begin on the left."""
    # a failure has no cells after it
    widths = [max(len(cell) for cell in column if not cell.startswith("failed:")) for column in zip(*lines)]
    shown = lambda cell, i: cell.ljust(widths[i]) if i in words else cell.rjust(widths[i])
    return "\n".join("  ".join(shown(cell, i) for i, cell in enumerate(line)).rstrip() for line in lines)


def one_of(kind: str, name: str, names: Iterable[str]) -> str:
    """``name``, which is one of ``names``; else ``UserError`` with the nearest of them."""
    names = list(names)
    if name not in names:
        raise UserError(no_such(kind, name, names))
    return name


def either(names: Iterable[str]) -> str:
    """``a, b or c``."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def at_least(least: float, **values: float | None) -> None:
    """``UserError`` for the first of some flags that is below ``least``, or NaN. A flag that is
    None was not given."""
    for name, value in values.items():
        if value is not None and not value >= least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least:g}, got {value:g}")


def similar_file(path: str | Path) -> str:
    """``; did you mean chats.jsonl?``: a file beside a missing one with a name like its own, first of
    its kind; or nothing."""
    path = Path(path)
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        return ""
    stems = {Path(name).stem: name for name in names if Path(name).suffix == path.suffix}
    near = stems.get(nearest(path.stem, stems) or "") or (path.suffix and nearest(path.name, names, 0.85))
    return f"; did you mean {path.parent / near}?" if near else ""


def existing(path: str | Path) -> Path:
    """``path``, a regular file that is there; else ``UserError`` with the name that is nearest
    among its neighbours."""
    path = Path(path)
    if not os.path.lexists(path):
        raise UserError(f"no such file: {path!s:.200}{similar_file(path)}")
    if path.is_dir():
        raise UserError(f"{path} is a folder: give a file")
    return regular(path)


def regular(path: Path) -> Path:
    """``path``; ``UserError`` if it is a pipe, a device or a socket, or a link to one, of which
    reading may never end."""
    if os.path.exists(path) and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is no regular file, but a pipe, a device or a socket")
    return path


def regular_in(folder: str | Path) -> None:
    """``UserError`` if a file in ``folder``, from which a package is to load something, never
    ends."""
    if os.path.isdir(folder):
        for path in Path(folder).iterdir():
            regular(path)


def owned(folder: Path, alone: bool = False) -> None:
    """``UserError`` if ``folder`` is there and is another user's, or, with ``alone``, others can
    write to it: what is in it would be read as this user's."""
    if not hasattr(os, "geteuid") or not folder.is_dir():
        return
    found = folder.stat()
    mine = found.st_uid in (os.geteuid(), 0)
    # some file systems show this user's files as another owner's
    if not mine and os.access(folder, os.W_OK):
        with tempfile.TemporaryFile(dir=folder) as probe:
            mine = os.fstat(probe.fileno()).st_uid == found.st_uid
    if not mine or (alone and found.st_mode & stat.S_IWOTH):
        why = "can be written to by others" if mine else f"belongs to user {found.st_uid}"
        raise UserError(f"{folder} {why}, so what is in it may not be this user's: give a folder of your own")


def unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """The dict of ``pairs``; ``ValueError`` if a name stands there twice: which of its values is
    meant is not known."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!s:.80} stands there twice")
    return found


def holds(module: str, folder: str | None, flag: str, requirement: str) -> None:
    """``UserError`` if the ``folder`` of a flag holds no Python package of that name, with what
    installs it there."""
    if folder and not ((Path(folder) / module).is_dir() or (Path(folder) / f"{module}.py").is_file()):
        missing = (
            f"{flag} {folder} holds no {module}"
            if Path(folder).is_dir()
            else f"{flag}: no such folder: {folder}{similar_file(folder)}"
        )
        raise UserError(f"{missing}; `pip install --no-deps --target {folder} {requirement}` puts it there")


def writable(file: str | Path | None = None, folder: str | Path | None = None, ours: str | None = None) -> None:
    """``UserError`` if ``file``, or files in ``folder``, cannot be written: better before work of
    an hour than after it.

    Makes missing folders. A file that is there must begin as the regular expression ``ours`` says,
    as the command's own do.
    """
    path = folder if file is None else file
    if path and not (file is not None and special(file)):
        where = Path(path) if file is None else Path(path).parent
        if reason := _folder_refuses(where) or (_file_refuses(Path(file), ours) if file is not None else None):
            raise UserError(f"cannot write to {path}: {reason}")


def _folder_refuses(where: Path) -> str | None:
    if hasattr(os, "geteuid") and where.is_symlink() and (owner := os.lstat(where).st_uid) not in (0, os.geteuid()):
        # what is written there could land anywhere
        return f"{where} is a link, which user {owner} has made"
    try:
        where.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        return f"{next((each for each in (where, *where.parents) if each.is_file()), where)} is a file, not a folder"
    except OSError as error:
        return error.strerror
    return None if os.access(where, os.W_OK) else "permission denied"


def _file_refuses(file: Path, ours: str | None) -> str | None:
    if file.is_dir():
        return "it is a folder"
    if file.is_symlink():
        return "it is a link; give the file itself"
    if ours and file.exists():
        with file.open("rb") as there:
            begin = there.read(1 << 16).decode(errors="replace")
        if begin and not re.match(ours, begin):
            return "it holds something else; give another name, or remove it"
    return None
