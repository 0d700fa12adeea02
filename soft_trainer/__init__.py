"""Fine-tune code-search encoders with Soft-InfoNCE: InfoNCE whose in-batch negatives carry weights."""

import importlib

__version__ = "0.2.0"

_HOMES = {
    "SoftInfoNCETrainer": "trainer",
    "RetrievalOutput": "evaluation.retrieval",
    "SoftInfoNCETrainingArguments": "options.training",
    "ModelArguments": "options.model",
    "DataArguments": "options.fields",
    "EstimatorCallback": "callbacks",
    "Estimator": "estimators.base",
    "BM25Estimator": "estimators.bm25",
    "SimCSEEstimator": "estimators.frozen_encoder",
    "TrainedModelEstimator": "estimators.frozen_encoder",
    "MixtureEstimator": "estimators.base",
    "EncoderProfile": "encoders.profiles",
    "PROFILES": "encoders.profiles",
    "load_encoder": "encoders.loading",
    "load_rows": "data.any_rows",
    "merge_encoders": "merging",
    "LossSettings": "loss_settings",
    "UserError": "errors",
    "SetupError": "errors",
    "info_nce": "losses",
    "soft_info_nce": "losses",
    "weighted_info_nce": "losses",
    "binary_cross_entropy": "losses",
    "kl_regularized_info_nce": "losses",
    "negative_weights": "weights",
    "cancel_top_k": "weights",
    "cancel_above_ratio": "weights",
    "extract_data_flow": "dataflow",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    """Imports a name when it is first used, so that `import soft_trainer` needs neither torch nor datasets."""
    if name not in _HOMES:
        raise AttributeError(f"module 'soft_trainer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"soft_trainer.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
