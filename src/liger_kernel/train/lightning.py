"""``--trainer lightning``: the run in Lightning's ``Trainer``, on one device or with DDP.

Rows, their order, the weight of each token, optimizer and schedule are the same as in the other
trainers.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from liger_kernel.train.checkpoint import torn
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.folder import record
from liger_kernel.train.measure import Pace, PeakMemory, as_clock
from liger_kernel.train.metrics import Endpoint, Reports, of_lines, of_run
from liger_kernel.train.model import save
from liger_kernel.train.optimizer import optimizer_of, scheduler
from liger_kernel.train.ranks import News, Preempted, Ranks, Watch, local_rank, restarts
from liger_kernel.train.resume import UNMOVED, accept, configured, finished, numbers, seed_all
from liger_kernel.train.rows import Data

try:
    import lightning as L
    from lightning.fabric.plugins import TorchCheckpointIO  # the trainer's own class is this one
except ImportError as error:
    raise UserError("trainer lightning needs lightning: pip install lightning") from error

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-true", "bf16-mixed": "bf16-mixed"}


class _Parts(IterableDataset):
    """This rank's batches of every step that is left, each with the number of tokens that the
    step learns from, a rank."""

    def __init__(self, config: TrainConfig, data: Data, ranks: Ranks, rows: int, done: Any):
        self.config, self.data, self.ranks, self.rows, self.done = config, data, ranks, rows, done

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step in range(self.done(), self.config.steps):
            picks = self.data.picks(step * self.rows, self.rows, self.config.seed)
            items = max(1, self.data.rows.count(picks)[1]) / self.ranks.world
            for batch in self.data.batches(picks, self.ranks.rank, self.ranks.world, self.config.batch):
                yield batch | {"num_items_in_batch": items}


class _Tensors(TorchCheckpointIO):
    """Reads tensors and plain values, and nothing that runs when it is unpickled;
    ``weights_only`` of ``Trainer.fit`` is as young as Lightning 2.6."""

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        try:
            return torch.load(path, map_location=map_location or "cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise UserError(
                f"checkpoint {path} is damaged, or holds objects other than tensors and plain values, which are not "
                "loaded: remove it"
            ) from error


class _Module(L.LightningModule):
    def __init__(self, config: TrainConfig, model: Any, parts: int):
        super().__init__()
        self.config, self.model, self.parts = config, model, parts

    @property
    def strict_loading(self) -> bool:
        return False  # a frozen base is in no checkpoint; ``on_load_checkpoint`` sees to the rest

    def _trained(self) -> set[str]:
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        return trained if len(trained) < sum(1 for _ in self.parameters()) else set(self.state_dict())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trained = self._trained()
        checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name in trained}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        there, mine = checkpoint["state_dict"].keys(), self._trained()
        if strange := sorted(mine - there) or sorted(there - mine - self.state_dict().keys()):
            raise UserError(
                "checkpoint does not fit this model: only one of the two has "
                f"{', '.join(strange[:3])}{' ...' if len(strange) > 3 else ''}"
            )

    def training_step(self, batch: dict[str, Any], index: int) -> Tensor:
        return self.model(**batch, use_cache=False).loss * self.parts  # Lightning takes the mean of the parts of a step

    def validation_step(self, batch: dict[str, Any], index: int) -> None:
        learnt = (batch["labels"][:, 1:] != -100).sum()
        self.evaluated += torch.stack((self.model(**batch, use_cache=False, num_items_in_batch=1).loss.float(), learnt))

    def on_validation_epoch_start(self) -> None:
        self.evaluated = torch.zeros(2, device=self.device)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        # Lightning's own refuses fused optimizers under bf16-mixed, as they scale gradients
        # themselves; nothing is scaled here
        if gradient_clip_val:
            torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = optimizer_of(self.model.parameters(), self.config)
        self.numbers = numbers(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler(optimizer, self.config), "interval": "step"},
        }


class _Lines(L.Callback):
    """Keeps the numbers of every step, watches over the run, and stops it on SIGTERM."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        stop: threading.Event,
        watch: Watch,
        pace: Pace,
        endpoint: Endpoint | None,
        reports: Reports | None,
        folder: Path,
    ):
        self.config, self.ranks, self.stop, self.watch, self.pace, self.folder = (
            config,
            ranks,
            stop,
            watch,
            pace,
            folder,
        )
        self.endpoint, self.reports = endpoint, reports
        self.news = News(ranks)
        self.lines: list[dict[str, Any]] = []  # loss and gradient norm on the device
        self.evaluations: list[dict[str, float]] = []
        self.preempted = False

    def on_train_start(self, trainer: Any, module: Any) -> None:
        record(self.config, self.ranks, trainer.global_step)
        self.seen, self.begun, self.loss, self.started = trainer.global_step, -1, 0.0, time.perf_counter()
        self.pace.begin(trainer.global_step)
        configured(trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler, module.numbers)
        # a step ends where batches so far divide by its parts: of a checkpoint, steps may have had
        # another number of these
        if trainer.global_step:
            batches = trainer.fit_loop.epoch_loop.batch_progress
            for count in (batches.total, batches.current):
                open_ = count.ready - count.completed
                count.ready = count.started = count.processed = trainer.global_step * module.parts
                count.completed = count.ready - open_

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if trainer.global_step != self.begun:  # of dropout: what was drawn before, or before a restart, plays no part
            self.begun = trainer.global_step
            seed_all(self.config.seed, self.begun, self.ranks.rank)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        self.lr = float(optimizer.param_groups[0]["lr"])  # of torchao's a tensor, on the CPU

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.loss = self.loss + outputs["loss"].detach()  # of a part
        if trainer.global_step == self.seen:
            return
        self.seen = step = trainer.global_step
        self.lines.append({"step": step, "loss": self.loss, "grad_norm": self.norm, "lr": self.lr})
        self.loss = 0.0
        self.watch.progress()
        self.pace.made(step)
        if step % self.config.log_every == 0 or step == self.config.steps:
            self.fetch()
        every, last = self.config.checkpoint_every, step == self.config.steps
        if every and self.news.exchange(self.stop.is_set(), -1)[0] and not last:
            self.preempted = trainer.should_stop = True
        if every and (step % every == 0 or last or self.preempted):
            self.save(trainer)

    def save(self, trainer: Any) -> None:
        """Write a checkpoint, all of it or none, and remove those beyond ``checkpoint_keep``.
        Its own callback keeps names that a save by hand upsets."""
        new = self.folder / "writing.tmp"
        if self.ranks.first:
            new.unlink(missing_ok=True)
        trainer.save_checkpoint(new)
        if self.ranks.first:
            with new.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(new, self.folder / f"step-{trainer.global_step:08d}.ckpt")
            for old in checkpoints(self.folder)[: -self.config.checkpoint_keep]:
                old.unlink()

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self.watch.progress()

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        total = module.evaluated.clone()
        if self.ranks.world > 1:
            torch.distributed.all_reduce(total)
        self.evaluations.append({"step": trainer.global_step, "loss": float(total[0] / total[1].clamp(min=1))})

    def fetch(self) -> None:
        for line in self.lines:
            if isinstance(line["loss"], Tensor):  # not fetched yet
                loss = line["loss"].clone()
                if self.ranks.world > 1:
                    torch.distributed.all_reduce(loss)
                line["loss"], line["grad_norm"] = float(loss) / self.ranks.world, float(line["grad_norm"])
                if self.reports:
                    self.reports.send(line)
            for name in ("loss", "grad_norm"):
                if not math.isfinite(line[name]):
                    raise UserError(
                        f"the {name.replace('grad_', 'gradient ')} is {line[name]} at step {line['step']}: lower the "
                        "learning rate, or look at the data"
                    )
        if self.endpoint and self.lines:
            self.endpoint.values, self.endpoint.progress = self.lines[-1] | {"restarts": restarts()}, time.time()
        if self.ranks.first and self.lines:
            step = self.lines[-1]["step"]
            each = (time.perf_counter() - self.started) / max(1, len(self.lines))
            eta = f"  ETA {as_clock((self.config.steps - step) * each)}" if step < self.config.steps else ""
            print(f"step {step}/{self.config.steps}  loss {self.lines[-1]['loss']:.4f}{eta}", flush=True)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints, the newest last; earlier releases wrote only last.ckpt."""
    return [*folder.glob("last.ckpt"), *sorted(folder.glob("step-*.ckpt"))]


def newest(folder: Path) -> Path | None:
    """The newest intact checkpoint; ``UserError`` if there are checkpoints and none is intact."""
    found = checkpoints(folder)
    for path in reversed(found):
        why = torn(path)
        if why is None:
            return path
        print(f"ignoring checkpoint {path}: it {why}", file=sys.stderr)
    if found:
        raise UserError(f"no checkpoint in {folder} is complete: restore one, or move the folder away to start again")
    return None


def run(
    config: TrainConfig,
    data: Data,
    model: Any,
    device: torch.device,
    precision: str,
    ranks: Ranks,
    stop: threading.Event,
) -> dict[str, Any]:
    """Train and save as ``config`` says; returns the content of ``metrics.json``."""
    folder = Path(config.out) / "checkpoints-lightning"
    last = ranks.agreed(newest(folder) if ranks.first else None)
    rows = accept(config, data, model, ranks, folder, last)
    parts = math.ceil(math.ceil(rows / ranks.world) / config.batch)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))  # ranks on this machine
    memory, pace = (
        PeakMemory(device),
        Pace(lambda step: data.tokens_of((step - 1) * rows, step * rows, config.seed), config.steps),
    )
    endpoint = (
        Endpoint(config.metrics_host, config.metrics_port + local_rank(), ranks.rank) if config.metrics_port else None
    )
    module = _Module(config, model, parts)
    mine = [
        batch
        for start in range(0, len(data.eval), config.batch * ranks.world)
        for batch in data.batches(
            data.eval[start : start + config.batch * ranks.world], ranks.rank, ranks.world, config.batch
        )
    ]
    reports = Reports(config, config.shown()) if ranks.first and config.reports else None
    try:
        with Watch(Path(config.out), ranks.rank, config.timeout) as watch:
            lines = _Lines(config, ranks, stop, watch, pace, endpoint, reports, folder)
            trainer = L.Trainer(
                accelerator="gpu" if device.type == "cuda" else "cpu",
                devices=[device.index or 0] if device.type == "cuda" and ranks.world == 1 else here,
                num_nodes=ranks.world // here,
                strategy="ddp" if config.parallel == "ddp" else "auto",
                precision=PRECISIONS[precision],
                max_steps=config.steps,
                accumulate_grad_batches=parts,
                gradient_clip_val=config.grad_clip or None,
                callbacks=[lines],
                plugins=[_Tensors()],
                enable_checkpointing=False,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                num_sanity_val_steps=0,
                val_check_interval=config.eval_every * parts if config.eval_every and mine else None,
                limit_val_batches=1.0 if config.eval_every and mine else 0,
                check_val_every_n_epoch=None,
            )
            # SIGTERM is ours: Lightning's handler would end the run at the next batch, before ranks
            # agree on a step to save
            trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]  # its handlers would take the place of ours
            memory.start()
            trainer.fit(
                module,
                DataLoader(_Parts(config, data, ranks, rows, lambda: trainer.global_step), batch_size=None),
                DataLoader(mine, batch_size=None) if mine else None,  # type: ignore[arg-type]  # batches are an iterable, which is enough
                ckpt_path=last,
            )
            lines.news.last()
            memory.pause()
            speed = pace.read()
            lines.fetch()
            if lines.preempted:
                raise Preempted(f"stopped after step {trainer.global_step} by SIGTERM; checkpoint: {folder}")
            if lines.lines and mine and (not lines.evaluations or lines.evaluations[-1]["step"] != config.steps):
                trainer.limit_val_batches = 1.0
                trainer.validate(module, DataLoader(mine, batch_size=None), verbose=False)  # type: ignore[arg-type]  # batches are an iterable, which is enough
            if config.save:
                save(model, data.tokenizer, config.save, ranks.first)
    finally:
        for open_ in (endpoint, reports):
            if open_:
                open_.close()
    if not lines.lines:
        return (
            finished(config, ranks)
            or of_run(config, model, device, precision, ranks.world, memory) | of_lines([]) | UNMOVED
        )
    return (
        of_run(config, model, device, precision, ranks.world, memory)
        | of_lines(lines.lines)
        | speed
        | {"evaluations": lines.evaluations}
    )
