"""The text of ``docs/models.md``, from the table of families: ``liger models --write`` calls
``document``. ``liger models TYPE`` has the classes and the variants of their kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import transformers
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

from liger_kernel.transformers.recognise.families import FAMILIES, IMAGE_TEXT_TO_TEXT, UNVERIFIED, VERSION, Family
from liger_kernel.transformers.recognise.slots import PLAIN_MLP
from liger_kernel.transformers.table import summary

# the first word of a variant's label -> its column
COLUMN = {"rms_norm": "norms", "layer_norm": "norms", "gated_rms_norm": "norms", "glu": "MLP", "relu_squared": "MLP"}
COLUMN |= {"moe": "experts", "rope": "rotary", "attention": "attention", "load_balancing": ""}
COLUMN |= dict.fromkeys(("causal_conv1d", "gated_delta_rule", "kda", "log_decay", "ssd", "by_parts"), "recurrent")
COLUMNS = ["head", "norms", "MLP", "experts", "rotary", "attention", "recurrent", "images"]
# group -> its first paragraph
GROUPS = {
    "Text": "",
    "Text and images": "",
    "Audio": "Speech and sound, some with images.",
    "Encoders, and encoders with a decoder": "",
    "Hybrids and recurrent models": "“Recurrent” are short convolutions, delta rules and Mamba-2's scan; "
    "what else carries a state runs Transformers' code. [Hybrids](guides/hybrids.md) says more.",
}
STATE = re.compile(r"_is_stateful = True|ShortConv|LightningAttention")
# why something stays stock, in the table -> the end of a sentence about one thing, and about several
REASONS = {
    PLAIN_MLP: ("has", "have", "one activation, for which PyTorch has a kernel"),
    "its tables are not understood": ("holds", "hold", "its angles in a form of its own"),
    "": ("computes", "compute", "something that no kernel does"),
}
PARTS = {"Experts": "experts", "load_balancing": "balancing loss", "apply_": "rotary embedding", "Norm": "norm"}
PARTS |= {"_delta_": "delta rule", "_scan": "scan"}
COLUMN_OF = {
    "norm": "norms",
    "MLP": "MLP",
    "rotary embedding": "rotary",
}  # a part of which a model may have several kinds
TOWERS = {"[Vv]ision|Vi[Tt]|Sam|VQ|Siglip|CLIP": "vision ", "Audio": "audio "}
INTRODUCTION = """\
<div class="filters"><label>Search <input type="search" placeholder="qwen3"></label><output></output></div>

liger-kernel replaces a part only if its kernel reproduces the part: bit-identical in bf16 on a CPU, or, for parts in
which Transformers rounds after every step and the kernel rounds once (experts, complex rotary embeddings, SwiGLU with a
slope, some LayerNorms), equal up to that rounding. For every family below, one training step of a tiny model, with
images where “images” is marked, gives the loss and the gradients of stock Transformers. Linear layers with PEFT's
adapters run in every family: see [LoRA and QLoRA](guides/lora.md).

The other marks say what runs on a kernel, in the language model or in one of its towers. “Head” is the output head with
its loss, which stores no logits. `liger models TYPE` names the classes and the reasons. A model that is not in the
tables is recognised when you patch it.
"""


def group_of(model_type: str) -> str:
    """Read from what Transformers says of the type and in its files, none of which is imported."""
    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(model_type)
    modeling, configuration = (
        "".join(file.read_text("utf-8") for file in sorted(folder.glob(f"{kind}_*.py")))
        for kind in ("modeling", "configuration")
    )
    audio = re.search(r"\baudio_\w+", configuration) and not model_type.endswith("text")
    if STATE.search(modeling):
        return "Hybrids and recurrent models"
    if audio or model_type in auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
        return "Audio"
    if model_type in IMAGE_TEXT_TO_TEXT:
        return "Text and images"
    encoders = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    return "Encoders, and encoders with a decoder" if any(model_type in names for names in encoders) else "Text"


def with_parts(row: Family) -> Iterator[Family]:
    yield row
    yield from (FAMILIES[part] for part in row.parts if part in FAMILIES)


def marks(row: Family) -> set[str]:
    """The columns in which a family has a mark."""
    found = {COLUMN[label.split("(")[0]] for each in with_parts(row) for label in each.swapped.values()}
    return found - {""} | ({"images"} if row.images else set()) | (set() if row.fused else {"head"})


def thing(name: str) -> str:
    """What a class or function is to a reader: Qwen3VLVisionMLP is the vision MLP."""
    part = next((said for start, said in PARTS.items() if start in name), "MLP")
    return next((tower for pattern, tower in TOWERS.items() if re.search(pattern, name)), "") + part


def stays_stock(model_type: str) -> str:
    """Sentences about what runs Transformers' code; of the text of a model, not about its towers."""
    row = FAMILIES[model_type]
    said = [f"The head {row.fused.removeprefix('it ')}."] if row.fused else []
    every = [entry for each in with_parts(row) for entry in each.left_alone.items()]
    # what holds a router calls the experts, and a function with an underscore is called by another
    left = [(thing(name), why) for name, why in every if why != "uses router" and name[0] != "_"]
    left = [(name, why) for name, why in left if not (model_type.endswith("text") and name.startswith(("vis", "aud")))]
    marked = marks(row)
    for start, (one, several, rest) in REASONS.items():
        things = list(dict.fromkeys(name for name, why in left if (why if why in REASONS else "") == start))
        things = [f"{'another' if COLUMN_OF.get(name) in marked else 'the'} {name}" for name in things]
        if things:
            verb = several if len(things) > 1 or things[0].endswith("experts") else one
            subject = " and ".join([", ".join(things[:-1])] * (len(things) > 1) + things[-1:])
            said.append(f"{subject[0].upper()}{subject[1:]} {verb} {rest}.")
    return " ".join(said)


def table(types: list[str]) -> Iterator[str]:
    found = {name: marks(FAMILIES[name]) for name in types}
    columns = [column for column in COLUMNS if any(column in marked for marked in found.values())]
    yield f"| type | {' | '.join(columns)} | stays stock |"
    yield f"|---|{':-:|' * len(columns)}---|"
    for name, marked in found.items():
        cells = ["✓" if column in marked else "" for column in columns]
        yield f"| `{name}` | {' | '.join(cells)} | {stays_stock(name)} |"


def escaped(text: str) -> str:
    return re.sub(r"([_*`|\[])", r"\\\1", text)  # not to be read as Markdown


def document() -> str:
    heads = [name for name, row in FAMILIES.items() if row.heads]
    group = {name: group_of(name) for name in heads}
    lines = ["# Model families", "", f"{summary()}; with transformers {VERSION}.", "", INTRODUCTION]
    for title, about in GROUPS.items():
        lines += [f"## {title}", "", *([about, ""] if about else [])]
        lines += [*table([name for name in heads if group[name] == title]), ""]
    parts = ", ".join(f"`{name}`" for name, row in FAMILIES.items() if not row.heads)
    lines += ["## Parts", "", f"These types are only parts of those above: {parts}.", ""]
    lines += [
        "## Not verified",
        "",
        "No tiny model of these types was trained, for the reason in the table. Their parts are",
    ]
    lines += ["recognised when you patch such a model.", "", "| type | why |", "|---|---|"]
    lines += [f"| `{name}` | {escaped(reason)} |" for name, reason in UNVERIFIED.items()]
    return "\n".join(lines) + "\n"
