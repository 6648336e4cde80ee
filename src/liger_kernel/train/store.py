"""Checkpoints in an object store: copied there as they complete, fetched from there where the run's folder has none.

The store has what the folder has, in the same order of writing: ``checkpoints/latest`` names only what is there whole. Rank 0 copies, in a thread beside
training, from a folder that all ranks see (or the only machine's own).
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from liger_kernel.train.checkpoint import LATEST, damage, listed, names_in, step_of, write
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.ranks import Preempted, Ranks
from liger_kernel.train.redact import in_a_line, redacted

FILE = re.compile(r"\.metadata|[A-Za-z0-9_][A-Za-z0-9_-]*\.(json|distcp)")  # what a checkpoint consists of: nothing else is brought here
PERIOD = 2.0  # seconds between looks for a new checkpoint


class Store:
    """The copy of the run in ``out`` at ``uri``: ``s3://bucket/run``, ``gs://...``, ``file:///...``, whatever fsspec has a package for."""

    def __init__(self, uri: str, out: Path):
        try:
            import fsspec

            self.fs, root = fsspec.core.url_to_fs(uri)
        except (ImportError, ValueError) as error:
            raise UserError(f"cannot use the store {uri!r}: {error}") from None
        self.uri, self.out, self.root = redacted(uri), out, f"{root.rstrip('/')}"
        self.known: list[str] = []  # what we found or left there
        self.damaged: set[str] = set()  # of it

    def names(self, say: bool = False) -> list[str]:
        """The checkpoints there, newest first."""
        try:
            return names_in(self.fs.cat_file(f"{self.root}/checkpoints/{LATEST}"), f"{self.uri}/checkpoints/{LATEST}" if say else None)
        except FileNotFoundError:
            return []

    def fetch(self) -> str | None:
        """Bring the newest whole checkpoint into the run's folder, unless that has one as new; its name."""
        folder = self.out / "checkpoints"
        local = listed(folder)
        here = next((step_of(folder / name) for name in local if damage(folder / name) is None), -1)
        self.known = self.names(say=True)
        for name in self.known:
            if step_of(folder / name) <= here:
                break
            (folder / name).mkdir(parents=True, exist_ok=True)
            for path in self.fs.ls(f"{self.root}/checkpoints/{name}", detail=False):
                file = path.rpartition("/")[2]
                if FILE.fullmatch(file):
                    self.fs.get_file(path, str(folder / name / file))
            if damage(folder / name) is None:
                with contextlib.suppress(FileNotFoundError):
                    self.fs.get_file(f"{self.root}/metrics.jsonl", str(self.out / "metrics.jsonl"))
                write(folder / LATEST, "".join(f"{each}\n" for each in dict.fromkeys((name, *local))))
                return name
            self.damaged.add(name)
        return None

    def copy(self) -> bool:
        """Bring the checkpoints that the folder names into the store, and remove others there; whether there was anything to do.

        ``RuntimeError`` if another run has written there meanwhile: what it wrote stays.
        """
        folder, there = self.out / "checkpoints", self.names()
        wanted = listed(folder)
        if wanted == there and not self.damaged.intersection(wanted):
            self.known = there
            return False
        if there != self.known:
            raise RuntimeError(f"another run writes there, its newest checkpoint is {there[0] if there else None}")
        for name in wanted:
            if name not in there or name in self.damaged:
                for path in sorted((folder / name).iterdir()):
                    self._put(path, f"checkpoints/{name}/{path.name}")
        if (self.out / "metrics.jsonl").is_file():
            self._put(self.out / "metrics.jsonl", "metrics.jsonl")
        self.fs.pipe_file(f"{self.root}/checkpoints/{LATEST}", "".join(f"{name}\n" for name in wanted).encode())
        try:
            for path in self.fs.ls(f"{self.root}/checkpoints", detail=False):
                if (name := path.rstrip("/").rpartition("/")[2]).startswith("step-") and name not in wanted:
                    self.fs.rm(path, recursive=True)
        except Exception as error:  # what is new is there
            print(f"older checkpoints remain in {self.uri}: {in_a_line(error)}", file=sys.stderr)
        self.known, self.damaged = wanted, set()
        return True

    def _put(self, path: Path, name: str) -> None:
        put(self.fs, path, f"{self.root}/{name}")


def put(fs: Any, path: Path, target: str) -> None:
    """Copy the file ``path`` to ``target`` of a file system of fsspec's."""
    if "file" in fs.protocol:  # an object store has no folders, and a bucket that is not there is a mistake, not to be made
        fs.makedirs(target.rpartition("/")[0], exist_ok=True)
    fs.put_file(str(path), target)


@contextlib.contextmanager
def stored(config: TrainConfig, ranks: Ranks) -> Iterator[None]:
    """Go on from ``config.store`` if the folder has no checkpoint, and keep it up to date; its last state is there when the context ends, or ``OSError``."""
    if not config.store:
        yield
        return
    problem, thread, ended = None, None, threading.Event()
    if ranks.first:
        try:
            store = Store(config.store_uri or "", Path(config.out))
            name = store.fetch()
            if name:
                print(f"fetched {name} from {store.uri}", flush=True)
        except UserError as error:
            problem = str(error)
        except Exception as error:  # every store has errors of its own
            problem = f"cannot read the store {config.store!r}: {in_a_line(error)}"
    problem = ranks.agreed(problem)
    if problem:
        raise UserError(problem)
    if ranks.first:
        thread = threading.Thread(target=_keep, args=(store, ended), name="store", daemon=True)
        thread.start()
    try:
        yield
    except BaseException as error:
        _end(thread, ended)
        if ranks.first and isinstance(error, Preempted):
            _last(store)
        raise
    _end(thread, ended)
    if ranks.first:
        _last(store)


def _end(thread: threading.Thread | None, ended: threading.Event) -> None:
    ended.set()
    if thread:
        thread.join()


def _last(store: Store) -> None:
    try:
        store.copy()
    except Exception as error:
        raise OSError(f"the last checkpoint is in {store.out} and not in {store.uri}: {in_a_line(error)}") from None  # its text may have credentials


def _keep(store: Store, ended: threading.Event) -> None:
    said: Any = None
    while not ended.wait(PERIOD):
        try:
            store.copy()
            said = None
        except Exception as error:  # training goes on; the next look tries again
            if said != str(error):
                said = str(error)
                print(f"a checkpoint could not be copied to {store.uri}, yet: {in_a_line(error)}", file=sys.stderr)
