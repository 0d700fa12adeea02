"""Before a study runs: whether every cell could start, how many steps it takes, and how long."""

from __future__ import annotations

import functools
import gzip
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from soft_trainer.arguments import (
    LANGUAGES,
    DataArguments,
    ModelArguments,
    SoftInfoNCETrainingArguments,
    as_argv,
    parse,
)
from soft_trainer.data.statistics import PAPER_ROWS
from soft_trainer.errors import UserError
from soft_trainer.estimators.bm25 import BM25Estimator
from soft_trainer.estimators.simcse import SimCSEEstimator
from soft_trainer.estimators.trained_model import TrainedModelEstimator
from soft_trainer.simcse import SimCSEArguments, SimCSETrainingArguments
from soft_trainer.studies import cells
from soft_trainer.studies.grid import Cell, Study
from soft_trainer.training.checks import make_objective

RUN = (ModelArguments, DataArguments, SoftInfoNCETrainingArguments)
ARGUMENTS = {None: RUN, "soft_trainer.simcse": (SimCSEArguments, SimCSETrainingArguments)}
ESTIMATORS = {"none": None, "bm25": BM25Estimator, "simcse": SimCSEEstimator, "trained_model": TrainedModelEstimator}
# Seconds of a step by estimator, CodeBERT with batches of 32 on an A6000: Table 8 of the paper.
PAPER_SECONDS = {"none": 0.75, "bm25": 0.77, "simcse": 0.81, "trained_model": 0.98}
PAPER_BATCH = 32


def check(study: Study, cell: Cell) -> tuple:
    """The parsed arguments of a cell, whose loss was made once to see that it can be.

    Raises:
        UserError: names the cell; an unknown option, or a value that it does not take.
    """
    options = {**cells.recipe(study, cell), "use_cpu": True}  # asks nothing of a device
    try:
        if cell.module not in ARGUMENTS:
            raise UserError(f"module={cell.module}: use one of {', '.join(filter(None, ARGUMENTS))}, or none")
        parsed = parse(ARGUMENTS[cell.module], as_argv(options))
        if cell.module is None:
            data, args = parsed[1:]
            make_objective(args, ESTIMATORS.get(data.estimator or "none", object))
    except UserError as error:
        raise UserError(f"{cell.name}: {error}") from error
    return parsed


def processes(study: Study) -> int:
    """How many processes the launcher says, 1 where it says nothing."""
    found = re.search(r"--num_processes[= ](\d+)", study.launcher)
    return int(found[1]) if found else 1


def steps(parsed: tuple, processes: int = 1) -> int | None:
    """Optimizer steps of a run, None where its rows are not known before it starts."""
    data, args = parsed[-2:]
    if args.max_steps > 0:
        return args.max_steps
    rows = _train_rows(data)
    if rows is None:
        return None
    rows = min(rows, data.max_train_rows or rows)
    batches = rows / (args.per_device_train_batch_size * processes)
    whole = int(batches) if args.dataloader_drop_last else -int(-batches // 1)
    return int(max(whole // args.gradient_accumulation_steps, 1) * args.num_train_epochs)


def _train_rows(data: DataArguments | SimCSEArguments) -> int | None:
    """Rows of the training split: those of a folder, or CodeSearchNet's as the paper counts them."""
    if isinstance(data, SimCSEArguments):
        if data.data_dirs:
            counts = [_lines(folder) for folder in data.data_dirs]
            return None if None in counts else sum(counts)
        return sum(PAPER_ROWS[language][0] for language in data.languages or LANGUAGES)
    if data.data_dir:
        return _lines(data.data_dir)
    return PAPER_ROWS[data.language][0] if data.paper_language in PAPER_ROWS else None


@functools.cache
def _lines(folder: str) -> int | None:
    for name, opener in (("train.jsonl", open), ("train.jsonl.gz", gzip.open)):
        if (path := Path(folder) / name).is_file():
            with opener(path, "rb") as file:
                return sum(1 for line in file if line.strip())
    return None


@dataclass
class Estimates:
    """How long cells take, from those that are finished, or else from what is given, or else from the paper.

    Args:
        processes: that a run is launched with.
        seconds_per_step: of every cell, where given.
    """

    processes: int = 1
    seconds_per_step: float | None = None
    known: list[tuple[Cell, float, int | None]] = field(default_factory=list)

    def learn(self, cell: Cell, spent: tuple[float, int | None] | None) -> None:
        """Take a finished cell's seconds and steps."""
        if spent is not None:
            self.known.append((cell, *spent))

    def seconds(self, cell: Cell, parsed: tuple) -> float | None:
        """Expected seconds of a cell; None where nothing is known."""
        planned = steps(parsed, self.processes)
        if self.seconds_per_step is not None:
            return None if planned is None else planned * self.seconds_per_step
        if like := self._like(cell):
            if planned is not None and all(count for _, count in like):
                return planned * sum(seconds for seconds, _ in like) / sum(count for _, count in like)
            return sum(seconds for seconds, _ in like) / len(like)
        data, args = parsed[-2:]
        published = PAPER_SECONDS.get(data.estimator or "none") if isinstance(data, DataArguments) else None
        if planned is None or published is None:
            return None
        return planned * published * args.per_device_train_batch_size / PAPER_BATCH

    def _like(self, cell: Cell) -> list[tuple[float, int | None]]:
        """Seconds and steps of the finished cells that share most with a cell."""
        shared = [
            (len(cell.place.items() & other.place.items()), seconds, count)
            for other, seconds, count in self.known
            if other.module == cell.module
        ]
        most = max((number for number, *_ in shared), default=0)
        return [(seconds, count) for number, seconds, count in shared if number == most]

    @property
    def source(self) -> str:
        """Where the figures come from, for people."""
        if self.seconds_per_step is not None:
            return f"at {self.seconds_per_step:g} s a step, evaluation not counted"
        if self.known:
            return f"by the {len(self.known)} finished cells most like each"
        return "by Table 8 of the paper (CodeBERT on an A6000), in proportion to the batch, evaluation not counted"


def total(seconds: Iterable[float | None]) -> str:
    """A sum as people read it, and how many terms are missing."""
    seconds = list(seconds)
    unknown = sum(1 for value in seconds if value is None)
    text = duration(sum(value for value in seconds if value is not None))
    return f"{text} and {unknown} runs without an estimate" if unknown else text


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`, `5 d 7 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24} h"
