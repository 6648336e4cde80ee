"""Losses over a vocabulary that is sharded over ranks."""
