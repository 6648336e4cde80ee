"""Models of Transformers whose training steps are recorded as CUDA graphs: may their rows be padded?"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_kernel.graphs.batches import IGNORE, PackedRow
from liger_kernel.graphs.micro_steps import Packs, Unfit, recorded
from liger_kernel.transformers import attention, documents
from liger_kernel.transformers.patching.patches import original, stock_class
from liger_kernel.transformers.patching.unpad import Row, bodies, given_row, packing_for, seen_in_tiny, unknown_code


def graphed(forward: Callable, when: bool | str) -> Callable:
    """Wrap the ``forward`` of a model with its loss. ``when``: "auto" for steps in which the GPU waits for
    the host."""
    return recorded(forward, changed_by_padding, _recording, _packer, when == "auto")


def _packer(model: Any) -> Packs | None:
    """What makes rows of padded batches, if the layers of ``model`` leave padding out."""
    found = bodies(model)
    return functools.partial(_packed_row, found[0]) if len(found) == 1 else None


_OF_TOKENS = {"input_ids", "attention_mask", "position_ids", "labels", "shift_labels"}


def _packed_row(body: Any, given: Mapping[str, Any]) -> PackedRow | None:
    """The real tokens of a padded batch in one row, as ``unpad`` makes it inside of the model; None if
    there is no padding, or it stays."""
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    others = (value for name, value in given.items() if name not in _OF_TOKENS)
    if type(ids) is not Tensor or type(mask) is not Tensor or any(isinstance(t, Tensor) and t.ndim for t in others):
        return None
    if (packing := packing_for(body, given)) is None:
        return None
    row = packing.arguments(dict(input_ids=ids, position_ids=given.get("position_ids")))
    del row["attention_mask"]
    for name in ("labels", "shift_labels"):
        if (labels := given.get(name)) is None:
            continue
        labels = labels.to(packing.real.device, non_blocking=True)
        if name == "labels":  # nobody says the first token of a text, least of all the text before it
            labels = labels.masked_fill(packing.real & ~F.pad(packing.real, (1, -1)), IGNORE)
        row[name] = packing.pack(labels)
    row |= dict(cu_seq_lens_q=packing.bounds, max_length_q=ids.shape[1])
    T = ids.shape[1]

    def restore(o: Tensor) -> Tensor:  # without the last token of all, if the model leaves it out
        return packing.pad(o)[:, : T - len(packing.index) + o.shape[1]]

    return PackedRow({**given, **row, "attention_mask": None}, packing.counts, _on_row, restore)


def _on_row(call: Callable, *, cu_seq_lens_q: Tensor, max_length_q: int, **inputs: Any) -> Any:
    row = Row(inputs["input_ids"], cu_seq_lens_q, max_length_q)
    with given_row(row):
        out = call(**inputs)
    if not row.used:
        raise Unfit("its attention does not know where rows end")
    return out


@contextlib.contextmanager
def _recording(model: Any, given: Mapping[str, Any]) -> Iterator[str]:
    """Around what is recorded: checkpointing does not restore random states, TRL's forward scores
    all tokens, as the host does not know how many count, and no mask is made that does nothing:
    releases of Transformers make one wherever they may not look at positions."""
    before: list[tuple[Any, str, Any]] = []
    for m in model.modules():
        function = vars(m).get(_CHECKPOINT)
        if isinstance(function, functools.partial) and function.func is checkpoint and m.gradient_checkpointing:
            before.append((m, _CHECKPOINT, function))
            setattr(m, _CHECKPOINT, functools.partial(function, preserve_rng_state=False))
    why = "checkpointing computes its dropout again" if before else ""
    trl = sys.modules.get("trl.trainer.utils")
    if hasattr(trl, "_use_triton"):
        before.append((trl, "_use_triton", trl._use_triton))
        trl._use_triton = lambda device: False
    if attention.goes_without_mask(original(stock_class(model), "forward"), model.config, given):
        before.append((model.config, "_attn_implementation", model.config._attn_implementation))
        model.config._attn_implementation = attention.CAUSAL
    try:
        with given_row(None):
            yield why
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


_CHECKPOINT = "_gradient_checkpointing_func"


def changed_by_padding(model: Any, packed: bool) -> str:
    """Why tokens on the right that no label counts might change the loss of ``model``, whether a mask
    hides them or not, and whether positions are given; "" if they do not change that of a tiny model
    of its configuration. In ``packed`` rows they are a document."""
    if packed and (joined := documents.joining(model)):
        return str(joined)
    if why := unknown_code(model):
        return why

    def compare(tiny: Any, forward: Callable) -> str:
        ids = torch.randint(3, 200, (2, 12))
        longer, labels = F.pad(ids, (0, 5)), F.pad(ids, (0, 5), value=IGNORE)
        mask = (labels != IGNORE).long()
        want = forward(tiny, input_ids=ids, labels=ids, use_cache=False).loss
        positions = torch.arange(17).expand(2, 17)
        counted = [{"position_ids": positions}] if "position_ids" in inspect.signature(forward).parameters else []
        for more in ({}, {"attention_mask": mask}, *counted):
            loss = forward(tiny, input_ids=longer, labels=labels, use_cache=False, **more).loss
            if not documents._near(loss, want):
                return "a tiny model of it computes another loss with padding on the right"
        return ""

    of_routers = bool(getattr(model.config, "output_router_logits", False))
    return seen_in_tiny(model, compare, "with padding", output_router_logits=of_routers)
