"""Soft-InfoNCE as a loss for sentence-transformers' trainer."""

from soft_trainer.options.removed import refuse_removed
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


def __getattr__(name: str):
    """Raises UserError for a removed name. The message says what to use instead."""
    refuse_removed([name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
