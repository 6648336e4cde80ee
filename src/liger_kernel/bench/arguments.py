"""Flags of ``liger bench`` and ``liger tune``. This file imports neither torch nor operators, so
``--help`` and errors in flags appear at once."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from liger_kernel.bench.rivals import PACKAGES
from liger_kernel.train.mistakes import Parser, UserError, at_least, holds, one_of, writable

DTYPES = ("bf16", "fp16", "fp32")
MODES = ("forward", "backward", "full")
VARIANTS = ("ours", "eager", "compile", "torch", "base")  # and packages
# how the files begin that the commands write
JSON, CSV, MARKDOWN = r'\s*\{\s*"meta":', "(op|model),", r"\| (op|model) \|"


def operators(argv: list[str]) -> argparse.Namespace:
    """Parse the flags of ``liger bench``. Dtypes and variants have defaults that depend on the
    GPU: if they are not given, they are None."""
    does = "Measure operators. `bench step`: training steps; `bench mismatch`: samplers; `bench report`: tables."
    parser = Parser(prog="liger bench", description=does, usage="%(prog)s [OP ...] [--name value ...]")
    add = parser.add_argument
    variants = (*VARIANTS[1:4], *PACKAGES)
    add("op", nargs="*", help="operators that `liger ops` lists (default: all)")
    add("--case", action="append", default=[], help="only this case (may be given again); see `liger ops NAME`")
    add("--sweep", help="instead of cases, an operator's sweep: tokens, vocabulary, hidden")
    add("--dtype", help="bf16, fp16, fp32; comma-separated (default: bf16, fp32 without a GPU)")
    add("--mode", default="full", help="forward, backward, full; comma-separated")
    default = "default: eager,compile,torch, eager without a GPU"
    add("--against", help=f"{', '.join(variants)}; comma-separated ({default})")
    for name, package in PACKAGES.items():
        where = f"where {package.requirement} is: pip install --no-deps --target DIR {package.requirement}"
        add(f"--{name}-path", metavar="DIR", help=where)
    add("--base", metavar="GITREF", help="our operators at this revision, too")
    add("--repeats", default=11, help="timed calls of each variant")
    add("--json", metavar="FILE", help="write rows as they come")
    add("--resume", action="store_true", help="leave out what --json FILE has already")
    add("--csv", metavar="FILE", help="write rows as a table")
    add("--smoke", action="store_true", help="two small cases of each operator, three repeats")
    add("--child", help=argparse.SUPPRESS)
    add("--done", default="[]", help=argparse.SUPPRESS)
    a = parser.parse_args(argv)
    a.mode = several("mode", a.mode, MODES)
    a.dtype = several("dtype", a.dtype, DTYPES) if a.dtype else None
    a.against = several("variant", a.against, (*VARIANTS, *PACKAGES)) if a.against else None
    at_least(1, repeats=a.repeats)
    a.repeats = 3 if a.smoke else a.repeats
    if a.resume and not a.json:
        raise UserError("--resume needs --json FILE, whose rows it leaves out")
    for name, package in PACKAGES.items():
        holds(package.module.partition(".")[0], getattr(a, f"{name}_path"), f"--{name}-path", package.requirement)
    outputs(None if a.resume else a.json, a.csv)
    return a


def outputs(json: str | None = None, csv: str | None = None, markdown: str | None = None) -> None:
    """``UserError`` for what cannot be written, or is there and is of something else."""
    for file, ours in ((json, JSON), (csv, CSV), (markdown, MARKDOWN)):
        writable(file=file, ours=ours)


def numbers(flag: str, text: str) -> list[int]:
    """Whole numbers with commas between, the least first."""
    try:
        return sorted(map(int, text.split(",")))
    except ValueError as error:
        raise UserError(f"--{flag} must be numbers, comma-separated, got {text!r}") from error


def tune(argv: list[str]) -> argparse.Namespace:
    """Parse the flags of ``liger tune``."""
    parser = Parser(prog="liger tune", description="Search launch configurations of an operator's kernels on this GPU.")
    parser.add_argument("op", nargs="+", help="operators that `liger ops` lists")
    parser.add_argument("--case", action="append", default=[], help="only this case (may be given again)")
    parser.add_argument("--sweep", help="instead of cases, an operator's sweep")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the tensors")
    parser.add_argument("--repeats", default=15, help="timed calls of each candidate")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    a = parser.parse_args(argv)
    at_least(1, repeats=a.repeats)
    return a


def several(kind: str, text: str, names: Iterable[str]) -> list[str]:
    """Some of ``names``, with commas between."""
    return [one_of(kind, item.strip(), names) for item in text.split(",")]
