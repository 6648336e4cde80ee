"""Several `liger bench step` commands in the time of few: all variants build their models side by
side, and are measured one after the other.

    python benchmarks/side_by_side.py COMMANDS OUT.csv [--one-step] [--without-attention]

COMMANDS is a file with the arguments of one command in each line; lines that an empty one follows
are a group. The models of a group must fit together: a variant that waits for its turn holds its
weights, or its part of them, and nothing else. One after the other builds its model, since with
--parallel fsdp2 each GPU has all weights until they are sharded. Whoever has the turn is alone with
the GPUs, until its process ends.

Steps on the longest rows that fit take minutes, almost all of them in attention. ``--one-step``
measures one step, after one of 4096 tokens that compiles kernels and makes moments; so does each
trial of ``--largest-seq``, which OUT.trials lists. ``--without-attention`` also replaces the
kernels of PyTorch's flash attention by some that allocate the same tensors and workspace, and
return the queries, and zero for their gradients. All else is computed, and the peak is about that
of the real step (MEASURED.md, "Long rows"); losses and times are not. The variants of
``step_rivals.py`` are there, too.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import step_rivals

TURNS, NUMBER, ALL = (
    f"SIDE_BY_SIDE_{name}" for name in ("TURNS", "NUMBER", "ALL")
)  # set for the processes of the variants
MODE = "SIDE_BY_SIDE_MODE"  # "one-step" or "without-attention"
TRIALS = "SIDE_BY_SIDE_TRIALS"  # a file for what a search for the longest row has tried
PATIENCE = 600.0  # seconds for the slowest to build its model
kept: list[Any] = []  # registrations of operators, which end with their objects


def take(what: str) -> int | None:
    """Wait until no other variant has the lock of this name. It ends with the process, or when what
    this returns is closed.

    The first rank takes it; the others poll, because a collective would use the GPU.
    """
    turns, number, lock = Path(os.environ[TURNS]), os.environ[NUMBER], None
    taken = turns / f"{what}-{number}"
    if int(os.environ.get("RANK", 0)) == 0:
        lock = os.open(turns / what, os.O_WRONLY | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        taken.touch()
    while not taken.exists():
        time.sleep(0.05)
    return lock


def wait_for_turn() -> None:
    """Return when every variant is built, or has failed, and it is this one's turn."""
    turns = Path(os.environ[TURNS])
    if int(os.environ.get("RANK", 0)) == 0:
        (turns / f"built-{os.environ[NUMBER]}").touch()
        until = time.monotonic() + PATIENCE
        while len(list(turns.glob("built-*"))) < int(os.environ[ALL]) and time.monotonic() < until:
            time.sleep(0.05)
    take("turn")
    time.sleep(0.5)  # for the memory of the one before


def list_trial(number: str, batch: int, seq: int, said: str) -> None:
    with open(os.environ[TRIALS], "a") as file:
        file.write(f"variant {number}, {batch} x {seq}: {said}\n")


def variant(spec: str, result: str) -> int:
    """``step_child.py``, which waits for its turn when it has built its model."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != own]
    child = step_rivals.load_child(json.loads(Path(spec).read_text())["child"])
    train, model, locks = child.Training.__init__, child.models.build, []

    def build_model(spec: dict[str, Any], *args: Any) -> Any:
        if not spec["variant"].startswith("unsloth"):  # which has to be imported first
            import transformers  # noqa: F401
        if spec["package"]:
            import liger_kernel.transformers  # noqa: F401
        locks.append(take("building"))
        return model(spec, *args)

    def build(self: Any, *args: Any) -> None:
        train(self, *args)
        if (lock := locks.pop()) is not None:
            os.close(lock)
        wait_for_turn()

    child.models.build, child.Training.__init__ = build_model, build
    if os.environ.get(MODE):
        child.Training.measure = lambda training, batch: one_step(child, training, batch)
        child.Training.trial = lambda training, batch: one_step(child, training, batch)["peak_allocated_gb"]
    if os.environ.get(MODE) == "without-attention":
        replace_attention()
    return child.main(spec, result)


def one_step(child: Any, training: Any, batch: int) -> dict[str, Any]:
    """The row of one step with this batch, after a short one."""
    import torch

    seq = training.spec["seq"]
    short = training.spec | {"seq": min(seq, 4096)}
    training.step([next(child.batches(short, 1, training.share, training.device))])
    data = [next(child.batches(training.spec, batch, training.share, training.device))]
    memory = child.measures.PeakMemory(training.device)
    child.synchronize()
    begun = time.perf_counter()
    training.step(data)
    child.synchronize()
    seconds = time.perf_counter() - begun
    return {
        "batch": batch,
        "tokens_per_s": batch * seq * training.shares / seconds,
        "step_ms": 1e3 * seconds,
        "spread": 0.0,
        "peak_allocated_gb": memory.read() / 1e9,
        "peak_reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if child.GPU else None,
        "losses": torch.stack(training.losses[1:]).tolist(),
        "gradient": None if training.gradient is None else training.gradient.item(),
    }


def replace_attention(device: str = "CUDA") -> None:
    """Let flash attention compute nothing. What it allocates: the output, the log-sum-exp of each
    query; backward the gradients, in fp32 that of the queries, too, and those of keys and values
    for each head of the queries, where heads share them."""
    import torch
    from torch import Tensor

    def like(t: Tensor) -> Tensor:  # (batch, heads, length, channels), in memory (batch, length, heads, channels)
        return torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: Any = None,
    ) -> Any:
        lse = torch.zeros(q.shape[:3], dtype=torch.float32, device=q.device)
        none, state = torch.empty(0, device=q.device), torch.zeros(2, dtype=torch.int64, device=q.device)
        return like(q).copy_(q), lse, none, none, q.shape[2], k.shape[2], state, none, none

    def backward(
        dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *saved: Any, scale: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        workspace = [
            torch.empty(q.shape, dtype=torch.float32, device=q.device),
            *([like(q), like(q)] if q.shape[1] != k.shape[1] else []),
        ]
        gradients = like(q).zero_(), like(k).zero_(), like(v).zero_()
        del workspace
        return gradients

    torch.backends.cuda.enable_cudnn_sdp(False)
    library = torch.library.Library("aten", "IMPL", device)
    for name, kernel in (
        ("_scaled_dot_product_flash_attention", forward),
        ("_scaled_dot_product_flash_attention_backward", backward),
    ):
        library.impl(name, kernel)
    kept.append(library)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands")
    parser.add_argument("out")
    parser.add_argument("--one-step", action="store_true")
    parser.add_argument("--without-attention", action="store_true")
    given = parser.parse_args(argv)
    commands, out = given.commands, given.out
    os.environ[MODE] = "without-attention" if given.without_attention else "one-step" if given.one_step else ""
    os.environ[TRIALS] = str(Path(out).resolve().with_suffix(".trials"))
    from liger_kernel.bench import step
    from liger_kernel.bench.results import parts_of, write_csv
    from liger_kernel.model_sizes import config_of

    step_rivals.register()
    parsed = [
        [step.parse(line.split()) for line in group.splitlines() if line.strip()]
        for group in Path(commands).read_text().split("\n\n")
    ]
    step.CHILD = Path(__file__).resolve()
    meta = step.environment()
    rows: list[dict[str, Any]] = []  # of groups that are over
    finished: list[dict[str, Any]] = []  # and what this group has so far
    meta |= {"dtype": "bfloat16" if meta["gpus"] > 0 else "float32"}
    own, run = threading.local(), step.subprocess.run
    step.subprocess.run = lambda *args, env=None, **more: run(
        *args, env={**(os.environ if env is None else env), **getattr(own, "turn", {})}, **more
    )

    child = step.run_child

    def tried(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
        """A child, which OUT.trials lists if it is a trial."""
        found = child(spec, folder)
        if spec["trial"]:
            list_trial(own.turn[NUMBER], spec["batch"][0], spec["seq"], found["failed"] or f"{found['peak']:.2f} GB")
        return found

    step.run_child = tried

    begun, writing = time.monotonic(), threading.Lock()

    def measure(number: int, a: Any, model: str, name: str, folder: Path) -> None:
        own.turn = {TURNS: str(folder), NUMBER: str(number), ALL: str(len(jobs))}
        mine = folder / str(number)
        mine.mkdir()
        (mine / f"{model}.pt").symlink_to(folder / f"{commands_of.index(a)}-{model}.pt")
        try:
            found = step.measure(a, model, name, mine, meta, a.peak_tflops or meta["gemm_tflops"])
        finally:
            (folder / f"built-{number}").touch()
        same = {field: getattr(a, field) for field in ("data", "lengths", "masked", "optimizer")}
        for row in found:
            said = (
                row["failed"]
                or f"{row['step_ms']:,.1f} ms, {row['tokens_per_s']:,.0f} tokens/s, {row['peak_allocated_gb']:.2f} "
                f"GB, spread {row['spread']:.1%}"
            )
            for what in ("batch", "seq"):
                said += f", largest {what} {row[f'largest_{what}']:,}" if row.get(f"largest_{what}") else ""
            size = ", ".join([f"{model} {name}", f"{row['batch']} x {row['seq']}", *parts_of(row | same)])
            print(f"{time.monotonic() - begun:.0f} s: {size}: {said}", flush=True)
        with writing:
            measured[number] = [row | same for row in found]
            write()

    def write() -> None:
        """All that is measured so far: a run that is stopped leaves what it has."""
        done = list(rows)
        for n, (a, model, _) in enumerate(jobs):
            stock = {
                row["batch"]: row
                for m, job in enumerate(jobs)
                if job == (a, model, "stock")
                for row in measured.get(m, [])
            }
            tolerance = step.tolerance_of(a, meta["dtype"])
            done += [step.judge(dict(row), stock.get(row["batch"]), tolerance) for row in measured.get(n, [])]
        write_csv({"meta": meta, "rows": done}, out)
        Path(out).with_suffix(".json").write_text(json.dumps({"meta": meta, "rows": done}, indent=1))
        finished[:] = done

    for commands_of in parsed:
        measured: dict[int, list[dict[str, Any]]] = {}
        with tempfile.TemporaryDirectory(prefix="liger-bench-") as tmp:
            for i, a in enumerate(commands_of):
                for model in a.model:
                    step.write_tokens(
                        a.data, config_of(step.values_of(a, model)).vocab_size, Path(tmp) / f"{i}-{model}.pt"
                    )
            jobs = [
                (a, model, name)
                for a in commands_of
                for model in a.model
                for name in sorted(a.against, key=lambda name: name != "stock")
            ]
            threads = [threading.Thread(target=measure, args=(n, *job, Path(tmp))) for n, job in enumerate(jobs)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        rows = list(finished)
    return int(not rows or any(row["failed"] for row in rows if row["variant"].startswith("ours")))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(variant(*sys.argv[1:]) if TURNS in os.environ else main(sys.argv[1:]))
