"""docs/environment.md has every environment variable that the source reads, and where."""

import ast
import functools
import os
import re
import subprocess
import sys
import threading
from collections import defaultdict
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from liger_kernel.train.ranks import ELASTIC

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "liger_kernel"
# names that are put together, or taken from a table, in the files that read them so
OF_OPERATORS = ("", "_<OPERATOR>")
MADE = {
    "compat/backends.py": {f"LIGER_KERNEL_{word}{name}" for word in ("IMPL", "BACKEND") for name in OF_OPERATORS},
    "deploy/flyte1.py": set(ELASTIC),
    "train/ranks.py": set(ELASTIC),
}


SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def keys(tree: ast.Module) -> list[ast.expr]:
    """What a module asks ``os.environ``: subscripts, ``get``, ``setdefault``, ``in``."""
    # of its end alone at first, as unparsing every node of the source takes seconds
    of_environ = lambda node: getattr(node, "attr", "") == "environ" and ast.unparse(node) == "os.environ"
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and of_environ(node.value) and isinstance(node.ctx, ast.Load):
            found.append(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("get", "setdefault") and of_environ(node.func.value):
                found.append(node.args[0])
        elif isinstance(node, ast.Compare) and any(map(of_environ, node.comparators)):
            found.append(node.left)
    return found


def constants() -> dict[str, str]:
    """Names in capitals that are one string: variables are named by them."""
    return dict(found for source in SOURCES.values() for found in re.findall(r'^([A-Z_]+) = "(\w+)"', source, re.M))


def read() -> dict[str, set[str]]:
    """Variable -> files that read it."""
    found = defaultdict(set)
    named = constants()
    for path, source in SOURCES.items():
        for key in keys(ast.parse(source)) if "environ" in source else ():
            name = key.value if isinstance(key, ast.Constant) else named.get(ast.unparse(key))
            for each in [name] if name else MADE[path]:
                found[each].add(path)
    return found


def test_the_table_is_what_the_source_reads():
    lines = (ROOT / "docs" / "environment.md").read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| `")]
    assert all(len(row) == 4 and all(cell.strip("| ") for cell in row) for row in rows)
    source = read()
    assert sorted(name for row in rows for name in re.findall(r"`([^`]+)`", row[0])) == sorted(source)
    for row in rows:
        names = re.findall(r"`([^`]+)`", row[0])
        assert set(re.findall(r"`([^`]+)`", row[3])) == set().union(*(source[name] for name in names)), names


ROCM = "https://rocm"


@pytest.mark.parametrize(
    "gpu, reached, given, index",
    [(False, True, "", "CPU"), (False, False, "", ""), (True, True, "", ""), (False, True, ROCM, ROCM)],
)
def test_make_takes_the_build_of_pytorch_that_the_machine_needs(tmp_path, gpu, reached, given, index):
    """Without a GPU that for CPUs, if its index can be reached."""
    (tmp_path / "torch").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(SimpleHTTPRequestHandler, directory=tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = f"http://127.0.0.1:{server.server_port}" + "/nowhere" * (not reached)
    for name, code in {
        "nvidia-smi": f"exit {int(not gpu)}",
        # makes an environment whose python writes down what pip is asked for
        "python": f'case "$2" in venv) mkdir -p .venv/bin && cp {tmp_path}/python .venv/bin/python;; '
        f'pip) echo "$@" >> {tmp_path}/asked;; *) exec {sys.executable} "$@";; esac',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    command = ["make", "-f", ROOT / "Makefile", ".venv/.ready-train", f"PYTHON={tmp_path}/python", f"CPU_INDEX={page}"]
    for file in ("pyproject.toml", "constraints.txt"):
        (tmp_path / file).write_text("")
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "no_proxy": "*"}
    subprocess.run([*command, f"TORCH_INDEX={given}"], cwd=tmp_path, check=True, env=environment)
    server.shutdown()
    server.server_close()
    asked = (tmp_path / "asked").read_text().splitlines()[-1]
    assert asked.partition("--extra-index-url ")[2].split(" ")[0] == (page if index == "CPU" else index)
