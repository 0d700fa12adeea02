"""Loads the rows of a run from the Hub, a folder or a source tree, and checks them."""

from __future__ import annotations

import dataclasses
import json
import os
import sysconfig
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, concatenate_datasets
from transformers import TrainingArguments

from soft_trainer.data.any_rows import HUB_NAME, load_rows
from soft_trainer.data.codesearchnet import (
    SPLITS,
    check_languages,
    check_rows,
    check_urls,
    drop_unusable_rows,
    load_folder,
    load_hub,
    select_by_urls,
)
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.files import write_json
from soft_trainer.options.fields import CODESEARCHNET, DataArguments
from soft_trainer.terminal import print_on_main, table


def needed_splits(arguments: DataArguments, args: TrainingArguments, from_scratch: bool = False) -> tuple[str, ...]:
    """Returns the splits that a run must have: training rows, and evaluation rows unless `eval_data_dir` has some."""
    own = not arguments.eval_data_dir
    wanted = {
        "train": args.do_train or from_scratch,
        "valid": (args.do_train and args.eval_strategy != "no") or (own and args.do_eval),
        "test": own and args.do_predict,
    }
    splits = tuple(split for split, needed in wanted.items() if needed)
    return (*splits, "codebase") if set(splits) - {"train"} else splits


def check_sources(arguments: DataArguments) -> None:
    """Checks languages and folders, so that a typing error is told before the Hub is asked for anything.

    Raises:
        UserError: names the option.
    """
    check_languages(arguments.languages, _reader(arguments))
    for name in ("source_dir", "extra_source_dir", "history", "split_urls"):
        folder = getattr(arguments, name)
        if folder and not Path(source_folder(folder)).is_dir():
            raise UserError(f"{name}={folder}: no such folder")
    for name in ("data_dir", "eval_data_dir", "guard"):
        for language in arguments.languages:
            for source in (getattr(arguments, name) or "").replace("{language}", language).split(","):
                if source.strip() and not (Path(source.strip()).exists() or HUB_NAME.fullmatch(source.strip())):
                    raise UserError(f"{name}={source.strip()}: no such folder or file")


def load_local(arguments: DataArguments, needed: Sequence[str] = SPLITS) -> dict[str, DatasetDict] | None:
    """Loads the splits of each language from the files of `data_dir`, before the Hub is asked for a model.

    Returns:
        What `load_data` takes; None if the rows come from elsewhere.

    Raises:
        UserError: rows cannot be read, or a query's url is not in the corpus.
    """
    sources = [(arguments.data_dir or "").replace("{language}", language) for language in arguments.languages]
    elsewhere = arguments.source_dir or arguments.history or len(set(sources)) < len(sources)
    if elsewhere or not all(source and Path(source).exists() for source in sources):
        return None  # `load_data` reads them, or says what is wrong
    columns = arguments.query_column, arguments.code_column
    loaded = [load_rows(source, *columns, needed) for source in sources]
    if not (arguments.split_urls or arguments.filters or arguments.drop_unusable):  # they choose the rows first
        for data in loaded:
            check_urls(data)
    return dict(zip(arguments.languages, loaded, strict=True))


def load_data(
    arguments: DataArguments,
    profile: EncoderProfile,
    mined_dir: str | Path,
    needed: Sequence[str] = SPLITS,
    local: Mapping[str, DatasetDict] | None = None,
) -> DatasetDict:
    """Loads the splits train, valid, test and codebase, as far as they exist.

    Args:
        mined_dir: folder for the pairs mined from `source_dir` and `history`.
        needed: the splits that the run must have; see `needed_splits`.
        local: the rows that `load_local` has loaded.

    Raises:
        UserError: rows cannot be read, or training or evaluation cannot use them (see `check_rows`).
    """
    check_languages(arguments.languages, _reader(arguments, profile))
    if mined := [name for name in ("source_dir", "history") if getattr(arguments, name) and arguments.data_dir]:
        raise UserError(f"data_dir and {mined[0]}: give one of them")
    if len(arguments.languages) > 1 and arguments.data_dir and "{language}" not in arguments.data_dir:
        raise UserError(f"data_dir={arguments.data_dir}: several languages need {{language}} in the folder's name")
    load = partial(_load_language, arguments, mined_dir=Path(mined_dir), needed=needed)
    data = _joined(dict(local or {language: load(language) for language in arguments.languages}))
    if arguments.split_urls:
        data = select_by_urls(data, arguments.split_urls)
    if len(arguments.languages) == 1 and (profile.data_flow_length or arguments.filters):
        for split, rows in data.items():
            if "language" not in rows.column_names:
                data[split] = _in_language(rows, arguments.language)
    if arguments.filters:
        data = _filtered(data, arguments.filters)
    if missing := [split for split in needed if split not in data]:
        raise UserError(
            f"no rows of {', '.join(missing)}: name a folder by --data_dir, a tree by --source_dir or --history"
        )
    if arguments.max_train_rows is not None and "train" in data:
        data["train"] = _first_rows(data["train"], arguments.max_train_rows, arguments.languages)
    if arguments.drop_unusable:
        data = drop_unusable_rows(data, profile)
    check_rows(data, profile)
    return data


def _reader(arguments: DataArguments, profile: EncoderProfile | None = None) -> str | None:
    """Names the part of the run that only knows the six languages. None if any language will do."""
    if arguments.source_dir or arguments.history:
        return "mining"
    if arguments.filters:
        return "--filters"
    if profile and profile.data_flow_length:
        return "data flow"
    return "CodeSearchNet" if not arguments.data_dir and arguments.dataset_name == CODESEARCHNET else None


def _load_language(arguments: DataArguments, language: str, mined_dir: Path, needed: Sequence[str]) -> DatasetDict:
    """Loads the splits of one language as they are stored."""
    if arguments.source_dir or arguments.history:
        own = mined_dir if len(arguments.languages) == 1 else mined_dir / language
        data = load_folder(_mined(arguments, language, own))
        return _with_extra_rows(data, arguments, language, own) if arguments.extra_source_dir else data
    if arguments.data_dir:
        source = arguments.data_dir.replace("{language}", language)
        return load_rows(source, arguments.query_column, arguments.code_column, needed)
    if arguments.dataset_name == "none":
        return DatasetDict()
    return load_hub(arguments.dataset_name, language)


def _joined(by_language: dict[str, DatasetDict]) -> DatasetDict:
    """Joins the rows of all languages, split by split, and adds its language to every row."""
    if len(by_language) == 1:
        return next(iter(by_language.values()))
    for language, data in by_language.items():
        for split, rows in data.items():
            data[split] = _in_language(rows, language)
    parts = {split: [data[split] for data in by_language.values() if split in data] for split in SPLITS}
    return DatasetDict({split: concatenate_datasets(rows) for split, rows in parts.items() if rows})


def _in_language(rows: Dataset, language: str) -> Dataset:
    """Sets the language of every row to `language`."""
    others = [name for name in rows.column_names if name != "language"]
    return rows.select_columns(others).add_column("language", [language] * len(rows))


def _first_rows(rows: Dataset, limit: int, languages: Sequence[str]) -> Dataset:
    """Takes the first rows of every language, at most `limit` in all, as evenly as their sizes allow."""
    rank = np.arange(len(rows))  # position of a row among the rows of its language
    if len(languages) > 1:
        names = np.array(rows["language"][:])
        for language in languages:
            rank[names == language] = np.arange((names == language).sum())
    return rows.select(np.sort(np.argsort(rank, kind="stable")[:limit]))


def _filtered(data: DatasetDict, filters: str) -> DatasetDict:
    """Applies rules to all splits and prints how many rows each rule dropped.

    The corpus keeps all rows, because any of them may be searched for. Only its comments are removed.
    """
    # datasketch is slow to import.
    from soft_trainer.data.filtering import filter_rows
    from soft_trainer.mining.rules import CODESEARCHNET_RULES, GRAPHCODEBERT_RULES

    groups = {"graphcodebert": GRAPHCODEBERT_RULES, "codesearchnet": CODESEARCHNET_RULES}
    names = [name.strip() for name in filters.split(",")]
    rules = list(dict.fromkeys(rule for name in names for rule in groups.get(name, (name,))))
    left, counts = {}, {}
    for split, rows in data.items():
        chosen = [rule for rule in rules if split != "codebase" or rule == "comments"]
        left[split], counts[split] = filter_rows(rows, chosen, name=split)
    lines = [[rule, *(counts[split].get(rule) for split in counts)] for rule in rules if rule != "comments"]
    headers = ["rule", *(f"rows dropped: {split}" for split in counts)]
    if "comments" in rules:
        lines.append(["rows without their comments", *(counts[split]["comments"] for split in counts)])
    print_on_main(table(headers, lines))
    return DatasetDict(left)


def _mined(arguments: DataArguments, language: str, folder: Path) -> Path:
    """Returns the folder with the pairs of the source tree or history, which is mined again if it has changed."""
    # datasketch and pygit2 are slow to import.
    from soft_trainer.mining.history import history_state, mine_history_to
    from soft_trainer.mining.tree import mine_to, mining_table, tree_state

    source = source_folder(arguments.source_dir) if arguments.source_dir else None
    record = folder / "mined_from.json"
    if arguments.history:
        options = {"source_dir": source, "max_functions": arguments.max_functions, "body": arguments.body}
        state = history_state(arguments.history)
        mine, origin = mine_history_to, arguments.history
    else:
        state, options = tree_state(source, language), {"keep": (arguments.mining_keep or "").split(",")}
        options["keep"] = [rule for rule in options["keep"] if rule]
        mine, origin = mine_to, source
    mined_from = [str(Path(origin).resolve()), state, language, *options.values()]
    if not record.exists() or json.loads(record.read_text()) != mined_from:
        print_on_main(mining_table(mine(origin, language, folder, **options)))
        write_json(record, mined_from)
    return folder


def _with_extra_rows(data: DatasetDict, arguments: DataArguments, language: str, folder: Path) -> DatasetDict:
    """Adds the functions of `--extra_source_dir` to train, but no copy of a function in the other splits."""
    extra = dataclasses.replace(arguments, source_dir=arguments.extra_source_dir, history=None)
    mined = load_folder(_mined(extra, language, folder / "extra"), SPLITS[:3])
    held_out = [data[split] for split in SPLITS if split != "train"]
    codes = {tuple(tokens) for rows in held_out for tokens in rows["code_tokens"]}
    queries = {_opening(tokens) for rows in held_out if "docstring_tokens" in rows.column_names
               for tokens in rows["docstring_tokens"]}  # fmt: skip
    parts = [data["train"]]
    for split in SPLITS[:3]:
        pairs = zip(mined[split]["code_tokens"], mined[split]["docstring_tokens"], strict=True)
        new = [row for row, (code, query) in enumerate(pairs) if tuple(code) not in codes
               and _opening(query) not in queries]  # fmt: skip
        parts.append(mined[split].select(new))
    data["train"] = concatenate_datasets(parts)
    print_on_main(f"train: {len(parts[0]):,} rows and {len(data['train']) - len(parts[0]):,} of extra_source_dir")
    return data


def _opening(tokens: Sequence[str] | None) -> tuple[str, ...]:
    """The first words of a text, by which a copy with small changes is known."""
    return tuple(token.lower() for token in (tokens or ())[:12])


def source_folder(source_dir: str) -> str:
    """Returns the folder that an option names: `stdlib` is Python's standard library, `installed` its packages."""
    known = {"stdlib": lambda: os.path.dirname(os.__file__), "installed": lambda: sysconfig.get_paths()["purelib"]}
    return known.get(source_dir, lambda: source_dir)()


def as_rows(rows, name: str) -> Dataset | None:
    """Converts `rows`, a list of dicts or a `datasets.Dataset`, to a `datasets.Dataset`.

    Raises:
        UserError: an empty list, or anything else, such as an `IterableDataset`, whose rows have no numbers.
    """
    if rows is None or isinstance(rows, Dataset):
        return rows
    if isinstance(rows, list) and not rows:
        raise UserError(f"{name}: there are no rows")
    if isinstance(rows, list) and all(isinstance(row, Mapping) for row in rows):
        return Dataset.from_list(rows)
    raise UserError(
        f"{name}: a datasets.Dataset (or a list of dicts) is expected, not {type(rows).__name__}; estimators and "
        "masks know a row by its number, so rows of a stream must be collected first"
    )


def as_row_sets(rows, name: str) -> Dataset | dict[str, Dataset] | None:
    """Applies `as_rows` to one set of rows, or to every set in a dict."""
    if isinstance(rows, Mapping):
        if not rows:
            raise UserError(f"{name}: the dict has no data set")
        return {key: as_rows(part, f"{name}[{key!r}]") for key, part in rows.items()}
    return as_rows(rows, name)


def corpus_for(codebase, key: str | None) -> Dataset:
    """Returns the corpus of the evaluation set `key`: `codebase` itself, or its entry if it is a dict.

    Raises:
        UserError: there is none.
    """
    if isinstance(codebase, Mapping):
        if key not in codebase:
            raise UserError(f"codebase: no corpus for {key!r}, only for {', '.join(map(repr, codebase))}")
        codebase = codebase[key]
    if not isinstance(codebase, Dataset):
        raise UserError("evaluation needs a corpus: pass codebase= (a Dataset with url and code)")
    return codebase
