"""A trainer whose folders are complete: checkpoints, the result, and everything that goes to the Hub."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, rotate_checkpoints

from soft_trainer import distributed
from soft_trainer.encoders.adapters import has_adapter, plain_encoder
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.files import mark_complete, reporting_disk_errors, saving_checkpoint, write_text
from soft_trainer.hub.export import export_encoder
from soft_trainer.hub.publishing import Publisher
from soft_trainer.training.adapters import load_checkpoint_adapter


class SavingTrainer(Trainer):
    """A `Trainer` that saves its encoder as a folder for every library, and loses no push to the Hub.

    Attributes:
        encoder: the profile of the encoder; a subclass sets it.
    """

    encoder: EncoderProfile
    _is_saving_checkpoint = False  # a checkpoint holds the adapter itself, so that a resumed run is exact

    @property
    def profile_to_save(self) -> EncoderProfile:
        """The profile that is saved beside the encoder."""
        return self.encoder

    # ---- Saving ----

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        """Saves a complete folder: encoder, tokenizer, files of sentence-transformers, profile and settings."""
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        with reporting_disk_errors(folder):
            merge = getattr(self.args, "merge_lora", False) and not self._is_saving_checkpoint
            export_encoder(model, self.processing_class, self.profile_to_save, folder, state_dict, merge=merge)
            settings = json.dumps(self.args.to_dict(), indent=2, default=str)
            write_text(folder / "training_args.json", settings + "\n")

    def _save_checkpoint(self, model, trial) -> None:
        """Saves a checkpoint and marks it as whole, before any older one is deleted."""
        run = self._get_output_dir(trial)
        folder = Path(run) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        self._is_saving_checkpoint = True
        try:
            with saving_checkpoint(folder):
                super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit, self._is_saving_checkpoint = limit, False
        distributed.barrier()
        if self.args.should_save:
            with saving_checkpoint(folder):
                mark_complete(folder)
            rotate_checkpoints(run, limit, self.state.best_model_checkpoint, use_mtime=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """Loads the weights of a checkpoint; `Trainer` knows adapters in a `PeftModel` only."""
        if has_adapter(self.model) and not self.is_fsdp_enabled:
            load_checkpoint_adapter(self.model, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Loads the weights of the best checkpoint."""
        checkpoint = self.state.best_model_checkpoint
        if has_adapter(self.model) and not self.is_fsdp_enabled and not self.is_deepspeed_enabled:
            load_checkpoint_adapter(self.model, checkpoint)
        else:
            super()._load_best_model()

    def call_model_init(self, trial=None):
        """Makes the encoder of a trial; that of a `PeftModel` is taken out."""
        return plain_encoder(super().call_model_init(trial))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the encoder as a complete folder; only `push_to_hub` pushes it."""
        super().save_model(output_dir, _internal_call=True)

    # ---- The Hub ----

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Makes sure, before training, that the result can be pushed.

        Raises:
            UserError: the token is missing or wrong or may not write, or the name is not valid.
        """
        if self.is_world_process_zero():
            self._publisher = Publisher(self.args)
            self.hub_model_id = self._publisher.hub_model_id

    def push_to_hub(self, commit_message: str | None = "End of training", **kwargs) -> str | None:
        """Saves the encoder and pushes the output folder.

        Returns:
            The address of the commit on the main process, None on the others.

        Raises:
            UserError: the push failed for good. The folder is whole, and the message says how to push it later.
        """
        if self.hub_model_id is None:
            self.init_hf_repo()
        self.save_model()
        if not self.is_world_process_zero():
            return None
        return self._publisher.conclude(commit_message)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes a checkpoint in the background, as `hub_strategy` says."""
        if self.is_world_process_zero() and self.args.hub_strategy != HubStrategy.END:
            paths = {
                HubStrategy.CHECKPOINT: (None, "last-checkpoint"),
                HubStrategy.ALL_CHECKPOINTS: (None, Path(checkpoint_folder).name),
            }.get(self.args.hub_strategy, (None,))
            self._publisher.push_in_background(checkpoint_folder, f"Step {self.state.global_step}", paths)

    def _finish_current_push(self) -> None:
        """Waits for the push that is under way."""
        if self.hub_model_id is not None and self.is_world_process_zero():
            self._publisher.finish()
