"""``python fake_gpu.py train config.json steps...``: a training process as a GPU of sm_90 would see it, of which launches do nothing; run by test_warmup.py.

``specialisations``: what the kernels of common operators are compiled for, over batches of several sizes. Prints JSON.
"""

from __future__ import annotations

import functools
import json
import sys

import torch
from triton import knobs
from triton.runtime import driver

from liger_kernel import ops, warmup
from liger_kernel.ops import _config, _op

ARCH = "sm90"


class Gpu(warmup.CompileOnly):
    """Loads every kernel and runs none; tensors are the CPU's."""

    class utils:
        load_binary = staticmethod(lambda name, kernel, shared, device: (object(), object(), 32, 0, 1024))
        get_device_properties = staticmethod(lambda device: {"max_shared_mem": 232448})

    def launcher_cls(self, src, metadata):
        return lambda *args: None


def train(config: str, *steps: str) -> dict:
    """Kernels compiled and found in the cache by steps of ``batch x seq`` tokens."""
    import transformers

    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    seen = {True: 0, False: 0}
    knobs.compilation.listener = lambda *, cache_hit, **_: seen.update({cache_hit: seen[cache_hit] + 1})
    driver.set_active(Gpu(warmup.TARGETS[ARCH]))
    _op._KERNEL_DEVICES.add("cpu")
    with _config.target(ARCH, warmup.TARGETS[ARCH].processors):
        model = transformers.AutoModelForCausalLM.from_config(warmup.configuration(config), dtype=torch.bfloat16).train()
        _apply_liger_kernel_to_instance(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in steps:
            tokens = torch.randint(0, 100, tuple(map(int, step.split("x"))))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
    return {"compiled": seen[False], "cached": seen[True]}


def specialisations() -> dict:
    """Operator -> kernels compiled for one batch, and for batches of all sizes."""
    t = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
    ids = lambda *shape, high=1: torch.empty(shape, dtype=torch.int64, device="meta")
    w, b = t(64), t(64)
    angles = lambda T: (torch.empty(1, T, 8, dtype=torch.bfloat16, device="meta"),) * 2
    calls = {
        "rms_norm": lambda B, T: ops.rms_norm(t(B, T, 64), w),
        "fused_add_rms_norm": lambda B, T: ops.fused_add_rms_norm(t(B, T, 64), t(B, T, 64), w),
        "layer_norm": lambda B, T: ops.layer_norm(t(B, T, 64), w, b),
        "glu": lambda B, T: ops.glu(t(B, T, 64), t(B, T, 64)),
        "rope": lambda B, T: ops.rope(t(B, T, 4, 16).transpose(1, 2), t(B, T, 2, 16).transpose(1, 2), *angles(T)),
        "rope-positions": lambda B, T: ops.rope(t(B, T, 4, 16), t(B, T, 2, 16), *angles(50), ids(B, T), unsqueeze_dim=2),
        "softmax": lambda B, T: ops.softmax(t(B, T, 64)),
        "cross_entropy": lambda B, T: ops.cross_entropy(t(B * T, 64), ids(B * T), ignore_index=-B * T % 17),
        "cross_entropy-temperature": lambda B, T: ops.cross_entropy(t(B * T, 64), ids(B * T), logit_scale=1 / (B + T)),
        "linear_cross_entropy": lambda B, T: ops.linear_cross_entropy(t(B * T, 64), t(64, 64), ids(B * T), chunk_rows=4096),
        "qk_norm_rope": lambda B, T: ops.qk_norm_rope(t(B, T, 4, 16), t(B, T, 2, 16), t(16), t(16), *angles(T), unsqueeze_dim=2),
        "modulated_rms_norm": lambda B, T: ops.modulated_rms_norm(t(B, T, 64), t(B, 64), t(B, 64), w),
        "poly_norm": lambda B, T: ops.poly_norm(t(B, T, 64), t(3), t(1)),
        "relu_squared": lambda B, T: ops.relu_squared(t(B, T, 64)),
        "embedding": lambda B, T: ops.embedding(ids(B, T), t(50, 64)),
        "moe": lambda B, T: ops.moe(t(B * T, 64), t(4, 32, 64), t(4, 64, 16), ids(B * T, 2), torch.rand(B * T, 2, device="meta")),
        "attn_res": lambda B, T: ops.attn_res(t(B, T, 3, 64), t(64), w),
        "jsd": lambda B, T: ops.jsd(t(B * T, 64), t(B * T, 64)),
    }

    def step(name: str, B: int, T: int) -> None:
        outs = calls[name](B, T)
        outs = [o for o in (outs if isinstance(outs, tuple) else (outs,)) if o.requires_grad]
        torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])

    def count(name: str, sizes: list[tuple[int, int]]) -> int:
        found = set()
        for size in sizes:
            for kernel, args, meta in warmup.launches(functools.partial(step, name, *size), "meta"):
                *_, bind = kernel.device_caches[0]
                _, specialisation, options = bind(*args, **meta)
                found.add((kernel.fn.__module__, kernel.fn.__name__, str(specialisation), str(options)))
        return len(found)

    with warmup.compiling_for(ARCH):
        return {name: [count(name, [(2, 48)]), count(name, [(2, 48), (1, 1), (1, 16), (3, 5), (1, 331), (7, 64)])] for name in calls}


if __name__ == "__main__":
    command, *args = sys.argv[1:]
    print(json.dumps(globals()[command](*args)))
