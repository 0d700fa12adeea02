"""Mines pairs from a repository's commits. A pair is a commit's subject and a function before the commit changed it.

Rows are split by time, so that no later change leaks into an earlier split. The corpus is therefore the tree before
the oldest test commit, and all training commits are ancestors of the oldest valid commit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import cache, partial
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

from soft_trainer import fingerprints
from soft_trainer.errors import UserError
from soft_trainer.files import check_writable, write_rows
from soft_trainer.mining.changes import CHANGE_RULES, INCOMPLETE, Change, ChangeReader, function_url, read_functions
from soft_trainer.mining.duplicates import exact_duplicates, hash_tokens
from soft_trainer.mining.rules import CODE_RULES, DOCUMENT_RULES, first_broken, may_mine
from soft_trainer.mining.tree import each_in_order, explained, main_language
from soft_trainer.source import git
from soft_trainer.source.documentation import document_tokens
from soft_trainer.source.functions import Function, Row
from soft_trainer.source.grammars import parser
from soft_trainer.terminal import print_on_main

# Of the commits that give pairs, the newest are test commits, and the commits before them are valid commits.
TEST_SHARE = 0.15
VALID_SHARE = 0.1
_CANDIDATES = 40  # how many commits are tried as the oldest one of a split
_AT_ONCE = 16  # how many commits a worker takes at once; neighbours change the same files


class MinedHistory(NamedTuple):
    """Rows mined from a repository's history, with judgments and counts.

    Attributes:
        rows: the rows of train, valid, test and codebase. Train begins with the newest commit.
        relevance: a row with query, url and relevance for each pair of a test query and a relevant function.
        cut: the id of the commit whose tree is the corpus.
        spans: the path, first line and last line of each function in the corpus, keyed by url.
        commits: the number of commits per outcome.
    """

    rows: dict[str, list[Row]]
    relevance: list[Row]
    cut: str
    spans: dict[str, tuple[str, int, int]]
    commits: Counter[str]


def mine_history(
    repository: str | Path,
    language: str,
    source_dir: str | Path | None = None,
    num_workers: int | None = None,
) -> MinedHistory:
    """Mines rows from the commits on a repository's current branch.

    Args:
        repository: a git repository, with or without a working tree.
        language: one of `SOURCE_LANGUAGES`.
        source_dir: a folder in the repository's working tree. Its documented functions also become training rows, as
            they were before the oldest valid commit.
        num_workers: the number of processes. By default, one per CPU core. It does not affect the result.

    Raises:
        UserError: the language is unknown, the repository or an object in it cannot be read, `source_dir` is outside
            the repository, or there are too few commits for three splits.
    """
    parser(language)  # raises UserError for an unknown language
    opened = git.open_repository(repository)
    folder = None
    if source_dir is not None:
        own = Path(source_dir).resolve()
        root = Path(opened.workdir or opened.path).resolve()
        if own in (root, Path(opened.path).resolve()):
            folder = ""
        elif own.is_relative_to(root):
            folder = f"{own.relative_to(root).as_posix()}/"
        else:
            raise UserError(f"source_dir={source_dir}: not a folder in the repository {root}")
    with git.reporting_missing_objects(repository):
        order = git.commits_oldest_first(opened)
        if git.shallow_ends(repository):
            print_on_main(
                f"{repository}: a shallow clone with {len(order):,} commits; `git fetch --unshallow` fetches the rest"
            )
        _reader.cache_clear()
        read = partial(_read_change, repository, language)
        changes = list(each_in_order(read, order, num_workers, "commit", _AT_ONCE))
        incomplete = sum(change.outcome == INCOMPLETE for change in changes)
        if incomplete:
            lacking = f"skipped {incomplete:,} of {len(order):,} commits, because objects are missing"
            print_on_main(f"{repository}: {lacking}; {git.REFETCH}")
        history = _History(opened, language, changes)
        corpus, spans = history.corpus()
        rows, counts = history.pairs(spans.keys())
        if folder is not None:
            rows["train"] += history.documented(folder)
        if history.missing_files:
            lacking = f"skipped {len(history.missing_files):,} source files that are missing from the trees"
            print_on_main(f"{repository}: {lacking}; {git.REFETCH}")
    missing = [split for split in rows if not rows[split]]
    if missing:
        raise UserError(f"{repository}: the history is too short, so there are no rows for {', '.join(missing)}")
    relevance = [{"query": row["docstring"], "url": row["url"], "relevance": 1.0} for row in rows["test"]]
    rows["codebase"] = corpus
    name = _name_of(repository)
    for split, part in rows.items():
        rows[split] = [{"repo": name, **row} for row in part]
    return MinedHistory(rows, relevance, history.cut, spans, counts)


def mine_history_to(repository: str | Path, language: str, output_dir: str | Path, **options: Any) -> MinedHistory:
    """Mines a repository's history and writes `{train,valid,test,codebase,relevance}.jsonl.gz` to `output_dir`.

    Args:
        repository: a git repository, with or without a working tree.
        language: one of `SOURCE_LANGUAGES`.
        output_dir: the folder for the files. It is created if necessary.
        options: other arguments for `mine_history`.

    Raises:
        UserError: `mine_history` fails, or `output_dir` cannot be written to.
    """
    check_writable(output_dir, f"output_dir={output_dir}")
    mined = mine_history(repository, language, **options)
    write_rows(mined.rows | {"relevance": mined.relevance}, output_dir)
    return mined


def history_state(repository: str | Path) -> str:
    """Returns a fingerprint of all readable commits and of the repository's name, which is part of every row.

    Raises:
        UserError: the repository cannot be opened.
    """
    opened = git.open_repository(repository)
    commits = git.commits_oldest_first(opened)
    return fingerprints.fingerprint(_name_of(repository), commits, git.missing_objects_state(opened))


def _name_of(repository: str | Path) -> str:
    return Path(repository).resolve().name.removesuffix(".git")


def history_language(repository: str | Path) -> str:
    """Returns the most common language of the source files in the newest tree.

    Raises:
        UserError: the repository cannot be read, or it has no source file in a supported language.
    """
    opened = git.open_repository(repository)
    with git.reporting_missing_objects(repository):
        files = dict(git.tree_files(opened, opened.head.target))

    def header(path: str) -> bytes | str:
        try:
            return git.blob(opened, files[path])
        except (git.pygit2.GitError, OSError):
            return INCOMPLETE

    return main_language(files, repository, header)


_reader = cache(ChangeReader)  # one in each process


def _read_change(repository: str | Path, language: str, commit_id: str) -> Change:
    return _reader(repository, (language,)).read_if_complete(commit_id)


class _History:
    """The changes made by a repository's commits, split by time.

    Args:
        repository: the repository.
        language: the language of the functions.
        changes: the changes made by all commits, oldest first.

    Attributes:
        test_start: the index of the oldest test commit.
        valid_start: the index of the oldest valid commit.
        cut: the id of the commit before the oldest test commit. Its tree is the corpus.
        missing_files: the paths of the source files that could not be read, as in a partial clone.

    Raises:
        UserError: there are too few commits for three splits.
    """

    def __init__(self, repository: git.pygit2.Repository, language: str, changes: Sequence[Change]):
        self.repository = repository
        self.language = language
        self.changes = changes
        self.missing_files: set[str] = set()
        kept = [index for index, change in enumerate(changes) if change.functions and change.parent]
        tested = max(1, math.floor(len(kept) * TEST_SHARE))
        validated = max(1, math.floor(len(kept) * VALID_SHARE))
        self.test_start = self._start(kept, tested, tested + validated)
        self.cut = changes[self.test_start].parent
        self._before_test = self._ancestors(self.test_start)
        older = [index for index in kept if changes[index].commit in self._before_test]
        self.valid_start = self._start(older, validated, 0)
        self._before_valid = self._ancestors(self.valid_start)
        self._renamed = self._move_to_cut()

    def _ancestors(self, index: int) -> set[str]:
        """Returns the ids of a commit's first parent and the parent's ancestors."""
        return set(git.commits_oldest_first(self.repository, self.changes[index].parent))

    def _start(self, kept: list[int], size: int, taken: int) -> int:
        """Returns the index of the commit that starts a split of about the `size` newest commits.

        Args:
            kept: the indices of the commits to choose from.
            size: the number of commits from the chosen one to the newest.
            taken: the number of commits that other splits need.

        Raises:
            UserError: there are at most `taken` commits.
        """
        if len(kept) <= taken:
            reasons = explained(Counter(change.outcome for change in self.changes if not change.functions))
            raise UserError(
                f"only {len(kept)} of {len(self.changes):,} commits change {self.language} functions and explain "
                f"the change, too few for train, valid and test{reasons}"
            )
        wanted = kept[-size:][0]

        def distance(index: int) -> tuple[int, int]:
            """Returns how many earlier commits are not a commit's ancestors, and its distance from `wanted`."""
            known = self._ancestors(index)
            unknown = sum(self.changes[other].commit not in known for other in kept if other < index)
            return unknown, abs(index - wanted)

        # Commits on other branches are not ancestors of a commit on an old branch.
        near = kept[-math.ceil(1.25 * size) : len(kept) - math.ceil(0.8 * size) + 1] or [wanted]
        return min(near[:: max(1, len(near) // _CANDIDATES)], key=distance)

    def _move_to_cut(self) -> dict[str, str]:
        """Changes the url of every changed function to the function's url in the corpus, which is the tree at the cut.

        Returns:
            The path at the cut of each file that was renamed since the oldest valid commit, keyed by the old path.
        """
        renamed = {}
        now = {}  # the path of a file -> its path at the cut
        for index in reversed(range(self.test_start)):
            change = self.changes[index]
            if change.commit in self._before_test:
                now |= {old: now.get(new, new) for old, new in change.renames}
            _set_urls(change, now)
            if index == self.valid_start:
                renamed = dict(now)
        now = {}
        for change in self.changes[self.test_start :]:
            _set_urls(change, now)
            now |= {new: now.get(old, old) for old, new in change.renames}
        return renamed

    def pairs(self, corpus: Collection[str]) -> tuple[dict[str, list[Row]], Counter[str]]:
        """Returns the distinct rows of every split, newest first, and the number of commits per outcome.

        Args:
            corpus: the urls of the corpus. Functions that did not exist at the cut are not relevant to any query.
        """
        spans = {  # the indices of each split's commits, and the commits that were not merged after the next cut
            "train": (range(self.valid_start), self._before_valid),
            "valid": (range(self.valid_start, self.test_start), self._before_test),
            "test": (range(self.test_start, len(self.changes)), {change.commit for change in self.changes}),
        }
        counts = Counter()
        rows = {}
        for split, (span, ancestors) in spans.items():
            earlier = set()
            for change in self.changes[: span.start]:
                earlier.update((change.query.casefold(), change.patch))
            earlier.discard("")
            pairs = {}
            for change in self.changes[span.start : span.stop][::-1]:
                answers = [row for row in change.functions if split == "train" or row["url"] in corpus]
                if not change.functions:
                    outcome = change.outcome
                elif change.commit not in ancestors:
                    outcome = "on a branch merged after a cut"
                elif not earlier.isdisjoint((change.query.casefold(), change.patch)):
                    outcome = f"{split}: subject or patch occurs before"
                elif not answers:
                    outcome = f"{split}: no function that existed at the cut"
                else:
                    outcome = split
                counts[outcome] += 1
                if outcome != split:
                    continue
                own = {"docstring": change.query, "docstring_tokens": document_tokens(change.query)}
                for row in answers:
                    pair = change.query, row["url"]
                    # The newest version stays, at the position of the oldest.
                    pairs[pair] = pairs.pop(pair, row | own | {"partition": split, "source": "history"})
            rows[split] = list(pairs.values())
        return rows, counts

    def corpus(self) -> tuple[list[Row], dict[str, tuple[str, int, int]]]:
        """Returns the rows of the corpus, without documentation, and `MinedHistory.spans`."""
        rows = []
        spans = {}
        for row, function in self._tree(self.cut, CHANGE_RULES, {}):
            rows.append(row | {"docstring": "", "docstring_tokens": [], "partition": "codebase"})
            spans[row["url"]] = (row["path"], *function.lines)
        return rows, spans

    def documented(self, folder: str) -> list[Row]:
        """Returns training rows for a folder's documented functions, as they were before the oldest valid commit."""
        rows = []
        cut = self.changes[self.valid_start].parent
        for row, _ in self._tree(cut, (*CODE_RULES, *DOCUMENT_RULES), self._renamed):
            if row["path"].startswith(folder):
                rows.append(row | {"partition": "train", "source": "documentation"})
        copies = exact_duplicates(hash_tokens(row["code_tokens"]) for row in rows)
        return list(compress(rows, ~copies))

    def _tree(self, commit: str, rules: Sequence[str], renamed: dict[str, str]) -> Iterator[tuple[Row, Function]]:
        """Yields (row, function) for each function in a commit's tree that parses and that no rule drops.

        Args:
            commit: the commit's id.
            rules: the names of the rules.
            renamed: the later path of each renamed file, to use in urls, keyed by the path in the tree.
        """
        for path, oid in git.tree_files(self.repository, commit):
            if not may_mine(path, [self.language]):
                continue
            try:
                file = read_functions(self.repository, oid, path)
            except (git.pygit2.GitError, OSError):
                self.missing_files.add(path)
                continue
            if file.language != self.language:
                continue
            for name, function in file.functions.items():
                row = file.row(function) | {"url": function_url(renamed.get(path, path), name)}
                if not function.broken and not first_broken(row, rules):
                    yield row, function


def _set_urls(change: Change, paths: dict[str, str]) -> None:
    """Sets the urls of a commit's functions. `paths` maps each renamed file's old path to its path at the cut."""
    for row in change.functions:
        path = row["path"]
        row["url"] = paths.get(path, path) + row["url"].removeprefix(path)
