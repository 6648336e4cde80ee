"""Processes of tests, forked from one that has imported everything."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import random
import socket
import sys
import threading
from unittest import mock

import torch

PRELOADED = [
    "interpreted",
    "test_memory_safety",
    "peft",
    "warmed",
    "transformers.models.llama.modeling_llama",
    "liger_kernel.transformers",
    "liger_kernel.model_sizes",
    "liger_kernel.train.loop",
]


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
    # before Python 3.13 the server does not see sys.path
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), CUDA_VISIBLE_DEVICES=""):
        forkserver.ensure_running()
    return context


def stop_forkserver() -> None:
    """Wait for the server, as it waits for its processes: their CPU time is then this process's."""
    from multiprocessing import forkserver

    # nothing public ends it; a process that a test left behind may keep it alive
    ending = threading.Thread(target=forkserver._forkserver._stop, daemon=True)  # type: ignore[attr-defined]
    ending.start()
    ending.join(timeout=20)


def free_port() -> int:
    """A port that nothing listens on. The system's own choice may be gone before it is used: it
    hands the same ones to every connection."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def start_ranks(fn, args: tuple, ranks: int) -> None:
    """``fn(rank, *args)`` in a process for each rank; returns when all have ended, raises
    ``ProcessException`` if one failed."""
    from torch.multiprocessing.spawn import start_processes

    method = "spawn" if torch.cuda.is_available() else "forkserver"
    if method == "forkserver":
        forkserver()
    start_processes(fn, args, ranks, start_method=method)
