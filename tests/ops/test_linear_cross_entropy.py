"""What a case cannot say of the linear cross entropy: memory, autocast, labels, chunk sizes."""

import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liger_kernel.ops import cross_entropy, linear_cross_entropy
from liger_kernel.ops.linear_cross_entropy import auto_chunk_rows, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(M=12, H=16, V=50, dtype=torch.float32):
    torch.manual_seed(0)
    x, w = torch.randn(M, H, device=DEVICE, dtype=dtype, requires_grad=True), torch.randn(V, H, device=DEVICE, dtype=dtype, requires_grad=True)
    target = torch.randint(0, V, (M,), device=DEVICE)
    target[::3] = -100
    return x, w, target


class Watch(TorchDispatchMode):
    """The most elements of any floating-point tensor that an operation returned, and the number of matrix products."""

    def __init__(self):
        super().__init__()
        self.largest = self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += "mm" in func.__name__
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                self.largest = max(self.largest, t.numel())
        return out


@pytest.fixture
def watch(monkeypatch):
    """Watches the inside of the launchers, which dispatch modes around them do not see."""
    module, mode = importlib.import_module("liger_kernel.ops.linear_cross_entropy"), Watch()
    chunks = module._chunks

    def watched(*args, **kwargs):
        with mode:
            return chunks(*args, **kwargs)

    monkeypatch.setattr(module, "_chunks", watched)
    return mode


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_full_logits_never_exist(reduction, watch):
    x, w, target = inputs(M=40, H=4, V=60)
    linear_cross_entropy(x, w, target, reduction=reduction, chunk_rows=5).sum().backward()
    assert watch.largest == 5 * 60


def test_only_the_products_that_are_needed(watch):
    x, w, target = inputs()
    with torch.no_grad():
        linear_cross_entropy(x, w, target, chunk_rows=12)
    assert watch.products == 1
    linear_cross_entropy(x.detach(), w, target, chunk_rows=12)
    assert watch.products == 1 + 2
    linear_cross_entropy(x, w, target, chunk_rows=12)
    assert watch.products == 1 + 2 + 3


def test_autocast_computes_in_its_dtype_and_returns_gradients_in_the_leaves():
    x, w, target = inputs(H=64)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, w, target)
    loss.backward()
    assert loss.dtype == x.grad.dtype == w.grad.dtype == torch.float32
    x16, w16 = (t.detach().bfloat16().requires_grad_() for t in (x, w))
    expected = linear_cross_entropy(x16, w16, target)
    expected.backward()
    assert torch.equal(loss, expected) and torch.equal(w.grad, w16.grad.float()) and torch.equal(x.grad, x16.grad.float())


def test_mixed_dtypes_are_promoted():
    x, w, target = inputs()
    loss = linear_cross_entropy(x.detach().bfloat16(), w, target)
    torch.testing.assert_close(loss, reference(x.detach().bfloat16().float(), w, target))


@pytest.mark.parametrize("label", [-1, 50, 1 << 40])
def test_a_label_out_of_range_makes_the_loss_nan(label):
    x, w, target = inputs()
    target[1] = label
    assert linear_cross_entropy(x, w, target).isnan()
    per_token = linear_cross_entropy(x, w, target, reduction="none")
    assert per_token.isnan().nonzero().tolist() == [[1]]


def test_all_labels_ignored_gives_what_torch_gives():
    x, w, target = inputs()
    loss = linear_cross_entropy(x, w, torch.full_like(target, -100))
    loss.backward()
    assert loss.isnan() and not x.grad.any() and not w.grad.any()


def test_int32_labels():
    x, w, target = inputs()
    for fn, args in ((linear_cross_entropy, (x, w)), (cross_entropy, (x,))):
        target = target.clamp(max=args[-1].shape[-1] - 1)
        ours, expected = fn(*args, target.int(), stats=True), fn(*args, target, stats=True)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, expected))


def test_class_weights_get_no_gradient():
    """Served by kernels and by the reference."""
    x, _, target = inputs()
    for dtype in (torch.float32, torch.float64):
        class_weight = torch.ones(16, device=DEVICE, dtype=dtype, requires_grad=True)
        cross_entropy(x.to(dtype), target.clamp(max=15), class_weight).backward()
        assert class_weight.grad is None


def test_a_softcap_of_zero_is_not_none():
    """Everything is capped to 0: all classes are equally likely."""
    x, w, target = inputs()
    for loss in (cross_entropy(x, target.clamp(max=15), softcap=0.0).exp() - 16, linear_cross_entropy(x, w, target, softcap=0.0).exp() - 50):
        assert loss.abs() < 1e-3


@pytest.mark.parametrize("chunk_rows", [None, 20])
def test_fp16_sums_over_tokens_do_not_overflow(chunk_rows):
    """The sum over all tokens, before the mean is taken, is not a number of fp16; the mean is."""
    x = torch.full((200, 4), 600.0, dtype=torch.float16, device=DEVICE)
    w = torch.zeros(3, 4, dtype=torch.float16, device=DEVICE, requires_grad=True)
    linear_cross_entropy(x, w, torch.zeros(200, dtype=torch.int64, device=DEVICE), chunk_rows=chunk_rows).backward()
    assert w.grad.dtype == torch.float16
    torch.testing.assert_close(w.grad[:, 0].tolist(), [-400.0, 200.0, 200.0], rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    "M, H, V, itemsize, rows, chunks",
    [
        (8192, 4096, 128256, 2, 1344, 7),  # six, and a remainder of 128
        (2048, 4096, 128256, 2, 1024, 2),
        (16384, 4096, 32000, 2, 3264, 6),
        (900, 4096, 128256, 2, 900, 1),
        (1 << 20, 2048, 128256, 2, 4160, 253),  # fp32 sums, 1 GiB
        (32768, 2048, 128256, 4, 2048, 16),
    ],
)
def test_chunks_on_a_gpu(M, H, V, itemsize, rows, chunks):
    assert auto_chunk_rows(M, V, H, itemsize, True) == rows and -(-M // rows) == chunks


@pytest.mark.parametrize("M, V", [(1, 10), (1025, 128256), (100000, 32000), (0, 7)])
def test_chunks_on_a_cpu_take_64_mib(M, V):
    rows = auto_chunk_rows(M, V, 512, 4, False)
    assert 1 <= rows <= max(M, 1) and rows * V * 4 <= max(64 * V * 4, 1 << 26)


def test_a_16_bit_weight_gradient_is_rounded_few_times(watch, monkeypatch):
    """More chunks are summed in fp32, unless the caller says otherwise."""
    sums = []
    module = importlib.import_module("liger_kernel.ops.linear_cross_entropy")
    add = module._add_mm
    monkeypatch.setattr(module, "_add_mm", lambda total, *args, **kwargs: (sums.append(total.dtype), add(total, *args, **kwargs)))
    x, w, target = inputs(M=42, dtype=torch.bfloat16)
    for chunk_rows, dtype, number in ((42, torch.bfloat16, 1), (8, torch.bfloat16, 6), (7, torch.float32, 6)):
        sums.clear()
        linear_cross_entropy(x, w, target, chunk_rows=chunk_rows)
        assert sums == [dtype] * number
    sums.clear()
    linear_cross_entropy(x, w, target, chunk_rows=2, accum_dtype=torch.bfloat16)
    assert sums == [torch.bfloat16] * 21


def test_zero_tokens_give_zero_gradients():
    x, w, target = inputs()
    loss = linear_cross_entropy(x[:0], w, target[:0], reduction="sum")
    loss.backward()
    assert loss == 0 and not w.grad.any()


def test_gradients_are_not_stored_twice():
    """Autograd takes the gradient that the forward computed, it does not copy it."""
    x, w, target = inputs(V=5000)
    grads = []
    w.register_hook(lambda grad: grads.append(grad.data_ptr()))
    linear_cross_entropy(x, w, target).backward()
    assert w.grad.data_ptr() == grads[0]
