"""Hard batches before training: negatives of the rows' own, and the neighbours that clustered batches are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from datasets import Dataset, concatenate_datasets

from soft_trainer.arguments import SoftInfoNCEOptions
from soft_trainer.data.batches import OwnNegatives, text_ids_of, with_code_only
from soft_trainer.data.negative_files import TrainingRows, column_negatives, load_negatives
from soft_trainer.data.negatives import NegativeChoice, Negatives, from_neighbours, limited
from soft_trainer.data.tokens import SIDES, column_texts, side_settings, text_column
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.estimators.bm25 import BM25Estimator
from soft_trainer.terminal import print_on_main

COLUMN = "column"  # --negatives column reads the column `negatives`


@dataclass(frozen=True)
class PreparedRows:
    """The training rows with what hard batches need.

    Args:
        rows: the training rows, followed by code-only rows.
        text_ids: for "query" and "code" a number for every row's text; None if duplicates are ignored.
        own_negatives: negatives of the rows' own, None if there are none.
        similar: the arguments of `similar_batches`, None for other strategies.
    """

    rows: Dataset
    text_ids: Mapping[str, np.ndarray] | None = None
    own_negatives: OwnNegatives | None = None
    similar: Mapping | None = None


def prepare_rows(
    options: SoftInfoNCEOptions,
    strategy: str,
    dataset: Dataset,
    profile: EncoderProfile,
    estimator,
    fit: Callable[[Dataset], None] | None,
    seed: int,
) -> PreparedRows:
    """Reads or mines own negatives and finds neighbours, as the options ask.

    Args:
        strategy: `train_sampling_strategy`.
        estimator: of the weights, or None.
        fit: fits the estimator on rows; called if negatives or neighbours come from it.
        seed: of the draws of own negatives.

    Raises:
        UserError: negatives that cannot be read or that the limits leave none of, or an estimator without vectors.
    """
    ids = text_ids_of(dataset, profile)
    negatives = _read(options, dataset, profile) if options.negatives_per_query else None
    rows = dataset
    if negatives is not None and len(negatives.code_only):
        rows = with_rows_of(dataset, negatives.code_only)
        column = text_column(rows, side_settings(profile, "code")["columns"], "code")
        codes = list(column_texts(rows.select(range(len(dataset), len(rows))), column))
        ids = with_code_only(ids, codes)
    mines = options.negatives_per_query > 0 and negatives is None
    if fit is not None and (mines or (strategy == "similar" and options.similar_by == "estimator")):
        fit(rows)
    if mines:
        negatives = _mined(options, estimator, ids)
    return PreparedRows(
        rows,
        ids if options.duplicates != "ignore" else None,
        _chosen(options, negatives, seed) if negatives is not None else None,
        _similar(options, dataset, estimator, ids) if strategy == "similar" else None,
    )


def training_texts(dataset: Dataset, profile: EncoderProfile) -> TrainingRows:
    """The texts of the training rows as the encoder reads them, and their urls."""
    columns = {side: text_column(dataset, side_settings(profile, side)["columns"], side) for side in SIDES}
    urls = dataset["url"][:] if "url" in dataset.column_names else [None] * len(dataset)
    queries, codes = (list(column_texts(dataset, columns[side])) for side in SIDES)
    return TrainingRows(queries, codes, urls)


def choice_of(options: SoftInfoNCEOptions) -> NegativeChoice:
    """The limits and chances of own negatives that the options name."""
    ranks = (0, None)
    if options.negative_ranks is not None:
        try:
            first, last = options.negative_ranks.split(",")
            ranks = (int(first or 0), int(last) if last.strip() else None)
        except ValueError:
            raise UserError(f"negative_ranks={options.negative_ranks!r}: write FIRST,LAST, for example 5,50") from None
    return NegativeChoice(
        options.negatives_per_query,
        ranks,
        options.negative_max_score,
        options.negative_margin,
        options.negative_ratio,
        options.negative_temperature,
    )


def with_rows_of(dataset: Dataset, code_only: Sequence[Mapping]) -> Dataset:
    """The training rows, followed by a row without a query for each code."""
    first = dataset[0]
    added = []
    for row in code_only:
        values = {"code": row["code"], "original_string": row["code"], "code_tokens": row["code"].split()}
        values |= {"language": first.get("language"), "docstring": "", "docstring_tokens": []} | dict(row)
        added.append({name: values.get(name) for name in dataset.column_names})
    return concatenate_datasets([dataset, Dataset.from_list(added, features=dataset.features)])


def _read(options: SoftInfoNCEOptions, dataset: Dataset, profile: EncoderProfile) -> Negatives | None:
    """The negatives of a file or of the rows' column; None if they are to be mined."""
    source = options.negatives
    if source is None and "negatives" not in dataset.column_names:
        return None
    texts = training_texts(dataset, profile)
    if source is not None and source != COLUMN:
        return load_negatives(source, texts)
    if "negatives" not in dataset.column_names:
        raise UserError(f"negatives={source}: the training rows have no column 'negatives'")
    return column_negatives(dataset["negatives"][:], texts)


def _mined(options: SoftInfoNCEOptions, estimator, ids: Mapping) -> Negatives:
    """Candidates by the run's estimator."""
    if estimator is None:
        raise UserError("negatives_per_query: mining needs an estimator, or name a file with --negatives")
    last = choice_of(options).ranks[1]
    count = max(options.negative_candidates, options.negatives_per_query, last or 0)
    neighbours = estimator.neighbours(count, tuple(ids.values()), "Mining negatives")
    return from_neighbours(neighbours, ids["code"])


def _chosen(options: SoftInfoNCEOptions, negatives: Negatives, seed: int) -> OwnNegatives:
    """The candidates within the limits, with a line that says how many they are."""
    choice = choice_of(options)
    left = limited(negatives, choice)
    counts = left.counts
    print_on_main(
        f"own negatives: {counts.mean():.1f} candidates a row, {int((counts == 0).sum()):,} of {len(counts):,} rows "
        f"have none; up to {choice.number} are drawn for each query in each epoch"
    )
    return OwnNegatives(left, choice, seed, meet_all=options.negatives_meet == "all")


def _similar(options: SoftInfoNCEOptions, dataset: Dataset, estimator, ids: Mapping) -> dict[str, object]:
    """The arguments of `similar_batches`."""
    count, progress = max(options.neighbours, options.group_size, options.nearest_apart + 1), "Finding neighbours"
    if options.similar_by == "bm25":
        columns = [name for name in ("docstring_tokens", "docstring") if name in dataset.column_names]
        estimator = BM25Estimator(*columns[:1])
        estimator.fit(dataset)
    if estimator is None:
        raise UserError("train_sampling_strategy=similar: it needs an estimator with vectors, or --similar_by bm25")
    neighbours = np.array(estimator.neighbours(count, (), progress).rows)
    # Code-only rows are in no batch of their own: they go, and the others move up.
    neighbours[neighbours >= len(dataset)] = -1
    neighbours = np.take_along_axis(neighbours, np.argsort(neighbours < 0, axis=1, kind="stable"), 1)
    return {
        "neighbours": neighbours[: len(dataset)],
        "group_size": options.group_size,
        "random_share": options.random_share,
        "apart": options.nearest_apart,
        "text_ids": [part[: len(dataset)] for part in ids.values()] if options.equal_texts_apart else (),
    }
