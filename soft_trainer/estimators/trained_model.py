"""Estimators by the scores of a frozen encoder: a trained model, or the encoder before training."""

from __future__ import annotations

import dataclasses

from soft_trainer.encoders.loading import Encoder
from soft_trainer.encoders.profiles import resolve_profile
from soft_trainer.errors import UserError
from soft_trainer.estimators.frozen_encoder import EncodedRowsEstimator
from soft_trainer.estimators.row_cache import DEFAULT_FOLDER


class TrainedModelEstimator(EncodedRowsEstimator):
    """Scores of a checkpoint trained with InfoNCE (Section 3.2, "Trained Model"), kept frozen.

    It may differ from the encoder in training. Tokenizer, lengths, pooling, score function and scale are read from its
    folder.
    """

    alpha, beta, temperature = 1.3, 0.7, 5.0

    @property
    def positive_temperature(self) -> float:
        """0.05 in units of cosines: 0.05 x the checkpoint's score scale."""
        return 0.05 * self.score_scale

    @property
    def score_scale(self) -> float:
        """The factor on the checkpoint's scores."""
        name, _, revision = self.model_name_or_path.partition("@")
        return resolve_profile(name, revision=revision or None).score_scale

    def fit(self, dataset) -> None:
        """Encodes queries and codes of every row, or reads them from the cache."""
        encoder = self.load()
        self._scale = encoder.profile.score_scale
        self._queries, self._codes = (self.encode_rows(dataset, side, encoder) for side in ("query", "code"))


class InitialModelEstimator(TrainedModelEstimator):
    """Scores of the encoder before training, frozen: a trained model without a second download.

    `EstimatorCallback` binds it to the run's encoder, and `SoftInfoNCETrainer` fits it before the first step and
    before a checkpoint is loaded, so that a resumed run has the same scores.
    """

    # Cosines x 20 of a zero-shot encoder lie within a few units: Table 7's 5.0 would make all weights equal.
    temperature = 2.0

    def __init__(self, cache_dir=DEFAULT_FOLDER, batch_size: int = 64):
        super().__init__("initial_model", cache_dir, batch_size)
        self._encoder: Encoder | None = None

    @property
    def score_scale(self) -> float:
        """The factor on the encoder's scores."""
        return self._encoder.profile.score_scale if self._encoder else 1.0

    def bind(self, encoder: Encoder) -> None:
        """Receives the run's encoder."""
        self._encoder = encoder

    def load(self) -> Encoder:
        """Returns the run's encoder, with its current weights.

        Raises:
            UserError: the estimator is not bound to an encoder.
        """
        if self._encoder is None:
            raise UserError("estimator=initial_model: it needs a SoftInfoNCETrainer, which binds it to its encoder")
        return self._encoder

    def __getstate__(self) -> dict:
        """Returns the state without the encoder, since a fitted estimator only looks up rows."""
        profile_only = self._encoder and dataclasses.replace(self._encoder, model=None, tokenizer=None)
        return super().__getstate__() | {"_encoder": profile_only}
