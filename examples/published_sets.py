# /// script
# requires-python = ">=3.11"
# dependencies = ["soft-trainer"]
# ///
"""Converts CoSQA, CoSQA+ and CodeSearchNet's challenge to `codebase.jsonl` and `relevance.jsonl`.

python examples/published_sets.py FOLDER OUTPUT_DIR [LANGUAGE]
soft-trainer evaluate MODEL --eval_data_dir OUTPUT_DIR

FOLDER has the published files of one set. The challenge has no corpus: pass `--data_dir` or `--language`, too.
"""

import csv
import json
import sys
from pathlib import Path


def write(path: Path, rows: list[dict]) -> None:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: str, output_dir: str, language: str = "python") -> None:
    """Writes the codebase, if the set has one, and the judgments."""
    source = Path(folder)
    target = Path(output_dir)
    target.mkdir(parents=True, exist_ok=True)
    codes = {}
    judged = []
    if (source / "annotationStore.csv").is_file():
        for row in csv.DictReader((source / "annotationStore.csv").open(newline="")):
            if row["Language"].lower() == language:
                judged.append((row["Query"].lower(), row["GitHubUrl"], float(row["Relevance"])))
    elif (source / "test_agent_query.json").is_file():
        queries = {row["query-idx"]: row["query"] for row in json.load(open(source / "test_agent_query.json"))}
        codes = {row["code-idx"]: row["code"] for row in json.load(open(source / "test_agent_codebase.json"))}
        for row in json.load(open(source / "test_agent_pairs_true.json")):
            if row["query-idx"] in queries:
                judged.append((queries[row["query-idx"]], row["code-idx"], row["label"]))
    else:
        codes = {number: code for code, number in json.load(open(source / "code_idx_map.txt")).items()}
        (dev,) = source.glob("cosqa-retrieval-dev*.json")
        for row in json.load(open(dev)):
            judged.append((row["doc"], row["retrieval_idx"], row.get("label", 1)))
    if codes:
        rows = [{"url": str(url), "code": code, "language": language} for url, code in codes.items()]
        write(target / "codebase.jsonl", rows)
    write(target / "relevance.jsonl", [{"query": q, "url": str(u), "relevance": r} for q, u, r in judged])


if __name__ == "__main__":
    main(*sys.argv[1:])
