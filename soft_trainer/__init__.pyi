"""Names and types of what the package exports; `__init__.py` imports each on first use."""

from .data.any_rows import load_rows
from .dataflow import extract_data_flow
from .encoders.distilling import distil_static
from .encoders.loading import load_encoder
from .encoders.profiles import PROFILES, EncoderProfile
from .errors import SetupError, UserError
from .estimators.base import Estimator
from .estimators.bm25 import BM25Estimator
from .estimators.callback import EstimatorCallback
from .estimators.frozen_encoder import InitialModelEstimator, SimCSEEstimator, TrainedModelEstimator
from .evaluation.retrieval import RetrievalOutput
from .losses import binary_cross_entropy, info_nce, kl_regularized_info_nce, soft_info_nce, weighted_info_nce
from .merging import merge_encoders
from .objective import Objective
from .options.fields import DataArguments
from .options.model import ModelArguments
from .options.training import SoftInfoNCETrainingArguments
from .trainer import SoftInfoNCETrainer
from .weights import cancel_above_ratio, cancel_top_k, negative_weights

__version__: str
__all__ = [
    "BM25Estimator",
    "DataArguments",
    "EncoderProfile",
    "Estimator",
    "EstimatorCallback",
    "InitialModelEstimator",
    "Objective",
    "ModelArguments",
    "PROFILES",
    "RetrievalOutput",
    "SetupError",
    "SimCSEEstimator",
    "SoftInfoNCETrainer",
    "SoftInfoNCETrainingArguments",
    "TrainedModelEstimator",
    "UserError",
    "__version__",
    "binary_cross_entropy",
    "cancel_above_ratio",
    "cancel_top_k",
    "distil_static",
    "extract_data_flow",
    "info_nce",
    "kl_regularized_info_nce",
    "load_encoder",
    "load_rows",
    "merge_encoders",
    "negative_weights",
    "soft_info_nce",
    "weighted_info_nce",
]
