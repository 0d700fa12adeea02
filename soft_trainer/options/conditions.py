"""Defines when the options in `fields.py` apply. For example, `cancel_k` applies only with cancel=top_k."""

from __future__ import annotations

from soft_trainer.choices import WITHOUT_ESTIMATOR
from soft_trainer.options.option_spec import AppliesIf

# The losses and weightings that read an option, in words.
LINEAR = "with loss=soft_info_nce and weighting=linear"
POSITIVE_AWARE = "with loss=soft_info_nce and weighting=positive_aware"
SIMILARITIES = "with a loss that uses similarities (all except info_nce)"
KL = "with loss=kl_regularization"


def reads_estimator(o, split=None) -> bool:
    """Returns True if the loss, the batches or the additional negatives use the estimator.

    Args:
        split: the training rows, if known: their negatives are drawn instead of similar functions.
    """
    finds = bool(o.negatives_per_query) and (split is None or split.judgments.negatives is None)
    loss = o.loss not in WITHOUT_ESTIMATOR or o.cancel != "none" or o.distill_weight > 0
    return loss or o.train_sampling_strategy == "similar" or finds


ESTIMATOR = AppliesIf(
    lambda o: o.estimator in (None, "none") or reads_estimator(o),
    "loss=info_nce has no weights, and neither batches nor negatives use an estimator",
    "if the loss, the batches or the negatives use an estimator",
)
BM25 = AppliesIf(lambda o: o.estimator == "bm25", "the estimator is not bm25", "with estimator=bm25")
OWN_ROWS = AppliesIf(
    lambda o: bool(o.data_dir or o.eval_data_dir),
    "neither data_dir nor eval_data_dir is set",
    "with data_dir or eval_data_dir",
)
FROM_HUB = AppliesIf(
    lambda o: not (o.data_dir or o.source_dir or o.history),
    "the rows come from data_dir, source_dir or history",
    "without data_dir, source_dir or history",
)
MINED = AppliesIf(
    lambda o: o.source_dir is not None and o.history is None,
    "no source_dir is mined",
    "with source_dir and without history",
)
TOP_K = AppliesIf(lambda o: o.cancel == "top_k", "it needs cancel=top_k", "with cancel=top_k")
RATIO = AppliesIf(lambda o: o.cancel == "ratio", "it needs cancel=ratio", "with cancel=ratio")
DISTILLED = AppliesIf(lambda o: o.distill_weight > 0, "distill_weight is 0", "with distill_weight above 0")


def loss_reads(name: str, when: str) -> AppliesIf:
    """Returns a condition that is true if the loss function or its weighting function takes the argument `name`."""
    return AppliesIf(lambda o: name in o.reads, "neither the loss nor its weighting uses it", when)


SIMILAR = AppliesIf(
    lambda o: o.train_sampling_strategy == "similar",
    "it needs train_sampling_strategy=similar",
    "with train_sampling_strategy=similar",
)
OWN_NEGATIVES = AppliesIf(
    lambda o: bool(o.negatives_per_query), "negatives_per_query is not set", "with negatives_per_query above 0"
)
