"""Forwards of models whose source is rewritten where one kernel does several of its steps.

    patterns.py      a small matcher of syntax: statements in, statements out
    fused_norms.py   a residual addition with the norm after it; norms of heads with their rotation
    linear_calls.py  linear layers with the same input; experts
    known_masks.py   masks for positions that the call itself knows
    source.py        reads the source of a forward, applies these rules, compiles the result

Every rule is safe for every module: the new functions decide at each call, and do what the source
did if a kernel cannot run.
"""

from liger_kernel.transformers.rewrite.source import MASKS, NORMS, PROJECTIONS, fused, parts_in, seeing

__all__ = ["MASKS", "NORMS", "PROJECTIONS", "fused", "parts_in", "seeing"]
