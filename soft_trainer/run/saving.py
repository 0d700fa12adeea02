"""Saves encoders as complete folders, and pushes them."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import Trainer

from soft_trainer.encoders.export import export_encoder
from soft_trainer.files import PROFILE_FILE, reporting_disk_errors, write_text
from soft_trainer.hub.background import Publisher
from soft_trainer.model_card import write_model_card
from soft_trainer.run.record import evaluated_results, trainer_record


class SavingTrainer(Trainer):
    """A `Trainer` that saves folders for `AutoModel` and sentence-transformers, and pushes only complete folders.

    Attributes:
        encoder: the profile to save with the encoder.
        plan: the training plan. Its Matryoshka dimensions are saved in the profile.
        evaluations: for each evaluation, its step, whether it ran during training, and its metrics.
        folder: the output folder.
        report: the `Measurements` of the last training, if there are any.
    """

    def save_encoder(self, folder: str | Path, state_dict=None, merge: bool = False) -> None:
        """Writes the encoder, the tokenizer, the profile, the sentence-transformers files and `training_args.json`."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        profile = self.encoder.replace(matryoshka_dims=self.plan.dims)
        with reporting_disk_errors(folder):
            export_encoder(model, self.processing_class, profile, folder, state_dict, merge=merge)
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

    # ---- The card and the Hub ----

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
