"""Distributions over keys, and attention of special forms."""
