"""Pushes a run's checkpoints in the background, and its output folder at the end. `dataset.py` pushes the rows."""

from __future__ import annotations

import tempfile
from concurrent.futures import Future, wait
from pathlib import Path

from huggingface_hub import HfApi
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging

from soft_trainer import distributed
from soft_trainer.errors import UserError
from soft_trainer.hub.push import check_push, push_folder, reason, stage, upload
from soft_trainer.options.fields import DataArguments

logger = logging.get_logger(__name__)


def check_pushes(data: DataArguments, args: TrainingArguments) -> None:
    """Checks, before any mining or training, that the rows and the encoder can be pushed to the Hub.

    Raises:
        UserError: a push would fail (see `check_push`), or the rows to push come from `dataset_name`.
    """
    if not distributed.is_main():
        return
    if name := data.push_data_to_hub:
        own_rows = data.source_dir or data.history or data.data_dir
        if not own_rows:
            raise UserError("push_data_to_hub pushes only your own rows: set source_dir, history or data_dir")
        check_push(name, args.hub_token, args.hub_private_repo, "dataset")
    if args.push_to_hub:
        check_push(_model_id(args), args.hub_token, args.hub_private_repo)


def _model_id(args: TrainingArguments) -> str:
    """Returns the repository to push to. Raises UserError if it is not set."""
    if not args.hub_model_id:
        raise UserError("hub_model_id is not set: set it to USER/NAME, the repository to push to")
    return args.hub_model_id


class Publisher:
    """Pushes a run's folders to a repository on the Hub, one at a time.

    Raises:
        UserError: the repository cannot be pushed to. The error is raised before training begins.
    """

    def __init__(self, args: TrainingArguments):
        self.args = args
        self.hub_model_id = _model_id(args)
        check_push(self.hub_model_id, args.hub_token, args.hub_private_repo)
        self._api = HfApi()  # runs one background push after the other
        self._pushes: list[Future] = []

    def push(self, message: str) -> str:
        """Pushes the output folder after all checkpoints, and returns the commit's URL. See `push_folder`."""
        self.finish()
        settings = self.args.hub_token, self.args.hub_private_repo, self.args.hub_revision
        return push_folder(self.args.output_dir, self.hub_model_id, *settings, message)

    def push_checkpoint(self, folder: str | Path, step: int) -> None:
        """Pushes a checkpoint in the background, unless `hub_strategy` is "end".

        If another push is in progress, the checkpoint is skipped unless `hub_always_push` is set. A failure is logged
        with the command that pushes the checkpoint later.
        """
        strategy = self.args.hub_strategy
        if strategy == HubStrategy.END or (self.busy and not self.args.hub_always_push):
            return
        paths: list[str | None] = [None]
        if strategy == HubStrategy.CHECKPOINT:
            paths.append("last-checkpoint")
        elif strategy == HubStrategy.ALL_CHECKPOINTS:
            paths.append(Path(folder).name)
        try:
            settings = self.hub_model_id, self.args.hub_token, self.args.hub_revision
            staged = stage(Path(folder), self.args.output_dir, *settings)
            self._pushes.append(self._api.run_as_future(self._upload, staged, Path(folder), f"Step {step}", paths))
        except (OSError, UserError) as error:
            logger.warning(f"Pushing {folder} during training failed: {error}")

    @property
    def busy(self) -> bool:
        """True while a push is in progress in the background."""
        return not all(push.done() for push in self._pushes)

    def finish(self) -> None:
        """Waits for the background pushes to finish."""
        wait(self._pushes)

    def _upload(self, staged: tempfile.TemporaryDirectory, folder: Path, message: str, paths: list) -> None:
        """Pushes a staged checkpoint to each of `paths` in the repository. Nobody reads this thread's errors."""
        args = self.args
        settings = args.hub_token, args.hub_private_repo, args.hub_revision
        with staged:
            for path in paths:
                try:
                    upload(staged.name, folder, self.hub_model_id, *settings, message, path_in_repo=path)
                except Exception as error:
                    # The push at the end replaces what goes to the root, so only a subfolder is worth pushing later.
                    cause = error if path else reason(error.__cause__ or error)
                    logger.warning(f"Pushing {folder.name} during training failed: {cause}")
