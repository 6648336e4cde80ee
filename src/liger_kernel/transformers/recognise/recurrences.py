"""The variants of what carries a state from token to token, short convolutions and gated delta
rules, and the stand-ins on which they are compared with stock.

A layer passes the bounds of packed documents in the flattened batch on with its other arguments:
``cu_seq_lens_q`` (documents + 1,), for delta rules ``cu_seqlens``. Stock knows them only with other
packages. ``patching/bounds.py`` gives them to models that have positions alone.

``B`` rows, ``T`` tokens per row, ``D`` channels.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_kernel import memory
from liger_kernel.ops._core.operator import use_kernels
from liger_kernel.ops.recurrent.causal_conv1d import WIDTHS, causal_conv1d
from liger_kernel.ops.recurrent.gated_delta_rule import MAX_D, gated_delta_rule
from liger_kernel.ops.recurrent.kda import kda
from liger_kernel.ops.recurrent.log_decay import log_decay
from liger_kernel.ops.recurrent.ssd import has_kernel, ssd
from liger_kernel.transformers.recognise.projections import linear
from liger_kernel.transformers.recognise.variant import (
    LINEARS,
    StandIns,
    Variant,
    are_numbers,
    plain,
    random_linear,
    random_weight,
)

# functions that carry a state over a whole row, whether or not a variant is for them
COMBINED = "_split_conv1d_scan_combined$"
CONVOLUTIONS, RULES = "^causal_conv1d_fn$", "^(torch_)?chunk_.*delta|chunk_scan$|selective_scan$"
# Rows up to this length are computed by references where no kernel runs: they go token by token,
# which takes less time than stock's chunks only here
SHORT = 80


def carries(name: str) -> bool:
    """Whether a function of this name carries a state over a row."""
    return re.search(f"{CONVOLUTIONS}|{RULES}", name) is not None


# attribute of a ``seq_idx``: its bounds, if they are known
KNOWN = "_liger_bounds"


def bounds_of_index(index: Tensor) -> Tensor:
    """The bounds of the documents that ``seq_idx`` (B, T) numbers. The host waits for those that are
    not known."""
    if (found := getattr(index, KNOWN, None)) is not None:
        return found
    begins = F.pad(index.diff(dim=-1) != 0, (1, 0), value=True)
    return F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=index.numel()).int()


def one_row(t: Tensor, bounds: Tensor | None) -> Tensor:
    """(B, T, ...) as (1, B T, ...), if there are bounds in it."""
    return t if bounds is None or t.shape[0] == 1 else t.reshape(1, -1, *t.shape[2:])


def by_documents(run: Callable[..., Tensor], bounds: Tensor | None, *tensors: Tensor) -> Tensor:
    """``run`` of each document alone, of tensors (1, T, ...): for functions that know no bounds. The
    host waits for these."""
    if bounds is None:
        return run(*tensors)
    ends = itertools.pairwise(bounds.tolist())
    return torch.cat([run(*(t[:, a:b] for t in tensors)) for a, b in ends if a < b], 1)


@dataclass(frozen=True)
class CausalConv1d(Variant):
    """A convolution of each channel over its last tokens, and an activation."""

    kind, exact, said = "causal_conv1d", False, ("silu",)

    def __call__(self, stock: Callable) -> Callable:
        def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
            bounds, index, x = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx"), hidden_states.transpose(1, 2)
            if bounds is None and index is not None:  # all that Inkling passes on, and LFM2 in Transformers 5.17
                bounds = bounds_of_index(index)
            act = "silu" if activation == "swish" else activation
            fits = act in (None, "silu") and weight.shape[1] in WIDTHS and weight.dtype in (x.dtype, torch.float32)
            fits = fits and all(plain(t) for t in (x, weight, bias) if t is not None)
            row = one_row(x, bounds)
            if fits and (use_kernels(x) or x.shape[1] <= SHORT or bounds is not None):
                y, _ = causal_conv1d(row, weight, bias, act=act, cu_seqlens=bounds)
            else:
                run = lambda x: stock(x.transpose(1, 2), weight, bias, activation).transpose(1, 2)
                y = by_documents(run, bounds, row)
            return y.view(x.shape).transpose(1, 2)

        return causal_conv1d_fn

    def stand_ins(self) -> StandIns:
        for W, activation in ((4, "silu"), (3, None), (2, "silu")):
            bias = torch.randn(5) if W < 4 else None
            of = lambda t: lambda _, dtype: None if t is None else t.to(dtype).requires_grad_()
            yield dict(activation=activation), (torch.randn(2, 5, 9), of(torch.randn(5, W)), of(bias))


@dataclass(frozen=True)
class GatedDeltaRule(Variant):
    """Linear attention with a decay and a delta rule, over a row of tokens."""

    kind, exact, said = "gated_delta_rule", False, ("chunks",)
    operator, of_channels = staticmethod(gated_delta_rule), False

    def __call__(self, stock: Callable) -> Callable:
        operator, of_channels = self.operator, self.of_channels

        def chunk_gated_delta_rule(
            query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
            use_qk_l2norm_in_kernel=False, **kwargs,
        ):  # fmt: skip
            # layers with a decay for each head rename the bounds, the others pass all arguments on
            bounds = kwargs.get("cu_seq_lens_q" if of_channels else "cu_seqlens")
            if bounds is not None and (output_final_state or initial_state is not None):
                raise ValueError(f"{self.kind}: cu_seqlens must be None with a cache, got bounds of documents")
            given = query, key, value, g, beta
            rows = [one_row(t, bounds) for t in given]
            fits = _fits(*given) and (query.shape[2] == value.shape[2] or not of_channels)
            if fits and (_has_kernel(query, value) or query.shape[1] <= SHORT):
                state = None if initial_state is None else initial_state.float()
                more = dict(qk_l2norm=use_qk_l2norm_in_kernel, recompute=_recomputes())
                more |= dict(initial_state=state, output_final_state=output_final_state, cu_seqlens=bounds)
                out, final = operator(*rows, **more)
                return out.view(value.shape), final
            how = chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel
            if bounds is None:
                return stock(*given, *how)
            return by_documents(lambda *tensors: stock(*tensors, *how)[0], bounds, *rows).view(value.shape), None

        return chunk_gated_delta_rule

    def stand_ins(self) -> StandIns:
        B, D, V = 2, 4, 3
        for T, groups, norm, state in ((70, 2, True, torch.randn(B, 2, D, V)), (9, 1, False, None)):
            groups = 1 if self.of_channels else groups
            q, k = torch.randn(2, B, T, 2 // groups, D)
            q, k = (t if norm else F.normalize(t, dim=-1) for t in (q, k))
            v, beta = torch.randn(B, T, 2, V), torch.rand(B, T, 2)
            g = -F.softplus(torch.randn(B, T, 2, *[D] * self.of_channels) - 2)
            decay = lambda *_, g=g: g.clone().requires_grad_()  # in fp32, whatever the dtype is
            begin = state if state is not None else lambda *_: None
            inputs = q, k, v, decay, beta, lambda *_: 64, begin
            yield dict(output_final_state=True, use_qk_l2norm_in_kernel=norm), inputs


@dataclass(frozen=True)
class KimiDeltaAttention(GatedDeltaRule):
    """The same with a decay for each channel of the keys."""

    kind, operator, of_channels = "kda", staticmethod(kda), True


@dataclass(frozen=True)
class ForgetGate(Variant):
    """The module that computes logarithms of decays from its input, by ``projections``. Attributes
    that may say more: the lowest value, and whether it counts. ``of_input``: whether the result has
    the dtype of the input; else it is in fp32."""

    kind, exact = "log_decay", False
    projections: tuple[str, ...]
    bound: str = ""
    switch: str = ""
    of_input: bool = False

    def words(self) -> tuple[str, ...]:
        return *self.projections, self.bound, self.switch

    def __call__(self, stock: Callable) -> Callable:
        names, of_input = self.projections, self.of_input

        def bound_of(module: Any) -> Any:
            on = self.bound and (not self.switch or getattr(module, self.switch))
            return getattr(module, self.bound) if on else None

        def forward(self, hidden_states):
            A_log, dt_bias, bound = self.A_log, self.dt_bias, bound_of(self)
            known = plain(A_log) and plain(dt_bias) and are_numbers(bound) and (bound is None or bound < 0)
            if not known or not hidden_states.is_floating_point():
                return stock(self, hidden_states)
            a = hidden_states
            for name in names:
                a = linear(getattr(self, name), a)
            how = dict(bound=bound, dtype=a.dtype if of_input else None)
            g = memory.cheap(log_decay, a, A_log.flatten(), dt_bias, **how)
            return g.unflatten(-1, (A_log.numel(), -1))

        LINEARS[forward] = frozenset(names), lambda self: None
        return forward

    def stand_ins(self) -> StandIns:
        H, D, N = 4, 8, 32
        for on in (True, False) if self.bound else (True,):
            attributes: dict[str, Any] = dict(num_heads=H, head_dim=D, dt_bias=random_weight(N))
            attributes |= dict(A_log=nn.Parameter(torch.linspace(-1, 1, H).view(1, 1, H, 1)))
            widths = [N, *[D] * (len(self.projections) - 1), N]
            layers = (random_linear(*pair) for pair in itertools.pairwise(widths))
            attributes |= dict(zip(self.projections, layers))
            if self.bound:
                attributes[self.bound] = -5.0 if on or self.switch else None
            if self.switch:
                attributes[self.switch] = on
            yield attributes, (3 * torch.randn(2, 9, N),)


FORGET_GATES = [
    ForgetGate(("f_a_proj", "f_b_proj")),
    ForgetGate(("f_a_proj", "f_b_proj"), "safe_gate_lower_bound"),
    ForgetGate(("f_proj",), "lower_bound", "safe_gate", True),
]


@dataclass(frozen=True)
class Scan(Variant):
    """The scan of Mamba-2. Its output has the dtype of its input, as that of the package which stock
    calls if it is installed; stock's own is in fp32."""

    kind, exact, rounds, said = "ssd", False, True, ("chunks",)

    def __call__(self, stock: Callable) -> Callable:
        def mamba2_chunk_scan(
            hidden_states, dt, A, B, C, chunk_size, D=None, dt_bias=None, initial_states=None, dt_softplus=False,
            dt_limit=(0.0, math.inf), return_final_states=False, **kwargs,
        ):  # fmt: skip
            bounds = kwargs.get("cu_seq_lens_q")
            if bounds is not None and (return_final_states or initial_states is not None):
                raise ValueError("ssd: cu_seq_lens_q must be None with a cache, got bounds of documents")
            given = hidden_states, dt, B, C
            x, steps, writes, reads = (one_row(t, bounds) for t in given)
            fits = all(map(plain, given)) and x.dtype == B.dtype == C.dtype and kwargs.get("z") is None
            if fits and (has_kernel(x, B.shape[3]) or hidden_states.shape[1] <= SHORT):
                state = None if initial_states is None else initial_states.float()
                how = dict(dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit, recompute=_recomputes())
                more = dict(initial_state=state, output_final_state=return_final_states, cu_seqlens=bounds)
                out, final = ssd(x, steps, A, writes, reads, D, **how, **more)
                out = out.view(hidden_states.shape)
                return (out, final) if return_final_states else out
            how = dict(D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit)
            how |= dict(initial_states=initial_states, return_final_states=return_final_states)
            run = lambda x, dt, B, C: stock(x, dt, A, B, C, chunk_size, **how)
            if bounds is None:
                return run(*given)
            return by_documents(run, bounds, x, steps, writes, reads).view(hidden_states.shape)

        return mamba2_chunk_scan

    def stand_ins(self) -> StandIns:
        T, H, P, N = 40, 4, 3, 5
        for groups, limit, state in ((2, (0.0, math.inf), torch.randn(2, H, P, N)), (1, (0.1, 0.5), None)):
            B, C = 0.3 * torch.randn(2, 2, T, groups, N)
            # in fp32, whatever the dtype is: stock rounds steps more often
            dt = torch.randn(2, T, H) - 2
            steps = lambda *_, dt=dt: dt.clone().requires_grad_()
            decay = lambda *_: torch.linspace(-2, -0.1, H).requires_grad_()
            begin = state if state is not None else lambda *_: None
            weights = torch.randn(H), torch.randn(H)
            inputs = torch.randn(2, T, H, P), steps, decay, B, C, lambda *_: 16, *weights, begin
            yield dict(dt_softplus=True, dt_limit=limit, return_final_states=True), inputs


@dataclass(frozen=True)
class CombinedScan(Variant):
    """Convolution, scan, norm and projection in one function, which Transformers has only with
    another package and which refuses bounds without it: None, so that the layer calls its parts."""

    kind, exact, said = "by_parts", False, ("convolution", "scan")

    def __call__(self, stock: Callable) -> Callable:
        def mamba2_split_conv1d_scan_combined(*args, **kwargs):
            return None

        return mamba2_split_conv1d_scan_combined

    def stand_ins(self) -> StandIns:
        yield {}, tuple(torch.randn(2, 2) for _ in range(7))


def _recomputes() -> bool:
    """Whether the backward computes states again: not in a checkpointed layer, which has level "off",
    as what it saves lives for its own backward alone."""
    return torch.compiler.is_compiling() or memory.level() != "off"


def _fits(q: Any, k: Any, v: Any, g: Any, beta: Any) -> bool:
    given = q, k, v, g, beta
    return (
        all(map(plain, given))
        and q.shape == k.shape
        and q.dtype == k.dtype == v.dtype
        and all(t.is_floating_point() for t in given)
        and q.ndim == v.ndim == 4
        and v.shape[2] % max(q.shape[2], 1) == 0
    )


def _has_kernel(q: Tensor, v: Tensor) -> bool:
    narrow = 16 <= q.shape[3] <= MAX_D and 16 <= v.shape[3] <= MAX_D and v.shape[3] % 16 == 0
    return narrow and use_kernels(q)
