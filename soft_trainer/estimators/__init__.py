"""Estimators, which compute the similarities between queries and functions that weights are based on."""
