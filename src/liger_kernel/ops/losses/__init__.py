"""Losses of logits, and losses of a linear head that never store all its logits."""
