"""Checkpoints: PyTorch's distributed checkpoints (DCP), written while training continues, and found
again after every kind of failure.

    checkpoints/latest             names of the complete checkpoints, newest first
    checkpoints/step-00000040/     DCP: tensors of all ranks, and .metadata for PyTorch's tools
                     tensors.json  where the tensors are
                     state.json    step, position in the data, and what must not change between runs
                     rank-0.json   random number generators of a rank
                     sums-0.json   checksums of the files that a rank wrote, written last

``latest`` is replaced (written aside, synced, renamed) only after every rank has written and synced
its part. So a process that is killed at any moment, or a full disk, leaves earlier checkpoints
intact. A run continues from the newest named checkpoint whose checksums hold. If there is none, or
``latest`` is lost, it continues from the newest intact checkpoint that is not named. It deletes
only what ``latest`` has named and what a killed run left unfinished.

Tensors are read by ``torch.load(weights_only=True)``, all else is JSON: DCP's own metadata, a
pickle, are not read. A checkpoint may come from a stranger: nothing in it names another file, and
one that is not as we write it is passed over.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import os
import random
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo  # the form in which DCP's reader wants places
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from liger_kernel.parallel import plain_parts
from liger_kernel.train.config import UserError
from liger_kernel.train.files import COUNT, fits, fresh, read_object, write
from liger_kernel.train.mistakes import note
from liger_kernel.train.ranks import Ranks

LATEST, INDEX = "latest", "tensors.json"
# names of the files that a checkpoint consists of
FILE = re.compile(r"\.metadata|[A-Za-z0-9_][A-Za-z0-9_-]*\.(json|distcp)")
# names of checkpoints: all that f"step-{step:08d}" can write
NAME = re.compile(r"step-(?:[0-9]{8}|[1-9][0-9]{8,14})")


class Checkpoints:
    """The checkpoints of a run. Every rank calls every method in the same order; at most one
    save is running."""

    def __init__(self, folder: Path, ranks: Ranks, keep: int):
        self.folder, self.ranks, self.keep = folder, ranks, keep
        self.failures = 0
        # the newest checkpoint on disk
        self.step, self.time = -1, time.time()
        self._future: Future | None = None
        self._path = folder
        # the names that latest is to keep, newest first; None: those that it has
        self._kept: list[str] | None = None
        # names of checkpoints whose checksums hold and whose tensors cannot be read
        self._unreadable: set[str] = set()

    def latest(self) -> Path | None:
        """Return the newest intact checkpoint, the same on all ranks. Damaged ones give a
        warning; ``UserError`` if all are damaged."""
        found = self.ranks.by_first(self._newest)
        return self.folder / found if found else None

    def _newest(self) -> str | None:
        """Its name, or None to begin anew; ``UserError`` if the run must do neither."""
        found, damaged = newest(self.folder, say=True, without=self._unreadable)
        named = listed(self.folder)
        if found:
            self._kept = named[named.index(found) :] if found in named else [found]
            if found not in named:
                note(f"{self.folder / LATEST} names no complete checkpoint: the newest complete one, {found}, is used")
            return found
        self._kept = []
        # a run that was killed in its first save has left nothing to lose
        if damaged and ((self.folder / LATEST).exists() or not all(unfinished(self.folder / name) for name in damaged)):
            raise none_is_complete(self.folder)
        return None

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Read ``path`` into model and optimizer, and this rank's generators if as many ranks wrote
        it. Returns state.json.

        None, on all ranks, where the tensors cannot be read: ``latest`` then gives the checkpoint
        before, which has to be read over what this one has left.
        """
        tensors, optimizer_state = _tensors(model, optimizer)
        there, state = read_object(path / INDEX), read_object(path / "state.json")
        # which moments are large enough for 8 bits depends on the size of a shard
        if any(name.endswith(".codes") for name in there.keys() ^ tensors.keys()):
            ranks = state["ranks"]
            raise UserError(
                f"checkpoint {path} has 8-bit moments in the blocks of {ranks} ranks: continue with {ranks} ranks, "
                f"got {self.ranks.world}"
            )
        # DCP itself ignores tensors that the model lacks
        sizes, own = ({k: tuple(v["size"]) for k, v in there.items()}, {k: tuple(t.shape) for k, t in tensors.items()})
        for name in sorted(sizes.keys() | own.keys()):
            if sizes.get(name) != own.get(name):
                shapes = f"shape {sizes.get(name, 'none')} there, {own.get(name, 'none')} here"
                raise UserError(f"checkpoint {path} does not fit this model: {name:.100} has {shapes}")
        try:
            dcp.load(tensors, storage_reader=IndexReader(path), process_group=self.ranks.saving)
        # DCP raises it on all ranks, whichever failed
        except dcp.api.CheckpointException as error:
            # an error of the file system may be gone at the next start: the checkpoint is not
            # passed over
            if any(isinstance(failure, OSError) for failure, _ in error.failures.values()):
                raise OSError(f"checkpoint {path} cannot be read: {_why(error)}") from error
            self._pass_over(path, _why(error))
            return None
        model_state: dict[str, Any] = {
            name[len("model.") :]: tensor for name, tensor in tensors.items() if name.startswith("model.")
        }
        set_model_state_dict(model, model_state, options=StateDictOptions(strict=False))
        set_optimizer_state_dict(model, optimizer, optimizer_state, options=_FLAT)
        if state["ranks"] == self.ranks.world:
            wrong = None
            try:
                set_generators(read_object(path / f"rank-{self.ranks.rank}.json"))
            # the state is that of another kind of generator
            except (ValueError, TypeError, RuntimeError) as error:
                wrong = f"generators: {error}"
            if self.ranks.any(wrong is not None):
                self._pass_over(path, wrong or "generators of another rank")
                return None
        self.step, self.time = state["step"], path.stat().st_mtime
        return state

    def _pass_over(self, path: Path, why: str) -> None:
        self._unreadable.add(path.name)
        if self.ranks.first:
            note(f"ignoring checkpoint {path}: {' '.join(why.split())[:300]}")

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], wait: bool) -> None:
        """Start a save. When it returns, training may change every tensor. With ``wait`` it is
        then on disk, or ``failures`` has grown."""
        self.finish()
        if state["step"] == self.step:
            return
        self._path = self.folder / f"step-{state['step']:08d}"
        error = self._problem_of_first(lambda: self._begin(state))
        if error is None:
            error = _problem(lambda: write(self._path / f"rank-{self.ranks.rank}.json", json.dumps(generators())))
        # ranks agree before DCP's own collectives, in which they would wait for one that failed
        if self.ranks.any(error is not None):
            self._failed(error or "another rank could not write")
            return
        tensors, _ = _tensors(model, optimizer)
        save = lambda by: by(tensors, storage_writer=IndexWriter(self._path), process_group=self.ranks.saving)
        sums, done = functools.partial(write_sums, self._path, self.ranks.rank), Future[None]()
        if not wait:
            try:
                # in the thread that saves, not in training's
                save(dcp.async_save).add_done_callback(lambda saving: _settle(done, saving.result, sums))
                self._future = done
                return
            except RuntimeError as problem:
                if "start new thread" not in str(problem):
                    raise
                note(f"{problem}: training waits for the checkpoint of step {state['step']}")
        _settle(done, lambda: save(dcp.save), sums)
        self._future = done
        if wait:
            # without it, other ranks have not finished either: ``commit`` comes later
            self.finish()

    @property
    def done(self) -> int:
        """The step of the newest save that this rank has finished, successfully or not; -1 while
        the first save is running."""
        return step_of(self._path) if self._future is not None and self._future.done() else self.step

    @property
    def under_way(self) -> int | None:
        """The step of the save that is not yet committed."""
        return None if self._future is None else step_of(self._path)

    def commit(self) -> None:
        """Make the running save the latest checkpoint and remove those beyond ``keep``. Every
        rank must have finished the save."""
        assert self._future is not None
        error = self._future.exception()
        self._future = None
        if self.ranks.any(error is not None):
            return self._failed(_why(error) if error else "another rank could not write")
        if problem := self._problem_of_first(self._name):
            return self._failed(problem)
        self.step, self.time = step_of(self._path), time.time()

    def finish(self) -> None:
        """Wait for the running save on all ranks, and commit it."""
        if self._future is not None:
            self._future.exception()
            self.commit()

    def _problem_of_first(self, work: Callable[[], Any]) -> str | None:
        """Why the first rank, which alone does this, cannot; all ranks learn it."""
        return self.ranks.agreed(_problem(work) if self.ranks.first else None)

    def _name(self) -> None:
        """Make what was written the latest."""
        before = listed(self.folder)
        kept = before if self._kept is None else self._kept
        names = [
            self._path.name,
            *(name for name in kept if name != self._path.name and (self.folder / name).is_dir()),
        ][: self.keep]
        write(self.folder / LATEST, "\n".join(names) + "\n")
        self._kept = names
        for old in present(self.folder):
            if old not in names and (old in before or unfinished(self.folder / old)):
                shutil.rmtree(self.folder / old, ignore_errors=True)

    def _begin(self, state: dict[str, Any]) -> None:
        """Make the folder of a save and state.json."""
        # what is there is damaged or was never finished, else the run had gone on from it
        fresh(self._path)
        write(self._path / "state.json", json.dumps(state | {"ranks": self.ranks.world}))

    def _failed(self, why: str) -> None:
        self.failures += 1
        if self.ranks.first:
            note(
                f"checkpoint {self._path} could not be written; earlier checkpoints remain: "
                f"{' '.join(why.split())[:500]}"
            )
            shutil.rmtree(self._path, ignore_errors=True)


def _problem(work: Callable[[], Any]) -> str | None:
    """Why it cannot be done, on a full disk."""
    try:
        work()
    except OSError as error:
        return str(error)
    return None


def _settle(done: Future, save: Callable[[], Any], sums: Callable[[], Any]) -> None:
    """Do both, and let ``done`` say that, or what went wrong: a full disk, here or on another rank."""
    try:
        save()
        sums()
        done.set_result(None)
    except BaseException as error:
        done.set_exception(error)
        # DCP's error is no Exception; others, as a user's Ctrl-C, end the run
        if not isinstance(error, (Exception, dcp.api.CheckpointException)):
            raise


def _why(error: BaseException) -> str:
    """DCP's error in a line: its own text holds the stacks of all ranks."""
    failures = getattr(error, "failures", None) or {}
    return (
        "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in list(failures.items())[:3])
        or f"{type(error).__name__}: {error}"
    )


def step_of(checkpoint: Path | str) -> int:
    return int(str(checkpoint).rpartition("-")[2])


def none_is_complete(folder: Path) -> UserError:
    return UserError(f"no checkpoint in {folder} is complete: restore one, or move the folder away to start again")


def names_in(latest: bytes, where: str | None = None) -> list[str]:
    """The checkpoints that a file ``latest`` names. Everything else in it, above all paths, is
    ignored, with a message if ``where`` is given."""
    words = latest.decode(errors="replace").split()
    names = [word for word in words if NAME.fullmatch(word)]
    if where and len(names) < len(words):
        strange = next(word for word in words if not NAME.fullmatch(word))
        note(f"{where} names {strange[:80]!r}, which is not the name of a checkpoint (step- and eight digits): ignored")
    return names


def listed(folder: Path, say: bool = False) -> list[str]:
    """The checkpoints that ``folder``'s ``latest`` names, newest first."""
    path = folder / LATEST
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return names_in(file.read(1 << 20), str(path) if say else None)


def present(folder: Path) -> list[str]:
    """The checkpoints in the folder, named or not, newest first."""
    return sorted(
        (path.name for path in folder.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()),
        key=lambda name: -step_of(name),
    )


def newest(folder: Path, say: bool = False, without: Collection[str] = ()) -> tuple[str | None, list[str]]:
    """Return (the newest intact checkpoint, the damaged ones before it): first those that
    ``latest`` names, then the others."""
    named, damaged = listed(folder, say), list[str]()
    for name in dict.fromkeys((*named, *present(folder))):
        why = None if name in without else damage(folder / name)
        if why is None and name not in without:
            return name, damaged
        damaged.append(name)
        if why and say and (name in named or not unfinished(folder / name)):
            note(f"ignoring checkpoint {folder / name}: {why}")
    return None, damaged


_FLAT = StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors to write or to read into, and the optimizer's state they are part of. Its
    numbers follow from the config and the step."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    # a frozen base may be quantised, and DCP cannot tell its state from modules
    frozen = len(trained) < sum(1 for _ in model.parameters())
    weights: dict[str, Any] = dict(trained if frozen else get_model_state_dict(model))
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    tensors = {f"model.{name}": t for name, t in weights.items()}
    for name, t in state.items():
        if isinstance(t, Tensor) and name.startswith("state."):
            tensors |= {
                ".".join(filter(None, ("optimizer", name, part))): plain for part, plain in plain_parts(t).items()
            }
    return tensors, state


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, by its checksums and the types and ranges of what it
    says; None if nothing is."""
    try:
        files = _files(path)
        step = step_of(path)
        state = read_object(path / "state.json", **STATE | {"step": range(step, step + 1)})
        of_ranks = [read_object(path / f"sums-{rank}.json") for rank in range(state["ranks"])]
        sums = {name: sha for of_rank in of_ranks for name, sha in of_rank.items()}
        for name in sums.keys() - files.keys():
            raise ValueError(f"{name!r:.100} is missing")
        if wrong := _differing(path, sums):
            return f"{wrong} is not what was written"
        for rank in range(state["ranks"]):
            own = random.Random(), np.random.RandomState(), torch.Generator()
            set_generators(read_object(path / f"rank-{rank}.json"), *own)
        return _misplaced(path, {name: files[name] for name in sums})
    # generators raise errors of any kind for other states
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace(f"{path}/", "")[:300]


def _files(folder: Path) -> dict[str, int]:
    """The sizes of a checkpoint's files; ``ValueError`` if it has something else, such as a
    link."""
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        if not entry.is_file(follow_symlinks=False):
            raise ValueError(f"{entry.name} is no regular file")
    return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in found}


# a part of a stream: its rows, the place behind its last record, whether it is the last, a digest
PART = [COUNT, [COUNT] * 3, bool, str]
# numbers of a run that go on with it
NUMBERS = ("step", "position", "tokens", "nonfinite", "skips")
# what a run needs of state.json; rows of a step are listed
STATE: dict[str, Any] = dict.fromkeys(NUMBERS, COUNT) | dict.fromkeys(("ranks", "global_batch"), range(1, 1 << 24))
STATE |= {"identity": dict, "data": {"parts": (NoneType, [PART, ...])}}
# of a tensor in tensors.json; a chunk is its offsets and sizes, its file, where it begins there, and its length
TENSOR = {"size": [COUNT, ...], "chunks": [[[COUNT, ...], [COUNT, ...], str, COUNT, range(1, 1 << 53)], ...]}


def _misplaced(path: Path, files: dict[str, int]) -> str | None:
    """A tensor that is not where it should be: inside a file of the checkpoint's own."""
    for name, tensor in read_object(path / INDEX).items():
        if not fits(tensor, TENSOR) or math.prod(tensor["size"]) != sum(math.prod(c[1]) for c in tensor["chunks"]):
            return f"{INDEX} does not say where {name:.100} is"
        for *_, file, begin, length in tensor["chunks"]:
            if files.get(file, 0) < begin + length:
                return f"{file:.100}, in which {name:.100} is, is too short or missing"
    return None


def first_whole(paths: Iterable[Path], damage: Callable[[Path], str | None]) -> Path | None:
    """The first of these that ``damage`` says nothing of; those before it give a warning."""
    for path in paths:
        why = damage(path)
        if why is None:
            return path
        note(f"ignoring checkpoint {path}: {why}")
    return None


def torn(path: Path) -> str | None:
    """What is wrong with a file of ``torch.save``, a zip with a checksum for each part and a
    table at its end; None if nothing is."""
    if path.is_symlink() or not path.is_file():
        return "is no regular file"
    try:
        with zipfile.ZipFile(path) as parts:
            part = parts.testzip()
        return None if part is None else f"is damaged: {part}"
    # a damaged table of a zip leads to errors of any kind
    except Exception as error:
        return f"is too short or damaged: {error}"


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    sha = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        # the interpreter is free while a block is read or hashed
        while block := file.read(1 << 22):
            sha.update(block)
    return sha.hexdigest()


def write_sums(folder: Path, rank: int) -> None:
    """Write the checksums of everything that ``rank`` wrote into a checkpoint."""
    mine = [
        folder / f"rank-{rank}.json",
        *folder.glob(f"__{rank}_*.distcp"),
        *([folder / name for name in ("state.json", INDEX, ".metadata")] if rank == 0 else []),
    ]
    write(folder / f"sums-{rank}.json", json.dumps({path.name: digest(path) for path in mine}))


def _differing(folder: Path, sums: dict[str, str]) -> str | None:
    """A file whose checksum is another, if there is one."""
    with ThreadPoolExecutor(8) as readers:
        same = readers.map(lambda name: digest(folder / name) == sums[name], sums)
    missing = {INDEX, "state.json", "rank-0.json"} - sums.keys()
    return next((name for name, equal in zip(sums, same) if not equal), None) or next(iter(missing), None)


def unfinished(path: Path) -> bool:
    """Whether the run that wrote a checkpoint was killed before it was complete."""
    try:
        ranks = read_object(path / "state.json")["ranks"]
        return not all((path / f"sums-{rank}.json").exists() for rank in range(ranks))
    except (OSError, ValueError, KeyError, TypeError):
        return not any(path.glob("sums-*.json"))


class IndexWriter(dcp.FileSystemWriter):
    """DCP's writer, which also writes ``INDEX``: where the tensors are."""

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, results)
        # of the results, since PyTorch 2.11 writes the places into a copy of the metadata
        parts = {part.index: part.storage_data for of_rank in results for part in of_rank}
        index = {}
        for name, tensor in metadata.state_dict_metadata.items():
            chunks = []
            for chunk in tensor.chunks:  # type: ignore[union-attr]  # all values are tensors
                part = parts[MetadataIndex(name, chunk.offsets)]
                chunks.append([*map(list, (chunk.offsets, chunk.sizes)), part.relative_path, part.offset, part.length])
            index[name] = {"size": list(tensor.size), "chunks": chunks}  # type: ignore[union-attr]  # as above
        write(Path(self.path) / INDEX, json.dumps(index))


class IndexReader(dcp.FileSystemReader):
    """DCP's reader, which reads ``INDEX`` in the place of DCP's own metadata: these are a pickle,
    and what a pickle names is run."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        parts = {}
        for name, tensor in read_object(Path(self.path) / INDEX).items():
            chunks = []
            for offsets, sizes, *place in tensor["chunks"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                parts[MetadataIndex(name, offsets)] = _StorageInfo(*place)
            tensors[name] = TensorStorageMetadata(TensorProperties(), torch.Size(tensor["size"]), chunks)
        return Metadata(tensors, storage_data=parts, storage_meta=StorageMeta(load_id=self.load_id))


def generators() -> dict[str, Any]:
    """The states of the random number generators of Python, numpy and PyTorch (with the current
    GPU's), as JSON."""
    kind, keys, *rest = np.random.get_state()
    text = lambda state: base64.b64encode(state.numpy().tobytes()).decode()
    states = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": text(torch.get_rng_state()),
    }
    return states | (
        {"cuda": text(torch.cuda.get_rng_state())} if torch.cuda.is_available() and torch.cuda.is_initialized() else {}
    )


def set_generators(
    states: dict[str, Any], python: Any = random, numpy: Any = np.random, cpu: torch.Generator | None = None
) -> None:
    """Restore the states that ``generators`` returned, or set other generators to them, of the
    CPU alone. ``ValueError`` and its like for other states."""
    tensor = lambda text: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    version, keys, gauss = states["python"]
    python.setstate((version, tuple(keys), gauss))
    # NumPy does not check the place, and reads whatever memory is there
    if type(place := states["numpy"][2]) is not int or not 0 <= place <= 624:
        raise ValueError(f"a generator of NumPy has 624 numbers, and its place was {place!r:.40}")
    numpy.set_state(tuple(states["numpy"]))
    (cpu or torch.default_generator).set_state(tensor(states["torch"]))
    if cpu is None and "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensor(states["cuda"]))
