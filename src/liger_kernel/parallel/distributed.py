"""PyTorch's classes of several processes, as far as this PyTorch has them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "CPUOffloadPolicy",
    "ColwiseParallel",
    "DTensor",
    "DeviceMesh",
    "FSDPModule",
    "FullyShardedDataParallel",
    "MixedPrecisionPolicy",
    "Partial",
    "Replicate",
    "RowwiseParallel",
    "Shard",
    "assembled",
    "fully_shard",
    "init_device_mesh",
    "parallelize_module",
]

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        FullyShardedDataParallel,
        MixedPrecisionPolicy,
        fully_shard,
    )
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
else:  # a PyTorch for one process: nothing is an instance of these
    DTensor = FSDPModule = FullyShardedDataParallel = ()  # type: ignore[assignment,misc]  # as isinstance takes it
    # nothing calls these without a process group
    globals().update(dict.fromkeys(set(__all__) - {"DTensor", "FSDPModule", "FullyShardedDataParallel", "assembled"}))


def assembled(part: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> DTensor:
    """The DTensor of this shape of which each rank has ``part``, whose sizes may differ."""
    stride = torch.empty(shape, device="meta").stride()  # from_local would compute it of equal parts
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
