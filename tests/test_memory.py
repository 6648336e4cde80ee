"""Rematerialisation: equal gradients with less kept, and nothing lost where others look at,
change or free what it works with."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from watching import Watch, calls_of

from liger_kernel import memory
from liger_kernel.memory import offload as offloading
from liger_kernel.ops._core import operator as _op
from liger_kernel.ops.attention.sink_attention import sink_attention
from liger_kernel.ops.norms.rms_norm import reference as rms_norm_reference, rms_norm


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """What is freed meanwhile is freed by counting references."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes that ``norm``, below, was called with."""
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(Layer, "calls", found)
    return found


def norm(x: Tensor, w: Tensor, **options) -> Tensor:
    if not torch.compiler.is_compiling():
        Layer.calls.append(tuple(x.shape))
    return rms_norm_reference(x, w, **options)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class Layer(nn.Module):
    """A norm, projections that share its output, and a gated activation; ``between`` may look at
    the norm's output or put something else in its place."""

    calls: list[tuple[int, ...]] = []

    def __init__(self, between=lambda y: y):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(16))
        self.q, self.k, self.gate, self.up = (nn.Linear(16, 24, bias=i % 2 == 0) for i in range(4))
        self.down = nn.Linear(24, 16, bias=False)
        self.between = between
        self.to(DEVICE)

    def body(self, x: Tensor) -> Tensor:
        y = memory.cheap(norm, x, self.w, eps=1e-5)
        y = self.between(y)
        a = self.q(y) + self.k(y)
        h = memory.cheap(gated, self.gate(y), self.up(y))
        return self.down(h * 1.0 if self.between is twice else h) + F.pad(a[..., :8], (0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Rematerialised(Layer):
    forward = memory.rematerialised(Layer.body)


def both(body, *unused: str) -> list[Layer]:
    """Layers with this forward, stock and rematerialised, without their ``unused`` parts."""
    layers = [type("Other", (Layer,), {"forward": forward})() for forward in (body, memory.rematerialised(body))]
    for layer in layers:
        for name in unused:
            delattr(layer, name)
    return layers


def twice(y: Tensor) -> Tensor:
    return y * 2


def x_of(shape: tuple[int, ...] = (2, 5, 16), dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype).requires_grad_()


def learn(layer: nn.Module, x: Tensor | None = None, run=lambda layer, x: layer(x)) -> dict[str, Tensor]:
    x = x_of() if x is None else x
    layer.zero_grad()
    out = run(layer, x * 1.0)
    out.square().sum().backward()
    return {"out": out.detach(), "x": x.grad} | {n: p.grad.clone() for n, p in layer.named_parameters()}


assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def held(layer: nn.Module, x: Tensor, run=lambda layer, x: layer(x)) -> tuple[int, Watch]:
    """Bytes that one forward leaves for its backward, besides its output."""
    with Watch() as kept:
        out = run(layer, x)
    return kept.bytes() - out.nbytes, kept


# -- any module --------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
def test_keeps_less_and_computes_once(calls, autocast):
    def run(layer, x):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            return layer(x)

    stock, ours = (held(cls(), x_of(), run)[0] for cls in (Layer, Rematerialised))
    # the norm's output and the gated activation; under autocast, a cast of the former for each Linear
    assert stock - ours == 2 * 5 * ((4 * 16 + 24) * 2 if autocast else (16 + 24) * 4)
    calls.clear()
    learned = learn(Rematerialised(), run=run)
    assert len(calls) == 2  # in the forward, and once for all four projections
    assert_equal(learned, learn(Layer(), run=run))


def test_small_values_are_kept(monkeypatch, calls):
    """Of 640 bytes the norm's output, of 960 the gated activation."""
    always = memory.rematerialised(Layer.body, "mlp")
    for small, dropped in ((639, 640 + 960), (640, 960), (960, 0)):
        monkeypatch.setattr(memory, "SMALL", small)
        stock, ours, level_mlp = (held(layer, x_of(), run)[0] for layer, run in (
            (Layer(), Layer.__call__), (Rematerialised(), Layer.__call__), (Layer(), lambda layer, x: always(layer, x)),
        ))  # fmt: skip
        assert (stock - ours, stock - level_mlp) == (dropped, 640 + 960)
        assert_equal(learn(Rematerialised()), learn(Layer()))


@pytest.mark.parametrize("failing", [False, True])
def test_frees_with_the_graph(failing):
    left = []  # nothing; but a backward that failed in a GPU's thread may leave some for the garbage collector
    for layer in (Layer(), Rematerialised()):
        with without_collector():
            with Watch() as kept:
                out = layer(x_of())
            if failing:
                out.register_hook(lambda g: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    out.sum().backward()
            assert kept.bytes() > out.nbytes
            del out
            left.append(kept.bytes())
            assert left[-1] == 0 or (failing and DEVICE == "cuda")
    assert left[1] <= left[0]


def test_nothing_is_kept_after_the_backward():
    layer, x = Rematerialised(), x_of()
    with Watch() as kept:
        out = layer(x)
        loss = out.sum()
    loss.backward()
    assert kept.bytes() == out.nbytes + loss.nbytes


def test_retain_graph(calls):
    grads = []
    for layer in (Layer(), Rematerialised()):
        out = layer(x_of()).sum()
        calls.clear()
        out.backward(retain_graph=True)
        out.backward(retain_graph=True)
        assert len(calls) == (2 if isinstance(layer, Rematerialised) else 0)
        torch.autograd.grad(out, [layer.k.weight], retain_graph=True)  # one of those who share, alone
        out.backward()
        grads.append({n: p.grad for n, p in layer.named_parameters()})
        with pytest.raises(RuntimeError, match="second time"):
            out.backward()
    assert_equal(*grads)


def test_second_derivatives():
    found = []
    for layer in (Layer(), Rematerialised()):
        x = x_of()
        (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        found.append(dict(zip("xw", torch.autograd.grad(dx.square().sum(), [x, layer.w]))))
    torch.testing.assert_close(found[1], found[0])


def with_kernels() -> None:
    """In the interpreter, on a CPU."""
    if DEVICE == "cpu" and not _op.INTERPRET:
        pytest.skip("without Triton")
    _op._KERNEL_DEVICES.add(DEVICE)


def test_second_derivatives_of_kernels_raise():
    with_kernels()
    layer, x = Rematerialised(), x_of()
    run = memory.rematerialised(lambda self, x: self.q(memory.cheap(rms_norm, x, self.w)))
    (dx,) = torch.autograd.grad(run(layer, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        dx.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_steps_aside_under_checkpointing(calls, reentrant):
    run = lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)
    bytes_held, learned, computed = [], [], []
    for cls in (Layer, Rematerialised):
        bytes_held.append(held(cls(), x_of(), run)[0])
        calls.clear()
        learned.append(learn(cls(), run=run))
        computed.append(len(calls))
    assert bytes_held[0] == bytes_held[1] and computed == [2, 2]
    assert_equal(*learned)


def test_steps_aside_for_hooks_of_others():
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        out = Rematerialised()(x_of())
    assert {(2, 5, 16), (10, 16)} & {tuple(t.shape) for t in packed} and out.grad_fn
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        out = Rematerialised()(x_of())
    assert memory._local.region is None and offloading.top_hooks() is None
    layer, x = Rematerialised(), x_of()
    functional = lambda parameters: torch.func.functional_call(layer, parameters, (x,)).square().sum()
    ours, stock = torch.func.grad(functional)(dict(layer.named_parameters())), learn(Layer())
    torch.testing.assert_close(ours, {name: stock[name] for name in ours})


def test_an_error_in_the_forward_leaves_no_hooks():
    def fail(y: Tensor) -> Tensor:
        raise KeyError

    with pytest.raises(KeyError):
        Rematerialised(fail)(x_of())
    assert offloading.top_hooks() is None and memory._local.region is None


BETWEEN = {
    "in place": lambda y: y.mul_(1.5),
    "in place, unseen": lambda y: torch.no_grad()(y.mul_)(1.5),
    "copy": lambda y: y.clone(),
    "part": lambda y: torch.cat((y[:1], y[1:] * 3)),
    "twice": twice,
}


@pytest.mark.parametrize("between", BETWEEN)
def test_a_changed_output_is_saved_as_it_is(between):
    assert_equal(learn(Rematerialised(BETWEEN[between])), learn(Layer(BETWEEN[between])))


def checkpointed_part(self, x: Tensor) -> Tensor:
    y = memory.cheap(norm, x, self.w)
    b = checkpoint(lambda y: self.down(memory.cheap(gated, self.gate(y), self.up(y))), y, use_reentrant=False)
    return b + F.pad(self.q(y)[..., :8], (0, 8)) + self.k(y).sum()


def hooks_pushed_inside(self, x: Tensor) -> Tensor:
    """Somebody pushes and pops them while ours are in place, over the end of our stretch."""
    y = memory.cheap(norm, x, self.w)
    with torch.autograd.graph.save_on_cpu():
        a = self.q(y)
        memory.readers_done()
        b = self.k(y)
    return self.down(a * b)


def views(self, x: Tensor) -> Tensor:
    y = memory.cheap(norm, x, self.w)
    a, b = self.q(y[1:]).sum(0), self.k(y.transpose(0, 1)[::2].flatten(0, 1)).sum(0)
    return a + b + self.gate(y[..., 4:].repeat(1, 1, 2)[..., :16]).sum((0, 1))


@pytest.mark.parametrize(
    "body, unused",
    [(checkpointed_part, ()), (hooks_pushed_inside, ("gate", "up")), (views, ("up", "down"))],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_forwards(body, unused):
    stock, ours = both(body, *unused)
    assert body is hooks_pushed_inside or held(ours, x_of())[0] < held(stock, x_of())[0]
    assert_equal(learn(ours), learn(stock))
    assert offloading.top_hooks() is None


def test_an_output_changed_after_it_was_saved():
    """Stock raises; here the gradient is that of the value that was there."""

    def body(self, x):
        y = memory.cheap(norm, x, self.w)
        a = self.q(y)
        with torch.no_grad():
            y.zero_()
        return a

    stock, ours = both(body)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stock(x_of()).sum().backward()
    ours(x_of()).sum().backward()
    expected = norm(x_of(), ours.w, eps=1e-6).detach().sum((0, 1)).expand(24, 16)
    torch.testing.assert_close(ours.q.weight.grad, expected)


@pytest.mark.parametrize("what", ["input", "weight", "other"])
def test_changed_inputs_raise_as_in_stock(what):
    for layer in (Layer(), Rematerialised()):
        x = x_of() * 1.0
        out = layer(x)
        with torch.no_grad():
            {"input": x, "weight": layer.w, "other": layer.q.weight}[what].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_freed_inputs():
    """A weight that is gone early leaves the output saved; gone later it is an error."""
    for early in (True, False):
        layer = Rematerialised()
        weight = nn.Parameter(layer.w.detach().clone())

        def free(y: Tensor | None = None, weight: Tensor = weight) -> Tensor | None:
            weight.untyped_storage().resize_(0)
            return y

        layer.w, layer.between = weight, free if early else lambda y: y
        out = layer(x_of().detach()).sum()
        if early:
            size = weight.numel() * weight.element_size()
            torch.autograd.grad(out, [layer.q.weight, layer.up.weight], retain_graph=True)
            weight.untyped_storage().resize_(size)
        else:
            free()
            with pytest.raises(RuntimeError, match="was freed before the backward"):
                out.backward()


def test_hooks_on_the_output_fire():
    learned, seen = [], []
    for cls in (Layer, Rematerialised):
        grads: list[Tensor] = []
        layer = cls(lambda y, grads=grads: y.register_hook(grads.append) and y)
        learned.append(learn(layer))
        seen.append(grads)
    assert_equal(*learned)
    assert len(seen[0]) == len(seen[1]) == 1 and torch.equal(seen[0][0], seen[1][0])


def test_nothing_without_gradients(calls):
    layer = Rematerialised()
    with torch.no_grad():
        assert layer(x_of()).grad_fn is None
    layer.requires_grad_(False)
    layer.q.requires_grad_(True)
    out = layer(x_of().detach())  # the norm keeps nothing, so its output is saved
    calls.clear()
    out.sum().backward()
    assert not calls and layer.q.weight.grad is not None


def test_threads_do_not_meet():
    barrier, stock = threading.Barrier(2), learn(Layer())
    layers = [Rematerialised(lambda y: (barrier.wait(10), y)[1]) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for learned in threads.map(learn, layers):
            assert_equal(learned, stock)


def test_compiles_as_if_it_were_not_there():
    layer, stock = Rematerialised(), Layer()
    counted = lambda model: torch.compile(model, backend="aot_eager", fullgraph=True)
    try:
        torch.testing.assert_close(learn(layer, run=lambda m, x: counted(m)(x)), learn(stock), rtol=1e-5, atol=1e-5)
        # a compiled part of a layer that is not
        layer.gate = torch.compile(layer.gate, backend="aot_eager")
        learned = {n.replace("_orig_mod.", ""): t for n, t in learn(layer).items()}
        torch.testing.assert_close(learned, learn(stock), rtol=1e-5, atol=1e-5)
    finally:
        torch._dynamo.reset()


def test_levels():
    for given, level in ((True, "cheap"), (False, "off"), (None, "off"), *((v, v) for v in ("off", "cheap", "mlp"))):
        assert memory.level_of(given) == level
    said = r"rematerialise: must be True, False or one of \('off', 'cheap', 'mlp'\), got"
    for wrong in ("all", 1, 2.0):
        with pytest.raises(ValueError, match=said):
            memory.level_of(wrong)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_streams_do_not_share():
    """A projection on another stream computes for itself."""

    def run(self, x):
        y = memory.cheap(rms_norm, x, self.w)
        a = self.q(y)
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            b = self.k(y)
        torch.cuda.current_stream().wait_stream(other)
        return a + b

    x = torch.randn(4096, 16, device=DEVICE, requires_grad=True)
    learned = []
    for forward in (run, memory.rematerialised(run)):
        layer = Layer()
        forward(layer, x).sum().backward()
        learned.append({"q": layer.q.weight.grad, "k": layer.k.weight.grad})
    assert_equal(*learned)


# -- attention in checkpointed layers -------------------------------------------------------------


class Attends(nn.Module):
    """Two calls of attention, between projections; ``after`` may change an output in place."""

    def __init__(self, after=lambda y: y, dropout: float = 0.0, sinks: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.dropout, self.after = nn.Linear(64, 192), nn.Linear(64, 64), dropout, after
        self.sinks = nn.Parameter(torch.randn(2)) if sinks else None
        self.to(DEVICE)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.sinks is not None:
            return sink_attention(q, k, v, self.sinks)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            q, k, v = (t.unflatten(-1, (2, 32)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            y = self.after(self.attend(q, k, v))
            x = F.dropout(x + self.out(y.transpose(1, 2).flatten(2)), 0.1)
        return x


def attended(module: nn.Module, keeps: bool, backwards: int = 1, **more) -> tuple[dict[str, Tensor], int]:
    """Output and gradients under checkpointing, and how often attention ran after the forward."""
    more |= dict(context_fn=memory.keeping_attention) if keeps else {}
    x = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE).requires_grad_()
    torch.manual_seed(2)
    y = checkpoint(module, x, use_reentrant=False, **more)
    with Watch() as seen:
        for i in range(backwards):
            y.square().sum().backward(retain_graph=i < backwards - 1)
    count = sum(name in {f.__name__.partition(".")[0] for f in memory.attention_operators()} for name in seen.names)
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in module.named_parameters()}, count


@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize(
    "options, kept",
    [({}, True), ({"sinks": True}, True), ({"dropout": 0.3}, False), ({"after": lambda y: y.mul_(1.5)}, False)],
    ids=["plain", "sinks", "dropout", "changed in place"],
)
def test_attention_is_kept(options, kept, backwards):
    """With dropout it runs again, or what is drawn after it would differ."""
    if "sinks" in options:
        with_kernels()
    stock, again = attended(Attends(**options), False, backwards)
    ours, more = attended(Attends(**options), True, backwards)
    assert_equal(ours, stock)
    # PyTorch's attention with dropout is a sum of parts on a CPU
    assert again == 2 * backwards * ("dropout" not in options or DEVICE != "cpu") and more == (0 if kept else again)


def test_operators_of_higher_order_pass():
    """Such as flex attention that is not compiled. A CPU has no backward of it."""
    from torch.nn.attention.flex_attention import flex_attention

    layer = nn.Linear(16, 16, device=DEVICE)
    run = lambda x: torch.no_grad()(flex_attention)(*3 * [x.detach()]) + layer(x)
    found = []
    with torch.compiler.set_stance("force_eager"):
        for more in ({}, dict(context_fn=memory.keeping_attention)):
            layer.zero_grad()
            x = x_of((1, 2, 16, 16))
            checkpoint(run, x, use_reentrant=False, **more).sum().backward()
            found.append({"x": x.grad, "weight": layer.weight.grad.clone()})
    assert_equal(*found)


def test_kept_attention_is_freed_with_the_graph():
    x, module = torch.randn(2, 48, 64, device=DEVICE), Attends()
    with without_collector():
        with Watch() as kept:
            y = checkpoint(module, x, use_reentrant=False, context_fn=memory.keeping_attention)
        assert kept.bytes() >= y.nbytes + 2 * 2 * 48 * 64 * 4
        del y
        assert kept.bytes() == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_kept_attention_under_compile(compiled):
    torch._dynamo.reset()
    module = Attends()
    run = torch.compile(module, backend="aot_eager") if compiled else module
    x = torch.randn(2, 48, 64, device=DEVICE, requires_grad=True)
    torch.manual_seed(2)
    y = checkpoint(run, x, use_reentrant=False, context_fn=memory.keeping_attention)
    y.sum().backward()
    assert x.grad.isfinite().all() and x.grad.abs().sum() > 0


# -- models of transformers ----------------------------------------------------------------------

transformers = pytest.importorskip("transformers")

from hf_models import assert_same_bits, checkpointed, make, served_by_kernels_or_references, step

import liger_kernel.transformers as ours
from liger_kernel.transformers import restore


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    with served_by_kernels_or_references():
        yield
    restore()


def patched(model: nn.Module, level: bool | str, **flags: bool) -> nn.Module:
    restore(model)
    ours._apply_liger_kernel_to_instance(model, rematerialise=level, **flags)
    return model


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]


class FlashAttnFunc(torch.autograd.Function):
    """Keeps what flash attention keeps, under its name, also without a GPU."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx, dout):
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


def saved_bytes(level: bool | str, layers: int, hooked: bool = False, fp8: str | None = None) -> int:
    """What a forward of Llama-3.2-1B's shape leaves; ``hooked``: MLPs must call their parts."""
    hidden, batch, length = 2048, 2, 512
    attention = lambda module, q, k, v, *args, **kwargs: (FlashAttnFunc.apply(q, k, v).transpose(1, 2), None)
    transformers.AttentionInterface.register("saving_little", attention)
    sizes = dict(vocab_size=128, hidden_size=hidden, intermediate_size=8192, num_hidden_layers=layers)
    heads = dict(num_attention_heads=32, num_key_value_heads=8, attn_implementation="saving_little")
    config = transformers.LlamaConfig(**sizes, **heads)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(batch, length, dtype=torch.long)
        angles = torch.zeros(1, length, hidden // 32, dtype=torch.bfloat16)
    model.model.rotary_emb.forward = lambda *_, **__: (angles, angles)  # transformers 4 cannot compute them there
    patched(model, level, **(dict(fp8=fp8, fp8_filter=lambda m, name: name != "lm_head") if fp8 else {}))
    for layer in layers_of(model) if hooked else ():
        layer.mlp.down_proj.register_forward_hook(lambda *_: None)
    with _op.intercept_launches(lambda *_: None, device="meta"), Watch() as kept:
        mask = torch.ones(batch, 1, length, length, device="meta")
        out = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    assert out.grad_fn is not None
    return kept.bytes()


def test_saved_bytes_of_a_layer():
    kept = lambda level, **more: saved_bytes(level, 3, **more) - saved_bytes(level, 1, **more)
    hidden = 2 * 2 * 512 * 2048 * 2  # bytes of one activation of two layers, in bf16
    parts = kept(False, hooked=True)
    off, cheap, mlp = map(kept, (False, True, "mlp"))
    assert parts - off == 4 * hidden  # the gated activation
    assert off - cheap == (1 + 1) * hidden  # two norms' outputs
    assert cheap - mlp == (4 + 4) * hidden  # gate and up
    assert kept(True, hooked=True) == cheap and kept("mlp", hooked=True) == mlp
    assert 1 - cheap / parts > 0.32
    assert 1 - mlp / parts > 0.75


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8_rceil"])
def test_saved_bytes_of_a_layer_in_fp8(recipe):
    """One cast of an input; gate and up in 16 bits. As docs/guides/fp8.md says."""
    kept = lambda level, fp8: saved_bytes(level, 3, fp8=fp8) - saved_bytes(level, 1, fp8=fp8)
    hidden = 2 * 2 * 512 * 2048 * 2  # bytes of one activation of two layers, in bf16
    for level in (False, True, "mlp"):
        casts = 0 if level or recipe == "rowwise_with_gw_hp" else 1  # the outputs of two norms, in 1 byte instead of 2
        more = (kept(level, recipe) - kept(level, None)) / hidden
        assert -casts <= more < 0.06 - casts  # scales, and the largest values of weights


class Rounded(torch.autograd.Function):
    """A product with a quantised weight that saves its input by itself."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.round(decimals=2).t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy @ w.round(decimals=2), dy.flatten(0, -2).t() @ x.flatten(0, -2)


class RoundedLinear(nn.Linear):
    def forward(self, x):
        return Rounded.apply(x, self.weight)


def quantised(model: nn.Module) -> None:
    for layer in layers_of(model):
        for child in (*layer.self_attn.children(), *layer.mlp.children()):
            if isinstance(child, nn.Linear):
                child.__class__ = RoundedLinear


def with_adapters(model: nn.Module) -> None:
    peft = pytest.importorskip("peft")
    how = dict(target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    peft.get_peft_model(model, peft.LoraConfig(r=4, **how)).train()


# plain; norms of heads; four norms; packed gate and up; experts; an activation of one projection
FAMILIES = ["llama", "qwen3", "gemma2", "phi3", "mixtral", "nemotron", "cohere"]
OF_OTHERS = {
    "checkpointed": checkpointed,
    "reentrant": functools.partial(checkpointed, reentrant=True),
    "quantised": quantised,  # a Linear that saves its input in a Function of its own
    "adapters": with_adapters,
    "autocast": lambda model: None,
}


@pytest.mark.parametrize("family, change", [*((family, "") for family in FAMILIES), *(("llama", c) for c in OF_OTHERS)])
def test_gradients_are_equal(family, change, monkeypatch):
    """At all levels, with the same bits."""
    model = make(family)
    if family == "nemotron":
        model.config.hidden_act = "relu2"
    if change:
        OF_OTHERS[change](model)
    computed = calls_of(monkeypatch, memory._Recipe, "_compute")
    with torch.autocast(DEVICE, torch.bfloat16, enabled=change == "autocast"):
        _, expected = step(patched(model, False))
        assert not computed
        for level in (True, "mlp"):
            computed.clear()
            assert_same_bits(step(patched(model, level))[1], expected)
            assert computed or change not in ("", "autocast")
    assert any("lora_A" in name for name in expected) == (change == "adapters")
