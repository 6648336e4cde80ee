"""``liger bench mismatch``: how far the log-probabilities of a sampler are from those that the
training forward gives to the same tokens.

An engine samples answers, in batches of several sizes, and keeps the log-probability of each token
that it chose. The training forward then scores the same rows, in other batches. With d = log p of
the trainer - log p of the sampler, over all tokens of all answers:

    equal = share of tokens with d = 0 to the last bit    kl = mean(exp(d) - 1 - d)
    median, p99, most = quantiles of |d|                  ratio = exp(most), the largest importance ratio

``kl`` estimates KL(sampler || trainer) from the sampled tokens, and is never negative. ``routers``:
the share of tokens whose experts differ in at least one layer.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from liger_kernel.bench.arguments import numbers, outputs, several
from liger_kernel.bench.results import Row
from liger_kernel.model_sizes import MODELS, config_of
from liger_kernel.train.files import export
from liger_kernel.train.mistakes import Parser, UserError, aligned, at_least, mistaken, needs, note, one_of

if TYPE_CHECKING:
    from torch import Tensor


class Side(NamedTuple):
    """How a row makes its model and its log-probabilities, on both sides: patched with these flags,
    or stock (None); from logits in fp32?"""

    flags: dict[str, Any] | None
    fp32_head: bool = False


ROWS = {
    "stock": Side(None),
    "stock:fp32-head": Side(None, True),
    "ours": Side({}),
    "ours:fp32-head": Side({}, True),
    "ours:invariant": Side({"batch_invariant": True}),
}
ENGINES = ("hf", "vllm")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# columns of the table, and how their numbers are shown
COLUMNS = {
    **{"batch": "{}", "tokens": "{:,}", "equal": "{:.2%}", "kl": "{:.1e}", "median": "{:.1e}", "p99": "{:.1e}"},
    **{"most": "{:.1e}", "ratio": "{:.3f}", "routers": "{:.2%}"},
}


def parser_of() -> Parser:
    does = "Compare the log-probabilities of a sampler with those of the training forward, token by token."
    parser = Parser(prog="liger bench mismatch", description=does)
    add = parser.add_argument
    what = f"in random weights: {', '.join(MODELS)}; or the folder or id of a checkpoint"
    add("--model", default="tiny", help=what)
    add("--layers", type=int, metavar="N", help="the number of layers to keep of a model in random weights")
    own = "hf: Transformers' generate with a static cache; vllm: the installed vLLM"
    add("--engine", default="hf", choices=ENGINES, help=own)
    add("--against", default=",".join(ROWS), help=f"rows, comma-separated (default: all): {', '.join(ROWS)}")
    add("--batch", default="1,8", help="answers that are sampled at a time, comma-separated")
    add("--answers", default=8, help="least number of answers: a larger batch is one")
    add("--train-batch", default=4, help="rows of a training forward")
    add("--prompt", default=32, help="tokens of a prompt")
    add("--new", default=32, help="tokens of an answer")
    add("--temperature", default=1.0, help="of the sampler and of the training forward")
    add("--dtype", choices=DTYPES, help="(default: bf16, fp32 without a GPU)")
    add("--json", metavar="FILE", help="write rows as they come")
    add("--plot", metavar="FILE", help="draw the differences as a PNG (needs matplotlib)")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    a = parser_of().parse_args(argv)
    a.batch, a.against = numbers("batch", a.batch), several("row", a.against, ROWS)
    at_least(1, batch=a.batch[0], answers=a.answers, layers=a.layers, prompt=a.prompt, new=a.new)
    at_least(1, train_batch=a.train_batch)
    if not a.temperature > 0:
        raise UserError(f"--temperature must be positive, got {a.temperature}")
    if a.model not in MODELS and not Path(a.model).is_dir() and "/" not in a.model:
        one_of("model", a.model, MODELS)
    if a.layers and a.model not in MODELS:
        raise UserError("--layers is for models in random weights: a checkpoint has all its layers")
    outputs(a.json)
    return a


# -- models


def stock_model(a: argparse.Namespace) -> Any:
    """The model, with the same weights in every row."""
    import torch
    import transformers

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, DTYPES[a.dtype or ("bf16" if device.type == "cuda" else "fp32")])
    auto: Any = transformers.AutoModelForCausalLM
    if a.model not in MODELS:
        with mistaken(f"cannot load {a.model}: ", OSError, ValueError):
            return auto.from_pretrained(a.model, dtype=dtype).to(device)
    values = MODELS[a.model] | ({"num_hidden_layers": a.layers} if a.layers else {})
    values = values | {"max_position_embeddings": max(values["max_position_embeddings"], a.prompt + a.new)}
    torch.manual_seed(0)
    with device:
        return auto.from_config(config_of(values), dtype=dtype)


@contextlib.contextmanager
def patched(model: Any, side: Side) -> Iterator[None]:
    """The model as a row has it. Within, the row's whole computation is batch-invariant if its flags
    say so."""
    if side.flags is None:
        yield
        return
    from liger_kernel.transformers import _apply_liger_kernel_to_instance, restore
    from liger_kernel.transformers.recognise.families import flags_of

    kind = model.config.model_type
    if unknown := side.flags.keys() - flags_of(kind):
        raise UserError(f"no flag {', '.join(sorted(unknown))} for {kind}")
    _apply_liger_kernel_to_instance(model=model, **side.flags)
    try:
        yield
    finally:
        restore(model)


class ScoringHead:
    """Log-probabilities of tokens from hidden states, as a row computes them on both sides."""

    def __init__(self, model: Any, side: Side, temperature: float):
        config = model.config.get_text_config()
        self.module, self.side, self.temperature = model.get_output_embeddings(), side, temperature
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0)

    def logits(self, hidden: Tensor, fp32: bool) -> Tensor:
        import torch.nn.functional as F

        w, b = self.module.weight, self.module.bias
        if fp32:
            hidden, w, b = hidden.float(), w.float(), None if b is None else b.float()
        z = F.linear(hidden, w, b) * self.scale
        return z if self.softcap is None else self.softcap * (z / self.softcap).tanh()

    def __call__(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """hidden (B, T, H), ids (B, T) -> fp32 (B, T)."""
        if self.side.flags is None:
            logits = self.logits(hidden, self.side.fp32_head).float() / self.temperature
            return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        from liger_kernel.ops import linear_logprobs

        how: Any = dict(logit_scale=self.scale, softcap=self.softcap, fp32_logits=self.side.fp32_head)
        found: Tensor = linear_logprobs(
            hidden, self.module.weight, ids, self.module.bias, temperature=self.temperature, **how
        )
        return found

    def check(self, model: Any, ids: Tensor) -> None:
        """``UserError`` if the model does more to its logits than this class knows."""
        import torch

        with torch.no_grad(), recording(model) as seen:
            theirs = model(ids, use_cache=False).logits.float()
            ours = self.logits(seen.hidden[-1], False).float()
        if not torch.allclose(theirs, ours, rtol=0.05, atol=0.05 * theirs.abs().max().item()):
            raise UserError(f"{model.config.model_type} has logits that are more than its head's product")


@dataclass
class Recording:
    """What calls of a model showed: the last hidden states, and the experts of each router, by call."""

    hidden: list[Tensor] = field(default_factory=list)
    experts: dict[str, list[Tensor]] = field(default_factory=dict)

    def routes(self, rows: int) -> Tensor | None:
        """The sorted experts of each token in each layer: (layers, rows, T, k)."""
        import torch

        if not self.experts:
            return None
        return torch.stack([torch.cat([c.view(rows, -1, c.shape[-1]) for c in e], 1) for e in self.experts.values()])


@contextlib.contextmanager
def recording(model: Any) -> Iterator[Recording]:
    import torch

    seen = Recording()

    def keep(name: str, out: Any) -> None:
        for t in out if isinstance(out, tuple) else ():
            if isinstance(t, torch.Tensor) and not t.is_floating_point():
                seen.experts.setdefault(name, []).append(t.sort(-1).values)

    routers = ((name, m) for name, m in model.named_modules() if type(m).__name__.endswith("Router"))
    with contextlib.ExitStack() as hooks:
        for name, m in routers:
            hooks.enter_context(m.register_forward_hook(lambda _, __, out, name=name: keep(name, out)))
        hooks.enter_context(model.base_model.register_forward_hook(lambda _, __, out: seen.hidden.append(out[0])))
        yield seen


# -- both sides


class ScoredRows(NamedTuple):
    """Prompts with answers (B, P + T), log-probabilities of the answers' tokens fp32 (B, T), and
    experts (layers, B, P + T - 1, k)."""

    ids: Tensor
    logp: Tensor
    routes: Tensor | None


def prompts_of(a: argparse.Namespace, model: Any) -> Tensor:
    """Random prompts for the largest batch; the first ones are those of smaller batches."""
    import torch

    most, vocab = a.answers + a.batch[-1], model.config.get_text_config().vocab_size
    return torch.randint(0, vocab, (most, a.prompt), generator=torch.Generator().manual_seed(1)).to(model.device)


def sample_hf(model: Any, head: ScoringHead, prompts: Tensor, batch: int, a: argparse.Namespace) -> ScoredRows:
    """Sample with ``generate`` and a static cache, ``batch`` prompts at a time."""
    import torch
    import transformers

    how = dict(max_new_tokens=a.new, do_sample=True, temperature=a.temperature, top_k=0, top_p=1.0, pad_token_id=0)
    # a compiled decode would be another arithmetic, in every row
    how |= dict(cache_implementation="static", disable_compile=True, use_cache=True)
    plan, found = transformers.GenerationConfig(**how), []
    model.generation_config.eos_token_id = None  # all answers have the same length
    model.eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for rows in prompts.split(batch):
            with recording(model) as seen:
                ids = model.generate(rows, attention_mask=torch.ones_like(rows), generation_config=plan)
            hidden = torch.stack([h[:, -1] for h in seen.hidden], 1)  # of the prompt its last token's, then one each
            # one step at a time, as the engine has them
            steps = zip(hidden.unbind(1), ids[:, a.prompt :].unbind(1))
            logp = torch.cat([head(h[:, None], y[:, None]) for h, y in steps], 1)
            found.append(ScoredRows(ids, logp, seen.routes(len(rows))))
    return joined(found)


def joined(found: list[ScoredRows]) -> ScoredRows:
    import torch

    ids, logp, routes = zip(*found)
    known = [t for t in routes if t is not None]
    return ScoredRows(torch.cat(ids), torch.cat(logp), torch.cat(known, 1) if known else None)


def score(model: Any, head: ScoringHead, samples: ScoredRows, a: argparse.Namespace) -> ScoredRows:
    """Score with the training forward: whole rows, in another order and in batches of their own."""
    import torch

    model.train()
    order, found = torch.randperm(len(samples.ids), generator=torch.Generator().manual_seed(3)), []
    ids = samples.ids[order.to(samples.ids.device)]
    for rows in ids.split(a.train_batch):
        with recording(model) as seen:
            model(rows, use_cache=False, logits_to_keep=1)
        logp = head(seen.hidden[-1][:, a.prompt - 1 : -1], rows[:, a.prompt :]).detach()
        routes = seen.routes(len(rows))
        found.append(ScoredRows(rows, logp, None if routes is None else routes[:, :, :-1]))
    back = order.argsort().to(ids.device)
    scored = joined(found)
    return ScoredRows(ids[back], scored.logp[back], None if scored.routes is None else scored.routes[:, back])


def sample_vllm(model: Any, name: str, prompts: Tensor, batch: int, a: argparse.Namespace) -> ScoredRows:
    """Sample with vLLM, in a process of its own, which reads the model from a folder."""
    import torch

    with tempfile.TemporaryDirectory(prefix="liger-bench-") as folder:
        if a.model in MODELS:
            model.save_pretrained(folder)
        given, result = Path(folder) / "spec.json", Path(folder) / "answers.json"
        spec = dict(model=folder if a.model in MODELS else a.model, dtype=DTYPES[a.dtype or "bf16"], batch=batch)
        flags = ROWS[name].flags
        implementation = "auto" if flags is None else "transformers"
        spec |= dict(prompts=prompts.tolist(), new=a.new, temperature=a.temperature, model_impl=implementation)
        given.write_text(json.dumps(spec))
        ours = {} if flags is None else {"LIGER_VLLM": "1"}
        ours |= {"VLLM_BATCH_INVARIANT": "1"} if (flags or {}).get("batch_invariant") else {}
        command = [sys.executable, "-m", "liger_kernel.engines.vllm_answers", str(given), str(result)]
        done = subprocess.run(command, env=os.environ | ours, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"vLLM: {(done.stderr.strip().splitlines() or ['no message'])[-1][:300]}")
        answers = json.loads(result.read_text())
    device = prompts.device
    ids = torch.cat([prompts, torch.tensor(answers["ids"], device=device)], 1)
    return ScoredRows(ids, torch.tensor(answers["logp"], device=device), None)


# -- results


def compare(sampler: ScoredRows, trainer: ScoredRows, prompt: int) -> tuple[Row, list[float]]:
    """The fields of a row, and quantiles of |d| for the plot."""

    d = (trainer.logp.double() - sampler.logp.double()).flatten()
    sizes = d.abs().sort().values
    at = lambda q: sizes[min(len(sizes) - 1, int(q * len(sizes)))].item()
    row: Row = dict(tokens=len(d), equal=(trainer.logp == sampler.logp).double().mean().item())
    row |= dict(kl=(d.exp() - 1 - d).mean().item(), median=at(0.5), p99=at(0.99), most=at(1.0))
    row |= dict(ratio=math.exp(min(row["most"], 700.0)), routers=None)
    if sampler.routes is not None and trainer.routes is not None:
        other = (sampler.routes != trainer.routes).any(-1)[:, :, prompt - 1 :]
        row["routers"] = other.any(0).double().mean().item()
    return row, [at(i / 200) for i in range(201)]


def measure(a: argparse.Namespace, name: str) -> Iterator[Row]:
    """The rows of one way, one for each batch."""
    import torch

    side, model = ROWS[name], stock_model(a)
    prompts = prompts_of(a, model)
    ScoringHead(model, side, a.temperature).check(model, prompts[:1])
    with patched(model, side):
        head = ScoringHead(model, side, a.temperature)
        for batch in a.batch:
            some = prompts[: -(-a.answers // batch) * batch]
            if a.engine == "hf":
                sampled = sample_hf(model, head, some, batch, a)
            else:
                sampled = sample_vllm(model, name, some, batch, a)
            row, quantiles = compare(sampled, score(model, head, sampled, a), a.prompt)
            yield dict(model=a.model, variant=name, engine=a.engine, batch=batch, **row, quantiles=quantiles)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(rows: list[Row]) -> str:
    used = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    shown = lambda row, name: "" if row.get(name) is None else COLUMNS[name].format(row[name])
    lines = [[row["variant"], *(shown(row, name) for name in used)] for row in rows if not row.get("failed")]
    failures = [f"{row['variant']}: {row['failed']}" for row in rows if row.get("failed")]
    return "\n".join([aligned([["row", *used], *lines], words={0}), *failures])


def plot(rows: list[Row]) -> bytes:
    """Draw, for each way at its largest batch, which share of tokens differs by at most how much."""
    from liger_kernel.train.card import curves

    last = {row["variant"]: row["quantiles"] for row in rows if not row.get("failed")}
    least = min((x for sizes in last.values() for x in sizes if x), default=1e-9) / 10
    # no logarithm of zero: equal bits are drawn on the left edge
    lines = {name: ([max(x, least) for x in sizes], [i / 2 for i in range(201)]) for name, sizes in last.items()}
    title, x = f"{rows[0]['model']}, {rows[0]['engine']}: sampler and trainer", "|difference of log-probabilities|"
    return curves(lines, "png", xscale="log", xlabel=f"{x} (left edge: equal bits)", ylabel="% of tokens", title=title)


def main(argv: list[str]) -> int:
    """Run the command. Returns 0 if every row of ours was measured, and the invariant one is equal."""
    a = parse(argv)
    if a.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError("--engine vllm needs vLLM: pip install vllm")
    if a.plot:
        with needs("--plot", "matplotlib"):
            import matplotlib  # noqa: F401
    from liger_kernel.bench import clock

    result: dict[str, Any] = {"meta": clock.hardware() | {"command": "liger bench mismatch " + " ".join(argv)}}
    rows = result["rows"] = []
    for name in a.against:
        try:
            for row in measure(a, name):
                rows.append(row)
                note(f"{name}, {row['batch']} at a time: {row['equal']:.2%} equal, kl {row['kl']:.1e}")
        except (UserError, ValueError, RuntimeError, NotImplementedError) as error:
            rows.append(dict(model=a.model, variant=name, engine=a.engine, failed=" ".join(str(error).split())[:300]))
        if a.json:
            export(a.json, json.dumps(result, indent=1))
    print(f"{a.model}, {a.engine}: prompts of {a.prompt} tokens, answers of {a.new}\n\n{table(rows)}")
    if a.plot:
        export(a.plot, plot(rows))
        print(a.plot)
    ours = [row for row in rows if row["variant"].startswith("ours")]
    invariant = [row for row in ours if row["variant"] == "ours:invariant"]
    return int(any(row.get("failed") for row in ours) or any(row.get("equal") != 1 for row in invariant))
