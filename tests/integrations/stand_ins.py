"""Lets a PyTorch that was built for CUDA load where CUDA is not installed: empty libraries with the
names and functions that it asks the loader for.

``python stand_ins.py SITE_PACKAGES`` puts them beside PyTorch's own libraries; needs readelf and
gcc. Nothing calls the functions: there is no GPU.
"""

from __future__ import annotations

import collections
import ctypes
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CUDA = re.compile(r"cu[A-Za-z]|__cuda|nccl|nv[a-z]|_Z\w*nvshmem")


def _readelf(*options: str) -> str:
    return subprocess.run(["readelf", "-W", *options], check=True, capture_output=True, text=True).stdout


def _found(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def asked_for(files: list[Path]) -> dict[str, dict[str, set[str]]]:
    """Library that ``files`` need and that is not here -> version -> functions of it that they
    use; "" are those without one, of any library."""
    needed: set[str] = set()
    provided: set[str] = set()
    loose: set[str] = set()
    versioned = collections.defaultdict(lambda: collections.defaultdict(set))
    for file in files:
        needed |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", _readelf("-d", file)))
        library_of, library = {}, ""
        for line in _readelf("-V", file).splitlines():
            if said := re.search(r"File: (\S+)", line):
                library = said[1]
            elif said := re.search(r"Name: (\S+)", line):
                library_of[said[1]] = library
        for line in _readelf("--dyn-syms", file).splitlines():
            columns = line.split()
            if len(columns) < 8 or not columns[0].endswith(":"):
                continue
            name, _, version = columns[7].partition("@")
            if columns[6] != "UND":
                provided.add(name)
            elif version:
                versioned[library_of.get(version, "")][version].add(name)
            elif CUDA.match(name):
                loose.add(name)
    here = {file.name for file in files}
    missing = sorted(n for n in needed - here if re.match(r"lib(cu|nv|nccl)", n) and not _found(n))
    if missing:
        versioned[missing[0]][""] = loose - provided
    return {library: versioned[library] for library in missing}


def make(site_packages: Path) -> list[str]:
    """Put what is missing beside PyTorch's libraries, which look there first; the names of it."""
    folder = site_packages / "torch" / "lib"
    libraries = asked_for([*folder.glob("*.so*"), *(site_packages / "torch").glob("_C*.so")])
    for library, versions in libraries.items():
        with tempfile.TemporaryDirectory() as made:
            script = Path(made, "versions")
            said = (f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in versions.items() if version)
            script.write_text("".join(said))
            build = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-x", "c", "-", f"-Wl,-soname,{library}"]
            build += [f"-Wl,--version-script={script}"] if any(versions) else []
            source = "".join(f"int {name}(void) {{ return 0; }}\n" for names in versions.values() for name in names)
            subprocess.run([*build, "-o", folder / library], input=source, text=True, check=True)
    return [*libraries]


if __name__ == "__main__":
    print(*make(Path(sys.argv[1])))
