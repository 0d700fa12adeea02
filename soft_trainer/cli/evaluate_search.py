"""Evaluate search in indexed source trees: nDCG@10, MRR, time and memory.

The queries come from one of three sources:
- judged queries for several source trees (--queries, --trees);
- the documentation of a tree's functions, which must be found in a copy of the tree without comments (--folder);
- the subjects of a repository's newest commits, which should find the functions that these commits changed, in the
  tree before them (--history). This compares word search and search with each model, with and without the memory of
  earlier commits. It reports whether the memory helps, whether the first model finds more, and whether each additional
  model finds more than the previous model, so list the encoder before training first.

soft-trainer evaluate-search --queries queries.jsonl.gz --trees DIR
soft-trainer evaluate-search --folder DIR
soft-trainer evaluate-search --history REPOSITORY --model BEFORE_TRAINING,outputs/history
soft-trainer evaluate-search --history REPOSITORY --external 'rg --files-with-matches -e {query} .'
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

from soft_trainer.cli.search import safe
from soft_trainer.errors import UserError
from soft_trainer.evaluation.significance import Comparison, compare_paired, difference_text
from soft_trainer.files import check_writable, write_text
from soft_trainer.search.code_index import CodeIndex
from soft_trainer.search.measuring import judged
from soft_trainer.search.measuring.verdict import MEMORY, WORDS, Verdict, compare_searches, with_memory
from soft_trainer.source.source_files import source_folder
from soft_trainer.terminal import print_on_main, table

_MAX_QUERIES = 200
# Whether the first system is better, by the `winner` of the comparison.
ANSWERS = {"a": "yes", "b": "no, it finds less"}
# Options that have no effect without another option.
_NEEDS = {"language": "history", "external": "history", "truncate_dim": "model", "max_queries": "folder"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `soft-trainer evaluate-search` to a parser."""
    add = parser.add_argument
    add("--queries", help="judged queries as JSON lines: repo, query, relevant, secondary")
    add("--trees", metavar="DIR", help="folder with a subfolder for each repo in --queries")
    add("--folder", metavar="DIR", help="one source tree; its documentation supplies the queries")
    add("--history", metavar="REPOSITORY", help="git repository; the subjects of its newest commits are the queries")
    add("--language", help="language of the functions in --history (default: the most common one)")
    add(
        "--model",
        help="folder or Hub name of an encoder; --history accepts several, comma-separated, the one before training "
        "first (default: search only by words)",
    )
    add(
        "--external",
        metavar="COMMAND",
        help="for --history: another program, such as 'rg -l -e {query} .', that prints path[:line], best first",
    )
    add("--truncate_dim", type=int, metavar="N", help="keep the first N dimensions of each embedding")
    add("--index_dir", metavar="DIR", help="folder for the indexes (default: a temporary one)")
    add("--max_queries", type=int, help=f"maximum number of queries from --folder (default: {_MAX_QUERIES})")
    add("--output", metavar="FILE", help="write the results of each query to this file, as JSON lines")


def run(arguments: argparse.Namespace) -> None:
    """Indexes the source trees, runs the queries and prints a table of results."""
    given = [name for name in ("queries", "folder", "history") if getattr(arguments, name)]
    one = len(given) == 1 and bool(arguments.queries) == bool(arguments.trees)
    if not one:
        raise UserError("give one of --queries (with --trees), --folder or --history")
    for option, needed in _NEEDS.items():
        if getattr(arguments, option) is not None and not getattr(arguments, needed):
            raise UserError(f"{option}: has no effect without --{needed}")
    if arguments.max_queries is not None and arguments.max_queries < 1:
        raise UserError(f"max_queries={arguments.max_queries}: expected 1 or more")
    if arguments.output:
        check_writable(Path(arguments.output).parent, f"output={arguments.output}")
    with tempfile.TemporaryDirectory(prefix="soft_trainer-") as scratch:
        text, answers = (_history if arguments.history else _files)(arguments, scratch)
    sys.stdout.write(text + "\n")
    if arguments.output:
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        write_text(arguments.output, "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers))


@contextmanager
def _index(arguments: argparse.Namespace, tree: str, index_dir: str | Path) -> Iterator[CodeIndex]:
    """Yields the index of a source tree, then prints the notices of its searches."""
    choice = {"model": arguments.model, "truncate_dim": arguments.truncate_dim}
    with CodeIndex.build(tree, index_dir, progress=True, **choice) as index:
        yield index
        for notice in index.notices:
            print_on_main(notice)


def _files(arguments: argparse.Namespace, scratch: str) -> tuple[str, list[dict]]:
    """Runs queries on one or more indexed trees. Returns the table, and the results of each query."""
    if arguments.folder:
        folder = source_folder(arguments.folder)
        queries = judged.documentation_queries(folder, f"{scratch}/tree", arguments.max_queries or _MAX_QUERIES)
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


def _history(arguments: argparse.Namespace, scratch: str) -> tuple[str, list[dict]]:
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
