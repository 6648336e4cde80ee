"""Texts and conversations, read one by one from files, folders and Hugging Face datasets, from any
position on.

Three kinds of record are understood; the keys of the first record decide:
  {"text": ...}                           plain text, every token is a label; documents are joined
                                          and cut into rows of equal length
  {"instruction", "output", ["input"]}    Alpaca: a conversation of one question and one answer
  {"messages": [{"role", "content"}...]}  a conversation, one row each; only the assistant's turns
                                          have labels

They are read here and not by the package datasets, which infers one schema for all records, has no
limit of a record's size, and names neither the line of a mistake nor the place to go on from.
"""

from __future__ import annotations

import codecs
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.hub import on_hub
from liger_kernel.train.mistakes import existing, unique
from liger_kernel.train.redact import in_a_line

# a place between two records: how many are before it, the number of the file, how many of that file
# are before it
Place = tuple[int, int, int]
BEGIN: Place = (0, 0, 0)
# Parts of the standard library that are not prose or code written by people for people.
NOT_TEXT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "turtledemo",
    "encodings",
    "__pycache__",
}


def standard_library() -> list[str]:
    """The sources of this Python's standard library, with docstrings and reference topics: a
    real text that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(root.rglob("*.py")) if not NOT_TEXT & set(path.relative_to(root).parts)]
    texts = [path.read_bytes().decode("utf-8", errors="ignore") for path in paths]
    if sum(map(len, texts)) < 1_000_000:
        raise UserError(f"this Python has no sources of its standard library in {root}: give --data FILE")
    return texts


class Records:
    """The records that ``config.data`` names, at most ``config.limit``. Each iteration reads
    them again, one by one."""

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
            lines = partial(_jsonl, most=self.config.max_record_mb * 10**6)
            return [partial(lines if path.suffix == ".jsonl" else _parquet, path) for path in files]
        return [partial(_hub, name, self.config.split, bool(self.config.stream))]


def files_of(name: str) -> list[Path]:
    """The file with that name, or the ``.jsonl`` and ``.parquet`` files of the folder, in order;
    nothing if it is not a path."""
    path = Path(name)
    if path.is_dir():
        files = sorted(existing(f) for f in path.iterdir() if f.suffix in (".jsonl", ".parquet"))
        if not files:
            raise UserError(f"no .jsonl or .parquet files in {path}")
        return files
    if path.suffix in (".jsonl", ".parquet"):
        return [existing(path)]
    if path.exists():
        raise UserError(f"data must be a .jsonl or .parquet file or a folder of them, got {path}")
    return []


def _jsonl(path: Path, skip: int, most: int) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(most + 1), b""), 1):
            if len(line) > most:
                raise UserError(
                    f"{path}:{number}: the line is longer than {most // 10**6} MB: one record a line; "
                    "--max-record-mb raises the limit"
                )
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            if skip:
                skip -= 1
                continue
            try:
                record = json.loads(line.decode(), object_pairs_hook=unique)
                # lone surrogates, which no tokenizer accepts
                if b"\\ud" in line or b"\\uD" in line:
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
        raise UserError("Parquet files need pyarrow: pip install pyarrow") from error
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
        raise UserError(
            f"{name!r} is not a file here, and datasets of the Hugging Face hub need the package datasets: pip "
            "install datasets"
        ) from error
    on_hub(name, also=("stdlib",), kind="dataset")
    try:
        data = datasets.load_dataset(name, split=split, streaming=stream)
        return data.skip(skip) if skip else data
    # the network, the hub and formats of datasets raise errors of many kinds
    except Exception as error:
        raise UserError(f"cannot load the dataset {name!r}: {in_a_line(error)}") from error


def conversation(record: dict[str, Any]) -> list[dict[str, str]] | None:
    """The turns of a chat or Alpaca record; None for plain text. Raises ``UserError`` for every
    other record."""
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


def text_of(record: dict[str, Any], number: int) -> str:
    """The text of a record, which is the ``number``-th."""
    if number == 1 and "text" not in record:
        raise UserError(
            "a record must have 'text', 'messages', or 'instruction' and 'output'; the first record has "
            f"{sorted(record)}"
        )
    if not isinstance(record.get("text"), str):
        raise UserError(f"record {number} has no 'text', unlike the first record")
    return record["text"]


def texts_of(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    """All the text in the records, to train a tokenizer on."""
    if conversation(next(iter(records))) is not None:
        turns = (turn for record in records for turn in conversation(record) or [])
        yield from (turn["content"] for turn in turns if isinstance(turn.get("content"), str))
        return
    yield from (text_of(record, number) for number, record in enumerate(records, 1))
