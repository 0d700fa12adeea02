"""The files that git leaves out, by git's rules, without git.

`pathspec` 1.1 lists 77 of the 200 random trees of our tests in another way than git, and takes ten seconds to match a
pattern of ten stars, `*a*a*a*a*a*a*a*a*a*ab`, with a name of forty letters.
"""

from __future__ import annotations

import os
import re
from functools import cached_property

from soft_trainer.errors import UserError
from soft_trainer.mining.source_files import read_regular
from soft_trainer.search.globs import expression, git_tokens
from soft_trainer.search.repositories import TrackedFiles, excludes_file, repository_dir, repository_of

IGNORE_FILE = ".gitignore"
MAX_BYTES = 1_000_000  # of an ignore file, which takes five seconds then


# The rules that hold in a folder, the innermost last, each with the folder of its file (empty, or with a slash at its
# end). The folders are relative to the repository's root.
Rules = tuple[tuple[str, "IgnoreRules"], ...]


class IgnoreRules:
    """The patterns of one ignore file."""

    def __init__(self, source: bytes):
        # Patterns match bytes, which are letters here.
        self.lines = source.removeprefix(b"\xef\xbb\xbf").decode("latin-1").split("\n")

    def verdict(self, path: str, folder: bool) -> bool | None:
        """Returns the decision of the last matching pattern: True to exclude, False to re-include, None without one.

        `path` is relative to the folder of the ignore file.
        """
        if folder:
            patterns = self._for_folders
        else:
            patterns = self._for_files
        if not path.isascii():
            path = os.fsencode(path).decode("latin-1")
        # Patterns without a slash look at the name alone, and no path has two slashes in a row.
        found = patterns.fullmatch(f"{path.rpartition('/')[2]}//{path}")
        if found is None:
            return None
        return found.lastindex is None

    @cached_property
    def _for_folders(self) -> re.Pattern[str]:
        return _alternatives([rule for _, rule in self._rules])

    @cached_property
    def _for_files(self) -> re.Pattern[str]:
        return _alternatives([rule for folders_only, rule in self._rules if not folders_only])

    @cached_property
    def _rules(self) -> list[tuple[bool, str]]:
        """Lists for each pattern whether it matches folders only, and its expression: in a group if it re-includes."""
        rules = []
        for line in self.lines:
            pattern = _without_blanks(line.removesuffix("\r").partition("\0")[0])
            if pattern.startswith("#"):
                continue
            negated = pattern.startswith("!")
            pattern = pattern[negated:]
            folders_only = pattern.endswith("/")
            pattern = pattern[: len(pattern) - folders_only]
            has_slash = "/" in pattern
            try:
                tokens = git_tokens(pattern.removeprefix("/"), has_slash)
            except LookupError:
                continue
            written = expression(tokens)
            if has_slash:
                written = f"[^/]*//{written}"
            else:
                written = f"{written}//(?s:.*)"
            if negated:
                written = f"({written})"
            rules.append((folders_only, written))
        return rules


def _alternatives(rules: list[str]) -> re.Pattern[str]:
    """Compiles rules so that the last one that matches is found first."""
    return re.compile("|".join(reversed(rules)) or "(?!)")


def _without_blanks(line: str) -> str:
    """Strips trailing blanks that are not escaped."""
    kept = re.match(r"(?s:(?: *(?:\\.|[^ \\]))*)", line)
    rest = line[kept.end() :]
    if "\\" in rest:
        return line
    return kept[0]


def ignored(rules: Rules, path: str, folder: bool) -> bool:
    """Returns True if the innermost ignore file that matches the path excludes it; no parent may be excluded."""
    for prefix, own in reversed(rules):
        verdict = own.verdict(path[len(prefix) :], folder)
        if verdict is not None:
            return verdict
    return False


def rules_of(folder: str, prefix: str) -> Rules | None:
    """Reads the rules that a folder's ignore file adds to the inherited ones; None if it cannot be read."""
    rules = []
    if os.path.lexists(os.path.join(folder, ".git")):
        exclude = os.path.join(repository_dir(folder), "info", "exclude")
        own = _read(os.path.realpath(exclude))
        if own is not None:
            rules.append((prefix, own))
    path = os.path.join(folder, IGNORE_FILE)
    if os.path.isfile(path) and not os.path.islink(path):  # git does not follow a link here
        own = _read(path)
        if own is None:
            return None
        rules.append((prefix, own))
    return tuple(rules)


def rules_around(root: str) -> tuple[str, Rules, TrackedFiles | None]:
    """Returns a folder's place in its repository, with a slash at its end, the rules from above, and what is tracked.

    A folder outside a repository has no rules, and neither has one that its repository leaves out: who names it wants
    it.

    Raises:
        UserError: an ignore file above the folder, or the user's own, cannot be read.
    """
    found = repository_of(root)
    if found is None:
        return "", (), None
    top, inside = found
    excludes = os.path.realpath(excludes_file(top))
    rules: Rules = ()
    if os.path.exists(excludes):
        own = _read(excludes)
        if own is None:
            raise UserError(f"{excludes}: git's core.excludesFile cannot be read; mend it or its name")
        rules = (("", own),)
    place = ""
    for name in inside.split("/")[:-1]:
        own_rules = rules_of(os.path.join(top, place), place)
        if own_rules is None:
            raise UserError(f"{os.path.join(top, place, IGNORE_FILE)}: cannot be read; mend it or remove it")
        rules += own_rules
        place += name
        if ignored(rules, place, True):
            return "", (), None
        place += "/"
    return place, rules, TrackedFiles(top, "")


def _read(path: str) -> IgnoreRules | None:
    """Reads an ignore file; None if it is missing, no regular file, or too large."""
    source = read_regular(path, MAX_BYTES)
    if isinstance(source, str):
        return None
    return IgnoreRules(source)
