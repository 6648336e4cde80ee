"""Residual streams: how layers read what layers before them wrote."""
