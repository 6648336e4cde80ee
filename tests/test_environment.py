"""docs/environment.md has every environment variable that the source reads, and where."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from liger_kernel.train.ranks import ELASTIC

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "liger_kernel"
# names that are put together, or taken from a table, in the files that read them so
MADE = {
    "backends/__init__.py": {f"LIGER_KERNEL_{word}{operator}" for word in ("IMPL", "BACKEND") for operator in ("", "_<OPERATOR>")},
    "deploy/flyte1.py": set(ELASTIC),
    "train/ranks.py": set(ELASTIC),
}


def keys(tree: ast.Module) -> list[ast.expr]:
    """What ``os.environ`` is asked for in a module: subscripts that are read, ``get``, ``setdefault``, ``in``."""
    of_environ = lambda node: ast.unparse(node) == "os.environ"
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and of_environ(node.value) and isinstance(node.ctx, ast.Load):
            found.append(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "setdefault") and of_environ(node.func.value):
            found.append(node.args[0])
        elif isinstance(node, ast.Compare) and any(map(of_environ, node.comparators)):
            found.append(node.left)
    return found


def constants() -> dict[str, str]:
    """Names in capitals that are one string, wherever they are bound: variables are named by them."""
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    assigned = [node for tree in trees for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]
    return {ast.unparse(node.targets[0]): node.value.value for node in assigned}


def read() -> dict[str, set[str]]:
    """Variable -> files that read it."""
    found = defaultdict(set)
    named = constants()
    for path in PACKAGE.rglob("*.py"):
        for key in keys(ast.parse(path.read_text())):
            if isinstance(key, ast.Constant):
                names = {key.value}
            elif ast.unparse(key) in named:
                names = {named[ast.unparse(key)]}
            else:
                names = MADE[path.relative_to(PACKAGE).as_posix()]
            for name in names:
                found[name].add(path.relative_to(PACKAGE).as_posix())
    return found


def test_the_table_is_what_the_source_reads():
    rows = [line.split(" | ") for line in (ROOT / "docs" / "environment.md").read_text().splitlines() if line.startswith("| `")]
    assert all(len(row) == 4 and all(cell.strip("| ") for cell in row) for row in rows)
    source = read()
    assert sorted(name for row in rows for name in re.findall(r"`([^`]+)`", row[0])) == sorted(source)
    for row in rows:
        names = re.findall(r"`([^`]+)`", row[0])
        assert set(re.findall(r"`([^`]+)`", row[3])) == set().union(*(source[name] for name in names)), names
