"""From records to rows: tokenizers, labels of conversations, and a draft that outlives a run
that is stopped."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch

from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.files import COUNT, fresh, read_object, write
from liger_kernel.train.hub import on_hub
from liger_kernel.train.mistakes import mistaken, note, regular_in
from liger_kernel.train.records import (
    BEGIN,
    Example,
    Place,
    PlacedRecord,
    Record,
    Turn,
    characters,
    example,
    text_of,
    texts_of,
)
from liger_kernel.train.redact import in_a_line
from liger_kernel.train.token_rows import IGNORE, TokenFile, TokenRows, Tokens, together

END = "<|endoftext|>"
# For tokenizers without a chat template. It is saved with the model, so that a chat uses what was
# trained.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '' if loop.first else '\n\n' }}{{ '### ' + m.role | capitalize + ':\n' + m.content }}"
    "{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}{{ '\n\n### Assistant:\n' if add_generation_prompt "
    "else '' }}"
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
# the folder of the tokenizer, in one of data that is being tokenised
TOKENIZER = "tokenizer"
DRAFT = ("ids", "labels", "lengths")
# of a draft: the place behind the last record, whether records are conversations, how many of these
# have no answer or one too late, and how many numbers its files have
STATE: dict[str, Any] = {"place": [COUNT] * 3, "chats": (bool, NoneType)}
STATE |= dict.fromkeys(("silent", "late", *DRAFT), COUNT)
# characters that are tokenised together; a tokenizer takes 150 bytes for each
PIECE = 1_000_000
# seconds between two moments at which what is tokenised is synced to the disk
KEEP_EVERY = 1.0
_BETWEEN_WORDS = re.compile(r"(?<=\S)(?=\s\S)")
_CUTS_TRIED = 100
# characters on each side of a cut: more than what a tokenizer looks at to find where a word ends
_AROUND = 1000


def batches_of(records: Iterable[PlacedRecord]) -> Iterator[list[PlacedRecord]]:
    """Records to tokenise together: 1000 at most, fewer once they have as much text as a piece."""
    some, total = [], 0
    for record, place in records:
        some.append((record, place))
        total += characters(record)
        if len(some) == 1000 or total >= PIECE:
            yield some
            some, total = [], 0
    if some:
        yield some


def pieces(text: str, tokenizer: Any = None) -> Iterator[str]:
    """``text`` in pieces of ``PIECE`` characters or a little more, which have the same tokens one
    by one as in one.

    It is cut before white space between words, where the tokenizer gives the text on both sides the
    same tokens together and apart. Where it does not (those that mark the begin of a text do not),
    the rest is one piece. None: as for ``train_bpe``, whose words end at every such place.
    """
    begin = 0
    while len(text) - begin > PIECE:
        places = itertools.islice(_BETWEEN_WORDS.finditer(text, begin + PIECE), _CUTS_TRIED)
        cut = next(
            (place.start() for place in places if tokenizer is None or _may_cut(text, place.start(), tokenizer)), None
        )
        if cut is None:
            if len(text) - begin > 10 * PIECE:
                say = (
                    f"this tokenizer's tokens of a text of {len(text):,} characters cannot be made piece by piece: "
                    "that takes memory, 150 bytes a character"
                )
                note(say)
            break
        yield text[begin:cut]
        begin = cut
    yield text[begin:]


def _may_cut(text: str, at: int, tokenizer: Any) -> bool:
    ids = lambda part: tokenizer(part, add_special_tokens=False)["input_ids"]
    left, right = text[max(0, at - _AROUND) : at], text[at : at + _AROUND]
    return ids(left + right) == ids(left) + ids(right)


def ids_of(texts: list[str], tokenizer: Any) -> Iterator[Tokens]:
    """The tokens of each text: of all together, but for long ones, which are tokenised piece by
    piece."""
    encode = lambda some: tokenizer(some, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    short = [text for text in texts if len(text) <= PIECE]
    encoded = iter(encode(short) if short else [])
    for text in texts:
        yield (
            next(encoded)
            if len(text) <= PIECE
            else np.concatenate([np.array(encode(piece), np.int32) for piece in pieces(text, tokenizer)])
        )


Row = tuple[list[int], list[int]]


def conversation_row(messages: list[Turn], tokenizer: Any, length: int, given: int = 0) -> Row:
    """A conversation in the tokenizer's own format, labels on the assistant's turns alone, without
    the first ``given`` turns, cut to ``length``.

    A turn is located by rendering the conversation up to it and through it. Where a template
    rewrites earlier turns (some drop the reasoning of all but the last), these are context: they
    carry no labels.
    """
    render = lambda turns, prompt=False: tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=prompt
    )
    text = render(messages)
    spans = []
    for i, message in enumerate(messages[given:], given):
        if message["role"] == "assistant":
            before, through = render(messages[:i], True), render(messages[: i + 1])
            if text.startswith(through) and through.startswith(before):
                spans.append((len(before), len(through)))
    return labelled(text, spans, tokenizer, length)


def completion_row(prompt: str, completion: str, tokenizer: Any, length: int) -> Row:
    """The two texts as one, as they stand there, between the tokens that begin and end a text;
    labels on the completion and the end."""
    begin, end = _around(tokenizer)
    spans = [(len(prompt), len(prompt) + len(completion))]
    ids, labels = labelled(prompt + completion, spans, tokenizer, length)
    return [*begin, *ids, *end][:length], [*(IGNORE for _ in begin), *labels, *end][:length]


def labelled(text: str, spans: list[tuple[int, int]], tokenizer: Any, length: int) -> Row:
    """At most ``length`` tokens of ``text``, and labels of those within the spans of characters."""
    ids: list[int] = []
    labels: list[int] = []
    at = 0
    for piece in pieces(text, tokenizer):
        encoded = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)
        for token, (begin, end) in zip(encoded["input_ids"], encoded["offset_mapping"]):
            # Some tokenizers trim the white space off a token's range: what counts is that it ends
            # inside a turn and does not begin before it.
            is_target = any(start <= at + begin and start < at + end <= stop for start, stop in spans)
            ids.append(token)
            labels.append(token if is_target else IGNORE)
        if len(ids) >= length:
            break
        at += len(piece)
    return ids[:length], labels[:length]


def _around(tokenizer: Any) -> Row:
    """The tokens that begin and end a text."""
    begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id not in (None, tokenizer.eos_token_id) else []
    return begin, [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []


def _answers(turn: Turn) -> bool:
    return turn.get("role") == "assistant" and bool(turn.get("content"))


class NoRows(UserError):
    """Records from which no row can be made."""


class Draft:
    """Records that are tokenised, on their way to rows. In ``folder``, what a run that is stopped
    has tokenised is there for the next one.

    What counts of the files there is what ``state.json`` says; what lies behind was cut short.
    """

    def __init__(self, folder: Path | None = None):
        self.folder, self._kept = folder, time.monotonic()
        known = self._known()
        # the place behind the last record
        self.place: Place = tuple(known.get("place", BEGIN))
        # whether records are conversations; None before the first
        self.chats: bool | None = known.get("chats")
        # numbers of conversations that are left out: without an answer, or with one too late
        self.silent, self.late = known.get("silent", 0), known.get("late", 0)
        self._tokens = {name: TokenFile(folder / name if folder else None, known.get(name, 0)) for name in DRAFT}

    def _known(self) -> dict[str, Any]:
        """What was tokenised before; nothing if the files are shorter than it says."""
        if self.folder is None:
            return {}
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError, ValueError):
            known = read_object(self.folder / "state.json", **STATE)
            if all((self.folder / name).stat().st_size >= 4 * known[name] for name in DRAFT):
                return known
        return {}

    def _keep(self) -> None:
        if self.folder is None or time.monotonic() < self._kept + KEEP_EVERY:
            return
        for tokens in self._tokens.values():
            tokens.sync()
        state = {"place": self.place, "chats": self.chats, "silent": self.silent, "late": self.late}
        write(
            self.folder / "state.json",
            json.dumps(state | {name: tokens.count for name, tokens in self._tokens.items()}),
        )
        self._kept = time.monotonic()

    def _add(self, ids: Tokens, labels: Tokens = ()) -> None:
        self._tokens["ids"] += ids
        self._tokens["labels"] += labels
        self._tokens["lengths"] += [len(ids)]

    def add(self, records: Iterable[PlacedRecord], tokenizer: Any, length: int) -> None:
        """Tokenise these. ``UserError`` names the one that cannot be read."""
        for some in batches_of(records):
            if self.chats is None:
                self.chats = example(some[0][0]) is not None
            if self.chats and not tokenizer.is_fast:
                raise UserError(
                    "answers need a fast tokenizer, because a slow tokenizer does not say which characters a token "
                    "covers"
                )
            if self.chats:
                for record, (number, *_) in some:
                    self._add_chat(record, number, tokenizer, length)
            else:
                self._add_texts([text_of(record, number) for record, (number, *_) in some], tokenizer)
            self.place = some[-1][1]
            self._keep()

    def _add_texts(self, texts: list[str], tokenizer: Any) -> None:
        begin, end = _around(tokenizer)
        for ids in ids_of(texts, tokenizer):
            self._add(np.concatenate([np.array(part, np.int32) for part in (begin, ids, end)]))

    def _add_chat(self, record: Record, number: int, tokenizer: Any, length: int) -> None:
        try:
            prompt, completion = example(record) or Example([], [])
            if isinstance(prompt, str):
                ids, labels = completion_row(prompt, completion, tokenizer, length)
            else:
                ids, labels = conversation_row(prompt + completion, tokenizer, length, len(prompt))
        except UserError as error:
            raise UserError(f"record {number}: {error}") from error
        # chat templates raise errors of any kind
        except Exception as error:
            raise UserError(
                f"record {number} is not a conversation that the chat template accepts: {in_a_line(error, 200)}"
            ) from error
        if completion and any(label != IGNORE for label in labels[1:]):
            self._add(ids, labels)
        elif completion if isinstance(prompt, str) else any(map(_answers, completion)):
            self.late += 1
        else:
            self.silent += 1

    def rows(self, length: int, packing: str = "auto") -> TokenRows:
        """TokenRows of at most ``length`` tokens; ``NoRows``: there are none."""
        documents = packing == "documents"
        lengths, ids = self._tokens["lengths"].tensor(), self._tokens["ids"]
        bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        if self.chats:
            left_out = self._left_out(length)
            if not len(lengths):
                raise NoRows(
                    f"nothing to learn: {', and '.join(left_out)}" if left_out else "the data has no conversation"
                )
            for why in left_out:
                note(f"{why}: left out, as they have nothing to learn")
            rows = TokenRows(ids.tensor(), self._tokens["labels"].tensor(), bounds)
            return together(rows, length) if documents else rows
        # documents are joined and cut; what does not fill the last row is dropped
        count = ids.count // length
        if not count:
            raise NoRows(f"the data is shorter than one row of {length} tokens: lower the length")
        joined = ids.tensor(count * length)
        rows = TokenRows(joined, joined, torch.arange(count + 1) * length)
        return rows.of_documents(bounds[:-1]) if documents else rows

    def _left_out(self, length: int) -> list[str]:
        """How many conversations teach nothing, for each reason."""
        total = self._tokens["lengths"].count + self.silent + self.late
        reasons = (
            (self.silent, "have no answer"),
            (
                self.late,
                f"have no answer within their first {length} tokens (raise --length), or have it in turns that the "
                "chat template rewrites",
            ),
        )
        return [f"{dropped} of {total} conversations {why}" for dropped, why in reasons if dropped]


def tokenise(
    records: Iterable[Record], tokenizer: Any, length: int, packing: str = "auto", before: int = 0
) -> TokenRows:
    """TokenRows of at most ``length`` tokens. ``UserError`` names the record it cannot read, counted
    from those ``before``; ``NoRows``: there are none."""
    draft = Draft()
    draft.add(((record, (number, 0, 0)) for number, record in enumerate(records, before + 1)), tokenizer, length)
    return draft.rows(length, packing)


def tokenizer_of(config: TrainConfig) -> Any:
    """The tokenizer that the config names; None where one is to be trained on the data."""
    source = config.tokenizer or config.model
    if source is None:
        return None
    on_hub(source)
    if Path(source).is_dir() and not any((Path(source) / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"{source} holds no tokenizer: it has no tokenizer.json or tokenizer_config.json. Give --tokenizer a "
            "folder that has one"
        )
    tokenizer = loaded(source, config.trust_remote_code)
    complete(tokenizer)
    return tokenizer


def loaded(source: str | Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a folder, or of the hub."""
    import transformers

    regular_in(source)
    with mistaken(f"cannot load the tokenizer {str(source)!r}: "):
        return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)


def complete(tokenizer: Any) -> None:
    """What training needs of a tokenizer and not every one has."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not tokenizer.chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE


def train_bpe(texts: Iterable[str], vocab: int) -> Any:
    """A byte-level BPE as a transformers tokenizer; the end of a text is also its beginning and
    its padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = (piece for text in texts for piece in pieces(text))
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=END)


def own_tokenizer(records: Iterable[Record], vocab: int, folder: Path | None) -> Any:
    """A BPE trained on these records; with a folder, it is kept there, and the one that is there
    is taken."""
    kept = folder and folder / TOKENIZER
    if kept and kept.is_dir():
        return loaded(kept)
    note(f"training a tokenizer of up to {vocab:,} tokens on the data")
    tokenizer = train_bpe(texts_of(records), vocab)
    complete(tokenizer)
    if kept:
        unfinished = fresh(kept.with_suffix(".unfinished"))
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(kept)
    return tokenizer
