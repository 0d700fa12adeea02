"""Runs a study's configurations with several seeds. Each run finds out whether it is finished or resumes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from soft_trainer.errors import UserError
from soft_trainer.options.parse import OF_A_RUN, parse
from soft_trainer.options.recipes import read_recipe
from soft_trainer.run.folder import record_of
from soft_trainer.system.files import CHECKPOINTS, is_finished, lock_file
from soft_trainer.system.terminal import print_on_main, table

KEYS = ("launcher", "options", "output_dir", "runs", "seeds")
PLACEHOLDER = re.compile(r"\{([\w.-]+)\}")
RECIPE = "recipe.yaml"
LOG = "log.txt"


@dataclass(frozen=True)
class PlannedRun:
    """One configuration of a study with one seed."""

    name: str  # METHOD/SEED, which is also the run's folder in the study's folder
    options: Mapping[str, object]

    @property
    def folder(self) -> Path:
        """The run's output folder."""
        return Path(self.options["output_dir"])


@dataclass(frozen=True)
class Study:
    """A study's runs, the launcher for each run, and the folder that contains the runs' output folders."""

    output_dir: Path
    launcher: str
    runs: Sequence[PlannedRun]


def read_study(path: str | Path, changes: Mapping[str, str] | None = None, output_dir: str | None = None) -> Study:
    """Reads a study from a YAML file.

    A study has an `output_dir`, `seeds`, and `runs`, which maps names to options. A run's option `config` is a recipe
    to start from. A study may also have `options` for all runs and a `launcher`. In a value, `{option}` is replaced
    with another option's value, and `{name}` with the folder of the run that has this name and the same seed.

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
            f"{path}: not a study, because it has no runs. To train with it, use `soft-trainer train --config`"
        )
    for name in content:
        if name not in KEYS:
            raise UserError(f"{path}: unknown key {name!r}; the keys of a study are {', '.join(KEYS)}")
    for key, kind, named in (("runs", dict, "mapping of names to options"), ("seeds", list, "list of numbers")):
        if not isinstance(content.get(key), kind) or not content[key]:
            raise UserError(f"{path}: {key}: expected a {named}")
    root = output_dir or content.get("output_dir")
    if not root:
        raise UserError(f"{path}: set output_dir, the parent of the runs' folders")
    shared = content.get("options") or {}
    changes = dict(changes or {})
    root = Path(_filled(str(root), shared | changes))
    runs = []
    for seed in content["seeds"]:
        folders = {str(name): root / str(name) / str(seed) for name in content["runs"]}
        for name, own in content["runs"].items():
            options = shared | (own or {}) | changes
            for key in ("seed", "output_dir"):
                if key in options:
                    raise UserError(f"{path}: {name} has {key}, which the study sets; remove it")
            recipe = {}
            if "config" in options:
                recipe = read_recipe(path.parent / options.pop("config"))
            folder = str(folders[str(name)])
            options = recipe | options | {"seed": seed, "output_dir": folder}
            # A run replaces {language} in the paths of rows itself, once for each language.
            known = options | folders
            of_rows = known | {"language": "{language}"}
            for key, value in options.items():
                options[key] = _filled(value, of_rows if key in ("data_dir", "eval_data_dir") else known)
            runs.append(PlannedRun(f"{name}/{seed}", options))
    return Study(root, content.get("launcher") or "accelerate launch", runs)


def _filled(value, known: Mapping):
    """Replaces each placeholder in a string, such as `{language}`, with its value in `known`."""
    if not isinstance(value, str):
        return value

    def text_of(match: re.Match) -> str:
        if match[1] not in known:
            raise UserError(f"{match[0]}: no option or run has this name; set it with --set {match[1]}=...")
        return str(known[match[1]])

    return PLACEHOLDER.sub(text_of, value)


def check_options(run: PlannedRun) -> None:
    """Raises UserError if an option of a run is unknown or has an invalid value."""
    try:
        parse(OF_A_RUN, [], options={**run.options, "use_cpu": True})  # the device is not checked
    except UserError as error:
        raise UserError(f"{run.name}: {error}") from error


# ---- The runs ----


def plan(study: Study) -> str:
    """Returns a table of a study's runs: finished, begun or new. Each run compares its settings when it starts."""
    rows = []
    for run in study.runs:
        state = "begun" if any(run.folder.glob(CHECKPOINTS)) else "new"
        if is_finished(record_of(run.folder)):
            state = "finished"
        rows.append([run.name, state])
    return table(("run", "state"), rows)


def run_all(study: Study, redo: bool = False) -> int:
    """Starts the runs, one at a time, and prints a summary. Each run decides whether it is done, resumes or begins.

    Args:
        redo: whether to repeat the runs from the beginning.

    Returns:
        0 if all runs are done, 1 if one failed, 130 after Ctrl-C.
    """
    outcomes = []
    code = 0
    try:
        for number, run in enumerate(study.runs, 1):
            outcome = _make(study, run, redo, f"[{number}/{len(study.runs)}] {run.name}")
            done = outcome.startswith("done")
            outcomes.append([run.name, outcome, _mrr(run.folder) if done else None])
            if not done:
                code = 1
    except KeyboardInterrupt:
        code = 130
        print_on_main(f"stopped; run the same command {'without --redo ' if redo else ''}to continue")
    print_on_main(f"\n{table(('run', 'outcome', 'MRR on test'), outcomes)}")
    return code


def _make(study: Study, run: PlannedRun, redo: bool, title: str) -> str:
    """Starts a run in another process. Returns an outcome, such as "done" or "failed: ..."."""
    folder = run.folder
    folder.mkdir(parents=True, exist_ok=True)
    # The run's process inherits the lock of its log, because it may outlive a study that is killed.
    with (folder / LOG).open("ab") as log:
        if not lock_file(log):
            return "skipped: another study has it open"
        (folder / RECIPE).write_text(yaml.safe_dump(dict(run.options), sort_keys=True))
        print_on_main(f"{title}: output in {folder / LOG}")
        start = log.tell()
        # Ctrl-C reaches the study, the launcher and the run, because they share a process group.
        process = subprocess.Popen(_command(study, folder, redo), stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        finally:
            process.wait()
    return f"failed: {_last_line(folder / LOG, start)}" if code else "done"


def _command(study: Study, folder: Path, overwrite: bool) -> list[str]:
    """Returns the command line that trains with the recipe in a run's folder."""
    launcher = shlex.split(study.launcher)
    if launcher[:2] == ["accelerate", "launch"]:  # this Python's `accelerate`, even if it is not on the PATH
        launcher[:2] = [sys.executable, "-m", "accelerate.commands.launch"]
    words = ["--overwrite", "true"] if overwrite else []
    return [*launcher, "-m", "soft_trainer.cli", "train", "--config", str(folder / RECIPE), *words]


def _last_line(log: Path, start: int) -> str:
    """Returns the last error of a run in its log, after byte `start`, or else the last line."""
    lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1].strip()


def _mrr(folder: Path) -> float | None:
    """Returns the trained encoder's MRR on test (the mean over several test sets), or None without a test result."""
    found = []
    for name, systems in record_of(folder).get("results", {}).items():
        if name.split("-")[0] == "test" and "trained" in systems:
            found.append(systems["trained"]["mrr"])
    return sum(found) / len(found) if found else None
