"""Resolves a trainer's settings into a plan and checks them, again whenever they have changed."""

from __future__ import annotations

import contextlib
import dataclasses

from soft_trainer import distributed
from soft_trainer.criterion import Criterion
from soft_trainer.data.tokens import SIDES
from soft_trainer.encoders.attention import running
from soft_trainer.encoders.encoding import Encoder, collator_of, prompt_length
from soft_trainer.encoders.packing import Passes
from soft_trainer.encoders.passes import decide_passes
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator
from soft_trainer.estimators.callback import EstimatorCallback, find_estimator_callback, with_estimators
from soft_trainer.options.defaults import estimator_name
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.run import preflight
from soft_trainer.run.saving import SavingTrainer
from soft_trainer.run.setup import Setup
from soft_trainer.training.collator import PairCollator, pieces_of


class PlannedTrainer(SavingTrainer):
    """A `Trainer` whose arguments, estimator and encoder are resolved into a plan.

    Args:
        setup: what the trainer starts from.
        data_collator: the user's data collator, or None.
        kwargs: further arguments of `transformers.Trainer`.

    Attributes:
        starting: the encoder before training.
        encoder: the profile of the encoder.
        train_split: the training rows, or None.
        plan: the checked settings.
        passes: how forward passes run.
    """

    def __init__(self, setup: Setup, data_collator=None, **kwargs):
        self.starting = setup.starting
        self.encoder = setup.encoder
        self.train_split = setup.train_split
        self.plan = setup.plan
        self.passes = Passes()
        self._passes_of = None  # the model and the settings that `passes` is about
        self._collates = data_collator is None
        super().__init__(
            args=setup.args,
            data_collator=data_collator,
            eval_dataset=setup.eval_dataset,
            callbacks=setup.callbacks,
            **kwargs,
        )
        self._resolved = self._settings()
        self._use_plan()

    def _bind_estimator(self) -> None:
        """Passes the encoder to the estimator, whose default settings may depend on the encoder."""
        if isinstance(self.estimator, Estimator):
            self.estimator.bind(self.text_encoder)

    def add_callback(self, callback) -> None:
        """Adds a callback. An estimator or an `EstimatorCallback` supplies the weights from now on.

        It replaces the default estimator.
        """
        (callback,) = with_estimators([callback])
        if not isinstance(callback, EstimatorCallback):
            super().add_callback(callback)
            return
        if self.estimator_callback and self.estimator_callback.by_default:
            self.remove_callback(self.estimator_callback)
            if isinstance(self.args, SoftInfoNCETrainingArguments):
                self.args.estimator = estimator_name(callback.estimator)
        find_estimator_callback([self.estimator_callback, callback])  # raises UserError if there are two
        super().add_callback(callback)
        self._bind_estimator()
        self.resolve()

    def resolve(self) -> None:
        """Derives the training plan from the current `args`, unless nothing has changed since the last time.

        Raises:
            UserError: the settings are incompatible.
        """
        if not self.args.auto_find_batch_size:  # otherwise, `Trainer` may have found a smaller one
            self._train_batch_size = self.args.train_batch_size
        if self._settings() != self._resolved:
            self.plan = preflight.make_plan(self, self._train_batch_size)
            self._use_plan()
            self._resolved = self._settings()

    def _settings(self) -> tuple:
        """Returns everything that the plan and its checks depend on and that may change after the constructor."""
        return dict(vars(self.args)), self._train_batch_size, self.estimator, self.model

    def _use_plan(self) -> None:
        """Makes the collator that the plan needs, and checks the plan against the rows and the encoder."""
        self._decide_passes()
        prompts = {side: prompt_length(self.processing_class, self.encoder, side) for side in SIDES}
        if self._collates:
            encoder = Encoder(self.model, self.processing_class, self.encoder, passes=self.passes)
            self.data_collator = PairCollator(
                collator_of(encoder, self.args.device),
                {side: self.encoder.max_tokens(side) for side in SIDES},
                prompts,
                self.plan.options.gradient_cache_chunk_size,
                pieces_of(self.passes, self.args.device, self.model),
            )
        else:
            preflight.check_own_collator(self.plan, prompts, self.model)
            options = dataclasses.replace(self.plan.options, negatives_per_query=0)  # it reads only pairs
            self.plan = dataclasses.replace(self.plan, options=options)
        preflight.check_encoder(self.model, self.processing_class, self.encoder)
        if self.train_split is not None:
            preflight.check_adapter(self.model, self.args, self.encoder)

    def _decide_passes(self) -> None:
        """Decides how forward passes run, once for each model. Every process gets the main process's decision.

        Raises:
            UserError: `packing` is true, but the passes must be padded.
        """
        model = getattr(self.model, "module", self.model)  # FSDP 1 wraps the encoder when training begins
        packing = getattr(self.args, "packing", "auto")
        reason = preflight.pads(self.args, not self._collates, self.accelerator, self.encoder.pooling)
        if self._passes_of == (model, packing, reason):
            return
        self._passes_of = (model, packing, reason)
        decided = model, self.encoder, self.args.device, self.precision, packing, reason
        # With FSDP, the other processes may not have the weights yet.
        self.passes = distributed.on_main(lambda: decide_passes(*decided))
        if str(packing).lower() == "true" and not self.passes.packed:
            raise UserError(f"packing=true: the texts of this run cannot be packed: {self.passes.why_padded}")

    def running(self) -> contextlib.AbstractContextManager:
        """Returns a context manager that prepares the model for our forward and backward passes; see `passes.py`."""
        return running(self.model, self.passes.packed)

    @property
    def text_encoder(self) -> Encoder:
        """The model with its tokenizer and profile, ready to encode."""
        return Encoder(self.model, self.processing_class, self.encoder, passes=self.passes)

    @property
    def criterion(self) -> Criterion:
        """The training loss with its settings."""
        return self.plan.criterion

    @property
    def estimator_callback(self) -> EstimatorCallback | None:
        """The callback that supplies the weights, or None."""
        return find_estimator_callback(self.callback_handler.callbacks)

    @property
    def estimator(self):
        """The estimator that supplies the weights, or None."""
        callback = self.estimator_callback
        return callback and callback.estimator

    @property
    def evaluated_dims(self) -> tuple[int, ...]:
        """The Matryoshka dimensions to evaluate in addition to the full embedding."""
        dims = self.plan.dims or self.encoder.matryoshka_dims
        return tuple(dim for dim in dims if dim < self.starting.size)

    @property
    def precision(self) -> str:
        """The number format of the forward pass, which depends on the launcher, the arguments and the model."""
        if self.accelerator.mixed_precision == "no":
            return str(self.model.dtype).removeprefix("torch.")
        return self.accelerator.mixed_precision
