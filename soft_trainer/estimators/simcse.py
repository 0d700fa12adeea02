"""The SimCSE estimator, which takes the similarity of a query to a code's query as that to the code."""

from __future__ import annotations

import dataclasses

from soft_trainer.estimators.frozen_encoder import EncodedRowsEstimator


class SimCSEEstimator(EncodedRowsEstimator):
    """Cosine of query embeddings from any sentence encoder (Section 3.2, "SimCSE").

    The encoder is a folder or Hub name: a sentence-transformers model, with its own pooling, or a plain `AutoModel`,
    with mean pooling. Embeddings are normalised. The paper uses `options.commands.PAPER_MODEL`, which
    `soft_trainer.simcse` trains further.
    """

    alpha, beta, temperature = 1.3, 0.7, 0.1
    distill_temperature = 0.07  # the temperature at which SimCSE is trained, as published
    compares_codes = False

    def fit(self, dataset) -> None:
        """Encodes the queries of every row, or reads them from the cache."""
        encoder = self.load()
        profile = encoder.profile.replace(normalize=True, score_function="dot")
        self._queries = self._codes = self.encode_rows(dataset, "query", dataclasses.replace(encoder, profile=profile))
