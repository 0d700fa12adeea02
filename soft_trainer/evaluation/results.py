"""What a run found: the comparison table, examples to read, and every query's rank in a file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from soft_trainer.console import table
from soft_trainer.data.tokens import texts
from soft_trainer.evaluation.ranking import Ranking

SYSTEMS = ("untrained", "lexical", "trained")
METRICS = ("mrr", "recall@1", "recall@5", "recall@10")
LABELS = {"untrained": "untrained encoder", "lexical": "lexical BM25", "trained": "trained encoder"}


def save_ranks(path: str | Path, dataset: Dataset, codebase: Dataset, ranking: Ranking) -> None:
    """Per-query ranks as Parquet: `url`, `rank` (1 is best), and the urls and scores of the top codes."""
    urls = codebase["url"]
    path = Path(path)
    aside = path.with_name(path.name + ".tmp")
    top = [[urls[row] for row in rows] for rows in ranking.top_indices.tolist()]
    columns = {
        "url": dataset["url"][:],
        "rank": ranking.ranks.tolist(),
        "top_urls": top,
        "top_scores": ranking.top_scores.tolist(),
    }
    pq.write_table(pa.table(columns), aside)
    aside.replace(path)


def results_table(results: dict[str, dict[str, dict]]) -> str:
    """`{split: {system: metrics}}` as a Markdown table, a row for each system on each split."""
    rows = []
    for split, systems in results.items():
        for system in SYSTEMS:
            if system in systems:
                metrics = systems[system]
                rows.append([split, LABELS[system], *(metrics[name] for name in METRICS), int(metrics["pool_size"])])
    return table(["queries of", "ranked by", "MRR", "recall@1", "recall@5", "recall@10", "codes in the pool"], rows)


def examples(
    dataset: Dataset, codebase: Dataset, ranking: Ranking, number: int, query_column: str, code_column: str
) -> str:
    """The first `number` queries with their top three functions; `=>` marks the true one."""
    blocks = []
    for row in range(min(number, len(dataset))):
        (query,) = texts([dataset[row][query_column]])
        lines = [f"{_short(query, 100)}   (rank {int(ranking.ranks[row])})"]
        for place, code_row in enumerate(ranking.top_indices[row, :3].tolist(), 1):
            code = codebase[code_row]
            mark = "=>" if code["url"] == dataset[row]["url"] else "  "
            place_of = f"   [{code['path']}]" if code.get("path") else ""
            lines.append(f"  {mark} {place}. {_short(*texts([code[code_column]]), 100)}{place_of}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _short(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"
