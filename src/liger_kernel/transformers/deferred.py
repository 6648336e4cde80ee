"""Fused output head and loss without replacing any model's ``forward``.

For the time of one training ``forward`` a stand-in takes the place of the output head. It returns ``DeferredLogits``: a recipe for the logits.
What models do to logits on the way to their loss (scaling, soft-capping, casts, slices, reshapes) is recorded; ``F.cross_entropy``, wherever
it is called from, takes the recipe and computes the loss from hidden states and head in chunks. Anything else gets the logits, computed by
the head itself: slower, never wrong. So the model's own ``forward`` and its own loss function run, whatever they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from transformers import modeling_outputs
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

from liger_kernel import parallel
from liger_kernel.nn import token_accuracy
from liger_kernel.ops._core.operator import on_gpu, transformed
from liger_kernel.ops.losses.chunks import Kept, auto_chunk_rows
from liger_kernel.ops.losses.cross_entropy import Loss as LossNumbers
from liger_kernel.ops.losses.cross_entropy import cross_entropy, items, normaliser
from liger_kernel.ops.losses.linear_cross_entropy import linear_cross_entropy
from liger_kernel.transformers import attention
from liger_kernel.transformers.heads import HeadState, can_wait, is_plain, untouched, width
from liger_kernel.transformers.model import loss_utils

IGNORE = -100

# Keywords of a patched ``forward`` that are meant for its loss, and what the operators call them.
LOSS_OPTIONS = {
    "label_smoothing": "label_smoothing",
    "lse_square_scale": "z_loss",
    "softcap": "softcap",
    "use_token_scaling": "token_scaling",
    "ce_weight": "class_weight",
    "accum_dtype": "accum_dtype",
}
STATISTICS = ("return_token_accuracy", "return_predicted_tokens")


# -- the loss ------------------------------------------------------------------------------


def head_cross_entropy(head: nn.Module, x: Tensor, target: Tensor, *, within: bool = False, class_weight: Tensor | None = None, **options: Any) -> Any:
    """Cross entropy of ``head(x)`` and ``target``, with the options and results of ``linear_cross_entropy``, without holding all logits.

    x (M, H), target (M,). A plain ``nn.Linear`` is fused, also one whose parameters FSDP or ZeRO shards: they are gathered once. Any other head (LoRA,
    quantised ...) is called itself on one chunk of tokens at a time, and again in the backward, in the state of this call.
    ``within``: the caller has entered ``head``.
    """
    if not within and parallel.needs_entering(head):
        return parallel.entered(head, lambda x: head_cross_entropy(parallel.bare(head), x, target, within=True, class_weight=class_weight, **options), x)
    if is_plain(head, within):
        return linear_cross_entropy(x, head.weight, target, head.bias, class_weight, **options)
    if isinstance(head, parallel.VocabularyParallel) and class_weight is None and not options.get("token_scaling"):
        return _vocabulary_parallel_loss(head, x, target, **options)
    for name in ("accum_dtype", "compact"):  # the head accumulates its own gradients, and may ask what every token is
        options.pop(name, None)
    class_weight = class_weight if class_weight is None else class_weight.detach()
    reduction, stats = options.pop("reduction", "mean"), options.pop("stats", False)
    call = head.forward if within else head
    state = None if torch.compiler.is_compiling() else HeadState(head)

    def part(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with contextlib.nullcontext() if state is None else state.restored():
            logits = call(x[None])
        return cross_entropy(
            logits.reshape(-1, logits.shape[-1]), target, class_weight, reduction="none" if reduction == "none" else "sum", stats=True, **options
        )

    rows = auto_chunk_rows(x.shape[0], out_features(head, x, call), x.shape[1], x.element_size(), on_gpu(x))
    run = functools.partial(checkpoint, part, use_reentrant=False) if torch.is_grad_enabled() else part
    parts = [run(*chunk) for chunk in zip(x.split(rows), target.split(rows))]
    losses, z_losses, predicted = ([p[i] for p in parts] for i in range(3))
    if reduction == "none":
        loss, z_loss = torch.cat(losses), torch.cat(z_losses)
    else:
        loss, z_loss = torch.stack(losses).sum(), torch.stack(z_losses).sum()
    if reduction == "mean":
        n = normaliser(target, class_weight, LossNumbers(ignore_index=options.get("ignore_index", IGNORE)))
        loss, z_loss = loss / n, z_loss / n
    return (loss, z_loss, torch.cat(predicted)) if stats else loss


def _vocabulary_parallel_loss(
    head: parallel.VocabularyParallel, x: Tensor, target: Tensor, *, compact: bool | Kept = False, token_scaling: bool = False, **options: Any
) -> Any:
    """The loss of a head that is sharded by vocabulary; tokens known not to count are left out."""
    kept = compact.rows() if isinstance(compact, Kept) and options.get("reduction") != "none" else None
    if kept is None:
        return head.cross_entropy(x, target, **options)
    found = head.cross_entropy(x.index_select(0, kept), target[kept], **options)
    if not options.get("stats"):
        return found
    loss, z_loss, predicted = found
    return loss, z_loss, predicted.new_full(target.shape, -1).index_copy_(0, kept, predicted)


def out_features(head: nn.Module, x: Tensor, call: Callable | None = None) -> int:
    """The width of ``head(x)``, asked of the head, or of ``call``, if it does not say."""
    n = width(head)
    if n is not None:
        return n
    with torch.no_grad():
        return (call or head)(x.reshape(1, -1, x.shape[-1])[:, :1]).shape[-1]


# -- the recipe ----------------------------------------------------------------------------


@dataclass
class Loss:
    """What the caller of ``forward`` asked of the loss, and what the loss found."""

    options: dict[str, Any] = field(default_factory=dict)
    statistics: bool = False
    taken: bool = False
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None
    causal: bool = False  # whether transformers' ForCausalLMLoss is the model's loss function
    kept: Kept | None = None  # tokens that count, counted when the forward began
    num_items: Any = None  # what the loss function will divide the sum by
    recipes: list[weakref.ref[Recipe]] = field(default_factory=list)  # made by calls of the head


class Recipe:
    """``head(rows)``, or ``rows`` if there is no head, then ``tail``; computed when somebody looks.

    ``tail`` holds ("mul", number), ("div", number), ("tanh", None) and ("to", dtype). Selecting and reshaping tokens acts on ``rows``. Once somebody
    looks, all recipes made of the same logits are computed from them, views as views: from then on the logits are what counts, as they may be changed
    in place.

    Gradients, autocast and the state of the head are what they were when it was called, whoever looks.
    """

    def __init__(self, rows: Tensor, head: nn.Module | None, loss: Loss, tail: tuple[tuple[str, Any], ...] = (), state: HeadState | None = None):
        self.rows, self.head, self.loss, self.tail, self.state = rows, head, loss, tail, state
        self.computed: Tensor | None = None
        self.learns = torch.is_grad_enabled()
        self.autocast = _autocast(rows.device.type)
        self.root: Recipe | None = None  # what others are made of, and how; kept until they are computed
        self.make: Callable[[], Tensor] | None = None
        self.shared = False  # whether another recipe was made of it, or may be of the same memory
        self.learnt = False  # whether a loss was computed without them, so that they get no gradient
        self.others: list[Callable[[], Recipe | None]] = []  # of a root: the recipes made of it, while they live

    def value(self) -> Tensor:
        """The logits themselves."""
        self.not_in_a_function()
        if self.computed is None:
            root = self if self.root is None else self.root
            for recipe in (root, *(other() for other in root.others), self):  # parents come before their children
                if recipe is not None and recipe.computed is None:
                    with _outside_inference(), torch.set_grad_enabled(recipe.learns):
                        recipe.computed = recipe.make() if recipe.make is not None else recipe._call_head()
                    recipe.root = recipe.make = None
        return self.computed  # type: ignore[return-value]

    def not_in_a_function(self) -> None:
        """``RuntimeError`` within a ``torch.autograd.Function`` that was given a recipe: autograd knows tensors alone, and no gradient would pass."""
        root = self if self.root is None else self.root
        if torch.is_grad_enabled() or not root.learns or torch.compiler.is_compiling():
            return
        forwards = {cls.forward.__code__ for cls in _subclasses(torch.autograd.Function) if isinstance(cls.forward, types.FunctionType)}
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code in forwards and any(isinstance(a, Recipe) for a in _arguments(frame)):
                raise RuntimeError(
                    "torch.autograd.Function.apply: the logits of a patched model are computed when they are needed, and are no tensor before: "
                    "give it logits.value(), or patch the model with fused_linear_cross_entropy=False"
                )
            frame = frame.f_back  # type: ignore[assignment]

    def _call_head(self) -> Tensor:
        with self.as_called(), self.in_state():
            y = self.rows if self.head is None else self.head(self.rows)
        for name, arg in self.tail:  # what was done in place
            y = _apply(y, name, arg)
        return y

    def as_called(self) -> contextlib.AbstractContextManager:
        """Autocast as it was when the head was called."""
        device = self.rows.device.type
        if self.head is None or self.autocast == _autocast(device):
            return contextlib.nullcontext()
        return torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None)

    def in_state(self) -> contextlib.AbstractContextManager:
        """The head as it was when it was called."""
        return contextlib.nullcontext() if self.state is None else self.state.restored()

    def derived(self, rows: Tensor, tail: tuple[tuple[str, Any], ...], op: Callable[[Tensor], Tensor]) -> Recipe:
        new = _recipe(rows, self.head, self.loss, tail, self.state)
        root = self if self.root is None else self.root
        new.learns, new.autocast, new.root = new.learns and self.learns, self.autocast, root
        new.make = lambda: op(self.value())
        new.shared = self.shared = True
        # while it is traced nothing is computed that nobody uses
        root.others.append((lambda: new) if torch.compiler.is_compiling() else weakref.ref(new))
        return new

    def then(self, name: str, arg: Any = None) -> Recipe:
        new = self.derived(self.rows, (*self.tail, (name, arg)), lambda y: _apply(y, name, arg))
        new.shared = name == "to" and arg == self.dtype
        return new

    def changed(self, name: str, arg: Any) -> Any:
        """The same in place."""
        if self.computed is not None or self.shared or not isinstance(arg, (int, float)) or not arg or self.learns != torch.is_grad_enabled():
            return getattr(self.value(), f"{name}_")(_materialised(arg))
        self.tail, make = (*self.tail, (name, arg)), self.make
        if make is not None:
            self.make = lambda: _apply(make(), name, arg)
        return self

    def with_rows(self, rows: Tensor, op: Callable[[Tensor], Tensor]) -> Recipe:
        return self.derived(rows, self.tail, op)

    def scale_and_cap(self) -> tuple[float, float | None] | None:
        """``tail`` as ``cap * tanh(scale * x / cap)``, or ``scale * x`` if cap is None; None if it is neither."""
        before = after = 1.0
        capped = False
        for name, arg in self.tail:
            if name == "tanh":
                if capped:
                    return None
                capped = True
            elif name != "to":
                factor = arg if name == "mul" else 1 / arg
                before, after = (before, after * factor) if capped else (before * factor, after)
        if capped and not after:
            return None  # a cap of 0
        return (before * after, after) if capped else (before, None)

    def gradient_wanted(self, name: str) -> None:
        """``RuntimeError`` if a loss has been computed already, without logits, so that its gradient does not pass through them."""
        if self.learnt:
            raise RuntimeError(
                f"{name}: a loss of these logits was computed without them, so that they get no gradient: ask before the loss is computed, "
                "take logits.value() before, or patch the model with fused_linear_cross_entropy=False"
            )

    # -- what is known without computing

    @property
    def shape(self) -> torch.Size:
        return self.rows.shape if self.head is None else torch.Size((*self.rows.shape[:-1], out_features(self.head, self.rows)))

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
        leaves = (self.rows, *(self.head.parameters() if self.head is not None else ()))
        return self.learns and any(t.requires_grad for t in leaves)

    @property
    def ndim(self) -> int:
        return self.rows.ndim

    def dim(self) -> int:
        return self.rows.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return len(self.rows)

    # -- what is recorded

    def __mul__(self, other: Any) -> Any:
        return self.then("mul", other) if self.computed is None and isinstance(other, (int, float)) else self.value() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self.then("div", other) if self.computed is None and isinstance(other, (int, float)) and other else self.value() / other

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
        return self.with_rows(self.rows, Tensor.contiguous) if self.computed is None and not kwargs else self.value().contiguous(**kwargs)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        return self._shaped("reshape", *shape, *kwargs.values()) if kwargs.keys() <= {"shape"} else self.value().reshape(*shape, **kwargs)

    def view(self, *shape: Any, **kwargs: Any) -> Any:
        return self._shaped("view", *shape, *kwargs.values()) if kwargs.keys() <= {"size"} else self.value().view(*shape, **kwargs)

    def _shaped(self, name: str, *shape: Any) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        V = self.shape[-1]
        if self.computed is None and all(isinstance(n, int) for n in sizes) and len(sizes) > 1:
            lead, last = sizes[:-1], sizes[-1]
            if last == V or (last == -1 and -1 not in lead and torch.Size(lead).numel() == self.rows.shape[:-1].numel()):
                return self.with_rows(self.rows.reshape(*lead, self.rows.shape[-1]), lambda y: y.reshape(sizes))
        return getattr(self.value(), name)(*shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if self.computed is None and start_dim >= 0 and end_dim % self.ndim < self.ndim - 1:
            return self.with_rows(self.rows.flatten(start_dim, end_dim), lambda y: y.flatten(start_dim, end_dim))
        return self.value().flatten(start_dim, end_dim)

    def __getitem__(self, index: Any) -> Any:
        if self.computed is None and _keeps_last_dim(index, self.ndim):
            return self.with_rows(self.rows[index], lambda y: y[index])
        return self.value()[index]

    # -- everything else

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.value(), name)

    @classmethod
    def __torch_function__(cls, fn: Callable, types_: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if fn is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if fn is torch.tanh and not kwargs:
            return args[0].tanh()
        if fn in _OF_GRADIENTS:
            asked = kwargs.get("inputs", args[-1]) if fn is torch.autograd.grad else args[:1]
            for x in asked:
                if isinstance(x, Recipe):
                    x.gradient_wanted("grad" if fn.__name__ == "__get__" else fn.__name__)
        return fn(*_of_tensors(args), **_of_tensors(kwargs))


def _subclasses(cls: Any) -> Iterator[Any]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def _arguments(frame: types.FrameType) -> list[Any]:
    """What the function of ``frame`` was called with, ``*args`` one by one."""
    code, values = frame.f_code, frame.f_locals
    n = code.co_argcount + code.co_kwonlyargcount
    named = [values.get(name) for name in code.co_varnames[:n]]
    return [*named, *values.get(code.co_varnames[n], ())] if code.co_flags & inspect.CO_VARARGS else named


def _apply(y: Tensor, name: str, arg: Any) -> Tensor:
    return y.to(arg) if name == "to" else y * arg if name == "mul" else y / arg if name == "div" else torch.tanh(y)


def _autocast(device: str) -> torch.dtype | None:
    """What matrices are multiplied in there, if autocast says."""
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def _outside_inference() -> contextlib.AbstractContextManager:
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()  # which cannot be traced
    return torch.inference_mode(False) if inference else contextlib.nullcontext()


def _materialised(x: Any) -> Any:
    return x.value() if isinstance(x, Recipe) else x


def _of_tensors(tree: Any) -> Any:
    """``tree`` with logits in the place of recipes."""
    return tree_map(_materialised, tree, is_leaf=_is_recipe)


def _is_recipe(x: Any) -> bool:
    return isinstance(x, Recipe)


def _operator(name: str) -> Callable:
    return lambda self, *args, **kwargs: getattr(self.value(), name)(*_of_tensors(args), **_of_tensors(kwargs))


_ARITHMETIC = ("add", "radd", "sub", "rsub", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "neg", "abs", "pow", "rpow", "matmul", "rmatmul")
_IN_PLACE = ("iadd", "isub", "ipow", "ifloordiv", "imod", "iand", "ior")
for _name in (*_ARITHMETIC, *_IN_PLACE, "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "invert", "bool", "iter", "setitem"):
    setattr(Recipe, f"__{_name}__", _operator(f"__{_name}__"))
Recipe.__hash__ = object.__hash__  # type: ignore[method-assign]


class DeferredLogits(Recipe, Tensor):  # type: ignore[misc]
    """A recipe that is a tensor, without memory of its own: ``isinstance`` says so, and what PyTorch's C++ is given is caught below."""

    @staticmethod
    def __new__(cls, rows: Tensor, head: nn.Module | None, *args: Any, **kwargs: Any) -> DeferredLogits:
        shape = rows.shape if head is None else (*rows.shape[:-1], out_features(head, rows))
        return Tensor._make_wrapper_subclass(cls, shape, dtype=rows.dtype, device=rows.device)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, fn: Any, types_: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        recipes = [x for x in tree_leaves((args, kwargs), is_leaf=_is_recipe) if _is_recipe(x)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in recipes):  # autograd, which is above, knows nothing of their gradient
            raise RuntimeError(
                f"{fn}: the logits of a patched model are computed when they are needed: give it logits.value(), "
                "or patch the model with fused_linear_cross_entropy=False"
            )
        return fn(*_of_tensors(args), **_of_tensors(kwargs or {}))


def _recipe(*args: Any, **kwargs: Any) -> Recipe:
    """One that is a tensor, but while it is traced: ``torch.compile`` knows objects better."""
    return (Recipe if torch.compiler.is_compiling() else DeferredLogits)(*args, **kwargs)


_OF_GRADIENTS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad, Tensor.grad.__get__, torch.autograd.grad}  # type: ignore[attr-defined]
# What goes through pytrees (torch.vmap, torch.func) are the logits
register_pytree_node(DeferredLogits, lambda x: ([x.value()], None), lambda children, _: next(iter(children)))


def _keeps_last_dim(index: Any, ndim: int) -> bool:
    """Whether ``index`` selects among all dims but the last."""
    items = index if isinstance(index, tuple) else (index,)
    if any(not (i is None or i is Ellipsis or isinstance(i, (int, slice, Tensor))) for i in items):
        return False
    used = sum(i.ndim if isinstance(i, Tensor) and i.dtype == torch.bool else i is not None for i in items if i is not Ellipsis)
    if items[-1:] == (slice(None),):
        return used <= ndim
    return used < ndim and (Ellipsis not in [i for i in items if not isinstance(i, Tensor)] or items[-1] is Ellipsis)


def _cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = IGNORE, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """``F.cross_entropy`` of a recipe."""
    if isinstance(input, Recipe) and input.ndim == 2 and target.ndim == 1 and size_average is None and reduce is None:
        said = {k: v for k, v in (("class_weight", weight), ("label_smoothing", label_smoothing or None)) if v is not None}
        return _loss(input, target, ignore_index=ignore_index, reduction=reduction, **said)
    args = (_materialised(a) for a in (input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing))
    return F.cross_entropy(*args)


def _loss(logits: Recipe, target: Tensor, **options: Any) -> Tensor:
    logits.not_in_a_function()
    asked = logits.loss
    options = asked.options | options
    cut = torch.is_grad_enabled() and not logits.learns  # from the graph, by a no_grad before this loss
    transform = logits.scale_and_cap() if logits.computed is None and not cut else None
    if transform is not None and (transform[1] is None or "softcap" not in asked.options):
        options["logit_scale"], softcap = transform
        options |= {} if softcap is None else {"softcap": softcap}
        head, rows = logits.head, logits.rows
    else:
        head, rows = None, logits.value()
    if head is None:
        options.pop("accum_dtype", None)
        found = cross_entropy(rows, target, options.pop("class_weight", None), stats=asked.statistics, **options)
    else:
        with logits.as_called(), logits.in_state():
            found = _head_loss(head, rows, target, asked, options)
        root = logits if logits.root is None else logits.root
        for recipe in (root, *(other() for other in root.others)):
            if recipe is not None:
                recipe.learnt = True
    asked.taken = True
    if not asked.statistics:
        return found
    loss, _, predicted = found
    if asked.predicted_tokens is None:  # the first loss of a forward is the main one
        asked.predicted_tokens, asked.token_accuracy = predicted, token_accuracy(predicted, target, options["ignore_index"])
    return loss


def _inside(function: Callable) -> bool:
    """Whether ``function`` is being called, a few frames up: some models have a loss function and do not use it."""
    frame = sys._getframe(1)
    for _ in range(12):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code is function.__code__:
            return True
    return False


def _head_loss(head: nn.Module, rows: Tensor, target: Tensor, asked: Loss, options: dict[str, Any]) -> Any:
    """``head_cross_entropy`` with what was known when the forward began, if it is the loss that was foreseen."""
    main = asked.causal and not asked.taken and options["ignore_index"] == IGNORE
    # a head's bias, its scale, and losses of single tokens are not in the signature of what was replaced
    plain = getattr(parallel.bare(head), "bias", None) is None and options.get("logit_scale", 1.0) == 1.0 and options.get("reduction") != "none"
    hooked = main and plain and loss_utils.replaced()
    main = main and (hooked if torch.compiler.is_compiling() else _inside(ForCausalLMLoss))
    within, inner = parallel.needs_entering(head), parallel.bare(head)
    return parallel.entered(head, lambda rows: _entered_loss(inner, rows, target, asked, options, within, main, hooked), rows)


def _entered_loss(head: nn.Module, rows: Tensor, target: Tensor, asked: Loss, options: dict[str, Any], within: bool, main: bool, hooked: bool) -> Any:
    """The rest of ``_head_loss``, where the parameters of the head are."""
    sliced, linear = isinstance(head, parallel.VocabularyParallel), is_plain(head, within)
    if main and hooked and linear:
        return _replaced_loss(head, rows, target, asked, options)
    kept = asked.kept if main and (linear or sliced) and asked.kept is not None and asked.kept.total == target.numel() else None
    if kept is not None:
        options["compact"] = kept
    # a sum that is about to be divided: dividing in the forward spares the backward a pass over the gradient of the head
    n = items(asked.num_items, rows) if main and linear and asked.num_items is not None and options.get("reduction") == "sum" else None
    if n is not None:
        n = n.where(n != 0, 1)  # of no tokens the caller divides by 0, as with logits
        options |= dict(reduction="mean", num_items=n)
    found = head_cross_entropy(head, rows, target, within=within, stats=asked.statistics, **options)
    loss, *more = found if asked.statistics else (found,)
    if n is not None:
        loss, more = loss * n, [more[0] * n, *more[1:]] if more else more
    if kept is not None and (chosen := kept.rows()) is not None:
        # a token that counts and was not foreseen makes the loss NaN rather than wrong
        counts = target != IGNORE
        loss = torch.where(counts.sum() == counts[chosen].sum(), loss, float("nan"))
    return (loss, *more) if asked.statistics else loss


def _replaced_loss(head: nn.Module, rows: Tensor, target: Tensor, asked: Loss, options: dict[str, Any]) -> Any:
    """What the function that somebody put in place of one of ours in ``loss_utils`` returns; it may reduce or not."""
    n = asked.num_items if options["reduction"] == "sum" else None  # by which the caller divides
    names = {ours: name for name, ours in LOSS_OPTIONS.items()} | {"softcap": "final_logit_softcapping"}
    said = {names[k]: v for k, v in options.items() if k in names}
    said |= dict.fromkeys(STATISTICS, True) if asked.statistics else {}
    found = loss_utils.LigerForCausalLMLoss(
        rows, head.weight, None, rows.shape[-1], num_items_in_batch=n, ignore_index=options["ignore_index"], shift_labels=target, **said
    )
    loss, predicted = (found, None) if isinstance(found, Tensor) else (found.loss, found.predicted_tokens)
    loss = loss if n is None else loss * items(n, rows)
    asked.statistics = predicted is not None
    return (loss, None, predicted) if asked.statistics else loss


# -- around the model's forward ------------------------------------------------------------


@dataclass
class Call:
    """A ``forward`` under way."""

    model: nn.Module
    loss: Loss
    keep_logits: bool


class StandIn(nn.Module):
    """In the head's place during ``forward``: returns a recipe to the calls that want one, and is the head to everybody else who looks.

    ``calls`` are those of each thread, the innermost last; None is one that wants logits.
    """

    def __init__(self, head: nn.Module):
        if torch.compiler.is_compiling():
            super().__init__()
            self.head = head
            self.calls: dict[int, list[Call | None]] = {}
        else:  # nothing of its own: parameters, hooks and all else are the head's for those who look meanwhile, and those who change it
            self.__dict__.update(head=head, calls={})

    def call(self) -> Call | None:
        """What this thread is in."""
        calls = self.calls.get(_thread())
        return calls[-1] if calls else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self.call()
        if call is None:
            return self.head(*args, **kwargs)
        held = None if call.keep_logits or kwargs or len(args) != 1 else _held(self.head, args[0])
        if held is None:
            logits = self.head(*args, **kwargs)
            return _recipe(logits, None, call.loss) if isinstance(logits, Tensor) else logits
        head, rows = held
        if torch.compiler.is_compiling():
            return Recipe(rows, head, call.loss)
        recipe = DeferredLogits(rows, head, call.loss, state=HeadState(head, rows) if head is self.head else None)
        call.loss.recipes.append(weakref.ref(recipe))
        return recipe

    def __getattr__(self, name: str) -> Any:
        if "_modules" in self.__dict__:  # where it is traced
            return super().__getattr__(name)
        return getattr(self.__dict__["head"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)  # hooks of all modules are for the head

    @property
    def __class__(self) -> type:
        return type(self.__dict__.get("head", self))

    def __setattr__(self, name: str, value: Any) -> None:
        if torch.compiler.is_compiling() or "calls" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self.head, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.head, name)


def _of_head(name: str) -> Callable:
    return lambda self, *args, **kwargs: getattr(self.head, name)(*args, **kwargs)


# What visits the modules of a model, to change them or to ask what they are, finds the head
for _name in ("state_dict", "named_modules", "apply", "train", "_apply", "requires_grad_", "__repr__"):
    setattr(StandIn, _name, _of_head(_name))


def _held(head: nn.Module, x: Any) -> tuple[nn.Module, Tensor] | None:
    """The head and rows of a recipe for ``head(x)``; None where the call cannot wait."""
    if not isinstance(x, Tensor) or not untouched():
        return None
    held = parallel.received(head, x)
    return None if held is not None and held[0] is head and not can_wait(head) else held


_standing: list[StandIn] = []  # those in place
_LOCK = threading.Lock()


@torch.compiler.assume_constant_result
def _thread() -> int:
    return threading.get_ident()


def _locked() -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if torch.compiler.is_compiling() else _LOCK


def _enter(parent: nn.Module, name: str, call: Call) -> StandIn:
    """A stand-in for ``name`` of ``parent``, the same one for all calls at a time."""
    with _locked():
        there = parent._modules[name]
        stand_in = there if isinstance(there, StandIn) else StandIn(there)
        stand_in.calls.setdefault(_thread(), []).append(call)
        if stand_in is not there:
            parent._modules[name] = stand_in
            _standing.append(stand_in)
    return stand_in


def _leave(stand_in: StandIn, parent: nn.Module, name: str) -> None:
    """The last call out puts the head back."""
    with _locked():
        thread = _thread()
        stand_in.calls[thread].pop()
        if not stand_in.calls[thread]:
            del stand_in.calls[thread]
        if not stand_in.calls:
            _standing[:] = [s for s in _standing if s.calls]
            if parent._modules.get(name) is stand_in:
                parent._modules[name] = stand_in.head


def _without_labels(forward: Callable, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``forward``, which returns logits also where ``model`` is called within its own loss."""
    within = [s for s in list(_standing) if (call := s.call()) is not None and call.model is model]
    for stand_in in within:
        stand_in.calls[_thread()].append(None)
    try:
        return forward(model, *args, **kwargs)
    finally:
        for stand_in in within:
            stand_in.calls[_thread()].pop()


def place_of_head(model: nn.Module) -> tuple[nn.Module, str] | None:
    """The module that holds the output head, and its name there."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    if head is None:  # transformers does not look for it where there is no embedding: in the last stage of a pipeline
        head = model._modules.get("lm_head")
    if not isinstance(head, nn.Module) or isinstance(head, nn.Embedding):  # which is called for the inputs, too
        return None
    for name, child in model._modules.items():  # where it nearly always is
        if child is head:
            return model, name
    return next(((m, name) for m in model.modules() for name, child in m._modules.items() if child is head), None)


def _positional(forward: Callable) -> tuple[list[str], bool]:
    """Names of the positional parameters of ``forward`` after ``self``, and whether it takes more."""
    parameters = inspect.signature(forward).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:], any(p.kind is p.VAR_POSITIONAL for p in parameters)


def fused(forward: Callable, *, keep_logits: bool = False, known: bool = True) -> Callable:
    """``forward`` (a function of a model class) with head and loss fused, and the keywords that users of patched models know.

    Logits are left out while training with labels, or as ``skip_logits`` says. With ``keep_logits`` they are always computed, and only
    the loss on them is fused. ``known``: it is transformers' own; else its loss may be of other labels than it is given, and its output anything.
    """
    signature = inspect.signature(forward)
    forward = attention.unmasked(forward)
    names = list(signature.parameters)
    variadic = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    takes_anything = bool(variadic)
    own_options = [n for n in LOSS_OPTIONS if n not in names]
    positional, more = _positional(forward)
    _declare_outputs(sys.modules.get(forward.__module__))

    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        options = {LOSS_OPTIONS[n]: v for n in own_options if (v := kwargs.pop(n, None)) is not None and v is not False}
        accuracy, predictions = (kwargs.pop(n, None) for n in STATISTICS)
        takes = positional
        if more and args:  # a wrapper somebody put there: what it is given has the names that the class knows
            of_class = _positional(type(self).forward)[0]
            takes = of_class if of_class[: len(positional)] == positional else positional
        at = takes[: len(args)]  # what is given by position is passed on so
        given = dict(zip(at, args)) | kwargs
        learns = given.get("labels") is not None or given.get("shift_labels") is not None
        if transformed() and not (options or accuracy or predictions):  # torch.func does not see through fused operators
            learns = False
        if not learns:  # with skip_logits=True, too: trainers that keep the labels for a loss of their own pass it in evaluation
            return _without_labels(forward, self, args, kwargs) if _standing else forward(self, *args, **kwargs)
        if takes_anything:
            given = _aligned(given)
        skip = not keep_logits and (self.training if skip_logits is None else skip_logits)
        place = place_of_head(self) if skip or keep_logits or options or accuracy or predictions else None
        if place is None:
            return forward(self, *(given[n] for n in at), *args[len(at) :], **{k: v for k, v in given.items() if k not in at})
        loss = Loss(options, bool(accuracy or predictions))
        parent, name = place
        head = parent._modules[name]
        head = head.head if isinstance(head, StandIn) else head
        shifts = not getattr(getattr(self, "config", None), "is_encoder_decoder", False)  # of others, some say that their labels are the shifted ones
        if known and not keep_logits and shifts and getattr(self, "loss_function", None) is ForCausalLMLoss:
            loss.causal, loss.num_items = True, given.get("num_items_in_batch")
            if parallel.is_linear(parallel.bare(head)) and not torch.compiler.is_compiling():
                loss.kept = _kept_early(given, parallel.bare(head))
        stand_in = _enter(parent, name, Call(self, loss, keep_logits=not skip))
        try:
            out = forward(self, *(given[n] for n in at), *args[len(at) :], **{k: v for k, v in given.items() if k not in at})
        finally:
            _leave(stand_in, parent, name)
        if not loss.taken and (options or loss.statistics):
            warnings.warn(f"{type(self).__name__}: its loss is not one cross entropy of its logits, so it has no {[*own_options, *STATISTICS]}", stacklevel=2)
        settle = _settled if known else _settled_in_place
        out = settle(out, skip, loss.token_accuracy if accuracy else None, loss.predicted_tokens if predictions else None)
        for recipe in loss.recipes:  # somebody holds these, and may look at them when the weights are others
            if (kept := recipe()) is not None:
                kept.value()
        return out

    skip = inspect.Parameter("skip_logits", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="bool | None")
    del wrapper.__wrapped__  # type: ignore[attr-defined]  # accelerate follows it when it takes its own wrappers off
    wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*(p for p in signature.parameters.values() if p not in variadic), skip, *variadic]
    )
    return wrapper


def _aligned(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a model's ``forward`` with labels that fit the logits it keeps, and ``labels`` where only ``shift_labels`` are given."""
    labels, shift_labels, keep = (given.get(n) for n in ("labels", "shift_labels", "logits_to_keep"))
    tokens = next((given[n].shape[:2] for n in ("input_ids", "inputs_embeds") if given.get(n) is not None), None)
    if keep is not None and not (isinstance(keep, int) and keep == 0):
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=given.get("ignore_index", IGNORE))[..., 1:]
        if shift_labels.shape == tokens:
            shift_labels = _kept(shift_labels, keep)
    if shift_labels is None:
        return given
    # contiguous: loss functions take a view of them
    return given | {"labels": shift_labels if labels is None else labels, "shift_labels": shift_labels.contiguous()}


def _kept_early(given: dict[str, Any], head: nn.Module) -> Kept | None:
    """The tokens that the causal loss will count; on a GPU they are counted while the model computes."""
    labels = given.get("shift_labels")
    if labels is None:
        labels = F.pad(given["labels"], (0, 1), value=IGNORE)[..., 1:]
    if labels.is_meta or labels.device != head.weight.device or (labels.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return Kept(labels, IGNORE)


def _kept(t: Tensor, keep: int | Tensor) -> Tensor:
    """What ``logits_to_keep`` keeps of t (B, T): the last ones, some positions, or of each sequence its own positions or mask."""
    if isinstance(keep, Tensor) and keep.ndim == 2:
        return t[keep] if keep.dtype == torch.bool else t.gather(1, keep)
    return t[:, slice(-keep, None) if isinstance(keep, int) else keep]


# -- outputs -------------------------------------------------------------------------------

_OUTPUTS: dict[type, type] = {}


EXTRA = "token_accuracy", "predicted_tokens"


def output_class(cls: type) -> type:
    """``cls``, a ``ModelOutput``, with the fields ``token_accuracy`` and ``predicted_tokens``; pickled without these it is a ``cls``, which loads anywhere."""
    if cls not in _OUTPUTS:
        name = cls.__name__ if cls.__name__.startswith("Liger") else f"Liger{cls.__name__}"
        namespace = {"__module__": __name__, "__doc__": cls.__doc__, "__reduce__": _reduced_output}
        _OUTPUTS[cls] = dataclasses.make_dataclass(name, [(n, "Tensor | None", None) for n in EXTRA], bases=(cls,), namespace=namespace)
    return _OUTPUTS[cls]


class _Output:
    """Makes an output for a copy; pickled, the function that makes one of the class it is given."""

    def __init__(self, cls: type, make: Any):
        self.cls, self.make = cls, make

    def __call__(self, *args: Any) -> Any:
        return self.cls(*args)

    def __reduce__(self) -> Any:
        return functools.partial, self.make


def _output(cls: type, *args: Any) -> Any:
    return output_class(cls)(*args)


def _reduced_output(self: Any) -> Any:
    own, stock = type(self), type(self).__bases__[0]
    _, args, state, *rest = super(own, self).__reduce__()
    if any(getattr(self, name) is not None for name in EXTRA):
        return _Output(own, (_output, stock)), args, state, *rest
    return _Output(own, (stock,)), args[: -len(EXTRA)], {k: v for k, v in (state or {}).items() if k not in EXTRA}, *rest


def _declare_outputs(module: types.ModuleType | None) -> None:
    """Make the classes that models of ``module`` may return, ahead of time: ``torch.compile`` cannot trace the making of a class."""
    for each in (modeling_outputs, module):
        for cls in _outputs_in(each) if each else ():
            output_class(cls)


def _outputs_in(module: types.ModuleType) -> Iterator[type]:
    for cls in vars(module).values():
        if isinstance(cls, type) and issubclass(cls, ModelOutput) and {"loss", "logits"} <= set(getattr(cls, "__dataclass_fields__", ())):
            yield cls


def _settled(out: Any, skip: bool, token_accuracy: Tensor | None, predicted_tokens: Tensor | None) -> Any:
    """``out`` without recipes: what was skipped is left out, the rest is computed. A ``ModelOutput`` is rebuilt, as it is also a dict."""
    if isinstance(out, tuple):
        drop = skip and isinstance(out[0], Tensor) and not isinstance(out[0], Recipe)  # the loss is there
        kept = [_materialised(x) for x in out if not (drop and isinstance(x, Recipe))]
        return tuple(kept + [x for x in (token_accuracy, predicted_tokens) if x is not None])
    if not isinstance(out, ModelOutput):
        return _materialised(out)
    drop = skip and getattr(out, "loss", None) is not None
    fields = {k: _materialised(v) for k, v in out.items() if not (drop and isinstance(v, Recipe))}
    return output_class(type(out))(**fields, token_accuracy=token_accuracy, predicted_tokens=predicted_tokens)


def _settled_in_place(out: Any, skip: bool, token_accuracy: Tensor | None, predicted_tokens: Tensor | None) -> Any:
    """The same for the output of a ``forward`` of the user's: the very object where it is a ``ModelOutput``, as it may have more than its class declares."""
    if not isinstance(out, ModelOutput):
        return _of_tensors(out)
    recipes = {k: v for k, v in out.items() if isinstance(v, Recipe)}
    for name, recipe in recipes.items():
        if skip and name == "logits" and getattr(out, "loss", None) is not None:
            OrderedDict.__delitem__(out, name)
            out.logits = None
        else:
            out[name] = recipe.value()
    for name, value in (("token_accuracy", token_accuracy), ("predicted_tokens", predicted_tokens)):
        if value is not None:
            out[name] = value
    return out
