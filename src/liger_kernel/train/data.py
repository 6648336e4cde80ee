"""From a name to batches: texts or conversations are read, tokenised, packed into rows and drawn in an order fixed by the seed.

Three kinds of record are understood, recognised by the keys of the first one:
  {"text": ...}                            plain text; every token is learnt, documents are joined and cut into rows of equal length
  {"instruction", "output", ["input"]}     Alpaca; a conversation of one question and one answer
  {"messages": [{"role", "content"}...]}   a conversation; one row each, only the assistant's turns carry labels

Labels are -100 where nothing is learnt; the model shifts them by one. With packing "documents" a row has several documents or conversations, whose
positions begin at 0: from these transformers sees where attention ends.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from liger_kernel.train.checkpoint import write
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.redact import in_a_line

IGNORE = -100
Tokens = Sequence[int] | np.ndarray
Place = tuple[int, int, int]  # between two records: how many are before it, the file, how many of the file are before it
BEGIN: Place = (0, 0, 0)
END = "<|endoftext|>"
ROWS = "rows.safetensors"  # in a folder of tokenised data, beside its tokenizer
TOKENIZER = "tokenizer"  # in a folder of data that is being tokenised
PIECE = 1_000_000  # characters that are tokenised together, each of which takes a tokenizer 150 bytes
KEEP_EVERY = 1.0  # seconds between two moments at which what is tokenised is synced to the disk
# For tokenizers without a chat template. It is saved with the model, so that a chat uses what was trained.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '' if loop.first else '\n\n' }}{{ '### ' + m.role | capitalize + ':\n' + m.content }}"
    "{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}{{ '\n\n### Assistant:\n' if add_generation_prompt else '' }}"
)
# Parts of the standard library that are not prose or code written by people for people.
NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "turtledemo", "encodings", "__pycache__"}


# -- records -------------------------------------------------------------------------------


def standard_library() -> list[str]:
    """The sources of this Python's standard library, docstrings and reference topics included: a real text that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(root.rglob("*.py")) if not NOT_TEXT & set(path.relative_to(root).parts)]
    texts = [path.read_bytes().decode("utf-8", errors="ignore") for path in paths]
    if sum(map(len, texts)) < 1_000_000:
        raise UserError(f"this Python has no sources of its standard library in {root}: give --data a file")
    return texts


class Records:
    """The records that ``config.data`` names, at most ``config.limit``; read anew, one by one, whenever they are gone through."""

    def __init__(self, config: TrainConfig):
        self.config = config

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (record for record, _ in self.since(BEGIN))

    def since(self, place: Place) -> Iterator[tuple[dict[str, Any], Place]]:
        """Those from a place on, each with the place behind it."""
        number, file, within = place
        for at, read in enumerate(self._sources()[file:], file):
            for record in read(within):
                number, within = number + 1, within + 1
                yield record, (number, at, within)
                if number == self.config.limit:
                    return
            within = 0
        if not number:
            raise UserError(f"{self.config.data} holds no records")

    def _sources(self) -> list[Callable[[int], Iterable[dict[str, Any]]]]:
        """Functions that read a file each, from a record of that number on."""
        name, files = self.config.data, files_of(self.config.data)
        if name == "stdlib":
            return [lambda skip: ({"text": text} for text in standard_library()[skip:])]
        if files:
            return [partial(_jsonl if path.suffix == ".jsonl" else _parquet, path) for path in files]
        return [partial(_hub, name, self.config.split, bool(self.config.stream))]


def files_of(name: str) -> list[Path]:
    """The file of that name, or the ``.jsonl`` and ``.parquet`` files of the folder, in order; none where it is no path."""
    path = Path(name)
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix in (".jsonl", ".parquet"))
        if not files:
            raise UserError(f"no .jsonl or .parquet files in {path}")
        return files
    if path.suffix in (".jsonl", ".parquet"):
        if not path.is_file():
            raise UserError(f"no such file: {path}")
        return [path]
    if path.exists():
        raise UserError(f"data must be a .jsonl or .parquet file or a folder of them, got {path}")
    return []


def _jsonl(path: Path, skip: int) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if skip:
                skip -= 1
                continue
            try:
                record = json.loads(line.decode())
                if b"\\ud" in line or b"\\uD" in line:  # halves of characters, which no tokenizer takes
                    json.dumps(record, ensure_ascii=False).encode()
            except ValueError as error:
                raise UserError(f"{path}:{number}: not valid JSON: {error}") from error
            except RecursionError as error:
                raise UserError(f"{path}:{number}: nested too deeply") from error
            if not isinstance(record, dict):
                raise UserError(f"{path}:{number}: a record must be an object, got {type(record).__name__}")
            yield record


def _parquet(path: Path, skip: int) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserError("Parquet files need pyarrow: pip install 'liger-kernel[train]'") from error
    try:
        file = parquet.ParquetFile(path)
        for group in range(file.num_row_groups):
            if skip >= (rows := file.metadata.row_group(group).num_rows):
                skip -= rows
                continue
            for batch in file.iter_batches(row_groups=[group]):
                yield from batch.slice(min(skip, batch.num_rows)).to_pylist()
                skip -= min(skip, batch.num_rows)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error


def _hub(name: str, split: str, stream: bool, skip: int) -> Iterable[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{name!r} is no file, and Hugging Face datasets need: pip install 'liger-kernel[datasets]'") from error
    try:
        data = datasets.load_dataset(name, split=split, streaming=stream)
        return data.skip(skip) if skip else data
    except Exception as error:  # whatever the network, the hub or the format of the dataset raise
        raise UserError(f"cannot load the dataset {name!r}: {in_a_line(error)}") from error


def conversation(record: dict[str, Any]) -> list[dict[str, str]] | None:
    """The turns of a chat or Alpaca record; None for plain text. ``UserError`` for what is neither."""
    if "messages" in record:
        turns = record["messages"]
        if turns is not None and not (isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)):
            raise UserError("messages must be a list of objects with role and content")
        return turns
    if "instruction" in record and "output" in record:
        parts = [part for part in (record["instruction"], record.get("input")) if part]
        if not all(isinstance(part, str) for part in (*parts, record["output"])):
            raise UserError("instruction, input and output must be text")
        question = "\n\n".join(parts)
        return [{"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}]
    return None


def characters(record: dict[str, Any]) -> int:
    """How much text a record has; none if it is not one, which is said where it is tokenised."""
    try:
        turns = conversation(record)
    except UserError:
        return 0
    texts = [record.get("text")] if turns is None else [turn.get("content") for turn in turns]
    return sum(len(text) for text in texts if isinstance(text, str))


# -- rows ----------------------------------------------------------------------------------


class _Tokens:
    """Integers on their way to a tensor of int32, in a file rather than in memory: one without a name, or that of ``path``, of which ``count`` are kept."""

    def __init__(self, path: Path | None = None, count: int = 0) -> None:
        # open as long as the tensor
        self.file: Any = tempfile.TemporaryFile() if path is None else path.open("r+b" if count else "w+b")  # noqa: SIM115
        self.count = count
        self.file.truncate(count * np.dtype(np.int32).itemsize)
        self.file.seek(0, os.SEEK_END)

    def __iadd__(self, more: Tokens) -> _Tokens:
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
        return torch.from_numpy(np.memmap(self.file, np.int32, "r+", shape=count)) if count else torch.empty(0, dtype=torch.int32)


class Rows:
    """Rows of tokens and labels, end to end in two int32 tensors; row i lies between ``bounds[i]`` and ``bounds[i + 1]``.

    ``positions``, where rows have several documents: those of the tokens in their documents. ``bounded``: batches of them say where documents begin, too.
    """

    def __init__(self, ids: Tensor, labels: Tensor, bounds: Tensor, positions: Tensor | None = None):
        self.ids, self.labels, self.bounds, self.positions = ids, labels, bounds, positions
        self.bounded = False
        self._learnt: Tensor | None = None
        self._digest: str | None = None

    @classmethod
    def of(cls, rows: Iterable[tuple[Tokens, Tokens]]) -> Rows:
        ids, labels, lengths = _Tokens(), _Tokens(), [0]
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
        """Of every token, label and bound, in order: other rows have another one."""
        if self._digest is None:
            sha = hashlib.sha256()
            for name, tensor in sorted(self.tensors(copy=False).items()):
                sha.update(name.encode())
                for part in tensor.split(1 << 24):
                    sha.update(part.contiguous().numpy().data)
            self._digest = sha.hexdigest()[:32]
        return self._digest

    @classmethod
    def read(cls, path: Path) -> Rows:
        """What ``write`` has written."""
        from safetensors import safe_open
        from safetensors.torch import load_file

        rows = cls(**load_file(path))
        with safe_open(path, "pt") as file:
            rows._digest = (file.metadata() or {}).get("digest")  # else, as of earlier releases, it takes going through all rows
        return rows

    def write(self, path: Path, metadata: dict[str, str] | None = None) -> None:
        """All of it to a safetensors file, with that metadata: by default the digest."""
        from safetensors.torch import save_file

        save_file(self.tensors(), path, metadata or {"digest": self.digest()})

    def of_documents(self, starts: Tensor) -> Rows:
        """The same rows, where a document begins at each of ``starts`` and at the begin of each row; its first token is predicted by nothing."""
        begins = torch.zeros(len(self.ids), dtype=torch.bool)
        begins[starts[starts < len(self.ids)]] = True
        begins[self.bounds[:-1]] = True
        at = torch.arange(len(self.ids))
        positions = at - torch.where(begins, at, 0).cummax(0).values
        return Rows(self.ids, self.labels.masked_fill(begins, IGNORE), self.bounds, positions.int())

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def count(self, picks: list[int]) -> tuple[int, int]:
        """(tokens, tokens that carry a loss: the first of a row is predicted by nothing)."""
        if self._learnt is None:  # once: every rank asks for the rows of all
            begins = self.bounds[:-1]
            carries = (self.labels != IGNORE).numpy()
            self._learnt = torch.from_numpy(np.add.reduceat(carries, begins.numpy(), dtype=np.int64)) - carries[begins.numpy()]
        index = torch.tensor(picks)
        return int((self.bounds[index + 1] - self.bounds[index]).sum()), int(self._learnt[index].sum())

    def row(self, pick: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids, labels and positions of a row."""
        span = slice(int(self.bounds[pick]), int(self.bounds[pick + 1]))
        return self.ids[span], self.labels[span], None if self.positions is None else self.positions[span]

    def batch(self, picks: list[int], pad: int) -> dict[str, Any]:
        """Right-padded (B, T) int64 tensors; an attention mask only where something is padded. Bounds of documents are as Flash Attention takes them."""
        ids, labels, positions = zip(*(self.row(i) for i in picks))
        padded = lambda rows, value: pad_sequence([row.long() for row in rows], batch_first=True, padding_value=value)
        batch = {"input_ids": padded(ids, pad), "labels": padded(labels, IGNORE)}
        lengths = torch.tensor([len(row) for row in ids])
        beyond = torch.arange(int(lengths.max())) - lengths[:, None]
        if positions[0] is not None:  # what is padded is behind all that is learnt, and a document of its own
            batch["position_ids"] = torch.where(beyond < 0, padded(positions, 0), beyond)
            if self.bounded:
                batch |= _bounds(batch["position_ids"])
        elif (beyond >= 0).any():
            batch["attention_mask"] = (beyond < 0).long()
        return batch


def _bounds(positions: Tensor) -> dict[str, Any]:
    """Where documents begin and end in the flattened batch, and the length of the longest."""
    bounds = torch.cat([(positions.flatten() == 0).nonzero().flatten(), torch.tensor([positions.numel()])]).int()
    return {f"cu_seq_lens_{t}": bounds for t in "qk"} | {f"max_length_{t}": int(bounds.diff().max()) for t in "qk"}


def learnt_tokens(batch: dict[str, Tensor]) -> int:
    """How many tokens carry a loss: the first of a row is predicted by nothing."""
    return int((batch["labels"][:, 1:] != IGNORE).sum())


def batches_of(records: Iterable[tuple[dict[str, Any], Place]], count: int = 1000) -> Iterator[list[tuple[dict[str, Any], Place]]]:
    """Records to tokenise together: ``count`` at most, fewer once they have as much text as a piece."""
    some, total = [], 0
    for record, place in records:
        some.append((record, place))
        total += characters(record)
        if len(some) == count or total >= PIECE:
            yield some
            some, total = [], 0
    if some:
        yield some


def pieces(text: str, tokenizer: Any = None) -> Iterator[str]:
    """``text`` in pieces of ``PIECE`` characters or a little more, which have the same tokens one by one as in one.

    It is cut before white space between words, where the tokenizer gives the text on both sides the same tokens together and apart. Where it does not (those
    that mark the begin of a text do not), the rest is one piece. None: as for ``train_bpe``, whose words end at every such place.
    """
    begin = 0
    while len(text) - begin > PIECE:
        places = itertools.islice(_BETWEEN_WORDS.finditer(text, begin + PIECE), _CUTS_TRIED)
        cut = next((place.start() for place in places if tokenizer is None or _may_cut(text, place.start(), tokenizer)), None)
        if cut is None:
            if len(text) - begin > 10 * PIECE:
                say = f"this tokenizer's tokens of a text of {len(text):,} characters cannot be made piece by piece: that takes memory, 150 bytes a character"
                print(say, file=sys.stderr, flush=True)
            break
        yield text[begin:cut]
        begin = cut
    yield text[begin:]


_BETWEEN_WORDS = re.compile(r"(?<=\S)(?=\s\S)")
_CUTS_TRIED = 100
_AROUND = 1000  # characters on each side of a cut: more than what a tokenizer looks at to find where a word ends


def _may_cut(text: str, at: int, tokenizer: Any) -> bool:
    ids = lambda part: tokenizer(part, add_special_tokens=False)["input_ids"]
    left, right = text[max(0, at - _AROUND) : at], text[at : at + _AROUND]
    return ids(left + right) == ids(left) + ids(right)


def ids_of(texts: list[str], tokenizer: Any) -> Iterator[Tokens]:
    """The tokens of each text: of all together, but for long ones, which are tokenised piece by piece."""
    encode = lambda some: tokenizer(some, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    short = [text for text in texts if len(text) <= PIECE]
    encoded = iter(encode(short) if short else [])
    for text in texts:
        yield next(encoded) if len(text) <= PIECE else np.concatenate([np.array(encode(piece), np.int32) for piece in pieces(text, tokenizer)])


def together(single: Rows, length: int) -> Rows:
    """Conversations, a row each, in rows of at most ``length``: the longest first, each into the row that it fills best."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (what is left, row), sorted
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
    return Rows.of((joined(single.ids, row), joined(single.labels, row)) for row in rows).of_documents(lengths.cumsum(0) - lengths)


def conversation_row(messages: list[dict[str, str]], tokenizer: Any, length: int) -> tuple[list[int], list[int]]:
    """A conversation in the tokenizer's own format, labels on the assistant's turns alone, cut to ``length``.

    A turn is located by rendering the conversation up to it and through it. Where a template rewrites earlier turns (some drop the reasoning of
    all but the last), these are context: they carry no labels.
    """
    render = lambda turns, prompt=False: tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
    text = render(messages)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, through = render(messages[:i], True), render(messages[: i + 1])
            if text.startswith(through) and through.startswith(before):
                spans.append((len(before), len(through)))
    ids: list[int] = []
    labels: list[int] = []
    at = 0
    for piece in pieces(text, tokenizer):
        encoded = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)
        for token, (begin, end) in zip(encoded["input_ids"], encoded["offset_mapping"]):
            # Some tokenizers trim the white space off a token's range: what counts is that it ends inside a turn and does not begin before it.
            learnt = any(start <= at + begin and start < at + end <= stop for start, stop in spans)
            ids.append(token)
            labels.append(token if learnt else IGNORE)
        if len(ids) >= length:
            break
        at += len(piece)
    return ids[:length], labels[:length]


class NoRows(UserError):
    """Records from which no row can be made."""


class Draft:
    """Records that are tokenised, on their way to rows. In ``folder``, what a run that is stopped has tokenised is there for the next one.

    What counts of the files there is what ``state.json`` says; what lies behind was cut short.
    """

    def __init__(self, folder: Path | None = None):
        self.folder, self._kept = folder, time.monotonic()
        known = self._known()
        self.place: Place = tuple(known.get("place", BEGIN))  # behind the last record
        self.chats: bool | None = known.get("chats")  # None: nothing is here yet
        self.silent, self.late = known.get("silent", 0), known.get("late", 0)  # conversations left out
        self._tokens = {name: _Tokens(folder / name if folder else None, known.get(name, 0)) for name in ("ids", "labels", "lengths")}

    def _known(self) -> dict[str, Any]:
        """What was tokenised before; nothing if the files are shorter than it says."""
        if self.folder is None:
            return {}
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError, ValueError):
            known = json.loads((self.folder / "state.json").read_text())
            if all((self.folder / name).stat().st_size >= 4 * known[name] for name in ("ids", "labels", "lengths")):
                return known
        return {}

    def _keep(self) -> None:
        if self.folder is None or time.monotonic() < self._kept + KEEP_EVERY:
            return
        for tokens in self._tokens.values():
            tokens.sync()
        state = {"place": self.place, "chats": self.chats, "silent": self.silent, "late": self.late}
        write(self.folder / "state.json", json.dumps(state | {name: tokens.count for name, tokens in self._tokens.items()}))
        self._kept = time.monotonic()

    def _add(self, ids: Tokens, labels: Tokens = ()) -> None:
        self._tokens["ids"] += ids
        self._tokens["labels"] += labels
        self._tokens["lengths"] += [len(ids)]

    def add(self, records: Iterable[tuple[dict[str, Any], Place]], tokenizer: Any, length: int) -> None:
        """Tokenise these. ``UserError`` names the one that cannot be read."""
        for some in batches_of(records):
            if self.chats is None:
                self.chats = conversation(some[0][0]) is not None
            if self.chats and not tokenizer.is_fast:
                raise UserError("conversations need a fast tokenizer: a slow one does not say which characters a token covers")
            if self.chats:
                for record, (number, *_) in some:
                    self._add_chat(record, number, tokenizer, length)
            else:
                self._add_texts([text_of(record, number) for record, (number, *_) in some], tokenizer)
            self.place = some[-1][1]
            self._keep()

    def _add_texts(self, texts: list[str], tokenizer: Any) -> None:
        begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id not in (None, tokenizer.eos_token_id) else []
        end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        for ids in ids_of(texts, tokenizer):
            self._add(np.concatenate([np.array(part, np.int32) for part in (begin, ids, end)]))

    def _add_chat(self, record: dict[str, Any], number: int, tokenizer: Any, length: int) -> None:
        try:
            turns = conversation(record) or []
            ids, labels = conversation_row(turns, tokenizer, length)
        except Exception as error:  # chat templates raise what they like
            raise UserError(f"record {number} is no conversation that the chat template accepts: {in_a_line(error, 200)}") from error
        if any(label != IGNORE for label in labels[1:]):
            self._add(ids, labels)
        elif any(turn.get("role") == "assistant" and turn.get("content") for turn in turns):
            self.late += 1
        else:
            self.silent += 1

    def rows(self, length: int, packing: str = "auto") -> Rows:
        """Rows of at most ``length`` tokens; ``NoRows``: there are none."""
        documents = packing == "documents"
        lengths, ids = self._tokens["lengths"].tensor(), self._tokens["ids"]
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        if self.chats:
            self._say_what_is_left_out(length)
            if not len(lengths):
                raise NoRows(f"no conversation has an answer within its first {length} tokens: raise the length")
            rows = Rows(ids.tensor(), self._tokens["labels"].tensor(), bounds)
            return together(rows, length) if documents else rows
        # documents are joined and cut; what does not fill the last row is dropped
        count = ids.count // length
        if not count:
            raise NoRows(f"the data is shorter than one row of {length} tokens: lower the length")
        joined = ids.tensor(count * length)
        rows = Rows(joined, joined, torch.arange(count + 1) * length)
        return rows.of_documents(bounds[:-1]) if documents else rows

    def _say_what_is_left_out(self, length: int) -> None:
        total = self._tokens["lengths"].count + self.silent + self.late
        reasons = (
            (self.silent, "have no answer"),
            (self.late, f"have none within their first {length} tokens, or in turns that the chat template rewrites"),
        )
        for dropped, why in reasons:
            if dropped:
                print(f"{dropped} of {total} conversations {why}: left out, as there is nothing to learn", file=sys.stderr, flush=True)


def tokenise(records: Iterable[dict[str, Any]], tokenizer: Any, length: int, packing: str = "auto", before: int = 0) -> Rows:
    """Rows of at most ``length`` tokens. ``UserError`` names the record it cannot read, counted from those ``before``; ``NoRows``: there are none."""
    draft = Draft()
    draft.add(((record, (number, 0, 0)) for number, record in enumerate(records, before + 1)), tokenizer, length)
    return draft.rows(length, packing)


def texts_of(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    """All the text in the records, to train a tokenizer on."""
    if conversation(next(iter(records))) is not None:
        turns = (turn for record in records for turn in conversation(record) or [])
        yield from (turn["content"] for turn in turns if isinstance(turn.get("content"), str))
        return
    yield from (text_of(record, number) for number, record in enumerate(records, 1))


def text_of(record: dict[str, Any], number: int) -> str:
    """The text of a record, which is the ``number``-th."""
    if number == 1 and "text" not in record:
        raise UserError(f"a record must have 'text', 'messages', or 'instruction' and 'output'; the first one has {sorted(record)}")
    if not isinstance(record.get("text"), str):
        raise UserError(f"record {number} has no text, unlike the first one")
    return record["text"]


def train_bpe(texts: Iterable[str], vocab: int) -> Any:
    """A byte-level BPE as a transformers tokenizer; the end of a text is also its beginning and its padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = (piece for text in texts for piece in pieces(text))
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=END)


def own_tokenizer(records: Iterable[dict[str, Any]], vocab: int, folder: Path | None) -> Any:
    """A BPE trained on these records; with a folder, it is kept there, and the one that is there is taken."""
    import transformers

    kept = folder and folder / TOKENIZER
    if kept and kept.is_dir():
        return transformers.AutoTokenizer.from_pretrained(kept)
    tokenizer = train_bpe(texts_of(records), vocab)
    complete(tokenizer)
    if kept:
        unfinished = kept.with_suffix(".unfinished")
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(kept)
    return tokenizer


def check(rows: Rows, vocabulary: int) -> None:
    if len(rows) and int(rows.ids.max()) >= vocabulary:
        raise UserError(f"the tokenizer has ids beyond the model's vocabulary of {vocabulary}")


# -- a dataset -----------------------------------------------------------------------------


class Data:
    """Rows to train on and rows to evaluate on, split by position so that the split does not depend on the seed."""

    def __init__(self, rows: Rows, tokenizer: Any, eval_fraction: float):
        self.rows, self.tokenizer = rows, tokenizer
        held = min(max(1, round(len(rows) * eval_fraction)), len(rows) - 1) if eval_fraction and len(rows) else 0
        # Every k-th row, not the last ones: neighbours come from the same source.
        self.eval = [round((i + 0.5) * len(rows) / held - 0.5) for i in range(held)]
        self.train = sorted(set(range(len(rows))) - set(self.eval))
        self._order: tuple[tuple[int, ...], list[int]] = ((), [])

    def check(self, vocabulary: int) -> None:
        """``UserError`` where a model has not that many ids."""
        check(self.rows, vocabulary)

    def identity(self) -> dict[str, Any]:
        """What must be the same for the order of the data to go on where it stopped."""
        return {"rows": len(self.rows), "held back": len(self.eval), "sum of ids": int(self.rows.ids.sum()), "digest of tokens": self.rows.digest()}

    def state(self) -> dict[str, Any]:
        """What a checkpoint should keep, beside the position, for ``seek`` to find it again."""
        return {}

    def seek(self, position: int, state: dict[str, Any]) -> None:
        """The next rows will be those at ``position``."""

    def close(self) -> None:
        """No more rows are needed."""

    def picks(self, position: int, count: int, seed: int) -> list[int]:
        """The rows at ``position`` and after it in the order of training, which depends on the seed and on nothing else; an epoch has an order of its own."""
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

    def train_batch(self, index: int, size: int, seed: int) -> dict[str, Any]:
        """Training batch number ``index`` of ``size`` rows each."""
        return self.rows.batch(self.picks(index * size, size, seed), self.tokenizer.pad_token_id)

    def batches(self, picks: list[int], rank: int, world: int, size: int) -> list[dict[str, Any]]:
        """This rank's share of a step's rows, in batches of at most ``size`` rows: as many batches on every rank, where rows are short one without labels."""
        batches = []
        for part in share(picks, rank, world, size):
            batch = self.rows.batch(part or picks[:1], self.tokenizer.pad_token_id)
            if not part:
                batch["labels"].fill_(IGNORE)
            batches.append(batch)
        return batches

    def eval_batches(self, size: int) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self.eval), size):
            yield self.rows.batch(self.eval[start : start + size], self.tokenizer.pad_token_id)


def share(picks: list[int], rank: int, world: int, size: int) -> list[list[int]]:
    """``rank``'s part of ``picks``, in pieces of at most ``size``; the number of pieces is the same on every rank, hence some may be empty."""
    mine = picks[len(picks) * rank // world : len(picks) * (rank + 1) // world]
    pieces = math.ceil(math.ceil(len(picks) / world) / size)
    return [mine[size * i : size * (i + 1)] for i in range(pieces)]


def load(config: TrainConfig) -> Data:
    """The data of a run. Rows of a file are cached: of the processes that share the cache one tokenises, the others read what it wrote."""
    if (Path(config.data) / ROWS).is_file():
        return _prepared(config)
    tokenizer = tokenizer_of(config)
    folder, sure = _cache(config, tokenizer)
    if config.stream:
        from liger_kernel.train.stream import Stream

        return Stream(config, tokenizer, folder)
    if not sure:
        rows, tokenizer = _tokenised(config, tokenizer)
        return Data(rows, tokenizer, config.eval_fraction)
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder.parent}.lock"):
        if not folder.is_dir():
            _fill(folder, config, tokenizer)
    return _read(folder, config, tokenizer)


def tokenizer_of(config: TrainConfig) -> Any:
    """The tokenizer that the config names; None where one is to be trained on the data."""
    try:
        import transformers
    except ImportError as error:
        raise UserError("training needs transformers: pip install 'liger-kernel[train]'") from error
    source = config.tokenizer or config.model
    if source is None:
        return None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the tokenizer {source!r}: {str(error).splitlines()[0]}") from error
    complete(tokenizer)
    return tokenizer


def prepare(config: TrainConfig, folder: str | Path) -> Path:
    """Tokenise the data of a run into ``folder``, which then serves as ``data`` of runs with this ``length`` or a greater one.

    Files of what was prepared there before are replaced.
    """
    folder, data = Path(folder), load(dataclasses.replace(config, stream=0))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".preparing-", ignore_cleanup_errors=True) as aside:
        new = Path(aside) / "new"
        _write(new, data.rows, data.tokenizer)
        for path in sorted(new.iterdir(), key=lambda path: path.name == ROWS):  # the rows last: they make it a prepared folder
            os.replace(path, folder / path.name)
    return folder


def _prepared(config: TrainConfig) -> Data:
    data = _read(Path(config.data), config, None)
    longest = int((data.rows.bounds[1:] - data.rows.bounds[:-1]).max())
    if longest > config.length:
        raise UserError(f"{config.data} was prepared with rows of {longest} tokens, length is {config.length}")
    return data


def _read(folder: Path, config: TrainConfig, tokenizer: Any) -> Data:
    import transformers

    return Data(Rows.read(folder / ROWS), tokenizer or transformers.AutoTokenizer.from_pretrained(folder), config.eval_fraction)


def _fill(folder: Path, config: TrainConfig, tokenizer: Any) -> None:
    """Tokenise the data of a run into ``folder``. A run that is stopped leaves what it has beside it, for the next one; after a mistake there is none."""
    unfinished = folder.with_suffix(".unfinished")
    try:
        _write(folder, *_tokenised(config, tokenizer, unfinished))
    except UserError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    shutil.rmtree(unfinished, ignore_errors=True)


def _tokenised(config: TrainConfig, tokenizer: Any, folder: Path | None = None) -> tuple[Rows, Any]:
    records, draft = Records(config), Draft(folder)
    if tokenizer is None:
        tokenizer = own_tokenizer(records, config.vocab, folder)
    if draft.place != BEGIN:
        print(f"tokenising goes on after record {draft.place[0]}", file=sys.stderr, flush=True)
    draft.add(records.since(draft.place), tokenizer, config.length)
    return draft.rows(config.length, config.packing), tokenizer


def complete(tokenizer: Any) -> None:
    """What training needs of a tokenizer and not every one has."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not tokenizer.chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE


def _cache(config: TrainConfig, tokenizer: Any) -> tuple[Path, bool]:
    """Where rows are kept, named after all that decides on them, and whether that is all that does: else it is of this run alone."""
    sure, files = True, files_of(config.data)
    if config.data == "stdlib":
        identity = sys.version
    elif files:
        identity = "\n".join(f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)
    else:
        identity, sure = f"{config.data} {config.split}", False
    if tokenizer is None:
        by: Any = config.vocab
    elif tokenizer.is_fast:
        by = [tokenizer.backend_tokenizer.to_str(), tokenizer.bos_token_id, tokenizer.eos_token_id, str(tokenizer.chat_template)]
    else:
        by, sure = config.tokenizer or config.model, False
    key = json.dumps([identity, config.limit, by, config.length, config.packing, CHAT_TEMPLATE, *([config.stream] if config.stream else [])])
    folder = config.cache if config.cache and sure else Path(config.out) / "cache"
    return Path(folder) / hashlib.sha256(key.encode()).hexdigest()[:16], sure


def _write(folder: Path, rows: Rows, tokenizer: Any) -> None:
    """All or nothing: a run that is killed leaves no half of a cache."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()  # with the permissions that folders have; the temporary one is its owner's alone
        tokenizer.save_pretrained(new)
        rows.write(new / ROWS)
        with contextlib.suppress(OSError):  # another run has just written the same
            os.rename(new, folder)
