"""The files of a tree that are worth an index, chosen by their names and by the tree's ignore files.

Nothing of the tree is run: no `git`, whose configuration can name programs. Links are not followed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property

from soft_trainer.mining.source_files import MAX_DEPTH, SKIPPED_FOLDERS, read_regular

IGNORE_FILE = ".gitignore"
_SECRETS = """.env .env.* *.pem *.key *.crt *.cer *.der *.p12 *.pfx *.jks *.keystore *.kdbx *.ppk *.gpg *.asc id_rsa*
    id_dsa* id_ecdsa* id_ed25519* .netrc .npmrc .pypirc .pgpass .htpasswd .git-credentials credentials
    *.tfstate *.tfvars"""
_SECRET, _HARMLESS = (
    re.compile("|".join(map(translate, names.split())))
    for names in (_SECRETS, ".env.example .env.sample .env.template .env.dist *.pub")
)
_LOCK_FILES = frozenset(
    """package-lock.json npm-shrinkwrap.json yarn.lock pnpm-lock.yaml cargo.lock poetry.lock pipfile.lock uv.lock
    composer.lock gemfile.lock go.sum bun.lock flake.lock""".split()
)

Stat = tuple[int, int]  # size in bytes, time of the last change in ns


@dataclass
class Listing:
    """Files of a tree: those to read, and those left out by their name or kind, with the reason.

    `ignores` has the ignore files that were followed, `[size, time]` of each, whether or not they are among `files`.
    """

    files: dict[str, Stat] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    ignores: dict[str, list[int]] = field(default_factory=dict)


def list_tree(
    root: str,
    known: Mapping[str, Stat] | None = None,
    skipped: Mapping[str, str] | None = None,
    ignores: Mapping[str, list[int]] | None = None,
) -> Listing:
    """Lists the files below `root`, paths relative with `/`.

    Args:
        known: the files of the last listing. Where no ignore file has changed since, they are not matched against the
            ignore files again, which takes ten times as long as to list them.
        skipped: paths that the last listing left out, with the reason.
        ignores: the ignore files of the last listing.
    """
    listing = _Walk(root, known or {}, skipped or {}).run()
    return listing if listing.ignores == ignores else _Walk(root, {}, {}).run()


class _Walk:
    """One pass over a tree, folder by folder, without recursion."""

    def __init__(self, root: str, known: Mapping[str, Stat], skipped: Mapping[str, str]):
        self.root, self.known, self.listing = root, known, Listing()
        self.skipped = skipped
        self.folders = {path.rpartition("/")[0] for path in known}
        for folder in [*self.folders]:
            while folder and (folder := folder.rpartition("/")[0]) not in self.folders:
                self.folders.add(folder)

    def run(self) -> Listing:
        """Walk the tree; folders are taken in the order of their names."""
        stack: list[tuple[str, int, tuple]] = [("", 0, ())]
        while stack:
            folder, depth, rules = stack.pop()
            try:
                with os.scandir(os.path.join(self.root, folder)) as scan:
                    entries = sorted(scan, key=lambda entry: entry.name)
            except OSError:
                self.listing.skipped[folder] = "unreadable"
                continue
            prefix = folder + "/" if folder else ""
            for entry in entries:
                if entry.name == IGNORE_FILE and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    self.listing.ignores[prefix + IGNORE_FILE] = [status.st_size, status.st_mtime_ns]
                    rules = (*rules, _Rules(self.root, prefix))
            below = []
            for entry in entries:
                path = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    if reason := self._reason_against_folder(path, entry.name, depth, rules):
                        self.listing.skipped[path] = reason
                    else:
                        below.append((path, depth + 1, rules))
                else:
                    self._add(path, entry, rules)
            stack += reversed(below)
        return self.listing

    def _reason_against_folder(self, path: str, name: str, depth: int, rules: tuple) -> str:
        if path in self.folders:
            return ""
        if path in self.skipped:
            return self.skipped[path]
        if name in SKIPPED_FOLDERS or os.path.lexists(os.path.join(self.root, path, "pyvenv.cfg")):
            return "other people's code or a cache"
        if not _is_utf8(name):
            return "a name that is not UTF-8"
        return "too deep" if depth >= MAX_DEPTH else "ignored" if _ignored(path + "/", rules) else ""

    def _add(self, path: str, entry: os.DirEntry, rules: tuple) -> None:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            self.listing.skipped[path] = "unreadable"
            return
        if not stat.S_ISREG(status.st_mode):
            self.listing.skipped[path] = "link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
            return
        if path not in self.known:
            reason = self.skipped.get(path) or _reason_against_name(path, entry.name, rules)
            if reason:
                self.listing.skipped[path] = reason
                return
        self.listing.files[path] = status.st_size, status.st_mtime_ns


def _reason_against_name(path: str, name: str, rules: tuple) -> str:
    if not _is_utf8(name):
        return "a name that is not UTF-8"
    lower = name.lower()
    if _SECRET.match(lower) and not _HARMLESS.match(lower):
        return "secret"
    if lower in _LOCK_FILES:
        return "generated"
    if ".min." in lower:
        return "minified"
    return "ignored" if _ignored(path, rules) else ""


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Rules:
    """The ignore file of one folder."""

    def __init__(self, root: str, prefix: str):
        self.root, self.prefix = root, prefix

    def decision(self, path: str) -> bool | None:
        """True for ignored, False for taken back by `!`, None where no line speaks of `path`."""
        return self._spec.check_file(path[len(self.prefix) :]).include

    @cached_property
    def _spec(self):
        import pathspec  # 25 ms, and a tree without new files needs no answer

        source = read_regular(os.path.join(self.root, self.prefix, IGNORE_FILE), 1 << 16)
        patterns = []
        for line in source.decode(errors="replace").splitlines() if isinstance(source, bytes) else []:
            try:
                patterns += pathspec.GitIgnoreSpec.from_lines([line]).patterns
            except ValueError:
                continue  # git passes over a bad pattern too
        return pathspec.GitIgnoreSpec(patterns)


def _ignored(path: str, rules: tuple[_Rules, ...]) -> bool:
    """The answer of the innermost ignore file that has one."""
    return next((answer for rule in reversed(rules) if (answer := rule.decision(path)) is not None), False)


def count_reasons(skipped: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """(reason, how many files and folders), the commonest first."""
    counts: dict[str, int] = {}
    for reason in skipped.values():
        counts[reason] = counts.get(reason, 0) + 1
    yield from sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """A path pattern: `**` is any folders, `*` and `?` stay in one; without `/` it is the file's name or a folder."""
    pattern = pattern.removeprefix("./")
    if pattern.endswith("/"):
        pattern += "**"
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    expression = "".join(wild.get(part, re.escape(part)) for part in parts)
    if "/" not in pattern:
        expression = f"(?:.*/)?{expression}"
    return re.compile(rf"(?s:{expression}(?:/.*)?)")
