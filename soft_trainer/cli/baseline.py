"""Train an encoder with sentence-transformers' trainer and losses, and measure it as `train` does.

soft-trainer baseline --data_dir DIR --model_name_or_path MODEL
soft-trainer baseline --baseline gist --mined_negatives 1 --data_dir DIR --model_name_or_path MODEL
"""

from __future__ import annotations

from soft_trainer.options.commands import BaselineArguments
from soft_trainer.options.fields import DataArguments, TrainingOptions
from soft_trainer.options.model import ModelArguments

OPTIONS = (BaselineArguments, ModelArguments, DataArguments, TrainingOptions)


def run(*options) -> None:
    """Trains and measures."""
    from soft_trainer.studies.baseline import train_baseline  # imports torch, for which --help need not wait

    train_baseline(*options)
