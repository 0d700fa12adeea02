"""Estimators of the similarity between queries and codes."""
