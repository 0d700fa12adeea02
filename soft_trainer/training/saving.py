"""Saves, loads and pushes encoders as complete folders, and marks complete checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints

from soft_trainer import distributed
from soft_trainer.data.trained_rows import write_trained_rows
from soft_trainer.encoders.adapters import has_adapter, plain_encoder, set_adapter_state
from soft_trainer.encoders.export import export_encoder
from soft_trainer.files import ADAPTER_WEIGHTS, ROLLING, reporting_disk_errors, write_text
from soft_trainer.hub.background import Publisher
from soft_trainer.model_card import write_model_card
from soft_trainer.training.output_folder import mark_complete, remove_rolling, saving_checkpoint
from soft_trainer.training.record import evaluated_results, trainer_record


class SavingTrainer(Trainer):
    """A `Trainer` that saves folders for `AutoModel` and sentence-transformers, and pushes only complete folders.

    Attributes:
        encoder: the profile to save with the encoder.
        plan: the training plan. Its Matryoshka dimensions are saved in the profile.
        ongoing: the training run in progress, and what it resumed from.
        run_fingerprint: everything that the results depend on (`run_fingerprint.py`), on the main process only.
        evaluations: for each evaluation, its step, whether it ran during training, and its metrics.
        folder: the output folder.
        report: the `Measurements` of the last training, if there are any.
    """

    _is_saving_checkpoint = False  # checkpoints keep adapters unmerged, so that a resumed run is exact
    _is_rolling = False  # True while `save_rolling_checkpoint` saves

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        """Saves the encoder with its tokenizer and profile. In a checkpoint, an adapter always stays unmerged."""
        if self.args.should_save:
            merge = getattr(self.args, "merge_lora", False) and not self._is_saving_checkpoint
            self.export(output_dir or self.args.output_dir, state_dict, merge)

    def export(self, folder: str | Path, state_dict=None, merge: bool = False) -> None:
        """Writes the encoder, the tokenizer, the profile, the sentence-transformers files and `training_args.json`."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        profile = self.encoder.replace(matryoshka_dims=self.plan.dims)
        with reporting_disk_errors(folder):
            export_encoder(model, self.processing_class, profile, folder, state_dict, merge=merge)
            settings = json.dumps(self.args.to_dict(), indent=2, default=str)
            write_text(Path(folder) / "training_args.json", settings + "\n")

    def _save_checkpoint(self, model, trial) -> None:
        """Saves a checkpoint of the current step, marks it complete, then deletes old ones (`save_total_limit`)."""
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
        unlogged = self.accelerator.gather(self._tr_loss).mean().item()
        if self.args.should_save:
            losses = self.ongoing.losses_before + self._total_loss_scalar + unlogged
            mark_complete(folder, self.run_fingerprint, self.args.save_only_model, losses)
            if self._is_rolling:
                remove_rolling(self.args.output_dir, keep=folder)
            else:
                rotate_checkpoints(run, limit, self.state.best_model_checkpoint, use_mtime=True)

    def save_rolling_checkpoint(self) -> None:
        """Saves a checkpoint of the current step to the subfolder ROLLING, and removes the previous one.

        It does not count for `save_total_limit`, is never pushed, and has the optimizer's state even with
        `save_only_model`.
        """
        only_model = self.args.save_only_model
        strategy = self.args.save_strategy
        self.args.save_only_model = False
        self.args.save_strategy = SaveStrategy.NO  # otherwise, `Trainer` might note this folder as the best checkpoint
        self._is_rolling = True
        try:
            self._save_checkpoint(self.model_wrapped, None)
        finally:
            self._is_rolling = False
            self.args.save_only_model = only_model
            self.args.save_strategy = strategy

    def _get_output_dir(self, trial) -> str:
        """Returns the folder for checkpoints: the output folder, a trial's folder, or the subfolder ROLLING."""
        if self._is_rolling:
            return str(Path(self.args.output_dir) / ROLLING)
        return super()._get_output_dir(trial)

    def _checkpoint_folder(self, run: str) -> Path:
        """Returns the folder of the current step's checkpoint, `RUN/checkpoint-STEP`."""
        return Path(run) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """Loads the weights or the adapter of a checkpoint. `Trainer` can load an adapter only into a `PeftModel`."""
        if has_adapter(self.model) and not self.is_fsdp_enabled:
            self._load_adapter(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _finalize_training(self, *args, **kwargs):
        """Ends training as `Trainer` does, but keeps the newest checkpoint after Ctrl-C or SIGTERM.

        With `save_total_limit=1`, `Trainer` would keep only the best one, and the run could not continue from here.
        """
        limit = self.args.save_total_limit
        if self.ongoing.stopping.signal:
            self.args.save_total_limit = None
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit

    def _load_best_model(self) -> None:
        """Loads the weights or the adapter of the best checkpoint."""
        if has_adapter(self.model) and not self.is_fsdp_enabled and not self.is_deepspeed_enabled:
            self._load_adapter(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _load_adapter(self, checkpoint: str) -> None:
        """Loads the adapter of a checkpoint into the model. Raises UserError if the adapter does not fit."""
        set_adapter_state(self.model, load_file(Path(checkpoint) / ADAPTER_WEIGHTS), checkpoint)

    def call_model_init(self, trial=None):
        """Creates the encoder for a trial with `model_init`, and unwraps it if it is a `PeftModel`."""
        return plain_encoder(super().call_model_init(trial))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the encoder with its tokenizer, profile and model card. Unlike `Trainer.save_model`, never pushes."""
        super().save_model(output_dir, _internal_call=True)
        if _internal_call or not self.is_world_process_zero():
            return
        folder = output_dir or self.args.output_dir
        if self.state.global_step > 0:
            write_trained_rows(folder, self.train_split, self.encoder)
        if getattr(self.args, "model_card", True):
            self.create_model_card(folder)

    # ---- The card and the Hub ----

    def create_model_card(self, folder: str | Path | None = None) -> Path | None:
        """Writes the model card into a folder, by default the output folder. Returns its path, or None on failure."""
        # The report has measured the sets of the evaluations during training.
        reported = self.report is not None and self.report.step == self.state.global_step
        record = self.report.record() if reported else trainer_record(self)
        record["results"] = evaluated_results(self, not reported) | record.get("results", {})
        return write_model_card(folder or self.args.output_dir, record)

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

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes a checkpoint in the background if `hub_strategy` includes checkpoints. Never pushes a rolling one."""
        if self.is_world_process_zero() and not self._is_rolling:
            self._publisher.push_checkpoint(checkpoint_folder, self.state.global_step)

    def _finish_current_push(self) -> None:
        """Waits until the push in the background has finished."""
        if self.hub_model_id is not None and self.is_world_process_zero():
            self._publisher.finish()
