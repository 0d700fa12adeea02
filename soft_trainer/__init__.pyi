"""Names and types of what the package exports; `__init__.py` imports each on first use. Editors need the `as`."""

from .criterion import Criterion as Criterion, Targets as Targets
from .data.load import load_rows as load_rows
from .dataflow import extract_data_flow as extract_data_flow
from .encoders.distilling import distil_static as distil_static
from .encoders.loading import load_encoder as load_encoder
from .encoders.profiles import PROFILES as PROFILES, EncoderProfile as EncoderProfile
from .errors import UserError as UserError
from .estimators.base import Estimator as Estimator, NeighbourEstimator as NeighbourEstimator
from .estimators.bm25 import BM25Estimator as BM25Estimator
from .estimators.callback import EstimatorCallback as EstimatorCallback
from .estimators.frozen_encoder import (
    InitialModelEstimator as InitialModelEstimator,
    SimCSEEstimator as SimCSEEstimator,
    TrainedModelEstimator as TrainedModelEstimator,
)
from .estimators.scores import CrossEncoderEstimator as CrossEncoderEstimator, ScoresEstimator as ScoresEstimator
from .evaluation.retrieval import RetrievalOutput as RetrievalOutput
from .losses import (
    binary_cross_entropy as binary_cross_entropy,
    info_nce as info_nce,
    kl_divergence as kl_divergence,
    kl_regularized_info_nce as kl_regularized_info_nce,
    soft_info_nce as soft_info_nce,
    weighted_info_nce as weighted_info_nce,
)
from .options.fields import DataArguments as DataArguments
from .options.model import ModelArguments as ModelArguments
from .options.training import SoftInfoNCETrainingArguments as SoftInfoNCETrainingArguments
from .trainer import SoftInfoNCETrainer as SoftInfoNCETrainer
from .weights import (
    cancel_above_ratio as cancel_above_ratio,
    cancel_top_k as cancel_top_k,
    negative_weights as negative_weights,
    positive_aware_weights as positive_aware_weights,
)

__version__: str
__all__ = [
    "BM25Estimator",
    "Criterion",
    "CrossEncoderEstimator",
    "DataArguments",
    "EncoderProfile",
    "Estimator",
    "EstimatorCallback",
    "InitialModelEstimator",
    "ModelArguments",
    "NeighbourEstimator",
    "PROFILES",
    "RetrievalOutput",
    "ScoresEstimator",
    "SimCSEEstimator",
    "SoftInfoNCETrainer",
    "SoftInfoNCETrainingArguments",
    "Targets",
    "TrainedModelEstimator",
    "UserError",
    "__version__",
    "binary_cross_entropy",
    "cancel_above_ratio",
    "cancel_top_k",
    "distil_static",
    "extract_data_flow",
    "info_nce",
    "kl_divergence",
    "kl_regularized_info_nce",
    "load_encoder",
    "load_rows",
    "negative_weights",
    "positive_aware_weights",
    "soft_info_nce",
    "weighted_info_nce",
]
