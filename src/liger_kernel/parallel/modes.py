"""Models under PyTorch's modes of several processes.

``parallelize`` puts a model, patched or not, under one of ``MODES``:

    none           one process
    ddp            a replica on every rank, gradients averaged (DistributedDataParallel)
    fsdp2          parameters, gradients and optimizer state sharded over the ranks
                   (``fully_shard``): one group per decoder layer, the rest in the root's group
    tp             every linear layer sharded over the ranks of one host by Transformers' plan for
                   the model, the head by vocabulary
    ulysses        replicas as under ddp, of which groups share rows: each rank computes a part of
                   their tokens, and in attention a part of the heads
    ulysses-fsdp2  the same, with everything sharded over all ranks as under fsdp2
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_kernel.ops._core.invariance import is_invariant
from liger_kernel.parallel.distributed import (
    ColwiseParallel,
    CPUOffloadPolicy,
    DeviceMesh,
    MixedPrecisionPolicy,
    Replicate,
    RowwiseParallel,
    fully_shard,
    init_device_mesh,
    parallelize_module,
)
from liger_kernel.parallel.gradients import clip_grad_norm_

MODES = ("none", "ddp", "fsdp2", "tp", "ulysses", "ulysses-fsdp2")
ULYSSES = {"ulysses": "ddp", "ulysses-fsdp2": "fsdp2"}  # how their weights are held


@dataclass(frozen=True)
class Parallel:
    """A model under one of ``MODES``.

    Call ``model``; use ``module``, the model itself, for names of parameters, ``state_dict`` and
    configuration. Ranks with the same ``data_rank`` must read the same batches, ranks with
    different ones different batches. There are ``data_ranks`` of them. ``mesh`` is None in a single
    process. Under ulysses, ``mesh`` has the dims data and sequence, and this rank computes part
    ``sequence_rank`` of ``sequence_ranks`` of its rows.
    """

    model: nn.Module
    module: nn.Module
    mode: str
    mesh: DeviceMesh | None = None
    data_rank: int = 0
    data_ranks: int = 1
    sequence_rank: int = 0
    sequence_ranks: int = 1

    def total(self, count: Tensor | float, *, sequences: bool = False) -> Tensor:
        """The sum of a number over all data ranks, with ``sequences`` over all that share rows,
        too, in fp64 on the model's device.

        It costs one small all-reduce for each dim of the mesh that has several such ranks.
        """
        # fp64, because counts of tokens pass 2^24, from where on fp32 skips numbers
        device = next(self.module.parameters()).device
        sum_ = torch.as_tensor(count, dtype=torch.float64).to(device, copy=True)
        for dim, ranks in enumerate((self.data_ranks, self.sequence_ranks if sequences else 1)):
            if self.mesh is not None and ranks > 1:
                dist.all_reduce(sum_, group=self.mesh.get_group(dim))
        return sum_

    def items(self, tokens: Tensor | float) -> Tensor:
        """Return ``num_items_in_batch`` for this rank's losses, if it learns ``tokens`` tokens
        before its next step.

        Every mode averages gradients over data ranks. If sums of losses are divided by this number,
        gradients are those of the mean over all tokens of all ranks, however unequal their numbers
        are. The mean loss is the sum of the data ranks' losses, divided by ``data_ranks``. Ranks
        that share rows all pass the tokens of whole rows, and have the same loss.
        """
        return self.total(tokens) / self.data_ranks

    @contextlib.contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """A context for forward and backward of a micro-batch: under DDP, only the ``last``
        micro-batch before a step reduces gradients.

        Under FSDP2 every micro-batch reduces gradients, so that they are sharded between
        micro-batches, too.
        """
        sums = last or self.mode not in ("ddp", "ulysses")
        # DDP has it
        with contextlib.nullcontext() if sums else self.model.no_sync():  # type: ignore[operator]
            yield

    def clip_grad_norm_(self, max_norm: float | None) -> Tensor:
        """Clip the gradients of this model, as ``clip_grad_norm_`` does."""
        return clip_grad_norm_(self.model, max_norm)


def parallelize(
    model: nn.Module,
    mode: str,
    *,
    mesh: DeviceMesh | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    reshard_after_forward: bool = True,
    own_head: bool = False,
    cpu_offload: bool = False,
    **options: Any,
) -> Parallel:
    """Put ``model`` under ``mode``, over the ranks of a 1-dim ``mesh`` (default: all). Patch it
    before; make its optimizer after, with groups ``by_sharding``.

    Under ulysses, the ranks of the last dim of a ``mesh`` of 1 or 2 dims share their rows, which
    they all pass to ``model`` whole; ``liger_kernel.parallel.ulysses`` says what it makes of them. Weights
    are replicated or sharded over all ranks of the mesh.

    The model is moved to its device, with the same weights on every rank. For FSDP2: layers compute
    in ``param_dtype`` (default: the dtype of the weights); weights are stored and updated in their
    own dtype, and gradients are reduced in ``reduce_dtype``. ``reshard_after_forward=False`` halves
    the number of gathers and needs more memory. ``own_head`` shards the output head outside of the
    root's group, so that it is gathered only while it is used. With ``cpu_offload``, shards of
    weights and gradients, and so the optimizer's step and state, are in the CPU's memory
    (``CPUOffloadPolicy``). ``options`` go to DistributedDataParallel or ``fully_shard``. Raises
    ``ValueError`` for an unknown mode, and for models that the mode cannot split.
    """
    if mode not in MODES:
        raise ValueError(f"parallelize: mode must be one of {MODES}, got {mode!r}")
    if cpu_offload and ULYSSES.get(mode, mode) != "fsdp2":
        raise ValueError(f"parallelize: cpu_offload needs mode fsdp2 or ulysses-fsdp2, got {mode}")
    if is_invariant() and mode not in ("none", "ddp", "fsdp2"):
        raise ValueError(f"parallelize: mode must be none, ddp or fsdp2 with batch invariance, got {mode}")
    if mode == "none":
        return Parallel(model, model, mode)
    device = next(model.parameters()).device
    mesh = mesh or init_device_mesh(device.type, (dist.get_world_size(),))
    shared = None
    if mode in ULYSSES:
        shared, mesh = _share_rows(model, mode, mesh)
    elif mesh.ndim != 1:
        raise ValueError(f"parallelize: mesh must have 1 dim, got {mesh.ndim}")
    if mode == "tp":
        tensor_parallel(model, mesh)
        return Parallel(model, model, mode, mesh)
    if ULYSSES.get(mode, mode) == "ddp":
        on = [device.index] if device.type == "cuda" else None
        run: nn.Module = nn.parallel.DistributedDataParallel(
            model, device_ids=on, process_group=mesh.get_group(), **options
        )
    else:
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        options |= {"mesh": mesh, "mp_policy": policy}
        if cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        for layer in layers_of(model):
            fully_shard(layer, reshard_after_forward=reshard_after_forward, **options)
        if own_head:
            of_transformers: Any = model
            head = of_transformers.get_output_embeddings()
            if any(p is q for p in head.parameters() for q in of_transformers.get_input_embeddings().parameters()):
                raise ValueError("parallelize: own_head must be False where the head is the embedding, got True")
            fully_shard(head, reshard_after_forward=reshard_after_forward, **options)
        fully_shard(model, **options)
        run = model
    if shared is not None:
        return Parallel(
            run, model, mode, shared, shared.get_local_rank(0), shared.size(0), shared.get_local_rank(1), shared.size(1)
        )
    return Parallel(run, model, mode, mesh, mesh.get_local_rank(), mesh.size())


def _share_rows(model: nn.Module, mode: str, mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """Ranks of the last dim of ``mesh`` share rows from now on. Returns the mesh (data,
    sequence), and that of all ranks, which hold the weights."""
    from liger_kernel.parallel import ulysses  # needs Transformers

    if mesh.ndim > 2:
        raise ValueError(f"parallelize: mesh of mode {mode} must have 1 or 2 dims, got {mesh.ndim}")
    shared = (
        mesh if mesh.ndim == 2 else DeviceMesh(mesh.device_type, mesh.mesh[None], mesh_dim_names=("data", "sequence"))
    )
    # in place, before DDP or FSDP2 wraps the model
    ulysses.share_rows(model, shared.get_group(1))
    return shared, DeviceMesh(mesh.device_type, mesh.mesh.flatten()) if mesh.ndim == 2 else mesh


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers: what Transformers says must not be split, otherwise the content
    of the outermost lists of modules."""
    # text and vision layers both, in a model of both
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [m for m in model.modules() if type(m).__name__ in names]
    if found:
        return found
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    outer = [m for name, m in lists if not any(name.startswith(other + ".") for other, _ in lists)]
    return [layer for m in outer for layer in m if any(True for _ in layer.parameters())]


# What transformers' plans call the ways to shard a layer, and how PyTorch does it. A head's logits
# are gathered for those who ask for them.
STYLES = {
    "colwise": lambda: ColwiseParallel(),
    "rowwise": lambda: RowwiseParallel(),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
SUMMED = "replicated_with_grad_allreduce"  # the same weights on every rank, of which each sees other heads


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the linear layers of a Transformers model in place, by its ``tp_plan``. Norms, and
    layers that the plan does not name, stay whole."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    unknown = sorted({s for s in plan.values() if s not in (*STYLES, SUMMED)})
    config = getattr(model, "config", None)
    if not plan or unknown:
        why = f"with the plan {', '.join(unknown)}" if unknown else "without a plan"
        raise ValueError(
            f"parallelize: mode tp needs a model whose tp_plan is made of {', '.join((*STYLES, SUMMED))}, got "
            f"{type(model).__name__} {why}"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, name, None)) and heads % mesh.size():
            raise ValueError(
                f"parallelize: {name} must be a multiple of the {mesh.size()} ranks of mode tp, got {heads}"
            )
    tied = _tied(model)
    shared = {name.rpartition(".")[0] for names in tied for name in names}
    if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in model.named_modules() for pattern in plan):
        raise ValueError(
            f"parallelize: mode tp needs modules that {type(model).__name__}'s tp_plan names, which have other names "
            "here: of adapters, for example"
        )
    for name, module in list(model.named_modules()):
        style = next((s for pattern, s in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if style is None and name in shared and isinstance(module, nn.Embedding):
            style = "embedding_rowwise"  # as its head is sharded
        if style == SUMMED:
            for p in module.parameters(recurse=False):
                p.register_hook(functools.partial(_summed, group=mesh.get_group()))
        elif style:
            parallelize_module(module, mesh, STYLES[style]())
    for first, *others in tied:  # sharding made several parameters of one
        for name in others:
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner).register_parameter(attribute, model.get_parameter(first))


def _tied(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _summed(g: Tensor, group: dist.ProcessGroup) -> Tensor:
    # a hook must not write to the gradient that it is given
    g = g.contiguous().clone()
    dist.all_reduce(g, group=group)
    return g
