"""Mines documented functions from a source tree.

The output is a folder in GraphCodeBERT's layout, with CodeSearchNet's columns. No package has rows in two splits.
Duplicates are dropped across the whole tree. The same tree always gives the same bytes, however many workers read it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.mining.duplicates import exact_duplicates, hash_tokens, minhash, near_duplicates
from soft_trainer.mining.packages import package_names
from soft_trainer.mining.rules import CODE_RULES, DOCUMENT_RULES, first_broken
from soft_trainer.shares import PARTITIONS, assign_splits
from soft_trainer.source.definitions import parse_file
from soft_trainer.source.documentation import document_tokens, summary
from soft_trainer.source.functions import FileFunctions, Row
from soft_trainer.source.grammars import parser
from soft_trainer.source.languages import LANGUAGE_OF_ENDING, PREPROCESSED, SOURCE_LANGUAGES, source_language
from soft_trainer.source.names import is_test_path
from soft_trainer.source.repositories import is_linked_worktree
from soft_trainer.source.source_files import SKIPPED_FOLDERS, decoded, read_text
from soft_trainer.system import fingerprints
from soft_trainer.system.files import check_writable, write_rows
from soft_trainer.system.terminal import progress_bar, table

PAIR_RULES = (*CODE_RULES, *DOCUMENT_RULES)
# The outcomes of a file of which nothing is mined, or whose syntax errors may hide functions.
_UNPARSEABLE = "unparseable"
_IN_PART = "mined in part"
_MAX_NAMED = 10
_AT_ONCE = 8  # how many files a worker takes at once


class Found(NamedTuple):
    """A function for the corpus: its row, and the MinHash signature of its code."""

    row: Row
    signature: np.ndarray


class MinedFile(NamedTuple):
    """The functions in one file.

    Attributes:
        outcome: "mined", `_IN_PART`, or the reason to skip the file.
        judged: (reason, found) for each function. `reason` is why the function is not a training pair, or "" for a
            pair. `found` is None if the function is not part of the corpus either.
        defined: the names of all functions.
        prototypes: the names and the documentation of functions that are documented where they are declared, in C.
    """

    outcome: str
    judged: Sequence[tuple[str, Found | None]] = ()
    defined: Sequence[str] = ()
    prototypes: Sequence[tuple[str, str]] = ()


class Mined(NamedTuple):
    """The result of mining.

    Attributes:
        rows: the rows of each split and the codebase.
        functions, files: the number of functions and files per outcome.
        broken: the files that the grammar could not parse whole.
    """

    rows: dict[str, list[Row]]
    functions: Counter[str]
    files: Counter[str]
    broken: list[str]


def mine(
    source_dir: str | Path,
    language: str,
    num_workers: int | None = None,
    keep: Sequence[str] = (),
) -> Mined:
    """Mines the documented functions in a source tree.

    Tests, hidden folders and folders of third-party code (`SKIPPED_FOLDERS`) are skipped. Each documented function
    that passes `PAIR_RULES`, except the rules in `keep`, becomes a pair. The codebase, which is the corpus, has the
    functions of valid and test, and every other distinct function outside the training packages, documented or not.
    In C and C++, a function may be documented at its prototype in another file, if its name is unique in the tree.

    Args:
        source_dir: the root of the tree. Symbolic links are not followed.
        language: one of `SOURCE_LANGUAGES`.
        num_workers: the number of processes. By default, one per CPU core. It does not affect the result.
        keep: the names of rules to ignore.

    Raises:
        UserError: the language or a rule is unknown, the folder does not exist, it has no files in the language or no
            documented functions, or it has fewer than three packages.
    """
    for rule in keep:
        if rule not in PAIR_RULES:
            raise UserError(f"keep={[rule]}: no such rule; use {', '.join(PAIR_RULES)}")
    functions = Counter()
    files = Counter()
    broken = []
    pairs = []
    others = []
    defined = Counter()
    prototypes = defaultdict(set)
    read = partial(_mine_file, source_dir, language, frozenset(keep))
    paths, worktrees = _source_files(source_dir, language)
    if worktrees:
        files["linked worktree (a folder)"] = worktrees
    for path, file in zip(paths, _each_in_order(read, paths, num_workers), strict=True):
        files[file.outcome] += 1
        if file.outcome in (_UNPARSEABLE, _IN_PART):
            broken.append(path)
        defined.update(file.defined)
        for name, docstring in file.prototypes:
            prototypes[name].add(docstring)
        for reason, found in file.judged:
            if not reason:
                pairs.append(found)
                continue
            functions[reason] += 1
            if found:
                others.append(found)
    unique = {name: min(texts) for name, texts in prototypes.items() if len(texts) == defined[name] == 1}
    undocumented = []
    for found in others:
        docstring = "" if found.row["docstring"] else unique.get(found.row["func_name"], "")
        tokens = document_tokens(summary(docstring, SOURCE_LANGUAGES[language].style))
        row = found.row | {"docstring": docstring, "docstring_tokens": tokens}
        if tokens and not first_broken(row, DOCUMENT_RULES, keep):
            pairs.append(found._replace(row=row))
            functions["undocumented"] -= 1
        else:
            undocumented.append(found)
    pairs, copies = _distinct(pairs)
    functions.update(copies)
    if not pairs:
        raise UserError(f"{source_dir}: no documented functions{_explained(functions + files)}")
    functions["kept as pairs"] = len(pairs)
    return Mined(_split(pairs, undocumented, source_dir), functions, files, broken)


def _split(pairs: list[Found], others: list[Found], root: str | Path) -> dict[str, list[Row]]:
    """Returns the rows of each split and of the codebase, in the order of the tree.

    Raises:
        UserError: the tree has fewer than three packages.
    """
    paths = [pair.row["path"] for pair in pairs]
    package = package_names(Counter(paths))
    sizes = Counter(map(package, paths))
    if len(sizes) < len(PARTITIONS):
        raise UserError(
            f"{root}: only {len(sizes)} files or packages have documented functions ({', '.join(sorted(sizes))}). "
            "Train, valid and test need one each, so use a larger tree"
        )
    split_of = assign_splits(sizes)
    rows: dict[str, list[Row]] = {split: [] for split in PARTITIONS}
    for pair in pairs:
        repo = package(pair.row["path"])
        rows[split_of[repo]].append({"repo": repo, **pair.row, "partition": split_of[repo]})
    # The encoder must not have seen a function of the codebase in training.
    others = [other for other in others if split_of.get(package(other.row["path"])) != "train"]
    codebase = rows["valid"] + rows["test"]
    for other in _distinct([*pairs, *others])[0][len(pairs) :]:
        codebase.append({"repo": package(other.row["path"]), **other.row, "partition": "codebase"})
    return rows | {"codebase": [row | {"docstring": "", "docstring_tokens": []} for row in codebase]}


def mine_to(source_dir: str | Path, language: str, output_dir: str | Path, **options: Any) -> Mined:
    """Mines `source_dir` into `output_dir/{train,valid,test,codebase}.jsonl.gz`.

    Args:
        source_dir: the root of the tree.
        language: one of `SOURCE_LANGUAGES`.
        output_dir: the folder for the files. It is created if necessary.
        options: other arguments for `mine`.

    Raises:
        UserError: `mine` fails, or `output_dir` cannot be written to.
    """
    check_writable(output_dir, f"output_dir={output_dir}")
    mined = mine(source_dir, language, **options)
    write_rows(mined.rows, output_dir)
    return mined


def mining_table(mined: Mined) -> str:
    """Returns a Markdown table with the number of rows per split, and of functions and files per outcome.

    A line below it names files with syntax errors.
    """
    lines = [["rows", split, len(rows)] for split, rows in mined.rows.items()]
    for kind, counts in (("functions", mined.functions), ("files", mined.files)):
        lines += [[kind, *each] for each in counts.most_common()]
    text = table(["", "split or outcome", "count"], lines)
    if mined.broken:
        more = f" and {len(mined.broken) - _MAX_NAMED:,} more" if len(mined.broken) > _MAX_NAMED else ""
        text += f"\nFunctions may be missing, because of syntax errors: {', '.join(mined.broken[:_MAX_NAMED])}{more}"
    return text


def _explained(counts: Counter[str]) -> str:
    """Formats the four most common reasons as the end of an error message, such as "; tests: 12, images: 3"."""
    if counts:
        return "; " + ", ".join(f"{name}: {count:,}" for name, count in counts.most_common(4))
    return ""


def _each_in_order(
    read: Callable[[str], MinedFile], paths: Sequence[str], num_workers: int | None
) -> Iterator[MinedFile]:
    """Yields `read(path)` for each path, in order, using several processes. Shows a progress bar."""
    workers = min(num_workers or os.cpu_count() or 1, -(-len(paths) // _AT_ONCE))
    with progress_bar("Mining", len(paths), "file") as bar, ExitStack() as stack:
        results = map(read, paths)
        if workers > 1:
            # A forked process must not free inherited objects: an ONNX session would wait for its threads.
            results = stack.enter_context(multiprocessing.Pool(workers, gc.freeze)).imap(read, paths, _AT_ONCE)
        for result in results:
            bar.update(1)
            yield result


def tree_state(source_dir: str | Path, language: str) -> str:
    """Returns a fingerprint of the names and contents of a tree's source files.

    Raises:
        UserError: the folder does not exist, the language is unknown, or the tree has no files in the language.
    """
    contents = {}
    for path in _source_files(source_dir, language)[0]:
        file = Path(source_dir, path)
        if file.is_file():
            contents[path] = fingerprints.file_fingerprint(file)
    return fingerprints.fingerprint(contents)


def tree_language(source_dir: str | Path) -> str:
    """Returns the most common language among the files below a folder, without tests.

    Raises:
        UserError: the folder does not exist, or no file is in a supported language.
    """
    if not Path(source_dir).is_dir():
        raise UserError(f"{source_dir}: no such folder")
    counts = Counter()
    for path in _files(source_dir)[0]:
        language = LANGUAGE_OF_ENDING.get(Path(path).suffix)
        if language is None or is_test_path(path, language):
            continue
        if path.endswith(".h"):  # in C or C++
            source = read_text(source_dir, path)
            language = "c" if isinstance(source, str) else source_language(path, source)
        counts[language] += 1
    if not counts:
        known = ", ".join(SOURCE_LANGUAGES)
        raise UserError(f"{source_dir}: no source file in a supported language ({known}); set language")
    return max(SOURCE_LANGUAGES, key=counts.__getitem__)


def _files(root: str | Path) -> tuple[list[str], int]:
    """Returns the paths of the files below `root`, and the number of linked worktrees, which are skipped.

    Hidden folders and folders of third-party code are also skipped.
    """
    paths = []
    worktrees = 0
    for folder, subfolders, names in os.walk(root):
        kept = [name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        subfolders[:] = [name for name in kept if not is_linked_worktree(os.path.join(folder, name))]
        worktrees += len(kept) - len(subfolders)
        paths += [Path(folder, name).relative_to(root).as_posix() for name in names]
    return paths, worktrees


def _source_files(root: str | Path, language: str) -> tuple[list[str], int]:
    """Returns the sorted paths, relative to `root`, of the files in a language, and the number of skipped worktrees.

    Raises:
        UserError: the language is unknown, the folder does not exist, or it has no files in the language.
    """
    parser(language)  # raises UserError for an unknown language
    if not Path(root).is_dir():
        raise UserError(f"{root}: no such folder; pass the root of a source tree")
    extensions = SOURCE_LANGUAGES[language].extensions
    if language == "cpp":
        extensions += (".h",)  # `_mine_file` skips those in C
    paths, worktrees = _files(root)
    paths = sorted(path for path in paths if path.endswith(extensions))
    if not paths:
        raise UserError(f"{root}: no {language} files to mine ({' '.join(extensions)})")
    return paths, worktrees


def _mine_file(root: str | Path, language: str, keep: frozenset[str], path: str) -> MinedFile:
    """Mines the functions in one file."""
    if decoded(os.fsencode(path)) is None:
        return MinedFile("name that is not UTF-8")
    if is_test_path(path, language) and "tests" not in keep:
        return MinedFile("test")
    source = read_text(root, path, strict=True)
    if isinstance(source, str):
        return MinedFile(source)
    if source_language(path, source) != language:
        return MinedFile("other language")
    tree, whole = parse_file(source, language)
    if tree is None:
        return MinedFile(_UNPARSEABLE)
    judged = []
    file = FileFunctions(tree, source, language, path)
    for function in file.functions:
        row = file.row(function)
        reason = first_broken(row, CODE_RULES, keep)
        if not reason and function.broken:
            reason = _UNPARSEABLE
        found = None
        if not reason:
            found = Found(row, minhash(row["code_tokens"]))
            reason = "undocumented"
            if row["docstring_tokens"]:
                reason = first_broken(row, DOCUMENT_RULES, keep)
        judged.append((reason, found))
    defined = [function.name for function in file.functions]
    prototypes = [*file.prototypes()] if language in PREPROCESSED else []
    return MinedFile("mined" if whole else _IN_PART, judged, defined, prototypes)


def _distinct(found: list[Found]) -> tuple[list[Found], Counter[str]]:
    """Drops duplicates of earlier functions. Returns the other functions, and how many functions each rule dropped."""
    copies = exact_duplicates(hash_tokens(row["code_tokens"]) for row, _ in found)
    found = list(compress(found, ~copies))
    near = near_duplicates(range(len(found)), lambda index: found[index].signature)
    counts = Counter(duplicates=int(copies.sum()), near_duplicates=int(near.sum()))
    return list(compress(found, ~near)), +counts
