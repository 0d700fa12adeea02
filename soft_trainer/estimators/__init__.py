"""Estimators: rows x rows -> raw similarity."""
