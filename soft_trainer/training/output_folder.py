"""Writes a trained encoder to a run's output folder, in place of an earlier run's files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from soft_trainer import distributed
from soft_trainer.data.trained_rows import write_trained_rows
from soft_trainer.errors import UserError
from soft_trainer.files import (
    CARD,
    DEPENDS_ON,
    PREVIOUS_CARD,
    RECORD,
    RECORD_FORMAT,
    RESULT_FILES,
    TRAINING_FILES,
    files_matching,
    listed_files,
    write_json,
)
from soft_trainer.fingerprints import file_fingerprint

ASIDE = ".encoder"  # the subfolder of a new encoder until it replaces the encoder of an earlier run


class OutputFolder:
    """The folder that a run writes its encoder and its results to.

    Args:
        path: the folder.
        fingerprint: the run fingerprint before the encoder is loaded. Empty in Python and on all but the main process.
        trains: True if the run trains, False if it only evaluates.
    """

    def __init__(self, path: str | Path, fingerprint: Mapping | None = None, trains: bool = True):
        self.path = Path(path)
        self.fingerprint = dict(fingerprint or {})
        self.trains = trains

    def save_encoder(self, trainer) -> None:
        """Saves the trained encoder, and replaces the files of an earlier run. Every process calls this method."""
        aside = self.path / ASIDE
        trainer.save_model(str(aside), _internal_call=True)  # `Measurements.finish` writes the card
        if distributed.rank_and_world_size()[0] == 0:
            write_trained_rows(aside, trainer.train_split, trainer.encoder)
            self.clear()
            # The record lists no files until the run has been evaluated.
            depends_on = trainer.run_fingerprint | self.fingerprint
            write_json(self.path / RECORD, {"format": RECORD_FORMAT, DEPENDS_ON: depends_on})
            for path in sorted(aside.rglob("*")):
                if path.is_file():
                    target = self.path / path.relative_to(aside)
                    target.parent.mkdir(exist_ok=True)
                    path.replace(target)
            shutil.rmtree(aside)
        trainer.save_state()

    def clear(self) -> None:
        """Removes an earlier run's files that this run will replace, but only renames a model card that was edited."""
        listed = {}
        with suppress(UserError):
            listed = listed_files(self.path) or {}
        card = self.path / CARD
        edited = card.is_file() and listed.get(CARD) != file_fingerprint(card)
        if edited and self.trains:
            card.replace(self.path / PREVIOUS_CARD)
        (self.path / RECORD).unlink(missing_ok=True)  # first, so that the record never lists files of another run
        for name in files_matching(self.path, TRAINING_FILES if self.trains else RESULT_FILES):
            (self.path / name).unlink()
