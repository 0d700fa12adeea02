"""From a study's YAML to its cells: one cell is one run with its options and the cells that it needs first."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from soft_trainer.arguments import read_recipe
from soft_trainer.errors import UserError

KEYS = ("grid", "keep_checkpoints", "launcher", "once", "options", "output_dir")
ABOUT = ("config", "module", "name", "needs")  # keys of an entry that are no options of a run
PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Args:
        name: its folder below the study's.
        place: the entry that it takes of every axis, empty for a run outside of the grid.
        options: of the run, without its output folder.
        needs: names of the cells whose output folders are its `estimator_model`.
        module: what is trained in place of a code-search encoder: `soft_trainer.simcse`, or None.
    """

    name: str
    place: Mapping[str, str]
    options: Mapping[str, object]
    needs: tuple[str, ...] = ()
    module: str | None = None


@dataclass(frozen=True)
class Study:
    """What a study's YAML says: where to write, how to start a run, and its cells by name."""

    output_dir: Path
    launcher: str
    keep_checkpoints: bool
    axes: Mapping[str, tuple[str, ...]]
    cells: Mapping[str, Cell]

    def folder(self, cell: str) -> Path:
        """Where a cell writes."""
        return self.output_dir / cell

    def chosen(self, only: str | None = None) -> list[Cell]:
        """The cells of the grid and what they need, what is needed first.

        Args:
            only: `axis=name` by comma; several names of one axis are alternatives.
        """
        conditions = self._conditions(only)
        ordered: dict[str, Cell] = {}
        for cell in self.cells.values():
            if cell.place and all(cell.place[axis] in names for axis, names in conditions.items()):
                self._put(cell.name, ordered)
        if not ordered:
            raise UserError("the study has no cells: its grid names no run")
        return list(ordered.values())

    def _conditions(self, only: str | None) -> dict[str, set[str]]:
        conditions: dict[str, set[str]] = {}
        for condition in only.split(",") if only else ():
            axis, _, name = condition.strip().partition("=")
            if name not in self.axes.get(axis, ()):
                known = "; ".join(f"{key}={'|'.join(names)}" for key, names in self.axes.items())
                raise UserError(f"only={condition}: write AXIS=NAME of {known}")
            conditions.setdefault(axis, set()).add(name)
        return conditions

    def _put(self, name: str, ordered: dict[str, Cell], waiting: tuple[str, ...] = ()) -> None:
        """Add a cell after those that it needs."""
        if name in waiting:
            raise UserError(f"needs: {' needs '.join((*waiting, name))}: no order is possible")
        for needed in self.cells[name].needs:
            self._put(needed, ordered, (*waiting, name))
        ordered.setdefault(name, self.cells[name])


def read_study(path: str | Path, changes: Mapping[str, str] | None = None, **settings) -> Study:
    """The study of a YAML file.

    A study has `output_dir`, `grid` (`axis: [entry, ...]`), and may have `options` (of every cell of the grid),
    `once` (`name: entry`, runs that cells need), `launcher`, `keep_checkpoints`. An entry is a value of the option
    that its axis is named after, or a mapping of options with a `name`, and may name a recipe to start from
    (`config`) and cells that are made first (`needs`), whose folders become its `estimator_model`: a name of `once`,
    or of its own axis, in the cell that is the same otherwise. `{option}` in a value stands for another option.

    Args:
        changes: options for every cell of the grid, over what the YAML says; `NAME.option` for a run of `once`.
        settings: other values of `output_dir`, `launcher` and `keep_checkpoints`, where they are not None.

    Raises:
        UserError: a file that is no study, an unknown key, name or placeholder.
    """
    path, changes = Path(path), dict(changes or {})
    content = read_recipe(path)
    unknown = sorted(set(content) - set(KEYS))
    if unknown or not isinstance(content.get("grid"), dict):
        raise UserError(f"{path}: {f'unknown key {unknown[0]!r}' if unknown else 'no grid'}; a study has {KEYS}")
    content |= {key: value for key, value in settings.items() if value is not None}
    if "output_dir" not in content:
        raise UserError(f"{path}: name an output_dir, where every run has its folder")
    axes = {axis: _entries(path, axis, entries) for axis, entries in content["grid"].items()}
    once = {name: _read({"name": name, **entry}, path) for name, entry in (content.get("once") or {}).items()}
    cells = [_once(path, entry, changes) for entry in once.values()]
    taken = sorted(set(changes) & set(axes))
    if taken:
        raise UserError(f"set {taken[0]}: it is an axis of the grid, choose from it with --only {taken[0]}=...")
    for entries in itertools.product(*axes.values()):
        cells.append(_cell(path, dict(zip(axes, entries, strict=True)), content.get("options") or {}, changes, once))
    study = Study(
        output_dir=Path(content["output_dir"]),
        launcher=content.get("launcher") or "accelerate launch",
        keep_checkpoints=bool(content.get("keep_checkpoints")),
        axes={axis: tuple(str(entry["name"]) for entry in entries) for axis, entries in axes.items()},
        cells={cell.name: cell for cell in cells},
    )
    _check_names(path, study)
    return study


def _entries(path: Path, axis: str, entries: Iterable) -> list[dict]:
    """The entries of an axis as mappings with a name."""
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: grid: {axis}: a list of entries is expected")
    entries = [entry if isinstance(entry, dict) else {"name": entry, axis: entry} for entry in entries]
    if unnamed := [entry for entry in entries if "name" not in entry]:
        raise UserError(f"{path}: grid: {axis}: {unnamed[0]}: give it a name, which becomes a folder's")
    return [_read(entry, path) for entry in entries]


def _read(entry: dict, path: Path) -> dict:
    """An entry with the options of its recipe in place of the recipe's name."""
    return entry | {"config": read_recipe(path.parent / entry["config"]) if "config" in entry else {}}


def _once(path: Path, entry: dict, changes: dict) -> Cell:
    """A run outside of the grid."""
    prefix = f"{entry['name']}."
    own = {key.removeprefix(prefix): changes.pop(key) for key in list(changes) if key.startswith(prefix)}
    options = _filled(path, entry["config"] | _own(entry) | own, {})
    return Cell(entry["name"], {}, options, _needed(entry), entry.get("module"))


def _cell(path: Path, entries: dict[str, dict], shared: dict, changes: dict, once: dict) -> Cell:
    """The cell of the grid with these entries, one of each axis."""
    place = {axis: str(entry["name"]) for axis, entry in entries.items()}
    recipes = [entry["config"] for entry in entries.values()]
    options: dict = {}
    for part in (*recipes, shared, *map(_own, entries.values()), changes):
        options |= part
    needs = tuple(
        name if name in once else "/".join((place | {axis: name}).values())
        for axis, entry in entries.items()
        for name in _needed(entry)
    )
    return Cell("/".join(place.values()), place, _filled(path, options, place), needs)


def _needed(entry: dict) -> tuple[str, ...]:
    """The names under `needs`, one or a list."""
    names = entry.get("needs") or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _own(entry: dict) -> dict:
    """The options that an entry names itself."""
    return {key: value for key, value in entry.items() if key not in ABOUT}


def _filled(path: Path, options: dict, place: dict[str, str]) -> dict:
    """The options with their placeholders replaced, without an output folder of a recipe's own."""
    known = {**place, **{key: value for key, value in options.items() if value is not None}}

    def value_of(match: re.Match) -> str:
        if match[1] not in known:
            raise UserError(f"{path}: {match[0]}: no option {match[1]!r} is given: --set {match[1]}=...")
        return str(known[match[1]])

    return {
        key: PLACEHOLDER.sub(value_of, value) if isinstance(value, str) else value
        for key, value in options.items()
        if key != "output_dir"
    }


def _check_names(path: Path, study: Study) -> None:
    for cell in study.cells.values():
        for needed in cell.needs:
            if needed not in study.cells:
                raise UserError(f"{path}: {cell.name} needs {needed}, which is neither in the grid nor under once")
