"""What a run found: the comparison table, examples to read, and every query's rank in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from soft_trainer.data.tokens import text_column, texts
from soft_trainer.errors import UserError
from soft_trainer.evaluation.ranking import Ranking
from soft_trainer.evaluation.retrieval import target_rows
from soft_trainer.terminal import table

SYSTEMS = ("untrained", "lexical", "trained")
METRICS = {"mrr": "MRR", "recall@1": "recall@1", "recall@5": "recall@5", "recall@10": "recall@10"}
GRADED = {"ndcg@10": "nDCG@10"}  # where codes have grades
_SHOWN, _WIDTH = 3, 300  # codes and characters that a report shows of a query
LABELS = {"untrained": "untrained encoder", "lexical": "lexical BM25", "trained": "trained encoder"}


def save_ranks(
    path: str | Path,
    dataset: Dataset,
    codebase: Dataset,
    ranking: Ranking,
    query_columns: Sequence[str] = (),
    code_columns: Sequence[str] = (),
) -> None:
    """Per-query ranks as Parquet: `url`, `rank` (1 is best), and the urls and scores of the top codes.

    With the columns that hold the texts (the first that exists is read) also `query`, its own `code`, and
    `top_codes`, the first three codes: one line each, cut to 300 characters, so that a report needs no data set.
    """
    urls = codebase["url"][:]
    path = Path(path)
    aside = path.with_name(path.name + ".tmp")
    columns = {
        "url": dataset["url"][:],
        "rank": ranking.ranks.tolist(),
        "top_urls": [[urls[row] for row in rows] for rows in ranking.top_indices.tolist()],
        "top_scores": ranking.top_scores.tolist(),
    }
    columns |= {name: dataset[name][:] for name in GRADED if name in dataset.column_names}
    if query_columns and code_columns:
        column = text_column(dataset, query_columns, "query")
        columns["query"] = [_short(text, _WIDTH) for text in texts(dataset[column][:])]
        columns |= _codes_to_read(dataset, codebase, ranking, text_column(codebase, code_columns, "code"))
    pq.write_table(pa.table(columns).replace_schema_metadata({"pool_size": str(len(urls))}), aside)
    aside.replace(path)


def _codes_to_read(dataset: Dataset, codebase: Dataset, ranking: Ranking, column: str) -> dict[str, list]:
    """`code` and `top_codes` of every query; of the codebase only the rows that are shown are read."""
    own, top = target_rows(dataset, codebase).tolist(), ranking.top_indices[:, :_SHOWN].tolist()
    rows = sorted({*own, *(row for rows in top for row in rows)})
    short = {row: _short(text, _WIDTH) for row, text in zip(rows, texts(codebase[rows][column]), strict=True)}
    return {"code": [short[row] for row in own], "top_codes": [[short[row] for row in rows] for rows in top]}


@dataclass(frozen=True)
class RankedQueries:
    """Every query's rank, as `save_ranks` wrote it.

    Args:
        path: the file.
        rows: its content.
    """

    path: Path
    rows: pa.Table

    @cached_property
    def urls(self) -> list[str]:
        """The url of each query's own code."""
        return self.rows["url"].to_pylist()

    @cached_property
    def ranks(self) -> np.ndarray:
        """int64[Q], 1 is best."""
        return self.rows["rank"].to_numpy()

    @property
    def pool_size(self) -> int | None:
        """Codes that were ranked, None where the file does not say."""
        size = (self.rows.schema.metadata or {}).get(b"pool_size")
        return size and int(size)

    def query(self, row: int) -> str:
        """The text of a query, the url of its own code where the file has no texts."""
        return self._read("query", row) or self.urls[row]

    def top(self, row: int) -> list[tuple[bool, str]]:
        """The first three codes of a query, best first: whether it is its own, and its text or url."""
        urls = self._read("top_urls", row)[:_SHOWN]
        codes = self._read("top_codes", row) or urls
        return [(url == self.urls[row], code or url) for url, code in zip(urls, codes, strict=True)]

    def _read(self, column: str, row: int):
        return self.rows[column][row].as_py() if column in self.rows.column_names else None


def load_ranks(path: str | Path) -> RankedQueries:
    """Reads what `save_ranks` wrote.

    Raises:
        UserError: no such file, or not one of ours.
    """
    path = Path(path)
    try:
        rows = pq.read_table(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    missing = {"url", "rank", "top_urls"} - set(rows.column_names)
    if missing or not len(rows):
        raise UserError(f"{path}: not the ranks of a run: {f'no column {sorted(missing)[0]}' if missing else 'empty'}")
    return RankedQueries(path, rows)


def results_table(results: dict[str, dict[str, dict]], labels: Mapping[str, str] = LABELS) -> str:
    """`{split: {system: metrics}}` as a Markdown table, a row for each system on each split."""
    found = [metrics for systems in results.values() for metrics in systems.values()]
    names = METRICS | {name: title for name, title in GRADED.items() if any(name in metrics for metrics in found)}
    rows = []
    for split, systems in results.items():
        for system in SYSTEMS:
            if system in systems:
                metrics = systems[system]
                rows.append([split, labels[system], *map(metrics.get, names), int(metrics["pool_size"])])
    return table(["queries of", "ranked by", *names.values(), "codes in the pool"], rows)


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
