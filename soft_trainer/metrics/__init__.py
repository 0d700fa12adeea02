"""Modules for `evaluate.load`, each a folder that is also a Space."""
