"""Keeps account of a run's output folder: which files the run wrote, so that the next one can remove them.

`run.json` lists them under "files", each with its hash and whether it may be pushed. Readers take what the list names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from soft_trainer import distributed
from soft_trainer.errors import UserError, name_option
from soft_trainer.files import LISTED, PUSHED_ROWS, RECORD, UNMERGED, listed_files
from soft_trainer.fingerprints import file_fingerprint
from soft_trainer.hub.push import encoder_files
from soft_trainer.options.declared import references
from soft_trainer.terminal import print_on_main

RANKS = "ranks-*.parquet"
# Files of a run that are not the encoder's. Everything else in the folder, such as a study's log, is left alone.
OWN_FILES = (RANKS, "training_args.json", "trainer_state.json", f"{PUSHED_ROWS}/*", f"{UNMERGED}/**/*")


class RunFolder:
    """A run's output folder.

    Args:
        path: the folder, which need not exist.
        resumes: True if the run continues from a checkpoint. Nothing is removed then, since it may yet be refused.
    """

    def __init__(self, path: str | Path, resumes: bool = False):
        self.path = Path(path)
        self.resumes = resumes
        self._before = self._states()
        self._kept: dict[str, dict] = {}

    def take_over(self, trains: bool) -> None:
        """Removes the files that the record of an earlier run lists, before this run writes its own.

        Args:
            trains: False if this run only measures. The encoder of an earlier training then stays, and only ranks go.
        """
        if self.resumes or distributed.rank_and_world_size()[0] != 0:
            return
        earlier = listed_files(self.path) or {}
        for name, described in earlier.items():
            path = self.path / name
            if trains or path.match(RANKS):
                path.unlink(missing_ok=True)
            elif path.is_file():
                self._kept[name] = described
        if earlier:
            (self.path / RECORD).unlink(missing_ok=True)  # so that a run that stops here leaves no record of another
        self._before = self._states()
        stale = sorted(name for name in self._before if Path(name).match(RANKS))
        if stale:
            print_on_main(f"warning: {self.path}: left alone, and read by nothing: {', '.join(stale)}")

    def written(self) -> dict[str, dict]:
        """Returns the files that this run has written, each with its hash and whether it may be pushed."""
        pushed = {path.relative_to(self.path).as_posix() for path in encoder_files(self.path)}
        files = dict(self._kept)
        for name, state in self._states().items():
            if self._before.get(name) != state:
                files[name] = {"hash": file_fingerprint(self.path / name), "pushed": name in pushed}
        return files

    def record(self, record: Mapping) -> dict:
        """Returns a record with the list of files."""
        return {**record, LISTED: self.written()}

    def _states(self) -> dict[str, tuple[int, ...]]:
        """Returns the inode, size and time of each file that may be a run's own."""
        if not self.path.is_dir():
            return {}
        found = set()
        with suppress(UserError):  # a broken configuration, which this run replaces
            found = encoder_files(self.path)
        for pattern in OWN_FILES:
            found |= {*self.path.glob(pattern)}
        states = {}
        for path in sorted(found):
            if path.is_file() and path.name != RECORD:
                status = path.stat()
                states[path.relative_to(self.path).as_posix()] = (status.st_ino, status.st_size, status.st_mtime_ns)
        return states


def check_inputs_apart(output_dir: str | Path, kinds: Sequence, options: Mapping[str, object]) -> None:
    """Raises UserError if a run would read what it removes: an option names the output folder, or a place in it."""
    folder = os.path.realpath(output_dir)
    for reference in references(kinds, options):
        for value in reference.values:
            inside = os.path.commonpath([folder, os.path.realpath(value)]) == folder
            if reference.kind != "place" and os.path.exists(value) and inside:
                raise UserError(
                    f"{reference.option}={value}: lies in the output folder, and the run would remove it; "
                    f"set another {name_option('output_dir')}"
                )
