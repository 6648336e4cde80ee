"""``--trainer hf``: the run in Transformers' ``Trainer``, with DDP, FSDP2 or DeepSpeed by its own
arguments.

TokenRows, their order, the weight of each token, optimizer and schedule are the same as in the other
trainers.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import TrainerState

from liger_kernel.train.checkpoint import first_whole, step_of, torn
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.files import read_object
from liger_kernel.train.model import replacing
from liger_kernel.train.redact import in_a_line
from liger_kernel.train.session import Following, Session, accept, configured, numbers, optimizer_of, scheduler


class _Places(Dataset):
    """Row numbers by their place in the order of training, or the rows kept back."""

    def __init__(self, pick: Any, count: int):
        self.pick, self.count = pick, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> int:
        return self.pick(place)


class _Trainer(transformers.Trainer):
    def __init__(self, config: TrainConfig, **options: Any):
        self.config = config
        super().__init__(**options)

    def _get_train_sampler(self, *args: Any) -> Sampler:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]  # it only needs a length

    def create_optimizer(self, *args: Any, **options: Any) -> torch.optim.Optimizer:
        if self.optimizer is None:
            model: Any = self.model
            self.optimizer = optimizer_of(model.parameters(), self.config)
            self.numbers = numbers(self.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            optimizer = optimizer or self.optimizer
            self.lr_scheduler = scheduler(optimizer, self.config)
        return self.lr_scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            configured(self.optimizer, self.lr_scheduler, self.numbers)


class _HFCallback(transformers.TrainerCallback):
    """Keeps what the trainer logs, watches over it, and stops it on SIGTERM."""

    def __init__(self, run: Following):
        self.run, self.steps = run, run.session.config.steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run.begin(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run.seed(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.run.made(state.global_step):
            control.should_save = control.should_training_stop = True
        if self.run.preempted or state.global_step == self.steps:
            control.should_log = True

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self.run.watch.progress()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        logs, step = logs or {}, state.global_step
        if "eval_loss" in logs:
            self.run.evaluations.append({"step": step, "loss": logs["eval_loss"]})
        if "loss" not in logs or "learning_rate" not in logs:
            return
        norm = logs.get("grad_norm", math.nan)
        self.run.lines.append({"step": step, "loss": logs["loss"], "grad_norm": norm, "lr": logs["learning_rate"]})
        self.run.logged(self.run.lines[-1], logs.get("grad_norm", 0.0))


def deepspeed(stage: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a ZeRO stage; values that are "auto" follow from the run."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    auto = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        "auto",
    )
    return auto | {
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }


def arguments(session: Session, folder: Path, rows: int) -> transformers.TrainingArguments:
    """The run as Transformers' arguments. Raises ``UserError`` for what its ``Trainer`` does not
    have."""
    config, together = session.config, session.config.batch * session.ranks.world
    accumulate, rest = divmod(rows, together)
    if rest:
        raise UserError(f"with trainer hf, global_batch must be a multiple of batch x ranks = {together}, got {rows}")
    how: dict[str, Any] = {}
    if config.parallel == "fsdp2":
        how = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2}}
    elif config.parallel.startswith("deepspeed-z"):
        how = {"deepspeed": deepspeed(int(config.parallel[-1]))}
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch,
        per_device_eval_batch_size=config.batch,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=config.grad_clip,
        bf16=session.precision == "bf16-mixed",
        use_cpu=session.device.type == "cpu",
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        save_strategy="steps" if config.checkpoint_every else "no",
        save_steps=config.checkpoint_every or 500,
        save_total_limit=config.checkpoint_keep,
        eval_strategy="steps" if config.eval_every and (config.eval_data or config.eval_fraction) else "no",
        eval_steps=config.eval_every or None,
        prediction_loss_only=True,
        report_to="none",
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        seed=config.seed,
        **how,
    )
    # one process, several GPUs: transformers would spread a batch of each over them by DataParallel
    if args.n_gpu > 1:
        args._n_gpu = 1
    return args


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    paths = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()]
    return first_whole(sorted(paths, key=step_of, reverse=True), damage)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint of Transformers' Trainer, for every backend; None if
    nothing is."""
    try:
        other = next(
            (each for each in path.rglob("*") if each.is_symlink() or not (each.is_file() or each.is_dir())), None
        )
        if other:
            raise ValueError(f"{other} is no regular file")
        # Transformers writes this file last
        read_object(path / "trainer_state.json", global_step=range(step_of(path), step_of(path) + 1))
        TrainerState.load_from_json(str(path / "trainer_state.json"))
    # Transformers raises what it likes for other names and types
    except Exception as error:
        return f"{type(error).__name__}: {in_a_line(error)}"
    return next((f"{file.name} {why}" for file in sorted(path.glob("*.pt*")) if (why := torn(file))), None)


def run(session: Session) -> dict[str, Any]:
    """Train and save as the config says; returns the content of ``metrics.json``. A line is the
    mean of ``log_every`` steps."""
    data, ranks, folder = session.data, session.ranks, Path(session.config.out) / "checkpoints-hf"
    last = ranks.by_first(lambda: newest(folder))
    rows = accept(session, folder, last)
    config = session.config
    args = arguments(session, folder, rows)
    with Following(session, rows) as following:
        trainer = _Trainer(
            config,
            model=session.model,
            args=args,
            train_dataset=_Places(lambda place: data.picks(place, 1, config.seed)[0], config.steps * rows),
            eval_dataset=_Places(lambda i: data.eval[i], len(data.eval)) if data.eval else None,
            data_collator=lambda picks: data.rows.batch(picks, data.pad),
            callbacks=[_HFCallback(following)],
        )
        following.memory.start()
        trainer.train(resume_from_checkpoint=str(last) if last else None)
        speed = following.end(trainer.state.global_step, folder)
        if following.lines and data.eval and not following.evaluated:
            trainer.evaluate()
        if config.save:
            with replacing(config.save) if ranks.first else contextlib.nullcontext() as aside:
                trainer.save_model(ranks.agreed(aside))
                if ranks.first:
                    data.tokenizer.save_pretrained(aside)
    return following.metrics(speed)
