"""Whether a name is a model or a dataset of the Hugging Face hub: asked once, before transformers or datasets ask six times."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from liger_kernel.nearest import did_you_mean
from liger_kernel.train.mistakes import UserError, beside
from liger_kernel.train.redact import in_a_line

SECONDS = 10.0  # that the hub has to answer


def on_hub(name: str, also: Iterable[str] = (), kind: Literal["model", "dataset"] = "model") -> None:
    """``UserError`` if ``name`` is no path, is in no cache, and is not on the hub or the hub cannot be reached; ``also``: other names to suggest.

    A rank of a run that somebody launched does not ask: transformers and datasets are patient with a network that comes back.
    """
    if Path(name).exists() or "RANK" in os.environ:
        return
    near = beside(name) or did_you_mean(name, also)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"no such folder: {name}{near}")
    import huggingface_hub
    from huggingface_hub import constants, errors

    loaded_before = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
    if constants.HF_HUB_OFFLINE or loaded_before.is_dir():
        return
    try:
        huggingface_hub.HfApi().repo_info(name, repo_type=kind, timeout=SECONDS)
    except errors.GatedRepoError:
        return  # it is there; what it needs, the package that loads it says
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UserError(f"no {kind} {name!r}: it is no folder here, and the Hugging Face hub has no public {kind} of that name{near}") from error
    except errors.HfHubHTTPError:
        return
    except Exception as error:  # of the network, by whichever client the hub's package has
        raise UserError(f"no {kind} {name!r}: it is no folder here, and the Hugging Face hub cannot be reached ({in_a_line(error)}){near}") from error
