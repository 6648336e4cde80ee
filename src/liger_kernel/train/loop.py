"""``train(config)``, and our own trainer: plain PyTorch on any number of ranks, which does not
wait for the GPU between two log lines."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_kernel import graphs
from liger_kernel.graphs.updates import Updates
from liger_kernel.train import adamw, adapters, folder, preview
from liger_kernel.train.checkpoint import NUMBERS, Checkpoints
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.data import load
from liger_kernel.train.files import read_object, write
from liger_kernel.train.kernels import Compilations, compile_ahead, use_cache
from liger_kernel.train.measure import UNTIMED, PeakMemory, StepClock, as_clock, peak_flops
from liger_kernel.train.metrics import StepLines, as_json, check_reports
from liger_kernel.train.mistakes import note
from liger_kernel.train.model import (
    attend,
    build,
    check_packing,
    device_and_precision,
    flops_per_token,
    mesh_of,
    mixed,
    save,
    split,
)
from liger_kernel.train.ranks import DelayedReduce, Preempted, Ranks, Stop, joined, restarts, told_to_stop
from liger_kernel.train.session import (
    Observers,
    Session,
    learning_rate,
    not_to_resume,
    optimizer_of,
    refuse_nonfinite,
    refuse_other,
    require,
    seed_all,
)
from liger_kernel.train.store import stored
from liger_kernel.train.token_rows import on

# steps in a row without finite gradients after which `--nonfinite skip` gives up: more data will
# not mend the weights
SKIPS = 10


def train(config: TrainConfig) -> dict[str, Any]:
    """Train, write ``config.out``/metrics.json and return its content: losses of all steps,
    tokens/s, peak memory and more.

    Under torchrun or ``launch_elastic`` this is one rank's part. It continues from the latest
    checkpoint in ``config.out``. Raises ``UserError`` for a configuration that cannot be trained,
    and ``Preempted`` after SIGTERM.
    """
    check_reports(config)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    device, precision = device_and_precision(config)
    adapters.check(config, device)
    require(config)
    check_packing(config)
    # without checkpoints there is nothing to save on SIGTERM, which then ends the process as it
    # always does
    stoppable = told_to_stop() if config.checkpoint_every else contextlib.nullcontext(Stop())
    with contextlib.ExitStack() as stack:
        stop, ranks = stack.enter_context(stoppable), stack.enter_context(joined(config, device))
        stack.enter_context(folder.locked(config, ranks))
        store = stack.enter_context(stored(config, ranks))
        data = stack.enter_context(contextlib.closing(load(config)))
        with explaining(config, device, ranks):
            model = build(config, data.tokenizer, device, precision)
        session = Session(config, data, model, device, precision, ranks, stop, store)
        attention = attend(config, data.rows, model, device, precision)
        data.check(model.config.get_text_config().vocab_size)
        if ranks.first:
            print(preview.summary(session, attention), flush=True)
        if config.dry_run:
            with explaining(config, device, ranks, model.config):
                if ranks.first:
                    preview.show(session)
            return {}
        if device.type == "cuda" and config.kernels == "on":
            use_cache()
            compile_ahead(config, model.config, precision, ranks)
        stop.early = False
        samples = preview.Samples(session)
        with explaining(config, device, ranks, model.config):
            metrics = _trainer(config)(session)
        if ranks.first:
            samples.show()
            if config.lora and (problem := preview.unmoved(metrics["losses"])):
                note(problem)
            if config.graphs:
                note(graphs.report(model))
            write(Path(config.out) / "metrics.json", as_json(metrics, indent=1) + "\n")
        if "problem" in metrics:
            raise OSError(metrics["problem"])
    return metrics


@torch.no_grad()
def evaluate(config: TrainConfig) -> dict[str, Any]:
    """Mean loss (nats) and perplexity over the learnt tokens of the rows kept back, by
    ``config.model``, in one process."""
    device, precision = device_and_precision(config)
    check_packing(config)
    with contextlib.closing(load(config)) as data:
        if not data.eval:
            raise UserError("there are no rows to evaluate on: eval_fraction is 0")
        model = build(config, data.tokenizer, device, precision).eval()
        data.check(model.config.get_text_config().vocab_size)
        attend(config, data.rows, model, device, precision)
        total, (_, tokens) = 0.0, data.rows.count(data.eval)
        for batch in data.batches(data.eval, 0, 1, config.batch):
            with mixed(device, precision):
                total += float(model(**on(device, batch), use_cache=False, num_items_in_batch=1).loss)
        loss, rows = total / max(1, tokens), len(data.eval)
    return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf, "tokens": tokens, "rows": rows}


@contextlib.contextmanager
def explaining(config: TrainConfig, device: torch.device, ranks: Ranks, form: Any = None) -> Iterator[None]:
    """Before an error for lack of memory goes on, say on the first rank what each switch would
    save. ``form``: the model's configuration, if it is there."""
    try:
        yield
    # cuBLAS and other libraries raise a RuntimeError
    except Exception as error:
        lacks = isinstance(error, torch.OutOfMemoryError) or re.search("out of memory|ALLOC_FAILED", str(error))
        if lacks and ranks.first and (form or config.model):
            # needs Triton
            from liger_kernel.train.fit import explained

            free = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
            note(explained(form or config.model, config, free, ranks.world))
        raise


def _trainer(config: TrainConfig) -> Callable[[Session], dict[str, Any]]:
    if config.trainer == "hf":
        from liger_kernel.train import hf

        return hf.run
    if config.trainer == "lightning":
        from liger_kernel.train import lightning

        return lightning.run
    return _own


def _own(session: Session) -> dict[str, Any]:
    config = session.config
    metrics = _Run(**vars(session)).train()
    if config.save:
        save(session.model, session.data.tokenizer, config.save, session.ranks.first)
    return metrics


@dataclasses.dataclass(eq=False)
class _Run(Session):
    """A run in a loop of our own."""

    # the name of one of two runs that take turns, before its lines; these have no time that is left
    label: ClassVar = ""

    @staticmethod
    def pause() -> None:
        """Between two stretches of steps that are timed; ``liger demo`` waits here for its turn."""

    def __post_init__(self) -> None:
        config, model, device, ranks = self.config, self.model, self.device, self.ranks
        self.flops = flops_per_token(model, config.length)
        self.identity  # noqa: B018  # of the whole model
        self.parallel = split(model, config, self.precision, mesh_of(config, device, ranks.world))
        if config.graphs:
            graphs.lend_gradients(model)
        self.autocast = self.precision == "bf16-mixed" and not config.fully_sharded
        self.optimizer = optimizer_of(model.parameters(), config)
        self.in_backward = adamw.InBackward(self.optimizer) if config.optimizer_in_backward else None
        otherwise = config.optimizer_on_cpu or config.optimizer_in_backward or ranks.world > 1
        replayed = config.graphs and self.optimizer.defaults.get("fused") and not otherwise
        self.updates = Updates(self.optimizer, self._clip) if replayed else None
        self.checkpoints = Checkpoints(Path(config.out) / "checkpoints", ranks, config.checkpoint_keep)
        self.step = self.position = self.tokens = self.nonfinite = self.skips = 0
        together = config.batch * self.parallel.data_ranks
        self.rows = config.global_batch or config.accumulate * together
        self.data.rows.multiple = self.parallel.sequence_ranks
        # dropout draws alike on ranks with the same tokens, otherwise on others
        seed_all(config.seed, self._draws)
        self._resume()
        # only here the rows of a step are known: those of the first start
        self.config = config = config.in_steps(self.rows, len(self.data.train))
        self.first = self.step
        if self.in_backward and self.rows > together:
            raise UserError(
                f"optimizer_in_backward needs at most batch x ranks = {together} rows in a step, got global_batch "
                f"{self.rows}: each backward makes a step"
            )
        self.memory, self.timer, self.compilations = PeakMemory(device), StepClock(device), Compilations()
        # of each step since the last log line: (loss, gradient norm) on the device, and the rest of
        # its line
        self.pending: list[tuple[Tensor, dict[str, Any]]] = []
        self.waits: list[float] = []
        self.unlogged = 0
        # these are of the whole run
        self.rates: list[float] = []
        self.times: list[float] = []
        self.seconds = 0.0

    @property
    def _draws(self) -> int:
        """A number that ranks with other tokens have otherwise."""
        return self.parallel.data_rank * self.parallel.sequence_ranks + self.parallel.sequence_rank

    def train(self) -> dict[str, Any]:
        config = self.config
        try:
            with Observers(self) as self.observers:
                folder.record(config, self.ranks, self.step)
                path = Path(config.out) / "metrics.jsonl"
                self.lines = StepLines(path, self.step) if self.ranks.first else None
                if self.device.type == "cuda" and self.step < config.steps:
                    self._rehearse()
                    self.observers.watch.progress()
                self._steps()
        finally:
            self.compilations.close()
        if self.updates:
            note(str(self.updates))
        metrics = self._metrics()
        if self.step == self.first:
            before = self.finished()
            # numbers that were found may be of a run with fewer steps
            return before if before and before["losses"] == metrics["losses"] else metrics
        return metrics

    def _steps(self) -> None:
        config, checkpoints, delayed = self.config, self.checkpoints, DelayedReduce(self.ranks)
        first, every = self.first, config.checkpoint_every
        self.started = self._clock()
        while self.step < config.steps:
            self.pending.append(self._step())
            step, last = self.step, self.step == config.steps
            logged = step % config.log_every == 0 or last
            save = bool(every) and (step % every == 0 or last)
            evaluates = self.data.eval and (last or (config.eval_every and step % config.eval_every == 0))
            evaluation = self._evaluate() if evaluates else None
            if logged or save or evaluates or step - first == UNTIMED:
                self._flush(evaluation, logged, timed=step - first > UNTIMED or config.steps - first <= UNTIMED)
            if save:
                self._save(wait=last or not config.checkpoint_async)
            stop, saved = delayed.exchange(self.stop.is_set(), checkpoints.done)
            if checkpoints.under_way is not None and checkpoints.under_way == saved:
                checkpoints.commit()
            if stop and not last:
                delayed.last()
                self._flush(None, True, timed=False)
                self._save(wait=True)
                if checkpoints.step < step:
                    raise OSError(
                        f"stopped after step {step} by SIGTERM, but its checkpoint could not be written; the newest "
                        f"is of step {checkpoints.step}"
                    )
                raise Preempted(f"stopped after step {step} by SIGTERM; checkpoint: step {checkpoints.step}")
            self.observers.progress()
        delayed.last()
        checkpoints.finish()

    def _batches(self) -> tuple[list[int], list[dict[str, Any]]]:
        """The rows of the next step, and this rank's batches of them."""
        data, parallel = self.data, self.parallel
        picks = data.picks(self.position, self.rows, self.config.seed)
        return picks, data.batches(picks, parallel.data_rank, parallel.data_ranks, self.config.batch)

    def _step(self) -> tuple[Tensor, dict[str, Any]]:
        """One optimizer step; (loss of this rank, gradient norm) on the device, and what the
        host knows of it."""
        self.timer.start()
        started = time.perf_counter()
        picks, batches = self._batches()
        tokens, targets = self.data.rows.count(picks)
        batches = [on(self.device, batch) for batch in batches]
        self.waits.append(time.perf_counter() - started)
        lr = learning_rate(self.config, self.step)
        adamw.set_lr(self.optimizer, lr)
        # every rank knows the rows of all: no collective is needed to weigh tokens alike; gradients
        # are averaged over ranks, hence the division
        loss = self._gradients(batches, max(1, targets) / self.parallel.data_ranks)
        norm = self._update()
        self.timer.stop()
        begin, self.position = self.position, self.position + self.rows
        self.step, self.tokens, self.unlogged = self.step + 1, self.tokens + tokens, self.unlogged + tokens
        line = {"step": self.step, "lr": lr, "tokens": self.tokens, "rows": [begin, self.position]}
        return torch.stack((loss, norm.float().to(loss.device))), line

    def _loss(self, batch: dict[str, Any], items: float) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            return self.parallel.model(**batch, use_cache=False, num_items_in_batch=items).loss

    def _gradients(self, batches: list[dict[str, Any]], items: float) -> Tensor:
        """Backward of every batch's loss; the sum of these."""
        loss = torch.zeros((), device=self.device)
        for i, batch in enumerate(batches):
            with self.parallel.accumulating(last=i + 1 == len(batches)):
                part = self._loss(batch, items)
                part.backward()
            loss += part.detach()
        return loss

    def _update(self, keep: bool = False) -> Tensor:
        """Clip, step and forget the gradients; their norm. Weights and moments stay where it is
        not finite, or with ``keep``."""
        if self.in_backward:
            return self.parallel.total(self.in_backward.norm().double().square(), sequences=True).sqrt()
        if self.updates and not keep:
            norm = self.updates()
        else:
            norm = self._clip(keep)
            # torchao's optimizers have no switch, so the host waits for the norm
            if self.optimizer.defaults.get("fused") or (not keep and bool(torch.isfinite(norm))):
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _clip(self, keep: bool = False) -> Tensor:
        """Clip the gradients, and let a fused step change nothing where their norm is not finite, or with
        ``keep``. The norm."""
        norm = self.parallel.clip_grad_norm_(self.config.grad_clip or None)
        if self.optimizer.defaults.get("fused"):
            # its kernel itself leaves weights and moments alone where this is 1: nobody waits for
            # the norm
            skip = torch.ones_like(norm, dtype=torch.bool) if keep else ~torch.isfinite(norm)
            where = "cpu" if self.config.optimizer_on_cpu else self.device
            fused: Any = self.optimizer
            # as GradScaler says it to an optimizer
            fused.found_inf, fused.grad_scale = skip.to(where, torch.float32), None
        return norm

    def _rehearse(self) -> None:
        """A batch's step that changes nothing: libraries are loaded, plans made and memory
        reserved before the first step that counts."""
        batch = self._batches()[1][0]
        if self.in_backward:
            self.in_backward.on = False
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            self._gradients([on(self.device, batch)], 1.0)
        self._update(keep=True)
        if self.in_backward:
            self.in_backward.on = True

    @torch.no_grad()
    def _evaluate(self) -> float:
        """Mean loss per targets token of the rows kept back. It may store logits, hence is no
        part of the measured memory, nor of the time."""
        before = self._clock()
        self.memory.pause()
        self.parallel.model.eval()
        data, parallel = self.data, self.parallel
        total, together = torch.zeros((), device=self.device), self.config.batch * parallel.data_ranks
        for start in range(0, len(data.eval), together):
            picks = data.eval[start : start + together]
            for batch in data.batches(picks, parallel.data_rank, parallel.data_ranks, self.config.batch):
                total += self._loss(on(self.device, batch), 1)
            self.observers.watch.progress()
        self.parallel.model.train()
        loss = float(parallel.total(total)) / max(1, data.rows.count(data.eval)[1])
        if self.ranks.first:
            print(f"step {self.step}: evaluation loss {loss:.4f}", flush=True)
        self.memory.start()
        self.started += self._clock() - before
        return loss

    def _fetched(self) -> list[dict[str, Any]]:
        """The lines of the steps whose numbers are still on the device."""
        outcomes = torch.stack([outcome for outcome, _ in self.pending])
        # each rank has the loss of its own tokens, divided by the number of all
        if self.parallel.data_ranks > 1:
            outcomes[:, 0] = self.parallel.total(outcomes[:, 0]) / self.parallel.data_ranks
        lines = [
            {**line, "loss": loss, "grad_norm": norm}
            for (_, line), (loss, norm) in zip(self.pending, outcomes.tolist())
        ]
        self.pending.clear()
        return lines

    def _refuse_nonfinite(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            finite = math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"])
            self.skips = 0 if finite else self.skips + 1
            self.nonfinite += not finite
            if self.skips > (SKIPS if self.config.nonfinite == "skip" else 0):
                if self.lines:
                    self.lines.append(lines)
                # a save that is under way is of an earlier, finite step
                self.checkpoints.finish()
                refuse_nonfinite(line["step"], line["loss"], line["grad_norm"])

    def _flush(self, evaluation: float | None, show: bool, timed: bool) -> None:
        """Fetch what the steps since the last time left on the device, write their lines, and
        stop a run that cannot go on."""
        if not self.pending:
            return
        seconds = self._clock() - self.started
        lines = self._fetched()
        if evaluation is not None:
            lines[-1]["eval_loss"] = evaluation
        self._refuse_nonfinite(lines)
        rate, times = self.unlogged / seconds, self.timer.read()
        self.memory.pause()
        if timed:
            self.rates.append(rate)
            self.times += times
        self.seconds += seconds
        peak, checkpoints = peak_flops(self.device, self.precision), self.checkpoints
        saved = checkpoints.step >= 0
        state = {
            **lines[-1],
            "tokens_per_second": rate,
            "mfu": rate * self.flops / peak / self.ranks.world if self.flops and peak else None,
            **_percentiles(times),
            "data_wait_seconds": statistics.mean(self.waits),
            "memory": self.memory.read(),
            "nonfinite_steps": self.nonfinite,
            "restarts": restarts(),
            "checkpoint_step": checkpoints.step if saved else None,
            "checkpoint_time": checkpoints.time if saved else None,
            "seconds_left": (self.config.steps - self.step) * seconds / len(lines),
            "checkpoint_failures": checkpoints.failures + (self.store.failures if self.store else 0),
            "kernels_compiled": self.compilations.count,
        }
        lines[-1] = {name: value for name, value in state.items() if value is not None}
        self.waits.clear()
        self.unlogged = 0
        if self.lines:
            self.lines.append(lines)
        self.observers.publish(state)
        if show and self.ranks.first:
            self._show(state)
        self.pause()
        self.started = self._clock()

    def _show(self, state: dict[str, Any]) -> None:
        text = f"loss {state['loss']:.4f}  {state['tokens_per_second']:,.0f} tokens/s  {state['memory'] / 1e9:.2f} GB"
        if state["mfu"]:
            text += f"  MFU {state['mfu']:.1%}"
        if state["nonfinite_steps"]:
            text += f"  {state['nonfinite_steps']} steps skipped"
        # the estimate leaves out evaluations and checkpoints
        if state["seconds_left"] and not self.label:
            text += f"  ETA {as_clock(state['seconds_left'])}"
        steps = str(self.config.steps)
        print(f"{self.label}step {state['step']:>{len(steps)}}/{steps}  {text}", flush=True)

    def _metrics(self) -> dict[str, Any]:
        lines = list(self.lines.read()) if self.lines else []
        newest = self.checkpoints.step
        metrics = self.metrics(self.memory, lines) | {
            # the median of the stretches between log lines, which other programs disturb less than
            # the mean
            "tokens_per_second": statistics.median(self.rates or [0.0]),
            **_percentiles(self.times),
            "seconds": self.seconds,
            # one number for each stretch
            "rates": self.rates,
            "kernels_compiled": self.compilations.count,
            "nonfinite_steps": self.nonfinite,
            "evaluations": [{"step": line["step"], "loss": line["eval_loss"]} for line in lines if "eval_loss" in line],
        }
        if self.config.checkpoint_every and newest < self.step:
            lost = "the last checkpoint could not be written"
            metrics["problem"] = f"{lost}; the newest checkpoint is that of step {newest}"
        return metrics

    def _save(self, wait: bool) -> None:
        state = {name: getattr(self, name) for name in NUMBERS} | {"global_batch": self.rows, "data": self.data.state()}
        self.checkpoints.save(self.parallel.module, self.optimizer, state | {"identity": self.identity}, wait)
        self.started = self._clock()

    def _resume(self) -> None:
        state = None
        # if the tensors of one cannot be read, the one before it is the latest
        while state is None:
            path = self.checkpoints.latest()
            if path is None:
                return
            if not self.config.resume and restarts() == 0:
                raise not_to_resume(self.checkpoints.folder)
            refuse_other(path, read_object(path / "state.json")["identity"], self.identity)
            state = self.checkpoints.load(path, self.parallel.module, self.optimizer)
        for name in NUMBERS:
            setattr(self, name, state[name])
        self.data.seek(self.position, state.get("data", {}))
        self.rows = self.config.global_batch or state["global_batch"]
        if state["ranks"] != self.ranks.world:
            seed_all(self.config.seed, self.step, self._draws)
        if self.ranks.first:
            by = f"written by {state['ranks']} ranks; {self.ranks.world} now"
            print(f"resuming after step {self.step} from {path} ({by})", flush=True)

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _percentiles(times: list[float]) -> dict[str, float | None]:
    at = lambda part: sorted(times)[int(part * len(times))] if times else None
    return {"step_seconds_p50": at(0.5), "step_seconds_p95": at(0.95)}
