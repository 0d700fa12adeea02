"""Mines documented functions from a source tree.

The output is a folder in GraphCodeBERT's layout with CodeSearchNet's columns. No package has rows in two splits.
Duplicates are dropped over the whole tree. The same tree gives the same bytes with any number of workers.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from soft_trainer import identity
from soft_trainer.dataflow import parser
from soft_trainer.errors import UserError
from soft_trainer.files import check_writable, write_rows
from soft_trainer.mining.definitions import parse
from soft_trainer.mining.duplicates import exact_duplicates, hash_tokens, minhash, near_duplicates
from soft_trainer.mining.functions import functions
from soft_trainer.mining.languages import SOURCE_LANGUAGES
from soft_trainer.mining.packages import SPLITS, assign_splits, package_names
from soft_trainer.mining.rules import CODE_RULES, DOCUMENT_RULES, Row, first_broken, is_mined_path, is_test_path
from soft_trainer.mining.source_files import SKIPPED_FOLDERS, decoded, read_text
from soft_trainer.terminal import Progress, table

# a function, and the MinHash of its code
Candidate = tuple[Row, np.ndarray]
# the reason why a function is no pair, empty for a pair; None for a function that is no code to search either
Judged = tuple[str, Candidate | None]

RULES = (*CODE_RULES, *DOCUMENT_RULES)


@dataclass
class Mined:
    """The result of mining: rows of every split and of the codebase, and counts of files and functions by outcome."""

    rows: dict[str, list[Row]]
    files: Counter[str] = field(default_factory=Counter)
    functions: Counter[str] = field(default_factory=Counter)


def mine(
    source_dir: str | os.PathLike[str],
    language: str,
    num_workers: int | None = None,
    keep: Sequence[str] = (),
) -> Mined:
    """Mines the documented functions of a source tree.

    Tests, hidden folders and folders of foreign code (`SKIPPED_FOLDERS`) are skipped. A pair is a documented function
    that passes every rule of `RULES` except those in `keep`. The codebase holds the codes of valid and test, and all
    other distinct functions outside the training packages, documented or not.

    Args:
        source_dir: root of the tree; symbolic links are not followed.
        language: one of `SOURCE_LANGUAGES`.
        num_workers: processes; None means one a CPU core. The result is the same for any number.
        keep: names of rules that are not applied.

    Raises:
        UserError: an unknown language or rule, no such folder, no file of the language, no documented function, or
            fewer than three packages.
    """
    paths, skipped = _source_files(source_dir, language, keep)
    mined = Mined({}, skipped)
    pairs: list[Candidate] = []
    others: list[Candidate] = []
    read = partial(_mine_file, source_dir, language, frozenset(keep))
    for outcome, judged in each_in_order(read, paths, num_workers, "file", 8):
        mined.files[outcome] += 1
        for reason, candidate in judged:
            if not reason:
                pairs.append(candidate)
                continue
            mined.functions[reason] += 1
            if candidate:
                others.append(candidate)
    mined.rows = _split(pairs, others, source_dir, mined.functions)
    mined.functions["kept as pairs"] = sum(len(mined.rows[split]) for split in SPLITS)
    return mined


def mine_to(
    source_dir: str | os.PathLike[str], language: str, output_dir: str | os.PathLike[str], **options: Any
) -> dict[str, Any]:
    """Mines `source_dir` into `output_dir/{train,valid,test,codebase}.jsonl.gz`. Takes the options of `mine`.

    Returns:
        Numbers of `rows` by split, of `functions` and `files` by outcome, and `seconds`; see `mining_table`.

    Raises:
        UserError: as `mine`, or an output_dir that cannot be written.
    """
    check_writable(output_dir, f"output_dir={output_dir}")
    started = time.perf_counter()
    mined = mine(source_dir, language, **options)
    write_rows(mined.rows, output_dir)
    return {
        "rows": {split: len(rows) for split, rows in mined.rows.items()},
        "functions": dict(mined.functions.most_common()),
        "files": dict(mined.files.most_common()),
        "seconds": time.perf_counter() - started,
    }


def mining_table(counts: Mapping[str, Any]) -> str:
    """Returns the counts of `mine_to` or `mine_history_to` as a Markdown table."""
    title = f"mined in {counts['seconds']:.1f} s"
    if "cut" in counts:
        title += f", cut at {counts['cut'][:10]}"
    rows = []
    for kind, numbers in counts.items():
        if isinstance(numbers, dict):
            rows += [[kind, name, count] for name, count in numbers.items()]
    return table(["", title, "count"], rows)


def explained(counts: Counter[str]) -> str:
    """Formats the most common reasons with their counts, for the end of an error message."""
    if counts:
        return "; " + ", ".join(f"{name}: {count:,}" for name, count in counts.most_common(4))
    return ""


def each_in_order(
    run: Callable[[Any], Any], items: Sequence, num_workers: int | None, unit: str, chunk: int
) -> Iterator[Any]:
    """Yields `run(item)` for every item in order, computed in several processes, with a progress bar.

    Args:
        num_workers: processes; None means one a CPU core. The results are the same for any number.
        unit: one item, in words.
        chunk: items that a process takes at once.
    """
    workers = min(num_workers or os.cpu_count() or 1, -(-len(items) // chunk))
    if workers > 1:
        pools = multiprocessing.Pool(workers)
    else:
        pools = nullcontext()
    with Progress("Mining", len(items), unit) as bar, pools as pool:
        for result in pool.imap(run, items, chunk) if pool else map(run, items):
            bar.update(1)
            yield result


def tree_state(source_dir: str | os.PathLike[str], language: str) -> str:
    """Returns a fingerprint of the names and contents of the tree's source files.

    Raises:
        UserError: no such folder, an unknown language, or no file of the language.
    """
    paths, _ = _source_files(source_dir, language, ("tests",))
    return identity.fingerprint({path: identity.file_fingerprint(Path(source_dir, path)) for path in paths})


def main_language(paths: Iterable[str], place: str | os.PathLike[str]) -> str:
    """Returns the language that most of the files are in.

    Args:
        paths: of files, relative to their root.
        place: the tree or repository, for the message.

    Raises:
        UserError: no source file in a known language.
    """
    counts = Counter()
    for path in paths:
        counts.update(language for language in SOURCE_LANGUAGES if is_mined_path(path, language))
    if not counts:
        known = ", ".join(SOURCE_LANGUAGES)
        raise UserError(f"{place}: no source file in one of {known}; choose with --language")
    return max(SOURCE_LANGUAGES, key=counts.__getitem__)


def tree_language(source_dir: str | os.PathLike[str]) -> str:
    """Returns the language of most files below a folder; UserError if there is none."""
    return main_language(_files(source_dir), source_dir)


def _files(root: str | os.PathLike[str]) -> Iterator[str]:
    """Yields the relative paths of the files, and of the links to folders, outside hidden and foreign folders."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        for name in links + names:
            yield os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")


def _source_files(
    root: str | os.PathLike[str], language: str, keep: Sequence[str] = ()
) -> tuple[list[str], Counter[str]]:
    """Returns the sorted relative paths of the language's files, and counts of skipped ones."""
    parser(language)  # refuses an unknown language
    if not Path(root).is_dir():
        raise UserError(f"{root}: no such folder; give the root of a source tree")
    for rule in keep:
        if rule not in RULES:
            raise UserError(f"keep={[rule]}: no such rule; use {', '.join(RULES)}")
    extensions = SOURCE_LANGUAGES[language].extensions
    paths = []
    skipped = Counter()
    for path in _files(root):
        full = Path(root, path)
        if full.is_symlink() and (full.is_dir() or path.endswith(extensions)):
            skipped["symbolic link"] += 1
        elif not path.endswith(extensions):
            continue
        elif not full.is_file():
            skipped["not a regular file"] += 1
        elif decoded(os.fsencode(path)) is None:
            skipped["name that is not UTF-8"] += 1
        elif is_test_path(path, language) and "tests" not in keep:
            skipped["test"] += 1
        else:
            paths.append(path)
    if not paths:
        raise UserError(f"{root}: no {language} file to mine ({' '.join(extensions)}){explained(skipped)}")
    return sorted(paths), skipped


def _mine_file(
    root: str | os.PathLike[str], language: str, keep: frozenset[str], path: str
) -> tuple[str, list[Judged]]:
    """Returns a file's outcome and its functions, pairs first."""
    source = read_text(root, path, strict=True)
    if isinstance(source, str):
        return source, []
    tree = parse(source, language)
    if tree is None:
        return "unparseable", []
    judged = []
    for row, node in functions(tree, source, language, path):
        reason = first_broken(row, CODE_RULES, keep)
        if not reason and node.has_error:
            reason = "unparseable"
        if reason:
            judged.append((reason, None))
            continue
        if row["docstring_tokens"]:
            reason = first_broken(row, DOCUMENT_RULES, keep)
        else:
            reason = "undocumented"
        judged.append((reason, (row, minhash(row["code_tokens"]))))
    return "mined", sorted(judged, key=lambda each: each[0] != "")


def _distinct(candidates: list[Candidate], dropped: Counter[str]) -> list[Candidate]:
    """Returns the candidates that are not duplicates of an earlier one. Counts the others in `dropped`."""
    copies = exact_duplicates(hash_tokens(row["code_tokens"]) for row, _ in candidates)
    candidates = list(compress(candidates, ~copies))
    near = near_duplicates(range(len(candidates)), lambda place: candidates[place][1])
    dropped.update(+Counter(duplicates=int(copies.sum()), near_duplicates=int(near.sum())))
    return list(compress(candidates, ~near))


def _split(
    pairs: list[Candidate], others: list[Candidate], root: str | os.PathLike[str], dropped: Counter[str]
) -> dict[str, list[Row]]:
    """Returns the distinct rows of every split and of the codebase, in the order of the tree."""
    pairs = _distinct(pairs, dropped)
    package = package_names(Counter(row["path"] for row, _ in pairs))
    sizes = Counter(package(row["path"]) for row, _ in pairs)
    if not pairs:
        raise UserError(f"{root}: no documented function{explained(dropped)}")
    if len(sizes) < len(SPLITS):
        raise UserError(
            f"{root}: documented functions in only {len(sizes)} files or packages ({', '.join(sorted(sizes))}); "
            "train, valid and test need one each: give a larger tree"
        )
    split = assign_splits(sizes)
    rows: dict[str, list[Row]] = {"train": [], "valid": [], "test": []}
    for row, _ in pairs:
        repo = package(row["path"])
        rows[split[repo]].append({"repo": repo, **row, "partition": split[repo]})
    # The encoder must not have seen a function of the codebase in training.
    others = [other for other in others if split.get(package(other[0]["path"])) != "train"]
    codebase = rows["valid"] + rows["test"]
    for row, _ in _distinct([*pairs, *others], Counter())[len(pairs) :]:
        codebase.append({"repo": package(row["path"]), **row, "partition": "codebase"})
    return rows | {"codebase": [row | {"docstring": "", "docstring_tokens": []} for row in codebase]}
