"""The rows that a run asked for, from the Hub, a folder or a source tree, checked."""

from __future__ import annotations

import json
import os
from pathlib import Path

from datasets import DatasetDict

from soft_trainer.arguments import DataArguments
from soft_trainer.console import say, table, write_json
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
    if arguments.filters:
        data = _filtered(data, arguments.filters)
    if arguments.max_train_rows is not None:
        data["train"] = data["train"].select(range(min(arguments.max_train_rows, len(data["train"]))))
    check_rows(data, profile)
    return data


def _filtered(data: DatasetDict, filters: str) -> DatasetDict:
    """The rows that the named rules leave, with a table of what each rule dropped.

    From the codebase nothing is dropped: a query of another split may look for it. Its comments go like those of all.
    """
    from soft_trainer.data.filtering import CODESEARCHNET_RULES, GRAPHCODEBERT_RULES, filter_rows

    groups = {"graphcodebert": GRAPHCODEBERT_RULES, "codesearchnet": CODESEARCHNET_RULES}
    names = [name.strip() for name in filters.split(",")]
    rules = list(dict.fromkeys(rule for name in names for rule in groups.get(name, (name,))))
    left, counts = {}, {}
    for split, rows in data.items():
        chosen = [rule for rule in rules if split != "codebase" or rule == "comments"]
        left[split], counts[split] = filter_rows(rows, chosen)
    say(
        table(
            ["dropped by (comments: changed by)", *counts],
            [[rule, *(counts[s].get(rule) for s in counts)] for rule in rules],
        )
    )
    return DatasetDict(left)


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
