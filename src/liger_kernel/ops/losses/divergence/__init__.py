"""Divergences of two distributions, and distillation by them."""
