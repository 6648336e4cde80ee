"""The experts that a forward chose, recorded, and chosen again (routing replay, arXiv:2510.11370).

Routers of Transformers choose by ``topk`` over as many scores as there are experts. In a forward
that is replayed, the given indices take the place of those, with the scores that the live router has
for them: weights and their gradients are the live router's, by the family's own code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from liger_kernel.transformers.recognise.experts import DOWN, GATE_UP, is_wrapper

_TOPK = {torch.topk, Tensor.topk}
_MASK = {torch.masked_fill, Tensor.masked_fill}
_WATCHED = _TOPK | _MASK


class _Choice(TorchFunctionMode):
    """One choice of a layer's router: ``chosen`` has it afterwards, which is ``given`` unless that is
    None."""

    chosen: Tensor | None = None

    def __init__(self, name: str, experts: int, tokens: torch.Size, given: Tensor | None):
        super().__init__()
        self.name, self.experts, self.tokens, self.given = name, experts, tokens, given

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in _WATCHED or not args or args[0].shape[-1:] != (self.experts,):
            return result
        if function in _MASK:
            # of groups of experts that are not chosen: scores of experts in them count if these are given
            return result if self.given is None else args[0]
        self.chosen = result.indices
        if self.given is None:
            return result
        given, (*tokens, k) = self.given, result.indices.shape
        if given.shape[-1] != k or given.numel() != result.indices.numel():
            raise ValueError(
                f"replay_routes: {self.name} chooses {k} experts for {torch.Size(tokens).numel()} tokens, got routes "
                f"of shape {tuple(given.shape)}"
            )
        given = given.to(result.indices).view(*tokens, k)
        self.chosen = torch.where(given < 0, result.indices, given)
        return torch.return_types.topk((args[0].gather(-1, self.chosen), self.chosen))


def _layers(op: str, model: nn.Module) -> list[tuple[str, nn.Module, nn.Module, int]]:
    """Name, block, experts and their number of each layer with experts; experts as the block calls
    them, with the wrappers of their adapters."""
    found, modules = [], dict(model.named_modules())
    for name, experts in modules.items():
        down = getattr(experts, DOWN, None)
        if is_wrapper(experts) or not (isinstance(down, Tensor) and down.ndim == 3 and hasattr(experts, GATE_UP)):
            continue
        above = name.rpartition(".")[0]
        while is_wrapper(modules[above]):
            name, above = above, above.rpartition(".")[0]
        found.append((above, modules[above], modules[name], down.shape[0]))
    if not found:
        raise ValueError(f"{op}: {type(model).__name__} must have experts in packed weights, got none")
    return found


@contextlib.contextmanager
def _watched(op: str, model: nn.Module, given: Sequence[Tensor] | None = None) -> Iterator[list[Tensor]]:
    """The routes of what runs meanwhile, which are ``given`` unless that is None."""
    layers = _layers(op, model)
    if given is not None and len(given) != len(layers):
        raise ValueError(f"{op}: routes must be of {len(layers)} layers, got {len(given)}")
    found: list[list[Tensor]] = [[] for _ in layers]
    open_choices: dict[int, _Choice] = {}

    def begin(i: int, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError(f"{op}: a compiled model cannot be watched")
        name, _, _, experts = layers[i]
        open_choices[i] = _Choice(name, experts, args[0].shape[:-1], None if given is None else given[i])
        open_choices[i].__enter__()

    def end(i: int) -> _Choice | None:
        choice = open_choices.pop(i, None)
        if choice is not None:
            choice.__exit__(None, None, None)
        return choice

    def chosen(i: int) -> None:
        choice = end(i)
        if choice is None:
            return
        if choice.chosen is None:
            raise ValueError(f"{op}: {choice.name} must choose its experts by topk, and chooses them otherwise")
        # a checkpointed layer chooses once more in the backward
        if torch._C._current_graph_task_id() == -1:
            found[i].append(choice.chosen.view(*choice.tokens, -1))

    hooks = []
    # who records sees what is chosen in the end, whichever context is inside of the other
    first, last = dict(prepend=given is not None), dict(prepend=given is None)
    for i, (_, block, experts, _) in enumerate(layers):
        hooks += [
            block.register_forward_pre_hook(lambda _, args, i=i: begin(i, args), **first),
            experts.register_forward_pre_hook(lambda *_, i=i: chosen(i), **last),
            # or an error came before its experts
            block.register_forward_hook(lambda *_, i=i: end(i) and None, always_call=True, **last),
        ]
    routes: list[Tensor] = []
    try:
        yield routes
        # those of a generation: of the prompt, then of each token
        routes += [torch.cat(each, -2) for each in found if each]
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def record_routes(model: nn.Module) -> Iterator[list[Tensor]]:
    """Record which experts the forwards inside of this context choose.

    The list that it gives is filled at the end: for each layer with experts int64 (B, T, K), or as
    its block sees tokens; of successive forwards, as those of ``generate``, one after another along
    T. Raises ``ValueError`` for a model without experts in packed weights, and for routers that do
    not choose by ``topk``.
    """
    with _watched("record_routes", model) as routes:
        yield routes


@contextlib.contextmanager
def replay_routes(model: nn.Module, routes: Tensor | Sequence[Tensor]) -> Iterator[None]:
    """Let the forward inside of this context choose these experts, with the live router's weights.

    ``routes``: those of ``record_routes``, or of a sampler, (..., layers, K). -1 stands for what the
    router chooses. The backward of a model with checkpointed layers belongs into the context, too.
    Raises ``ValueError`` for other numbers of layers, tokens or experts.
    """
    with _watched("replay_routes", model, routes.unbind(-2) if isinstance(routes, Tensor) else routes):
        yield
