"""Forwards of models whose source is rewritten: ``rules.py`` says what becomes what, ``source.py``
reads, matches and compiles, and ``joined_steps.py`` is what the new source calls."""
