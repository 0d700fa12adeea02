"""Modules for `evaluate.load`. Each is a folder that can be pushed as a Space."""
