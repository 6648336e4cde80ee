"""The numbers in MEASURED.md: whole training steps of Hugging Face models, and the operators, each variant in a process of its own.

    python benchmarks/measure.py step --model llama-3.2-1b --batch 4 --seq 4096 --against stock,compile,upstream,ours
    python benchmarks/measure.py ops --against eager,compile,upstream,ours

``upstream`` is the published liger-kernel in a directory of its own: pip install --no-deps --target DIR liger-kernel==0.8.5, then
``--upstream-path DIR``. Times are medians of device time between CUDA events over calls with a cold L2; weights are random.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

MODELS = {
    "llama-3.2-1b": dict(
        model_type="llama", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, vocab_size=128256, tie_word_embeddings=True, rope_theta=500000.0, rms_norm_eps=1e-5, max_position_embeddings=131072),
    "llama-3-8b-4layers": dict(
        model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=128256, rope_theta=500000.0, rms_norm_eps=1e-5, max_position_embeddings=8192),
    "gemma-2b": dict(
        model_type="gemma", hidden_size=2048, intermediate_size=16384, num_hidden_layers=18, num_attention_heads=8, num_key_value_heads=1,
        head_dim=256, vocab_size=256000, hidden_act="gelu_pytorch_tanh", max_position_embeddings=8192),
    "tiny": dict(model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=500),
}  # fmt: skip


def timed(call, torch, repeats: int) -> float:
    """Median milliseconds of ``call`` on the device, or of the wall clock without one."""
    if not torch.cuda.is_available():
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)
    flush, times = torch.empty(1 << 28, dtype=torch.int8, device="cuda"), []
    for _ in range(repeats):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # about 1 ms, in which the host enqueues the call: its own cost stays out
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def step(a: argparse.Namespace) -> dict:
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = dict(MODELS[a.model])
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    model.config.use_cache = False
    if a.variant in ("upstream", "ours", "ours+compile"):
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    run = torch.compile(model) if a.variant.endswith("compile") else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    batches = [torch.randint(0, config.vocab_size, (a.batch, a.seq), device=device) for _ in range(4)]
    losses = []

    def one(i: int) -> None:
        loss = run(input_ids=batches[i % 4], labels=batches[i % 4]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    for i in range(a.warmup):
        one(i)
    sync, memory = (torch.cuda.synchronize, torch.cuda.max_memory_allocated) if device == "cuda" else (lambda: None, lambda: 0)
    sync()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for i in range(a.steps):
        one(i)
    sync()
    seconds = (time.perf_counter() - start) / a.steps
    return dict(
        tokens_per_s=round(a.batch * a.seq / seconds),
        step_ms=round(1e3 * seconds, 2),
        peak_gb=round(memory() / 1e9, 2),
        losses=[round(x.item(), 4) for x in losses[:4]],
    )


def operators(torch, variant: str):
    """name -> (make inputs, call) for one variant; the inputs' gradients are taken with respect to all that require them."""
    F = torch.nn.functional
    bf = dict(dtype=torch.bfloat16, device="cuda")
    randn = lambda *shape, scale=1.0: (scale * torch.randn(*shape, **bf)).requires_grad_()
    if variant == "ours":
        from liger_kernel import ops

        norm = lambda x, w: ops.rms_norm(x, w)
        glu = lambda a, b: ops.glu(a, b)
        rope = lambda q, k, cos, sin: ops.rope(q.transpose(1, 2), k.transpose(1, 2), cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2])
        ce, lce = (lambda z, y: ops.cross_entropy(z, y)), (lambda x, w, y: ops.linear_cross_entropy(x, w, y))
    elif variant == "upstream":
        from liger_kernel.transformers import functional as U

        norm = lambda x, w: U.liger_rms_norm(x, w, 1e-6)
        glu = U.liger_swiglu
        rope = lambda q, k, cos, sin: U.liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        ce, lce = U.liger_cross_entropy, U.liger_fused_linear_cross_entropy
    else:

        def norm(x, w):
            h = x.float()
            return w * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

        def rope(q, k, cos, sin):
            half = lambda x: torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)
            return tuple(x.transpose(1, 2) * cos[:, None] + half(x.transpose(1, 2)) * sin[:, None] for x in (q, k))

        glu = lambda a, b: F.silu(a) * b
        ce = lambda z, y: F.cross_entropy(z.float(), y)
        lce = lambda x, w, y: F.cross_entropy((x @ w.t()).float(), y)
        if variant == "compile":
            norm, rope, glu, ce, lce = (torch.compile(f, dynamic=False) for f in (norm, rope, glu, ce, lce))

    def labels(M, V):
        y = torch.randint(0, V, (M,), device="cuda")
        y[::17] = -100
        return y

    angle = lambda T, D: torch.randn(1, T, D // 2, **bf).repeat(1, 1, 2)
    cases = {f"rms_norm {M}x{N}": (norm, lambda M=M, N=N: (randn(M, N), randn(N))) for M, N in ((8192, 4096), (16384, 2048), (262144, 128))}
    cases["rope B4 T2048 H32/8 D128"] = (rope, lambda: (randn(4, 2048, 32, 128), randn(4, 2048, 8, 128), angle(2048, 128), angle(2048, 128)))
    cases["glu 8192x14336"] = (glu, lambda: (randn(8192, 14336), randn(8192, 14336)))
    cases["cross_entropy 8192x128256"] = (ce, lambda: (randn(8192, 128256), labels(8192, 128256)))
    for M, H, V in ((2048, 4096, 128256), (8192, 4096, 128256), (8192, 2048, 151936), (4096, 3072, 256000), (16384, 2048, 128256)):
        cases[f"linear_cross_entropy {M}x{H}x{V}"] = (lce, lambda M=M, H=H, V=V: (randn(M, H), randn(V, H, scale=0.02), labels(M, V)))
    return cases


def ops(a: argparse.Namespace) -> dict:
    import torch

    results = {}
    for name, (fn, make) in operators(torch, a.variant).items():
        if a.only and not name.startswith(a.only):
            continue
        args = make()
        leaves = [t for t in args if t.requires_grad]
        outs = fn(*args)
        grads = [torch.randn_like(o) for o in (outs if isinstance(outs, tuple) else (outs,))] if not name.startswith(("cross", "linear")) else None
        del outs

        def call(fn=fn, args=args, leaves=leaves, grads=grads):
            for t in leaves:
                t.grad = None
            outs = fn(*args)
            torch.autograd.backward(outs if isinstance(outs, tuple) else (outs,), grads)

        for _ in range(3):
            call()
        ms = timed(call, torch, 9)
        for t in leaves:
            t.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        start = time.perf_counter()
        for _ in range(20 if ms < 5 else 1):
            call()
        host = (time.perf_counter() - start) / (20 if ms < 5 else 1)
        torch.cuda.synchronize()
        results[name] = dict(ms=round(ms, 4), peak_mb=round(peak / 1e6), host_us=round(1e6 * host))
        del args, leaves, grads, call
        torch.cuda.empty_cache()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "ops"])
    parser.add_argument(
        "--against", default="stock,ours", help="variants, comma-separated: stock (step) or eager (ops), compile, upstream, ours, ours+compile (step)"
    )
    parser.add_argument("--model", choices=MODELS, default="llama-3.2-1b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--only", help="operators whose name begins like this")
    parser.add_argument("--upstream-path", help="directory that holds the published package")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--variant", help=argparse.SUPPRESS)  # a child process: one variant, JSON on its last line
    a = parser.parse_args()
    if a.variant:
        print(json.dumps({"step": step, "ops": ops}[a.what](a)))
        return
    results = {}
    for variant in a.against.split(","):
        env = dict(os.environ)
        if variant == "upstream":
            env["PYTHONPATH"] = f"{a.upstream_path}:{env.get('PYTHONPATH', '')}"
        done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--variant", variant], env=env, capture_output=True, text=True)
        results[variant] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else dict(error=done.stderr.strip().splitlines()[-1:])
        print(f"{variant:9}", json.dumps(results[variant]), flush=True)
    if a.json:
        with open(a.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
