"""Executes the runs of a study in order, each in another process, and reports the outcome of each."""

from __future__ import annotations

import fcntl
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import yaml

from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator
from soft_trainer.estimators.registry import ESTIMATORS
from soft_trainer.files import newest_complete, read_json, record_path, write_json
from soft_trainer.options.commands import BaselineArguments, SimCSEArguments
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.parse import parse
from soft_trainer.options.resolve import resolve_loss
from soft_trainer.options.training import SimCSETrainingArguments, SoftInfoNCETrainingArguments
from soft_trainer.studies.baseline import check_baseline
from soft_trainer.studies.grid import PlannedRun, Study
from soft_trainer.terminal import print_on_main, table

OPTIONS = "cell.json"
RECIPE = "recipe.yaml"
LOG = "log.txt"
OURS = (ModelArguments, DataArguments, SoftInfoNCETrainingArguments)
# The command of a run and its arguments, by its module.
COMMANDS = {
    None: ("train", OURS),
    "soft_trainer.simcse": ("simcse", (SimCSEArguments, SimCSETrainingArguments)),
    "soft_trainer.studies.baseline": ("baseline", (BaselineArguments, *OURS)),
}
DONE = ("done", "done before")
ERROR = re.compile(r"(error: |[\w.]*(Error|Exception|Interrupt)\b)")
LAUNCHER_ERRORS = ("subprocess.CalledProcessError", "torch.distributed.elastic")


def check(study: Study, run: PlannedRun) -> tuple:
    """Parses the arguments of a run.

    Raises:
        UserError: names the run; an unknown option, a value that it does not take, or a loss that cannot be made.
    """
    options = {**recipe(study, run), "use_cpu": True}  # checks nothing about a device
    try:
        if run.module not in COMMANDS:
            raise UserError(f"module={run.module}: use one of {', '.join(filter(None, COMMANDS))}, or none")
        parsed = parse(COMMANDS[run.module][1], [], options=options)
        if run.module is None:
            _, data, args = parsed
            entry = ESTIMATORS.get(data.estimator or "none")
            resolve_loss(args, None if entry and entry.estimator_class is None else Estimator())
        elif isinstance(parsed[0], BaselineArguments):
            check_baseline(*parsed[1:])
    except UserError as error:
        raise UserError(f"{run.name}: {error}") from error
    return parsed


# ---- The folder of a run ----


@dataclass(frozen=True)
class FolderState:
    """The state of a run's folder."""

    state: str  # `new`, `stopped` (a whole checkpoint is there), `done`, or `changed` (made with other options)
    changes: tuple[str, ...] = ()  # differences between the options now and those that the folder was made with
    seconds: float = 0.0  # spent so far
    mrr: float | None = None  # of the trained encoder on test

    @property
    def time(self) -> str:
        """The time spent so far, for people."""
        return str(timedelta(seconds=round(self.seconds)))


def progress(study: Study, run: PlannedRun) -> FolderState:
    """Reads the state of a run's folder, which another study may change at any time."""
    folder = study.folder(run.name)
    record = _read_json(folder / OPTIONS)
    results = _read_json(record_path(folder))
    if record is None:
        return FolderState("new") if results is None else FolderState("changed", ("made without the study",))
    changes = []
    for name, options in _options(study, run).items():
        before = record["options"].get(name, {})
        prefix = "" if name == run.name else f"{name}: "
        for key in sorted({*options, *before}):
            if options.get(key) != before.get(key):
                was, now = (values.get(key, "not given") for values in (before, options))
                changes.append(f"{prefix}{key} was {was}, is {now}")
    if changes or _finished(results):
        state = "changed" if changes else "done"
    else:
        state = "stopped" if newest_complete(folder) else "new"
    mrr = (results or {}).get("results", {}).get("test", {}).get("trained", {}).get("mrr")
    return FolderState(state, tuple(changes), record["seconds"], mrr)


def _options(study: Study, run: PlannedRun) -> dict[str, dict[str, str]]:
    """Returns the options of a run and of those that it needs, by name, as text; without folders, which may move."""
    return {
        name: {key: _text(value) for key, value in study.runs[name].options.items() if value is not None}
        for name in (run.name, *run.needs)
    }


def _text(value) -> str:
    """Formats a value; equal numbers give the same text, whichever way they were written."""
    if isinstance(value, bool | list | dict):
        return json.dumps(value)
    try:
        return f"{float(value):.12g}"
    except ValueError:
        return str(value)


def _finished(record: dict | None) -> bool:
    """Returns True for the record of a run or of a SimCSE encoder, which is written last, whatever it measured."""
    return bool({"training", "train"} & (record or {}).keys())


def _read_json(path: Path) -> dict | None:
    with suppress(UserError):
        return read_json(path)
    return None


# ---- The process of a run ----


def recipe(study: Study, run: PlannedRun) -> dict:
    """Returns the options that a run is started with."""
    options = {**run.options, "output_dir": str(study.folder(run.name))}
    if run.needs:
        options["estimator_model"] = ",".join(str(study.folder(needed)) for needed in run.needs)
    return options


def command(study: Study, run: PlannedRun, resume: bool = False) -> list[str]:
    """Returns the command line that starts a run.

    Raises:
        UserError: the launcher does not exist.
    """
    launcher = shlex.split(study.launcher)
    if launcher[:2] == ["accelerate", "launch"]:  # this Python's own, even if it is not on the PATH
        launcher[:2] = [sys.executable, "-m", "accelerate.commands.launch"]
    if shutil.which(launcher[0]) is None:
        raise UserError(f"launcher={study.launcher!r}: no command {launcher[0]}")
    start = ["-m", "soft_trainer.cli", COMMANDS[run.module][0], "--config", str(study.folder(run.name) / RECIPE)]
    return [*launcher, *start, *(["--resume_from_checkpoint", "last"] if resume else [])]


def execute(study: Study, run: PlannedRun) -> str | None:
    """Executes a run to its end and returns its error, None if it succeeded. The output goes to `log.txt`.

    A stopped run resumes from its checkpoint. A run that another study has finished meanwhile is left alone.

    Raises:
        BlockingIOError: another study, or a run that outlived its study, holds the folder.
    """
    folder = study.folder(run.name)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("ab") as log:
        _lock(log)  # the run inherits the lock, which therefore outlives a killed study
        before = progress(study, run)
        if before.state in ("done", "changed"):
            return f"meanwhile run with other options: {'; '.join(before.changes)}" if before.changes else None
        resume = before.state == "stopped"
        record = {"options": _options(study, run), "seconds": before.seconds if resume else 0.0}
        write_json(folder / OPTIONS, record)
        (folder / RECIPE).write_text(yaml.safe_dump(recipe(study, run), sort_keys=True))
        start = time.monotonic()
        offset = log.tell()
        # Ctrl-C reaches the study, the launcher and the run, as they share a process group.
        process = subprocess.Popen(command(study, run, resume), stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        finally:
            process.wait()
            write_json(folder / OPTIONS, record | {"seconds": record["seconds"] + time.monotonic() - start})
    if code or not _finished(_read_json(record_path(folder))):
        return last_error(folder / LOG, offset) or f"ended with exit code {code} and no results"
    if not study.keep_checkpoints:
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    return None


def _lock(log) -> None:
    """Locks a run's log, and with it its folder, until the file is closed.

    Raises:
        BlockingIOError: another study, or a run that outlived its study, holds the folder.
    """
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        print_on_main(f"warning: {log.name} is on a file system without locks: run one study at a time there")


def last_error(path: Path, offset: int) -> str | None:
    """Returns the last line of a log after `offset` that names an error of the run, or else its last line."""
    text = path.read_bytes()[offset:].decode(errors="replace")
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    errors = [line for line in lines if ERROR.match(line) and not line.startswith(LAUNCHER_ERRORS)]
    return (errors or lines or [None])[-1]


# ---- All runs ----


def plan(study: Study, chosen: Sequence[PlannedRun]) -> str:
    """Returns the runs in order, each with the state of its folder and the runs that it needs, as a table."""
    rows = [[n, run.name, progress(study, run).state, ", ".join(run.needs)] for n, run in enumerate(chosen, 1)]
    done = sum(state == "done" for _, _, state, _ in rows)
    summary = f"{len(chosen)} runs, {done} of them done; output in {study.output_dir}"
    return f"{table(('', 'run', 'state', 'needs'), rows)}\n\n{summary}\n"


def check_changes(study: Study, chosen: Sequence[PlannedRun], redo: bool) -> None:
    """Refuses runs that were made with other options, or deletes them if they should be repeated.

    Raises:
        UserError: names the first of them and its changes, or one that is running.
    """
    changed = {run.name: now.changes for run in chosen if (now := progress(study, run)).state == "changed"}
    if changed and not redo:
        first, changes = next(iter(changed.items()))
        raise UserError(
            f"{len(changed)} runs were made with other options, the first is {study.folder(first)}: "
            f"{'; '.join(changes)}. Write to another --output_dir, or delete and repeat them with --redo"
        )
    for folder in map(study.folder, changed):
        try:
            with (folder / LOG).open("ab") as log:
                _lock(log)
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            raise UserError(f"{folder}: its run goes on, started by another study; stop it before --redo") from None


def run_all(study: Study, chosen: Sequence[PlannedRun]) -> int:
    """Executes every run that is not done and whose needs are done, and prints a summary.

    Returns:
        0 if all are done, 1 if one is not, 130 after Ctrl-C.
    """
    outcomes: dict[str, tuple[str, str]] = {}  # name -> `done`, `done before`, `failed`, `not run`; the reason
    try:
        for number, run in enumerate(chosen, 1):
            outcomes[run.name] = _outcome(study, run, f"[{number}/{len(chosen)}] {run.name}", outcomes)
    except KeyboardInterrupt:
        outcomes[run.name] = ("stopped", "by Ctrl-C")
    states = {state for state, _ in outcomes.values()}
    rows = []
    for name, (state, reason) in outcomes.items():
        now = progress(study, study.runs[name])
        rows.append([name, state, now.mrr, now.time if state in DONE else None, reason])
    end = "\nstopped; the same command continues from here" if "stopped" in states else ""
    print_on_main(f"\n{table(('run', 'state', 'MRR on test', 'time', 'reason'), rows)}\n{end}")
    return 130 if "stopped" in states else int(not states.issubset(DONE))


def _outcome(study: Study, run: PlannedRun, title: str, outcomes: dict) -> tuple[str, str]:
    state = progress(study, run).state  # another study may have changed it meanwhile
    if state == "done":
        return "done before", ""
    if missing := [needed for needed in run.needs if outcomes[needed][0] not in DONE]:
        return "not run", f"needs {missing[0]}, which is {outcomes[missing[0]][0]}"
    verb = "resumes" if state == "stopped" else "starts"
    print_on_main(f"{title}: {verb}; output in {study.folder(run.name) / LOG}")
    try:
        error = execute(study, run)
    except BlockingIOError:
        return "not run", "another study, or a run left over from one, holds it now"
    if error is not None:
        print_on_main(f"{title}: failed: {error}")
        return "failed", error
    now = progress(study, run)
    mrr = "" if now.mrr is None else f", MRR {now.mrr:.3f} on test"
    print_on_main(f"{title}: done in {now.time}{mrr}")
    return "done", ""
