"""Rotary position embedding, alone and behind the norms of heads."""
