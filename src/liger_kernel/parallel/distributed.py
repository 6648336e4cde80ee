"""PyTorch's classes of several processes, as far as this PyTorch has them."""

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    *("DTensor", "DeviceMesh", "Partial", "Replicate", "Shard", "assembled", "init_device_mesh"),
    *("CPUOffloadPolicy", "FSDPModule", "FullyShardedDataParallel", "MixedPrecisionPolicy", "fully_shard"),
    *("ColwiseParallel", "RowwiseParallel", "parallelize_module"),
]

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor, Placement
else:  # a PyTorch for one process: nothing is an instance of these
    DTensor = FSDPModule = FullyShardedDataParallel = ()  # type: ignore[assignment,misc]  # as isinstance takes it


def assembled(part: Tensor, mesh: "DeviceMesh", placements: "tuple[Placement, ...]", shape: torch.Size) -> "DTensor":
    """The DTensor of this shape of which each rank has ``part``, whose sizes may differ."""
    stride = torch.empty(shape, device="meta").stride()  # from_local would compute it of equal parts
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
