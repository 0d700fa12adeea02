"""Folders that a trainer writes: the encoder for every library, and checkpoints, of which older ones go last."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from soft_trainer import distributed
from soft_trainer.files import mark_complete, reporting_disk_errors, saving_checkpoint, write_text
from soft_trainer.hub.export import export_encoder


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
    args, folder = trainer.args, Path(run) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    limit, args.save_total_limit = args.save_total_limit, None
    try:
        with saving_checkpoint(folder):
            yield
    finally:
        args.save_total_limit = limit
    distributed.barrier()
    if args.should_save:
        with saving_checkpoint(folder):
            mark_complete(folder)
        rotate_checkpoints(run, limit, trainer.state.best_model_checkpoint, use_mtime=True)
