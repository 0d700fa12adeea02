"""A cell's folder: what was made there with which options, and how its run is started and ended."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from soft_trainer.errors import UserError
from soft_trainer.files import newest_complete, record_path, write_json
from soft_trainer.studies.grid import Cell, Study
from soft_trainer.terminal import print_on_main

RECORD, RECIPE, LOG = "cell.json", "recipe.yaml", "log.txt"
# The command of a cell, by its module.
COMMANDS = {None: "train", "soft_trainer.simcse": "simcse"}
ERROR = re.compile(r"(error: |[\w.]*(Error|Exception|Interrupt)\b)")
LAUNCHERS_OWN = ("subprocess.CalledProcessError", "torch.distributed.elastic")


class Stopped(Exception):
    """The study was told to end by this signal."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(signal.Signals(number).name)


class RunningElsewhere(Exception):
    """Another study, or a run that outlived its study, holds the cell."""


def state(study: Study, cell: Cell) -> str:
    """`done`, `cut` (a whole checkpoint is there), `new`, or `changed` (made with other options)."""
    folder = study.folder(cell.name)
    before, results = _read(folder / RECORD), _read(record_path(folder))
    if before is None and results is None:
        return "new"
    if before is None or changes(study, cell):
        return "changed"
    if _trained(results):
        return "done"
    return "cut" if newest_complete(folder) else "new"


def changes(study: Study, cell: Cell) -> list[str]:
    """How the options of a cell, and of those it needs, differ from what its folder was made with."""
    before = _read(study.folder(cell.name) / RECORD)
    if before is None:
        return ["made without the study"]
    differences = []
    for place, now in _options(study, cell).items():
        then = before["options"].get(place, {})
        where = "" if place == cell.name else f"{place}: "
        for key in sorted({*now, *then}):
            if now.get(key) != then.get(key):
                differences.append(f"{where}{key} was {then.get(key, 'not given')}, is {now.get(key, 'not given')}")
    return differences


def spent(study: Study, cell: Cell) -> tuple[float, int | None] | None:
    """Seconds and steps of a finished cell, None for one that is not."""
    record = _read(study.folder(cell.name) / RECORD)
    return (record["seconds"], record.get("steps")) if record and record.get("finished") else None


def mrr_on_test(study: Study, cell: Cell) -> float | None:
    """The trained encoder's MRR on test."""
    results = _read(record_path(study.folder(cell.name))) or {}
    return results.get("results", {}).get("test", {}).get("trained", {}).get("mrr")


def clear(study: Study, cell: Cell) -> None:
    """Remove what a cell's folder holds, to make it again."""
    shutil.rmtree(study.folder(cell.name), ignore_errors=True)


def command(study: Study, cell: Cell, resume: bool = False) -> list[str]:
    """The words that start a cell's run.

    Raises:
        UserError: the launcher is not there.
    """
    launcher = shlex.split(study.launcher)
    if launcher[:2] == ["accelerate", "launch"]:  # that of this Python, also where it is not on the PATH
        launcher[:2] = [sys.executable, "-m", "accelerate.commands.launch"]
    if shutil.which(launcher[0]) is None:
        raise UserError(f"launcher={study.launcher!r}: no command {launcher[0]}")
    started = ["-m", "soft_trainer.cli", COMMANDS[cell.module]]
    config = ["--config", str(study.folder(cell.name) / RECIPE)]
    return [*launcher, *started, *config, *(["--resume_from_checkpoint", "last"] if resume else [])]


def recipe(study: Study, cell: Cell) -> dict:
    """The options that a cell's run is started with."""
    options = {**cell.options, "output_dir": str(study.folder(cell.name))}
    if cell.needs:
        options["estimator_model"] = ",".join(str(study.folder(needed)) for needed in cell.needs)
    return options


def run(study: Study, cell: Cell) -> str | None:
    """Run a cell to its end, its output in `log.txt`; returns what went wrong, None where nothing did.

    A cell that was cut goes on from its checkpoint, and one that another study has made meanwhile is left as it is.

    Raises:
        RunningElsewhere: somebody else runs it now.
        Stopped: the study was told to end; the run has saved a checkpoint and ended.
    """
    folder = study.folder(cell.name)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("ab") as log:
        _lock(log)
        found = state(study, cell)
        if found == "done":
            return None
        if found == "changed":
            return f"made meanwhile with other options: {'; '.join(changes(study, cell))}"
        spent_before = _read(folder / RECORD)["seconds"] if found == "cut" else 0.0
        record = {"options": _options(study, cell), "finished": False, "seconds": spent_before}
        write_json(folder / RECORD, record)
        (folder / RECIPE).write_text(yaml.safe_dump(recipe(study, cell), sort_keys=True))
        start, offset = time.monotonic(), log.tell()
        try:
            code = _wait(command(study, cell, resume=found == "cut"), log)
        finally:
            record["seconds"] += time.monotonic() - start
            write_json(folder / RECORD, record)
    results = _read(record_path(folder))
    if code or not _trained(results):
        return _last_error(folder / LOG, offset) or f"ended with exit code {code} and no results"
    write_json(folder / RECORD, record | {"finished": True, "steps": results.get("training", {}).get("steps")})
    if not study.keep_checkpoints:
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    return None


def _lock(log) -> None:
    """Lock a cell by its log. The run inherits the lock with its output, so one that outlives its study keeps it."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunningElsewhere(log.name) from None
    except OSError:
        print_on_main(f"warning: {log.name} is on a file system without locks: run one study at a time there")


def _wait(words: list[str], log) -> int:
    """Run a command to its end; a `Stopped` on the way ends it first."""
    # In a session of its own, so that Ctrl-C reaches the study alone, which lets the run save a checkpoint.
    process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait()
    except Stopped:
        _terminate(process)
        raise


def _terminate(process: subprocess.Popen) -> None:
    """Tell the run, not its launcher, to end, and wait; told a second time, kill."""
    try:
        # `accelerate launch` would die of SIGTERM at once and leave the run to itself. Data workers are left alone.
        for child in psutil.Process(process.pid).children() or [process]:
            child.terminate()
        process.wait()
    except Stopped:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    except psutil.NoSuchProcess:
        process.wait()


def _options(study: Study, cell: Cell) -> dict[str, dict]:
    """`{cell: options}` of a cell and of those it needs, as words, without folders that may move."""
    return {name: _words(study.cells[name].options) for name in (cell.name, *cell.needs)}


def _words(options) -> dict[str, str]:
    return {key: _word(value) for key, value in options.items() if value is not None}


def _word(value) -> str:
    """A value as text; numbers that are equal read alike, however they were written."""
    if isinstance(value, bool | list | dict):
        return json.dumps(value)
    try:
        return f"{float(value):.12g}"
    except ValueError:
        return str(value)


def _trained(results: dict | None) -> bool:
    """Whether a record is that of a run that has trained."""
    splits = (results or {}).get("results", {})
    return bool(results) and ("train" in results or any("trained" in systems for systems in splits.values()))


def _read(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _last_error(path: Path, offset: int) -> str | None:
    """The last line of a log, from `offset` on, that says what went wrong; the launcher's report does not count."""
    with path.open("rb") as log:
        log.seek(offset)
        lines = re.split(r"[\r\n]+", log.read().decode(errors="replace"))
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if ERROR.match(line) and not line.startswith(LAUNCHERS_OWN)]
    return (errors or lines or [None])[-1]
