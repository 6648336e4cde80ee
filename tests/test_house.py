"""The shape of the code: folders in the order that CONTRIBUTING.md gives them, imports that go down
only, one name for one thing, and no folder above its budget."""

import ast
import functools
import itertools
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import mutations
import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
PACKAGE = "liger_kernel"
# Modules that import others by a name that is no constant, and what they may reach: all but these
# are seen in their source
BY_HAND = {
    "liger_kernel": "modules of names that are asked for",
    "liger_kernel._legacy": "a module whose other path is imported",
    "liger_kernel.compat.backends": "where implementations of an operator are registered",
    "liger_kernel.compat.helpers": "packages that users name",
    "liger_kernel.bench.rivals": "rivals' packages",
    "liger_kernel.cli": "modules of commands",
    "liger_kernel.engines.vllm": "vLLM's modules",
    "liger_kernel.megatron": "Megatron's modules",
    "liger_kernel.transformers": "its own modules, when a name of theirs is asked for",
    "liger_kernel.transformers.model.output_classes": "transformers' modules",
    "liger_kernel.transformers.recognise.families": "transformers' modules",
    "liger_kernel.transformers.recognise.tiny": "transformers' modules",
    "liger_kernel.transformers.trl_head": "TRL's modules",
}


def modules() -> dict[str, Path]:
    """Name -> file of every module of the package."""
    found = {}
    for path in sorted((SRC / PACKAGE).rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


LONG = 6  # arguments


def called(node: ast.Call) -> str:
    """The last name of what is called. Unparsing all calls takes longer than all the rest."""
    return getattr(node.func, "attr", None) or getattr(node.func, "id", "")


class Facts(NamedTuple):
    """What the tests ask of a file, found by one walk through it."""

    imports: set[str]  # modules of the package, at its top, within functions, or by importlib and a constant
    by_hand: bool  # imports by a name that is no constant
    classes: list[str]
    names: set[str]  # its own, and of all that it defines or reads
    laid_out: set[int]  # lines that may end in `fmt: skip`: those of a kernel and of long signatures
    characters: int  # of lines with a token that is neither a comment nor a docstring, without indentation


@functools.cache
def facts(module: str) -> Facts:
    source = MODULES[module].read_text()
    tree = ast.parse(source)
    found = Facts(set(), False, [], {MODULES[module].stem}, set(), 0)
    by_hand, for_types, documents, texts = False, set(), set(), set()
    for node in ast.walk(tree):
        named = (getattr(node, field, None) for field in ("name", "asname", "id", "attr", "arg"))
        found.names.update(name for name in named if isinstance(name, str))
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            for_types |= {id(inner) for part in node.body for inner in ast.walk(part)}
        if isinstance(node, ast.ClassDef):
            found.classes.append(node.name)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body[:1]:
                case [ast.Expr(ast.Constant(value=str())) as doc]:
                    documents |= set(range(doc.lineno, doc.end_lineno + 1))
        if isinstance(node, ast.FunctionDef):
            if any(getattr(d, "id", "") == "jit" for d in node.decorator_list):
                found.laid_out.update(range(node.lineno, node.end_lineno + 1))
            elif sum(isinstance(part, ast.arg) for part in ast.walk(node.args)) >= LONG:
                found.laid_out.update(range(node.lineno, node.body[0].lineno))
        elif isinstance(node, ast.Import) and id(node) not in for_types:
            found.imports.update(a.name for a in node.names if a.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES and id(node) not in for_types:
            inner = {a.name: f"{node.module}.{a.name}" for a in node.names}
            found.imports.update(path if path in MODULES else node.module for path in inner.values())
        elif isinstance(node, ast.Call) and called(node).endswith(("import_module", "__import__")):
            if not isinstance(named := node.args[0], ast.Constant):
                by_hand = True
            elif called(node) != "__import__":
                found.imports.update({named.value} & MODULES.keys())
        elif isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno > node.lineno:
            texts |= set(range(node.lineno + 1, node.end_lineno + 1))
    lines = [line.strip() for line in source.splitlines()]
    code = (line for i, line in enumerate(lines, 1) if i not in documents and (i in texts or line[:1] != "#"))
    return found._replace(by_hand=by_hand, characters=sum(map(len, code)))


# The list of public names has those of `extra`, too; `extra` itself needs only `ops`
SURFACES = {"liger_kernel.ops"}


@functools.cache
def graph() -> dict[str, set[str]]:
    """What each module imports. Not at import: every test process collects this file."""
    found = {name: facts(name).imports - {name} for name in MODULES}
    for name in SURFACES & found.keys():
        found[name] = {other for other in found[name] if not other.startswith("liger_kernel.extra.")}
    return found


def listed() -> list[str]:
    """Folders and files of CONTRIBUTING.md's list, from below."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## The shape of the code\n", 1)[1]
    block = re.findall(r"^ {4}(?! )(\S+)", text.split("\n\n")[0], re.M)
    return [name.removesuffix("/").removesuffix(".py") for name in block]


def child(package: str, name: str) -> str | None:
    """Which child of ``package`` module ``name`` lies in; None for itself and others."""
    return name[len(package) + 1 :].split(".")[0] if name.startswith(f"{package}.") else None


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Some circle of ``edges``, or nothing."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for following in sorted(edges.get(node, ())):
                if found := walk(following, [*path, node]):
                    return found
            done.add(node)
        return []

    return next((found for node in sorted(edges) if (found := walk(node, []))), [])


def test_every_folder_and_file_is_listed():
    assert len(set(listed())) == len(listed())
    assert {child(PACKAGE, name) for name in MODULES} - {None} == set(listed())


def test_imports_go_down():
    order = {name: i for i, name in enumerate(listed())}
    up = [
        f"{name} imports {found}"
        for name, all_found in graph().items()
        for found in all_found
        if (one := child(PACKAGE, name)) and (other := child(PACKAGE, found)) and order[other] > order[one]
    ]
    assert not up, "\n".join(up)


@pytest.mark.parametrize("package", [name for name, path in MODULES.items() if path.name == "__init__.py"])
def test_no_circle_within(package):
    """Neither of files, nor of the folders that they lie in."""
    edges = defaultdict(set)
    for name, all_found in graph().items():
        for found in all_found:
            one, other = child(package, name), child(package, found)
            if one and other and one != other:
                edges[one].add(other)
            elif one and found == package:
                edges[one].add("__init__")
            elif other and name == package:
                edges["__init__"].add(other)
    found = circle(edges)
    assert not found, " -> ".join(found)


def test_imports_by_hand_are_listed():
    by_hand = {name for name in MODULES if facts(name).by_hand}
    assert by_hand == set(BY_HAND)


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


# Names of two files or two classes that are one thing in two places, each with the reason
OF_A_SUBJECT = "operators, their modules (nn), their benchmarks (bench/cases), and what is recognised of models"
ONE_THING = {
    **dict.fromkeys(("activations", "attention", "losses", "mlps", "norms", "projections", "residual"), OF_A_SUBJECT),
    **dict.fromkeys(("token_embedding", "float8", "float8_training"), OF_A_SUBJECT),
    "grpo_loss": "LinkedIn's name of the loss, from log-probabilities and from a head",
    "cross_entropy": "the same loss, of all classes and of a vocabulary that is spread over ranks",
    "linear_cross_entropy": "the same loss, of all classes and of a vocabulary that is spread over ranks",
    "ulysses": "the published path, and the module",
    "LigerFusedLinearJSDFunction": "LinkedIn's package has two of this name",
    **dict.fromkeys(("LigerRMSNorm", "LigerSwiGLUMLP", "LigerGEGLUMLP"), "the names that the hub's kernels have"),
    **dict.fromkeys(("LigerTiledSwiGLUMLP", "LigerTiledGEGLUMLP"), "the names that the hub's kernels have"),
}


@pytest.mark.parametrize("kind", ["file", "class"])
def test_a_name_has_one_sense(kind):
    """No two files and no two classes have the same name, unless ``ONE_THING`` says why."""
    places = defaultdict(list)
    for module, path in MODULES.items():
        files = [path.stem] if path.stem not in ("__init__", "__main__") else []
        for name in files if kind == "file" else facts(module).classes:
            places[name].append(module)
    assert not {name: found for name, found in places.items() if len(found) > 1 and name not in ONE_THING}


# Words that meant something to us alone, and that a reader has to learn first. The field has others:
# folder or free memory (room), entry (door), used (taken), called (entered), trained (learnt), run by
# (served), reason (Left), module (ByItsModule), request (Wish)
PRIVATE = {
    *("house", "room", "rooms", "door", "doors", "taken", "entered", "learnt", "served", "spare", "tops"),
    *("elsewhere", "wish", "wishes"),
}
PRIVATE_CLASSES = {"Left", "Seen", "Made", "News"}  # as ordinary words they are clear


def test_identifiers_are_words_of_the_field():
    private = {
        f"{module}: {name}"
        for module in MODULES
        for name in facts(module).names
        for words in [set(re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name))]
        if words & PRIVATE_CLASSES or {word.lower() for word in words} & PRIVATE
    }
    assert not private


def test_text_of_the_source_has_no_private_words():
    """Comments, docstrings and messages; ``room`` in the sense of space is a word like any other."""
    found = {
        f"{path.relative_to(SRC)}: {word}"
        for path in MODULES.values()
        for word in re.findall(r"\b(?:house|rooms|doors?)\b", path.read_text(), re.IGNORECASE)
    }
    assert not found


def test_what_is_compiled_reads_no_locals():
    """``torch.compile`` of PyTorch 2.11 has no ``locals()``."""
    folders = [SRC / PACKAGE / name for name in ("chunked_loss", "memory", "nn", "ops")]
    assert not [f.name for folder in folders for f in folder.rglob("*.py") if "locals()" in f.read_text()]


def test_what_is_not_formatted_is_laid_out_by_meaning_or_says_why():
    stray = []
    for module, path in MODULES.items():
        lines = path.read_text().splitlines()
        if not any(line.lstrip().startswith("#") and "fmt: skip" in line for line in lines):  # says why
            skips = [i for i, line in enumerate(lines, 1) if line.endswith("# fmt: skip")]
            stray += [f"{path.name}:{i}" for i in skips if i not in facts(module).laid_out]
    assert not stray, ", ".join(stray)


def test_a_type_that_is_ignored_has_a_reason():
    """Behind it, or as a comment on the line above."""
    found = []
    for path in MODULES.values():
        lines = ["", *path.read_text().splitlines()]
        found += [
            f"{path.name}:{i}"
            for i, (above, line) in enumerate(itertools.pairwise(lines), 1)
            if "# type: ignore" in line
            and not re.search(r"# type: ignore\[[a-z, -]+\]  # \w", line)
            and not (re.search(r"# type: ignore\[[a-z, -]+\]$", line) and re.search(r"# \w", above))
        ]
    assert not found, ", ".join(found)


def test_no_folder_has_more_code_than_its_budget():
    rows = [line.split() for line in (ROOT / "tests" / "budgets.txt").read_text().splitlines() if line[0] != "#"]
    budgets = {name: int(most) for name, most, _ in rows}
    sizes: dict[str, int] = defaultdict(int)
    for module, path in MODULES.items():
        first, *rest = path.relative_to(SRC / PACKAGE).parts
        sizes[first if rest else "files"] += facts(module).characters
    assert sizes.keys() == budgets.keys()
    assert not {name: (size, budgets[name]) for name, size in sizes.items() if size > 1000 * budgets[name]}


def test_mutations_find_what_they_change():
    """They run nightly, and follow the source at once."""
    for m in mutations.MUTATIONS.values():
        text = (SRC / PACKAGE / m.file).read_text()
        assert text.count(m.before) == 1 and (ROOT / m.tests).exists(), m
