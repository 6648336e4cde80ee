"""Benchmark cases of ``ops/norms``: shapes of real models, rivals and sweeps."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from liger_kernel.bench.measured import Measured, real
from liger_kernel.extra.group_norm import _tensors as _group_norm_tensors
from liger_kernel.extra.modulated_rms_norm import _tensors as _modulated_rms_norm_tensors
from liger_kernel.extra.poly_norm import _tensors as _poly_norm_tensors
from liger_kernel.extra.poly_norm import reference
from liger_kernel.ops._core.operator import T
from liger_kernel.ops.activations.glu import ACTS
from liger_kernel.ops.norms.fused_add_rms_norm import _tensors as _fused_add_rms_norm_tensors
from liger_kernel.ops.norms.gated_rms_norm import _tensors as _gated_rms_norm_tensors


def _fused_add_rms_norm_torch(x, residual, w=None, *, eps=1e-6, offset=0.0, casting="llama"):
    s = x if residual is None else x + residual
    return F.rms_norm(s, s.shape[-1:], w + offset if offset else w, eps), s


def _gated_rms_norm_torch(x, gate, w, *, eps=1e-6, act="silu", casting="llama"):
    """As the classes of transformers compute it; ``casting`` changes roundings, not the work."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    n = w.float() * h if casting == "gemma" else w * h.to(x.dtype)
    return (n * ACTS[act](gate.float())).to(x.dtype)


def _modulated_rms_norm_torch(x, scale, shift=None, w=None, *, eps=1e-6, offset=0.0, casting="llama"):
    lift = lambda t: t.unsqueeze(1) if 1 < t.ndim < x.ndim else t
    y = F.rms_norm(x, x.shape[-1:], w + offset if w is not None and offset else w, eps) * (1 + lift(scale))
    return y if shift is None else y + lift(shift)


MEASURED = {
    "dyt": Measured(
        cases=[
            real("llama-7b", x=T((8192, 4096)), alpha=T((1,)), gamma=T((4096,)), beta=T((4096,))),
            real("vit-large", x=T((64 * 196, 1024)), alpha=T((1,)), gamma=T((1024,)), beta=T((1024,))),
        ],
        rivals={
            "torch": lambda x, alpha, gamma, beta=None: torch.tanh(alpha * x) * gamma + (0.0 if beta is None else beta),
            "upstream": lambda functional, x, alpha, gamma, beta=None: functional.liger_dyt(x, alpha, gamma, beta),
        },
        sweeps={
            "hidden": (
                (1024, 2048, 4096, 8192, 16384),
                lambda n: dict(x=T(((1 << 25) // n, n)), alpha=T((1,)), gamma=T((n,)), beta=T((n,))),
            )
        },
    ),
    "fused_add_rms_norm": Measured(
        cases=[
            real("llama3-8b", **_fused_add_rms_norm_tensors(8192, 4096)),
            real("llama3-8b-no-residual", **dict(_fused_add_rms_norm_tensors(8192, 4096), residual=None)),
            real("row-of-8k", **_fused_add_rms_norm_tensors(2048, 8192)),
            real("row-of-16k", **_fused_add_rms_norm_tensors(1024, 16384)),
            real("row-of-64k", **_fused_add_rms_norm_tensors(256, 65536)),
        ],
        rivals={
            "torch": _fused_add_rms_norm_torch,
            "upstream": lambda functional, x, residual, w=None, *, eps=1e-6, offset=0.0, casting="llama": (
                functional.liger_fused_add_rms_norm(x, residual, w, eps, offset, casting)
            ),
        },
        sweeps={"hidden": ((1024, 2048, 4096, 8192, 16384), lambda n: _fused_add_rms_norm_tensors((1 << 25) // n, n))},
    ),
    "gated_rms_norm": Measured(
        cases=[
            real("qwen3-next-80b", **_gated_rms_norm_tensors(8192, 32, 128)),
            real("kimi-linear-48b", **dict(_gated_rms_norm_tensors(8192, 32, 128), act="sigmoid", casting="gemma")),
            real("row-of-4k", **_gated_rms_norm_tensors(4096, 4096)),
        ],
        rivals={"torch": _gated_rms_norm_torch},
        sweeps={"hidden": ((128, 256, 512, 1024, 2048, 4096), lambda n: _gated_rms_norm_tensors((1 << 25) // n, n))},
    ),
    "group_norm": Measured(
        cases=[
            real("sd-unet", **_group_norm_tensors(32, 8, 320, 64, 64)),
            real("sd-unet-deep", **_group_norm_tensors(32, 8, 1280, 8, 8)),
            real("vae-decoder", **_group_norm_tensors(32, 1, 128, 1024, 1024)),
            real("instance-norm", x=T((8, 64, 256, 256)), num_groups=64),
            real("wav2vec2", **_group_norm_tensors(512, 8, 512, 49999)),
        ],
        rivals={
            "torch": lambda x, num_groups, w=None, b=None, *, eps=1e-5: torch.group_norm(x, num_groups, w, b, eps),
            "upstream": lambda functional, x, num_groups, w=None, b=None, *, eps=1e-5: functional.liger_group_norm(
                x, w, b, x.shape[1], num_groups, eps
            ),
        },
        sweeps={"side": ((16, 32, 64, 128, 256), lambda n: _group_norm_tensors(32, 8, 256, n, n))},
    ),
    "layer_norm": Measured(
        cases=[
            real("gpt", x=T((8192, 4096)), w=T((4096,)), b=T((4096,))),
            real("siglip", x=T((16384, 1024)), w=T((1024,)), b=T((1024,)), eps=1e-6),
            real("dit", x=T((8, 1024, 1152)), w=None, eps=1e-6),
            real("row-of-8k", x=T((2048, 8192)), w=T((8192,)), b=T((8192,))),
            real("row-of-16k", x=T((1024, 16384)), w=T((16384,)), b=T((16384,))),
            real("row-of-64k", x=T((256, 65536)), w=T((65536,)), b=T((65536,))),
        ],
        rivals={
            "torch": lambda x, w=None, b=None, *, eps=1e-5: F.layer_norm(x, x.shape[-1:], w, b, eps),
            "upstream": lambda functional, x, w=None, b=None, *, eps=1e-5: functional.liger_layer_norm(x, w, b, eps),
        },
        sweeps={
            "hidden": ((1024, 2048, 4096, 8192, 16384), lambda n: dict(x=T(((1 << 25) // n, n)), w=T((n,)), b=T((n,))))
        },
    ),
    "modulated_rms_norm": Measured(
        cases=[
            real("dit-xl", **_modulated_rms_norm_tensors((32, 256, 1152), (32, 1152))),
            real("flux", x=T((2, 4608, 3072)), scale=T((2, 3072)), shift=T((2, 3072))),
            real("wan-14b", x=T((1, 32760, 5120)), scale=T((1, 5120)), shift=T((1, 5120))),
            real("row-of-8k", **_modulated_rms_norm_tensors((2, 1024, 8192), (2, 8192))),
            real("wan-ti2v", x=T((1, 8192, 3072)), scale=T((1, 8192, 3072)), shift=T((1, 8192, 3072))),
            real("token-4k", **_modulated_rms_norm_tensors((8192, 4096), (8192, 4096))),
        ],
        rivals={
            "torch": _modulated_rms_norm_torch,
            "upstream": lambda functional, x, scale, shift=None, w=None, *, eps=1e-6, offset=0.0, casting="llama": (
                functional.liger_modulated_rms_norm(x, w, scale, shift, eps, offset, casting)
            ),
        },
        sweeps={
            "hidden": ((1024, 2048, 4096, 8192), lambda n: _modulated_rms_norm_tensors((8, (1 << 22) // n, n), (8, n)))
        },
    ),
    "poly_norm": Measured(
        cases=[
            real("1b", **_poly_norm_tensors(8192, 5504)),
            real("row-of-28k", **_poly_norm_tensors(2048, 28672)),
            real("row-of-16k", **_poly_norm_tensors(2048, 16384)),
        ],
        rivals={
            "torch": reference,
            "upstream": lambda functional, x, w, b, *, eps=1e-6: functional.liger_poly_norm(x, w, b.reshape(()), eps),
        },
        sweeps={"hidden": ((1024, 2048, 4096, 8192, 16384), lambda n: _poly_norm_tensors((1 << 25) // n, n))},
    ),
    "rms_norm": Measured(
        cases=[
            real("llama3-8b", x=T((8192, 4096)), w=T((4096,))),
            real("qwen3-qk", x=T((4, 2048, 32, 128)), w=T((128,))),
            real("phi3", x=T((4096, 3072)), w=T((3072,))),
            real("row-of-64k", x=T((256, 65536)), w=T((65536,))),
            real("row-of-256k", x=T((64, 262144)), w=T((262144,))),
        ],
        rivals={
            "torch": lambda x, w=None, *, eps=1e-6, offset=0.0, casting="llama": F.rms_norm(
                x, x.shape[-1:], w + offset if offset else w, eps
            ),
            "upstream": lambda functional, x, w=None, *, eps=1e-6, offset=0.0, casting="llama": (
                functional.liger_rms_norm(x, w, eps, offset, casting)
            ),
        },
        sweeps={"hidden": ((1024, 2048, 4096, 8192, 16384), lambda n: dict(x=T(((1 << 25) // n, n)), w=T((n,))))},
    ),
}
