"""The rows that a run asked for, from the Hub, a folder or a source tree, checked."""

from __future__ import annotations

import json
import os
from pathlib import Path

from datasets import DatasetDict

from soft_trainer.arguments import DataArguments
from soft_trainer.console import say, write_json
from soft_trainer.data.codesearchnet import (
    check_language,
    check_rows,
    load_folder,
    load_hub,
    select_by_urls,
    standard_library,
)
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import SetupError


def load_data(arguments: DataArguments, profile: EncoderProfile, mined_dir: str | Path) -> DatasetDict:
    """The splits train, valid, test and codebase.

    Args:
        mined_dir: where pairs mined from `source_dir` are written.

    Raises:
        SetupError: data that cannot be had or would not work; see `check_rows`.
    """
    check_language(arguments.language)
    if arguments.data_dir and arguments.source_dir:
        raise SetupError("data_dir and source_dir: give one of them")
    if arguments.source_dir:
        data = load_folder(_mined(arguments, Path(mined_dir)))
    elif arguments.data_dir:
        data = load_folder(arguments.data_dir)
    else:
        data = load_hub(arguments.dataset_name, arguments.language)
    if arguments.split_urls:
        data = select_by_urls(data, arguments.split_urls)
    if arguments.max_train_rows is not None:
        data["train"] = data["train"].select(range(min(arguments.max_train_rows, len(data["train"]))))
    check_rows(data, profile)
    return data


def _mined(arguments: DataArguments, folder: Path) -> Path:
    """Mine the source tree into `folder`, unless that is what lies there."""
    from soft_trainer.data.mining import mine_to, mining_table

    source = standard_library() if arguments.source_dir == "stdlib" else arguments.source_dir
    keep = tuple(arguments.mining_keep.split(",")) if arguments.mining_keep else ()
    record = folder / "mined_from.json"
    origin = [str(Path(source).resolve()), _newest_change(Path(source)), arguments.language, list(keep)]
    if not record.exists() or json.loads(record.read_text()) != origin:
        say(mining_table(mine_to(source, arguments.language, folder, keep=keep)))
        write_json(record, origin)
    return folder


def _newest_change(source: Path) -> float:
    """When a folder of the tree last changed, so that an edited tree is mined again."""
    return max((os.stat(folder).st_mtime for folder, _, _ in os.walk(source)), default=0.0)
