"""The instrument itself: declared costs against counts, the accuracy gate, rivals, tuning."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import types

import processes
import pytest
import torch
from fp8_operators import CASTS
from preference_losses import LOSSES
from quick import further
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from liger_kernel import cli
from liger_kernel.bench import arguments, clock, operators, rivals, tables, tune
from liger_kernel.bench.cases import OPS
from liger_kernel.bench.measured import Passing
from liger_kernel.ops._core import launch_config as _config
from liger_kernel.ops._core.launch_config import Tile
from liger_kernel.testing import backward, forward, like

CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.name}") for op in OPS.values() for case in op.cases if not case.gpu
]
in_every_case = pytest.mark.parametrize("op, case", CASES)


class Elementwise(TorchDispatchMode):
    """Counts an operation for each element that an elementwise operation writes or a reduction
    reads, but for products of matrices."""

    # fmt: off
    FREE = (
        "view", "reshape", "expand", "clone", "copy", "detach", "empty", "zeros", "ones", "slice", "select", "transpose", "unsqueeze", "squeeze",  # noqa: E501
        "cat", "stack", "split", "alias", "gather", "scatter", "index", "where", "full", "fill", "mm", "t.", "_to_copy", "permute", "as_strided",  # noqa: E501
        "scalar", "new_",
    )
    # fmt: on
    FUSED = {"_softmax": 4, "native_layer_norm": 6}  # operations a value, of operators that are several at once

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not any(func.__name__.startswith(name) for name in self.FREE):
            every = (*args, *(out if isinstance(out, tuple | list) else [out]))
            tensors = [t for t in every if isinstance(t, Tensor) and t.is_floating_point()]
            each = next((n for name, n in self.FUSED.items() if func.__name__.startswith(name)), 1)
            self.count += each * max((t.numel() for t in tensors), default=0)
        return out


@in_every_case
def test_declared_bytes_are_those_of_inputs_and_outputs(op, case):
    args = case.make(torch.float32, "cpu")
    outs = forward(op.reference, args)
    grads = backward(outs, args, {k: torch.ones_like(o) for k, o in outs.items() if o.requires_grad})
    cost, size = op.cost(**args), lambda tensors: sum(t.nbytes for t in tensors)
    inputs = [v for v in args.values() if isinstance(v, Tensor)]
    # one may be an input, handed on
    given = {t.data_ptr() for t in inputs}
    written = [o for o in outs.values() if o.ndim > 1 and o.data_ptr() not in given]
    per_row = 16 * max(t.shape[0] for t in inputs)  # losses and statistics, which nobody counts
    assert abs(cost.forward - size(inputs) - size(written)) <= per_row
    # a backward reads the upstream gradients and writes the others; what else it reads is some of
    # the forward's inputs
    least = size(grads.values()) + size(o for o in outs.values() if o.ndim > 1)
    assert least <= cost.backward + per_row and cost.backward <= least + size(inputs) + per_row
    assert max(cost.forward, cost.backward) <= cost.of("full")[0] <= cost.forward + cost.backward


@in_every_case
def test_declared_operations_are_those_that_a_count_finds(op, case):
    if case.args.get("groups", 1) > 1:
        pytest.skip("the counter multiplies the weight gradient of a grouped convolution by its groups")
    # the reference computes every row
    args = case.make(torch.float32, "cpu") | ({"compact": False} if "compact" in case.args else {})
    with FlopCounterMode(display=False) as products, Elementwise() as elementwise:
        outs = forward(op.reference, args)
        backward(outs, args, {k: torch.ones_like(o) for k, o in outs.items() if o.requires_grad})
    cost = op.cost(**args)
    declared_products = sum(2 * m * n * k for part in cost.gemms for m, n, k in part)
    if op.name == "sink_attention":  # the reference also multiplies pairs of tokens that do not see each other
        assert 0 < declared_products <= products.get_total_flops()
    else:
        assert declared_products == products.get_total_flops()
    if not declared_products:
        # a factor of four moves a dot on the roofline, nothing else
        assert 0.25 < cost.of("full")[1] / elementwise.count < 4


def test_modes_are_parts_of_the_whole():
    args = OPS["linear_cross_entropy"].cases[0].make(torch.float32, "cpu")
    cost = OPS["linear_cross_entropy"].cost(**args)
    assert [len(cost.of(mode)[2]) for mode in arguments.MODES] == [1, 2, 3]
    assert cost.of("full")[1] == cost.of("forward")[1] + cost.of("backward")[1]


@pytest.mark.parametrize("error, accurate", [(0.0, True), (1e-3, False), *further((float("nan"), False))])
def test_a_wrong_kernel_is_caught_and_gets_no_speed_up(error, accurate, monkeypatch, capsys):
    right = OPS["rms_norm"]
    op = dataclasses.replace(right, fn=lambda x, *args, **kwargs: right.fn(x, *args, **kwargs) * (1 + error))
    rows = list(operators.measure(op, op.cases[0], torch.float32, ["full"], ["eager"], {}, 3))
    ours = next(r for r in rows if r["variant"] == "ours")
    assert ours["accurate"] is accurate and ours["device_ms"] > 0
    line = next(line for line in tables.text_table(rows).splitlines() if " eager " in line)
    assert ("x  " in line) is accurate, line


def test_a_kernel_that_raises_is_a_row_that_says_so():
    def fn(x, w=None, **_):
        raise RuntimeError("no such GPU")

    op = dataclasses.replace(OPS["rms_norm"], fn=fn)
    rows = operators.measure(op, op.cases[0], torch.float32, ["full"], [], {}, 3)
    ours = next(r for r in rows if r["variant"] == "ours")
    assert ours["failed"] == "RuntimeError: no such GPU" and not ours["accurate"] and "device_ms" not in ours


@pytest.mark.skipif(clock.GPU, reason="says what it does without a GPU")
def test_the_command_without_a_gpu(tmp_path, capsys, user_env, monkeypatch):
    @contextlib.contextmanager
    def child(command, **_):
        """``subprocess.Popen`` of a child that measures: importing takes longer than the rest."""
        (tmp_path / "said").unlink(missing_ok=True)
        code, said = processes.forked(command[1:], user_env, tmp_path / "said")
        yield types.SimpleNamespace(stdout=io.StringIO(said), wait=lambda: code, kill=lambda: None)

    monkeypatch.setattr(operators, "subprocess", types.SimpleNamespace(Popen=child, PIPE=None))
    json_file, csv_file = tmp_path / "b.json", tmp_path / "b.csv"
    ops, files = ["rms_norm", "linear_cross_entropy"], ["--json", str(json_file), "--csv", str(csv_file)]
    code = cli.main(["bench", *ops, "--smoke", "--against", "eager,upstream", *files])
    said = capsys.readouterr().out
    assert code == 0 and "this measures the CPU path" in said
    assert "pip install --no-deps --target DIR liger-kernel==0.8.5, then --upstream-path DIR" in said
    result = json.loads(json_file.read_text())
    assert {r["op"] for r in result["rows"]} == {*ops} and all(r["accurate"] for r in result["rows"])
    assert all(r["percent_of_floor"] > 0 and r["error_pytorch"] is not None for r in result["rows"])
    assert result["meta"]["copy_tb_s"] > 0 and result["meta"]["date"]
    assert result["meta"]["command"].startswith("liger bench rms_norm")
    header, *lines = csv_file.read_text().splitlines()
    assert {"hardware", "torch", "date", "device_ms"} <= set(header.split(",")) and len(lines) == len(result["rows"])
    # resumed, it measures nothing again
    cli.main(["bench", "rms_norm", "--smoke", "--json", str(json_file), "--resume"])
    assert json.loads(json_file.read_text())["rows"] == result["rows"]


# rivals that run on a GPU only, or refuse the first case
ELSEWHERE = ("expert_load", "moe", "sink_attention", "linear_divergence", "logit_divergence")
RIVALS = [op for op in OPS.values() if "torch" in op.rivals and op.name not in ELSEWHERE]


@pytest.mark.parametrize("op", RIVALS, ids=lambda op: op.name)
def test_a_rival_computes_what_the_operator_does(op):
    """Of the first case, in fp64, although some round to fp32 as models do."""
    args = op.cases[0].make(torch.float64, "cpu")
    rival = op.rivals["torch"]
    theirs, expected = forward(rival, operators.inputs(rival, args)), forward(op.reference, like(args))
    for name, found in theirs.items():
        torch.testing.assert_close(found.double(), expected[name].double(), rtol=1e-5, atol=1e-5)


def test_a_published_rival_gets_arguments_in_its_own_order_and_refuses_others():
    theirs = types.SimpleNamespace(norm=lambda x, scale, weight: (x, scale, weight))
    rival = Passing("norm", "x eps weight=w", ignored="casting").of(OPS["rms_norm"])
    assert rival(theirs, **rival.prepare(dict(x=1, w=2, casting="gemma"))) == (1, 1e-6, 2)
    assert rival(theirs, **rival.prepare(dict(x=1, offset=0.0))) == (1, 1e-6, None)
    with pytest.raises(NotImplementedError):
        rival.prepare(dict(x=1, offset=1.0))


def test_a_rival_of_our_own_name_is_loaded_beside_us(tmp_path):
    package = tmp_path / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    (tmp_path / "liger_kernel" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "functional.py").write_text(
        "import liger_kernel\nWHO = 'theirs'\ndef late():\n    import liger_kernel\n    return liger_kernel.__file__\n"
    )
    import liger_kernel

    rival = rivals.load("upstream", str(tmp_path))
    assert rival.module.WHO == "theirs" and rival.module.liger_kernel is not liger_kernel
    with rival.present():
        assert rival.module.late().startswith(str(tmp_path))
    import liger_kernel as again

    assert again is liger_kernel and str(tmp_path) not in str(liger_kernel.__file__)


def test_what_a_rival_needs_prepared_is_not_timed():
    seen = []

    def rival(module, x, w):
        seen.append(x.shape[0])
        return OPS["rms_norm"].reference(x, w)

    shorter = lambda args: args | {"x": args["x"].detach()[:4].requires_grad_()}
    fn = operators._with(Passing(rival, "x w", prepare=shorter).of(OPS["rms_norm"]), None)
    operators._contestant(fn, OPS["rms_norm"].cases[0].make(torch.float32, operators.DEVICE), "full")()()
    assert seen == [4, 4]


def test_an_earlier_revision_of_ours_runs_beside_us(monkeypatch):
    if not (rivals.Path(rivals.__file__).parents[3] / ".git").exists():
        pytest.skip("not a git checkout")
    base = rivals.revision("HEAD")
    x = torch.randn(3, 8)
    with base.present():
        assert torch.equal(base.module.rms_norm(x), OPS["rms_norm"].fn(x))
    assert base.module.rms_norm is not OPS["rms_norm"].fn


def test_kernels_are_counted_between_separators():
    def event(name, start, length):
        span = types.SimpleNamespace(start=start, elapsed_us=lambda: length)
        return types.SimpleNamespace(name=name, time_range=span, device_type=torch.autograd.DeviceType.CUDA)

    spin = lambda at: event("spin_kernel(long)", at, 9)
    events = [event("memset", 0, 50), spin(1), event("_fwd", 2, 3.0), event("_bwd", 3, 4.0), spin(4)]
    events += [event("copy", 5, 7), spin(6), spin(7)]
    assert clock._between_separators(types.SimpleNamespace(events=lambda: events[::-1])) == [[3.0, 4.0], []]


def test_times():
    times = clock.Times([3.0, 1.0, 2.0, 100.0, 2.0])
    assert times.median == 2.0 and math.isclose(times.spread, (51.5 - 1.5) / 2)


def test_nobody_always_follows_the_same_other():
    """Heat that one contestant leaves behind would count against the next."""
    ran = []
    clock.race({name: lambda name=name: lambda: ran.append(name) for name in "abc"}, repeats=12, warmup=0)
    assert all(sorted(ran[i : i + 3]) == list("abc") for i in range(0, 36, 3)), "each once a round"
    before = {name: {a for a, b in itertools.pairwise(ran[:36]) if b == name} for name in "abc"}
    assert all(len(found) > 1 for found in before.values())


# -- tuning --------------------------------------------------------------------------------


@pytest.mark.parametrize("accurate", [True, False])
def test_tuning_finds_the_best_tile_that_is_accurate(accurate, monkeypatch, capsys):
    """On a machine where one takes half the time of all others."""
    asked, best = {}, Tile(8, 256, 4)

    def fn(x, w=None, **options):
        asked["tile"] = _config.tile("rms_norm_fwd", x.shape[-1], x.itemsize, elements=4096)
        return OPS["rms_norm"].reference(x, w, **options)

    op = dataclasses.replace(OPS["rms_norm"], fn=fn)
    monkeypatch.setattr(tune, "DEVICE", "cpu")
    timed = lambda fn, base, repeats: (fn(**like(base)), 0.5 if asked["tile"] == best else 1.0)[1]
    monkeypatch.setattr(tune, "timed_call", timed)
    monkeypatch.setattr(tune, "accuracy", lambda *_: (0.0, 0.0, accurate or asked["tile"] != best))
    found = tune.search(op, op.cases[0], "fp32", 5)
    assert found == ({"rms_norm_fwd/4/256": (best, 1.0, 0.5)} if accurate else {})
    assert ("refused, because it is not accurate" in capsys.readouterr().out) == (not accurate)


def test_a_tuned_table_is_used_and_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(_config, "TUNED", tmp_path / "_tuned")
    with _config.target("sm90", 132):
        _config._table.cache_clear()
        heuristic = _config.tile("rms_norm_fwd", 256, 2, elements=4096)
        tune.write({"rms_norm_fwd/2/256": Tile(2, 256, 1)})
        tune.write({"glu/2/64": Tile(4, 64, 1)})
        _config._table.cache_clear()
        _config.tile.cache_clear()
        assert _config.tile("rms_norm_fwd", 256, 2, elements=4096) == Tile(2, 256, 1) != heuristic
        assert _config.tile("glu", 64, 2, elements=4096) == Tile(4, 64, 1)
    _config._table.cache_clear()


@pytest.mark.parametrize("op", LOSSES.values(), ids=LOSSES)
def test_losses_are_their_references_at_their_products(op):
    args = op.cases[0].make(torch.float64, "cpu")
    with FlopCounterMode(display=False) as products:
        truth = operators.results(op.reference, like(args))
    assert products.get_total_flops() == sum(2 * m * n * k for part in op.cost(**args).gemms for m, n, k in part)
    for name, found in operators.results(op.fn, like(args)).items():
        torch.testing.assert_close(found, truth[name])


@pytest.mark.parametrize("op", [next(iter(CASTS.values())), *further(*list(CASTS.values())[1:])], ids=CASTS)
def test_casts_are_measured(op):
    """Forward alone: nothing has gradients. Each is accurate, and moves at least its inputs."""
    for case in (c for c in op.cases if not c.gpu):
        rows = list(operators.measure(op, case, torch.bfloat16, ["backward", "full"], ["eager"], {}, 3))
        assert {(row["mode"], row["variant"]) for row in rows} == {("full", "ours"), ("full", "eager")}
        assert not any(row["failed"] for row in rows) and all(row["accurate"] for row in rows), rows
        inputs = [t for t in case.make(torch.bfloat16, operators.DEVICE).values() if isinstance(t, Tensor)]
        assert rows[0]["bytes"] >= sum(t.nbytes for t in inputs)


def test_values_of_casts_are_those_of_torchao():
    """Which accuracy does not say, because they are compared as integers: in blocks each bit."""
    pytest.importorskip("torchao")
    op = CASTS["float8_casts"]
    for case in (c for c in op.cases if not c.gpu):
        args = case.make(torch.bfloat16, operators.DEVICE)
        ours, theirs, reference = op.fn(**args), op.rivals["ao"](None, **args), op.reference(**args)
        least = 1 if args["recipe"] == "mxfp8_rceil" else 0.98  # torchao's factor is rounded twice
        for found, other, expected in zip(ours, theirs, reference):
            assert found.shape == other.shape and found.dtype == other.dtype and torch.equal(found, expected)
            assert found.dtype != torch.uint8 or (found == other).float().mean() >= least
