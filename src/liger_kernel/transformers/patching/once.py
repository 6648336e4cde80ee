"""Warnings that are given once."""

from __future__ import annotations

import warnings

WARNED: set[tuple[str, str]] = set()


def warn(subject: str, about: str, text: str) -> None:
    if (subject, about) not in WARNED:
        WARNED.add((subject, about))
        warnings.warn(f"{subject}: {about}: {text}" if about else f"{subject}: {text}", stacklevel=4)
