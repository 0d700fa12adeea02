"""Computes the fingerprint of a run: everything that the results depend on, as one flat mapping of JSON values.

The mapping has these keys:

    NAME                an option that affects results and differs from its default; rows, an encoder and a
                        configuration file are replaced with a hash of their content
    processes, precision, versions, format
    the ...             what a trainer in Python was given: rows, tokenizer, encoder, criterion, estimator

A user's own loss, weighting, estimator and collator are compared by name. Checkpoints and `run.json` store the
mapping, and `changes` compares two mappings. Caches depend on fewer inputs, so they compare hashes from
`fingerprints.py` instead.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import TrainingArguments

from soft_trainer.criterion import Criterion
from soft_trainer.data.split import Split
from soft_trainer.encoders.adapters import active_adapter, has_adapter
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.hub.files import public_name, saved_adapter
from soft_trainer.options.defaults import defaults_of
from soft_trainer.options.parse import OF_A_RUN
from soft_trainer.options.spec import Reference, option_specs, references
from soft_trainer.options.training import AFFECT_NOTHING, SoftInfoNCETrainingArguments
from soft_trainer.system.fingerprints import (
    HASH,
    UNREAD_PROFILE,
    adapter_configuration,
    encoder_files_fingerprint,
    environment,
    file_fingerprint,
    fingerprint,
    plain_settings,
    source_fingerprint,
    tokenizer_fingerprint,
)
from soft_trainer.system.packaged import located

FORMAT = 7  # increases when checkpoints or the way batches are drawn become incompatible
TRAINING_ROWS = "the training rows"
MEASURED_ROWS = "the rows to measure"
STARTING_WEIGHTS = "the weights before training"
LENGTHS = ("max_steps", "num_train_epochs")  # the first one counts if it is positive


def changes(then: Mapping, now: Mapping) -> list[str]:
    """Lists the differences between two run fingerprints, such as "seed was 42, is now 7".

    A run may become longer. A missing option counts as its default value. All other keys, except the format, are
    compared only if both fingerprints have them. Versions of libraries are never compared.

    Args:
        then: a fingerprint from a checkpoint or record.
        now: the current run's fingerprint.
    """
    length, shorter = change_of_length(then, now)
    lines = [length] if shorter else []
    defaults = _defaults() | {"format": None}
    for name in sorted({*then, *now} - {*LENGTHS, "versions"}):
        if not (name in defaults or (name in then and name in now)):
            continue
        before = then.get(name, defaults.get(name))
        after = now.get(name, defaults.get(name))
        if before == after:
            continue
        if any(HASH.search(str(value)) for value in (before, after)):
            lines.append(f"{name} changed")
        elif after is None and name in defaults:
            lines.append(f"{name} was {before}, is now the default: set {name}={before}")
        else:
            lines.append(f"{name} was {before}, is now {after}")
    return lines


def change_of_length(then: Mapping, now: Mapping) -> tuple[str | None, bool]:
    """Returns how the length of a run changed, such as "num_train_epochs was 3, is now 2", and whether it is shorter.

    Epochs are not compared with steps, because a fingerprint does not know the number of steps in an epoch.
    """
    for name in LENGTHS:
        before, after = (run.get(name, _defaults()[name]) for run in (then, now))
        if before > 0 or after > 0:
            break
    line = None if before == after else f"{name} was {before:g}, is now {after:g}"
    return line, 0 < after < before


# ---- The fingerprint ----


def run_fingerprint(*options) -> dict[str, object]:
    """Returns the part of the run fingerprint that is known before anything is loaded.

    Args:
        options: the dataclass instances with the options. One of them has the training arguments.
    """
    values = option_values(*options)
    (args,) = (part for part in options if isinstance(part, TrainingArguments))
    found = {
        "format": FORMAT,
        "processes": args.world_size,
        "precision": args.mixed_precision,
        "versions": environment(),
    }
    defaults = _defaults()
    open_options = defaults_of(SoftInfoNCETrainingArguments)
    for name, value in plain_settings(values).items():
        if value is None:  # the default, before a trainer is made
            value = open_options.get(name)
        if affects_results(name) and _or_none(value) != defaults.get(name):
            found[name] = value
    languages = str(values.get("language") or "").split(",")
    for reference in references(OF_A_RUN, {name: value for name, value in values.items() if name in found}):
        if reference.kind == "tree":  # its rows are compared instead
            del found[reference.option]
        else:
            found[reference.option] = _content(reference, languages)
    return plain_settings(found)


@functools.cache
def affects_results(name: str) -> bool:
    """Returns True if an option affects results, or is unknown because it comes from another version."""
    for kind in OF_A_RUN:
        if name in option_specs(kind):
            return option_specs(kind)[name].results
    return name not in AFFECT_NOTHING


@functools.cache
def _defaults() -> dict[str, object]:
    """Returns the defaults of all options that affect results, keyed by name."""
    found = {}
    for kind in (*OF_A_RUN, SoftInfoNCETrainingArguments):
        for each in dataclasses.fields(kind):
            default = each.default
            if each.default_factory is not dataclasses.MISSING:
                default = each.default_factory()
            found[each.name] = default
    found |= defaults_of(SoftInfoNCETrainingArguments)
    return plain_settings({name: _or_none(value) for name, value in found.items() if affects_results(name)})


def _or_none(value):
    """Turns an empty string or container into None, because `transformers` stores these instead of None."""
    return None if isinstance(value, str | list | dict | tuple) and not value else value


def option_values(*parts) -> dict[str, object]:
    """Combines the options of several dataclass instances into one dict from name to value."""
    values = {}
    for part in parts:
        if isinstance(part, TrainingArguments):
            values |= part.to_dict()
        else:
            values |= {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}
    return values


# ---- Content that options refer to ----


def _content(reference: Reference, languages: Sequence[str]) -> str | list[str]:
    """Returns the hash or name of what an option refers to, or a list for several sources or languages."""
    found = []
    for value in reference.values:
        for name in dict.fromkeys(value.replace("{language}", language.strip()) for language in languages):
            found.append(content_of(reference.kind, name))
    return found[0] if len(found) == 1 else found


def content_of(kind: str, value: str) -> str:
    """Returns the hash of local rows, of a local encoder or of a file, or the name of anything else."""
    path = Path(value)
    if kind == "rows" and path.exists():
        return source_fingerprint(path)
    if kind == "file" and path.is_file():
        return file_fingerprint(path)
    folder = Path(located(value))
    if kind == "encoder" and folder.exists():
        files = encoder_files_fingerprint(folder) or "no encoder"
        adapter = saved_adapter(folder)
        return files if adapter is None else fingerprint(files, content_of(kind, adapter[0]))
    return public_name(value, on_hub=kind in ("rows", "encoder"))


# ---- What was loaded ----

# Arguments of estimators that do not affect similarities.
_UNREAD_ESTIMATOR = ("cache_dir", "batch_size", "trust_remote_code")


def splits_hash(splits: Split | Mapping[str, Split] | None) -> str | None:
    """Hashes a split or several splits. None stays None."""
    if isinstance(splits, Mapping):
        return fingerprint({str(name): split.fingerprint() for name, split in splits.items()})
    return None if splits is None else splits.fingerprint()


def loaded_fingerprint(
    model: torch.nn.Module, tokenizer, profile: EncoderProfile, criterion: Criterion, **objects
) -> dict[str, object]:
    """Returns the part of the run fingerprint that describes an encoder, a criterion, an estimator and so on.

    Args:
        objects: an estimator, a collator and so on, keyed by what they are called in the result.
    """
    found = {"the tokenizer": tokenizer_fingerprint(tokenizer), "the encoder's type": str(model.dtype)}
    found["the adapter"] = None
    if has_adapter(model):
        found["the adapter"] = fingerprint(adapter_configuration(model.peft_config[active_adapter(model)]))
    for owner, values in (("encoder", profile), ("criterion", criterion)):
        for name, value in dataclasses.asdict(values).items():
            if name not in UNREAD_PROFILE:
                found[f"the {owner}'s {name}"] = value
    for kind, each in objects.items():
        found |= _object(f"the {kind}", each)
    return found


def _object(kind: str, owner) -> dict[str, object]:
    """Returns the name of an object's class or of a function, and the settings if the class is not the user's.

    The settings are the constructor's arguments that the object stores as attributes with the same names.
    """
    if owner is None:
        return {kind: None}
    named = owner if hasattr(owner, "__qualname__") else type(owner)
    found = {kind: f"{named.__module__}:{named.__qualname__}"}
    if named.__module__.startswith("soft_trainer."):
        for name in inspect.signature(named).parameters:
            value = getattr(owner, name, None)
            if name == "model_name_or_path" and value is not None:
                value = content_of("encoder", str(value))
            if name not in _UNREAD_ESTIMATOR and isinstance(value, int | float | str | None):
                found[f"{kind}'s {name}"] = value
    return found
