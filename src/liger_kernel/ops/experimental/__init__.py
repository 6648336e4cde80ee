"""Operators whose interface may change; imported by their own paths only."""
