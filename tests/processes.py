"""Processes of tests, forked from one that has imported everything."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import multiprocessing
import os
import random
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import torch

PRELOADED = ["interpreted", "test_memory_safety", "peft", "warmed", "transformers.models.llama.modeling_llama"]
PRELOADED += ["liger_kernel.transformers", "liger_kernel.model_sizes", "liger_kernel.train.loop"]


@functools.cache
def forkserver() -> multiprocessing.context.BaseContext:
    """Processes forked from one, the same for all tests, that has imported all they need: what is
    not there is skipped. They see no GPU.

    What they import asks for GPUs, and after that a fork cannot use them; nor can an optimizer step
    on the CPU, for which PyTorch 2.11 asks CUDA.
    """
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # before Python 3.13 the server does not see sys.path; a fork of a process with OpenMP's threads waits for them
    own = dict(PYTHONPATH=os.pathsep.join(sys.path), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    with mock.patch.dict(os.environ, own):
        forkserver.ensure_running()
    return context


def stop_forkserver() -> None:
    """Wait for the server, as it waits for its processes: their CPU time is then this process's."""
    from multiprocessing import forkserver

    # nothing public ends it; a process that a test left behind may keep it alive
    ending = threading.Thread(target=forkserver._forkserver._stop, daemon=True)  # type: ignore[attr-defined]
    ending.start()
    ending.join(timeout=20)


def write_to(log: str | os.PathLike) -> None:
    """All that this process prints goes to the end of a file from now on."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))


def as_users_run_it() -> None:
    """References compute, as on a user's machine without a GPU, and not the interpreter."""
    from liger_kernel.ops._core import operator as _op

    _op._KERNEL_DEVICES.discard("cpu")


def run_script(argv: list[str], env: dict[str, str], log: str, folder: str = ".") -> None:
    """Be ``python *argv`` in a process that has imported everything: a file, ``-c`` or ``-m``.
    Packages that are found in ``PYTHONPATH`` before ours replace it. Without ``TRITON_INTERPRET``
    in ``env``, a user's process."""
    write_to(log), os.chdir(folder), os.environ.clear(), os.environ.update(env)
    if "TRITON_INTERPRET" not in env:
        as_users_run_it()
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    ours, theirs = sys.modules["liger_kernel"], importlib.machinery.PathFinder.find_spec("liger_kernel", sys.path)
    if theirs.origin != ours.__file__:
        for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
            del sys.modules[name]
    if argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        exec(argv[1], {"__name__": "__main__"})
    elif argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


def forked(argv: list[str], env: dict[str, str], log: str | os.PathLike, folder: str | os.PathLike = ".") -> tuple:
    """Exit code of ``python *argv``, and what it said: by ``run_script``, as to import again takes
    longer than most scripts; where there is a GPU, in a process that may use it."""
    if torch.cuda.is_available():
        with open(log, "a") as said:
            command = [sys.executable, *argv]
            code = subprocess.run(command, env=env, cwd=folder, stdout=said, stderr=said, check=False).returncode
    else:
        child = forkserver().Process(target=run_script, args=(argv, env, str(log), str(folder)))
        child.start(), child.join()
        code = child.exitcode
    with open(log) as said:
        return code, said.read()


def run_code(code: str, argv: list[str], ends: dict[str, Connection], log: str) -> None:
    """Be ``python -c code *argv`` as a user's, who gives the descriptors ``ends`` to it."""
    write_to(log), as_users_run_it()
    sys.argv = ["-c", *(str(ends[word].fileno()) if word in ends else word for word in argv)]
    exec(code, {"__name__": "__main__"})


def free_port() -> int:
    """A port that nothing listens on. The system's own choice may be gone before it is used: it
    hands the same ones to every connection."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def children_of(pid: int) -> list[int]:
    """Processes that one has started, the first at first."""
    parents = {
        int(path.parent.name): int(path.read_text().rpartition(")")[2].split()[1])
        for path in Path("/proc").glob("[0-9]*/stat")
    }
    return sorted(process for process, parent in parents.items() if parent == pid)


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def start_ranks(fn, args: tuple, ranks: int) -> None:
    """``fn(rank, *args)`` in a process for each rank; returns when all have ended, raises
    ``ProcessException`` if one failed."""
    from torch.multiprocessing.spawn import start_processes

    method = "spawn" if torch.cuda.is_available() else "forkserver"
    if method == "forkserver":
        forkserver()
    start_processes(fn, args, ranks, start_method=method)
