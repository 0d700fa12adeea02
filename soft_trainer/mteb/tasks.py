"""Finds mteb tasks by name, loads their data, and turns our evaluation sets into tasks."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Sequence

import mteb
from datasets import Dataset
from mteb.abstasks import AbsTask, AbsTaskRetrieval
from mteb.abstasks.retrieval_dataset_loaders import RetrievalSplitData
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.get_tasks import TASK_LIST

from soft_trainer.data.tokens import text_column, texts
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.evaluation.evaluation_sets import EvaluationSet
from soft_trainer.mteb.model import language_code

SPLIT = "test"


def split_names(names: str) -> list[str]:
    """Splits names at commas, but not inside brackets: `MTEB(Code, v1)` is one name."""
    return [name.strip() for name in re.split(r",(?![^()]*\))", names) if name.strip()]


def find_tasks(names: Iterable[str]) -> list[AbsTask]:
    """Returns the tasks and the tasks of the benchmarks with these names, each once.

    Raises:
        UserError: a name that mteb does not know (names the nearest), or a task that reads more than text.
    """
    tasks: dict[str, AbsTask] = {}
    for name in names:
        for task in _named(name):
            # An aggregate, such as the mean over several years of a task, has no data.
            for part in task.metadata.tasks if task.is_aggregate else [task]:
                if set(part.metadata.modalities) != {"text"}:
                    kinds = ", ".join(part.metadata.modalities)
                    raise UserError(f"mteb={name}: {part.metadata.name} reads {kinds}; an encoder of code reads text")
                tasks[part.metadata.name] = part
    return list(tasks.values())


def _named(name: str) -> Sequence[AbsTask]:
    """The tasks of a benchmark, or the one task of this name."""
    for find in (lambda: mteb.get_benchmark(name).tasks, lambda: [mteb.get_task(name)]):
        try:
            return find()
        except KeyError:
            continue
    known = [benchmark.name for benchmark in mteb.get_benchmarks()] + [task.metadata.name for task in TASK_LIST]
    lower = {known_name.lower(): known_name for known_name in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1)
    advice = f"did you mean {lower[near[0]]!r}?" if near else "`mteb available-tasks` lists them all"
    raise UserError(f"mteb={name}: mteb {mteb.__version__} has no task or benchmark of this name; {advice}")


def load(task: AbsTask) -> None:
    """Loads the data of a task, from the Hub or its cache.

    Raises:
        UserError: the data cannot be loaded.
    """
    try:
        task.load_data()
    except UserError:
        raise
    except Exception as error:  # no network, no access, a changed data set: each library raises its own errors
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
        raise UserError(
            f"{task.metadata.name}: mteb cannot load {task.metadata.dataset['path']} ({reason}); it needs the network "
            "once, and HF_TOKEN for a private data set"
        ) from error


def check_data(tasks: Iterable[AbsTask]) -> None:
    """Loads the data of every task once, so that missing data is reported before the model is loaded.

    The data stays in the Hub's cache on disk, not in memory.

    Raises:
        UserError: the data of a task cannot be loaded.
    """
    for task in tasks:
        load(task)
        task.unload_data()


class EvaluationSetTask(AbsTaskRetrieval):
    """An evaluation set as a retrieval task of mteb: ranks the whole corpus for every query, without the network.

    Args:
        evaluation_set: queries and corpus, such as `EvaluationSet("test", data["test"], data["codebase"])`.
        profile: says which columns are read.
        name: the task's name, by default that of the set.
        language: the programming language, for rows that have no column `language`.

    Raises:
        UserError: columns are missing, grades are not whole numbers (which mteb needs), or the name is that of one of
            mteb's own tasks.
    """

    def __init__(
        self,
        evaluation_set: EvaluationSet,
        profile: EncoderProfile,
        name: str | None = None,
        language: str | None = None,
    ) -> None:
        self._set, name = evaluation_set, name or evaluation_set.name
        if any(name == task.metadata.name for task in TASK_LIST):
            raise UserError(f"{name}: mteb has a task of this name, whose results it would replace: rename the folder")
        self._columns = [
            text_column(rows, columns, side)
            for rows, columns, side in (
                (evaluation_set.queries, profile.query_columns, "query"),
                (evaluation_set.codebase, profile.code_columns, "code"),
            )
        ]
        if evaluation_set.graded and any(grade % 1 for grade in evaluation_set.queries["relevance"][:]):
            raise UserError(f"{name}: mteb takes whole numbers as relevance; measure these queries without --mteb")
        if "language" in evaluation_set.codebase.column_names:
            languages = evaluation_set.codebase.unique("language")
            language = languages[0] if len(languages) == 1 else None
        self.metadata = TaskMetadata(
            name=name,
            description=f"{name}: queries against the whole corpus of {len(evaluation_set.codebase)} codes.",
            type="Retrieval",
            category="t2t",
            eval_splits=[SPLIT],
            eval_langs=[language_code(language)],
            main_score="ndcg_at_10",
            dataset={"path": name, "revision": evaluation_set.queries._fingerprint},
        )
        super().__init__()

    def load_data(self, num_proc: int | None = None, **_) -> None:
        """Fills `dataset` with queries, corpus and the right codes of each query."""
        if self.data_loaded:
            return
        rows, corpus = self._set.queries, self._set.codebase
        query_texts, code_texts = texts(rows[self._columns[0]][:]), texts(corpus[self._columns[1]][:])
        numbers = rows["query_number"][:] if self._set.graded else range(len(rows))
        grades = rows["relevance"][:] if self._set.graded else [1] * len(rows)
        queries = {str(number): text for number, text in zip(numbers, query_texts, strict=True)}
        relevant: dict[str, dict[str, int]] = {query: {} for query in queries}
        for number, url, grade in zip(numbers, rows["url"][:], grades, strict=True):
            relevant[str(number)][url] = int(grade)
        data = RetrievalSplitData(
            corpus=Dataset.from_dict({"id": corpus["url"][:], "text": code_texts}),
            queries=Dataset.from_dict({"id": list(queries), "text": list(queries.values())}),
            relevant_docs=relevant,
            top_ranked=None,
        )
        self.dataset, self.data_loaded = {"default": {SPLIT: data}}, True

    def unload_data(self) -> None:
        """Frees `dataset`. The rows themselves stay, so that the task can be loaded again."""
        self.dataset, self.data_loaded = {}, False
