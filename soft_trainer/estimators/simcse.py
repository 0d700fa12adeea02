"""SimCSE: the similarity of a query and a code is that of the query and the code's own query."""

from __future__ import annotations

import dataclasses

from soft_trainer.estimators.frozen_encoder import EncodedRowsEstimator

PAPER_MODEL = "sentence-transformers/msmarco-distilbert-dot-v5"


class SimCSEEstimator(EncodedRowsEstimator):
    """Cosine of query embeddings from any sentence encoder (Section 3.2, "SimCSE").

    The encoder is a folder or Hub name: of sentence-transformers, with its own pooling, or a plain `AutoModel`, with
    mean pooling. Embeddings are normalised. The paper uses `PAPER_MODEL`, trained further by `soft_trainer.simcse`.
    """

    alpha, beta, temperature = 1.3, 0.7, 0.1
    distill_temperature = 0.07  # of its own training, as published
    compares_codes = False

    def fit(self, dataset) -> None:
        """Encodes the queries of every row, or reads them from the cache."""
        encoder = self.load()
        profile = encoder.profile.replace(normalize=True, score_function="dot")
        self._queries = self._codes = self.encode_rows(dataset, "query", dataclasses.replace(encoder, profile=profile))
