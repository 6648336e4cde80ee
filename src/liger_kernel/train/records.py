"""Texts and conversations, read one by one from files, folders and Hugging Face datasets, from any
position on.

These kinds of record are understood; the keys of the first record, which ``columns`` may rename,
decide:
  {"text": ...}                                plain text, every token is a label; documents are
                                               joined and cut into rows of equal length
  {"messages": [{"role", "content"}...]}       a conversation, one row each; only the assistant's
                                               turns have labels
  {"conversations": [{"from", "value"}...]}    the same, as ShareGPT writes it
  {"prompt": text, "completion": text}         one row each, without a chat template; only the
                                               completion has labels
  {"prompt": [...], "completion": [...]}       a conversation; only the completion's turns of the
                                               assistant have labels
  {"instruction", "output", ["input"]}         Alpaca: a conversation of one question and one answer

Files are read here and not by the package datasets, which infers one schema for all records (the
answer "7" of a CSV file becomes a number, an empty one null), has no limit of a record's size, and
names neither the line of a mistake nor the place to go on from. It reads what lies on the hub.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from liger_kernel.nearest import did_you_mean, nearest
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.hub import on_hub
from liger_kernel.train.mistakes import either, existing, mistaken, needs, similar_file, unique

Record = dict[str, Any]
Turn = dict[str, Any]  # of a conversation, as chat templates take it
# a place between two records: how many are before it, the number of the file, how many of that file
# are before it
Place = tuple[int, int, int]
BEGIN: Place = (0, 0, 0)
# a record, and the place behind it
PlacedRecord = tuple[Record, Place]
# Parts of the standard library that are not prose or code written by people for people.
NOT_TEXT = "site-packages dist-packages test tests idlelib lib2to3 ensurepip turtledemo encodings __pycache__"


def standard_library() -> list[str]:
    """The sources of this Python's standard library, with docstrings and reference topics: a
    real text that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(root.rglob("*.py")) if not {*NOT_TEXT.split()} & set(path.relative_to(root).parts)]
    texts = [path.read_bytes().decode("utf-8", errors="ignore") for path in paths]
    if sum(map(len, texts)) < 1_000_000:
        raise UserError(f"this Python has no sources of its standard library in {root}: give --data FILE")
    return texts


class Records:
    """The records that ``config.data`` names, at most ``config.limit``. Each iteration reads
    them again, one by one."""

    def __init__(self, config: TrainConfig):
        self.config = config

    def __iter__(self) -> Iterator[Record]:
        return (record for record, _ in self.since(BEGIN))

    def since(self, place: Place) -> Iterator[PlacedRecord]:
        """Those from a place on, each with the place behind it."""
        number, file, within = place
        renamed = self.config.renamed
        for at, read in enumerate(self._sources()[file:], file):
            for record in read(within):
                if renamed:
                    record = _with_names(record, renamed, first=not number)
                number, within = number + 1, within + 1
                yield record, (number, at, within)
                if number == self.config.limit:
                    return
            within = 0
        if not number:
            raise UserError(f"{self.config.data} holds no records")

    def _sources(self) -> list[Callable[[int], Iterable[Record]]]:
        """Functions that read a file each, from a record of that number on."""
        name, files = self.config.data, files_of(self.config.data)
        if name == "stdlib":
            return [lambda skip: ({"text": text} for text in standard_library()[skip:])]
        if files:
            most = self.config.max_record_mb * 10**6
            return [partial(READERS[path.suffix.lower()], path, most=most) for path in files]
        return [partial(_hub, name, self.config.split, bool(self.config.stream))]


def _with_names(record: Record, renamed: dict[str, str], first: bool) -> Record:
    """The record with other names of its columns: ``renamed`` is theirs -> ours."""
    missing = [name for name in renamed if name not in record]
    if first and missing:
        near = did_you_mean(missing[0], record)
        raise UserError(f"columns: the first record has no {missing[0]!r}{near or f'; it has {sorted(record)!s:.300}'}")
    kept = {name: value for name, value in record.items() if name not in renamed}
    return kept | {ours: record[theirs] for theirs, ours in renamed.items() if theirs in record}


def files_of(name: str) -> list[Path]:
    """The file with that name, or the files of the folder, in order: those of the first kind of
    which it has any, as a README.txt may lie beside data; nothing if it is not a path."""
    path = Path(name)
    if path.is_dir():
        for kind in FOLDERS:
            if files := sorted(existing(f) for f in path.iterdir() if f.suffix.lower() in kind):
                return files
        raise UserError(f"no {either(READERS)} files in {path}")
    if path.suffix.lower() in READERS:
        return [existing(path)]
    if path.exists():
        raise UserError(f"data must be a {either(READERS)} file or a folder of them, got {path}")
    return []


def _lines(path: Path, most: int) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(most + 1), b""), 1):
            if len(line) > most:
                raise UserError(
                    f"{path}:{number}: the line is longer than {most // 10**6} MB: one record a line; "
                    "--max-record-mb raises the limit"
                )
            yield _decoded(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, f"{path}:{number}")


def _whole(path: Path) -> str:
    return _decoded(path.read_bytes().removeprefix(codecs.BOM_UTF8), str(path))


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8: {error}") from error


def _parsed(text: str, where: str) -> Any:
    try:
        found = json.loads(text, object_pairs_hook=unique)
        # lone surrogates, which no tokenizer accepts
        if "\\ud" in text or "\\uD" in text:
            json.dumps(found, ensure_ascii=False).encode()
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON: {error}") from error
    except RecursionError as error:
        raise UserError(f"{where}: nested too deeply") from error
    return found


def _object(value: Any, where: str) -> Record:
    if not isinstance(value, dict):
        raise UserError(f"{where}: a record must be an object, got {type(value).__name__}")
    return value


def _jsonl(path: Path, skip: int, most: int) -> Iterator[Record]:
    lines = ((number, line) for number, line in enumerate(_lines(path, most), 1) if line.strip())
    for number, line in itertools.islice(lines, skip, None):
        yield _object(_parsed(line, f"{path}:{number}"), f"{path}:{number}")


def _json(path: Path, skip: int, most: int) -> Iterable[Record]:
    """One array, which is held in memory; many a file of that name has an object a line instead."""
    with path.open("rb") as file:
        array = file.read(1 << 16).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    if not array:
        return _jsonl(path, skip, most)
    records = _parsed(_whole(path), str(path))
    return (_object(record, f"{path}, record {number}") for number, record in enumerate(records[skip:], skip + 1))


def _csv(path: Path, skip: int, most: int) -> Iterator[Record]:
    """All values are text, as they stand there."""
    lines = _lines(path, most)
    first = next(lines, "")
    csv.field_size_limit(min(most, 2**31 - 1))
    # names of columns have none of the three
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader(itertools.chain([first], lines), delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        unique([(name, None) for name in names])
        for row in itertools.islice(filter(None, reader), skip, None):
            if len(row) != len(names):
                raise ValueError(f"{len(row)} values for {len(names)} columns")
            yield dict(zip(names, row))
    except UserError:
        raise
    except (csv.Error, ValueError) as error:
        raise UserError(f"{path}:{reader.line_num}: {error}") from error


def _txt(path: Path, skip: int, most: int) -> Iterator[Record]:
    """The file is one text: its line breaks are part of it."""
    if path.stat().st_size > most:
        raise UserError(
            f"{path} is one text, longer than {most // 10**6} MB: cut it into files; --max-record-mb raises the limit"
        )
    if not skip:
        yield {"text": _whole(path)}


def _parquet(path: Path, skip: int, most: int) -> Iterator[Record]:
    with needs("Parquet", "pyarrow"):
        import pyarrow.parquet as parquet
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


READERS: dict[str, Any] = {".jsonl": _jsonl, ".parquet": _parquet, ".csv": _csv, ".tsv": _csv}
READERS |= {".json": _json, ".txt": _txt}
FOLDERS = ((".jsonl", ".parquet"), (".csv", ".tsv"), (".json",), (".txt",))


def _hub(name: str, split: str, stream: bool, skip: int) -> Iterable[Record]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{name!r} is not a file here, and datasets of the Hugging Face hub need the package datasets: pip "
            f"install datasets{similar_file(name)}"
        ) from error
    on_hub(name, also=("stdlib",), kind="dataset")
    with mistaken(f"cannot load the dataset {name!r}: "):
        data = datasets.load_dataset(name, split=split, streaming=stream)
        return data.skip(skip) if skip else data


class Example(NamedTuple):
    """What a row is made of, turns or text: nothing of ``prompt`` has labels."""

    prompt: Any
    completion: Any


# of ShareGPT's turns and those of its relatives -> of a chat template
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}


def example(record: Record) -> Example | None:
    """The record, unless it is plain text. Raises ``UserError`` for what looks like one of the
    kinds and is none."""
    for name in ("messages", "conversations"):
        if name in record:
            return Example([], _turns(record[name], name))
    if "prompt" in record and "completion" in record:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) != isinstance(completion, str):
            raise UserError("prompt and completion must both be text, or both lists of messages")
        if isinstance(prompt, str):
            return Example(prompt, completion)
        return Example(_turns(prompt, "prompt"), _turns(completion, "completion"))
    if "instruction" in record and "output" in record:
        parts = [part for part in (record["instruction"], record.get("input")) if part]
        if not all(isinstance(part, str) for part in (*parts, record["output"])):
            raise UserError("instruction, input and output must be text")
        question = {"role": "user", "content": "\n\n".join(parts)}
        return Example([question], [{"role": "assistant", "content": record["output"]}])
    return None


def _turns(turns: Any, name: str) -> list[Turn]:
    """Messages as chat templates take them; none are no turns."""
    if turns is not None and not (isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)):
        raise UserError(f"{name} must be a list of objects with role and content, or from and value")
    found = [_turn(turn) if "from" in turn and "role" not in turn else turn for turn in turns or ()]
    for turn in found:  # templates have roles of their own: what is nearly one of these is none
        role, known = turn.get("role"), ROLES.values()
        if isinstance(role, str) and role not in known and (near := nearest(role, known, 0.8)):
            raise UserError(f"{name}: no role {role!r:.80}; did you mean {near}?")
    return found


def _turn(turn: Turn) -> Turn:
    speaker = str(turn["from"])
    if speaker not in ROLES:
        raise UserError(f"'from' must be one of {', '.join(ROLES)}; got {speaker!r:.80}{did_you_mean(speaker, ROLES)}")
    if not isinstance(turn.get("value"), str):
        raise UserError("the 'value' of a turn must be text")
    return {"role": ROLES[speaker], "content": turn["value"]}


def texts(record: Record) -> list[str]:
    """All the text in a record."""
    parts = example(record) or [record.get("text")]
    turns = [each for part in parts for each in (part if isinstance(part, list) else [part])]
    found = [turn.get("content") if isinstance(turn, dict) else turn for turn in turns]
    return [text for text in found if isinstance(text, str)]


def characters(record: Record) -> int:
    """How much text a record has; none if it is not one, which is said where it is tokenised."""
    try:
        return sum(map(len, texts(record)))
    except UserError:
        return 0


# what others call the columns that we know, for a message
GUESSES = {
    "prompt": "prompt question query instruction instruct input problem human user",
    "completion": "completion answer response output solution target assistant reply",
    "messages": "chat dialogue dialog turns conversation",
    "text": "content document body",
}


def _renaming(record: Record) -> str:
    """The ``--columns`` that would make a known kind of these columns."""
    named = {
        ours: [name for name in record if nearest(str(name), words.split(), 0.9)] for ours, words in GUESSES.items()
    }
    both = ["prompt", "completion"] if named["prompt"] and named["completion"] else []
    wanted = both or [ours for ours in ("messages", "text") if named[ours]][:1]
    return ",".join(f"{named[ours][0]}={ours}" for ours in wanted if ours not in named[ours]) or "NAME=text"


def text_of(record: Record, number: int) -> str:
    """The text of a record, which is the ``number``-th."""
    if number == 1 and "text" not in record:
        raise UserError(
            "a record must have 'text', 'messages', 'conversations', 'prompt' and 'completion', or 'instruction' and "
            f"'output'; the first record has {sorted(record)!s:.300}: --columns {_renaming(record)} renames them"
        )
    if not isinstance(record.get("text"), str):
        raise UserError(f"record {number} has no 'text', unlike the first record")
    return record["text"]


def texts_of(records: Iterable[Record]) -> Iterator[str]:
    """All the text in the records, to train a tokenizer on."""
    if example(next(iter(records))) is not None:
        yield from itertools.chain.from_iterable(map(texts, records))
        return
    yield from (text_of(record, number) for number, record in enumerate(records, 1))
