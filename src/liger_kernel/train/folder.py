"""The folder of a run: whether the run may write to it and to what else it writes, the record of
its starts, and its lock, so that there is one run at a time.

liger-run.json                    the config of the newest start that was accepted, as ``--config`` reads it
liger-run-1.json ...              those of earlier starts
metrics-1.json, metrics-1.jsonl   what the run left that began with that start, where a later one began anew

Rank 0 holds the lock during the run; the system releases it when the process ends in any way. It
is filelock's, the system's ``flock`` of the file ``lock``. On NFS since Linux 2.6.12 the server
holds it, so that it acts between machines. If a file system has no locks (some mounts of Lustre,
some FUSE), the run says so and continues without. The content of ``lock`` (who took it last) is for
messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from liger_kernel.train.checkpoint import FILE
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.files import read_object, reopen, special, write
from liger_kernel.train.mistakes import note, writable
from liger_kernel.train.ranks import Ranks, restarts

RECORD = "liger-run.json"
CHECKPOINTS = ("checkpoints", "checkpoints-hf", "checkpoints-lightning")
# what a start leaves that was refused or ended before it had a record, and what is copied to begin
# from
UNRECORDED = re.compile(r"lock|cache(\.lock)?|checkpoints(-hf|-lightning)?|stuck-rank-\d+\.txt")
OURS = re.compile(rf"{UNRECORDED.pattern}|liger-run(-\d+)?\.json|metrics(-\d+)?\.jsonl?|tensorboard|wandb|wandb-id")
# what may lie there and is never written
HIDDEN = re.compile(r"\..*|lost\+found|.*\.log")
BESIDE = re.compile(rf"{HIDDEN.pattern}|.*\.(out|err|txt|ya?ml)")
STEP = re.compile(r"(fetching-)?step-\d+")
IN_CHECKPOINTS = re.compile(rf"latest|identity\.json|{STEP.pattern}(\.ckpt)?|checkpoint-\d+|.*\.tmp")
IN_A_STEP = re.compile(rf"{FILE.pattern}|.*\.tmp")


def check(config: TrainConfig) -> None:
    """``UserError`` if a folder that the run would write to holds something else than this run has
    written there.

    The first rank calls it before the first write.
    """
    base = "" if config.lora else config.model  # adapters may lie beside theirs
    if config.save and base and os.path.realpath(config.save) == os.path.realpath(base):
        raise UserError(f"save must be another folder than model, which it would replace; got {config.save}")
    out = Path(config.out)
    _refuse_links(out)
    earlier = list(_records(out))
    if not earlier and (strange := _strange(config)):
        raise UserError(f"{out} holds {strange}, which is not of a run of liger train: give another --out")
    # a run removes some of them with all they hold
    for name in filter(STEP.fullmatch, _entries(out / "checkpoints")):
        step = out / "checkpoints" / name
        if strange := _first(_entries(step), IN_A_STEP):
            raise UserError(f"{step} holds {strange}, which no run has written: move it, or give another --out")
    if config.save and not any(_same(config.save, values.get("save")) for values in earlier):
        allowed = re.compile(rf"{HIDDEN.pattern}|{OURS.pattern}") if _same(config.save, out) else HIDDEN
        files = [name for name in _entries(Path(config.save)) if not (Path(config.save) / name).is_dir()]
        if strange := _first(files, allowed):
            raise UserError(f"{config.save} holds {strange}, which this run has not saved: give another --save")


def record(config: TrainConfig, ranks: Ranks, step: int) -> None:
    """Note that the run was accepted and goes on from ``step``, once every rank has come to this.

    What earlier starts have left stays.
    """
    ranks.any(False)
    if not ranks.first:
        return
    out = Path(config.out)
    # what the run has saved it may replace, from whatever folder it is started
    config = dataclasses.replace(config, save=config.save and str(Path(config.save).absolute()))
    before = next(_records(out), None)
    if before == config.shown():
        return
    if before is not None:
        numbers = [re.fullmatch(r"(?:liger-run|metrics)-(\d+)\.jsonl?", name) for name in _entries(out)]
        number = 1 + max((int(found[1]) for found in numbers if found), default=0)
        write(out / f"liger-run-{number}.json", json.dumps(before, indent=2) + "\n")
        for kind in ("json", "jsonl") if step == 0 else ():
            if (out / f"metrics.{kind}").is_file():
                os.replace(out / f"metrics.{kind}", out / f"metrics-{number}.{kind}")
    config.save_to(out / RECORD)


def _records(out: Path) -> Iterator[dict[str, Any]]:
    """The configs of accepted starts, the newest first."""
    numbered = [name for name in _entries(out) if re.fullmatch(r"liger-run-\d+\.json", name)]
    for name in (RECORD, *sorted(numbered, key=lambda name: -int(name[10:-5]))):
        if (out / name).is_file():
            yield _json(out / name)


def _is_config(values: dict[str, Any]) -> bool:
    """Whether an object is a config of a run, which ``--config`` may read from there. A model's
    has other names."""
    return 2 * len(values.keys() & {field.name for field in dataclasses.fields(TrainConfig)}) > len(values)


def _strange(config: TrainConfig) -> str | None:
    """What there is in the folder of a run without a record that is of no run."""
    out = Path(config.out)
    copied = any((out / name).is_dir() for name in CHECKPOINTS)
    is_data = lambda path: _same(path, config.data) or _same(path, config.eval_data)
    for name in _entries(out):
        path = out / name
        if name in CHECKPOINTS:
            if strange := _first(_entries(path), IN_CHECKPOINTS):
                return f"{name}/{strange}"
        elif name in ("lock", "cache.lock"):
            if path.stat().st_size and "pid" not in _json(path):
                return name
        elif UNRECORDED.fullmatch(name) or (name == "metrics.jsonl" and copied) or _is_config(_json(path)):
            continue
        elif OURS.fullmatch(name) or not (path.is_dir() or BESIDE.fullmatch(name) or is_data(path)):
            return name
    return None


def _refuse_links(out: Path) -> None:
    """A run's folder may be a link, but nothing in it, which may come from somebody else; nor
    are there pipes, or folders with names of files."""
    for folder in (out, *(out / name for name in (*CHECKPOINTS, "cache"))):
        for name in _entries(folder):
            path = folder / name
            file = name.endswith((".json", ".jsonl", "lock", "latest", "wandb-id"))
            kinds = {"link": path.is_symlink(), "pipe or a device": special(path), "folder": file and path.is_dir()}
            kind = next((kind for kind, holds in kinds.items() if holds), None)
            if kind and (folder != out or OURS.fullmatch(name)):
                raise UserError(f"{path} is a {kind}, which no run has made: remove it, or give another --out")


def _first(names: list[str], allowed: re.Pattern[str]) -> str | None:
    """The first of the names that is not allowed."""
    return next((name for name in names if not allowed.fullmatch(name)), None)


def _entries(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _same(one: str | Path, other: str | Path | None) -> bool:
    return other is not None and Path(one).resolve() == Path(other).resolve()


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is none."""
    with contextlib.suppress(OSError, ValueError):
        return read_object(path)
    return {}


# seconds that the run before has to end; after a restart, whose rank 0 may have been on another
# machine, twelve times as long
PATIENCE = 5.0


@contextlib.contextmanager
def locked(config: TrainConfig, ranks: Ranks) -> Iterator[None]:
    """Lock the run's folder. Raises ``UserError`` on every rank if the run may not write to it or
    what it saves to.

    It may not if something else is there, or if another run, which is named, has locked the folder.
    """
    with contextlib.ExitStack() as stack:

        def lock() -> None:
            check(config)
            for folder in (config.out, config.save, config.cache):
                writable(folder=folder)
            if held := acquired(Path(config.out), PATIENCE * (12 if restarts() else 1)):
                stack.callback(held.release)

        ranks.by_first(lock)
        yield


def acquired(folder: Path, patience: float) -> FileLock | None:
    """The lock of a folder; None where there are no locks."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    if path.exists() and path.stat().st_nlink > 1:  # its content is replaced below
        raise UserError(f"{path} is a file elsewhere, too: remove it")
    lock = FileLock(path, timeout=patience)
    try:
        lock.acquire(poll_interval=0.1)
    except Timeout:
        raise UserError(
            f"another run writes to {folder}: {_holder(path)}. Wait for it, stop it, or give another --out"
        ) from None
    except OSError as error:
        if error.filename is not None:  # it cannot be opened
            raise
        without = "a second run could write to it without being noticed"
        note(f"{folder} cannot be locked ({error.strerror}): {without}")
        return None
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    with reopen(path) as file:
        file.truncate()
        file.write(json.dumps(holder).encode())
    return lock


def _holder(path: Path) -> str:
    try:
        who = read_object(path)
        return f"process {who['pid']} on {who['host']}, since {who['since']}"
    except (ValueError, KeyError, OSError):
        return "it has not said who it is"
