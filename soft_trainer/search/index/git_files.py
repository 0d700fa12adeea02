"""Reads a git repository's location, tracked files and settings without git or pygit2."""

from __future__ import annotations

import os
import re
import struct
from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from soft_trainer.source.source_files import read_regular

_MAX_INCLUDES = 10  # the depth of nested includes
_MAX_CONFIG_BYTES = 1_000_000
_MAX_INDEX_BYTES = 500_000_000
_SECTION = re.compile(r'\[\s*([\w.-]+)\s*(?:"((?:[^"\\]|\\.)*)")?\s*\]')
_SETTING = re.compile(r"([A-Za-z][\w-]*)\s*=\s*(.*)")
_VALUE = re.compile(r'(?:"(?:[^"\\]|\\.)*"|\\.|[^"\\#;])*')  # up to a comment


def repository_of(folder: str) -> tuple[str, str] | None:
    """Returns the repository that contains a folder, and the folder's path in it, which is empty or ends with `/`.

    Returns None if the folder is not in a repository.
    """
    for parent in (Path(folder), *Path(folder).parents):
        if os.path.lexists(parent / ".git"):
            if parent == Path(folder):
                return str(parent), ""
            return str(parent), f"{os.path.relpath(folder, parent)}/"
    return None


def head_time(repository: str) -> int:
    """Returns the time in ns when HEAD last moved, or 0 if it is unknown."""
    folder = Path(working_tree_dir(repository))
    try:
        moved = folder / "logs" / "HEAD"
        return (moved if moved.exists() else folder / "HEAD").stat().st_mtime_ns
    except OSError:
        return 0


def working_tree_dir(top: str) -> str:
    """Returns the git directory of the working tree `top`. In a submodule or linked working tree, `.git` is a file."""
    place = os.path.join(top, ".git")
    pointer = read_regular(place, _MAX_CONFIG_BYTES)
    if isinstance(pointer, str) or not pointer.startswith(b"gitdir:"):
        return place
    return os.path.join(top, os.fsdecode(pointer[len(b"gitdir:") :].strip()))


def repository_dir(top: str) -> str:
    """Returns the git directory that all working trees of a repository share."""
    place = working_tree_dir(top)
    shared = read_regular(os.path.join(place, "commondir"), _MAX_CONFIG_BYTES)
    if isinstance(shared, str):
        return place
    return os.path.join(place, os.fsdecode(shared.strip()))


def excludes_file(top: str) -> str:
    """Returns the path from the setting `core.excludesFile`, or git's default path."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    everywhere = [os.path.join(home, "git", "config"), os.path.expanduser("~/.gitconfig")]
    if os.environ.get("GIT_CONFIG_GLOBAL"):
        everywhere = [os.environ["GIT_CONFIG_GLOBAL"]]
    chosen = os.path.join(home, "git", "ignore")
    for file in ("/etc/gitconfig", *everywhere, os.path.join(repository_dir(top), "config")):
        for name, value in _settings(file):
            if name == "core.excludesfile":
                chosen = value
    return os.path.join(top, os.path.expanduser(chosen))


def _settings(path: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yields the settings from a configuration file and from the files that it includes unconditionally."""
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


class TrackedFiles:
    """The files that a repository tracks, which no rule can exclude.

    Args:
        top: the repository's working tree.
        prefix: what comes before the repository in every path. Empty, or ends with a slash.
    """

    def __init__(self, top: str, prefix: str):
        self.top = top
        self.prefix = prefix

    def holds(self, path: str) -> bool:
        """Returns True if a file is tracked."""
        return self._next(path) == path

    def holds_below(self, path: str) -> bool:
        """Returns True if any file below a folder is tracked."""
        return self._next(f"{path}/").startswith(f"{path}/")

    def _next(self, path: str) -> str:
        """Returns the first tracked path at or after `path` in alphabetical order, or "" if there is none."""
        place = bisect_left(self._paths, path)
        return "".join(self._paths[place : place + 1])

    @cached_property
    def _paths(self) -> list[str]:
        source = read_regular(os.path.join(working_tree_dir(self.top), "index"), _MAX_INDEX_BYTES)
        if isinstance(source, str):
            return []
        try:
            return sorted(self.prefix + path for path in _tracked(source))
        except (struct.error, ValueError, IndexError):
            return []  # it is damaged, or has a newer format


def _tracked(index: bytes) -> Iterator[str]:
    """Yields the paths in a repository's index file, whichever of its three formats it has."""
    _, version, count = struct.unpack_from(">4sII", index)
    place = 12
    name = b""
    for _ in range(count):
        (flags,) = struct.unpack_from(">H", index, place + 60)
        start = place + 62
        if flags & 0x4000:  # more flags
            start += 2
        kept = 0
        if version == 4:  # a name starts with the previous name, without some of its last letters
            dropped = index[start] & 127
            while index[start] & 128:
                start += 1
                dropped = ((dropped + 1) << 7) + (index[start] & 127)
            start += 1
            kept = len(name) - dropped
        end = index.index(b"\0", start)
        name = name[:kept] + index[start:end]
        if version == 4:
            place = end + 1
        else:
            place += ((end - place) // 8 + 1) * 8
        yield os.fsdecode(name)
