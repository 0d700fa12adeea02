"""Saves encoders as complete folders, and pushes them."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import Trainer

from soft_trainer.data.trained_rows import write_trained_rows
from soft_trainer.encoders.export import export_encoder
from soft_trainer.files import reporting_disk_errors, write_text
from soft_trainer.hub.background import Publisher
from soft_trainer.hub.model_card import environment, write_model_card
from soft_trainer.training import reporting
from soft_trainer.training.negatives import negatives_to_draw
from soft_trainer.training.record import trainer_record


class SavingTrainer(Trainer):
    """A `Trainer` that saves folders for `AutoModel` and sentence-transformers, and pushes only complete folders.

    Attributes:
        encoder: the profile to save with the encoder.
        plan: the training plan. Its Matryoshka dimensions are saved in the profile.
        run_fingerprint: everything that the results depend on (`run_fingerprint.py`), on the main process only.
        evaluations: for each evaluation, its step, whether it ran during training, and its metrics.
        folder: the output folder.
        report: the `Measurements` of the last training, if there are any.
    """

    def export(self, folder: str | Path, state_dict=None, merge: bool = False) -> None:
        """Writes the encoder, the tokenizer, the profile, the sentence-transformers files and `training_args.json`."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        profile = self.encoder.replace(matryoshka_dims=self.plan.dims)
        with reporting_disk_errors(folder):
            export_encoder(model, self.processing_class, profile, folder, state_dict, merge=merge)
            settings = json.dumps(self.args.to_dict(), indent=2, default=str)
            write_text(Path(folder) / "training_args.json", settings + "\n")

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
        final_step = reporting.best_step(self.args, self.state) or self.state.global_step
        evaluations = self.evaluations
        report = self.report
        reported = report is not None and report.written is not None and report.step == self.state.global_step
        if reported:  # the report has measured the sets of the evaluations during training
            evaluations = [each for each in evaluations if not each[1]]
        results = reporting.measured_results(evaluations, final_step, merged=bool(self.merging))
        if reported:
            record = report.written | {"results": results | report.written["results"]}
        else:
            record = trainer_record(self) | {"results": results}
        return write_model_card(folder or self.args.output_dir, record)

    def describe(self) -> dict:
        """Returns sections of a run's record: model id, loss, training, environment and, after a merge, merging."""
        record = {
            "model_id": self.hub_model_id,
            "loss": reporting.loss_table(self.plan, self.estimator),
            "training": self.setup_table() | reporting.course_table(self.args, self.state),
            "environment": environment(),
        }
        if self.merging:
            record["merging"] = self.merging
        return record

    def setup_table(self) -> dict[str, object]:
        """Returns the training settings except the loss, keyed by label, such as "learning rate"."""
        negatives = 0
        pairs = None
        if self.train_split is not None:
            negatives, _ = negatives_to_draw(self.plan.options, self.train_split.judgments)
            of_sources = [pairs for _, _, pairs in self.train_split.sources.values()]
            pairs = max(of_sources, default=len(self.train_dataset))  # a batch comes from one source
        return reporting.setup_table(self.args, self.plan, self.model, self.passes, negatives, pairs)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Checks before training that a push would work, and creates the repository on the Hub if necessary.

        Raises:
            UserError: a push would fail.
        """
        if self.is_world_process_zero():
            self._publisher = Publisher(self.args)
            self.hub_model_id = self._publisher.hub_model_id

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
