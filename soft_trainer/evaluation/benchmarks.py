"""Evaluates encoders that `SentenceTransformer` loads, on tasks and benchmarks of mteb."""

from __future__ import annotations

import re
import textwrap
from contextlib import suppress
from pathlib import Path

import mteb
from mteb.abstasks import AbsTask
from sentence_transformers import SentenceTransformer

from soft_trainer.errors import UserError
from soft_trainer.files import reporting_disk_errors
from soft_trainer.terminal import table


def find_tasks(names: str) -> list[AbsTask]:
    """Returns the named tasks and the tasks of the named benchmarks. Names are separated by commas.

    Raises:
        UserError: mteb has no task or benchmark with one of the names.
    """
    tasks: list[AbsTask] = []
    # A comma inside brackets does not separate: `MTEB(Code, v1)` is one name.
    for name in re.split(r"\s*,(?![^()]*\))\s*", names.strip()):
        with suppress(KeyError):
            tasks += mteb.get_benchmark(name).tasks
            continue
        try:
            tasks.append(mteb.get_task(name))
        except KeyError as error:
            raise UserError(f"mteb={name}: no task or benchmark of mteb {mteb.__version__}: {error.args[0]}") from None
    return tasks


def measure(
    model: SentenceTransformer,
    tasks: list[AbsTask],
    folder: str | None = None,
    batch_size: int = 64,
    bar: bool = False,
) -> str:
    """Evaluates the model on every task. Returns a Markdown table of the main scores.

    Args:
        folder: where mteb stores the result of each task as soon as it is known. If None, results are not stored.
        batch_size: the number of texts to encode at once.
        bar: whether to show progress bars.

    Raises:
        UserError: a task's data cannot be loaded, or the disk is full.
    """
    options = {"show_progress_bar": bar, "co2_tracker": False, "overwrite_strategy": "always"}
    options["encode_kwargs"] = {"batch_size": batch_size, "show_progress_bar": bar}
    options["cache"] = None
    if folder is not None:
        options["cache"] = mteb.ResultCache(Path(folder))
    rows = []
    for task in tasks:
        _load(task)
        with reporting_disk_errors(folder or "."):
            results = mteb.evaluate(model, task, **options)
        task.unload_data()
        for result in results:
            rows.append([result.task_name, task.metadata.main_score, result.get_score()])
    return table(["task", "main score", "value"], rows)


def _load(task: AbsTask) -> None:
    """Loads a task's data. Any error in mteb becomes a UserError."""
    try:
        task.load_data()
    except Exception as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
        raise UserError(
            f"{task.metadata.name}: mteb cannot load its data ({reason}); it needs the network once, and HF_TOKEN for "
            "a private data set"
        ) from error
