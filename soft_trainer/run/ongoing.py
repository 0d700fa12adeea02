"""Holds what belongs to a single training run of a trainer, which may train several times."""

from __future__ import annotations

import contextlib
from pathlib import Path

from transformers import EarlyStoppingCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from soft_trainer.run.folder import MARKER
from soft_trainer.run.interruption import Stopping
from soft_trainer.system.files import read_json
from soft_trainer.training.prepared_rows import PreparedRows


class Training:
    """The state of one call of `SoftInfoNCETrainer.train`. The trainer drops it when the call ends.

    Outside of `train`, a trainer has an object without a checkpoint, for steps and batches that a user asks for.

    Args:
        checkpoint: the folder of the checkpoint to resume from, or None.

    Attributes:
        prepared: what was computed from the rows before the first step, or None before that.
        losses_before: the sum of the losses of all steps before the checkpoint.
        step: the step of the checkpoint, or 0.
        stopped_early: True if early stopping ended training at the checkpoint.
        stopping: handles signals, and asks for checkpoints by time.
        false_negatives: the number of known positives among the other functions of this process's batches so far.
        contexts: the context managers to leave when training ends.
    """

    def __init__(self, checkpoint: str | None = None):
        self.checkpoint = checkpoint
        self.prepared: PreparedRows | None = None
        self.losses_before = 0.0
        self.step = 0
        self.stopped_early = False
        if checkpoint is not None:
            self.losses_before = read_json(Path(checkpoint) / MARKER).get("losses") or 0.0
            stored = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
            self.step = stored.global_step
            states = stored.stateful_callbacks.get(EarlyStoppingCallback.__name__, [])
            for each in [states] if isinstance(states, dict) else states:  # a list if there are several
                callback = EarlyStoppingCallback.from_state(each)
                self.stopped_early |= callback.early_stopping_patience_counter >= callback.early_stopping_patience
        self.stopping = Stopping()
        self.false_negatives = 0
        self.contexts = contextlib.ExitStack()
