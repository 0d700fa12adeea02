"""Describes a command-line run for its record: the names of its encoder and rows, its options and statistics."""

from __future__ import annotations

from collections.abc import Mapping

from soft_trainer.data.languages import languages_in
from soft_trainer.data.layouts.published import is_public
from soft_trainer.data.split import Split
from soft_trainer.data.tokens import side_texts
from soft_trainer.encoders.hub_files import public_name
from soft_trainer.hub.model_card import license_of
from soft_trainer.options.fields import CODESEARCHNET, DataArguments
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.run.building import model_label, model_name
from soft_trainer.run.evaluation_sets import EvaluationSet
from soft_trainer.run.folder import RunFolder
from soft_trainer.run.opening import Rows
from soft_trainer.terminal import shortened
from soft_trainer.trainer import SoftInfoNCETrainer
from soft_trainer.training.measurements import Measurements
from soft_trainer.training.record import public_options

CARD_SAMPLES = 3  # training pairs on the model card


def measurements_of_run(
    trainer: SoftInfoNCETrainer,
    rows: Rows,
    model_args: ModelArguments,
    data_args: DataArguments,
    statistics: dict,
    folder: RunFolder,
) -> Measurements:
    """Returns the `Measurements` of a command-line run, which also write its record and its model card.

    Args:
        statistics: the result of `data_statistics`.
    """
    sets = [*split_sets(trainer.args, rows.splits), *rows.evaluation_sets]
    base = None if model_args.from_scratch else model_name(model_args)
    corpora = {name: split.corpus for name, split in rows.splits.items()}
    about = {
        "base_model": base and public_name(base),
        "license": license_of(base),
        "dataset": data_args.rows_name,
        "languages": data_args.languages or languages_in(corpora),
        "options": public_options(model_args, data_args, trainer.args),
        "encoder": {"name": model_label(model_args), "from_scratch": model_args.from_scratch},
        "statistics": statistics,
        "samples": _samples(trainer, data_args),
    }
    return Measurements(
        trainer,
        {each.name: each.split for each in sets},
        folder,
        about,
        followed=[each.name for each in rows.evaluation_sets],
        examples=data_args.examples,
        encoder=model_args.model_name_or_path,
        source=data_args.source_dir or data_args.history,
    )


def _samples(trainer: SoftInfoNCETrainer, data_args: DataArguments) -> list[tuple[str, str]]:
    """Returns the first training pairs, shortened for the model card, or [] if the data set is not public."""
    split = trainer.train_split
    if split is None or not data_args.from_hub:
        return []
    data_set = data_args.data_dir or data_args.dataset_name
    if data_set != CODESEARCHNET and not is_public(data_set):
        return []
    pairs = split.judgments.pairs()[:CARD_SAMPLES]
    profile = trainer.encoder
    queries = side_texts(split.queries.select(pairs[:, 0]), "query", profile)
    codes = side_texts(split.corpus.select(pairs[:, 1]), "code", profile)
    return [(shortened(query), shortened(code)) for query, code in zip(queries, codes, strict=True)]


def split_sets(args: SoftInfoNCETrainingArguments, splits: Mapping[str, Split]) -> list[EvaluationSet]:
    """Returns valid (if `do_eval`) and test (if `do_predict`) as evaluation sets, one per language or source."""
    sets = []
    for name, asked in {"valid": args.do_eval, "test": args.do_predict}.items():
        for key, split in splits.items():
            if asked and key.split("-")[0] == name:
                sets.append(EvaluationSet(key, split))
    return sets
