"""Variants of functions that rotate queries and keys, and the stand-ins on which they are
compared with stock."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from liger_kernel import memory
from liger_kernel.ops.rotary.rope import CASTING, by_sections, of_complex, rope
from liger_kernel.transformers.recognise.variant import ROPE_FORMS, StandIns, Variant, decoding

# How a rope function's tables hold the angles of pairs: once, or for first and second columns,
# which may differ: a module of the user's own makes what it likes, and may be exchanged after the
# patch.
TABLES: dict[str, Callable[[Tensor], Tensor]] = {
    "once": lambda t: t,
    "twice": lambda t: t.view(*t.shape[:-1], 2, t.shape[-1] // 2),  # cat(angles, angles)
    # repeat_interleave(angles, 2)
    "repeated": lambda t: t.view(*t.shape[:-1], t.shape[-1] // 2, 2).transpose(-1, -2),
}
FIRST: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda t: t[..., : t.shape[-1] // 2],
    "repeated": lambda t: t[..., ::2],
}
# layouts that our kernel does not have: their pairs are its pairs, and what is moved is moved here
PAIRS = {"apart": "pairs", "behind": "pairs"}


def _learn(*tables: Tensor) -> bool:
    """Whether a table requires a gradient. Stock must run then, because our kernels read each
    angle only once and would return a partial gradient."""
    return (tables[0].requires_grad or tables[-1].requires_grad) and torch.is_grad_enabled()


def _angles(tables: str, turn: Callable) -> Callable[[Tensor], Tensor]:
    """What a rope function ``turn(x, table)`` reads of its tables: both columns' angles, or the
    first's."""
    if tables != "once":
        # It may fail where tensors have no values: then both, which is right if they are equal
        with contextlib.suppress(Exception), torch.no_grad():
            table = torch.arange(1.0, 5.0, device="cpu")[None, None]
            equal = table.clone()
            TABLES[tables](equal)[..., 1, :] = FIRST[tables](equal)
            one, other = (turn(table[None], t) for t in (table, equal))
            pairs = zip(one, other) if isinstance(one, tuple) else [(one, other)]
            if all(torch.equal(a, b) for a, b in pairs):
                return FIRST[tables]
    return TABLES[tables]


def _fits(x: Tensor, cos: Tensor, unsqueeze_dim: int) -> bool:
    tables = cos.ndim == 3 and cos.shape[0] in (1, x.shape[0])
    return x.ndim == 4 and tables and unsqueeze_dim in (1, 2)


def _q_and_k(unsqueeze_dim: int, width: int = 16) -> tuple[Tensor, Tensor]:
    shapes = ((3, heads, 5, width) if unsqueeze_dim == 1 else (3, 5, heads, width) for heads in (2, 1))
    q, k = (torch.randn(shape) for shape in shapes)
    return q, k


def _stand_ins(form: str) -> StandIns:
    for width in (16, 24):  # 24: the last eight columns pass through
        for batch, unsqueeze_dim in ((1, 1), (3, 1), (3, 2)):
            q, k = _q_and_k(unsqueeze_dim, width)
            angle = torch.randn(batch, 5, 8 if form == "once" else 16)
            yield {"unsqueeze_dim": unsqueeze_dim}, (q, k, angle.cos(), angle.sin())


@dataclass(frozen=True)
class _OfTables(Variant):
    """A rope that the ``form`` of its tables distinguishes from other ropes. ``casting``: see
    ``ops.rotary.rope``."""

    kind, tables, by_tables = "rope", 2, True
    casting: str
    layout: str
    form: str

    def fits(self, forms: set[str] | None) -> bool:
        return forms == {self.form} or (not forms and self.form == "once")  # "once" also if no form is known


class Rope(_OfTables):
    """Queries and keys. ``layout`` "apart": the input has pairs, and the output has the first
    values of all pairs, then the second values."""

    def __call__(self, stock: Callable) -> Callable:
        casting, layout, pairs = self.casting, self.layout, PAIRS.get(self.layout, self.layout)
        angles = _angles(self.form, lambda x, table: stock(x, x, table, table))

        # ``k`` and the tables have defaults, because some models call it with queries alone
        def apply_rotary_pos_emb(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
            memory.readers_done()  # the projections have read the value
            fits = k is not None and k.ndim == 4 and not decoding(cos)
            if not fits or not _fits(q, cos, unsqueeze_dim) or _learn(cos, sin):
                return stock(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
            turned = rope(q, k, angles(cos), angles(sin), layout=pairs, unsqueeze_dim=unsqueeze_dim, casting=casting)
            return tuple(torch.cat((y[..., ::2], y[..., 1::2]), -1) for y in turned) if layout == "apart" else turned

        rotate: Callable = apply_rotary_pos_emb
        parameters = inspect.signature(stock).parameters
        if "position_ids" in parameters:  # it has no effect, and most models have removed it
            rotate = lambda q, k, cos, sin, position_ids=None, unsqueeze_dim=1: apply_rotary_pos_emb(
                q, k, cos, sin, unsqueeze_dim
            )
        # norms of heads may join this rotation
        if layout != "apart" and parameters["unsqueeze_dim"].default == 1:
            ROPE_FORMS[rotate] = layout, angles, casting
        return rotate

    def stand_ins(self) -> StandIns:
        return _stand_ins(self.form)


@dataclass(frozen=True)
class RopeAlone(_OfTables):
    """One tensor. The kernel gets a second tensor without heads. ``layout`` "behind": pairs in
    the last columns; the other columns pass through."""

    sin_first: bool = False

    def words(self) -> tuple[str, ...]:
        return "alone", "sin first" if self.sin_first else "", self.casting, self.layout, self.form

    def __call__(self, stock: Callable) -> Callable:
        casting, layout, pairs = self.casting, self.layout, PAIRS.get(self.layout, self.layout)
        angles = _angles(self.form, lambda x, table: stock(x, table, table))

        def turned(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> Tensor | None:
            if not _fits(x, cos, unsqueeze_dim) or _learn(cos, sin):
                return None
            cos, sin = angles(cos), angles(sin)
            first = x.shape[-1] - 2 * cos.shape[-1] if layout == "behind" else 0
            part = x[..., first:] if first else x
            none = part.detach().narrow(unsqueeze_dim, 0, 0)
            y, _ = rope(part, none, cos, sin, layout=pairs, unsqueeze_dim=unsqueeze_dim, casting=casting)
            return torch.cat((x[..., :first], y), -1) if first else y

        if self.sin_first:

            def apply_rotary_pos_emb(tensor, sin, cos):
                y = turned(tensor, cos, sin, 2)
                return stock(tensor, sin, cos) if y is None else y
        else:

            def apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=1):
                y = turned(x, cos, sin, unsqueeze_dim)
                return stock(x, cos, sin, unsqueeze_dim) if y is None else y

        return apply_rotary_pos_emb

    def stand_ins(self) -> StandIns:
        for attributes, (q, _, cos, sin) in _stand_ins(self.form):
            if not self.sin_first:
                yield attributes, (q, cos, sin)
            elif attributes["unsqueeze_dim"] == 2:
                yield {}, (q, sin, cos)


@dataclass(frozen=True)
class _OfForm(Variant):
    """A rope whose function has parameters, or inputs, that no other rope has."""

    kind, tables = "rope", 2
    form: ClassVar[str]
    casting: str

    def words(self) -> tuple[str, ...]:
        return self.casting, self.form


class RopeOfSections(_OfForm):
    """Queries and keys with angles from several tables, one for each section of the columns."""

    form = "sections"

    def __call__(self, stock: Callable) -> Callable:
        casting = self.casting

        def apply_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
            if q.ndim != 4 or cos.ndim != 4 or unsqueeze_dim not in (1, 2) or _learn(cos, sin):
                return stock(q, k, cos, sin, mrope_section, unsqueeze_dim)
            cos, sin = (by_sections(TABLES["twice"](t), mrope_section) for t in (cos, sin))
            return rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, casting=casting)

        return apply_multimodal_rotary_pos_emb

    def stand_ins(self) -> StandIns:
        for unsqueeze_dim in (1, 2):
            q, k = _q_and_k(unsqueeze_dim)
            angle = torch.randn(3, 3, 5, 16)
            yield {"unsqueeze_dim": unsqueeze_dim, "mrope_section": [2, 3, 3]}, (q, k, angle.cos(), angle.sin())


class FlatRope(_OfForm):
    """Queries and keys with all tokens of a batch in one dimension."""

    form = "flat"

    def __call__(self, stock: Callable) -> Callable:
        casting = self.casting

        def apply_rotary_pos_emb_vision(q, k, cos, sin):
            if q.ndim != 3 or k.ndim != 3 or cos.ndim != 2 or _learn(cos, sin):
                return stock(q, k, cos, sin)
            cos, sin = (TABLES["twice"](t)[None] for t in (cos, sin))
            q, k = rope(q[None], k[None], cos, sin, unsqueeze_dim=2, casting=casting)
            return q[0], k[0]

        return apply_rotary_pos_emb_vision

    def stand_ins(self) -> StandIns:
        angle = torch.randn(5, 16)
        yield {}, (torch.randn(5, 2, 16), torch.randn(5, 1, 16), angle.cos(), angle.sin())


@dataclass(frozen=True)
class ComplexRope(Variant):
    """Queries and keys with complex tables. ``unsqueeze_dim``: where the tables get a dimension
    for the heads."""

    kind, tables, exact = "rope", 1, False
    form: str
    unsqueeze_dim: int

    def __call__(self, stock: Callable) -> Callable:
        unsqueeze_dim = self.unsqueeze_dim

        def apply_rotary_emb(xq, xk, freqs_cis):
            pairs = xq.shape[-1] // 2
            # one table for all images has no dimension of the batch, or too many
            one = unsqueeze_dim == 2 and freqs_cis.numel() == xq.shape[1] * pairs
            table = freqs_cis.reshape(1, xq.shape[1], pairs) if one else freqs_cis
            if not freqs_cis.is_complex() or table.ndim != 3 or _learn(freqs_cis):
                return stock(xq, xk, freqs_cis)
            return rope(xq, xk, *of_complex(table.to(xq.device)), layout="pairs", unsqueeze_dim=unsqueeze_dim)

        return apply_rotary_emb

    def stand_ins(self) -> StandIns:
        for batch in (1, 3):
            q, k = _q_and_k(self.unsqueeze_dim)
            yield {}, (q, k, torch.polar(torch.ones(batch, 5, 8), torch.randn(batch, 5, 8)))


ROPES = [Rope(*form) for form in product(CASTING, ("halves", "pairs", "apart"), TABLES)]
ROPES_ALONE = [RopeAlone(*form) for form in product(CASTING, ("halves", "pairs", "behind"), TABLES)]
SIN_FIRST = [RopeAlone(*form, sin_first=True) for form in product(CASTING, ("halves", "pairs"), ("once",))]
ROPES_OF_SECTIONS = [RopeOfSections(casting) for casting in CASTING]
FLAT_ROPES = [FlatRope(casting) for casting in CASTING]
COMPLEX_ROPES = [ComplexRope("complex", d) for d in (2, 1)]
