"""Plots of results that ``liger bench`` or ``liger bench step`` wrote with --json or --csv, as SVG
files:  python benchmarks/draw.py FILE ... DIR

Files are merged: a row that was measured again in a later file counts.
"""

from __future__ import annotations

import argparse
import sys

import plots

from liger_kernel.bench.results import merged, read
from liger_kernel.train.files import export
from liger_kernel.train.mistakes import UserError


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("folder", metavar="DIR")
    a = parser.parse_args(argv)
    for plot in plots.plots_of(merged([read(file) for file in a.files])):
        path = f"{a.folder}/{plot.name}.svg"
        export(path, plot.file())
        print(path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"draw.py: {error}")
