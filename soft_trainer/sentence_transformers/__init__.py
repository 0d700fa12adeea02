"""Soft-InfoNCE inside sentence-transformers: a loss for its trainer, and rows of ours as its data sets and back."""

from soft_trainer.sentence_transformers.interchange import from_sentence_transformers, to_sentence_transformers
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
    "from_sentence_transformers",
    "to_sentence_transformers",
    "with_rows",
]
