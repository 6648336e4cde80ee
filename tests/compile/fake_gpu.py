"""What a process does where kernels are compiled for sm_90 and their launches do nothing; prints
JSON.

``python fake_gpu.py train config.json 2x32 3x17``: kernels that training steps of so many tokens
compile, and find in the cache.
``counts``: all of the following. ``specialisations``: what common operators compile for one batch,
and for batches of several sizes. ``in_bf16``: operations on bf16 in kernels of rotations.
``launches``: what reaches the driver by Triton's own way and by ours.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import ClassVar

import torch
from triton import knobs
from triton.runtime import driver

from liger_kernel import ops, warmup
from liger_kernel.compile.launches import Mock, launches as launches_of
from liger_kernel.compile.targets import TARGETS, CompileOnly, compiling_for
from liger_kernel.ops._core import launch_config as _config, operator as _op

ARCH = "sm90"


class Gpu(CompileOnly):
    """Loads every kernel and runs none; tensors are the CPU's."""

    class utils:
        load_binary = staticmethod(lambda name, kernel, shared, device: (object(), object(), 32, 0, 1024))
        get_device_properties = staticmethod(lambda device: {"max_shared_mem": 232448})

    started: ClassVar[list] = []

    def launcher_cls(self, src, metadata):
        return lambda x, y, z, stream, function, packed, *args: self.started.append(
            (metadata.hash, (x, y, z), packed, args[3:])
        )


def use() -> None:
    """Operators take it for the GPU of this process, whatever PyTorch was built for."""
    driver.set_active(Gpu(TARGETS[ARCH]))
    _op._KERNEL_DEVICES.add("cpu")
    _op._stream, _op._hook = lambda device: 0, knobs.runtime.launch_enter_hook


def train(config: str, *steps: str) -> dict:
    """Kernels compiled and found in the cache by steps of ``batch x seq`` tokens."""
    import transformers

    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    seen = {True: 0, False: 0}
    knobs.compilation.listener = lambda *, cache_hit, **_: seen.update({cache_hit: seen[cache_hit] + 1})
    use()
    with _config.target(ARCH, TARGETS[ARCH].processors):
        found = warmup.configuration(config)
        model = transformers.AutoModelForCausalLM.from_config(found, dtype=torch.bfloat16).train()
        _apply_liger_kernel_to_instance(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in steps:
            tokens = torch.randint(0, 100, tuple(map(int, step.split("x"))))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
    return {"compiled": seen[False], "cached": seen[True]}


def launches() -> dict:
    """What reaches the driver by Triton's own way and by ours, for calls that differ in all that
    a kernel is specialised on."""
    use()
    bf16 = torch.randn(4096).bfloat16()
    calls = {
        "plain": (bf16[:512].view(8, 64), bf16[:64]),
        "one-row": (bf16[:64].view(1, 64), bf16[:64]),
        "odd": (bf16[:315].view(5, 63), bf16[:63]),
        "strided": (bf16[:640].view(8, 80)[:, :64], bf16[:64]),
        "fp32": (torch.randn(8, 64), bf16[:64]),
        "misaligned": (bf16[1:513].view(8, 64), bf16[:64]),
        "parameter": (bf16[:512].view(8, 64), torch.nn.Parameter(bf16[:64])),
        "no-weight": (bf16[:512].view(8, 64), None),
    }

    def started(direct: bool) -> list:
        _op._DIRECT = direct
        for x, w in calls.values():
            for _ in range(2):
                x, dy = x.detach().requires_grad_(), torch.ones_like(x)
                y = ops.rms_norm(x, w, eps=1e-5)
                torch.autograd.grad(y, x, dy.to(y.dtype))
        shown = lambda args: str([type(a).__name__ if isinstance(a, torch.Tensor) else a for a in args])
        seen = [(h, grid, shown(args)) for h, grid, _, args in Gpu.started]
        Gpu.started.clear()
        return seen

    with _config.target(ARCH, TARGETS[ARCH].processors):
        theirs, ours = started(False), started(True)
        for _ in range(2):
            ops.cross_entropy(torch.randn(4, 64), torch.zeros(4, dtype=torch.int64), ignore_index=-100)
    negative = sum(kernel.__module__.endswith(".cross_entropy_rows") for kernel, *_ in _op._compiled)
    kernels, direct = len({h for h, *_ in ours}), len(_op._compiled)
    return dict(negative=negative, same=theirs == ours, launches=len(ours), kernels=kernels, direct=direct)


def specialisations() -> dict:
    """Operator -> kernels compiled for one batch, and for batches of all sizes."""
    t = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
    ids = lambda *shape, high=1: torch.empty(shape, dtype=torch.int64, device="meta")
    w, b = t(64), t(64)
    angles = lambda T: (torch.empty(1, T, 8, dtype=torch.bfloat16, device="meta"),) * 2
    qk = lambda B, T: (t(B, T, 4, 16), t(B, T, 2, 16))
    xw, weights = lambda B, T: (t(B * T, 64), t(64, 64)), lambda M: torch.rand(M, 2, device="meta")
    calls = {
        "rms_norm": lambda B, T: ops.rms_norm(t(B, T, 64), w),
        "fused_add_rms_norm": lambda B, T: ops.fused_add_rms_norm(t(B, T, 64), t(B, T, 64), w),
        "gated_rms_norm": lambda B, T: ops.gated_rms_norm(t(B, T, 64), t(B, T, 64), w),
        "layer_norm": lambda B, T: ops.layer_norm(t(B, T, 64), w, b),
        "glu": lambda B, T: ops.glu(t(B, T, 64), t(B, T, 64)),
        "rope": lambda B, T: ops.rope(t(B, T, 4, 16).transpose(1, 2), t(B, T, 2, 16).transpose(1, 2), *angles(T)),
        "rope-positions": lambda B, T: ops.rope(*qk(B, T), *angles(50), ids(B, T), unsqueeze_dim=2),
        "softmax": lambda B, T: ops.softmax(t(B, T, 64)),
        "cross_entropy": lambda B, T: ops.cross_entropy(t(B * T, 64), ids(B * T), ignore_index=-B * T % 17),
        "cross_entropy-temperature": lambda B, T: ops.cross_entropy(t(B * T, 64), ids(B * T), logit_scale=1 / (B + T)),
        "linear_cross_entropy": lambda B, T: ops.linear_cross_entropy(*xw(B, T), ids(B * T), chunk_rows=4096),
        "qk_norm_rope": lambda B, T: ops.qk_norm_rope(*qk(B, T), t(16), t(16), *angles(T), unsqueeze_dim=2),
        "modulated_rms_norm": lambda B, T: ops.modulated_rms_norm(t(B, T, 64), t(B, 64), t(B, 64), w),
        "poly_norm": lambda B, T: ops.poly_norm(t(B, T, 64), t(3), t(1)),
        "relu_squared": lambda B, T: ops.relu_squared(t(B, T, 64)),
        "embedding": lambda B, T: ops.embedding(ids(B, T), t(50, 64)),
        "moe": lambda B, T: ops.moe(t(B * T, 64), t(4, 32, 64), t(4, 64, 16), ids(B * T, 2), weights(B * T)),
        "expert_load": lambda B, T: ops.expert_load(t(B * T, 16), ids(B * T, 2))[0],
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
            for kernel, args, meta in launches_of(functools.partial(step, name, *size), "meta"):
                *_, bind = kernel.device_caches[0]
                _, specialisation, options = bind(*args, **meta)
                found.add((kernel.fn.__module__, kernel.fn.__name__, str(specialisation), str(options)))
        return len(found)

    with compiling_for(ARCH):
        return {
            name: [count(name, [(2, 48)]), count(name, [(2, 48), (1, 1), (1, 16), (3, 5), (1, 331), (7, 64)])]
            for name in calls
        }


def in_bf16() -> list[str]:
    """The operations on bf16 of kernels that round as models do."""
    found: set[str] = set()

    def compile(kernel, grid, args, meta):
        given = [Mock(a) if isinstance(a, torch.Tensor) else a for a in args]
        ptx = kernel.warmup(*given, grid=(1,), **meta).asm["ptx"]
        found.update(line.split()[0] for line in ptx.splitlines() if ".bf16 " in line)

    t = lambda *shape: torch.empty(shape, device="meta", dtype=torch.bfloat16)
    q, w, angles = t(1, 2, 8, 64), t(64), t(1, 8, 32)
    with compiling_for(ARCH), _op.intercept_launches(compile):
        ops.rope(q, q, angles, angles, casting="none")
        ops.qk_norm_rope(q, q, w, w, angles, angles, rope_casting="none")
    return sorted(found)


def counts() -> dict:
    return {"specialisations": specialisations(), "in_bf16": in_bf16(), "launches": launches()}


if __name__ == "__main__":
    command, *args = sys.argv[1:]
    print(json.dumps(globals()[command](*args)))
