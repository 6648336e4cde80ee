"""What a run shows: model, kernels, data, device and the memory that it expects to need; rows with
labels marked and the time that steps take (``--dry-run``); answers before and after training, and a
loss that stays."""

from __future__ import annotations

import copy
import math
import statistics
from itertools import groupby
from typing import Any

import torch

from liger_kernel.train import adapters
from liger_kernel.train.config import TrainConfig
from liger_kernel.train.measure import PeakMemory, StepClock, as_clock, device_name, peak_flops
from liger_kernel.train.mistakes import note
from liger_kernel.train.model import flags_for, flops_per_token, mixed
from liger_kernel.train.ranks import restarts
from liger_kernel.train.redact import in_a_line
from liger_kernel.train.session import Session
from liger_kernel.train.stream import Stream
from liger_kernel.train.token_rows import IGNORE, Data, on

# rows that are shown, pieces of a row, and characters of a piece
ROWS, PIECES, WIDTH = 3, 12, 300
# tokens of an answer
ANSWER = 48
# part of a GPU's peak that is assumed where nothing is measured
USED = 0.4


def summary(session: Session, attention: str) -> str:
    """The lines, on rank 0."""
    config, model, world = session.config, session.model, session.ranks.world
    no_end = "; the tokenizer has no end token: texts are joined without one, and an answer does not learn to end"
    trained, total = parameters(model)
    part = "all of them trained" if trained == total else f"{trained:,} of them trained ({trained / max(1, total):.2%})"
    counted = f"{trained:,} of {total:,} parameters"
    lines = [
        f"model: {config.model or 'random weights'} ({model.config.model_type}), {total:,} parameters, {part}",
        *([f"adapters: {adapters.described(config)}; {counted} are trained"] if config.lora else []),
        *kernels(config, model),
        f"attention: {attention}",
        f"data: {_data(session)}{no_end if session.data.tokenizer.eos_token_id is None else ''}",
        f"device: {device_name(session.device)}, {session.precision}"
        f"{f', {world} ranks ({config.parallel})' if world > 1 else ''}, trainer {config.trainer}",
        f"memory: {_memory(session)}",
    ]
    return "\n".join(lines)


def parameters(model: Any) -> tuple[int, int]:
    """How many parameters are trained, and how many there are; values of 4 bits count one by
    one."""
    if hasattr(model, "get_nb_trainable_parameters"):
        return model.get_nb_trainable_parameters()
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes)


def kernels(config: TrainConfig, model: Any) -> list[str]:
    """What is patched and what is not, each with the reason."""
    if config.kernels == "off":
        return ["patched: nothing (--kernels off): the model is as Hugging Face ships it"]
    from liger_kernel.transformers.patching.report import patches_report, projections_report

    report = patches_report(model, flags_for(config, model.config.model_type))
    lines = [report.line.replace("liger_kernel", "kernels"), *str(report).splitlines()]
    return [*lines, *([f"projections: {projections_report(model)}"] if config.lora or config.fp8 else [])]


def rows_of(config: TrainConfig, world: int) -> int:
    """The rows of a step of a run that begins."""
    return config.global_batch or config.batch * config.accumulate * (world // config.sharing(world))


def _data(session: Session) -> str:
    data, rows = session.data, rows_of(session.config, session.ranks.world)
    config = session.config.in_steps(rows, len(data.train))
    wanted = f"{config.steps:,} steps of {rows:,} rows"
    if isinstance(data, Stream):
        return (
            f"{config.data}, read in parts of {config.stream:g} million characters, rows of at most "
            f"{config.length:,} tokens; {wanted}"
        )
    passes = config.steps * rows / max(1, len(data.train))
    source = f" of {config.eval_data}" if config.eval_data else ""
    held = f", {len(data.eval):,} more{source} for evaluation" if data.eval else ""
    return (
        f"{config.data}, {len(data.train):,} rows of at most {config.length:,} tokens to train on{held}; "
        f"{wanted}: {passes:.2f} passes over the data"
    )


def _memory(session: Session) -> str:
    if session.device.type != "cuda":
        return "not estimated on a CPU"
    if restarts():
        return "as it was estimated when the run began"
    try:
        # needs Triton
        from liger_kernel.train.fit import expected

        found = expected(session.model.config, session.config, session.ranks.world)
    # an estimate that only informs must not end a run
    except Exception as error:
        return f"not estimated: {in_a_line(error)}"
    total = torch.cuda.get_device_properties(session.device).total_memory
    beyond = ". That is more than the GPU has: expect to run out of memory" if found["peak"] > total else ""
    parts = ", ".join(f"{name} {gb(size)}" for name, size in found["parts"].items() if size)
    return (
        f"expected: about {gb(found['peak'])} of the GPU's {gb(total)} at the peak, in '{found['phase']}', "
        f"estimated from shapes: {parts}{beyond}"
    )


def gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 5e7 else f"{size / 1e6:.1f} MB" if size else "0"


def _cut(text: str, width: int = WIDTH) -> str:
    """Begin and end of a long text."""
    half = width // 2
    return text if len(text) <= width else f"{text[:half]} ... {len(text) - 2 * half:,} characters ... {text[-half:]}"


def show(session: Session) -> None:
    print(_rows(session.data, session.config.seed), _time(session), sep="\n", flush=True)


def _rows(data: Data, seed: int) -> str:
    """The first rows of training, with tokens that have labels between marks."""
    shown = []
    for pick in data.picks(0, min(ROWS, len(data.train)), seed):
        ids, labels, _ = data.rows.row(pick)
        text, runs, at = "", [(has, len(list(run))) for has, run in groupby((labels != IGNORE).tolist())], 0
        for has, count in runs[:PIECES]:
            piece = _cut(data.tokenizer.decode(ids[at : at + count].tolist()))
            text += f">>>{piece}<<<" if has else piece
            at += count
        text += f" ... and {len(ids) - at:,} tokens" if at < len(ids) else ""
        number = data.rows.count([pick])[1]
        shown.append(f"row of {len(ids):,} tokens, {number:,} of them predicted, which have labels (>>> <<<):\n{text}")
    return "\n".join(shown)


def _time(session: Session) -> str:
    """About how long the steps will take: a batch is timed where a rank has the whole model."""
    data, world = session.data, session.ranks.world
    each = rows_of(session.config, world)
    config = session.config.in_steps(each, len(data.train))
    picks = data.picks(0, min(each, config.batch), config.seed)
    if config.parallel in ("none", "ddp"):
        seconds, peak = _batch(session, picks)
        total = seconds * math.ceil(each / world / config.batch) * config.steps
        how = f"a batch took {seconds:.3g} s and {gb(peak)} at the peak, without moments"
    elif (flops := flops_per_token(session.model, config.length)) and (
        limit := peak_flops(session.device, session.precision)
    ):
        tokens = data.rows.count(picks)[0] / len(picks) * each * config.steps
        total = tokens * flops / limit / USED / world
        how = f"at {USED:.0%} of the peak of {world} GPUs"
    else:
        return f"time: not known for parallel {config.parallel} here"
    return f"time: about {as_clock(total)} for {config.steps:,} steps, without evaluations and checkpoints; {how}"


def _batch(session: Session, picks: list[int]) -> tuple[float, int]:
    """Seconds of a batch's forward and backward, the second time, and the memory of these."""
    data, model, device = session.data, session.model, session.device
    batch = on(device, data.rows.batch(picks, data.pad))
    memory, clock = PeakMemory(device), StepClock(device)
    for _ in range(2):
        clock.start()
        with mixed(device, session.precision):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        clock.stop()
        # waits for the GPU
        float(loss.detach())
        model.zero_grad(set_to_none=True)
    return clock.read()[-1], memory.read()


class Samples:
    """Answers of the model before training, to show beside those after it. There are none where
    nothing is tuned to answer (text, random weights), or where no rank has the whole model."""

    def __init__(self, session: Session):
        config, data = session.config, session.data
        self._session = session
        # of each: prompt and answer, in tokens
        self._questions: list[tuple[torch.Tensor, torch.Tensor]] = []
        if session.ranks.first and config.model and config.samples and config.parallel in ("none", "ddp"):
            trained = data.picks(0, min(config.samples, len(data.train)), config.seed)
            picks = [*data.eval, *trained][: config.samples]
            self._questions = [found for pick in picks if (found := _question(data, pick))]
        self._before = self._answers() if self._questions else []

    def _answers(self) -> list[str]:
        model, data = self._session.model, self._session.data
        found = []
        try:
            form = copy.deepcopy(model.generation_config)
            form.update(do_sample=False, temperature=None, top_p=None, top_k=None, max_new_tokens=ANSWER)
            own = form.eos_token_id if isinstance(form.eos_token_id, list) else [form.eos_token_id]
            ends = {data.tokenizer.eos_token_id, *own} - {None}
            form.update(pad_token_id=data.pad, eos_token_id=sorted(ends) or None)
            model.eval()
            for prompt, _ in self._questions:
                ids = prompt[None].long().to(next(model.parameters()).device)
                with torch.no_grad(), mixed(ids.device, self._session.precision):
                    whole = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=form)
                found.append(data.tokenizer.decode(whole[0, len(prompt) :], skip_special_tokens=True))
        # what only informs must not end a run
        except Exception as error:
            note(f"no answers are shown: {in_a_line(error, 200)}")
            self._questions = []
        finally:
            model.train()
        return found

    def show(self) -> None:
        if not self._questions:
            return
        after = self._answers()
        for (prompt, answer), *said in zip(self._questions, self._before, after):
            decode = lambda ids: self._session.data.tokenizer.decode(ids, skip_special_tokens=True)
            print(f"prompt: {_cut(decode(prompt).strip())}")
            for when, text in zip(("before", "after", "in the data"), (*said, decode(answer))):
                print(f"  {when}: {_cut(text.strip())}", flush=True)


def _question(data: Data, pick: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The first prompt and answer of a row; None if it is text, in which all tokens have labels."""
    ids, labels, positions = data.rows.row(pick)
    # what reaches to the end ends there
    has = [*(labels != IGNORE).tolist(), False]
    if True not in has:
        return None
    begin = has.index(True)
    end = has.index(False, begin)
    # where the document begins, of several in a row
    first = 0 if positions is None else begin - int(positions[begin])
    return (ids[first:begin], ids[begin:end]) if begin - first > 1 else None


def unmoved(losses: list[float]) -> str | None:
    """What is wrong with a run whose last losses are as its first, but for the noise of batches."""
    part = len(losses) // 5
    if part < 3:
        return None
    first, last = losses[:part], losses[-part:]
    noise = math.sqrt((statistics.variance(first) + statistics.variance(last)) / part)
    before, after = statistics.mean(first), statistics.mean(last)
    if before - after > 2 * noise:
        return None
    return (
        f"warning: the loss did not fall by more than its noise: {before:.4f} in the first fifth of the run, "
        f"{after:.4f} in the last. Try a higher --lr or more steps; --dry-run shows which tokens have labels"
    )
