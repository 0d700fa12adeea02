"""Every estimator that the command line can name, in the order of the paper's tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from soft_trainer.estimators.bm25 import BM25Estimator
from soft_trainer.estimators.choosing import MAKERS
from soft_trainer.estimators.simcse import SimCSEEstimator
from soft_trainer.estimators.trained_model import TrainedModelEstimator


@dataclass(frozen=True)
class EstimatorEntry:
    """One estimator.

    Args:
        name: its name on the command line.
        label: its name in tables.
        make: makes it from (arguments, models, query_column); None for none.
        estimator_class: its class; None for none.
        paper_seconds: seconds of a step in Table 8 of the paper: CodeBERT, batches of 32, an A6000.
    """

    name: str
    label: str
    make: Callable | None
    estimator_class: type | None
    paper_seconds: float | None


_ENTRIES = (
    EstimatorEntry("none", "", None, None, 0.75),
    EstimatorEntry("bm25", "BM25", MAKERS["bm25"], BM25Estimator, 0.77),
    EstimatorEntry("trained_model", "Trained model", MAKERS["trained_model"], TrainedModelEstimator, 0.98),
    EstimatorEntry("simcse", "SimCSE", MAKERS["simcse"], SimCSEEstimator, 0.81),
)
ESTIMATORS = {entry.name: entry for entry in _ENTRIES}
