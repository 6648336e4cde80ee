"""Benchmarks: ``liger bench``, ``liger bench step``, ``liger tune``."""
