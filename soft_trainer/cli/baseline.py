"""Train an encoder with sentence-transformers' trainer and losses, and measure it as `train` does.

soft-trainer baseline --data_dir DIR --model_name_or_path MODEL
soft-trainer baseline --baseline gist --mined_negatives 1 --data_dir DIR --model_name_or_path MODEL
"""

from __future__ import annotations

from soft_trainer.options.fields import DataArguments, SoftInfoNCETrainingArguments
from soft_trainer.options.model import ModelArguments
from soft_trainer.studies.baseline import BaselineArguments, train_baseline

OPTIONS = (BaselineArguments, ModelArguments, DataArguments, SoftInfoNCETrainingArguments)
run = train_baseline
