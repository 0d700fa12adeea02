"""Estimators, which compute the similarities between queries and codes that weights are based on."""
