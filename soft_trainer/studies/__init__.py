"""Runs studies, and compares and reports finished runs."""
