"""Everything that every operator promises. New operators and cases are picked up by import;
nothing to add here."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import refused_calls
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from devices import DEVICE, needs_kernels
from quick import further
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from liger_kernel import operator_checks as checks
from liger_kernel.bench.cases import OPS
from liger_kernel.nn.losses import liger_cross_entropy
from liger_kernel.operator_checks import (
    DTYPES,
    Launches,
    assert_accurate,
    ones,
    padded,
    sharing_rows,
    threes,
    transposed,
)
from liger_kernel.ops import LigerRMSNormFunction
from liger_kernel.ops._core import operator as _op
from liger_kernel.ops.projections.float8 import lacking
from liger_kernel.testing import assert_as_accurate, assert_same_bits, differentiable, forward, like, run, upstream

GPU = torch.cuda.is_available()
SUMS = ("expert_load",)  # their results are sums over rows


def _cases(op) -> list:
    """Those that this machine can run."""
    return [c for c in op.cases if not (c.args.get("fp8") and lacking(torch.device(DEVICE)))]


def _first(op, n: int = 2 if GPU else 1) -> list:
    """Enough for what depends on the operator rather than on the case."""
    return [c for c in _cases(op) if not c.gpu][:n]


def _params(keep) -> list:
    """Operators and cases; in the interpreter, what is not the first of an operator is slow."""
    slow = lambda o, c: not GPU and c not in _first(o)
    return [
        pytest.param(o, c, id=f"{o.name}-{c.name}", marks=[pytest.mark.slow] * slow(o, c))
        for o in OPS.values()
        for c in _cases(o)
        if keep(c)
    ]


def _accuracy() -> list:
    """Every case in every dtype; in the interpreter fp16 is slow, and bf16 but of the first."""
    slow = lambda o, c, d: not GPU and (d == torch.float16 or (d == torch.bfloat16 and c not in _first(o)))
    return [
        pytest.param(o, c, d, id=f"{str(d)[6:]}-{o.name}-{c.name}", marks=[pytest.mark.slow] * slow(o, c, d))
        for o in OPS.values()
        for c, d in itertools.product(_cases(o), DTYPES)
        if not c.timed and (GPU or not c.gpu)
    ]


# a row kernel, a loss, a head with its loss in chunks, experts, adapters
ONE_OF_EACH_KIND = ("rms_norm", "cross_entropy", "linear_cross_entropy", "moe", "lora_mlp")


def _of_each_kind(params: list) -> list:
    """Of what takes seconds an operator: without a GPU, others than these are slow."""
    few = lambda p: GPU or p.values[0].name in ONE_OF_EACH_KIND
    return [p if few(p) else pytest.param(*p.values, id=p.id, marks=pytest.mark.slow) for p in params]


runnable = pytest.mark.parametrize("op, case", _params(lambda c: not c.timed and (GPU or not c.gpu)))
small = pytest.mark.parametrize("op, case", _params(lambda c: not c.gpu))
first = pytest.mark.parametrize(
    "op, case", [pytest.param(o, c, id=f"{o.name}-{c.name}") for o in OPS.values() for c in _first(o)]
)
CHECKS = (
    checks.results_may_be_written_into,
    checks.never_reads_uninitialised_memory,
    checks.empty_input,
    checks.modifies_nothing,
    checks.second_backward_equals_the_first,
    *(checks.never_waits_for_the_device,) * GPU,
)
# nodes that are PyTorch's products above all; tests/ops/test_lora.py counts these
NODES = {
    "lora_linear": "LinearsFunctionBackward",
    "lora_qkv": "LinearsFunctionBackward",
    "lora_mlp": "AdaptedMLPFunctionBackward",
}


@pytest.fixture(autouse=True)
def _memory_given_back():
    yield
    if GPU and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.mark.parametrize("op, case, dtype", _accuracy())
def test_as_accurate_as_pytorch(op, case, dtype):
    checks.as_accurate_as_pytorch(op, case, dtype)


@small
@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_every_case(op, case, check):
    check(op, case)


@small
@pytest.mark.parametrize("grads", [threes, transposed, *further(ones, padded)], ids=lambda f: f.__name__)
def test_any_upstream_gradient(op, case, grads):
    checks.as_accurate_as_pytorch(op, case, grads=grads)


@needs_kernels
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_kernels_run(op):
    if op.name not in NODES:
        checks.kernels_run(op)
        return
    outs = forward(op.fn, op.cases[0].make(torch.bfloat16, DEVICE))
    assert {type(o.grad_fn).__name__ for o in outs.values()} == {NODES[op.name]}


@pytest.mark.parametrize("op, case", _of_each_kind(_params(lambda c: not c.gpu)))
def test_compiles_whole(op, case):
    """Losses with a head plan chunks by the number of rows: of these, a few versions are right."""
    # while compiling, every row is computed, as with compact=False: in FP8 the ignored ones count
    # in the scale of x
    compact = case.args.get("compact")
    same = dataclasses.replace(case, args=dict(case.args) | {"compact": False}) if compact else case
    any_rows = "linear" not in op.name or "lora" in op.name
    checks.compiles_whole(op, case, same=same, any_rows=any_rows, apart=("sinks",))


@small
@pytest.mark.parametrize("arrange", [*checks.LAYOUTS[:2], *further(*checks.LAYOUTS[2:])], ids=lambda f: f.__name__)
def test_strides_do_not_matter(op, case, arrange):
    tensors = (v for v in case.args.values() if isinstance(v, _op.T))
    if arrange is checks.sequence_first and all(len(v.shape) < 3 for v in tensors):
        pytest.skip("is what column_major is")
    checks.strides_do_not_matter(op, case, arrange)


@runnable
def test_same_bits_twice(op, case):
    checks.same_bits_twice(op, case)


@pytest.mark.skipif(
    not GPU or torch.cuda.mem_get_info()[1] < 70 << 30,
    reason="needs 70 GB of GPU memory; test_memory_safety.py covers inputs elsewhere",
)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_more_than_2_to_31_elements(op):
    """The last rows beyond 32-bit offsets, forward and backward, are what they are alone."""
    case = next(c for c in op.cases if c.gpu)
    rows_of, x = sharing_rows(case), next(iter(case.args))
    if case.args[x].dtype == torch.int64:
        pytest.skip("rows of indices: a test of its own in tests/ops")
    rows = 2**31 // math.prod(case.args[x].shape[1:]) + 9
    per_row = {"reduction": "none"} if "reduction" in inspect.signature(op.fn).parameters else {}
    more = {k: dataclasses.replace(case.args[k], shape=(rows, *case.args[k].shape[1:])) for k in rows_of}
    args = dataclasses.replace(case, args=dict(case.args) | more | per_row).make(torch.bfloat16, DEVICE)
    last = lambda k, v: (v[-4:] if k in rows_of else v).detach().clone().requires_grad_(v.requires_grad)
    last = {k: last(k, v) if isinstance(v, Tensor) else v for k, v in args.items()}
    expected = run(op.reference, like(last), threes), run(op.reference, like(last, torch.float64), threes)
    ours = run(op.fn, args, threes)
    of_rows = [k for k in expected[0] if ours[k].ndim and ours[k].shape[0] == rows]
    assert ("out0" in of_rows or op.name in SUMS) and f"d{x}" in of_rows
    assert_as_accurate({k: ours[k][-4:] for k in of_rows}, *({k: e[k] for k in of_rows} for e in expected))


@small
@pytest.mark.parametrize("few", [True] if GPU else [True, *further(False)])
def test_frozen_inputs_cost_nothing(op, case, few):
    checks.frozen_inputs_cost_nothing(op, case, few, counted=op.name not in NODES)


@first
def test_default_device_does_not_matter(op, case):
    """What an operator needs besides its tensors is where they are."""
    args = case.make(torch.float32, DEVICE)
    expected = run(op.fn, like(args), ones)
    with torch.device("meta"):
        found = run(op.fn, args, ones)
    assert_same_bits(found, expected)


@needs_kernels
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_second_derivatives_are_refused(op):
    checks.second_derivatives_are_refused(op)


@needs_kernels
def test_second_derivatives_by_inputs_that_others_computed():
    x = torch.randn(3, 8, device=DEVICE, requires_grad=True)
    (dx,) = torch.autograd.grad(OPS["glu"].fn(2 * x, 3 * x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(dx.square().sum(), x, allow_unused=True)


class Called(torch.nn.Module):
    """``fn`` with the arguments that are no tensors; ``names`` are those of the others."""

    def __init__(self, fn, args: dict):
        super().__init__()
        self.fn, self.names = fn, [k for k, v in args.items() if isinstance(v, Tensor)]
        self.rest = {k: v for k, v in args.items() if not isinstance(v, Tensor)}

    def forward(self, *tensors: Tensor):
        return self.fn(**self.rest, **dict(zip(self.names, tensors)))

    def given(self, fn):
        """``fn`` of the tensors in order, with the arguments of the operator."""
        return lambda **args: fn(*(args[k] for k in self.names))


RECORDERS = {
    "export": lambda m, tensors: torch.export.export(m, tensors, strict=False).module(),
    "strict": lambda m, tensors: torch.export.export(m, tensors, strict=True).module(),
    "make_fx": lambda m, tensors: make_fx(m)(*tensors),
    "symbolic": lambda m, tensors: make_fx(m, tracing_mode="symbolic")(*tensors),
    "pre_dispatch": lambda m, tensors: make_fx(m, pre_dispatch=True)(*tensors),
    "jit.trace": lambda m, tensors: torch.jit.trace(m, tensors, check_trace=False),
}
# of the others, exported graphs are enough
ANY_GRAPH = ("cross_entropy", "linear_cross_entropy", "linear_divergence", "moe", "rms_norm")


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    "name, how", [(name, how) for name in OPS for how in RECORDERS if how == "export" or name in ANY_GRAPH]
)
def test_recorded_graphs_have_gradients(name, how):
    """And only PyTorch's operators: a graph of launchers would leave out gradients."""
    op, case = OPS[name], _first(OPS[name])[0]
    module = Called(op.fn, args := case.make(torch.float32, DEVICE))
    graph = RECORDERS[how](module, tuple(like(args)[k] for k in module.names))
    assert not re.search(r"ops\.liger|liger::|\^\w", str(graph.graph))
    assert_accurate(run(module.given(graph), like(args)), op, case)


def test_a_recorded_torch_function_has_gradients():
    """PyTorch takes the mode of a graph above autograd off while it calls one."""
    z, target = torch.randn(3, 8, device=DEVICE), torch.tensor([1, -100, 7], device=DEVICE)
    graph = make_fx(lambda z, target: liger_cross_entropy(z, target), pre_dispatch=True)(z, target)
    found, expected = (torch.func.grad(fn)(z, target) for fn in (graph, F.cross_entropy))
    torch.testing.assert_close(found, expected)


@needs_kernels
@pytest.mark.parametrize("name", ["fused_add_rms_norm", "rope", "lora_linear", "lora_mlp"])
def test_tensors_of_a_finished_transform(name):
    """They have no memory of their own: tables of angles that a module has kept."""
    op, kept = OPS[name], []
    args = _first(op)[0].make(torch.float32, DEVICE)
    for key, t in args.items():
        if isinstance(t, Tensor) and t.is_floating_point():
            torch.func.grad(lambda t: (kept.append(t * 1), t.sum())[1])(t.detach())
            found, expected = (forward(op.fn, args | {key: each}) for each in (kept[-1], t.detach()))
            assert_same_bits(found, expected)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_forward_mode_is_that_of_the_reference(op):
    args = _first(op)[0].make(torch.float64, DEVICE)

    def tangents(fn, dtype: torch.dtype) -> list[Tensor]:
        moved = {k: torch.ones_like(v) for k, v in differentiable(args).items()}
        with forward_ad.dual_level():
            cast = lambda v: v.detach().to(dtype) if v.is_floating_point() else v
            given = {k: cast(v) if isinstance(v, Tensor) else v for k, v in args.items()}
            outs = forward(fn, given | {k: forward_ad.make_dual(given[k], t.to(dtype)) for k, t in moved.items()})
            return [t for o in outs.values() if (t := forward_ad.unpack_dual(o).tangent) is not None]

    found, expected = tangents(op.fn, torch.float32), tangents(op.reference, torch.float64)
    assert len(found) == len(expected) > 0
    for ours, true in zip(found, expected):
        torch.testing.assert_close(ours.double(), true.double(), rtol=1e-3, atol=1e-4 * (1 + true.abs().max().item()))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_fake_tensors_have_the_shapes_of_results(op):
    """Also beside real ones, as estimators of memory have them."""
    case = _first(op)[0]
    compact = {"compact": True} if "compact" in inspect.signature(op.fn).parameters else {}
    args = case.make(torch.float32, DEVICE)
    expected = run(op.fn, like(args), ones)
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = run(op.fn, args | compact, ones)
    assert {k: (v.shape, v.dtype) for k, v in found.items()} == {k: (v.shape, v.dtype) for k, v in expected.items()}


@needs_kernels
def test_functions_are_not_exported():
    """They have no reference, and a graph of their launchers would have no gradients."""
    module = Called(lambda x: LigerRMSNormFunction.apply(x, None, 1e-6), {"x": torch.ones(2, 4)})
    with pytest.raises(ValueError, match="rms_norm_fwd: an exported graph must have PyTorch's operators"):
        torch.export.export(module, (torch.ones(2, 4, requires_grad=True),))


@first
@pytest.mark.parametrize("reentrant", [*further(True), False])
def test_checkpoints(op, case, reentrant):
    """Activation checkpointing computes the same again: the same gradients, and losses to the last
    bit or two.

    A loss whose gradient nobody wants yet comes from a kernel compiled for that.
    """
    args = case.make(torch.bfloat16, DEVICE)
    by_name = lambda *values: op.fn(**dict(zip(args, values)))
    checkpointed = lambda **a: torch.utils.checkpoint.checkpoint(by_name, *a.values(), use_reentrant=reentrant)
    results = []
    for fn in (op.fn, checkpointed):
        fresh = like(args)
        outs = forward(fn, fresh)
        grads = upstream(outs)
        # reentrant checkpoints have no torch.autograd.grad
        torch.autograd.backward([outs[k] for k in grads], list(grads.values()))
        results.append((outs, {f"d{k}": v.grad for k, v in differentiable(fresh).items()}))
    (outs, grads), (again, grads_again) = results
    assert_same_bits(grads, grads_again)
    for k, o in outs.items():
        rtol = 2 * torch.finfo(o.dtype).eps if o.is_floating_point() else 0
        torch.testing.assert_close(again[k], o, rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.parametrize("name, args, error", [pytest.param(*c, id=f"{c[0]}-{c[2]}") for c in refused_calls.refused()])
def test_says_what_is_wrong(name, args, error):
    with pytest.raises(ValueError) as raised:
        OPS[name].fn(**_op.Case(name, args).make(torch.float32, DEVICE))
    assert str(raised.value) == f"{name}: {error}"


@functools.cache
def recorded(op_name: str, case: int, frozen: str | None) -> dict[str, dict[str, tuple]]:
    """Calls of launchers by an operator's case, with one input frozen or none."""
    calls: dict[str, dict[str, tuple]] = {}
    args = OPS[op_name].cases[case].make(torch.float32, DEVICE)
    if frozen:
        args[frozen] = args[frozen].detach()
    with Launches() as launches:
        run(OPS[op_name].fn, args)
    for func, fargs, fkwargs, _ in launches.calls:
        kind = tuple((a.ndim, a.dtype) if isinstance(a, Tensor) else a for a in fargs)
        calls.setdefault(func._schema.name.removeprefix("liger::"), {}).setdefault(repr(kind), (func, fargs, fkwargs))
    return calls


def ways(ops: list[str]):
    """What ``recorded`` may be asked: small cases, the first of every operator first; then these
    with one input frozen."""
    cases = [(i, op, c) for op in ops for i, c in enumerate(OPS[op].cases) if not c.gpu]
    cases.sort(key=lambda found: found[2] not in _first(OPS[found[1]]))
    yield from ((op, i, None) for i, op, _ in cases)
    yield from ((op, i, frozen) for i, op, c in cases for frozen in differentiable(c.make(torch.float32, DEVICE)))


def checked_apart() -> set[str]:
    """Launchers that no operator's case reaches: a test beside this one makes the check of ``liger.NAME``."""
    texts = [path.read_text() for path in Path(__file__).parent.glob("*.py")]
    return {name for text in texts if "opcheck(" in text for name in re.findall(r"\bliger\.(\w+)", text)}


@functools.cache
def with_imported(module: str) -> str:
    """The name and the source of a module, and the source of those of ours that it imports from."""
    source = inspect.getsource(sys.modules[module])
    imported = re.findall(r"^from (liger_kernel\.ops\.\w+\.[\w.]+) import", source, re.M)
    return "\n".join([module, source, *(inspect.getsource(sys.modules[name]) for name in imported)])


@needs_kernels
@pytest.mark.parametrize("name", sorted(_op._LAUNCHERS.keys() - checked_apart()))
def test_launcher_has_a_true_schema_and_fake(name):
    home = _op._LAUNCHERS[name].rpartition(".")[2]
    near = [o.name for o in OPS.values() if re.search(rf"\b{home}\b", with_imported(o.fn.__module__))]
    reached = (found for way in ways(near) if (found := recorded(*way).get(name)))
    calls = {kind: call for found in itertools.islice(reached, 40 if GPU else 1) for kind, call in found.items()}
    assert calls, f"no case reaches {name}: check it in a test of its own, as test_lora.py does with opcheck"
    for func, args, kwargs in list(calls.values())[: None if GPU else 1]:
        checks.has_a_true_schema_and_fake(func, args, kwargs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_runs_where_its_tensors_are(op):
    args = op.cases[0].make(torch.float32, "cuda:1")
    pytorch, truth = run(op.reference, like(args)), run(op.reference, like(args, torch.float64))
    with torch.cuda.device(0):
        assert_as_accurate(run(op.fn, args), pytorch, truth)


def test_functions_without_kernels_say_so(monkeypatch):
    """An ``autograd.Function`` has no reference to fall back to."""
    monkeypatch.setattr(_op, "_KERNEL_DEVICES", set())
    for triton, what in ((True, "a GPU"), (False, "Triton")):
        monkeypatch.setattr(_op, "HAS_TRITON", triton)
        with pytest.raises(RuntimeError, match=f"kernels need {what}, got a tensor on cpu: call the operator"):
            LigerRMSNormFunction.apply(torch.ones(2, 4), None, 1e-6)


def test_a_reference_has_the_signature_of_its_operator(monkeypatch):
    monkeypatch.setattr(_op, "OPS", {})

    def scaled(x: Tensor, *, scale: float = 2.0, block: int = 8) -> Tensor:
        return x * scale

    declare = lambda reference: _op.op(reference=reference, cases=[], cost=None)(scaled)

    def names_alone(x, *, scale, **how):
        return x * scale

    declare(names_alone)
    assert names_alone(3.0) == names_alone(3.0, block=4) == scaled(3.0)
    other_default = lambda x, *, scale=3.0, block=8: x * scale
    other_default.__annotations__ = scaled.__annotations__
    for wrong in (lambda x, *, factor, **how: x, lambda x, *, scale: x, lambda y, *, scale, block: y, other_default):
        with pytest.raises(TypeError, match="differ in signature"):
            declare(wrong)


WITHOUT_TRITON = """
import importlib.abc, sys

class NoTriton(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTriton())
import torch
from liger_kernel.ops import OPS
from liger_kernel.ops._core import operator as _op
from liger_kernel.testing import assert_as_accurate, like, run

assert not _op.HAS_TRITON and "triton" not in sys.modules
for op in OPS.values():
    args = op.cases[0].make(torch.float32, "cpu")
    ours, pytorch, truth = run(op.fn, like(args)), run(op.reference, like(args)), run(op.reference, like(args, torch.float64))
    assert_as_accurate(ours, pytorch, truth)
    print(op.name)
"""  # noqa: E501


def test_works_without_triton(user_env):
    command = [sys.executable, "-c", WITHOUT_TRITON]
    done = subprocess.run(command, env=user_env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(OPS)
