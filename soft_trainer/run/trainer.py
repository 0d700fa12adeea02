"""Keeps the book of a run: its plan, its folder and checkpoints, what it depends on, its log and its results.

`SoftInfoNCETrainer` in `trainer.py` computes. `RunTrainer` decides whether a run starts, continues or is done, and
records what comes out. `train` calls these methods in this order; `transformers.Trainer` runs the loop around them:

    opened                                     locks the folder, and finds the checkpoint to continue from
    _hp_search_setup -> _prepare_training      resolves the plan again if settings have changed, compares the run
                                               fingerprint with the checkpoint's, prepares the rows
    set_initial_training_values                the number of epochs, none after an early stop
    training_step, log, evaluate
    _save_checkpoint                           saves a checkpoint, marks it complete (`run/folder.py`) and pushes it
                                               (`hub/background.py`), also after Ctrl-C, SIGTERM, or by time
                                               (`run/interruption.py`)
    save_model, create_model_card              write the encoder and its card
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import signal
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, TrainOutput
from transformers.utils import logging

from soft_trainer.criterion import Criterion
from soft_trainer.data.holdout import warn_of_overlap
from soft_trainer.data.tokens import SIDES
from soft_trainer.encoders.adapters import has_adapter, set_adapter_state
from soft_trainer.encoders.attention import running
from soft_trainer.encoders.encoding import Encoder, collator_of, prompt_length
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import load_model
from soft_trainer.encoders.packing import Passes
from soft_trainer.encoders.passes import decide_passes
from soft_trainer.errors import NotFiniteError, UserError
from soft_trainer.estimators.base import Estimator
from soft_trainer.estimators.callback import EstimatorCallback, find_estimator_callback, with_estimators
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.hub.background import Publisher
from soft_trainer.options.defaults import estimator_name
from soft_trainer.options.resolve import FALLING
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.run import interruption, preflight
from soft_trainer.run.fingerprint import MEASURED_ROWS, TRAINING_ROWS, loaded_fingerprint, run_fingerprint, splits_hash
from soft_trainer.run.folder import (
    OutputFolder,
    best_checkpoint,
    compared,
    has_finite_weights,
    mark_complete,
    saving_checkpoint,
)
from soft_trainer.run.measurements import Measurements
from soft_trainer.run.merge_callback import MergeCallback
from soft_trainer.run.model_card import write_model_card
from soft_trainer.run.ongoing import Training
from soft_trainer.run.record import evaluated_results, loss_table, setup_table, trainer_record
from soft_trainer.run.reporting import banner, show_progress, warnings_of
from soft_trainer.run.setup import RunDetails, Setup
from soft_trainer.system import distributed
from soft_trainer.system.files import ADAPTER_WEIGHTS, PROFILE_FILE, reporting_disk_errors, write_text
from soft_trainer.system.terminal import print_on_main
from soft_trainer.training.batches import Batch
from soft_trainer.training.collator import PairCollator, pieces_of

logger = logging.get_logger(__name__)

# The logged number of known positives among a batch's other functions, by what `false_negatives` does with them.
FALSE_NEGATIVES = {"mask": "false_negatives_masked", "positives": "extra_positives"}


class RunTrainer(Trainer):
    """A `Trainer` whose run has a plan and a folder, can be interrupted and continued, and is recorded.

    It saves folders for `AutoModel` and sentence-transformers, and pushes only complete folders. A subclass computes:
    `prepare_rows`, `predict`, `predict_sets`, `metrics_of`, `embed_rows`, `use_averaged_weights`, and what
    `transformers.Trainer` calls.

    Args:
        setup: what the run starts from.
        details: what a script knows about the run.
        data_collator: the user's data collator, or None.
        kwargs: further arguments of `transformers.Trainer`.

    Attributes:
        starting: the encoder before training.
        encoder: the profile of the encoder.
        train_split: the training rows, or None.
        plan: the checked settings.
        passes: how forward passes run.
        folder: the output folder.
        ongoing: what belongs to the current call of `train`.
        evaluations: for each evaluation, its step, whether it ran during training, and its metrics.
        report: the results of the last training, if `args.report` is set.
    """

    def __init__(self, setup: Setup, details: RunDetails, data_collator=None, **kwargs):
        args = setup.args
        split = setup.train_split
        sets = setup.eval_dataset
        if details.measured is None and sets is not None:
            details = dataclasses.replace(details, measured=sets if isinstance(sets, Mapping) else {"eval": sets})
        self.details = details
        self._content_before: dict[str, object] = {}
        if getattr(args, "report", False) and not details.options:
            self._content_before = setup.starting.fingerprint()
        model, tokenizer = setup.load()
        overwrite = getattr(args, "overwrite", False)
        self.folder = OutputFolder(
            args.output_dir, split is not None, overwrite, getattr(args, "from_command_line", False)
        )
        self.starting = setup.starting
        self.encoder = setup.encoder
        self.train_split = split
        self.plan = setup.plan
        self.passes = Passes()
        self._passes_of = None  # the model and the settings that `passes` is about
        self._collates = data_collator is None
        super().__init__(
            model=None if "model_init" in kwargs else model,
            args=args,
            data_collator=data_collator,
            train_dataset=None if split is None else split.to_pairs(),
            eval_dataset=sets,
            processing_class=tokenizer,
            callbacks=setup.callbacks,
            **kwargs,
        )
        self._resolved = self._settings()
        self._use_plan()
        self.ongoing = Training()
        self.evaluations: list[tuple[int, bool, dict]] = []
        self.report: Measurements | None = None
        self._parameters: int | None = None  # counted once, because this takes 5 ms
        self._merging = MergeCallback(self)
        self.add_callback(self._merging)
        self.add_callback(self.folder)
        show_progress(self)

    # ---- The plan ----

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
            self.data_collator = PairCollator(
                collator_of(self.text_encoder, self.args.device),
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

    # ---- Before the first step, and after the last ----

    def train(self, resume_from_checkpoint: str | bool | None = None, trial=None, **kwargs):
        """Prints a summary of the settings, then trains the encoder.

        Args:
            resume_from_checkpoint: the folder of a checkpoint, or "last" or True for the newest complete checkpoint
                in `output_dir`. By default, `args.resume_from_checkpoint`.
            trial, kwargs: the other arguments of `Trainer.train`.

        Raises:
            UserError: the settings and the data are incompatible, or the checkpoint is from another run.
            NotFiniteError: the loss, the gradient or a weight became NaN or infinite.
            SystemExit: SIGTERM or SIGUSR1 stopped training after a checkpoint was saved. The code is 143.
            KeyboardInterrupt: Ctrl-C stopped training, after a checkpoint was saved, or at once if it was pressed
                twice. The message says how to continue.
        """
        self.evaluations = [each for each in self.evaluations if each[0] == 0]  # drops evaluations of an earlier run
        reports = getattr(self.args, "report", False) and trial is None
        with interruption.explaining_interruption(self.args, lambda: self.state.global_step):
            if self.train_split is None:
                raise UserError("train_dataset is missing: pass the training rows")
            if reports and self.details.measured is None:
                raise UserError("report=True: pass eval_dataset=, which is measured before and after training")
            with self.opened(resume_from_checkpoint) as folder:
                if folder.done:
                    # An earlier process has trained the encoder.
                    code = self.starting.trust_remote_code
                    model = load_model(self.args.output_dir, self.encoder, trust_remote_code=code)
                    self.model = self.model_wrapped = model.to(self.args.device)
                    print_on_main(f"{self.args.output_dir}: already done; --overwrite true trains again")
                    return TrainOutput(0, 0.0, {})
                if folder.checkpoint is None and trial is None:
                    warn_of_overlap(self.details.measured or {}, self.train_split)
                if not reports:
                    self.report = None
                elif self.report is None or folder.checkpoint is None or self.state.global_step == 0:
                    self.report = Measurements(self)
                output = self._train(folder.checkpoint, trial, **kwargs)
                if reports:
                    folder.take_encoder(self)
                    self.report.measure("trained", self.args.lexical)
                    self.report.finish()
        return output

    def _train(self, checkpoint: str | None, trial, **kwargs) -> TrainOutput:
        """Trains, from a checkpoint if there is one. After a signal to stop, saves the last step and raises."""
        if checkpoint:
            print_on_main(f"Resuming from {checkpoint}")
        self.ongoing = Training(checkpoint)
        self.ongoing.contexts.callback(setattr, self.args, "save_total_limit", self.args.save_total_limit)
        try:
            with self.ongoing.contexts:
                output = super().train(checkpoint, trial, **kwargs)
            if self.hub_model_id is not None and self.is_world_process_zero():
                self._publisher.finish()
            if received := self.ongoing.stopping.signal:
                step = self.state.global_step
                remedy = interruption.how_to_continue(self.args, step)
                if received == signal.SIGINT:
                    raise KeyboardInterrupt(f"interrupted at step {step}: {remedy}")
                print_on_main(f"stopped by {signal.Signals(received).name} at step {step}: {remedy}")
                raise SystemExit(143)
        finally:
            self.ongoing = Training()
        return output._replace(training_loss=output.metrics["train_loss"])

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
        return self.folder.opened(self.fingerprint, resume)

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
            self.folder.fingerprint = compared(self.fingerprint, None)
            self.report = Measurements(self)
            self.report.measure(system, getattr(self.args, "lexical", True), top_k)
            finish(self.report)
        return self.report

    def hyperparameter_search(self, hp_space=None, compute_objective=None, n_trials=20, direction=None, **kwargs):
        """Searches hyperparameters as `Trainer` does. Maximises `metric_for_best_model`, or MRR if that is not set."""
        name = (self.args.metric_for_best_model or "mrr").removeprefix("eval_")
        objective = compute_objective or (lambda metrics: metrics[f"eval_{name}"])
        return super().hyperparameter_search(hp_space, objective, n_trials, direction or "maximize", **kwargs)

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
        # Compare before preparing the rows, which may take hours.
        self.folder.fingerprint = compared(self.fingerprint, checkpoint)
        preflight.check_evaluated(self.args, self.eval_dataset, bool(self.early_stops))
        if self.compute_metrics is not None:
            preflight.check_metric(self.args, self.evaluated_dims, self.eval_dataset, self._metrics_of_three)
        kind = self.accelerator.distributed_type.value
        table = banner(loss_table(self), setup_table(self), self.encoder, kind)
        print_on_main("\n".join([table, *warnings_of(self)]))
        self.prepare_rows()
        if self.report is not None and not any("untrained" in each for each in self.report.outputs.values()):
            self.report.measure("untrained")

    def _metrics_of_three(self) -> dict[str, float]:
        """Evaluates the first three rows of each evaluation set."""
        if isinstance(self.eval_dataset, Mapping):
            return self.metrics_of({name: split.first(3) for name, split in self.eval_dataset.items()}, "eval")
        return self.metrics_of(self.eval_dataset.first(3), "eval")

    def set_initial_training_values(self, args, dataloader) -> tuple:
        """Returns the lengths of training. After an early stop or the last step at the checkpoint, no epoch remains.

        `Trainer` would take another step if the last one did not end an epoch.
        With `auto_find_batch_size`, each attempt begins here.
        """
        epochs, *others = super().set_initial_training_values(args, dataloader)
        if self.ongoing.stopped_early:
            print_on_main("early stopping has ended this training")
        elif self.ongoing.step < others[-1]:
            return epochs, *others
        self.ongoing.contexts.callback(lambda: setattr(self.state, "num_train_epochs", epochs))
        return 0, *others

    # ---- What the run depends on ----

    def fingerprint(self) -> dict[str, object]:
        """Returns everything that the results depend on."""
        found = run_fingerprint(*self.details.options, self.args)
        found |= self._content_before
        found.pop("do_train", None)  # in Python, the rows decide
        if self.train_split is not None:
            found |= {TRAINING_ROWS: self.train_split.fingerprint(), "do_train": True}
        measured = self.details.measured
        if measured is not None:
            # The followed sets are named after their folders, which may be renamed.
            followed = self.details.followed
            own = {name: split for name, split in measured.items() if name not in followed}
            found[MEASURED_ROWS] = splits_hash(own | dict(enumerate(measured[name] for name in followed)))
        collator = None if self._collates else self.data_collator
        return found | loaded_fingerprint(
            self.model,
            self.processing_class,
            self.encoder,
            self.criterion,
            estimator=self.estimator,
            collator=collator,
        )

    @property
    def run_fingerprint(self) -> Mapping:
        """Everything that the results of the current training depend on, on the main process only."""
        return self.folder.fingerprint

    @property
    def early_stops(self) -> list[EarlyStoppingCallback]:
        """The callbacks that may stop training early because of a metric."""
        return [each for each in self.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]

    @property
    def metrics_choose(self) -> bool:
        """True if evaluations choose the final weights or the learning rate."""
        return bool(self.early_stops) or self.args.load_best_model_at_end or self.args.lr_scheduler_type in FALLING

    @property
    def merging(self) -> dict | None:
        """The ratio, base and unmerged encoder of the merge after the last training, or None if nothing was merged."""
        return self._merging.record

    # ---- The log ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs metrics. With a training loss, also logs statistics of weights and false negatives."""
        if "loss" in logs:
            self._check_finite("loss", logs["loss"])
            if self.accelerator.mixed_precision != "fp16":
                self._check_finite("gradient's norm", logs.get("grad_norm", 0.0))
            elif self.accelerator.scaler is not None and self.accelerator.scaler.get_scale() < 1:
                # The scaler skips a step whose gradient overflows, and halves the scale. It starts at 65,536.
                logger.warning_once("fp16: the gradients overflow, so steps are skipped; train in bf16 or float32")
            if self.estimator_callback is not None:
                logs |= self.estimator_callback.statistics()
            if self.plan.masks_false_negatives:
                name = FALSE_NEGATIVES[self.plan.options.false_negatives]
                logs[name] = sum(distributed.gather_numbers(self.ongoing.false_negatives))
        if "train_loss" in logs:  # `Trainer` averages only over the steps since a checkpoint was loaded
            if best_checkpoint(self.args, self.state) is None:  # otherwise, its weights are loaded next
                self._check_weights()
            logs["train_loss"] = self.losses(unlogged=0.0) / max(self.state.global_step, 1)
        super().log(logs, start_time)

    def losses(self, unlogged: float) -> float:
        """Returns the sum of the losses of all steps so far. Every process calls this method.

        `Trainer` counts what `training_step` returns, which a subclass may override.

        Args:
            unlogged: the sum of this process's losses that `Trainer` has not added to its total yet.

        Raises:
            NotFiniteError: a loss is NaN or infinite.
        """
        total = self.ongoing.losses_before + fmean(distributed.gather_numbers(self._total_loss_scalar + unlogged))
        self._check_finite("loss", total)
        return total

    def _check_weights(self) -> None:
        """Raises NotFiniteError if a trained weight is NaN or infinite. Every process calls this method."""
        if not has_finite_weights(self.model):
            self._check_finite("weights", math.nan)

    def _check_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise NotFiniteError(
                f"{name}: {value} by step {self.state.global_step}, so training stops without another checkpoint. "
                "Lower the learning rate, or train in bf16 or float32"
            )

    def floating_point_ops(self, inputs: Batch) -> int:
        """Estimates a batch's floating-point operations as 6 x parameters x tokens, including padding tokens."""
        if self._parameters is None:
            self._parameters = self.model.num_parameters(exclude_embeddings=True)
        tokens = sum(inputs_of_pass["input_ids"].numel() for inputs_of_pass in inputs.passes)
        return 6 * tokens * self._parameters

    # ---- Saving, the card and the Hub ----

    def save_encoder(self, folder: str | Path, state_dict=None, merge: bool = False) -> None:
        """Writes the encoder, the tokenizer, the profile, the sentence-transformers files and `training_args.json`."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        profile = self.encoder.replace(matryoshka_dims=self.plan.dims)
        with reporting_disk_errors(folder):
            export_encoder(model, self.processing_class, profile, folder, state_dict, merge=merge)
        self._write_arguments(folder)

    def _write_arguments(self, folder: str | Path) -> None:
        with reporting_disk_errors(folder):
            text = json.dumps(self.args.to_dict(), indent=2, default=str) + "\n"
            write_text(Path(folder) / "training_args.json", text)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the encoder with its tokenizer, profile and model card. Unlike `Trainer.save_model`, never pushes."""
        super().save_model(output_dir, _internal_call=True)
        if _internal_call or not self.is_world_process_zero():
            return
        folder = output_dir or self.args.output_dir
        if getattr(self.args, "model_card", True):
            self.create_model_card(folder)

    def create_model_card(self, folder: str | Path | None = None) -> Path | None:
        """Writes the model card into a folder, by default the output folder. Every process calls this method.

        The card describes the encoder in the folder, so a folder without an encoder gets it too.

        Returns:
            The path of the card on the main process, or None on other processes.
        """
        folder = Path(folder or self.args.output_dir)
        if not (folder / PROFILE_FILE).is_file():
            super().save_model(str(folder), _internal_call=True)
        if not self.is_world_process_zero():
            return None
        return write_model_card(folder, self.record())

    def record(self) -> dict[str, object]:
        """Returns the run's record, which the card, `run.json` and the report are written from (see `model_card`)."""
        report = self.report
        if report is None or report.step != self.state.global_step:
            return trainer_record(self) | {"results": evaluated_results(self, of_training=True)}
        # The report has measured the sets of the evaluations during training.
        results = evaluated_results(self, of_training=False) | report.results
        return trainer_record(self, report.statistics) | {"results": results, "chosen_on": report.chosen_on}

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Checks before training that a push would work, and creates the repository on the Hub if necessary.

        Raises:
            UserError: a push would fail.
        """
        if self.is_world_process_zero():
            self._publisher = Publisher(self.args)
            self.hub_model_id = self._publisher.repository.name

    def push_to_hub(self, commit_message: str | None = "End of training", **kwargs) -> str | None:
        """Saves the encoder with its model card, and pushes the output folder to the Hub.

        Returns:
            The URL of the commit on the main process, or None on other processes.
        """
        if self.hub_model_id is None:
            self.init_hf_repo()
        if not self.folder.done:
            self.save_model()
        if not self.is_world_process_zero():
            return None
        return self._publisher.push(commit_message)

    # ---- Checkpoints ----

    def _load_adapter(self, checkpoint: str) -> None:
        """Loads the adapter of a checkpoint into the model. Raises UserError if the adapter does not fit."""
        set_adapter_state(self.model, load_file(Path(checkpoint) / ADAPTER_WEIGHTS), checkpoint)

    def _best_saved(self, *steps: int) -> tuple[int, float] | tuple[None, None]:
        """Returns the step and the value of the best evaluation of a saved encoder, or (None, None).

        `Trainer` also counts evaluations at steps that were not saved.

        Args:
            steps: the steps to compare with the best checkpoint so far.
        """
        metric = f"eval_{(self.args.metric_for_best_model or '').removeprefix('eval_')}"
        values = {entry["step"]: entry[metric] for entry in self.state.log_history if metric in entry}
        if best := self.state.best_model_checkpoint:
            steps = (int(best.rpartition("-")[2]), *steps)
        choose = max if self.args.greater_is_better else min
        step = choose((step for step in steps if step in values), key=values.get, default=None)
        return step, values.get(step)

    # ---- Private methods of `Trainer`, because no public method and no callback does the same ----

    def _hp_search_setup(self, trial) -> None:
        """Prepares training. No callback runs between the settings of a trial and the weights of a checkpoint."""
        super()._hp_search_setup(trial)
        self._prepare_training()

    def _save_checkpoint(self, model, trial) -> None:
        """Saves a checkpoint, marks it complete and pushes it. No callback knows that all files are written.

        Raises:
            NotFiniteError: a loss or a weight is NaN or infinite, so there is no checkpoint.
        """
        self._check_weights()
        losses = self.losses(self._tr_loss.item() if self.is_in_train else 0.0)  # added when training ends
        step = self.state.global_step
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        self.state.best_global_step, _ = self._best_saved(step)
        strategy = self.args.hub_strategy
        self.args.hub_strategy = HubStrategy.END  # `Trainer` would push its own selection of files
        try:
            with saving_checkpoint(folder):
                super()._save_checkpoint(model, trial)
        finally:
            self.args.hub_strategy = strategy
        distributed.barrier()
        if not folder.is_dir():  # `Trainer` keeps the highest steps, which may be an earlier run's
            return
        if self.args.should_save:
            self._write_arguments(folder)
            mark_complete(folder, self.run_fingerprint, self.args.save_only_model, losses)
        if self.args.push_to_hub and self.is_world_process_zero():
            self._publisher.push_checkpoint(folder, step)

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        """Saves a complete folder. With FSDP and DeepSpeed, only this method gets the weights.

        In a checkpoint, an adapter always stays unmerged, so that a resumed run is exact.
        """
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            merge = getattr(self.args, "merge_lora", False) and not folder.name.startswith(PREFIX_CHECKPOINT_DIR)
            self.save_encoder(folder, state_dict, merge)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """Loads the weights or the adapter of a checkpoint. `Trainer` can load an adapter only into a `PeftModel`."""
        if has_adapter(self.model) and not self.is_fsdp_enabled:
            self._load_adapter(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Loads the weights or the adapter of the best checkpoint, for the same reason."""
        self.state.best_global_step, self.state.best_metric = self._best_saved()
        if has_adapter(self.model) and not self.is_fsdp_enabled and not self.is_deepspeed_enabled:
            self._load_adapter(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()
