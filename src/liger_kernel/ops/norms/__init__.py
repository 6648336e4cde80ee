"""Norms of rows, alone and fused with neighbouring operations."""
