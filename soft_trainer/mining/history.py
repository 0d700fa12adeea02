"""Mines pairs from a repository's commits: the message, and a changed function as it was before.

Rows are split by time. The corpus is the tree before the oldest test commit, and training knows only commits that the
tree before the oldest valid commit descends from, so that nothing from after a cut reaches what is before it.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import compress
from pathlib import Path
from typing import Any

from soft_trainer import identity
from soft_trainer.dataflow import parser
from soft_trainer.errors import UserError
from soft_trainer.files import check_writable, write_rows
from soft_trainer.mining import repository as git
from soft_trainer.mining.changes import MAX_FUNCTIONS, RULES, Change, ChangeReader, function_url, read_functions
from soft_trainer.mining.documentation import document_tokens
from soft_trainer.mining.duplicates import exact_duplicates, hash_tokens
from soft_trainer.mining.functions import Function
from soft_trainer.mining.rules import CODE_RULES, DOCUMENT_RULES, Row, first_broken, is_mined_path
from soft_trainer.mining.tree import each_in_order, explained, main_language
from soft_trainer.terminal import print_on_main

# of the commits that give pairs, the newest ones
TEST_SHARE = 0.15
VALID_SHARE = 0.1
_CANDIDATES = 40  # commits that are tried as the oldest of a split
_AT_ONCE = 16  # commits for a worker; neighbours share files


@dataclass
class MinedHistory:
    """The result of mining a history.

    Attributes:
        rows: the rows of train, valid, test and codebase, in train newest first.
        relevance: (query, url, relevance) of the test queries, several urls for one query.
        cut: id of the commit whose tree is the corpus.
        places: path, first and last line of each function of the corpus, by url.
        commits: counts by outcome.
    """

    rows: dict[str, list[Row]]
    relevance: list[Row]
    cut: str
    places: dict[str, tuple[str, int, int]]
    commits: Counter[str]


def mine_history(
    repository: str | os.PathLike[str],
    language: str,
    max_functions: int = MAX_FUNCTIONS,
    source_dir: str | os.PathLike[str] | None = None,
    num_workers: int | None = None,
) -> MinedHistory:
    """Mines the history of a repository's current branch.

    Args:
        repository: a git repository, with or without a working tree.
        language: one of `SOURCE_LANGUAGES`.
        max_functions: commits that change more functions are left out.
        source_dir: a folder of the repository's working tree, whose documented functions are training rows too. They
            are read from the tree at the cut, not from the disk.
        num_workers: processes; None means one a CPU core. The result is the same for any number.

    Raises:
        UserError: an unknown language, no repository that can be read, a missing object, a source_dir outside it, or
            too few commits for three splits.
    """
    parser(language)  # refuses an unknown language
    opened = git.open_repository(repository)
    folder = None
    if source_dir is not None:
        folder = _folder_inside(opened, source_dir)
    with git.reporting_missing_objects(repository):
        order = git.commits_oldest_first(opened)
        if opened.is_shallow:
            print_on_main(
                f"{repository}: a shallow clone with {len(order):,} commits; `git fetch --unshallow` brings the rest"
            )
        _reader.cache_clear()
        read = partial(_read_change, (repository, language, max_functions))
        splitter = _Splitter(opened, language, list(each_in_order(read, order, num_workers, "commit", _AT_ONCE)))
        corpus, places = splitter.corpus()
        rows, counts = splitter.pairs({row["url"] for row in corpus})
        if folder is not None:
            rows["train"] += splitter.documented(folder)
    missing = [split for split in rows if not rows[split]]
    if missing:
        raise UserError(f"{repository}: the history is too short; no row is left for {', '.join(missing)}")
    relevance = [{"query": row["docstring"], "url": row["url"], "relevance": 1.0} for row in rows["test"]]
    rows["codebase"] = corpus
    name = _name_of(repository)
    for split, part in rows.items():
        rows[split] = [{"repo": name, **row} for row in part]
    return MinedHistory(rows, relevance, splitter.cut, places, counts)


def mine_history_to(
    repository: str | os.PathLike[str], language: str, output_dir: str | os.PathLike[str], **options: Any
) -> dict[str, Any]:
    """Mines a history into `output_dir`: four files of rows and `relevance.jsonl.gz`. Takes `mine_history`'s options.

    Returns:
        Numbers of `rows` by split and of `commits` by outcome, `cut` and `seconds`; see `mining_table`.

    Raises:
        UserError: as `mine_history`, or an output_dir that cannot be written.
    """
    check_writable(output_dir, f"output_dir={output_dir}")
    started = time.perf_counter()
    mined = mine_history(repository, language, **options)
    write_rows(mined.rows | {"relevance": mined.relevance}, output_dir)
    return {
        "rows": {split: len(rows) for split, rows in mined.rows.items()},
        "commits": dict(mined.commits.most_common()),
        "cut": mined.cut,
        "seconds": time.perf_counter() - started,
    }


def history_state(repository: str | os.PathLike[str]) -> str:
    """Returns a fingerprint of all commit ids and of the repository's name, which the rows hold.

    Raises:
        UserError: no repository that can be read.
    """
    return identity.fingerprint(_name_of(repository), git.commits_oldest_first(git.open_repository(repository)))


def _name_of(repository: str | os.PathLike[str]) -> str:
    return Path(repository).resolve().name.removesuffix(".git")


def history_language(repository: str | os.PathLike[str]) -> str:
    """Returns the language of most source files in the newest tree; UserError if there is none."""
    opened = git.open_repository(repository)
    with git.reporting_missing_objects(repository):
        return main_language((path for path, _ in git.tree_files(opened, opened.head.target)), repository)


def _folder_inside(opened: git.pygit2.Repository, source_dir: str | os.PathLike[str]) -> str:
    """Returns the path of `source_dir` in the repository, with `/` at the end; empty for the whole repository."""
    own = Path(source_dir).resolve()
    root = Path(opened.workdir or opened.path).resolve()
    if own in (root, Path(opened.path).resolve()):
        return ""
    if not own.is_relative_to(root):
        raise UserError(
            f"source_dir={source_dir}: is no folder of the repository {root}, whose tree at the cut is read"
        )
    return f"{own.relative_to(root).as_posix()}/"


_reader = cache(ChangeReader)  # one in each process


def _read_change(options: tuple, commit_id: str) -> Change:
    with git.reporting_missing_objects(options[0]):
        return _reader(*options).read(commit_id)


class _Splitter:
    """Splits the changes of all commits, oldest first, and makes their rows."""

    def __init__(self, repository: git.pygit2.Repository, language: str, changes: Sequence[Change]):
        self.repository = repository
        self.language = language
        self.changes = changes
        kept = [place for place, change in enumerate(changes) if change.functions and change.parent]
        tested = max(1, math.floor(len(kept) * TEST_SHARE))
        validated = max(1, math.floor(len(kept) * VALID_SHARE))
        self.test_start, self.before_test = self._cut(kept, tested, tested + validated)
        older = [place for place in kept if changes[place].commit in self.before_test]
        self.valid_start, self.before_valid = self._cut(older, validated, 0)
        self.cut = changes[self.test_start].parent
        self.train_cut = changes[self.valid_start].parent
        self.urls, self.renamed = self._urls_at_cut()

    def _cut(self, kept: list[int], size: int, taken: int) -> tuple[int, set[str]]:
        """Returns the place of the oldest of about `size` newest commits, and the ids of all its ancestors."""
        if len(kept) <= taken:
            reasons = explained(Counter(change.outcome for change in self.changes if not change.functions))
            raise UserError(
                f"only {len(kept)} of {len(self.changes):,} commits change {self.language} functions and say how; "
                f"train, valid and test need some each{reasons}"
            )
        # Of the commits near that place, the one is taken whose parent knows most of the commits before it: the parent
        # of a commit on an old branch does not know what happened on other branches.
        near = kept[-math.ceil(1.25 * size) : len(kept) - math.ceil(0.8 * size) + 1] or kept[-size:]
        best = (math.inf, math.inf)
        for place in near[:: max(1, len(near) // _CANDIDATES)]:
            known = {str(commit.id) for commit in self.repository.walk(self.changes[place].parent)}
            unknown = sum(self.changes[other].commit not in known for other in kept if other < place)
            judged = (unknown, abs(place - kept[-size:][0]))
            if judged < best:
                best = judged
                chosen = (place, known)
        return chosen

    def _urls_at_cut(self) -> tuple[list[list[str]], dict[str, str]]:
        """Returns the urls of each commit's functions at the cut, and new paths of files renamed between the cuts."""
        urls: list[list[str]] = [[]] * len(self.changes)
        renamed: dict[str, str] = {}
        now: dict[str, str] = {}  # path -> its path at the cut
        for place in reversed(range(self.test_start)):
            change = self.changes[place]
            if change.commit in self.before_test:
                now |= {old: now.get(new, new) for old, new in change.renames}
            urls[place] = _urls(change, now)
            if place == self.valid_start:
                renamed = dict(now)
        now = {}
        for place, change in enumerate(self.changes[self.test_start :], self.test_start):
            urls[place] = _urls(change, now)
            now |= {new: now.get(old, old) for old, new in change.renames}
        return urls, renamed

    def split(self, place: int) -> str:
        """Returns the split of a commit; empty for one that neither precedes a cut nor follows it."""
        if place >= self.test_start:
            return "test"
        if place >= self.valid_start:
            split = "valid"
            known = self.before_test
        else:
            split = "train"
            known = self.before_valid
        if self.changes[place].commit in known:
            return split
        return ""

    def pairs(self, known: set[str]) -> tuple[dict[str, list[Row]], Counter[str]]:
        """Returns the distinct rows of every split, newest first, and the number of commits by outcome.

        Args:
            known: urls of the corpus. Other functions did not exist at the cut and answer no query.
        """
        rows: dict[str, dict[tuple[str, str], Row]] = {"train": {}, "valid": {}, "test": {}}
        seen = {"valid": self._texts(self.valid_start), "test": self._texts(self.test_start)}
        counts: Counter[str] = Counter()
        for place in reversed(range(len(self.changes))):
            split = self.split(place)
            outcome, pairs = self._pairs_of(place, split, seen, known)
            counts[outcome] += 1
            query = self.changes[place].query
            own = {"docstring": query, "docstring_tokens": document_tokens(query)}
            for url, (_, row) in pairs:
                part = rows[split]
                row = row | own | {"url": url, "partition": split, "source": "history"}
                part[query, url] = part.pop((query, url), row)  # the newest version, in the place of the oldest
        return {split: list(part.values()) for split, part in rows.items()}, counts

    def _texts(self, end: int) -> set[str]:
        """Returns the queries in lower case and the hashes of patches of all commits before a place."""
        texts = set()
        for change in self.changes[:end]:
            texts.update((change.query.casefold(), change.patch))
        return texts - {""}

    def _pairs_of(self, place: int, split: str, seen: dict[str, set[str]], known: set[str]) -> tuple[str, list]:
        """Returns a commit's outcome, and the url, name and row of each function that answers its query."""
        change = self.changes[place]
        if not change.functions:
            return change.outcome, []
        if not split:
            return "on a branch merged after a cut", []
        pairs = list(zip(self.urls[place], change.functions, strict=True))
        if split == "train":
            return split, pairs
        if not seen[split].isdisjoint((change.query.casefold(), change.patch)):
            return f"{split}: subject or patch occurs before", []
        pairs = [pair for pair in pairs if pair[0] in known]
        if not pairs:
            return f"{split}: no function that existed at the cut", []
        return split, pairs

    def tree(self, commit: str, renamed: dict[str, str], folder: str = "") -> Iterator[tuple[Row, Function]]:
        """Yields the rows and functions of a commit's tree below a folder, without syntax errors."""
        for path, oid in git.tree_files(self.repository, commit):
            if not path.startswith(folder) or not is_mined_path(path, self.language):
                continue
            file = read_functions(self.repository, self.language, oid, path)
            for name, function in file.functions.items():
                if not function.node.has_error:
                    yield file.row(function) | {"url": function_url(renamed.get(path, path), name)}, function

    def corpus(self) -> tuple[list[Row], dict[str, tuple[str, int, int]]]:
        """Returns the functions of the tree at the cut, without documentation, and their places."""
        rows = []
        places = {}
        for row, function in self.tree(self.cut, {}):
            if not first_broken(row, RULES):
                rows.append(row | {"docstring": "", "docstring_tokens": [], "partition": "codebase"})
                places[row["url"]] = (row["path"], *function.lines)
        return rows, places

    def documented(self, folder: str) -> list[Row]:
        """Returns training rows from the documentation below a folder, as it was at the cut of training."""
        rows = []
        for row, _ in self.tree(self.train_cut, self.renamed, folder):
            if row["docstring_tokens"] and not first_broken(row, (*CODE_RULES, *DOCUMENT_RULES)):
                rows.append(row | {"partition": "train", "source": "documentation"})
        copies = exact_duplicates(hash_tokens(row["code_tokens"]) for row in rows)
        return list(compress(rows, ~copies))


def _urls(change: Change, paths: dict[str, str]) -> list[str]:
    """Returns the urls of a commit's functions, with paths as they are at the cut."""
    return [function_url(paths.get(row["path"], row["path"]), name) for name, row in change.functions]
