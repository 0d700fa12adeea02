"""Prepares a command-line run: reads the rows, finds the encoder's profile, and checks the options.

Local rows are read before the Hub is contacted, and options are checked before the model is loaded, so that mistakes
show up early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soft_trainer.data.holdout import warn_of_overlap
from soft_trainer.data.load import Sources
from soft_trainer.data.split import Split
from soft_trainer.encoders import adapters
from soft_trainer.encoders.encoding import check_dims
from soft_trainer.encoders.hub_files import saved_adapter
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.encoders.scratch import parse_size
from soft_trainer.errors import UserError
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.options.defaults import apply_defaults
from soft_trainer.options.fields import DataArguments, TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.resolve import resolve
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.run.building import build_profile, model_label, model_name, pretrained_config
from soft_trainer.run.evaluation_sets import EvaluationSet, load_evaluation_sets, trained_rows, warn_of_trained_pairs
from soft_trainer.run.rows import check_sources, evaluated, load_data, needed_splits, read_sources
from soft_trainer.training.preflight import check_metric, check_rows_of
from soft_trainer.training.run_fingerprint import rows_of_run


@dataclass(frozen=True)
class Rows:
    """A run's rows: the splits (see `load_data`), the additional evaluation sets, and the profile that reads them."""

    profile: EncoderProfile
    splits: dict[str, Split]
    evaluation_sets: Sequence[EvaluationSet] = ()

    def fingerprint(self) -> dict[str, str]:
        """Returns the part of the run fingerprint that describes the rows."""
        return rows_of_run(self.splits, [each.split for each in self.evaluation_sets])


def open_run(
    model_args: ModelArguments, data_args: DataArguments, args: TrainingOptions
) -> tuple[EncoderProfile, Sources | None]:
    """Checks that data sources exist, reads the rows of `data_dir`, and finds the encoder's profile.

    Returns:
        The profile, and the splits of each source (None if `data_dir` is not set).

    Raises:
        UserError: rows or an encoder cannot be found or read.
    """
    check_sources(data_args)
    sources = None
    if data_args.data_dir:
        with args.main_process_first(desc="loading data"):
            sources = read_sources(data_args, needed_splits(data_args, args, bool(model_args.from_scratch)))
    return build_profile(model_args), sources


def complete_options(
    model_args: ModelArguments, data_args: DataArguments, args: TrainingOptions, profile: EncoderProfile
) -> None:
    """Fills in options that are not set: the defaults that depend on the encoder, and the output folder."""
    pretrained = None if model_args.from_scratch else model_name(model_args)
    revision = model_args.model_revision
    adapter = model_args.lora_r is not None or bool(pretrained and saved_adapter(pretrained, revision))
    apply_defaults(args, profile, pretrained, revision, adapter=adapter, trains=args.do_train)
    args.output_dir = args.output_dir or default_output_dir(model_args, data_args, args)
    args.report = False  # the run measures by itself


def default_output_dir(model: ModelArguments, data: DataArguments, args: TrainingOptions) -> str:
    """Returns `outputs/MODEL-LANGUAGE-LOSS-ESTIMATOR`, with the name of the rows if there is no language."""
    names = "-".join(data.languages) or data.rows_name.rsplit("/", 1)[-1]
    estimator = args.estimator or "none"
    loss = args.loss or ("info_nce" if estimator == "none" else "soft_info_nce")
    weights = f"{loss}-{estimator}".replace(":", ".")
    return f"outputs/{model_label(model)}-{names}-{weights}"


def load_run(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: TrainingOptions,
    profile: EncoderProfile,
    sources: Sources | None,
) -> Rows:
    """Loads a run's splits and evaluation sets. The main process reads first, and the others use its caches.

    Args:
        sources: the splits that `open_run` returned, or None.

    Raises:
        UserError: the rows cannot be read or are unusable.
    """
    needed = needed_splits(data_args, args, bool(model_args.from_scratch))
    with args.main_process_first(desc="loading data"):
        splits = load_data(data_args, profile, needed, sources)
        trained = trained_rows(data_args, model_args.model_name_or_path)
        measured = splits.get("test") or splits.get("valid")
        sets = load_evaluation_sets(data_args, profile, measured and measured.corpus, trained)
        others = {each.name: each.split for each in sets}
        if args.do_train:
            warn_of_overlap(others, splits["train"])
        elif model_args.model_name_or_path:
            asked = {"valid": args.do_eval, "test": args.do_predict}
            measured_splits = {name: split for name, split in splits.items() if asked.get(name.split("-")[0])}
            warn_of_trained_pairs(measured_splits | others, model_args.model_name_or_path, profile)
        return Rows(profile, splits, sets)


def check_before_loading(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: SoftInfoNCETrainingArguments,
    estimator,
    rows: Rows,
) -> None:
    """Checks a command-line run's settings against its rows and the model's configuration, before loading the model.

    Raises:
        UserError: a setting does not work. The message suggests values that work.
    """
    plan = resolve(args, estimator)
    scratch = model_args.from_scratch
    dims = plan.dims or rows.profile.matryoshka_dims
    if not dims:
        size = 0
    elif scratch:
        size, _ = parse_size(scratch)
    else:
        size = rows.profile.truncate_dim or pretrained_config(model_args).hidden_size
    check_dims(dims, size)
    check_metric(args, [dim for dim in dims if dim < size], evaluated(rows.splits, "valid"))
    check_new_adapter(model_args, args.merge_lora)
    if scratch and isinstance(estimator, InitialModelEstimator):
        raise UserError(
            f"estimator=initial_model: with from_scratch={scratch}, the encoder starts with random weights, so its "
            "similarities mean nothing; use bm25, simcse or trained_model"
        )
    if args.do_train:
        check_rows_of(plan, args, estimator, rows.splits["train"])


def check_new_adapter(model_args: ModelArguments, merge: bool) -> None:
    """Checks the LoRA options against the encoder before it is loaded.

    Raises:
        UserError: `lora_r` is set for an encoder from scratch or for an existing adapter, or `merge` is set without
            an adapter.
    """
    new = model_args.lora_r is not None
    saved = None
    if new:
        adapters.import_peft()
    if not model_args.from_scratch:
        name = model_name(model_args)
        saved = saved_adapter(name, model_args.model_revision)
        if new and saved:
            raise UserError(
                f"lora_r: {name} is already an adapter; training continues from it, so drop the LoRA options"
            )
    if merge and not (new or saved):
        raise UserError("merge_lora: no adapter to merge; set lora_r, for example to 16")
