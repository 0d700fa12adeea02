"""Measures search for `soft-trainer evaluate-search`, and formats the results."""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from soft_trainer.cli.search import safe
from soft_trainer.errors import UserError
from soft_trainer.evaluation.significance import Comparison, compare_paired, difference_text
from soft_trainer.search.code_index import CodeIndex
from soft_trainer.search.measuring import judged
from soft_trainer.search.measuring.verdict import MEMORY, WORDS, Verdict, compare_searches, with_memory
from soft_trainer.source.source_files import source_folder
from soft_trainer.terminal import print_on_main, table

# Whether the first system is better, by the `winner` of the comparison.
ANSWERS = {"a": "yes", "b": "no, it finds less"}


@contextmanager
def _index(arguments: argparse.Namespace, tree: str, index_dir: str | Path) -> Iterator[CodeIndex]:
    """Yields the index of a source tree, then prints the notices of its searches."""
    choice = {"model": arguments.model, "truncate_dim": arguments.truncate_dim}
    with CodeIndex.build(tree, index_dir, progress=True, **choice) as index:
        yield index
        for notice in index.notices:
            print_on_main(notice)


def measure_files(arguments: argparse.Namespace, scratch: str) -> tuple[str, list[dict]]:
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


def measure_history(arguments: argparse.Namespace, scratch: str) -> tuple[str, list[dict]]:
    """Compares word search, commit memory and models. The queries come from a repository's newest commits.

    Returns:
        The table with the verdict, and the results of each query.
    """
    verdict = compare_searches(
        arguments.history,
        arguments.language,
        [name.strip() for name in (arguments.model or "").split(",") if name.strip()],
        arguments.truncate_dim,
        arguments.external,
        arguments.index_dir,
    )
    for notice in verdict.notices:
        print_on_main(safe(notice))
    rows = []
    for level in ("files", "functions"):
        for name, own in verdict.measured.items():
            means = np.mean(own[level], axis=0)
            against = "" if name == WORDS else _difference(verdict, name, WORDS, level)[1]
            rows.append([level, safe(name), len(verdict.queries), means[0], means[2], against])
    headers = ["level", "search by", "queries", "MRR", "recall@10", "MRR against words (95 % interval)"]
    answers = []
    for number, query in enumerate(verdict.queries):
        ranks = {name: own["functions"][number].mrr for name, own in verdict.measured.items()}
        answers.append({"query": query.query, "functions": sorted(query.targets), "reciprocal_ranks": ranks})
    lines = "\n".join(_answers(verdict))
    return f"{table(headers, rows, floats='.3f')}\n\ntree at {verdict.cut[:10]}\n{lines}", answers


def _difference(verdict: Verdict, name: str, other: str, level: str) -> tuple[Comparison, str]:
    """Returns the paired comparison of two systems' reciprocal ranks, and a description of the difference in MRR."""
    ranks = [[one.mrr for one in verdict.measured[system][level]] for system in (name, other)]
    comparison = compare_paired(*ranks)
    return comparison, difference_text(comparison.delta, comparison.interval, digits=3)


def _answers(verdict: Verdict) -> list[str]:
    """Returns lines that report whether memory helps, and whether each encoder improves on the search before it.

    Each system is compared with the previous system. The best of several systems is never compared with the first.
    """
    steps = [("Does commit memory help", MEMORY, WORDS)]
    before = ""
    for model in verdict.models:
        if before:
            question = f"Does {safe(model)} find more than {safe(before)}, the previous model"
            steps.append((question, with_memory(model), with_memory(before)))
        else:
            steps.append((f"Does {safe(model)} add to words and memory", with_memory(model), MEMORY))
        before = model
    lines = []
    for question, name, other in steps:
        comparison, text = _difference(verdict, name, other, "functions")
        answer = ANSWERS.get(comparison.winner, f"{len(verdict.queries)} queries are too few to tell")
        if comparison.ties == len(verdict.queries):
            answer = "it makes no difference"
        lines.append(f"{question}? {answer[0].upper()}{answer[1:]}: MRR of functions {text}.")
    if len(verdict.models) == 1:
        lines.append("To see what training adds, list the encoder before training first: --model BEFORE,TRAINED.")
    return lines
