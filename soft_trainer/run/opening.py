"""Opens a run: checks the names of rows, reads local ones before the Hub is asked for a model, then reads the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from datasets import DatasetDict

from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.options.fields import DataArguments, TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.run.building import build_profile
from soft_trainer.run.evaluation_sets import EvaluationSet, load_evaluation_sets
from soft_trainer.run.rows import check_sources, load_data, load_local, needed_splits
from soft_trainer.run.run_data import RunData


@dataclass(frozen=True)
class Opening:
    """The first things that a run knows.

    Args:
        needed: the splits that the run needs.
        local: the rows that are in local files, or None.
        profile: the encoder's profile.
    """

    needed: tuple[str, ...]
    local: Mapping[str, DatasetDict] | None
    profile: EncoderProfile


def open_run(model_args: ModelArguments, data_args: DataArguments, args: TrainingOptions) -> Opening:
    """Checks the names of rows, reads local rows, and finds the encoder's profile.

    Raises:
        UserError: rows or an encoder cannot be found or read.
    """
    check_sources(data_args)
    needed = needed_splits(data_args, args, bool(model_args.from_scratch))
    with args.main_process_first(desc="loading data"):
        local = load_local(data_args, needed)
    return Opening(needed, local, build_profile(model_args))


def load_run(opening: Opening, data_args: DataArguments, args: TrainingOptions) -> tuple[RunData, list[EvaluationSet]]:
    """Returns a run's rows and its evaluation sets. The main process reads first, and the others use its caches.

    Raises:
        UserError: the rows cannot be read, or the run cannot use them.
    """
    profile = opening.profile
    with args.main_process_first(desc="loading data"):
        data = load_data(data_args, profile, Path(args.output_dir) / "data", opening.needed, opening.local)
        return data, load_evaluation_sets(data_args, profile, data.tables.get("codebase"))
