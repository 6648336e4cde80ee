"""Runs of a tiny model on a CPU, of which tests change what they are about."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from liger_kernel.train.config import TrainConfig, UserError

TEXT = "def add(a, b):\n    return a + b\n\n"
MODEL: dict[str, Any] = dict(hidden=32, heads=2, kv_heads=1, layers=1)
STEPS: dict[str, Any] = dict(length=24, batch=4, steps=3, warmup=1, lr=1e-2, log_every=1)
RUN = MODEL | STEPS | dict(vocab=300, device="cpu")


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


# of other packages
OTHER_TRAINERS = [
    pytest.param(name, marks=needs(of)) for name, of in (("hf", "accelerate"), ("lightning", "lightning"))
]


def write_jsonl(path: Path, records: Iterable[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def small_run(folder: Path, records: Iterable[Any], **changes: Any) -> TrainConfig:
    """A run in ``folder`` on these records; its tokens are kept there, too."""
    places = dict(out=str(folder / "run"), cache=str(folder / "cache"))
    return TrainConfig(**RUN | places | dict(data=write_jsonl(folder / "text.jsonl", records)) | changes)


def save_model(folder: Path, tokenizer: Any, kind: str = "Llama", dtype: str = "float32", **sizes: Any) -> str:
    """The folder with a model of one layer, the same each time, and its tokenizer."""
    import torch
    import transformers

    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    small |= dict(num_key_value_heads=1, vocab_size=len(tokenizer))
    torch.manual_seed(0)
    form = getattr(transformers, f"{kind}Config")(**small | sizes)
    getattr(transformers, f"{kind}ForCausalLM")(form).to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def saved(config: TrainConfig) -> bytes:
    """The model or the adapters that a run has saved."""
    (path,) = Path(config.save or "").glob("*model.safetensors")
    return path.read_bytes()


def forget_the_newest(config: TrainConfig) -> None:
    """Remove the newest checkpoint of a run, and what it has saved."""
    folder = Path(config.out) / ("checkpoints" if config.trainer == "torch" else f"checkpoints-{config.trainer}")
    newest = max(folder.glob("*-*[0-9]*"), key=lambda path: int(path.stem.rpartition("-")[2]))
    newest.unlink() if newest.is_file() else shutil.rmtree(newest)
    if config.save:
        shutil.rmtree(config.save)


def resumed_alike(config: TrainConfig) -> dict[str, Any]:
    """What a run says, of which a second start from the checkpoint before the newest has the bits:
    losses, those of the steps that it makes at least, and what is saved."""
    from liger_kernel.train import loop

    expected = loop.train(config)
    whole = saved(config)
    forget_the_newest(config)
    again = loop.train(config)["losses"]
    assert again and again == expected["losses"][-len(again) :] and saved(config) == whole
    return expected


def refused(said: str, call: Callable[..., Any], /, *given: Any, **named: Any) -> None:
    """The call is a mistake of the user's, whose text matches ``said``."""
    with pytest.raises(UserError, match=said):
        call(*given, **named)
