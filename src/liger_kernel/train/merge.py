"""``liger merge``: adapters and their base as one model, in the base's dtype, which every program
loads; or in the storage of a quantised base.

What was written is loaded again, and must have the logits of the base with its adapters; or of their sums,
rounded to the numbers of the base's storage.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from liger_kernel.train.config import TrainConfig
from liger_kernel.train.mistakes import Parser, UserError, mistaken, why, writable
from liger_kernel.train.trained import add_flags, base_of, load_model, load_tokenizer

# the logits of these tokens are compared
TEXT = "Is 17 a prime number? Yes: no number but 1 and itself divides it.\ndef area(a, b): return a * b\n" * 2
# largest difference of all logits (root mean square, relative), in steps of the dtype: each weight is
# rounded once more. Single logits move further: by 8 % of the largest, where all move by 1.3 %
STEPS, LEAST = 8, 1e-4

_TO = "dense: 16 bits; base: the storage of a quantised base, with its scales"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="liger merge", description="Merge adapters into their base: one model for every program.")
    add = parser.add_argument
    add("adapters", metavar="ADAPTER", help="the folder of adapters that a run with --lora has saved")
    add("--out", required=True, metavar="DIR", help="new or empty folder for model, tokenizer and card")
    add("--push", metavar="REPO", help="upload it, too: to a new, private repository of the hub, OWNER/NAME")
    add("--to", choices=("dense", "base"), default="dense", help=_TO)
    add_flags(parser, "cpu")
    a = parser.parse_args(argv)
    if os.path.lexists(a.out) and (not Path(a.out).is_dir() or os.listdir(a.out)):
        raise UserError(f"{a.out} is there and not an empty folder: give a new --out")
    return a


def main(argv: list[str]) -> int:
    a = parse(argv)
    import huggingface_hub
    import transformers

    from liger_kernel.train import card
    from liger_kernel.train.model import device_and_precision, replacing

    transformers.logging.set_verbosity_error()
    device = device_and_precision(TrainConfig(device=a.device))[0]
    base = base_of(a.adapters, a.base)
    if base is None:
        raise UserError(f"{a.adapters} is no folder of adapters: a whole model needs no merge")
    files = stored_base(base, a, device) if a.to == "base" else None
    writable(folder=a.out)
    model = dense(load_model(base, a.trust_remote_code, device, a.quantize, dense=True), base)
    tokenizer = load_tokenizer(a.adapters, base, a.trust_remote_code)
    api = huggingface_hub.HfApi()
    if a.push:  # before the work
        with mistaken(f"cannot push to {a.push}: "):
            api.whoami()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"].to(device)
    model, plain, adapted = merge(model, a.adapters, ids, files)
    with replacing(a.out) as aside:
        if files is None:
            model.save_pretrained(aside)
            expected = adapted
        else:
            expected = logits(model, ids)
            files.write(Path(aside))
        tokenizer.save_pretrained(aside)
        del model  # two may not fit
        model = load_model(aside, a.trust_remote_code, device, dense=files is not None)
        print(compared(plain, expected, logits(model, ids), model.dtype))
        if files is not None:
            print(rounding(plain, adapted, expected, files.method))
        card.write_merged(Path(aside), Path(a.adapters), a.push or Path(a.out).absolute().name)
    print(f"model in {a.out}")
    if a.push:
        with mistaken(f"cannot push {a.out}, which is complete, to {a.push}: "):
            api.create_repo(a.push, private=True)
            print(f"pushed: {api.upload_folder(repo_id=a.push, folder_path=a.out)}")
    for program in ("liger chat", "vllm serve"):
        print(f"  next: {program} {shlex.quote(a.out)}")
    return 0


def dense(model: Any, name: str) -> Any:
    """``model`` without quantised weights, which a merge would round once more."""
    if not getattr(model, "is_quantized", False):
        return model
    dtype = model.dtype
    try:
        return model.dequantize().to(dtype)
    except Exception as error:
        raise UserError(
            f"{name} is quantised for good ({why(error)}): give --base the same model in 16 bits"
        ) from error


def stored_base(base: str, a: argparse.Namespace, device: Any) -> Any:
    """The files of a quantised base."""
    import transformers

    from liger_kernel.train import stored

    if a.quantize:
        raise UserError("--to base: leave out --quantize, which is for a base in 16 bits")
    form = transformers.AutoConfig.from_pretrained(base, trust_remote_code=a.trust_remote_code)
    if not stored.method_of(form):
        raise UserError(f"--to base: {base} must be quantised by one of {', '.join(stored.METHODS)}")
    return stored.opened(base, form, device)


def merge(model: Any, folder: str, ids: Any, files: Any = None) -> tuple[Any, Any, Any]:
    """The merged model; logits of the base, and with its adapters. With ``files``, it has the values of
    the rounded sums, whose numbers ``files`` then holds."""
    from liger_kernel.train import adapters

    with mistaken(f"cannot load the adapters {folder}: "):
        model = adapters.restored(model, folder).eval()
    adapted = logits(model, ids)
    with model.disable_adapter():
        plain = logits(model, ids)
    # adapters that are no matrices, as prompts, have no such method
    with mistaken(f"cannot merge {folder}: "):
        if files is None:
            return model.merge_and_unload(safe_merge=True), plain, adapted
        round_sums(model.base_model.model, files)
        return model.unload(), plain, adapted


def round_sums(model: Any, files: Any) -> None:
    """Round the sums of the weights in ``files`` and of the adapters of ``model``: ``files`` gets their
    numbers, and ``model`` their values."""
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    from liger_kernel.ops.projections.merge_aware import merged
    from liger_kernel.transformers.recognise.experts import adapters_of, experts_of, is_wrapper
    from liger_kernel.transformers.recognise.projections import adapted_layer
    from liger_kernel.transformers.recognise.storages import Fallback

    tuner: Any = BaseTunerLayer
    for name, m in model.named_modules():
        if isinstance(m, AuxiliaryTrainingWrapper):
            raise UserError(f"{name} was trained as a whole, and --to base writes adapted layers alone")
        if not isinstance(m, tuner):
            continue
        name, of_experts = name.replace(".base_layer", ""), is_wrapper(m)
        weight = getattr(experts_of(m), m.parameter_name) if of_experts else m.base_layer.weight
        # gpt-oss's parameters are (E, in, out)
        found: Any = adapters_of(m, True) if of_experts else adapted_layer(m, weight.dtype)
        if not isinstance(found, Fallback) and not of_experts:
            whole = found.magnitude is None and not any(a.bias is not None for a in found.adapters)
            found = found.adapters if whole else Fallback("a magnitude (DoRA) or a bias of an adapter")
        if isinstance(found, Fallback):
            raise UserError(f"{name} cannot be merged into the storage of its base: {found}")
        # a NaN would be rounded to a number
        if not all(bool(t.isfinite().all()) for adapter in found for t in (adapter.a, adapter.b)):
            raise UserError(f"{name} has an adapter with numbers that are not finite")
        key = files.key_of(f"{name}.{m.parameter_name}" if of_experts else name)
        with torch.no_grad():
            new = merged(files.weight(key), found)
            files.numbers[key], values = new.values, new.dense(weight.dtype)
            weight.copy_(values.mT if of_experts else values)


def logits(model: Any, ids: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits.float()


def compared(plain: Any, adapted: Any, merged: Any, dtype: Any) -> str:
    """What the merge has changed, in a line; ``UserError`` if that is more than rounding."""
    import torch

    part = lambda x: (x.norm() / adapted.norm()).item()
    most, off = (merged - adapted).abs().max().item(), part(merged - adapted)
    said = f"largest difference of logits by the merge: {most:.2g} ({off:.1%}, root mean square) in {dtype}"
    # `not <=`: a NaN is no small difference
    if not off <= max(STEPS * torch.finfo(dtype).eps, LEAST):
        raise UserError(f"{said}. That is more than rounding, so nothing is written")
    return f"{said}; the adapters change {part(adapted - plain):.1%}"


def rounding(plain: Any, adapted: Any, rounded: Any, method: str) -> str:
    """What the rounding to the numbers of a storage has changed, in a line."""
    part = lambda x: f"{(x.norm() / adapted.norm()).item():.1%}"
    return (
        f"the numbers of {method} move the logits by {part(rounded - adapted)} (the adapters by "
        f"{part(adapted - plain)}); a run with --merge-aware has trained with these numbers"
    )
