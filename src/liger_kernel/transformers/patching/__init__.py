"""Patches: which function replaces which, how patches are applied and restored, and which flags
select them."""
