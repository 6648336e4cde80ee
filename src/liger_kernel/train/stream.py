"""TokenRows while they are made: data is read, tokenised and shuffled part by part, and training begins
when the first part is there.

A part is a run of records, of ``config.stream`` million characters or a little more. One process,
of all that share a folder, writes parts into it, in order and ahead of training; every rank reads
them there. What a part holds follows from data and config alone, and checkpoints know where parts
begin:
a run that goes on where the folder is empty has the part made first that it needs, not all before
it.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from liger_kernel.train.checkpoint import PART
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.files import fits
from liger_kernel.train.mistakes import existing
from liger_kernel.train.ranks import local_rank
from liger_kernel.train.records import BEGIN, PlacedRecord, Records, characters
from liger_kernel.train.redact import in_a_line
from liger_kernel.train.token_rows import Data, TokenRows
from liger_kernel.train.tokenise import TOKENIZER, NoRows, loaded, own_tokenizer, tokenise, tokenizer_of

# row i of part k is pick k * WIDTH + i
WIDTH = 1 << 32
# parts held open: the first, of which rows are held back, and those that a step can be in
KEPT = 3


class StreamPart(NamedTuple):
    """What is known of a part without its rows; a list in JSON."""

    rows: int
    # the ``Place`` behind its last record
    end: list[int]
    last: bool
    digest: str


def path_of(folder: Path, part: int) -> Path:
    return folder / f"part-{part:06d}.safetensors"


def described(path: Path) -> StreamPart:
    """A part that has been written."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(existing(path), "pt") as file:
            part = json.loads((file.metadata() or {})["part"])
        if not fits(part, PART):
            raise ValueError(f"{part!r:.80} is no part")
    except (SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise UserError(f"{path} holds no part of rows: {in_a_line(error)}; remove it") from error
    return StreamPart(*part)


def changed(number: int, known: StreamPart, found: StreamPart) -> UserError:
    """What is said of data that are not those that a run has trained on."""
    return UserError(f"the data has changed: part {number} had {known}, now it has {found}")


class Parts(TokenRows):
    """The rows of all parts."""

    def __init__(self, stream: Stream):
        self._stream, self._vocabulary = stream, sys.maxsize
        self._open: dict[int, TokenRows] = {}

    def check(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        for rows in self._open.values():
            rows.check(vocabulary)

    def part(self, number: int) -> TokenRows:
        if number not in self._open:
            if len(self._open) == KEPT:
                # the part that was opened first, but never part 0
                del self._open[next(k for k in self._open if k)]
            rows = TokenRows.read(self._stream.wait(number))
            self._stream.compare(number)
            rows.check(self._vocabulary)
            self._open[number] = rows
        return self._open[number]

    @property
    def positions(self) -> Tensor | None:  # type: ignore[override]  # a property there, too
        return self.part(0).positions

    def row(self, pick: int) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.part(pick // WIDTH).row(pick % WIDTH) if pick >= 0 else super().row(pick)

    def count(self, picks: list[int]) -> tuple[int, int]:
        if picks[0] < 0:
            return super().count(picks)
        of_parts = groupby(picks, lambda pick: pick // WIDTH)
        counts = [self.part(number).count([pick % WIDTH for pick in some]) for number, some in of_parts]
        tokens, targets = zip(*counts)
        return sum(tokens), sum(targets)


class Stream(Data):
    """TokenRows in the order of their parts, shuffled within each; those held back are of the first.
    The number of all is known once the last is written."""

    rows: Parts

    def __init__(self, config: TrainConfig, tokenizer: Any, folder: Path):
        self._folder = folder
        self._parts: list[StreamPart] = []
        self._writer = _start(config, folder) if local_rank() == 0 else None
        try:
            if tokenizer is None:
                self.wait(0)
                tokenizer = loaded(folder / TOKENIZER)
            rows = Parts(self)
            # only to find which rows of part 0 are held back
            super().__init__(rows.part(0), tokenizer, config.eval_fraction)
            self._parts.append(described(path_of(folder, 0)))
        except BaseException:
            self.close()
            raise
        self.rows = rows
        # for each part, the number of rows up to its end in the order of training
        self._ends = [len(self.train)]

    def wait(self, part: int) -> Path:
        """Until that part is there."""
        path = path_of(self._folder, part)
        while not path.is_file():
            if self._writer is not None and self._writer.poll() is not None and not path.is_file():
                output: Any = self._writer.stdout  # a pipe
                message = output.read().decode().strip()
                code = self._writer.returncode
                raise UserError(message or f"tokenising ended with exit code {code}: {path} is missing")
            time.sleep(0.02)
        return path

    def picks(self, position: int, count: int, seed: int) -> list[int]:
        return [self._pick(place, seed) for place in range(position, position + count)]

    def _pick(self, place: int, seed: int) -> int:
        while place >= self._ends[-1] and not self._parts[-1].last:
            self._add(described(self.wait(len(self._parts))))
        epoch, place = divmod(place, self._ends[-1]) if self._parts[-1].last else (0, place)
        part = bisect.bisect_right(self._ends, place)
        begin = self._ends[part - 1] if part else 0
        # opening the part compares it with what the checkpoint knows
        self.rows.part(part)
        row = self._shuffled(self._ends[part] - begin, seed, epoch, part)[place - begin]
        return part * WIDTH + (row if part else self.train[row])

    def compare(self, number: int) -> None:
        """``UserError`` if a part that is there is not the one that a checkpoint knows."""
        found = described(path_of(self._folder, number))
        if number < len(self._parts) and found != self._parts[number]:
            raise changed(number, self._parts[number], found)

    def _add(self, part: StreamPart) -> None:
        self._parts.append(part)
        self._ends.append(self._ends[-1] + part.rows)

    def identity(self) -> dict[str, Any]:
        first = self.rows.part(0)
        return {
            "rows of part 0": len(first),
            "held back": len(first) - len(self.train),
            "sum of ids of part 0": int(first.ids.sum()),
            "digest of part 0": self._parts[0].digest,
        }

    def state(self) -> dict[str, Any]:
        return {"parts": self._parts}

    def seek(self, position: int, state: dict[str, Any]) -> None:
        known = [StreamPart(*part) for part in state.get("parts", [])]
        for part in known[len(self._parts) :]:
            self._add(part)
        if self._parts[-1].last:
            position %= self._ends[-1]
        wanted = bisect.bisect_right(self._ends, position)
        if self._writer is not None:
            # the writer has written everything and ended
            with contextlib.suppress(BrokenPipeError):
                _tell(self._writer, {"wanted": wanted, "parts": self._parts})

    def close(self) -> None:
        if self._writer is not None:
            self._writer.kill()
            self._writer.communicate()
            self._writer = None


def _start(config: TrainConfig, folder: Path) -> subprocess.Popen:
    """The process that writes parts. It ends when this one does, whatever ends it."""
    writer = subprocess.Popen(
        [sys.executable, "-m", "liger_kernel.train.stream", str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    _tell(writer, dataclasses.asdict(config))
    return writer


def _tell(writer: subprocess.Popen, message: dict[str, Any]) -> None:
    assert writer.stdin is not None
    writer.stdin.write(json.dumps(message).encode() + b"\n")
    writer.stdin.flush()


class Writer:
    """Writes the parts that are missing, from the one that is wanted on, then those before it."""

    def __init__(self, config: TrainConfig, folder: Path):
        self.config, self.folder, self.records = config, folder, Records(config)
        self.request: dict[str, Any] = {"wanted": 0, "parts": []}
        self.tokenizer = tokenizer_of(config)
        # the parts that are known, from the first
        self._parts: list[StreamPart] = []
        self._there: set[int] = set()
        # the part that begins where ``_ahead`` is
        self._next = -1
        self._stream: Iterator[PlacedRecord] = iter(())
        self._ahead: PlacedRecord | None = None

    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        while (part := self._due()) is not None:
            self._write(part)

    def _due(self) -> int | None:
        self._parts += [StreamPart(*known) for known in self.request["parts"][len(self._parts) :]]
        if not path_of(self.folder, 0).is_file():
            return 0
        part = self._missing(self.request["wanted"])
        return self._missing(0) if part is None else part

    def _missing(self, part: int) -> int | None:
        """The first part from that one on which has not been written, or cannot be before it is
        known where the one before ends."""
        part = min(part, len(self._parts))
        while True:
            if part not in self._there:
                if not path_of(self.folder, part).is_file():
                    return part
                self._there.add(part)
            if part == len(self._parts):
                self._parts.append(described(path_of(self.folder, part)))
            if self._parts[part].last:
                return None
            part += 1

    def _write(self, part: int) -> None:
        begin = self._parts[part - 1].end if part else list(BEGIN)
        if self._next != part:
            self._stream = self.records.since(tuple(begin))  # type: ignore[arg-type]  # a position is a pair
            self._ahead = next(self._stream, None)
        records, size, end = [], 0, tuple(begin)
        while self._ahead is not None and size < self.config.stream * 1_000_000:
            record, end = self._ahead
            records.append(record)
            size += characters(record)
            self._ahead = next(self._stream, None)
        self._next = part + 1
        if self.tokenizer is None:
            self.tokenizer = own_tokenizer(records, self.config.vocab, self.folder)
        try:
            rows = tokenise(records, self.tokenizer, self.config.length, self.config.packing, begin[0])
        except NoRows:
            if part == 0:
                raise
            rows = TokenRows.of([])
        found = StreamPart(len(rows), list(end), self._ahead is None, rows.digest())
        if part < len(self._parts) and found != self._parts[part]:
            raise changed(part, self._parts[part], found)
        path = path_of(self.folder, part)
        unfinished = path.with_suffix(".unfinished")
        unfinished.unlink(missing_ok=True)
        rows.write(unfinished, {"part": json.dumps(found)})
        unfinished.replace(path)


def _main() -> None:
    # only a mistake goes to the parent, which raises it; everything else goes to stderr
    parent, sys.stdout = sys.stdout, sys.stderr
    config, folder, code = TrainConfig(**json.loads(sys.stdin.readline())), Path(sys.argv[1]), 0
    try:
        from filelock import FileLock

        folder.parent.mkdir(parents=True, exist_ok=True)
        writer = Writer(config, folder)

        def listen() -> None:
            for line in sys.stdin:
                writer.request = json.loads(line)
            # standard input has ended, as the parent has
            os._exit(0)

        threading.Thread(target=listen, daemon=True).start()
        with FileLock(f"{folder}.lock"):
            writer.run()
    except UserError as error:
        print(error, file=parent, flush=True)
        code = 2
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    # an orderly exit would wait for the lock of sys.stdin, which the listener holds
    os._exit(code)


if __name__ == "__main__":
    _main()
