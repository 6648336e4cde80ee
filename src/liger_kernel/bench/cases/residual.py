"""Benchmark cases of residual streams, which are in ``extra``."""

from __future__ import annotations

import torch

from liger_kernel.bench.measured import Measured, Passing, real
from liger_kernel.extra.attn_res import _tensors as blocks
from liger_kernel.extra.mhc import _ALPHAS as ALPHAS
from liger_kernel.ops._core.operator import T

FP32 = torch.float32


def _attn_res_upstream(functional, v, w_query, w_norm, eps):
    return functional.liger_attn_res(v.movedim(-2, 0), w_query, w_norm, eps)


def _mhc_coeffs_upstream(functional, x, phi, b, *alphas, **options):
    alphas = (alpha.reshape(()) for alpha in alphas)
    return functional.liger_mhc_coeffs(x, phi, b, *alphas, allow_fp32=True, **options)


RESIDUALS = {
    "attn_res": Measured(
        cases=[real("kimi", **blocks(8192, 8, 4096)), real("wide", **blocks(1024, 12, 8192))],
        rivals={"upstream": Passing(_attn_res_upstream)},
    ),
    "mhc_coeffs": Measured(
        cases=[
            real("deepseek", x=T((8192, 4, 4096)), phi=T((16384, 24)), b=T((24,)), **ALPHAS),
            real("streams-8", x=T((2048, 8, 1024)), phi=T((8192, 80)), b=T((80,)), **ALPHAS),
        ],
        rivals={
            "upstream": Passing(
                _mhc_coeffs_upstream,
                "x phi b alpha_pre alpha_post alpha_res tmax=tmax rms_eps=rms_eps pre_eps=pre_eps "
                "sinkhorn_eps=sinkhorn_eps post_mult=post_mult",
            )
        },
    ),
    "mhc_pre": Measured(
        cases=[real("deepseek", x=T((8192, 4, 4096)), h_pre=T((8192, 4), dtype=FP32))], rivals={"upstream": "x h_pre"}
    ),
    "mhc_post_res": Measured(
        cases=[
            real(
                "deepseek",
                x=T((8192, 4, 4096)),
                f_out=T((8192, 4096)),
                h_post=T((8192, 4), dtype=FP32),
                h_res=T((8192, 4, 4), dtype=FP32),
            )
        ],
        rivals={"upstream": "x f_out h_post h_res"},
    ),
}
