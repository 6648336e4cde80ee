"""Padded batches without the padding: the layers of a model compute real tokens alone.

A batch (B, T) becomes one row of its N real tokens, each at the position that it has in its own
row, and hidden states come back in the padded shape, 0 at padding:

    attention_mask   1 1 1 0   the layers get   a b c d e, positions 0 1 2 2 3
                     0 0 1 1   attention        varlen_attn of (a b c) and (d e); where that does
                                                not run, the model's own, of the padded rows

Only attention must know of rows. The mask that it gets is a ``PackedMask``, whatever window or
chunks the model's masks have. What this is right for is seen in a tiny model of the same
configuration; everything else runs as it was, and a warning says why.

``B`` rows, ``T`` tokens per row, ``N`` real tokens, ``H`` heads, ``D`` width of a head.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, packed_sequence_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from liger_kernel.ops._core.operator import host_can_read
from liger_kernel.parallel.sharded_head import is_compiled, observed_inside
from liger_kernel.transformers import attention, documents
from liger_kernel.transformers.head.recipe import IGNORE
from liger_kernel.transformers.lazy_mask import visible_keys
from liger_kernel.transformers.patching.bounds import BOUNDS, bounded, gives_bounds
from liger_kernel.transformers.patching.patches import core, original, stock_class, warn_once
from liger_kernel.transformers.recognise.families import undisturbed
from liger_kernel.transformers.recognise.tiny import model_of, tiny_of
from liger_kernel.transformers.rewrite import rules

_PACKING = "_liger_packing"  # attribute of the mask that a model gets instead of the padded one
_KNOWING: set[Callable] = set()  # functions in Transformers' interfaces that know ``PackedMask``


class Packing:
    """Where the ``n`` real tokens of a padded batch are. ``real``: (B, T) bool, on the host or on
    the model's device; ``longest``: the most tokens of a row; ``whole``: no row has padding
    between real tokens; ``counts``: labels that count, at most."""

    def __init__(self, real: Tensor, n: int, longest: int, whole: bool, device: torch.device, counts: int = 0):
        order = torch.argsort(real.flatten().logical_not(), stable=True)  # unlike ``nonzero``, it does not wait
        bounds = F.pad(real.sum(1).cumsum(0), (1, 0)).int()
        self.real, self.index, self.bounds = (moved(t, device) for t in (real, order[:n], bounds))
        self.longest, self.whole, self.used, self.counts = longest, whole, False, counts

    def pack(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (1, N, ...)"""
        return x.flatten(0, 1).index_select(0, self.index.to(x.device))[None]

    def pad(self, x: Tensor) -> Tensor:
        """(1, N, ...) -> (B, T, ...); 0 at the last tokens if ``x`` lacks them."""
        flat = x.new_zeros(self.real.numel(), *x.shape[2:])
        index = self.index[: x.shape[1]].to(x.device)
        return flat.index_copy(0, index, x[0]).view(*self.real.shape, *x.shape[2:])

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the model gets instead of the padded arguments ``given``."""
        positions, T = given.get("position_ids"), self.real.shape[1]
        positions = self.index[None] % T if positions is None else self.pack(positions.expand(self.real.shape))
        mask: Any = torch.ones(1, len(self.index), dtype=torch.bool, device=self.index.device)
        setattr(mask, _PACKING, self)
        tokens = {n: self.pack(t) for n in documents.TOKENS if (t := given.get(n)) is not None}
        return {**given, **tokens, "position_ids": positions, "attention_mask": mask}

    def mask_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """With what Transformers makes the mask of attention that does not know bounds."""
        B, T = self.real.shape
        return arguments | dict(batch_size=B, q_length=T, kv_length=T, attention_mask=self.real)

    def mask(self, make: Callable, arguments: dict[str, Any]) -> PackedMask:
        return PackedMask(self, make, arguments)


class Row(Packing):
    """A row (1, N) that its caller has packed, with ``bounds`` on the device; bounds at its end are of
    empty documents. The host need not know how many tokens are real."""

    def __init__(self, tokens: Tensor, bounds: Tensor, longest: int):
        self.real, self.bounds, self.longest = torch.ones_like(tokens, dtype=torch.bool), bounds, longest
        self.index, self.whole, self.used = torch.arange(tokens.shape[1], device=tokens.device), True, False

    def pack(self, x: Tensor) -> Tensor:
        return x

    def pad(self, x: Tensor) -> Tensor:
        return x

    def mask_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        document = torch.bucketize(self.index, self.bounds[1:], out_int32=True, right=True)[None]
        within = and_masks(arguments["mask_function"], packed_sequence_mask_function(document))
        return super().mask_arguments(arguments) | dict(mask_function=within)


def moved(t: Tensor, device: torch.device) -> Tensor:
    # from pageable memory, the host might wait until the GPU is idle
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and not t.is_cuda else t.to(device)


class PackedMask:
    """The mask of a packed row. ``make(**arguments)`` makes that of the padded rows; it is made if
    an attention layer needs it."""

    def __init__(self, packing: Packing, make: Callable, arguments: dict[str, Any]):
        (_, T), n = packing.real.shape, len(packing.index)
        arguments |= Packing.mask_arguments(packing, arguments)
        arguments["allow_is_causal_skip"] = False  # there is padding, and to look for it the host would wait
        if "cache_position" in arguments:  # before transformers 5
            arguments["cache_position"] = torch.arange(T, device=packing.real.device)
        self.packing, self.make, self.arguments, self.shape = packing, make, arguments, (1, 1, n, n)
        keys = visible_keys(arguments)
        # a window counts places in the row, padding included
        self.keys = keys if keys is not None and (keys.window is None or packing.whole) else None

    @functools.cached_property
    def padded(self) -> Any:
        return self.make(**self.packing.mask_arguments(self.arguments))

    def attend(
        self, attend: Callable, by_bounds: bool, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **more: Any
    ) -> tuple[Tensor, None]:
        """Attention of q, k, v (1, H, N, D) in rows; ``attend`` is the model's own function, which
        knows bounds itself (``by_bounds``) or gets padded rows. Returns (1, N, H, D)."""
        packing = self.packing
        bounds = packing.bounds.to(q.device)
        if by_bounds:
            of_each = {f"cu_seq_lens_{t}": bounds for t in "qk"} | {f"max_length_{t}": packing.longest for t in "qk"}
            return attend(module, q, k, v, None, **more | of_each)
        if self.keys is not None:
            out = attention.by_bounds(q, k, v, self.shape, self.keys.window, bounds, packing.longest, more)
            if out is not None:
                return out, None
        q, k, v = (packing.pad(t.transpose(1, 2)).transpose(1, 2) for t in (q, k, v))
        mask = self.padded
        mask = mask.to(q.device) if isinstance(mask, Tensor) else mask
        return packing.pack(attend(module, q, k, v, mask, **more)[0]), None


def _know_packed_masks(name: str) -> None:
    """Let Transformers' attention ``name`` know ``PackedMask``. It stays so, and changes nothing
    for other masks: the backward runs checkpointed layers again."""
    attend, make = ALL_ATTENTION_FUNCTIONS[name], ALL_MASK_ATTENTION_FUNCTIONS[name]
    if {attend, make} <= _KNOWING:
        return

    @functools.wraps(attend)
    def attended(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any) -> Any:
        if not isinstance(attention_mask, PackedMask):
            return attend(module, query, key, value, attention_mask, **more)
        return attention_mask.attend(attend, "flash" in name, module, query, key, value, **more)

    @functools.wraps(make)
    def masked(**arguments: Any) -> Any:
        given = arguments.get("attention_mask")
        # some models make a view of the mask that they get
        packing = getattr(given, _PACKING, getattr(getattr(given, "_base", None), _PACKING, None))
        if packing is None:
            return make(**arguments)
        packing.used = True
        return packing.mask(make, arguments)

    for interface, function in ((ALL_ATTENTION_FUNCTIONS, attended), (ALL_MASK_ATTENTION_FUNCTIONS, masked)):
        type(interface).register(name, function)
        _KNOWING.add(function)


# -- the forward of a model's body

_LABELS = "labels", "shift_labels"
COUNTS_AT_PADDING = "labels count at padding, or after it: set them to -100"
_NO_MASK = "it does not make masks of attention_mask by Transformers' functions"


def calls_layers(m: nn.Module) -> bool:
    return any(isinstance(child, nn.ModuleList) for child in m.children())


def takes_tokens(forward: Callable) -> bool:
    return {"input_ids", "attention_mask", "position_ids"} <= inspect.signature(forward).parameters.keys()


def unpadded(forward: Callable) -> Callable:
    """Wrap ``forward``, of the module that calls a model's layers, so that padding is left out. A
    ``forward`` that takes no tokens stays."""
    if not takes_tokens(forward):
        return forward
    names = list(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args)) | kwargs
        packing = None if torch.compiler.is_compiling() else _given.get() or _packing_of(self, given)
        out = packed(forward, self, given, packing) if isinstance(packing, Packing) else None
        return forward(self, *args, **kwargs) if out is None else out

    vars(call)[_UNPADS] = True
    return call


# -- for recorded steps, in which the host cannot look at a mask

_UNPADS = "_liger_unpads"  # of a forward that leaves padding out
# the row that a model's body gets; a text if padding stays
_given: contextvars.ContextVar[Row | str | None] = contextvars.ContextVar("row", default=None)


def bodies(model: nn.Module) -> list[nn.Module]:
    """The modules in ``model`` that leave padding out."""
    unpads = lambda m: hasattr(vars(m).get("forward", type(m).forward), _UNPADS)
    return [m for m in model.modules() if unpads(m) and calls_layers(m)]


@contextlib.contextmanager
def given_row(row: Row | None) -> Iterator[None]:
    """Meanwhile the body of a model gets this ``row``; None: padded batches stay as they are."""
    token = _given.set(row or "padding stays")
    try:
        yield
    finally:
        _given.reset(token)


def packing_for(body: Any, given: Mapping[str, Any]) -> Packing | None:
    """Where the real tokens of a batch for the model around ``body``, which nothing observes, are; None
    if padding stays. The host waits once, if the mask is on the GPU."""
    tokens = {name: value for name, value in given.items() if name not in _LABELS}
    labels = next((t for name in _LABELS if (t := given.get(name)) is not None), None)
    packing = _packing_of(body, tokens, labels, observed=False)
    return packing if packing is not None and packing.whole else None


def packed(forward: Callable, model: Any, given: Mapping[str, Any], packing: Packing) -> Any:
    """The output of ``model`` in the padded shape; None if it has made no mask of the packing."""
    _know_packed_masks(model.config._attn_implementation)
    # as checkpointing does: nobody continues a text from a training step
    more: dict[str, Any] = {"use_cache": False} if _config(model, "use_cache") else {}
    if hasattr(forward, documents.GIVES):
        more[BOUNDS] = packing.bounds
    out = forward(model, **packing.arguments(given) | more)
    if not packing.used:
        _reasons[model] = _NO_MASK
        return None
    if isinstance(out, tuple):
        return packing.pad(out[0]), *out[1:]
    out.last_hidden_state = packing.pad(out.last_hidden_state)
    return out


def _packing_of(
    model: Any, given: Mapping[str, Any], labels: Tensor | None = None, observed: bool = True
) -> Packing | None:
    """Where the real tokens of this batch are; None if the model has to run as it was. ``labels``: a
    caller's, if there are none; ``observed``: it may be."""
    if why := reason_of_batch(model, given, observed):
        return _say(model, why)
    if why is None:
        return None
    mask, tokens = given["attention_mask"], documents.tokens_of(given)
    real = mask != 0
    n, longest, parts, counting, counts = look(real, labels_of_caller(mask.shape) if labels is None else labels)
    if n in (0, mask.numel()):
        return None
    if parts > 1 and gives_bounds(model):
        return _say(model, "there is padding between real tokens, at which recurrent layers lose a part of their state")
    if counting:
        return _say(model, COUNTS_AT_PADDING)
    if why := reason_of_model(model):
        return _say(model, why)
    return Packing(real, n, longest, parts < 2, tokens.device, counts)


def reason_of_batch(model: Any, given: Mapping[str, Any], observed: bool = True) -> str | None:
    """Why tokens of this batch cannot become one row; "" if nothing is against it, None if it is no
    batch of training at all."""
    mask = given.get("attention_mask")
    # not in generation, nor where the caller has packed
    if mask is None or any(given.get(n) is not None for n in ("past_key_values", "cache", "cu_seq_lens_q")):
        return None
    if getattr(model, "_is_replica", False):
        return "it is a replica of DataParallel"
    tokens = documents.tokens_of(given)
    if type(mask) is not Tensor or tokens is None or tokens.shape[:2] != mask.shape:
        return "attention_mask is not of its tokens (B, T)"
    if not mask.numel() or not host_can_read(mask):
        return None
    why = _reasons.get(model) or _reason_of_call(model, given)
    if not why and observed and observed_inside(model):  # they may see how many tokens there are, or have a
        why = "hooks see what its layers compute"  # value for each row
    return why


def reason_of_model(model: Any) -> str:
    """Why the layers of ``model`` cannot compute a batch as one row; "" if they can."""
    if model not in _reasons:
        _reasons[model] = _reason_of(model)
    return _reasons[model]


def _say(model: Any, why: str) -> None:
    if torch.is_grad_enabled():  # generation is no case for this at all
        warn_once(f"unpad: {stock_class(model).__name__} computes padding, too: {why}")


def look(real: Tensor, labels: Tensor | None) -> list[int]:
    """The number of real tokens, the most of a row, the most parts that padding divides a row in,
    how many labels may be compared with what a model says at padding, and how many count. The host
    waits once."""
    begins = real & ~F.pad(real, (1, -1))
    counting = counted = real.new_zeros((), dtype=torch.long)
    if labels is not None:
        counts = (labels != IGNORE).to(real.device)
        # causal models compare a label with the token before it, others with its own
        counting = (counts & ~real).sum() + (counts[:, 1:] & ~real[:, :-1]).sum()
        counted = counts.sum()
    lengths = real.sum(1)
    return torch.stack((lengths.sum(), lengths.max(), begins.sum(1).max(), counting, counted)).tolist()


def labels_of_caller(shape: torch.Size) -> Tensor | None:
    """The labels (B, T) of the nearest caller that has any: models with heads of all kinds, those
    of trainers, and users' own have them in a variable, and do not hand them on."""
    for frame, _ in traceback.walk_stack(sys._getframe(2)):
        for name in _LABELS:
            if name in (*frame.f_code.co_varnames, *frame.f_code.co_cellvars):
                value = frame.f_locals.get(name)
                if isinstance(value, Tensor) and value.shape == shape:
                    return value
    return None


# -- what padding can be left out of

# model -> why it runs as it was; "" if it does not
_reasons: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
# whose modules compute token by token, or what Transformers' do
_KNOWN = re.compile(
    r"(transformers|torch|peft|liger_kernel|accelerate|deepspeed|bitsandbytes|torchao|hqq|gptqmodel|auto_gptq|awq)\."
)
_OUTPUTS = ("hidden_states", "attentions", "router_logits")


def _reason_of_call(model: Any, given: Mapping[str, Any]) -> str:
    name = model.config._attn_implementation
    if name not in ("sdpa", attention.NAME) and "flash" not in name:
        return f"its attention is {name}, not sdpa or flash attention"
    asked, trains = given.get("use_cache"), model.training and torch.is_grad_enabled()
    if asked or (asked is None and _config(model, "use_cache") and not trains):
        return "use_cache is True, so that keys and values are kept"
    wanted = {n for n, value in given.items() if n.startswith("output_") and value}
    wanted |= {f"output_{n}" for n in _OUTPUTS if given.get(f"output_{n}") is None and _config(model, f"output_{n}")}
    if wanted:
        return f"{min(wanted)} is True"
    positions = given.get("position_ids")
    B, T = given["attention_mask"].shape
    if positions is not None and positions.shape not in ((B, T), (1, T)):
        return "positions have several axes"
    known = {"attention_mask", "position_ids", *documents.TOKENS}
    for name, value in given.items():
        # a number, such as that of items in the batch, has no rows
        if name not in known and any(isinstance(t, Tensor) and t.ndim for t in tree_leaves(value)):
            return f"it is given {name}"
    return ""


def _config(model: Any, name: str) -> Any:
    return getattr(model.config, name, False)


def unknown_code(model: Any) -> str:
    """Why a tiny model of its configuration might not be like ``model``."""
    of = {stock_class(m).__name__: vars(m).get("forward", type(m).forward) for m in model.modules()}
    if strange := [name for name, f in of.items() if not _KNOWN.match(f.__module__ or "")]:
        return f"{min(strange)}.forward is other code's"
    if any(map(is_compiled, model.modules())):
        return "its layers are compiled"
    return rope_of_rows(model)


def rope_of_rows(model: Any) -> str:
    """Why positions of a row depend on the longest one of its batch, if they do."""
    rope = re.search("dynamic|longrope", str([_config(model, n) for n in ("rope_parameters", "rope_scaling")]))
    return f"rope of the kind {rope[0]} depends on the length of padded rows" if rope else ""


def _reason_of(model: Any) -> str:
    if why := unknown_code(model):
        return why
    cls = stock_class(model)
    masks = frozenset({rules.MASKS})
    if rules.parts_in(core(original(cls, "forward")), masks) != masks:
        return "its forward numbers tokens, or makes masks, in a way of its own"
    for c in {stock_class(m) for m in model.modules()} - {cls}:
        forward = c.__module__.startswith("transformers.models.") and core(original(c, "forward", None))
        if forward and re.search(r"\barange\((?!.*inv_freq)", inspect.getsource(forward)):
            return f"{c.__name__} numbers tokens"
    return _difference(model)


def _difference(model: Any) -> str:
    """Whether hidden states of a tiny model of this configuration change if padding is left
    out."""

    def compare(tiny: Any, forward: Callable) -> str:
        documents.patch_like(tiny, model)
        recurrent = gives_bounds(model)
        forward = bounded(forward) if recurrent else forward
        place, lengths = torch.arange(12), torch.tensor([[12], [4], [7]])
        ids = torch.randint(3, 200, (3, 12))
        # padding on the right, on the left, and within rows
        inside = [] if recurrent else [(place < lengths - 2) | (place > 9)]
        for real in (place < lengths, place >= 12 - lengths, *inside):
            given = dict(input_ids=ids, attention_mask=real.long(), use_cache=False)
            n, longest, parts, *_ = look(real, None)
            padded = forward(tiny, **given)
            got = packed(forward, tiny, given, Packing(real, n, longest, parts < 2, real.device))
            if got is None:
                return _NO_MASK
            if padded.keys() != got.keys():
                return "its output has more than hidden states"
            if not documents._near(*(out.last_hidden_state[real] for out in (padded, got))):
                joined = documents.joining(model)
                return str(joined or "a tiny model of it computes something else without padding")
        return ""

    return seen_in_tiny(model, compare, "without padding", **{f"output_{name}": False for name in _OUTPUTS})


def seen_in_tiny(model: Any, compare: Callable[[Any, Callable], str], how: str, **options: Any) -> str:
    """``compare(tiny, forward)`` of a tiny model of the configuration of ``model``, with those of the
    ``options`` that it has, and its stock forward; or why that does not run."""
    try:
        with undisturbed(), torch.no_grad():
            config, cls = tiny_of(model.config), stock_class(model)
            for name in filter(lambda name: hasattr(config, name), options):
                setattr(config, name, options[name])
            return compare(model_of(config, "sdpa", cls).eval(), original(cls, "forward"))
    except Exception as error:
        return f"a tiny model of it does not run {how} ({type(error).__name__}: {error})"[:300]
