"""The model card beside what a run has saved: how to load it, and how it was trained; and what to
type next."""

from __future__ import annotations

import io
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from liger_kernel.train.adapters import described
from liger_kernel.train.config import TrainConfig
from liger_kernel.train.files import write
from liger_kernel.train.mistakes import note
from liger_kernel.train.preview import rows_of
from liger_kernel.train.redact import in_a_line, redacted
from liger_kernel.train.trained import QUANTIZE

CARD, PICTURE = "README.md", "loss.png"
# cards with one of these are replaced: our own, and the empty form that PEFT writes
MARK, FORM = "<!-- written by liger-kernel, which replaces this file -->", "[More Information Needed]"
# library and words, of adapters (True) and of models
KINDS = {True: ("peft", "Adapters of"), False: ("transformers", "A fine-tune of")}
TEXT = Path(__file__).with_name("card.template")


def finish(config: TrainConfig, metrics: dict[str, Any]) -> None:
    """Leave a card beside what a run has saved, and say what to do with it."""
    if not config.save:
        print("the model is not saved: --save FOLDER saves it")
        return
    try:
        _write_trained(config, Path(config.save), metrics)
    # what only informs must not end a run
    except Exception as error:
        note(f"no model card: {in_a_line(error)}")
    print(f"{'adapters' if config.lora else 'model'} in {config.save}")
    if config.lora and not config.model:  # the random weights of their base are in no file
        return
    options = ["--quantize", config.quantize] if config.quantize in QUANTIZE else []
    options += ["--trust-remote-code"] * config.trust_remote_code
    beside = ["--beside", config.model] if config.model else []
    merge = ["liger", "merge", config.save, "--out", f"{config.save.rstrip('/')}-merged", *options]
    for command in [["liger", "chat", config.save, *beside, *options], *([merge] if config.lora else [])]:
        print(f"  next: {shlex.join(command)}")


def _write_trained(config: TrainConfig, folder: Path, metrics: dict[str, Any]) -> None:
    """A card that somebody has written stays."""
    from huggingface_hub import ModelCardData

    old = _text(folder)
    losses = metrics["losses"]
    if not losses or (old and MARK not in old and FORM not in old):
        return
    # somebody's picture stays, too
    draws = MARK in old or not (folder / PICTURE).exists()
    # our own trainer has every step, the others have means of the steps of a line
    every = 1 if config.trainer == "torch" else config.log_every
    steps = metrics.get("steps", config.steps)
    library, kind = KINDS[bool(config.lora)]
    data = ModelCardData(library_name=library, pipeline_tag="text-generation", tags=["liger-kernel"])
    if config.model and not Path(config.model).exists():  # an id of the hub
        data.base_model = config.model
    text = TEXT.read_text(encoding="utf-8").format(
        data=data.to_yaml(),
        mark=MARK,
        name=folder.absolute().name,
        kind=kind,
        base=_public(config.model or "random weights"),
        source=_public(config.data),
        config=config,
        rows=rows_of(config, metrics["ranks"]),
        steps=steps,
        trained=described(config) if config.lora else "all weights",
        first=losses[0],
        last=losses[-1],
        evaluated="".join(f", {e['loss']:.4f} on rows kept back" for e in metrics["evaluations"][-1:]),
        picture=_draw([steps - every * i for i in range(len(losses))][::-1], losses, folder / PICTURE) if draws else "",
    )
    write(folder / CARD, text)


def write_merged(folder: Path, trained: Path, name: str) -> None:
    """The card of a merged model, from that of the adapters, if it is ours."""
    text, old = _text(trained), trained.absolute().name
    if MARK in text:
        names = ((f"# {old}\n", f"# {name}\n"), (f'"{old}"', f'"{name}"'))
        for before, after in (*zip(KINDS[True], KINDS[False]), *names):
            text = text.replace(before, after, 1)
        write(folder / CARD, text)
        if (trained / PICTURE).is_file():
            shutil.copy(trained / PICTURE, folder / PICTURE)


def _text(folder: Path) -> str:
    return (folder / CARD).read_text(encoding="utf-8", errors="replace") if (folder / CARD).is_file() else ""


def _public(name: str) -> str:
    """A name without the folders that lead to it, which nobody else has."""
    return Path(name).absolute().name if Path(name).exists() else redacted(name)


def _draw(steps: list[int], losses: list[float], path: Path) -> str:
    """Draw the losses, and return what shows them; nothing without matplotlib."""
    try:
        write(path, curves({"loss": (steps, losses)}, "png", xlabel="step", ylabel="loss"))
    except ImportError:
        return ""
    return f"\n![loss of each step]({PICTURE})\n"


def curves(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], form: str, **axes: Any) -> bytes:
    """A picture of lines: name -> (x, y). ``axes``: what ``Axes.set`` of matplotlib takes."""
    from matplotlib.figure import Figure

    figure, picture = Figure(figsize=(7, 3), layout="constrained"), io.BytesIO()
    shown = figure.subplots(subplot_kw=axes)
    for name, (x, y) in lines.items():
        shown.plot(x, y, label=name, gid=name.replace(" ", "-"))
    if len(lines) > 1:
        shown.legend()
    figure.savefig(picture, format=form, dpi=120)
    return picture.getvalue()
