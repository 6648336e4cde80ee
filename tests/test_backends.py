"""Operators by the published names of implementations: a name is respected or refused."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE, assert_beside, needs_kernels

import liger_kernel
from liger_kernel import backends, functional

TRITON = backends.TRITON


_SEED = torch.Generator(DEVICE).manual_seed(0)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE, generator=_SEED)


def log_probs(*shape: int) -> torch.Tensor:
    return draw(*shape).log_softmax(-1)


def _rms(x, w, eps, offset):
    return F.rms_norm(x, x.shape[-1:], w + offset, eps)


def _half_turn(t):
    return torch.cat((-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]), -1)


def _turned(t):
    cos, sin = (table.to(t.dtype)[:, None] for table in (ANGLES.cos(), ANGLES.sin()))
    return t * cos + _half_turn(t) * sin


def _jsd(q, p):
    m = torch.logaddexp(q, p) - torch.tensor(2.0, dtype=q.dtype).log()
    return sum(F.kl_div(m, t, reduction="batchmean", log_target=True) for t in (p, q)) / 2


ANGLES = torch.cat((draw(1, 5, 4),) * 2, -1)
TARGET = torch.tensor([0, 3, -100, 10, 7, 7], device=DEVICE)
# name -> differentiable arguments, further ones, and PyTorch's own words for it
CALLS = {
    "rms_norm": ((draw(5, 24), draw(24)), dict(eps=1e-5, offset=1.0), lambda x, w: _rms(x, w, 1e-5, 1.0)),
    "fused_add_rms_norm": (
        (draw(5, 24), draw(5, 24), draw(24)),
        {},
        lambda x, r, w: (_rms(x + r, w, 1e-6, 0.0), x + r),
    ),
    "layer_norm": ((draw(5, 24), draw(24), draw(24)), {}, lambda x, w, b: F.layer_norm(x, (24,), w, b, 1e-6)),
    "softmax": ((draw(5, 24),), {}, lambda x: x.softmax(-1)),
    "swiglu": (
        (draw(5, 24), draw(5, 24)),
        dict(gate_multiplier=0.5, down_multiplier=3.0),
        lambda a, b: F.silu(a * 0.5) * b * 3,
    ),
    "geglu": ((draw(5, 24), draw(5, 24)), {}, lambda a, b: F.gelu(a, approximate="tanh") * b),
    "rope": (
        (draw(2, 4, 5, 8), draw(2, 2, 5, 8)),
        dict(cos=ANGLES.cos(), sin=ANGLES.sin()),
        lambda *qk: tuple(map(_turned, qk)),
    ),
    "jsd": ((log_probs(5, 24), log_probs(5, 24)), {}, _jsd),
    "kl_div": (
        (log_probs(5, 24),),
        dict(y_true=(P := draw(5, 24).softmax(-1))),
        lambda x: F.kl_div(x, P.to(x.dtype), reduction="batchmean"),
    ),
    "cross_entropy": (
        (draw(6, 11),),
        dict(target=TARGET, label_smoothing=0.1),
        lambda x: F.cross_entropy(x, TARGET, label_smoothing=0.1),
    ),
    "fused_linear_cross_entropy": (
        (draw(6, 8), draw(11, 8)),
        dict(target=TARGET, reduction="sum"),
        lambda x, w: F.cross_entropy(x @ w.t(), TARGET, reduction="sum"),
    ),
    "fused_linear_jsd": (
        (draw(6, 8), draw(11, 8), draw(6, 8), draw(11, 8)),
        dict(temperature=2.0),
        lambda x, w, tx, tw: _jsd(*((a @ b.t() / 2).log_softmax(-1) for a, b in ((x, w), (tx.detach(), tw.detach())))),
    ),
}


@needs_kernels
@pytest.mark.parametrize("impl", ["triton", "torch", None])
@pytest.mark.parametrize("name", functional.__all__)
def test_beside_pytorch(name, impl):
    tensors, more, stock = CALLS[name]
    more = {k: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in more.items()}
    learn = 2 if name == "fused_linear_jsd" else len(tensors)  # the teacher learns nothing

    def ours(**leaves):
        out = getattr(functional, name)(*leaves.values(), **more, impl=impl)
        return out[0] if "cross_entropy" in name and isinstance(out, tuple) else out

    args = {f"x{i}": t.float().requires_grad_(i < learn) for i, t in enumerate(tensors)}
    assert_beside(ours, lambda **leaves: stock(*leaves.values()), args)


def test_a_named_implementation_runs(monkeypatch):
    """By argument, by environment, for one operator or all, by ``set_impl``, in this order."""
    x = torch.randn(3, 8, device=DEVICE)
    ran = []
    monkeypatch.setitem(backends._REGISTRY, "softmax", dict(backends._REGISTRY["softmax"]))
    for name in ("here", "there", "elsewhere", "everywhere"):
        backends.register_impl("softmax", impl_name=name)(lambda x, name=name: ran.append(name) or x)
    try:
        liger_kernel.set_impl("everywhere")
        assert liger_kernel.get_impl() == liger_kernel.get_backend() == "everywhere"
        functional.softmax(x)
        monkeypatch.setenv("LIGER_KERNEL_IMPL", "elsewhere")
        functional.softmax(x)
        monkeypatch.setenv("LIGER_KERNEL_IMPL_SOFTMAX", "there")
        functional.softmax(x)
        functional.softmax(x, impl="here")
        functional.softmax(x, backend="here")
    finally:
        liger_kernel.set_impl(None)
    assert ran == ["everywhere", "elsewhere", "there", "here", "here"]


def test_what_is_preferred_runs_where_nobody_names_one(monkeypatch):
    monkeypatch.setitem(backends._REGISTRY, "softmax", dict(backends._REGISTRY["softmax"]))

    class Zero(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.zeros_like(x)

    register = functools.partial(backends.register_op, "softmax", backend="zero", preference_rank=1)
    register()(Zero)
    assert backends.available_impls("softmax")[0] == "zero"
    assert backends.resolve_impl("softmax").autograd_function is Zero
    assert not functional.softmax(torch.ones(2, 3)).any()
    register(capability=backends.Capability(modules=["no_such_module"]))(Zero)
    assert functional.softmax(torch.ones(2, 3)).any()


def test_what_cannot_run_is_refused():
    x = torch.randn(3, 8, device=DEVICE)
    for name in ("cutile", "nvidia-cutedsl", "ascend-triton", "tritn"):
        with pytest.raises(backends.ImplNotAvailableError, match="softmax: impl must be one of"):
            functional.softmax(x, impl=name)
    with pytest.raises(backends.ImplNotAvailableError, match=r"mode of .* must be one of"):
        functional.softmax(x, mode="chunked")
    with pytest.raises(backends.ImplNotAvailableError):
        functional.softmax(x.double(), impl="triton")
    with pytest.raises(backends.NoImplAvailableError, match="op_name must be one of"):
        backends.dispatch("no_such_operator", x)
    assert functional.softmax(x.double()).dtype == torch.float64


def test_names_of_implementations():
    importlib.import_module("liger_kernel.backends.dispatch")  # a submodule and a function
    assert backends.all_impls("rms_norm") == [TRITON, "torch"]
    assert backends.available_impls("rms_norm")[-1] == "torch"
    assert backends.set_backend is backends.set_impl
    assert backends.BackendNotAvailableError is backends.ImplNotAvailableError
    assert set(functional.__all__) <= set(backends.all_registered_ops())
    assert liger_kernel.available_impls("rms_norm") == backends.available_impls("rms_norm")
    assert liger_kernel.functional is functional
    x, w = torch.randn(3, 8), torch.randn(8)
    found = backends.dispatch("rms_norm", x, w, 1e-5, 1.0, "gemma", False, None, impl="torch")
    torch.testing.assert_close(found, _rms(x, w, 1e-5, 1.0))


def test_capabilities(monkeypatch):
    assert backends.Capability().is_satisfied()
    assert "no_such_module" in backends.Capability(modules=["torch", "no_such_module"]).reason_if_unsatisfied()
    assert backends.Capability(predicate=lambda: False).reason_if_unsatisfied()
    assert "ZeroDivisionError" in backends.Capability(predicate=lambda: 1 / 0).reason_if_unsatisfied()
    if not torch.cuda.is_available():
        assert "no CUDA" in backends.Capability(requires_cuda=True).reason_if_unsatisfied()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert backends.Capability(min_cc=(9, 0), max_cc=(9, 0)).is_satisfied()
    assert backends.Capability(min_cc=(10, 0)).reason_if_unsatisfied() == "the GPU must be at least sm_100, got sm_90"
    assert backends.Capability(max_cc=(8, 9)).reason_if_unsatisfied() == "the GPU must be at most sm_89, got sm_90"


def test_a_fallback_is_said_once_or_raised(monkeypatch):
    with pytest.warns(backends.LigerImplFallbackWarning, match="softmax: mine is left to torch: a dtype"):
        backends.emit_fallback_warning("softmax", "mine", "torch", "a dtype")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backends.emit_fallback_warning("softmax", "mine", "torch", "a dtype")
    monkeypatch.setenv("LIGER_KERNEL_STRICT", "1")
    with pytest.raises(backends.ImplNotAvailableError):
        backends.emit_fallback_warning("softmax", "mine", "torch", "a dtype")


def test_no_kernels_at_all():
    """LIGER_KERNEL_IMPL=torch leaves everything to PyTorch, with no warning."""
    code = (
        "import warnings; warnings.simplefilter('error'); from liger_kernel.ops._core import operator; "
        "import torch; assert not operator.use_kernels(torch.ones(1))"
    )
    env = os.environ | {"LIGER_KERNEL_IMPL": "torch", "TRITON_INTERPRET": "1"}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


def test_sets_of_operators():
    from liger_kernel.ops.backends import IMPL_REGISTRY, ImplInfo, register_impl

    from liger_kernel.ops import LIGER_KERNEL_IMPL_ENV, select_impl

    assert LIGER_KERNEL_IMPL_ENV == "LIGER_KERNEL_IMPL" and select_impl("cuda") is None
    assert select_impl("cuda", "triton") is None
    with pytest.raises(RuntimeError, match=r"must be one of .* got 'cutile'"):
        select_impl("cuda", "cutile")
    info = ImplInfo("mine", ("npu", "xpu"), ("npu",), "my.module")
    register_impl(info)
    try:
        assert select_impl("npu") is select_impl("xpu", "mine") is info and select_impl("xpu") is None
        with pytest.raises(RuntimeError, match="mine is for"):
            select_impl("cuda", "mine")
    finally:
        del IMPL_REGISTRY["mine"]
    with pytest.raises(ValueError, match="default_devices"):
        ImplInfo("mine", ("npu",), ("cuda",), "my.module")


def test_native_kernels_are_not_here():
    from liger_kernel.ops.configure import FusedLinearCrossEntropyConfig, MoEConfig, configure
    from liger_kernel.transformers.moe import LigerExpertParallelFusedMoe

    with pytest.warns(UserWarning, match="no native kernels"):
        assert configure(flsce=FusedLinearCrossEntropyConfig(1, 2, 3), moe=MoEConfig(1, 2, 3, 4, 5, 6)) is False

    with pytest.raises(backends.ImplNotAvailableError, match="NVSHMEM"):
        LigerExpertParallelFusedMoe(SimpleNamespace(size=lambda: 2))
    x, gate, up, down = draw(5, 8), draw(3, 4, 8), draw(3, 4, 8), draw(3, 8, 4)
    index, weight = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]], device=DEVICE), draw(5, 2)
    out = LigerExpertParallelFusedMoe()(x, index.int(), weight, gate, up, down, 3)
    up_x = lambda w: torch.einsum("th,eih->eti", x, w)
    each = torch.einsum("eti,ehi->teh", F.silu(up_x(gate)) * up_x(up), down)
    torch.testing.assert_close(out, (each.gather(1, index[..., None].expand(-1, -1, 8)) * weight[..., None]).sum(1))
