"""Prepares the training rows before the first step: finds hard negatives and similar pairs, and creates the loader."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from transformers import TrainingArguments

from soft_trainer.data.split import RelevantCodes, Split
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import codes_without_query
from soft_trainer.estimators.neighbours import Excluded, Neighbours
from soft_trainer.options.resolve import Plan
from soft_trainer.terminal import print_on_main
from soft_trainer.training.batches import TrainBatches, relevant_codes
from soft_trainer.training.negatives import HardNegatives, below_ratio, negatives_to_draw
from soft_trainer.training.sampler import EpochDataLoader, GlobalBatchSampler, data_seed, languages_of
from soft_trainer.training.sources import SourceSampler

CANDIDATES = 64  # the number of similar functions to consider as negatives for each query
NEIGHBOURS = 32  # the number of nearest functions to find for each query, to form groups of similar pairs
PROGRESS = "Finding neighbours"


@dataclass(frozen=True)
class PreparedRows:
    """Results computed from the training rows before the first step. Unneeded fields are None.

    Args:
        answers: the look-up of relevant functions by text.
        negatives: draws the hard negatives that each query adds to a batch.
        similar: the arguments of `similar_batches`, for batches of similar pairs.
        without_query: bool[C], the functions that the estimator cannot compare; see `codes_without_query`.
    """

    answers: RelevantCodes | None = None
    negatives: HardNegatives | None = None
    similar: dict[str, object] | None = None
    without_query: np.ndarray | None = None


def prepared_rows(split: Split, plan: Plan, estimator, encoder: EncoderProfile, seed: int) -> PreparedRows:
    """Computes what the plan needs before the first step: known positives, hard negatives and similar pairs.

    Args:
        estimator: the estimator, fitted on `split`, or None.
        seed: the seed for drawing each epoch's negatives.

    Raises:
        UserError: all functions near a query score too high for `negative_ratio`, so no negative is left.
    """
    options = plan.options
    strategy = plan.train_sampling_strategy
    number, candidates = negatives_to_draw(options, split.judgments)
    answers = None
    if options.false_negatives != "ignore" or number or strategy == "no_duplicates":
        answers = relevant_codes(split, encoder)
    negatives = None
    if number:
        if candidates is None:
            excluded = Excluded(split.judgments.first_codes(), answers)
            neighbours = find_neighbours(estimator, split, max(CANDIDATES, number), excluded)
            candidates = below_ratio(neighbours, options.negative_ratio, answers.code_texts)
            del neighbours  # frees gigabytes if there are millions of queries
        negatives = HardNegatives(candidates, number, seed)
        print_on_main(str(negatives))
    similar = None
    if strategy == "similar":
        pairs = split.judgments.pairs()
        excluded = Excluded(split.judgments.first_codes())
        count = max(NEIGHBOURS, options.group_size)
        neighbours = find_neighbours(estimator, split, count, excluded, np.unique(pairs[:, 1]))
        similar = {"pairs": pairs, "neighbours": neighbours.rows, "group_size": options.group_size}
    without_query = codes_without_query(estimator, split) if plan.criterion.needs_similarity else None
    return PreparedRows(answers, negatives, similar, without_query)


def find_neighbours(
    estimator, split: Split, k: int, excluded: Excluded, codes: np.ndarray | None = None
) -> Neighbours:
    """Finds the k functions most similar to each query, among the functions from the same source.

    Args:
        excluded: the functions that must not be returned, such as a query's positive.
        codes: the sorted indices of the functions to search. By default, all functions.
    """
    if not split.sources:
        return estimator.neighbours(k, excluded, codes, PROGRESS)
    if codes is None:
        codes = np.arange(len(split.corpus))
    parts = []
    first_query = 0
    first_code = 0
    for queries, size, _ in split.sources.values():
        own = slice(first_query, first_query + queries)
        start, end = np.searchsorted(codes, (first_code, first_code + size))
        # Neighbours of other sources' queries are dropped below, so any positive from this source will do for them.
        positives = np.full(len(excluded.own), excluded.own[first_query])
        positives[own] = excluded.own[own]
        near = estimator.neighbours(k, Excluded(positives, excluded.answers), codes[start:end], PROGRESS)
        parts.append(Neighbours(near.rows[own], near.scores[own], near.own[own]))
        first_query += queries
        first_code += size
    return Neighbours.joined(parts)


def train_loader(
    batches: TrainBatches, rows: PreparedRows, plan: Plan, args: TrainingArguments, split: Split
) -> EpochDataLoader:
    """Returns the training data loader, which yields this process's `Batch` of each global batch.

    Args:
        split: the training rows. The strategy "one_language" reads their languages.
    """
    strategy = plan.train_sampling_strategy
    read = {}
    if strategy == "no_duplicates":
        queries, codes = batches.pairs.T
        read["text_ids"] = (rows.answers.query_texts[queries], rows.answers.code_texts[codes])
    elif strategy == "group_by_length":
        read["lengths"] = batches.lengths()
    elif strategy == "one_language":
        read["languages"] = languages_of(split.to_pairs())
    sampler = make_sampler(split, plan, args, similar=rows.similar, **read)
    return EpochDataLoader.for_training(batches, sampler, args)


def make_sampler(split: Split, plan: Plan, args: TrainingArguments, **read) -> GlobalBatchSampler | SourceSampler:
    """Returns the sampler of global batches. All rows of a batch come from one source.

    Args:
        read: the arguments that the sampling strategy needs; see `GlobalBatchSampler`.

    Raises:
        UserError: there are too few rows, or `source_sampling` does not fit the sources.
    """
    sampling = plan.options.source_sampling
    arguments = {
        "batch_size": plan.batch_size * plan.processes,
        "strategy": plan.train_sampling_strategy,
        "seed": data_seed(args),
        "drop_last": args.dataloader_drop_last,
        **read,
    }
    if split.sources:
        pairs = {name: pairs for name, (_, _, pairs) in split.sources.items()}
        return SourceSampler(pairs, sampling, **arguments)
    if sampling not in ("proportional", "round_robin"):
        raise UserError(f"source_sampling={sampling}: there is only one source of training rows")
    return GlobalBatchSampler(len(split.judgments.pairs()), **arguments)
