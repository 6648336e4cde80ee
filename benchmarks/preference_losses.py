"""Losses of ``chunked_loss`` as operators to measure: as trainers call them, on real shapes,
against plain formulas and LinkedIn's package.

Shapes: x (N, T, H) hidden states of N sequences (with pairs: the chosen ones first); w (V, H);
target (N, T).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.bench.measured import MeasuredOp
from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss, LigerFusedLinearORPOLoss
from liger_kernel.ops._core.operator import Case, Cost, T, acc, nbytes

BETA = 0.1


def logprobs(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    z = F.linear(x, w)
    return z.to(acc(z.dtype)).log_softmax(-1).gather(-1, target[..., None])[..., 0]


def orpo_reference(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """arXiv:2403.07691, with the likelihood of the chosen answers."""
    logp = logprobs(x, w, target)
    chosen, rejected = logp.mean(1).chunk(2)
    odds = chosen - rejected - torch.log1p(-chosen.exp()) + torch.log1p(-rejected.exp())
    return -logp[: len(chosen)].mean() - BETA * F.logsigmoid(odds).mean()


def dpo_reference(x: Tensor, w: Tensor, target: Tensor, ref_x: Tensor, ref_w: Tensor) -> Tensor:
    """arXiv:2305.18290."""
    with torch.no_grad():
        ref = logprobs(ref_x, ref_w, target).sum(1)
    chosen, rejected = (logprobs(x, w, target).sum(1) - ref).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def grpo_reference(x: Tensor, w: Tensor, target: Tensor, advantages: Tensor) -> Tensor:
    """arXiv:2402.03300 on the policy's own samples, without a penalty: the ratio is 1, so it is
    never clipped."""
    logp = logprobs(x, w, target)
    return -((logp - logp.detach()).exp() * advantages[:, None]).mean(1).mean()


def orpo(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return LigerFusedLinearORPOLoss(beta=BETA, compact=False)(w, x, target)[0]


def dpo(x: Tensor, w: Tensor, target: Tensor, ref_x: Tensor, ref_w: Tensor) -> Tensor:
    return LigerFusedLinearDPOLoss(beta=BETA, compact=False)(w, x, target, ref_input=ref_x, ref_weight=ref_w)[0]


def grpo(x: Tensor, w: Tensor, target: Tensor, advantages: Tensor) -> Tensor:
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="grpo", compact=False)
    return loss(x, w, target, torch.ones_like(target), advantages)[0]


def _theirs(call: Callable[[Any], Callable[..., Any]]) -> Callable[..., Tensor]:
    """Adapt LinkedIn's function: ``call(their chunked_loss)`` takes the arguments and returns
    the loss and more."""

    def rival(functional: Any, *args: Any, **kwargs: Any) -> Tensor:
        return call(importlib.import_module("liger_kernel.chunked_loss"))(*args, **kwargs)[0]

    return rival


THEIRS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "orpo": lambda m: lambda x, w, target: m.LigerFusedLinearORPOLoss(beta=BETA)(w, x, target),
    "dpo": lambda m: (
        lambda x, w, target, ref_x, ref_w: m.LigerFusedLinearDPOLoss(beta=BETA)(
            w, x, target, ref_input=ref_x, ref_weight=ref_w
        )
    ),
    "grpo": lambda m: (
        lambda x, w, target, advantages: m.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="grpo")(
            x, w, target, torch.ones_like(target), advantages
        )
    ),
}


def _head(*shape: int, dtype: torch.dtype) -> Tensor:
    return 0.02 * torch.randn(*shape, dtype=dtype)


def _arguments(name: str, N: int, L: int, H: int, V: int) -> dict[str, T]:
    found = dict(
        x=T((N, L, H)),
        w=T((V, H), _head),
        target=T((N, L), lambda *shape, dtype: torch.randint(0, V, shape), dtype=torch.int64),
    )
    if name == "dpo":
        found |= dict(ref_x=T((N, L, H), grad=False), ref_w=T((V, H), _head, grad=False))
    return found | (dict(advantages=T((N,), grad=False)) if name == "grpo" else {})


def _cost(**args: Tensor) -> Cost:
    (M, H), V = args["x"].flatten(0, 1).shape, args["w"].shape[0]
    read, product = nbytes(*args.values()), (M, V, H)
    return Cost(read, nbytes(args["x"], args["w"]), gemms=([product] * (1 + ("ref_w" in args)), [(M, H, V), (V, H, M)]))


def _loss(fn: Callable[..., Tensor], reference: Callable[..., Tensor]) -> MeasuredOp:
    name = fn.__name__
    cases = [
        Case("small", _arguments(name, 4, 6, 16, 50)),
        Case("llama-3.2-1b", _arguments(name, 8, 1024, 2048, 128256), gpu=True),
    ]
    return MeasuredOp(
        name, fn, reference, cases, _cost, reference.__doc__ or "", {"upstream": _theirs(THEIRS[name])}, {}
    )


LOSSES: dict[str, MeasuredOp] = {
    op.name: op for op in (_loss(orpo, orpo_reference), _loss(dpo, dpo_reference), _loss(grpo, grpo_reference))
}
