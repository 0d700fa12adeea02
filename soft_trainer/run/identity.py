"""Composes what a run's results depend on, by name: options, the content that they refer to, and processes.

A study compares it before a run is started, and a run compares it with that of the results in its output folder.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from soft_trainer.errors import UserError
from soft_trainer.files import PROFILE_FILE, TOKENIZER_FILES, WEIGHT_FILES
from soft_trainer.fingerprints import file_fingerprint, fingerprint, folder_fingerprint, own_code, plain_settings
from soft_trainer.options.declared import Reference, declared_options, references
from soft_trainer.options.fields import DataArguments, TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.training import OF_TRANSFORMERS, SoftInfoNCETrainingArguments
from soft_trainer.run.rows import source_folder
from soft_trainer.source.git import open_repository
from soft_trainer.source.languages import SOURCE_LANGUAGES
from soft_trainer.source.source_files import SKIPPED_FOLDERS

KINDS = (ModelArguments, DataArguments, TrainingOptions)
STUDIED = "study.json"  # the file with the settings that a study made a folder with
# An encoder's own files. The folder of a run also has logs and results, on which no other run depends.
ENCODER = (*WEIGHT_FILES, *TOKENIZER_FILES, PROFILE_FILE, STUDIED, "*.py", "modules.json", "[0-9]_*/*")
ENCODER += ("sentence_bert_config.json", "config_sentence_transformers.json", "pytorch_model*.bin")


def settings_of(model: ModelArguments, data: DataArguments, args: SoftInfoNCETrainingArguments) -> dict:
    """Returns the options that affect a run's result, in the form that they have after a round trip through JSON."""
    declared = declared_options(model) | declared_options(data) | declared_options(args)
    values = vars(model) | vars(data) | args.to_dict()
    settings = {name: values[name] for name in OF_TRANSFORMERS}
    settings |= {name: values[name] for name, each in declared.items() if each.results}
    return plain_settings(settings)


def run_identity(model: ModelArguments, data: DataArguments, args: SoftInfoNCETrainingArguments) -> dict:
    """Returns all that the results of a run depend on, as far as it is known before rows and encoder are loaded."""
    options = vars(model) | vars(data) | vars(args)
    processes = {"processes": args.world_size}
    return settings_of(model, data, args) | content(options, args.output_dir) | processes


def content(options: Mapping[str, object], apart: str | os.PathLike | None = None) -> dict[str, str]:
    """Returns fingerprints of the local content that options refer to: rows, encoders, code and repositories.

    A name on the Hub has no local content.

    Args:
        options: the values of options, keyed by name.
        apart: a folder that is left out, because the run writes to it.
    """
    languages = str(options.get("language") or "").split(",")
    found = {}
    for reference in references(KINDS, options):
        hashed = []
        for value in reference.values:
            for place in dict.fromkeys(value.replace("{language}", language.strip()) for language in languages):
                hashed.append(_of(reference, place, apart))
        if any(hashed):
            found[f"the content of {reference.option}"] = fingerprint(hashed)
    return found


def _of(reference: Reference, value: str, apart: str | os.PathLike | None) -> str | None:
    """Returns the fingerprint of one thing that an option refers to, or None if it has no local content."""
    if reference.kind == "code" and ":" in value and not os.path.exists(value):
        return own_code(value)
    folder = Path(source_folder(value))
    if reference.kind == "place" or not folder.exists():
        return None
    if reference.kind == "repository":
        return _repository(folder)
    if reference.kind == "code":
        return _tree(folder, apart)
    if reference.kind == "encoder" and folder.is_dir():
        return _encoder(folder)
    if apart and folder.resolve().is_relative_to(Path(apart).resolve()):
        apart = None  # rows that another run has written
    return folder_fingerprint(folder, apart)


def _encoder(folder: Path) -> str:
    """Returns a hash of an encoder's own files."""
    files = {}
    for pattern in ENCODER:
        for path in folder.glob(pattern):
            if path.is_file():
                files[path.relative_to(folder).as_posix()] = file_fingerprint(path)
    return fingerprint(files)


def _repository(folder: Path) -> str | None:
    """Returns the id of the current commit, which is a hash of all that is mined from a history."""
    try:
        return str(open_repository(folder).head.target)
    except UserError:  # the run itself says what is wrong
        return None


def _tree(root: Path, apart: str | os.PathLike | None) -> str:
    """Returns a hash of the source files in a tree, except those in hidden folders and in third-party code."""
    endings = tuple(ending for each in SOURCE_LANGUAGES.values() for ending in each.extensions)
    left_out = apart and os.path.realpath(apart)
    files = {}
    for folder, subfolders, names in os.walk(root):
        kept = [name for name in subfolders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
        subfolders[:] = [name for name in kept if os.path.realpath(os.path.join(folder, name)) != left_out]
        for name in names:
            path = Path(folder, name)
            if name.endswith(endings) and path.is_file():
                files[path.relative_to(root).as_posix()] = file_fingerprint(path)
    return fingerprint(files)


def launched_with(launcher: str) -> dict[str, str]:
    """Returns a launcher's command, which decides the number of processes, and the content of the files it names."""
    found = {"launcher": launcher}
    files = [word for word in shlex.split(launcher)[1:] if os.path.isfile(word)]
    if files:
        found["the content of launcher"] = fingerprint([file_fingerprint(file) for file in files])
    return found


def changes(then: Mapping, now: Mapping, may_change: Iterable[str] = ()) -> list[str]:
    """Describes what differs between two identities, as in "seed was 1, is 2", "data_dir changed".

    Args:
        may_change: the names that the reader ignores.
    """
    ignored = {*may_change}
    lines = []
    for name in [*now, *(name for name in then if name not in now)]:
        if name in ignored or then.get(name) == now.get(name):
            continue
        if name not in then or name not in now:
            lines.append(f"{name} is new or gone")
        elif name.startswith("the content of "):
            lines.append(f"{name} changed")
        else:
            lines.append(f"{name} was {then[name]}, is {now[name]}")
    return lines


def settings(options: Mapping[str, object], without: Sequence[str] = ()) -> dict[str, str]:
    """Returns options as text, as far as they are set."""
    return {name: str(value) for name, value in options.items() if name not in without}
