"""Benchmark cases of ``ops/residual``: shapes of real models, rivals and sweeps."""

from __future__ import annotations

import torch

from liger_kernel.bench.measured import Measured, real
from liger_kernel.extra.mhc import _ALPHAS as _mhc_ALPHAS
from liger_kernel.ops._core.operator import T


def _mhc_upstream_coeffs(functional, **args):
    return functional.liger_mhc_coeffs(
        **{k: v.reshape(()) if k.startswith("alpha") else v for k, v in args.items()}, allow_fp32=True
    )


MEASURED = {
    "attn_res": Measured(
        cases=[
            real("kimi", v=T((8192, 8, 4096)), w_query=T((4096,)), w_norm=T((4096,))),
            real("wide", v=T((1024, 12, 8192)), w_query=T((8192,)), w_norm=T((8192,))),
        ],
        rivals={
            "upstream": lambda functional, v, w_query, w_norm, *, eps=1e-6: functional.liger_attn_res(
                v.movedim(-2, 0), w_query, w_norm, eps
            )
        },
    ),
    "mhc_coeffs": Measured(
        cases=[
            real("deepseek", x=T((8192, 4, 4096)), phi=T((16384, 24)), b=T((24,)), **_mhc_ALPHAS),
            real("streams-8", x=T((2048, 8, 1024)), phi=T((8192, 80)), b=T((80,)), **_mhc_ALPHAS),
        ],
        rivals={"upstream": _mhc_upstream_coeffs},
    ),
    "mhc_pre": Measured(
        cases=[real("deepseek", x=T((8192, 4, 4096)), h_pre=T((8192, 4), dtype=torch.float32))],
        rivals={"upstream": lambda functional, x, h_pre: functional.liger_mhc_pre(x, h_pre)},
    ),
    "mhc_post_res": Measured(
        cases=[
            real(
                "deepseek",
                x=T((8192, 4, 4096)),
                f_out=T((8192, 4096)),
                h_post=T((8192, 4), dtype=torch.float32),
                h_res=T((8192, 4, 4), dtype=torch.float32),
            )
        ],
        rivals={
            "upstream": lambda functional, x, f_out, h_post, h_res: functional.liger_mhc_post_res(
                x, f_out, h_post, h_res
            )
        },
    ),
}
