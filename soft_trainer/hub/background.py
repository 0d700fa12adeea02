"""Pushes a run's checkpoints in the background, and its output folder at the end. `dataset.py` pushes the rows."""

from __future__ import annotations

import os
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging

from soft_trainer import distributed
from soft_trainer.errors import UserError
from soft_trainer.hub.push import check_push, push_folder, reason
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
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="push")
        self._pushes: list[Future] = []
        self._failed: dict[str | None, tuple[str | Path, str]] = {}  # folder and message by path in the repository

    def push(self, folder: str | Path, message: str, path_in_repo: str | None = None) -> str:
        """Pushes `folder` immediately and returns the commit's URL. Raises the errors of `push_folder`."""
        settings = self.args.hub_token, self.args.hub_private_repo, self.args.hub_revision
        return push_folder(folder, self.hub_model_id, *settings, message, path_in_repo=path_in_repo)

    def push_checkpoint(self, folder: str | Path, step: int) -> None:
        """Pushes a checkpoint in the background, unless `hub_strategy` is "end".

        If another push is in progress, the checkpoint is skipped unless `hub_always_push` is set.
        """
        strategy = self.args.hub_strategy
        busy = not all(push.done() for push in self._pushes)
        if strategy == HubStrategy.END or (busy and not self.args.hub_always_push):
            return
        paths: list[str | None] = [None]
        if strategy == HubStrategy.CHECKPOINT:
            paths.append("last-checkpoint")
        elif strategy == HubStrategy.ALL_CHECKPOINTS:
            paths.append(Path(folder).name)
        push = (folder, f"Step {step}", paths)
        try:
            # Training may delete the checkpoint while it is uploaded. The temporary folder is deleted after the push.
            staged = tempfile.TemporaryDirectory(prefix=".push-", dir=self.args.output_dir)
            shutil.copytree(folder, staged.name, copy_function=_link, dirs_exist_ok=True)
            self._pushes.append(self._executor.submit(self._push_staged, staged, *push))
        except OSError as error:
            self._fail(error, *push)

    def finish(self) -> None:
        """Waits for the background pushes to finish."""
        wait(self._pushes)

    def conclude(self, message: str) -> str:
        """Pushes the output folder, then retries the failed pushes of checkpoints. Raises the errors of `push_folder`.

        Returns:
            The URL of the output folder's commit.
        """
        self.finish()
        url = self.push(self.args.output_dir, message)
        for path, (folder, step) in self._failed.items():
            if path is not None and Path(folder).is_dir():  # an old checkpoint may have been deleted
                self.push(folder, step, path)
        return url

    def _push_staged(self, staged: tempfile.TemporaryDirectory, folder, message: str, paths) -> None:
        """Pushes a temporary copy of `folder` to each of `paths` in the repository. Failures are logged."""
        try:
            with staged:
                for path in paths:
                    self.push(staged.name, message, path)
                    self._failed.pop(path, None)
        except Exception as error:  # no caller reads the error of this thread
            self._fail(error, folder, message, paths)

    def _fail(self, error: BaseException, folder: str | Path, message: str, paths: list[str | None]) -> None:
        """Logs a failed push, and records it to be retried at the end."""
        # The UserError suggests a command that uses the temporary folder, which is already gone. Log only the cause.
        cause = reason(error.__cause__ or error)
        logger.warning(f"Pushing {folder} during training failed and will be retried at the end: {cause}")
        self._failed |= dict.fromkeys(paths, (folder, message))


def _link(source: str, target: str) -> None:
    """Hard-links a file, or copies the file if the file system does not support hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
