"""One rank of many, of which the others are not there: collectives return at once, and tensors
have no data. For ``simulated``, which counts their bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from liger_kernel.parallel import ULYSSES, ulysses
from liger_kernel.parallel.distributed import DTensor
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.model import mesh_of, split


class FakeRanks(NamedTuple):
    """``every``: the mesh of all ranks; ``shared``: with those that share rows in the last dim.
    None for a run of one process."""

    every: DeviceMesh | None = None
    shared: DeviceMesh | None = None

    def split(
        self, model: nn.Module, config: TrainConfig, precision: str, reduce_dtype: torch.dtype | None
    ) -> nn.Module:
        """The model over the ranks, as ``liger train`` has it. It makes no mesh, as that would
        read tensors."""
        if config.parallel in ULYSSES and self.shared is not None:
            ulysses.share_rows(model, self.shared.get_group(1))
            config = dataclasses.replace(config, parallel=ULYSSES[config.parallel], sequence_parallel_size=None)
        return split(model, config, precision, self.every, reduce_dtype=reduce_dtype).model


@contextlib.contextmanager
def fake_ranks(config: TrainConfig, world: int) -> Iterator[FakeRanks]:
    """The first of ``world`` ranks. Raises ``UserError`` in a process that has joined others
    already."""
    if config.parallel == "none":
        yield FakeRanks()
        return
    # defines what collectives return where tensors have no data
    import torch.distributed._tools.fake_collectives
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError("what several ranks need is not known in a process that is one of them")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield FakeRanks(init_device_mesh("cpu", (world,)), mesh_of(config, torch.device("cpu"), world))
    finally:
        dist.destroy_process_group()


class Replica(nn.Module):
    """Stands in for ``DistributedDataParallel``, of which only the buckets of gradients need
    memory."""

    def __init__(self, module: nn.Module, **_: Any):
        super().__init__()
        self.module, self.buckets = module, [torch.empty_like(p) for p in module.parameters() if p.requires_grad]


@contextlib.contextmanager
def followed(meter: Any, on_cpu: bool) -> Iterator[None]:
    """Tell the meter what FSDP2 gathers and what it reduces. ``on_cpu``: shards of gradients are
    not on the GPU."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    def labelled(method: Callable, label: str) -> Callable:
        @functools.wraps(method)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            before, meter.label = meter.label, label
            try:
                return method(group, *args, **kwargs)
            finally:
                meter.label = before
                for each in group.fsdp_params if on_cpu else ():
                    meter.leave(local(each.sharded_param.grad))

        return call

    with contextlib.ExitStack() as stack:
        for name in ("unshard", "wait_for_unshard", "post_backward"):
            label = "gradients" if name == "post_backward" else "gathered weights"
            wrapped = labelled(getattr(FSDPParamGroup, name), label)
            stack.enter_context(mock.patch.object(FSDPParamGroup, name, wrapped))
        yield


def local(t: Any) -> Tensor:
    """This rank's part of a tensor."""
    return t.to_local() if isinstance(t, DTensor) else t


def heads_of(model: Any) -> tuple[dict[nn.Module, tuple[int, int]], bool]:
    """Stands in for Ulysses' search for attention, which runs the model on data: modules that
    know how many queries share a head of keys are attention."""
    config = model.config
    heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return {m: heads for m in model.modules() if hasattr(m, "num_key_value_groups")}, False
