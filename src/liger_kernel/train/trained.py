"""What a run has saved, loaded again: a model, or adapters and their base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from liger_kernel.train.config import TrainConfig
from liger_kernel.train.hub import on_hub
from liger_kernel.train.mistakes import Parser, UserError, mistaken, why

QUANTIZE = ("nf4", "int8")  # forms of a base that can be made dense again
# forms of checkpoints that transformers decodes while it loads, where our decoding does not know them, by
# the classes that tell it so
_STORED = {"fp8": "FineGrainedFP8Config", "compressed-tensors": "CompressedTensorsConfig"}


def add_flags(parser: Parser, device: str) -> None:
    """The flags that say how it is loaded."""
    add = parser.add_argument
    add("--base", metavar="NAME", help="the adapters' base, if it is not where the run found it")
    add("--quantize", choices=QUANTIZE, help="load the base in 4 or 8 bits, as a run with this flag did")
    add("--device", default=device, help="cpu, cuda, or auto: the GPU if there is one")
    add("--trust-remote-code", action="store_true", help="run the model's own Python code, with your rights")


def base_of(folder: str, base: str | None = None) -> str | None:
    """The base of the adapters in ``folder``: ``base``, or the one that they name. None if the folder
    holds a whole model, or is a name on the hub."""
    from liger_kernel.train import adapters

    on_hub(folder)
    path = Path(folder)
    if not adapters.holds_adapters(folder):
        if path.is_dir() and not (path / "config.json").is_file():
            raise UserError(f"{folder} holds neither a model nor adapters: give what --save of a run names")
        if base:
            raise UserError(f"{folder} holds no adapters: leave out --base")
        return None
    with mistaken(f"cannot read {path / adapters.SAVED}: "):
        found = base or adapters.base_of(folder)
    if not found:
        raise UserError(f"the base of {folder} had random weights, which are in no file: train adapters over a --model")
    return found


def load_tokenizer(name: str, base: str | None, trusted: bool) -> Any:
    """The tokenizer beside the model or the adapters; else the base's."""
    from liger_kernel.train import tokenise

    if base and not any((Path(name) / file).is_file() for file in tokenise.TOKENIZER_FILES):
        name = base
    tokenizer = tokenise.loaded(name, trusted)
    tokenise.complete(tokenizer)
    return tokenizer


def load_model(name: str, trusted: bool, device: Any, quantize: str | None = None, dense: bool = False) -> Any:
    """The model ``name`` in the dtype that it is stored in, or in 4 or 8 bits. ``dense``: one that is
    quantised is decoded, if its form is known."""
    import transformers

    from liger_kernel.train import adapters, stored

    on_hub(name)
    config = TrainConfig(model=name, lora=1, quantize=quantize, trust_remote_code=trusted)
    options: dict[str, Any] = {"dtype": "auto", "trust_remote_code": trusted}
    if quantize:
        adapters.check(config, device)
        options |= {"quantization_config": adapters.quantization(config, "bf16"), "device_map": {"": device}}
    with mistaken(f"cannot load the model {name}: "):
        form = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trusted)
        method = stored.method_of(form)
        if method and dense and not quantize:
            try:
                return decoded(name, form).to(device)
            except ValueError as error:
                if method not in _STORED:
                    raise UserError(f"{why(error)}: give --base the same model in 16 bits") from error
        if method in _STORED and not quantize:
            more = {"quantization_config": getattr(transformers, _STORED[method])(dequantize=True)} if dense else {}
            options |= {"device_map": {"": device}} | more
        model = transformers.AutoModelForCausalLM.from_pretrained(name, **options)
    return (model if getattr(model, "is_quantized", False) else model.to(device)).eval()


def decoded(name: str, form: Any) -> Any:
    """The model ``name``, which has the configuration ``form``, with the values of its quantised weights, in
    16 bits on the CPU. ``ValueError`` for a storage that is not known."""
    import copy

    import torch
    import transformers

    from liger_kernel.train import stored

    dtype = getattr(form, "dtype", None) or torch.bfloat16
    weights, plain = stored.opened(name, form).decoded(dtype), copy.deepcopy(form)
    del plain.quantization_config
    with torch.device("meta"):
        cls: Any = type(transformers.AutoModelForCausalLM.from_config(plain, dtype=dtype))
    return cls.from_pretrained(None, config=plain, state_dict=weights, dtype=dtype).eval()
