"""Marks checkpoints as complete, finds the newest, and compares a checkpoint with the run that resumes from it."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from transformers import TrainingArguments

from soft_trainer import distributed
from soft_trainer.data.judgments import Split
from soft_trainer.encoders.adapters import active_adapter, has_adapter
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.files import read_json, reporting_disk_errors, write_json
from soft_trainer.fingerprints import (
    class_fingerprint,
    differences,
    model_fingerprint,
    plain_settings,
    tokenizer_fingerprint,
)
from soft_trainer.options.resolve import Plan
from soft_trainer.options.training import step_options
from soft_trainer.terminal import print_on_main

# ---- The run that a checkpoint belongs to ----

MARKER = "complete.json"
FORMAT = 1  # the version of checkpoints and of how batches are drawn; training resumes only in the same version
# Settings that cannot be read from an adapter's weights.
ADAPTER = ("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora")
# Estimator arguments that do not affect similarities, or that the fingerprint of the encoder covers.
_UNREAD = {"cache_dir", "batch_size", "trust_remote_code", "model_name_or_path"}


def identify(describe: Callable[[], Mapping], checkpoint: str | None) -> dict[str, object]:
    """Returns the settings to store in checkpoints, after comparing them with the checkpoint to resume from.

    Only the main process does this, because other processes may not have the weights or the folder. They get an empty
    dict.

    Args:
        describe: returns `training_settings` or `start_settings`.
        checkpoint: the folder of the checkpoint to resume from, or None.

    Raises:
        UserError: the settings differ, or the checkpoint contains only weights.
    """
    identity = {}
    problem = None
    if distributed.rank_and_world_size()[0] == 0:
        identity = plain_settings(describe())
        if checkpoint:
            problem = _difference(checkpoint, identity)
    problem = distributed.from_main(problem)
    if problem is not None:
        raise UserError(problem)
    return identity


def training_settings(args: TrainingArguments, plan: Plan, encoder: EncoderProfile, model, tokenizer, split: Split):
    """Returns the settings of a training run, with fingerprints of its rows, tokenizer and frozen weights."""
    frozen = {name: tensor for name, tensor in model.named_parameters() if not tensor.requires_grad}
    profile = dataclasses.asdict(encoder)
    del profile["name"]
    del profile["matryoshka_dims"]  # training reads the option with that name instead
    del profile["teacher"]  # it may have moved, and the estimator is compared by what it is
    del profile["teacher_identity"]
    adapter = model.peft_config[active_adapter(model)] if has_adapter(model) else None
    return (
        step_options(args)
        | profile
        | dataclasses.asdict(plan.objective)
        | plan.objective.sources
        | {f"the adapter's {name}": getattr(adapter, name, None) for name in ADAPTER}
        | {
            "format": FORMAT,
            "save_only_model": args.save_only_model,
            "dtype": str(model.dtype),
            "processes": args.world_size,
            "the training rows": split.fingerprint(),
            "the tokenizer": tokenizer_fingerprint(tokenizer),
            "the model's configuration or frozen weights": model_fingerprint(model, frozen),
        }
    )


def start_settings(estimator, model, weights_before: Mapping | None) -> dict[str, object]:
    """Returns the fitted estimator's arguments, with fingerprints of its encoder and the weights to merge with."""
    settings = {"the weights to merge with": None, "estimator": None}
    if weights_before:
        settings["the weights to merge with"] = model_fingerprint(model, weights_before)
    if estimator is None:
        return settings
    plain = {}
    for name in sorted(inspect.signature(type(estimator)).parameters.keys() - _UNREAD):
        value = getattr(estimator, name, None)
        if isinstance(value, str | int | float | bool | None):
            plain[name] = value
    settings["estimator"] = [type(estimator).__name__, plain]
    settings["the source of the estimator"] = None
    if not type(estimator).__module__.startswith("soft_trainer."):
        settings["the source of the estimator"] = class_fingerprint(type(estimator))
    settings["the estimator's encoder"] = getattr(estimator, "encoder_identity", None)
    return settings


def _difference(checkpoint: str, identity: Mapping) -> str | None:
    """Returns the reason why training cannot resume from a checkpoint, or None if it can."""
    then = read_json(Path(checkpoint) / MARKER)["training"]
    if then.get("save_only_model"):
        return f"{checkpoint}: it contains only weights (save_only_model), so a run cannot be resumed from it"
    changed = differences(then, identity)
    if not changed:
        return None
    return (
        f"{checkpoint}: {'; '.join(changed[:3])}. A training continues with the settings that it began with; only its "
        "length, logging and saving may change. Leave resume_from_checkpoint out to begin another one"
    )


# ---- Complete checkpoints ----


@contextmanager
def saving_checkpoint(folder: str | Path) -> Iterator[None]:
    """Reports disk errors like `reporting_disk_errors`, and removes a checkpoint that any error left unfinished."""
    try:
        with reporting_disk_errors(folder):
            (Path(folder) / MARKER).unlink(missing_ok=True)
            yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def mark_complete(folder: str | Path, training: Mapping) -> None:
    """Marks a checkpoint as complete by writing a file with the time, the run's settings and all file sizes.

    Args:
        training: the settings that a run must share with this one to resume from the checkpoint.

    Raises:
        UserError: the file cannot be written. The checkpoint has then been removed.
    """
    folder = Path(folder)
    with saving_checkpoint(folder):
        sizes = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                sizes[str(path.relative_to(folder))] = path.stat().st_size
        write_json(folder / MARKER, {"written": time.time(), "training": training, "sizes": sizes})


def _written(folder: Path) -> float | None:
    """Returns the time when a checkpoint was marked complete, or None if a file is missing or has a different size."""
    with suppress(OSError, UserError, KeyError, AttributeError):  # no marker of this version, or a missing file
        marker = read_json(folder / MARKER)
        if all((folder / name).stat().st_size == size for name, size in marker["sizes"].items()):
            return marker["written"]
    return None


def newest_complete(output_dir: str | Path) -> str | None:
    """Returns a run's newest complete checkpoint, or None. Warns about incomplete ones.

    The newest is the one that was written last. It need not have the highest step, because an earlier run may have
    written to this folder. The recorded time is used, because copying a folder changes modification times.
    """
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints  # slow to import

    times: dict[str, float] = {}
    for checkpoint in sort_checkpoints(str(output_dir), PREFIX_CHECKPOINT_DIR):
        written = _written(Path(checkpoint))
        if written is None:
            print_on_main(f"warning: skipping {checkpoint}: it is not complete, or another version wrote it")
        else:
            times[checkpoint] = written
    return max(times, key=times.get, default=None)


def last_checkpoint(wanted: str | bool | None, output_dir: str | Path) -> str | None:
    """Finds the checkpoint to resume from.

    Args:
        wanted: the value of `resume_from_checkpoint`: a checkpoint's folder, "last" or "true" for the newest complete
            checkpoint in `output_dir`, or "false" or None for no checkpoint.

    Returns:
        The checkpoint's folder, or None to start from the beginning.

    Raises:
        UserError: the folder does not exist, or it is not a complete checkpoint.
    """
    if wanted is None or str(wanted).lower() in ("false", "no"):
        return None
    if str(wanted).lower() in ("true", "last", "yes"):
        checkpoint = newest_complete(output_dir)
        if checkpoint is None:
            print_on_main(f"{output_dir} has no complete checkpoint to resume from: training starts at the first step")
        return checkpoint
    named = f"resume_from_checkpoint={wanted}"
    folder = Path(wanted)
    no_state = not (folder / "trainer_state.json").is_file()
    if not folder.is_dir():
        raise UserError(f"{named}: no such folder; `last` takes the newest checkpoint of the output folder")
    if no_state:
        raise UserError(f"{named}: it has no trainer_state.json, so it is not a training checkpoint")
    if _written(folder) is None:
        raise UserError(f"{named}: it is not complete (a file is missing or has changed), or another version wrote it")
    return str(wanted)
