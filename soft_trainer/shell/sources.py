"""Checks the sources of rows that options name, before torch is imported."""

from __future__ import annotations

import itertools
from pathlib import Path

from soft_trainer.data.folders import SPLITS, is_hub_name, list_files, row_files
from soft_trainer.data.languages import check_languages
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.options.fields import CODESEARCHNET, COLUMN_OPTIONS, DataArguments
from soft_trainer.source.source_files import source_folder
from soft_trainer.system.terminal import nearest_file


def check_sources(arguments: DataArguments) -> None:
    """Checks the languages, folders, files and columns in the options.

    Raises:
        UserError: a language is not supported, or a folder or column does not exist. The message has the option.
    """
    check_languages(arguments.languages, language_reader(arguments))
    for name in ("source_dir", "split_urls"):
        folder = getattr(arguments, name)
        if folder and not Path(source_folder(folder)).is_dir():
            raise UserError(f"{name}={folder}: no such folder{nearest_file(folder)}")
    for name, language in itertools.product(("data_dir", "eval_data_dir"), arguments.languages or [None]):
        sources = with_language(getattr(arguments, name) or "", language)
        for source in [sources] if name == "data_dir" else sources.split(","):
            if source.strip() and not (Path(source.strip()).exists() or is_hub_name(source.strip())):
                missing = source.strip()
                raise UserError(f"{name}={missing}: no such folder or file{nearest_file(missing)}")
        if name == "data_dir" and sources and Path(sources).exists():
            _check_columns(sources, arguments)


def _check_columns(source: str, arguments: DataArguments) -> None:
    """Raises UserError if the tables in a local file or folder lack a column that an option names."""
    options = {name: getattr(arguments, name) for name in COLUMN_OPTIONS if getattr(arguments, name)}
    files = list_files(source)
    if not options or files.is_saved():
        return
    # Imported here, because `datasets` takes a second.
    from soft_trainer.data.columns import check_column
    from soft_trainer.data.layouts import LAYOUTS, TABLES
    from soft_trainer.data.layouts.tables import batches_of, reading

    if any(layout.finds(files) for layout in LAYOUTS if layout is not TABLES):
        return  # `read_source` decides which files are read
    paths = row_files(files)
    names: dict[str, None] = {}
    for path in itertools.chain.from_iterable(paths.get(split, ()) for split in SPLITS):
        with reading(path):
            for batch in batches_of(path, set()):
                names |= dict.fromkeys(batch.column_names)
                if names.keys() >= {*options.values()}:
                    return
    for option, name in options.items() if names else ():
        check_column([*names], option, name, source)


def with_language(source: str, language: str | None) -> str:
    """Replaces `{language}` in the path of a source: `rows/{language}` becomes `rows/ruby`.

    Raises:
        UserError: the path contains `{language}`, and `language` is None.
    """
    if language is None and "{language}" in source:
        raise UserError(f"{source}: set language, which replaces {{language}}")
    return source.replace("{language}", language or "")


def language_reader(arguments: DataArguments, profile: EncoderProfile | None = None) -> str | None:
    """Returns what limits the languages of a run, such as "mining", or None if all languages work."""
    if profile and profile.data_flow_length:
        return "data flow"
    if arguments.source_dir:
        return "mining"
    if not arguments.data_dir and arguments.dataset_name == CODESEARCHNET:
        return "CodeSearchNet"
    return None
