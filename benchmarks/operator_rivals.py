"""``liger bench`` with more rivals and more to measure:

    python benchmarks/operator_rivals.py linear_cross_entropy --against eager,cce --cce-path DIR
    python benchmarks/operator_rivals.py dpo orpo grpo --against eager,upstream --upstream-path DIR
    python benchmarks/operator_rivals.py float8_casts --against eager,ao,compile

cce, quack and ao are cut-cross-entropy, quack-kernels and torchao. dpo, orpo and grpo are losses of
``chunked_loss`` as trainers call them; float8_amax, float8_casts, float8_product and glu_and_tops
the steps of a linear layer in FP8. All other flags are those of ``liger bench``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any


def _softmax_quack(quack: Any, x: Any, *, dim: int = -1) -> Any:
    moved = x.movedim(dim, -1)
    return quack.softmax(moved.reshape(-1, x.shape[dim])).view_as(moved).movedim(-1, dim)


def _rms_norm_quack(
    quack: Any, x: Any, w: Any = None, *, eps: float = 1e-6, offset: float = 0.0, casting: str = "llama"
) -> Any:
    return quack.rmsnorm(x.reshape(-1, x.shape[-1]), w, eps=eps).view(x.shape)


def _cross_entropy_quack(quack: Any, logits: Any, target: Any, class_weight: Any = None, **options: Any) -> Any:
    from liger_kernel.bench.cases.losses import plain

    theirs = {name: options.pop(name) for name in ("ignore_index", "reduction") if name in options}
    options.pop("gradient_in_forward", None)
    plain(options | dict(class_weight=class_weight))
    return quack.cross_entropy(logits, target, **theirs)


def _linear_cross_entropy_cce(
    cce: Any, x: Any, w: Any, target: Any, bias: Any = None, class_weight: Any = None, **options: Any
) -> Any:
    from liger_kernel.bench.cases.losses import OURS, plain

    theirs = {name: options.pop(name) for name in ("ignore_index", "reduction", "softcap") if name in options}
    plain({k: v for k, v in options.items() if k not in OURS} | dict(class_weight=class_weight, bias=bias))
    return cce.linear_cross_entropy(x, w, target, **theirs)


def register() -> None:
    """Add the rivals and what they are measured on to ``liger bench``."""
    from fp8_operators import CASTS
    from preference_losses import LOSSES

    from liger_kernel.bench import flags, operators, rivals

    flags.MOVED_OPERATORS.clear()
    rivals.PACKAGES |= {
        "cce": rivals.Package("cut_cross_entropy", "cut-cross-entropy"),
        "quack": rivals.Package("quack", "quack-kernels"),
        "ao": rivals.Package("torchao.float8", "torchao"),
    }
    for name, package, rival in (
        ("softmax", "quack", _softmax_quack),
        ("rms_norm", "quack", _rms_norm_quack),
        ("cross_entropy", "quack", _cross_entropy_quack),
        ("linear_cross_entropy", "cce", _linear_cross_entropy_cce),
    ):
        op = operators.OPS[name]
        operators.OPS[name] = replace(op, rivals={**op.rivals, package: rival})
    operators.OPS |= LOSSES | CASTS
    operators.ENTRY = (str(Path(__file__).resolve()),)


if __name__ == "__main__":
    register()
    from liger_kernel.bench import operators
    from liger_kernel.train.mistakes import UserError

    try:
        sys.exit(operators.main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"operator_rivals.py: {error}")
