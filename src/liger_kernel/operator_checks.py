"""What every operator promises, as checks that any test runner can call. Those of this package call
them, too.

On a machine without a GPU, kernels run in Triton's interpreter if ``TRITON_INTERPRET=1`` is set
before anything is imported; without it, ``kernels_run`` fails.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_kernel.ops._core.operator import NAMESPACE, OPS, Case, Op, T
from liger_kernel.testing import (
    Named,
    assert_as_accurate,
    assert_same_bits,
    backward,
    differentiable,
    forward,
    like,
    run,
    upstream,
)

__all__ = ["checks_of"]

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Gradients = Callable[[Named], Named]


# What is sent upstream


def ones(outs: Named) -> Named:
    """What ``loss.backward()`` sends upstream."""
    return {k: torch.ones_like(o) for k, o in outs.items() if o.requires_grad}


def threes(outs: Named) -> Named:
    """One number for all elements, not 1, in memory once: stride 0, as from ``(3 *
    y).sum().backward()``."""
    return {k: o.new_full((), 3.0).expand(o.shape) for k, o in outs.items() if o.requires_grad}


def transposed(outs: Named) -> Named:
    """Upstream gradients in column-major memory."""
    return {k: column_major(g) for k, g in upstream(outs).items()}


def padded(outs: Named) -> Named:
    """Upstream gradients with rows further apart than they are long."""
    return {k: row_padded(g) if g.ndim else g for k, g in upstream(outs).items()}


# How tensors lie in memory


def column_major(t: Tensor) -> Tensor:
    return t.movedim(-1, 0).contiguous().movedim(0, -1) if t.ndim else t


def noise(t: Tensor) -> float | bool | int:
    """What must not be read: NaN, True or the largest integer."""
    return math.nan if t.is_floating_point() else True if t.dtype == torch.bool else torch.iinfo(t.dtype).max


def row_padded(t: Tensor) -> Tensor:
    """Rows further apart than they are long, noise between them."""
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 3), noise(t))
    return wide[..., : t.shape[-1]].copy_(t)


def every_other(t: Tensor) -> Tensor:
    """Columns two apart, those of vectors too, noise between them."""
    wide = t.new_full((*t.shape, 2), noise(t))
    return wide[..., 0].copy_(t)


def misaligned(t: Tensor) -> Tensor:
    """Begins one element into its storage."""
    return torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape)


def sequence_first(t: Tensor) -> Tensor:
    """The first two dims exchanged in memory, as attention layouts do."""
    return t.transpose(0, 1).contiguous().transpose(0, 1) if t.ndim > 1 else t


LAYOUTS = (column_major, row_padded, every_other, misaligned, sequence_first)


def of_rows(t: Tensor, times: int) -> Tensor:
    """A copy that is no view, its rows ``times`` times, and of the same strides: guards of
    compiled code ask for all that."""
    rows = t.shape[0]
    if t.stride(0) == 0:
        return t[:1].clone().expand(times * rows, *t.shape[1:])
    copy = torch.empty_strided((times * rows, *t.shape[1:]), t.stride(), dtype=t.dtype, device=t.device)
    with torch.no_grad():
        for i in range(times):
            copy[i * rows : (i + 1) * rows] = t
    return copy.requires_grad_(t.requires_grad)


def sharing_rows(case: Case) -> list[str]:
    """The tensors that have the first one's leading dim."""
    tensors = {k: v for k, v in case.args.items() if isinstance(v, T)}
    rows = next(iter(tensors.values())).shape[0]
    return [k for k, v in tensors.items() if v.shape[0] == rows]


# What the reference says


def _expected(op: Op, case: Case, dtype: torch.dtype, grads: Gradients, draw: int) -> tuple[Named, Named]:
    args = case.make(dtype, DEVICE, draw)
    return run(op.reference, like(args), grads), run(op.reference, like(args, torch.float64), grads)


_remembered = functools.lru_cache(maxsize=8 if GPU else 512)(_expected)


def expected(op: Op, case: Case, dtype: torch.dtype, grads: Gradients = upstream, draw: int = 0) -> tuple[Named, Named]:
    """The reference's results in ``dtype`` and in fp64, for a draw of the case's inputs."""
    return (_expected if case.gpu else _remembered)(op, case, dtype, grads, draw)


def assert_accurate(
    ours: Named, op: Op, case: Case, dtype: torch.dtype = torch.float32, grads: Gradients = upstream,
    without: Container[str] = (),
) -> None:  # fmt: skip
    """``without``: names of gradients that are not asked for. Where the reference happens to be more
    accurate than it mostly is, other draws, which take longer, say what is typical."""

    def of(draw: int) -> tuple[Named, Named]:
        pytorch, truth = expected(op, case, dtype, grads, draw)
        asked = lambda found: {k: t for k, t in found.items() if k not in without}
        return asked(pytorch), asked(truth)

    first = of(0)
    try:
        assert_as_accurate(ours, *first)
    except AssertionError:
        # one draw says enough of a large tensor, and nothing of a few numbers
        draws = 8 if not case.gpu else 4 if any(t.numel() < 16 for t in first[1].values()) else 1
        again = lambda draw: run(op.fn, case.make(dtype, DEVICE, draw), grads)
        assert_as_accurate(ours, *first, *map(of, range(1, draws)), again=again)


class Launches(TorchDispatchMode):
    """Records ``(launcher, args, kwargs, outputs)`` of every launcher that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == NAMESPACE:
            self.calls.append((func, args, kwargs or {}, out))
        return out

    def allocated(self) -> int:
        """Elements that launchers returned."""
        outs = itertools.chain.from_iterable(
            out if isinstance(out, (tuple, list)) else (out,) for *_, out in self.calls
        )
        return sum(o.numel() for o in outs if isinstance(o, Tensor))


# The checks


def kernels_run(op: Op) -> None:
    """Nothing else would notice if everything fell back to the reference."""
    with Launches() as launches:
        run(op.fn, op.cases[0].make(torch.bfloat16, DEVICE))
    found = [str(call[0]) for call in launches.calls]
    without = "" if GPU else "; without a GPU, kernels need TRITON_INTERPRET=1"
    assert len(found) >= 2, f"{op.name}: forward and backward launched {found}{without}"


def second_derivatives_are_refused(op: Op) -> None:
    """Rather than left out of a sum: a penalty on a gradient is not a constant."""
    args = op.cases[0].make(torch.float32, DEVICE)
    outs, inputs = forward(op.fn, args), list(differentiable(args).values())
    dx = torch.autograd.grad(outs["out0"].sum(), inputs[0], create_graph=True)[0]
    penalised = outs["out0"].sum() + dx.square().sum()
    for differentiate in (
        lambda: torch.autograd.grad(penalised, inputs, allow_unused=True, retain_graph=True),
        lambda: penalised.backward(),
    ):
        try:
            differentiate()
        except RuntimeError as error:
            assert "no second derivatives" in str(error), error
        else:
            raise AssertionError(f"{op.name}: second derivatives are computed: is backward @once_differentiable?")


def as_accurate_as_pytorch(op: Op, case: Case, dtype: torch.dtype = torch.float32, grads: Gradients = upstream) -> None:
    assert_accurate(run(op.fn, case.make(dtype, DEVICE), grads), op, case, dtype, grads)


def strides_do_not_matter(op: Op, case: Case, arrange: Callable[[Tensor], Tensor]) -> None:
    args = {
        k: arrange(v.detach()).requires_grad_(v.requires_grad) if isinstance(v, Tensor) and v.ndim else v
        for k, v in case.make(torch.float32, DEVICE).items()
    }
    assert_accurate(run(op.fn, args), op, case)


def compiles_whole(
    op: Op, case: Case, *, same: Case | None = None, any_rows: bool = True, apart: Sequence[str] = ()
) -> None:
    """And once for batches of all sizes, if ``any_rows``: neither the operator nor its launchers'
    fakes take the number of rows for a constant.

    ``same``: a case of the same inputs that has the results of compiled code. ``apart``: tensors
    whose first dim is not that of the rows, even if it has its size.
    """
    torch._dynamo.reset()
    # Inductor takes seconds a case and treats all cases of an operator alike: it compiles the first
    # three
    inductor = GPU and case in list(op.cases)[:3]
    compiled = torch.compile(op.fn, fullgraph=True, dynamic=True, backend="inductor" if inductor else "aot_eager")
    args = case.make(torch.float32, DEVICE)
    tensors = {name: t for name, t in args.items() if isinstance(t, Tensor) and t.ndim and name not in apart}
    size = next(iter(tensors.values())).shape[0]
    rows = {name: of_rows(t, 1) for name, t in tensors.items() if t.shape[0] == size > 1}
    for t in rows.values():
        torch._dynamo.mark_dynamic(t, 0)
    assert_accurate(run(compiled, args | rows), op, same or case)
    if any_rows:
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled(**args | {name: of_rows(t, 2) for name, t in rows.items()})


def results_may_be_written_into(op: Op, case: Case) -> None:
    """As models do with what PyTorch returns. What the backward needs is missed loudly."""
    args = case.make(torch.float32, DEVICE)
    outs = forward(op.fn, args)
    grads = upstream(outs)
    try:
        written = {k: o.mul_(2) for k, o in outs.items() if k in grads}
        found = backward(written, args, grads)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error) or "is being modified inplace" in str(error)
    else:
        expected = run(op.fn, args, lambda outs: {k: 2 * g for k, g in upstream(outs).items()})
        assert_same_bits(found, {k: expected[k] for k in found})


def same_bits_twice(op: Op, case: Case) -> None:
    args = case.make(torch.bfloat16, DEVICE)
    assert_same_bits(run(op.fn, like(args)), run(op.fn, like(args)))


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every uninitialised tensor is NaN, or the largest integer, wherever it is allocated."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all(), "torch.utils.deterministic.fill_uninitialized_memory is off"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not have a deterministic implementation")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def never_reads_uninitialised_memory(op: Op, case: Case) -> None:
    with poisoned_memory():
        assert_accurate(run(op.fn, case.make(torch.float32, DEVICE)), op, case)


def empty_input(op: Op, case: Case) -> None:
    """No rows; a tensor whose name ends in ``_offsets`` says where rows begin, and has one more."""
    args = case.make(torch.float32, DEVICE)
    empty = args | {k: args[k].detach()[:0].requires_grad_(args[k].requires_grad) for k in sharing_rows(case)}
    empty |= {k: args[k][:1] for k in args if k.endswith("_offsets")}
    assert_as_accurate(run(op.fn, empty), run(op.reference, like(empty)), run(op.reference, like(empty, torch.float64)))


def frozen_inputs_cost_nothing(op: Op, case: Case, few: bool = True, counted: bool = True) -> None:
    """Subsets of the inputs ask for gradients, on a GPU all of them, else few or all but one: only
    these get them, and what is not needed is not allocated, if launchers allocate it
    (``counted``)."""
    _, truth = expected(op, case, torch.float32)
    args = case.make(torch.float32, DEVICE)
    names = list(differentiable(args))
    with Launches() as full:
        run(op.fn, like(args))
    sizes = range(len(names)) if GPU else {0, 1} & {*range(len(names))} if few else [len(names) - 1]
    for needed in itertools.chain.from_iterable(itertools.combinations(names, n) for n in sizes):
        frozen = {
            k: v.detach().clone().requires_grad_(k in needed) if isinstance(v, Tensor) else v for k, v in args.items()
        }
        with Launches() as launches:
            ours = run(op.fn, frozen)
        assert_accurate(ours, op, case, without={f"d{k}" for k in names if k not in needed})
        if full.calls and counted:
            saved, unneeded = full.allocated() - launches.allocated(), 0
            known = [truth[f"d{k}"] for k in needed if f"d{k}" in truth]
            for d in (truth[f"d{k}"] for k in names if k not in needed and f"d{k}" in truth):
                if not any(
                    d.shape == other.shape and torch.equal(d, other) for other in known
                ):  # inputs that are added up share theirs
                    unneeded += d.numel()
                    known.append(d)
            assert saved >= unneeded, (
                f"gradients for {needed or 'nothing'}: launchers allocate {saved} elements less; the others have "
                f"{unneeded}"
            )
    with torch.no_grad(), Launches() as launches:
        forward(op.fn, args)
    with Launches() as frozen_launches:
        forward(op.fn, {k: v.detach() if isinstance(v, Tensor) else v for k, v in args.items()})
    assert launches.allocated() == frozen_launches.allocated(), "no_grad computes more than frozen inputs do"


def modifies_nothing(op: Op, case: Case) -> None:
    """Neither inputs, nor what is sent upstream, nor results, by the backward."""
    args = case.make(torch.bfloat16, DEVICE)
    before = {k: v.detach().clone() for k, v in args.items() if isinstance(v, Tensor)}
    outs = forward(op.fn, args)
    grads = upstream(outs)
    now = {k: args[k] for k in before} | outs | {f"gradient of {k}": g for k, g in grads.items()}
    before |= {k: v.detach().clone() for k, v in now.items() if k not in before}
    versions = {k: v._version for k, v in now.items()}
    backward(outs, args, grads)
    assert_same_bits({k: v.detach() for k, v in now.items()}, before)
    assert {k: v._version for k, v in now.items()} == versions


def second_backward_equals_the_first(op: Op, case: Case) -> None:
    args = case.make(torch.bfloat16, DEVICE)
    outs = forward(op.fn, args)
    grads = threes(outs)
    first = {k: g.clone() for k, g in backward(outs, args, grads, retain_graph=True).items()}
    assert_same_bits(backward(outs, args, grads, retain_graph=True), first)
    assert_same_bits(backward(outs, args, grads), first)


def has_a_true_schema_and_fake(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """A call of a launcher, as ``Launches`` records it."""
    torch.library.opcheck(
        func, args, kwargs, test_utils=("test_schema", "test_faketensor") if GPU else "test_faketensor"
    )


def launchers_have_true_schemas_and_fakes(op: Op, case: Case) -> None:
    with Launches() as launches:
        run(op.fn, case.make(torch.float32, DEVICE))
    for func, args, kwargs, _ in launches.calls:
        has_a_true_schema_and_fake(func, args, kwargs)


def never_waits_for_the_device(op: Op, case: Case) -> None:
    args = case.make(torch.bfloat16, DEVICE)
    grads = upstream(forward(op.fn, args))
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(op.fn, args, lambda outs: grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")


OF_AN_OPERATOR = (kernels_run, second_derivatives_are_refused)
OF_A_CASE: tuple[Callable[[Op, Case], None], ...] = (
    results_may_be_written_into,
    same_bits_twice,
    never_reads_uninitialised_memory,
    empty_input,
    frozen_inputs_cost_nothing,
    modifies_nothing,
    second_backward_equals_the_first,
    compiles_whole,
    launchers_have_true_schemas_and_fakes,
    *(never_waits_for_the_device,) * GPU,
)


def _named(name: str, check: Callable[..., None], *args: Any) -> Callable[[], None]:
    bound: Any = functools.partial(check, *args)
    bound.__name__ = name  # by which pytest names a parameter
    return bound


def checks_of(fn: Callable[..., Any]) -> list[Callable[[], None]]:
    """The checks of an operator, each a function without arguments and with a name, for example
    for ``pytest.mark.parametrize``.

    For every case: accuracy of outputs and gradients, in three dtypes and beside fp64. For every
    case that is not ``gpu``: any upstream gradient, layouts in memory, ``torch.compile`` of the whole
    for all numbers of rows, empty and frozen inputs, equal bits in a second call and a second
    backward, nothing modified, nothing uninitialised read, true schemas and fakes of launchers, and
    on a GPU that the host never waits. Once: kernels run, and second derivatives are refused.

    Give the rows of a case a number that is not the size of another tensor's first dim: tensors that
    share the first one's are the batch.
    """
    op = OPS.get(getattr(fn, "__name__", ""))
    if op is None or op.fn is not fn:
        raise ValueError(f"checks_of: fn must be an operator that @op has declared, got {fn!r}")
    found = [_named(check.__name__, check, op) for check in OF_AN_OPERATOR]
    for case in (c for c in op.cases if not c.timed and (GPU or not c.gpu)):
        found += [_named(f"{case.name}-{str(d)[6:]}", as_accurate_as_pytorch, op, case, d) for d in DTYPES]
        if not case.gpu:
            found += [_named(f"{case.name}-{check.__name__}", check, op, case) for check in OF_A_CASE]
            found += [_named(f"{case.name}-{a.__name__}", strides_do_not_matter, op, case, a) for a in LAYOUTS]
            for grads in (ones, threes, transposed, padded):
                name = f"{case.name}-{grads.__name__}"
                found.append(_named(name, as_accurate_as_pytorch, op, case, torch.float32, grads))
    return found
