"""Compares a checkpoint with the run that resumes from it, and saves a checkpoint on SIGTERM."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from transformers import TrainerCallback, TrainingArguments

from soft_trainer import distributed
from soft_trainer.data.judgments import Split
from soft_trainer.encoders.adapters import active_adapter, has_adapter
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.files import MARKER, newest_complete, read_json
from soft_trainer.identity import differences, model_fingerprint, plain_settings, tokenizer_fingerprint
from soft_trainer.options.resolve import Plan
from soft_trainer.options.training import step_options

# ---- The run that a checkpoint belongs to ----

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
    adapter = model.peft_config[active_adapter(model)] if has_adapter(model) else None
    return (
        step_options(args)
        | profile
        | dataclasses.asdict(plan.loss)
        | plan.loss.sources
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


# ---- Interruption ----


def how_to_continue(args) -> str:
    """Returns text for a message: the newest complete checkpoint, and how to resume from it.

    Args:
        args: the training arguments. If they come from `parse`, the text suggests a command, otherwise a Python call.
    """
    if hasattr(args, "given"):
        start = "the same command"
        resume = "the same command with --resume_from_checkpoint last"
    else:
        start = "trainer.train()"
        resume = 'trainer.train(resume_from_checkpoint="last")'
    checkpoint = newest_complete(args.output_dir) if args.output_dir else None
    if checkpoint is None:
        return f"no checkpoint has been written; {start} starts from the first step"
    return f"{checkpoint} is kept; {resume} continues from it"


@contextlib.contextmanager
def explaining_interruption(args, step: Callable[[], int] | None = None) -> Iterator[None]:
    """Gives a KeyboardInterrupt a message that says which checkpoint is kept and how to resume.

    Args:
        args: the training arguments.
        step: returns the current step for the message.

    Raises:
        KeyboardInterrupt: the body was interrupted.
    """
    try:
        yield
    except KeyboardInterrupt as interruption:
        line = str(interruption)
        if not line:
            when = f" at step {step()}" if step else ""
            line = f"interrupted{when}: {how_to_continue(args)}"
        raise KeyboardInterrupt(line) from None


class SaveOnTermination(TrainerCallback):
    """Saves a checkpoint and stops training after SIGTERM. All processes stop at the same step."""

    PERIOD = 10  # the number of steps between two messages to other processes

    def __init__(self):
        self.terminated = False
        self._before = None  # the previous handler

    def on_train_begin(self, args, state, control, **kwargs):
        """Installs the SIGTERM handler if training runs in the main thread."""
        # `auto_find_batch_size` may start training several times. Only the first call stores the previous handler.
        if threading.current_thread() is threading.main_thread() and self._before is None:
            self._process = os.getpid()
            self._before = signal.signal(signal.SIGTERM, self._on_signal)

    def on_step_end(self, args, state, control, **kwargs):
        """Saves a checkpoint and stops if any process has received SIGTERM."""
        last = state.global_step >= state.max_steps
        asked = args.world_size == 1 or last or state.global_step % self.PERIOD == 0
        if asked and distributed.any_process(self.terminated):
            self.terminated = control.should_save = control.should_training_stop = True

    def restore(self) -> None:
        """Restores the previous SIGTERM handler. Call this however training ended."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number, frame):
        if os.getpid() == self._process:
            self.terminated = True
        else:  # a data worker inherits the handler but has nothing to save
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
