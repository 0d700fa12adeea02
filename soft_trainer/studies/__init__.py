"""Runs studies, compares finished runs and writes reports on them."""
