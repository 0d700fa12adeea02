"""Measures how often search results are called weak, for judged queries and for queries that have no answer.

python benchmarks/weak_results.py queries.jsonl.gz TREES
python benchmarks/weak_results.py queries.jsonl.gz TREES --model outputs/static
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from soft_trainer.search import CodeIndex
from soft_trainer.search.index.words import STOP_WORDS, WORD
from soft_trainer.search.measuring import judged
from soft_trainer.terminal import table

STRAY = 60  # queries of each kind for each tree
DOCUMENTATION = 200  # queries for each tree, at most
LETTERS = "bcdfghjklmnpqrstvwxyz"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queries")
    parser.add_argument("trees", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--only", nargs="+", help="names of trees")
    arguments = parser.parse_args()
    queries = judged.read_queries(arguments.queries)
    names = arguments.only or sorted({query.tree for query in queries})
    queries = [query for query in queries if query.tree in names]
    words = vocabulary(query.query for query in queries)
    rows: dict[str, list[tuple]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            tree = arguments.trees / name
            with CodeIndex.build(tree, f"{scratch}/{name}", model=arguments.model) as index:
                for kind, some in kinds(queries, name, words).items():
                    rows.setdefault(kind, []).extend(outcome(index, query) for query in some)
            bare = f"{scratch}/bare"
            documented = judged.documentation_queries(str(tree), bare, DOCUMENTATION)
            with CodeIndex.build(bare, f"{scratch}/bare-{name}", model=arguments.model) as index:
                rows.setdefault("documentation", []).extend(outcome(index, query) for query in documented)
            shutil.rmtree(bare)
    headers = ["queries", "number", "nothing found", "first weak", "first weak and right", "right ones of ten weak"]
    sys.stdout.write(table(headers, [[kind, *summary(own)] for kind, own in rows.items()], floats=".3f") + "\n")


def vocabulary(queries: Iterable[str]) -> list[str]:
    """Returns the significant words of the queries."""
    words = {word.lower() for query in queries for word in WORD.findall(query)}
    return sorted(word for word in words - STOP_WORDS if word.isalpha() and len(word) > 2)


def kinds(queries: list[judged.JudgedQuery], name: str, words: list[str]) -> dict[str, list[judged.JudgedQuery]]:
    """Returns queries of each kind for a tree."""
    rng = random.Random(name)
    asked = {
        "judged": [query for query in queries if query.tree == name],
        "judged for other trees": [query._replace(targets=frozenset()) for query in queries if query.tree != name],
    }
    for kind, known, unknown in (
        ("one word and one of random letters", 1, 1),
        ("one word and three of random letters", 1, 3),
        ("an identifier of a word and random letters", 1, 1),
        ("four words at random", 4, 0),
    ):
        between = "_" if "identifier" in kind else " "
        asked[kind] = []
        for _ in range(STRAY):
            some = rng.choices(words, k=known)
            for _ in range(unknown):
                some.append("".join(rng.choices(LETTERS, k=rng.randint(3, 9))))
            rng.shuffle(some)
            asked[kind].append(judged.JudgedQuery(name, between.join(some), frozenset()))
    return asked


def outcome(index: CodeIndex, query: judged.JudgedQuery) -> tuple[bool, bool, bool, int, int]:
    """Searches for a query.

    Returns:
        Whether anything was found, whether the first result is weak, whether it is right, the number of right results
        among ten, and the number of those that are weak.
    """
    results = index.search(query.query, judged.CUT)
    if not results:
        return False, False, False, 0, 0
    right = [result for result in results if result.path in query.targets]
    first = results[0]
    return True, first.weak, first.path in query.targets, len(right), sum(result.weak for result in right)


def summary(outcomes: list[tuple[bool, bool, bool, int, int]]) -> list[float]:
    """Returns the number of queries and the shares of the table's columns."""
    found = [each for each in outcomes if each[0]]
    right = sum(each[3] for each in found)
    return [
        len(outcomes),
        1 - len(found) / len(outcomes),
        sum(each[1] for each in found) / len(found),
        sum(each[1] and each[2] for each in found) / len(found),
        sum(each[4] for each in found) / max(right, 1),
    ]


if __name__ == "__main__":
    main()
