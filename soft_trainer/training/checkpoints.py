"""Checkpoints: written whole, before older ones are deleted, and where a run that is stopped from outside goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from soft_trainer import distributed
from soft_trainer.errors import UserError
from soft_trainer.files import (
    MARKER,
    mark_complete,
    newest_complete,
    read_json,
    reporting_disk_errors,
    saving_checkpoint,
    write_text,
)
from soft_trainer.hub.export import export_encoder
from soft_trainer.identity import (
    differences,
    model_fingerprint,
    plain_settings,
    tokenizer_fingerprint,
)
from soft_trainer.options.training import step_options
from soft_trainer.terminal import print_on_main


def save_encoder(trainer, folder: str | Path, state_dict=None, merge: bool = False) -> None:
    """Writes encoder, tokenizer, files of sentence-transformers, profile and training arguments.

    Args:
        merge: merge an adapter into the weights.

    Raises:
        UserError: the disk is full.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    with reporting_disk_errors(folder):
        profile = trainer.encoder.replace(matryoshka_dims=trainer.plan.dims)
        export_encoder(model, trainer.processing_class, profile, folder, state_dict, merge=merge)
        settings = json.dumps(trainer.args.to_dict(), indent=2, default=str)
        write_text(Path(folder) / "training_args.json", settings + "\n")


@contextlib.contextmanager
def whole_checkpoint(trainer, run: str) -> Iterator[None]:
    """Marks the checkpoint that the body writes into the folder `run` as whole, and only then deletes older ones.

    Raises:
        UserError: the disk is full. The unfinished checkpoint is removed.
    """
    args = trainer.args
    folder = Path(run) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    limit = args.save_total_limit
    args.save_total_limit = None
    try:
        with saving_checkpoint(folder):
            yield
    finally:
        args.save_total_limit = limit
    distributed.barrier()
    if args.should_save:
        with saving_checkpoint(folder):
            mark_complete(folder, trainer.identity)
        rotate_checkpoints(run, limit, trainer.state.best_model_checkpoint, use_mtime=True)


# ---- Which training a checkpoint is of ----

FORMAT = 1  # of checkpoints and of the batches of an epoch: a higher one cannot continue a training of a lower one
# Arguments of an estimator that leave its similarities as they are, or that its encoder's fingerprint stands for.
_UNREAD = {"cache_dir", "batch_size", "trust_remote_code", "model_name_or_path"}


def identify(trainer, checkpoint: str | None, describe: Callable[[], Mapping]) -> None:
    """Adds to what a checkpoint says of its training, and refuses to continue from one that says something else.

    Only the main process looks: others may not have the weights, or the folder.

    Raises:
        UserError: the settings that differ, or a checkpoint that does not hold all that a training needs.
    """
    problem = None
    if distributed.rank_and_world_size()[0] == 0:
        trainer.identity |= plain_settings(describe())
        problem = _difference(checkpoint, trainer.identity) if checkpoint else None
    problem = distributed.from_main(problem)
    if problem is not None:
        raise UserError(problem)


def training_settings(trainer) -> dict[str, object]:
    """Returns the settings of a training, and fingerprints of its rows, its tokenizer and what it does not train."""
    model = trainer.model
    frozen = {name: tensor for name, tensor in model.named_parameters() if not tensor.requires_grad}
    profile = dataclasses.asdict(trainer.encoder)
    del profile["name"]
    del profile["matryoshka_dims"]  # the option of that name says what is trained
    return (
        step_options(trainer.args)
        | profile
        | dataclasses.asdict(trainer.plan.loss)
        | {
            "format": FORMAT,
            "save_only_model": trainer.args.save_only_model,
            "dtype": str(model.dtype),
            "processes": trainer.args.world_size,
            "the training rows": trainer.train_split.fingerprint(),
            "the tokenizer": tokenizer_fingerprint(trainer.processing_class),
            "the model's configuration or frozen weights": model_fingerprint(model, frozen),
        }
    )


def start_settings(trainer) -> dict[str, object]:
    """Returns the arguments of the fitted estimator, and fingerprints of its encoder and of weights to merge with."""
    start = trainer._weights_before
    merged = {"the weights to merge with": start and model_fingerprint(trainer.model, start)}
    estimator = trainer.estimator
    if estimator is None:
        return merged | {"estimator": None}
    names = inspect.signature(type(estimator)).parameters.keys() - _UNREAD
    values = {name: getattr(estimator, name, None) for name in sorted(names)}
    plain = {name: value for name, value in values.items() if isinstance(value, str | int | float | bool | None)}
    encoder = getattr(estimator, "encoder_identity", None)
    return merged | {"estimator": [type(estimator).__name__, plain], "the estimator's encoder": encoder}


def _difference(checkpoint: str, identity: Mapping) -> str | None:
    """Says why a training cannot continue from a checkpoint, None if it can."""
    then = read_json(Path(checkpoint) / MARKER).get("training")
    if then is None:
        return f"{checkpoint}: another version wrote it, which did not record the settings; start again"
    if then.get("save_only_model"):
        return f"{checkpoint}: it holds weights alone (save_only_model), so no training continues from it"
    changed = differences(then, identity)
    if not changed:
        return None
    return (
        f"{checkpoint}: {'; '.join(changed[:3])}. A training continues with the settings that it began with; only its "
        "length, logging and saving may change. Leave resume_from_checkpoint out to begin another one"
    )


# ---- Stopped from outside ----


def how_to_continue(args) -> str:
    """Names the newest complete checkpoint and the call, or the command, that continues from it.

    Args:
        args: `TrainingArguments`; those that `parse` has read are continued by a command.
    """
    from_command = hasattr(args, "given")
    checkpoint = newest_complete(args.output_dir) if args.output_dir else None
    if checkpoint is None:
        again = "the same command starts" if from_command else "trainer.train() starts"
        return f"no checkpoint has been written; {again} from the first step"
    call = 'trainer.train(resume_from_checkpoint="last")'
    again = "the same command with --resume_from_checkpoint last" if from_command else call
    return f"{checkpoint} is kept; {again} continues from it"


@contextlib.contextmanager
def explaining_interruption(trainer, in_training: bool = False) -> Iterator[None]:
    """Gives a KeyboardInterrupt the line that says what is kept and how to continue.

    Args:
        in_training: name the step too.

    Raises:
        KeyboardInterrupt: with the line.
    """
    try:
        yield
    except KeyboardInterrupt as interruption:
        when = f" at step {trainer.state.global_step}" if in_training else ""
        line = str(interruption) or f"interrupted{when}: {how_to_continue(trainer.args)}"
        raise KeyboardInterrupt(line) from None


@contextlib.contextmanager
def stoppable(trainer) -> Iterator[None]:
    """Lets SIGTERM end the training in the body after a checkpoint, and Ctrl-C with a line on how to continue.

    Raises:
        SystemExit: stopped by SIGTERM, code 143.
        KeyboardInterrupt: with the line.
    """
    termination = SaveOnTermination()
    trainer.add_callback(termination)
    try:
        with explaining_interruption(trainer, in_training=True):
            yield
    finally:
        trainer.remove_callback(termination)
        if termination.before is not None:
            signal.signal(signal.SIGTERM, termination.before)
    if distributed.any_process(termination.terminated):
        if not _saved_last_step(trainer):  # the signal came after the last step
            trainer._save_checkpoint(trainer.model_wrapped, None)
        print_on_main(f"stopped by SIGTERM at step {trainer.state.global_step}: {how_to_continue(trainer.args)}")
        raise SystemExit(143)


def _saved_last_step(trainer) -> bool:
    folder = Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    return (folder / MARKER).is_file()


class SaveOnTermination(TrainerCallback):
    """On SIGTERM, finishes the step, saves a checkpoint and stops. All processes stop at the same step."""

    PERIOD = 10  # steps between two messages to the other processes

    def __init__(self):
        self.terminated = False
        self.before = None  # the handler that the training replaced

    def on_train_begin(self, args, state, control, **kwargs):
        """Handles the signal from now on, in the main thread."""
        # `auto_find_batch_size` begins a training again: the handler that comes back in the end is the first one.
        if threading.current_thread() is threading.main_thread() and self.before is None:
            self._process = os.getpid()
            self.before = signal.signal(signal.SIGTERM, self._on_signal)

    def on_step_end(self, args, state, control, **kwargs):
        """Saves and stops if a process has received the signal."""
        last = state.global_step >= state.max_steps
        asked = args.world_size == 1 or last or state.global_step % self.PERIOD == 0
        if asked and distributed.any_process(self.terminated):
            self.terminated = control.should_save = control.should_training_stop = True

    def _on_signal(self, number, frame):
        if os.getpid() == self._process:
            self.terminated = True
        else:  # a data worker: it inherited the handler and has nothing to save
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
