"""Losses of logits, and of a linear head whose logits are never held."""
