"""Composes all that the results of a run depend on, by name. Nothing else does, and all that compares runs reads it.

`run_identity` returns a mapping of groups, each a mapping from names to values that JSON can represent:

    options   the options that affect results
    content   the local files that options refer to (rows, encoders, code, repositories), and the code of own functions
    start     the number of processes, what else the launcher decides, and the version of how batches are drawn
    versions  Python and the libraries
    loaded    what options and files became: rows, tokenizer, encoder, objective, estimator
    fitted    what is known of the estimator once it is fitted

The last two are known only in a trainer. A checkpoint stores all groups, `run.json` too, and `study.json` those that
are known before a run begins. A reader compares the groups that it knows, except what it declares below as free to
change. Caches depend on less; `fingerprints.py` has what they compare.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from accelerate.commands.config import default_config_file
from transformers import TrainingArguments

from soft_trainer.data.judgments import Split
from soft_trainer.encoders.adapters import active_adapter, has_adapter
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.fingerprints import (
    HASH,
    class_fingerprint,
    encoder_files_fingerprint,
    file_fingerprint,
    fingerprint,
    folder_fingerprint,
    model_fingerprint,
    own_code,
    plain_settings,
    rows_fingerprint,
    tokenizer_fingerprint,
)
from soft_trainer.hub.model_card import environment
from soft_trainer.options.declared import Reference, declared_options, references
from soft_trainer.options.fields import DataArguments, LossOptions, TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.resolve import FALLING, Plan
from soft_trainer.options.training import OF_TRANSFORMERS
from soft_trainer.source.git import open_repository
from soft_trainer.source.languages import SOURCE_LANGUAGES
from soft_trainer.source.source_files import SKIPPED_FOLDERS, source_folder

FORMAT = 2  # the version of checkpoints and of how batches are drawn
KINDS = (ModelArguments, DataArguments, TrainingOptions)
_CONTENT = "the content of {}"

# ---- Readers: the groups and names that may change, with the reason ----

# The output folder may be written to again by a run that gives the same results.
OUTPUT_FOLDER = {"versions": "the run is made again, and records the new ones"}
# A finished cell of a study is done, and a stopped one is resumed.
STUDY = {"versions": "a study outlives an upgrade; its plan names what changed"}
# A training continues from a checkpoint.
RESUME = {"versions": "a training outlives an upgrade; a line names what changed"}
RESUME |= dict.fromkeys(declared_options(LossOptions), "the objective that they make is compared")
RESUME |= dict.fromkeys(("num_train_epochs", "max_steps", "do_train"), "a training may go on for longer")
RESUME |= {"load_best_model_at_end": "it decides after the last step"}


def free_to_resume(identity: Mapping) -> dict[str, str]:
    """Returns the names that may change when a training resumes, with the reasons."""
    options = identity.get("options", {})
    if options.get("load_best_model_at_end") or options.get("lr_scheduler_type") in FALLING:
        return RESUME
    return RESUME | {"the evaluation rows": "no weight depends on them"}


def differences(then: Mapping, now: Mapping, may_change: Mapping[str, str]) -> list[str]:
    """Describes what differs between two identities, as in "seed was 1, is 2" or "the training rows changed".

    Args:
        then: an identity that was stored.
        now: an identity. Groups that it lacks are not known yet, and are not compared.
        may_change: the names that the reader ignores.
    """
    lines = []
    for group, after in now.items():
        before = then.get(group) or {}
        if group in may_change:
            continue
        for name in [*after, *(name for name in before if name not in after)]:
            if name not in may_change and before.get(name) != after.get(name):
                lines.append(_difference(name, before, after))
    return lines


def _difference(name: str, before: Mapping, after: Mapping) -> str:
    """Describes one difference between two groups."""
    if name not in before or name not in after:
        return f"{name} is new or gone"
    if any(HASH.fullmatch(str(group[name])) for group in (before, after)):
        return f"{name} changed"
    return f"{name} was {before[name]}, is {after[name]}"


def changed_versions(then: Mapping, now: Mapping) -> list[str]:
    """Describes the libraries whose versions differ between two identities, if they are known."""
    return differences(then, {"versions": now["versions"]} if "versions" in now else {}, {})


# ---- The identity ----


@dataclass(frozen=True)
class Loaded:
    """The parts of a trainer that its results depend on.

    Args:
        weights_before: the weights to merge with, or None.
        evaluated: what is ranked during training: queries and corpora, as the trainer has them.
    """

    plan: Plan
    encoder: EncoderProfile
    model: torch.nn.Module
    tokenizer: object
    split: Split
    estimator: object
    weights_before: Mapping | None
    evaluated: tuple


def run_identity(
    options: Mapping[str, object],
    start: Mapping[str, object],
    apart: str | os.PathLike | None = None,
    loaded: Loaded | None = None,
) -> dict[str, dict]:
    """Returns all that the results of a run depend on, as far as it is known.

    Args:
        options: the values of options, keyed by name.
        start: the result of `started` or `launched_with`.
        apart: a folder whose content is left out, because the run writes to it.
        loaded: the parts of the trainer, if there is one.
    """
    identity = {
        "options": {name: value for name, value in options.items() if name in result_options()},
        "content": content(options, apart),
        "start": {"format": FORMAT, **start},
        "versions": environment(),
    }
    if loaded is not None:
        identity["content"] |= _own_code(loaded)
        identity["loaded"] = _described(loaded)
    return plain_settings(identity)


def fitted(estimator) -> dict[str, dict]:
    """Returns the group of the identity that is known once the estimator is fitted."""
    return {"fitted": {"the estimator's encoder": getattr(estimator, "encoder_identity", None)}}


@functools.cache
def result_options() -> frozenset[str]:
    """Returns the names of the options that affect results."""
    names = {*OF_TRANSFORMERS}
    for kind in KINDS:
        names |= {name for name, declared in declared_options(kind).items() if declared.results}
    return frozenset(names)


def option_values(*parts) -> dict[str, object]:
    """Returns the values of all options of some dataclass instances, keyed by name.

    Plain `TrainingArguments` have the defaults of the options that only this package has.
    """
    values = {}
    for part in parts:
        if isinstance(part, TrainingArguments):
            values |= {name: declared.default for name, declared in declared_options(TrainingOptions).items()}
            values |= part.to_dict()
        else:
            values |= vars(part)
    return values


def started(args: TrainingArguments) -> dict[str, object]:
    """Returns what the launcher has decided."""
    return {"processes": args.world_size, "mixed_precision": args.mixed_precision}


# ---- What a launcher decides, before it starts ----

_PROCESSES = ("num_processes", "nproc_per_node", "np")  # of accelerate, torchrun and mpirun
_UNREAD = ("main_process_port", "main_process_ip", "master_port", "master_addr", "log_dir", "quiet", "tee")


def launched_with(launcher: str) -> dict[str, object]:
    """Returns what a launcher's command decides: the number of processes, its other options, and its files' content.

    The spelling and the order of options do not matter, nor does the number if it is the default.
    """
    options = _launcher_options(launcher)
    processes = [" ".join(options.pop(name)[:1]) for name in _PROCESSES if name in options]
    if any(os.path.basename(word).startswith("accelerate") for word in options["launcher"]):
        config = options.setdefault("config_file", [default_config_file])[0]
        if os.path.isfile(config):
            processes.append((yaml.safe_load(Path(config).read_bytes()) or {}).get("num_processes"))
        else:
            del options["config_file"]
        processes.append(torch.cuda.device_count())
    found = {"processes": str(next(filter(None, processes), 1))}
    for name, words in sorted(options.items()):
        if name not in _UNREAD:
            values = [file_fingerprint(word) if os.path.isfile(word) else word for word in words]
            found[name if name == "launcher" else f"the launcher's {name}"] = " ".join(values)
    return found


def _launcher_options(launcher: str) -> dict[str, list[str]]:
    """Returns the words that follow each option of a command. Those before the first one are its "launcher"."""
    name = "launcher"
    options: dict[str, list[str]] = {name: []}
    for word in shlex.split(launcher.replace("=", " ")):
        if word.startswith("--") or word == "-np":
            name = word.lstrip("-").replace("-", "_")
            options[name] = []
        else:
            options[name].append(word)
    return options


# ---- Local content ----


def content(options: Mapping[str, object], apart: str | os.PathLike | None = None) -> dict[str, str | None]:
    """Returns a fingerprint of the local content that each option refers to: rows, encoders, code and repositories.

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
            found[_CONTENT.format(reference.option)] = hashed[0] if len(hashed) == 1 else fingerprint(hashed)
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
        return encoder_files_fingerprint(folder)
    if apart and folder.resolve().is_relative_to(Path(apart).resolve()):
        apart = None  # rows that another run has written
    return folder_fingerprint(folder, apart)


def _repository(folder: Path) -> str | None:
    """Returns a hash of the current commit, whose id depends on all that is mined from a history."""
    try:
        repository = open_repository(folder)
    except UserError:  # the run itself says what is wrong
        return None
    return None if repository.head_is_unborn else fingerprint(str(repository.head.target))


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


# ---- What options and files became in a trainer ----

# Fields of a profile that training does not read. A teacher may have moved; as an estimator it is compared itself.
_UNREAD_PROFILE = ("name", "matryoshka_dims", "teacher", "teacher_identity")
# Settings that cannot be read from an adapter's weights.
_ADAPTER = ("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora")
# Estimator arguments that do not affect similarities, or that the fingerprint of the encoder covers.
_UNREAD_ESTIMATOR = {"cache_dir", "batch_size", "trust_remote_code", "model_name_or_path"}


def _own_code(loaded: Loaded) -> dict[str, str]:
    """Returns fingerprints of the user's own loss, weighting and estimator, wherever they are defined."""
    sources = loaded.plan.objective.sources
    if loaded.estimator is not None and not type(loaded.estimator).__module__.startswith("soft_trainer."):
        sources["estimator"] = class_fingerprint(type(loaded.estimator))
    return {_CONTENT.format(option): hashed for option, hashed in sources.items()}


def _rows(rows) -> object:
    """Returns fingerprints of rows, or of several sets of them."""
    if isinstance(rows, Mapping):
        return {name: _rows(each) for name, each in rows.items()}
    if isinstance(rows, Split):
        return rows.fingerprint()
    return None if rows is None else rows_fingerprint(rows)


def _described(loaded: Loaded) -> dict[str, object]:
    """Returns the rows, the tokenizer, the encoder, the objective and the estimator of a trainer."""
    model = loaded.model
    estimator = loaded.estimator
    frozen = {name: tensor for name, tensor in model.named_parameters() if not tensor.requires_grad}
    adapter = model.peft_config[active_adapter(model)] if has_adapter(model) else None
    found = {f"the adapter's {name}": getattr(adapter, name, None) for name in _ADAPTER}
    found |= {
        "the training rows": loaded.split.fingerprint(),
        "the evaluation rows": fingerprint([_rows(each) for each in loaded.evaluated]),
        "the tokenizer": tokenizer_fingerprint(loaded.tokenizer),
        "the encoder's type": str(model.dtype),
        "the encoder's configuration or frozen weights": model_fingerprint(model, frozen),
        "the estimator": None,
    }
    for owner, values in (("encoder", loaded.encoder), ("objective", loaded.plan.objective)):
        for name, value in dataclasses.asdict(values).items():
            if name not in _UNREAD_PROFILE:
                found[f"the {owner}'s {name}"] = value
    if loaded.weights_before:
        found["the weights to merge with"] = model_fingerprint(model, loaded.weights_before)
    if estimator is not None:
        found["the estimator"] = type(estimator).__name__
        for name in sorted(inspect.signature(type(estimator)).parameters.keys() - _UNREAD_ESTIMATOR):
            value = getattr(estimator, name, None)
            if isinstance(value, str | int | float | bool | None):
                found[f"the estimator's {name}"] = value
    return found
