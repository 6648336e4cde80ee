"""Losses, outputs and forwards of patched causal models, under the names that other packages
import."""
