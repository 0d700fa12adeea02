"""Starts, stops and resumes one run of a study in a process of its own, and reads the state of its folder."""

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
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from soft_trainer.errors import UserError
from soft_trainer.files import newest_complete, record_path, write_json
from soft_trainer.studies.grid import PlannedRun, Study
from soft_trainer.terminal import print_on_main

RECORD, RECIPE, LOG = "cell.json", "recipe.yaml", "log.txt"
# The command of a run, by its module.
COMMANDS = {None: "train", "soft_trainer.simcse": "simcse", "soft_trainer.studies.baseline": "baseline"}
ERROR = re.compile(r"(error: |[\w.]*(Error|Exception|Interrupt)\b)")
LAUNCHER_ERRORS = ("subprocess.CalledProcessError", "torch.distributed.elastic")


class Stopped(Exception):
    """A signal told the study to end."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(signal.Signals(number).name)


class RunningElsewhere(Exception):
    """Another study, or a run that outlived its study, holds the folder."""


@dataclass(frozen=True)
class Progress:
    """The state of a run's folder."""

    state: str  # `new`, `stopped` (a whole checkpoint is there), `done`, or `changed` (made with other options)
    changes: tuple[str, ...] = ()  # differences between the options now and those that the folder was made with
    spent: float = 0.0  # seconds
    finished: tuple[float, int | None] | None = None  # seconds and steps of the whole run, None before its end
    mrr: float | None = None  # of the trained encoder on test


def progress(study: Study, run: PlannedRun) -> Progress:
    """Reads the state of a run's folder, which another study may change at any time."""
    folder = study.folder(run.name)
    record, results = _read_json(folder / RECORD), _read_json(record_path(folder))
    if record is None:
        return Progress("new") if results is None else Progress("changed", ("made without the study",))
    changes = tuple(_changes(record["options"], _options(study, run)))
    if changes:
        state = "changed"
    elif _trained(results):
        state = "done"
    else:
        state = "stopped" if newest_complete(folder) else "new"
    finished = (record["seconds"], record.get("steps")) if record.get("finished") else None
    mrr = (results or {}).get("results", {}).get("test", {}).get("trained", {}).get("mrr")
    return Progress(state, changes, record["seconds"], finished, mrr)


def _options(study: Study, run: PlannedRun) -> dict[str, dict[str, str]]:
    """The options of a run and of the runs that it needs, by name, as text, without folders, which may move."""
    return {
        name: {key: _text(value) for key, value in study.runs[name].options.items() if value is not None}
        for name in (run.name, *run.needs)
    }


def _text(value) -> str:
    """A value as text; equal numbers give the same text, whichever way they were written."""
    if isinstance(value, bool | list | dict):
        return json.dumps(value)
    try:
        return f"{float(value):.12g}"
    except ValueError:
        return str(value)


def _changes(before: dict[str, dict], now: dict[str, dict]):
    for (name, options), prefix in zip(now.items(), ("", *(f"{needed}: " for needed in list(now)[1:])), strict=True):
        earlier = before.get(name, {})
        for key in sorted({*options, *earlier}):
            if options.get(key) != earlier.get(key):
                yield f"{prefix}{key} was {earlier.get(key, 'not given')}, is {options.get(key, 'not given')}"


def _trained(results: dict | None) -> bool:
    """True if a record is that of a run that has trained."""
    splits = (results or {}).get("results", {})
    return bool(results) and ("train" in results or any("trained" in systems for systems in splits.values()))


def _read_json(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


# ---- The command ----


def recipe(study: Study, run: PlannedRun) -> dict:
    """The options that a run is started with."""
    options = {**run.options, "output_dir": str(study.folder(run.name))}
    if run.needs:
        options["estimator_model"] = ",".join(str(study.folder(needed)) for needed in run.needs)
    return options


def command(study: Study, run: PlannedRun, resume: bool = False) -> list[str]:
    """The words that start a run.

    Raises:
        UserError: the launcher does not exist.
    """
    launcher = shlex.split(study.launcher)
    if launcher[:2] == ["accelerate", "launch"]:  # this Python's own, even if it is not on the PATH
        launcher[:2] = [sys.executable, "-m", "accelerate.commands.launch"]
    if shutil.which(launcher[0]) is None:
        raise UserError(f"launcher={study.launcher!r}: no command {launcher[0]}")
    config = ["--config", str(study.folder(run.name) / RECIPE)]
    start = ["-m", "soft_trainer.cli", COMMANDS[run.module]]
    return [*launcher, *start, *config, *(["--resume_from_checkpoint", "last"] if resume else [])]


# ---- The process ----


def execute(study: Study, run: PlannedRun) -> str | None:
    """Runs a run to its end, with its output in `log.txt`. Returns its error, or None if it succeeded.

    A stopped run resumes from its checkpoint. A run that another study has finished meanwhile is left as it is.

    Raises:
        RunningElsewhere: another process holds the folder.
        Stopped: a signal told the study to end; the run has saved a checkpoint and ended.
    """
    folder = study.folder(run.name)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("ab") as log:
        _lock(log)
        before = progress(study, run)
        if before.state == "done":
            return None
        if before.state == "changed":
            return f"made meanwhile with other options: {'; '.join(before.changes)}"
        resume = before.state == "stopped"
        record = {"options": _options(study, run), "finished": False, "seconds": before.spent if resume else 0.0}
        write_json(folder / RECORD, record)
        (folder / RECIPE).write_text(yaml.safe_dump(recipe(study, run), sort_keys=True))
        start, offset = time.monotonic(), log.tell()
        try:
            code = _wait(command(study, run, resume), log)
        finally:
            record["seconds"] += time.monotonic() - start
            write_json(folder / RECORD, record)
    results = _read_json(record_path(folder))
    if code or not _trained(results):
        return last_error(folder / LOG, offset) or f"ended with exit code {code} and no results"
    write_json(folder / RECORD, record | {"finished": True, "steps": results.get("training", {}).get("steps")})
    if not study.keep_checkpoints:
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    return None


def _lock(log) -> None:
    """Hold a folder through its log; the run inherits the lock, so it outlives a study that is killed."""
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
    """Tell the run, not its launcher, to end, and wait; a second signal kills it."""
    try:
        # `accelerate launch` would die of SIGTERM at once and orphan the run. Data workers get no signal.
        for child in psutil.Process(process.pid).children() or [process]:
            child.terminate()
        process.wait()
    except Stopped:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    except psutil.NoSuchProcess:
        process.wait()


def last_error(path: Path, offset: int) -> str | None:
    """The last line of a log, from `offset` on, that names an error of the run, else its last line."""
    with path.open("rb") as log:
        log.seek(offset)
        lines = re.split(r"[\r\n]+", log.read().decode(errors="replace"))
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if ERROR.match(line) and not line.startswith(LAUNCHER_ERRORS)]
    return (errors or lines or [None])[-1]
