"""Losses of pairs of sequences under a linear head, given as a function of their log-probabilities.

Shapes: ``_input`` (2B, T, H) and ``target`` (2B, T), the first B sequences chosen and the last B
rejected, in the same order; weight (V, H), bias (V,). With log pi(y) the sum over a sequence's
counted tokens of their log-probabilities, or with ``average_log_prob`` their mean,

    loss = preference_loss_fn(log pi(chosen), log pi(rejected), ...) + alpha * NLL
    NLL  = -(mean of logp over the tokens of all chosen sequences)

Tokens whose target is ``ignore_index`` have no part in anything. A sequence without any token has
log-probability 0, and an NLL of no tokens is 0.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.nn.options import WithOptions
from liger_kernel.ops._core import checks
from liger_kernel.ops._core.operator import as_index
from liger_kernel.ops.losses.linear_loss import Tokens, counted, linear_loss

__all__ = ["LigerFusedLinearPreferenceBase"]

Found = tuple[Tensor, tuple[Tensor, ...]]


def passed_to(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a signature: a call is one of ``function`` with all arguments by name, of which what
    the body returns replaces some, or is added."""

    def decorate(of):
        parameters = inspect.signature(of).parameters
        defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        names = tuple(parameters)

        @functools.wraps(of)
        def call(*args, **kwargs):
            changed = of(*args, **kwargs)  # refuses what the signature does not have
            return function(**defaults | dict(zip(names, args)) | kwargs | changed)

        return call

    return decorate


class LossFunction:
    """``apply(...)`` for classes whose ``forward(cls, ctx, ...)`` returns a differentiable loss;
    arguments by position or by name.

    The engine computes the gradients: a ``backward`` in a subclass is not called, and ``ctx``
    exists only for the signature.
    """

    forward: Any
    _unbound: bool

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        # the base's own, which ``super().forward(cls, ctx, ...)`` calls
        cls._unbound = "cls" in inspect.signature(cls.forward).parameters

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Found:
        ctx = torch.autograd.function.FunctionCtx()
        return cls.forward(cls, ctx, *args, **kwargs) if cls._unbound else cls.forward(ctx, *args, **kwargs)


def plain_logprobs(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int, average: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of sequences (n,), those of all classes (n, T, V), and the logits, in
    plain PyTorch: for a ``forward`` with a loop of its own."""
    logits = F.linear(x, weight, bias)
    every, counts = logits.float().log_softmax(-1), target != ignore_index
    logps = every.gather(-1, target.where(counts, 0)[..., None])[..., 0].where(counts, 0).sum(-1)
    return logps / counts.sum(-1).clamp(min=1) if average else logps, every, logits


def sequences(
    target: Tensor, ignore_index: int, average: bool, group: int, compact: bool, whole: bool
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The numbers of counted tokens of sequences ``target`` (..., T), the numbers that divide their
    log-probabilities, and options of ``linear_loss``."""
    counts = (target != ignore_index).sum(-1)
    kept = compact and counted(target, ignore_index, group)
    head = dict(group=group, ignore_index=ignore_index, compact=kept, whole=whole, mean_logit=True)
    return counts, counts.clamp(min=1) if average else torch.ones_like(counts), head


class LigerFusedLinearPreferenceBase(LossFunction):
    """The base of a loss of pairs: a subclass has ``preference_loss_fn``, and a ``forward`` if
    it has other arguments."""

    @staticmethod
    def preference_loss_fn(*args: Any, **kwargs: Any) -> Any:
        """What some pairs add to the loss, 0-dim, or that and tensors to return with it.

        It is called with ``(chosen_logps (n,), rejected_logps (n,), full_target (2B, T), beta=,
        **loss_kwargs)`` and, with a reference, ``ref_chosen_logps`` and ``ref_rejected_logps``
        (n,), for one chunk after the other. Losses and 0-dim tensors are added, other tensors are
        concatenated. For a mean over the batch, divide by ``full_target.shape[0] // 2``.
        """
        raise NotImplementedError("preference_loss_fn")

    @staticmethod
    def chunk_forward(
        input_chunk, weight, target_chunk, bias=None, ignore_index=-100, compute_nll_loss=True,
        chosen_nll_target_chunk=None, average_log_prob=True,
    ):  # fmt: skip
        """Log-probabilities and logits of chosen and rejected, and the summed NLL of the chosen;
        see ``plain_logprobs``."""
        logps, every, logits = plain_logprobs(input_chunk, weight, target_chunk, bias, ignore_index, average_log_prob)
        n = target_chunk.shape[0] // 2
        nll: Tensor | float = 0.0
        if compute_nll_loss:
            y = target_chunk[:n] if chosen_nll_target_chunk is None else chosen_nll_target_chunk
            nll = F.nll_loss(every[:n].flatten(0, 1), y.flatten(), reduction="sum", ignore_index=ignore_index)
        return logps[:n], logps[n:], logits[:n], logits[n:], nll

    @staticmethod
    def forward(
        cls, ctx, _input, weight, target, bias=None, chunk_size=1, ignore_index=-100, alpha=1.0, beta=0.1,
        compute_nll_loss=True, nll_target=None, compiled=True, use_ref_model=False, ref_input=None, ref_weight=None,
        ref_bias=None, average_log_prob=True, *, ref_chosen_logps=None, ref_rejected_logps=None, whole_batch=False,
        compact=True, **loss_kwargs,
    ):  # fmt: skip
        """``(loss, (chosen_logps (B,), rejected_logps (B,), chosen_logits_mean,
        rejected_logits_mean, nll_loss, *what preference_loss_fn returned))``.

        The means are over counted tokens and the vocabulary. ``nll_target`` ((B, T) or (2B, T)):
        other targets of the chosen sequences for the NLL, which cost products of their own. The
        reference is a head on ``ref_input`` (2B, T, H), or ``ref_chosen_logps`` and
        ``ref_rejected_logps`` (B,), sums over tokens. ``whole_batch``: ``preference_loss_fn``
        receives all pairs at once, which costs one more product. ``compact``: omit ignored tokens
        from all products, and wait once for their number. ``chunk_size`` and ``compiled`` have no
        effect: the engine chooses chunks, and nothing is compiled.
        """
        name = cls.__name__
        check_sequences(name, _input, target, pairs=True)
        target = as_index(target)
        N, T, H = _input.shape
        B = N // 2
        if nll_target is not None and nll_target.shape not in ((B, T), (N, T)):
            raise ValueError(f"{name}: nll_target must have shape {(B, T)} or {(N, T)}, got {tuple(nll_target.shape)}")
        nll_y = as_index(nll_target[:B].reshape(-1)) if compute_nll_loss and nll_target is not None else None
        # a pair's sequences beside each other: a chunk has whole pairs
        paired = lambda t: t.unflatten(0, (2, B)).transpose(0, 1)
        y = paired(target)
        counts, lengths, head = sequences(y, ignore_index, average_log_prob, 2 * T, compact, whole_batch)
        tokens_of = counts.sum(0).clamp(min=1)
        ref = None
        if ref_chosen_logps is not None and ref_rejected_logps is not None:
            ref = torch.stack((ref_chosen_logps, ref_rejected_logps), 1).detach() / lengths
        elif use_ref_model:
            known, reference = "ref_chosen_logps and ref_rejected_logps", (ref_input, ref_weight, target, ref_bias)
            ref = reference_logprobs(name, known, *reference, paired, **head).sum(1).view(B, 2) / lengths

        def fn(tokens: Tokens, first: int, last: int) -> Found:
            logp = tokens.logp.view(last - first, 2, T).sum(-1)
            chosen, rejected = (logp / lengths[first:last]).unbind(1)
            names = "ref_chosen_logps", "ref_rejected_logps"
            refs = {} if ref is None else dict(zip(names, ref[first:last].unbind(1)))
            loss, *extra = several(cls.preference_loss_fn(chosen, rejected, target, beta=beta, **refs, **loss_kwargs))
            nll = -logp[:, 0].sum() / tokens_of[0] if compute_nll_loss and nll_y is None else logp.new_zeros(())
            mean_logit: Any = tokens.mean_logit
            logits = mean_logit.view(last - first, 2, T).sum((0, 2)) / tokens_of
            return loss + alpha * nll, (chosen, rejected, *logits.unbind(0), nll, *extra)

        x = paired(_input).reshape(N * T, H)
        loss, (chosen, rejected, chosen_logits, rejected_logits, nll, *extra) = linear_loss(
            fn, x, weight, y.reshape(N * T), bias, **head
        )
        if nll_y is not None:
            n = (nll_y != ignore_index).sum().clamp(min=1)
            of_nll = lambda t, *_: -t.logp.sum() / n
            how = dict(group=block(B * T), ignore_index=ignore_index, compact=compact)
            apart, _ = linear_loss(of_nll, _input[:B].reshape(B * T, H), weight, nll_y, bias, **how)
            loss, nll = loss + alpha * apart, apart.detach()
        return loss, (chosen, rejected, chosen_logits, rejected_logits, nll, *extra)


class PairLoss(WithOptions):
    """A module over a loss of pairs that needs nothing but the policy; ``function`` computes it."""

    function = LigerFusedLinearPreferenceBase

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    label_smoothing: float = 0.0
    compute_nll_loss: bool = True
    compiled: bool = True

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Found:
        return self.function.apply(_input, lin_weight, target, bias, **self.options())


def check_sequences(name: str, x: Tensor, target: Tensor, pairs: bool) -> None:
    """Raise ``ValueError`` if the input is not a batch of sequences."""
    checks.dims(name, "(2B, T, H)" if pairs else "(B, T, H)", _input=x)
    if pairs and x.shape[0] % 2:
        raise ValueError(f"{name}: _input must hold as many chosen as rejected sequences, got {x.shape[0]}")
    checks.shape(name, x.shape[:2], target=target)


def sigmoid(z: Tensor) -> Tensor:
    """torch.sigmoid with a gradient that stays accurate where it saturates at 1."""
    return F.logsigmoid(z).exp()


def several(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def reference_logprobs(
    name: str, other: str, x: Tensor | None, w: Tensor | None, target: Tensor, bias: Tensor | None,
    arranged: Callable[[Tensor], Tensor] = lambda t: t, **options: Any,
) -> Tensor:  # fmt: skip
    """Log-probabilities (N, T) of each token under the reference, without gradient: x (N, T, H),
    target (N, T), ``options`` of ``linear_loss``; sequences in the order that ``arranged`` gives them.
    Raise ``ValueError`` if a head is missing, with what may be given instead, or does not fit ``target``.

    They are computed like the policy's, in the same chunks, so that equal models have bit-identical
    log-probabilities.
    """
    if x is None or w is None:
        raise ValueError(f"{name}: ref_input and ref_weight, or {other}, must be given with use_ref_model, got None")
    N, T = target.shape
    if x.ndim != 3 or x.shape[:2] != target.shape:
        raise ValueError(f"{name}: ref_input must have shape ({N}, {T}, H), got {tuple(x.shape)}")
    of_tokens = lambda tokens, *_: (tokens.logp.sum(), (tokens.logp,))
    with torch.no_grad():
        rows = arranged(x).reshape(N * T, x.shape[-1])
        _, (logp,) = linear_loss(of_tokens, rows, w, arranged(target).reshape(-1), bias, **options)
    return logp.view(N, T)


def block(M: int) -> int:
    """A group for losses of tokens: small enough for any chunk, and fewer than M, as the engine
    counts groups on the host."""
    return max(min(64, M & -M), 1)
