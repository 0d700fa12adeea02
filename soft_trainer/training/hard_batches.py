"""Hard batches before training: negatives of the rows' own, and the neighbours that clustered batches are made of."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets

from soft_trainer.data.batches import OwnNegatives, text_ids_of
from soft_trainer.data.global_batches import data_seed
from soft_trainer.data.negative_files import TrainingRows, column_negatives, load_negatives
from soft_trainer.data.negatives import NegativeChoice, Negatives, from_neighbours, limited
from soft_trainer.data.neighbours import EXACT_ROWS, cached_neighbours, exact_neighbours
from soft_trainer.data.tokens import SIDES, side_texts, text_column, text_ids
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator, MixtureEstimator, members_of
from soft_trainer.estimators.bm25 import BM25Estimator
from soft_trainer.options.fields import SoftInfoNCEOptions
from soft_trainer.options.resolve import COLUMN, COMPARE_CODES, parse_ranks
from soft_trainer.terminal import print_on_main
from soft_trainer.weights import checked_similarity

COLUMN_NAME = "negatives"  # the column that it reads


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


def prepare_rows(trainer) -> PreparedRows:
    """Fits the estimator, reads or mines own negatives and finds neighbours, as the trainer's plan says.

    Raises:
        UserError: negatives that cannot be read or that the limits leave none of, or an estimator without vectors.
    """
    plan = trainer.plan
    options = trainer.plan.options
    dataset = trainer.train_dataset
    profile = trainer.encoder
    estimator = trainer.estimator
    choice = choice_of(options)
    negatives = read_negatives(options, dataset, profile)
    rows, ids = with_codes(dataset, negatives.code_only if negatives is not None else (), profile)
    if plan.loss.needs_similarity:
        check_code_only(estimator, len(rows) - len(dataset))
    if estimator is not None:
        trainer.estimator_callback.fit(rows)
    if options.negatives_per_query > 0 and negatives is None:
        count = max(options.negative_candidates, options.negatives_per_query, choice.ranks[1] or 0)
        negatives = mined_negatives(estimator, count, len(dataset), ids)
    own_negatives = None
    if negatives is not None:
        left = limited(negatives, choice)
        counts = left.counts
        print_on_main(
            f"own negatives: {counts.mean():.1f} candidates a row, {int((counts == 0).sum()):,} of {len(counts):,} "
            f"rows have none; up to {choice.number} are drawn for each query in each epoch"
        )
        own_negatives = OwnNegatives(left, choice, data_seed(trainer.args), meet_all=options.negatives_meet == "all")
    similar = _similar(trainer, ids) if plan.train_sampling_strategy == "similar" else None
    return PreparedRows(rows, ids if options.duplicates != "ignore" else None, own_negatives, similar)


def read_negatives(options: SoftInfoNCEOptions, dataset: Dataset, profile: EncoderProfile) -> Negatives | None:
    """Reads own negatives from a file or the rows' column; returns None if there are none or they are mined.

    Raises:
        UserError: no such file or column, or negatives of other rows.
    """
    source = options.negatives
    column = COLUMN_NAME in dataset.column_names
    if not options.negatives_per_query or (source is None and not column):
        return None
    if source == COLUMN and not column:
        raise UserError(f"negatives={source}: the training rows have no column {COLUMN_NAME!r}")
    texts = training_texts(dataset, profile)
    if source in (None, COLUMN):
        return column_negatives(dataset[COLUMN_NAME][:], texts)
    return load_negatives(source, texts)


def check_code_only(estimator, number: int) -> None:
    """Refuses codes that are not training rows if the estimator compares queries with queries.

    Raises:
        UserError: names the estimators that fit.
    """
    for member in members_of(estimator) if number else ():
        if not getattr(member, "compares_codes", True):
            raise UserError(
                f"negatives: codes that are not training rows ({number:,} of them) have no query, but "
                f"{type(member).__name__} compares queries; use {COMPARE_CODES}"
            )


def training_texts(dataset: Dataset, profile: EncoderProfile) -> TrainingRows:
    """Reads the texts of the training rows as the encoder does, and their urls."""
    urls = dataset["url"][:] if "url" in dataset.column_names else [None] * len(dataset)
    return TrainingRows(*(side_texts(dataset, side, profile) for side in SIDES), urls)


def choice_of(options: SoftInfoNCEOptions) -> NegativeChoice:
    """Returns the limits and chances of own negatives that the options name."""
    return NegativeChoice(
        options.negatives_per_query,
        parse_ranks(options.negative_ranks),
        options.negative_max_score,
        options.negative_margin,
        options.negative_ratio,
        options.negative_temperature,
    )


def with_codes(
    dataset: Dataset, code_only: Sequence[Mapping], profile: EncoderProfile
) -> tuple[Dataset, dict[str, np.ndarray]]:
    """Appends a row without a query for each code; returns the rows and their `text_ids_of`."""
    ids = text_ids_of(dataset, profile)
    if not len(code_only):
        return dataset, ids
    empty = {"language": dataset[0].get("language"), "docstring": "", "docstring_tokens": []}
    added = []
    for row in code_only:
        values = empty | {"original_string": row["code"], "code_tokens": row["code"].split()} | dict(row)
        added.append({name: values.get(name) for name in dataset.column_names})
    further = Dataset.from_list(added, features=dataset.features)
    # The queries of code-only rows equal none.
    queries = text_ids(f"\0 code-only row {number}" for number in range(len(further)))
    new = {"query": queries, "code": text_ids(side_texts(further, "code", profile))}
    return concatenate_datasets([dataset, further]), {side: np.concatenate([ids[side], new[side]]) for side in SIDES}


def mined_negatives(
    estimator, count: int, rows: int, ids: Mapping[str, np.ndarray], code_only: Sequence[dict] = ()
) -> Negatives:
    """Returns the codes most similar to each row's query, those with its query's or its code's text left out.

    Args:
        estimator: fitted on the training rows, followed by the code-only rows.
        count: candidates of each row.
        rows: the number of training rows.
        ids: `text_ids_of` of all these rows.

    Raises:
        UserError: too many rows for an estimator that cannot but compare all pairs.
    """
    texts = tuple(ids.values())
    progress = "Mining negatives"
    # The neighbours of a mixture are those of one member alone.
    if isinstance(estimator, Estimator) and estimator.finds_neighbours and not isinstance(estimator, MixtureEstimator):
        return from_neighbours(estimator.neighbours(count, texts, progress, rows), ids["code"], code_only)
    codes = len(ids["code"])
    if codes > EXACT_ROWS:
        raise UserError(
            f"{type(estimator).__name__} finds negatives by comparing all pairs, which is too slow for {codes:,} "
            f"codes (at most {EXACT_ROWS:,}); mine with bm25, simcse, trained_model or initial_model"
        )

    everything = torch.arange(codes)

    def score(block: np.ndarray) -> torch.Tensor:
        return checked_similarity(estimator, torch.from_numpy(block), everything).clone()  # it may keep the tensor

    find = functools.partial(exact_neighbours, score, np.arange(rows), codes, count, texts, progress)
    return from_neighbours(cached_neighbours(None, [], count, find), ids["code"], code_only)


def _similar(trainer, ids: Mapping) -> dict[str, object]:
    """Returns the arguments of `similar_batches`."""
    options = trainer.plan.options
    dataset = trainer.train_dataset
    estimator = trainer.estimator
    count = max(options.neighbours, options.group_size, options.nearest_apart + 1)
    rows = len(dataset)
    if options.similar_by == "bm25":
        cache_dir = getattr(estimator, "cache_dir", trainer.cache_dir)
        estimator = BM25Estimator(text_column(dataset, trainer.encoder.query_columns, "query"), cache_dir=cache_dir)
        estimator.fit(dataset)
    neighbours = estimator.neighbours(count, progress="Finding neighbours", rows=rows, codes=rows)
    return {
        "neighbours": neighbours.rows,
        "group_size": options.group_size,
        "random_share": options.random_share,
        "apart": options.nearest_apart,
        "text_ids": [side[:rows] for side in ids.values()] if options.equal_texts_apart else (),
    }
