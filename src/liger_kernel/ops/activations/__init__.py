"""Elementwise activations."""
