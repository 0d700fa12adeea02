"""A trained model: the scores that a frozen code-search encoder gives query and code."""

from __future__ import annotations

from torch import Tensor

from soft_trainer.estimators.base import Rows
from soft_trainer.estimators.encoded import EncodedRowsEstimator, dot_products


class TrainedModelEstimator(EncodedRowsEstimator):
    """Scores of a checkpoint trained with InfoNCE (Section 3.2, "Trained Model"), kept frozen.

    It may be another encoder than the one in training. Tokenizer, lengths, pooling, score function and scale are read
    from its folder.
    """

    alpha, beta, temperature = 1.3, 0.7, 5.0

    def fit(self, dataset) -> None:
        """Encodes queries and codes of every row, or reads them from the cache."""
        encoder = self.load()
        self._scale = encoder.profile.score_scale
        self._queries, self._codes = (self.encode_rows(dataset, side, encoder) for side in ("query", "code"))

    def similarity(self, query_rows: Rows, code_rows: Rows) -> Tensor:
        """The checkpoint's scores, Tensor[Q, C] in float32."""
        return dot_products(self._queries, self._codes, query_rows, code_rows) * self._scale
