"""Opens what the options of a command-line run name: the encoder to start from, and the rows.

Local rows are read before the Hub is contacted, so that mistakes show up early.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from soft_trainer.data.languages import languages_in
from soft_trainer.data.split import Split
from soft_trainer.options.fields import DataArguments, TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.run.setup import RunDetails
from soft_trainer.run.starting import StartingEncoder
from soft_trainer.shell.building import build_encoder
from soft_trainer.shell.evaluation_sets import load_evaluation_sets, training_of, warn_of_trained_rows
from soft_trainer.shell.rows import choose_language, evaluated, load_data, needed_splits, read_languages
from soft_trainer.shell.sources import with_language


@dataclass(frozen=True, kw_only=True)
class Rows(RunDetails):
    """The rows of a command-line run. The run measures valid, test and the sets in `eval_data_dir`, which it follows.

    Args:
        train: the training rows, or None.
        valid: the rows to evaluate during training, or None.
    """

    train: Split | None
    valid: Split | dict[str, Split] | None


def open_run(
    model_args: ModelArguments, data_args: DataArguments, args: TrainingOptions
) -> tuple[StartingEncoder, Rows]:
    """Returns the encoder to start from, and the rows. The main process reads first, the others use its caches.

    Raises:
        UserError: rows or an encoder cannot be found or read, or the rows are unusable.
    """
    choose_language(data_args)
    needed = needed_splits(data_args, args, bool(model_args.from_scratch))
    with args.main_process_first(desc="loading data"):
        read = read_languages(data_args, needed) if data_args.data_dir else None
        encoder = build_encoder(model_args)
        splits = load_data(data_args, encoder.profile, needed, read)
        trained = training_of(model_args.model_name_or_path)
        own = splits.get("test") or splits.get("valid")
        others = load_evaluation_sets(data_args, encoder.profile, own and own.corpus, trained)
    if data_args.data_dir and own and not args.do_train and not own.judgments.graded:
        for language in data_args.languages or [None]:
            warn_of_trained_rows("data_dir", with_language(data_args.data_dir, language), trained, data_args)
    if model_args.from_scratch:
        encoder.rows = splits["train"]  # its tokenizer is trained on them
    train = splits["train"] if args.do_train else None
    asked = {"valid": args.do_eval, "test": args.do_predict}
    measured = {name: split for name, split in splits.items() if asked.get(name.split("-")[0])}
    measured |= others
    corpora = {name: split.corpus for name, split in splits.items()}
    about = {
        "dataset": data_args.rows_name,
        "languages": data_args.languages or languages_in(corpora),
    }
    return encoder, Rows(
        train=train,
        valid=evaluated(splits, "valid"),
        measured=measured,
        followed=[*others],
        about=about,
        options=(model_args, data_args),
    )


def search_command(data_args: DataArguments, encoder: str) -> str | None:
    """Returns a line with the command that searches the tree that the rows were mined from, or None."""
    if not data_args.source_dir:
        return None
    command = shlex.join(["soft-trainer", "search", "--folder", data_args.source_dir, "--model", encoder])
    return f'To search the same tree: {command} "what the code does"'
