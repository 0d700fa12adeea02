"""Measures search for `soft-trainer evaluate-search`, and formats the results."""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from soft_trainer.errors import UserError
from soft_trainer.search.code_index import CodeIndex
from soft_trainer.search.measuring import judged
from soft_trainer.source.source_files import source_folder
from soft_trainer.system.terminal import print_on_main, table


@contextmanager
def _index(arguments: argparse.Namespace, tree: str, index_dir: str | Path) -> Iterator[CodeIndex]:
    """Yields the index of a source tree, then prints the notices of its searches."""
    choice = {"model": arguments.model, "truncate_dim": arguments.truncate_dim}
    with CodeIndex.build(tree, index_dir, progress=True, **choice) as index:
        yield index
        for notice in index.notices:
            print_on_main(notice)


def measure(arguments: argparse.Namespace, scratch: str) -> tuple[str, list[dict]]:
    """Runs queries on one or more indexed trees. Returns the table, and the results of each query."""
    if arguments.folder:
        folder = source_folder(arguments.folder)
        queries = judged.documentation_queries(folder, f"{scratch}/tree", arguments.max_queries)
        trees = {"": f"{scratch}/tree"}
    else:
        queries = judged.read_queries(arguments.queries)
        trees = {name: f"{arguments.trees}/{name}" for name in dict.fromkeys(query.tree for query in queries)}
        for tree in trees.values():
            if not os.path.isdir(tree):
                raise UserError(f"{tree}: no such folder; --trees needs a subfolder for each repo in --queries")
    outcomes = []
    for name, tree in trees.items():
        with _index(arguments, tree, Path(arguments.index_dir or f"{scratch}/indexes", name or "tree")) as index:
            own = [query for query in queries if query.tree == name]
            outcomes += judged.ask(index, own, lexical=arguments.model is None)
    headers = ["queries", "number", "nDCG@10", "MRR@10", "p50, ms", "p95, ms"]
    text = table(headers, judged.summary_rows(outcomes), floats=".3f")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    text += f"\n\npeak memory: {memory:,.0f} MiB"
    return text, [{"repo": o.judged.tree, "query": o.judged.query, "paths": o.paths} for o in outcomes]
