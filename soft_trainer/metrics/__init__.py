"""Metrics for `evaluate.load`. Each subfolder can be pushed to the Hub as a Space."""
