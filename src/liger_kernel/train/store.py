"""Checkpoints in an object store: copied there as they complete, fetched from there where the run's
folder has none.

The store has what the folder has, in the same order of writing: ``checkpoints/latest`` names only
what is there whole. Rank 0 copies, in a thread beside training, from a folder that all ranks see
(or the only machine's own).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from liger_kernel.train.checkpoint import FILE, LATEST, NAME, damage, listed, names_in, newest, step_of
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.files import aside, fresh, write
from liger_kernel.train.mistakes import note
from liger_kernel.train.ranks import Preempted, Ranks, optional_thread
from liger_kernel.train.redact import in_a_line, redacted

# a file beside latest: names of checkpoints that are being copied, or were when the run was killed
UPLOADING = "uploading"
PROBE = "probe"
# at most so many bytes of latest and uploading are read
MOST = 1 << 20
# seconds between looks for a new checkpoint
PERIOD = 2.0


class Store:
    """The copy of the run in ``out`` at ``uri``: ``s3://bucket/run``, ``gs://...``,
    ``file:///...``, whatever fsspec has a package for."""

    def __init__(self, uri: str, out: Path):
        try:
            import fsspec

            self.fs, root = fsspec.core.url_to_fs(uri)
        except (ImportError, ValueError) as error:
            raise UserError(f"cannot use the store {uri!r}: {error}") from None
        self.uri, self.out, self.root = redacted(uri), out, root.rstrip("/")
        # the names in its latest when we last read or wrote it
        self.known: list[str] = []
        # names of checkpoints that are damaged there
        self.damaged: set[str] = set()
        # checkpoints that could not be copied at the first attempt
        self.failures = 0

    def _at(self, name: str = "") -> str:
        return f"{self.root}/checkpoints/{name}".rstrip("/")

    def names(self, file: str = LATEST, say: bool = False) -> list[str]:
        """The checkpoints that a file of its names, newest first."""
        path, where = self._at(file), f"{self.uri}/checkpoints/{file}"
        try:
            if not self._regular(path):
                raise OSError(f"{where} is no regular file")
            return names_in(self.fs.cat_file(path, 0, MOST), where if say else None)
        except FileNotFoundError:
            return []

    def _regular(self, path: str) -> bool:
        """Whether this is a file, or not there. Folders of machines alone have links, pipes and
        devices, which a stranger may have made."""
        return (
            "file" not in self.fs.protocol
            or not os.path.lexists(path)
            or (os.path.isfile(path) and not os.path.islink(path))
        )

    def _present(self) -> list[str]:
        """The checkpoints of which there is anything, newest first."""
        try:
            self.fs.invalidate_cache()
            paths = self.fs.ls(self._at(), detail=False)
        except FileNotFoundError:
            return []
        names = {path.rstrip("/").rpartition("/")[2] for path in paths}
        return sorted((name for name in names if NAME.fullmatch(name)), key=lambda name: -step_of(name))

    def probe(self) -> None:
        """Write to it and remove what was written, before there is anything to lose.
        ``UserError`` where that cannot be."""
        probe = self._at(PROBE)
        try:
            _folders(self.fs, probe)
            self.fs.pipe_file(probe, b"")
        # every store has errors of its own
        except Exception as error:
            raise UserError(
                f"cannot write to the store {self.uri}: {type(error).__name__}: {in_a_line(error)}"
            ) from None
        # a store may forbid removal
        with contextlib.suppress(Exception):
            self.fs.rm_file(probe)

    def fetch(self) -> str | None:
        """Bring the newest whole checkpoint into the run's folder, unless that has one as new;
        its name. ``UserError`` if it has some, and none is whole."""
        folder = self.out / "checkpoints"
        here = newest(folder)[0]
        self.known = self.names(say=True)
        unfinished = set(self.names(UPLOADING)) - set(self.known)
        there = [name for name in dict.fromkeys((*self.known, *self._present())) if name not in unfinished]
        for name in there:
            if here and step_of(name) <= step_of(here):
                return None
            why = self._bring(name)
            if why is None:
                with contextlib.suppress(FileNotFoundError):
                    new, lines = aside(self.out / "metrics.jsonl"), f"{self.root}/metrics.jsonl"
                    if self._regular(lines):
                        self.fs.get_file(lines, str(new))
                        new.replace(self.out / "metrics.jsonl")
                    else:
                        note(f"{self.uri}/metrics.jsonl is no regular file: ignored")
                write(folder / LATEST, "".join(f"{each}\n" for each in dict.fromkeys((name, *listed(folder)))))
                return name
            note(f"ignoring checkpoint {self.uri}/checkpoints/{name}: {why}")
            self.damaged.add(name)
        if there and not here:
            raise UserError(
                f"no checkpoint in the store {self.uri} is complete: restore one, or give another --store to start "
                "again"
            )
        return None

    def _bring(self, name: str) -> str | None:
        """Copy a checkpoint into the run's folder; what is wrong with it, of which nothing is
        left there."""
        new, target = fresh(self.out / "checkpoints" / f"fetching-{name}"), self.out / "checkpoints" / name
        try:
            for path in self.fs.ls(self._at(name), detail=False):
                file = path.rpartition("/")[2]
                if not self._regular(path):
                    raise UserError(f"{file} is no regular file")
                if FILE.fullmatch(file):
                    self.fs.get_file(path, str(new / file))
            why = damage(new)
        except FileNotFoundError:
            why = "it is not there"
        except UserError as error:
            why = str(error)
        if why is None:
            # what has the name here is damaged, else it would not be fetched
            shutil.rmtree(target, ignore_errors=True)
            new.rename(target)
        shutil.rmtree(new, ignore_errors=True)
        return why

    def copy(self) -> bool:
        """Bring the checkpoints that the folder names into the store, and remove what its
        ``latest`` named before; whether there was anything to do.

        ``RuntimeError`` if another run has written there meanwhile: what it wrote stays.
        """
        folder, there = self.out / "checkpoints", self.names()
        wanted = [name for name in listed(folder) if (folder / name).is_dir()]
        if wanted == there and not self.damaged.intersection(wanted):
            self.known = there
            return False
        if there != self.known:
            raise RuntimeError(f"another run writes there; its newest checkpoint is {there[0] if there else None}")
        unfinished = self.names(UPLOADING)
        new = [name for name in wanted if name not in there or name in self.damaged]
        _folders(self.fs, self._at(UPLOADING))
        self.fs.pipe_file(self._at(UPLOADING), "".join(f"{name}\n" for name in new).encode())
        for name in new:
            for path in sorted(path for path in (folder / name).iterdir() if path.is_file() and not path.is_symlink()):
                put(self.fs, path, self._at(f"{name}/{path.name}"))
        if (self.out / "metrics.jsonl").is_file():
            put(self.fs, self.out / "metrics.jsonl", f"{self.root}/metrics.jsonl")
        self.fs.pipe_file(self._at(LATEST), "".join(f"{name}\n" for name in wanted).encode())
        self.fs.pipe_file(self._at(UPLOADING), b"")
        try:
            for name in {*there, *unfinished}.intersection(self._present()).difference(wanted):
                self.fs.rm(self._at(name), recursive=True)
        # the new checkpoint is complete there all the same
        except Exception as error:
            note(f"older checkpoints remain in {self.uri}: {in_a_line(error)}")
        self.known, self.damaged = wanted, set()
        return True


def put(fs: Any, path: Path, target: str) -> None:
    """Copy the file ``path`` to ``target`` of a file system of fsspec's."""
    _folders(fs, target)
    fs.put_file(str(path), target)


def _folders(fs: Any, target: str) -> None:
    """Those of ``target``. An object store has no folders, and a bucket that is not there is a
    mistake, not to be made."""
    if "file" in fs.protocol:
        fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        if os.path.islink(target):
            os.unlink(target)


@contextlib.contextmanager
def stored(config: TrainConfig, ranks: Ranks) -> Iterator[Store | None]:
    """Go on from ``config.store`` if the folder has no checkpoint, and keep it up to date; its last
    state is there when the context ends, or ``OSError``.

    On rank 0 it gives the store, whose failures count as the checkpoints' own.
    """
    if not config.store:
        yield None
        return
    found: list[Store] = []

    def begin() -> None:
        try:
            store = Store(config.store_uri or "", Path(config.out))
            store.probe()
            if name := store.fetch():
                print(f"fetched {name} from {store.uri}", flush=True)
        except UserError:
            raise
        # every store has errors of its own
        except Exception as error:
            raise UserError(f"cannot read the store {config.store!r}: {in_a_line(error)}") from None
        found.append(store)

    ranks.by_first(begin)
    if not found:
        yield None
        return
    (store,), ended, whole = found, threading.Event(), True
    without = "checkpoints are copied to the store at the end of the run alone"
    thread = optional_thread(lambda: _keep(store, ended), "store", without)
    try:
        yield store
    except BaseException as error:
        whole = isinstance(error, Preempted)
        raise
    finally:
        ended.set()
        if thread:
            thread.join()
        try:
            if whole:
                store.copy()
        except Exception as error:
            lost = f"the last checkpoint is in {store.out}, but not in {store.uri}: {in_a_line(error)}"
            raise OSError(lost) from None  # without the cause, whose text may have credentials


def _keep(store: Store, ended: threading.Event) -> None:
    message, failed = None, None
    while not ended.wait(PERIOD):
        try:
            store.copy()
            message = None
        # training goes on; the next look tries again
        except Exception as error:
            newest_here = listed(store.out / "checkpoints")[:1]
            store.failures += newest_here != failed
            failed = newest_here
            if message != str(error):
                message = str(error)
                note(f"a checkpoint could not be copied to {store.uri} and will be copied later: {in_a_line(error)}")
