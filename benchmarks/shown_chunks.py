"""Measures how often the chunk that a search shows first answers the question.

    python benchmarks/shown_chunks.py [--model NAME] [--index_dir DIR]

line_queries.jsonl has 60 questions about jinja2, joblib and this package, with the lines that answer them. The
questions were written from the sources before any ranking saw them. The half "choose" may be used to choose weights;
the half "report" is only for the reported figures. The line numbers fit one version of each tree. So jinja2 and
joblib must be installed in the versions below (`pip install jinja2==3.1.6 joblib==1.6.0`), and this package is read
from the commit below.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from soft_trainer.search import CodeIndex, SearchResult
from soft_trainer.source.git import open_repository, write_tree
from soft_trainer.terminal import table

QUERIES = Path(__file__).with_name("line_queries.jsonl")
PACKAGES = {"jinja2": "3.1.6", "joblib": "1.6.0"}
COMMIT = "5e389c87ba2bcce405ae2e7adcbef69639ee85cc"
DEPTH = 10


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="encoder to search with as well")
    parser.add_argument("--index_dir", help="folder to keep the indexes in, to use them again")
    arguments = parser.parse_args()
    queries = [json.loads(line) for line in QUERIES.read_text(encoding="utf-8").splitlines()]
    modes = {"words": True} | ({"words and encoder": False} if arguments.model else {})
    outcomes: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in dict.fromkeys(query["repository"] for query in queries):
            base = Path(arguments.index_dir or scratch).absolute()
            index = CodeIndex.build(tree_of(name, base / "tree"), base / name, arguments.model, progress=True)
            for query in queries:
                if query["repository"] != name:
                    continue
                for mode, lexical in modes.items():
                    results = index.search(query["query"], DEPTH, lexical=lexical)
                    for group in (name, f"half {query['half']}", "all"):
                        outcomes.setdefault((mode, group), []).append(outcome(results, query["answers"]))
            index.close()
    rows = sorted(
        ([mode, group, len(own), *means(own)] for (mode, group), own in outcomes.items()), key=lambda r: r[:2]
    )
    headers = ["search by", "questions", "number", "first result", "in ten", "MRR@10", "right file", "chunk of it"]
    sys.stdout.write(table(headers, rows, floats=".3f") + "\n")


def tree_of(name: str, folder: Path) -> str | Path:
    """The folder of an installed package, or this package's tree at `COMMIT`, written to `folder`."""
    if name not in PACKAGES:
        write_tree(open_repository(Path(__file__).parents[1]), COMMIT, folder)
        return folder
    if version(name) != PACKAGES[name]:
        raise SystemExit(f"{name} {version(name)} is installed; pip install {name}=={PACKAGES[name]}")
    return find_spec(name).submodule_search_locations[0]


def outcome(results: list[SearchResult], answers: list[dict]) -> tuple[float, ...]:
    """Whether the first result answers, whether one of ten does, 1 / its rank; right file first, and its first chunk.

    The last is NaN where no result is in a right file.
    """
    right = [any(overlaps(result, answer) for answer in answers) for result in results]
    paths = {answer["path"] for answer in answers}
    in_file = [answers for result, answers in zip(results, right, strict=True) if result.path in paths]
    rank = right.index(True) + 1 if any(right) else float("inf")
    first_file = bool(results) and results[0].path in paths
    return (
        float(rank == 1),
        float(any(right)),
        1 / rank,
        float(first_file),
        float(in_file[0]) if in_file else float("nan"),
    )


def overlaps(result: SearchResult, answer: dict) -> bool:
    """True if a result shows a line of the answer."""
    inside = result.start_line <= answer["end_line"] and result.end_line >= answer["start_line"]
    return inside and result.path == answer["path"]


def means(outcomes: list[tuple[float, ...]]) -> list[float]:
    """The mean of each measure, without NaN."""
    columns = [[value for value in column if value == value] for column in zip(*outcomes, strict=True)]
    return [sum(column) / max(len(column), 1) for column in columns]


if __name__ == "__main__":
    main()
