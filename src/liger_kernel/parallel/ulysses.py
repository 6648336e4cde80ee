"""Sequence parallelism by all-to-all (DeepSpeed-Ulysses, arXiv:2309.14509) for models that use
Transformers' attention interface.

The ranks of a group read the same rows. Each of them computes its contiguous part of the tokens of
every row, except in attention: there it holds all tokens of its part of the heads. With ``P``
ranks, one all-to-all turns (B, H, T / P, D) of query, key and value into (B, H / P, T, D), the
model's own attention function runs, and another one turns its output back.

``share_rows`` changes a model in place. Its calls take whole batches and cut them: labels are
shifted before the cut, so that no target is lost between two parts. Attention gets the mask and the
positions of whole rows, in the form that its function takes; sdpa gets no mask for rows without
padding, documents or windows. ``loss`` of the output is that of whole rows, the same number on
every rank of the group; ``logits`` are those of the rank's own tokens.

Each rank's gradient is ``P`` times the term of its own tokens. So the mean over all ranks, as
DistributedDataParallel and FSDP compute it, is the gradient of one process.

What the model does with tokens is seen in calls with four tokens, before it is changed:
``ValueError`` says why it cannot be split.

``B`` rows, ``T`` tokens of a whole row, ``H`` heads, ``D`` width of a head, ``P`` ranks of the
group.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PREFIX = "ulysses_"  # before the name of the model's own attention: transformers looks for "flash" in names
PROBE = "ulysses_probe"
IGNORE = -100
# of a call's arguments: what is cut along dim 1, and tensors of the whole batch that attention
# reads
_CUT = ("input_ids", "inputs_embeds", "labels", "shift_labels")
_WHOLE = (
    "attention_mask",
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "num_items_in_batch",
)
_REFUSED = (
    *("past_key_values", "cache", "use_cache", "output_attentions", "logits_to_keep"),
    *("return_token_accuracy", "return_predicted_tokens", "ce_weight"),
)
_OF_ATTENTION = (*_WHOLE, "shift_labels", "s_aux")  # tensors that attention functions may be given


@dataclass(frozen=True, eq=False)
class Whole:
    """What the layers get as their attention mask: the mask of whole rows of T tokens, and their
    positions if the caller gave any.

    It reaches attention through the arguments of the layers, hence also when a checkpointed layer
    is computed again.
    """

    mask: Any
    positions: Tensor | None
    T: int


@dataclass(frozen=True)
class _Rows:
    """The batch of the running call, before it is padded: length, positions and padding;
    ``documents``: whether the mask follows from the positions, too."""

    T: int
    positions: Tensor | None
    mask: Tensor | None
    documents: bool


class _Batch(threading.local):
    rows: _Rows | None = None


_batch = _Batch()


@dataclass(frozen=True)
class _Layer:
    """How an attention module of a shared model computes."""

    group: Any
    function: Callable
    wrapped: str


# not in the modules: a group cannot be copied
_layers: weakref.WeakKeyDictionary[nn.Module, _Layer] = weakref.WeakKeyDictionary()


class _WithOthers:
    """An object with other values of some attributes."""

    sinks: Tensor

    def __init__(self, of: Any, **instead: Any):
        self.__dict__.update(instead, _of=of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


class _AllToAll(torch.autograd.Function):
    """Exchange the entries of dim 0, one for each rank. It is its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.group), None


@torch._disable_dynamo  # PyTorch 2.11 compiles it to a backward whose gradients are zero
def _all_to_all(x: Tensor, group: Any) -> Tensor:
    return _AllToAll.apply(x, group)


class _GroupSum(torch.autograd.Function):
    """The sum of all ranks' numbers, on each of them. Every rank's backward starts at its own
    copy, so that a gradient counts once for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.size = dist.get_world_size(group)
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0] * ctx.size, None


def to_heads(x: Tensor, group: Any) -> Tensor:
    """x (B, H, T / P, D) of the own tokens -> (B, H / P, T, D) of the own heads."""
    P = dist.get_world_size(group)
    # (P, B, T / P, H / P, D): the rows are in order where B is 1, without a copy
    parts = x.unflatten(1, (P, -1)).permute(1, 0, 3, 2, 4)
    return _all_to_all(parts, group).transpose(0, 1).flatten(1, 2).transpose(1, 2)


def to_tokens(x: Tensor, group: Any) -> Tensor:
    """x (B, T, H / P, D) of the own heads -> (B, T / P, H, D) of the own tokens."""
    P = dist.get_world_size(group)
    parts = x.unflatten(1, (P, -1)).transpose(0, 1)  # (P, B, T / P, H / P, D)
    return _all_to_all(parts, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def repeats(heads: int, kv_heads: int, ranks: int) -> int | None:
    """How often each key and value head is repeated so that ranks get equal numbers of them,
    beside their query heads; None if nothing makes it possible."""
    if heads % ranks or heads % kv_heads:
        return None
    # the fewest copies, which cost bandwidth: all of a group's copies make every split possible
    groups = heads // kv_heads
    return next(n for n in range(1, groups + 1) if groups % n == 0 and kv_heads * n % ranks == 0)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of query (B, H, T / P, D), key and value of the own tokens; returns (B, T / P,
    H, D). The model's own function sees whole rows."""
    layer = _layers.get(module)
    if layer is None:
        raise RuntimeError(
            "ulysses: this model is a copy of one under mode ulysses: put the copy under parallelize, too"
        )
    _check_given(attention_mask, kwargs)
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"ulysses: key must have the {query.shape[2]} tokens of query, got {key.shape[2]}: there is no cache"
        )
    group, P = layer.group, dist.get_world_size(layer.group)
    if (n := repeats(query.shape[1], key.shape[1], P)) is None:
        raise ValueError(f"ulysses: query must have a multiple of {P} heads, got {query.shape[1]}")
    key, value = (t if n == 1 else t.repeat_interleave(n, 1) for t in (key, value))
    # without the tokens that make rows divisible: a token that may see nothing looks at all keys
    query, key, value = (to_heads(t, group)[:, :, : attention_mask.T] for t in (query, key, value))
    # Flash Attention finds documents by the positions of whole rows
    if "position_ids" in kwargs:
        kwargs["position_ids"] = attention_mask.positions
    # the function asks the module for its attention's name and its groups, which are others here
    own = _WithOthers(
        module,
        config=_WithOthers(module.config, _attn_implementation=layer.wrapped),
        num_key_value_groups=query.shape[1] // key.shape[1],
    )
    if kwargs.get("s_aux") is not None:  # sinks: one for each head
        kwargs["s_aux"] = kwargs["s_aux"].chunk(P)[dist.get_rank(group)]
    if (sinks := getattr(module, "sinks", None)) is not None:
        own.sinks = sinks.chunk(P)[dist.get_rank(group)]
    out = layer.function(own, query, key, value, attention_mask.mask, **kwargs)[0]
    # zeros for the tokens that were left out above
    more = -attention_mask.T % P
    return to_tokens(F.pad(out, (0, 0, 0, 0, 0, more)) if more else out, group), None


def _check_given(attention_mask: Any, kwargs: dict[str, Any]) -> None:
    if not isinstance(attention_mask, Whole):
        raise ValueError(
            "ulysses: attention must get the mask that Transformers makes for its layers, got a "
            f"{type(attention_mask).__name__} made of own tokens"
        )
    for name, given in kwargs.items():
        if isinstance(given, Tensor) and name not in _OF_ATTENTION:
            raise ValueError(f"ulysses: attention must get no tensors but {', '.join(_OF_ATTENTION)}, got {name}")


def _tensors(function: Callable) -> Iterator[Tensor]:
    """Tensors of tokens that a mask function reads."""
    # of rows: how much is padded on the left, found in the whole mask
    if function.__qualname__.startswith("chunked_overlay."):
        return
    # mask functions are closures of closures, and hold tensors of the batch nowhere else
    for cell in getattr(function, "__closure__", None) or ():
        for part in cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,):
            if isinstance(part, Tensor):
                yield part
            elif inspect.isfunction(part):
                yield from _tensors(part)


def mask(*, config: Any, mask_function: Callable, **arguments: Any) -> Whole:
    """The mask of whole rows that the model's own attention takes: ``mask_function`` speaks of
    causality and windows, the batch of documents and padding."""
    rows = _batch.rows
    if rows is None:
        raise RuntimeError("ulysses: masks are made in calls of the model that parallelize was given, not of its parts")
    if any(True for _ in _tensors(mask_function)):
        raise ValueError(
            "ulysses: masks must be made of causality, windows, documents and padding, got one of other tensors of "
            "tokens"
        )
    # Transformers has seen only this rank's positions
    if rows.documents and rows.mask is None and rows.positions is not None:
        positions = rows.positions.expand(arguments["batch_size"], -1)
        if (documents := masking_utils.find_packed_sequence_indices(positions)) is not None:
            mask_function = _in_documents(mask_function, positions, documents)
            arguments["allow_is_causal_skip"] = False
    wrapped = config._attn_implementation.removeprefix(PREFIX)
    arguments |= {"q_length": rows.T, "kv_length": rows.T, "q_offset": 0, "kv_offset": 0, "attention_mask": rows.mask}
    maker = AttentionMaskInterface().get(wrapped)  # None: an attention of the user's that takes no masks
    arguments |= {"config": _WithOthers(config, _attn_implementation=wrapped), "mask_function": mask_function}
    return Whole(None if maker is None else maker(**arguments), rows.positions, rows.T)


def _in_documents(mask_function: Callable, positions: Tensor, documents: Tensor) -> Callable:
    if combined := getattr(masking_utils, "packed_sequence_compatibility_function", None):
        return combined(mask_function, positions, documents)
    # Transformers 5.17 and older
    return masking_utils.and_masks(mask_function, masking_utils.packed_sequence_mask_function(documents))


@dataclass(frozen=True)
class _Cut:
    """The hooks of a model: its arguments are cut, and the losses of the parts added.
    ``documents``: it gives positions to those who make masks."""

    group: Any
    documents: bool

    def before(self, model: nn.Module, args: tuple, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if args:
            raise ValueError("ulysses: a model must be called with keyword arguments, got positional ones")
        rows, given = self.cut(given)
        _batch.rows = rows
        return args, given

    def after(self, model: nn.Module, args: tuple, given: dict[str, Any], out: Any) -> Any:
        _batch.rows = None
        # a loss of the ranks' own tokens was divided by the number of all tokens: the sum is the loss of whole rows
        if out is None or given.get("labels") is None:  # None: the call has failed
            return out
        if isinstance(out, tuple):
            return (_GroupSum.apply(out[0], self.group), *out[1:])
        out.loss = _GroupSum.apply(out.loss, self.group)
        return out

    def cut(self, given: dict[str, Any]) -> tuple[_Rows, dict[str, Any]]:
        """The whole batch and the arguments of this rank's part of it. Rows are padded on the
        right to a multiple of the ranks."""
        _check_call(given)
        P, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        given = {"use_cache": False} | {name: value for name, value in given.items() if value is not None}
        tokens = next((given[name] for name in ("input_ids", "inputs_embeds") if name in given), None)
        if tokens is None:
            raise ValueError("ulysses: a model must be called with input_ids or inputs_embeds, got neither")
        B, T = tokens.shape[:2]
        more = -T % P
        if more and "cu_seq_lens_q" in given:
            raise ValueError(
                f"ulysses: rows with cu_seq_lens_q must have a multiple of {P} tokens, got {T}: pad them, as a "
                "document of its own"
            )
        part = slice(rank * ((T + more) // P), (rank + 1) * ((T + more) // P))
        if (labels := given.get("shift_labels", given.get("labels"))) is not None:
            ignored = given.get("ignore_index", IGNORE)
            # shifted before the cut: the last token of a part predicts the first one of the next part
            if "shift_labels" not in given:
                labels = F.pad(labels, (0, 1), value=ignored)[:, 1:]
            given.setdefault("num_items_in_batch", (labels != ignored).sum())
            given["labels"] = given["shift_labels"] = F.pad(labels, (0, more), value=ignored)
        padding, positions = given.get("attention_mask"), given.get("position_ids")
        for name in given.keys() & {*_CUT}:
            value = given[name]
            if more and name in ("input_ids", "inputs_embeds"):
                value = F.pad(value, (*(0, 0) * (value.ndim - 2), 0, more))
            given[name] = value[:, part].contiguous()
        own = torch.arange(T, device=tokens.device)[None] if positions is None else positions
        # not counted on, as tables of positions may end with the row
        own = torch.cat((own, own[:, -1:].expand(-1, more)), 1)
        given["position_ids"] = own[:, part].contiguous()
        # of the whole row, so that Transformers looks for documents neither here, nor for the
        # mask's length in the part
        if padding is None:
            given["attention_mask"] = torch.ones(B, T, dtype=torch.bool, device=tokens.device)
        mask = None if padding is None else padding.to(tokens.device, torch.bool)
        return _Rows(T, positions, mask, self.documents), given


def _check_call(given: dict[str, Any]) -> None:
    for name in _REFUSED:
        if (value := given.get(name)) is not None and (isinstance(value, Tensor) or value):
            raise ValueError(
                f"ulysses: {name} must be left out, because each rank computes its part of the rows, got {value!r:.60}"
            )
    for name, value in given.items():
        if isinstance(value, Tensor) and value.ndim and name not in (*_CUT, *_WHOLE):
            raise ValueError(f"ulysses: a batch must have no tensors but {', '.join((*_CUT, *_WHOLE))}, got {name}")
    for name in ("attention_mask", "position_ids"):
        value = given.get(name)
        if value is not None and not (isinstance(value, Tensor) and value.ndim == 2):
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"ulysses: {name} must be a tensor (B, T), got {got}")


def share_rows(model: nn.Module, group: Any) -> None:
    """Make the calls of ``model`` those of a rank of ``group``, in place. ``ValueError`` says
    why a model, or its number of heads, cannot be split."""
    of_transformers: Any = model
    config = getattr(of_transformers, "config", None)
    name, wrapped = type(model).__name__, getattr(config, "_attn_implementation", None)
    if config is None or wrapped is None:
        raise _unfit(name, "is no model of Transformers")
    if wrapped.startswith(PREFIX):
        raise _unfit(name, "is under mode ulysses already")
    if (why := _why_not(of_transformers)) is not None:
        raise _unfit(name, why)
    P = dist.get_world_size(group)
    # all checks come before the first change, so that a model that is refused stays as it was
    found, documents = _attention_of(of_transformers)
    for module, (heads, kv_heads) in found.items():
        if repeats(heads, kv_heads, P) is None:
            raise ValueError(
                f"parallelize: the number of heads must be a multiple of the {P} ranks that share rows, got {heads}"
            )
        source = sys.modules[type(module).__module__]
        own = getattr(source, "eager_attention_forward", None)
        function = getattr(source, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS).get(wrapped, own)
        if function is None:
            raise _unfit(name, f"has an attention {wrapped} that is not a function of its file")
        _layers[module] = _Layer(group, function, wrapped)
    AttentionInterface.register(PREFIX + wrapped, attention)
    AttentionMaskInterface.register(PREFIX + wrapped, mask)
    config._attn_implementation = PREFIX + wrapped
    cut = _Cut(group, documents)
    model.register_forward_pre_hook(cut.before, with_kwargs=True)
    model.register_forward_hook(cut.after, with_kwargs=True, always_call=True)


def _unfit(name: str, why: str) -> ValueError:
    return ValueError(f"parallelize: mode ulysses cannot split the rows of {name}, which {why}")


def _why_not(model: Any) -> str | None:
    """What of a model's configuration and modules does not allow for splitting its rows."""
    config = model.config
    if config.get_text_config() is not config or getattr(config, "is_encoder_decoder", False):
        return "is not a model of text alone"
    for module in model.modules():
        if any(p.is_meta for p in module.parameters(recurse=False)):
            return "has no weights yet: load them first"
    # older versions of Transformers have the kind in the modules only
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = str([rotary, *(getattr(module, "rope_type", None) for module in model.modules())])
    if kind := re.search(r"\b(dynamic|longrope)\b", kinds):
        why = "whose frequencies depend on the longest position, which only one rank has"
        return f"has rotary embeddings {kind[0]}, {why}"
    return None


def _attention_of(model: Any) -> tuple[dict[nn.Module, tuple[int, int]], bool]:
    """The attention modules of a model with their numbers of query and key heads, and whether its
    masks separate documents, which begin at position 0. Raises ``ValueError`` if tokens meet
    elsewhere, or if its loss has no share of a rank.

    The model runs on four tokens, with a function in the place of attention that lets no token see
    another. NaN at the first token must not reach the others, labels must be those that are given
    as shifted, masks must be causal, and positions must be 0, 1, 2, 3 if they are not given.
    """
    name, found, told = type(model).__name__, dict[nn.Module, tuple[int, int]](), {"documents": False, "future": False}

    def alone(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        _check_given(attention_mask, kwargs)
        found[module] = query.shape[1], key.shape[1]
        value = value + query.mean((1, 3), keepdim=True) + key.mean((1, 3), keepdim=True)
        return value.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(1, 2).contiguous(), None

    def no_mask(*, mask_function: Callable, **_: Any) -> Whole:
        told["documents"] |= any(True for _ in _tensors(mask_function))
        told["future"] |= bool(mask_function(*ids.new_tensor([0, 0, 0, 1])))  # of row, head, query and key
        return Whole(None, None, ids.shape[1])

    # one token of NaN: whatever else becomes NaN has met it outside of attention
    AttentionInterface.register(PROBE, alone)
    AttentionMaskInterface.register(PROBE, no_mask)
    places = torch.arange(4, device=model.device)[None]
    ids = places + (places >= padding if isinstance(padding := getattr(model.config, "pad_token_id", None), int) else 0)
    call, meeting = functools.partial(model, input_ids=ids, use_cache=False), list[str]()
    try:
        with _alone(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            with contextlib.ExitStack() as hooks:
                first = lambda *of: of[2].index_fill(1, places[0, :1], torch.nan)
                hooks.callback(model.get_input_embeddings().register_forward_hook(first).remove)
                meeting = hooks.enter_context(_meetings(model))
                apart = call(position_ids=places).logits[:, 1:].isfinite().all()
            placed = [
                [call(**mask, **more).logits[:, 1:] for more in ({}, {"position_ids": places})]
                for mask in ({}, {"attention_mask": places > 0})
            ]
            told["documents"] = False  # of what is padded
            call(position_ids=places % 2)
            shifted = torch.full_like(ids, IGNORE)
            loss_of = functools.partial(call, labels=ids, shift_labels=shifted, position_ids=places)
            losses = [loss_of(num_items_in_batch=1).loss]
            shifted[:, 2] = 1
            losses += [loss_of(num_items_in_batch=n).loss for n in (1, 2)]
    except Exception as error:
        if not meeting:
            raise _unfit(
                name, f"does not run with another attention: {type(error).__name__}: {str(error)[:300]}"
            ) from error
    if meeting or not apart or not found:
        of = f": {meeting[0]}" if meeting else ""
        raise _unfit(name, f"has layers in which tokens meet without Transformers' attention interface{of}")
    for source in {sys.modules[type(module).__module__] for module in found}:
        if re.search(r"_attn_implementation (==|!=|in|not in) ", inspect.getsource(source)):
            raise _unfit(name, "asks which attention it has, and computes something else for other names")
    if told["future"]:
        raise _unfit(name, "is not causal")
    if not all(torch.equal(*pair) for pair in placed):
        raise _unfit(name, "counts positions by its attention mask or its tokens")
    if losses[0] != 0 or not losses[1] or not torch.allclose(losses[1], 2 * losses[2]):
        why = "has a loss that is not the sum over labels that are shifted already (shift_labels), divided by"
        more = ": set output_router_logits to False" * bool(getattr(model.config, "output_router_logits", False))
        raise _unfit(name, f"{why} num_items_in_batch{more}")
    return found, told["documents"]


@contextlib.contextmanager
def _alone(model: Any) -> Iterator[None]:
    """The model in evaluation, with ``PROBE`` as its attention."""
    wrapped, modes = model.config._attn_implementation, {module: module.training for module in model.modules()}
    model.config._attn_implementation = PROBE
    model.eval()
    try:
        yield
    finally:
        model.config._attn_implementation = wrapped
        for module, training in modes.items():
            module.training = training


@contextlib.contextmanager
def _meetings(model: nn.Module) -> Iterator[list[str]]:
    """The modules, innermost first, that make NaN of tokens after the first one."""
    found: list[str] = []
    of_tokens = lambda t: isinstance(t, Tensor) and t.is_floating_point() and t.ndim == 3
    finite = lambda values: all(t[:, 1:].isfinite().all() for t in tree_leaves(values) if of_tokens(t))

    def look(name: str, m: nn.Module, args: Any, given: Any, out: Any) -> None:
        if finite((args, given)) and not finite(out):
            found.append(f"{name} ({type(m).__name__})")

    with contextlib.ExitStack() as hooks:
        for name, m in model.named_modules():
            hooks.callback(m.register_forward_hook(functools.partial(look, name), with_kwargs=True).remove)
        yield found
