"""Pushes what a run makes: its rows, its checkpoints in the background, and at the end the output folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from datasets import DatasetDict
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging

from soft_trainer import distributed
from soft_trainer.errors import refuse
from soft_trainer.hub.data import write_data
from soft_trainer.hub.push import PUSHED_ROWS, check_push, push_folder, reason
from soft_trainer.options.fields import DataArguments
from soft_trainer.terminal import print_on_main

logger = logging.get_logger(__name__)


def check_pushes(data: DataArguments, args: TrainingArguments) -> None:
    """Makes sure, before anything is mined or trained, that the pushes of the options can succeed.

    Raises:
        UserError: the rows are already on the Hub, or `check_push` refuses.
    """
    if distributed.rank_and_world_size()[0] != 0:
        return
    if name := data.push_data_to_hub:
        own_rows = data.source_dir or data.history or data.data_dir
        refuse((not own_rows, "push_data_to_hub: give rows of your own with --source_dir, --history or --data_dir"))
        check_push(name, args.hub_token, args.hub_private_repo, "dataset")
    if args.push_to_hub:
        check_push(_model_id(args), args.hub_token, args.hub_private_repo)


def _model_id(args: TrainingArguments) -> str:
    return args.hub_model_id or Path(args.output_dir).absolute().name


def push_data(data: DatasetDict, arguments: DataArguments, args: TrainingArguments) -> None:
    """Pushes the rows of a run from the main process, if `--push_data_to_hub` is given.

    Raises:
        UserError: the push failed for good. The folder is complete, and the message says how to push it later.
    """
    name = arguments.push_data_to_hub
    if name and distributed.rank_and_world_size()[0] == 0:
        folder = write_data(data, arguments, Path(args.output_dir) / PUSHED_ROWS)
        token, private = args.hub_token, args.hub_private_repo
        url = push_folder(folder, name, token, private, commit_message="Rows of a run", repo_type="dataset")
        print_on_main(f"Rows pushed: {url}")


class Publisher:
    """Pushes the folders of one run to its repository on the Hub, one after the other.

    Args:
        args: the arguments of the run, of which those that begin with `hub_` are read.

    Raises:
        UserError: the repository cannot be pushed to. Nothing has been trained yet.
    """

    def __init__(self, args: TrainingArguments):
        self.args = args
        self.hub_model_id = _model_id(args)
        check_push(self.hub_model_id, args.hub_token, args.hub_private_repo)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="push")
        self._pushes: list[Future] = []
        self._failed: dict[str | None, tuple[str | Path, str]] = {}  # path in the repository -> folder, message

    def push(self, folder: str | Path, message: str, path_in_repo: str | None = None) -> str:
        """Pushes `folder` now and returns the address of the commit.

        Raises:
            UserError: the push failed for good; the message says how to push later.
        """
        settings = self.args.hub_token, self.args.hub_private_repo, self.args.hub_revision
        return push_folder(folder, self.hub_model_id, *settings, message, path_in_repo=path_in_repo)

    def push_checkpoint(self, folder: str | Path, step: int) -> None:
        """Pushes a checkpoint in the background, to where `hub_strategy` says.

        Does nothing while another push is in progress, unless `hub_always_push` is set.
        """
        strategy, busy = self.args.hub_strategy, not all(push.done() for push in self._pushes)
        if strategy == HubStrategy.END or (busy and not self.args.hub_always_push):
            return
        copies = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: Path(folder).name}
        paths = (None, copies[strategy]) if strategy in copies else (None,)
        try:
            staged = _staged(folder, self.args.output_dir)
        except OSError as error:
            self._fail(error, folder, f"Step {step}", paths)
        else:
            self._pushes.append(self._executor.submit(self._push_staged, staged, folder, f"Step {step}", paths))

    def finish(self) -> None:
        """Waits for pushes in progress."""
        wait(self._pushes)

    def conclude(self, message: str) -> str:
        """Pushes the output folder, then again every checkpoint whose push failed.

        Returns:
            The address of the commit of the output folder.

        Raises:
            UserError: a push failed for good; the message says how to push later.
        """
        self.finish()
        url = self.push(self.args.output_dir, message)
        for path, (folder, step) in self._failed.items():
            if path is not None and Path(folder).is_dir():  # an old checkpoint may have been deleted by now
                self.push(folder, step, path)
        return url

    def _push_staged(self, staged: tempfile.TemporaryDirectory, folder, message: str, paths) -> None:
        """Pushes the staged files of `folder` to each of `paths`; a failure is logged."""
        try:
            with staged:
                for path in paths:
                    self.push(staged.name, message, path)
                    self._failed.pop(path, None)
        except Exception as error:  # no caller reads the error of this thread
            self._fail(error, folder, message, paths)

    def _fail(self, error: BaseException, folder: str | Path, message: str, paths: tuple[str | None, ...]) -> None:
        """Logs a failed push and records it, to be retried at the end."""
        # The UserError names a command with links that are gone by now, so only its cause is logged.
        cause = reason(error.__cause__ or error)
        logger.warning(f"Pushing {folder} during training failed; it is pushed again at the end: {cause}")
        self._failed |= dict.fromkeys(paths, (folder, message))


def _staged(folder: str | Path, output_dir: str) -> tempfile.TemporaryDirectory:
    """Links a checkpoint's files into a separate folder, since training may delete them while they are uploaded."""
    staged = tempfile.TemporaryDirectory(prefix=".push-", dir=output_dir)  # removed when nothing refers to it
    shutil.copytree(folder, staged.name, copy_function=_link, dirs_exist_ok=True)
    return staged


def _link(source: str, target: str) -> None:
    """Links a file, or copies it if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
