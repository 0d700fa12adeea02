"""Finds the functions that a commit changes, as they were before it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from soft_trainer.mining.commits import query_of, reason_against
from soft_trainer.mining.definitions import parse
from soft_trainer.mining.functions import FileFunctions, Function
from soft_trainer.mining.languages import SOURCE_LANGUAGES
from soft_trainer.mining.repository import REGULAR_FILES, decoded, read_object, shallow_ends, source_text
from soft_trainer.mining.rules import first_broken, is_test_path
from soft_trainer.mining.source_files import SKIPPED_FOLDERS

if TYPE_CHECKING:
    import pygit2

Row = dict[str, Any]
# A query may ask for a constructor or for a function of two lines, so they stay.
RULES = ("tests",)
MAX_CHANGED_FILES = 100  # a commit that changes more of the language's files is taken for a mechanical one
_KEPT_FILES = 64  # parsed files in memory: the next commit often changes the same ones


class ChangedFunction(NamedTuple):
    """A function that a commit changes: its path and its name in the file then, and its row; `added` if it is new."""

    path: str
    name: str
    row: Row
    added: bool


@dataclass
class Change:
    """A commit as mining sees it.

    Attributes:
        commit: its id, and `parent` that of its first parent, empty for a root.
        query: its message as a query.
        outcome: the reason why it is left out, or "kept".
        functions: those that it changes, without those that a rule of mining drops.
        renames: (old path, new path) of renamed source files, also of commits that are left out.
        patch: a hash of the lines that it removes and adds.
    """

    commit: str
    parent: str
    query: str
    outcome: str
    functions: list[ChangedFunction] = field(default_factory=list)
    renames: list[tuple[str, str]] = field(default_factory=list)
    patch: str = ""


class SourceFile:
    """The functions of one version of a file, each with a name that no other function of the file has."""

    def __init__(self, source: bytes, language: str):
        root = parse(source, language)
        self._file = None if root is None else FileFunctions(root, source, language)
        self.functions: dict[str, Function] = {}
        seen: Counter[str] = Counter()
        for function in self._file.functions if self._file else ():
            seen[function.name] += 1
            number = seen[function.name]
            self.functions[function.name if number == 1 else f"{function.name}~{number}"] = function

    def row(self, name: str, path: str) -> Row:
        """The row of a function. Its url holds the path and the name, and not the lines, which every commit moves."""
        return self._file.row(self.functions[name], path) | {"url": function_url(path, name)}

    def at(self, lines: Sequence[range]) -> set[str]:
        """The innermost functions that hold these lines."""
        owners: dict[int, str] = {}
        wanted = {line for part in lines for line in part}
        for name, function in self.functions.items():  # outer functions come before those inside them
            first, last = function.lines
            if last - first < len(wanted):
                owners.update((line, name) for line in range(first, last + 1) if line in wanted)
            else:
                owners.update((line, name) for line in wanted if first <= line <= last)
        return set(owners.values())


def function_url(path: str, name: str) -> str:
    """The id of a function: all its versions have the same."""
    return f"{path}#{name}"


class ChangeReader:
    """Reads commits of a repository, for one language.

    Args:
        max_functions: commits that change more functions are left out.
        body: the query holds the first paragraph of the body too.
    """

    def __init__(
        self,
        repository: pygit2.Repository,
        language: str,
        max_functions: int = 5,
        body: bool = False,
    ):
        self.repository, self.language = repository, language
        self.max_functions, self.body = max_functions, body
        self._ends = shallow_ends(repository)
        self._files: OrderedDict[Any, SourceFile] = OrderedDict()

    def read(self, commit_id: str) -> Change:
        """The change that a commit makes."""
        commit = read_object(self.repository, commit_id)
        parent = str(commit.parent_ids[0]) if commit.parent_ids else ""
        message = commit.raw_message.decode(errors="replace")
        people = (_name_and_address(person) for person in (commit.author, commit.committer))
        change = Change(commit_id, parent, query_of(message, self.body), reason_against(message, *people) or "kept")
        if len(commit.parent_ids) > 1:
            change.outcome = "merge"
        elif commit_id in self._ends:
            change.outcome = "end of a shallow clone"
        else:
            self._read_files(commit, change)
        return change

    def _read_files(self, commit: pygit2.Commit, change: Change) -> None:
        """Fills in renames, and the functions of a commit whose message is of use."""
        diff = self._diff(commit)
        deltas = [delta for delta in diff.deltas if self._is_source(delta)]
        kinds = {delta.status_char() for delta in deltas}
        if kinds >= {"A", "D"}:
            diff.find_similar()
            deltas = [delta for delta in diff.deltas if self._is_source(delta)]
        change.renames = [(d.old_file.path, d.new_file.path) for d in deltas if d.status_char() == "R"]
        if change.outcome == "kept":
            change.outcome = self._read_functions(deltas, change)

    def _diff(self, commit: pygit2.Commit) -> pygit2.Diff:
        """The files that differ from the first parent's."""
        if not commit.parent_ids:
            return commit.tree.diff_to_tree(swap=True)
        return read_object(self.repository, commit.parent_ids[0]).tree.diff_to_tree(commit.tree)

    def _is_source(self, delta: pygit2.DiffDelta) -> bool:
        """True for files of the language that mining reads, by both names of a renamed one."""
        sides = [file for file in (delta.old_file, delta.new_file) if file.mode]
        return all(
            file.mode in REGULAR_FILES
            and (path := decoded(file.raw_path)) is not None
            and is_mined_path(path, self.language)
            for file in sides
        )

    def _read_functions(self, deltas: Sequence[pygit2.DiffDelta], change: Change) -> str:
        """Fills in the functions that differ in more than comments and layout, and the patch's hash; the outcome."""
        if not deltas:
            return f"no {self.language} file changed"
        if len(deltas) > MAX_CHANGED_FILES:
            return f"over {MAX_CHANGED_FILES} files"
        functions: list[ChangedFunction] = []
        touched, digest = 0, xxhash.xxh3_128()
        for delta in deltas:
            for function, reason in self._changed(delta, digest.update):
                touched += 1
                if touched > self.max_functions:
                    return f"over {self.max_functions} functions"
                if not reason:
                    functions.append(function)
        if functions:
            change.functions, change.patch = functions, digest.hexdigest()
            return "kept"
        return "tests or syntax errors alone" if touched else "no function changed, or only its layout and comments"

    def _changed(
        self, delta: pygit2.DiffDelta, update: Callable[[bytes], None]
    ) -> Iterator[tuple[ChangedFunction, str]]:
        """Yields the changed functions of a file, each with the rule that drops it; `update` takes the lines."""
        before, after = (self._source_file(file) for file in (delta.old_file, delta.new_file))
        if not any(file and file.functions for file in (before, after)):
            return
        old_lines, new_lines = self._lines(delta, update)
        names = dict.fromkeys(sorted(before.at(old_lines)) if before else ())
        names |= dict.fromkeys(sorted(after.at(new_lines)) if after else ())
        for name in names:
            old = before.row(name, delta.old_file.path) if before and name in before.functions else None
            new = after.row(name, delta.new_file.path) if after and name in after.functions else None
            if old and new and old["code_tokens"] == new["code_tokens"]:
                continue
            row, file = (old, before) if old else (new, after)
            reason = "syntax error" if file.functions[name].node.has_error else first_broken(row, RULES)
            yield ChangedFunction(row["path"], name, row, old is None), reason

    def _lines(self, delta: pygit2.DiffDelta, update: Callable[[bytes], None]) -> tuple[list[range], list[range]]:
        """The lines that are removed from the old file and added in the new one."""
        old, new = (
            read_object(self.repository, file.id) if file.mode else None for file in (delta.old_file, delta.new_file)
        )
        # A diff with nothing can only be asked for from the side that exists.
        patch = old.diff(new, context_lines=0) if old and new else (old or new).diff(context_lines=0)
        removed, added = [], []
        for hunk in patch.hunks:
            removed.append(range(hunk.old_start, hunk.old_start + hunk.old_lines))
            added.append(range(hunk.new_start, hunk.new_start + hunk.new_lines))
            for line in hunk.lines:
                update((line.origin if old else "+").encode() + line.raw_content.strip())
        return (removed, added) if old else ([], removed)

    def _source_file(self, file: pygit2.DiffFile) -> SourceFile | None:
        """The functions of a file, None if there is no file or mining skips it."""
        if not file.mode:
            return None
        key = file.id
        if key not in self._files:
            self._files[key] = SourceFile(source_text(self.repository, file.id, file.path) or b"", self.language)
            if len(self._files) > _KEPT_FILES:
                self._files.popitem(last=False)
        self._files.move_to_end(key)
        return self._files[key]


def _name_and_address(person: pygit2.Signature) -> str:
    """A person's name and e-mail address, in any encoding."""
    return b" ".join(part[:200] for part in (person.raw_name, person.raw_email)).decode(errors="replace")


def is_mined_path(path: str, language: str) -> bool:
    """True for a source file of the language outside tests, hidden folders and folders of foreign code."""
    *folders, name = path.split("/")
    if not name.endswith(SOURCE_LANGUAGES[language].extensions) or is_test_path(path, language):
        return False
    return not any(folder in SKIPPED_FOLDERS or folder.startswith(".") for folder in folders)
