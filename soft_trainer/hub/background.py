"""Pushes a run's checkpoints in the background, and its output folder at the end."""

from __future__ import annotations

import tempfile
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path

from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging

from soft_trainer.errors import UserError
from soft_trainer.hub.push import Repository, reason
from soft_trainer.system import distributed

logger = logging.get_logger(__name__)


def check_push(args: TrainingArguments) -> None:
    """Checks, before any mining or training, that the encoder can be pushed to the Hub, if `push_to_hub` is set.

    Raises:
        UserError: the push would fail; see `Repository.check`.
    """
    if args.push_to_hub and distributed.is_main():
        Publisher(args)


class Publisher:
    """Pushes a run's folders to a repository on the Hub, one at a time.

    Raises:
        UserError: the repository cannot be pushed to. The error is raised before training begins.
    """

    def __init__(self, args: TrainingArguments):
        self.args = args
        self.repository = Repository(args.hub_model_id, args.hub_token, args.hub_private_repo, args.hub_revision)
        self.repository.check()
        self._pushes: list[Future] = []  # the client runs one after the other

    def push(self, message: str) -> str:
        """Pushes the output folder after all checkpoints, and returns the commit's URL. See `Repository.push`."""
        self.finish()
        return self.repository.push(self.args.output_dir, message)

    def push_checkpoint(self, folder: str | Path, step: int) -> None:
        """Pushes a checkpoint in the background, unless `hub_strategy` is "end".

        If another push is in progress, the checkpoint is skipped unless `hub_always_push` is set. A failure is logged
        with the command that pushes the checkpoint later.
        """
        folder = Path(folder)
        strategy = self.args.hub_strategy
        busy = not all(push.done() for push in self._pushes)
        if strategy == HubStrategy.END or (busy and not self.args.hub_always_push):
            return
        paths: list[str | None] = [None]
        if strategy == HubStrategy.CHECKPOINT:
            paths.append("last-checkpoint")
        elif strategy == HubStrategy.ALL_CHECKPOINTS:
            paths.append(folder.name)
        try:
            staged = self.repository.stage(folder, self.args.output_dir)
        except (OSError, UserError) as error:
            logger.warning(f"Pushing {folder} during training failed: {error}")
            return
        self._pushes.append(self.repository.api.run_as_future(self._upload, staged, folder, f"Step {step}", paths))

    def finish(self) -> None:
        """Waits for the background pushes to finish."""
        wait(self._pushes)

    def _upload(self, staged: tempfile.TemporaryDirectory, folder: Path, message: str, paths: list) -> None:
        """Pushes a staged checkpoint to each of `paths` in the repository. Nobody reads this thread's errors."""
        with staged:
            for path in paths:
                try:
                    replace(self.repository, path_in_repo=path).upload(staged.name, folder, message)
                except Exception as error:
                    # The push at the end replaces what goes to the root, so only a subfolder is worth pushing later.
                    cause = error if path else reason(error.__cause__ or error)
                    logger.warning(f"Pushing {folder.name} during training failed: {cause}")
