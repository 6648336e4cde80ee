"""Prompts computed once: batches of several answers to a prompt, as reinforcement learning has them.

A batch (B, T) whose last columns are answers becomes one row of N tokens: each prompt once, then the
answers. Hidden states come back in the shape of the batch, and gradients of a prompt are summed.

    0 p p p | a a 0
    0 p p p | b 0 0      the layers get    p p p q q | a a b c c c
    0 0 q q | c c c      positions         1 2 3 2 3 | 4 5 4 4 5 6

Rows with the same tokens before their answers share a prompt, wherever they are in the batch. It is
``patching/unpad.py`` for a tree instead of rows, is right for the same models, and says why where it
does not run. Attention is ``prefix_attention``; where that does not run (windows, caps, sinks, a CPU),
the model's own attention gets the padded rows, and only the rest of the layers computes prompts once.

``B`` rows, ``T`` tokens per row, ``A`` of these columns of answers; ``N`` tokens of the row.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernel.transformers import trl_head
from liger_kernel.transformers.head.recipe import IGNORE
from liger_kernel.transformers.head.stand_in import outliving
from liger_kernel.transformers.patching import unpad
from liger_kernel.transformers.patching.bounds import gives_bounds
from liger_kernel.transformers.patching.patches import stock_class, warn_once
from liger_kernel.transformers.patching.unpad import PackedMask, Packing
from liger_kernel.transformers.prefix_attention import Branches, Span, prefix_attention
from liger_kernel.transformers.trl_head import both, is_unread

_ROWS = 4096  # of the batch, whose gradients are in fp32 at a time


class _Padded(torch.autograd.Function):
    """``apply(x (N, ...), place, real)`` -> rows ``x[place]``, 0 where not ``real``. The gradient of a
    token is the sum over its rows, in fp32."""

    @staticmethod
    def forward(ctx, x, place, real):
        ctx.save_for_backward(place, real)
        ctx.like = x.shape, x.dtype
        return x.index_select(0, place).mul_(_beside(real, x))

    @staticmethod
    def backward(ctx, dy):
        (place, real), (shape, dtype) = ctx.saved_tensors, ctx.like
        total = torch.promote_types(dtype, torch.float32)
        dx = torch.zeros(shape, dtype=total, device=dy.device)
        for i, keeps, d in zip(place.split(_ROWS), real.split(_ROWS), dy.split(_ROWS)):
            dx.index_add_(0, i, d * _beside(keeps, dx))
        return dx.to(dtype), None, None


def _beside(real: Tensor, x: Tensor) -> Tensor:
    return real.view(-1, *[1] * (x.ndim - 1)).to(x.dtype)


class Prompts(Packing):
    """Where the tokens of a batch are that is a row of prompts and answers. ``real`` (B, T) is on the
    host; ``owner``: for each row, the first row with the same prompt; ``whole``: as in ``rows``, the
    packing of this batch with its prompts as often as they are in it."""

    def __init__(self, real: Tensor, owner: list[int], answers: int, whole: bool, device: torch.device):
        B, T = real.shape
        self.whole, self.used = whole, False
        self.of_rows = real, device
        lengths = [part.sum(1).tolist() for part in real.split((T - answers, answers), 1)]
        of_prompt = dict(enumerate(lengths[0]))
        of_group = dict.fromkeys(owner, 0)
        for b, n in zip(owner, lengths[1]):
            of_group[b] += n
        # prompts without answers come first, so that the others are one slice of keys
        prompts = sorted(of_group, key=lambda b: of_group[b] > 0)
        rank = {b: i for i, b in enumerate(prompts)}
        rows = sorted(range(B), key=lambda b: rank[owner[b]])

        # number of each token's sequence in the row, by which the tokens are sorted
        sequence = torch.full((B, T), len(prompts) + B)
        sequence[prompts, : T - answers] = torch.arange(len(prompts))[:, None]
        sequence[rows, T - answers :] = torch.arange(B)[:, None] + len(prompts)
        flat = sequence.masked_fill(~real, len(prompts) + B).flatten()
        order = flat.argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(B * T)).view(B, T)
        place[:, : T - answers] = place[owner, : T - answers]
        place = place.masked_fill_(~real, 0)

        shared = [b for b in prompts if of_group[b]]
        each = [*(of_prompt[b] for b in prompts), *(n for b in rows if (n := lengths[1][b]))]
        own, groups, keys = (
            F.pad(torch.tensor(n).cumsum(0), (1, 0)).int()
            for n in (each, [of_group[b] for b in shared], [of_prompt[b] for b in shared])
        )
        P = sum(of_prompt[b] for b in prompts)
        longest, of_keys, n = max(each), max(of_prompt[b] for b in shared), int(own[-1])
        self.real, self.index, self.place, own, groups, keys = (
            unpad.moved(t, device) for t in (real, order[:n], place.flatten(), own, groups, keys)
        )
        self.branches = Branches(
            Span(own, own, longest, longest, True),
            Span(groups, keys, max(of_group.values()), of_keys, False),
            P - sum(of_prompt[b] for b in shared),
            P,
        )

    @functools.cached_property
    def rows(self) -> Packing:
        real, device = self.of_rows
        return Packing(real, int(real.sum()), int(real.sum(1).max()), self.whole, device)

    def pad(self, x: Tensor) -> Tensor:
        place, real = (t.to(x.device).flatten() for t in (self.place, self.real))
        return _Padded.apply(x[0], place, real).view(*self.real.shape, *x.shape[2:])

    def mask(self, make: Callable, arguments: dict[str, Any]) -> PackedMask:
        return _Mask(self, make, arguments)


class _Mask(PackedMask):
    packing: Prompts

    @functools.cached_property
    def of_rows(self) -> PackedMask:
        return PackedMask(self.packing.rows, self.make, self.arguments)

    def attend(
        self, attend: Callable, by_bounds: bool, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **more: Any
    ) -> tuple[Tensor, None]:
        packing = self.packing
        if self.keys is not None and self.keys.window is None:
            out = prefix_attention(q, k, v, packing.branches, more)
            if out is not None:
                return out, None
        rows = packing.rows
        q, k, v = (rows.pack(packing.pad(t.transpose(1, 2))).transpose(1, 2) for t in (q, k, v))
        out = self.of_rows.attend(attend, by_bounds, module, q, k, v, **more)[0]
        return packing.pack(rows.pad(out)), None


@contextlib.contextmanager
def shared_prompts(model: nn.Module, answers: int) -> Iterator[None]:
    """Meanwhile ``model`` computes the prompts of each batch once. ``answers``: how many columns of a
    batch, the last ones, are answers. Batches in which no two rows have the same prompt run as they
    are. What cannot be right this way runs as it is, and a warning says why. Raises ``ValueError`` for
    other numbers of columns, and for a model that takes no tokens with a mask and positions."""
    if answers < 1:
        raise ValueError(f"shared_prompts: answers must be at least 1, got {answers}")
    bodies = [m for m in model.modules() if unpad.takes_tokens(type(m).forward) and unpad.calls_layers(m)]
    if not bodies:
        need = "a model whose layers are called by a module that takes input_ids, attention_mask and position_ids"
        raise ValueError(f"shared_prompts: model must be {need}, got {type(model).__name__}")
    with contextlib.ExitStack() as after:
        for body in bodies:
            before = vars(body).get("forward")
            vars(body)["forward"] = _sharing(body, answers)
            after.callback(_put_back, body, before)
        yield


def _put_back(body: nn.Module, before: Any) -> None:
    del vars(body)["forward"]
    if before is not None:
        vars(body)["forward"] = before


def _sharing(body: nn.Module, answers: int) -> Callable:
    forward: Any = body.forward
    names = list(inspect.signature(forward).parameters)

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args)) | kwargs
        prompts = None if torch.compiler.is_compiling() else _prompts_of(body, given, answers)
        if prompts is not None:
            with unpad.given_row(None):  # that of ``unpad``, which may be around the layers, too
                out = unpad.packed(lambda _, **given: forward(**given), body, given, prompts)
            if out is not None:
                return out
            _say(body, unpad.reason_of_model(body))
        return forward(*args, **kwargs)

    return call


def _prompts_of(body: Any, given: Mapping[str, Any], answers: int) -> Prompts | None:
    """Where the tokens of this batch are; None if it has to run as it is. The host waits for the
    tokens."""
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if ids is None:
        return _say(body, "it is given no input_ids, by which prompts are compared")
    if answers >= ids.shape[1]:
        need = f"less than the {ids.shape[1]} columns of the batch"
        raise ValueError(f"shared_prompts: answers must be {need}, got {answers}")
    whole = mask is None
    why = unpad.reason_of_batch(body, {**given, "attention_mask": torch.ones_like(ids) if whole else mask})
    if not why and gives_bounds(body):
        why = "a recurrent layer of it would begin an answer with the state of the answer before"
    if why or why is None:
        return _say(body, why) if why else None
    real = torch.ones_like(ids, dtype=torch.bool) if whole else mask != 0
    _, _, parts, counting, _ = unpad.look(real, unpad.labels_of_caller(real.shape))
    if counting:
        return _say(body, unpad.COUNTS_AT_PADDING)
    # a prompt at other positions is another prompt
    read = [t.expand(ids.shape) for t in (ids, given.get("position_ids")) if t is not None]
    prompts = torch.cat([t.masked_fill(~real, -1)[:, :-answers] for t in read], 1).cpu()
    real = real.cpu()
    first: dict[bytes, int] = {}
    owner = [first.setdefault(row.numpy().tobytes(), b) for b, row in enumerate(prompts)]
    shares = len(first) < len(owner) and bool(real[:, :-answers].any(1).all() and real[:, -answers:].any())
    if shares and (why := unpad.reason_of_model(body)):
        return _say(body, why)
    return Prompts(real, owner, answers, parts < 2, ids.device) if shares else None


def _say(body: nn.Module, why: str) -> None:
    warn_once(f"shared_prompts: {stock_class(body).__name__} computes a prompt for each of its answers: {why}")


def answer_logprobs(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, answers: int, *, temperature: float = 1.0,
    entropy: bool = False, **given: Any,
) -> Any:  # fmt: skip
    """fp32 log-probabilities of the last ``answers`` columns of ``input_ids`` (B, T), (B, A), 0 at
    padding; with ``entropy`` a tuple of them and the entropies. Prompts are computed once, and the
    head multiplies the tokens before those of answers only. ``given``: what else the model gets."""
    inner = trl_head.layers(model)[-1]
    targets = input_ids.masked_fill(attention_mask == 0, IGNORE)[:, -answers:]

    def read(module: nn.Module, args: Any, out: Any) -> tuple[Tensor, Tensor]:
        logits = out.logits[:, -answers - 1 : -1]
        if is_unread(logits):
            return both(logits, targets, entropy, temperature)
        return _of_logits(logits, targets, temperature)

    with contextlib.ExitStack() as after, shared_prompts(model, answers), outliving(inner):
        # before FSDP2's hooks, which shard the head again
        after.callback(inner.register_forward_hook(read, prepend=True).remove)
        logp, entropies = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **given)
    return (logp, entropies) if entropy else logp


def _of_logits(logits: Any, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = (torch.as_tensor(logits).float() / temperature).log_softmax(-1)
    counts = targets != IGNORE
    found = logp.gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    return found * counts, -(logp.exp() * logp).sum(-1) * counts
