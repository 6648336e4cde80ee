"""Gradients and parameters that are sharded over ranks: their norm, groups of one sharding, and what
a checkpoint holds of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.parallel.distributed import DTensor, FullyShardedDataParallel, assembled
from liger_kernel.parallel.sharded_head import classes_of_ranks


def clip_grad_norm_(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scale the gradients of ``model`` so that their 2-norm is at most ``max_norm`` (None: only
    measure). Returns the norm before, 0-dim and plain.

    It is the norm of the whole gradient and the same on every rank, however parameters are sharded:
    each distinct sharding is reduced once, replicas count once. Under FSDP1, ``model`` must be the
    root. A DeepSpeed engine is refused, because DeepSpeed clips itself (``gradient_clipping``).
    """
    if hasattr(model, "get_global_grad_norm"):
        raise ValueError(
            "clip_grad_norm_: model must not be a DeepSpeed engine, which clips for itself: set gradient_clipping in "
            "its configuration"
        )
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(float("inf") if max_norm is None else max_norm)
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = grad_norm([p.grad for p in parameters if p.grad is not None])
    # foreach kernels take tensors of one sharding at a time
    if max_norm is not None:
        for group in by_sharding(parameters):
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


def grad_norm(grads: Iterable[Tensor]) -> Tensor:
    """The 2-norm of gradients of all shardings together; 0-dim and plain. Every rank must call
    it."""
    # a norm of each sharding, and then the norm of norms: DTensors of two meshes cannot be stacked
    norms = [torch.nn.utils.get_total_norm(group) for group in by_sharding(grads)]
    whole = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
    return torch.linalg.vector_norm(torch.stack(whole)) if whole else torch.zeros(())


def by_sharding(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Split ``tensors`` into lists of one mesh and sharding each. Fused and foreach optimizers
    need such groups, as they compute with all tensors at once."""
    groups: dict[Any, list[Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.device_mesh, t.placements) if isinstance(t, DTensor) else None, []).append(t)
    return list(groups.values())


def in_blocks(p: Tensor, least: int, block: int) -> bool | None:
    """Whether a quantiser of ``block`` values cuts the shards of ``p`` into whole blocks, on all
    ranks alike; None if it cuts none of them.

    It leaves a shard alone that has fewer than ``least`` values or is no whole number of blocks.
    """
    width = p[0].numel() if p.ndim else 1
    rows = classes_of_ranks(p) if isinstance(p, DTensor) else [p.shape[0] if p.ndim else 1]
    # every rank decides for all, so that no two of them quantise differently
    cut = {n * width >= least and n * width % block == 0 for n in rows}
    return None if cut == {False} else cut == {True} and (width % block == 0 or len(set(rows)) == 1)


def plain_parts(t: Tensor) -> dict[str, Tensor]:
    """What a checkpoint holds of ``t``: by attribute the codes and scales of torchao's quantised
    tensors, sharded as ``t`` is; of all others ``t``, as ``""``.

    They share memory with ``t``. DCP can stage, write and shard them anew, as it cannot with the
    class itself; ``in_blocks`` says which shards it fits.
    """
    local: Any = t.to_local() if isinstance(t, DTensor) else t
    if not (hasattr(local, "codes") and hasattr(local, "scale")):
        return {"": t}
    parts = {"codes": local.codes, "scale": local.scale}
    width = t.shape[1:].numel()
    # a row has whole blocks: scales are sharded by the same rows, however many a rank has
    if width % local.block_size == 0:
        parts["scale"] = local.scale.view(-1, width // local.block_size)
    if not isinstance(t, DTensor):
        return parts
    rows = {"codes": t.shape[0], "scale": t.shape[0] if parts["scale"].ndim == 2 else t.numel() // local.block_size}
    of_part = lambda name, part: torch.Size((rows[name], *part.shape[1:]))
    return {name: assembled(part, t.device_mesh, t.placements, of_part(name, part)) for name, part in parts.items()}
