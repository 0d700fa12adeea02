"""Opens a run: checks the names of rows, reads local ones before the Hub is asked for a model, then reads the rest."""

from __future__ import annotations

from pathlib import Path

from soft_trainer.data.dividing import warn_of_overlap
from soft_trainer.data.load import Sources
from soft_trainer.data.split import Split
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.options.defaults import apply_defaults
from soft_trainer.options.fields import DataArguments, TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.run.building import build_profile, model_label, model_name
from soft_trainer.run.evaluation_sets import EvaluationSet, load_evaluation_sets, trained_rows, warn_of_trained_rows
from soft_trainer.run.rows import check_sources, load_data, needed_splits, read_sources


def open_run(
    model_args: ModelArguments, data_args: DataArguments, args: TrainingOptions
) -> tuple[EncoderProfile, Sources | None]:
    """Checks the names of rows, reads the rows of `data_dir`, and finds the encoder's profile.

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
    """Sets the options that depend on the encoder, and the output folder."""
    pretrained = None if model_args.from_scratch else model_name(model_args)
    apply_defaults(data_args, args, profile, pretrained, model_args.model_revision)
    args.output_dir = args.output_dir or default_output_dir(model_args, data_args, args)


def default_output_dir(model: ModelArguments, data: DataArguments, args: TrainingOptions) -> str:
    """Returns `outputs/MODEL-LANGUAGE-LOSS-ESTIMATOR`. Without a language, the name of the rows takes its place."""
    names = "-".join(data.languages) or data.rows_name.rsplit("/", 1)[-1]
    estimator = data.estimator or "none"
    loss = args.loss or ("info_nce" if estimator == "none" else "soft_info_nce")
    weights = f"{loss}-{estimator}".replace(":", ".")
    return f"outputs/{model_label(model)}-{names}-{weights}"


def load_run(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: TrainingOptions,
    profile: EncoderProfile,
    sources: Sources | None,
) -> tuple[dict[str, Split], list[EvaluationSet]]:
    """Returns a run's splits and its evaluation sets. The main process reads first, and the others use its caches.

    Args:
        sources: the rows that `open_run` returned.

    Raises:
        UserError: the rows cannot be read, or the run cannot use them.
    """
    needed = needed_splits(data_args, args, bool(model_args.from_scratch))
    with args.main_process_first(desc="loading data"):
        splits = load_data(data_args, profile, Path(args.output_dir) / "data", needed, sources)
        if not args.do_train:
            warn_of_trained_rows(data_args, model_args.model_name_or_path)
        trained = trained_rows(data_args, model_args.model_name_or_path)
        measured = splits.get("test") or splits.get("valid")
        sets = load_evaluation_sets(data_args, profile, measured and measured.corpus, trained)
        if args.do_train:
            warn_of_overlap({each.name: each.split for each in sets}, splits["train"])
        return splits, sets
