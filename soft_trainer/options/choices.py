"""Lists the built-in losses, weightings and estimators by name. Imports no libraries, to keep `--help` fast."""

from __future__ import annotations

from dataclasses import dataclass

# name -> the function in `losses.py`
LOSSES = {
    "soft_info_nce": "soft_info_nce",
    "info_nce": "info_nce",
    "weighted_info_nce": "weighted_info_nce",
    "bce": "binary_cross_entropy",
    "kl_regularization": "kl_regularized_info_nce",
}
WITHOUT_ESTIMATOR = ("info_nce",)  # the losses that use no similarity
# name -> the function in `weights.py`
WEIGHTINGS = {"linear": "negative_weights", "positive_aware": "positive_aware_weights"}


@dataclass(frozen=True)
class EstimatorChoice:
    """A built-in estimator.

    Args:
        reference: the class in `estimators/`, as `module:Class`. Its constructor takes `cache_dir`.
        finds_neighbours: whether it finds similar rows, which similar batches and mined negatives need.
        compares_codes: whether it compares queries with functions. BM25 does with `bm25_document_column`.
        takes_model: whether `--estimator_model` selects its encoder.
        default_model: the encoder without `--estimator_model`, or None if that option is required.
    """

    reference: str
    finds_neighbours: bool = True
    compares_codes: bool = True
    takes_model: bool = False
    default_model: str | None = None


PAPER_MODEL = "sentence-transformers/msmarco-distilbert-dot-v5"  # the paper's SimCSE estimator starts from it
# In the order of the paper's tables.
ESTIMATORS: dict[str, EstimatorChoice | None] = {
    "none": None,
    "bm25": EstimatorChoice("bm25:BM25Estimator", compares_codes=False),
    "trained_model": EstimatorChoice("frozen_encoder:TrainedModelEstimator", takes_model=True),
    "simcse": EstimatorChoice(
        "frozen_encoder:SimCSEEstimator", compares_codes=False, takes_model=True, default_model=PAPER_MODEL
    ),
    "initial_model": EstimatorChoice("frozen_encoder:InitialModelEstimator"),
    "scores": EstimatorChoice("scores:ScoresEstimator", finds_neighbours=False),
}
# For messages: the estimators that find similar rows.
*_OTHERS, _LAST = [name for name, choice in ESTIMATORS.items() if choice and choice.finds_neighbours]
FIND_NEIGHBOURS = f"{', '.join(_OTHERS)} or {_LAST}"
# For messages: the estimators that compare any query with any function.
COMPARE_CODES = "an encoder (initial_model, trained_model), or bm25 with bm25_document_column=code_tokens"
