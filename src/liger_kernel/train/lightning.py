"""``--trainer lightning``: the run in Lightning's ``Trainer``, on one device or with DDP.

TokenRows, their order, the weight of each token, optimizer and schedule are the same as in the other
trainers.
"""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from liger_kernel.train.checkpoint import first_whole, none_is_complete, torn
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.measure import as_clock
from liger_kernel.train.mistakes import needs
from liger_kernel.train.model import save
from liger_kernel.train.session import Following, Session, accept, configured, numbers, optimizer_of, scheduler

with needs("trainer lightning", "lightning"):
    import lightning as L

    # ``Trainer`` uses this class by default
    from lightning.fabric.plugins import TorchCheckpointIO

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-true", "bf16-mixed": "bf16-mixed"}


class _Batches(IterableDataset):
    """This rank's batches of every step that is left, each with the number of tokens that the
    step learns from, a rank."""

    def __init__(self, session: Session, rows: int, done: Callable[[], int]):
        self.session, self.rows, self.done = session, rows, done

    def __iter__(self) -> Iterator[dict[str, Any]]:
        config, data, ranks = self.session.config, self.session.data, self.session.ranks
        for step in range(self.done(), config.steps):
            picks = data.picks(step * self.rows, self.rows, config.seed)
            items = max(1, data.rows.count(picks)[1]) / ranks.world
            for batch in data.batches(picks, ranks.rank, ranks.world, config.batch):
                yield batch | {"num_items_in_batch": items}


class _SafeCheckpointIO(TorchCheckpointIO):
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
        # a frozen base is in no checkpoint; ``on_load_checkpoint`` sees to the rest
        return False

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
        # Lightning takes the mean of the parts of a step
        return self.model(**batch, use_cache=False).loss * self.parts

    def validation_step(self, batch: dict[str, Any], index: int) -> None:
        targets = (batch["labels"][:, 1:] != -100).sum()
        loss = self.model(**batch, use_cache=False, num_items_in_batch=1).loss
        self.evaluated += torch.stack((loss.float(), targets))

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


class _LightningCallback(L.Callback):
    """Keeps the numbers of every step, watches over the run, and stops it on SIGTERM."""

    def __init__(self, run: Following, folder: Path):
        self.run, self.config, self.ranks, self.folder = run, run.session.config, run.session.ranks, folder

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.run.begin(trainer.global_step)
        self.step, self.begun, self.loss, self.started = trainer.global_step, -1, 0.0, time.perf_counter()
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
        if trainer.global_step != self.begun:
            self.begun = trainer.global_step
            self.run.seed(self.begun)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        # torchao's learning rate is a tensor on the CPU
        self.lr = float(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        # the loss of one part of the step
        self.loss = self.loss + outputs["loss"].detach()
        if trainer.global_step == self.step:
            return
        self.step = step = trainer.global_step
        # loss and gradient norm stay on the device until they are logged
        self.run.lines.append({"step": step, "loss": self.loss, "grad_norm": self.norm, "lr": self.lr})
        self.loss = 0.0
        stop, every, last = self.run.made(step), self.config.checkpoint_every, step == self.config.steps
        if step % self.config.log_every == 0 or last:
            self.fetch()
        if stop:
            trainer.should_stop = True
        if every and (step % every == 0 or last or stop):
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
        self.run.watch.progress()

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        total = self.summed(module.evaluated)
        self.run.evaluations.append({"step": trainer.global_step, "loss": float(total[0] / total[1].clamp(min=1))})

    def summed(self, numbers: Tensor) -> Tensor:
        """Over all ranks."""
        total = numbers.clone()
        if self.ranks.world > 1:
            torch.distributed.all_reduce(total)
        return total

    def fetch(self) -> None:
        lines = self.run.lines
        for line in lines:
            # a tensor has not been fetched yet
            if isinstance(line["loss"], Tensor):
                line["loss"] = float(self.summed(line["loss"])) / self.ranks.world
                line["grad_norm"] = float(line["grad_norm"])
                self.run.logged(line, line["grad_norm"])
        if self.ranks.first and lines:
            step = lines[-1]["step"]
            each = (time.perf_counter() - self.started) / max(1, len(lines))
            eta = f"  ETA {as_clock((self.config.steps - step) * each)}" if step < self.config.steps else ""
            print(f"step {step}/{self.config.steps}  loss {lines[-1]['loss']:.4f}{eta}", flush=True)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints, the newest last."""
    return sorted(folder.glob("step-*.ckpt"))


def newest(folder: Path) -> Path | None:
    """The newest intact checkpoint; ``UserError`` if there are checkpoints and none is intact."""
    there = checkpoints(folder)
    found = first_whole(reversed(there), torn)
    if there and not found:
        raise none_is_complete(folder)
    return found


def run(session: Session) -> dict[str, Any]:
    """Train and save as the config says; returns the content of ``metrics.json``."""
    data, ranks, device = session.data, session.ranks, session.device
    folder = Path(session.config.out) / "checkpoints-lightning"
    last = ranks.by_first(lambda: newest(folder))
    rows = accept(session, folder, last)
    config = session.config
    parts = math.ceil(math.ceil(rows / ranks.world) / config.batch)
    # the number of ranks on this machine
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))
    module = _Module(config, session.model, parts)
    together = config.batch * ranks.world
    held = [data.eval[start : start + together] for start in range(0, len(data.eval), together)]
    mine = [batch for picks in held for batch in data.batches(picks, ranks.rank, ranks.world, config.batch)]
    evaluates = bool(config.eval_every and mine)
    loader = lambda batches: DataLoader(batches, batch_size=None)
    with Following(session, rows) as following:
        lines = _LightningCallback(following, folder)
        trainer = L.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=[device.index or 0] if device.type == "cuda" and ranks.world == 1 else here,
            num_nodes=ranks.world // here,
            strategy="ddp" if config.parallel == "ddp" else "auto",
            precision=PRECISIONS[session.precision],
            max_steps=config.steps,
            accumulate_grad_batches=parts,
            gradient_clip_val=config.grad_clip or None,
            callbacks=[lines],
            plugins=[_SafeCheckpointIO()],
            enable_checkpointing=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            val_check_interval=config.eval_every * parts if evaluates else None,
            limit_val_batches=1.0 if evaluates else 0,
            check_val_every_n_epoch=None,
        )
        # SIGTERM is ours: Lightning's handler would end the run at the next batch, before ranks
        # agree on a step to save
        connector: Any = trainer._signal_connector
        connector.register_signal_handlers = lambda: None
        following.memory.start()
        todo = _Batches(session, rows, lambda: trainer.global_step)
        trainer.fit(module, loader(todo), loader(mine) if mine else None, ckpt_path=last)
        lines.fetch()
        speed = following.end(trainer.global_step, folder)
        if following.lines and mine and not following.evaluated:
            trainer.limit_val_batches = 1.0
            trainer.validate(module, loader(mine), verbose=False)
        if config.save:
            save(session.model, data.tokenizer, config.save, ranks.first)
    return following.metrics(speed)
