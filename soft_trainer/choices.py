"""Lists the names of the built-in losses, weightings and estimators. Imports no libraries, to keep `--help` fast."""

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
# name -> the class in `estimators/`, in the order of the paper's tables. Each constructor takes `cache_dir`.
ESTIMATORS = {
    "none": None,
    "bm25": "bm25:BM25Estimator",
    "trained_model": "frozen_encoder:TrainedModelEstimator",
    "simcse": "frozen_encoder:SimCSEEstimator",
    "initial_model": "frozen_encoder:InitialModelEstimator",
    "scores": "scores:ScoresEstimator",
}
COMPARE_QUERIES = ("bm25", "simcse")  # without bm25_document_column, they compare queries with queries
# For messages: the estimators that find similar rows, which similar batches and mined negatives need.
FIND_NEIGHBOURS = "bm25, simcse, trained_model or initial_model"
# For messages: the estimators that compare queries with functions.
COMPARE_CODES = "an encoder (initial_model, trained_model), or bm25 with bm25_document_column=code_tokens"
