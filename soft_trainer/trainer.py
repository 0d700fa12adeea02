"""SoftInfoNCETrainer: encode, gather, weigh, loss. Evaluation is in `training/retrieval.py`."""

from __future__ import annotations

import dataclasses

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainingArguments

from soft_trainer import distributed
from soft_trainer.arguments import SoftInfoNCEOptions, SoftInfoNCETrainingArguments
from soft_trainer.callbacks import EstimatorCallback, find_estimator_callback
from soft_trainer.data.batches import Batch, TrainBatches, text_ids_of
from soft_trainer.data.chunks import ChunkCost
from soft_trainer.data.collator import PairCollator, Side
from soft_trainer.data.global_batches import EpochDataLoader, data_seed, training_sampler
from soft_trainer.data.tokens import SIDES
from soft_trainer.encoders.adapters import plain_encoder
from soft_trainer.encoders.encoding import encode, prompt_length
from soft_trainer.encoders.loading import Encoder
from soft_trainer.encoders.matryoshka import check_dims, parse_dims, shorten
from soft_trainer.encoders.pooling import score
from soft_trainer.encoders.profiles import PROFILES, EncoderProfile, check_profile, resolve_profile
from soft_trainer.encoders.tokenizers import prepare_tokenizer
from soft_trainer.encoders.transformer import check_model
from soft_trainer.errors import UserError
from soft_trainer.evaluation.dimensions import shorter_metric
from soft_trainer.files import last_checkpoint
from soft_trainer.loss_settings import LossSettings
from soft_trainer.terminal import print_on_main
from soft_trainer.training.adapters import check_adapter, check_checkpoint
from soft_trainer.training.batch_trainer import BatchTrainer
from soft_trainer.training.checks import (
    banner,
    check_batches,
    check_own_collator,
    check_prompts_pooled,
    check_run,
    check_trainer_arguments,
    check_weighting,
    make_loss_settings,
    measured_metrics,
    options_of,
    warnings_of,
)
from soft_trainer.training.gradient_cache import cached_backward
from soft_trainer.training.guard import FiniteGuard, OverflowCounter
from soft_trainer.training.hard_batches import PreparedRows, check_code_only, prepare_rows
from soft_trainer.training.retrieval import as_row_sets, as_rows
from soft_trainer.training.stopping import SaveOnTermination, explaining_interruption
from soft_trainer.weights import Weigher

LOSS_BLOCK = 256  # queries whose scores against all codes are in memory at once, with gradient caching


class SoftInfoNCETrainer(BatchTrainer):
    """Fine-tunes a code-search encoder with Soft-InfoNCE (Eq. 3) or one of the paper's other losses.

    Args:
        model: a plain `PreTrainedModel` encoder, so that the saved folder loads with `AutoModel`. It may have an
            adapter (`model.add_adapter`); a `PeftModel` gives the encoder inside.
        args: `SoftInfoNCETrainingArguments`, or plain `transformers.TrainingArguments`. The latter mean Soft-InfoNCE
            with an estimator and InfoNCE without.
        train_dataset: rows in CodeSearchNet's columns, a `Dataset` or a list of dicts. A row's number is its position.
        eval_dataset: rows with `url` and a query, or a dict of them.
        codebase: the corpus that queries are ranked against, rows with `url` and a code, or a dict with the keys of
            `eval_dataset`.
        processing_class: the tokenizer.
        encoder: pooling, prefix, lengths and score. None: known from the model.
        data_collator: features with `query_ids` and `code_ids` -> `{"query": inputs, "code": inputs}`.
        callbacks: among them an `EstimatorCallback`, for weights.
        kwargs: other arguments of `transformers.Trainer`.

    Raises:
        UserError: settings or data that cannot work, before any training.
    """

    # InfoNCE is a mean over a batch: without this, accumulation would log a multiple of the loss.
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        model=None,
        args: TrainingArguments | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        codebase: Dataset | dict[str, Dataset] | None = None,
        processing_class=None,
        encoder: EncoderProfile | None = None,
        data_collator=None,
        callbacks=None,
        **kwargs,
    ):
        args = args or SoftInfoNCETrainingArguments()
        args.output_dir = args.output_dir or "outputs"
        check_trainer_arguments(model, processing_class, kwargs)
        check_profile(encoder)
        model, self.encoder = plain_encoder(model), encoder
        self.estimator_callback = find_estimator_callback(callbacks)
        self.codebase = as_row_sets(codebase, "codebase")
        self.args, self.compute_metrics = args, kwargs.get("compute_metrics")
        self.train_dataset = as_rows(train_dataset, "train_dataset")
        self.eval_dataset = as_row_sets(eval_dataset, "eval_dataset")
        self.check_settings()
        check_own_collator(args, data_collator)
        self._own_collator = data_collator is None
        self._overflows: OverflowCounter | None = None
        super().__init__(
            model,
            args,
            data_collator=data_collator or PairCollator(processing_class.pad_token_id),
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            **kwargs,
        )
        name = self.model.config._name_or_path
        self.encoder = self.encoder or (resolve_profile(name) if name else PROFILES["auto"])
        prepare_tokenizer(processing_class, self.encoder)
        check_prompts_pooled(self.prompt_lengths, data_collator)
        self.check_encoder()
        self._duplicates_masked = 0
        self._guard: FiniteGuard | None = None
        self._overflows = OverflowCounter(self.accelerator.scaler) if self.accelerator.scaler else None
        self._termination = SaveOnTermination()
        for callback in filter(None, (self._overflows, self._termination)):
            self.add_callback(callback)
        self._prepared: PreparedRows | None = None
        self._bind_estimator()

    def _bind_estimator(self) -> None:
        """Shows the estimator the training rows and the encoder."""
        if self.estimator_callback is not None:
            encoder = Encoder(self.model, self.processing_class, self.encoder)
            self.estimator_callback.bind(self.train_dataset, encoder)
            check_weighting(self.loss_settings, self.estimator)

    def add_callback(self, callback) -> None:
        """Adds a callback; an `EstimatorCallback` becomes the source of the weights."""
        super().add_callback(callback)
        if isinstance(callback, EstimatorCallback):
            self.estimator_callback = find_estimator_callback({self.estimator_callback, callback})
            self.check_settings()
            self._bind_estimator()

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator, which a search of hyperparameters does for every trial."""
        super().create_accelerator_and_postprocess()
        if self._overflows is not None:
            self._overflows.scaler = self.accelerator.scaler

    # ---- Settings: read when they are used, because args may change between construction and training ----

    @property
    def options(self) -> SoftInfoNCEOptions:
        """The options of the loss."""
        return options_of(self.args)

    @property
    def estimator(self):
        """The estimator of the weights, None without one."""
        return self.estimator_callback.estimator if self.estimator_callback else None

    @property
    def loss_settings(self) -> LossSettings:
        """The loss with its settings."""
        return make_loss_settings(self.options, self.estimator)

    @property
    def weigher(self) -> Weigher:
        """The object that turns rows into the weights of a batch."""
        return Weigher(self.loss_settings, self.estimator)

    @property
    def matryoshka_dims(self) -> tuple[int, ...]:
        """The numbers of first dimensions that are trained as embeddings, the largest first; () for all at once."""
        return parse_dims(self.options.matryoshka_dims)

    @property
    def evaluated_dims(self) -> tuple[int, ...]:
        """The numbers of first dimensions that are evaluated beside all of them."""
        dims = self.matryoshka_dims or (self.encoder.matryoshka_dims if self.encoder else ())
        model = getattr(self, "model", None)  # the constructor checks some settings before it has one
        return tuple(dim for dim in dims if model is None or dim < model.config.hidden_size)

    @property
    def profile_to_save(self) -> EncoderProfile:
        """The encoder's profile, with the dimensions that were trained."""
        return dataclasses.replace(self.encoder, matryoshka_dims=self.matryoshka_dims)

    @property
    def global_batch_size(self) -> int:
        """N, the number of codes that each query meets."""
        return self._train_batch_size * (self.args.world_size if self.gathers else 1)

    # ---- Batches ----

    def get_train_dataloader(self) -> EpochDataLoader:
        """Global batches of rows; each process's workers collate its share."""
        if self.train_dataset is None:
            raise UserError("train_dataset: training needs rows")
        check_batches(self.args, self.loss_settings, self.train_dataset, self._train_batch_size)
        rows, batches = self.train_dataset, self._train_batches()
        size = self._train_batch_size * self.args.world_size
        inputs = (lambda: text_ids_of(rows, self.encoder), lambda: self._prepared.similar)
        sampler = training_sampler(self.args, rows, batches, size, *inputs)
        return EpochDataLoader.for_training(batches, sampler, self.args)

    def prepare_rows(self) -> PreparedRows:
        """Reads or mines own negatives, finds neighbours and fits the estimator if they need it."""
        callback, strategy, seed = self.estimator_callback, self.args.train_sampling_strategy, data_seed(self.args)
        fit = None if callback is None else callback.fit
        if callback is not None:
            callback.begin()
        rows = prepare_rows(self.options, strategy, self.train_dataset, self.encoder, self.estimator, fit, seed)
        if self.loss_settings.needs_similarity:
            check_code_only(self.estimator, len(rows.rows) - len(self.train_dataset))
        if callback is not None:
            callback.prepare(rows.rows)
        self._prepared = rows
        return rows

    def _train_batches(self) -> TrainBatches:
        """The training rows as token ids, with what the workers compute beside them."""
        prepared = self._prepared or self.prepare_rows()
        precompute = self.loss_settings.needs_similarity and getattr(self.estimator, "in_workers", False)
        return self._batches(
            {side: self._tokens(prepared.rows, side) for side in SIDES},
            weigh=self.weigher if precompute else None,
            text_ids=prepared.text_ids,
            duplicates=self.options.duplicates,
            own_negatives=prepared.own_negatives,
        )

    @property
    def prompt_lengths(self) -> dict[str, int]:
        """For each side of a batch the first tokens of its texts that are left out of the pooling."""
        return {side: prompt_length(self.processing_class, self.encoder, side) for side in SIDES}

    def _batches(self, tokens: dict, **inputs) -> TrainBatches:
        rank, world_size = distributed.rank_and_world_size()
        if self._own_collator:
            cost = ChunkCost.of(self.model.config.hidden_size, self.args.device.type)
            self.data_collator = PairCollator(
                self.processing_class.pad_token_id,
                cost if self.options.chunk_by_length else None,
                self.options.gradient_cache_chunk_size,
                self.prompt_lengths,
            )
        return TrainBatches(
            tokens, self.data_collator, gather=self.gathers, rank=rank, world_size=world_size, **inputs
        )

    # ---- The step ----

    def compute_loss(self, model, inputs: Batch, return_outputs=False, num_items_in_batch=None):
        """The mean loss of this process's queries against the codes of the global batch."""
        queries, codes = (self.embeddings(model, getattr(inputs, side)) for side in SIDES)
        loss = self.batch_loss(queries, codes, inputs)
        return (loss, {"query": queries, "code": codes}) if return_outputs else loss

    def embeddings(self, model, side: Side) -> Tensor:
        """Embeddings Tensor[B, d] of one side of a batch, in the batch's order."""
        return torch.cat([encode(model, self.encoder, chunk) for chunk in side.chunks])[side.order]

    def batch_loss(self, queries: Tensor, codes: Tensor, batch: Batch) -> Tensor:
        """The loss from embeddings Tensor[B, d] of this process's queries and codes."""
        if self.gathers:
            codes = distributed.gather_with_gradient(codes, batch.code_sizes)
        return self._block_loss(queries, codes, batch, slice(0, len(queries)))

    def _block_loss(self, queries: Tensor, codes: Tensor, batch: Batch, block: slice) -> Tensor:
        """The part of a block of queries in this process's loss, against the codes Tensor[N, d] of all processes."""
        if not len(queries):
            return 0.0 * (queries.sum() + codes.sum())  # keeps the graph, which other processes wait for
        loss_settings, scores = self.loss_settings, self._scores(queries, codes)
        positives = batch.positives[block]
        negatives, also = (None if mask is None else mask[block] for mask in (batch.negatives, batch.also))
        if batch.loss_inputs is not None:
            inputs = {name: tensor[block] for name, tensor in batch.loss_inputs.items()}
        elif loss_settings.needs_similarity:
            inputs = self.weigher(batch.rows[block], batch.code_rows, positives, negatives)
        else:
            inputs = {}
        if "weights" in inputs and block.start == 0:
            self.estimator_callback.observe(inputs["weights"], loss_settings.floor, scores[0], positives)
        loss = sum(loss_settings(each, positives, negatives=negatives, also=also, **inputs) for each in scores)
        return loss * batch.loss_scale(len(queries))

    def _scores(self, queries: Tensor, codes: Tensor) -> list[Tensor]:
        """The scores Tensor[B, N] by the first dimensions of the embeddings, for each number of `matryoshka_dims`."""
        sides = ([shorten(self.encoder, side, dim) for side in (queries, codes)] for dim in self.matryoshka_dims)
        return [score(self.encoder, *each) for each in sides] or [score(self.encoder, queries, codes)]

    def training_step(self, model, inputs: Batch, num_items_in_batch=None) -> Tensor:
        """A step of any `Trainer`, or one with gradient caching; the loss must be finite."""
        self._duplicates_masked += inputs.duplicates
        step = super().training_step if self.options.gradient_cache_chunk_size is None else self._cached_step
        loss = step(model, inputs, num_items_in_batch)
        if self._guard is not None:
            self._guard.watch(self.state.global_step + 1, loss, inputs.rows)
        return loss

    def _cached_step(self, model, inputs: Batch, num_items_in_batch=None) -> Tensor:
        """Forward and backward with gradient caching."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        accumulated = self.current_gradient_accumulation_steps
        loss = cached_backward(
            lambda chunk: encode(model, self.encoder, chunk),
            inputs,
            lambda queries, codes, block: self._block_loss(queries, codes, inputs, block) / accumulated,
            self.accelerator.backward,
            self.gathers,
            block_size=max(self.options.gradient_cache_chunk_size, LOSS_BLOCK),
            no_sync=lambda: self.accelerator.no_sync(model),
        )
        return loss.to(self.args.device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs, with the weights' statistics beside a training loss."""
        if "loss" in logs:
            logs |= self.estimator_callback.statistics() if self.estimator_callback is not None else {}
            logs |= {"duplicates_masked": self._duplicates_masked} if self.options.duplicates != "ignore" else {}
            logs |= {"fp16_overflows": self._overflows.count} if self._overflows is not None else {}
        super().log(logs, start_time)

    # ---- Before the first step, and after the last ----

    def _save_checkpoint(self, model, trial) -> None:
        """Saves a checkpoint, unless the loss before it was not finite."""
        if self._guard is not None:
            self._guard.check()
        super()._save_checkpoint(model, trial)

    def check_settings(self) -> None:
        """Refuses settings that cannot work. They may change between the constructor and `train`, so both call it."""
        names = (*self.METRICS, *map(shorter_metric, self.evaluated_dims))
        metrics = None if self.compute_metrics else measured_metrics(names, self.eval_dataset)
        check_run(self.args, self.estimator, self.train_dataset, metrics=metrics)

    def check_encoder(self) -> None:
        """Refuses an encoder that cannot be trained or saved as the settings say."""
        check_model(self.model, self.encoder)
        if self.train_dataset is not None:
            check_adapter(self.model, self.args)
        check_dims(self.matryoshka_dims, self.model.config.hidden_size)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """Trains, after a table that says what will be trained.

        Args:
            resume_from_checkpoint: a folder; "last" or True for the newest complete checkpoint of `output_dir`.

        Raises:
            UserError: settings or data that cannot work.
            NotFiniteError: the loss became NaN or infinite.
            SystemExit: stopped by SIGTERM (code 143), after a checkpoint.
            KeyboardInterrupt: Ctrl-C; the message says what is kept and how to continue.
        """
        self._checkpoint = last_checkpoint(resume_from_checkpoint, self.args.output_dir)
        try:
            with explaining_interruption(self.args, lambda: f" at step {self.state.global_step}"):
                output = super().train(self._checkpoint, *args, **kwargs)
        finally:
            self._termination.release()
        self._termination.exit_if_terminated(self.args, self.state.global_step)
        self._guard.check()
        return output

    def _hp_search_setup(self, trial) -> None:
        """Checks the settings and prepares the rows, after a search of hyperparameters has set those of a trial.

        `Trainer.train` calls it in every training, when the model exists and no checkpoint is loaded yet.
        """
        super()._hp_search_setup(trial)
        self.check_settings()
        self.check_encoder()
        self.check_evaluation()
        check_checkpoint(self.model, self._checkpoint)
        if self._checkpoint and self.estimator_callback is not None:
            self.estimator_callback.check_resumed(self.state.global_step)
        self._bind_estimator()
        print_on_main("\n".join([banner(self), *warnings_of(self)]))
        self.prepare_rows()
        self._guard = FiniteGuard(self.train_dataset)
