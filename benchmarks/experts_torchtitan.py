"""Training steps of torchtitan's Qwen3-30B-A3B, beside those that ``benchmarks/several_gpus.sh OUT
experts`` measures.

    pip download torchtitan==0.2.2 --no-deps && unzip torchtitan-0.2.2-*.whl -d DIR
    python benchmarks/experts_torchtitan.py OUT.csv --torchtitan DIR --gpus 4 [--batch 4] [--seq
    2048] [--steps 5] [--warmup 3] [--variants fsdp2+ep fsdp2 ...]
    python benchmarks/experts_torchtitan.py OUT.csv --torchtitan DIR --gpus 2 --batch 2 --seq 64 --smoke     a tiny model over gloo, without a GPU

    fsdp2+ep    each GPU has its part of every layer's experts, and tokens are exchanged; FSDP2 shards all other weights
    fsdp2       FSDP2 shards all weights, and gathers the experts of a layer
    +compile    torchtitan's ``--compile.enable`` on top: torch.compile of the parts of a layer, and of the loss

torchtitan 0.2.2 is the newest release that PyTorch 2.11 can import. The model, the parallelism with
full activation checkpointing, the loss and the collection of garbage are its own; by its default
there is no torch.compile. The rest is as in ``liger bench step``: weights, gradients and their sums
over GPUs in bf16 (torchtitan's default sums in fp32), PyTorch's fused AdamW, the same tokens and
labels, random weights of the same distribution, no clipping of gradients. PyTorch must be
installed, but nothing else that torchtitan requires: that loads data, reads a configuration, or
logs.
"""  # noqa: E501

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import importlib.metadata
import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.fsdp import FSDPModule
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

COLUMNS = (
    "variant",
    "gpus",
    "batch",
    "seq",
    "step_ms",
    "spread",
    "tokens_per_s",
    "peak_gb",
    "losses",
    "gpu",
    "torch",
    "torchtitan",
)
VARIANTS = ("fsdp2+ep", "fsdp2", "fsdp2+ep+compile", "fsdp2+compile")
UNUSED = (
    "datasets",
    "datasets.distributed",
    "tokenizers",
    "torch.utils.tensorboard",
    "torchdata",
    "torchdata.stateful_dataloader",
    "tyro",
)
BATCHES = 4  # distinct batches, which steps use in turn
IGNORED = -100


class StandIn(ModuleType):
    """A module with every class that anybody asks for."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def without_gpu() -> None:
    """Let torchtitan use the CPU, and the reference of its Triton kernel; ``histc`` counts only
    floats there."""
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.models.moe import utils

    utils.generate_permute_indices = functools.partial(utils.generate_permute_indices, use_cpu=True)
    histc = torch.histc
    torch.histc = lambda t, **how: histc(t.float(), **how).to(t.dtype)


def batches(B: int, T: int, vocab: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Those of ``liger bench step --data random``: tokens, and for each the next one of its row."""
    stream, found = (
        torch.randint(0, vocab, (1 << 22,), generator=torch.Generator().manual_seed(0), dtype=torch.int32).long(),
        [],
    )
    for i in range(BATCHES):
        ids = stream[(torch.arange(B * T) + (i * dist.get_world_size() + dist.get_rank()) * B * T) % len(stream)].view(
            B, T
        )
        labels = ids.roll(-1, dims=1)
        labels[:, -1] = IGNORED
        found.append((ids.to(device), labels.to(device)))
    return found


def measure(variant: str, a: argparse.Namespace) -> dict[str, Any]:
    """One rank of one variant."""
    sys.path.insert(0, str(a.torchtitan))
    sys.modules.update({name: StandIn(name) for name in UNUSED})
    vars(sys.modules["tyro"])["constructors"] = StandIn("tyro.constructors")
    if a.smoke:
        without_gpu()
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
    from torchtitan.distributed import ParallelDims, utils as distributed
    from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3, qwen3_args
    from torchtitan.tools.utils import GarbageCollection, set_default_dtype

    device = torch.device("cpu") if a.smoke else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not a.smoke:
        torch.cuda.set_device(device)
    config = JobConfig()
    config.training.dtype = config.training.mixed_precision_param = config.training.mixed_precision_reduce = "bfloat16"
    config.compile.enable = "compile" in variant.split("+")
    config.training.seq_len, config.activation_checkpoint.mode, config.debug.seed, config.comm.trace_buf_size = (
        a.seq,
        "full",
        0,
        0,
    )
    ranks = distributed.init_distributed(config.comm)
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=-1,
        cp=1,
        tp=1,
        pp=1,
        ep=ranks if "ep" in variant.split("+") else 1,
        etp=1,
        world_size=ranks,
    )
    distributed.set_determinism(dims, device, config.debug, distinct_seed_mesh_dims=["pp"])
    sizes = qwen3_args["debugmodel_moe" if a.smoke else "30B-A3B"]
    if a.smoke:
        sizes = dataclasses.replace(
            sizes, n_layers=2, moe_args=dataclasses.replace(sizes.moe_args, num_experts=16), moe_inter_dim=128
        )
    sizes.update_from_config(config)
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model = Qwen3Model(sizes)
    model = parallelize_qwen3(model, dims, config)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights()
        for p in (p for p in model.parameters() if p.ndim > 1):
            p.normal_(
                0, 0.02
            )  # torchtitan's embedding has a deviation of 1, and which experts tokens choose depends on it
    for module in (m for m in model.modules() if a.smoke and isinstance(m, FSDPModule)):
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums; the factor is 1
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)
    losses: list[Tensor] = []
    cross_entropy = build_cross_entropy_loss(config)
    data, garbage = batches(a.batch, a.seq, sizes.vocab_size, device), GarbageCollection(config.training.gc_freq)

    def step() -> None:
        garbage.run(len(losses))
        ids, labels = data[len(losses) % BATCHES]
        logits = model(ids)
        loss = cross_entropy(logits, labels) / (a.batch * (a.seq - 1) * ranks)
        del logits  # as torchtitan does, for the backward to free them
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    def mark() -> Any:
        if a.smoke:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    for _ in range(a.warmup):
        step()
    if not a.smoke:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    marks = [mark()]
    for _ in range(a.steps):
        step()
        marks.append(mark())
    if not a.smoke:
        torch.cuda.synchronize()
    times = [
        1e3 * (ended - begun) if a.smoke else begun.elapsed_time(ended) for begun, ended in itertools.pairwise(marks)
    ]
    slowest = torch.tensor([*times, 0 if a.smoke else torch.cuda.max_memory_allocated() / 1e9], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    first = torch.stack(losses[:BATCHES]).float()  # each is this rank's part of a mean
    dist.all_reduce(first)
    *times, peak = slowest.tolist()
    low, ms, high = statistics.quantiles(times, n=4)
    row = dict(
        variant=variant,
        gpus=ranks,
        batch=a.batch,
        seq=a.seq,
        step_ms=ms,
        spread=(high - low) / ms,
        tokens_per_s=1e3 * a.batch * a.seq * ranks / ms,
    )
    row |= dict(peak_gb=None if a.smoke else peak, losses=" ".join(f"{loss:.4f}" for loss in first.tolist()))
    row |= dict(
        gpu="CPU" if a.smoke else torch.cuda.get_device_name(),
        torch=torch.__version__,
        torchtitan=importlib.metadata.version("torchtitan"),
    )
    dist.destroy_process_group()
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--torchtitan", type=Path, required=True)
    for name, default in dict(gpus=4, batch=4, seq=2048, steps=5, warmup=3).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--smoke", action="store_true")
    a = parser.parse_args()
    if not a.smoke and torch.cuda.device_count() < a.gpus:
        parser.error(f"{a.gpus} GPUs are needed, there are {torch.cuda.device_count()}; see --smoke")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    ranks = LaunchConfig(
        1, 1, a.gpus, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="spawn", max_restarts=0
    )
    failed = False
    with open(a.out, "w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for variant in a.variants:
            try:
                row = elastic_launch(ranks, measure)(variant, a)[0]
            except ChildFailedError as error:
                failed = True
                print(f"{variant:16} failed: {error}", flush=True)
                continue
            peak = "" if a.smoke else f"{row['peak_gb']:.2f} GB, "
            said = (
                f"{row['step_ms']:,.1f} ms ±{row['spread']:.1%}, {row['tokens_per_s']:,.0f} tokens/s, "
                f"{peak}losses {row['losses']}"
            )
            print(f"{variant:16} {a.gpus} GPUs, {a.batch} x {a.seq}: {said}", flush=True)
            table.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
            file.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
