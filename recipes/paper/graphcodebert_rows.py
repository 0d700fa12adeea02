"""Writes the rows that the paper's recipes read: CodeSearchNet, filtered by GraphCodeBERT's rules.

    python recipes/paper/graphcodebert_rows.py code-search-net/code_search_net outputs/paper_rows --languages ruby go

The rows of each language go to OUTPUT_DIR/LANGUAGE, in CodeSearchNet's files. ROWS is anything that `load_rows` reads.
As in GraphCodeBERT (Guo et al., 2021), comments are removed from functions. A pair is dropped if its function has a
syntax error, or if its documentation is shorter than 3 or longer than 256 tokens, or contains an image, a link or a
character beyond ASCII. The corpus keeps all of its functions, because users may search for any of them.
"""

import argparse
import os
from collections import Counter
from pathlib import Path

from datasets import Dataset, Features, Value

from soft_trainer import dataflow, load_rows
from soft_trainer.data.languages import CODESEARCHNET_LANGUAGES
from soft_trainer.mining.rules import DOCUMENT_RULES, first_broken
from soft_trainer.system.files import write_rows
from soft_trainer.system.terminal import table

RULES = ("unparseable", *DOCUMENT_RULES)
PROCESSES = os.cpu_count()


def without_comments(row: dict) -> dict:
    """Removes the comments from a row's function."""
    code = dataflow.remove_comments(row["code"], row["language"])
    if code.split() == row["code"].split():
        return row
    return row | {"code": code, "code_tokens": dataflow.code_tokens(code, row["language"])}


def broken_rule(row: dict) -> dict:
    """Returns the first rule that drops a row, or ""."""
    return {"dropped_by": first_broken(row, RULES)}


def mapped(rows: Dataset, change, columns: Features) -> Dataset:
    """Applies a function to every row, in several processes if there are many rows."""
    return rows.map(change, features=columns, num_proc=PROCESSES if len(rows) > 1000 else None)


def filter_rows(rows: Dataset) -> tuple[Dataset, Counter]:
    """Returns the rows that pass GraphCodeBERT's rules, without comments, and how many each rule dropped."""
    rows = mapped(rows, without_comments, rows.features)
    judged = mapped(rows, broken_rule, Features(rows.features | {"dropped_by": Value("string")}))
    rules = judged["dropped_by"][:]
    kept = [number for number, rule in enumerate(rules) if not rule]
    return rows.select(kept), Counter(filter(None, rules))


def main() -> None:
    """Filters the rows of each language, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", metavar="ROWS", help="a name on the Hub, or a folder")
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--languages", nargs="+", default=CODESEARCHNET_LANGUAGES)
    options = parser.parse_args()
    for language in options.languages:
        written = {}
        counts = []
        for name, split in load_rows(options.rows, language=language).items():
            pairs = split.to_pairs()
            written[name], dropped = filter_rows(pairs)
            counts.append((name, len(pairs), *(dropped[rule] for rule in RULES), len(written[name])))
            if name != "train":
                written["codebase"] = mapped(split.corpus, without_comments, split.corpus.features)
        write_rows(written, options.output_dir / language)
        print(language)  # noqa: T201
        print(table(("split", "pairs", *RULES, "left"), counts))  # noqa: T201


if __name__ == "__main__":
    main()
