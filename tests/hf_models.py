"""What tests of patched models share: tiny models, a training step, and snapshots that tell
whether anything is not the stock object."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from liger_kernel.transformers.recognise import families
from liger_kernel.transformers.recognise.compare import references
from liger_kernel.transformers.recognise.families import configs_of, modeling
from liger_kernel.transformers.recognise.slots import SLOT_OF, VARIANTS
from liger_kernel.transformers.recognise.tiny import VOCAB, model_of, tiny_config, with_images

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = DEVICE == "cuda" or os.environ.get("LIGER_TEST_INTERPRETED") == "1"  # whether they serve whole models
TOLERANCE = 1e-5 if KERNELS else 2e-6


@contextlib.contextmanager
def served_by_kernels_or_references() -> Iterator[None]:
    """Kernels on a GPU or with LIGER_TEST_INTERPRETED=1; else references, to save minutes."""
    with contextlib.nullcontext() if KERNELS else references():
        yield


def recognised(*model_types: str) -> None:
    """What these are is known from here on: with another Transformers than the table's,
    recognition tries our functions, which is no call of a model."""
    for model_type in model_types:
        families.family(model_type)


def forget_training() -> None:
    """For the next training, which older accelerate would run in this one's dtype, compiled."""
    from accelerate.state import AcceleratorState

    for name in [n for n in os.environ if n.startswith("ACCELERATE_")]:
        del os.environ[name]
    AcceleratorState._reset_state(reset_partial_state=True)


SMOKE = ["llama", "gemma2", "qwen3_moe", "qwen2_vl"]  # what every version has and trains: CI tries these on the oldest


@contextlib.contextmanager
def stock(family: str) -> Iterator[None]:
    """Around what stock models do, some of which other versions lack or do not train."""
    try:
        yield
    except Exception as error:
        if transformers.__version__ == families.VERSION or family in SMOKE:
            raise
        pytest.skip(f"stock of {transformers.__version__}: {type(error).__name__}")


def tiny_model(model_type: str, *, attention: str = "eager", head: str | None = None, **more: Any) -> nn.Module:
    return model_of(tiny_config(model_type, **more), attention, head)


def exact_parts(model: nn.Module) -> dict[str, bool]:
    """Slots in which all that is swapped in ``model`` has the bits of stock. (LayerNorms may add in
    another order, and then rarely round differently.)"""
    rows = [families.family(t) for t in dict.fromkeys(c.model_type for c in configs_of(model.config))]
    labels = [label for row in rows if row for label in row.swapped.values()]
    inexact = {SLOT_OF[label] for label in labels if not VARIANTS[label].exact}
    return {slot: slot not in inexact | {"layer_norm"} for slot in SLOT_OF.values()}


def make(model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = tiny_model(model_type, **more)
    # norms at their initial 1 or 0 would hide offsets, and biases at 0 themselves
    for name, p in model.named_parameters():
        if p.ndim == 1:
            nn.init.normal_(p, p.mean().item() if "norm" in name else 0.0, 0.2)
    return model.to(DEVICE, dtype)


def checkpointed(model: nn.Module, reentrant: bool = False) -> nn.Module:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


@contextlib.contextmanager
def group_of_one(device: str = DEVICE) -> Iterator[Any]:
    """A process group of this process; its mesh."""
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield torch.distributed.init_device_mesh(device, (1,))
    finally:
        torch.distributed.destroy_process_group()


def said(call: Callable[[], Any], subject: str) -> list[str]:
    """Warnings of a call that begin with ``subject``."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in found if str(w.message).startswith(subject)]


def tokens(batch: int = 2, length: int = 12, seed: int = 1, ignored: int = 3) -> dict[str, Tensor]:
    """Tokens and labels, the first ``ignored`` of each sequence ignored."""
    ids = torch.randint(3, VOCAB - 3, (batch, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    labels = ids.clone()
    labels[:, :ignored] = -100
    return {"input_ids": ids, "labels": labels}


def batch_of(model: nn.Module) -> dict[str, Tensor]:
    """``tokens``, with an image in each sequence if the model takes images."""
    batch = tokens()
    torch.manual_seed(3)
    return {
        k: v.to(DEVICE, model.dtype) if v.is_floating_point() else v.to(DEVICE)
        for k, v in (with_images(model, batch) or batch).items()
    }


def step(model: nn.Module, batch: dict[str, Any] | None = None, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
    """Output of one training step; loss and all gradients by name."""
    torch.manual_seed(2)
    model.zero_grad()
    out = model(**(tokens() if batch is None else batch), **{"use_cache": False, **kwargs})
    loss = out[0] if isinstance(out, tuple) else out.loss
    loss.backward()
    return out, {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_learning(ours: dict[str, Tensor], stock: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Loss and gradients equal to fp32 rounding: each to ``tolerance`` of its largest value, or of
    1/1000 of the largest gradient of all.

    (Some gradients, of key biases for example, are zero but for rounding.)
    """
    assert ours.keys() == stock.keys(), f"gradients differ: {ours.keys() ^ stock.keys()}"
    floor = max(g.abs().max().item() for n, g in stock.items() if n != "loss") / 1000
    for name, g in stock.items():
        error = (ours[name] - g).abs().max().item()
        assert error <= tolerance * max(g.abs().max().item(), floor), (
            f"{name}: error {error:.1e}, largest value {g.abs().max().item():.1e}"
        )


def assert_learns_the_same(
    model: nn.Module, patch: Callable[[nn.Module], Any], tolerance: float = TOLERANCE, **kwargs: Any
) -> Any:
    """A step of ``model`` learns the same before and after ``patch`` of it. Returns its output."""
    expected = step(model, **kwargs)[1]
    patch(model)
    out, learned = step(model, **kwargs)
    assert_same_learning(learned, expected, tolerance)
    return out


def assert_same_bits(ours: dict[str, Tensor], stock: dict[str, Tensor]) -> None:
    """The same computation; on a GPU some of PyTorch's own sums have no fixed order."""
    if KERNELS:
        assert_same_learning(ours, stock)
    else:
        assert ours.keys() == stock.keys() and all(torch.equal(ours[n], g) for n, g in stock.items())


def snapshot(*owners: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Every attribute of classes, Python modules, and of models' modules."""
    flat = [m for o in owners for m in (o.modules() if isinstance(o, nn.Module) else [o])]
    of_class = lambda o: {"__class__": type(o)} if isinstance(o, nn.Module) else {}
    return [(o, o.__dict__ | of_class(o)) for o in flat]


def assert_untouched(before: list[tuple[Any, dict[str, Any]]]) -> None:
    """Every attribute is again, or still, the very object that it was."""
    for owner, attributes in before:
        now = owner.__dict__ | {"__class__": type(owner)}
        attributes = {"__class__": type(owner)} | attributes
        changed = [k for k in attributes.keys() | now.keys() if now.get(k, owner) is not attributes.get(k, owner)]
        # models keep some themselves: positions after images, seeds
        changed = [k for k in changed if not isinstance(now.get(k), (Tensor, int))]
        assert not changed, f"{owner if isinstance(owner, type) else type(owner)}: {changed}"


def everything_of(model_type: str) -> list[Any]:
    """The modeling module of a type and its classes."""
    module = modeling(model_type)
    return [module, *(c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__)]
