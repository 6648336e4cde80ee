"""Calls that an operator must refuse, by refused_calls.txt: for each operator, the arguments of a call, and
changes of these, each with the text of its ``ValueError`` behind the operator's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from liger_kernel.ops._core.operator import T
from liger_kernel.ops.losses.logprob_tiles import OUTPUTS
from liger_kernel.ops.recurrent.cu_seqlens import bounds  # noqa: F401  of a line of the text


def F(*shape: int) -> T:
    return T(shape)


def integers(*shape: int) -> T:
    return T(shape, dtype=torch.int64)


def constant(*shape: int) -> T:
    return T(shape, grad=False)


def _layer(name: str, N: int, K: int, r: int = 2) -> dict[str, T]:
    """A linear layer with an adapter."""
    return {name: F(N, K), f"{name}_a": F(r, K), f"{name}_b": F(N, r)}


_EXPERTS = dict(x=F(4, 8), gate_up=F(3, 16, 8), down=F(3, 8, 8), topk_index=integers(4, 2), topk_weight=F(4, 2))
_NO_DIM = torch.tensor(1.0)
_TEACHER = dict(teacher_x=constant(4, 6), teacher_w=constant(10, 6))
_TOP_K = dict(topk_log_probs=constant(4, 2), topk_indices=integers(4, 2), kind="forward_kl")


def refused() -> list[tuple[str, dict[str, Any], str]]:
    """Operator, arguments, and what is said of them."""
    calls, op, base = [], "", {}
    for line in Path(__file__).with_suffix(".txt").read_text().replace("{OUTPUTS}", str(OUTPUTS)).splitlines():
        if not line.startswith(" "):
            op, _, given = line.partition(": ")
            base = eval(f"dict({given})")
        else:
            new, _, error = line.strip().rpartition("-> ")
            calls.append((op, base | eval(f"dict({new})"), error))
    return calls
