"""Triton's file cache for many processes that share one directory, and for directories that are
copied, for example into a container image.

``LIGER_TRITON_BASE_CACHE`` names a second directory, which is only read: files that the cache
itself (``TRITON_CACHE_DIR``) lacks are looked up there.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from typing import Any

from triton.runtime.cache import FileCacheManager

BASE = "LIGER_TRITON_BASE_CACHE"


class LigerTritonFileCacheManager(FileCacheManager):
    """A file cache without temporary directories, which a process could remove while others work in
    the same place.

    Triton's own class stores absolute paths, so it finds nothing in a directory that has moved.
    This class looks for files in the directory that has the list of them.
    """

    def get_file(self, filename: str) -> str | None:
        """The path of ``filename`` in the cache, or else in the base directory; None if neither
        has it."""
        folders = [self.cache_dir, *([os.path.join(os.environ[BASE], self.key)] if os.environ.get(BASE) else [])]
        return next(filter(os.path.isfile, (os.path.join(folder, filename) for folder in folders)), None)

    def has_file(self, filename: str) -> bool:
        """Whether ``get_file`` finds it."""
        return self.get_file(filename) is not None

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Names and paths of the files that belong to ``filename``; None unless all of them
        exist."""
        path = self.get_file(f"__grp__{filename}")
        try:
            with open(path or "") as file:
                names = json.load(file)["child_paths"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        # a damaged list must not lead out of the directory
        if not isinstance(names, dict) or any(os.path.basename(name) != name for name in names):
            return None
        paths = {name: self.get_file(name) for name in names}
        return None if None in paths.values() else {name: path for name, path in paths.items() if path}

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Store ``data`` (bytes, or text if ``binary`` is False) as ``filename``. Other
        processes see the whole file or none. Returns the path."""
        if not self.cache_dir:
            raise RuntimeError("LigerTritonFileCacheManager: there must be a cache directory, got none")
        path = self._make_path(filename)
        temporary = os.path.join(self.cache_dir, f"tmp.pid_{os.getpid()}_{uuid.uuid4().hex}")
        try:
            with open(temporary, "xb") as file:  # with the permissions that the user's other files have
                file.write(data if isinstance(data, bytes) else str(data).encode())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        return path


def apply_liger_triton_cache_manager() -> None:
    """Set TRITON_CACHE_MANAGER, so that Triton uses this cache in this process and in the
    processes that it starts."""
    os.environ["TRITON_CACHE_MANAGER"] = "liger_kernel.triton.monkey_patch:LigerTritonFileCacheManager"
