"""Loads and checks a run's rows. They come from the Hub, a folder or a source tree."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from transformers import TrainingArguments

from soft_trainer.data.columns import ColumnNames
from soft_trainer.data.dividing import equal_rows, row_hashes
from soft_trainer.data.joining import join_sources
from soft_trainer.data.judgments import Split
from soft_trainer.data.languages import check_languages, languages_in
from soft_trainer.data.layouts.codesearchnet import load_hub, select_by_urls
from soft_trainer.data.layouts.files import SPLITS
from soft_trainer.data.layouts.tables import HUB_NAME
from soft_trainer.data.load import load_rows, splits_of
from soft_trainer.data.row_checks import check_split, drop_unusable_rows
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.files import MINED_FROM
from soft_trainer.fingerprints import code_fingerprint, fingerprint, keep_files, kept_files
from soft_trainer.options.fields import CODESEARCHNET, COLUMN_OPTIONS, DataArguments
from soft_trainer.source.source_files import source_folder
from soft_trainer.terminal import print_on_main, table

Sources = dict[str, dict[str, Split]]  # the splits of each source or language; the only one is called ""


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
        raise UserError(f"{source}: set language, which replaces {{language}}")
    return source.replace("{language}", language or "")


def load_local(arguments: DataArguments, needed: Sequence[str] = SPLITS) -> Sources | None:
    """Reads the rows of `data_dir`, or returns None if they must be mined or come from `dataset_name`.

    Raises:
        UserError: the rows cannot be read, or the corpus lacks the code for a query.
    """
    for mined in ("source_dir", "history"):
        if arguments.data_dir and getattr(arguments, mined):
            raise UserError(f"data_dir and {mined}: give one of them")
    places = arguments.sources
    if arguments.data_dir and not places:
        languages = arguments.languages if len(arguments.languages) > 1 else [""]
        if len(languages) > 1 and "{language}" not in arguments.data_dir:
            raise UserError(f"data_dir={arguments.data_dir}: several languages need {{language}} in the folder's name")
        places = {name: _in_place(arguments.data_dir, name or arguments.language) for name in languages}
    elif len(arguments.languages) > 1 and places:
        raise UserError(f"data_dir={arguments.data_dir}: several sources can be read for only one language at a time")
    # Options that drop rows may drop the unusable ones.
    check = not (arguments.split_urls or arguments.filters or arguments.drop_unusable)
    columns = column_names(arguments)
    return {name: load_rows(place, *columns, needed=needed, check=check) for name, place in places.items()} or None


def column_names(arguments: DataArguments) -> ColumnNames:
    """Returns the names of columns that the options give."""
    return ColumnNames(*(getattr(arguments, name) for name in COLUMN_OPTIONS))


def load_data(
    arguments: DataArguments,
    profile: EncoderProfile,
    mined_dir: str | Path,
    needed: Sequence[str] = SPLITS,
    sources: Sources | None = None,
) -> dict[str, Split]:
    """Loads a run's rows.

    Args:
        mined_dir: the folder for pairs mined from `source_dir` and `history`.
        needed: the splits that the run needs; see `needed_splits`.
        sources: the rows that `load_local` returned.

    Returns:
        `train`, `valid` and `test`, as far as they exist. With several languages or sources, valid and test are called
        `valid-NAME` and `test-NAME`.

    Raises:
        UserError: the rows cannot be read, or cannot be used for training or evaluation (see `check_split`).
    """
    _choose_language(arguments)
    check_languages(arguments.languages, _reader(arguments, profile))
    if arguments.sources and arguments.push_data_to_hub:
        raise UserError("push_data_to_hub: pushes the rows of one source, but data_dir has several")
    if sources is None:
        sources = load_local(arguments, needed) or _load_others(arguments, Path(mined_dir))
    limits = dict.fromkeys(sources, arguments.max_train_rows)
    several = len(arguments.languages) > 1
    for name, splits in sources.items():
        sources[name] = _chosen(splits, arguments, profile, name if several else arguments.language)
    if several:
        limits = _shares({name: splits.get("train") for name, splits in sources.items()}, arguments.max_train_rows)
    for name, splits in sources.items():
        _check_needed(splits, needed, name if several else "", sources)
        if limits[name] == 0:
            splits.pop("train", None)  # the other languages have all the rows
        elif limits[name] is not None and "train" in splits:
            splits["train"] = splits["train"].first(limits[name])
        if arguments.drop_unusable:
            splits = _sharing(splits, drop_unusable_rows(splits, profile))
        sources[name] = splits
        for split in splits:
            check_split(splits[split], split, profile)
    return _joined(sources, several, profile)


def _chosen(
    splits: dict[str, Split], arguments: DataArguments, profile: EncoderProfile, language: str | None
) -> dict[str, Split]:
    """Applies the options that choose rows, and sets the rows' language if it is needed and unknown."""
    if arguments.split_urls:
        splits = select_by_urls(splits, arguments.split_urls)
    spoken = {name: split.corpus for name, split in splits.items() if "language" in split.corpus.column_names}
    known = languages_in(spoken)
    every = len(spoken) == len(splits)
    if arguments.data_dir and len(arguments.languages) == 1 and every and known and language not in known:
        raise UserError(f"language={language}: the rows of {arguments.data_dir} are in {', '.join(known)}; drop it")
    given = dict(splits)
    parsed = bool(profile.data_flow_length or arguments.filters)
    for name, split in splits.items():
        unknown = "language" not in split.corpus.column_names
        if len(arguments.languages) > 1 or (language and parsed and unknown):
            splits[name] = split.in_language(language)
    if arguments.filters:
        splits = _filtered(splits, arguments.filters)
    return _sharing(given, splits)


def _sharing(before: Mapping[str, Split], after: Mapping[str, Split]) -> dict[str, Split]:
    """Lets splits that had one corpus have one again, so that it is encoded once."""
    corpora = {}
    for name, split in after.items():
        corpora.setdefault(id(before[name].corpus), split.corpus)
    return {name: dataclasses.replace(split, corpus=corpora[id(before[name].corpus)]) for name, split in after.items()}


def _check_needed(splits: Mapping[str, Split], needed: Sequence[str], language: str, sources: Sources) -> None:
    """Raises UserError if a split that the run needs is missing, or that of one of several languages."""
    if language and {*needed} - {"train"}:
        for split in SPLITS[1:3]:
            if split not in splits and any(split in other for other in sources.values()):
                raise UserError(f"{split}: no rows in {language}, but every language is measured by itself")
    found = {*splits}
    if found - {"train"}:
        found.add("codebase")
    if missing := [split for split in needed if split not in found]:
        raise UserError(
            f"no rows of {', '.join(missing)}: name a folder with data_dir, or a tree with source_dir or history"
        )


def _shares(parts: Mapping[str, Split | None], limit: int | None) -> dict[str, int | None]:
    """Divides a number of training rows among languages as evenly as their sizes allow."""
    if limit is None:
        return dict.fromkeys(parts)
    sizes = {name: 0 if split is None else len(split.judgments.pairs()) for name, split in parts.items()}
    shares = dict.fromkeys(parts, 0)
    while sum(shares.values()) < min(limit, sum(sizes.values())):
        free = [name for name in parts if shares[name] < sizes[name]]
        left = limit - sum(shares.values())
        for name in free[:left]:
            shares[name] += min(max(1, left // len(free)), sizes[name] - shares[name])
    return shares


def _joined(sources: Sources, languages: bool, profile: EncoderProfile) -> dict[str, Split]:
    """Joins the training rows of several languages, which mix in a batch, or of several sources, which do not."""
    if [*sources] == [""]:
        return sources[""]
    joined = {}
    parts = {name: splits["train"] for name, splits in sources.items() if "train" in splits}
    if parts and languages:
        joined["train"] = dataclasses.replace(Split.joined(parts), sources={})
    elif parts:
        for name in parts:
            others = [splits for other, splits in sources.items() if other != name]
            parts[name] = _without_held_out(parts[name], others, name)
        joined["train"] = join_sources(parts, profile)
    for split in SPLITS[1:3]:
        for name, splits in sources.items():
            if split in splits:
                joined[f"{split}-{name}"] = splits[split]
    if not languages:
        rows = []
        for name, splits in sources.items():
            sizes = [len(splits[split].judgments.pairs()) if split in splits else "none" for split in SPLITS[:3]]
            rows.append((name, *sizes))
        print_on_main(table(("source", *SPLITS[:3]), rows))
    return joined


def _without_held_out(train: Split, sources: Iterable[Mapping[str, Split]], name: str) -> Split:
    """Drops the training pairs that equal a pair of valid or test of another source, and prints their number."""
    held_out = []
    for splits in sources:
        held_out += [row_hashes(split.to_pairs()) for key, split in splits.items() if key != "train"]
    equal = equal_rows(row_hashes(train.to_pairs()), held_out)
    if equal.any():
        print_on_main(f"{name}: {int(equal.sum()):,} training pairs equal a row of another source's valid or test")
        return train.keep(np.flatnonzero(~equal))
    return train


def evaluated(splits: Mapping[str, Split], name: str) -> Split | dict[str, Split] | None:
    """Returns valid or test, or None. Each of several languages or sources has its own split."""
    parts = {key.removeprefix(f"{name}-"): split for key, split in splits.items() if key.startswith(f"{name}-")}
    return splits.get(name) or parts or None


def _reader(arguments: DataArguments, profile: EncoderProfile | None = None) -> str | None:
    """Returns the part of the run that supports only some languages, or None if all parts support any."""
    if arguments.filters:
        return "filters"
    if profile and profile.data_flow_length:
        return "data flow"
    if arguments.source_dir or arguments.history:
        return "mining"
    if not arguments.data_dir and arguments.dataset_name == CODESEARCHNET:
        return "CodeSearchNet"
    return None


def _load_others(arguments: DataArguments, mined_dir: Path) -> Sources:
    """Loads rows that are mined, or that are on the Hub as `dataset_name`."""
    sources = {}
    several = len(arguments.languages) > 1
    for language in _loaded_languages(arguments):
        folder = mined_dir / language if several else mined_dir
        if arguments.source_dir or arguments.history:
            splits = load_rows(_mined(arguments, language, folder), check=False, divide=False)
            if arguments.extra_source_dir:
                splits["train"] = _with_extra_rows(splits, arguments, language, folder)
        elif arguments.dataset_name == "none":
            splits = {}
        else:
            splits = splits_of(load_hub(arguments.dataset_name, language), arguments.dataset_name, check=False)
        sources[language if several else ""] = splits
    return sources


def _filtered(splits: Mapping[str, Split], filters: str) -> dict[str, Split]:
    """Applies rules to all splits, and prints how many rows each rule dropped.

    The corpus keeps all its rows, because a user may look for any of them. Only its comments are removed.
    """
    # datasketch is slow to import.
    from soft_trainer.data.filtering import filter_split
    from soft_trainer.mining.rules import CODESEARCHNET_RULES, GRAPHCODEBERT_RULES

    groups = {"graphcodebert": GRAPHCODEBERT_RULES, "codesearchnet": CODESEARCHNET_RULES}
    rules: dict[str, None] = {}  # each rule once, in order
    for name in map(str.strip, filters.split(",")):
        rules |= dict.fromkeys(groups.get(name, (name,)))
    left = {}
    counts = {}
    for name, split in splits.items():
        left[name], counts[name], of_corpus = filter_split(split, [*rules], name)
        if name != "train":
            corpus = of_corpus
    if left.keys() - {"train"}:
        counts["codebase"] = corpus
    shown = pd.DataFrame(counts, index=sorted(rules, key=lambda rule: rule == "comments"), dtype=object)
    shown = shown.where(shown.notna(), None).rename({"comments": "rows without their comments"})
    headers = ["rule", *shown.columns.map("rows dropped: {}".format)]
    print_on_main(table(headers, shown.reset_index().to_numpy().tolist()))
    return left


def _mined(arguments: DataArguments, language: str, folder: Path) -> Path:
    """Returns a folder with the pairs mined from a source tree or a history.

    They are mined again if the source has changed.
    """
    # datasketch and pygit2 are slow to import.
    from soft_trainer.mining.history import history_state, mine_history_to
    from soft_trainer.mining.tree import mine_to, mining_table, tree_state

    source = None
    if arguments.source_dir:
        source = source_folder(arguments.source_dir)
    record = folder / MINED_FROM
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


def _with_extra_rows(splits: Mapping[str, Split], arguments: DataArguments, language: str, folder: Path) -> Split:
    """Returns train with functions from `extra_source_dir`, except copies of functions in other splits."""
    extra = dataclasses.replace(arguments, source_dir=arguments.extra_source_dir, history=None)
    held_out = []
    for name in {*splits} - {"train"}:
        held_out += [row_hashes(splits[name].to_pairs()), row_hashes(splits[name].corpus)]
    mined = load_rows(_mined(extra, language, folder / "extra"), check=False, divide=False)
    parts = {"train": splits["train"]}
    dropped = 0
    for name, split in mined.items():
        pairs = split.to_pairs()
        equal = equal_rows(row_hashes(pairs), held_out)
        dropped += int(equal.sum())
        parts[f"extra {name}"] = Split.from_pairs(pairs.select(np.flatnonzero(~equal)))
    joined = Split.joined(parts)
    rows, *added = (pairs for _, _, pairs in joined.sources.values())
    print_on_main(
        f"train: {rows:,} rows and {sum(added):,} of extra_source_dir; {dropped:,} are dropped because valid, test or "
        "the corpus has the same"
    )
    return dataclasses.replace(joined, sources={})
