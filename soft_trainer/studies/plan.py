"""Plans a study before it runs: checks that every run could start, counts its steps and estimates its time."""

from __future__ import annotations

import functools
import gzip
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from soft_trainer import arguments
from soft_trainer.arguments import LANGUAGES, DataArguments, parse
from soft_trainer.data.statistics import PAPER_ROWS
from soft_trainer.errors import UserError
from soft_trainer.estimators.registry import ESTIMATORS
from soft_trainer.simcse import SimCSEArguments, SimCSETrainingArguments
from soft_trainer.studies import execution
from soft_trainer.studies.baseline import BaselineArguments, check_options
from soft_trainer.studies.grid import PlannedRun, Study
from soft_trainer.training.checks import make_objective

OURS = (arguments.ModelArguments, DataArguments, arguments.SoftInfoNCETrainingArguments)
ARGUMENTS = {
    None: OURS,
    "soft_trainer.studies.baseline": (BaselineArguments, *OURS),
    "soft_trainer.simcse": (SimCSEArguments, SimCSETrainingArguments),
}
PAPER_BATCH = 32  # of the registry's paper_seconds


def check(study: Study, run: PlannedRun) -> tuple:
    """The parsed arguments of a run.

    Raises:
        UserError: names the run; an unknown option, a value that it does not take, or a loss that cannot be made.
    """
    options = {**execution.recipe(study, run), "use_cpu": True}  # asks nothing of a device
    try:
        if run.module not in ARGUMENTS:
            raise UserError(f"module={run.module}: use one of {', '.join(filter(None, ARGUMENTS))}, or none")
        parsed = parse(ARGUMENTS[run.module], [], options=options)
        if run.module is None:
            _, data, args = parsed
            entry = ESTIMATORS.get(data.estimator or "none")
            make_objective(args, entry.estimator_class if entry else object)
        elif isinstance(parsed[0], BaselineArguments):
            check_options(*parsed[1:])
    except UserError as error:
        raise UserError(f"{run.name}: {error}") from error
    return parsed


def process_count(study: Study) -> int:
    """The number of processes that the launcher names, else 1."""
    number = re.search(r"--num_processes[= ](\d+)", study.launcher)
    return int(number[1]) if number else 1


def steps(parsed: tuple, processes: int = 1) -> int | None:
    """Optimizer steps of a run, None if its rows are not known before it starts."""
    data, args = parsed[-2:]
    if args.max_steps > 0:
        return args.max_steps
    rows = _train_rows(data)
    if rows is None:
        return None
    batches = min(rows, data.max_train_rows or rows) / (args.per_device_train_batch_size * processes)
    batches = int(batches) if args.dataloader_drop_last else -int(-batches // 1)
    return int(max(batches // args.gradient_accumulation_steps, 1) * args.num_train_epochs)


def _train_rows(data: DataArguments | SimCSEArguments) -> int | None:
    """Rows of the training split: counted in the folders, or as the paper counts those of CodeSearchNet."""
    if isinstance(data, SimCSEArguments):
        folders, languages = data.data_dirs, data.languages or LANGUAGES
    else:
        folders, languages = [data.data_dir] if data.data_dir else [], [data.paper_language]
    if folders:
        counts = [_lines(folder) for folder in folders]
    else:
        counts = [PAPER_ROWS[language][0] if language in PAPER_ROWS else None for language in languages]
    return None if None in counts else sum(counts)


@functools.cache
def _lines(folder: str) -> int | None:
    for name, opener in (("train.jsonl", open), ("train.jsonl.gz", gzip.open)):
        if (path := Path(folder) / name).is_file():
            with opener(path, "rb") as file:
                return sum(1 for line in file if line.strip())
    return None


@dataclass
class Estimates:
    """Estimates the time of runs: from `seconds_per_step` if given, else from finished runs, else from the paper."""

    processes: int = 1
    seconds_per_step: float | None = None
    known: list[tuple[PlannedRun, float, int | None]] = field(default_factory=list)

    def learn(self, run: PlannedRun, finished: tuple[float, int | None] | None) -> None:
        """Takes a run's seconds and steps, if it has finished."""
        if finished is not None:
            self.known.append((run, *finished))

    def seconds(self, run: PlannedRun, parsed: tuple) -> float | None:
        """Expected seconds of a run, None if nothing is known."""
        planned = steps(parsed, self.processes)
        if self.seconds_per_step is not None:
            return None if planned is None else planned * self.seconds_per_step
        if alike := self._most_alike(run):
            seconds, counts = zip(*alike, strict=True)
            if planned is not None and all(counts):
                return planned * sum(seconds) / sum(counts)
            return sum(seconds) / len(seconds)
        data, args = parsed[-2:]
        entry = ESTIMATORS.get(data.estimator or "none") if isinstance(data, DataArguments) else None
        if planned is None or entry is None or entry.paper_seconds is None:
            return None
        return planned * entry.paper_seconds * args.per_device_train_batch_size / PAPER_BATCH

    def _most_alike(self, run: PlannedRun) -> list[tuple[float, int | None]]:
        """Seconds and steps of the finished runs that share the most entries with a run."""
        alike = [
            (len(run.place.items() & other.place.items()), figures)
            for other, *figures in self.known
            if other.module == run.module
        ]
        most = max((shared for shared, _ in alike), default=0)
        return [tuple(figures) for shared, figures in alike if shared == most]

    @property
    def source(self) -> str:
        """The origin of the figures."""
        if self.seconds_per_step is not None:
            return f"at {self.seconds_per_step:g} s a step, without evaluation"
        if self.known:
            return f"from the most similar of {len(self.known)} finished runs"
        return "by Table 8 of the paper (CodeBERT on an A6000), in proportion to the batch, without evaluation"


def total(seconds: Iterable[float | None]) -> str:
    """The sum of the known times, and the number of those that are not known."""
    seconds = list(seconds)
    text, unknown = duration(sum(filter(None, seconds))), seconds.count(None)
    return f"{text} and {unknown} run{'s' if unknown > 1 else ''} without an estimate" if unknown else text


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`, `5 d 7 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, hours = round(seconds / 60), round(round(seconds / 60) / 60)
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{hours // 24} d {hours % 24} h"
