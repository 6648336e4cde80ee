"""Benchmark cases of ``ops/norms``, and of norms in ``extra``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from liger_kernel.bench.measured import Measured, Passing, real
from liger_kernel.extra.dyt import _tensors as dyt
from liger_kernel.extra.group_norm import _tensors as groups
from liger_kernel.extra.modulated_rms_norm import _tensors as modulated
from liger_kernel.extra.poly_norm import _tensors as powers
from liger_kernel.ops._core.operator import T
from liger_kernel.ops.activations.glu import ACTS
from liger_kernel.ops.norms.fused_add_rms_norm import _tensors as added
from liger_kernel.ops.norms.gated_rms_norm import _tensors as gated

HIDDEN = (1024, 2048, 4096, 8192, 16384)


def _rms_norm_torch(x, w, eps, offset):
    return F.rms_norm(x, x.shape[-1:], w + offset if w is not None and offset else w, eps)


def _fused_add_rms_norm_torch(x, residual, w, eps, offset):
    s = x if residual is None else x + residual
    return _rms_norm_torch(s, w, eps, offset), s


def _gated_rms_norm_torch(x, gate, w, eps, act, casting):
    """As the classes of transformers compute it; ``casting`` changes roundings, not the work."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    n = w.float() * h if casting == "gemma" else w * h.to(x.dtype)
    return (n * ACTS[act](gate.float())).to(x.dtype)


def _modulated_rms_norm_torch(x, scale, shift, w, eps, offset):
    lift = lambda t: t.unsqueeze(1) if 1 < t.ndim < x.ndim else t
    y = _rms_norm_torch(x, w, eps, offset) * (1 + lift(scale))
    return y if shift is None else y + lift(shift)


def _group_norm_upstream(functional, x, num_groups, w, b, eps):
    return functional.liger_group_norm(x, w, b, x.shape[1], num_groups, eps)


def affine(*shape: int, bias: bool = True) -> dict[str, T]:
    """x, a weight, and a bias."""
    found = dict(x=T(shape), w=T(shape[-1:]))
    return found | dict(b=T(shape[-1:])) if bias else found


NORMS = {
    "dyt": Measured(
        cases=[real("llama-7b", **dyt(8192, 4096)), real("vit-large", **dyt(64 * 196, 1024))],
        rivals={
            "torch": Passing(
                lambda x, alpha, gamma, beta: torch.tanh(alpha * x) * gamma + (0.0 if beta is None else beta)
            ),
            "upstream": "x alpha gamma beta",
        },
        sweeps={"hidden": (HIDDEN, lambda n: dyt((1 << 25) // n, n))},
    ),
    "fused_add_rms_norm": Measured(
        cases=[
            real("llama3-8b", **added(8192, 4096)),
            real("llama3-8b-no-residual", **added(8192, 4096) | {"residual": None}),
            real("row-of-8k", **added(2048, 8192)),
            real("row-of-16k", **added(1024, 16384)),
            real("row-of-64k", **added(256, 65536)),
        ],
        rivals={
            "torch": Passing(_fused_add_rms_norm_torch, ignored="casting"),
            "upstream": "x residual w eps offset casting",
        },
        sweeps={"hidden": (HIDDEN, lambda n: added((1 << 25) // n, n))},
    ),
    "gated_rms_norm": Measured(
        cases=[
            real("qwen3-next-80b", **gated(8192, 32, 128)),
            real("kimi-linear-48b", **gated(8192, 32, 128), act="sigmoid", casting="gemma"),
            real("row-of-4k", **gated(4096, 4096)),
        ],
        rivals={"torch": Passing(_gated_rms_norm_torch)},
        sweeps={"hidden": ((128, 256, 512, 1024, 2048, 4096), lambda n: gated((1 << 25) // n, n))},
    ),
    "group_norm": Measured(
        cases=[
            real("sd-unet", **groups(32, 8, 320, 64, 64)),
            real("sd-unet-deep", **groups(32, 8, 1280, 8, 8)),
            real("vae-decoder", **groups(32, 1, 128, 1024, 1024)),
            real("instance-norm", x=T((8, 64, 256, 256)), num_groups=64),
            real("wav2vec2", **groups(512, 8, 512, 49999)),
        ],
        rivals={"torch": Passing(torch.group_norm, "x num_groups w b eps"), "upstream": Passing(_group_norm_upstream)},
        sweeps={"side": ((16, 32, 64, 128, 256), lambda n: groups(32, 8, 256, n, n))},
    ),
    "layer_norm": Measured(
        cases=[
            real("gpt", **affine(8192, 4096)),
            real("siglip", **affine(16384, 1024), eps=1e-6),
            real("dit", x=T((8, 1024, 1152)), w=None, eps=1e-6),
            real("row-of-8k", **affine(2048, 8192)),
            real("row-of-16k", **affine(1024, 16384)),
            real("row-of-64k", **affine(256, 65536)),
        ],
        rivals={
            "torch": Passing(lambda x, w, b, eps: F.layer_norm(x, x.shape[-1:], w, b, eps)),
            "upstream": "x w b eps",
        },
        sweeps={"hidden": (HIDDEN, lambda n: affine((1 << 25) // n, n))},
    ),
    "modulated_rms_norm": Measured(
        cases=[
            real("dit-xl", **modulated((32, 256, 1152), (32, 1152))),
            real("flux", **modulated((2, 4608, 3072), (2, 3072)) | {"w": None}),
            real("wan-14b", **modulated((1, 32760, 5120), (1, 5120)) | {"w": None}),
            real("row-of-8k", **modulated((2, 1024, 8192), (2, 8192))),
            real("wan-ti2v", **modulated((1, 8192, 3072), (1, 8192, 3072)) | {"w": None}),
            real("token-4k", **modulated((8192, 4096), (8192, 4096))),
        ],
        rivals={
            "torch": Passing(_modulated_rms_norm_torch, ignored="casting"),
            "upstream": "x w scale shift eps offset casting",
        },
        sweeps={"hidden": (HIDDEN[:-1], lambda n: modulated((8, (1 << 22) // n, n), (8, n)))},
    ),
    "poly_norm": Measured(
        cases=[
            real("1b", **powers(8192, 5504)),
            real("row-of-28k", **powers(2048, 28672)),
            real("row-of-16k", **powers(2048, 16384)),
        ],
        rivals={
            "upstream": Passing(lambda functional, x, w, b, eps: functional.liger_poly_norm(x, w, b.reshape(()), eps))
        },
        sweeps={"hidden": (HIDDEN, lambda n: powers((1 << 25) // n, n))},
    ),
    "rms_norm": Measured(
        cases=[
            real("llama3-8b", **affine(8192, 4096, bias=False)),
            real("qwen3-qk", **affine(4, 2048, 32, 128, bias=False)),
            real("phi3", **affine(4096, 3072, bias=False)),
            real("row-of-64k", **affine(256, 65536, bias=False)),
            real("row-of-256k", **affine(64, 262144, bias=False)),
        ],
        rivals={"torch": Passing(_rms_norm_torch, ignored="casting"), "upstream": "x w eps offset casting"},
        sweeps={"hidden": (HIDDEN, lambda n: affine((1 << 25) // n, n, bias=False))},
    ),
}
