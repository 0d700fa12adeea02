"""Keeps the book of a run: its folder and checkpoints, what it depends on, its log and its results.

`SoftInfoNCETrainer` in `trainer.py` computes. `RunTrainer` decides whether a run starts, continues or is done, and
records what comes out. `train` calls these methods in this order; `transformers.Trainer` runs the loop around them:

    opened                                     locks the folder, and finds the checkpoint to continue from
    _hp_search_setup -> _prepare_training      resolves the plan again if settings have changed, compares the run
                                               fingerprint with the checkpoint's, prepares the rows
    set_initial_training_values                the number of epochs, none after an early stop
    training_step, log, evaluate
    _save_checkpoint                           saves a checkpoint and marks it complete (`run/folder.py`), also
                                               after Ctrl-C, SIGTERM, or by time (`run/interruption.py`)
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import EarlyStoppingCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from soft_trainer import distributed
from soft_trainer.data.holdout import warn_of_overlap
from soft_trainer.encoders.adapters import has_adapter, set_adapter_state
from soft_trainer.encoders.loading import load_model
from soft_trainer.errors import NotFiniteError, UserError
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.files import ADAPTER_WEIGHTS
from soft_trainer.options.resolve import FALLING
from soft_trainer.run import interruption, preflight
from soft_trainer.run.fingerprint import MEASURED_ROWS, TRAINING_ROWS, loaded_fingerprint, run_fingerprint, splits_hash
from soft_trainer.run.folder import OutputFolder, compared, mark_complete, saving_checkpoint
from soft_trainer.run.measurements import Measurements
from soft_trainer.run.merge_callback import MergeCallback
from soft_trainer.run.ongoing import Training
from soft_trainer.run.record import loss_table, setup_table
from soft_trainer.run.reporting import banner, show_progress, warnings_of
from soft_trainer.run.settings import PlannedTrainer
from soft_trainer.run.setup import RunDetails, Setup
from soft_trainer.terminal import print_on_main
from soft_trainer.training.batches import Batch

# The logged number of known positives among a batch's other functions, by what `false_negatives` does with them.
FALSE_NEGATIVES = {"mask": "false_negatives_masked", "positives": "extra_positives"}


class RunTrainer(PlannedTrainer):
    """A `Trainer` whose run has a folder, can be interrupted and continued, and is recorded.

    A subclass computes: `prepare_rows`, `predict`, `predict_sets`, `metrics_of`, `embed_rows`, `use_averaged_weights`,
    and what `transformers.Trainer` calls.

    Args:
        setup: what the run starts from.
        details: what a script knows about the run.
        kwargs: further arguments of `transformers.Trainer`.

    Attributes:
        folder: the output folder.
        ongoing: what belongs to the current call of `train`.
        evaluations: for each evaluation, its step, whether it ran during training, and its metrics.
        report: the results of the last training, if `args.report` is set.
    """

    def __init__(self, setup: Setup, details: RunDetails, **kwargs):
        args = setup.args
        split = setup.train_split
        sets = setup.eval_dataset
        if details.measured is None and sets is not None:
            details = replace(details, measured=sets if isinstance(sets, Mapping) else {"eval": sets})
        self.details = details
        self._content_before: dict[str, object] = {}
        if getattr(args, "report", False) and not details.options:
            self._content_before = setup.starting.fingerprint()
        model, tokenizer = setup.load()
        overwrite = getattr(args, "overwrite", False)
        self.folder = OutputFolder(
            args.output_dir, split is not None, overwrite, getattr(args, "from_command_line", False)
        )
        super().__init__(
            setup,
            model=None if "model_init" in kwargs else model,
            train_dataset=None if split is None else split.to_pairs(),
            processing_class=tokenizer,
            **kwargs,
        )
        self.ongoing = Training()
        self.evaluations: list[tuple[int, bool, dict]] = []
        self.report: Measurements | None = None
        self._parameters: int | None = None  # counted once, because this takes 5 ms
        self._merging = MergeCallback(self)
        self.add_callback(self._merging)
        self.add_callback(self.folder)
        show_progress(self)

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
            SystemExit: SIGTERM stopped training after a checkpoint was saved. The code is 143.
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
                if not reports:
                    self.report = None
                elif self.report is None or folder.checkpoint is None or self.state.global_step == 0:
                    warn_of_overlap(self.details.measured, self.train_split)
                    self.report = Measurements(self)
                output = self._train(folder.checkpoint, trial, **kwargs)
                if reports:
                    folder.take_encoder(self)
                    self.report.measure("trained", self.args.lexical)
                    self.report.finish()
        return output

    def _train(self, checkpoint: str | None, trial, **kwargs) -> TrainOutput:
        """Trains, from a checkpoint if there is one. After Ctrl-C or SIGTERM, saves the last step and raises."""
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
                print_on_main(f"stopped by SIGTERM at step {step}: {remedy}")
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
        if "loss" in logs or "train_loss" in logs:  # every process logs these
            self._add_new_tokens()
        if "loss" in logs:
            self._check_finite("loss", logs["loss"])
            if self.accelerator.mixed_precision != "fp16":  # its scaler skips a step with such a gradient
                self._check_finite("gradient's norm", logs.get("grad_norm", 0.0))
            if self.estimator_callback is not None:
                logs |= self.estimator_callback.statistics()
            if self.plan.masks_false_negatives:
                name = FALSE_NEGATIVES[self.plan.options.false_negatives]
                logs[name] = sum(distributed.gather_numbers(self.ongoing.false_negatives))
        if "train_loss" in logs:  # `Trainer` averages only over the steps since a checkpoint was loaded
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
        """Raises NotFiniteError if a trained weight is NaN or infinite. Every process checks its own part."""
        finite = True
        for weight in self.model.parameters():
            if weight.requires_grad:
                part = weight.to_local() if isinstance(weight, DTensor) else getattr(weight, "ds_tensor", weight)
                finite &= bool(torch.isfinite(part).all())
        if not all(distributed.gather_numbers(int(finite))):
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
        return 6 * inputs.count_tokens(padding=True) * self._parameters

    def _add_new_tokens(self) -> None:
        """Adds the tokens of all processes to the trainer's count. In every step, that would wait for the device."""
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += sum(distributed.gather_numbers(self.ongoing.new_tokens))
            self.ongoing.new_tokens = 0

    # ---- Checkpoints ----

    def _load_adapter(self, checkpoint: str) -> None:
        """Loads the adapter of a checkpoint into the model. Raises UserError if the adapter does not fit."""
        set_adapter_state(self.model, load_file(Path(checkpoint) / ADAPTER_WEIGHTS), checkpoint)

    # ---- Private methods of `Trainer`, because no public method and no callback does the same ----

    def _hp_search_setup(self, trial) -> None:
        """Sets the hyperparameters of a trial, then prepares training.

        No callback runs after the model exists and before a checkpoint is loaded.
        """
        super()._hp_search_setup(trial)
        self._prepare_training()

    def _track_num_input_tokens(self, inputs: Batch) -> None:
        """Counts a batch's query and code tokens on this process if `include_num_input_tokens_seen` is set.

        `Trainer` expects a mapping, and gathers the number in every step.
        """
        kind = self.args.include_num_input_tokens_seen
        if kind != "no":
            self.ongoing.new_tokens += inputs.count_tokens(padding=kind != "non_padding")

    def _save_checkpoint(self, model, trial) -> None:
        """Saves a checkpoint unless a loss or a weight is not finite, and marks it complete."""
        self._check_weights()
        losses = self.losses(self._tr_loss.item() if self.is_in_train else 0.0)  # added when training ends
        self._add_new_tokens()
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with saving_checkpoint(folder):
            super()._save_checkpoint(model, trial)
        distributed.barrier()
        if self.args.should_save:
            mark_complete(folder, self.run_fingerprint, self.args.save_only_model, losses)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes a checkpoint as a complete folder, in the background."""
        if self.is_world_process_zero():
            self._publisher.push_checkpoint(checkpoint_folder, self.state.global_step)

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        """Saves the encoder, its tokenizer and profile. With FSDP and DeepSpeed, only this method gets the weights.

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
        if has_adapter(self.model) and not self.is_fsdp_enabled and not self.is_deepspeed_enabled:
            self._load_adapter(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()
