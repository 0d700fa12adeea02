"""Finds the functions that a commit changes, as they were before."""

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

_KEPT_FILES = 64  # parsed files in memory: the next commit often changes the same ones


@dataclass
class Change:
    """A commit as mining sees it.

    Attributes:
        commit: its id; `parent` is its first parent's id, empty for a root.
        query: its message as a query.
        outcome: the reason why it is left out, or "kept".
        functions: name in the file and row of each changed function that no rule of mining drops.
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
        seconds: the time limit for parsing a file; a file that takes longer has no functions.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        language: str | None,
        max_functions: int = MAX_FUNCTIONS,
        seconds: float = 60.0,
    ):
        self.path = path
        self.repository = open_repository(path)
        self.language = language
        self.max_functions = max_functions
        # commits whose parents a shallow clone leaves out; libgit2 shows these as roots
        self._ends = set()
        if self.repository.is_shallow:
            self._ends.update(Path(self.repository.path, "shallow").read_text().split())
        self._languages = [language] if language else SOURCE_LANGUAGES
        self._seconds = seconds
        self._functions = lru_cache(_KEPT_FILES)(self._read_file)

    def read(self, commit_id: str) -> Change:
        """Returns the change that a commit makes."""
        commit = read_object(self.repository, commit_id)
        parent = ""
        if commit.parent_ids:
            parent = str(commit.parent_ids[0])
        message = commit.raw_message.decode(errors="replace")
        reason = reason_against(message, _person(commit.author), _person(commit.committer))
        change = Change(commit_id, parent, query_of(message), reason or "kept")
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
        """Returns the mined files that differ from the first parent's."""
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
        for file in (delta.old_file, delta.new_file):
            missing = not file.mode
            if not missing and (file.mode not in REGULAR_FILES or not self._language_of(decoded(file.raw_path) or "")):
                return False
        return True

    def _language_of(self, path: str) -> str | None:
        """Returns the language of a file that mining reads, None for another."""
        for language in self._languages:
            if is_mined_path(path, language):
                return language
        return None

    def _read_file(self, oid: pygit2.Oid, path: str) -> FileFunctions:
        """Returns the functions of a version of a file."""
        return read_functions(self.repository, self._language_of(path), oid, path, self._seconds)

    def _read_functions(self, deltas: Sequence[pygit2.DiffDelta], change: Change) -> str:
        """Fills in the changed functions and the hash of the patch, and returns the outcome.

        Changes of comments and layout do not count.
        """
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
        old = self._side(delta.old_file)
        new = self._side(delta.new_file)
        if not old.functions and not new.functions:
            return
        removed, added = self._lines(delta, update)
        pairs = [(name, old.counterpart(name, new)) for name in sorted(old.at(removed))]
        pairs += [(new.counterpart(name, old), name) for name in sorted(new.at(added))]
        for before, after in dict.fromkeys(pairs):
            if before and after and old.tokens(old.functions[before]) == new.tokens(new.functions[after]):
                continue
            if before:
                name = before
                file = old
            else:
                name = after
                file = new
            function = file.functions[name]
            row = file.row(function)
            yield name, row, "syntax error" if function.node.has_error else first_broken(row, RULES)

    def _side(self, file: pygit2.DiffFile) -> FileFunctions:
        """Returns the functions of one side of a diff, none where the file does not exist."""
        if file.mode:
            return self._functions(file.id, file.path)
        return FileFunctions(None, b"", self._language_of(file.path), file.path)

    def _lines(self, delta: pygit2.DiffDelta, update: Callable[[bytes], None]) -> tuple[list[range], list[range]]:
        """Returns the lines that are removed from the old file and added in the new one."""
        old = new = None
        if delta.old_file.mode:
            old = read_object(self.repository, delta.old_file.id)
        if delta.new_file.mode:
            new = read_object(self.repository, delta.new_file.id)
        removed = []
        added = []
        for hunk in pygit2.Patch.create_from(old, new, context_lines=0).hunks:
            removed.append(range(hunk.old_start, hunk.old_start + hunk.old_lines))
            added.append(range(hunk.new_start, hunk.new_start + hunk.new_lines))
            for line in hunk.lines:
                update(line.origin.encode() + line.raw_content.strip())
        return removed, added


def _person(person: pygit2.Signature) -> str:
    """Returns the name and the address of a person, each cut to 200 bytes."""
    return (person.raw_name[:200] + b" " + person.raw_email[:200]).decode(errors="replace")


def read_functions(
    repository: pygit2.Repository, language: str, oid: pygit2.Oid, path: str, seconds: float = 60.0
) -> FileFunctions:
    """Returns the functions of a version of a file, none if mining skips it or it cannot be parsed."""
    source = readable(blob(repository, oid), path, strict=True)
    if isinstance(source, str):  # the reason to skip it
        return FileFunctions(None, b"", language, path)
    return FileFunctions(parse(source, language, seconds), source, language, path)


def function_url(path: str, name: str) -> str:
    """Returns the id of a function, the same for all its versions. It holds no lines, which every commit moves."""
    return f"{path}#{name}"
