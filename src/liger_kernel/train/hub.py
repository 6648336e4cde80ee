"""Names of models and datasets: the configuration of a model, and whether the Hugging Face hub
has a name, asked once, before others ask six times."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from liger_kernel.model_sizes import MODELS, config_of
from liger_kernel.nearest import did_you_mean
from liger_kernel.train.mistakes import UserError, existing, mistaken, one_of, regular_in, similar_file
from liger_kernel.train.redact import in_a_line

# seconds that the hub has to answer
SECONDS = 10.0


def on_hub(name: str, also: Iterable[str] = (), kind: Literal["model", "dataset"] = "model") -> None:
    """``UserError`` if ``name`` is no path, is in no cache, and is not on the hub or the hub cannot
    be reached; ``also``: other names to suggest.

    A path that is not there is never asked for: its folder's name may be that of a stranger on the
    hub. A rank of a run that somebody launched does not ask either: transformers and datasets are
    patient with a network that comes back.
    """
    if Path(name).exists():
        return regular_in(name)
    near = similar_file(name) or did_you_mean(name, also)
    if name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1:
        raise UserError(f"no such folder: {name}{near}")
    from huggingface_hub import constants

    if (Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "snapshots").is_dir():
        return
    owner, _, rest = name.partition("/")
    if rest and Path(owner).is_dir():
        fetch = f"hf download {'--repo-type dataset ' * (kind == 'dataset')}{name}"
        raise UserError(
            "no such folder: "
            f"{name}{near or f'; if you mean the {kind} on the Hugging Face hub, fetch it first: {fetch}'}"
        )
    if constants.HF_HUB_OFFLINE or "RANK" in os.environ:
        return
    import huggingface_hub
    from huggingface_hub import errors

    try:
        huggingface_hub.HfApi().repo_info(name, repo_type=kind, timeout=SECONDS)
    # errors of the network are those of the client that the hub's package uses
    except Exception as error:
        gated, there = isinstance(error, errors.GatedRepoError), not isinstance(error, errors.RepositoryNotFoundError)
        # what a model needs that is there, the package that loads it says
        if gated or (there and isinstance(error, errors.HfHubHTTPError)):
            return
        unreached = f"cannot be reached ({in_a_line(error)})"
        unknown = not there or isinstance(error, errors.HFValidationError)
        lacks = f"has no public {kind} of that name" if unknown else unreached
        raise UserError(f"no {kind} {name!r}: it is no folder here, and the Hugging Face hub {lacks}{near}") from error


def skeleton(name: str | None, trust_remote_code: bool) -> Any:
    """The model ``name`` without weights, or a Llama of one layer: its modules and their names."""
    import torch
    import transformers

    if name:
        on_hub(name)
    with mistaken(f"cannot build the model{f' {name}' if name else ''}: "):
        form = transformers.LlamaConfig(num_hidden_layers=1)
        if name:
            form = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(form, trust_remote_code=trust_remote_code)


def configuration(name: str, trust_remote_code: bool = False) -> Any:
    """The transformers configuration of a ``config.json``, a folder that holds one, a model that
    `liger bench step` knows, or a model on the hub."""
    import transformers

    if name in MODELS:
        return config_of(MODELS[name])
    with mistaken(f"cannot read the configuration of {name}: "):
        if Path(name).suffix == ".json":
            values = json.loads(existing(name).read_text(encoding="utf-8"))
            if not isinstance(values, dict) or "model_type" not in values:
                raise UserError(f"{name} has no model_type: give the config.json of a transformers model")
            one_of("model type", values["model_type"], transformers.CONFIG_MAPPING)
            return transformers.AutoConfig.for_model(**values)
        on_hub(name, MODELS)
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
