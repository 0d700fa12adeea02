"""Train the sentence encoder of the SimCSE estimator, unsupervised, on queries alone (Section 4.1).

soft-trainer simcse --config simcse
soft-trainer simcse --data_dirs DIR [DIR ...] --output_dir outputs/simcse

A text is encoded twice, with another dropout each time, and has to find itself among the texts of its batch. The
output folder loads with `SimCSEEstimator` and with `SentenceTransformer`.
"""

from __future__ import annotations

from soft_trainer.options.commands import SimCSEArguments, SimCSETrainingOptions

OPTIONS = (SimCSEArguments, SimCSETrainingOptions)


def run(*options) -> None:
    """Trains and measures."""
    from soft_trainer.simcse import train_simcse  # imports torch, for which --help need not wait

    train_simcse(*options)
