"""Weights by a sentence-transformers model: the one in training as it is before training, or another one."""

from __future__ import annotations

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from soft_trainer import distributed
from soft_trainer.encoders.profiles import COSINE_SCALE
from soft_trainer.estimators.base import Estimator, Rows, as_array


class SentenceTransformerEstimator(Estimator):
    """Scores that a sentence-transformers model gives query and code, kept frozen.

    Every row is encoded once, when the loss is made, with the model's own prompts for queries and documents. The
    scores are the model's similarities, cosines x 20.

    Args:
        model: a frozen guide, which may be larger than the model in training; None takes the model in training as it
            is when the loss is made.
        batch_size: the number of texts encoded at once.
    """

    # As those of InitialModelEstimator, whose scores these are.
    alpha, beta, temperature = 1.3, 0.7, 2.0

    def __init__(self, model: SentenceTransformer | None = None, batch_size: int = 64):
        self.model, self.batch_size = model, batch_size

    @property
    def score_scale(self) -> float:
        """The factor on the model's similarities: 20 on cosines, 1 on others."""
        return COSINE_SCALE if self.model is None or self.model.similarity_fn_name == "cosine" else 1.0

    @property
    def positive_temperature(self) -> float:
        """0.05 in units of cosines."""
        return 0.05 * self.score_scale

    def fit(self, dataset) -> None:
        """Encodes queries and codes of every row; each process encodes its share."""
        self._queries = self._embeddings(self.model.encode_query, dataset["docstring"][:])
        self._codes = self._embeddings(self.model.encode_document, dataset["code"][:])

    def similarity(self, query_rows: Rows, code_rows: Rows) -> Tensor:
        """Computes the model's scaled similarities, Tensor[Q, C] in float32."""
        queries, codes = self._queries[as_array(query_rows)], self._codes[as_array(code_rows)]
        return self.model.similarity(queries, codes) * self.score_scale

    def _embeddings(self, encode, texts: list[str]) -> Tensor:
        share = texts[distributed.shard(len(texts), *distributed.rank_and_world_size())]
        was_training = self.model.training
        embeddings = encode(share, batch_size=self.batch_size, convert_to_tensor=True, show_progress_bar=False)
        self.model.train(was_training)
        return distributed.gather(torch.as_tensor(embeddings)).float().cpu()
