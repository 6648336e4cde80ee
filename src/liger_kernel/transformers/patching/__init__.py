"""Patches: what is put in the place of what, applied, restored, and by which flags."""
