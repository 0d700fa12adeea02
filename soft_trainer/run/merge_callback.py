"""Merges the weights before and after training if `merge_ratio` is set."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import Tensor
from transformers import TrainerCallback

from soft_trainer.errors import UserError
from soft_trainer.run.merging import merge, weights_to_merge
from soft_trainer.system.files import PROFILE_FILE, UNMERGED


class MergeCallback(TrainerCallback):
    """A callback that copies the weights before training, and merges the copy with the final weights.

    Args:
        trainer: a `SoftInfoNCETrainer`, which calls `keep` before it loads a checkpoint.

    Attributes:
        before: the weights before training, or None if nothing will be merged.
        record: the ratio, the base and the unmerged encoder of the last merge, or None if nothing was merged.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        self.before: dict[str, Tensor] | None = None
        self.record: dict | None = None

    def keep(self, resumed: bool) -> None:
        """Copies the weights before training if they will be merged.

        Args:
            resumed: True if this trainer has already trained the encoder and now resumes from a checkpoint.

        Raises:
            UserError: the weights have been trained already, or they cannot be merged.
        """
        if getattr(self._trainer.args, "merge_ratio", None) is None:
            self.before = None
        elif not resumed:
            self.before = weights_to_merge(self._trainer.model)
        elif self.before is None:
            raise UserError("merge_ratio: this trainer has already trained the encoder; resume with a new trainer")

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Saves the trained encoder to a subfolder, then merges the weights. Does nothing after a signal to stop."""
        trainer = self._trainer
        self.record = None
        if trainer.ongoing.stopping.agree():
            return
        unmerged = Path(args.output_dir) / UNMERGED
        if self.before is None:
            if args.should_save and (unmerged / PROFILE_FILE).is_file():
                shutil.rmtree(unmerged)  # left by an earlier run that merged
            return
        trainer.use_averaged_weights()
        if args.should_save:
            trainer.save_encoder(unmerged, merge=args.merge_lora)
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        self.record = merge(model, self.before, args.merge_ratio)
