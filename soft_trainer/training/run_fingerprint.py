"""Computes the fingerprint of a run: everything that the results depend on, as one flat mapping of JSON values.

The mapping has these keys:

    NAME                an option that affects results and differs from its default; a local file becomes its hash
    code of NAME        the hash of a user's loss, weighting, estimator, collator or metrics
    processes, precision, versions, format
    the ...             loaded objects that only a trainer has: rows, tokenizer, encoder, criterion, estimator

Checkpoints and `run.json` store the mapping. `changes` compares two mappings, and MAY_DIFFER_IN_FOLDER,
MAY_DIFFER_IN_STUDY and MAY_DIFFER_ON_RESUME list the keys that may differ. Caches depend on fewer inputs, so they
compare hashes from `fingerprints.py` instead.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import TrainingArguments

from soft_trainer.data.split import Split
from soft_trainer.encoders.adapters import active_adapter, has_adapter
from soft_trainer.encoders.hub_files import public_name, saved_adapter
from soft_trainer.encoders.packaged import located
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.fingerprints import (
    HASH,
    encoder_files_fingerprint,
    file_fingerprint,
    fingerprint,
    folder_fingerprint,
    model_fingerprint,
    own_code,
    plain_settings,
    rows_fingerprint,
    source_fingerprint,
    tokenizer_fingerprint,
)
from soft_trainer.hub.model_card import environment
from soft_trainer.options.fields import DataArguments, LossOptions, TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.option_spec import Reference, option_specs, references
from soft_trainer.options.resolve import FALLING, Plan
from soft_trainer.options.training import (
    AFFECT_CHOICES,
    AFFECT_NOTHING,
    AFFECT_RESULTS,
    SoftInfoNCETrainingArguments,
)
from soft_trainer.source.git import open_repository
from soft_trainer.source.languages import SOURCE_LANGUAGES
from soft_trainer.source.source_files import SKIPPED_FOLDERS, source_folder

FORMAT = 3  # increases when checkpoints or the way batches are drawn become incompatible
KINDS = (ModelArguments, DataArguments, TrainingOptions)
NO_SOURCE = "unknown, because its source cannot be read"
NOT_COMPARED = "not compared"  # a setting without a hash

# ---- The keys that may differ ----

# For a run that writes to the output folder of an earlier run.
MAY_DIFFER_IN_FOLDER = frozenset({"versions"})
# For a study, which does not know what its launcher decides.
BY_LAUNCHER = ("processes", "precision")
MAY_DIFFER_IN_STUDY = MAY_DIFFER_IN_FOLDER.union(BY_LAUNCHER)
# For a run that resumes from a checkpoint, perhaps for longer. Instead of the options, it compares what they produced:
# the rows, the encoder, the criterion and the estimator.
MAY_DIFFER_ON_RESUME = MAY_DIFFER_IN_FOLDER.union(
    ("num_train_epochs", "max_steps", "do_train", "do_eval", "do_predict", "ignore_data_skip"),
    option_specs(ModelArguments),
    option_specs(DataArguments),
    option_specs(LossOptions),
)


def changes(then: Mapping, now: Mapping, may_change: Iterable[str]) -> list[str]:
    """Lists the differences between two run fingerprints, such as "seed was 42, is now 7".

    A missing option counts as its default value. Options in AFFECT_CHOICES and all other keys, except the format, are
    compared only if both fingerprints have them.

    Args:
        then: a fingerprint from a checkpoint or record.
        now: the current run's fingerprint.
        may_change: the keys to ignore.
    """
    lines = []
    defaults = _defaults()
    for name in [*now, *(name for name in then if name not in now)]:
        known = name in defaults or name == "format" or (name in then and name in now)
        if name in may_change or not known:
            continue
        before = then.get(name, defaults.get(name))
        after = now.get(name, defaults.get(name))
        if before == after:
            continue
        if any(HASH.search(str(value)) for value in (before, after)):
            lines.append(f"{name} changed")
        else:
            lines.append(f"{name} was {before}, is now {after}")
    return lines


# ---- The fingerprint ----


@dataclass(frozen=True)
class Loaded:
    """The trainer's objects that the results depend on, as input for `run_fingerprint`.

    Args:
        weights_before: the weights to merge with after training, or None.
        evaluated: the queries and corpora ranked during training, if their metrics select the final weights.
        own: other objects that affect results, keyed by name, such as a data collator or an early-stopping callback.
    """

    plan: Plan
    encoder: EncoderProfile
    model: torch.nn.Module
    tokenizer: object
    split: Split
    estimator: object
    weights_before: Mapping | None
    evaluated: tuple = ()
    own: Mapping[str, object] = field(default_factory=dict)


def run_fingerprint(
    *options, apart: str | os.PathLike | None = None, metrics_choose: bool = False, loaded: Loaded | None = None
) -> dict[str, object]:
    """Returns the run fingerprint: the options, file contents and loaded objects that the results depend on.

    Args:
        options: the dataclass instances with the options. One of them has the training arguments.
        apart: a folder to ignore, because the run writes to it.
        metrics_choose: True if evaluation metrics affect the weights in a way that the options don't show, such as
            through an early-stopping callback.
        loaded: the objects of the trainer, or None before a trainer exists.
    """
    values = option_values(*options)
    (args,) = (part for part in options if isinstance(part, TrainingArguments))
    found = {
        "format": FORMAT,
        "processes": args.world_size,
        "precision": args.mixed_precision,
        "versions": environment(),
    }
    chosen = metrics_choose or choose_by_metrics(args)
    defaults = _defaults()
    for name, value in plain_settings(values).items():
        if name in AFFECT_CHOICES:
            counts = chosen
        else:
            counts = affects_results(name) and _or_none(value) != defaults.get(name)
        if counts:
            found[name] = value
    found |= _content({name: value for name, value in values.items() if name in found}, apart)
    if loaded is not None:
        found |= _described(loaded)
    return plain_settings(found)


def choose_by_metrics(args: TrainingArguments) -> bool:
    """Returns True if evaluation metrics select the final weights or change the learning rate."""
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    return args.load_best_model_at_end or schedule in FALLING


@functools.cache
def affects_results(name: str) -> bool:
    """Returns True if an option affects results, or is unknown because it comes from another version."""
    for kind in KINDS:
        if name in option_specs(kind):
            return option_specs(kind)[name].results
    return name in AFFECT_RESULTS or name not in (*AFFECT_CHOICES, *AFFECT_NOTHING)


@functools.cache
def _defaults() -> dict[str, object]:
    """Returns the defaults of all options except AFFECT_CHOICES, keyed by name."""
    found = {}
    for kind in (*KINDS, SoftInfoNCETrainingArguments):
        for each in dataclasses.fields(kind):
            default = each.default
            if each.default_factory is not dataclasses.MISSING:
                default = each.default_factory()
            if each.name not in AFFECT_CHOICES:
                found[each.name] = _or_none(default)
    return plain_settings(found)


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


def _content(options: Mapping[str, object], apart: str | os.PathLike | None) -> dict[str, object]:
    """Replaces options that refer to files or code with hashes of their content. Names on the Hub stay unchanged.

    Returns:
        The replaced values keyed by option, and hashes keyed by `code of OPTION` for a user's functions.
    """
    languages = str(options.get("language") or "").split(",")
    found = {}
    for reference in references(KINDS, options):
        hashed = []
        for value in reference.values:
            if reference.kind == "code" and ":" in value and not os.path.exists(value):
                found[f"code of {reference.option}"] = own_code(value) or NO_SOURCE
            for place in dict.fromkeys(value.replace("{language}", language.strip()) for language in languages):
                hashed.append(_of(reference, place, apart))
        found[reference.option] = hashed[0] if len(hashed) == 1 else hashed
    return found


def _of(reference: Reference, value: str, apart: str | os.PathLike | None) -> str:
    """Returns the hash of the local file or folder that an option refers to, or the name if it is on the Hub."""
    if reference.kind == "encoder":
        value = str(located(value))
    folder = Path(source_folder(value))
    if not folder.exists():
        return public_name(value, on_hub=reference.kind in ("rows", "encoder"))
    if reference.kind == "repository":
        return _repository(folder)
    if reference.kind == "code":
        return _tree(folder, apart)
    if reference.kind == "encoder" and folder.is_dir():
        files = encoder_files_fingerprint(folder) or "no encoder"
        adapter = saved_adapter(folder)
        return files if adapter is None else fingerprint(files, _of(reference, adapter[0], apart))
    if reference.kind == "rows":
        return source_fingerprint(folder)
    if apart and folder.resolve().is_relative_to(Path(apart).resolve()):
        apart = None  # the folder contains rows that an earlier run has written
    return folder_fingerprint(folder, except_in=apart)


def _repository(folder: Path) -> str:
    """Hashes the id of a repository's current commit, which determines the history to mine rows from."""
    try:
        return fingerprint(str(open_repository(folder).head.target))
    except UserError:  # the run itself will report the problem
        return "no commit"


def _tree(root: Path, apart: str | os.PathLike | None) -> str:
    """Hashes the source files below a folder, except in hidden folders, third-party code and the folder `apart`."""
    endings = tuple(ending for each in SOURCE_LANGUAGES.values() for ending in each.extensions)
    skipped = apart and os.path.realpath(apart)
    files = {}
    for folder, subfolders, names in os.walk(root):
        kept = [name for name in subfolders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
        subfolders[:] = [name for name in kept if os.path.realpath(os.path.join(folder, name)) != skipped]
        for name in names:
            path = Path(folder, name)
            if name.endswith(endings) and path.is_file():
                files[path.relative_to(root).as_posix()] = file_fingerprint(path)
    return fingerprint(files)


# ---- The loaded objects of a trainer ----

# Fields of a profile that training does not read. A teacher's path may change, because its content is compared.
_UNREAD_PROFILE = ("name", "matryoshka_dims", "teacher", "teacher_identity")
# Settings that cannot be read from an adapter's weights.
_ADAPTER = ("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora")
# Arguments of estimators that do not affect similarities.
_UNREAD_ESTIMATOR = ("cache_dir", "batch_size", "trust_remote_code")


def _described(loaded: Loaded) -> dict[str, object]:
    """Describes the trainer's objects by hash or value: rows, tokenizer, encoder, criterion, estimator and so on."""
    model = loaded.model
    frozen = {name: tensor for name, tensor in model.named_parameters() if not tensor.requires_grad}
    adapter = model.peft_config[active_adapter(model)] if has_adapter(model) else None
    found = {f"the adapter's {name}": getattr(adapter, name, None) for name in _ADAPTER}
    found |= {
        "the training rows": loaded.split.fingerprint(),
        "the tokenizer": tokenizer_fingerprint(loaded.tokenizer),
        "the encoder's type": str(model.dtype),
        "the encoder's configuration or frozen weights": model_fingerprint(model, frozen),
    }
    if loaded.evaluated:
        found["the evaluation rows"] = fingerprint([_rows(each) for each in loaded.evaluated])
    if loaded.weights_before:
        found["the weights to merge with"] = model_fingerprint(model, loaded.weights_before)
    for owner, values in (("encoder", loaded.encoder), ("criterion", loaded.plan.criterion)):
        for name, value in dataclasses.asdict(values).items():
            if name not in _UNREAD_PROFILE:
                found[f"the {owner}'s {name}"] = value
    for option in ("loss", "weighting"):
        name = getattr(loaded.plan.criterion, option)
        if ":" in name:
            found[f"code of {option}"] = own_code(name) or NO_SOURCE
    for kind, own in {"estimator": loaded.estimator, **loaded.own}.items():
        found |= _object(kind, own)
    return found


def _object(kind: str, own) -> dict[str, object]:
    """Returns an object's class, its settings and, if a user wrote the class, the hash of the code.

    The settings are the constructor's arguments that the object stores as attributes with the same names.

    Args:
        kind: the name in the keys, such as "estimator".
        own: an instance, a function, a `functools.partial` or None.
    """
    if isinstance(own, functools.partial):
        return _object(kind, own.func) | {f"the {kind}'s arguments": _setting([own.args, own.keywords])}
    if inspect.isroutine(own):
        bound = getattr(own, "__self__", None)
        found = {} if bound is None or inspect.isclass(bound) else _object(kind, bound)
        return found | {f"the {kind}": own.__qualname__, f"code of {kind}": own_code(own) or NO_SOURCE}
    owner = type(own)
    found = {f"the {kind}": None if own is None else owner.__name__}
    if own is None:
        return found
    if not owner.__module__.startswith(("soft_trainer.", "transformers.")):  # these libraries' versions are compared
        found[f"code of {kind}"] = own_code(owner) or NO_SOURCE
    for name in inspect.signature(owner).parameters:
        # An estimator with `encoder_identity` is compared by the content of its encoder, whose folder may move.
        by_content = name == "model_name_or_path" and hasattr(own, "encoder_identity")
        if name not in _UNREAD_ESTIMATOR and not by_content:
            found[f"the {kind}'s {name}"] = _setting(getattr(own, name, inspect.Parameter.empty))
    return found


def _setting(value) -> object:
    """Returns a number or text unchanged, but hashes any other value, or a text that may be a local path."""
    if isinstance(value, int | float | None) or (isinstance(value, str) and value == public_name(value, on_hub=False)):
        return value
    try:
        return fingerprint(value)
    except TypeError:
        return NOT_COMPARED


def _rows(rows) -> object:
    """Hashes a data set or a `Split`, or each value of a mapping of these. None stays None."""
    if isinstance(rows, Mapping):
        return {name: _rows(each) for name, each in rows.items()}
    if isinstance(rows, Split):
        return rows.fingerprint()
    return None if rows is None else rows_fingerprint(rows)
