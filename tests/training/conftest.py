"""A trainer of the tiny encoder, whose every argument a test may change."""

import pytest
from transformers import TrainingArguments

from soft_trainer import BM25Estimator, EstimatorCallback, SoftInfoNCETrainer, SoftInfoNCETrainingArguments

UNSET = object()


@pytest.fixture
def trainer_of(model, dataset, tokenizer, profile, tmp_path):
    """Makes a trainer. Options of the arguments are keywords; `arguments` are those of the trainer itself.

    `plain` takes `TrainingArguments`; `estimator` None takes none.
    """

    def make(plain=False, estimator=UNSET, arguments=None, kind=SoftInfoNCETrainer, **options):
        settings = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 8,
            "max_steps": 3,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
        }
        args = (TrainingArguments if plain else SoftInfoNCETrainingArguments)(**settings | options)
        estimator = BM25Estimator() if estimator is UNSET else estimator
        given = {
            "model": model,
            "args": args,
            "train_dataset": dataset,
            "eval_dataset": dataset,
            "codebase": dataset,
            "processing_class": tokenizer,
            "encoder": profile,
            "callbacks": [EstimatorCallback(estimator)] if estimator else [],
        }
        return kind(**given | (arguments or {}))

    return make
