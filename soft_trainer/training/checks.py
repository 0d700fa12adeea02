"""Checks before the first step: settings that cannot work are refused, unusual ones are named."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from datasets import DatasetDict
from transformers import PreTrainedModel

from soft_trainer.data.codesearchnet import by_language
from soft_trainer.data.collator import PairCollator
from soft_trainer.data.global_batches import GlobalBatchSampler, languages_of
from soft_trainer.encoders.matryoshka import check_dims, parse_dims
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.encoders.tokenizers import add_padding_token
from soft_trainer.encoders.transformer import profile_warnings
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator, members_of
from soft_trainer.estimators.mixture import MixtureEstimator
from soft_trainer.estimators.trained_model import InitialModelEstimator
from soft_trainer.evaluation.dimensions import shorter_metric, shorter_titles
from soft_trainer.evaluation.results import METRICS
from soft_trainer.loss_settings import LossSettings
from soft_trainer.options.fields import DataArguments, ModelArguments, SoftInfoNCEOptions, SoftInfoNCETrainingArguments
from soft_trainer.options.refused import FALLING, REFUSED_ARGUMENTS, check_options, ignored_options
from soft_trainer.terminal import table
from soft_trainer.training.adapters import adapter_settings, adapter_warnings, check_lora_options
from soft_trainer.training.building import hidden_size, model_name
from soft_trainer.training.hard_batches import COLUMN, COLUMN_NAME, check_negatives, choice_of
from soft_trainer.training.merging import check_merging
from soft_trainer.training.unused_options import unused_in_training

# Options of the loss that have a default of their own, not the estimator's.
LOSS_OPTIONS = (
    *("weighting", "floor", "infonce_weight", "kl_weight", "cancel", "cancel_k", "cancel_ratio"),
    *("order_loss_weight", "order_loss_scale", "distill_weight", "clamp_negative_scores"),
)
CHOICES = {
    "duplicates": ("mask", "positives", "ignore"),
    "similar_by": ("estimator", "bm25"),
    "negatives_meet": ("own", "all"),
}
# Option -> its smallest value.
LEAST = {"negatives_per_query": 0, "negative_candidates": 1, "neighbours": 1, "group_size": 1, "nearest_apart": 0}


def banner(trainer) -> str:
    """The settings of a training as a table."""
    args, loss = trainer.args, trainer.loss_settings
    if loss.weighting == "positive_aware":
        weights = ("margin / temperature", f"{loss.margin:g} / {loss.temperature:g}, positive-aware")
    else:
        values = f"{loss.alpha:g} / {loss.beta:g} / {loss.temperature:g}, floor {loss.floor:g}"
        weights = ("alpha / beta / temperature", values if loss.needs_similarity else "not used")
    encoder = trainer.encoder
    rows = [
        ("batch per process", args.per_device_train_batch_size),
        ("processes", f"{args.world_size} ({trainer.accelerator.distributed_type.value})"),
        ("codes a query meets (N)", trainer.global_batch_size),
        ("negatives per query", trainer.global_batch_size - 1),
        ("accumulated batches", args.gradient_accumulation_steps),
        ("loss", loss.loss),
        ("estimator", "none" if trainer.estimator is None else type(trainer.estimator).__name__),
        weights,
        ("batches", args.train_sampling_strategy),
        ("own negatives per query", options_of(args).negatives_per_query),
        ("score", f"{encoder.score_function} x {encoder.score_scale:g}, {encoder.pooling} pooling"),
        *_prompt_rows(encoder),
        ("precision", trainer.precision),
    ]
    rows += adapter_settings(trainer.model).items()
    if trainer.matryoshka_dims:
        rows.append(("trained dimensions", ", ".join(map(str, trainer.matryoshka_dims))))
    return table(("training", ""), rows)


def _prompt_rows(encoder: EncoderProfile) -> list[tuple[str, str]]:
    """The text before queries and codes as rows of the table, none where there is none."""
    note = "" if encoder.include_prompt else ", not pooled"
    prefixes = (("query", encoder.query_prefix), ("code", encoder.code_prefix))
    return [(f"before every {side}", json.dumps(prefix) + note) for side, prefix in prefixes if prefix]


def warnings_of(trainer) -> list[str]:
    """Lines about settings that work, but hardly as intended."""
    warnings, encoder = ignored_options(trainer.args), trainer.encoder
    strategy = trainer.args.train_sampling_strategy
    warnings += unused_in_training(trainer.loss_settings, options_of(trainer.args), strategy)
    if encoder.score_function == "cosine" and encoder.score_scale == 1:
        warnings.append(
            "warning: cosine scores lie between -1 and 1, too close together for a softmax to learn from: set "
            "score_scale (20 is usual)"
        )
    half = {p.dtype for p in trainer.model.parameters() if p.requires_grad} & {torch.float16, torch.bfloat16}
    if half:
        name = str(half.pop()).removeprefix("torch.")
        warnings.append(
            f"warning: the weights themselves are {name}, so small updates are lost: load the model in "
            "float32 (--dtype float32) and use autocast instead, --bf16 true or --fp16 true"
        )
    warnings += profile_warnings(trainer.model, encoder)
    warnings += adapter_warnings(trainer.model, trainer.args)
    dims, size = trainer.matryoshka_dims, trainer.model.config.hidden_size
    if dims and dims[0] < size:
        warnings.append(
            f"warning: matryoshka_dims leaves {size} out, so the dimensions after the first {dims[0]} do not learn: "
            f"add {size}, unless only shorter embeddings are wanted"
        )
    return warnings


def check_trainer_arguments(model, processing_class, arguments: dict) -> None:
    """Refuses arguments of `transformers.Trainer` that have no meaning here.

    Args:
        model: the encoder, None if `model_init` makes it.
        arguments: the keyword arguments that `Trainer` would get.

    Raises:
        UserError: names the argument and the alternative.
    """
    if model is None and arguments.get("model_init") is None:
        raise UserError("model: pass a PreTrainedModel encoder, or model_init= that makes one")
    # A PeftModel is no PreTrainedModel, but has one inside.
    if not (model is None or isinstance(model, PreTrainedModel) or hasattr(model, "peft_config")):
        raise UserError(f"model: a PreTrainedModel encoder is expected, not {type(model).__name__}")
    if processing_class is None:
        raise UserError("processing_class: SoftInfoNCETrainer needs the encoder's tokenizer")
    add_padding_token(processing_class)
    for name, alternative in REFUSED_ARGUMENTS.items():
        if arguments.get(name) is not None:
            raise UserError(f"{name}: has no meaning for SoftInfoNCETrainer; {alternative}")


def check_before_loading(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: SoftInfoNCETrainingArguments,
    estimator,
    data: DatasetDict,
    profile: EncoderProfile,
) -> None:
    """Refuses a run of the command line that cannot work, when its rows are known and before its model is loaded.

    Raises:
        UserError: the setting that cannot work, and values that do.
    """
    name = None if model_args.from_scratch else model_name(model_args)
    check_lora_options(model_args, args.merge_lora, name, model_args.model_revision)
    dims = parse_dims(args.matryoshka_dims) or profile.matryoshka_dims
    size = hidden_size(model_args) if dims else 0
    check_dims(dims, size)
    names = (*METRICS, *(shorter_metric(dim) for dim in dims if dim < size))
    metrics = measured_metrics(names, by_language(data.get("valid"), data_args.languages))
    check_run(args, estimator, data.get("train"), data_args.early_stopping_patience, metrics)
    check_merging(args, bool(data_args.guard), "valid" in data)
    check_initial_model(estimator, model_args.from_scratch)
    if args.do_train:
        weighs = make_loss_settings(args, estimator).needs_similarity
        check_negatives(args, data["train"], profile, estimator if weighs else None)


def check_run(
    args,
    estimator,
    train_dataset=None,
    early_stopping_patience: int | None = None,
    metrics: Iterable[str] | None = tuple(METRICS),
) -> None:
    """Refuses settings that cannot work, before a model is loaded.

    Args:
        args: `SoftInfoNCETrainingArguments`, or plain `TrainingArguments`.
        estimator: of the weights, or None.
        train_dataset: the rows to train on.
        metrics: the names of the metrics that an evaluation measures; None if they are not known.

    Raises:
        UserError: the setting that cannot work, and values that do.
    """
    check_options(args)
    loss_settings = make_loss_settings(options_of(args), estimator)
    if args.n_gpu > 1:
        raise UserError(
            f"{args.n_gpu} GPUs without a launcher would be wrapped in DataParallel, which splits the negatives "
            "of a batch: start with `accelerate launch`, or show one GPU with CUDA_VISIBLE_DEVICES=0"
        )
    if args.mixed_precision == "fp16" and args.device.type == "cpu":  # also when the launcher chose it
        raise UserError("fp16 needs a GPU: use bf16 (--bf16 true, or the launcher's --mixed_precision bf16) on a CPU")
    if loss_settings.needs_similarity and estimator is None:
        raise UserError(
            f"{loss_settings.settings_that_need_similarity} needs an estimator: pass "
            "callbacks=[EstimatorCallback(...)], or use loss=info_nce"
        )
    check_weighting(loss_settings, estimator)
    _check_hard_batches(args, estimator, train_dataset)
    if loss_settings.cancel == "ratio" and isinstance(estimator, MixtureEstimator):
        raise UserError("cancel=ratio: a mixture's similarities are logarithms, use cancel=top_k")
    if args.eval_strategy != "no" and metrics is not None:
        _check_metric(args, list(metrics))
    if early_stopping_patience is not None:
        if args.eval_strategy == "no":
            raise UserError("early_stopping_patience needs evaluations to count: --eval_strategy epoch, for example")
        if early_stopping_patience < 1:
            raise UserError(f"early_stopping_patience={early_stopping_patience}: must be 1 or more")
    if train_dataset is not None:
        check_batches(args, loss_settings, train_dataset, args.per_device_train_batch_size)
        if isinstance(estimator, Estimator):
            estimator.check(train_dataset)


def _check_hard_batches(args, estimator, train_dataset) -> None:
    """Refuses own negatives and clustered batches that could not be made."""
    options = options_of(args)
    for name, allowed in CHOICES.items():
        if getattr(options, name) not in allowed:
            raise UserError(f"{name}={getattr(options, name)!r}: use one of {', '.join(allowed)}")
    if args.train_sampling_strategy == "similar" and options.similar_by == "estimator":
        if not (isinstance(estimator, Estimator) and estimator.finds_neighbours):
            name = "no estimator" if estimator is None else type(estimator).__name__
            raise UserError(
                f"train_sampling_strategy=similar: {name} has no vectors to find neighbours by; use bm25, simcse, "
                "trained_model or initial_model, or --similar_by bm25"
            )
    for name, least in LEAST.items():
        if getattr(options, name) < least:
            raise UserError(f"{name}={getattr(options, name)}: must be {least} or more")
    if not 0 <= options.random_share <= 1:
        raise UserError(f"random_share={options.random_share}: must be from 0 to 1")
    if not options.negatives_per_query:
        if options.negatives is not None:
            raise UserError("negatives: say how many of them each query gets, with --negatives_per_query")
        return
    choice_of(options)
    if options.negatives not in (None, COLUMN) and not Path(options.negatives).exists():
        raise UserError(f"negatives={options.negatives}: no such file")
    if options.negatives is None and estimator is None and train_dataset is not None:
        if COLUMN_NAME not in train_dataset.column_names:
            raise UserError(
                "negatives_per_query: mining needs an estimator; or name a file with --negatives, or give the rows a "
                "column 'negatives'"
            )


def check_own_collator(args, data_collator) -> None:
    """Refuses own negatives with a user's collator, which sees pairs and knows no further codes."""
    if data_collator is not None and not isinstance(data_collator, PairCollator):
        if options_of(args).negatives_per_query:
            raise UserError("data_collator: collates pairs, so it cannot be used with negatives_per_query")


def check_prompts_pooled(prompt_lengths: Mapping[str, int], data_collator) -> None:
    """Refuses a user's collator if prompts are left out of the pooling; one of ours learns the prompts' lengths.

    Raises:
        UserError: the collator knows nothing of prompts.
    """
    if data_collator is None or not any(prompt_lengths.values()):
        return
    if not isinstance(data_collator, PairCollator):
        raise UserError("data_collator: does not know which tokens are the prompt's; use include_prompt=True with it")
    data_collator.prompt_lengths = dict(prompt_lengths)


def check_initial_model(estimator, from_scratch: str | None) -> None:
    """Refuses weights by an encoder that starts at random.

    Raises:
        UserError: names the estimators that fit.
    """
    if from_scratch and any(isinstance(member, InitialModelEstimator) for member in members_of(estimator)):
        raise UserError(
            f"estimator=initial_model: with --from_scratch {from_scratch} the encoder starts at random, and so would "
            "the weights; use bm25, simcse or trained_model"
        )


def check_weighting(loss_settings: LossSettings, estimator) -> None:
    """Refuses positive-aware weights by an estimator that compares queries with queries.

    Raises:
        UserError: names the estimators that fit.
    """
    if loss_settings.uses_weights and loss_settings.weighting == "positive_aware" and estimator is not None:
        if not getattr(estimator, "compares_codes", True):
            raise UserError(
                f"weighting=positive_aware: {type(estimator).__name__} does not compare queries with codes; use "
                "an encoder (--estimator initial_model), or BM25Estimator(document_column='code_tokens') "
                "(--bm25_document_column code_tokens)"
            )


def check_batches(args, loss_settings: LossSettings, train_dataset, batch_size: int) -> None:
    """Refuses batches that cannot be drawn, or that are too small for the weights.

    Args:
        batch_size: rows per process.

    Raises:
        UserError: names the size that works.
    """
    size, strategy = batch_size * args.world_size, args.train_sampling_strategy
    languages = languages_of(train_dataset) if strategy == "one_language" else ()
    GlobalBatchSampler(
        len(train_dataset), size, strategy=strategy, drop_last=args.dataloader_drop_last, languages=languages
    )
    check_codes(loss_settings, size if options_of(args).gather_negatives is not False else batch_size)


def check_codes(loss_settings: LossSettings, codes: int) -> None:
    """Refuses batches in which a query meets too few codes for the weights.

    Raises:
        UserError: names the number that works.
    """
    if codes < loss_settings.smallest_batch:
        settings = f"loss={loss_settings.loss}, cancel={loss_settings.cancel}"
        if loss_settings.uses_weights and loss_settings.weighting == "eq4":
            formula = "beta must be above alpha / (N - 1)"
            settings += f", alpha={loss_settings.alpha:g}, beta={loss_settings.beta:g} ({formula})"
        raise UserError(
            f"a query meets N={codes} codes, too few for {settings}: the smallest N that works is "
            f"{loss_settings.smallest_batch}"
        )


def measured_metrics(names: Iterable[str], eval_dataset) -> list[str]:
    """The metrics of an evaluation: `names`, and with a dict of evaluation sets also those of each set."""
    keys = eval_dataset if isinstance(eval_dataset, Mapping) else ()
    return [f"{prefix}{name}" for prefix in ("", *(f"{key}_" for key in keys)) for name in names]


def _check_metric(args, measured: Sequence[str]) -> None:
    """Refuses a `metric_for_best_model` that evaluation does not measure."""
    metric = args.metric_for_best_model
    if metric is None:
        return
    if metric in ("loss", "eval_loss"):
        if args.load_best_model_at_end or args.save_strategy == "best" or args.lr_scheduler_type in FALLING:
            raise UserError(f"metric_for_best_model='loss': evaluation measures retrieval, use {measured[0]!r}")
        return
    name = metric.removeprefix("eval_")
    if name not in measured:
        nearest = difflib.get_close_matches(name, measured, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"use one of {', '.join(measured)}"
        raise UserError(f"metric_for_best_model={metric!r}: evaluation does not measure it; {hint}")
    if name.endswith((*METRICS, *shorter_titles(measured))) and not args.greater_is_better:
        raise UserError(f"greater_is_better=False: {name} is better when larger")


def options_of(args) -> SoftInfoNCEOptions:
    """The options of the loss; their defaults if `args` are plain `TrainingArguments`."""
    return args if isinstance(args, SoftInfoNCEOptions) else SoftInfoNCEOptions()


def make_loss_settings(options: SoftInfoNCEOptions, estimator) -> LossSettings:
    """The loss of a run: its options, and the estimator's defaults for options that are None."""
    settings = {name: getattr(options, name) for name in LOSS_OPTIONS}
    prefix = "positive_" if options.weighting == "positive_aware" else ""
    defaults = {"alpha": ("alpha", 1.0), "beta": ("beta", 1.0), "margin": ("positive_margin", 0.0)}
    defaults |= {"temperature": (f"{prefix}temperature", 1.0), "distill_temperature": ("distill_temperature", 1.0)}
    for name, (attribute, value) in defaults.items():
        given, default = getattr(options, name), getattr(estimator, attribute, value)
        # A study checks its runs with the class alone, whose defaults may depend on a checkpoint.
        default = value if isinstance(default, property) else default
        settings[name] = default if given is None else given
    return LossSettings(loss=options.loss or ("info_nce" if estimator is None else "soft_info_nce"), **settings)
