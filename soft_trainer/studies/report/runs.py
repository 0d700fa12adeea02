"""What the report knows of each run: its record, its log and its ranks, found below the folders that it is given."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from soft_trainer.errors import UserError
from soft_trainer.evaluation.results import RankedQueries, load_ranks
from soft_trainer.files import NUMBERS, RECORD, record_path

STATE = "trainer_state.json"
_NEEDED = ("base_model", "dataset", "languages", "loss", "training", "results")
# What two seeds, or two languages, of one setting may differ in.
_NOT_SETTINGS = ("loss", "estimator", "name", "profile", "seed", "steps", "train runtime, s", "seconds a step")
_ESTIMATORS = {"BM25Estimator": "bm25", "SimCSEEstimator": "simcse", "TrainedModelEstimator": "trained_model"}


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """A run as its output folder describes it.

    Args:
        folder: the output folder.
        record: of `Run.record`.
        log: `log_history` of `trainer_state.json`, empty where it was not trained.
    """

    folder: Path
    record: Mapping
    log: Sequence[Mapping]

    @property
    def encoder(self) -> str:
        """A short name of the encoder that was fine-tuned."""
        base = self.record["base_model"] or "random weights"
        return self.record.get("encoder", {}).get("name") or base.rstrip("/").rsplit("/", 1)[-1]

    @property
    def profile(self) -> str | None:
        """The encoder's profile, None for random weights: they are not what the paper measured."""
        return self.record.get("encoder", {}).get("profile") if self.record["base_model"] else None

    @cached_property
    def sets(self) -> dict[tuple[str, str], str]:
        """Evaluation set and language -> key of the results: "test", or "test-ruby" of a run in several languages."""
        languages, found = self.record["languages"], {}
        for key in self.record["results"]:
            own = [name for name in languages if len(languages) > 1 and key.endswith(f"-{name}")]
            found[(key.removesuffix(f"-{own[0]}"), own[0]) if own else (key, "+".join(languages))] = key
        return found

    @property
    def loss(self) -> str:
        """The loss, with its cancellation where there is one."""
        return self.record["loss"]["loss"]

    @property
    def cancels(self) -> bool:
        """Whether false negatives are cancelled."""
        return self.record["loss"].get("cancel", "none") != "none"

    @property
    def estimator(self) -> str:
        """The name on the command line of the estimator in use, "none" where the loss asks none."""
        if self.loss == "info_nce" and not self.cancels:
            return "none"
        kind = self.record["loss"].get("estimator")
        return self.record.get("estimator", {}).get("name") or _ESTIMATORS.get(kind, kind or "none")

    @property
    def seed(self) -> int | None:
        """The seed of the training."""
        return self.record["training"].get("seed")

    @cached_property
    def settings(self) -> dict[str, object]:
        """All that was chosen of encoder, loss, estimator and training, flat; no seed, no times."""
        record = self.record
        parts = (record.get("encoder", {}), record["loss"], record.get("estimator", {}), record["training"])
        flat = {"base model": record["base_model"], "trained on": "+".join(record["languages"])}
        for part in parts:
            flat |= {name: value for name, value in part.items() if name not in _NOT_SETTINGS}
        plain = (str, int, float)  # anything else compares by its text
        return {name: v if isinstance(v, plain) else str(v) for name, v in flat.items() if v is not None}

    def ranks(self, key: str, system: str = "trained") -> RankedQueries:
        """Every query's rank; read anew each time, since many runs do not fit into memory.

        Raises:
            UserError: the file is missing or cannot be read.
        """
        return load_ranks(self.folder / f"ranks-{key}-{system}.parquet")


def find_runs(folders: Iterable[str | Path]) -> tuple[list[ReportedRun], dict[str, str]]:
    """All runs below `folders`, and for each folder that is left out the reason.

    Raises:
        UserError: a folder that does not exist, or not one readable run.
    """
    found: dict[Path, Path] = {}  # by its real place, so that a folder named twice counts once
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder")
        begun = {path.parent for name in (RECORD, NUMBERS, "ranks-*.parquet") for path in folder.rglob(name)}
        for place in sorted(begun):
            found.setdefault(place.resolve(), place)
    runs, left_out = [], {}
    for folder in found.values():
        try:
            runs.append(read_run(folder))
        except UserError as error:
            left_out[str(folder)] = str(error)
    if not runs:
        reasons = "; ".join(f"{folder}: {reason}" for folder, reason in left_out.items())
        raise UserError(f"no finished run (a folder with {RECORD}) was found{': ' if reasons else ''}{reasons}")
    return runs, left_out


def read_run(folder: Path) -> ReportedRun:
    """One run.

    Raises:
        UserError: it did not finish, or its record cannot be read; the message says what is wrong.
    """
    path = record_path(folder)
    if not path.is_file():
        raise UserError(f"not finished: it has ranks but no {RECORD}")
    record = _read_json(path)
    missing = [name for name in _NEEDED if name not in record]
    if missing:
        raise UserError(f"{path.name} is not that of a code-search run: it lacks {', '.join(missing)}")
    if not (isinstance(record["loss"], dict) and record["loss"].get("loss") and isinstance(record["training"], dict)):
        raise UserError(f"{path.name}: loss and training must be tables")
    for split, systems in record["results"].items():
        for system, metrics in systems.items():
            if not {"mrr", "pool_size"} <= metrics.keys():
                raise UserError(f"{path.name}: the results of {system} on {split} lack mrr or pool_size")
    log = _read_json(folder / STATE).get("log_history", []) if (folder / STATE).is_file() else []
    return ReportedRun(folder, record, log)


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path.name}: a JSON object is expected")
    return value
