"""Loads and checks the rows of a command-line run, from the Hub, a folder or a source tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import TrainingArguments

from soft_trainer.data.array_cache import DEFAULT_FOLDER
from soft_trainer.data.columns import ColumnNames
from soft_trainer.data.folders import SPLITS
from soft_trainer.data.holdout import Division
from soft_trainer.data.languages import check_languages, languages_in
from soft_trainer.data.layouts.codesearchnet import select_by_urls
from soft_trainer.data.load import read_source
from soft_trainer.data.make_splits import Context
from soft_trainer.data.row_checks import check_split, drop_unusable_rows
from soft_trainer.data.split import Split
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.options.fields import COLUMN_OPTIONS, DataArguments
from soft_trainer.shell.sources import language_reader, with_language
from soft_trainer.source.languages import SOURCE_LANGUAGES
from soft_trainer.source.source_files import source_folder
from soft_trainer.system.fingerprints import fingerprint, keep_files, kept_files
from soft_trainer.system.terminal import print_on_main, table

MINED = DEFAULT_FOLDER.with_name("mined")
UNCHECKED = Context(check=False)  # these rows have CodeSearchNet's columns
Languages = Mapping[str, Mapping[str, Split]]  # the splits of each language, or of "" if there is only one


def needed_splits(arguments: DataArguments, args: TrainingArguments, from_scratch: bool = False) -> tuple[str, ...]:
    """Returns the splits that a run with these options needs.

    Valid is needed only if it is evaluated during training, or if nothing else is measured. With `eval_data_dir`, test
    is not needed.
    """
    own = not arguments.eval_data_dir
    train = args.do_train or from_scratch
    test = own and args.do_predict
    valid = (args.do_train and args.eval_strategy != "no") or (own and args.do_eval and not test)
    return tuple(split for split, needed in zip(SPLITS, (train, valid, test, valid or test), strict=True) if needed)


def choose_language(arguments: DataArguments) -> None:
    """Sets the option `language` to the most common language of the source tree, unless it is set."""
    if arguments.language or not arguments.source_dir:
        return
    from soft_trainer.mining.tree import tree_language  # needs the extra `search`

    arguments.language = tree_language(source_folder(arguments.source_dir))
    print_on_main(f"language: {arguments.language}, the most common one")


def read_languages(arguments: DataArguments, needed: Sequence[str] = SPLITS) -> Languages:
    """Reads the rows of each language in the options.

    Args:
        needed: the splits that the run needs; see `needed_splits`.

    Returns:
        The splits of each language, or of "" if there is only one.

    Raises:
        UserError: the rows cannot be read, or the corpus lacks a query's code.
    """
    if arguments.data_dir and arguments.source_dir:
        raise UserError("data_dir and source_dir: set only one of them")
    languages = arguments.languages
    if arguments.data_dir and len(languages) > 1 and "{language}" not in arguments.data_dir:
        raise UserError(f"data_dir={arguments.data_dir}: several languages need {{language}} in the path")
    # With options that drop rows, unusable rows are not an error yet.
    context = Context(
        column_names(arguments),
        needed=needed,
        division=Division(arguments.test_fraction, arguments.split_seed),
        check=not (arguments.split_urls or arguments.drop_unusable),
    )
    read = {}
    for language in languages or [None]:
        name = language if len(languages) > 1 else ""
        if arguments.data_dir:
            source = with_language(arguments.data_dir, language)
            read[name] = read_source(source, context)
        elif arguments.source_dir:
            read[name] = read_source(_mined(arguments, language), UNCHECKED)
        elif arguments.dataset_name != "none":
            read[name] = read_source(arguments.dataset_name, UNCHECKED._replace(language=language))
        else:
            read[name] = {}
    return read


def column_names(arguments: DataArguments) -> ColumnNames:
    """Returns the options `query_column`, `code_column` and so on."""
    return ColumnNames(*(getattr(arguments, name) for name in COLUMN_OPTIONS))


def load_data(
    arguments: DataArguments,
    profile: EncoderProfile,
    needed: Sequence[str] = SPLITS,
    read: Languages | None = None,
) -> dict[str, Split]:
    """Loads the splits of a run, applies the options that choose rows, and checks the rows.

    Args:
        needed: see `read_languages`.
        read: the result of `read_languages`, if the rows have been read already.

    Returns:
        The existing splits among `train`, `valid` and `test`. With several languages, valid and test are called
        `valid-LANGUAGE` and `test-LANGUAGE`.

    Raises:
        UserError: the rows cannot be read or used for training or evaluation (see `check_split`), a split in `needed`
            is missing, or only some languages have valid or test.
    """
    choose_language(arguments)
    check_languages(arguments.languages, language_reader(arguments, profile))
    read = read or read_languages(arguments, needed)
    several = len(arguments.languages) > 1
    chosen = {}
    for name, splits in read.items():
        chosen[name] = _chosen(splits, arguments, profile, name if several else arguments.language)
        if several and {*needed} - {"train"}:
            for split in SPLITS[1:3]:
                if split not in chosen[name] and any(split in other for other in read.values()):
                    raise UserError(f"{split}: no rows in {name}, but each language is measured separately")
        found = {*chosen[name]}
        if found - {"train"}:
            found.add("codebase")
        if missing := [split for split in needed if split not in found]:
            raise UserError(
                f"no rows of {', '.join(missing)}: set data_dir to a folder, or source_dir to a source tree"
            )
    for splits in chosen.values():
        if arguments.max_train_rows is not None and "train" in splits:
            splits["train"] = splits["train"].first(arguments.max_train_rows)
    for splits in chosen.values():
        if arguments.drop_unusable:
            counts = []
            for name, split in splits.items():
                splits[name], (rows, dropped) = drop_unusable_rows(split, name, profile)
                counts.append((name, rows, dropped))
            print_on_main(table(("split", "rows", "dropped as unusable"), counts))
        for name, split in splits.items():
            check_split(split, name, profile)
    return _joined_languages(chosen) if several else chosen[""]


def _chosen(
    splits: Mapping[str, Split], arguments: DataArguments, profile: EncoderProfile, language: str | None
) -> dict[str, Split]:
    """Applies the option `split_urls`, and adds a column `language` if it is needed but missing."""
    if arguments.split_urls:
        splits = select_by_urls(splits, arguments.split_urls)
    splits = dict(splits)
    spoken = {name: split.corpus for name, split in splits.items() if "language" in split.corpus.column_names}
    known = languages_in(spoken)
    every = len(spoken) == len(splits)
    if arguments.data_dir and len(arguments.languages) == 1 and every and known and language not in known:
        raise UserError(
            f"language={language}: the rows of {arguments.data_dir} are in {', '.join(known)}; omit language"
        )
    if language and not known and language not in SOURCE_LANGUAGES:
        raise UserError(
            f"language={language}: no row names a language, and it is not one of {', '.join(SOURCE_LANGUAGES)}; omit "
            "language, or add a column `language`"
        )
    parsed = profile.data_flow_length > 0
    for name, split in splits.items():
        unknown = "language" not in split.corpus.column_names
        if len(arguments.languages) > 1 or (language and parsed and unknown):
            splits[name] = split.in_language(language)
    return splits


def _joined_languages(chosen: Languages) -> dict[str, Split]:
    """Joins the training rows of several languages, and gives their valid and test names such as `test-ruby`."""
    joined = {}
    trains = {name: splits["train"] for name, splits in chosen.items() if "train" in splits}
    if trains:
        joined["train"] = Split.joined(trains)
    for split in SPLITS[1:3]:
        for name, splits in chosen.items():
            if split in splits:
                joined[f"{split}-{name}"] = splits[split]
    return joined


def evaluated(splits: Mapping[str, Split], name: str) -> Split | dict[str, Split] | None:
    """Returns the split `name`, a dict of splits such as `test-ruby` keyed by language, or None."""
    parts = {key.removeprefix(f"{name}-"): split for key, split in splits.items() if key.startswith(f"{name}-")}
    return splits.get(name) or parts or None


def _mined(arguments: DataArguments, language: str) -> Path:
    """Mines pairs from a source tree into a folder of the cache, unless they are there already."""
    from soft_trainer.mining.tree import mine_to, mining_table, tree_state  # datasketch is slow to import

    source = source_folder(arguments.source_dir)
    options = {"keep": list(filter(None, (arguments.mining_keep or "").split(",")))}
    made_from = fingerprint(tree_state(source, language), language, options)
    folder = MINED / made_from
    record = folder.with_suffix(".json")
    if kept_files(record, made_from) is None:
        print_on_main(mining_table(mine_to(source, language, folder, **options)))
        print_on_main(f"The mined rows are in {folder}")
        keep_files(record, made_from, sorted(folder.glob("*.jsonl.gz")))
    return folder
