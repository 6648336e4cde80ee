"""Models over several processes: PyTorch's modes, what a loss needs of a sharded head, and the norm
of sharded gradients.

``parallelize`` puts a model, patched or not, under one of ``MODES``:

    none           one process
    ddp            a replica on every rank, gradients averaged (DistributedDataParallel)
    fsdp2          parameters, gradients and optimizer state sharded over the ranks (``fully_shard``): one group per decoder layer, the rest in the root's group
    tp             every linear layer sharded over the ranks of one host by Transformers' plan for the model, the head by vocabulary
    ulysses        replicas as under ddp, of which groups share rows: each rank computes a part of their tokens, and in attention a part of the heads
    ulysses-fsdp2  the same, with everything sharded over all ranks as under fsdp2

Only this file knows how FSDP, ZeRO and DTensor work. It does not need Transformers.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernel.ops._core.operator import as_index, on_gpu
from liger_kernel.ops._core.shards import own_part
from liger_kernel.ops.losses.chunks import auto_chunk_rows
from liger_kernel.ops.losses.vocab_parallel.linear_cross_entropy import vocab_parallel_linear_cross_entropy

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        FullyShardedDataParallel,
        MixedPrecisionPolicy,
        fully_shard,
    )
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
else:  # a PyTorch for one process: nothing is an instance of these
    DTensor = FSDPModule = FullyShardedDataParallel = ()  # type: ignore[assignment,misc]  # as isinstance takes it

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
        with contextlib.nullcontext() if last or self.mode not in ("ddp", "ulysses") else self.model.no_sync():  # type: ignore[operator]  # DDP has it
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
    they all pass to ``model`` whole; ``liger_kernel.ulysses`` says what it makes of them. Weights
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
    from liger_kernel import ulysses  # needs Transformers

    if mesh.ndim > 2:
        raise ValueError(f"parallelize: mesh of mode {mode} must have 1 or 2 dims, got {mesh.ndim}")
    shared = (
        mesh if mesh.ndim == 2 else DeviceMesh(mesh.device_type, mesh.mesh[None], mesh_dim_names=("data", "sequence"))
    )
    ulysses.share_rows(model, shared.get_group(1))
    return shared, DeviceMesh(mesh.device_type, mesh.mesh.flatten()) if mesh.ndim == 2 else mesh


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers: what Transformers says must not be split, otherwise the content
    of the outermost lists of modules."""
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
    g = g.contiguous().clone()
    dist.all_reduce(g, group=group)
    return g


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
    if max_norm is not None:
        for group in by_sharding(parameters):
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


def grad_norm(grads: Iterable[Tensor]) -> Tensor:
    """The 2-norm of gradients of all shardings together; 0-dim and plain. Every rank must call
    it."""
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
    rows = _slices(p) if isinstance(p, DTensor) else [p.shape[0] if p.ndim else 1]
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
    if (
        width % local.block_size == 0
    ):  # a row has whole blocks: scales are sharded by the same rows, however many a rank has
        parts["scale"] = local.scale.view(-1, width // local.block_size)
    if not isinstance(t, DTensor):
        return parts
    rows = {"codes": t.shape[0], "scale": t.shape[0] if parts["scale"].ndim == 2 else t.numel() // local.block_size}
    sharded = {}
    for name, part in parts.items():
        shape = torch.Size((rows[name], *part.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        sharded[name] = DTensor.from_local(
            part, t.device_mesh, t.placements, run_check=False, shape=shape, stride=stride
        )
    return sharded  # type: ignore[return-value]  # a DTensor is a Tensor


Hook = Callable[..., Any]
_SHARDING = (
    "torch.distributed.fsdp.",
    "deepspeed.",
)  # whose hooks bring a module's parameters for the time of its call
_TENSOR = (
    "torch.distributed.tensor.",
    "transformers.distributed.",
)  # whose hooks, or forward, spread a module's work over ranks


def _is_from(function: Any, packages: tuple[str, ...]) -> bool:
    function = getattr(function, "func", function)
    return (getattr(getattr(function, "__func__", function), "__module__", None) or "").startswith(packages)


HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"  # attributes of modules


def _hooks(module: nn.Module) -> list[Hook]:
    return [hook for name in HOOKS for hook in getattr(module, name).values()]


def local(t: Tensor) -> Tensor:
    """The part of a ``DTensor`` that this rank holds, itself and no view; any other tensor
    itself."""
    return t._local_tensor if isinstance(t, DTensor) else t


def unsharded_class(module: nn.Module) -> type:
    """Return the class of ``module`` before ``fully_shard`` made a class of its own."""
    cls = type(module)
    return (
        cls.__bases__[1]
        if isinstance(module, FSDPModule) and cls.__bases__[:1] == (FSDPModule,) and len(cls.__bases__) == 2
        else cls
    )


def is_linear(head: nn.Module) -> bool:
    """Whether ``head`` is an ``nn.Linear``, possibly fully sharded, and no derived class."""
    return unsharded_class(head) is nn.Linear


def is_own_linear(function: Callable) -> bool:
    """Whether ``function``, in the place of ``F.linear``, computes the same: ZeRO-3 has one that
    keeps less for the backward."""
    return _is_from(function, ("deepspeed.runtime.zero.",))


def hooks_of_users(module: nn.Module) -> Iterator[Hook]:
    """The hooks on ``module`` except those that spread parameters or work over ranks."""
    return (hook for hook in _hooks(module) if not _is_from(hook, (*_SHARDING, *_TENSOR)))


def is_hooked(head: nn.Module) -> bool:
    """Whether hooks on ``head`` do more than to provide its parameters."""
    return any(not _is_from(hook, _SHARDING) for hook in _hooks(head))


def is_sharded(head: nn.Module) -> bool:
    """Whether parameters of ``head`` or its parts exist only while they, or a model around them,
    are called (FSDP1, FSDP2, ZeRO-3)."""
    for m in head.modules():
        if isinstance(m, FullyShardedDataParallel) or any(_is_from(hook, _SHARDING) for hook in _hooks(m)):
            return True
        # FSDP1 puts views of what it has gathered in the place of parameters, new ones each time;
        # functional_call puts any tensors there
        if _ranks() and any(map(_is_view, (*m._parameters.values(), *m.__dict__.values()))):
            return True
    return any(hasattr(p, "ds_id") for p in head.parameters())


def _ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _is_view(t: Any) -> bool:
    return isinstance(t, Tensor) and not isinstance(t, nn.Parameter) and (type(t) is not Tensor or t._is_view())


def bare(head: nn.Module) -> nn.Module:
    """Return what FSDP1 has wrapped, or ``head``."""
    return head.module if isinstance(head, FullyShardedDataParallel) else head


def needs_entering(head: nn.Module) -> bool:
    """Whether the parameters of ``head`` exist only while it is called (FSDP1, FSDP2, ZeRO-3),
    and nobody else observes its calls."""
    hooks = _hooks(head)
    sharded = isinstance(head, FullyShardedDataParallel) or any(_is_from(hook, _SHARDING) for hook in hooks)
    return sharded and all(_is_from(hook, (*_SHARDING, *_TENSOR)) for hook in hooks)


def entered(head: nn.Module, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run ``function(*args, **kwargs)`` instead of one call of ``head``: its parameters are
    gathered once and its gradients reduced once.

    A sharded head that is called chunk by chunk would be gathered for each chunk. ``function`` may
    call ``bare(head).forward``.
    """
    return (
        call_instead(head, bare(head), function, *args, **kwargs) if needs_entering(head) else function(*args, **kwargs)
    )


def call_instead(head: nn.Module, inner: nn.Module, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call ``head``, with ``function`` instead of the ``forward`` of ``inner``, which is a part
    of the head or the head itself."""
    hooks = {name: getattr(head, name) for name in ("_forward_pre_hooks", "_forward_hooks")}
    forward = inner.__dict__.get("forward")

    def leave() -> None:
        inner.__dict__.pop("forward", None)
        if forward is not None:
            inner.__dict__["forward"] = forward

    def instead(*args: Any, **kwargs: Any) -> Any:
        leave()
        return function(*args, **kwargs)

    inner.__dict__["forward"] = instead
    for name, all_hooks in hooks.items():
        if any(_is_from(hook, _TENSOR) for hook in all_hooks.values()):  # they are for logits
            setattr(head, name, OrderedDict((k, hook) for k, hook in all_hooks.items() if _is_from(hook, _SHARDING)))
    try:
        return head(*args, **kwargs)
    finally:
        leave()
        for name, all_hooks in hooks.items():
            setattr(head, name, all_hooks)


def received(head: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor] | None:
    """Return ``head`` and the rows that it computes with, for the arguments of a call; None if only
    the call itself tells.

    For a head that is sharded by vocabulary, the rows are plain and whole on every rank, and their
    gradient is this rank's term. What the head's own hooks gather (for example a sequence that is
    spread over ranks) is gathered here.
    """
    if not is_tensor_parallel(head):
        return head, x
    if not _is_vocabulary_parallel(head):
        return None
    for hook in head._forward_pre_hooks.values():
        if _is_from(hook, _TENSOR):
            out = hook(head, (x,))
            x = x if out is None else out[0] if isinstance(out, tuple) else out
    mesh = _mesh_of(head.weight)
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return VocabularyParallel(head), own_part(x.redistribute(placements=[Replicate()]), [Partial()])


def is_tensor_parallel(head: nn.Module) -> bool:
    """Whether the work of ``head``, or of a part of it, is spread over ranks."""
    return any(map(_is_tensor_parallel, head.modules()))


def _is_tensor_parallel(module: nn.Module) -> bool:
    return any(_is_from(hook, _TENSOR) for hook in _hooks(module)) or _is_from(module.__dict__.get("forward"), _TENSOR)


def _is_vocabulary_parallel(head: nn.Module) -> bool:
    if not is_linear(head) or not all(_is_from(hook, (*_SHARDING, *_TENSOR)) for hook in _hooks(head)):
        return False
    parameters = [p for p in (head.weight, head.bias) if p is not None]
    return (
        all(isinstance(p, DTensor) and p.placements[-1] == Shard(0) for p in parameters)
        and min(_slices(head.weight)) > 0
    )


def _mesh_of(w: Any) -> DeviceMesh:
    """The ranks among which classes are spread: the last dim, whatever shards them further."""
    mesh = w.device_mesh
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]


def _slices(w: Any) -> list[int]:
    """Classes of each rank."""
    V, ranks = w.shape[0], _mesh_of(w).size()
    step = -(-V // ranks)
    return [max(0, min(step, V - rank * step)) for rank in range(ranks)]


class VocabularyParallel(nn.Module):
    """A linear head (V, H) whose classes are spread over ranks. ``received`` makes it, together
    with the rows to call it with."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head: Any = head
        self.slices = _slices(self.head.weight)
        self.out_features = sum(self.slices)

    def _local(self) -> tuple[Tensor, Tensor | None, DeviceMesh]:
        w, b = self.head.weight, self.head.bias
        return w.to_local(), None if b is None else b.to_local(), w.device_mesh

    def forward(self, x: Tensor) -> Tensor:
        """Gather all logits (..., V) on every rank, for readers that need them."""

        def logits(x: Tensor) -> Tensor:
            w, b, mesh = self._local()
            shape = torch.Size((*x.shape[:-1], self.out_features))
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(
                F.linear(x, w, b), mesh, [Shard(x.ndim - 1)], run_check=False, shape=shape, stride=stride
            ).full_tensor()

        return entered(self.head, logits, x)

    def cross_entropy(
        self, x: Tensor, target: Tensor, *, stats: bool = False, ignore_index: int = -100, **options: Any
    ) -> Any:
        """``linear_cross_entropy`` of rows x (M, H) and target (M,). Logits never leave a rank:
        ranks exchange three numbers per row, and with ``stats`` the best class of each slice. With
        ``stats`` it returns loss, None and predicted classes (M,).

        ``options`` are those of ``vocab_parallel_linear_cross_entropy``.
        """

        def loss(x: Tensor) -> Any:
            w, b, mesh = self._local()
            found = vocab_parallel_linear_cross_entropy(
                x, w, target, mesh.get_group(), b, ignore_index=ignore_index, sizes=self.slices, sum_dx=False, **options
            )
            if not stats:
                return found
            sign = -1.0 if options.get("logit_scale", 1.0) < 0 else 1.0
            best = _best_classes(
                x.detach(),
                w.detach(),
                None if b is None else b.detach(),
                sign,
                mesh,
                sum(self.slices[: mesh.get_local_rank()]),
            )
            return found, None, best.where(as_index(target) != ignore_index, -1)

        return entered(self.head, loss, x)


@torch.no_grad()
def _best_classes(x: Tensor, w: Tensor, b: Tensor | None, sign: float, mesh: DeviceMesh, first: int) -> Tensor:
    """The class of the largest logit of each row, of all ranks' classes; the first of equals."""
    rows = auto_chunk_rows(x.shape[0], w.shape[0], x.shape[1], x.element_size(), on_gpu(x))
    value, index = (
        torch.cat(parts) for parts in zip(*((sign * F.linear(c, w, b)).float().max(-1) for c in x.split(rows)))
    )
    own = torch.stack((value.double(), (index + first).double()))
    parts = own.new_empty(mesh.size(), *own.shape)
    dist.all_gather(list(parts.unbind()), own, group=mesh.get_group())
    return parts[:, 1].gather(0, parts[:, 0].argmax(0)[None])[0].long()
