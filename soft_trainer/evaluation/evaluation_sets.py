"""Additional evaluation sets of a run: published human queries, or rows of another project.

`--eval_data_dir` names any rows that `load_rows` reads, all of which are measured, or folders with one or more of

    cosqa-retrieval-dev*.json, cosqa-retrieval-test*.json   CoSQA: a JSON list whose `doc` is the query and whose
                                                            `retrieval_idx` is the code's number in code_idx_map.txt
    test_agent_query.json, test_agent_codebase.json,        CoSQA+, a query has several right codes: lists of
    test_agent_pairs_true.json                              {"query-idx", "query"}, {"code-idx", "code"} and
                                                            {"query-idx", "code-idx", "label"}
    annotationStore.csv                                     CodeSearchNet's challenge: Language, Query, GitHubUrl,
                                                            Relevance from 0 to 3; rows of `--language` are read
    relevance.jsonl                                         any other human queries: one {"query": text, "url": id,
                                                            "relevance": number of 0 or more} a line
    test.jsonl                                              rows in CodeSearchNet's columns, as in `--data_dir`

each also gzipped. The corpus of CoSQA is `code_idx_map` (.txt or .json), that of CoSQA+ its own file, that of other
sets the folder's codebase.jsonl. Judged queries without such a file are ranked against the run's own corpus. A code
that nobody judged has relevance 0. Several judgments of the same query and code are averaged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict

from soft_trainer.data.any_rows import load_rows
from soft_trainer.data.codesearchnet import SPLITS, check_rows, drop_unusable_rows
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.evaluation.published_sets import published_sets
from soft_trainer.options.fields import DataArguments
from soft_trainer.terminal import print_on_main


@dataclass(frozen=True)
class EvaluationSet:
    """Queries and the corpus that holds their codes.

    Args:
        name: the name of its results.
        queries: rows with `url` and a query. With graded relevance there is a row for every query and relevant code,
            with `query_number` (from 0) and `relevance` (above 0). The rows of a query are adjacent.
        codebase: the corpus, rows with `url` and a code.
    """

    name: str
    queries: Dataset
    codebase: Dataset

    @property
    def graded(self) -> bool:
        """True if codes have grades. A query may then have several codes."""
        return "relevance" in self.queries.column_names

    @property
    def first_pairs(self) -> np.ndarray:
        """The row of each query's most relevant code, int64[Q]. Graded sets only."""
        return np.unique(self.queries["query_number"], return_index=True)[1]


def load_evaluation_sets(
    arguments: DataArguments,
    profile: EncoderProfile,
    codebase: Dataset | None = None,
    option: str = "eval_data_dir",
    names: Iterable[str] = (),
) -> list[EvaluationSet]:
    """Loads the sets of `--eval_data_dir`, or of another option that takes such folders.

    A set has the name of its folder. Several sets in one folder are called FOLDER-dev, FOLDER-test, ...

    Args:
        codebase: the run's own corpus, for judged queries whose folder has none.
        names: names that are already taken by other sets.

    Raises:
        UserError: a folder without any set, a file that cannot be read (names file and row), rows that cannot be
            used (see `check_rows`), or two sets with the same name.
    """
    sets: list[EvaluationSet] = []
    taken = {*names, *SPLITS, *(f"{split}-{language}" for split in SPLITS for language in arguments.languages)}
    for folder in (Path(name.strip()) for name in (getattr(arguments, option) or "").split(",") if name.strip()):
        parts = dict(published_sets(folder, arguments.languages, codebase)) if folder.is_dir() else {}
        if not parts:
            parts = {"rows": _all_rows(folder, arguments, option, profile)}
        for part, (queries, corpus) in parts.items():
            name = folder.resolve().name + (f"-{part}" if len(parts) > 1 else "")
            if name in taken:
                raise UserError(f"{option}={folder}: there are other results called {name}; rename the folder")
            try:
                check_rows(DatasetDict(test=queries, codebase=corpus), profile)
            except UserError as error:
                raise UserError(f"{folder}, {part}: {error}") from None
            taken.add(name)
            sets.append(EvaluationSet(name, queries, corpus))
            count = queries[-1]["query_number"] + 1 if sets[-1].graded else len(queries)
            print_on_main(f"{name}: {count:,} queries ({part}) over {len(corpus):,} codes")
    return sets


def _all_rows(source: Path, arguments: DataArguments, option: str, profile: EncoderProfile) -> tuple[Dataset, Dataset]:
    """Loads all rows of a file, a folder or a data set, as queries over their own codes."""
    try:
        data = load_rows(source, arguments.query_column, arguments.code_column, split=False)
        if arguments.drop_unusable:
            data = drop_unusable_rows(data, profile)
    except UserError as error:
        names = sorted(path.name for path in source.iterdir()) if source.is_dir() else []
        looked_for = (
            "; no evaluation set; looked for CoSQA's cosqa-retrieval-dev*.json or -test*.json with code_idx_map.txt, "
            "CoSQA+'s test_agent_query.json, annotationStore.csv, relevance.jsonl, or test.jsonl with codebase.jsonl, "
            f"each also as .gz; it holds {', '.join(names[:8]) or 'nothing'}{' ...' if len(names) > 8 else ''}"
        )
        raise UserError(f"{option}={error}{looked_for if source.is_dir() else ''}") from None
    return data["test"], data["codebase"]
