"""The switches of a patch: each is one field of ``PatchOptions``, with its default, values and help.

The flags of ``apply_liger_kernel_to_*`` and their stub, the options of ``liger train`` and ``liger
fit``, and the schema of jobs are made from these fields. This file imports nothing, because
``--help`` reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

# The values of fp8_filter: names of layers, or a function of a layer (an nn.Module) and its name
Filter = Callable[[Any, str], bool] | Collection[str]


def _switch(
    default: Any,
    help: str,
    *,
    check: Callable[[str, Any], Any] = lambda name, value: bool(value),
    ours: bool = True,
    option: str | None = "bool",
    choices: tuple[str, ...] | None = None,
    variants: dict[str, Any] | None = None,
) -> Any:
    """``check``: makes a given value the field's, or raises. ``ours``: LinkedIn's package has no
    such flag, so it may be given by name only. ``option``: its type as an option of ``liger
    train``; None if it is none. ``choices``: the option's values. ``variants``: names of variants
    of ``liger bench step`` and their values; default: the field's own name for a switch that is
    off."""
    values = dict(help=help, check=check, ours=ours, option=option, choices=choices, variants=variants)
    return dataclasses.field(default=default, metadata=values)


def _true_or_false(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name}: must be True or False, got {value!r}")
    return bool(value)


def _request(variant: str, help: str) -> Any:
    """A switch that is off, and that is True or False, which turns on a variant of the bench."""
    return _switch(False, help, check=_true_or_false, variants={variant: True})


LEVELS = ("off", "cheap", "mlp")  # "mlp": besides, the projections before a gated activation are multiplied again


def level_of(value: bool | str | None) -> str:
    """Return the level of a flag: True is "cheap", False and None are "off". Raises
    ``ValueError`` for an unknown level."""
    level = "cheap" if value is True else "off" if value is False or value is None else value
    if level not in LEVELS:
        raise ValueError(f"rematerialise: must be True, False or one of {LEVELS}, got {value!r}")
    return level


def _tiles(name: str, value: Any) -> bool | int:
    if value is None or value is False or value is True:
        return bool(value)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: must be True, False or a number of tiles from 1 on, got {value!r}")
    return value


def _memory_of_head(name: str, value: Any) -> str | int:
    """Of "1.5GB": 1500000000."""
    if value in (None, False, "auto", "low"):
        return value or "auto"
    text = "" if isinstance(value, bool) else str(value).replace(" ", "").upper().removesuffix("B")
    power = "KMGT".find(text[-1:]) + 1 if text else 0
    try:
        found = int(float(text[:-1] if power else text) * 1000**power)
    except (ValueError, OverflowError):
        found = 0
    if found <= 0:
        raise ValueError(f"{name}: must be 'auto', 'low' or a number of bytes, as 2000000000 or '2GB', got {value!r}")
    return found


def _when(name: str, value: Any) -> bool | str:
    if value != "auto" and value not in (None, True, False):
        raise ValueError(f"{name}: must be True, False or 'auto', got {value!r}")
    return value if value == "auto" else bool(value)


def _as_it_is(name: str, value: Any) -> Any:
    return value  # the three flags of FP8 are checked together, by ``transformers/fp8.py``


@dataclass
class PatchOptions:
    """What a patch replaces, and how the model then trains. None is False.

    The defaults are what most families have; ``transformers/patching/apply.py`` has the others.
    """

    rope: bool = _switch(True, "rotary embedding", ours=False)
    rms_norm: bool = _switch(True, "RMSNorm", ours=False)
    layer_norm: bool = _switch(True, "LayerNorm", ours=False, option=None)
    # off by default for some mixtures of experts
    swiglu: bool = _switch(True, "gated MLP with SiLU", ours=False, variants={"experts": True})
    geglu: bool = _switch(True, "gated MLP with GELU", ours=False)
    relu_squared: bool = _switch(True, "MLP with a squared ReLU", ours=False, option=None)
    attention: bool = _switch(True, "attention with sinks", ours=False, option=None)
    cross_entropy: bool = _switch(False, "cross entropy over the logits, not fused with the head", ours=False)
    fused_linear_cross_entropy: bool = _switch(
        True, "output head and cross entropy in one: the logits are never stored", ours=False
    )
    head_memory: str | int = _switch(
        "auto",
        "logits of the fused head at a time: auto; low: the fewest; or their bytes, such as 2GB: more are faster",
        check=_memory_of_head,
        option="str",
        variants={"low": "low", "2gb": "2GB"},
    )
    rematerialise: bool | str = _switch(
        True,
        "what the backward computes again: cheap: norms and gated activations (default); mlp: gate and up, too; off: "
        "nothing",
        check=lambda name, value: level_of(value),
        option="str",
        choices=LEVELS,
        variants={"off": "off", "mlp": "mlp"},
    )
    fused_logprobs: bool = _switch(
        True, "trainers of TRL compute log-probabilities with our head, which stores no logits", option=None
    )
    recurrent: bool = _switch(
        True, "short convolutions, delta rules and scans of recurrent layers, each packed document by itself"
    )
    projections: bool = _switch(True, "linear layers with PEFT's adapters run as one node", option=None)
    fp8: bool | str = _switch(
        False,
        "linear layers multiply in FP8, forward and backward, with one scale for each tensor, row or 32 values",
        check=_as_it_is,
        option="str",
        choices=("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8_rceil"),
    )
    fp8_filter: Filter | None = _switch(  # noqa: RUF009  # a field
        None,
        "layers that stay as they are, beside heads, routers and small layers, such as o_proj,mlp",
        check=_as_it_is,
        option="str",
    )
    fp8_head: bool = _switch(
        False, "the output head and its loss multiply in FP8, too", check=_as_it_is, variants={"head": True}
    )
    activation_offloading: bool = _request(
        "offload", "keep inputs of checkpointed layers, else large activations, in the CPU's memory until the backward"
    )
    keep_attention: bool = _request(
        "attention", "checkpointed layers keep the outputs of attention instead of computing them twice"
    )
    tiled_mlp: bool | int = _switch(
        False,
        "run MLPs in so many tiles of the tokens; 0: as many as have 2048 tokens each, at most 16",
        check=_tiles,
        option="int",
        variants={"tiled": True},
    )
    unpad: bool = _request(
        "unpad", "the layers leave padding out: they compute the real tokens of padded batches alone"
    )
    batch_invariant: bool = _request(
        "invariant",
        "a token's hidden states, log-probabilities and gradients have the same bits in any batch, padded or packed",
    )
    graphs: bool | str = _switch(
        False,
        "steps that wait for the host are replayed from CUDA graphs, for sizes that come twice; auto, and"
        " liger train: where a measured step waits",
        check=_when,
        variants={"graphs": True},
    )

    def __post_init__(self) -> None:
        if self.cross_entropy and self.fused_linear_cross_entropy:
            raise AssertionError("cross_entropy and fused_linear_cross_entropy cannot both be True")
        for name, field in SWITCHES.items():
            setattr(self, name, field.metadata["check"](name, getattr(self, name)))

    @property
    def head(self) -> str | None:
        """What becomes of output head and loss: "fused", "logits" (a fused loss on real logits)
        or None."""
        return "fused" if self.fused_linear_cross_entropy else "logits" if self.cross_entropy else None

    @property
    def slots(self) -> dict[str, bool]:
        """Slot of recognition -> whether what is found for it is replaced."""
        same = ("rope", "rms_norm", "layer_norm", "relu_squared", "attention", "recurrent")
        return {name: getattr(self, name) for name in same} | {"glu": self.swiglu or self.geglu}

    @property
    def parts(self) -> dict[str, Any]:
        """The slots, and the switches that change what replaces them: what the functions that
        select patches take."""
        # The head and FP8 are requests of their own; both kinds of gated MLP are one slot
        apart = {*HEADS, "fp8", "fp8_filter", "fp8_head", "swiglu", "geglu"}
        return {name: getattr(self, name) for name in SWITCHES if name not in apart} | self.slots


SWITCHES = {field.name: field for field in dataclasses.fields(PatchOptions)}
HEADS = ("cross_entropy", "fused_linear_cross_entropy")  # of which a model can have one
