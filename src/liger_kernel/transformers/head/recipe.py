"""Logits that are not computed yet: a recipe for them, which records what a model does to them
on the way to its loss."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from liger_kernel import _private
from liger_kernel.ops._core.saved import saving_hooks, where_they_are
from liger_kernel.ops.losses.chunks import Kept
from liger_kernel.transformers.head.head_weights import HeadWeights

IGNORE = -100


@dataclass(frozen=True, eq=False)
class LossOptions:
    """The options of a cross entropy, with the names and defaults of the operators."""

    # of the call of ``F.cross_entropy``
    class_weight: Tensor | None = None
    ignore_index: int = IGNORE
    reduction: str = "mean"
    label_smoothing: float = 0.0
    # what the model does to its logits before that
    logit_scale: float = 1.0
    softcap: float | None = None
    # what the caller of the model wants
    token_scaling: bool = False
    z_loss: float = 0.0
    stats: bool = False
    accum_dtype: torch.dtype | None = None
    fp8: str | None = None  # a recipe, where the loss computes the head's products
    # what was known when the forward began
    num_items: Tensor | None = None
    compact: bool | Kept = False

    def but(self, **changes: Any) -> LossOptions:
        """Return the same options with these fields changed."""
        return LossOptions(**self.given() | changes)

    def given(self, *without: str) -> dict[str, Any]:
        """The fields that differ from the defaults, except those in ``without``: keywords for an
        operator, which need not know the rest."""
        return {
            name: getattr(self, name)
            for name, default in _FIELDS.items()
            if getattr(self, name) is not default and name not in without
        }


_FIELDS = {f.name: f.default for f in fields(LossOptions)}
DEFAULTS = LossOptions()


@dataclass
class LossRequest:
    """What the caller of ``forward`` wants from the loss, and what the loss returned."""

    # a factory, because PyTorch 2.11 cannot compile the constant DEFAULTS here
    options: LossOptions = field(default_factory=LossOptions)
    statistics: bool = False
    memory: str | int = "auto"  # of the logits of a chunk: ``chunk_rows_of``
    computed: bool = False  # whether one was computed from a recipe
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None
    causal: bool = False  # whether transformers' ForCausalLMLoss is the model's loss function
    outlives: bool = False  # whether the caller of ``forward`` gets the recipe
    kept: Kept | None = None  # tokens that count, counted when the forward began
    num_items: Any = None  # what the loss function will divide the sum by
    recipes: list[weakref.ref[LogitsRecipe]] = field(default_factory=list)  # recipes that calls of the head made


# A loss function -> the function that computes it from a recipe. These register themselves here, so
# that this module need not import them
LOSSES: dict[Callable, Callable[..., Any]] = {}
# The same for other functions of a recipe that outlives its call. They may return NotImplemented
READERS: dict[Callable, Callable[..., Any]] = {}


class LogitsRecipe:
    """Logits of ``rows`` and ``thin`` by ``head``, or ``rows`` if there is no head, followed by
    ``tail``. They are computed when somebody reads them.

    ``tail`` holds ("mul", number), ("div", number), ("tanh", None) and ("to", dtype). Selecting and
    reshaping tokens acts on ``rows``. As soon as somebody reads one recipe, all recipes of the same
    logits are computed from them, and views stay views: from then on, the logits may be changed in
    place.

        logits = lm_head(x)                     rows x (B, T, H)        tail ()
        logits.float() / 2.0                    the same rows           tail (to fp32), (div 2.0)
        (...)[:, :-1].reshape(-1, V)            rows (B (T - 1), H)     the same tail

    Gradient mode and autocast are those of the moment in which the model called the head, whoever
    reads the recipe.
    """

    def __init__(
        self,
        rows: Tensor,
        head: HeadWeights | None,
        loss: LossRequest,
        *,
        thin: Tensor | None = None,
        tail: tuple[tuple[str, Any], ...] = (),
        parent: LogitsRecipe | None = None,
    ):
        self.rows, self.thin, self.head, self.loss, self.tail = rows, thin, head, loss, tail
        self.computed: Tensor | None = None
        self.learns: bool = torch.is_grad_enabled() and (parent is None or parent.learns)
        self.autocast: torch.dtype | None = _autocast(rows.device.type) if parent is None else parent.autocast
        self.saving: Any = saving_hooks()[0] if parent is None else parent.saving
        # the recipe of the head's call, from which this one was made; kept until the logits are
        # computed
        self.root: LogitsRecipe | None = None if parent is None else parent if parent.root is None else parent.root
        self.make: Callable[[], Tensor] | None = None
        self.shared = parent is not None  # whether another recipe was made from it, or may share its memory
        self.without_gradient = False  # whether a loss was computed without the logits, so that these get no gradient
        self.others: list[Callable[[], LogitsRecipe | None]] = []  # in a root: the live recipes that were made from it

    def family(self) -> list[LogitsRecipe]:
        """All live recipes of the same logits, parents before their children."""
        root = self if self.root is None else self.root
        return [recipe for recipe in (root, *(other() for other in root.others)) if recipe is not None]

    def value(self) -> Any:
        """Compute the logits, or return them if they are computed."""
        if self.computed is None:
            self.needs_graph()
            # under torch.compile the family lacks recipes that nobody uses
            for recipe in (*self.family(), self):
                if recipe.computed is None:
                    with _outside_inference(), torch.set_grad_enabled(recipe.learns):
                        recipe.computed = recipe.make() if recipe.make is not None else recipe._from_head()
                    recipe.root = recipe.make = None
        return self.computed

    def _from_head(self) -> Tensor:
        with self.as_called():
            y = self.rows if self.head is None else self.head.logits(self.rows, self.thin)
        for name, arg in self.tail:  # includes what was done in place
            y = _apply(y, name, arg)
        return y

    def needs_graph(self) -> None:
        """Raise ``RuntimeError`` if a ``torch.autograd.Function`` has returned this recipe. A plain
        recipe is in no graph."""

    def as_called(self) -> contextlib.AbstractContextManager:
        """Restore the autocast state in which the head was called.

        If hooks for saved tensors were in place for this call only, such as those by which TRL's
        offloading keeps what the head saves where it is, hooks that are in place around the call do
        not get what the loss saves.
        """
        device = self.rows.device.type
        if self.head is None:
            return contextlib.nullcontext()
        states = contextlib.ExitStack()
        if self.autocast != _autocast(device):
            states.enter_context(torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None))
        if self.saving is not None and self.saving != saving_hooks()[0]:
            states.enter_context(where_they_are())
        return states

    def derived(
        self, op: Callable[[Tensor], Tensor], rows: Callable[[Tensor], Tensor] | None = None, tail: tuple = ()
    ) -> LogitsRecipe:
        """The recipe of ``op(logits)``. ``op`` does ``rows`` to the tokens and ``tail`` to
        values."""
        self.needs_graph()
        x, thin = self.rows, self.thin
        if rows is not None:
            x, thin = rows(x), None if thin is None else rows(thin)
        new = new_recipe(x, self.head, self.loss, thin=thin, tail=(*self.tail, *tail), parent=self)
        new.make = lambda: op(self.value())
        self.shared = True
        # while the compiler traces, a strong reference: it removes logits that nobody uses
        assert new.root is not None
        new.root.others.append((lambda: new) if torch.compiler.is_compiling() else weakref.ref(new))
        return new

    def then(self, name: str, arg: Any = None) -> LogitsRecipe:
        new = self.derived(lambda y: _apply(y, name, arg), tail=((name, arg),))
        new.shared = name == "to" and arg == self.dtype
        return new

    def changed(self, name: str, arg: Any) -> Any:
        """Do the same as ``then``, in place."""
        number = isinstance(arg, (int, float)) and arg
        if self.computed is not None or self.shared or not number or self.learns != torch.is_grad_enabled():
            return getattr(self.value(), f"{name}_")(materialised(arg))
        self.tail, make = (*self.tail, (name, arg)), self.make
        if make is not None:
            self.make = lambda: _apply(make(), name, arg)
        return self

    def scale_and_cap(self) -> tuple[float, float | None] | None:
        """``tail`` as ``cap * tanh(scale * x / cap)``, or as ``scale * x`` if cap is None; None
        if ``tail`` is neither."""
        before = after = 1.0
        capped = False
        for name, arg in self.tail:
            if name == "log_softmax" or (name == "tanh" and capped):
                return None
            if name == "tanh":
                capped = True
            elif name != "to":
                factor = arg if name == "mul" else 1 / arg
                before, after = (before, after * factor) if capped else (before * factor, after)
        if capped and not after:
            return None  # a cap of 0
        return (before * after, after) if capped else (before, None)

    def gradient_wanted(self, name: str) -> None:
        """Raise ``RuntimeError`` if a loss was already computed without logits, so that its
        gradient does not pass through them."""
        if self.without_gradient:
            raise RuntimeError(
                f"{name}: a loss of these logits was computed without them, so that they get no gradient: ask before "
                "the loss is computed, take logits.value() before, or patch the model with "
                "fused_linear_cross_entropy=False"
            )

    # Attributes that are known without computing the logits

    @property
    def shape(self) -> torch.Size:
        return self.rows.shape if self.head is None else torch.Size((*self.rows.shape[:-1], self.head.classes))

    @property
    def dtype(self) -> torch.dtype:
        casts = [arg for name, arg in self.tail if name == "to"]
        if casts:
            return casts[-1]
        return self.autocast if self.head is not None and self.autocast is not None else self.rows.dtype

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def requires_grad(self) -> bool:
        leaves = (self.rows, self.thin, *(() if self.head is None else self.head.tensors()))
        return self.learns and any(t is not None and t.requires_grad for t in leaves)

    @property
    def ndim(self) -> int:
        return self.rows.ndim

    def dim(self) -> int:
        return self.rows.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return len(self.rows)

    # Operations that are recorded

    def __mul__(self, other: Any) -> Any:
        recorded = self.computed is None and isinstance(other, (int, float))
        return self.then("mul", other) if recorded else self.value() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        recorded = self.computed is None and isinstance(other, (int, float)) and other
        return self.then("div", other) if recorded else self.value() / other

    def __imul__(self, other: Any) -> Any:
        return self.changed("mul", other)

    def __itruediv__(self, other: Any) -> Any:
        return self.changed("div", other)

    def tanh(self) -> Any:
        return self.then("tanh") if self.computed is None else self.value().tanh()

    def float(self, **kwargs: Any) -> Any:
        return self.value().float(**kwargs) if kwargs else self.to(torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if self.computed is None and not kwargs and len(args) == 1:
            if isinstance(args[0], torch.dtype):
                return self.then("to", args[0])
            if args[0] == self.device:
                return self
        return self.value().to(*args, **kwargs)

    def contiguous(self, **kwargs: Any) -> Any:
        recorded = self.computed is None and not kwargs
        # the rows stay as they are, and the logits of a slice become contiguous
        return self.derived(Tensor.contiguous) if recorded else self.value().contiguous(**kwargs)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        named = kwargs.keys() <= {"shape"}
        return self._shaped("reshape", *shape, *kwargs.values()) if named else self.value().reshape(*shape, **kwargs)

    def view(self, *shape: Any, **kwargs: Any) -> Any:
        named = kwargs.keys() <= {"size"}
        return self._shaped("view", *shape, *kwargs.values()) if named else self.value().view(*shape, **kwargs)

    def _shaped(self, name: str, *shape: Any) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if self.computed is None and all(isinstance(n, int) for n in sizes) and len(sizes) > 1:
            lead, last = sizes[:-1], sizes[-1]
            tokens = self.rows.shape[:-1].numel()
            if last == self.shape[-1] or (last == -1 and -1 not in lead and torch.Size(lead).numel() == tokens):
                return self.derived(lambda y: y.reshape(sizes), lambda t: t.reshape(*lead, t.shape[-1]))
        return getattr(self.value(), name)(*shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if self.computed is None and start_dim >= 0 and end_dim % self.ndim < self.ndim - 1:
            op = lambda t: t.flatten(start_dim, end_dim)
            return self.derived(op, op)
        return self.value().flatten(start_dim, end_dim)

    def __getitem__(self, index: Any) -> Any:
        if self.computed is None and _keeps_last_dim(index, self.ndim):
            op = lambda t: t[index]
            return self.derived(op, op)
        return self.value()[index]

    # Everything else reads the logits

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.value(), name)

    @classmethod
    def __torch_function__(
        cls, fn: Callable, types_: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if fn in LOSSES:
            return LOSSES[fn](*args, **kwargs)
        if fn is torch.tanh and not kwargs:
            return args[0].tanh()
        x = args[0] if args else None
        if fn in READERS and isinstance(x, LogitsRecipe) and x.loss.outlives and x.computed is None:
            found = READERS[fn](*args, **kwargs)
            if found is not NotImplemented:
                return found
        if fn in _OF_GRADIENTS:
            inputs = kwargs.get("inputs", args[-1]) if fn is torch.autograd.grad else args[:1]
            for x in inputs:
                if isinstance(x, LogitsRecipe):
                    x.gradient_wanted("grad" if fn.__name__ == "__get__" else fn.__name__)
        return fn(*of_tensors(args), **of_tensors(kwargs))


def _apply(y: Tensor, name: str, arg: Any) -> Tensor:
    if name == "log_softmax":
        return y.log_softmax(-1)
    return y.to(arg) if name == "to" else y * arg if name == "mul" else y / arg if name == "div" else torch.tanh(y)


def _autocast(device: str) -> torch.dtype | None:
    """The dtype of matrix products on that device under autocast; None if autocast is off."""
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def _outside_inference() -> contextlib.AbstractContextManager:
    # the compiler cannot trace this call
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if inference else contextlib.nullcontext()


def materialised(x: Any) -> Any:
    return x.value() if isinstance(x, LogitsRecipe) else x


def of_tensors(tree: Any) -> Any:
    """Return ``tree`` with logits instead of recipes."""
    return tree_map(materialised, tree, is_leaf=_is_recipe)


def _is_recipe(x: Any) -> bool:
    return isinstance(x, LogitsRecipe)


def _operator(name: str) -> Callable:
    return lambda self, *args, **kwargs: getattr(self.value(), name)(*of_tensors(args), **of_tensors(kwargs))


# Python looks for operators in the class, past __getattr__
_OPERATORS = "add radd sub rsub rtruediv floordiv rfloordiv mod rmod neg abs pow rpow matmul rmatmul "
_OPERATORS += "iadd isub ipow ifloordiv imod iand ior eq ne lt le gt ge and or invert bool iter setitem"
for _name in _OPERATORS.split():
    setattr(LogitsRecipe, f"__{_name}__", _operator(f"__{_name}__"))
# Python removes __hash__ from a class that defines __eq__
LogitsRecipe.__hash__ = object.__hash__  # type: ignore[method-assign]


class DeferredLogits(LogitsRecipe, Tensor):
    """A recipe that is a tensor for ``isinstance`` but has no memory of its own.

    Calls into PyTorch's C++ that go past ``__torch_function__`` see an empty leaf of the graph that
    requires a gradient if the logits do. A gradient that arrives there would be lost.
    """

    @staticmethod
    def __new__(cls, rows: Tensor, head: HeadWeights | None, *args: Any, **kwargs: Any) -> DeferredLogits:
        shape = rows.shape if head is None else (*rows.shape[:-1], head.classes)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=rows.dtype, device=rows.device)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.requires_grad:
            with _private.without_torch_function():
                self.requires_grad_()
                self.register_hook(_refused)

    def needs_graph(self) -> None:
        with _private.without_torch_function():
            if self.grad_fn is not None:
                _refused(self)

    @classmethod
    def __torch_dispatch__(cls, fn: Any, types_: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        recipes = [x for x in tree_leaves((args, kwargs), is_leaf=_is_recipe) if _is_recipe(x)]
        # autograd runs above this level and would miss their gradient
        if torch.is_grad_enabled() and any(x.requires_grad for x in recipes):
            raise RuntimeError(f"{fn}: {_NO_TENSOR}")
        return fn(*of_tensors(args), **of_tensors(kwargs or {}))


_NO_TENSOR = (
    "the logits of a patched model are computed when they are needed, and are no tensor before: give it "
    "logits.value(), or patch the model with fused_linear_cross_entropy=False"
)


def _refused(_: Tensor) -> None:
    """The hook of what is no part of the graph: a ``torch.autograd.Function`` got a recipe."""
    raise RuntimeError(f"torch.autograd.Function.apply: {_NO_TENSOR}")


def new_recipe(*args: Any, **kwargs: Any) -> LogitsRecipe:
    """Make a recipe that is a tensor; under ``torch.compile`` a plain object, which the compiler
    traces better."""
    return (LogitsRecipe if torch.compiler.is_compiling() else DeferredLogits)(*args, **kwargs)


_GRAD: Any = Tensor.grad  # the descriptor of the class, not a value
_OF_GRADIENTS = {
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.retain_grad,
    _GRAD.__get__,
    torch.autograd.grad,
}
# In pytrees (torch.vmap, torch.func) the logits replace a recipe
register_pytree_node(DeferredLogits, lambda x: ([x.value()], None), lambda children, _: next(iter(children)))


def _keeps_last_dim(index: Any, ndim: int) -> bool:
    """Whether ``index`` selects among all dims but the last."""
    items = index if isinstance(index, tuple) else (index,)
    if any(not (i is None or i is Ellipsis or isinstance(i, (int, slice, Tensor))) for i in items):
        return False
    used = sum(
        i.ndim if isinstance(i, Tensor) and i.dtype == torch.bool else i is not None for i in items if i is not Ellipsis
    )
    if items[-1:] == (slice(None),):
        return used <= ndim
    return used < ndim and (Ellipsis not in [i for i in items if not isinstance(i, Tensor)] or items[-1] is Ellipsis)
