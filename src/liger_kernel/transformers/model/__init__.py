"""Losses, outputs and forwards of patched causal models, by the names that other packages reach for."""
