"""Provides Soft-InfoNCE as a loss for `SentenceTransformerTrainer`."""

from soft_trainer.sentence_transformers.loss import (
    CachedSoftInfoNCELoss,
    SentenceTransformerEstimator,
    SoftInfoNCELoss,
)
from soft_trainer.sentence_transformers.rows import with_rows

__all__ = [
    "CachedSoftInfoNCELoss",
    "SentenceTransformerEstimator",
    "SoftInfoNCELoss",
    "with_rows",
]
