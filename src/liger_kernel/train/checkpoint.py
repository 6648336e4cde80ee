"""Checkpoints: PyTorch's distributed ones (DCP), written beside training, found again whatever happened.

    checkpoints/latest             names of the complete checkpoints, newest first: what is not named here does not count
    checkpoints/step-00000040/     DCP: tensors of all ranks, and .metadata, which says where they are
                     state.json    step, position in the data, and what must not change between runs
                     rank-0.json   random number generators of a rank

``latest`` is replaced (written aside, synced, renamed) only after every rank has written and synced its part, so that a process killed at any moment, and a
full disk, leave the checkpoints before in place. Tensors are read by ``torch.load(weights_only=True)``, and of the pickle that DCP keeps its metadata in,
only the types that metadata is made of.
"""

from __future__ import annotations

import base64
import enum
import io
import json
import os
import pickle
import random
import re
import shutil
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from liger_kernel.train.config import UserError
from liger_kernel.train.ranks import Ranks

LATEST = "latest"
NAME = re.compile(r"step-(?:[0-9]{8}|[1-9][0-9]{8,})")  # what f"step-{step:08d}" writes


class Checkpoints:
    """The checkpoints of a run. Every rank calls every method, in the same order; one save is under way at most."""

    def __init__(self, folder: Path, ranks: Ranks, keep: int):
        self.folder, self.ranks, self.keep = folder, ranks, keep
        self.failures = 0
        self.step, self.time = -1, time.time()  # of the newest one on disk
        self._future: Future | None = None
        self._path = folder

    def latest(self) -> Path | None:
        """The newest complete checkpoint, the same for all ranks; one that is damaged is passed over with a warning."""
        found = None
        if self.ranks.first:
            for name in listed(self.folder, say=True):
                why = damage(self.folder / name)
                if why is None:
                    found = name
                    break
                print(f"passing over checkpoint {self.folder / name}: {why}", file=sys.stderr)
            else:
                if listed(self.folder):
                    found = ""
        found = self.ranks.agreed(found)
        if found == "":
            raise UserError(f"no checkpoint in {self.folder} is complete")
        return self.folder / found if found else None

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Read ``path`` into model and optimizer, and the generators of this rank if as many ranks wrote it; returns state.json."""
        tensors, optimizer_state = _tensors(model, optimizer)
        reader = SafeReader(path)
        beyond = sorted(reader.read_metadata().state_dict_metadata.keys() - tensors.keys())  # what is not asked for DCP leaves out without a word
        if beyond:
            raise UserError(f"checkpoint {path} does not fit this model, which has no {', '.join(beyond[:3])}{' ...' if len(beyond) > 3 else ''}")
        try:
            dcp.load(tensors, storage_reader=reader, process_group=self.ranks.saving)
        except dcp.api.CheckpointException as error:
            raise UserError(f"checkpoint {path} does not fit this model: {_why(error)}") from error
        model_state: dict[str, Any] = {name[len("model.") :]: tensor for name, tensor in tensors.items() if name.startswith("model.")}
        set_model_state_dict(model, model_state, options=StateDictOptions(strict=False))
        set_optimizer_state_dict(model, optimizer, optimizer_state, options=_FLAT)
        state = json.loads((path / "state.json").read_text())
        if state["ranks"] == self.ranks.world:
            set_generators(json.loads((path / f"rank-{self.ranks.rank}.json").read_text()))
        self.step, self.time = state["step"], path.stat().st_mtime
        return state

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], wait: bool) -> None:
        """Begin to write; when it returns, training may change every tensor. With ``wait`` it is on disk, or ``failures`` has grown."""
        self.finish()
        if state["step"] == self.step:
            return
        self._path = self.folder / f"step-{state['step']:08d}"
        error: str | None = None
        if self.ranks.first:
            try:
                shutil.rmtree(self._path, ignore_errors=True)  # what a killed run left
                self._path.mkdir(parents=True)
                write(self._path / "state.json", json.dumps(state | {"ranks": self.ranks.world}))
            except OSError as problem:
                error = str(problem)
        error = self.ranks.agreed(error)
        if error is None:
            try:
                write(self._path / f"rank-{self.ranks.rank}.json", json.dumps(generators()))
            except OSError as problem:
                error = str(problem)
        if self.ranks.any(error is not None):  # before DCP's own collectives, in which a rank that failed would be missed
            self._failed(error or "another rank could not write")
            return
        tensors, _ = _tensors(model, optimizer)
        options = {"storage_writer": dcp.FileSystemWriter(self._path), "process_group": self.ranks.saving}
        self._future = Future()
        if wait:
            try:
                self._future.set_result(dcp.save(tensors, **options))
            except (Exception, dcp.api.CheckpointException) as problem:  # this disk or another rank's; DCP's is no Exception
                self._future.set_exception(problem)
            self.finish()
        else:
            self._future = dcp.async_save(tensors, **options)  # type: ignore[assignment]

    @property
    def done(self) -> int:
        """The step of the newest save that this rank has finished, well or not; -1 while the first is under way."""
        return step_of(self._path) if self._future is not None and self._future.done() else self.step

    @property
    def under_way(self) -> int | None:
        """The step of the save that is not yet committed."""
        return None if self._future is None else step_of(self._path)

    def commit(self) -> None:
        """Every rank has finished the save under way: make it the latest, and remove those beyond ``keep``."""
        assert self._future is not None
        error = self._future.exception()
        self._future = None
        if self.ranks.any(error is not None):
            return self._failed(_why(error) if error else "another rank could not write")
        full = self.ranks.agreed(self._name() if self.ranks.first else None)
        if full:
            return self._failed(full)
        self.step, self.time = step_of(self._path), time.time()

    def finish(self) -> None:
        """Wait for the save under way on all ranks, and commit it."""
        if self._future is not None:
            self._future.exception()
            self.commit()

    def _name(self) -> str | None:
        """Make what was written the latest; the reason if that failed."""
        names = [self._path.name, *(name for name in listed(self.folder) if name != self._path.name)][: self.keep]
        try:
            write(self.folder / LATEST, "\n".join(names) + "\n")
        except OSError as error:
            return str(error)
        for old in self.folder.glob("step-*"):
            if old.name not in names:
                shutil.rmtree(old, ignore_errors=True)
        return None

    def _failed(self, why: str) -> None:
        self.failures += 1
        if self.ranks.first:
            print(f"checkpoint {self._path} failed, those before it remain: {' '.join(why.split())[:500]}", file=sys.stderr)
            if self._path.name not in listed(self.folder):
                shutil.rmtree(self._path, ignore_errors=True)


def _why(error: BaseException) -> str:
    """DCP's error in a line: its own text holds the stacks of all ranks."""
    failures = getattr(error, "failures", None) or {}
    return "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in list(failures.items())[:3]) or f"{type(error).__name__}: {error}"


def step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def names_in(latest: bytes, where: str | None = None) -> list[str]:
    """The checkpoints that a file ``latest`` names. Anything else in it is no name, above all no path: it is left out, and said where ``where`` is given."""
    words = latest.decode(errors="replace").split()
    names = [word for word in words if NAME.fullmatch(word)]
    if where and len(names) < len(words):
        strange = next(word for word in words if not NAME.fullmatch(word))
        print(f"{where} names {strange[:80]!r}, which is no checkpoint (step- and eight digits): passed over", file=sys.stderr)
    return names


def listed(folder: Path, say: bool = False) -> list[str]:
    """The checkpoints that ``folder``'s ``latest`` names, newest first."""
    path = folder / LATEST
    return names_in(path.read_bytes(), str(path) if say else None) if path.is_file() else []


_FLAT = StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors to write or to read into, and the optimizer's state they are part of. Its numbers follow from the config and the step."""
    weights: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    tensors = {f"model.{name}": t for name, t in weights.items()} | {f"optimizer.{name}": t for name, t in state.items() if isinstance(t, Tensor)}
    return tensors, state


# -- files ---------------------------------------------------------------------------------


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


def damage(path: Path) -> str | None:
    """What is missing from a checkpoint, by its metadata; None if nothing is."""
    try:
        state = json.loads((path / "state.json").read_text())
        for rank in range(state["ranks"]):
            json.loads((path / f"rank-{rank}.json").read_text())
        stored = SafeReader(path).read_metadata().storage_data
        sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    except (OSError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
        return f"{type(error).__name__}: {error}"
    for part in stored.values():
        if sizes.get(part.relative_path, 0) < part.offset + part.length:
            return f"{part.relative_path} is too short or missing"
    return None


class SafeReader(dcp.FileSystemReader):
    """DCP's reader; it refuses metadata that names anything but what metadata of tensors is made of."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = _Unpickler(io.BytesIO((Path(self.path) / ".metadata").read_bytes())).load()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    # Bytes are left out: DCP would unpickle them.
    CHECKPOINT = {"Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta"}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 writes it
        allowed = (
            (module == "torch.distributed.checkpoint.metadata" and name in self.CHECKPOINT)
            or (module == "torch.distributed.checkpoint.filesystem" and name in ("_StorageInfo", "SerializationFormat"))
            or (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"))
            or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
        )
        if not allowed:
            raise pickle.UnpicklingError(f"checkpoint metadata must not hold {module}.{name}")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> enum.Enum:
    """A member of an Enum, which early releases of Python 3.11 pickle as ``getattr(kind, name)``."""
    if isinstance(kind, enum.EnumMeta) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"checkpoint metadata must not hold {name} of {kind!r}")


# -- random numbers ------------------------------------------------------------------------


def generators() -> dict[str, Any]:
    """The states of Python's, numpy's and PyTorch's generators, the current GPU's among them, as JSON."""
    kind, keys, *rest = np.random.get_state()
    text = lambda state: base64.b64encode(state.numpy().tobytes()).decode()
    states = {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest], "torch": text(torch.get_rng_state())}
    return states | ({"cuda": text(torch.cuda.get_rng_state())} if torch.cuda.is_available() and torch.cuda.is_initialized() else {})


def set_generators(states: dict[str, Any]) -> None:
    """Undo what was drawn since ``generators``."""
    tensor = lambda text: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(tensor(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensor(states["cuda"]))
