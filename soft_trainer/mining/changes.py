"""Finds the functions that a commit changes, as they were before it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import xxhash

from soft_trainer.mining.commits import query_of, reason_against
from soft_trainer.mining.definitions import parse
from soft_trainer.mining.functions import FileFunctions
from soft_trainer.mining.languages import SOURCE_LANGUAGES
from soft_trainer.mining.repository import REGULAR_FILES, blob, open_repository, pygit2, read_object
from soft_trainer.mining.rules import Row, first_broken, is_mined_path
from soft_trainer.mining.source_files import decoded, readable

# A query may ask for a constructor or for a function of two lines, so they stay.
RULES = ("tests",)
MAX_FUNCTIONS = 5  # a commit that changes more is left out
MAX_CHANGED_FILES = 100  # a commit that changes more of the language's files is taken for a mechanical one
Names = tuple[str | None, str | None]
_KEPT_FILES = 64  # parsed files in memory: the next commit often changes the same ones


@dataclass
class Change:
    """A commit as mining sees it.

    Attributes:
        commit: its id, and `parent` that of its first parent, empty for a root.
        query: its message as a query.
        outcome: the reason why it is left out, or "kept".
        functions: the name in its file and the row of each that it changes, without those that a rule of mining drops.
        renames: (old path, new path) of renamed source files, also of commits that are left out.
        patch: a hash of the lines that it removes and adds.
    """

    commit: str
    parent: str
    query: str
    outcome: str
    functions: list[tuple[str, Row]] = field(default_factory=list)
    renames: list[tuple[str, str]] = field(default_factory=list)
    patch: str = ""


class ChangeReader:
    """Reads commits of a repository.

    Args:
        language: of the functions; None means every language that mining reads.
        max_functions: commits that change more functions are left out.
        body: the query holds the first paragraph of the body too.
        seconds: a file that keeps its grammar busy for longer has no functions.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        language: str | None,
        max_functions: int = MAX_FUNCTIONS,
        body: bool = False,
        seconds: float = 60.0,
    ):
        self.path = path
        self.repository = open_repository(path)
        self.language = language
        self.max_functions = max_functions
        self.body = body
        shallow = Path(self.repository.path, "shallow")
        # commits whose parents a shallow clone leaves out; libgit2 shows these as roots
        if self.repository.is_shallow:
            self._ends = frozenset(shallow.read_text().split())
        else:
            self._ends = frozenset()
        if language is None:
            self._languages = tuple(SOURCE_LANGUAGES)
        else:
            self._languages = (language,)
        self._seconds = seconds
        self._functions = lru_cache(_KEPT_FILES)(self._read_file)

    def read(self, commit_id: str) -> Change:
        """Returns the change that a commit makes."""
        commit = read_object(self.repository, commit_id)
        if commit.parent_ids:
            parent = str(commit.parent_ids[0])
        else:
            parent = ""
        message = commit.raw_message.decode(errors="replace")
        people = [
            b" ".join(part[:200] for part in (person.raw_name, person.raw_email)).decode(errors="replace")
            for person in (commit.author, commit.committer)
        ]
        change = Change(commit_id, parent, query_of(message, self.body), reason_against(message, *people) or "kept")
        if len(commit.parent_ids) > 1:
            change.outcome = "merge"
        elif commit_id in self._ends:
            change.outcome = "end of a shallow clone"
        else:
            deltas = self._deltas(commit)
            change.renames = [(d.old_file.path, d.new_file.path) for d in deltas if d.status_char() == "R"]
            if change.outcome == "kept":
                change.outcome = self._read_functions(deltas, change)
        return change

    def _deltas(self, commit: pygit2.Commit) -> list[pygit2.DiffDelta]:
        """Returns the files that mining reads and that differ from the first parent's."""
        if commit.parent_ids:
            diff = read_object(self.repository, commit.parent_ids[0]).tree.diff_to_tree(commit.tree)
        else:
            diff = commit.tree.diff_to_tree(swap=True)
        deltas = [delta for delta in diff.deltas if self._is_source(delta)]
        if {delta.status_char() for delta in deltas} >= {"A", "D"}:
            diff.find_similar()
            deltas = [delta for delta in diff.deltas if self._is_source(delta)]
        return deltas

    def _is_source(self, delta: pygit2.DiffDelta) -> bool:
        """Returns True for a file of the language that mining reads; a renamed one must pass under both names."""
        return all(
            file.mode in REGULAR_FILES and self._language_of(decoded(file.raw_path) or "")
            for file in (delta.old_file, delta.new_file)
            if file.mode
        )

    def _language_of(self, path: str) -> str | None:
        """Returns the language of a file that mining reads, None for another."""
        return next((language for language in self._languages if is_mined_path(path, language)), None)

    def _read_file(self, oid: pygit2.Oid, path: str) -> FileFunctions | None:
        """Returns the functions of a version of a file; None if mining skips it or it cannot be parsed."""
        return read_functions(self.repository, self._language_of(path), oid, path, self._seconds)

    def _read_functions(self, deltas: Sequence[pygit2.DiffDelta], change: Change) -> str:
        """Fills in the functions that differ in more than comments and layout, and the patch's hash; the outcome."""
        if not deltas:
            return f"no {self.language or 'source'} file changed"
        if len(deltas) > MAX_CHANGED_FILES:
            return f"over {MAX_CHANGED_FILES} files"
        functions = []
        touched = 0
        digest = xxhash.xxh3_128()
        for delta in deltas:
            for name, row, reason in self._changed(delta, digest.update):
                touched += 1
                if touched > self.max_functions:
                    return f"over {self.max_functions} functions"
                if not reason:
                    functions.append((name, row))
        if functions:
            change.functions = functions
            change.patch = digest.hexdigest()
            return "kept"
        if touched:
            return "tests or syntax errors alone"
        return "no function changed, or only its layout and comments"

    def _changed(self, delta: pygit2.DiffDelta, update: Callable[[bytes], None]) -> Iterator[tuple[str, Row, str]]:
        """Yields name and row of each changed function, and the rule that drops it; `update` takes the lines."""
        sides = delta.old_file, delta.new_file
        versions = [self._functions(side.id, side.path) if side.mode else None for side in sides]
        if not any(file and file.functions for file in versions):
            return
        touched = [
            sorted(file.at(lines)) if file else ()
            for file, lines in zip(versions, self._lines(sides, update), strict=True)
        ]
        for names in _pairs(versions, touched):
            found = [
                (name, file.row(file.functions[name], side.path), file.functions[name].node)
                for name, file, side in zip(names, versions, sides, strict=True)
                if name
            ]
            if len(found) == 2 and found[0][1]["code_tokens"] == found[1][1]["code_tokens"]:
                continue
            name, row, node = found[0]  # as it was before the commit, or as it was added
            yield name, row, "syntax error" if node.has_error else first_broken(row, RULES)

    def _lines(self, sides: Sequence[pygit2.DiffFile], update: Callable[[bytes], None]) -> tuple[list[range], ...]:
        """Returns the lines that are removed from the old file and added in the new one."""
        old, new = (read_object(self.repository, side.id) if side.mode else None for side in sides)
        # A diff with nothing can only be asked for from the side that exists.
        if old and new:
            patch = old.diff(new, context_lines=0)
        else:
            patch = (old or new).diff(context_lines=0)
        removed = []
        added = []
        for hunk in patch.hunks:
            removed.append(range(hunk.old_start, hunk.old_start + hunk.old_lines))
            added.append(range(hunk.new_start, hunk.new_start + hunk.new_lines))
            for line in hunk.lines:
                update((line.origin if old else "+").encode() + line.raw_content.strip())
        if old:
            return (removed, added)
        return ([], removed)


def _pairs(versions: Sequence[FileFunctions | None], touched: Sequence[Sequence[str]]) -> list[Names]:
    """Returns each touched function's name in the old and the new version of a file; None where it does not exist."""
    old, new = versions
    pairs = [(name, old.counterpart(name, new) if new else None) for name in touched[0]]
    pairs += [(new.counterpart(name, old) if old else None, name) for name in touched[1]]
    return list(dict.fromkeys(pairs))


def read_functions(
    repository: pygit2.Repository, language: str, oid: pygit2.Oid, path: str, seconds: float = 60.0
) -> FileFunctions | None:
    """Returns the functions of a version of a file, None if mining skips it or it cannot be parsed."""
    source = readable(blob(repository, oid), path, strict=True)
    if isinstance(source, bytes):
        root = parse(source, language, seconds)
    else:
        root = None
    if root is None:
        return None
    return FileFunctions(root, source, language)


def function_url(path: str, name: str) -> str:
    """Returns the id of a function. All its versions have the same, so it holds no lines, which every commit moves."""
    return f"{path}#{name}"
