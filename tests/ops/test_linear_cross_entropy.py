"""What a case cannot say of the linear cross entropy: memory, autocast, labels, chunk sizes."""

import importlib

import pytest
import torch
from chunk_loop import multiplications, watch_loop, watch_products
from devices import DEVICE
from torch._subclasses.fake_tensor import FakeTensorMode
from watching import Watch, calls_of

from liger_kernel.nn import LigerFusedLinearCrossEntropyLoss
from liger_kernel.ops import cross_entropy, linear_cross_entropy
from liger_kernel.ops.losses.chunks import Kept, auto_chunk_rows
from liger_kernel.ops.losses.linear_cross_entropy import chunk_rows_of
from liger_kernel.testing import assert_same_bits


def inputs(M=12, H=16, V=50, dtype=torch.float32):
    torch.manual_seed(0)
    x, w = (torch.randn(n, H, device=DEVICE, dtype=dtype, requires_grad=True) for n in (M, V))
    target = torch.randint(0, V, (M,), device=DEVICE)
    target[::3] = -100
    return x, w, target


@pytest.fixture
def watch(monkeypatch):
    """Watches the inside of the chunk loop, which dispatch modes around launchers do not see."""
    mode = Watch()
    watch_loop(monkeypatch, mode)
    return mode


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_full_logits_never_exist(reduction, watch):
    x, w, target = inputs(M=40, H=4, V=60)
    linear_cross_entropy(x, w, target, reduction=reduction, chunk_rows=5).sum().backward()
    assert watch.largest == 5 * 60


def test_only_the_products_that_are_needed(watch):
    x, w, target = inputs()
    with torch.no_grad():
        linear_cross_entropy(x, w, target, chunk_rows=6)
    assert watch.products == 2 * 1
    linear_cross_entropy(x.detach(), w, target, chunk_rows=6)
    assert watch.products == 2 * (1 + 2)
    linear_cross_entropy(x, w, target, chunk_rows=6)
    assert watch.products == 2 * (1 + 2 + 3)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_frozen_head_with_adapters_makes_nothing_of_its_size(reduction, watch):
    """Neither its sum with adapters, nor a gradient; four thin products more than frozen."""
    x, w, target = inputs(M=20, H=16, V=60)
    xa, wb = (torch.randn(n, 2, device=DEVICE, requires_grad=True) for n in (20, 60))
    linear_cross_entropy(x, w.detach(), target, xa=xa, wb=wb, reduction=reduction, chunk_rows=5).sum().backward()
    assert watch.largest == max(5 * 60, x.numel()) < w.numel()
    # of logits, which are computed twice where a loss is not reduced, and gradients
    assert watch.products == 4 * (2 + 3 + (2 if reduction == "none" else 0))
    assert w.grad is None and x.grad is not None


def test_autocast_computes_in_its_dtype_and_returns_gradients_in_the_leaves():
    x, w, target = inputs(H=64)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, w, target)
    loss.backward()
    assert loss.dtype == x.grad.dtype == w.grad.dtype == torch.float32
    x16, w16 = (t.detach().bfloat16().requires_grad_() for t in (x, w))
    expected = linear_cross_entropy(x16, w16, target)
    expected.backward()
    found = dict(loss=loss.detach(), dx=x.grad, dw=w.grad)
    assert_same_bits(found, dict(loss=expected.detach(), dx=x16.grad.float(), dw=w16.grad.float()))


def test_a_softcap_of_zero_is_not_none():
    """Everything is capped to 0: all classes are equally likely."""
    x, w, target = inputs()
    assert cross_entropy(x, target.clamp(max=15), softcap=0.0).exp().item() == pytest.approx(16)
    assert linear_cross_entropy(x, w, target, softcap=0.0).exp().item() == pytest.approx(50)


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
        (8192, 4096, 128256, 2, 2048, 4),
        (8192, 8192, 128256, 2, 2048, 4),
        (8192, 2048, 151936, 2, 1024, 8),
        (2048, 4096, 128256, 2, 1024, 2),
        (16384, 4096, 32000, 2, 3584, 5),
        (900, 4096, 128256, 2, 900, 1),
        (1 << 20, 2048, 128256, 2, 4096, 256),  # fp32 sums, 1 GiB
        (32768, 2048, 128256, 4, 2048, 16),
    ],
)
def test_chunks_on_a_gpu(M, H, V, itemsize, rows, chunks):
    assert auto_chunk_rows(M, V, H, itemsize, True) == rows and -(-M // rows) == chunks


def test_chunks_that_take_so_much_memory():
    x, w = torch.empty(8192, 4096, device="meta"), torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta")
    low = auto_chunk_rows(32768, 32000, 8192, 2, True, low=True)
    assert low == 6656 < auto_chunk_rows(32768, 32000, 8192, 2, True) + 1 and chunk_rows_of("auto", x, w) is None
    assert [chunk_rows_of(n, x.bfloat16(), w) for n in (1, 10**9, 2 * 10**9)] == [128, 3840, 7680]
    assert chunk_rows_of(10**9, x, w) == 1920  # in fp32
    assert chunk_rows_of("low", *inputs()[:2]) == 12


def test_chunks_of_a_frozen_weight_are_as_small_as_is_quick(monkeypatch):
    assert auto_chunk_rows(32768, 128256, 4096, 2, True, frozen=True) == 1024
    assert auto_chunk_rows(900, 128256, 4096, 2, True, frozen=True) == 900
    module = importlib.import_module("liger_kernel.ops.losses.linear_cross_entropy")
    asked, (x, w, target) = calls_of(monkeypatch, module, "auto_chunk_rows"), inputs()
    for each in (w.detach(), w):
        linear_cross_entropy(x, each, target).backward()
    assert [more.get("frozen", False) for _, more in asked] == [True, False]


@pytest.mark.parametrize("M, V", [(1, 10), (1025, 128256), (100000, 32000), (0, 7)])
def test_chunks_on_a_cpu_take_64_mib(M, V):
    rows = auto_chunk_rows(M, V, 512, 4, False)
    assert 1 <= rows <= max(M, 1) and rows * V * 4 <= max(64 * V * 4, 1 << 26)


def test_a_16_bit_weight_gradient_is_rounded_few_times(watch, monkeypatch):
    """More chunks are summed in fp32, unless the caller says otherwise."""
    added = calls_of(monkeypatch, importlib.import_module("liger_kernel.ops.losses.chunks"), "add_mm")
    x, w, target = inputs(M=42, dtype=torch.bfloat16)
    bf16 = torch.bfloat16
    for chunk_rows, asked, dtype in ((21, None, bf16), (8, None, bf16), (6, None, torch.float32), (2, bf16, bf16)):
        added.clear()
        linear_cross_entropy(x, w, target, chunk_rows=chunk_rows, accum_dtype=asked)
        sums = [args[0].dtype for args, _ in added if args[0].shape == w.shape]
        assert sums == [dtype] * -(-42 // chunk_rows)


def test_gradients_are_not_stored_twice():
    """Autograd takes the gradient that the forward computed, it does not copy it."""
    x, w, target = inputs(V=5000)
    grads = []
    w.register_hook(lambda grad: grads.append(grad.data_ptr()))
    linear_cross_entropy(x, w, target).backward()
    assert w.grad.data_ptr() == grads[0]


@pytest.mark.parametrize("chunk_rows", [5, 100])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_tokens_take_part_in_no_product(chunk_rows, reduction, monkeypatch):
    """Half of the rows, the same results; the others may even be NaN."""
    x, w, target = inputs(M=40)
    target[1::2] = -100
    seen = watch_products(monkeypatch)
    options = dict(reduction=reduction, chunk_rows=chunk_rows)
    dense = torch.autograd.grad(linear_cross_entropy(x, w, target, **options).sum(), (x, w))
    work = multiplications(seen)
    seen.clear()
    broken = x.detach().masked_fill((target == -100)[:, None], float("nan")).requires_grad_()
    compact = torch.autograd.grad(linear_cross_entropy(broken, w, target, compact=True, **options).sum(), (broken, w))
    assert multiplications(seen) <= 0.5 * work
    for a, b in zip(dense, compact):
        torch.testing.assert_close(a, b)


def test_labels_counted_early_need_no_second_count():
    x, w, target = inputs(M=40)
    kept = Kept(target)
    torch.testing.assert_close(linear_cross_entropy(x, w, target, compact=kept), linear_cross_entropy(x, w, target))
    assert kept.rows().tolist() == (target != -100).nonzero()[:, 0].tolist()
    assert Kept(target.clamp(min=0)).rows() is None, "nothing to leave out"
    assert Kept(torch.tensor([1, -100, -100, -100, 2, 3]), group=2).counts() == [1, 0, 2]


def test_labels_are_counted_on_the_stream_of_their_device(monkeypatch):
    """Whatever the current device is: an event of another one would be there before the count."""
    waited_for = []
    event = type("Event", (), {"record": lambda self, stream=None: waited_for.append(stream)})
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    device = torch.device("cuda", int(torch.cuda.device_count() != 1))
    with FakeTensorMode():
        Kept(torch.zeros(8, dtype=torch.long, device=device))
    assert waited_for == [device]


@pytest.mark.parametrize("chunk_rows", [4, 100])
@pytest.mark.parametrize("num_items", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_go_straight_into_a_buffer(chunk_rows, dtype, num_items):
    x, w, target = inputs(dtype=dtype)
    options = dict(chunk_rows=chunk_rows, num_items=num_items)
    expected = torch.autograd.grad(linear_cross_entropy(x, w, target, **options), (x, w))
    main_grad = torch.full_like(w, 0.125, dtype=torch.float32)
    linear_cross_entropy(x, w, target, **options, dw_into=main_grad).backward()
    assert w.grad is None
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(x.grad, expected[0], rtol=2 * eps, atol=eps)
    torch.testing.assert_close(main_grad - 0.125, expected[1].float(), rtol=2 * eps, atol=eps)


def test_a_buffer_that_missed_an_upstream_gradient_says_so():
    x, w, target = inputs()
    main_grad = torch.zeros_like(w)
    (2 * linear_cross_entropy(x, w, target, chunk_rows=4, dw_into=main_grad)).backward()
    assert main_grad.isnan().any()
    main_grad.zero_()
    # known before the product
    twos = torch.full((12,), 2.0, device=DEVICE)
    linear_cross_entropy(x, w, target, reduction="none", dw_into=main_grad).backward(twos)
    (dw,) = torch.autograd.grad(linear_cross_entropy(x, w, target, reduction="sum"), w)
    torch.testing.assert_close(main_grad, 2 * dw)


def test_checked_mode_names_the_label(monkeypatch):
    monkeypatch.setenv("LIGER_CHECKS", "1")
    x, w, target = inputs()
    linear_cross_entropy(x, w, target)
    target[4] = 50
    with pytest.raises(ValueError, match=r"linear_cross_entropy: target must be in \[0, 50\) or -100, got 50"):
        linear_cross_entropy(x, w, target)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("chunk_rows", [5, None])
def test_a_cuda_graph_replays_it(reduction, chunk_rows):
    x, w, target = inputs(M=20, dtype=torch.bfloat16)
    run = lambda: torch.autograd.grad(
        linear_cross_entropy(x, w, target, reduction=reduction, chunk_rows=chunk_rows, compact=True).sum(), (x, w)
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = run()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for found, expected in zip(grads, run()):  # cuBLAS may take another way, with a workspace of its own
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


@needs_gpu
def test_nothing_waits_for_the_device_once_labels_are_counted():
    x, w, target = inputs(M=40, dtype=torch.bfloat16)
    kept = Kept(target)
    linear_cross_entropy(x, w, target, compact=kept, chunk_rows=8).backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(x, w, target, compact=kept, chunk_rows=8).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_token_counts_average_rightly_over_micro_batches():
    x, w, target = inputs(M=40)
    loss = LigerFusedLinearCrossEntropyLoss(return_token_accuracy=True)
    parts = [loss(w, x[rows], target[rows]) for rows in (slice(0, 7), slice(7, 40))]
    whole = loss(w, x, target)
    correct, counted = (sum(getattr(part, name) for part in parts) for name in ("correct_tokens", "counted_tokens"))
    assert counted == (target != -100).sum() and torch.equal(correct / counted, whole.token_accuracy)
