"""Variants of MLPs, and the stand-ins on which they are compared with stock."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from liger_kernel import memory
from liger_kernel.ops._core.operator import use_kernels
from liger_kernel.ops.activations.glu import glu
from liger_kernel.ops.activations.relu_squared import relu_squared
from liger_kernel.ops.projections.adapted import Group, Projection
from liger_kernel.ops.projections.mlp import adapted_mlp, mlp
from liger_kernel.ops.projections.tiled_mlp import apply_tiled_mlp, count_of
from liger_kernel.ops.projections.weights import ByItsModule
from liger_kernel.transformers.recognise.activations import CLAMPED, activation
from liger_kernel.transformers.recognise.projections import (
    as_they_are,
    engine_runs,
    fitting,
    kept,
    linear,
    shared,
    with_base,
)
from liger_kernel.transformers.recognise.variant import (
    LINEARS,
    Halve,
    InFp32,
    StandIns,
    Variant,
    are_numbers,
    plain,
    random_linear,
    runs_its_class,
    unhooked,
)


@dataclass(frozen=True)
class GLUForm:
    """What a gated MLP does in addition to ``down(act(gate(x)) * up(x))``. ``attributes``: sets
    of attributes for its stand-ins."""

    attributes: tuple[Callable[[], dict[str, Any]], ...] = (dict,)
    gate: Callable[[Any, Tensor], Tensor] = lambda self, gate: gate
    options: Callable[[Any], dict[str, Any]] = lambda self: {}  # keywords of the operator
    wide: bool = False  # whether activation and product are in fp32
    # what stands between the product and the last projection, such as a norm or dropout
    between: Callable[[Any, Tensor], Tensor] = lambda self, h: h
    after: Callable[[Any, Tensor], Tensor] = lambda self, y: y
    exact: bool = True

    @property
    def whole(self) -> bool:
        """Whether only the activation and the product happen between the projections."""
        return not self.wide and self.gate is GLUForm.gate and self.between is GLUForm.between


def _as_weighted(h: Tensor, projection: Any) -> Tensor:
    """``h`` in the dtype of the projection's weight; unchanged if the weight is in 8 bits."""
    dtype = getattr(projection.weight, "dtype", torch.int8)
    # a layer in 8 bits casts by itself
    return h if dtype in (h.dtype, torch.int8) else h.to(dtype)


GLU_FORMS = {
    "": GLUForm(),
    "multipliers": GLUForm(
        (lambda: {"gate_multiplier": 0.7, "down_multiplier": 1.3},),
        options=lambda self: {"gate_multiplier": self.gate_multiplier},
        after=lambda self, y: y * self.down_multiplier,
    ),
    "global_scale": GLUForm(
        (lambda: {"global_scale": nn.Parameter(torch.full((1,), 0.7))},), after=lambda self, y: y * self.global_scale
    ),
    "residual_dropout": GLUForm(
        (lambda: {"residual_dropout": 0.0}, lambda: {"residual_dropout": 1.0}),
        after=lambda self, y: F.dropout(y, p=self.residual_dropout, training=self.training),
    ),
    "ffn_sub_norm": GLUForm((lambda: {"ffn_sub_norm": Halve()},), between=lambda self, h: self.ffn_sub_norm(h)),
    "drop": GLUForm((lambda: {"drop": Halve()},), between=lambda self, h: self.drop(h)),
    "dropout, cast": GLUForm(  # for models in 16 bits that keep their last projection in fp32
        (lambda: {"dropout": Halve(), "wo": random_linear(12, 8, InFp32)}, lambda: {"dropout": Halve()}),
        between=lambda self, h: _as_weighted(self.dropout(h), self.wo),
    ),
    "dropout": GLUForm((lambda: {"dropout": Halve()},), between=lambda self, h: self.dropout(h)),
    "sparsity": GLUForm(
        (lambda: {"activation_sparsity": 0.0}, lambda: {"activation_sparsity": 0.6}),
        gate=lambda self, gate: self._gaussian_topk(gate) if self.activation_sparsity > 0.0 else gate,
    ),
    "fp32": GLUForm(wide=True),
} | {
    # with a slope, stock rounds after every step, and we once
    name: GLUForm((lambda numbers=numbers: dict(numbers),), options=options, exact="alpha" not in name)
    for name, (options, numbers) in CLAMPED.items()
    if name != "alpha, limit"  # only experts have it
}
NO_ACTIVATION = "an activation that is none of ours"
_LINEAR: Any = nn.Linear.forward


def _bare(m: Any) -> bool:
    """Whether a call of ``m`` only multiplies by its weight: no bias, adapter, sharding or hook."""
    return type(m) in (nn.Linear,) and runs_its_class(m) and m.bias is None and plain(m.weight)


def _whole(x: Tensor, *projections: Any) -> bool:
    """Whether a gated MLP of these projections can run as one operator, and that helps."""
    # Without gradients nothing is kept, so that one operator saves nothing
    if not use_kernels(x, fusible=True) or not torch.is_grad_enabled() or nn.Linear.forward is not _LINEAR:
        return False
    if not all(map(_bare, projections)) or not (x.requires_grad or any(m.weight.requires_grad for m in projections)):
        return False
    # autocast casts the weights, and the operator does as autocast does
    return all(m.weight.dtype == x.dtype for m in projections) or torch.is_autocast_enabled(x.device.type)


def _as_one_node(found: list[Any], x: Tensor, count: int, halves: bool) -> tuple[Group, Group] | None:
    """These projections of x as those of ``adapted_mlp`` in ``count`` tiles, if it can run them and that helps.
    ``halves``: the first one gives gate and up."""
    if not all(isinstance(p, Projection) for p in found) or not (count > 1 or any(p.gains for p in found)):
        return None
    # masks of dropout, and DoRA's norms, are of all tokens
    if count > 1 and any(p.magnitude is not None or any(a.dropout for a in p.adapters) for p in found):
        return None
    *first, last = found
    width = first[0].weight.shape[0]
    inner = width // 2 if halves else width
    fits = (
        not any(isinstance(p.weight, ByItsModule) for p in found)
        and all(fitting(p, x.shape[-1], x.device) and p.weight.shape[0] == width for p in first)
        and fitting(last, inner, x.device)
    )
    return (Group(first), Group((last,))) if fits else None


def in_tiles(run: Callable, module: Any, x: Any, tiles: bool | int) -> Any:
    """``run(module, x)``, an MLP, in ``tiles`` of the tokens; in one piece if that is one tile,
    or if something must see all tokens at once."""
    count = _tiles_of(x, tiles)
    # looked for at each call, because hooks come and go
    if count > 1 and not torch.compiler.is_compiling() and (why := _in_one_piece(module)):
        _say_in_one_piece(type(module).__name__, why)
        count = 1
    if count == 1:
        return run(module, x)
    # the projections read x: if x is recomputed, now is the time
    memory.readers_follow()
    y = apply_tiled_mlp(run, module, x, count)
    memory.readers_done()
    return y


def _tiles_of(x: Any, tiles: bool | int) -> int:
    return count_of(tiles, x.numel() // max(1, x.shape[-1])) if tiles and isinstance(x, Tensor) and x.ndim > 1 else 1


def _in_one_piece(module: nn.Module) -> str | None:
    """Why an MLP may not run in tiles."""
    # a parameter would be gathered again for each tile
    if any(hasattr(p, "ds_id") for p in module.parameters()):
        return "ZeRO-3 gathers its weights"
    hooked = any(m is not module and ("_hf_hook" in vars(m) or not unhooked(m)) for m in module.modules())
    return "hooks on its layers expect to see all tokens" if hooked else None


@functools.cache
def _say_in_one_piece(name: str, why: str) -> None:
    warnings.warn(f"liger_kernel: tiled_mlp: {name} runs in one piece, because {why}", stacklevel=3)


def tiled(forward: Callable, tiles: bool | int) -> Callable:
    """Wrap the ``forward`` of an MLP of any form that computes each token independently."""

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs) if kwargs or len(args) != 1 else in_tiles(forward, self, args[0], tiles)

    return run


@dataclass(frozen=True)
class GLU(Variant):
    """``down(act(gate(x)) * up(x))``, with the names of its projections and its activation.
    ``form``: what else it does, one of ``GLU_FORMS``."""

    kind = "glu"
    gate: str
    up: str
    down: str
    act: str
    form: str

    @property
    def exact(self) -> bool:
        return GLU_FORMS[self.form].exact

    def __call__(self, stock: Callable, tiles: bool | int = False) -> Callable:
        """A forward that looks at each call what its module is now, for ``LlamaMLP``:

            three bare ``nn.Linear``, with gradients    ``whole``: one operator
            LoRA on gate_proj, or weights in 4 bits     ``adapted``: one node
            a hook on up_proj, or no gradients          ``by_parts``: modules, and one operator for
                                                        ``silu(gate) * up``
            an activation that is none of ours          ``by_parts``: the stock forward

        The first two in tiles if ``tiles`` says so; the last two in tiles of the whole MLP.
        """
        gate, up, down, act, form = self.gate, self.up, self.down, self.act, GLU_FORMS[self.form]
        inner, outer = [*dict.fromkeys((gate, up))], down  # one or two projections, and the last one

        activation_of = lambda self: activation(F.silu if act == "F.silu" else getattr(self, act))
        numbers = lambda self: are_numbers(*form.options(self).values())

        def whole(self, x, name, projections):
            """Run the MLP as one operator; None if it does anything else."""
            if not _whole(x, *projections):
                return None
            memory.readers_follow()
            weights = [m.weight for m in projections]
            first, second, last = weights if up != gate else (weights[0], None, weights[1])
            y = mlp(x, first, second, last, act=name, recompute=memory.level() == "mlp", **form.options(self))
            memory.readers_done()
            return form.after(self, y)

        def adapted(self, x, name, count, projections):
            """Run the MLP as one node if it has tiles, adapters, or a weight in 8 bits or less;
            None if it has none of them, or if it does more."""
            if (count == 1 and all(type(p) is nn.Linear for p in projections)) or not engine_runs(x, projections):
                return None
            if (groups := kept(_as_one_node, x, projections, count, up == gate)) is None:
                return None
            memory.readers_follow()
            how = dict(recompute=memory.level() == "mlp", ends=form.after is GLUForm.after and memory.is_last(self))
            y = adapted_mlp(x, *groups, act=name, tiles=count, **how, **form.options(self))
            memory.readers_done()
            return form.after(self, with_base(y, groups[1].projections[0], projections[-1], x))

        def by_parts(self, name, x):
            """Run the projections, and the activation and the product as one operator."""
            memory.readers_follow()
            if name is None:
                y = stock(self, x)
                memory.readers_done()
                return y
            first = shared(x, *(getattr(self, name) for name in inner))
            g, u = first[0].chunk(2, -1) if up == gate else first
            memory.readers_done()
            # from here on as the model says: its own gate, fp32, and what stands around the product
            g = form.gate(self, g)
            dtype = g.dtype
            if form.wide:
                g, u = g.float(), u.float()
            h = memory.cheap(glu, g, u, act=name, **form.options(self))
            return form.after(self, linear(getattr(self, outer), form.between(self, h.to(dtype))))

        def forward(self, x):
            if torch.compiler.is_compiling():  # the compiler gets the plain formula
                return in_tiles(stock, self, x, tiles)
            if as_they_are(x, (getattr(self, name) for name in (*inner, outer))):
                return stock(self, x)
            # At each call: an activation, a limit or a hook may have changed since the last one
            name, count = activation_of(self) if numbers(self) else None, _tiles_of(x, tiles)
            y = None
            # the operators know no limit or slope of the activation
            if name is not None and form.whole and not form.options(self).keys() - {"gate_multiplier"}:
                # The most that one kernel can do first. Each says None if the layers do more
                projections = [getattr(self, name) for name in (*inner, outer)]
                y = whole(self, x, name, projections) if count == 1 else None
                y = adapted(self, x, name, count, projections) if y is None else y
            if y is None and count > 1:
                return in_tiles(lambda self, x: by_parts(self, name, x), self, x, tiles)
            return memory.projected(functools.partial(by_parts, self, name), x) if y is None else y

        def why_stock(self):
            if not numbers(self):
                return "a factor or limit that is a tensor"
            return None if activation_of(self) else NO_ACTIVATION

        LINEARS[forward] = frozenset((gate, up, down)), why_stock
        return forward

    def stand_ins(self) -> StandIns:
        # we have no Softplus: the MLP must use the activation that it is given
        for fn in (nn.SiLU(), nn.GELU(approximate="tanh"), nn.Softplus()):
            for more in GLU_FORMS[self.form].attributes:
                wide = 24 if self.up == self.gate else 12
                attributes = {self.gate: random_linear(8, wide), self.down: random_linear(12, 8)} | more()
                if self.up != self.gate:
                    attributes[self.up] = random_linear(8, 12)
                if self.act != "F.silu":
                    attributes[self.act] = fn
                yield attributes, (torch.randn(2, 5, 8),)


@dataclass(frozen=True)
class MLP(Variant):
    """``down(relu(up(x)) ** 2)``, with the names of its projections and its activation."""

    kind = "relu_squared"
    up: str
    down: str
    act: str

    def __call__(self, stock: Callable, tiles: bool | int = False) -> Callable:
        up, down, act = self.up, self.down, self.act

        def run(self, x):
            if torch.compiler.is_compiling() or activation(getattr(self, act)) != "relu2":
                return stock(self, x)
            return linear(getattr(self, down), memory.cheap(relu_squared, linear(getattr(self, up), x)))

        def forward(self, x):
            return in_tiles(run, self, x, tiles)

        LINEARS[forward] = (
            frozenset((up, down)),
            lambda self: None if activation(getattr(self, act)) == "relu2" else NO_ACTIVATION,
        )
        return forward

    def stand_ins(self) -> StandIns:
        # an MLP that ignores its activation would pass with one alone
        for fn in (ACT2FN["relu2"], nn.SiLU()):
            yield (
                {self.up: random_linear(8, 12), self.down: random_linear(12, 8), self.act: fn},
                (torch.randn(2, 5, 8),),
            )


# Names of projections and activation as Transformers has them. The first that fits is used
GLU_NAMES = """
    gate_proj up_proj down_proj act_fn
    gate_proj up_proj down_proj activation_fn
    gate_up_proj gate_up_proj down_proj activation_fn
    gate_up_proj gate_up_proj down_proj act_fn
    gate_up_proj gate_up_proj down_proj F.silu
    input_linear input_linear output_linear activation
    weights_in weights_in weights_out F.silu
    w1 w3 w2 F.silu
    w1 w3 w2 act_fn
    w1 w2 w3 act_fn
    wi_0 wi_1 wo act
    Wi Wi Wo act
    gate_proj up_proj down_proj F.silu
"""
MLP_NAMES = """
    up_proj down_proj act_fn
    fc1 fc2 activation_fn
    c_fc c_proj act
    dense_h_to_4h dense_4h_to_h act
"""
GLUS = [GLU(*names.split(), form=form) for names in GLU_NAMES.strip().splitlines() for form in GLU_FORMS]
MLPS = [MLP(*names.split()) for names in MLP_NAMES.strip().splitlines()]
