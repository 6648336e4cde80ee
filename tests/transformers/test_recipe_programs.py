"""Random programs on logits: what a recipe shows, and the gradients that come of it, are those of
the logits.

``LIGER_TEST_PROGRAMS=20000 pytest tests/transformers/test_recipe_programs.py`` runs so many; some
hundred are in every run.
"""

import copy
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hf_models import DEVICE, served_by_kernels_or_references
from torch import nn

from liger_kernel.transformers.head.recipe import LossRequest
from liger_kernel.transformers.head.stand_in import deferred

PROGRAMS, GROUP = int(os.environ.get("LIGER_TEST_PROGRAMS", 200)), 100
B, T, H, V = 2, 5, 8, 11
Step = tuple[str, Callable[..., Any], int]  # what it says, what it does, of how many tensors


def _in_place(change: Callable) -> Callable:
    def run(*operands):
        change(*operands)

    return run


def _augmented(statement: str) -> Callable:
    def run(x):
        scope = {"x": x, "torch": torch}
        exec(statement, scope)
        return scope["x"]

    return run


def _a_look(look: Callable) -> Callable:
    def run(x):
        with torch.no_grad():
            return look(x)

    return run


def steps(rng: random.Random, look: int | None = None) -> Step:
    """One step of a program, with its numbers drawn; or a look of this number."""
    c = rng.choice([0.5, 2.0, 1.0, -1.5, 3])
    n = rng.randrange(1, 4)
    columns = torch.arange(float(V), device=DEVICE) / V
    of_one = {
        "float": lambda x: x.float(),
        "double": lambda x: x.to(torch.float64),
        "to keyword": lambda x: x.to(dtype=torch.float32),
        "contiguous": lambda x: x.contiguous(),
        "clone": lambda x: x.clone(),
        "detach": lambda x: x.detach(),
        f"* {c}": lambda x: x * c,
        f"{c} *": lambda x: c * x,
        f"/ {c}": lambda x: x / c,
        f"{c} -": lambda x: c - x,
        "torch.mul": lambda x: torch.mul(x, c),
        "tensor scale": lambda x: x * torch.tensor(c, device=DEVICE),
        "tanh": lambda x: x.tanh(),
        "torch.tanh": lambda x: torch.tanh(x),
        "cap": lambda x: torch.tanh(x / 2.0) * 2.0,
        "-": lambda x: -x,
        "+ columns": lambda x: x + columns,
        "view": lambda x: x.view(-1, V),
        "view(size=)": lambda x: x.view(size=(-1, V)),
        "reshape": lambda x: x.reshape(-1, V),
        "reshape(shape=)": lambda x: x.reshape(shape=(-1, V)),
        "view 4": lambda x: x.view(1, -1, 1, V),
        "flatten": lambda x: x.flatten(0, -2),
        "flatten all": lambda x: x.flatten(),
        "unsqueeze": lambda x: x.unsqueeze(0),
        "[None]": lambda x: x[None],
        "[..., :-1, :]": lambda x: x[..., :-1, :],
        f"[:, -{n}:]": lambda x: x[:, -n:],
        "[0]": lambda x: x[0],
        "[::2]": lambda x: x[::2],
        "[tensor]": lambda x: x[torch.tensor([0, -1], device=DEVICE)],
        "[mask]": lambda x: x[torch.arange(x.shape[0], device=DEVICE) % 2 == 0],
        "[..., columns]": lambda x: x[..., 2:7],
        "narrow": lambda x: x.narrow(-2, 0, 1),
        "split": lambda x: x.split(1)[-1],
        "chunk": lambda x: torch.chunk(x, 2)[0],
        "transpose": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
        "log_softmax": lambda x: x.log_softmax(-1),
        "masked_fill": lambda x: x.masked_fill(columns > 0.8, -5.0),
        "where": lambda x: torch.where(columns > 0.3, x, 0.1),
    }
    of_two = {
        "+": lambda x, y: x + y,
        "cat": lambda x, y: torch.cat((x, y)),
        "where of two": lambda x, y: torch.where(x > y, x, y),
        "copy_": _in_place(lambda x, y: x.copy_(y * 0.5)),
    }
    in_place = {
        f"mul_ {c}": _in_place(lambda x: x.mul_(c)),
        "clamp_": _in_place(lambda x: x.clamp_(-0.2, 0.2)),
        "add_ columns": _in_place(lambda x: x.add_(columns)),
        "setitem": _in_place(lambda x: x.__setitem__((..., 0), -3.0)),
        "fill a row": _in_place(lambda x: x[0].zero_()),
        "uncounted": _a_look(_in_place(lambda x: x.mul_(0.5))),
        f"*= {c}": _augmented(f"x *= {c}"),
        f"/= {c}": _augmented(f"x /= {c}"),
        "+= 1": _augmented("x += 1"),
    }
    looks = {
        "argmax": _a_look(lambda x: x.argmax(-1)),
        "shape": lambda x: torch.tensor(x.shape),
        "item": _a_look(lambda x: torch.tensor(x.sum().item())),
        "tolist": _a_look(lambda x: torch.tensor(x.detach().tolist())),
        "as_tensor": lambda x: torch.as_tensor(x) * 1.0,
        "isinstance": lambda x: torch.tensor(isinstance(x, torch.Tensor) and torch.is_tensor(x)),
        "requires_grad": lambda x: torch.tensor(x.requires_grad),
        "numpy": _a_look(lambda x: torch.as_tensor(x.detach().cpu().numpy())),
        "lse": lambda x: x.logsumexp(-1).sum(),
        "vmap": lambda x: torch.vmap(lambda t: t.sum())(x).sum(),
        "iterate": lambda x: sum(row.sum() for row in x),
        "in": lambda x: torch.tensor(100.0 in x),
        "numpy scalar": lambda x: np.float32(2) * x,
        "float(memory_format=)": lambda x: x.float(memory_format=torch.contiguous_format),
        "size(dim=)": lambda x: torch.tensor(x.size(dim=-1)),
        "reversed": lambda x: next(iter(reversed(x))),
        "repr": lambda x: torch.tensor(len(repr(x)) > 50),
        "deepcopy": lambda x: copy.deepcopy(x.detach()),
        "dlpack": lambda x: torch.from_dlpack(x.detach()),
        "tree": lambda x: torch.utils._pytree.tree_map(lambda t: t * 2, {"logits": [x]})["logits"][0],
        "graph": lambda x: torch.tensor([x.grad_fn is not None, x.is_leaf]),
        "data": lambda x: x.data * 1.0,
        "memory": lambda x: torch.tensor([*x.stride(), x.untyped_storage().nbytes()]),
        "sizes": lambda x: torch.tensor([x.element_size(), x.numel(), x.nbytes, x.itemsize]),
        "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(lambda t: t.tanh() * 2, x, use_reentrant=False),
    }
    kind = rng.choices([of_one, of_two, in_place, looks], [6, 1, 1.5, 1.5])[0]
    kind, name = (looks, list(looks)[look % len(looks)]) if look is not None else (kind, rng.choice(list(kind)))
    return name, kind[name], 2 if kind is of_two else 1


def _loss_of(x: torch.Tensor, g: int) -> torch.Tensor:
    """A cross entropy of what has V columns, the mean of squares of anything else."""
    if x.ndim and x.shape[-1] == V and x.numel():
        flat = x.reshape(-1, V)
        target = (torch.arange(flat.shape[0], device=DEVICE) * 7 + g) % V
        target[::3] = -100
        return F.cross_entropy(
            flat.float(), target, reduction=("sum", "mean")[g % 2], label_smoothing=(0.0, 0.1)[g % 3 == 0]
        )
    return x.square().mean() if x.is_floating_point() and x.numel() else torch.zeros((), device=DEVICE)


def run(program: list[tuple[Step, int, int]], losses: list[int], first: Any, leaves: tuple) -> list[torch.Tensor]:
    """What the program saw, its loss, and the gradients of ``leaves``."""
    pool, seen = [first], []
    for (_, step, operands), i, j in program:
        out = step(*(pool[k % len(pool)] for k in (i, j)[:operands]))
        if isinstance(out, torch.Tensor):
            seen.append(out) if out.ndim == 0 or not out.is_floating_point() else pool.append(out)
    loss = sum(_loss_of(pool[k % len(pool)], k) for k in losses) + sum(s for s in seen if s.requires_grad)
    nothing = [torch.zeros_like(p) for p in leaves]
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True) if loss.requires_grad else nothing
    return [*(s.detach() for s in seen), loss.detach(), *grads]


@pytest.mark.parametrize("group", range(-(-PROGRAMS // GROUP)))
def test_a_program_sees_the_logits(group):
    compared = 0
    with served_by_kernels_or_references():
        for seed in range(group * GROUP, (group + 1) * GROUP):
            rng = random.Random(seed)
            looks = [] if seed % 4 else [(steps(rng, seed // 4), 0, 0)]  # at the logits, each in turn
            program = looks + [(steps(rng), rng.randrange(8), rng.randrange(8)) for _ in range(rng.randrange(1, 7))]
            losses = [rng.randrange(8) for _ in range(rng.randrange(1, 4))]
            torch.manual_seed(seed)
            head = nn.Linear(H, V, bias=seed % 2 == 0, device=DEVICE)
            hidden = torch.randn(B, T, H, device=DEVICE, requires_grad=True)
            leaves = (hidden, head.weight)
            try:
                expected = run(program, losses, head(hidden), leaves)
            except Exception:  # shapes that do not fit, changes that autograd refuses
                continue
            compared += 1
            try:
                found = run(program, losses, deferred(head, hidden, LossRequest()), leaves)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
            except Exception as error:
                told = f"program {seed}: {[name for (name, *_), _, _ in program]}, losses of {losses}"
                raise AssertionError(told) from error
    assert compared > GROUP // 4
