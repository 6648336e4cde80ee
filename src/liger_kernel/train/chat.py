"""``liger chat``: ask a model, or adapters over their base, and compare the answers with another
model's. Transformers generates; the model is loaded as it was saved."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from liger_kernel.train.config import TrainConfig
from liger_kernel.train.mistakes import Parser, UserError, at_least, existing, mistaken, note
from liger_kernel.train.trained import add_flags, base_of, load_model, load_tokenizer

Turns = list[dict[str, str]]
NEW = "/new"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="liger chat", description="Chat with a model that a run has saved, or with any other.")
    add = parser.add_argument
    add("model", metavar="FOLDER", help="a model or adapters, or an id of the hub")
    add("--beside", metavar="BASE", help="another model, whose answers are shown above; the adapters' base is free")
    add("--prompts", metavar="FILE", help="answer each line, or each conversation of a .jsonl file, and end")
    add("--tokens", default=512, help="most tokens of an answer")
    add_flags(parser, "auto")
    a = parser.parse_args(argv)
    at_least(1, tokens=a.tokens)
    if a.prompts:
        existing(a.prompts)
    return a


def models(a: argparse.Namespace) -> Iterator[tuple[str, Any, Any, Any]]:
    """Those to ask: the name, the model, its tokenizer, and the context to answer in, as without its
    adapters."""
    from liger_kernel.train import adapters
    from liger_kernel.train.model import device_and_precision

    device = device_and_precision(TrainConfig(device=a.device))[0]

    def load(name: str, base: str | None) -> tuple[Any, Any]:
        tokenizer = load_tokenizer(name, base, a.trust_remote_code)
        model = load_model(base or name, a.trust_remote_code, device, a.quantize)
        if base:
            with mistaken(f"cannot load the adapters {name}: "):
                model = adapters.restored(model, name).eval()
        return model, tokenizer

    base = base_of(a.model, a.base)
    ours = load(a.model, base)
    if a.beside and base and Path(a.beside).resolve() == Path(base).resolve():
        yield a.beside, *ours, ours[0].disable_adapter
    elif a.beside:
        yield a.beside, *load(a.beside, base_of(a.beside)), contextlib.nullcontext
    yield a.model, *ours, contextlib.nullcontext


def answer(model: Any, tokenizer: Any, turns: Turns, most: int) -> str:
    """The next turn, which is printed while it is made."""
    from transformers import TextStreamer

    with mistaken("cannot make a prompt by the chat template: "):
        how = dict(add_generation_prompt=True, return_dict=True, return_tensors="pt")
        tokens = tokenizer.apply_chat_template(turns, **how).to(model.device)
    given = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    made = model.generate(**given, streamer=streamer, pad_token_id=tokenizer.pad_token_id, max_new_tokens=most)
    return tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


def prompts_of(file: str) -> Iterator[Turns]:
    """The conversations of a file, up to the answer that ends them."""
    from liger_kernel.train.records import Records, example

    if not file.endswith(".jsonl"):
        for line in filter(str.strip, Path(file).read_text(encoding="utf-8-sig").splitlines()):
            yield [{"role": "user", "content": line}]
        return
    for number, record in enumerate(Records(TrainConfig(data=file)), 1):
        prompt, completion = example(record) or ([], [])
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt, *completion]
        while turns and turns[-1].get("role") == "assistant":
            turns.pop()
        if not turns:
            raise UserError(f"{file}: record {number} has no question, but {sorted(record)}")
        yield turns


def typed() -> Iterator[Turns]:
    """The lines of standard input; nothing where a new conversation begins."""
    note(f"{NEW} begins a new conversation, Ctrl-D ends")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # lines can be edited
    with contextlib.suppress(EOFError):
        while True:
            if line := input("> " if sys.stdin.isatty() else "").strip():
                yield [] if line == NEW else [{"role": "user", "content": line}]


def main(argv: list[str]) -> int:
    a = parse(argv)
    import torch
    import transformers

    torch.manual_seed(0)  # where generation_config.json of a model says to draw tokens
    transformers.logging.set_verbosity_error()
    asked = list(models(a))
    said: dict[str, Turns] = {}
    for question in prompts_of(a.prompts) if a.prompts else typed():
        if a.prompts:
            print(f"> {question[-1]['content']}")
        if a.prompts or not question:
            said.clear()
        for name, model, tokenizer, context in asked if question else ():
            turns = said.setdefault(name, [])
            turns += question
            if a.beside:
                print(f"[{name}]")
            with context():
                turns.append({"role": "assistant", "content": answer(model, tokenizer, turns, a.tokens)})
        print(flush=True)
    return 0
