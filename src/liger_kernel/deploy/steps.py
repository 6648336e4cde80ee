"""The steps of a workflow as plain functions. Each takes a configuration and folders, and
returns a folder. The tasks of Flyte 1 and 2 call them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import html
import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.files import write
from liger_kernel.train.redact import redacted

METRICS = ("metrics.json", "metrics.jsonl")


def prepare(config: TrainConfig, folder: Path) -> Path:
    """Tokenise the data into ``folder``."""
    from liger_kernel.train import data

    return data.prepare(config, folder)


def warm(config: TrainConfig, arch: str | None, folder: Path) -> Path:
    """Compile the kernels that training needs on ``arch`` into ``folder``, without a GPU. Does
    nothing if ``arch`` is None or the model is not known yet."""
    folder.mkdir(parents=True, exist_ok=True)
    if arch and config.model and config.kernels == "on":
        from liger_kernel import warmup

        os.environ["TRITON_CACHE_DIR"] = str(folder)
        config.save_to(folder / "train.json")
        warmup.main(["--config", str(folder / "train.json"), "--arch", arch])
    return folder


def private(name: str) -> Path:
    """The folder ``name`` in the temporary folder, created if it does not exist. Other users can
    neither read it nor write to it.

    Raises ``UserError`` if it is a link, belongs to another user, or is writable for others: its
    name is predictable, so anyone may have created it.
    """
    folder = Path(tempfile.gettempdir()) / name
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if hasattr(os, "geteuid"):  # on other systems, each user has a temporary folder
        found = folder.lstat()
        wrong = {
            "is no folder": not stat.S_ISDIR(found.st_mode),
            f"belongs to user {found.st_uid}": found.st_uid != os.geteuid(),
            "can be written to by others": found.st_mode & 0o022,
        }
        if why := next((why for why, holds in wrong.items() if holds), None):
            raise UserError(f"{folder} {why}: remove it, or set TMPDIR to a folder of your own")
        folder.chmod(0o700)
    return folder


def once(source: str, fetch: Callable[[str], Any]) -> Path:
    """A local folder that ``fetch(folder)`` has filled from ``source``. If several processes
    call this, one fetches and the others wait."""
    from filelock import FileLock

    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    folder = private(f"liger-{user}") / hashlib.sha256(source.encode()).hexdigest()[:16]
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            aside = folder.with_name(folder.name + ".tmp")
            fetch(str(aside))
            aside.rename(folder)
    return folder


def train(config: TrainConfig, data: Path, kernels: Path, processes: int) -> Path:
    """Train on prepared ``data``, and return the folder with the model and its metrics. Rank 0
    should store it.

    It runs as one of the ranks that a platform has started; without a platform, it starts
    ``processes`` here. It continues from the latest checkpoint. Raises ``RuntimeError`` if the run
    failed, so that the platform tries again.
    """
    folder = Path(config.out)
    config = dataclasses.replace(config, data=str(data), save=str(folder / "model"), nproc=None)
    os.environ["LIGER_TRITON_BASE_CACHE"] = str(kernels)
    if "RANK" in os.environ:
        from liger_kernel.train import loop, ranks

        try:
            ranks.reporting(loop.train)(config)
        except ranks.Preempted as stopped:
            raise RuntimeError(str(stopped)) from stopped
    else:
        from liger_kernel.train.ranks import launch_elastic

        code = launch_elastic(dataclasses.replace(config, nproc=processes))
        if code:
            raise RuntimeError(f"liger train ended with {code}")
    if first():
        for name in METRICS:
            write(folder / "model" / name, (folder / name).read_bytes())
    return folder / "model"


def first() -> bool:
    """Whether this is rank 0, or there are no ranks."""
    return os.environ.get("RANK", "0") == "0"


def evaluate(config: TrainConfig, data: Path, run: Path) -> dict[str, Any]:
    """The loss of the saved model on held-out rows, stock and patched. It shows that the saved
    model is the trained model."""
    from liger_kernel.train.loop import evaluate

    config = dataclasses.replace(config, data=str(data), model=str(run))
    scores = evaluate(config)
    return {**scores, "loss_without_kernels": evaluate(dataclasses.replace(config, kernels="off"))["loss"]}


def export(run: Path, scores: dict[str, Any], target: str) -> str:
    """Copy the model, with ``evaluation.json``, to ``target``, a URI for fsspec; returns the
    URI."""
    try:
        import fsspec

        fs, root = fsspec.core.url_to_fs(target)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"cannot export to {target!r}: {error}"
        ) from None  # from None, because the original error may contain credentials
    write(run / "evaluation.json", json.dumps(scores, indent=1) + "\n")
    from liger_kernel.train.store import put

    for path in sorted(run.iterdir()):
        put(fs, path, f"{root}/{path.name}")
    return redacted(target)


def report(run: Path, scores: dict[str, Any]) -> str:
    """A report as HTML: loss and throughput over the steps, and summary numbers."""
    metrics = json.loads((run / "metrics.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [(line["step"], line["tokens_per_second"]) for line in lines if "tokens_per_second" in line]
    shown = {
        "final loss": f"{metrics['losses'][-1]:.4f}",
        "evaluation loss": f"{scores['loss']:.4f}",
        "the same without kernels": f"{scores['loss_without_kernels']:.4f}",
        "tokens/s": f"{metrics['tokens_per_second']:,.0f}",
        "ranks": f"{metrics['ranks']} on {metrics['device']}",
        "restarts": metrics["restarts"],
        "steps skipped": metrics["nonfinite_steps"],
    }
    rows = "".join(
        f"<tr><th align=left>{name}</th><td>{html.escape(str(value))}</td></tr>" for name, value in shown.items()
    )
    losses = [(line["step"], line["loss"]) for line in lines]
    return f"<h2>liger train</h2><table>{rows}</table>{_svg(losses, 'loss')}{_svg(rates, 'tokens per second')}"


def _svg(points: list[tuple[int, float]], name: str) -> str:
    from liger_kernel.train.card import curves

    steps, values = zip(*points)
    text = curves({name: (steps, values)}, "svg", xlabel="step", ylabel=name).decode()
    return text[text.index("<svg") :]
