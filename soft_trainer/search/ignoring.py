"""The files that git leaves out, by git's rules, without git.

Nothing is started, since a repository's configuration can name programs.
"""

from __future__ import annotations

import os
import re
import struct
from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property

from soft_trainer.errors import UserError
from soft_trainer.mining.source_files import read_regular
from soft_trainer.search.globs import expression, git_tokens

IGNORE_FILE = ".gitignore"
MAX_BYTES = 1_000_000  # of an ignore file, which takes five seconds then
_MAX_INCLUDES = 10  # one in another
_MAX_CONFIG_BYTES = 1_000_000
_MAX_INDEX_BYTES = 500_000_000
_SECTION = re.compile(r'\[\s*([\w.-]+)\s*(?:"((?:[^"\\]|\\.)*)")?\s*\]')
_SETTING = re.compile(r"([A-Za-z][\w-]*)\s*=\s*(.*)")
_VALUE = re.compile(r'(?:"(?:[^"\\]|\\.)*"|\\.|[^"\\#;])*')  # up to a comment


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
        patterns = self._for_folders if folder else self._for_files
        if patterns is None:
            return None
        if not path.isascii():
            path = os.fsencode(path).decode("latin-1")
        # Patterns without a slash look at the name alone, and no path has two slashes in a row.
        found = patterns.fullmatch(f"{path.rpartition('/')[2]}//{path}")
        return None if found is None else found.lastindex is None

    @cached_property
    def _for_folders(self) -> re.Pattern[str] | None:
        return _alternatives([rule for _, rule in self._rules])

    @cached_property
    def _for_files(self) -> re.Pattern[str] | None:
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
            written = f"[^/]*//{written}" if has_slash else f"{written}//(?s:.*)"
            rules.append((folders_only, f"({written})" if negated else written))
        return rules


def _alternatives(rules: list[str]) -> re.Pattern[str] | None:
    """Compiles rules so that the last one that matches is found first; None if there are none."""
    return re.compile("|".join(reversed(rules))) if rules else None


def _without_blanks(line: str) -> str:
    """Strips trailing blanks that are not escaped."""
    kept = re.match(r"(?s:(?: *(?:\\.|[^ \\]))*)", line)
    rest = line[kept.end() :]
    return line if "\\" in rest else kept[0]


class TrackedFiles:
    """The tracked files of a repository, which no rule can exclude.

    Args:
        top: the repository's working tree.
        prefix: its folder among the paths that are asked for, with a slash at its end, or empty.
    """

    def __init__(self, top: str, prefix: str):
        self.top = top
        self.prefix = prefix

    def holds(self, path: str) -> bool:
        """Returns True for a tracked file."""
        return self._next(path) == path

    def holds_below(self, path: str) -> bool:
        """Returns True if a file in this folder is tracked."""
        return self._next(f"{path}/").startswith(f"{path}/")

    def _next(self, path: str) -> str:
        place = bisect_left(self._paths, path)
        return self._paths[place] if place < len(self._paths) else ""

    @cached_property
    def _paths(self) -> list[str]:
        source = read_regular(os.path.join(_working_tree_dir(self.top), "index"), _MAX_INDEX_BYTES)
        try:
            return [] if isinstance(source, str) else sorted(self.prefix + path for path in _tracked(source))
        except (struct.error, ValueError, IndexError):
            return []  # damaged, or of a format to come


def _tracked(index: bytes) -> Iterator[str]:
    """Yields the paths in a repository's index, in any of its three formats."""
    _, version, count = struct.unpack_from(">4sII", index)
    place = 12
    name = b""
    for _ in range(count):
        (flags,) = struct.unpack_from(">H", index, place + 60)
        start = place + (64 if flags & 0x4000 else 62)
        kept = 0
        if version == 4:  # a name begins as the one before, without its last letters
            dropped = index[start] & 127
            while index[start] & 128:
                start += 1
                dropped = ((dropped + 1) << 7) + (index[start] & 127)
            start += 1
            kept = len(name) - dropped
        end = index.index(b"\0", start)
        name = name[:kept] + index[start:end]
        place = end + 1 if version == 4 else place + ((end - place) // 8 + 1) * 8
        yield os.fsdecode(name)


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
        exclude = os.path.join(_repository_dir(folder), "info", "exclude")
        rules.append((prefix, _read(os.path.realpath(exclude)) or IgnoreRules(b"")))
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
    top = root
    while not os.path.lexists(os.path.join(top, ".git")):
        if top == os.path.dirname(top):
            return "", (), None
        top = os.path.dirname(top)
    excludes = os.path.realpath(_global_excludes(top))
    rules: Rules = ()
    if os.path.exists(excludes):
        own = _read(excludes)
        if own is None:
            raise UserError(f"{excludes}: git's core.excludesFile cannot be read; mend it or its name")
        rules = (("", own),)
    place = ""
    for name in os.path.relpath(root, top).split(os.sep) if root != top else ():
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
    return None if isinstance(source, str) else IgnoreRules(source)


def _working_tree_dir(top: str) -> str:
    """Returns the git folder of a working tree."""
    place = os.path.join(top, ".git")
    pointer = read_regular(place, _MAX_CONFIG_BYTES)  # a file in submodules and further working trees
    if isinstance(pointer, str) or not pointer.startswith(b"gitdir:"):
        return place
    return os.path.join(top, os.fsdecode(pointer[len(b"gitdir:") :].strip()))


def _repository_dir(top: str) -> str:
    """Returns the git folder that all working trees of a repository share."""
    place = _working_tree_dir(top)
    shared = read_regular(os.path.join(place, "commondir"), _MAX_CONFIG_BYTES)
    return place if isinstance(shared, str) else os.path.join(place, os.fsdecode(shared.strip()))


def _global_excludes(top: str) -> str:
    """Returns the path that `core.excludesFile` names, or git's default for it."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    everywhere = [os.path.join(home, "git", "config"), os.path.expanduser("~/.gitconfig")]
    if os.environ.get("GIT_CONFIG_GLOBAL"):
        everywhere = [os.environ["GIT_CONFIG_GLOBAL"]]
    chosen = os.path.join(home, "git", "ignore")
    for file in ("/etc/gitconfig", *everywhere, os.path.join(_repository_dir(top), "config")):
        for name, value in _settings(file):
            if name == "core.excludesfile":
                chosen = value
    return os.path.join(top, os.path.expanduser(chosen))


def _settings(path: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yields the settings of a configuration file, and of the files that it includes without a condition."""
    source = read_regular(os.path.realpath(path), _MAX_CONFIG_BYTES)
    if isinstance(source, str) or depth > _MAX_INCLUDES:
        return
    section = ""
    for line in re.sub(r"\\\r?\n", "", os.fsdecode(source)).split("\n"):
        line = line.strip()
        header = _SECTION.match(line)
        if header:
            section = ".".join(part for part in (header[1].lower(), header[2]) if part)
            line = line[header.end() :].strip()
        setting = _SETTING.fullmatch(line)
        if not setting:
            continue
        name = f"{section}.{setting[1].lower()}"
        value = re.sub(r'\\(.)|"', lambda found: found[1] or "", _VALUE.match(setting[2])[0].strip())
        if name == "include.path":
            included = os.path.join(os.path.dirname(path), os.path.expanduser(value))
            yield from _settings(included, depth + 1)
        else:
            yield name, value
