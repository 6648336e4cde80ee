"""Time and memory of an output head whose vocabulary is sharded over a tensor-parallel group, with
the entropy of every token's distribution.

    python benchmarks/sharded_head.py OUT.csv --gpus 2 [--verl DIR] [--upstream DIR] [--cases
    llama-3-8b,llama-3-70b] [--variants ours verl] [--steps 10]
    python benchmarks/sharded_head.py OUT.csv --share 8     one GPU's share of 8: an eighth of the classes, all labels among them, and no exchange
    python benchmarks/sharded_head.py OUT.csv --smoke --gpus 2     tiny shapes; without a GPU over gloo in fp32

A step computes each token's negative log-probability of its label, the entropy, and the gradients
dx, summed over the ranks, and dw, for random upstream gradients of both. Every variant runs in
processes of its own, one for each GPU:

    ours               vocab_parallel_linear_cross_entropy with entropy
    ours, no entropy   the same without entropy, which product+upstream is compared with
    verl               linear_cross_entropy of verl 0.9.1, a wheel unpacked in the folder of --verl; only verl.utils.kernel is loaded, between empty
                       packages and with a stand-in for verl.utils.device, so that none of verl's
                       requirements need be installed
    product+ours       a product, then vocab_parallel_cross_entropy of the logits, without entropy
    product+upstream   a product, then the vocabulary-parallel cross entropy of LinkedIn's liger-kernel 0.8.5, unpacked in the folder of --upstream
    product+torch      a product, then the definition in PyTorch operations

Where a variant leaves the sum of dx to its caller, an all-reduce in the dtype of dx follows. Errors
are relative RMS against fp64: the values of all tokens, dx of the first 256, dw of the first 256
classes of each rank. Times are medians of the slowest rank's steps, spreads the distance of the
quartiles by the median, TFLOP/s those of three products for each GPU, and peak memory is beyond the
inputs and counts the gradients.
"""  # noqa: E501

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CASES = {
    "llama-3-8b": (8192, 4096, 128256),
    "llama-3-70b": (8192, 8192, 128256),
}  # tokens, hidden size, classes of all ranks
SMOKE = {"smoke": (320, 128, 2304)}
COMPARED, WARMUP, PATIENCE = (
    256,
    5,
    300.0,
)  # rows and classes whose gradients are compared, steps, seconds for one variant
ERRORS = ["error_nll", "error_entropy", "error_dx", "error_dw"]
COLUMNS = ["case", "gpus", "share", "variant", "ms", "spread", "tflops", "peak_gb", *ERRORS, "gpu", "torch", "triton"]
Head = Callable[
    [Tensor, Tensor, Tensor, Any], tuple[Tensor, ...]
]  # x, w, labels and group -> negative log-probabilities, and entropies if it has them


class Sum(torch.autograd.Function):
    """The sum over ranks that all compute the same loss from it, so that each has the whole
    gradient already; or the identity, whose gradient is summed."""

    @staticmethod
    def forward(ctx, x, group, of_gradients):
        ctx.group, ctx.of_gradients = group, of_gradients
        if of_gradients:
            return x.view_as(x)
        dist.all_reduce(total := x.clone(), group=group)
        return total

    @staticmethod
    def backward(ctx, dx):
        if ctx.of_gradients:
            dist.all_reduce(dx := dx.contiguous(), group=ctx.group)
        return dx, None, None


def shared(x: Tensor, group: Any) -> Tensor:
    return Sum.apply(x, group, True) if group else x


def slice_of(labels: Tensor, classes: int, group: Any) -> tuple[Tensor, Tensor]:
    """Labels as columns of this rank's classes, and which of them are its own."""
    own = labels - (dist.get_rank(group) if group else 0) * classes
    mine = (own >= 0) & (own < classes)
    return own.where(mine, 0)[:, None], mine


def ours(folder: str, entropy: bool = True) -> Head:
    head = importlib.import_module("liger_kernel.ops").vocab_parallel_linear_cross_entropy
    run = functools.partial(head, reduction="none", entropy=entropy)
    return run if entropy else lambda *args: (run(*args),)


def ours_of_logits(folder: str) -> Head:
    loss = importlib.import_module("liger_kernel.ops").vocab_parallel_cross_entropy
    return lambda x, w, labels, group: (loss(shared(x, group) @ w.t(), labels, group, reduction="none"),)


def verl(folder: str) -> Head:
    for name in ("verl", "verl.utils"):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")))]
    device: Any = ModuleType("verl.utils.device")
    device.is_cuda_available, device.get_device_capability = torch.cuda.is_available(), torch.cuda.get_device_capability
    device.get_device_name, device.get_torch_device = lambda: "cuda", lambda: torch.cuda
    sys.modules["verl.utils.device"] = device
    head = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def run(x: Tensor, w: Tensor, labels: Tensor, group: Any) -> tuple[Tensor, ...]:
        log_p, entropy = head(shared(x, group), w, labels, 1.0, "none", group)
        return -log_p, entropy

    return run


def upstream(folder: str) -> Head:
    module = importlib.import_module("liger_kernel.ops.vocab_parallel_cross_entropy")
    if not Path(str(module.__file__)).is_relative_to(folder):
        raise ImportError(f"another package came first: {module.__file__}")
    loss = module.LigerVocabParallelCEFunction.apply
    return lambda x, w, labels, group: (
        loss((shared(x, group) @ w.t())[:, None], labels[:, None], group, -100, 0.0, "pytorch", "global")[:, 0],
    )


def plain(folder: str) -> Head:
    def run(x: Tensor, w: Tensor, labels: Tensor, group: Any) -> tuple[Tensor, ...]:
        z = (shared(x, group) @ w.t()).float()
        column, mine = slice_of(labels, w.shape[0], group)
        top = z.detach().amax(-1)
        if group:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        e = (z - top[:, None]).exp()
        sums = torch.stack([e.sum(-1), (e * z).sum(-1), z.gather(-1, column)[:, 0].where(mine, 0)])
        total, weighted, own = Sum.apply(sums, group, False) if group else sums
        lse = top + total.log()
        return lse - own, lse - weighted / total

    return run


VARIANTS: dict[str, Callable[[str], Head]] = {
    "ours": ours,
    "ours, no entropy": functools.partial(ours, entropy=False),
    "verl": verl,
    "product+ours": ours_of_logits,
    "product+upstream": upstream,
    "product+torch": plain,
}


@torch.no_grad()
def truth(x: Tensor, w: Tensor, labels: Tensor, g: Tensor, g_entropy: Tensor, group: Any) -> dict[str, Tensor]:
    """Values of all rows, dx of the first ones and dw of the first classes, in fp64."""
    reduce = lambda t, op=dist.ReduceOp.SUM: dist.all_reduce(t, op, group=group) if group else None
    w64, (column, mine), dx = w.double(), slice_of(labels, w.shape[0], group), x.new_empty(0)
    dw, nll, entropy = (
        torch.zeros_like(w64[:COMPARED]),
        torch.empty_like(g, dtype=torch.float64),
        torch.empty_like(g, dtype=torch.float64),
    )
    for first in range(0, len(x), COMPARED):
        rows = slice(first, first + COMPARED)
        rows64, y = x[rows].double(), column[rows]
        z = rows64 @ w64.t()
        top = z.amax(-1)
        reduce(top, dist.ReduceOp.MAX)
        p = (z - top[:, None]).exp_()
        sums = torch.stack([p.sum(-1), (p * z).sum(-1), z.gather(-1, y)[:, 0].where(mine[rows], 0)])
        reduce(sums)
        lse, mean = top + sums[0].log(), sums[1] / sums[0]
        nll[rows], entropy[rows] = lse - sums[2], lse - mean
        p /= sums[0][:, None]
        dz = p * (g[rows, None] - g_entropy[rows, None] * (z - mean[:, None]))
        dz.scatter_add_(-1, y, -g[rows, None].double() * mine[rows, None])
        dw += dz[:, :COMPARED].t() @ rows64
        if first == 0:
            dx = dz @ w64
            reduce(dx)
    return dict(nll=nll, entropy=entropy, dx=dx, dw=dw)


def measure(name: str, case: str, steps: int, share: int, folder: str) -> dict[str, Any]:
    """One rank of one variant."""
    rank, ranks, gpu = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    if gpu:
        torch.cuda.set_device(rank)
    head, group = VARIANTS[name](folder), None
    if ranks > 1:
        dist.init_process_group("nccl" if gpu else "gloo")
        group = dist.group.WORLD
    M, H, V = (CASES | SMOKE)[case]
    N = V // (ranks * share)
    torch.manual_seed(rank)
    w = (
        (torch.randn(N, H, device=device) * (2 / H**0.5)).to(dtype).requires_grad_()
    )  # logits of a standard deviation of 2
    x, labels = torch.randn(M, H, device=device).to(dtype), torch.randint(N * ranks, (M,), device=device)
    g, g_entropy = torch.randn(M, device=device), 0.1 * torch.randn(M, device=device)
    for t in (x, labels, g, g_entropy) if group else ():
        dist.broadcast(t, 0)
    x.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        values = head(x, w, labels, group)
        return *values, *torch.autograd.grad(values, (x, w), (g, g_entropy)[: len(values)])

    if name in ("ours, no entropy", "product+ours", "product+upstream"):
        g_entropy.zero_()
    expected = truth(x, w, labels, g, g_entropy, group)
    inputs = torch.cuda.memory_allocated() - sum(t.nbytes for t in expected.values())
    *values, dx, dw = step()
    errors = {}
    for key, found in dict(zip(("nll", "entropy"), values), dx=dx[:COMPARED], dw=dw[:COMPARED]).items():
        squares = torch.stack([(found.detach().double() - expected[key]).square().sum(), expected[key].square().sum()])
        if group:
            dist.all_reduce(squares)
        errors[f"error_{key}"] = (squares[0] / squares[1]).sqrt().item()
    del values, dx, dw, found, expected
    for _ in range(WARMUP):
        step()
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
        times = [begun.elapsed_time(ended) for begun, ended in itertools.pairwise(marks)]
    else:
        clock = [time.perf_counter(), *((step(), time.perf_counter())[1] for _ in range(steps))]
        times = [1e3 * (ended - begun) for begun, ended in itertools.pairwise(clock)]
    slowest = torch.tensor([*times, (torch.cuda.max_memory_allocated() - inputs) / 1e9], device=device)
    if group:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.destroy_process_group()
    *times, peak = slowest.tolist()
    low, ms, high = statistics.quantiles(times, n=4)
    row = dict(
        case=case,
        gpus=ranks,
        share=share,
        variant=name,
        ms=ms,
        spread=(high - low) / ms,
        tflops=6 * M * H * N / ms / 1e9,
        **errors,
    )
    versions = dict(torch=torch.__version__, triton=importlib.import_module("triton").__version__)
    return row | dict(peak_gb=peak if gpu else None, gpu=torch.cuda.get_device_name() if gpu else "CPU", **versions)


def child(result: str, name: str, case: str, steps: str, share: str, folder: str) -> None:
    """A rank writes what it measured, or why it failed, and ends at once: the others may wait
    for it in vain."""
    try:
        said = measure(name, case, int(steps), int(share), folder)
    except Exception as error:
        said = dict(failed=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    Path(f"{result}.{os.environ['RANK']}").write_text(json.dumps(said))
    os._exit("failed" in said)


def run(name: str, case: str, a: argparse.Namespace, folder: str) -> dict[str, Any]:
    """All ranks of one variant; the row of the first, or the first failure."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="sharded-head-") as tmp:
        env = os.environ | dict(WORLD_SIZE=str(a.gpus), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, env.get("PYTHONPATH")]))
        command = [
            sys.executable,
            os.path.abspath(__file__),
            "--child",
            f"{tmp}/result",
            name,
            case,
            str(a.steps),
            str(a.share),
            folder,
        ]
        with open(f"{tmp}/log", "w") as log:
            ranks = [
                subprocess.Popen(command, env=env | dict(RANK=str(rank)), stdout=log, stderr=log)
                for rank in range(a.gpus)
            ]
        until = time.monotonic() + PATIENCE
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes) and time.monotonic() < until:
            time.sleep(0.1)
        for rank in ranks:
            rank.kill()
            rank.wait()
        said = [
            json.loads(file.read_text())
            for file in sorted(Path(tmp).glob("result.*"), key=lambda file: file.stat().st_mtime_ns)
        ]
        last = Path(f"{tmp}/log").read_text().strip().rpartition("\n")[-1]
    missing = (
        [dict(failed=f"exit codes {codes}, None for ranks that did not end: {last[:200]}")]
        if len(said) < a.gpus
        else []
    )
    return [*(row for row in said if "failed" in row), *missing, *said][0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--share", type=int, default=1)
    parser.add_argument("--verl", type=Path)
    parser.add_argument("--upstream", type=Path)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--smoke", action="store_true")
    a = parser.parse_args()
    if a.gpus > 1 and a.share > 1:
        parser.error("--share is for one GPU")
    if not a.smoke and torch.cuda.device_count() < a.gpus:
        parser.error(f"{a.gpus} GPUs are needed, there are {torch.cuda.device_count()}; see --smoke")
    src = Path(__file__).resolve().parents[1] / "src"
    folders = dict.fromkeys(VARIANTS, src) | {"verl": a.verl, "product+upstream": a.upstream}
    failed = False
    with open(a.out, "w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for case in SMOKE if a.smoke else a.cases.split(","):
            for name in (name for name in a.variants if folders[name]):
                row = run(name, case, a, str(folders[name].resolve()))
                of = f"{case:12} gpus {a.gpus} share {a.share} {name:17}"
                if "failed" in row:
                    failed = True
                    print(of, row["failed"], flush=True)
                    continue
                errors = ", ".join(f"{key.removeprefix('error_')} {row[key]:.1e}" for key in ERRORS if key in row)
                peak = "" if row["peak_gb"] is None else f"{row['peak_gb']:6.2f} GB  "
                print(
                    of,
                    f"{row['ms']:8.2f} ms ±{row['spread']:5.1%} {row['tflops']:6.1f} TFLOP/s  {peak}errors {errors}",
                    flush=True,
                )
                table.writerow(
                    {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
                )
                file.flush()
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    sys.exit(main())
