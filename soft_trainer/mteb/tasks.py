"""Finds mteb tasks by name, turns our evaluation sets into tasks, runs them on an encoder, and reports the results."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import mteb
from datasets import Dataset
from huggingface_hub import EvalResult
from mteb.abstasks import AbsTask, AbsTaskRetrieval
from mteb.abstasks.retrieval_dataset_loaders import RetrievalSplitData
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.get_tasks import TASK_LIST
from mteb.results import TaskResult

from soft_trainer.data.tokens import column_texts, text_column
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.evaluation.evaluation_sets import EvaluationSet
from soft_trainer.files import reporting_disk_errors, write_json, written_aside
from soft_trainer.mteb.model import MtebEncoder, language_code
from soft_trainer.terminal import table

SPLIT = "test"
# mteb cuts every ranking at 1,000 codes.
RETRIEVAL = {"mrr_at_1000": "MRR@1000", "ndcg_at_10": "nDCG@10", "recall_at_10": "recall@10"}
SOURCE = {"source_name": "mteb", "source_url": "https://github.com/embeddings-benchmark/mteb"}


# ---- Tasks ----


def find_tasks(names: str) -> list[AbsTask]:
    """Returns the tasks and the tasks of the benchmarks with these names, by comma, each once.

    UserError for a name that mteb does not know (names the nearest), or a task that reads more than text.
    """
    tasks: dict[str, AbsTask] = {}
    # A comma inside brackets does not separate: `MTEB(Code, v1)` is one name.
    for name in filter(None, map(str.strip, re.split(r",(?![^()]*\))", names))):
        for task in _named(name):
            # An aggregate, such as the mean over several years of a task, has no data.
            for part in task.metadata.tasks if task.is_aggregate else [task]:
                if part.metadata.modalities != ["text"]:
                    kinds = ", ".join(part.metadata.modalities)
                    raise UserError(f"mteb={name}: {part.metadata.name} reads {kinds}; an encoder of code reads text")
                tasks[part.metadata.name] = part
    return list(tasks.values())


def _named(name: str) -> Sequence[AbsTask]:
    """Returns the tasks of a benchmark, or the one task of this name."""
    with suppress(KeyError):
        return mteb.get_benchmark(name).tasks
    with suppress(KeyError):
        return [mteb.get_task(name)]
    names = [benchmark.name for benchmark in mteb.get_benchmarks()] + [task.metadata.name for task in TASK_LIST]
    known = {known_name.lower(): known_name for known_name in names}
    near = difflib.get_close_matches(name.lower(), known, n=1)
    advice = f"did you mean {known[near[0]]!r}?" if near else "`mteb available-tasks` lists them all"
    raise UserError(f"mteb={name}: mteb {mteb.__version__} has no task or benchmark of this name; {advice}")


def load(task: AbsTask) -> None:
    """Loads the data of a task, from the Hub or its cache; raises UserError if that fails."""
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


class EvaluationSetTask(AbsTaskRetrieval):
    """An evaluation set as a retrieval task of mteb: ranks the whole corpus for every query, without the network.

    Args:
        evaluation_set: queries and corpus, such as `EvaluationSet("test", data["test"], data["codebase"])`.
        profile: says which columns are read.
        language: the programming language, for rows that have no column `language`.

    Raises:
        UserError: columns are missing, grades are not whole numbers (which mteb needs), or the name is that of one of
            mteb's own tasks.
    """

    def __init__(self, evaluation_set: EvaluationSet, profile: EncoderProfile, language: str | None = None) -> None:
        self._set = evaluation_set
        name = evaluation_set.name
        queries = evaluation_set.queries
        codebase = evaluation_set.codebase
        self._query_column = text_column(queries, profile.query_columns, "query")
        self._code_column = text_column(codebase, profile.code_columns, "code")
        taken = any(name == task.metadata.name for task in TASK_LIST)
        fractions = evaluation_set.graded and any(grade % 1 for grade in queries["relevance"][:])
        if taken:
            raise UserError(f"{name}: mteb has a task of this name, whose results it would replace: rename the folder")
        if fractions:
            raise UserError(f"{name}: mteb takes whole numbers as relevance; measure these queries without --mteb")
        if "language" in codebase.column_names:
            languages = codebase.unique("language")
            language = languages[0] if len(languages) == 1 else None
        self.metadata = TaskMetadata(
            name=name,
            description=f"{name}: queries against the whole corpus of {len(codebase)} codes.",
            type="Retrieval",
            category="t2t",
            eval_splits=[SPLIT],
            eval_langs=[language_code(language)],
            main_score="ndcg_at_10",
            dataset={"path": name, "revision": queries._fingerprint},
        )
        super().__init__()

    def load_data(self, num_proc: int | None = None, **_) -> None:
        """Fills `dataset` with queries, corpus and the right codes of each query."""
        if self.data_loaded:
            return
        rows = self._set.queries
        corpus = self._set.codebase
        numbers = rows["query_number"][:] if self._set.graded else range(len(rows))
        grades = rows["relevance"][:] if self._set.graded else [1] * len(rows)
        queries = dict(zip(map(str, numbers), column_texts(rows, self._query_column), strict=True))
        relevant: dict[str, dict[str, int]] = {query: {} for query in queries}
        for number, url, grade in zip(numbers, rows["url"][:], grades, strict=True):
            relevant[str(number)][url] = int(grade)
        data = RetrievalSplitData(
            corpus=Dataset.from_dict({"id": corpus["url"][:], "text": list(column_texts(corpus, self._code_column))}),
            queries=Dataset.from_dict({"id": list(queries), "text": list(queries.values())}),
            relevant_docs=relevant,
            top_ranked=None,
        )
        self.dataset = {"default": {SPLIT: data}}
        self.data_loaded = True

    def unload_data(self) -> None:
        """Frees `dataset`. The rows themselves stay, so that the task can be loaded again."""
        self.dataset = {}
        self.data_loaded = False


# ---- Results ----


@dataclass(frozen=True)
class Measured:
    """A task with its result as mteb returns it, and the number of codes that were ranked for each query.

    Args:
        pool_sizes: (subset, split) -> codes in the corpus. Empty for a task that does not rank a corpus.
    """

    task: AbsTask
    result: TaskResult
    pool_sizes: dict[tuple[str, str], int]

    def scores(self) -> Iterator[tuple[str, str, dict, int | None]]:
        """Yields each subset and split with its scores by name, and the number of codes in its corpus."""
        for split, subsets in self.result.scores.items():
            for scores in subsets:
                subset = scores["hf_subset"]
                yield subset, split, scores, self.pool_sizes.get((subset, split))


def measure(model: MtebEncoder, task: AbsTask, batch_size: int = 64, progress: bool = False) -> Measured:
    """Evaluates the encoder on one task, without earlier results; UserError if its data cannot be loaded."""
    load(task)
    sizes = {}
    if isinstance(task, AbsTaskRetrieval):
        task.convert_v1_dataset_format_to_v2(None)
        parts = ((subset, *part) for subset, splits in task.dataset.items() for part in splits.items())
        # With `top_ranked`, only a few candidates are ranked for each query.
        sizes = {(subset, split): len(data["corpus"]) for subset, split, data in parts if data["top_ranked"] is None}
    options = {"batch_size": batch_size, "show_progress_bar": progress}
    results = mteb.evaluate(
        model, task, cache=None, co2_tracker=False, show_progress_bar=progress, encode_kwargs=options
    )
    task.unload_data()
    return Measured(task, results.task_results[0], sizes)


def write_result(measured: Measured, model: MtebEncoder, folder: str | Path) -> None:
    """Writes a result in mteb's format, where `mteb.ResultCache(folder)` finds it; UserError if the disk is full."""
    meta = model.mteb_model_meta
    with reporting_disk_errors(folder):
        path = mteb.ResultCache(folder).get_task_result_path(measured.result.task_name, meta)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path.with_name("model_meta.json"), meta.to_dict())
        with written_aside(path) as aside:
            measured.result.to_disk(aside)


def results_table(results: Sequence[Measured]) -> str:
    """Returns a Markdown table, a row for each subset of each task, and their mean if there are several tasks."""
    rows = []
    for measured in results:
        for subset, _, scores, size in measured.scores():
            place = [measured.result.task_name, None if subset == "default" else subset]
            rows.append([*place, *map(scores.get, RETRIEVAL), scores["main_score"], size])
    if len(results) > 1:
        mean = fmean(measured.result.get_score() for measured in results)
        rows.append([f"mean of {len(results)} tasks", *[None] * (1 + len(RETRIEVAL)), mean, None])
    return table(["task", "subset", *RETRIEVAL.values(), "main score", "codes in the corpus"], rows)


def eval_results(results: Iterable[Measured]) -> list[EvalResult]:
    """Returns the entries for a model card; each metric's name states the size of the corpus."""
    entries = []
    for measured in results:
        metadata = measured.task.metadata
        path = metadata.dataset["path"]
        revision = metadata.dataset["revision"]
        for subset, split, scores, size in measured.scores():
            metrics = RETRIEVAL if size else {"main_score": metadata.main_score}
            entries += [
                EvalResult(
                    task_type=metadata.type,
                    dataset_type=path,
                    dataset_name=metadata.name + ("" if subset == "default" else f" ({subset})"),
                    dataset_config=subset,
                    dataset_split=split,
                    dataset_revision=None if isinstance(measured.task, EvaluationSetTask) else revision,
                    metric_type=metric,
                    metric_name=title + (f" over {size:,} codes" if size else ""),
                    metric_value=round(float(scores[metric]), 4),
                    **SOURCE,
                )
                for metric, title in metrics.items()
            ]
    return entries
