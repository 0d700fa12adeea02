"""Pushes a run's results: its rows as a data set, checkpoints in the background, and the output folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from datasets import Dataset, DatasetDict, DatasetInfo, Features
from datasets.info import DatasetInfosDict
from huggingface_hub import DatasetCard, DatasetCardData
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging

from soft_trainer import distributed
from soft_trainer.data.codesearchnet import FEATURES, FILE_FEATURES, HUB_SPLITS, languages_in
from soft_trainer.errors import UserError
from soft_trainer.files import reporting_disk_errors, write_rows, write_text
from soft_trainer.hub.push import PUSHED_ROWS, ROW_FILES, check_push, push_folder, reason
from soft_trainer.options.fields import DataArguments
from soft_trainer.terminal import print_on_main, table

logger = logging.get_logger(__name__)

USES = {
    "train": "pairs to train on",
    "valid": "queries that choose the best checkpoint",
    "test": "queries that the result is reported on",
    "codebase": "the corpus: the functions that queries are ranked against",
}
_TEMPLATE = Path(__file__).with_name("data_card.md.jinja")


def check_pushes(data: DataArguments, args: TrainingArguments) -> None:
    """Checks, before any mining or training, that everything can be pushed.

    Raises:
        UserError: a push would fail (see `check_push`), or the rows to push are not the user's own.
    """
    if distributed.rank_and_world_size()[0] != 0:
        return
    if name := data.push_data_to_hub:
        own_rows = data.source_dir or data.history or data.data_dir
        if not own_rows:
            raise UserError("push_data_to_hub: give rows of your own with --source_dir, --history or --data_dir")
        check_push(name, args.hub_token, args.hub_private_repo, "dataset")
    if args.push_to_hub:
        check_push(_model_id(args), args.hub_token, args.hub_private_repo)


def _model_id(args: TrainingArguments) -> str:
    return args.hub_model_id or Path(args.output_dir).absolute().name


# ---- Rows ----


def push_data(data: DatasetDict, arguments: DataArguments, args: TrainingArguments) -> None:
    """Pushes a run's rows from the main process, if `--push_data_to_hub` is given.

    Raises:
        UserError: the push failed; see `push_folder`.
    """
    name = arguments.push_data_to_hub
    if name and distributed.rank_and_world_size()[0] == 0:
        folder = write_data(data, arguments, Path(args.output_dir) / PUSHED_ROWS)
        of_rows = {"commit_message": "Rows of a run", "repo_type": "dataset"}
        print_on_main(f"Rows pushed: {push_folder(folder, name, args.hub_token, args.hub_private_repo, **of_rows)}")


def write_data(data: DatasetDict, arguments: DataArguments, folder: str | Path) -> Path:
    """Writes `SPLIT.jsonl.gz` with all of CodeSearchNet's columns, and the card, to a folder.

    If any split has a column `source` or `negatives`, all splits get it. Splits from an earlier run are deleted.

    Returns:
        The folder.

    Raises:
        UserError: the disk is full, or the folder cannot be written to.
    """
    folder = Path(folder)
    columns = _features(data)
    with reporting_disk_errors(folder):
        write_rows({split: _in_columns(rows, columns) for split, rows in data.items()}, folder)
        for name in {*ROW_FILES} - {f"{split}.jsonl.gz" for split in data}:
            (folder / name).unlink(missing_ok=True)
        write_text(folder / "README.md", str(data_card(data, arguments)))
    return folder


def _in_columns(rows: Dataset, columns: Features) -> Iterator[dict]:
    """Yields rows with these columns. The value of a missing column is None."""
    for row in rows:
        yield {name: row.get(name) for name in columns}


def _features(data: DatasetDict) -> Features:
    """Returns the columns of the files."""
    given = {name for rows in data.values() for name in rows.column_names}
    return Features({name: kind for name, kind in FILE_FEATURES.items() if name in FEATURES or name in given})


def data_card(data: DatasetDict, arguments: DataArguments) -> DatasetCard:
    """Returns the card: a header that tells `datasets.load_dataset` the splits and columns, followed by text."""
    languages = arguments.languages or languages_in(data)
    files = [{"split": HUB_SPLITS.get(split, split), "path": f"{split}.jsonl.gz"} for split in data]
    header = DatasetCardData(
        language=["code"],
        license="other",
        task_categories=["text-retrieval"],
        tags=["code-search", "soft-infonce", *languages],
        configs=[{"config_name": "default", "data_files": files}],
    )
    DatasetInfosDict({"default": DatasetInfo(features=_features(data))}).to_dataset_card_data(header)
    split, rows = next(iter(data.items()))
    repositories = Counter()
    if "repo" in rows.column_names:
        repositories.update(rows["repo"])
    return DatasetCard.from_template(
        header,
        template_path=str(_TEMPLATE),
        title=arguments.rows_name.rsplit("/", 1)[-1],
        name=arguments.rows_name,
        languages=languages,
        source=arguments.history or arguments.source_dir,
        history=bool(arguments.history),
        filters=arguments.filters,
        split=split,
        repositories=len(repositories),
        largest=", ".join(f"{name} ({count:,})" for name, count in repositories.most_common(5)),
        negatives="negatives" in _features(data),
        rows=table(["split", "rows", "use"], [(name, len(part), USES[name]) for name, part in data.items()]),
    )


# ---- The encoder and its checkpoints ----


class Publisher:
    """Pushes a run's folders to its repository on the Hub, one at a time.

    Raises:
        UserError: the repository cannot be pushed to. It is raised before training begins.
    """

    def __init__(self, args: TrainingArguments):
        self.args = args
        self.hub_model_id = _model_id(args)
        check_push(self.hub_model_id, args.hub_token, args.hub_private_repo)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="push")
        self._pushes: list[Future] = []
        self._failed: dict[str | None, tuple[str | Path, str]] = {}  # folder and message by path in the repository

    def push(self, folder: str | Path, message: str, path_in_repo: str | None = None) -> str:
        """Pushes `folder` now and returns the commit's URL. Raises the same errors as `push_folder`."""
        settings = self.args.hub_token, self.args.hub_private_repo, self.args.hub_revision
        return push_folder(folder, self.hub_model_id, *settings, message, path_in_repo=path_in_repo)

    def push_checkpoint(self, folder: str | Path, step: int) -> None:
        """Pushes a checkpoint in the background, if `hub_strategy` asks for it.

        If another push is in progress, it does nothing unless `hub_always_push` is set.
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
        """Waits for pushes in progress."""
        wait(self._pushes)

    def conclude(self, message: str) -> str:
        """Pushes the output folder, then retries failed checkpoints. Raises the same errors as `push_folder`.

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
        """Pushes the staged files of `folder` to each of `paths`. Failures are logged."""
        try:
            with staged:
                for path in paths:
                    self.push(staged.name, message, path)
                    self._failed.pop(path, None)
        except Exception as error:  # no caller reads the error of this thread
            self._fail(error, folder, message, paths)

    def _fail(self, error: BaseException, folder: str | Path, message: str, paths: list[str | None]) -> None:
        """Logs a failed push and records it, so that it is retried at the end."""
        # The UserError has a command with a temporary folder that is gone by now, so only its cause is logged.
        cause = reason(error.__cause__ or error)
        logger.warning(f"Pushing {folder} during training failed; it is pushed again at the end: {cause}")
        self._failed |= dict.fromkeys(paths, (folder, message))


def _link(source: str, target: str) -> None:
    """Links a file, or copies it if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
