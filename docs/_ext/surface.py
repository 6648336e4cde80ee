"""The reference, generated from the lists by which the package names its public surface.

``.. surface:: MODULE`` documents every public name of a module; ``:only:`` and ``:without:`` choose
by the modules that names are defined in, and ``:names:`` by a regular expression. An object that
has several paths is documented once, at the first of ``MODULES``; the others are named there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import re
import runpy
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# Calls that operators refuse, which tests make: operator -> the errors
REFUSED: dict[str, list[str]] = {}
for table in (Path(__file__).parents[2] / "tests").glob("refused_*.py"):
    for operator, _, error in runpy.run_path(str(table))["refused"]():
        REFUSED.setdefault(operator, []).append(error)

# The order says by which path an object is documented
MODULES = [
    "liger_kernel",
    "liger_kernel.transformers",
    "liger_kernel.utils",
    "liger_kernel.ops",
    "liger_kernel.nn",
    "liger_kernel.functional",
    "liger_kernel.chunked_loss",
    "liger_kernel.transformers.functional",
    "liger_kernel.graphs",
    "liger_kernel.memory",
    "liger_kernel.offloading",
    "liger_kernel.parallel",
    "liger_kernel.backends",
    "liger_kernel.train",
    "liger_kernel.train.loop",
    "liger_kernel.transformers.attention",
    "liger_kernel.deploy",
    "liger_kernel.megatron",
    "liger_kernel.hub",
    "liger_kernel.hub.layers",
    "liger_kernel.testing",
    "liger_kernel.library",
    "liger_kernel.operator_checks",
]


def public(module: ModuleType) -> dict[str, Any]:
    """The functions and classes of ours that a module offers: those of ``__all__``, or, without
    one, all whose names have no underscore."""
    listed = getattr(module, "__all__", None)
    names = sorted(
        {*dir(module), *listed} if listed and module.__name__ == "liger_kernel.transformers" else listed or dir(module)
    )
    names = [name for name in names if not name.startswith("_") or (listed and name in listed)]
    found = {name: getattr(module, name) for name in names}
    return {name: value for name, value in found.items() if is_documented(value, module, bool(listed))}


def is_documented(value: Any, module: ModuleType, listed: bool) -> bool:
    """Functions, classes and ``Function.apply`` of ours; in a module without a list that is not
    a list of imports itself, only its own."""
    if not (inspect.isroutine(value) or inspect.isclass(value)):
        return False
    home = home_of(value)
    if not home.startswith("liger_kernel"):
        return False
    return listed or Path(module.__file__ or "").name == "__init__.py" or home == module.__name__


def home_of(value: Any) -> str:
    """The module that a value is defined in; that of its class for ``Function.apply``."""
    owner = getattr(value, "__self__", None)
    return str(getattr(owner if inspect.isclass(owner) else value, "__module__", ""))


def identity(value: Any) -> Any:
    """What two paths to one object have in common: ``Function.apply`` is made anew whenever it
    is asked for."""
    owner = getattr(value, "__self__", None)
    return (owner, value.__name__) if inspect.isclass(owner) else id(value)


@functools.cache
def paths() -> dict[Any, list[str]]:
    """Every public object, by its identity, and its paths, the one that it is documented by
    first."""
    found: dict[Any, list[str]] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for attribute, value in public(module).items():
            found.setdefault(identity(value), []).append(f"{name}.{attribute}")
    return found


def find(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@functools.cache
def chosen(module: str, only: str = "", without: str = "", names: str = "") -> list[tuple[str, Any, list[str]]]:
    """(path, object, other paths) of what ``.. surface:: module`` documents."""
    every, found = paths(), []
    below = lambda value, prefixes: any(
        home_of(value) == prefix or home_of(value).startswith(prefix + ".") for prefix in prefixes.split()
    )
    for attribute, value in public(importlib.import_module(module)).items():
        first, *others = every[identity(value)]
        wanted = (
            (not only or below(value, only))
            and not (without and below(value, without))
            and re.fullmatch(names or ".*", attribute)
        )
        if wanted and first == f"{module}.{attribute}":
            found.append((first, value, others))
    return found


FAMILY = re.compile(r"\.apply_liger_kernel_to_(?!llama$|megatron$)")
OPTIONS = re.compile(r"^\.\. surface:: (\S+)\n((?:   :\w+:.*\n)*)", re.M)


def documented(page: str) -> list[str]:
    """The paths that a page of the reference documents, of all its directives."""
    found = []
    for module, options in OPTIONS.findall(page):
        found += [path for path, *_ in chosen(module, **dict(re.findall(r":(\w+): *(.*)", options)))]
    return found


def rest(text: str) -> list[str]:
    """A docstring as reStructuredText: outside of double backquotes nothing is markup, and what
    is indented is a formula or a table."""
    escape = lambda plain: re.sub(r"[*|`\\]|_(?!\w)", r"\\\g<0>", plain)
    out: list[str] = []
    for formula, group in itertools.groupby(text.splitlines(), lambda line: line.startswith(" ") or not line.strip()):
        lines = list(group)
        if formula and any(line.strip() for line in lines):
            out += [
                "",
                "::",
                "",
                *(f"   {line}".rstrip() for line in textwrap.dedent("\n".join(lines)).strip("\n").splitlines()),
                "",
            ]
        elif formula:
            out += [""]
        else:
            out += "".join(
                part if part.startswith("``") else escape(part)
                for part in re.split(r"(``.+?``)", "\n".join(lines), flags=re.S)
            ).splitlines()
    return out


# Modules whose docstring has the formula of an operator that lies in another file
FORMULAS = {
    "cross_entropy": "liger_kernel.ops.losses.cross_entropy_rows",
    "rms_norm": "liger_kernel.ops.norms.rms_kernels",
}
# Modules of the package whose docstring has the formula, the shapes and the source of what is
# defined in them
STATED = ("liger_kernel.chunked_loss.", "liger_kernel.ops.losses.linear_loss", "liger_kernel.ops.losses.grpo_loss")


def notes(value: Any, others: list[str]) -> Iterator[str]:
    """What the docstring of an object leaves to others: formula and source, which its module or
    its operator states, the errors of its cases, other paths."""
    from liger_kernel.ops import OPS

    operator = OPS.get(getattr(value, "__name__", ""))
    if operator and operator.fn is value:
        for module in dict.fromkeys((value.__module__, FORMULAS.get(operator.name, value.__module__))):
            yield from ["", *rest(inspect.cleandoc(importlib.import_module(module).__doc__ or "")), ""]
        if errors := REFUSED.get(operator.name):
            yield from ["Raises ``ValueError``, with the operator's name before the text, for example:", ""]
            yield from [f"- ``{error}``" for error in dict.fromkeys(errors)]
            yield ""
    elif home_of(value).startswith(STATED) and value.__name__.endswith(("Loss", "Base", "loss", "GrpoLossFunction")):
        yield from ["", *rest(inspect.cleandoc(sys.modules[home_of(value)].__doc__ or "")), ""]
    elif names := [name for name in operators_of(value) if OPS[name].fn is not value]:
        links = ", ".join(f":func:`~liger_kernel.ops.{name}`" for name in names)
        yield from ["", f"Shapes, dtypes, formula, source and errors: {links}.", ""]
    if others:
        yield from ["", "Also " + ", ".join(f"``{path}``" for path in others) + ".", ""]


def operators_of(value: Any) -> list[str]:
    """The operators that an object calls, itself or by other functions and classes of ours that
    it names; a call of an operator is not followed."""
    from liger_kernel.ops import OPS

    found, seen, open_ = [], set(), [value]
    while open_:
        one = open_.pop(0)
        one = getattr(one, "__wrapped__", one)
        if inspect.isclass(one):
            open_ += [
                inspect.unwrap(member.__func__ if isinstance(member, (staticmethod, classmethod)) else member)
                for member in methods(one)
            ]
        code = getattr(one, "__code__", None)
        if code is None or one in seen or not one.__module__.startswith(CALLERS):
            continue
        seen.add(one)
        names = [name for each in (code, *(c for c in code.co_consts if inspect.iscode(c))) for name in each.co_names]
        for name, other in [(name, one.__globals__[name]) for name in names if name in one.__globals__]:
            operator = OPS.get(getattr(other, "__name__", name))  # it may be imported under another name
            if operator and operator.fn is other:
                found.append(operator.name)
            elif inspect.isfunction(other) or inspect.isclass(other):
                open_.append(other)
    if home_of(value) == "liger_kernel.compat.functional":
        found.append(value.operator)
    if not found and home_of(value).startswith(("liger_kernel.ops.", "liger_kernel.extra.")):
        # a Function or a launcher, which lies beside its operator
        found += [name for name, operator in OPS.items() if operator.fn.__module__ == home_of(value)]
    return list(dict.fromkeys(found))


CALLERS = tuple(f"liger_kernel.{name}" for name in ("nn", "compat", "megatron", "hub"))


def methods(cls: type) -> list[Any]:
    """What a class of ours and its bases of ours compute with; of a method that is defined
    again, the last."""
    ours = [base for base in reversed(cls.__mro__) if base.__module__.startswith("liger_kernel")]
    merged = {name: member for base in ours for name, member in vars(base).items()}
    return [
        member
        for name, member in merged.items()
        if inspect.isroutine(member) or isinstance(member, (staticmethod, classmethod))
    ]


def entry(path: str, value: Any, others: list[str]) -> Iterator[str]:
    """The directives that document one object."""
    if inspect.isclass(getattr(value, "__self__", None)):  # Function.apply, whose arguments are those of its forward
        owner = value.__self__
        parameters = list(inspect.signature(owner.forward).parameters.values())
        yield f".. py:function:: {path}({', '.join(str(p) for p in parameters if p.name != 'ctx')})"
        text = rest(inspect.cleandoc(owner.__doc__ or ""))
        yield from [
            "",
            *(f"   {line}" for line in [f"``{owner.__name__}.apply``, with arguments by position.", "", *text]),
            "",
        ]
    elif FAMILY.search(path):  # hundreds, whose docstrings differ in one word
        yield from [f".. py:function:: {path}{_signature(value)}", "   :single-line-parameter-list:", ""]
    else:
        yield f".. auto{'class' if inspect.isclass(value) else 'function'}:: {path}"
        if inspect.isclass(value):
            yield from [
                "   :members:",
                f"   :exclude-members: {'forward, backward, apply' if is_function(value) else 'extra_repr'}",
            ]
            yield from ["   :undoc-members:"] if is_module(value) else []  # forward, whose arguments are what matters
    yield from (f"   {line}".rstrip() for line in notes(value, others))
    yield ""


def _signature(value: Any) -> str:
    signature = inspect.signature(value)
    flags = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=flags, return_annotation=signature.empty))


def is_module(value: Any) -> bool:
    import torch

    return issubclass(value, torch.nn.Module)


def is_function(value: Any) -> bool:
    import torch

    return issubclass(value, torch.autograd.Function)


def setup(app: Any) -> dict[str, Any]:
    from docutils.parsers.rst import directives
    from docutils.statemachine import StringList
    from sphinx.util.docutils import SphinxDirective
    from sphinx.util.parsing import nested_parse_to_nodes

    class Surface(SphinxDirective):
        required_arguments = 1
        option_spec = dict.fromkeys(("only", "without", "names"), directives.unchanged)

        def run(self) -> list[Any]:
            lines = [line for item in chosen(self.arguments[0], **self.options) for line in entry(*item)]
            return nested_parse_to_nodes(self.state, StringList(lines, self.arguments[0]))

    def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        lines[:] = rest("\n".join(lines)) if str(getattr(obj, "__module__", "")).startswith("liger_kernel") else []

    app.add_directive("surface", Surface)
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True}
