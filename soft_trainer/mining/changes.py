"""Finds the functions that a commit changes, as they were before the commit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path

import xxhash

from soft_trainer.mining.commits import query_of, reason_against
from soft_trainer.mining.rules import first_broken, may_mine, mined_language
from soft_trainer.source.definitions import parse
from soft_trainer.source.functions import FileFunctions, Row
from soft_trainer.source.git import (
    REGULAR_FILES,
    blob,
    message_of,
    open_repository,
    pygit2,
    read_object,
    shallow_ends,
)
from soft_trainer.source.languages import SOURCE_LANGUAGES, source_language
from soft_trainer.source.source_files import decoded, readable

# A query may ask for a constructor or a two-line function, so the other rules do not apply.
CHANGE_RULES = ("tests",)
INCOMPLETE = "an object is missing"
SHALLOW_END = "end of a shallow clone"
MAX_FUNCTIONS = 5  # a commit that changes more is skipped
MAX_CHANGED_FILES = 100  # a commit that changes more source files is treated as mechanical

_KEPT_FILES = 64  # parsed files in memory: the next commit often changes the same ones


@dataclass
class Change:
    """A commit as mining reads it: the subject as a query, and the functions that the commit changes.

    Attributes:
        commit: the commit's id.
        parent: the id of the first parent, or "" for a root commit.
        query: the commit's subject, turned into a query.
        outcome: the reason for skipping the commit, or "kept".
        functions: a row for each changed function that no mining rule drops. `function_url` makes the row's url.
        renames: (old path, new path) for each renamed source file, even if the commit is skipped.
        patch: a hash of the removed and added lines.
    """

    commit: str
    parent: str
    query: str
    outcome: str = ""
    functions: list[Row] = field(default_factory=list)
    renames: list[tuple[str, str]] = field(default_factory=list)
    patch: str = ""


class ChangeReader:
    """Reads a repository's commits and the functions that each commit changes.

    Args:
        path: the repository.
        languages: the languages of the functions. By default, all of `SOURCE_LANGUAGES`.
        seconds: the time limit for parsing a file. A file that takes longer counts as having no functions.
        names_only: True if rows need no code and no documentation, which saves a third of the time.

    Raises:
        UserError: the repository cannot be opened.
    """

    def __init__(
        self,
        path: str | Path,
        languages: Collection[str] = tuple(SOURCE_LANGUAGES),
        seconds: float = 60.0,
        names_only: bool = False,
    ):
        self.repository = open_repository(path)
        self._languages = languages
        self._seconds = seconds
        self._names_only = names_only
        # The parents of these commits are missing in a shallow clone. libgit2 shows the commits as roots.
        self._ends = set(shallow_ends(path).split())
        self._functions = lru_cache(_KEPT_FILES)(partial(read_functions, self.repository))

    def read(self, commit_id: str) -> Change:
        """Reads the change that a commit makes."""
        commit = read_object(self.repository, commit_id)
        parents = [*map(str, commit.parent_ids), ""]
        message = message_of(commit)
        change = Change(commit_id, parents[0], query_of(message))
        if len(commit.parent_ids) > 1:
            change.outcome = "merge"
        elif commit_id in self._ends:
            change.outcome = SHALLOW_END
        else:
            deltas = self._deltas(commit)
            change.renames = [(d.old_file.path, d.new_file.path) for d in deltas if d.status_char() == "R"]
            change.outcome = reason_against(message, _person(commit.author), _person(commit.committer))
            if not change.outcome:
                change.outcome = self._read_functions(deltas, change)
        return change

    def read_if_complete(self, commit_id: str) -> Change:
        """Reads a commit's change. Returns an empty change if an object is missing, as in a partial clone."""
        try:
            return self.read(commit_id)
        except (pygit2.GitError, OSError):
            return Change(commit_id, "", "", INCOMPLETE)

    def _deltas(self, commit: pygit2.Commit) -> list[pygit2.DiffDelta]:
        """Returns the source files that differ between a commit and its first parent."""
        if commit.parent_ids:
            diff = read_object(self.repository, commit.parent_ids[0]).tree.diff_to_tree(commit.tree)
        else:
            diff = commit.tree.diff_to_tree(swap=True)
        deltas = list(filter(self._is_source, diff.deltas))
        if {delta.status_char() for delta in deltas} >= {"A", "D"}:
            diff.find_similar()
            deltas = list(filter(self._is_source, diff.deltas))
        return deltas

    def _is_source(self, delta: pygit2.DiffDelta) -> bool:
        """Returns True if mining reads a changed file. Mining must be able to read a renamed file under both names."""
        files = [file for file in (delta.old_file, delta.new_file) if file.mode]
        return all(
            file.mode in REGULAR_FILES and may_mine(decoded(file.raw_path) or "", self._languages) for file in files
        )

    def _read_functions(self, deltas: Sequence[pygit2.DiffDelta], change: Change) -> str:
        """Returns a commit's outcome. If the commit is kept, fills in the changed functions and the patch's hash.

        Changes to comments and layout are ignored.
        """
        if not deltas:
            return "no source file changed"
        if len(deltas) > MAX_CHANGED_FILES:
            return f"over {MAX_CHANGED_FILES} files"
        digest = xxhash.xxh3_128()
        changed = chain.from_iterable(self._changed(delta, digest) for delta in deltas)
        changed = list(islice(changed, MAX_FUNCTIONS + 1))
        if len(changed) > MAX_FUNCTIONS:
            return f"over {MAX_FUNCTIONS} functions"
        if not changed:
            return "no function changed, or only its layout and comments"
        change.functions = [row for row, reason in changed if not reason]
        if not change.functions:
            return "only tests or syntax errors"
        change.patch = digest.hexdigest()
        return "kept"

    def _changed(self, delta: pygit2.DiffDelta, digest: xxhash.xxh3_128) -> Iterator[tuple[Row, str]]:
        """Yields the row of each changed function and the rule that drops the row, or "". Adds changes to `digest`."""
        old = self._side(delta.old_file)
        new = self._side(delta.new_file)
        if not old.functions and not new.functions:
            return
        removed = set()
        added = set()
        for hunk in pygit2.Patch.create_from(old.source, new.source, context_lines=0).hunks:
            for line in hunk.lines:
                removed.add(line.old_lineno)  # -1 for a line that is added
                added.add(line.new_lineno)
                digest.update(line.origin.encode() + line.raw_content.strip())
        pairs = [(name, old.counterpart(name, new)) for name in sorted(old.at(removed))]
        pairs += [(new.counterpart(name, old), name) for name in sorted(new.at(added))]
        for before, after in dict.fromkeys(pairs):
            if before and after and old.has_same_code(old.functions[before], new, new.functions[after]):
                continue
            if before:
                name = before
                file = old
            else:
                name = after
                file = new
            function = file.functions[name]
            row = {"path": file.path, "func_name": function.name, "language": file.language}
            if not self._names_only:
                row = file.row(function)
            row["url"] = function_url(file.path, name)
            yield row, "syntax error" if function.broken else first_broken(row, CHANGE_RULES)

    def _side(self, file: pygit2.DiffFile) -> FileFunctions:
        """Returns the functions in one version of a changed file, or no functions if that version does not exist."""
        if file.mode:
            functions = self._functions(file.id, file.path, self._seconds)
            if functions.language in self._languages:
                return functions
        return FileFunctions(None, b"", mined_language(file.path), file.path)


def _person(person: pygit2.Signature) -> str:
    """Returns a person as `Name <email>`, with both parts cut to 200 bytes."""
    return (person.raw_name[:200] + b" <" + person.raw_email[:200] + b">").decode(errors="replace")


def read_functions(repository: pygit2.Repository, oid: pygit2.Oid, path: str, seconds: float = 60.0) -> FileFunctions:
    """Returns the functions in one version of a file.

    The result is empty if mining skips the file or if the file cannot be parsed.
    """
    source = readable(blob(repository, oid), path, strict=True)
    if isinstance(source, str):  # the reason to skip it
        return FileFunctions(None, b"", mined_language(path), path)
    language = source_language(path, source)
    return FileFunctions(parse(source, language, seconds), source, language, path)


def function_url(path: str, name: str) -> str:
    """Returns a function's id. The id has no line numbers, so it is the same in every version of the function."""
    return f"{path}#{name}"
