"""Loads and checks a run's rows. They come from the Hub, a folder or a source tree."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from datasets import Dataset, DatasetDict, concatenate_datasets
from transformers import TrainingArguments

from soft_trainer.data.any_rows import load_tables
from soft_trainer.data.columns import ColumnNames
from soft_trainer.data.languages import check_languages, languages_in
from soft_trainer.data.layouts.codesearchnet import load_folder, load_hub, select_by_urls, splits_in
from soft_trainer.data.layouts.files import SPLITS
from soft_trainer.data.layouts.judged import has_judged_splits, load_judged_splits
from soft_trainer.data.layouts.tables import HUB_NAME
from soft_trainer.data.row_checks import check_rows, check_texts, check_urls, drop_unusable_rows
from soft_trainer.data.tokens import columns_in
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError, name_option
from soft_trainer.fingerprints import code_fingerprint, fingerprint, keep_files, kept_files
from soft_trainer.options.fields import CODESEARCHNET, COLUMN_OPTIONS, DataArguments
from soft_trainer.run.run_data import RunData
from soft_trainer.source.source_files import source_folder
from soft_trainer.terminal import print_on_main, table


def needed_splits(arguments: DataArguments, args: TrainingArguments, from_scratch: bool = False) -> tuple[str, ...]:
    """Returns the splits that a run cannot do without.

    Valid is needed only if it is evaluated during training, or if nothing else is measured. Neither valid nor test is
    needed if `eval_data_dir` provides other queries.
    """
    own = not arguments.eval_data_dir
    train = args.do_train or from_scratch
    test = own and args.do_predict
    valid = (args.do_train and args.eval_strategy != "no") or (own and args.do_eval and not test)
    return tuple(split for split, needed in zip(SPLITS, (train, valid, test, valid or test), strict=True) if needed)


def check_sources(arguments: DataArguments) -> None:
    """Checks the names of languages and folders before the Hub is contacted, and chooses a language if none was given.

    Raises:
        UserError: a language or a folder does not exist. The message gives the option.
    """
    check_languages(arguments.languages, _reader(arguments))
    for name in ("source_dir", "extra_source_dir", "history", "split_urls"):
        folder = getattr(arguments, name)
        if folder and not Path(source_folder(folder)).is_dir():
            raise UserError(f"{name}={folder}: no such folder")
    for name, language in itertools.product(("data_dir", "eval_data_dir"), _loaded_languages(arguments)):
        sources = _in_place(getattr(arguments, name) or "", language)
        whole = name == "data_dir" and not arguments.sources
        for source in [sources] if whole else sources.split(","):
            if source.strip() and not (Path(source.strip()).exists() or HUB_NAME.fullmatch(source.strip())):
                raise UserError(f"{name}={source.strip()}: no such folder or file")
    _choose_language(arguments)


def _choose_language(arguments: DataArguments) -> None:
    """Sets the language of a source tree or a history to the most common one, if none was given."""
    # pygit2 is slow to import.
    from soft_trainer.mining.history import history_language
    from soft_trainer.mining.tree import tree_language

    if arguments.language:
        return
    if arguments.history:
        arguments.language = history_language(arguments.history)
    elif arguments.source_dir:
        arguments.language = tree_language(source_folder(arguments.source_dir))
    else:
        return
    print_on_main(f"language: {arguments.language}, the most common one")


def _loaded_languages(arguments: DataArguments) -> list[str | None]:
    """Returns the languages to load. A single None stands for rows in any language."""
    return arguments.languages or [None]


def _in_place(source: str, language: str | None) -> str:
    """Replaces `{language}` in the name of a source.

    Raises:
        UserError: no language was given.
    """
    if language is None and "{language}" in source:
        raise UserError(f"{source}: set {name_option('language')}, which replaces {{language}}")
    return source.replace("{language}", language or "")


def load_local(arguments: DataArguments, needed: Sequence[str] = SPLITS) -> dict[str, DatasetDict] | None:
    """Loads the rows of each language if they are in local files, before the Hub is asked for a model.

    Returns:
        The rows for `load_data`, or None if they are not in local files.

    Raises:
        UserError: the rows cannot be read, or the corpus lacks the code for a query.
    """
    if arguments.sources:
        return None
    sources = {name: _in_place(arguments.data_dir or "", name) for name in _loaded_languages(arguments)}
    elsewhere = arguments.source_dir or arguments.history or len({*sources.values()}) < len(sources)
    for source in sources.values():
        elsewhere = elsewhere or not source or not Path(source).exists() or has_judged_splits(Path(source))
    if elsewhere:
        return None  # `load_data` reads them, or raises an error
    loaded = {}
    for language, source in sources.items():
        loaded[language] = _load_rows(source, arguments, needed)
        if not _chooses_rows(arguments):
            check_urls(loaded[language])
    return loaded


def _chooses_rows(arguments: DataArguments) -> bool:
    """Returns True if options leave out some rows, which must then be checked later."""
    return bool(arguments.split_urls or arguments.filters or arguments.drop_unusable)


def _load_rows(source: str, arguments: DataArguments, needed: Sequence[str]) -> DatasetDict:
    return load_tables(source, column_names(arguments), needed, check=not _chooses_rows(arguments))


def column_names(arguments: DataArguments) -> ColumnNames:
    """Returns the names of columns that the options give."""
    return ColumnNames(*(getattr(arguments, name) for name in COLUMN_OPTIONS))


def load_data(
    arguments: DataArguments,
    profile: EncoderProfile,
    mined_dir: str | Path,
    needed: Sequence[str] = SPLITS,
    local: Mapping[str, DatasetDict] | None = None,
) -> RunData:
    """Loads a run's rows.

    Args:
        mined_dir: the folder for pairs mined from `source_dir` and `history`.
        needed: the splits that the run needs; see `needed_splits`.
        local: the rows that `load_local` returned.

    Raises:
        UserError: the rows cannot be read, or cannot be used for training or evaluation (see `check_rows`).
    """
    if arguments.sources:
        return _load_sources(arguments, profile, mined_dir, needed)
    _choose_language(arguments)
    check_languages(arguments.languages, _reader(arguments, profile))
    source = arguments.data_dir
    for mined in ("source_dir", "history"):
        if source and getattr(arguments, mined):
            raise UserError(f"data_dir and {mined}: give one of them")
    if source and "{language}" not in source and len(arguments.languages) > 1:
        raise UserError(f"data_dir={source}: several languages need {{language}} in the folder's name")
    sources = [_in_place(source or "", language) for language in _loaded_languages(arguments)]
    if any(each and has_judged_splits(Path(each)) for each in sources):
        if len(sources) > 1:
            raise UserError(f"data_dir={source}: folders of judgments can be read for only one language at a time")
        return _judged_data(arguments, Path(sources[0]), profile, needed)
    data = _load_languages(arguments, Path(mined_dir), needed, local)
    if arguments.split_urls:
        data = select_by_urls(data, arguments.split_urls)
    if len(arguments.languages) == 1 and (profile.data_flow_length or arguments.filters):
        for split, rows in data.items():
            if "language" not in rows.column_names:
                data[split] = _in_language(rows, arguments.language)
    if arguments.filters:
        data = _filtered(data, arguments.filters)
    _check_needed(data, needed)
    measured = set()
    if len(arguments.languages) > 1 and set(needed) - {"train"}:
        measured = set(data) - {"train"}
    for split in sorted(measured):
        known = set(data[split]["language"][:])
        if absent := [name for name in arguments.languages if name not in known]:
            raise UserError(f"{split}: no rows in {', '.join(absent)}, but every language is measured by itself")
    if arguments.max_train_rows is not None and "train" in data:
        data["train"] = _first_rows(data["train"], arguments.max_train_rows, len(arguments.languages) > 1)
    if arguments.drop_unusable:
        data = drop_unusable_rows(data, profile)
    check_rows(data, profile)
    return RunData.of_tables(data)


def _load_sources(
    arguments: DataArguments, profile: EncoderProfile, mined_dir: str | Path, needed: Sequence[str]
) -> RunData:
    """Loads each source by itself, and joins their training rows."""
    if len(arguments.languages) > 1:
        raise UserError(f"data_dir={arguments.data_dir}: several sources can be read for only one language at a time")
    if arguments.push_data_to_hub:
        raise UserError("push_data_to_hub: pushes the rows of one source")
    sources = {}
    for name, place in arguments.sources.items():
        sources[name] = load_data(dataclasses.replace(arguments, data_dir=place), profile, mined_dir, needed)
    data = RunData.of_sources(sources, profile)
    rows = []
    for name, own in sources.items():
        sizes = []
        for split in SPLITS[:3]:
            sizes.append(len(own.splits[split].judgments.pairs()) if split in own.splits else "none")
        rows.append((name, *sizes))
    print_on_main(table(("source", *SPLITS[:3]), rows))
    return data


def _judged_data(arguments: DataArguments, folder: Path, profile: EncoderProfile, needed: Sequence[str]) -> RunData:
    """Loads the rows from a folder of BEIR, CoSQA or CoSQA+."""
    for name in ("split_urls", "filters", "drop_unusable", "push_data_to_hub", *COLUMN_OPTIONS):
        if getattr(arguments, name):
            raise UserError(f"{name}: applies to rows with a query and a code each, not to judgments")
    splits = load_judged_splits(folder)
    if arguments.max_train_rows is not None and "train" in splits:
        train = splits["train"]
        examples = train.judgments.pairs()[: arguments.max_train_rows]
        judgments = dataclasses.replace(train.judgments, examples=examples)
        splits["train"] = dataclasses.replace(train, judgments=judgments)
    known = languages_in({name: split.corpus for name, split in splits.items()})
    if arguments.languages and known and set(known) != set(arguments.languages):
        raise UserError(f"language={arguments.language}: the rows of {folder} are in {', '.join(known)}; leave it out")
    if arguments.languages and not known:
        for name, split in splits.items():
            sides = {"queries": split.queries, "corpus": split.corpus}
            spoken = {side: _in_language(rows, arguments.language) for side, rows in sides.items()}
            splits[name] = dataclasses.replace(split, **spoken)
    data = RunData.of_splits(splits)
    _check_needed(data.tables, needed)
    for name, rows in data.tables.items():
        check_texts(rows, name, profile)
    return data


def _check_needed(data: Mapping[str, Dataset], needed: Sequence[str]) -> None:
    """Raises UserError if a split that the run needs is missing."""
    if missing := [split for split in needed if split not in data]:
        raise UserError(
            f"no rows of {', '.join(missing)}: name a folder with {name_option('data_dir')}, or a tree with "
            f"{name_option('source_dir')} or {name_option('history')}"
        )


def _reader(arguments: DataArguments, profile: EncoderProfile | None = None) -> str | None:
    """Returns the part of the run that supports only some languages, or None if all parts support any."""
    if arguments.filters:
        return name_option("filters")
    if profile and profile.data_flow_length:
        return "data flow"
    if arguments.source_dir or arguments.history:
        return "mining"
    if not arguments.data_dir and arguments.dataset_name == CODESEARCHNET:
        return "CodeSearchNet"
    return None


def _load_languages(
    arguments: DataArguments, mined_dir: Path, needed: Sequence[str], local: Mapping[str, DatasetDict] | None
) -> DatasetDict:
    """Loads and joins the splits of all languages. If there are several, the column `language` is set in each row."""
    loaded = []
    several = len(arguments.languages) > 1
    for language in _loaded_languages(arguments):
        if several:
            own = mined_dir / language
        else:
            own = mined_dir
        if local:
            data = local[language]
        elif arguments.source_dir or arguments.history:
            data = load_folder(_mined(arguments, language, own))
            if arguments.extra_source_dir:
                data = _with_extra_rows(data, arguments, language, own)
        elif arguments.data_dir:
            data = _load_rows(_in_place(arguments.data_dir, language), arguments, needed)
        elif arguments.dataset_name == "none":
            data = DatasetDict()
        else:
            data = load_hub(arguments.dataset_name, language)
        if several:
            for split, rows in data.items():
                data[split] = _in_language(rows, language)
        loaded.append(data)
    if not several:
        return loaded[0]
    joined = DatasetDict()
    for split in SPLITS:
        parts = []
        for data in loaded:
            parts += splits_in(data, [split])
        if parts:
            joined[split] = concatenate_datasets(parts)
    return joined


def _in_language(rows: Dataset, language: str) -> Dataset:
    """Sets the language of all rows to `language`."""
    others = rows.remove_columns(columns_in(rows, ["language"]))
    return others.add_column("language", [language] * len(rows))


def _first_rows(rows: Dataset, limit: int, several: bool) -> Dataset:
    """Returns the first `limit` rows, shared among the languages as evenly as possible."""
    if not several:
        return rows.select(range(min(limit, len(rows))))
    languages = pd.Series(rows["language"][:])
    rank = languages.groupby(languages).cumcount().to_numpy()  # a row's position among the rows of its language
    return rows.select(np.sort(np.argsort(rank, kind="stable")[:limit]))


def _filtered(data: DatasetDict, filters: str) -> DatasetDict:
    """Applies rules to all splits, and prints how many rows each rule dropped.

    The corpus keeps all its rows, because a user may look for any of them. Only its comments are removed.
    """
    # datasketch is slow to import.
    from soft_trainer.data.filtering import filter_rows
    from soft_trainer.mining.rules import CODESEARCHNET_RULES, GRAPHCODEBERT_RULES

    groups = {"graphcodebert": GRAPHCODEBERT_RULES, "codesearchnet": CODESEARCHNET_RULES}
    rules: dict[str, None] = {}  # each rule once, in order
    for name in map(str.strip, filters.split(",")):
        rules |= dict.fromkeys(groups.get(name, (name,)))
    left = DatasetDict()
    counts = {}
    for split, rows in data.items():
        chosen = [rule for rule in rules if split != "codebase" or rule == "comments"]
        left[split], counts[split] = filter_rows(rows, chosen, name=split)
    shown = pd.DataFrame(counts, index=sorted(rules, key=lambda rule: rule == "comments"), dtype=object)
    shown = shown.where(shown.notna(), None).rename({"comments": "rows without their comments"})
    headers = ["rule", *shown.columns.map("rows dropped: {}".format)]
    print_on_main(table(headers, shown.reset_index().to_numpy().tolist()))
    return left


def _mined(arguments: DataArguments, language: str, folder: Path) -> Path:
    """Returns a folder with the pairs mined from a source tree or a history. They are mined again if the source has
    changed.
    """
    # datasketch and pygit2 are slow to import.
    from soft_trainer.mining.history import history_state, mine_history_to
    from soft_trainer.mining.tree import mine_to, mining_table, tree_state

    source = None
    if arguments.source_dir:
        source = source_folder(arguments.source_dir)
    record = folder / "mined_from.json"
    if arguments.history:
        mine = mine_history_to
        origin = arguments.history
        state = history_state(arguments.history)
        below = source and str(Path(source).resolve())
        options = {"source_dir": below}
    else:
        mine = mine_to
        origin = source
        state = tree_state(source, language)
        options = {"keep": list(filter(None, (arguments.mining_keep or "").split(",")))}
    made_from = fingerprint(
        state,
        language,
        options,
        code_fingerprint("soft_trainer.mining", "soft_trainer.source", "soft_trainer.dataflow"),
    )
    if kept_files(record, made_from) is None:
        print_on_main(mining_table(mine(origin, language, folder, **options)))
        keep_files(record, made_from, sorted(folder.glob("*.jsonl.gz")))
    return folder


def _with_extra_rows(data: DatasetDict, arguments: DataArguments, language: str, folder: Path) -> DatasetDict:
    """Adds functions from `extra_source_dir` to train, except copies of functions in other splits."""
    extra = dataclasses.replace(arguments, source_dir=arguments.extra_source_dir, history=None)

    def marks(rows: Dataset) -> Iterator[set]:
        """Yields each row's code and the first words of its query, either of which identifies a copy."""
        if "docstring_tokens" in rows.column_names:
            queries = rows["docstring_tokens"]
        else:
            queries = [()] * len(rows)
        for code, query in zip(rows["code_tokens"], queries, strict=True):
            yield {("code", *code), ("query", *(token.lower() for token in (query or ())[:12]))}

    held_out = set()
    for split in SPLITS[1:]:
        held_out = held_out.union(*marks(data[split]))
    parts = [data["train"]]
    for rows in load_folder(_mined(extra, language, folder / "extra"), SPLITS[:3]).values():
        parts.append(rows.select([row for row, mark in enumerate(marks(rows)) if mark.isdisjoint(held_out)]))
    data["train"] = concatenate_datasets(parts)
    print_on_main(f"train: {len(parts[0]):,} rows and {len(data['train']) - len(parts[0]):,} of extra_source_dir")
    return data
