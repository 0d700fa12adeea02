"""Prepares the training rows before the first step: finds hard negatives and similar pairs, and creates the loader."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from transformers import TrainingArguments

from soft_trainer.data.split import RelevantCodes, Split
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.estimators.base import codes_without_query
from soft_trainer.estimators.neighbours import Excluded
from soft_trainer.options.resolve import Plan
from soft_trainer.system.terminal import print_on_main
from soft_trainer.training.batches import TrainBatches, relevant_codes
from soft_trainer.training.negatives import HardNegatives, below_ratio, negatives_to_draw
from soft_trainer.training.sampler import EpochDataLoader, GlobalBatchSampler, data_seed, languages_of

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
            neighbours = estimator.neighbours(max(CANDIDATES, number), excluded, progress=PROGRESS)
            candidates = below_ratio(neighbours, options.negative_ratio, answers.code_texts)
            del neighbours  # frees gigabytes if there are millions of queries
        negatives = HardNegatives(candidates, number, seed)
        print_on_main(str(negatives))
    similar = None
    if strategy == "similar":
        pairs = split.judgments.pairs()
        excluded = Excluded(split.judgments.first_codes())
        count = max(NEIGHBOURS, options.group_size)
        neighbours = estimator.neighbours(count, excluded, np.unique(pairs[:, 1]), PROGRESS)
        similar = {"pairs": pairs, "neighbours": neighbours.rows, "group_size": options.group_size}
    without_query = codes_without_query(estimator, split) if plan.criterion.needs_similarity else None
    return PreparedRows(answers, negatives, similar, without_query)


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
    sampler = make_sampler(len(batches.pairs), plan, args, similar=rows.similar, **read)
    return EpochDataLoader.for_training(batches, sampler, args)


def make_sampler(rows: int, plan: Plan, args: TrainingArguments, **read) -> GlobalBatchSampler:
    """Returns the sampler of global batches.

    Args:
        rows: the number of training pairs.
        read: the arguments that the sampling strategy needs; see `GlobalBatchSampler`.

    Raises:
        UserError: the strategy needs a column that the rows do not have.
    """
    batch_size = plan.batch_size * plan.processes
    strategy = plan.train_sampling_strategy
    return GlobalBatchSampler(rows, batch_size, strategy, data_seed(args), args.dataloader_drop_last, **read)
