"""Writes rankings and judgments in the format of trec_eval, which ranx, ir-measures and pytrec_eval also read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from soft_trainer.data.column_names import OWN_ID, TEXT_ID
from soft_trainer.data.split import Split
from soft_trainer.errors import UserError
from soft_trainer.evaluation.ranking import Ranking
from soft_trainer.files import written_aside

TAG = "soft_trainer"  # the name of the system, the last field of a line


def write_run_file(path: str | Path, split: Split, ranking: Ranking) -> str:
    """Writes lines of `query Q0 function rank score tag` to `path`, and `query 0 function grade` to `PATH.qrels`.

    Queries and functions have the ids of their source. Without ids, or if ids repeat, they are numbered: `q1`, `c1`.

    Args:
        ranking: the top functions of each query.

    Returns:
        A line that states how many functions are listed for each query, and how many queries have a tie.

    Raises:
        UserError: an id contains white space, or a grade is not an integer.
    """
    queries = _ids(split.queries[OWN_ID][:] if OWN_ID in split.queries.column_names else [], len(split.queries), "q")
    codes = _ids(split.corpus["url"][:], len(split.corpus), "c")
    judged = split.judgments.relevant.tocoo()
    if (judged.data % 1).any():
        raise UserError(
            f"{path}: the format holds integer grades, but a grade is {judged.data[judged.data % 1 > 0][0]}"
        )
    tied = 0
    with written_aside(path) as aside, open(aside, "w", encoding="utf-8") as file:
        top = zip(ranking.top_indices.tolist(), ranking.top_scores.numpy(force=True), strict=True)
        for query, (columns, scores) in enumerate(top):
            relevant = np.isin(columns, split.judgments.relevant[query].indices)
            tied += int((scores[relevant][:, None] == scores).sum() > relevant.sum())
            for rank, (column, score) in enumerate(zip(columns, scores, strict=True), 1):
                if score > -np.inf:  # otherwise, the function is the query's own document, which is not ranked
                    file.write(f"{queries[query]} Q0 {codes[column]} {rank} {score!s} {TAG}\n")
    with written_aside(f"{path}.qrels") as aside, open(aside, "w", encoding="utf-8") as file:
        for query, code, grade in zip(judged.row, judged.col, judged.data, strict=True):
            file.write(f"{queries[query]} 0 {codes[code]} {int(grade)}\n")
    depth = ranking.top_indices.shape[1]
    line = f"{path} and {path}.qrels: the first {depth:,} of {len(codes):,} functions for each query"
    if depth < len(codes):
        line += ", so MAP will be too low"
    if tied:
        line += f"; {tied:,} of {len(queries):,} queries have a relevant function with the score of another function"
    return line


def _ids(ids: list[str], number: int, letter: str) -> list[str]:
    """Returns the ids, or numbers if there are no ids, some are hashes of texts, or some repeat."""
    if len({*ids}) < number or any(each.startswith(TEXT_ID) for each in ids):
        return [f"{letter}{row}" for row in range(1, number + 1)]
    for each in ids:
        if not each or len(each.split()) > 1 or each != each.strip():
            raise UserError(f"the id {each!r} has a blank, which separates fields in a run file: set --id_column")
    return ids
