"""The tiled MLP against the MLP in one piece: gradients, hooks, dropout, autocast, wrappers, and
what is kept for the backward."""

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from devices import DEVICE, drawn, needs_kernels
from torch import nn
from watching import saved

from liger_kernel.nn import LigerGEGLUMLP, LigerSwiGLUMLP, LigerTiledGEGLUMLP, LigerTiledSwiGLUMLP
from liger_kernel.ops import LigerTiledMLPFunction, apply_tiled_mlp
from liger_kernel.ops.projections.adapted import Adapter, Projection
from liger_kernel.ops.projections.mlp import adapted_mlp
from liger_kernel.ops.projections.weights import Dequantized, dense
from liger_kernel.patch_options import PatchOptions
from liger_kernel.testing import assert_as_accurate, assert_same_bits

CONFIG = SimpleNamespace(hidden_size=32, intermediate_size=64, hidden_act="silu")


class MLP(nn.Module):
    """Plain PyTorch; ``tiles`` of the sequence, or in one piece."""

    def __init__(self, p: float = 0.0, tiles: int | None = None):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(32, 64), nn.Dropout(p), nn.Linear(64, 32, bias=False)
        self.tiles = tiles

    def one(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(nn.functional.silu(self.up(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) if self.tiles is None else apply_tiled_mlp(MLP.one, self, x, self.tiles)


def mlp(tiles: int | None, dtype: torch.dtype = torch.float32, p: float = 0.0, seed: int = 0) -> MLP:
    torch.manual_seed(seed)
    return MLP(p, tiles).to(DEVICE).to(torch.bfloat16).to(dtype)


def data(dtype: torch.dtype = torch.float32, T: int = 50, seed: int = 0) -> torch.Tensor:
    return drawn(2, T, 32, seed=seed).to(dtype).requires_grad_()


def results(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    y = module(x)
    y.mul(x.detach() + 1).sum().backward()  # not zero in the mean, so that sums over tiles grow
    return {"out0": y.detach(), "dx": x.grad} | {f"d{n}": p.grad for n, p in module.named_parameters()}


@pytest.mark.parametrize(
    "dtype, T, tiles",
    [(torch.float32, 50, 1), (torch.float32, 50, 7), (torch.bfloat16, 320, 32), (torch.bfloat16, 3, 50)],
)
def test_equals_the_mlp_in_one_piece(dtype, T, tiles):
    whole = lambda s, dtype: results(mlp(None, dtype, seed=s), data(dtype, T, s))
    pairs = [(whole(s, dtype), whole(s, torch.float64)) for s in range(8)]
    assert_as_accurate(results(mlp(tiles, dtype), data(dtype, T)), *pairs[0], *pairs[1:])


@pytest.mark.parametrize("tiled, whole", [(LigerTiledSwiGLUMLP, LigerSwiGLUMLP), (LigerTiledGEGLUMLP, LigerGEGLUMLP)])
def test_modules(tiled, whole):
    config = copy.copy(CONFIG)
    config.hidden_act = "silu" if whole is LigerSwiGLUMLP else "gelu_pytorch_tanh"
    ours, plain = tiled(config, num_shards=3).to(DEVICE), whole(config).to(DEVICE)
    plain.load_state_dict(ours.state_dict())
    truth = results(copy.deepcopy(plain).double(), data(torch.float64))
    assert_as_accurate(results(ours, data()), results(plain, data()), truth)
    assert tiled(config).to(DEVICE)(data(T=0)).shape == (2, 0, 32)


def test_dropout_draws_the_same_again():
    ours, plain = mlp(5, p=0.5), mlp(None, p=0.5)
    plain.forward = lambda x: torch.cat([plain.one(t) for t in x.chunk(5, -2)], -2)
    torch.manual_seed(1)
    expected, after = results(plain, data()), torch.rand(3)
    torch.manual_seed(1)
    found = results(ours, data())
    assert torch.equal(torch.rand(3), after), "the backward moved the generator"
    torch.testing.assert_close(found, expected)


def test_hooks_run_once_and_gradients_accumulate():
    module, calls = mlp(5), []
    for name, p in module.named_parameters():
        p.register_hook(lambda g, name=name: calls.append(name))
        p.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name))
    first = {k: v.clone() for k, v in results(module, data()).items()}
    assert sorted(calls) == sorted(2 * ["up.weight", "up.bias", "down.weight"])
    second = results(module, data())
    assert_same_bits(*({k: found[k] for k in ("out0", "dx")} for found in (second, first)))
    torch.testing.assert_close(second["dup.weight"], 2 * first["dup.weight"])


def test_grad_leaves_dot_grad_alone():
    module, x = mlp(3), data()
    y = module(x)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(y.sum(), x, create_graph=True)[0].sum().backward()
    (dw,) = torch.autograd.grad(module(x).sum(), [module.up.weight])
    assert dw.abs().sum() > 0 and x.grad is None and all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("frozen", ["x", "up", "down", "all but x"])
def test_frozen(frozen):
    def run(tiles):
        module, x = mlp(tiles), data()
        for n, p in module.named_parameters():
            p.requires_grad_(frozen not in n and frozen != "all but x")
        x.requires_grad_(frozen != "x")
        return results(module, x)

    present = lambda found: {k: v for k, v in found.items() if v is not None}
    torch.testing.assert_close(present(run(4)), present(run(None)))


def test_keeps_the_input_and_the_weights_only():
    module, x = mlp(5), data()
    with saved() as kept:
        y = module(x)
    assert sum(t.numel() for t in kept) == x.numel() + sum(p.numel() for p in module.parameters())
    with torch.no_grad():
        assert torch.equal(module(x), y)


def test_changed_weights_are_noticed():
    module = mlp(3)
    y = module(data())
    with torch.no_grad():
        module.up.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_autocast_is_that_of_the_forward():
    def run(tiles):
        module, x = mlp(tiles), data()
        with torch.autocast(DEVICE, torch.bfloat16):
            y = module(x)
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        return module.up.weight.grad

    torch.testing.assert_close(run(3), run(None), rtol=0.02, atol=0.02)


def test_weights_from_outside_are_refused():
    scale = torch.ones(32, device=DEVICE, requires_grad=True)
    y = LigerTiledMLPFunction.apply(lambda module, x: MLP.one(module, x) * scale, mlp(None), data(), 3, [scale])
    said = r"fn must use no tensor outside mlp_module that asks for a gradient, got one of shape \(32,\)"
    with pytest.raises(ValueError, match=said):
        y.sum().backward()


def test_threads_share_a_module():
    """The backward exchanges the module's weights for a while, which no other thread may see."""
    module, x = mlp(3), torch.randn(2, 12, 32, device=DEVICE)
    weights = list(module.parameters())
    grads = lambda _: torch.autograd.grad(module(x).sum(), weights)
    expected = grads(0)
    with ThreadPoolExecutor(4) as threads:
        assert all(all(map(torch.equal, found, expected)) for found in threads.map(grads, range(40)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_checkpoint(reentrant):
    plain, module = mlp(4, p=0.5), mlp(4, p=0.5)
    module.forward = lambda x: torch.utils.checkpoint.checkpoint(MLP.forward, module, x, use_reentrant=reentrant)
    torch.manual_seed(3)
    expected = results(plain, data())
    torch.manual_seed(3)
    assert_same_bits(results(module, data()), expected)


def test_compiles_whole():
    torch._dynamo.reset()
    module = mlp(4)
    ours = results(torch.compile(module, fullgraph=True, backend="aot_eager"), data())
    ours = {name.replace("_orig_mod.", ""): t for name, t in ours.items()}
    torch.testing.assert_close(ours, results(mlp(None), data()))


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(DEVICE != "cpu", reason="one process on the CPU says as much")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1", "fsdp1-flat", "fsdp2"])
def test_wrapped(wrapper, process_group):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    module = mlp(4)
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(module)
    elif wrapper == "fsdp2":
        model = fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
    else:
        model = FullyShardedDataParallel(module, use_orig_params=wrapper == "fsdp1", device_id=torch.device("cpu"))
    expected, x = mlp(None), data()
    for m in (model, expected):
        optimizer = torch.optim.SGD(m.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(model(x), expected(x))


# -- as one node ---------------------------------------------------------------------------


def projections(dtype: torch.dtype, kind: str, packed: bool = False) -> list[Projection]:
    """Gate, up and down, of ``kind``: learnt, frozen, dequantized, or with adapters."""
    seeds = itertools.count()
    new = lambda *shape: (drawn(*shape, seed=next(seeds)) / shape[-1] ** 0.5).to(dtype)

    def one(N: int, K: int) -> Projection:
        w, bias = new(N, K).requires_grad_(kind == "learnt"), new(N).requires_grad_(kind == "learnt")
        weight = Dequantized((N, K), None, dequantize=lambda dtype: w.to(dtype)) if kind == "dequantized" else dense(w)
        adapter = Adapter(new(3, K).requires_grad_(), new(N, 3).requires_grad_(), 0.5)
        return Projection(weight, bias, (adapter,) * (kind == "adapters"))

    return [one(48, 16), one(16, 24)] if packed else [one(24, 16), one(24, 16), one(16, 24)]


def by_node(
    dtype: torch.dtype, kind: str, tiles: int, packed: bool = False, run=lambda f, x: f(x)
) -> dict[str, torch.Tensor]:
    *first, down = projections(dtype, kind, packed)
    x = drawn(2, 5, 16, seed=1).to(dtype).requires_grad_()
    y = run(lambda x: adapted_mlp(x, first, down, ends=True, tiles=tiles), x)
    y.mul(x.detach() + 1).sum().backward()
    learnt = [t for p in (*first, down) for t in p.tensors() if t is not None and t.requires_grad]
    assert all(t.grad.dtype == t.dtype for t in learnt)
    return {"out0": y.detach(), "dx": x.grad} | {f"d{i}": t.grad for i, t in enumerate(learnt)}


@needs_kernels
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["learnt", "frozen", "dequantized", "adapters"])
@pytest.mark.parametrize("tiles", [3, 4, 10, 50])
def test_a_node_in_tiles(kind, tiles, packed):
    whole, tiled = (by_node(torch.float32, kind, count, packed) for count in (1, tiles))
    torch.testing.assert_close(tiled, whole, rtol=1e-5, atol=1e-5)


@needs_kernels
def test_a_node_in_tiles_is_as_accurate_as_a_whole_one():
    """Gradients of weights are added in fp32."""
    found = [by_node(torch.bfloat16, "learnt", tiles) for tiles in (5, 1)]
    assert_as_accurate(*found, by_node(torch.float32, "learnt", 1))


@needs_kernels
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_node_in_tiles_under_autocast(reentrant):
    """Weights in fp32 are cast once, and their gradients have their dtype."""

    def run(f, x):
        with torch.autocast(DEVICE, torch.bfloat16):
            return f(x) if reentrant is None else torch.utils.checkpoint.checkpoint(f, x, use_reentrant=reentrant)

    whole, tiled = (by_node(torch.float32, "learnt", tiles, run=run) for tiles in (1, 3))
    torch.testing.assert_close(tiled, whole, rtol=0.05, atol=0.05)


@needs_kernels
def test_a_node_in_tiles_saves_its_input_and_the_weights_only_and_gives_gradients_again():
    kept = []

    def run(f, x):
        with saved() as found:
            y = f(x)
        kept.extend(found)
        (y.sum() * 0).backward(retain_graph=True)
        return y

    assert_same_bits(by_node(torch.float32, "learnt", 3, run=run), by_node(torch.float32, "learnt", 3))
    assert sum(t.numel() for t in kept) == 10 * 16 + 3 * 24 * 16 + 24 + 24 + 16


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", (2,)])
def test_bad_numbers_of_tiles(value):
    with pytest.raises(ValueError, match="tiled_mlp: must be True, False or a number of tiles from 1 on, got"):
        PatchOptions(tiled_mlp=value)
    assert [PatchOptions(tiled_mlp=value).tiled_mlp for value in (None, True, 7)] == [False, True, 7]
    with pytest.raises(ValueError, match="apply_tiled_mlp: x must have at least 2 dims, got 1"):
        apply_tiled_mlp(MLP.one, mlp(None), torch.ones(32), 2)
