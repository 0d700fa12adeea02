"""Defines `SoftInfoNCETrainer`, which trains an encoder on query-code pairs and evaluates it by ranking a corpus.

The constructor resolves the options into a plan and makes the collator. `SoftInfoNCETrainer.train` then calls these
methods in this order. `transformers.Trainer` runs the loop around them:

    _hp_search_setup -> _prepare_training      resolves the plan again if settings have changed, compares the run
                                               fingerprint with the checkpoint's, prepares the rows
    get_train_dataloader                       returns the batches, which data workers build with `TrainBatches`
    training_step                              runs one step on a batch
        _prepare_inputs                        moves the batch to the device, and makes its weights there
        compute_loss                           embeds the texts (packed in one pass, or padded), gathers the functions,
            block_loss                         scores them and calls the criterion
        or _cached_step                        does the same with gradient caching
    evaluate -> predict                        embeds the queries and the corpus, and ranks the corpus for each query
    _save_checkpoint                           saves a checkpoint and marks it complete (`training/output_folder.py`)

Each process handles its shard of a global batch, of the texts to encode, and of the queries to rank, and
`distributed.py` gathers the results. Only the main process prints and checks checkpoints.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    EarlyStoppingCallback,
    EvalPrediction,
    PrinterCallback,
    ProgressCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    SaveStrategy,
    TrainOutput,
    rotate_checkpoints,
    speed_metrics,
)

from soft_trainer import distributed
from soft_trainer.criterion import Criterion
from soft_trainer.data.columns import ColumnNames
from soft_trainer.data.holdout import warn_of_overlap
from soft_trainer.data.load import evaluation_splits, training_split
from soft_trainer.data.split import Split
from soft_trainer.data.tokens import SIDES, GraphColumn, TokenColumn, column_of
from soft_trainer.data.trained_rows import warn_of_trained_pairs
from soft_trainer.encoders.adapters import has_adapter, set_adapter_state
from soft_trainer.encoders.attention import running
from soft_trainer.encoders.encoding import (
    Encoder,
    collator_of,
    comparable,
    embed_sharded,
    encode,
    placed,
    prompt_length,
    score,
)
from soft_trainer.encoders.loading import add_padding_token, load_model, prepare_tokenizer
from soft_trainer.encoders.packing import Passes
from soft_trainer.encoders.passes import decide_passes
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.encoders.static import exclude_unknown_token
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator
from soft_trainer.estimators.callback import EstimatorCallback, find_estimator_callback, with_estimators
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.estimators.registry import estimator_of_run
from soft_trainer.evaluation.retrieval import RetrievalOutput, best_answers, by_corpus, mean_over_sets, rank_corpus
from soft_trainer.files import ADAPTER_WEIGHTS, ROLLING
from soft_trainer.options.defaults import apply_defaults, default_output_dir
from soft_trainer.options.resolve import Plan
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.terminal import print_on_main, shows_bars
from soft_trainer.training import interruption, preflight
from soft_trainer.training.batches import Batch, TrainBatches
from soft_trainer.training.collator import PairCollator, pieces_of
from soft_trainer.training.finite import FiniteGuard, OverflowCounter
from soft_trainer.training.gradient_cache import cached_backward
from soft_trainer.training.measurements import Measurements
from soft_trainer.training.merge_callback import MergeCallback
from soft_trainer.training.ongoing import Training
from soft_trainer.training.output_folder import (
    UNFINISHED,
    OutputFolder,
    check_named,
    compared,
    continued,
    mark_complete,
    remove_rolling,
    saving_checkpoint,
)
from soft_trainer.training.prepared_rows import prepare_rows, train_loader
from soft_trainer.training.record import loss_table, setup_table
from soft_trainer.training.reporting import ProgressLines, QuietBar, banner, warnings_of
from soft_trainer.training.run_fingerprint import (
    MEASURED_ROWS,
    PASSES,
    TRAINING_ROWS,
    choose_by_metrics,
    loaded_fingerprint,
    run_fingerprint,
    splits_hash,
)
from soft_trainer.training.sampler import EpochDataLoader, data_seed
from soft_trainer.training.saving import SavingTrainer
from soft_trainer.training.targets import TargetMaker

# The logged number of known positives among a batch's other functions, by what `false_negatives` does with them.
FALSE_NEGATIVES = {"mask": "false_negatives_masked", "positives": "extra_positives"}
LOSS_BLOCK = 256  # with gradient caching, the scores of at least this many queries are computed at a time


class SoftInfoNCETrainer(SavingTrainer):
    """Fine-tunes a code-search encoder with Soft-InfoNCE (Eq. 3) or one of the paper's other losses.

    Args:
        model: a plain `PreTrainedModel` encoder, so that the saved folder loads with `AutoModel`. It may have an
            adapter (`model.add_adapter`). A `PeftModel` is unwrapped, and so is a `SentenceTransformer` if an
            `EncoderProfile` can describe its modules. A folder or a name on the Hub is loaded with its tokenizer.
        args: `SoftInfoNCETrainingArguments` or plain `transformers.TrainingArguments`. Without an estimator among the
            callbacks, `SoftInfoNCETrainingArguments` select the command line's default estimator, and plain
            `TrainingArguments` train with InfoNCE.
        train_dataset: pairs of a query and a function with the columns that `load_rows` recognises, as a `Dataset`, a
            data frame or a list of dicts, or a `Split` of queries, corpus and judgments. A dict holds several sources;
            each batch comes from one source. The trainer stores the pairs as `train_dataset` and the `Split` as
            `train_split`.
        eval_dataset: pairs as in `train_dataset`, rows with a query and the `url` of its function, a `Split`, or a
            dict of any of these. The trainer converts them to splits.
        codebase: the corpus to rank for the queries, as rows with a `url` and a function, or as a dict with the keys
            of `eval_dataset`. By default, the functions of `eval_dataset`.
        processing_class: the tokenizer. By default, the tokenizer of a model that is passed by name.
        encoder: pooling, score, prompts and maximum lengths. By default, they are inferred from the model. A dict
            changes only some of the inferred settings, such as `{"query_length": 64, "score_scale": 20.0}`.
        data_collator: turns features with `query_ids` and `code_ids` into `{"query": inputs, "code": inputs}`. A
            custom collator works only with a single process.
        callbacks: the trainer's callbacks. An estimator or an `EstimatorCallback` among them supplies the weights.
        query_column, code_column, id_column, negatives_column: the names of the rows' columns, if `load_rows` does not
            recognise them.
        measured: the sets that `train` measures before and after training if `args.report` is set, and `measure`
            without training, keyed by name. By default, `eval_dataset`, called "eval".
        followed: the names of those sets to measure at every evaluation too.
        about: sections of the run's record that the trainer does not know: "dataset", "languages" and "samples".
        options: further dataclass instances with options of the run, such as a command's.
        kwargs: any other arguments of `transformers.Trainer`.

    Raises:
        UserError: the settings and the data are incompatible. This is raised before training begins.
    """

    # InfoNCE is a mean over a batch: without this, accumulation would log a multiple of the loss.
    loss_is_scaled_for_ga = False
    _train_batch_size: int | None = None  # known once `Trainer` has its arguments

    def __init__(
        self,
        model=None,
        args: TrainingArguments | None = None,
        train_dataset: Dataset | Split | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        codebase: Dataset | dict[str, Dataset] | None = None,
        processing_class=None,
        encoder: EncoderProfile | Mapping[str, object] | None = None,
        data_collator=None,
        callbacks=None,
        query_column: str | None = None,
        code_column: str | None = None,
        id_column: str | None = None,
        negatives_column: str | None = None,
        measured: Mapping[str, Split] | None = None,
        followed: Sequence[str] = (),
        about: Mapping[str, object] | None = None,
        options: Sequence = (),
        **kwargs,
    ):
        self.starting = starting = preflight.first_encoder(model, processing_class, encoder, kwargs)
        args = args or SoftInfoNCETrainingArguments()
        self.columns = ColumnNames(query_column, code_column, id_column, negatives_column)
        self.encoder = starting.profile
        self.train_split = split = training_split(train_dataset, "train_dataset", self.columns, self.encoder)
        eval_dataset = evaluation_splits(eval_dataset, codebase, "eval_dataset", self.columns)
        callbacks = with_estimators(callbacks)
        callback = find_estimator_callback(callbacks)
        if isinstance(args, SoftInfoNCETrainingArguments):
            # Another trainer with the same arguments must not get the defaults of this encoder.
            args = copy.copy(args)
            apply_defaults(args, starting, callback and callback.estimator, split is not None, split)
            if callback is None and split is not None:
                chosen = estimator_of_run(args, self.encoder, starting.trust_remote_code, split)
                if chosen is not None:
                    callbacks += with_estimators([chosen])
                    callback = find_estimator_callback(callbacks)
        args.output_dir = args.output_dir or default_output_dir(args, starting.label, about)
        if getattr(args, "early_stopping_patience", None):
            callbacks.append(EarlyStoppingCallback(args.early_stopping_patience))
        self.estimator_callback = callback
        if isinstance(self.estimator, Estimator):
            self.estimator.bind(Encoder(starting.model, starting.tokenizer, self.encoder))
        # Everything that can be checked is checked before the weights are loaded. The plan reads these attributes.
        self.args = args
        self.eval_dataset = eval_dataset
        self.compute_metrics = kwargs.get("compute_metrics")
        starting.check(getattr(args, "merge_lora", False), self.estimator)
        self.plan: Plan = preflight.make_plan(self)
        check_named(args.resume_from_checkpoint)
        self._content_before: dict[str, object] = {}
        if getattr(args, "report", False) and not options:
            self._content_before = starting.fingerprint()
        set_seed(args.seed)
        with args.main_process_first(desc="loading the encoder"):
            first, processing_class = starting.load()
        add_padding_token(processing_class)
        preflight.complete_launch(args, first, self.encoder)
        self.folder = OutputFolder(
            args.output_dir,
            split is not None,
            getattr(args, "overwrite", False),
            getattr(args, "from_command_line", False),
        )
        super().__init__(
            None if "model_init" in kwargs else first,
            args,
            data_collator=data_collator,
            train_dataset=None if split is None else split.to_pairs(),
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            **kwargs,
        )
        self.folder.close()  # `Trainer` has created it
        self.measured = measured
        if measured is None and eval_dataset is not None:
            self.measured = eval_dataset if isinstance(eval_dataset, Mapping) else {"eval": eval_dataset}
        self.followed = followed
        self.about = dict(about or {})
        self.options = options
        self.passes = Passes()
        self._passes_of = None  # the model and the settings that `passes` is about
        self._parameters: int | None = None  # counted once, because this takes 5 ms
        self.codebase = codebase
        prepare_tokenizer(processing_class, self.encoder)
        self._collates = data_collator is None
        self.ongoing = Training(self.train_dataset)
        self.evaluations: list[tuple[int, bool, dict]] = []  # step, whether during training, metrics
        self.report: Measurements | None = None  # the results of the last training, if `args.report` is set
        self.run_fingerprint = {}
        self._merging = MergeCallback(self)
        self.add_callback(self._merging)
        self.add_callback(self.folder)
        self._overflows: OverflowCounter | None = None
        if self.accelerator.scaler:
            self._overflows = OverflowCounter(lambda: self.accelerator.scaler)
            self.add_callback(self._overflows)
        self._show_progress()
        self._resolved = self._settings()
        self._use_plan()

    def _show_progress(self) -> None:
        """Adds progress lines, above the bar if there is a terminal. Notebooks keep the table of `transformers`."""
        shown = self.pop_callback(ProgressCallback)
        if self.args.disable_tqdm or not shows_bars():
            self.remove_callback(PrinterCallback)
        elif shown is None:
            return
        else:
            self.add_callback(QuietBar)
        if self.args.world_size == 1:
            self.add_callback(ProgressLines(lambda: self.ongoing.guard.mean_loss()))
        else:
            self.add_callback(ProgressLines())  # the guard knows only this process's losses

    def _bind_estimator(self) -> None:
        """Passes the encoder to the estimator, whose default settings may depend on the encoder."""
        if isinstance(self.estimator, Estimator):
            self.estimator.bind(self.text_encoder)

    def add_callback(self, callback) -> None:
        """Adds a callback. An estimator or an `EstimatorCallback` supplies the weights from now on."""
        (callback,) = with_estimators([callback])
        super().add_callback(callback)
        if isinstance(callback, EstimatorCallback):
            self.estimator_callback = find_estimator_callback({self.estimator_callback, callback})
            self._bind_estimator()
            self.resolve()

    # ---- Settings ----

    def resolve(self) -> None:
        """Derives the training plan from the current `args`, unless nothing has changed since the last time.

        Raises:
            UserError: the settings are incompatible.
        """
        if not self.args.auto_find_batch_size:  # otherwise, `Trainer` may have found a smaller one
            self._train_batch_size = self.args.train_batch_size
        if self._settings() != self._resolved:
            self.plan = preflight.make_plan(self)
            self._use_plan()
            self._resolved = self._settings()

    def _settings(self) -> tuple:
        """Returns everything that the plan and its checks depend on and that may change after the constructor."""
        return dict(vars(self.args)), self._train_batch_size, self.estimator, self.model

    def _use_plan(self) -> None:
        """Makes the collator that the plan needs, and checks the plan against the rows and the encoder."""
        exclude_unknown_token(self.model, self.processing_class)
        self._decide_passes()
        prompts = {side: prompt_length(self.processing_class, self.encoder, side) for side in SIDES}
        if self._collates:
            self.data_collator = PairCollator(
                collator_of(self.passes, self.processing_class.pad_token_id, self.args.device),
                {side: self.encoder.max_tokens(side) for side in SIDES},
                prompts,
                self.plan.options.gradient_cache_chunk_size,
                pieces_of(self.passes, self.args.device, self.model),
            )
        else:
            preflight.check_own_collator(self.plan, prompts)
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
    def estimator(self):
        """The estimator that supplies the weights, or None."""
        if self.estimator_callback is None:
            return None
        return self.estimator_callback.estimator

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

    # ---- Batches ----

    def get_train_dataloader(self) -> EpochDataLoader:
        """Returns the training data loader. Each process's data workers collate its shard of each global batch."""
        self.resolve()  # `auto_find_batch_size` may have made the batches smaller
        batches = self._train_batches()
        return train_loader(batches, self.ongoing.prepared, self.plan, self.args, self.train_split)

    def prepare_rows(self) -> None:
        """Fits the estimator, then finds hard negatives and similar pairs. Runs before a checkpoint is loaded."""
        if self.estimator is not None:
            if isinstance(self.estimator, Estimator):
                self.estimator.packing = getattr(self.args, "packing", "auto")
            self.estimator_callback.fit(self.train_split)
        seed = data_seed(self.args)
        self.ongoing.prepared = prepare_rows(self.train_split, self.plan, self.estimator, self.encoder, seed)

    def _train_batches(self) -> TrainBatches:
        """Returns the data set that data workers build training batches from: tokens, judgments and similarities."""
        if self.ongoing.prepared is None:
            self.prepare_rows()
        split = self.train_split
        maker = self.target_maker
        if not self.criterion.needs_similarity or not getattr(self.estimator, "in_workers", False):
            # Workers that cannot ask the estimator must not pickle it. `_prepare_inputs` asks it once per step.
            maker = dataclasses.replace(maker, estimator=None)
        rank, world_size = distributed.rank_and_world_size()
        return TrainBatches(
            {"query": self._tokens(split.queries, "query"), "code": self._tokens(split.corpus, "code")},
            split.judgments.pairs(),
            self.data_collator,
            maker,
            gather=self.plan.gathers,
            hard_negatives=self.ongoing.prepared.negatives,
            rank=rank,
            world_size=world_size,
        )

    @property
    def target_maker(self) -> TargetMaker:
        """The object that computes a batch's positives, negatives and weights. Requires the prepared rows."""
        rows = self.ongoing.prepared
        false_negatives = self.plan.options.false_negatives
        relevant = None if false_negatives == "ignore" else rows.answers
        keeps = false_negatives == "positives"
        sends_float32 = self.args.device.type != "cpu"
        return TargetMaker(self.criterion, self.estimator, relevant, keeps, rows.without_query, sends_float32)

    # ---- The step ----

    def training_step(self, model, inputs: Batch, num_items_in_batch=None) -> Tensor:
        """Runs a training step, with gradient caching if planned, and checks that the loss is finite."""
        self.ongoing.false_negatives += inputs.false_negatives
        chunk_size = self.plan.options.gradient_cache_chunk_size
        with interruption.explaining_out_of_memory(self.args, chunk_size, len(inputs.rows), len(inputs.codes)):
            if chunk_size is None:
                loss = super().training_step(model, inputs, num_items_in_batch)
            else:
                loss = self._cached_step(model, inputs)
        self.ongoing.guard.watch(self.state.global_step + 1, loss, inputs.rows)
        return loss

    def compute_loss(self, model, batch: Batch, return_outputs=False, num_items_in_batch=None):
        """Returns the loss of this process's queries, scaled by `Batch.loss_scale` for averaging over processes."""
        queries, codes = self.embeddings(model, batch)
        gathered = codes
        if self.plan.gathers:
            gathered = distributed.gather_with_gradient(codes, batch.code_sizes)
        loss = self.block_loss(queries, gathered, batch, slice(None))
        if return_outputs:
            return loss, {"query": queries, "code": codes}
        return loss

    def embeddings(self, model, batch: Batch) -> tuple[Tensor, Tensor]:
        """Embeds the queries and the functions of a batch. Returns Tensor[B, d] and Tensor[C, d]."""
        # Several passes share the weights in half precision.
        with self.accelerator.autocast() if len(batch.passes) > 1 else contextlib.nullcontext():
            embeddings = torch.cat([encode(model, self.encoder, inputs) for inputs in batch.passes])
        return embeddings.index_select(0, batch.queries), embeddings.index_select(0, batch.codes)

    def block_loss(self, queries: Tensor, codes: Tensor, batch: Batch, block: slice) -> Tensor:
        """Returns the loss of one block of this process's queries against the functions of the batch.

        Args:
            queries: Tensor[B, d], this process's queries.
            codes: Tensor[N, d], the functions of all processes, or of this process if the plan does not gather
                functions.
            batch: the batch, on the device of the embeddings.
            block: the rows of `queries` to compute the loss of.
        """
        targets = batch.targets[block]
        if not len(targets):
            return 0.0 * (queries.sum() + codes.sum())  # other processes wait for this one's backward pass
        local = queries[block]
        scores = [score(self.encoder, local, codes, dim=dim) for dim in self.plan.dims or (None,)]
        if targets.weights is not None and not block.start:  # the first block is enough for the log
            self.estimator_callback.observe(targets, scores[0], self.criterion.floor)
        loss = sum(self.criterion(each, targets) for each in scores)
        # DDP averages gradients over processes. With this factor, the average is the gradient of the global batch.
        return loss * batch.loss_scale(len(targets))

    def _cached_step(self, model, inputs: Batch) -> Tensor:
        """Runs the forward and backward pass of one step with gradient caching, and returns the loss."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        accumulated = self.current_gradient_accumulation_steps
        loss = cached_backward(
            lambda of_pass: encode(model, self.encoder, of_pass),
            inputs,
            lambda queries, codes, block: self.block_loss(queries, codes, inputs, block) / accumulated,
            self.accelerator.backward,
            self.plan.gathers,
            block_size=max(self.plan.options.gradient_cache_chunk_size, LOSS_BLOCK),
            no_sync=lambda: self.accelerator.no_sync(model),
        )
        return loss.to(self.args.device)

    def floating_point_ops(self, inputs: Batch) -> int:
        """Estimates a batch's floating-point operations as 6 x parameters x tokens, including padding tokens."""
        if self._parameters is None:
            self._parameters = self.model.num_parameters(exclude_embeddings=True)
        return 6 * inputs.count_tokens(padding=True) * self._parameters

    def _add_new_tokens(self) -> None:
        """Adds the tokens of all processes to the trainer's count. In every step, that would wait for the device."""
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += sum(distributed.gather_numbers(self.ongoing.new_tokens))
            self.ongoing.new_tokens = 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs metrics. With a training loss, also logs statistics of weights, false negatives and fp16 overflows."""
        if "loss" in logs or "train_loss" in logs:  # every process logs these
            self._add_new_tokens()
        if "loss" in logs:
            if self.estimator_callback is not None:
                logs |= self.estimator_callback.statistics()
            if self.plan.masks_false_negatives:
                name = FALSE_NEGATIVES[self.plan.options.false_negatives]
                logs[name] = sum(distributed.gather_numbers(self.ongoing.false_negatives))
            if self._overflows is not None:
                logs["fp16_overflows"] = self._overflows.count
        if "train_loss" in logs:  # `Trainer` averages only over the steps since a checkpoint was loaded
            logs["train_loss"] = self.losses(unlogged=0.0) / max(self.state.global_step, 1)
        super().log(logs, start_time)

    # ---- Before the first step, and after the last ----

    def train(self, resume_from_checkpoint: str | bool | None = None, trial=None, **kwargs):
        """Prints a summary of the settings, then trains the encoder.

        Args:
            resume_from_checkpoint: the folder of a checkpoint, or "last" or True for the newest complete checkpoint
                in `output_dir`. By default, `args.resume_from_checkpoint`.
            trial, kwargs: the other arguments of `Trainer.train`.

        Raises:
            UserError: the settings and the data are incompatible, or the checkpoint is from another run.
            NotFiniteError: the loss became NaN or infinite.
            SystemExit: SIGTERM stopped training after a checkpoint was saved. The code is 143.
            KeyboardInterrupt: Ctrl-C stopped training, after a checkpoint was saved, or at once if it was pressed
                twice. The message says how to continue.
        """
        self.evaluations = [each for each in self.evaluations if each[0] == 0]  # drops evaluations of an earlier run
        reports = getattr(self.args, "report", False) and trial is None
        with interruption.explaining_interruption(self.args, lambda: self.state.global_step):
            if self.train_split is None:
                raise UserError("train_dataset is missing: pass the training rows")
            if reports and self.measured is None:
                raise UserError("report=True: pass eval_dataset=, which is measured before and after training")
            with self.opened(resume_from_checkpoint) as folder:
                if folder.done:
                    # An earlier process has trained the encoder.
                    code = self.starting.trust_remote_code
                    model = load_model(self.args.output_dir, self.encoder, trust_remote_code=code)
                    self.model = self.model_wrapped = model.to(self.args.device)
                    print_on_main(f"{self.args.output_dir}: already done; overwrite=true trains again")
                    return TrainOutput(0, 0.0, {})
                if not reports:
                    self.report = None
                elif self.report is None or folder.checkpoint is None or self.state.global_step == 0:
                    warn_of_overlap(self.measured, self.train_split)
                    self.report = Measurements(self)
                output = self._train(folder.checkpoint, trial, **kwargs)
                if reports:
                    folder.save_encoder(self)
                    self.report.measure("trained", self.args.lexical)
                    self.report.finish()
        return output

    def opened(
        self, resume_from_checkpoint: str | bool | None = None
    ) -> contextlib.AbstractContextManager[OutputFolder]:
        """Opens the output folder for this run during a `with` block; see `OutputFolder.opened`.

        `train` and `measure` open it themselves. A script that writes other files to it opens it around both.
        """
        if self.folder.refuses:  # it compares the run; in a trial, there is no model yet
            self._bind_estimator()
            self.resolve()
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        self.folder.path = Path(self.args.output_dir)
        return self.folder.opened(self.fingerprint, resume, (*self.options, self.args))

    def measure(self, system: str = "untrained", finish=Measurements.finish, top_k: int = 10) -> Measurements:
        """Ranks the measured sets without training, and writes ranks and results to the output folder.

        Args:
            system: what the encoder is called in the results, "untrained" or "trained".
            finish: what to do with the measurements while the folder is open. By default, writes and prints them.
            top_k: the number of top functions to keep for each query.
        """
        with interruption.explaining_interruption(self.args, lambda: 0), self.opened():
            if self.folder.holds_training:
                raise UserError(
                    f"output_dir={self.folder.path}: measure() would replace the results of a training run; use "
                    "predict or evaluate, or a trainer with another output_dir"
                )
            self.run_fingerprint = compared(self.fingerprint, None)
            self.report = Measurements(self)
            if self.starting.name:
                warn_of_trained_pairs(self.measured, self.starting.name, self.encoder)
            self.report.measure(system, self.args.lexical, top_k)
            finish(self.report)
        return self.report

    def _train(self, checkpoint: str | None, trial, **kwargs) -> TrainOutput:
        """Trains, from a checkpoint if there is one. After Ctrl-C or SIGTERM, saves the last step and raises."""
        if checkpoint:
            print_on_main(f"Resuming from {checkpoint}")
        self.ongoing = Training(self.train_dataset, checkpoint)
        self.ongoing.contexts.callback(setattr, self.args, "save_total_limit", self.args.save_total_limit)
        try:
            with self.ongoing.contexts:
                output = super().train(checkpoint, trial, **kwargs)
            if self.hub_model_id is not None and self.is_world_process_zero():
                self._publisher.finish()
            if received := self.ongoing.stopping.signal:
                step = self.state.global_step
                if self.ongoing.stopping.saved_step != step:  # the signal came after that step
                    self.save_rolling_checkpoint()
                remedy = interruption.how_to_continue(self.args, step)
                if received == signal.SIGINT:
                    raise KeyboardInterrupt(f"interrupted at step {step}: {remedy}")
                print_on_main(f"stopped by SIGTERM at step {step}: {remedy}")
                raise SystemExit(143)
        finally:
            self.ongoing = Training(self.train_dataset)
        if self.args.should_save:
            remove_rolling(self.args.output_dir)
        return output._replace(training_loss=output.metrics["train_loss"])

    def set_initial_training_values(self, args, dataloader) -> tuple:
        """Returns the lengths of training. After an early stop or the last step at the checkpoint, no epoch remains.

        `Trainer` would take another step if the last one did not end an epoch.
        With `auto_find_batch_size`, each attempt begins here.
        """
        self.ongoing.guard = FiniteGuard(self.train_dataset)
        epochs, *others = super().set_initial_training_values(args, dataloader)
        if self.ongoing.stopped_early:
            print_on_main("early stopping has ended this training")
        elif self.ongoing.step < others[-1]:
            return epochs, *others
        self.ongoing.contexts.callback(lambda: setattr(self.state, "num_train_epochs", epochs))
        return 0, *others

    def _prepare_training(self) -> None:
        """Checks the settings, compares them with the checkpoint to resume from, if any, and prepares the rows.

        With `report`, also measures the encoder before training.
        """
        stopping = self.ongoing.stopping
        self.add_callback(stopping)
        self.ongoing.contexts.callback(self.remove_callback, stopping)
        self.ongoing.contexts.callback(stopping.restore)
        self._bind_estimator()
        self.resolve()
        self.ongoing.contexts.enter_context(self.running())
        checkpoint = self.ongoing.checkpoint
        if checkpoint and self.state.global_step > 0 and isinstance(self.estimator, InitialModelEstimator):
            raise UserError(
                "estimator=initial_model: this trainer has already trained the encoder; resume with a new trainer"
            )
        self._merging.keep(resumed=checkpoint is not None and self.state.global_step > 0)
        # Compare before preparing the rows, which may take hours, and again once the estimator has loaded its encoder.
        self.run_fingerprint = compared(self.fingerprint, checkpoint)
        preflight.check_evaluated(self.args, self.eval_dataset, bool(self.early_stops))
        kind = self.accelerator.distributed_type.value
        table = banner(self.args, loss_table(self), setup_table(self), self.encoder, kind)
        print_on_main("\n".join([table, *warnings_of(self)]))
        self.prepare_rows()
        fitted = {"the estimator's encoder": getattr(self.estimator, "encoder_identity", None)}
        preflight.warn_of_another_teacher(self.encoder, self.plan.options.teacher, fitted["the estimator's encoder"])
        self.run_fingerprint = continued(compared(lambda: self.run_fingerprint | fitted, checkpoint), checkpoint)
        if self.report is not None and not any("untrained" in each for each in self.report.outputs.values()):
            self.report.measure("untrained")

    @property
    def early_stops(self) -> list[EarlyStoppingCallback]:
        """The callbacks that may stop training early because of a metric."""
        return [each for each in self.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]

    @property
    def metrics_choose(self) -> bool:
        """True if evaluations choose the final weights or the learning rate."""
        return bool(self.early_stops) or choose_by_metrics(self.args)

    def fingerprint(self) -> dict[str, object]:
        """Returns the run fingerprint without the content of an encoder that the estimator loads during fitting."""
        metrics_choose = self.metrics_choose
        found = run_fingerprint(*self.options, self.args, metrics_choose=metrics_choose)
        found |= self._content_before
        found.pop("do_train", None)  # in Python, the rows decide
        if self.train_split is not None:
            found |= {TRAINING_ROWS: self.train_split.fingerprint(), "do_train": True}
        if self.measured is not None:
            # The followed sets are named after their folders, which may be renamed.
            own = {name: split for name, split in self.measured.items() if name not in self.followed}
            found[MEASURED_ROWS] = splits_hash(own | dict(enumerate(self.measured[name] for name in self.followed)))
        found[PASSES] = "packed" if self.passes.packed else "padded"
        if metrics_choose:
            found["the evaluation rows"] = splits_hash(self.eval_dataset)
        return found | loaded_fingerprint(
            self.model,
            self.processing_class,
            self.encoder,
            self.criterion,
            self._merging.before,
            estimator=self.estimator,
            collator=None if self._collates else self.data_collator,
            early_stop=next(iter(self.early_stops), None),
            metrics=self.compute_metrics if metrics_choose else None,
        )

    # ---- Evaluation ----

    def evaluate(
        self,
        eval_dataset=None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        codebase=None,
    ) -> dict[str, float]:
        """Ranks the whole corpus for each query in `eval_dataset`, and returns metrics such as MRR and recall.

        Args:
            eval_dataset: rows with a `url` and a query, a `Split`, or a dict of either. By default, the trainer's
                evaluation rows. A string selects one key of the trainer's evaluation rows.
            codebase: the corpus, or a dict of corpora with the same keys. By default, the trainer's corpus.

        Returns:
            `PREFIX_mrr`, `PREFIX_recall@1` (5, 10), `PREFIX_pool_size` and so on, the same on all processes. If
            `evaluated_dims` contains 256, also `PREFIX_mrr_256`. For a dict of data sets, `PREFIX_KEY_mrr` and so on,
            and the mean over the sets as `PREFIX_mrr`. A corpus that several sets share is encoded once.
        """
        if isinstance(eval_dataset, str):
            eval_dataset = {eval_dataset: self.eval_dataset[eval_dataset]}
        sets = self._splits(self.eval_dataset if eval_dataset is None else eval_dataset, codebase, metric_key_prefix)
        if isinstance(sets, Mapping):
            metrics = {}
            for output in self.predict_sets(sets, metric_key_prefix).values():
                metrics |= output.metrics
            metrics |= mean_over_sets(metrics, metric_key_prefix, tuple(sets))
        else:
            metrics = self.predict(sets, metric_key_prefix=metric_key_prefix).metrics
        self.evaluations.append((self.state.global_step, self.is_in_train, metrics))
        self._add_new_tokens()
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(
        self,
        dataset: Dataset | Split,
        codebase: Dataset | None = None,
        metric_key_prefix: str = "test",
        codes: Tensor | None = None,
        queries: Tensor | None = None,
        top_k: int = 10,
    ) -> RetrievalOutput:
        """Ranks the corpus for each query in `dataset`, and returns ranks and metrics, the same on all processes.

        Args:
            dataset: rows with a `url` and a query, or a `Split`, which has its own corpus.
            codebase: the corpus, as rows with a `url` and a function. By default, the trainer's corpus.
            metric_key_prefix: the first part of each metric's name.
            codes, queries: the results of `embed_rows(codebase, "code")` and `embed_rows(dataset, "query")`, if you
                have already computed them.
            top_k: the number of top functions to return for each query.

        Raises:
            UserError: the corpus is missing, or it lacks a query's relevant function.
        """
        start = time.time()
        split = self._splits(dataset, codebase, metric_key_prefix)
        if queries is None:
            queries = self.embed_rows(split.queries, "query")
        if codes is None:
            codes = self.embed_rows(split.corpus, "code")
        output = rank_corpus(queries, codes, split, self.encoder, self.evaluated_dims, top_k)
        metrics = output.metrics
        if self.compute_metrics is not None:
            predictions = (output.ranks.numpy(force=True), output.top_indices.numpy(force=True))
            metrics |= self.compute_metrics(EvalPrediction(predictions, best_answers(split.judgments)))
        metrics |= speed_metrics("", start, num_samples=len(split.queries))
        prefix = f"{metric_key_prefix}_"  # the user's metrics may have it; speed metrics start with "_"
        metrics = {prefix + key.removeprefix(prefix).lstrip("_"): value for key, value in metrics.items()}
        return dataclasses.replace(output, metrics=metrics)

    def predict_sets(self, sets: Mapping[str, Split], metric_key_prefix: str = "test") -> dict[str, RetrievalOutput]:
        """Ranks the corpus of each split as `predict` does, and encodes a corpus that several splits share only once.

        Args:
            sets: the splits, keyed by name.
            metric_key_prefix: the metrics are called `PREFIX_KEY_mrr` and so on. The runtimes of splits that share a
                corpus exclude its encoding.

        Returns:
            The outputs of `predict`, with the keys of `sets`.
        """
        outputs = {}
        for group in by_corpus(sets):
            codes = None
            if len(group) > 1:
                codes = self.embed_rows(next(iter(group.values())).corpus, "code")
            for key, split in group.items():
                outputs[key] = self.predict(split, metric_key_prefix=f"{metric_key_prefix}_{key}", codes=codes)
        return {key: outputs[key] for key in sets}

    def hyperparameter_search(self, hp_space=None, compute_objective=None, n_trials=20, direction=None, **kwargs):
        """Searches hyperparameters as `Trainer` does. Maximises `metric_for_best_model`, or MRR if that is not set."""
        name = (self.args.metric_for_best_model or "mrr").removeprefix("eval_")
        objective = compute_objective or (lambda metrics: metrics[f"eval_{name}"])
        return super().hyperparameter_search(hp_space, objective, n_trials, direction or "maximize", **kwargs)

    def _splits(self, sets, codebase, name: str) -> Split | dict[str, Split]:
        """Combines queries with a corpus into splits. A `codebase` replaces the corpus of a `Split`."""
        if sets is None:
            raise UserError(f"{name}: no queries; pass eval_dataset= here or to the trainer")
        if codebase is None:
            return evaluation_splits(sets, self.codebase, name, self.columns)
        if isinstance(sets, Split):
            sets = sets.queries
        elif isinstance(sets, Mapping):
            sets = {key: rows.queries if isinstance(rows, Split) else rows for key, rows in sets.items()}
        return evaluation_splits(sets, codebase, name, self.columns)

    def embed_rows(self, rows: Dataset, side: str) -> Tensor:
        """Embeds the queries or functions in `rows`. Returns Tensor[n, d] on every process. `side` is query or code.

        The dot products of the embeddings are the encoder's scores, before multiplication by the score scale.
        """
        self.use_averaged_weights()
        encoder = self.text_encoder
        with placed(self.model, self.args.device), self.running(), self.accelerator.autocast():
            label = None if self.args.disable_tqdm else f"Encoding {side}"
            tokens = self._tokens(rows, side)
            size = self.args.per_device_eval_batch_size
            embeddings = embed_sharded(encoder, tokens, side, size, label)
        return comparable(self.encoder, embeddings)

    def use_averaged_weights(self) -> None:
        """Switches a schedule-free optimizer to its averaged weights, because evaluation uses these weights."""
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()

    def _tokens(self, rows: Dataset, side: str) -> TokenColumn | GraphColumn:
        """Tokenises the queries or functions in `rows`, in one process per machine. The others read the cache."""
        with self.args.main_process_first(desc=f"tokenising {side}"):
            return column_of(rows, side, self.encoder, self.processing_class)

    @property
    def merging(self) -> dict | None:
        """The ratio, base and unmerged encoder of the merge after the last training, or None if nothing was merged."""
        return self._merging.record

    # ---- Checkpoints ----

    def losses(self, unlogged: float) -> float:
        """Returns the sum of the losses of all steps so far. Every process calls this method.

        `Trainer` counts what `training_step` returns, which a subclass may override.

        Args:
            unlogged: the sum of this process's losses that `Trainer` has not added to its total yet.

        Raises:
            NotFiniteError: the loss or the gradient became NaN or infinite.
        """
        self.ongoing.guard.check()
        return self.ongoing.losses_before + fmean(distributed.gather_numbers(self._total_loss_scalar + unlogged))

    def save_rolling_checkpoint(self) -> None:
        """Saves a checkpoint of the current step to the subfolder ROLLING, and removes the previous one.

        It does not count for `save_total_limit`, is never pushed, and has the optimizer's state even with
        `save_only_model`.
        """
        args = self.args
        folder = Path(args.output_dir) / ROLLING
        self.args = copy.copy(args)
        self.args.output_dir = str(folder)
        self.args.save_only_model = False
        self.args.save_strategy = SaveStrategy.NO  # otherwise, `Trainer` might note this folder as the best checkpoint
        self.args.save_total_limit = None
        self.args.push_to_hub = False
        try:
            self._save_checkpoint(self.model_wrapped, None)
        finally:
            self.args = args
        if args.should_save:
            remove_rolling(args.output_dir, keep=folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")

    def _load_adapter(self, checkpoint: str) -> None:
        """Loads the adapter of a checkpoint into the model. Raises UserError if the adapter does not fit."""
        set_adapter_state(self.model, load_file(Path(checkpoint) / ADAPTER_WEIGHTS), checkpoint)

    # ---- Private methods of `Trainer`, because no public method and no callback does the same ----

    def _hp_search_setup(self, trial) -> None:
        """Sets the hyperparameters of a trial, then prepares training.

        No callback runs after the model exists and before a checkpoint is loaded.
        """
        super()._hp_search_setup(trial)
        if trial is not None and getattr(self.args, "origins", None) is not None:
            chosen = trial if isinstance(trial, Mapping) else self.hp_space(trial)
            self.args.origins |= dict.fromkeys(chosen, "trial")
        self._prepare_training()

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """Moves a batch to this process's device, and computes its weights there. `Trainer` expects a mapping."""
        inputs = inputs.to(self.args.device)
        if inputs.has_weights or not self.criterion.needs_similarity or not len(inputs.targets):
            return inputs
        targets = self.target_maker.add_weights(inputs.targets, inputs.query_rows, inputs.code_rows)
        return dataclasses.replace(inputs, targets=targets, has_weights=True)

    def _get_num_items_in_batch(self, batch_samples: list, device) -> None:
        """Returns None, because the loss is a mean over a batch, not over tokens. `Trainer` expects a mapping."""

    def _get_grad_norm(self, model, grad_norm=None):
        """Returns the norm of a step's gradient, and checks that it is finite. With fp16, `OverflowCounter` does.

        No callback gets the norm, and computing it again takes time.
        """
        grad_norm = super()._get_grad_norm(model, grad_norm)
        if self.accelerator.mixed_precision != "fp16":
            self.ongoing.guard.watch_gradient(self.state.global_step + 1, grad_norm)
        return grad_norm

    def _track_num_input_tokens(self, inputs: Batch) -> None:
        """Counts a batch's query and code tokens on this process if `include_num_input_tokens_seen` is set.

        `Trainer` expects a mapping, and gathers the number in every step.
        """
        kind = self.args.include_num_input_tokens_seen
        if kind != "no":
            self.ongoing.new_tokens += inputs.count_tokens(padding=kind != "non_padding")

    def _maybe_log_save_evaluate(self, *args, **kwargs) -> None:
        """Logs, evaluates and saves as `Trainer` does, then saves a rolling checkpoint if one is due.

        No callback runs after the last of these three. After a stop within an epoch, this method does nothing more,
        because a run that was not interrupted would not evaluate there.
        """
        stopping = self.ongoing.stopping
        if stopping.signal:
            return
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if stopping.due(self.args, self.state, self.control):
            self.save_rolling_checkpoint()
            stopping.saved(self.state.global_step)
        if stopping.signal:
            self.control.should_training_stop = True
            self.args.save_total_limit = None  # with a limit of 1, `Trainer` would now keep only the best checkpoint

    def _save_checkpoint(self, model, trial) -> None:
        """Saves a checkpoint unless the last loss was not finite, marks it complete, then deletes old ones.

        `Trainer` would delete old ones (`save_total_limit`) while the new one is incomplete.
        """
        losses = self.losses(self._tr_loss.item() if self.is_in_train else 0.0)  # added when training ends
        self._add_new_tokens()
        run = self._get_output_dir(trial)
        folder = Path(run) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        limit = self.args.save_total_limit
        self.args.save_total_limit = None
        try:
            with saving_checkpoint(folder):
                super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        distributed.barrier()
        if self.args.should_save:
            mark_complete(folder, self.run_fingerprint, self.args.save_only_model, losses)
            rotate_checkpoints(run, limit, self.state.best_model_checkpoint, use_mtime=True)

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        """Saves the encoder, its tokenizer and profile. With FSDP and DeepSpeed, only this method gets the weights.

        In a checkpoint, an adapter always stays unmerged, so that a resumed run is exact.
        """
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            merge = getattr(self.args, "merge_lora", False) and not (folder / UNFINISHED).exists()
            self.export(folder, state_dict, merge)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """Loads the weights or the adapter of a checkpoint. `Trainer` can load an adapter only into a `PeftModel`."""
        if has_adapter(self.model) and not self.is_fsdp_enabled:
            self._load_adapter(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Loads the weights or the adapter of the best checkpoint, for the same reason."""
        if has_adapter(self.model) and not self.is_fsdp_enabled and not self.is_deepspeed_enabled:
            self._load_adapter(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes a checkpoint in the background. `Trainer` would push an incomplete folder itself."""
        if self.is_world_process_zero():
            self._publisher.push_checkpoint(checkpoint_folder, self.state.global_step)
