"""Runs tasks of mteb on an encoder, and turns their results into a table, files, and entries of a model card."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import mteb
from huggingface_hub import EvalResult
from mteb.abstasks import AbsTask, AbsTaskRetrieval
from mteb.results import TaskResult

from soft_trainer.errors import UserError
from soft_trainer.files import reporting_disk_errors, write_json, written_aside
from soft_trainer.mteb.model import MtebEncoder
from soft_trainer.mteb.tasks import EvaluationSetTask, load
from soft_trainer.terminal import table

# mteb cuts every ranking at 1,000 codes.
RETRIEVAL = {"mrr_at_1000": "MRR@1000", "ndcg_at_10": "nDCG@10", "recall_at_10": "recall@10"}
SOURCE = {"source_name": "mteb", "source_url": "https://github.com/embeddings-benchmark/mteb"}


@dataclass(frozen=True)
class Measured:
    """A task's result, and the number of codes that were ranked for each query.

    Args:
        task: the task.
        result: as mteb returns it.
        pool_sizes: (subset, split) -> codes in the corpus. Empty for a task that does not rank a corpus.
    """

    task: AbsTask
    result: TaskResult
    pool_sizes: dict[tuple[str, str], int]

    def scores(self) -> Iterator[tuple[str, str, dict]]:
        """Yields each subset and split with its scores by name."""
        for split, subsets in self.result.scores.items():
            for scores in subsets:
                yield scores["hf_subset"], split, scores


def measure(model: MtebEncoder, task: AbsTask, batch_size: int = 64, progress: bool = False) -> Measured:
    """Evaluates the encoder on one task. Results of earlier evaluations are not read.

    Raises:
        UserError: the data of the task cannot be loaded.
    """
    load(task)
    sizes = {}
    if isinstance(task, AbsTaskRetrieval):
        task.convert_v1_dataset_format_to_v2(None)
        parts = ((subset, *part) for subset, splits in task.dataset.items() for part in splits.items())
        # With `top_ranked`, only a few candidates are ranked for each query.
        sizes = {(subset, split): len(data["corpus"]) for subset, split, data in parts if data["top_ranked"] is None}
    results = mteb.evaluate(
        model,
        task,
        cache=None,
        co2_tracker=False,
        show_progress_bar=progress,
        encode_kwargs={"batch_size": batch_size, "show_progress_bar": progress},
    )
    task.unload_data()
    if not results.task_results:
        raise UserError(f"{task.metadata.name}: mteb gave no result: {results.exceptions[0].exception}")
    return Measured(task, results.task_results[0], sizes)


def write_result(measured: Measured, model: MtebEncoder, folder: str | Path) -> Path:
    """Writes a result in mteb's own format, where `mteb.ResultCache(folder)` looks for it.

    Returns:
        Its path, `folder/results/MODEL/REVISION/TASK.json`.

    Raises:
        UserError: the folder cannot be written.
    """
    meta = model.mteb_model_meta
    with reporting_disk_errors(folder):
        path = mteb.ResultCache(folder).get_task_result_path(measured.result.task_name, meta)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path.with_name("model_meta.json"), meta.to_dict())
        with written_aside(path) as aside:
            measured.result.to_disk(aside)
    return path


def results_table(results: Sequence[Measured]) -> str:
    """Returns a Markdown table, a row for each subset of each task, and their mean if there are several tasks."""
    rows = [
        [
            measured.result.task_name,
            None if subset == "default" else subset,
            *(scores.get(name) for name in RETRIEVAL),
            scores["main_score"],
            measured.pool_sizes.get((subset, split)),
        ]
        for measured in results
        for subset, split, scores in measured.scores()
    ]
    if len(results) > 1:
        mean = fmean(measured.result.get_score() for measured in results)
        rows.append([f"mean of {len(results)} tasks", *[None] * (1 + len(RETRIEVAL)), mean, None])
    return table(["task", "subset", *RETRIEVAL.values(), "main score", "codes in the corpus"], rows)


def eval_results(results: Iterable[Measured]) -> list[EvalResult]:
    """Returns the entries for a model card; each metric's name states the size of the corpus."""
    entries = []
    for measured in results:
        metadata = measured.task.metadata
        published = not isinstance(measured.task, EvaluationSetTask)
        for subset, split, scores in measured.scores():
            size = measured.pool_sizes.get((subset, split))
            over = f" over {size:,} codes" if size else ""
            metrics = RETRIEVAL if size else {"main_score": metadata.main_score}
            entries += [
                EvalResult(
                    task_type=metadata.type,
                    dataset_type=metadata.dataset["path"],
                    dataset_name=metadata.name + ("" if subset == "default" else f" ({subset})"),
                    dataset_config=subset,
                    dataset_split=split,
                    dataset_revision=metadata.dataset["revision"] if published else None,
                    metric_type=metric,
                    metric_name=f"{title}{over}",
                    metric_value=round(float(scores[metric]), 4),
                    **SOURCE,
                )
                for metric, title in metrics.items()
            ]
    return entries
