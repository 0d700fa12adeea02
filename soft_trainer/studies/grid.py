"""Reads the YAML of a study: from a grid of options to the runs, each with its options and the runs that it needs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from soft_trainer.errors import UserError
from soft_trainer.options.recipes import read_recipe

KEYS = ("grid", "keep_checkpoints", "launcher", "once", "options", "output_dir")
ENTRY_KEYS = ("config", "module", "name", "needs")  # keys of an entry that are not options of its run
PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    name: str  # its folder below the study's folder
    place: Mapping[str, str]  # axis -> name of the run's entry; empty for a run outside of the grid
    options: Mapping[str, object]  # without the output folder
    needs: tuple[str, ...] = ()  # names of the runs whose output folders are its `estimator_model`
    module: str | None = None  # what trains in place of `train`, see `execution.COMMANDS`


@dataclass(frozen=True)
class Study:
    """The content of a study's YAML: the folder to write to, the launcher, and the runs by name."""

    output_dir: Path
    launcher: str
    keep_checkpoints: bool
    axes: Mapping[str, tuple[str, ...]]
    runs: Mapping[str, PlannedRun]

    def folder(self, name: str) -> Path:
        """Returns the output folder of a run."""
        return self.output_dir / name

    def chosen(self, only: str | None = None) -> list[PlannedRun]:
        """Returns the runs of the grid, each after the runs that it needs.

        Args:
            only: `axis=name` by comma; several names of one axis are alternatives.

        Raises:
            UserError: an unknown axis or name, or runs that need each other.
        """
        conditions: dict[str, set[str]] = {}
        for condition in only.split(",") if only else ():
            axis, _, name = condition.strip().partition("=")
            if name not in self.axes.get(axis, ()):
                known = "; ".join(f"{key}={'|'.join(names)}" for key, names in self.axes.items())
                raise UserError(f"only={condition}: write AXIS=NAME of {known}")
            conditions.setdefault(axis, set()).add(name)
        ordered: dict[str, PlannedRun] = {}

        # By hand, since `graphlib` sorts by layers and would not keep the order of the grid.
        def add(name: str, waiting: tuple[str, ...] = ()) -> None:
            """Adds a run after the runs that it needs; `waiting` are those that need it."""
            if name in waiting:
                raise UserError(f"needs: {' needs '.join((*waiting, name))}: no order is possible")
            for needed in self.runs[name].needs:
                add(needed, (*waiting, name))
            ordered.setdefault(name, self.runs[name])

        for run in self.runs.values():
            if run.place and all(run.place[axis] in names for axis, names in conditions.items()):
                add(run.name)
        return list(ordered.values())


def read_study(path: str | Path, changes: Mapping[str, str] | None = None, **settings) -> Study:
    """Reads a study from a YAML file.

    A study has `output_dir`, `grid` (`axis: [entry, ...]`), and may have `options` (of every run of the grid),
    `once` (`name: entry`, runs that others need), `launcher`, `keep_checkpoints`. An entry is a value of the option
    that its axis is named after, or a mapping of options with a `name`. It may name a recipe to start from
    (`config`) and runs that are made first (`needs`), whose folders become its `estimator_model`. Such a name is one
    of `once`, or another entry of the same axis, which means the run that differs in this entry alone. `{option}` in
    a value stands for another option.

    Args:
        changes: options of every run of the grid, which override the YAML; `NAME.option` for a run of `once`.
        settings: values of `output_dir`, `launcher` and `keep_checkpoints`; one that is not None overrides the YAML.

    Raises:
        UserError: the file is not a study, or has an unknown key, name or placeholder.
    """
    path = Path(path)
    content = read_recipe(path) | {key: value for key, value in settings.items() if value is not None}
    try:
        return _study(content, path.parent, dict(changes or {}))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _study(content: dict, folder: Path, changes: dict) -> Study:
    grid = content.get("grid")
    unknown = set(content) - set(KEYS)
    recipe = "the recipe of one run is for `soft-trainer train --config`"
    if not grid or not isinstance(grid, dict):
        raise UserError(f"no grid, so it is not a study; {recipe}")
    if unknown:
        raise UserError(f"unknown key {min(unknown, default='')!r}; a study has {', '.join(KEYS)}")
    if not content.get("output_dir"):
        raise UserError("name an output_dir, where every run has its folder")
    shared = content.get("options") or {}
    once = content.get("once") or {}
    for name, part in (("options", shared), ("once", once)):
        if not isinstance(part, dict):
            raise UserError(f"{name}: a mapping is expected")
    for name, entry in once.items():
        if not isinstance(entry, dict):
            raise UserError(f"{name}: a mapping is expected")
    axes = {axis: _entries(axis, entries, folder) for axis, entries in grid.items()}
    once = {name: _entry({"name": name, **entry}, folder) for name, entry in once.items()}
    runs = {}
    for name, entry in once.items():
        own = {key.removeprefix(f"{name}."): changes.pop(key) for key in [*changes] if key.startswith(f"{name}.")}
        options = _filled(entry["config"] | entry["options"] | own, {})
        runs[name] = PlannedRun(name, {}, options, entry["needs"], entry["module"])
    taken = min(set(changes) & set(axes), default=None)
    if taken:
        raise UserError(f"set {taken}: it is an axis of the grid, choose from it with --only {taken}=...")
    for entries in itertools.product(*axes.values()):
        run = _run_of_grid(dict(zip(axes, entries, strict=True)), shared, changes, once)
        if run.name in runs:
            raise UserError(f"{run.name}: two runs have this name; give their entries different ones")
        runs[run.name] = run
    missing = (f"{run.name} needs {needed}" for run in runs.values() for needed in run.needs if needed not in runs)
    first = next(missing, None)
    if first:
        raise UserError(f"{first}, which is neither in the grid nor under once")
    return Study(
        output_dir=Path(content["output_dir"]),
        launcher=content.get("launcher") or "accelerate launch",
        keep_checkpoints=bool(content.get("keep_checkpoints")),
        axes={axis: tuple(entry["name"] for entry in entries) for axis, entries in axes.items()},
        runs=runs,
    )


def _entries(axis: str, entries: object, folder: Path) -> list[dict]:
    """Returns the entries of an axis, each in the parts of `_entry`."""
    if not isinstance(entries, list) or not entries:
        raise UserError(f"grid: {axis}: a list of entries is expected")
    entries = [entry if isinstance(entry, dict) else {"name": _as_text(entry, "-"), axis: entry} for entry in entries]
    unnamed = next((entry for entry in entries if "name" not in entry), None)
    if unnamed is not None:
        raise UserError(f"grid: {axis}: {unnamed}: give it a name, which becomes a folder's name")
    return [_entry(entry, folder) for entry in entries]


def _entry(content: dict, folder: Path) -> dict:
    """Splits an entry into its name, the options of its recipe, its own, the runs that it needs, and its module."""
    needs = content.get("needs") or ()
    name = str(content["name"])
    path = Path(name)
    outside = path.is_absolute() or ".." in path.parts or not path.parts
    if outside:
        raise UserError(f"{name!r} cannot be a folder of the study: write {{name: NAME, OPTION: {name!r}}}")
    return {
        "name": name,
        "config": read_recipe(folder / content["config"]) if "config" in content else {},
        "options": {key: value for key, value in content.items() if key not in ENTRY_KEYS},
        "needs": (needs,) if isinstance(needs, str) else tuple(needs),
        "module": content.get("module"),
    }


def _run_of_grid(entries: dict[str, dict], shared: dict, changes: dict, once: dict) -> PlannedRun:
    """Returns the run with these entries, one of each axis."""
    place = {axis: entry["name"] for axis, entry in entries.items()}
    recipes, own = ([entry[part] for entry in entries.values()] for part in ("config", "options"))
    # The last of them wins.
    options = {key: value for part in (*recipes, shared, *own, changes) for key, value in part.items()}
    needs = tuple(
        needed if needed in once else "/".join((place | {axis: needed}).values())
        for axis, entry in entries.items()
        for needed in entry["needs"]
    )
    name = "/".join(place.values())
    modules = sorted({entry["module"] for entry in entries.values()} - {None})
    if len(modules) > 1:
        raise UserError(f"{name}: it has two modules, {' and '.join(modules)}")
    return PlannedRun(name, place, _filled(options, place), needs, modules[0] if modules else None)


def _filled(options: dict, place: dict[str, str]) -> dict:
    """Returns the options with their placeholders replaced, without the output folder that a recipe names."""
    known = {**place, **{key: value for key, value in options.items() if value is not None}}

    def value_of(match: re.Match) -> str:
        if match[1] not in known:
            raise UserError(f"{match[0]}: no option {match[1]!r} is given: --set {match[1]}=...")
        return _as_text(known[match[1]])

    def filled(value):
        if isinstance(value, list):
            return [filled(item) for item in value]
        return PLACEHOLDER.sub(value_of, value) if isinstance(value, str) else value

    return {key: filled(value) for key, value in options.items() if key != "output_dir"}


def _as_text(value, between: str = ",") -> str:
    """Writes a value as text, a list joined by `between`: in a name no comma, at which `--only` splits."""
    return between.join(map(str, value)) if isinstance(value, list) else str(value)
