"""What a loss needs of an output head that is sharded or spread over ranks, by hooks of FSDP, ZeRO
or tensor parallelism."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from liger_kernel.ops._core.operator import as_index, on_gpu
from liger_kernel.ops._core.shards import own_part
from liger_kernel.ops.losses.chunks import auto_chunk_rows
from liger_kernel.ops.losses.vocab_parallel.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from liger_kernel.parallel.distributed import (
    DeviceMesh,
    DTensor,
    FSDPModule,
    FullyShardedDataParallel,
    Partial,
    Replicate,
    Shard,
    assembled,
)

Hook = Callable[..., Any]
# whose hooks bring a module's parameters for the time of its call
_SHARDING = ("torch.distributed.fsdp.", "deepspeed.")
# whose hooks, or forward, spread a module's work over ranks
_TENSOR = ("torch.distributed.tensor.", "transformers.distributed.")


def _is_from(function: Any, packages: tuple[str, ...]) -> bool:
    # some packages register partials
    function = getattr(function, "func", function)
    return (getattr(getattr(function, "__func__", function), "__module__", None) or "").startswith(packages)


HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"  # attributes of modules


def _hooks(module: nn.Module) -> list[Hook]:
    return [hook for name in HOOKS for hook in getattr(module, name).values()]


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


# hooks that do nothing unless asked, only ask for gradients, or take away a mask
_HARMLESS = re.compile(r"transformers\.utils\.output_capturing|make_inputs_require_grads?$|train\.model\.without_mask$")


def observed_inside(model: nn.Module) -> bool:
    """Whether hooks see what the modules in ``model`` compute, or change it, as NEFTune's noise does."""
    # most have none, and a model with adapters has thousands
    inside = (m for m in model.modules() if any(map(vars(m).get, HOOKS)) and m is not model)
    seeing = lambda hook: not _HARMLESS.search(f"{hook.__module__}.{getattr(hook, '__qualname__', '')}")
    return _has_any_global_hook() or any(seeing(hook) for m in inside for hook in hooks_of_users(m))


def is_compiled(m: nn.Module) -> bool:
    """Whether ``torch.compile`` runs the calls of ``m``."""
    return type(m).__module__.startswith("torch._dynamo") or bool(vars(m).get("_compiled_call_impl"))


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


def gathers_when_called(head: nn.Module) -> bool:
    """Whether the parameters of ``head`` exist only while it is called (FSDP1, FSDP2, ZeRO-3),
    and nobody else observes its calls."""
    hooks = _hooks(head)
    sharded = isinstance(head, FullyShardedDataParallel) or any(_is_from(hook, _SHARDING) for hook in hooks)
    return sharded and all(_is_from(hook, (*_SHARDING, *_TENSOR)) for hook in hooks)


def run_gathered(head: nn.Module, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run ``function(*args, **kwargs)`` instead of one call of ``head``: its parameters are
    gathered once and its gradients reduced once.

    A sharded head that is called chunk by chunk would be gathered for each chunk. ``function`` may
    call ``bare(head).forward``.
    """
    return (
        call_instead(head, bare(head), function, *args, **kwargs)
        if gathers_when_called(head)
        else function(*args, **kwargs)
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

    # in the instance: a class may be shared by layers that run in other threads
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


def inputs_of(head: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor] | None:
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
        if _is_from(hook, _TENSOR):  # it gathers rows that are spread over ranks
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
        and min(classes_of_ranks(head.weight)) > 0
    )


def _mesh_of(w: Any) -> DeviceMesh:
    """The ranks among which classes are spread: the last dim, whatever shards them further."""
    # under FSDP2 with tensor parallelism, the first dim shards every weight further
    mesh = w.device_mesh
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]


def classes_of_ranks(w: Any) -> list[int]:
    """Classes of each rank."""
    V, ranks = w.shape[0], _mesh_of(w).size()
    # as DTensor splits: the last ranks may have fewer classes, or none
    step = -(-V // ranks)
    return [max(0, min(step, V - rank * step)) for rank in range(ranks)]


class VocabularyParallel(nn.Module):
    """A linear head (V, H) whose classes are spread over ranks. ``inputs_of`` makes it, together
    with the rows to call it with."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head: Any = head
        self.slices = classes_of_ranks(self.head.weight)
        self.out_features = sum(self.slices)

    def _local(self) -> tuple[Tensor, Tensor | None, DeviceMesh]:
        w, b = self.head.weight, self.head.bias
        return w.to_local(), None if b is None else b.to_local(), w.device_mesh

    def forward(self, x: Tensor) -> Tensor:
        """Gather all logits (..., V) on every rank, for readers that need them."""

        def logits(x: Tensor) -> Tensor:
            w, b, mesh = self._local()
            shape = torch.Size((*x.shape[:-1], self.out_features))
            return assembled(F.linear(x, w, b), mesh, (Shard(x.ndim - 1),), shape).full_tensor()

        return run_gathered(self.head, logits, x)

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
            # a negative scale makes the smallest logit the largest
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

        return run_gathered(self.head, loss, x)


@torch.no_grad()
def _best_classes(x: Tensor, w: Tensor, b: Tensor | None, sign: float, mesh: DeviceMesh, first: int) -> Tensor:
    """The class of the largest logit of each row, of all ranks' classes; the first of equals."""
    # products of chunks again, only for who asked for statistics
    rows = auto_chunk_rows(x.shape[0], w.shape[0], x.shape[1], x.element_size(), on_gpu(x))
    value, index = (
        torch.cat(parts) for parts in zip(*((sign * F.linear(c, w, b)).float().max(-1) for c in x.split(rows)))
    )
    # one message: fp64 holds every index and every logit of 32 bits
    own = torch.stack((value.double(), (index + first).double()))
    parts = own.new_empty(mesh.size(), *own.shape)
    dist.all_gather(list(parts.unbind()), own, group=mesh.get_group())
    return parts[:, 1].gather(0, parts[:, 0].argmax(0)[None])[0].long()
