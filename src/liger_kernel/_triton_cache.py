"""Triton's file cache for many processes that share one directory."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

from triton.runtime.cache import FileCacheManager


class LigerTritonFileCacheManager(FileCacheManager):
    """Writes no directories of its own, so that nothing is there to remove while other processes work in the same place."""

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Store ``data`` (bytes, or text if ``binary`` is False) as ``filename``: others see all of it or nothing. Returns the path."""
        if not self.cache_dir:
            raise RuntimeError("LigerTritonFileCacheManager: there must be a cache directory, got none")
        path = self._make_path(filename)
        handle, temporary = tempfile.mkstemp(dir=self.cache_dir, prefix=f"tmp.pid_{os.getpid()}_")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data if isinstance(data, bytes) else str(data).encode())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        return path


def apply_liger_triton_cache_manager() -> None:
    """Make it Triton's cache in this process and those it starts, by TRITON_CACHE_MANAGER."""
    os.environ["TRITON_CACHE_MANAGER"] = "liger_kernel.triton.monkey_patch:LigerTritonFileCacheManager"
