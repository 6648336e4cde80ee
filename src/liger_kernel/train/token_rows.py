"""TokenRows of tokens: how they are stored, packed, batched, and drawn in an order that the seed
determines.

Labels are -100 where nothing is learned; the model shifts them by one. With packing "documents", a
row has several documents or conversations, whose positions begin at 0: from these, Transformers
sees where attention ends.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from liger_kernel.train.config import UserError
from liger_kernel.train.files import create, reopen
from liger_kernel.train.mistakes import existing
from liger_kernel.train.redact import in_a_line

IGNORE = -100
Tokens = Sequence[int] | np.ndarray


class TokenFile:
    """Integers on their way to a tensor of int32, in a file rather than in memory: one without a
    name, or that of ``path``, of which ``count`` are kept."""

    def __init__(self, path: Path | None = None, count: int = 0) -> None:
        # open as long as the tensor
        self.file: Any = (reopen(path) if count else create(path)) if path else tempfile.TemporaryFile()  # noqa: SIM115
        self.count = count
        self.file.truncate(count * np.dtype(np.int32).itemsize)
        self.file.seek(0, os.SEEK_END)

    def __iadd__(self, more: Tokens) -> TokenFile:
        self.file.write(np.asarray(more, dtype=np.int32).tobytes())
        self.count += len(more)
        return self

    def sync(self) -> None:
        """What was added so far is on the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def tensor(self, count: int | None = None) -> Tensor:
        """The first ``count`` of them, or all; the file goes when the tensor does."""
        count = self.count if count is None else count
        self.file.flush()
        return (
            torch.from_numpy(np.memmap(self.file, np.int32, "r+", shape=count))
            if count
            else torch.empty(0, dtype=torch.int32)
        )


class TokenRows:
    """TokenRows of tokens and labels, end to end in two int32 tensors; row i lies between ``bounds[i]``
    and ``bounds[i + 1]``.

    ``positions``: positions of the tokens in their documents, if rows have several. ``bounded``:
    their batches also say where documents begin. ``masked``: and which tokens are padding.
    ``multiple``: rows of documents are padded to a multiple of it. ``held``: rows of other data, to
    evaluate on; its row i is pick ``~i``.
    """

    held: TokenRows | None = None
    bounded = masked = False
    multiple = 1

    def __init__(self, ids: Tensor, labels: Tensor, bounds: Tensor, positions: Tensor | None = None):
        self.ids, self.labels, self.bounds, self.positions = ids, labels, bounds, positions
        self._targets: Tensor | None = None
        self._digest: str | None = None

    @classmethod
    def of(cls, rows: Iterable[tuple[Tokens, Tokens]]) -> TokenRows:
        ids, labels, lengths = TokenFile(), TokenFile(), [0]
        for row in rows:
            ids += row[0]
            labels += row[1]
            lengths.append(len(row[0]))
        return cls(ids.tensor(), labels.tensor(), torch.tensor(lengths).cumsum(0))

    def tensors(self, copy: bool = True) -> dict[str, Tensor]:
        """What makes them again; with ``copy`` no two share memory."""
        found = {"ids": self.ids, "labels": self.labels.clone() if copy else self.labels, "bounds": self.bounds}
        return found if self.positions is None else found | {"positions": self.positions}

    def digest(self) -> str:
        """A digest of every token, label and bound, in order."""
        if self._digest is None:
            sha = hashlib.sha256()
            for name, tensor in sorted(self.tensors(copy=False).items()):
                sha.update(name.encode())
                for part in tensor.split(1 << 24):
                    sha.update(part.contiguous().numpy().data)
            self._digest = sha.hexdigest()[:32]
        return self._digest

    @classmethod
    def read(cls, path: Path) -> TokenRows:
        """What ``write`` has written; ``UserError`` for anything else, before a GPU reads beside
        the rows."""
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import load_file

        try:
            found = load_file(existing(path))
        except SafetensorError as error:
            raise UserError(f"{path} holds no rows of tokens: {in_a_line(error)}") from error
        if wrong := _wrong(found):
            raise UserError(f"{path} holds no rows of tokens: {wrong}")
        rows = cls(**found)
        with safe_open(path, "pt") as file:
            # without one, it is computed from all rows
            rows._digest = (file.metadata() or {}).get("digest")
        return rows

    def write(self, path: Path, metadata: dict[str, str] | None = None) -> None:
        """All of it to a safetensors file, with that metadata: by default the digest."""
        from safetensors.torch import save_file

        save_file(self.tensors(), path, metadata or {"digest": self.digest()})

    def of_documents(self, starts: Tensor) -> TokenRows:
        """The same rows, where a document begins at each of ``starts`` and at the begin of each
        row; its first token is predicted by nothing."""
        begins = torch.zeros(len(self.ids), dtype=torch.bool)
        begins[starts[starts < len(self.ids)]] = True
        begins[self.bounds[:-1]] = True
        at = torch.arange(len(self.ids))
        positions = at - torch.where(begins, at, 0).cummax(0).values
        return TokenRows(self.ids, self.labels.masked_fill(begins, IGNORE), self.bounds, positions.int())

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def count(self, picks: list[int]) -> tuple[int, int]:
        """(tokens, tokens that carry a loss: the first of a row is predicted by nothing)."""
        if self.held and picks and picks[0] < 0:
            return self.held.count([~pick for pick in picks])
        # computed once, as every rank needs the rows of all ranks in each step
        if self._targets is None:
            begins = self.bounds[:-1]
            carries = (self.labels != IGNORE).numpy()
            self._targets = (
                torch.from_numpy(np.add.reduceat(carries, begins.numpy(), dtype=np.int64)) - carries[begins.numpy()]
            )
        index = torch.tensor(picks)
        return int((self.bounds[index + 1] - self.bounds[index]).sum()), int(self._targets[index].sum())

    def check(self, vocabulary: int) -> None:
        """``UserError`` for tokens or labels that a model with so many ids lacks."""
        # in parts, as rows may lie in a file that is larger than the memory
        for ids, labels in zip(self.ids.split(1 << 24), self.labels.split(1 << 24)):
            targets = torch.where(labels == IGNORE, 0, labels)
            least, most = min(int(ids.min()), int(targets.min())), max(int(ids.max()), int(targets.max()))
            if least < 0:
                raise UserError(
                    f"tokens and labels must be 0 or more, or labels {IGNORE}, got {least}: the file of the rows is "
                    "damaged, remove it"
                )
            if most >= vocabulary:
                raise UserError(
                    f"the tokenizer has ids that the model's vocabulary of {vocabulary} lacks: give the model's own "
                    "tokenizer"
                )

    def row(self, pick: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids, labels and positions of a row."""
        if self.held and pick < 0:
            return self.held.row(~pick)
        span = slice(int(self.bounds[pick]), int(self.bounds[pick + 1]))
        return self.ids[span], self.labels[span], None if self.positions is None else self.positions[span]

    def batch(self, picks: list[int], pad: int) -> dict[str, Any]:
        """Right-padded (B, T) int64 tensors; an attention mask only if something is padded.
        Bounds of documents have Flash Attention's form."""
        ids, labels, positions = zip(*(self.row(i) for i in picks))
        longest = max(map(len, ids))
        more = -longest % self.multiple if positions[0] is not None else 0
        padded = lambda rows, value: F.pad(
            pad_sequence([row.long() for row in rows], batch_first=True, padding_value=value), (0, more), value=value
        )
        batch = {"input_ids": padded(ids, pad), "labels": padded(labels, IGNORE)}
        lengths = torch.tensor([len(row) for row in ids])
        beyond = torch.arange(longest + more) - lengths[:, None]
        # padding is behind all labels and a document of its own
        if positions[0] is not None:
            batch["position_ids"] = torch.where(beyond < 0, padded(positions, 0), beyond)
            if self.bounded:
                batch |= _bounds(batch["position_ids"])
        if (self.masked or positions[0] is None) and (beyond >= 0).any():
            batch["attention_mask"] = (beyond < 0).long()
        return batch


def _wrong(found: dict[str, Tensor]) -> str | None:
    """What keeps these tensors from being rows."""
    if not {"ids", "labels", "bounds"} <= found.keys() <= {"ids", "labels", "bounds", "positions"}:
        return f"it has tensors {', '.join(sorted(found)):.200}"
    count, bounds, positions = found["ids"].numel(), found["bounds"], found.get("positions")
    for name in found.keys() - {"bounds"}:
        if found[name].dtype != torch.int32 or found[name].shape != (count,):
            return f"{name} must be {count} numbers in int32"
    ends = bounds[[0, -1]].tolist() if bounds.dtype == torch.int64 and bounds.ndim == 1 and len(bounds) else []
    if ends != [0, count] or bool((bounds.diff() < 1).any()):
        return f"bounds must rise from 0 to {count} in int64"
    if positions is not None and count and not 0 <= positions.min() <= positions.max() < bounds.diff().max():
        return "positions must lie in their rows"
    return None


def _bounds(positions: Tensor) -> dict[str, Any]:
    """Where documents begin and end in the flattened batch, and the length of the longest."""
    bounds = torch.cat([(positions.flatten() == 0).nonzero().flatten(), torch.tensor([positions.numel()])]).int()
    return {f"cu_seq_lens_{t}": bounds for t in "qk"} | {f"max_length_{t}": int(bounds.diff().max()) for t in "qk"}


def together(single: TokenRows, length: int) -> TokenRows:
    """Put conversations, one row each, into rows of at most ``length``: the longest first, each
    into the row that it fills best."""
    rows: list[list[int]] = []
    # (tokens that are left, number of the row), sorted
    free: list[tuple[int, int]] = []
    bounds = single.bounds.tolist()
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    for number in sorted(range(len(single)), key=lambda i: (-sizes[i], i)):
        size = sizes[number]
        place = bisect.bisect_left(free, (size, -1))
        left, row = free.pop(place) if place < len(free) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        bisect.insort(free, (left - size, row))
    joined = lambda tokens, row: torch.cat([tokens[bounds[i] : bounds[i + 1]] for i in row]).numpy()
    lengths = torch.tensor([sizes[i] for row in rows for i in row])
    return TokenRows.of((joined(single.ids, row), joined(single.labels, row)) for row in rows).of_documents(
        lengths.cumsum(0) - lengths
    )


class Data:
    """TokenRows to train on and rows to evaluate on, split by position, so that the split does not
    depend on the seed."""

    def __init__(self, rows: TokenRows, tokenizer: Any, eval_fraction: float):
        self.rows, self.tokenizer = rows, tokenizer
        held = min(max(1, round(len(rows) * eval_fraction)), len(rows) - 1) if eval_fraction and len(rows) else 0
        # Every k-th row, not the last ones: neighbours come from the same source.
        self.eval = [round((i + 0.5) * len(rows) / held - 0.5) for i in range(held)]
        self.train = sorted(set(range(len(rows))) - set(self.eval))
        self._order: tuple[tuple[int, ...], list[int]] = ((), [])
        # Nothing learns from padding or attends to it, so any id does where the tokenizer has none.
        self.pad: int = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def evaluate_on(self, held: TokenRows) -> None:
        """Keep back these rows, and none of the data."""
        if (held.positions is None) != (self.rows.positions is None):
            raise UserError("eval_data must be packed as data is: only one of them has rows of several documents")
        self.rows.held = held
        self.eval = [~i for i in range(len(held))]

    def check(self, vocabulary: int) -> None:
        """Raise ``UserError`` if a model has fewer ids than the data; its embedding need not
        have that of padding."""
        self.rows.check(vocabulary)
        if self.rows.held:
            self.rows.held.check(vocabulary)
        self.pad = self.pad if self.pad < vocabulary else 0

    def identity(self) -> dict[str, Any]:
        """What must be equal for the order of the data to continue where it stopped."""
        return {
            "rows": len(self.rows),
            "held back": len(self.rows) - len(self.train),
            "sum of ids": int(self.rows.ids.sum()),
            "digest of tokens": self.rows.digest(),
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint should keep, beside the position, for ``seek`` to find it again."""
        return {}

    def seek(self, position: int, state: dict[str, Any]) -> None:
        """The next rows will be those at ``position``."""

    def close(self) -> None:
        """No more rows are needed."""

    def picks(self, position: int, count: int, seed: int) -> list[int]:
        """The rows at ``position`` and after it in the order of training, which depends on the
        seed and on nothing else; an epoch has an order of its own."""
        picks = []
        for place in range(position, position + count):
            epoch, offset = divmod(place, len(self.train))
            picks.append(self.train[self._shuffled(len(self.train), seed, epoch)[offset]])
        return picks

    def _shuffled(self, count: int, seed: int, epoch: int, part: int = 0) -> list[int]:
        if self._order[0] != (count, seed, epoch, part):
            generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) ^ part << 40)
            self._order = (count, seed, epoch, part), torch.randperm(count, generator=generator).tolist()
        return self._order[1]

    def tokens_of(self, begin: int, end: int, seed: int) -> int:
        """Tokens of the rows at positions ``begin`` to ``end`` in the order of training."""
        return self.rows.count(self.picks(begin, end - begin, seed))[0]

    def batches(self, picks: list[int], rank: int, world: int, size: int) -> list[dict[str, Any]]:
        """This rank's share of a step's rows, in batches of at most ``size`` rows: as many
        batches on every rank, where rows are short one without labels."""
        batches = []
        for part in share(picks, rank, world, size):
            batch = self.rows.batch(part or picks[:1], self.pad)
            if not part:
                batch["labels"].fill_(IGNORE)
            batches.append(batch)
        return batches


def on(device: torch.device, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch there. The host does not wait for its way to a GPU."""
    moved = lambda t: (t.pin_memory() if device.type == "cuda" else t).to(device, non_blocking=True)
    return {name: moved(value) if isinstance(value, Tensor) else value for name, value in batch.items()}


def share(picks: list[int], rank: int, world: int, size: int) -> list[list[int]]:
    """``rank``'s part of ``picks``, in pieces of at most ``size``; the number of pieces is the
    same on every rank, hence some may be empty."""
    mine = picks[len(picks) * rank // world : len(picks) * (rank + 1) // world]
    pieces = math.ceil(math.ceil(len(picks) / world) / size)
    return [mine[size * i : size * (i + 1)] for i in range(pieces)]
