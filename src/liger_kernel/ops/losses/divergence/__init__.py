"""Divergences of two distributions, and distillation with them."""
