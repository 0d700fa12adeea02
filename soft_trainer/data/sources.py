"""The rows that a run asked for, from the Hub, a folder or a source tree, checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from datasets import DatasetDict, concatenate_datasets
from transformers import TrainingArguments

from soft_trainer.arguments import DataArguments
from soft_trainer.data.codesearchnet import (
    SPLITS,
    check_languages,
    check_rows,
    load_folder,
    load_hub,
    select_by_urls,
    standard_library,
)
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.files import write_json
from soft_trainer.terminal import print_on_main, table


def needed_splits(arguments: DataArguments, args: TrainingArguments, from_scratch: bool = False) -> tuple[str, ...]:
    """What a run cannot do without: rows to train on, and to measure on unless `eval_data_dir` has some."""
    own = not arguments.eval_data_dir
    wanted = {
        "train": args.do_train or from_scratch,
        "valid": (args.do_train and args.eval_strategy != "no") or (own and args.do_eval),
        "test": own and args.do_predict,
    }
    splits = tuple(split for split, needed in wanted.items() if needed)
    return (*splits, "codebase") if set(splits) - {"train"} else splits


def load_data(
    arguments: DataArguments, profile: EncoderProfile, mined_dir: str | Path, needed: Sequence[str] = SPLITS
) -> DatasetDict:
    """The splits train, valid, test and codebase, as far as they are there.

    Args:
        mined_dir: where pairs mined from `source_dir` are written.
        needed: the splits that the run cannot do without; see `needed_splits`.

    Raises:
        UserError: data that cannot be had or would not work; see `check_rows`.
    """
    check_languages(arguments.languages)
    if arguments.data_dir and arguments.source_dir:
        raise UserError("data_dir and source_dir: give one of them")
    if len(arguments.languages) > 1 and arguments.data_dir and "{language}" not in arguments.data_dir:
        raise UserError(f"data_dir={arguments.data_dir}: with several languages, write {{language}} where they differ")
    load = partial(_load_language, arguments, mined_dir=Path(mined_dir), needed=needed)
    data = _joined({language: load(language) for language in arguments.languages})
    if arguments.split_urls:
        data = select_by_urls(data, arguments.split_urls)
    if arguments.filters:
        data = _filtered(data, arguments.filters)
    _check_splits(data, needed)
    if arguments.max_train_rows is not None and "train" in data:
        data["train"] = data["train"].select(range(min(arguments.max_train_rows, len(data["train"]))))
    check_rows(data, profile)
    return data


def _load_language(arguments: DataArguments, language: str, mined_dir: Path, needed: Sequence[str]) -> DatasetDict:
    """The splits of one language, as they come."""
    if arguments.source_dir:
        own = mined_dir if len(arguments.languages) == 1 else mined_dir / language
        return load_folder(_mined(arguments, language, own))
    if arguments.data_dir:
        return load_folder(arguments.data_dir.replace("{language}", language), needed=needed)
    if arguments.dataset_name == "none":
        return DatasetDict()
    return load_hub(arguments.dataset_name, language)


def _joined(by_language: dict[str, DatasetDict]) -> DatasetDict:
    """The splits of all languages one after the other, every row with its language."""
    if len(by_language) == 1:
        return next(iter(by_language.values()))
    for language, data in by_language.items():
        for split, rows in data.items():
            others = [name for name in rows.column_names if name != "language"]
            data[split] = rows.select_columns(others).add_column("language", [language] * len(rows))
    parts = {split: [data[split] for data in by_language.values() if split in data] for split in SPLITS}
    return DatasetDict({split: concatenate_datasets(rows) for split, rows in parts.items() if rows})


def _check_splits(data: DatasetDict, needed: Sequence[str]) -> None:
    """Refuse rows without a split that is needed, or with queries and no pool."""
    missing = [split for split in needed if split not in data]
    if missing:
        raise UserError(f"no rows of {', '.join(missing)}: name a folder by --data_dir, or a tree by --source_dir")
    if "codebase" not in data and (queries := [split for split in ("valid", "test") if split in data]):
        raise UserError(f"{' and '.join(queries)} without a pool: codebase.jsonl or codebase.jsonl.gz is missing")


def _filtered(data: DatasetDict, filters: str) -> DatasetDict:
    """The rows that the named rules leave, with a table of what each rule dropped.

    From the codebase nothing is dropped: a query of another split may look for it. Its comments go like those of all.
    """
    from soft_trainer.data.filtering import filter_rows
    from soft_trainer.mining.rules import CODESEARCHNET_RULES, GRAPHCODEBERT_RULES

    groups = {"graphcodebert": GRAPHCODEBERT_RULES, "codesearchnet": CODESEARCHNET_RULES}
    names = [name.strip() for name in filters.split(",")]
    rules = list(dict.fromkeys(rule for name in names for rule in groups.get(name, (name,))))
    left, counts = {}, {}
    for split, rows in data.items():
        chosen = [rule for rule in rules if split != "codebase" or rule == "comments"]
        left[split], counts[split] = filter_rows(rows, chosen)
    print_on_main(
        table(
            ["dropped by (comments: changed by)", *counts],
            [[rule, *(counts[s].get(rule) for s in counts)] for rule in rules],
        )
    )
    return DatasetDict(left)


def _mined(arguments: DataArguments, language: str, folder: Path) -> Path:
    """Mine the source tree into `folder`, unless that is what lies there."""
    from soft_trainer.mining.tree import mine_to, mining_table, tree_state

    source = standard_library() if arguments.source_dir == "stdlib" else arguments.source_dir
    keep = tuple(arguments.mining_keep.split(",")) if arguments.mining_keep else ()
    record = folder / "mined_from.json"
    origin = [str(Path(source).resolve()), tree_state(source, language), language, list(keep)]
    if not record.exists() or json.loads(record.read_text()) != origin:
        print_on_main(mining_table(mine_to(source, language, folder, keep=keep)))
        write_json(record, origin)
    return folder
