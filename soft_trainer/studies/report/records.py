"""Reads the runs of a report, each from its record and its log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from soft_trainer.errors import UserError
from soft_trainer.estimators.registry import ESTIMATORS
from soft_trainer.files import NUMBERS, RECORD, record_path

STATE = "trainer_state.json"
# Entries of a record that seeds or languages of one setting may differ in.
_NOT_SETTINGS = ("loss", "estimator", "name", "profile", "seed", "steps", "train runtime, s", "seconds a step")
_ESTIMATOR_NAMES = {
    entry.estimator_class.__name__: name for name, entry in ESTIMATORS.items() if entry.estimator_class
}


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """A run as its output folder describes it."""

    folder: Path
    record: Mapping  # of `Run.record`
    log: Sequence[Mapping]  # `log_history` of `trainer_state.json`, empty if the run did not train
    encoder: str  # a short name
    profile: str | None  # None for random weights, which the paper did not measure
    loss: str
    cancel: str  # kind and number of the false-negative cancellation, such as "top_k 3"; empty if there is none
    estimator: str  # name on the command line; "none" if the loss does not use one
    seed: int | None
    settings: Mapping[str, object]  # of encoder, loss, estimator and training, without seed and times
    sets: Mapping[tuple[str, str], str]  # (evaluation set, language) -> key of the results, such as "test-ruby"


def find_runs(folders: Iterable[str | Path]) -> tuple[list[ReportedRun], dict[str, str]]:
    """All runs below `folders`, and the reason for each folder that is left out.

    Raises:
        UserError: a folder does not exist, or no run can be read.
    """
    places: dict[Path, Path] = {}  # real path -> path as named: a folder that is named twice counts once
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder")
        found = {path.parent for name in (RECORD, NUMBERS, "ranks-*.parquet") for path in folder.rglob(name)}
        for place in sorted(found):
            places.setdefault(place.resolve(), place)
    runs, left_out = [], {}
    for folder in places.values():
        try:
            runs.append(read_run(folder))
        except FileNotFoundError:
            left_out[str(folder)] = f"not finished: it has ranks but no {RECORD}"
        except (AttributeError, KeyError, TypeError) as error:
            left_out[str(folder)] = f"{record_path(folder).name} is not that of a code-search run: it lacks {error}"
        except UserError as error:
            left_out[str(folder)] = str(error)
        except (OSError, ValueError) as error:
            left_out[str(folder)] = f"cannot be read: {error}"
    if not runs:
        reasons = "; ".join(f"{folder}: {reason}" for folder, reason in left_out.items())
        raise UserError(f"no finished run (a folder with {RECORD}) was found{': ' if reasons else ''}{reasons}")
    return runs, left_out


def read_run(folder: Path) -> ReportedRun:
    """Reads one run.

    Raises:
        UserError: the run was measured, but not trained.
        OSError, ValueError, AttributeError, KeyError, TypeError: its record is not there or not that of a run.
    """
    record, state = json.loads(record_path(folder).read_text(encoding="utf-8")), folder / STATE
    if "results" in record and "loss" not in record:
        raise UserError("measured by `soft-trainer evaluate`, not trained; `soft-trainer compare` reads it")
    for metrics in (metrics for systems in record["results"].values() for metrics in systems.values()):
        _ = metrics["mrr"], metrics["pool_size"]
    base, languages, _ = (record[name] for name in ("base_model", "languages", "dataset"))
    encoder, loss, estimator = record.get("encoder", {}), record["loss"], record.get("estimator", {})
    kind = loss.get("cancel", "none")
    number = loss.get({"top_k": "cancel_k", "ratio": "cancel_ratio"}.get(kind), "")
    cancel = "" if kind == "none" else f"{kind} {number}"
    class_name = loss.get("estimator") or "none"
    name = estimator.get("name") or _ESTIMATOR_NAMES.get(class_name, class_name)
    settings = {"base model": base, "trained on": "+".join(languages)}
    for part in (encoder, loss, estimator, record["training"]):
        settings |= {name: value for name, value in part.items() if name not in _NOT_SETTINGS}
    plain = (str, int, float)  # anything else is compared by its text
    sets = {}
    for key in record["results"]:
        own = [name for name in languages if len(languages) > 1 and key.endswith(f"-{name}")]
        sets[(key.removesuffix(f"-{own[0]}"), own[0]) if own else (key, "+".join(languages))] = key
    return ReportedRun(
        folder=folder,
        record=record,
        log=json.loads(state.read_text(encoding="utf-8"))["log_history"] if state.is_file() else [],
        encoder=encoder.get("name") or (base or "random weights").rstrip("/").rsplit("/", 1)[-1],
        profile=encoder.get("profile") if base else None,
        loss=loss["loss"],
        cancel=cancel,
        estimator=name if cancel or loss["loss"] != "info_nce" else "none",
        seed=record["training"].get("seed"),
        settings={name: v if isinstance(v, plain) else str(v) for name, v in settings.items() if v is not None},
        sets=sets,
    )
