"""Fixtures and options of all tests."""

from __future__ import annotations

import gc
import json
import os

import interpreted  # noqa: F401
import numpy
import processes
import pytest
from skipped import Skips

from liger_kernel import memory

memory.SMALL = 0  # tensors of tests are small


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """``once(name, fn)``: what ``fn`` returns, JSON, which one of the test processes calls; the
    others wait for it."""
    import fcntl  # not on Windows

    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def call(name, fn):
        said = folder / f"{name}.json"
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not said.exists():
                said.write_text(json.dumps(fn()))
        return json.loads(said.read_text())

    return call


@pytest.fixture
def exact_dots(monkeypatch) -> None:
    """Rows of products in the interpreter do not depend on their places: NumPy's do in fp32, with
    some processors."""
    stock, wide = numpy.matmul, numpy.float64

    def matmul(a, b, dtype=None):
        return (
            stock(a.astype(wide), b.astype(wide)).astype(dtype) if dtype == numpy.float32 else stock(a, b, dtype=dtype)
        )

    monkeypatch.setattr(numpy, "matmul", matmul)


@pytest.fixture
def user_env() -> dict[str, str]:
    """The environment for a subprocess that is to behave as a user's: without the interpreter."""
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}


@pytest.fixture
def computed(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of the logits that recipes had to compute."""
    from liger_kernel.transformers.head.recipe import DeferredLogits

    shapes, value = [], DeferredLogits.value

    def spy(self):
        if self.computed is None:
            shapes.append(tuple(self.shape))
        return value(self)

    monkeypatch.setattr(DeferredLogits, "value", spy)
    return shapes


# Of tests that take up to a minute each: they begin first, so that at the end no process waits for
# one of them.
LONG = ["test_compile_targets", "test_warmup", "test_train", "test_runtime", "test_bench_step", "test_doors"]
LONG += ["test_parallel", "test_vocab_parallel", "test_memory_safety", "test_fit"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONG)


def pytest_collection_finish() -> None:
    gc.freeze()  # of what every test file imports nothing goes away: collections need not look through it


def pytest_sessionfinish() -> None:
    processes.stop_forkserver()


def pytest_configure(config: pytest.Config) -> None:
    if (most := config.getoption("--max-skips")) is not None:
        config.pluginmanager.register(Skips(most))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--max-skips",
        type=int,
        metavar="N",
        help="fail if more than N tests are skipped for reasons that tests/skipped.py does not list",
    )
