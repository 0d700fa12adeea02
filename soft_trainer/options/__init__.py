"""Declares, parses and checks the options of a run."""
