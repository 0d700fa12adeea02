"""Measure the search of indexed trees: nDCG@10, MRR, times and memory.

The queries are judged ones over several trees (--queries, --trees); or the documentation of one tree's functions,
which should find them in a copy of the tree without comments (--folder); or the subjects of a repository's newest
commits, which should find the functions that the commits changed, in the tree before them (--history).

soft-trainer evaluate-search --queries queries.jsonl.gz --trees DIR
soft-trainer evaluate-search --folder DIR
soft-trainer evaluate-search --history REPOSITORY --model outputs/history
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.files import check_writable, write_text
from soft_trainer.search import evaluation
from soft_trainer.search.index import CodeIndex
from soft_trainer.terminal import print_on_main, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    add("--queries", help="judged queries as JSON lines: repo, query, relevant, secondary")
    add("--trees", metavar="DIR", help="folder with a subfolder for each repo of --queries")
    add("--folder", metavar="DIR", help="one tree, whose documentation gives the queries")
    add("--history", metavar="REPOSITORY", help="git repository, whose newest commits give the queries")
    add("--language", help="language of --history's functions (default: the one with the most files)")
    add("--model", help="folder or Hub name of an encoder (default: words alone)")
    add("--truncate_dim", type=int, metavar="N", help="keep the first N dimensions of every embedding")
    add("--index_dir", metavar="DIR", help="folder to keep the indexes in (default: a temporary one)")
    add("--max_queries", type=int, default=200, help="maximum number of queries of --folder (default: 200)")
    add("--output", metavar="FILE", help="write what was found for each query as JSON lines")


def run(arguments: argparse.Namespace) -> None:
    """Indexes, searches, and prints the table."""
    given = [name for name in ("queries", "folder", "history") if getattr(arguments, name)]
    one = len(given) == 1 and bool(arguments.queries) == bool(arguments.trees)
    if not one:
        raise UserError("give --queries and --trees, or --folder, or --history")
    if arguments.language and not arguments.history:
        raise UserError("language: has no meaning without --history")
    if arguments.truncate_dim is not None and not arguments.model:
        raise UserError("truncate_dim: has no meaning without --model")
    if arguments.max_queries < 1:
        raise UserError(f"max_queries={arguments.max_queries}: 1 or more is expected")
    if arguments.output:
        check_writable(Path(arguments.output).parent, f"output={arguments.output}")
    with tempfile.TemporaryDirectory(prefix="soft_trainer-") as scratch:
        text, answers = (_history if arguments.history else _files)(arguments, scratch)
    sys.stdout.write(text + "\n")
    if arguments.output:
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        write_text(arguments.output, "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers))


@contextmanager
def _index(arguments: argparse.Namespace, tree: str, place: str | Path) -> Iterator[CodeIndex]:
    """Makes the index of a tree, and prints its notices at the end."""
    choice = {"model": arguments.model, "truncate_dim": arguments.truncate_dim}
    with CodeIndex.build(tree, place, progress=True, **choice) as index:
        yield index
        for notice in dict.fromkeys(index.notices):
            print_on_main(notice)


def _files(arguments: argparse.Namespace, scratch: str) -> tuple[str, list[dict]]:
    """Puts queries to the indexes of trees; returns the table, and what was found for each query."""
    if arguments.folder:
        queries = evaluation.documentation_queries(arguments.folder, f"{scratch}/tree", arguments.max_queries)
        trees = {"": f"{scratch}/tree"}
    else:
        queries = evaluation.read_queries(arguments.queries)
        trees = {name: f"{arguments.trees}/{name}" for name in dict.fromkeys(query.tree for query in queries)}
        for tree in trees.values():
            if not os.path.isdir(tree):
                raise UserError(f"{tree}: no such folder; --trees has one for each repo of --queries")
    outcomes = []
    for name, tree in trees.items():
        with _index(arguments, tree, Path(arguments.index_dir or f"{scratch}/indexes", name or "tree")) as index:
            own = [query for query in queries if query.tree == name]
            outcomes += evaluation.ask(index, own, lexical=arguments.model is None)
    headers = ["queries", "number", "nDCG@10", "MRR@10", "p50, ms", "p95, ms"]
    text = table(headers, evaluation.summary_rows(outcomes), floats=".3f")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    text += f"\n\npeak memory: {memory:,.0f} MiB"
    return text, [{"repo": o.judged.tree, "query": o.judged.query, "paths": o.paths} for o in outcomes]


def _history(arguments: argparse.Namespace, scratch: str) -> tuple[str, list[dict]]:
    """Puts the newest commits of a repository to the tree before them, by words and with the model."""
    queries, mined = evaluation.history_queries(arguments.history, arguments.language, f"{scratch}/tree")
    names = {"words": True} | ({f"words and {arguments.model}": False} if arguments.model else {})
    with _index(arguments, f"{scratch}/tree", arguments.index_dir or f"{scratch}/index") as index:
        searches = {name: evaluation.search_of(index, lexical, True) for name, lexical in names.items()}
        found = {name: evaluation.measure(queries, mined, search) for name, search in searches.items()}
    rows = []
    for level in ("files", "functions"):
        rows += [[level, name, len(queries), *np.mean(own[level], axis=0)] for name, own in found.items()]
    headers = ["answers", "search by", "queries", "MRR", "nDCG@10", "recall@10"]
    answers = []
    for place, query in enumerate(queries):
        ranks = {name: own["functions"][place].mrr for name, own in found.items()}
        answers.append({"query": query.query, "functions": sorted(query.targets), "reciprocal_ranks": ranks})
    return f"{table(headers, rows, floats='.3f')}\n\ntree at {mined.cut[:10]}", answers
