"""From a name to batches: data are read, tokenised once for all processes that share a cache, or
streamed part by part.

records.py     what files and datasets hold
tokenise.py    records -> rows of tokens and labels
token_rows.py  rows -> batches, in an order fixed by the seed
stream.py      the same while training is under way
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.mistakes import note, owned
from liger_kernel.train.records import BEGIN, Records, files_of
from liger_kernel.train.stream import Stream
from liger_kernel.train.token_rows import Data, TokenRows
from liger_kernel.train.tokenise import CHAT_TEMPLATE, Draft, loaded, own_tokenizer, tokenizer_of

# the file of rows in a folder of tokenised data, beside the tokenizer's files
ROWS = "rows.safetensors"


def load(config: TrainConfig) -> Data:
    """Return the data of a run. The rows of a file are cached: one of the processes that share
    the cache tokenises, the others read its result."""
    if not config.eval_data:
        return _load(config)
    data = _load(dataclasses.replace(config, eval_fraction=0.0))
    with contextlib.ExitStack() as stack:
        stack.callback(data.close)
        data.evaluate_on(_evaluation(config, data.tokenizer))
        stack.pop_all()
    return data


def _evaluation(config: TrainConfig, tokenizer: Any) -> TokenRows:
    """The rows of ``eval_data``, by the tokenizer of the data."""
    where: dict[str, Any] = dict(data=config.eval_data, split=config.eval_split, eval_data=None)
    try:
        found = _load(dataclasses.replace(config, **where, eval_fraction=0.0, stream=0.0), tokenizer)
        if found.tokenizer is not tokenizer and found.tokenizer.get_vocab() != tokenizer.get_vocab():
            raise UserError("its rows were prepared with another tokenizer than that of the data")
    except UserError as error:
        raise UserError(f"eval_data {config.eval_data}: {error}") from error
    return found.rows


def _load(config: TrainConfig, tokenizer: Any = None) -> Data:
    if (Path(config.data) / ROWS).is_file():
        return _prepared(config)
    tokenizer = tokenizer or tokenizer_of(config)
    folder, sure = _cache(config, tokenizer)
    owned(folder.parent)
    owned(folder, alone=True)
    if config.stream:
        return Stream(config, tokenizer, folder)
    if not sure:
        rows, tokenizer = _tokenised(config, tokenizer)
        return Data(rows, tokenizer, config.eval_fraction)
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder.parent}.lock"):
        unfinished = folder.with_suffix(".unfinished")
        if not folder.is_dir():
            try:
                _write(folder, *_tokenised(config, tokenizer, unfinished))
            # a run that is stopped leaves what it has for the next one, a mistake leaves nothing
            except UserError:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
        # the draft of this run, or of one that was killed before it came to this line
        shutil.rmtree(unfinished, ignore_errors=True)
    return _read(folder, config, tokenizer)


def packs(config: TrainConfig) -> bool:
    """Whether rows will have several documents that must not see each other."""
    prepared = Path(config.data) / ROWS
    if not prepared.is_file():
        return config.packing == "documents"
    from safetensors import safe_open

    with safe_open(prepared, "pt") as file:
        return "positions" in file.keys()  # noqa: SIM118  # it is no dict


def prepare(config: TrainConfig, folder: str | Path) -> Path:
    """Tokenise the data of a run into ``folder``, which can then be the ``data`` of runs with this
    ``length`` or a greater one.

    Files of earlier preparations in the folder are replaced.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / ROWS).is_file() and (other := [path.name for path in sorted(folder.iterdir()) if path.is_file()]):
        raise UserError(f"{folder} holds {other[0]}, which is not of prepared rows: give another folder")
    data = load(dataclasses.replace(config, stream=0, eval_data=None))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".preparing-", ignore_cleanup_errors=True) as aside:
        new = Path(aside) / "new"
        _write(new, data.rows, data.tokenizer)
        # the file of rows comes last, as it makes the folder a prepared one
        for path in sorted(new.iterdir(), key=lambda path: path.name == ROWS):
            os.replace(path, folder / path.name)
    return folder


def _tokenised(config: TrainConfig, tokenizer: Any, folder: Path | None = None) -> tuple[TokenRows, Any]:
    records, draft = Records(config), Draft(folder)
    if tokenizer is None:
        tokenizer = own_tokenizer(records, config.vocab, folder)
    if draft.place != BEGIN:
        note(f"tokenising continues after record {draft.place[0]}")
    draft.add(records.since(draft.place), tokenizer, config.length)
    return draft.rows(config.length, config.packing), tokenizer


def _prepared(config: TrainConfig) -> Data:
    data = _read(Path(config.data), config, None)
    longest = int((data.rows.bounds[1:] - data.rows.bounds[:-1]).max())
    if longest > config.length:
        raise UserError(
            f"{config.data} was prepared with rows of {longest} tokens, but length is {config.length}: give --length "
            f"{longest} or more"
        )
    return data


def _read(folder: Path, config: TrainConfig, tokenizer: Any) -> Data:
    if tokenizer is None:
        tokenizer = loaded(folder, config.trust_remote_code)
    return Data(TokenRows.read(folder / ROWS), tokenizer, config.eval_fraction)


def _cache(config: TrainConfig, tokenizer: Any) -> tuple[Path, bool]:
    """Where rows are kept, named after all that decides on them, and whether that is all that
    does: else it is of this run alone."""
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
        by = [
            tokenizer.backend_tokenizer.to_str(),
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            str(tokenizer.chat_template),
        ]
    else:
        by, sure = config.tokenizer or config.model, False
    key = json.dumps(
        [
            identity,
            config.limit,
            by,
            config.length,
            config.packing,
            CHAT_TEMPLATE,
            *([config.stream] if config.stream else []),
            *([config.renamed] if config.columns else []),
        ]
    )
    folder = config.cache if config.cache and sure else Path(config.out) / "cache"
    return Path(folder) / hashlib.sha256(key.encode()).hexdigest()[:16], sure


def _write(folder: Path, rows: TokenRows, tokenizer: Any) -> None:
    """All or nothing: a run that is killed leaves no half of a cache."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as temporary:
        new = Path(temporary) / "new"
        # with the permissions that folders have; the temporary one is its owner's alone
        new.mkdir()
        tokenizer.save_pretrained(new)
        rows.write(new / ROWS)
        # OSError: another run has just written the same folder
        with contextlib.suppress(OSError):
            os.rename(new, folder)
