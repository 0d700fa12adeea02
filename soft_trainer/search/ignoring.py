"""The files that git leaves out, by git's rules, without git.

Nothing is started, since a repository's configuration can name programs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cached_property

from soft_trainer.errors import UserError
from soft_trainer.mining.source_files import read_regular
from soft_trainer.search.globs import expression, git_tokens

IGNORE_FILE = ".gitignore"
MAX_BYTES = 2_000_000  # of an ignore file, which takes ten seconds then
_MAX_INCLUDES = 10  # one in another
_MAX_CONFIG_BYTES = 1_000_000
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
        """Returns what the last pattern that matches says: True to leave out, False to take back; None without one.

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
        """Lists whether a pattern means folders only, and its expression: in a group if it takes a path back."""
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
            tokens = git_tokens(pattern.removeprefix("/"), has_slash)
            if not tokens:
                continue
            written = expression(tokens)
            written = f"[^/]*//{written}" if has_slash else f"{written}//(?s:.*)"
            rules.append((folders_only, f"({written})" if negated else written))
        return rules


def _alternatives(rules: list[str]) -> re.Pattern[str] | None:
    """Compiles rules so that the last one that matches is found first; None if there are none."""
    return re.compile("|".join(reversed(rules))) if rules else None


def _without_blanks(line: str) -> str:
    """Removes the blanks at the end that no backslash protects."""
    kept = re.match(r"(?s:(?: *(?:\\.|[^ \\]))*)", line)
    rest = line[kept.end() :]
    return line if "\\" in rest else kept[0]


def ignored(rules: Rules, path: str, folder: bool) -> bool:
    """Returns True if the innermost file that mentions the path leaves it out; no folder around it may be left out."""
    for prefix, own in reversed(rules):
        verdict = own.verdict(path[len(prefix) :], folder)
        if verdict is not None:
            return verdict
    return False


def rules_of(folder: str, prefix: str) -> Rules | None:
    """Reads the rules that a folder adds to those around it; None if its ignore file cannot be read."""
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


def rules_around(root: str) -> tuple[str, Rules]:
    """Returns the place of a folder in its repository, with a slash at its end, and the rules from above it.

    A folder outside a repository has none, and neither has one that its repository leaves out: who names it wants it.

    Raises:
        UserError: the user's own ignore file cannot be read.
    """
    top = root
    while not os.path.lexists(os.path.join(top, ".git")):
        if top == os.path.dirname(top):
            return "", ()
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
        rules += rules_of(os.path.join(top, place), place) or ()
        place += name
        if ignored(rules, place, True):
            return "", ()
        place += "/"
    return place, rules


def _read(path: str) -> IgnoreRules | None:
    """Reads an ignore file; None if it is missing, no regular file, or too large."""
    source = read_regular(path, MAX_BYTES)
    return None if isinstance(source, str) else IgnoreRules(source)


def _repository_dir(top: str) -> str:
    """Returns the folder with the data that all working trees of a repository share."""
    place = os.path.join(top, ".git")
    pointer = read_regular(place, _MAX_CONFIG_BYTES)  # a file in submodules and further working trees
    if not isinstance(pointer, str) and pointer.startswith(b"gitdir:"):
        place = os.path.join(top, os.fsdecode(pointer[len(b"gitdir:") :].strip()))
        shared = read_regular(os.path.join(place, "commondir"), _MAX_CONFIG_BYTES)
        if not isinstance(shared, str):
            place = os.path.join(place, os.fsdecode(shared.strip()))
    return place


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
