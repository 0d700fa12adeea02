"""Prepares what a trainer starts from. All that can be checked is checked before the encoder's weights are loaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import EarlyStoppingCallback, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments, set_seed
from transformers.utils import logging

from soft_trainer.data.split import Split
from soft_trainer.encoders.encoding import Encoder
from soft_trainer.encoders.loading import prepare_tokenizer
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.estimators.base import Estimator
from soft_trainer.estimators.bm25 import BM25Estimator
from soft_trainer.estimators.callback import EstimatorCallback, find_estimator_callback, with_estimators
from soft_trainer.estimators.registry import choose_estimator, estimator_of_run
from soft_trainer.options.defaults import apply_defaults, default_output_dir
from soft_trainer.options.fields import EstimatorOptions
from soft_trainer.options.resolve import Plan
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.run.folder import check_named
from soft_trainer.run.preflight import complete_launch, make_plan
from soft_trainer.run.starting import StartingEncoder
from soft_trainer.system.terminal import print_on_main, shows_bars
from soft_trainer.weights import smallest_batch


@dataclass(frozen=True, kw_only=True)
class RunDetails:
    """Facts about a run that a script knows and a trainer does not, for the run's record.

    Args:
        measured: the sets that `train` measures before and after training if `args.report` is set, and `measure`
            without training, keyed by name. By default, the trainer's `eval_dataset`, called "eval".
        followed: the names of those sets to measure at every evaluation too.
        about: sections of the record: "dataset" and "languages".
        options: further dataclass instances with options of the run, such as a command's.
    """

    measured: Mapping[str, Split] | None = None
    followed: Sequence[str] = ()
    about: Mapping[str, object] = field(default_factory=dict)
    options: Sequence = ()


@dataclass
class Setup:
    """The objects that a trainer starts from.

    Args:
        starting: the encoder, whose weights are not loaded yet.
        args: the training arguments, with all defaults.
        train_split, eval_dataset: the rows.
        callbacks: the user's callbacks, and those that the arguments ask for.
        estimator_callback: the one among them that supplies the weights, or None.
        compute_metrics: the user's metrics, or None.
        plan: the training plan.
    """

    starting: StartingEncoder
    args: TrainingArguments
    train_split: Split | None
    eval_dataset: Split | Mapping[str, Split] | None
    callbacks: list
    estimator_callback: EstimatorCallback | None
    compute_metrics: object | None
    plan: Plan | None = None

    @property
    def encoder(self) -> EncoderProfile:
        """The profile of the encoder."""
        return self.starting.profile

    @property
    def estimator(self):
        """The estimator that supplies the weights, or None."""
        return self.estimator_callback and self.estimator_callback.estimator

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Loads the encoder, or creates it from the seed, with its tokenizer. Adapts both for training."""
        set_seed(self.args.seed)
        with self.args.main_process_first(desc="loading the encoder"):
            model, tokenizer = self.starting.load()
        prepare_tokenizer(tokenizer, self.encoder)
        complete_launch(self.args, model, self.encoder)
        return model, tokenizer


def set_up(
    starting: StartingEncoder,
    args: TrainingArguments | None,
    train_split: Split | None,
    eval_dataset: Split | Mapping[str, Split] | None,
    callbacks: Sequence | None,
    compute_metrics,
    about: Mapping[str, object],
    own_loss: str | None = None,
) -> Setup:
    """Completes the arguments with the encoder's defaults, chooses the estimator, and makes and checks the plan.

    Args:
        own_loss: the trainer's class if it computes the loss itself, or None.

    Raises:
        UserError: the settings are incompatible with one another, the rows or the encoder.
    """
    if not shows_bars():
        logging.disable_progress_bar()  # of loading and saving weights
    args = args or SoftInfoNCETrainingArguments()
    callbacks = with_estimators(callbacks)
    callback = find_estimator_callback(callbacks)
    if isinstance(args, SoftInfoNCETrainingArguments):
        # Another trainer with the same arguments must not get the defaults of this encoder.
        args = copy.copy(args)
        apply_defaults(args, starting, callback and callback.estimator, train_split is not None, train_split)
    for name, value in vars(args).items():
        if isinstance(value, np.generic):  # a number of NumPy cannot be saved with a checkpoint
            setattr(args, name, value.item())
    if callback is None and train_split is not None:
        callback = _chosen_estimator(args, starting, train_split, own_loss)
        callbacks += [callback] if callback else []
    args.output_dir = args.output_dir or default_output_dir(args, starting.label, about)
    if getattr(args, "early_stopping_patience", None):
        callbacks.append(EarlyStoppingCallback(args.early_stopping_patience))
    setup = Setup(starting, args, train_split, eval_dataset, callbacks, callback, compute_metrics)
    if isinstance(setup.estimator, Estimator):
        setup.estimator.bind(Encoder(starting.model, starting.tokenizer, starting.profile))
    starting.check(getattr(args, "merge_lora", False), setup.estimator)
    setup.plan = make_plan(setup)
    check_named(args.resume_from_checkpoint)
    return setup


def _chosen_estimator(
    args: TrainingArguments, starting: StartingEncoder, split: Split, own_loss: str | None
) -> EstimatorCallback | None:
    """Returns the estimator that the arguments select, or None if nothing reads one. By default, this is BM25.

    A loss of the user's and batches too small for Eq. 4 train with InfoNCE, unless the arguments ask for weights.
    """
    plain = not isinstance(args, SoftInfoNCETrainingArguments)
    by_default = plain or "estimator" in args.by_encoder
    weighs = plain or (args.estimator == "bm25" and args.loss is None)
    if by_default and weighs:
        pairs = args.per_device_train_batch_size
        if getattr(args, "gather_negatives", None) is not False:
            pairs *= args.world_size
        pairs = min(pairs, len(split.judgments))
        least = smallest_batch(BM25Estimator.alpha, BM25Estimator.beta)
        reason = None
        if own_loss:
            reason = f"{own_loss} computes the loss; pass an estimator for weights"
        elif pairs < least and getattr(args, "alpha", None) is None and getattr(args, "beta", None) is None:
            reason = f"the weights of Eq. 4 need batches of {least} pairs or more, not {pairs}"
        if reason:
            print_on_main(f"loss=info_nce: {reason}")
            if plain:
                return None
            args.loss = "info_nce"
    if plain:
        estimator = choose_estimator(EstimatorOptions(), starting.profile.query_columns)
    else:
        estimator = estimator_of_run(args, starting.profile, starting.trust_remote_code, split)
    return None if estimator is None else EstimatorCallback(estimator, by_default)
