"""One run at a time in a folder: rank 0 holds a lock during the run, which the system releases when
the process ends in any way.

The lock is ``flock`` of the file ``lock`` in the run's folder. On NFS since Linux 2.6.12 the server
holds it, so that it acts between machines. If a file system has no locks (some mounts of Lustre,
some FUSE), the run says so and continues without. The content of ``lock`` (who took it last) is for
messages.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.files import NOFOLLOW
from liger_kernel.train.folder import check
from liger_kernel.train.mistakes import writable
from liger_kernel.train.ranks import Ranks, restarts

# seconds that a run before has to end; after a restart, whose rank 0 may have been on another
# machine, twelve times as long
PATIENCE = 5.0


@contextlib.contextmanager
def held(config: TrainConfig, ranks: Ranks) -> Iterator[None]:
    """Lock the run's folder. Raises ``UserError`` on every rank if the run may not write to it or
    what it saves to.

    It may not if something else is there, or if another run, which is named, has locked the folder.
    """
    handle, problem = None, None
    if ranks.first:
        try:
            check(config)
            for folder in (config.out, config.save, config.cache):
                writable(folder=folder)
            handle = _taken(Path(config.out), PATIENCE * (12 if restarts() else 1))
        except UserError as error:
            problem = str(error)
    problem = ranks.agreed(problem)
    if problem:
        raise UserError(problem)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _taken(folder: Path, patience: float) -> int | None:
    """The open file that holds the lock; None where there are no locks."""
    if importlib.util.find_spec("fcntl") is None:  # Windows
        return None
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(
        folder / "lock", os.O_RDWR | os.O_CREAT | NOFOLLOW, 0o666
    )  # not inherited by programs that are started
    if os.fstat(handle).st_nlink > 1:  # its content is replaced below
        os.close(handle)
        raise UserError(f"{folder / 'lock'} is a file elsewhere, too: remove it")
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                print(
                    f"{folder} cannot be locked ({error.strerror}): a second run could write to it without being "
                    "noticed",
                    file=sys.stderr,
                )
                os.close(handle)
                return None
            if time.monotonic() > end:
                holder = _holder(handle)
                os.close(handle)
                raise UserError(
                    f"another run writes to {folder}: {holder}. Wait for it, stop it, or give another --out"
                ) from None
            time.sleep(0.1)
    os.ftruncate(handle, 0)
    os.pwrite(
        handle,
        json.dumps(
            {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        ).encode(),
        0,
    )
    return handle


def _holder(handle: int) -> str:
    try:
        who = json.loads(os.pread(handle, 4096, 0))
        return f"process {who['pid']} on {who['host']}, since {who['since']}"
    except (ValueError, KeyError, TypeError, OSError):
        return "it has not said who it is"
