"""An operator of another package: ``examples/own_operator``, installed, is seen and checked, and
checks find what is wrong with it."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import processes
import pytest
from devices import needs_kernels

from liger_kernel import library
from liger_kernel.operator_checks import checks_of
from liger_kernel.ops import OPS, rms_norm
from liger_kernel.ops._core import operator as _op

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_operator"
SOURCE = (EXAMPLE / "l2_normalise.py").read_text()


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder of installed packages: the example, and one whose operators cannot be imported."""
    site = tmp_path_factory.mktemp("site")
    for name in ("l2_normalise.py", "test_l2_normalise.py"):
        (site / name).write_text((EXAMPLE / name).read_text())
    project = (EXAMPLE / "pyproject.toml").read_text()
    group, name, module = re.search(r'^\[project\.entry-points\."(.+)"\]\n(.+) = "(.+)"', project, re.M).groups()
    for package, value in (("own_operator", module), ("broken", "no_such_module")):
        info = site / f"{package}-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    return site


CALLS = """
import os, pytest
from liger_kernel import cli
options = ["-q", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider"]
assert pytest.main([*options, "test_l2_normalise.py"]) == 0
assert cli.main(["ops"]) == cli.main(["bench", "l2_normalise", "--case", "odd", "--dtype", "fp32", "--smoke"]) == 0
"""


@needs_kernels
def test_its_checks_pass_and_commands_see_it(installed, tmp_path):
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"PYTHONPATH": path}
    code, said = processes.forked(["-c", CALLS], env, tmp_path / "said", installed)
    assert code == 0, said
    assert int(re.search(r"(\d+) passed", said)[1]) >= 44
    assert re.search(r"^l2_normalise +3 cases  Rows of length 1", said, re.M)
    assert re.search(r"^rms_norm .*^.*l2_normalise.*odd", said, re.M | re.S), said
    assert "the operators of no_such_module are missing" in said


# What is wrong: the text, another one instead, the check that finds it, and what it says
WRONG = {
    "a factor of the gradient": (")[:, None]) * scale, mask)", ")[:, None]), mask)", "odd-float32", "dx: max error"),
    "the stride of rows": ("M, N, x.stride(0), eps", "M, N, N, eps", "odd-row_padded", "out0: not finite"),
    "the stride of upstream rows": ("dy.stride(0), x.str", "N, x.str", "odd-padded", "dx: not finite"),
    "what is sent upstream is written to": ("dx = x.new_empty(M, N)", "dx = dy", "odd-modifies_nothing", "gradient of"),
    "memory that nobody writes": (
        "x * scale[:, None], mask)",
        "x * scale[:, None], mask & (row > 0)[:, None])",
        "odd-never_reads_uninitialised_memory",
        "out0: not finite",
    ),
    "no kernel": ("if not use_kernels(x)", "if True", "kernels_run", r"launched \[\]"),
    "second derivatives": ("    @once_differentiable\n", "", "second_derivatives_are_refused", "are computed"),
    "a number of rows that is a constant": (
        "y, scale = x.new_empty(M, N),",
        "y, scale = x.new_empty(7 if N == 123 else M, N),",
        "odd-compiles_whole",
        r"specialized it to be a constant \(7\)",
    ),
    "a fake of another shape": (
        "dx = x.new_empty(M, N)",
        "dx = x.new_empty(M, N + tracing(x))",
        "odd-launchers_have_true_schemas_and_fakes",
        "Shapes .* are not equal",
    ),
}


@needs_kernels
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what, tmp_path, monkeypatch):
    monkeypatch.setattr(_op, "OPS", {})
    text, other, check, said = WRONG[what]
    assert text in SOURCE
    name = f"wrong{[*WRONG].index(what)}"
    path = tmp_path / f"{name}.py"
    path.write_text(SOURCE.replace(text, other).replace("l2_normalise", name))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("liger_kernel.operator_checks.OPS", _op.OPS)
    checks = {each.__name__: each for each in checks_of(getattr(module, name))}
    with pytest.raises(Exception, match=said):
        checks[check]()


def test_what_is_no_operator_is_refused():
    with pytest.raises(ValueError, match=r"checks_of: fn must be an operator that @op has declared, got <function"):
        checks_of(lambda x: x)


def test_a_name_is_one_operator():
    def other(x):
        return x

    other.__name__ = "rms_norm"
    with pytest.raises(ValueError, match=r"op: name must be new, got 'rms_norm', an operator of liger_kernel\.ops\."):
        _op.op(reference=lambda x: x, cases=[], cost=None)(other)
    assert OPS["rms_norm"].fn is rms_norm


def test_an_operator_needs_nothing_private():
    found = set(re.findall(r"^from (liger_kernel[\w.]*) import", SOURCE, re.M))
    assert found == {"liger_kernel.library"}


def test_names_of_the_contract_stay():
    """What is added is added here; what is taken away breaks packages of others."""
    published = (
        "Case Cost T acc cdiv column_sum jit launch launch_config launcher load_row load_tile nbytes "
        "once_differentiable op rows_of shaped store_tile tile_at tl tracing use_kernels"
    )
    assert library.__all__ == published.split() and all(hasattr(library, name) for name in library.__all__)
