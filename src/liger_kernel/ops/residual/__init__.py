"""Residual streams: how layers read the outputs of earlier layers."""
