"""``liger bench step`` with more variants, which campaigns compared with ours:

    python benchmarks/step_rivals.py --lora 16 --against stock,unsloth,ours --unsloth-path DIR
    python benchmarks/step_rivals.py --fp8 tensorwise --against ours:bf16,ours,torchao

unsloth            the model by Unsloth's FastLanguageModel
unsloth:offload    the same; with --checkpointing, the layers' inputs are in the CPU's memory
torchao            a model patched by ours with torchao's linear layers, each decoder layer compiled
ours:gathered      torchao's layers, whose weights FSDP2 gathers in FP8, on our kernels
torchao:gathered   the same, each decoder layer compiled

All other flags are those of ``liger bench step``. The processes of variants run this file, which
adapts ``step_child.py``.
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

GATHERED = ("ours:gathered", "torchao:gathered")

# -- in the process of a variant


def load_child(path: str) -> Any:
    """``step_child.py`` with what the variants here need. By its path: a process of Unsloth need not
    find our package."""
    found = importlib.util.spec_from_file_location("step_child", path)
    assert found is not None and found.loader is not None
    child = importlib.util.module_from_spec(found)
    found.loader.exec_module(child)
    stock, build, training_step = child.models.stock, child.models.build, child.Training.step

    def converted(spec: dict[str, Any], device: torch.device) -> Any:
        model = stock(spec, device)
        if spec["recipe"]:
            convert(spec, model)
        return model

    def build_variant(spec: dict[str, Any], device: torch.device) -> Any:
        return unsloth(spec, child.models) if spec["variant"].startswith("unsloth") else build(spec, device)

    def step(training: Any, data: Any) -> None:
        training_step(training, data)
        if training.spec["variant"] in GATHERED:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(training.model)

    child.models.stock, child.models.build, child.Training.step = converted, build_variant, step
    return child


def unsloth(spec: dict[str, Any], models: Any) -> Any:
    """Unsloth's model from a checkpoint of stock's weights. ``models`` is ``step_model.py``."""
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
    if spec["quantize"] and not getattr(model, models.BITSANDBYTES[spec["quantize"]], False):
        raise RuntimeError("Unsloth left the weights in 16 bits: can it load bitsandbytes here?")
    model = FastLanguageModel.get_peft_model(model, **models.adapters(spec), **recomputed)
    # weights are loaded for inference, in which Unsloth neither compiles its layers nor checkpoints them
    FastLanguageModel.for_training(model)
    if not all(layer.training for layer in models.layers_of(model)):
        raise RuntimeError("Unsloth's layers are not set to training")
    models.start(model)
    return model


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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_child(spec["child"]).models.stock(spec, device)
    model.save_pretrained(folder)
    words = {f"<{i}>": i for i in range(model.config.vocab_size)}
    special = {f"{name}_token": f"<{i}>" for i, name in enumerate(("pad", "bos", "eos", "unk"))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=special["unk_token"]))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def convert(spec: dict[str, Any], model: Any) -> None:
    """torchao's linear layers but the head. For the variants that gather, FSDP2 is to gather their
    weights in FP8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(spec["recipe"])
    gathers, emulated = spec["variant"] in GATHERED, not torch.cuda.is_available()
    config = dataclasses.replace(config, enable_fsdp_float8_all_gather=gathers, emulate=emulated)
    head = model.get_output_embeddings()
    fits = lambda m, name: m is not head and m.in_features % 16 == m.out_features % 16 == 0
    convert_to_float8_training(model, config=config, module_filter_fn=fits)


# -- the command


def register() -> None:
    """Add the variants to ``liger bench step``."""
    from liger_kernel.bench import step
    from liger_kernel.train.mistakes import holds

    step.VARIANTS |= {
        "unsloth": step.Setup(compile="itself"),  # so that no hooks change its code
        "unsloth:offload": step.Setup(compile="itself"),
        "torchao": step.Setup("ours", compile="layers", fp8=False),
        "ours:gathered": step.Setup("ours", fp8=False),
        "torchao:gathered": step.Setup("ours", compile="layers", fp8=False),
    }
    tensorwise = step.RECIPES[:1]
    step.NEEDS_FP8 |= {"torchao": step.RECIPES[:3], **dict.fromkeys(GATHERED, tensorwise)}
    child, step.CHILD = str(step.CHILD), Path(__file__).resolve()
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
        path = [a.unsloth_path] if name.startswith("unsloth") and a.unsloth_path else spec["path"]
        converts = "torchao" in name or name in GATHERED
        return spec | {"recipe": a.fp8 if converts else None, "path": path, "child": child}

    step.parser_of, step.refused, step.spec_of = parser_of, refused, spec_of


if __name__ == "__main__":
    if sys.argv[1:2] == ["--save-weights"]:
        save_weights(*sys.argv[2:])
    elif sys.argv[1:] and sys.argv[1].endswith("spec.json"):  # a process of a variant
        sys.exit(load_child(json.loads(Path(sys.argv[1]).read_text())["child"]).main(*sys.argv[1:]))
    else:
        register()
        from liger_kernel.bench import step
        from liger_kernel.train.mistakes import UserError

        try:
            sys.exit(step.main(sys.argv[1:]))
        except UserError as error:
            sys.exit(f"step_rivals.py: {error}")
