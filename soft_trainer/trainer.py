"""SoftInfoNCETrainer: rows become batches, batches a loss, and an evaluation ranks a whole corpus.

Every process runs all of it on its share: of a global batch, of the texts to encode, of the queries to rank.
`distributed.py` gathers. The main process alone prints, and writes everything but caches of rows, which one process of
each machine writes, and each process's random state in a checkpoint, which `transformers` saves.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor
from transformers import EvalPrediction, PrinterCallback, ProgressCallback, Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints, speed_metrics

from soft_trainer import distributed
from soft_trainer.callbacks import EstimatorCallback, find_estimator_callback, with_estimators
from soft_trainer.data.batches import Batch, TrainBatches
from soft_trainer.data.collator import ChunkCost, PairCollator, Side
from soft_trainer.data.global_batches import EpochDataLoader, data_seed
from soft_trainer.data.judgments import Split
from soft_trainer.data.sources import as_row_sets, as_split
from soft_trainer.data.tokens import SIDES, GraphColumn, TokenColumn, column_of
from soft_trainer.encoders.adapters import has_adapter, plain_encoder, set_adapter_state
from soft_trainer.encoders.encoding import Encoder, comparable, embed_sharded, encode, prompt_length, score, shorten
from soft_trainer.encoders.loading import prepare_tokenizer
from soft_trainer.encoders.profiles import PROFILE_FILE, EncoderProfile, profile_of
from soft_trainer.encoders.repository import ADAPTER_WEIGHTS
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator
from soft_trainer.estimators.registry import default_estimator
from soft_trainer.evaluation.retrieval import RetrievalOutput, best_answers, mean_over_sets
from soft_trainer.files import (
    MARKER,
    last_checkpoint,
    mark_complete,
    reporting_disk_errors,
    saving_checkpoint,
    write_text,
)
from soft_trainer.hub.export import export_encoder
from soft_trainer.hub.model_card import environment, write_model_card
from soft_trainer.hub.publishing import Publisher
from soft_trainer.hub.push import UNMERGED
from soft_trainer.loss_settings import LossSettings
from soft_trainer.options.resolve import Plan, resolve
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.terminal import print_on_main, shows_bars
from soft_trainer.training import checkpoints, preflight, summary
from soft_trainer.training.batching import PreparedRows, prepare_rows, train_loader
from soft_trainer.training.evaluation import Corpora, check_evaluations, evaluation_split, measure
from soft_trainer.training.finite import FiniteGuard, OverflowCounter
from soft_trainer.training.gradient_cache import cached_backward
from soft_trainer.training.merging import merge, weights_to_merge
from soft_trainer.training.messages import ProgressLines, banner, warnings_of

LOSS_BLOCK = 256  # queries whose scores against all codes are in memory at once, with gradient caching


class SoftInfoNCETrainer(Trainer):
    """Fine-tunes a code-search encoder with Soft-InfoNCE (Eq. 3) or one of the paper's other losses.

    Args:
        model: a plain `PreTrainedModel` encoder, so that the saved folder loads with `AutoModel`. It may have an
            adapter (`model.add_adapter`); a `PeftModel` gives the encoder inside.
        args: `SoftInfoNCETrainingArguments`, with the command line's default estimator where none is given, or plain
            `transformers.TrainingArguments`, which mean Soft-InfoNCE with an estimator and InfoNCE without.
        train_dataset: pairs of a query and a code in CodeSearchNet's columns, a `Dataset` or a list of dicts; or a
            `Split` of queries, corpus and judgments. The attribute `train_dataset` holds its pairs, `train_split` it.
        eval_dataset: rows with `url` and a query, or a dict of them.
        codebase: the corpus that queries are ranked against, rows with `url` and a code, or a dict with the keys of
            `eval_dataset`.
        processing_class: the tokenizer.
        encoder: pooling, prefix, lengths and score. None: known from the model.
        data_collator: features with `query_ids` and `code_ids` -> `{"query": inputs, "code": inputs}`.
        callbacks: among them an estimator or an `EstimatorCallback`, for weights.
        kwargs: other arguments of `transformers.Trainer`.

    Raises:
        UserError: settings or data that cannot work, before any training.
    """

    # InfoNCE is a mean over a batch: without this, accumulation would log a multiple of the loss.
    loss_is_scaled_for_ga = False
    writes_card = True  # False where a `Run` has written the card, which knows more, or wants none
    _is_saving_checkpoint = False  # a checkpoint holds the adapter itself, so that a resumed run is exact

    def __init__(
        self,
        model=None,
        args: TrainingArguments | None = None,
        train_dataset: Dataset | Split | None = None,
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
        preflight.check_trainer_arguments(model, processing_class, kwargs)
        model = plain_encoder(model)
        encoder = encoder or profile_of(model)
        trains = train_dataset is not None
        callbacks = with_estimators(callbacks, trains and functools.partial(default_estimator, args, encoder, model))
        callback = find_estimator_callback(callbacks)
        split = as_split(train_dataset, "train_dataset")
        resolve(args, callback and callback.estimator)  # refuses before anything is set up
        super().__init__(
            model,
            args,
            data_collator=data_collator or PairCollator(processing_class.pad_token_id),
            train_dataset=split and split.pair_rows(),
            eval_dataset=as_row_sets(eval_dataset, "eval_dataset"),
            processing_class=processing_class,
            callbacks=callbacks,
            **kwargs,
        )
        self.train_split = split
        self.codebase = as_row_sets(codebase, "codebase")
        self.estimator_callback = callback
        self.encoder = encoder
        prepare_tokenizer(processing_class, self.encoder)
        self._collates = data_collator is None
        self._rows: PreparedRows | None = None
        self._duplicates_masked = 0
        self._guard: FiniteGuard | None = None
        self.evaluations: list[tuple[int, bool, dict]] = []  # step, whether during training, metrics
        self._weights_before: dict[str, Tensor] | None = None
        self.merging: dict | None = None  # of the last training: ratio, base and unmerged encoder; None: not merged
        self._overflows: OverflowCounter | None = None
        if self.accelerator.scaler:
            self._overflows = OverflowCounter(lambda: self.accelerator.scaler)
            self.add_callback(self._overflows)
        if args.disable_tqdm or not shows_bars():
            for bar in (PrinterCallback, ProgressCallback):
                self.remove_callback(bar)
            self.add_callback(ProgressLines(lambda: self._guard.mean_loss()))
        self._bind_estimator()
        self.resolve()

    def _bind_estimator(self) -> None:
        """Hands the encoder to the estimator, whose defaults may depend on it."""
        if isinstance(self.estimator, Estimator):
            self.estimator.bind(Encoder(self.model, self.processing_class, self.encoder))

    def add_callback(self, callback) -> None:
        """Adds a callback; an estimator or an `EstimatorCallback` becomes the source of the weights."""
        (callback,) = with_estimators([callback])
        super().add_callback(callback)
        if isinstance(callback, EstimatorCallback):
            self.estimator_callback = find_estimator_callback({self.estimator_callback, callback})
            self._bind_estimator()
            self.resolve()

    # ---- Settings ----

    def resolve(self) -> None:
        """Plans the training from the current `args`, and checks the plan against rows and encoder.

        Raises:
            UserError: settings that cannot work.
        """
        self.plan: Plan = resolve(self.args, self.estimator, self._train_batch_size)
        self.weigher = functools.partial(self.plan.loss.weigh, self.estimator)
        prompts = self.prompt_lengths
        if self._collates:
            cost = ChunkCost.of_model(self.model, self.args.device.type)
            largest = self.plan.options.gradient_cache_chunk_size
            self.data_collator = PairCollator(self.processing_class.pad_token_id, cost, largest, prompts)
        elif isinstance(self.data_collator, PairCollator):
            self.data_collator.prompt_lengths = prompts
        else:
            preflight.check_own_collator(self.plan, prompts)
        if self.compute_metrics is None:
            preflight.check_metric(self.args, self.evaluated_dims, self.eval_dataset)
        preflight.check_encoder(self.plan, self.args, self.model, self.encoder)
        if self.train_split is not None:
            preflight.check_rows_of(self.plan, self.args, self.estimator, self.train_split)
            preflight.check_adapter(self.model, self.args)

    @property
    def loss_settings(self) -> LossSettings:
        """The loss with its settings."""
        return self.plan.loss

    @property
    def estimator(self):
        """The estimator of the weights, None without one."""
        if self.estimator_callback is None:
            return None
        return self.estimator_callback.estimator

    @property
    def evaluated_dims(self) -> tuple[int, ...]:
        """The Matryoshka dimensions to evaluate in addition to the full embedding."""
        dims = self.plan.dims or self.encoder.matryoshka_dims
        return tuple(dim for dim in dims if dim < self.model.config.hidden_size)

    @property
    def precision(self) -> str:
        """The number format of the forward pass, chosen by the launcher, the arguments or the model."""
        if self.accelerator.mixed_precision == "no":
            return str(self.model.dtype).removeprefix("torch.")
        return self.accelerator.mixed_precision

    # ---- Batches ----

    def get_train_dataloader(self) -> EpochDataLoader:
        """Returns global batches of rows; each process's workers collate its share."""
        self.resolve()  # `auto_find_batch_size` may have made the batches smaller
        batches = self._train_batches()
        return train_loader(batches, self._rows, self.plan, self.args, self.train_dataset)

    def prepare_rows(self) -> None:
        """Fits the estimator, before a checkpoint is loaded, and finds negatives and similar pairs."""
        if self.estimator is not None:
            self.estimator_callback.fit(self.train_split)
        self._rows = prepare_rows(self.train_split, self.plan, self.estimator, self.encoder, data_seed(self.args))

    def _train_batches(self) -> TrainBatches:
        """Returns the training rows as token ids, with all that the workers compute."""
        if self._rows is None:
            self.prepare_rows()
        split = self.train_split
        plan = self.plan
        duplicates = plan.options.duplicates
        rank, world_size = distributed.rank_and_world_size()
        precompute = plan.loss.needs_similarity and getattr(self.estimator, "in_workers", False)
        return TrainBatches(
            {"query": self._tokens(split.queries, "query"), "code": self._tokens(split.corpus, "code")},
            split.judgments.pairs(),
            self.data_collator,
            weigh=self.weigher if precompute else None,
            answers=None if duplicates == "ignore" else self._rows.answers,
            duplicates=duplicates,
            gather=plan.gathers,
            own_negatives=self._rows.negatives,
            rank=rank,
            world_size=world_size,
        )

    @property
    def prompt_lengths(self) -> dict[str, int]:
        """The number of tokens at the start of each side's texts that are left out of the pooling."""
        return {side: prompt_length(self.processing_class, self.encoder, side) for side in SIDES}

    # ---- The step ----

    def compute_loss(self, model, inputs: Batch, return_outputs=False, num_items_in_batch=None):
        """Returns this process's part of the loss of the global batch; gradient caching computes it by blocks."""
        queries, codes = (self.embeddings(model, getattr(inputs, side)) for side in SIDES)
        loss = self.batch_loss(queries, codes, inputs)
        if return_outputs:
            return loss, {"query": queries, "code": codes}
        return loss

    def embeddings(self, model, side: Side) -> Tensor:
        """Returns embeddings Tensor[B, d] of one side of a batch, in the batch's order."""
        return torch.cat([encode(model, self.encoder, chunk) for chunk in side.chunks])[side.order]

    def batch_loss(self, queries: Tensor, codes: Tensor, batch: Batch) -> Tensor:
        """Returns the loss from embeddings Tensor[B, d] of this process's queries and codes."""
        if self.plan.gathers:
            codes = distributed.gather_with_gradient(codes, batch.code_sizes)
        return self._block_loss(queries, codes, batch, slice(0, len(queries)))

    def _block_loss(self, queries: Tensor, codes: Tensor, batch: Batch, block: slice) -> Tensor:
        """Returns the loss of one block of queries, against the codes Tensor[N, d] of all processes."""
        if not len(queries):
            return 0.0 * (queries.sum() + codes.sum())  # keeps the graph, which other processes wait for
        loss_of = self.plan.loss
        scores = self._scores(queries, codes)
        positives = batch.positives[block]
        negatives, also = (None if mask is None else mask[block] for mask in (batch.negatives, batch.also))
        if batch.loss_inputs is not None:
            inputs = {name: tensor[block] for name, tensor in batch.loss_inputs.items()}
        elif loss_of.needs_similarity:
            inputs = self.weigher(batch.query_rows[block], batch.code_rows, positives, negatives)
        else:
            inputs = {}
        if "weights" in inputs and block.start == 0:
            self.estimator_callback.observe(inputs["weights"], loss_of.floor, scores[0], positives)
        loss = sum(loss_of(each, positives, negatives=negatives, also=also, **inputs) for each in scores)
        return loss * batch.loss_scale(len(queries))

    def _scores(self, queries: Tensor, codes: Tensor) -> list[Tensor]:
        """Returns the scores Tensor[B, N] by the first dimensions of the embeddings, for each of the plan's `dims`."""
        if not self.plan.dims:
            return [score(self.encoder, queries, codes)]
        scores = []
        for dim in self.plan.dims:
            shorter = [shorten(self.encoder, side, dim) for side in (queries, codes)]
            scores.append(score(self.encoder, *shorter))
        return scores

    def training_step(self, model, inputs: Batch, num_items_in_batch=None) -> Tensor:
        """Takes a step, with gradient caching if asked for; the loss must be finite."""
        self._duplicates_masked += inputs.duplicates
        if self.plan.options.gradient_cache_chunk_size is None:
            loss = super().training_step(model, inputs, num_items_in_batch)
        else:
            loss = self._cached_step(model, inputs)
        if self._guard is not None:
            self._guard.watch(self.state.global_step + 1, loss, inputs.rows)
        return loss

    def _cached_step(self, model, inputs: Batch) -> Tensor:
        """Runs forward and backward with gradient caching."""
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
            self.plan.gathers,
            block_size=max(self.plan.options.gradient_cache_chunk_size, LOSS_BLOCK),
            no_sync=lambda: self.accelerator.no_sync(model),
        )
        return loss.to(self.args.device)

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """Moves the batch to this process's device; with a user's collator, equalises the forward passes too."""
        if self.args.world_size > 1 and not isinstance(self.data_collator, PairCollator):
            passes = distributed.largest([len(getattr(inputs, side).chunks) for side in SIDES])
            for side, number in zip(SIDES, passes, strict=True):
                inputs = dataclasses.replace(inputs, **{side: getattr(inputs, side).with_passes(number)})
        return inputs.to(self.args.device)

    def _get_num_items_in_batch(self, batch_samples: list, device) -> None:
        """Returns None: the loss is a mean over a batch, not over tokens."""

    def floating_point_ops(self, inputs: Batch) -> int:
        """Returns 6 x parameters x computed tokens, padding included."""
        return 6 * inputs.count_tokens(padding=True) * self.model.num_parameters(exclude_embeddings=True)

    def _track_num_input_tokens(self, inputs: Batch) -> None:
        """Counts the tokens of both sides, as `include_num_input_tokens_seen` asks."""
        kind = self.args.include_num_input_tokens_seen
        if kind != "no":
            tokens = inputs.count_tokens(padding=kind != "non_padding")
            self.state.num_input_tokens_seen += sum(distributed.gather_numbers(tokens))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs numbers, adding the statistics of the weights to a training loss."""
        if "loss" in logs:
            if self.estimator_callback is not None:
                logs |= self.estimator_callback.statistics()
            if self.plan.options.duplicates != "ignore":
                logs["duplicates_masked"] = self._duplicates_masked
            if self._overflows is not None:
                logs["fp16_overflows"] = self._overflows.count
        super().log(logs, start_time)

    # ---- Before the first step, and after the last ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """Prints a summary of the training, then trains.

        Args:
            resume_from_checkpoint: a folder; "last" or True for the newest complete checkpoint of `output_dir`.

        Raises:
            UserError: settings or data that cannot work.
            NotFiniteError: the loss became NaN or infinite.
            SystemExit: stopped by SIGTERM (code 143), after a checkpoint.
            KeyboardInterrupt: Ctrl-C; the message says what is kept and how to continue.
        """
        self.evaluations = [each for each in self.evaluations if each[0] == 0]  # others are of an earlier training
        self._checkpoint = last_checkpoint(resume_from_checkpoint, self.args.output_dir)
        termination = checkpoints.SaveOnTermination()
        self.add_callback(termination)
        try:
            with checkpoints.explaining_interruption(self.args, lambda: self.state.global_step):
                output = super().train(self._checkpoint, *args, **kwargs)
        finally:
            self.remove_callback(termination)
            termination.restore()
        if distributed.any_process(termination.terminated):
            self._stop()
        self._guard.check()
        self._merge()
        return output

    def _stop(self) -> None:
        """Ends the process after SIGTERM, with a checkpoint of the last step."""
        step = self.state.global_step
        if not (self._checkpoint_folder(self.args.output_dir) / MARKER).is_file():  # the signal came after that step
            self._save_checkpoint(self.model_wrapped, None)
        print_on_main(f"stopped by SIGTERM at step {step}: {checkpoints.how_to_continue(self.args)}")
        raise SystemExit(143)

    def _hp_search_setup(self, trial) -> None:
        """Sets the hyperparameters of a trial, then prepares the training.

        `Trainer.train` calls it in every training, when the model exists and no checkpoint is loaded yet.
        """
        super()._hp_search_setup(trial)
        self._prepare_training()

    def _prepare_training(self) -> None:
        """Checks the settings, compares the checkpoint with them, and prepares the rows."""
        self._bind_estimator()
        self.resolve()
        checkpoint = self._checkpoint
        preflight.check_start(self.estimator, self.train_dataset, checkpoint, self.state.global_step)
        read = (self.args, self.plan, self.encoder, self.model, self.processing_class, self.train_split)
        self.identity = checkpoints.identify(lambda: checkpoints.training_settings(*read), checkpoint)
        check_evaluations(self.args, self.eval_dataset, self.codebase)
        self._keep_weights()
        loss = summary.loss_table(self.plan, self.estimator)
        table = banner(loss, self._setup_table(), self.encoder, self.accelerator.distributed_type.value)
        warnings = warnings_of(self.args, self.plan, self.encoder, self.model)
        print_on_main("\n".join([table, *warnings]))
        self.prepare_rows()
        start = (self.estimator, self.model, self._weights_before)
        self.identity |= checkpoints.identify(lambda: checkpoints.start_settings(*start), checkpoint)
        self._guard = FiniteGuard(self.train_dataset)
        self._duplicates_masked = 0

    def _keep_weights(self) -> None:
        """Copies the weights before training if they will be merged; a UserError if they cannot be."""
        resumed = self._checkpoint is not None and self.state.global_step > 0
        if getattr(self.args, "merge_ratio", None) is None:
            self._weights_before = None
        elif not resumed:
            self._weights_before = weights_to_merge(self.model)
        elif self._weights_before is None:
            raise UserError("merge_ratio: this trainer has trained the encoder; resume with a new trainer")

    def _merge(self) -> None:
        """Saves the unmerged encoder and merges the model, if there is a `merge_ratio`."""
        unmerged = Path(self.args.output_dir) / UNMERGED
        self.merging = None
        if self._weights_before is None:
            if self.args.should_save and (unmerged / PROFILE_FILE).is_file():
                shutil.rmtree(unmerged)  # an earlier run into this folder merged
            return
        self._use_averaged_weights()
        if self.args.should_save:
            self._export(unmerged, merge=self.args.merge_lora)
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        self.merging = merge(model, self._weights_before, self.args.merge_ratio)

    # ---- Evaluation ----

    def evaluate(
        self,
        eval_dataset: Corpora = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        codebase: Corpora = None,
    ) -> dict[str, float]:
        """Ranks every query of `eval_dataset` against the whole corpus.

        Args:
            eval_dataset: rows with `url` and a query, a `Split`, or a dict of them; the trainer's own when None. A
                string names one of the trainer's own.
            codebase: the corpus, or a dict of them with the same keys; the trainer's own when None.

        Returns:
            `PREFIX_mrr`, `PREFIX_recall@1` (5, 10), `PREFIX_pool_size`, ..., the same on every process, and
            `PREFIX_mrr_256` for 256 of `evaluated_dims`. With a dict of data sets, `PREFIX_KEY_mrr` and so on, and
            the mean over the sets as `PREFIX_mrr`.
        """
        if eval_dataset is None:
            eval_dataset = self.eval_dataset
        elif isinstance(eval_dataset, str):
            eval_dataset = {eval_dataset: self.eval_dataset[eval_dataset]}
        if isinstance(eval_dataset, Mapping):
            metrics = {}
            for key, rows in eval_dataset.items():
                prefix = f"{metric_key_prefix}_{key}"
                split = self._split_of(rows, key, codebase, prefix)
                metrics |= self.predict(split, metric_key_prefix=prefix).metrics
            metrics |= mean_over_sets(metrics, metric_key_prefix, tuple(eval_dataset))
        else:
            metrics = self.predict(eval_dataset, codebase, metric_key_prefix).metrics
        self.evaluations.append((self.state.global_step, self.is_in_train, metrics))
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(
        self,
        dataset: Dataset | Split,
        codebase: Dataset | None = None,
        metric_key_prefix: str = "test",
        top_k: int = 10,
        codes: Tensor | None = None,
        queries: Tensor | None = None,
    ) -> RetrievalOutput:
        """Ranks the corpus for every query of `dataset`, on every process.

        Args:
            dataset: rows with `url` and a query, or a `Split`, which has its corpus.
            codebase: the corpus, rows with `url` and a code; the trainer's own when None.
            top_k: the number of codes to keep of each query's ranking.
            codes, queries: `embed_rows(codebase, "code")` and `embed_rows(dataset, "query")`, if the caller has them.

        Raises:
            UserError: no corpus, or a query without a right answer in it.
        """
        start = time.time()
        split = self._split_of(dataset, None, codebase, metric_key_prefix)
        if queries is None:
            queries = self.embed_rows(split.queries, "query")
        if codes is None:
            codes = self.embed_rows(split.corpus, "code")
        output = measure(queries, codes, split, self.encoder, self.evaluated_dims, top_k)
        metrics = output.metrics
        if self.compute_metrics is not None:
            predictions = (output.ranks.numpy(force=True), output.top_indices.numpy(force=True))
            metrics |= self.compute_metrics(EvalPrediction(predictions, best_answers(split.judgments)))
        metrics |= speed_metrics("", start, num_samples=len(split.queries))
        prefix = f"{metric_key_prefix}_"  # the user's metrics may have it already; those of speed start with "_"
        metrics = {prefix + key.removeprefix(prefix).lstrip("_"): value for key, value in metrics.items()}
        return dataclasses.replace(output, metrics=metrics)

    def hyperparameter_search(self, hp_space=None, compute_objective=None, n_trials=20, direction=None, **kwargs):
        """Searches hyperparameters as any `Trainer` does, for the largest `metric_for_best_model`, or `mrr`."""
        name = (self.args.metric_for_best_model or "mrr").removeprefix("eval_")
        objective = compute_objective or (lambda metrics: metrics[f"eval_{name}"])
        return super().hyperparameter_search(hp_space, objective, n_trials, direction or "maximize", **kwargs)

    def _split_of(self, queries, key: str | None, codebase: Corpora, name: str) -> Split:
        """Returns queries with their corpus and right answers; a UserError where a query has none."""
        corpora = self.codebase if codebase is None else as_row_sets(codebase, "codebase")
        return evaluation_split(queries, corpora, key, name)

    def embed_rows(self, rows: Dataset, side: str) -> Tensor:
        """Returns embeddings Tensor[n, d] of one side of `rows`, comparable by dot product; each process has all."""
        self._use_averaged_weights()
        # FSDP and DeepSpeed place the model when training begins; until then it would be slow where it is.
        unplaced = self.model.device.type == "cpu" and self.args.device.type != "cpu"
        if unplaced:
            self.model.to(self.args.device)
        with self.accelerator.autocast():
            encoder = Encoder(self.model, self.processing_class, self.encoder)
            label = None if self.args.disable_tqdm else f"Encoding {side}"
            tokens = self._tokens(rows, side)
            size = self.args.per_device_eval_batch_size
            embeddings = embed_sharded(encoder, tokens, side, size, label)
        if unplaced:
            self.model.to("cpu")
        return comparable(self.encoder, embeddings)

    def _use_averaged_weights(self) -> None:
        """Switches the model to the weights for evaluation, since schedule-free optimizers hold two sets."""
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()

    def _tokens(self, rows: Dataset, side: str) -> TokenColumn | GraphColumn:
        """Returns the tokens of one side of `rows`; the main process prepares them, the others read its cache."""
        with self.args.main_process_first(desc=f"tokenising {side}"):
            return column_of(rows, side, self.encoder, self.processing_class)

    # ---- Saving ----

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        """Saves a complete folder; a checkpoint saves an adapter separately."""
        if self.args.should_save:
            merge = getattr(self.args, "merge_lora", False) and not self._is_saving_checkpoint
            self._export(output_dir or self.args.output_dir, state_dict, merge)

    def _export(self, folder: str | Path, state_dict=None, merge: bool = False) -> None:
        """Writes encoder, tokenizer, profile, files of sentence-transformers and `training_args.json`."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        profile = self.encoder.replace(matryoshka_dims=self.plan.dims)
        with reporting_disk_errors(folder):
            export_encoder(model, self.processing_class, profile, folder, state_dict, merge=merge)
            settings = json.dumps(self.args.to_dict(), indent=2, default=str)
            write_text(Path(folder) / "training_args.json", settings + "\n")

    def _save_checkpoint(self, model, trial) -> None:
        """Saves a checkpoint unless the last loss was not finite, then deletes older ones."""
        if self._guard is not None:
            self._guard.check()
        run = self._get_output_dir(trial)
        folder = self._checkpoint_folder(run)
        limit = self.args.save_total_limit
        self.args.save_total_limit = None
        self._is_saving_checkpoint = True
        try:
            with saving_checkpoint(folder):
                super()._save_checkpoint(model, trial)
        finally:
            self._is_saving_checkpoint = False
            self.args.save_total_limit = limit
        distributed.barrier()
        if self.args.should_save:
            mark_complete(folder, self.identity)
            rotate_checkpoints(run, limit, self.state.best_model_checkpoint, use_mtime=True)

    def _checkpoint_folder(self, run: str) -> Path:
        """Returns the folder of this step's checkpoint."""
        return Path(run) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """Loads the weights of a checkpoint; `Trainer` knows adapters in a `PeftModel` only."""
        if has_adapter(self.model) and not self.is_fsdp_enabled:
            self._load_adapter(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Loads the weights of the best checkpoint."""
        if has_adapter(self.model) and not self.is_fsdp_enabled and not self.is_deepspeed_enabled:
            self._load_adapter(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _load_adapter(self, checkpoint: str) -> None:
        """Loads the adapter of a checkpoint, or raises `UserError` if it does not fit."""
        set_adapter_state(self.model, load_file(Path(checkpoint) / ADAPTER_WEIGHTS), checkpoint)

    def call_model_init(self, trial=None):
        """Makes the encoder of a trial, unwrapped if it is a `PeftModel`."""
        return plain_encoder(super().call_model_init(trial))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the encoder as a complete folder; only `push_to_hub` pushes it."""
        super().save_model(output_dir, _internal_call=True)

    # ---- The Hub ----

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Makes sure, before training, that the result can be pushed, or raises `UserError`."""
        if self.is_world_process_zero():
            self._publisher = Publisher(self.args)
            self.hub_model_id = self._publisher.hub_model_id

    def push_to_hub(self, commit_message: str | None = "End of training", **kwargs) -> str | None:
        """Saves the encoder with its card and pushes it; returns the commit's address, None off the main process."""
        if self.hub_model_id is None:
            self.init_hf_repo()
        self.save_model()
        if not self.is_world_process_zero():
            return None
        if self.writes_card:
            self.create_model_card()
        return self._publisher.conclude(commit_message)

    def create_model_card(self) -> Path | None:
        """Writes the card of the training into the output folder; returns its path, None if that fails."""
        rows = {"train": self.train_dataset, "valid": self.eval_dataset, "codebase": self.codebase}
        final_step = summary.best_step(self.args, self.state) or self.state.global_step
        record = self.describe() | {
            "base_model": self.model.config._name_or_path or None,
            "results": summary.measured_results(self.evaluations, final_step, merged=bool(self.merging)),
            **summary.rows_table(rows, self.encoder, self.processing_class),
        }
        return write_model_card(self.args.output_dir, record)

    def describe(self) -> dict:
        """Returns the parts of a record that the trainer decides: loss, training and environment."""
        record = {
            "model_id": self.hub_model_id,
            "loss": summary.loss_table(self.plan, self.estimator),
            "training": self._setup_table() | summary.course_table(self.args, self.state),
            "environment": environment(),
        }
        if self.merging:
            record["merging"] = self.merging
        return record

    def _setup_table(self) -> dict[str, object]:
        return summary.setup_table(self.args, self.plan, self.model, self.precision)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes a checkpoint in the background, as `hub_strategy` says."""
        if self.is_world_process_zero():
            self._publisher.push_checkpoint(checkpoint_folder, self.state.global_step)

    def _finish_current_push(self) -> None:
        """Waits for the push that is under way."""
        if self.hub_model_id is not None and self.is_world_process_zero():
            self._publisher.finish()
