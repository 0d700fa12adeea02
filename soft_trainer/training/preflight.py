"""Checks of a plan against rows, encoder and trainer, before hours of work. `options` checks the options alone."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from datasets import DatasetDict
from transformers import PreTrainedModel

from soft_trainer.data.codesearchnet import by_language, target_rows
from soft_trainer.data.collator import PairCollator
from soft_trainer.data.global_batches import GlobalBatchSampler, languages_of
from soft_trainer.encoders.matryoshka import check_dims
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.encoders.tokenizers import add_padding_token
from soft_trainer.errors import UserError, refuse
from soft_trainer.estimators.base import Estimator, members_of
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.evaluation.dimensions import shorter_metric, shorter_titles
from soft_trainer.evaluation.results import METRICS
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.refused import FALLING, REFUSED_ARGUMENTS
from soft_trainer.options.resolve import Plan, check_codes, resolve
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.training.adapters import check_lora_options
from soft_trainer.training.building import hidden_size, model_name
from soft_trainer.training.hard_batches import COLUMN_NAME, check_negatives
from soft_trainer.training.merging import AUTO, check_merging


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
    plan = resolve(args, estimator)
    name = None if model_args.from_scratch else model_name(model_args)
    check_lora_options(model_args, args.merge_lora, name, model_args.model_revision)
    dims = plan.dims or profile.matryoshka_dims
    size = hidden_size(model_args) if dims else 0
    check_dims(dims, size)
    check_metric(args, [dim for dim in dims if dim < size], by_language(data.get("valid"), data_args.languages))
    check_merging(args, bool(data_args.guard), "valid" in data)
    reads_encoder = any(isinstance(member, InitialModelEstimator) for member in members_of(estimator))
    refuse(
        (
            data_args.early_stopping_patience is not None and args.eval_strategy == "no",
            "early_stopping_patience needs evaluations to count: --eval_strategy epoch, for example",
        ),
        (
            model_args.from_scratch and reads_encoder,
            f"estimator=initial_model: with --from_scratch {model_args.from_scratch} the encoder starts at random, "
            "and so would the weights; use bm25, simcse or trained_model",
        ),
    )
    if args.do_train:
        check_rows_of(plan, args, estimator, data["train"])
        check_negatives(plan, data["train"], profile, estimator if plan.loss.needs_similarity else None)


def check_rows_of(plan: Plan, args, estimator, train_dataset) -> None:
    """Refuses rows that do not fill a batch, that the estimator cannot read, or that have no negatives.

    Raises:
        UserError: names what is missing, and the size of a batch that works.
    """
    languages = languages_of(train_dataset) if plan.strategy == "one_language" else ()
    size = plan.batch_size * plan.processes
    drop_last, strategy = args.dataloader_drop_last, plan.strategy
    GlobalBatchSampler(len(train_dataset), size, strategy=strategy, drop_last=drop_last, languages=languages)
    check_codes(plan.loss, plan.global_batch_size)
    if isinstance(estimator, Estimator):
        estimator.check(train_dataset)
    mines = plan.options.negatives_per_query and plan.options.negatives is None
    if mines and estimator is None and COLUMN_NAME not in train_dataset.column_names:
        raise UserError(
            "negatives_per_query: mining needs an estimator; or name a file with --negatives, or give the rows a "
            "column 'negatives'"
        )


def check_metric(args, dims: Iterable[int], eval_dataset, names: Iterable[str] = METRICS) -> None:
    """Refuses a `metric_for_best_model` that evaluation does not measure.

    Args:
        dims: the numbers of first dimensions that are measured, too.
        eval_dataset: the rows of evaluation, or a dict of them, whose sets are measured apart.
        names: the metrics of an evaluation.

    Raises:
        UserError: names the nearest metric.
    """
    metric = args.metric_for_best_model
    if metric is None or args.eval_strategy == "no":
        return
    keys = eval_dataset if isinstance(eval_dataset, Mapping) else ()
    names = [*names, *map(shorter_metric, dims)]
    measured = [f"{prefix}{name}" for prefix in ("", *(f"{key}_" for key in keys)) for name in names]
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


def check_evaluation(trainer) -> None:
    """Refuses evaluations that cannot be made during training, or at its end to choose a merge ratio.

    Raises:
        UserError: no evaluation rows, no corpus for them, or a query whose url is not in it.
    """
    args, sets = trainer.args, trainer.eval_dataset
    chooses = getattr(args, "merge_ratio", None) == AUTO
    if args.eval_strategy == "no" and not args.eval_on_start and not chooses:
        return
    if sets is None:
        raise UserError("eval_strategy, eval_on_start: pass eval_dataset= (rows with url and a query)")
    for key, queries in (sets if isinstance(sets, Mapping) else {None: sets}).items():
        name = "eval_dataset" if key is None else f"eval_dataset[{key!r}]"
        target_rows(queries, trainer.corpus_of(key), name)


def check_trainer_arguments(model, processing_class, arguments: dict) -> None:
    """Refuses arguments of `transformers.Trainer` that have no meaning here.

    Args:
        model: the encoder, None if `model_init` makes it.
        arguments: the keyword arguments that `Trainer` would get.

    Raises:
        UserError: names the argument and the alternative.
    """
    # A PeftModel is not a PreTrainedModel, but has one inside.
    is_encoder = model is None or isinstance(model, PreTrainedModel) or hasattr(model, "peft_config")
    refuse(
        (
            model is None and arguments.get("model_init") is None,
            "model: pass a PreTrainedModel encoder, or model_init= that makes one",
        ),
        (not is_encoder, f"model: a PreTrainedModel encoder is expected, not {type(model).__name__}"),
        (processing_class is None, "processing_class: SoftInfoNCETrainer needs the encoder's tokenizer"),
        *(
            (arguments.get(name) is not None, f"{name}: has no meaning for SoftInfoNCETrainer; {alternative}")
            for name, alternative in REFUSED_ARGUMENTS.items()
        ),
    )
    add_padding_token(processing_class)


def check_collator(plan: Plan, data_collator, prompt_lengths: Mapping[str, int]) -> None:
    """Refuses a user's collator where it would have to know more than pairs; one of ours learns the prompts' lengths.

    Raises:
        UserError: own negatives, or prompts that are left out of the pooling.
    """
    if isinstance(data_collator, PairCollator):
        data_collator.prompt_lengths = dict(prompt_lengths)
    elif data_collator is not None:
        prompts = any(prompt_lengths.values())
        refuse(
            (
                plan.options.negatives_per_query,
                "data_collator: collates pairs, so it cannot be used with negatives_per_query",
            ),
            (prompts, "data_collator: does not know which tokens are the prompt's; use include_prompt=True with it"),
        )
