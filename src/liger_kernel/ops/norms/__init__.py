"""Norms of rows, alone and with what surrounds them."""
