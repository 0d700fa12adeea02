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
from soft_trainer.data.judgments import NEGATIVES, Split
from soft_trainer.data.negatives import Negatives, below_ratio, from_neighbours
from soft_trainer.data.neighbours import EXACT_ROWS, cached_neighbours, exact_neighbours
from soft_trainer.data.tokens import SIDES, side_texts, text_ids
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator
from soft_trainer.options.resolve import COMPARE_CODES
from soft_trainer.terminal import print_on_main
from soft_trainer.weights import checked_similarity

CANDIDATES = 64  # similar codes that are looked at for each query


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
        UserError: negatives that cannot be read or none below the ratio, or an estimator without vectors.
    """
    plan = trainer.plan
    options = trainer.plan.options
    dataset = trainer.train_dataset
    profile = trainer.encoder
    estimator = trainer.estimator
    negatives = column_negatives(dataset) if options.negatives_per_query else None
    rows, ids = with_codes(dataset, negatives.code_only if negatives is not None else (), profile)
    if plan.loss.needs_similarity:
        check_code_only(estimator, len(rows) - len(dataset))
    if estimator is not None:
        trainer.estimator_callback.fit(rows)
    if options.negatives_per_query > 0 and negatives is None:
        found = mined_negatives(estimator, max(CANDIDATES, options.negatives_per_query), len(dataset), ids)
        negatives = below_ratio(found, options.negative_ratio)
    own_negatives = None
    if negatives is not None:
        counts = negatives.counts
        print_on_main(
            f"own negatives: {counts.mean():.1f} candidates a row, {int((counts == 0).sum()):,} of {len(counts):,} "
            f"rows have none; up to {options.negatives_per_query} are drawn for each query in each epoch"
        )
        own_negatives = OwnNegatives(negatives, options.negatives_per_query, data_seed(trainer.args))
    similar = _similar(trainer) if plan.train_sampling_strategy == "similar" else None
    return PreparedRows(rows, ids if options.duplicates != "ignore" else None, own_negatives, similar)


def column_negatives(dataset: Dataset) -> Negatives | None:
    """Returns the negatives of the column `negatives`, None without one.

    Raises:
        UserError: the column holds something else than texts or urls of codes.
    """
    if NEGATIVES not in dataset.column_names:
        return None
    split = Split.from_pairs(dataset)
    wrong = split.judgments.wrong
    further = [split.corpus[row] for row in range(len(dataset), len(split.corpus))]
    unknown = np.full(len(dataset), np.nan, dtype=np.float32)
    return Negatives(wrong.indptr, wrong.indices.astype(np.int64), wrong.data, unknown, further)


def check_code_only(estimator, number: int) -> None:
    """Refuses codes that are not training rows if the estimator compares queries with queries.

    Raises:
        UserError: names the estimators that fit.
    """
    if number and not getattr(estimator, "compares_codes", True):
        raise UserError(
            f"negatives: codes that are not training rows ({number:,} of them) have no query, but "
            f"{type(estimator).__name__} compares queries; use {COMPARE_CODES}"
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


def mined_negatives(estimator, count: int, rows: int, ids: Mapping[str, np.ndarray]) -> Negatives:
    """Returns the codes most similar to each row's query, those with its query's or its code's text left out.

    Args:
        estimator: fitted on the training rows.
        count: candidates of each row.
        rows: the number of training rows.
        ids: `text_ids_of` of these rows.

    Raises:
        UserError: too many rows for an estimator that cannot but compare all pairs.
    """
    texts = tuple(ids.values())
    progress = "Mining negatives"
    if isinstance(estimator, Estimator) and estimator.finds_neighbours:
        return from_neighbours(estimator.neighbours(count, texts, progress, rows), ids["code"])
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
    return from_neighbours(cached_neighbours(None, [], count, find), ids["code"])


def _similar(trainer) -> dict[str, object]:
    """Returns the arguments of `similar_batches`."""
    options = trainer.plan.options
    rows = len(trainer.train_dataset)
    count = max(options.neighbours, options.group_size)
    neighbours = trainer.estimator.neighbours(count, progress="Finding neighbours", rows=rows, codes=rows)
    return {"neighbours": neighbours.rows, "group_size": options.group_size}
