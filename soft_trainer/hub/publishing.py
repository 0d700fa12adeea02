"""Pushes during training, in the background, of which none fails in silence."""

from __future__ import annotations

import os
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from transformers import TrainingArguments
from transformers.utils import logging

from soft_trainer.errors import SetupError
from soft_trainer.hub.push import check_push, push_folder

logger = logging.get_logger(__name__)


class Publisher:
    """Pushes the folders of one run to its repository on the Hub, one after the other.

    Args:
        args: of the run; those that begin with `hub_` are read.

    Raises:
        SetupError: the repository cannot be pushed to; nothing has been trained yet.
    """

    def __init__(self, args: TrainingArguments):
        self.args = args
        self.hub_model_id = args.hub_model_id or Path(args.output_dir).absolute().name
        check_push(self.hub_model_id, args.hub_token, args.hub_private_repo)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="push")
        self._last: Future | None = None

    def push(self, folder: str | Path, message: str, path_in_repo: str | None = None) -> str:
        """Push `folder` now and return the address of the commit.

        Raises:
            SetupError: the push failed for good; says how to push later.
        """
        args = self.args
        return push_folder(
            folder, self.hub_model_id, args.hub_token, args.hub_private_repo, args.hub_revision, message,
            path_in_repo=path_in_repo,
        )  # fmt: skip

    def push_behind(self, folder: str | Path, message: str, paths: tuple[str | None, ...] = (None,)) -> None:
        """Push `folder` in the background, to each of `paths` in the repository; not while another push is under way,
        unless `hub_always_push`."""
        if self._last is not None and not self._last.done() and not self.args.hub_always_push:
            return
        self._report()
        # Training may delete a checkpoint while it is being sent: what is sent are links of its files.
        staged = tempfile.TemporaryDirectory(prefix=".push-", dir=self.args.output_dir)
        shutil.copytree(folder, staged.name, copy_function=_link, dirs_exist_ok=True)

        def push_staged():
            with staged:
                return [self.push(staged.name, message, path) for path in paths]

        self._last = self._executor.submit(push_staged)

    def finish(self) -> None:
        """Wait for the push that is under way; one that failed is logged, and is made good by the push at the end."""
        if self._last is not None:
            self._last.exception()
            self._report()

    def _report(self) -> None:
        if self._last is not None and self._last.done():
            error, self._last = self._last.exception(), None
            if error is not None and not isinstance(error, SetupError):
                raise error
            if error is not None:
                logger.warning(f"A push during training failed and is made again at the end. {error}")


def _link(source: str, target: str) -> None:
    """A second name for a file; a copy where the file system has no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
