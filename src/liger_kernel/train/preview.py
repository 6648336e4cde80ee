"""What a run shows of its data and of what it has learnt: rows with labels marked and the time
that steps take (``--dry-run``), answers before and after training, and a loss that stays."""

from __future__ import annotations

import copy
import math
import statistics
from itertools import groupby
from typing import Any

import torch

from liger_kernel.train.config import TrainConfig
from liger_kernel.train.measure import PeakMemory, StepClock, as_clock, peak_flops
from liger_kernel.train.mistakes import note
from liger_kernel.train.model import flops_per_token, mixed
from liger_kernel.train.redact import in_a_line
from liger_kernel.train.session import Session
from liger_kernel.train.summary import gb, rows_of
from liger_kernel.train.token_rows import IGNORE, Data, on

# rows that are shown, pieces of a row, and characters of a piece
ROWS, PIECES, WIDTH = 3, 12, 300
# tokens of an answer
ANSWER = 48
# part of a GPU's peak that is assumed where nothing is measured
USED = 0.4


def _cut(text: str, width: int = WIDTH) -> str:
    """Begin and end of a long text."""
    half = width // 2
    return text if len(text) <= width else f"{text[:half]} ... {len(text) - 2 * half:,} characters ... {text[-half:]}"


def show(config: TrainConfig, data: Data, model: Any, device: torch.device, precision: str, world: int) -> None:
    print(_rows(config, data), _time(config, data, model, device, precision, world), sep="\n", flush=True)


def _rows(config: TrainConfig, data: Data) -> str:
    """The first rows of training, with tokens that have labels between marks."""
    shown = []
    for pick in data.picks(0, min(ROWS, len(data.train)), config.seed):
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


def _time(config: TrainConfig, data: Data, model: Any, device: torch.device, precision: str, world: int) -> str:
    """About how long the steps will take: a batch is timed where a rank has the whole model."""
    each = rows_of(config, world)
    config = config.in_steps(each, len(data.train))
    picks = data.picks(0, min(each, config.batch), config.seed)
    if config.parallel in ("none", "ddp"):
        seconds, peak = _batch(data, picks, model, device, precision)
        total = seconds * math.ceil(each / world / config.batch) * config.steps
        how = f"a batch took {seconds:.3g} s and {gb(peak)} at the peak, without moments"
    elif (flops := flops_per_token(model, config.length)) and (limit := peak_flops(device, precision)):
        tokens = data.rows.count(picks)[0] / len(picks) * each * config.steps
        total = tokens * flops / limit / USED / world
        how = f"at {USED:.0%} of the peak of {world} GPUs"
    else:
        return f"time: not known for parallel {config.parallel} here"
    return f"time: about {as_clock(total)} for {config.steps:,} steps, without evaluations and checkpoints; {how}"


def _batch(data: Data, picks: list[int], model: Any, device: torch.device, precision: str) -> tuple[float, int]:
    """Seconds of a batch's forward and backward, the second time, and the memory of these."""
    batch = on(device, data.rows.batch(picks, data.pad))
    memory, clock = PeakMemory(device), StepClock(device)
    for _ in range(2):
        clock.start()
        with mixed(device, precision):
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
