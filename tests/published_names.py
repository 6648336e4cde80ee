"""Writes published_names.txt: what a wheel of the published package offers, read without importing
it.

    python tests/published_names.py                      the newest on the index, downloaded by pip
    python tests/published_names.py --version 0.8.5
    python tests/published_names.py --wheel liger_kernel-0.8.5-py3-none-any.whl

A name is public if neither it nor its module begins with an underscore, and it is
 - a class or a function at the top of a module, but for kernels;
 - or imported by a package, or by a module ``functional``, from the package itself;
 - or something else that a package, ``utils`` or ``monkey_patch`` defines.
What runs on other hardware, or is written in other languages than Triton, is left out.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "liger_kernel"
LIST = Path(__file__).with_suffix(".txt")
# for other hardware, in other languages than Triton, and the package's own tests
ELSEWHERE = ("ops.backends.", "ops.cute.", "ops.cutedsl.", "ops.cutile.", "testing.")
HEADER = (
    "# What liger-kernel {version} offers: a module with its names that have no parameters here, then the others, with "
    "theirs and their defaults. Those of a class are its constructor's. By {script}."
)


def newest(folder: Path, version: str | None = None) -> Path:
    """The wheel, downloaded by pip into ``folder``; ``CalledProcessError`` without a network."""
    asked = f"liger-kernel=={version}" if version else "liger-kernel"
    flags = ["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest"]
    subprocess.run([sys.executable, *flags, str(folder), asked], check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("liger_kernel-*.whl")
    return wheel


def modules(wheel: zipfile.ZipFile) -> Iterator[tuple[str, bool, ast.Module]]:
    """Public modules, as (path below the package, whether it is a package, syntax tree)."""
    for name in sorted(wheel.namelist()):
        path = Path(name)
        if path.parts[0] != PACKAGE or path.suffix != ".py":
            continue
        parts = path.with_suffix("").parts[1:]
        package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if package else parts)
        if any(part.startswith("_") for part in module.split(".")) or f"{module}.".startswith(ELSEWHERE):
            continue
        yield module, package, ast.parse(wheel.read(name))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those at the top of a module, also under ``if`` and ``try``."""
    for s in body:
        yield s
        if isinstance(s, ast.If) and "TYPE_CHECKING" not in ast.unparse(s.test):
            yield from statements([*s.body, *s.orelse])
        elif isinstance(s, ast.Try):
            yield from statements([*s.body, *(x for h in s.handlers for x in h.body), *s.orelse])


def parameters(f: ast.FunctionDef) -> str:
    """As they are written at a call: without types, and without what Python and autograd put in
    front."""
    a = f.args
    for each in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))):
        each.annotation = None
    while a.args and a.args[0].arg in ("self", "cls", "ctx"):
        del a.args[0]
    a.defaults, a.kw_defaults = ([d and plain(d) for d in ds] for ds in (a.defaults, a.kw_defaults))
    return f"({ast.unparse(a)})"


def plain(default: ast.expr) -> ast.expr:
    """What a default is: ``torch.float16`` as ``float16``."""
    return ast.Name(default.attr) if isinstance(default, ast.Attribute) else default


def of_class(c: ast.ClassDef) -> Iterator[str]:
    methods = {f.name: f for f in c.body if isinstance(f, ast.FunctionDef)}
    function = c.name.endswith("Function")  # what others derive from is not applied
    if function:
        for name in ("apply", "forward"):
            if name in methods:
                yield f"{c.name}.apply{parameters(methods[name])}"
                break
        else:
            yield c.name
    else:
        yield c.name + (parameters(methods["__init__"]) if "__init__" in methods else fields(c))
    for name, f in methods.items():
        if name.startswith("_") or name in ("extra_repr", "backward", "apply", *(["forward"] if function else [])):
            continue
        if not any(ast.unparse(d).endswith(("property", ".setter")) for d in f.decorator_list):
            yield f"{c.name}.{name}{parameters(f)}"


def fields(c: ast.ClassDef) -> str:
    """The parameters of a dataclass; nothing for a class whose constructor is inherited, in part
    or whole."""
    if c.bases or not any("dataclass" in ast.unparse(d) for d in c.decorator_list):
        return ""
    own = [s for s in c.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
    return f"({', '.join(s.target.id + (f'={ast.unparse(plain(s.value))}' if s.value else '') for s in own)})"  # type: ignore[union-attr]


def is_kernel(f: ast.FunctionDef) -> bool:
    return any("triton" in ast.unparse(d) or "jit" in ast.unparse(d) for d in f.decorator_list) or any(
        a.annotation is not None and "constexpr" in ast.unparse(a.annotation) for a in f.args.args
    )


def names(module: str, package: bool, tree: ast.Module) -> Iterator[str]:
    for s in statements(tree.body):
        if isinstance(s, ast.ClassDef) and public(s.name):
            yield from of_class(s)
        elif isinstance(s, ast.FunctionDef) and public(s.name) and not is_kernel(s):
            yield f"{s.name}{parameters(s)}"
        elif isinstance(s, ast.ImportFrom) and (package or module.endswith("functional")):
            yield from imports(s)
        elif isinstance(s, (ast.Assign, ast.AnnAssign)) and (package or module.endswith(("utils", "monkey_patch"))):
            targets = s.targets if isinstance(s, ast.Assign) else [s.target]
            yield from (t.id for t in targets if isinstance(t, ast.Name) and public(t.id) and t.id != "logger")


def public(name: str) -> bool:
    return not name.startswith("_")


def imports(s: ast.stmt) -> list[str]:
    """What a statement imports from the package itself."""
    if not isinstance(s, ast.ImportFrom) or not (s.level or (s.module or "").startswith(PACKAGE)):
        return []
    return [name for a in s.names if public(name := a.asname or a.name) and name != "*"]


def read(wheel: Path) -> tuple[str, dict[str, list[str]]]:
    """The wheel's version, and by module the names it offers, each with its parameters."""
    found: dict[str, list[str]] = {}
    with zipfile.ZipFile(wheel) as z:
        for module, package, tree in modules(z):
            if own := list(dict.fromkeys(names(module, package, tree))):
                found[module] = own
    return wheel.name.split("-")[1], found


def text(version: str, found: dict[str, list[str]]) -> str:
    lines = [HEADER.format(version=version, script=f"tests/{Path(__file__).name}")]
    for module, own in found.items():
        plain = [name for name in own if "(" not in name]
        lines += [" ".join([f"{module or '.'}:", *plain]), *(f"    {name}" for name in own if name not in plain)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="a wheel on disk")
    parser.add_argument("--version", help="one on the index (default: the newest)")
    parser.add_argument("--out", type=Path, default=LIST)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        version, found = read(options.wheel or newest(Path(folder), options.version))
    options.out.write_text(text(version, found))
    print(f"liger-kernel {version}: {sum(map(len, found.values()))} names in {len(found)} modules -> {options.out}")


if __name__ == "__main__":
    main()
