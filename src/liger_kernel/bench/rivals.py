"""Other packages to measure against. Each is loaded beside ours, from a place where it does not
affect other code."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from liger_kernel.nearest import did_you_mean
from liger_kernel.train.mistakes import UserError

OURS = "liger_kernel"


@dataclass(frozen=True)
class Package:
    """Where a rival's functions are, and how to install it."""

    module: str
    requirement: str


# scripts of benchmarks/ add others
PACKAGES = {"upstream": Package("liger_kernel.transformers.functional", "liger-kernel==0.8.5")}


class Missing(Exception):
    """The rival is not installed; the message says how to install it."""


class Rival:
    """A loaded package. Inside ``present()``, imports return its modules, even if their names
    are the same as ours."""

    def __init__(self, module: str, path: str | None):
        self.path = path
        self._modules: dict[str, ModuleType] = {}
        with self.present():
            self.module: ModuleType = importlib.import_module(module)

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == OURS}
        sys.modules.update(self._modules)
        if self.path:
            sys.path.insert(0, self.path)
        try:
            yield
        finally:
            if self.path:
                sys.path.remove(self.path)
            self._modules = {
                name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == OURS
            }
            sys.modules.update(hidden)


def load(name: str, path: str | None = None) -> Rival:
    """The package of rival ``name``, from directory ``path`` if given. ``Missing`` if it is not
    there."""
    package = PACKAGES[name]
    get = f"pip install --no-deps --target DIR {package.requirement}, then --{name}-path DIR"
    how = f"{path} holds no {name}: {get}" if path else f"{name} is missing: {get}"
    if name == "upstream" and path is None:
        raise Missing(how)
    try:
        return Rival(package.module, path)
    except ImportError as error:
        raise Missing(f"{how} ({error})") from error


def check_revision(ref: str) -> str:
    """The root of the checkout that contains this package. Raises ``UserError`` without a
    checkout, or if it has no revision of that name."""
    git = lambda *command: subprocess.run(
        ["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    try:
        root = git("rev-parse", "--show-toplevel")
    except FileNotFoundError as error:
        raise UserError("--base needs git, which is not installed") from error
    if root.returncode:
        raise UserError(f"--base needs a git checkout, and {Path(__file__).parents[1]} is in none")
    if git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").returncode:
        refs = git("for-each-ref", "--format=%(refname:short)").stdout.split()
        raise UserError(f"--base: no git revision {ref!r}{did_you_mean(ref, refs)}")
    return root.stdout.strip()


def revision(ref: str) -> Rival:
    """Our operators at a git revision, in their own namespace."""
    root = check_revision(ref)
    folder = tempfile.mkdtemp(prefix="liger-base-")
    archive = subprocess.run(["git", "archive", ref, "src"], cwd=root, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    for file in (Path(folder) / "src" / OURS / "ops").rglob("*.py"):  # at that revision, any file may contain the name
        file.write_text(file.read_text().replace('NAMESPACE = "liger"', 'NAMESPACE = "liger_base"'))
    return Rival("liger_kernel.ops", str(Path(folder) / "src"))
