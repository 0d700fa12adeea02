"""Mine hard negatives of training rows: for each query the codes that an estimator finds most similar to it.

soft-trainer mine-negatives negatives.jsonl.gz --data_dir DIR
soft-trainer mine-negatives negatives.jsonl.gz --data_dir DIR --estimator trained_model --estimator_model NAME
soft-trainer mine-negatives negatives.jsonl.gz --data_dir DIR --codes MORE.jsonl.gz

`soft-trainer train --data_dir DIR --negatives negatives.jsonl.gz --negatives_per_query 1` reads the file. The rows
must be those of the training: the same folder, filters and limits. Here bm25 compares the words of a query with those
of codes, and identifiers are split into words.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

from soft_trainer.cli.shared_options import add_shared_options
from soft_trainer.errors import UserError
from soft_trainer.files import check_writable
from soft_trainer.options.fields import DataArguments, SoftInfoNCEOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.terminal import print_on_main, table

# The options that training has too, with the same names, help and defaults.
SHARED = {
    DataArguments: ("data_dir", "dataset_name", "source_dir", "history", "language", "split_urls", "filters")
    + ("mining_keep", "max_train_rows", "estimator", "estimator_model", "estimator_cache_dir", "no_estimator_cache")
    + ("mixture_shares", "mixture_temperatures", "bm25_idf", "bm25_scope"),
    SoftInfoNCEOptions: ("negative_candidates", "negative_ranks", "negative_max_score", "negative_margin")
    + ("negative_ratio",),
    ModelArguments: ("trust_remote_code", "profile", "query_columns", "code_columns"),
}
# columns that bm25 reads
QUERY_WORDS = "query_words"
CODE_WORDS = "code_words"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("output", metavar="OUTPUT", help="file to write: .jsonl or .jsonl.gz")
    parser.add_argument(
        "--codes", help="JSON lines with `code` (and `url`): further code, in addition to that of the training rows"
    )
    parser.add_argument("--code_dir", help="source tree in --language: its functions are further code")
    add_shared_options(parser, SHARED)


def run(arguments: argparse.Namespace) -> None:
    """Mines, writes the file, and prints a table that helps to choose limits."""
    # Imported here, so that a wrong option need not wait for them.
    from soft_trainer.data.negative_files import write_negatives
    from soft_trainer.data.negatives import limited
    from soft_trainer.data.sources import load_data
    from soft_trainer.estimators.registry import choose_estimator
    from soft_trainer.options.declared import check_values
    from soft_trainer.training.building import build_profile
    from soft_trainer.training.hard_batches import check_code_only, choice_of, mined_negatives, training_texts

    given = {kind: kind(**{name: getattr(arguments, name) for name in names}) for kind, names in SHARED.items()}
    data_args, options, model_args = given.values()
    estimator = arguments.estimator
    codes = Path(arguments.codes or "").name
    unfit = estimator in (None, "none") or "initial_model" in estimator.split("+")
    fit = "bm25, or the encoder that shall mine: --estimator trained_model --estimator_model NAME"
    known_ending = arguments.output.endswith((".jsonl", ".jsonl.gz"))
    if unfit:
        raise UserError(f"estimator={estimator}: use {fit}")
    if codes.startswith("codebase."):
        raise UserError(f"{codes}: a codebase holds the codes of test, which must not be trained on")
    if not known_ending:
        raise UserError(f"{arguments.output}: name a file that ends in .jsonl or .jsonl.gz")
    if arguments.codes and not Path(arguments.codes).is_file():
        raise UserError(f"codes={arguments.codes}: no such file")
    if arguments.code_dir and not Path(arguments.code_dir).is_dir():
        raise UserError(f"code_dir={arguments.code_dir}: no such folder")
    check_writable(Path(arguments.output).parent, arguments.output)
    check_values(options)
    choice = choice_of(dataclasses.replace(options, negatives_per_query=1))
    profile = build_profile(dataclasses.replace(model_args, profile=model_args.profile or "auto"))
    bm25_of_codes = dataclasses.replace(data_args, bm25_document_column=CODE_WORDS)
    estimator = choose_estimator(bm25_of_codes, (QUERY_WORDS,), model_args.trust_remote_code)
    with tempfile.TemporaryDirectory(prefix="soft-trainer-") as folder:
        data = load_data(data_args, profile, folder, ("train",))
        train = data["train"]
        further = _further_codes(arguments, data)
        check_code_only(estimator, len(further))
        rows, ids = _with_words(train, further, profile)
        estimator.fit(rows)
        mined = mined_negatives(estimator, options.negative_candidates, len(train), ids, further)
        negatives = limited(mined, choice)
        name = ":".join(filter(None, (data_args.estimator, data_args.estimator_model)))
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        write_negatives(arguments.output, negatives, training_texts(train, profile), name)
        sys.stdout.write(f"{_summary(negatives)}\nWritten to {arguments.output}\n")


def _further_codes(arguments: argparse.Namespace, data) -> list[dict]:
    """Returns the codes of --codes and --code_dir, without those that are in a split of the data already."""
    from soft_trainer.data.codesearchnet import load_jsonl

    rows = []
    if arguments.codes:
        codes = load_jsonl(Path(arguments.codes))
        lacking = "code" not in codes.column_names or None in codes["code"][:]
        if lacking:
            raise UserError(f"{arguments.codes}: every row needs the column 'code'")
        rows += codes
    if arguments.code_dir:
        from soft_trainer.mining.tree import source_functions  # imports grammars, which are slow

        rows += source_functions(arguments.code_dir, arguments.language)
    kept = ("url", "code", "code_tokens", "language")
    left = {}
    known = set()
    for split in data.values():
        for column in {"url", "code"} & set(split.column_names):
            known.update(split[column][:])
    for row in rows:
        if row["code"] not in known and row.get("url") not in known:
            left.setdefault(row["code"], {name: row[name] for name in kept if row.get(name)})
    if len(left) < len(rows):
        print_on_main(
            f"{len(rows) - len(left):,} of {len(rows):,} further codes are left out: copies, training rows, and codes "
            "of the corpus that queries are ranked against"
        )
    return list(left.values())


def _with_words(train, further: list[dict], profile) -> tuple:
    """Returns the rows with the columns that bm25 reads, further codes last, and their `text_ids_of`."""
    from soft_trainer.data.tokens import SIDES, side_texts
    from soft_trainer.estimators.bm25 import split_identifiers
    from soft_trainer.training.hard_batches import with_codes

    rows, ids = with_codes(train, further, profile)
    for side, name in zip(SIDES, (QUERY_WORDS, CODE_WORDS), strict=True):
        words = [split_identifiers(text.split()) for text in side_texts(rows, side, profile)]
        rows = rows.add_column(name, words)
    return rows, ids


def _summary(negatives) -> str:
    """Returns a table: how many candidates there are, and how they score against the queries' own codes."""
    import numpy as np

    first = negatives.starts[:-1][negatives.counts > 0]
    own = negatives.own[negatives.counts > 0]
    nearest = negatives.scores[first]
    lines = [
        ("training rows", f"{len(negatives):,}"),
        ("rows without a candidate", f"{int((negatives.counts == 0).sum()):,}"),
        ("candidates of a row, mean", f"{negatives.counts.mean():.1f}"),
        ("further codes among them", f"{len(negatives.code_only):,}"),
        ("score of the own code, median", f"{np.median(own):.3g}"),
        ("score of the nearest candidate, median", f"{np.median(nearest):.3g}"),
        ("rows whose nearest candidate scores above the own code", f"{(nearest > own).mean():.0%}"),
    ]
    return table(("negatives", ""), lines)
