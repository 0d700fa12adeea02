"""Formats and stores a run's results: a table of metrics, example queries, and files with each query's rank."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike

from soft_trainer.data.column_names import CODE_COLUMNS, QUERY_COLUMNS
from soft_trainer.data.columns import row_texts, text_column, text_ids
from soft_trainer.data.split import Split
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.evaluation.ranked_queries import LABELS
from soft_trainer.evaluation.ranking import Ranking
from soft_trainer.evaluation.retrieval import (
    CUT,
    MAP,
    NDCG,
    UNRANKED,
    RetrievalOutput,
    best_answers,
    shorter_titles,
)
from soft_trainer.system.files import written_aside
from soft_trainer.system.fingerprints import encoder_files_fingerprint, fingerprint
from soft_trainer.system.terminal import shortened, table

METRICS = {"mrr": "MRR", "recall@1": "recall@1", "recall@5": "recall@5", "recall@10": "recall@10"}
CHANGE = "mrr_change"  # from before to after training
MARGIN = "mrr_change_margin"
# Metrics for graded judgments.
GRADED = {MAP: "MAP", NDCG: "nDCG@10"}
ROUNDING = 1e-9  # a larger difference between two means is not a rounding error
# A report shows this many functions for each query, and this many characters of a text.
_SHOWN = 3
_WIDTH = 300


def save_ranks(
    path: str | Path,
    split: Split,
    output: RetrievalOutput,
    profile: EncoderProfile,
    encoder: str | Path | None = None,
) -> None:
    """Writes each query's `url`, `rank` (starting at 1) and top functions to a Parquet file.

    So that a report can be written without the data set, the file also contains each `query`, its relevant `code` and
    the first three `top_codes`, each shortened to a line of at most 300 characters, and `top_relevant`, which says
    which of the three are relevant. `code` is the relevant function with the highest grade. `key` is a fingerprint of
    a query with its relevant functions, and the file has one of the corpus, so that only equal data is compared.

    Args:
        profile: the encoder's profile, which names the columns that may contain the texts.
        encoder: the folder of the encoder that produced the ranks, if any. Its fingerprint is stored in the file.
    """
    urls = np.array(split.corpus["url"][:], dtype=object)
    ranking = output.ranking
    query, code = _columns(split, profile)
    own = best_answers(split.judgments)
    top_indices = ranking.top_indices[:, :CUT].numpy(force=True)
    top = top_indices[:, :_SHOWN]
    asked = np.repeat(np.arange(len(top)), top.shape[1])
    relevant = np.asarray(split.judgments.relevant[asked, top.ravel()]).reshape(top.shape) > 0
    read = np.union1d(own, top)
    lines = np.empty(len(urls), dtype=object)
    lines[read] = [_line(text, _WIDTH) for text in split.corpus[read][code]]
    columns = {
        "url": urls[own].tolist(),
        "rank": ranking.ranks.tolist(),
        "top_urls": urls[top_indices].tolist(),
        "top_scores": ranking.top_scores[:, :CUT].tolist(),
        **output.by_query,
        "query": [_line(text, _WIDTH) for text in split.queries[query][:]],
        "code": lines[own].tolist(),
        "top_codes": lines[top].tolist(),
        "top_relevant": relevant.tolist(),
    }
    # Keys are equal on equal data, whatever the order of the corpus and whichever columns the encoder reads.
    query = text_column(split.queries, (*QUERY_COLUMNS, *profile.query_columns), "query")
    code = text_column(split.corpus, (*CODE_COLUMNS, *profile.code_columns), "code")
    codes = text_ids(f"{url}\0{text}" for url, text in zip(urls, row_texts(split.corpus, code), strict=True))
    judged = split.judgments.relevant
    columns["key"] = []
    for row, text in enumerate(row_texts(split.queries, query)):
        answers = slice(judged.indptr[row], judged.indptr[row + 1])
        grades = zip(codes[judged.indices[answers]].tolist(), judged.data[answers].tolist(), strict=True)
        columns["key"].append(fingerprint(text, sorted(grades)))
    facts = {"pool_size": str(len(urls)), "corpus": fingerprint(np.sort(codes))}
    made_by = encoder and encoder_files_fingerprint(encoder)
    if made_by:
        facts |= {"encoder": made_by, "encoder_folder": os.path.relpath(encoder, Path(path).parent)}
    # pyarrow reads a relative path such as `model:v1/x` as a URI, so it gets open files.
    with written_aside(path) as aside, open(aside, "wb") as file:
        pq.write_table(pa.table(columns).replace_schema_metadata(facts), file)


def _columns(split: Split, profile: EncoderProfile) -> tuple[str, str]:
    """Returns the columns of queries and functions to show: the first of the profile's columns that exist."""
    query = text_column(split.queries, profile.query_columns, "query")
    return query, text_column(split.corpus, ("code", *profile.code_columns), "code")


def change_of_mrr(before: ArrayLike, after: ArrayLike) -> dict[str, float]:
    """Computes the change in MRR between two rankings of the same queries, with a 95 % confidence interval.

    Args:
        before, after: int[Q], the ranks of Q queries, starting at 1.

    Returns:
        A dict with `mrr_change` and `mrr_change_margin`, half the width of the interval. The dict is empty if there is
        only one query.
    """
    differences = 1 / np.asarray(after, dtype=np.float64) - 1 / np.asarray(before, dtype=np.float64)
    if len(differences) < 2:
        return {}
    margin = 1.96 * differences.std(ddof=1) / math.sqrt(len(differences))
    return {CHANGE: float(differences.mean()), MARGIN: float(margin)}


def metrics_table(
    results: dict[str, dict[str, dict]], labels: Mapping[str, str] = LABELS, chosen_on: Collection[str] = ()
) -> str:
    """Formats `{split: {system: metrics}}` as a Markdown table with a row for each split and system.

    Args:
        labels: the titles of the systems in the table, in order. Other systems are skipped.
        chosen_on: the splits on which evaluations chose the trained weights.
    """
    measured = []
    everything: dict[str, float] = {}
    for split, systems in results.items():
        for key, title in labels.items():
            if key in systems:
                if key == "trained" and split in chosen_on:
                    title += " (chosen on these rows)"
                measured.append((split, title, systems[key]))
                everything |= systems[key]
    names = {"mrr": METRICS["mrr"]}
    if CHANGE in everything:
        names[CHANGE] = "change in MRR (95 % interval)"
    names |= METRICS
    # If each query has one relevant function, MAP equals MRR.
    if any(abs(metrics.get(MAP, metrics["mrr"]) - metrics["mrr"]) > ROUNDING for *_, metrics in measured):
        names |= {name: title for name, title in GRADED.items() if name in everything}
    names |= shorter_titles(everything) | {"pool_size": "functions in the corpus"}
    if UNRANKED in everything:
        names[UNRANKED] = "queries in the corpus, not ranked for themselves"
    rows = []
    for split, title, metrics in measured:
        shown = {**metrics, "pool_size": int(metrics["pool_size"])}
        if CHANGE in metrics:
            shown[CHANGE] = f"{metrics[CHANGE]:+.3f} ± {metrics[MARGIN]:.3f}"
        rows.append([split, title, *map(shown.get, names)])
    return table(["queries", "ranked by", *names.values()], rows)


def examples(split: Split, ranking: Ranking, number: int, profile: EncoderProfile) -> str:
    """Formats the first `number` queries with their top three functions as text. `=>` marks relevant functions."""
    query_column, code_column = _columns(split, profile)
    blocks = []
    queries = split.queries.select(range(min(number, len(split.queries))))
    for row, query in enumerate(queries):
        lines = [f"{_line(query[query_column], 100)}   (rank {int(ranking.ranks[row])})"]
        top = ranking.top_indices[row, :_SHOWN].tolist()
        for rank, (number, code) in enumerate(zip(top, split.corpus.select(top), strict=True), 1):
            mark = "=>" if split.judgments.relevant[row, number] else "  "
            path = f"   [{code['path']}]" if code.get("path") else ""
            lines.append(f"  {mark} {rank}. {_line(code[code_column], 100)}{path}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _line(text: str | Sequence[str], width: int) -> str:
    """Shortens a text or a list of tokens to one line of at most `width` characters."""
    return shortened(text if isinstance(text, str) else " ".join(text or ()), width)
