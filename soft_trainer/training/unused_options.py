"""Options that were given but change nothing beside the other options of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from soft_trainer.estimators.registry import WITH_MODEL
from soft_trainer.loss_settings import LossSettings
from soft_trainer.options.fields import DataArguments, ModelArguments, SoftInfoNCEOptions, SoftInfoNCETrainingArguments


@dataclass(frozen=True)
class Condition:
    """Options that have an effect under a condition alone.

    Args:
        names: of the options.
        holds: True if they have an effect.
        reason: the end of the line that says why they have none.
    """

    names: tuple[str, ...]
    holds: Callable[..., bool]
    reason: str


# `holds` gets the loss, its options and the strategy of the batches.
OF_TRAINING = (
    Condition(
        ("alpha", "beta", "floor"),
        lambda loss, *_: loss.uses_weights and loss.weighting == "eq4",
        "only loss=soft_info_nce with weighting=eq4 reads it",
    ),
    Condition(
        ("margin",), lambda loss, *_: loss.weighting == "positive_aware", "only weighting=positive_aware reads it"
    ),
    Condition(("temperature",), lambda loss, *_: loss.loss != "info_nce", "loss=info_nce has no weights"),
    Condition(
        ("infonce_weight", "kl_weight"),
        lambda loss, *_: loss.loss == "kl_regularization",
        "only loss=kl_regularization reads it",
    ),
    Condition(("cancel_k",), lambda loss, *_: loss.cancel == "top_k", "only cancel=top_k reads it"),
    Condition(("cancel_ratio",), lambda loss, *_: loss.cancel == "ratio", "only cancel=ratio reads it"),
    Condition(("order_loss_scale",), lambda loss, *_: loss.order_loss_weight > 0, "order_loss_weight is 0"),
    Condition(("distill_temperature",), lambda loss, *_: loss.distill_weight > 0, "distill_weight is 0"),
    Condition(
        ("group_size", "random_share", "nearest_apart", "equal_texts_apart", "neighbours", "similar_by"),
        lambda loss, options, strategy: strategy == "similar",
        "only train_sampling_strategy=similar reads it",
    ),
    Condition(
        (
            *("negatives_meet", "negative_candidates", "negative_ranks", "negative_max_score", "negative_margin"),
            *("negative_ratio", "negative_temperature"),
        ),
        lambda loss, options, strategy: options.negatives_per_query > 0,
        "negatives_per_query is 0",
    ),
)
# `holds` gets the arguments of data, model and training.
OF_THE_COMMAND = (
    Condition(
        ("estimator",),
        lambda data, model, args: _estimators(data) == ["none"] or _reads_estimator(args),
        "loss=info_nce has no weights, and neither batches nor negatives come from an estimator",
    ),
    Condition(
        ("bm25_idf", "bm25_scope", "bm25_document_column"),
        lambda data, model, args: "bm25" in _estimators(data),
        "the estimator is not bm25",
    ),
    Condition(
        ("estimator_model",),
        lambda data, model, args: bool(set(WITH_MODEL) & set(_estimators(data))),
        "only the estimators simcse and trained_model read it",
    ),
    Condition(
        ("mixture_shares", "mixture_temperatures"),
        lambda data, model, args: len(_estimators(data)) > 1,
        "the estimator is no mixture",
    ),
    Condition(("mining_keep",), lambda data, model, args: data.source_dir is not None, "no source_dir is mined"),
    Condition(
        ("vocabulary_size",), lambda data, model, args: model.from_scratch is not None, "only from_scratch reads it"
    ),
    Condition(
        ("model_revision",), lambda data, model, args: model.from_scratch is None, "from_scratch loads no encoder"
    ),
)


def _estimators(data: DataArguments) -> list[str]:
    return (data.estimator or "none").split("+")


def _reads_estimator(args: SoftInfoNCETrainingArguments) -> bool:
    """True if the loss, the batches or own negatives may come from the estimator."""
    similar = args.train_sampling_strategy == "similar" and args.similar_by == "estimator"
    loss = args.loss != "info_nce" or args.cancel != "none" or args.order_loss_weight > 0 or args.distill_weight > 0
    return loss or similar or args.negatives_per_query > 0


def unused_in_training(loss_settings: LossSettings, options: SoftInfoNCEOptions, strategy: str) -> list[str]:
    """A line for each option of the loss that was given and changes nothing.

    Args:
        strategy: `train_sampling_strategy`.
    """
    return _lines(OF_TRAINING, _changed(options, SoftInfoNCEOptions), loss_settings, options, strategy)


def unused_in_command(
    data_args: DataArguments, model_args: ModelArguments, args: SoftInfoNCETrainingArguments
) -> list[str]:
    """A line for each option of the rows, the estimator and the encoder that was given and changes nothing."""
    changed = _changed(data_args, DataArguments) | _changed(model_args, ModelArguments)
    return _lines(OF_THE_COMMAND, changed, data_args, model_args, args)


def _changed(options, kind: type) -> dict[str, object]:
    """The options that differ from their defaults."""
    fields = dataclasses.fields(kind)
    return {field.name: value for field in fields if (value := getattr(options, field.name)) != field.default}


def _lines(conditions: tuple[Condition, ...], changed: Mapping[str, object], *settings) -> list[str]:
    return [
        f"warning: {name}={changed[name]} has no effect: {condition.reason}"
        for condition in conditions
        for name in condition.names
        if name in changed and not condition.holds(*settings)
    ]
