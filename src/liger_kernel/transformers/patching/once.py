"""Warnings that are given once."""

from __future__ import annotations

import warnings

WARNED: set[tuple[str, str]] = set()


def warn(subject: str, about: str, text: str) -> None:
    warn_once((subject, about), f"{subject}: {about}: {text}" if about else f"{subject}: {text}", 5)


def warn_once(key: tuple[str, str], text: str, stacklevel: int = 5) -> None:
    if key not in WARNED:
        WARNED.add(key)
        warnings.warn(text, stacklevel=stacklevel)
