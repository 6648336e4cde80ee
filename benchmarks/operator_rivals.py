"""``liger bench`` with more rivals and more to measure:

    python benchmarks/operator_rivals.py linear_cross_entropy --against eager,cce --cce-path DIR
    python benchmarks/operator_rivals.py dpo orpo grpo --against eager,upstream --upstream-path DIR
    python benchmarks/operator_rivals.py float8_casts --against eager,ao,compile
    python benchmarks/operator_rivals.py gated_delta_rule kda --against torch,fla --fla-path DIR

cce, quack, ao and fla are cut-cross-entropy, quack-kernels, torchao and fla-core, whose gated delta
rule refuses Hopper with Triton 3.4 to 3.7.0 (its issue 640). dpo, orpo and grpo are losses of
``chunked_loss`` as trainers call them; float8_amax, float8_casts, float8_product and glu_and_tops
the steps of a linear layer in FP8. All other flags are those of ``liger bench``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any


def _softmax_quack(quack: Any, x: Any, dim: int) -> Any:
    moved = x.movedim(dim, -1)
    return quack.softmax(moved.reshape(-1, x.shape[dim])).view_as(moved).movedim(-1, dim)


def _rms_norm_quack(quack: Any, x: Any, w: Any, eps: float) -> Any:
    return quack.rmsnorm(x.reshape(-1, x.shape[-1]), w, eps=eps).view(x.shape)


def register() -> None:
    """Add the rivals and what they are measured on to ``liger bench``."""
    from fp8_operators import CASTS
    from preference_losses import LOSSES

    from liger_kernel.bench import operators, rivals
    from liger_kernel.bench.cases.losses import HOW
    from liger_kernel.bench.measured import Passing

    rivals.PACKAGES |= {
        "cce": rivals.Package("cut_cross_entropy", "cut-cross-entropy"),
        "quack": rivals.Package("quack", "quack-kernels"),
        "ao": rivals.Package("torchao.float8", "torchao"),
        "fla": rivals.Package("fla.ops", "fla-core"),
    }
    rule = "q k v g beta initial_state=initial_state output_final_state=output_final_state cu_seqlens=cu_seqlens"
    rule = f"{rule} scale=scale use_qk_l2norm_in_kernel=qk_l2norm"
    loss = "ignore_index=ignore_index reduction=reduction"
    for name, package, rival in (
        ("softmax", "quack", Passing(_softmax_quack, "x dim")),
        ("rms_norm", "quack", Passing(_rms_norm_quack, "x w eps", "offset casting")),
        ("cross_entropy", "quack", Passing("cross_entropy", f"logits target {loss}", "gradient_in_forward")),
        (
            "linear_cross_entropy",
            "cce",
            Passing("linear_cross_entropy", f"x w target {loss} softcap=softcap", f"{HOW} accum_dtype"),
        ),
        ("gated_delta_rule", "fla", Passing("chunk_gated_delta_rule", rule, "recompute")),
        ("kda", "fla", Passing("chunk_kda", rule, "recompute")),
    ):
        op = operators.OPS[name]
        operators.OPS[name] = replace(op, rivals={**op.rivals, package: rival.of(op)})
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
