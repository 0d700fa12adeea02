"""Defines the conditions under which options are read, for the declarations in `fields.py`."""

from __future__ import annotations

from soft_trainer.options.option_spec import AppliesIf

# The losses and weightings of the package that read an option, in words.
LINEAR = "with loss=soft_info_nce and weighting=linear"
POSITIVE_AWARE = "with loss=soft_info_nce and weighting=positive_aware"
SIMILARITIES = "with a loss that uses similarities, which all but info_nce do"
KL = "with loss=kl_regularization"


def reads_estimator(o) -> bool:
    """Returns True if the loss, the batches or additional negatives may depend on the estimator."""
    loss = o.loss != "info_nce" or o.cancel != "none" or o.distill_weight > 0
    return loss or o.train_sampling_strategy == "similar" or o.negatives_per_query > 0


ESTIMATOR = AppliesIf(
    lambda o: o.estimator in (None, "none") or reads_estimator(o),
    "loss=info_nce has no weights, and neither batches nor negatives come from an estimator",
    "if the loss, the batches or the negatives use an estimator",
)
BM25 = AppliesIf(lambda o: o.estimator == "bm25", "the estimator is not bm25", "with estimator=bm25")
OWN_ROWS = AppliesIf(
    lambda o: bool(o.data_dir or o.eval_data_dir),
    "neither data_dir nor eval_data_dir is given",
    "with data_dir or eval_data_dir",
)
FROM_HUB = AppliesIf(
    lambda o: not (o.data_dir or o.source_dir or o.history),
    "the rows come from data_dir, source_dir or history",
    "without data_dir, source_dir and history",
)
MINED = AppliesIf(
    lambda o: o.source_dir is not None and o.history is None,
    "no source_dir is mined",
    "with source_dir and without history",
)
TOP_K = AppliesIf(lambda o: o.cancel == "top_k", "only cancel=top_k reads it", "with cancel=top_k")
RATIO = AppliesIf(lambda o: o.cancel == "ratio", "only cancel=ratio reads it", "with cancel=ratio")
DISTILLED = AppliesIf(lambda o: o.distill_weight > 0, "distill_weight is 0", "with distill_weight above 0")


def loss_reads(name: str, when: str) -> AppliesIf:
    """Returns the condition that the loss or its weighting has an argument with this name."""
    return AppliesIf(lambda o: name in o.reads, "neither the loss nor its weights read it", when)


SIMILAR = AppliesIf(
    lambda o: o.train_sampling_strategy == "similar",
    "only train_sampling_strategy=similar reads it",
    "with train_sampling_strategy=similar",
)
OWN_NEGATIVES = AppliesIf(
    lambda o: o.negatives_per_query > 0, "negatives_per_query is 0", "with negatives_per_query above 0"
)
