"""Declares the options for the loss and its weights. Imports no libraries, to keep `--help` fast."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from soft_trainer.options.choices import LOSSES, WEIGHTINGS
from soft_trainer.options.spec import option, unset

CANCELLATIONS = ("none", "top_k", "ratio")
# The default is the estimator's attribute, or 1 if it has none.
estimator_default = functools.partial(unset, of_estimator=1.0)
TEACHER_WEIGHT = 0.3  # chosen on valid in benchmarks/teacher_study.md
# Options that determine the paper's weights.
weighing = functools.partial(option, group="weights")
weighing_default = functools.partial(estimator_default, group="weights")


@dataclass
class LossOptions:
    """Options for the loss and its weights. `soft_trainer.criterion.Criterion` inherits them, with all defaults."""

    loss: str | None = weighing(
        None,
        f"{', '.join(LOSSES)}, or your own function as module:name. Default: soft_info_nce with an estimator, "
        "otherwise info_nce.",
        choices=tuple(LOSSES),
        own=True,
        refers_to="code",
        common=True,
    )
    weighting: str = weighing(
        "linear",
        "How similarities become weights: linear compares negatives with each other (Eq. 4), positive_aware compares "
        "them with the positive; or your own function as module:name. Default: positive_aware for search encoders, "
        "otherwise linear.",
        choices=tuple(WEIGHTINGS),
        own=True,
        refers_to="code",
        common=True,
    )
    alpha: float | None = weighing_default(
        "weighting=linear: weight of the similarity in Eq. 4.",
        least=0,
    )
    beta: float | None = weighing_default("weighting=linear: constant in Eq. 4.", above=0)
    temperature: float | None = weighing_default(
        "Temperature of the softmax of similarities, or of positive_aware weights. It belongs to the weights: the "
        "scores in the loss have score_scale.",
        least=0,
    )
    floor: float = weighing(
        0.1,
        "weighting=linear: smallest weight of a negative in Eq. 4. Default: 0.1.",
        least=0,
        most=1,
    )
    margin: float | None = weighing_default(
        "weighting=positive_aware: a negative has weight 1 if it is less similar than the positive by this much.",
        of_estimator=0.0,
    )
    distill_weight: float = option(
        0.0,
        "Weight of an additional loss, the KL divergence between the estimator's scores and the encoder's over the "
        f"negatives. 0 turns it off. Default: {TEACHER_WEIGHT} with a teacher, otherwise 0.",
        least=0,
    )
    distill_temperature: float | None = estimator_default(
        "Temperature of the estimator's softmax in the loss that distill_weight adds.",
        above=0,
    )
    infonce_weight: float = weighing(
        1.3,
        "Weight of InfoNCE in kl_regularization.",
        least=0,
    )
    kl_weight: float = weighing(
        0.7,
        "Weight of the divergence in kl_regularization.",
        least=0,
    )
    cancel: str = weighing("none", "False-negative cancellation: none, top_k or ratio.", choices=CANCELLATIONS)
    cancel_k: int = weighing(
        3,
        "cancel=top_k: number of negatives to exclude, the most similar ones.",
        least=0,
    )
    cancel_ratio: float = weighing(
        0.5,
        "cancel=ratio: negatives are excluded if their similarity is above this fraction of the positive's.",
        least=0,
    )
