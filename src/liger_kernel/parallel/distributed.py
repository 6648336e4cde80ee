"""PyTorch's classes of several processes, as far as this PyTorch has them."""

from __future__ import annotations

import torch.distributed as dist

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh as DeviceMesh
    from torch.distributed.device_mesh import init_device_mesh as init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
    from torch.distributed.fsdp import FSDPModule as FSDPModule
    from torch.distributed.fsdp import FullyShardedDataParallel as FullyShardedDataParallel
    from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as fully_shard
    from torch.distributed.tensor import DTensor as DTensor
    from torch.distributed.tensor import Partial as Partial
    from torch.distributed.tensor import Replicate as Replicate
    from torch.distributed.tensor import Shard as Shard
    from torch.distributed.tensor.parallel import ColwiseParallel as ColwiseParallel
    from torch.distributed.tensor.parallel import RowwiseParallel as RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module as parallelize_module
else:  # a PyTorch for one process: nothing is an instance of these
    DTensor = FSDPModule = FullyShardedDataParallel = ()  # type: ignore[assignment,misc]  # as isinstance takes it
