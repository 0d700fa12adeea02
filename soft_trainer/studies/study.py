"""Runs a study's configurations with several seeds. Finished runs are skipped, and interrupted ones are resumed."""

from __future__ import annotations

import fcntl
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from soft_trainer.errors import UserError, name_option
from soft_trainer.files import RECORD, STUDIED, read_json, write_json
from soft_trainer.options.parse import parse
from soft_trainer.options.recipes import read_recipe
from soft_trainer.terminal import print_on_main, table
from soft_trainer.training.checkpoints import newest_complete
from soft_trainer.training.identity import (
    KINDS,
    STUDY,
    changed_versions,
    differences,
    launched_with,
    option_values,
    run_identity,
)

KEYS = ("launcher", "options", "output_dir", "runs", "seeds")
PLACEHOLDER = re.compile(r"\{([\w.-]+)\}")
RECIPE = "recipe.yaml"
LOG = "log.txt"

# Options that a run cannot set, because the study does.
_OF_STUDY = {"seed": "the study's `seeds` decide", "output_dir": "the study's `output_dir` decides"}


@dataclass(frozen=True)
class PlannedRun:
    """One configuration of a study with one seed."""

    name: str  # METHOD/SEED, which is also its folder in the study's folder
    options: Mapping[str, object]


@dataclass(frozen=True)
class Study:
    """A study as described in its YAML file."""

    output_dir: Path
    launcher: str
    runs: Sequence[PlannedRun]

    def folder(self, run: PlannedRun) -> Path:
        """Returns a run's output folder."""
        return self.output_dir / run.name


def read_study(path: str | Path, changes: Mapping[str, str] | None = None, output_dir: str | None = None) -> Study:
    """Reads a study from a YAML file.

    A study has an `output_dir`, `seeds`, and `runs`, which maps names to options. A run's option `config` is a recipe
    to start from. A study may also have `options` for all runs and a `launcher`. In a value, `{option}` is replaced by
    another option, and `{name}` by the folder of the run with this name and the same seed.

    Args:
        changes: options for all runs, which override the YAML.
        output_dir: overrides the YAML.

    Raises:
        UserError: the file is not a study, or it has an unknown key or placeholder.
    """
    path = Path(path)
    content = read_recipe(path)
    if "runs" not in content:
        raise UserError(
            f"{path}: has no runs, so it is not a study; `soft-trainer train` takes it with {name_option('config')}"
        )
    for name in content:
        if name not in KEYS:
            raise UserError(f"{path}: unknown key {name!r}; a study has {', '.join(KEYS)}")
    if not isinstance(content["runs"], dict) or not content["runs"]:
        raise UserError(f"{path}: runs: a mapping is expected")
    if not isinstance(content.get("seeds"), list) or not content["seeds"]:
        raise UserError(f"{path}: seeds: a list is expected")
    shared = content.get("options") or {}
    changes = dict(changes or {})
    root = output_dir or content.get("output_dir")
    if not root:
        raise UserError(f"{path}: name an output_dir, the parent of the runs' folders")
    root = Path(_filled(str(root), shared | changes))
    runs = []
    own = {name: _with_recipe(options, path.parent) for name, options in content["runs"].items()}
    for seed in content["seeds"]:
        folders = {name: root / name / str(seed) for name in own}
        for name, (recipe, options) in own.items():
            options = shared | options | changes
            for key, decides in _OF_STUDY.items():
                if key in options:
                    raise UserError(f"{path}: {name}: {key}: {decides}")
            options = recipe | options | {"seed": seed}
            known = options | folders
            try:
                options = {key: _filled(value, known) for key, value in options.items()}
            except UserError as error:
                raise UserError(f"{path}: {name}: {error}") from error
            runs.append(PlannedRun(f"{name}/{seed}", options | {"output_dir": str(folders[name])}))
    return Study(root, content.get("launcher") or "accelerate launch", runs)


def _with_recipe(options: Mapping | None, folder: Path) -> tuple[dict, dict]:
    """Returns a run's options, together with those of the recipe that it starts from."""
    options = dict(options or {})
    config = options.pop("config", None)
    if config is None:
        return {}, options
    recipe = read_recipe(folder / config)
    recipe.pop("output_dir", None)
    return recipe, options


def _filled(value, known: Mapping):
    """Replaces the placeholders in a value."""
    if not isinstance(value, str):
        return value

    def text_of(match: re.Match) -> str:
        if match[1] not in known:
            raise UserError(
                f"{match[0]}: no option or run has this name; set it with {name_option('set')} {match[1]}=..."
            )
        return str(known[match[1]])

    return PLACEHOLDER.sub(text_of, value)


def check_options(run: PlannedRun) -> tuple:
    """Returns the parsed options of a run. Raises UserError if an option is unknown or has an invalid value."""
    try:
        return parse(KINDS, [], options={**run.options, "use_cpu": True})  # the device is not checked
    except UserError as error:
        raise UserError(f"{run.name}: {error}") from error


# ---- The folder of a run ----


def identity_of(study: Study, run: PlannedRun) -> dict[str, dict]:
    """Returns all that a run's results depend on, as far as it is known before anything is loaded.

    An option that is not given counts as such, even where its default is given in another run: some defaults depend on
    the encoder.
    """
    parts = check_options(run)
    given = {name: value for name, value in option_values(*parts).items() if name in parts[0].given}
    return run_identity(given, launched_with(study.launcher), study.output_dir)


def state_of(study: Study, run: PlannedRun) -> tuple[str, list[str]]:
    """Returns a run's state ("new", "stopped", "done" or "changed") and what has changed since it was made."""
    folder = study.folder(run)
    made_with = _read(folder / STUDIED)
    finished = "training" in (_read(folder / RECORD) or {})
    if made_with is None:
        if finished:
            return "changed", ["made without the study"]
        return "new", []
    identity = identity_of(study, run)
    changes = differences(made_with, identity, STUDY)
    if changes:
        return "changed", changes
    if finished:
        return "done", changed_versions(made_with, identity)
    if newest_complete(folder):
        return "stopped", []
    return "new", []


def _read(path: Path) -> dict | None:
    with suppress(UserError):
        return read_json(path)
    return None


# ---- The runs ----


def plan(study: Study) -> str:
    """Returns a table of the runs and their states."""
    rows = []
    for run in study.runs:
        state, changes = state_of(study, run)
        rows.append([run.name, state, "; ".join(changes)])
    return table(("run", "state", "differs in"), rows)


def run_all(study: Study, redo: bool = False) -> int:
    """Starts every run that is not done, one after the other, and prints a summary.

    Args:
        redo: delete and repeat runs that were made with other settings.

    Returns:
        0 if all runs are done, 1 if one failed, 130 after Ctrl-C.

    Raises:
        UserError: a run was made with other settings, or `redo` would delete a run that is still running.
    """
    for run in study.runs:
        state, changes = state_of(study, run)
        if state != "changed":
            continue
        if not redo:
            raise UserError(
                f"{study.folder(run)}: was made with other settings: {'; '.join(changes)}. Write to another "
                f"{name_option('output_dir')}, or delete and repeat such runs with {name_option('redo')}"
            )
        with (study.folder(run) / LOG).open("ab") as log:
            if not _lock(log):
                raise UserError(
                    f"{study.folder(run)}: its run is still in progress in another study; stop it before "
                    f"{name_option('redo')}"
                )
            shutil.rmtree(study.folder(run))
    outcomes = []
    code = 0
    try:
        for number, run in enumerate(study.runs, 1):
            outcome = _make(study, run, f"[{number}/{len(study.runs)}] {run.name}")
            outcomes.append([run.name, outcome, _mrr(study.folder(run))])
            if not outcome.startswith("done"):
                code = 1
    except KeyboardInterrupt:
        code = 130
        print_on_main("stopped; the same command continues from here")
    print_on_main(f"\n{table(('run', 'outcome', 'MRR on test'), outcomes)}")
    return code


def _make(study: Study, run: PlannedRun, title: str) -> str:
    """Starts a run in another process, unless it is done, and returns its outcome."""
    state, upgraded = state_of(study, run)
    if state == "done":
        return "; ".join(["done before", *upgraded])
    folder = study.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("ab") as log:
        if not _lock(log):
            return "held by another study, or by a run that one left over"
        write_json(folder / STUDIED, identity_of(study, run))
        (folder / RECIPE).write_text(yaml.safe_dump(dict(run.options), sort_keys=True))
        print_on_main(f"{title}: {'resumes' if state == 'stopped' else 'starts'}; output in {folder / LOG}")
        start = log.tell()
        # Ctrl-C reaches the study, the launcher and the run, because they share a process group.
        process = subprocess.Popen(_command(study, folder, state == "stopped"), stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        finally:
            process.wait()
    if code:
        return f"failed: {_last_line(folder / LOG, start)}"
    return "done"


def _lock(log) -> bool:
    """Locks a run's log, and thereby its folder, until the file is closed. Returns False if it is locked already.

    The run's process inherits the lock, because it may outlive a study that is killed.
    """
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        pass
    return True


def _command(study: Study, folder: Path, resume: bool) -> list[str]:
    """Returns a run's command line."""
    launcher = shlex.split(study.launcher)
    if launcher[:2] == ["accelerate", "launch"]:  # the one of this Python, even if it is not on the PATH
        launcher[:2] = [sys.executable, "-m", "accelerate.commands.launch"]
    if shutil.which(launcher[0]) is None:
        raise UserError(f"launcher={study.launcher!r}: no command {launcher[0]}")
    command = [*launcher, "-m", "soft_trainer.cli", "train", "--config", str(folder / RECIPE)]
    if resume:
        return [*command, "--resume_from_checkpoint", "last"]
    return command


def _last_line(log: Path, start: int) -> str:
    """Returns the last line of a log that looks like an error, or else its last line."""
    last = "no output"
    error = None
    for line in log.read_bytes()[start:].decode(errors="replace").splitlines():
        if line.strip():
            last = line.strip()
            # The launcher's own errors come after the error of the run.
            if re.match(r"error: |(?!subprocess\.|torch\.distributed\.)[\w.]*(Error|Exception)\b", line):
                error = last
    return error or last


def _mrr(folder: Path) -> float | None:
    """Returns the trained encoder's MRR on test, or None if it was not measured."""
    record = _read(folder / RECORD) or {}
    return record.get("results", {}).get("test", {}).get("trained", {}).get("mrr")
