"""``liger bench step`` with more variants, which campaigns compared with ours:

    python benchmarks/step_rivals.py --lora 16 --against stock,unsloth,ours --unsloth-path DIR
    python benchmarks/step_rivals.py --fp8 tensorwise --against ours:bf16,ours,torchao

unsloth            the model by Unsloth's FastLanguageModel
unsloth:offload    the same; with --checkpointing, the layers' inputs are in the CPU's memory
torchao            a model patched by ours with torchao's linear layers, each decoder layer compiled
ours:gathered      torchao's layers, whose weights FSDP2 gathers in FP8, on our kernels
torchao:gathered   the same, each decoder layer compiled

All other flags are those of ``liger bench step``, whose processes load this file by its path, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

COMPILES = {"unsloth": True, "unsloth:offload": True}  # variants that compile their layers themselves
BITSANDBYTES = {"nf4": "is_loaded_in_4bit", "int8": "is_loaded_in_8bit"}
GATHERED = ("ours:gathered", "torchao:gathered")

# -- in the process of a variant


def build(spec: dict[str, Any], device: torch.device) -> Any:
    """Unsloth's model from a checkpoint of stock's weights; None for the others."""
    if not spec["variant"].startswith("unsloth"):
        return None
    weights = _weights(spec)
    compiled = f"{spec['tokens']}-compiled"
    os.environ |= {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_COMPILE_LOCATION": compiled}
    from unsloth import FastLanguageModel

    offload = "unsloth" if spec["variant"].endswith(":offload") else True
    recomputed = {"use_gradient_checkpointing": offload if spec["checkpointing"] else False}
    model, _ = FastLanguageModel.from_pretrained(
        str(weights),
        max_seq_length=spec["config"]["max_position_embeddings"] if spec["largest_seq"] else spec["seq"],
        local_files_only=True,
        use_exact_model_name=True,
        load_in_4bit=spec["quantize"] == "nf4",
        load_in_8bit=spec["quantize"] == "int8",
        dtype=getattr(torch, spec["dtype"]),
        **recomputed,
    )
    if spec["quantize"] and not getattr(model, BITSANDBYTES[spec["quantize"]], False):
        raise RuntimeError("Unsloth left the weights in 16 bits: can it load bitsandbytes here?")
    model = FastLanguageModel.get_peft_model(model, **_models(spec["models"]).adapters(spec), **recomputed)
    # weights are loaded for inference, in which Unsloth neither compiles its layers nor checkpoints them
    FastLanguageModel.for_training(model)
    if not all(layer.training for layer in _models(spec["models"]).layers_of(model)):
        raise RuntimeError("Unsloth's layers are not set to training")
    return model


def _models(file: str) -> Any:
    """``step_model.py``, by its path: a process of Unsloth need not find our package."""
    found = importlib.util.spec_from_file_location("step_model", file)
    assert found is not None and found.loader is not None
    models = importlib.util.module_from_spec(found)
    found.loader.exec_module(models)
    return models


def _weights(spec: dict[str, Any]) -> Path:
    """The folder of stock's weights, which one process saves for all: another one, because Unsloth
    must be imported before transformers."""
    tokens = Path(spec["tokens"]).resolve()  # side_by_side.py links it into the folders of variants
    folder, dist = tokens.with_suffix(".weights"), torch.distributed
    if int(os.environ.get("RANK", 0)) == 0 and not folder.exists():
        command = [sys.executable, __file__, "--save-weights", json.dumps(spec), str(folder)]
        subprocess.run(command, check=True)
    if dist.is_initialized():
        dist.barrier()
    return folder


def save_weights(given: str, folder: str) -> None:
    """Save the stock model, and a tokenizer with a word for every row of its embedding, for
    ``from_pretrained``."""
    import tokenizers
    import transformers

    spec = json.loads(given)
    model = _models(spec["models"]).stock(spec, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    model.save_pretrained(folder)
    words = {f"<{i}>": i for i in range(model.config.vocab_size)}
    special = {f"{name}_token": f"<{i}>" for i, name in enumerate(("pad", "bos", "eos", "unk"))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=special["unk_token"]))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def convert(spec: dict[str, Any], model: Any) -> None:
    """torchao's linear layers but the head. For the variants that gather, FSDP2 is to gather their
    weights in FP8."""
    if spec["variant"].startswith("unsloth"):
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(spec["recipe"])
    gathers, emulated = spec["variant"] in GATHERED, not torch.cuda.is_available()
    config = dataclasses.replace(config, enable_fsdp_float8_all_gather=gathers, emulate=emulated)
    head = model.get_output_embeddings()
    fits = lambda m, name: m is not head and m.in_features % 16 == m.out_features % 16 == 0
    convert_to_float8_training(model, config=config, module_filter_fn=fits)


def after_step(spec: dict[str, Any], model: Any) -> None:
    if spec["variant"] in GATHERED:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)


# -- the command


def register() -> None:
    """Add the variants to ``liger bench step``."""
    from liger_kernel.bench import flags, step
    from liger_kernel.train.mistakes import holds

    flags.MOVED_STEPS.clear()
    here = str(Path(__file__).resolve())
    step.VARIANTS |= {
        "unsloth": step.Variant(script=here),
        "unsloth:offload": step.Variant(script=here),
        "torchao": step.Variant("ours", compile="layers", fp8=False, script=here),
        "ours:gathered": step.Variant("ours", fp8=False, script=here),
        "torchao:gathered": step.Variant("ours", compile="layers", fp8=False, script=here),
    }
    tensorwise = step.RECIPES[:1]
    step.NEEDS_FP8 |= {"torchao": step.RECIPES[:3], **dict.fromkeys(GATHERED, tensorwise)}
    models = str(step.CHILD.with_name("step_model.py"))
    original_parser, original_refused, original_spec = step.parser_of, step.refused, step.spec_of

    def parser_of() -> Any:
        parser = original_parser()
        parser.prog = "python benchmarks/step_rivals.py"
        parser.formatter_class, parser.description = argparse.RawDescriptionHelpFormatter, __doc__
        where = "where Unsloth is, unless it is installed: pip install --target DIR unsloth"
        parser.add_argument("--unsloth-path", metavar="DIR", help=where)
        return parser

    def refused(a: Any) -> Any:
        theirs = next((name for name in a.against if name.startswith("unsloth")), None)
        gathered = next((name for name in a.against if name in GATHERED), None)
        yield theirs and not a.lora, "unsloth needs --lora R"
        yield theirs and a.attention, "unsloth has its own attention: leave out --attention"
        apart = theirs and a.parallel not in (None, "ddp")
        yield apart, f"unsloth has no --parallel {a.parallel}: only ddp, or one GPU"
        yield gathered and a.parallel != "fsdp2", f"{gathered} needs --parallel fsdp2, which gathers the weights"
        yield from original_refused(a)
        holds("unsloth", a.unsloth_path, "--unsloth-path", "unsloth")
        for package, needed in (
            ("unsloth", theirs and not a.unsloth_path),
            ("torchao", gathered or "torchao" in a.against),
        ):
            if needed and importlib.util.find_spec(package) is None:
                raise UserError(f"{package} is not installed: pip install {package}")

    def spec_of(a: Any, model: str, name: str, *more: Any) -> dict[str, Any]:
        spec = original_spec(a, model, name, *more)
        folder = a.unsloth_path if name.startswith("unsloth") else None
        return spec | {"recipe": a.fp8, "script_path": folder, "models": models}

    step.parser_of, step.refused, step.spec_of = parser_of, refused, spec_of


if __name__ == "__main__":
    if sys.argv[1:2] == ["--save-weights"]:
        save_weights(*sys.argv[2:])
    else:
        register()
        from liger_kernel.bench import step
        from liger_kernel.train.mistakes import UserError

        try:
            sys.exit(step.main(sys.argv[1:]))
        except UserError as error:
            sys.exit(f"step_rivals.py: {error}")
