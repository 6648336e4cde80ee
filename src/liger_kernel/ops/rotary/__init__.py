"""Rotary position embedding, alone and after norms of heads."""
