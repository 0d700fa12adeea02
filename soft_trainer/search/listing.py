"""The files of a tree that are worth an index, chosen by their names and by the tree's ignore files.

Nothing of the tree is run: no `git`, whose configuration can name programs. Links are not followed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any

from soft_trainer.errors import UserError
from soft_trainer.mining.source_files import MAX_DEPTH, SKIPPED_FOLDERS, read_regular

IGNORE_FILE = ".gitignore"
_SECRETS = """.env .env.* *.pem *.key *.crt *.cer *.der *.p12 *.pfx *.jks *.keystore *.kdbx *.ppk *.gpg *.asc id_rsa*
    id_dsa* id_ecdsa* id_ed25519* .netrc .npmrc .pypirc .pgpass .htpasswd .git-credentials credentials
    *.tfstate *.tfvars"""
_SECRET, _HARMLESS = (
    re.compile("|".join(map(translate, names.split())))
    for names in (_SECRETS, ".env.example .env.sample .env.template .env.dist *.pub")
)
# Kinds of files in which nobody looks for code, by the end of the name.
_KINDS = {
    "lock file": ("package-lock.json", "npm-shrinkwrap.json", "pnpm-lock.yaml", "go.sum", ".lock"),
    "minified": (".min.js", ".min.css", ".min.mjs", ".min.html", ".js.map", ".css.map"),
    "translation": (".po", ".pot", ".mo", ".xlf", ".xliff"),
    "snapshot": (".snap", ".ambr"),
    "data": (".csv", ".tsv", ".jsonl", ".ndjson", ".geojson", ".svg", ".parquet"),
}
_DATA_IF_LARGE = (".json", ".xml", ".yaml", ".yml", ".sql", ".html", ".txt")
MAX_DATA_BYTES = 100_000
# Names of folders for other people's code, and names that some projects give to such folders and others to their own.
_VENDORED = frozenset(
    """vendor vendored _vendor _vendored node_modules bower_components site-packages dist-packages third_party
    third-party thirdparty 3rdparty 3rd_party""".split()
)
_MAYBE_VENDORED = frozenset("external externals extern deps".split())

_NOT_UTF8 = re.compile("[\ud800-\udfff]")  # surrogates stand for bytes that do not decode
Stat = tuple[int, int]  # size in bytes, time of the last change in ns


@dataclass
class Listing:
    """Files of a tree: those to read, and those left out by their name or kind, with the reason.

    `ignores` has all that was followed: `[size, time]` of each ignore file, whether or not it is among `files`, and
    the patterns to exclude and to include.
    """

    files: dict[str, Stat] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    ignores: dict[str, list] = field(default_factory=dict)


def list_tree(
    root: str, last: Listing | None = None, exclude: Sequence[str] = (), include: Sequence[str] = ()
) -> Listing:
    """Lists the files below `root`, paths relative with `/`; a UserError if it cannot be read.

    Args:
        last: the last listing. Where no ignore file has changed since, its paths are not matched against the ignore
            files again, which takes ten times as long as to list them.
        exclude: patterns of files and folders to leave out, as in `glob_pattern`.
        include: patterns of files to take although their kind, their folder or an ignore file speaks against them.
            Secrets stay out.
    """
    patterns = {"exclude": list(exclude), "include": list(include)}
    if last:
        listing = _Walk(root, last, patterns).run()
        if listing.ignores == last.ignores:
            return listing
    return _Walk(root, Listing(), patterns).run()


class _Walk:
    """One pass over a tree, folder by folder, without recursion."""

    def __init__(self, root: str, last: Listing, patterns: dict[str, list[str]]):
        self.root = root
        self.known = last.files
        self.skipped = last.skipped
        self.listing = Listing(ignores=dict(patterns))
        self.exclude, self.include = (list(map(glob_pattern, patterns[name])) for name in ("exclude", "include"))
        rooted = (pattern.removeprefix("./") for pattern in patterns["include"] if "/" in pattern)
        self.include_heads = [re.split(r"[*?]", pattern)[0] for pattern in rooted]
        self.rules: dict[str, Any] = {}  # of the ignore files, by folder
        self.folders = {""}  # all that hold a known file
        for path in self.known:
            while (path := path.rpartition("/")[0]) not in self.folders:
                self.folders.add(path)

    def run(self) -> Listing:
        """Walks the tree, folders in the order of their names."""
        # `ignoring`: the folders around that have an ignore file. `against`: the reason against a folder that holds
        # included files; its other files are left out for it.
        stack: list[tuple[str, tuple[str, ...], str]] = [("", (), "")]
        while stack:
            folder, self.ignoring, self.against = stack.pop()
            try:
                with os.scandir(os.path.join(self.root, folder)) as scan:
                    entries = sorted(scan, key=lambda entry: entry.name)
            except OSError as error:
                if not folder:
                    raise UserError(f"{self.root}: the folder cannot be read ({error.strerror})") from error
                self.listing.skipped[folder] = "unreadable"
                continue
            prefix = folder + "/" if folder else ""
            for entry in entries:
                if entry.name == IGNORE_FILE and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    self.listing.ignores[prefix + IGNORE_FILE] = [status.st_size, status.st_mtime_ns]
                    self.ignoring = (*self.ignoring, prefix)
            below = []
            for entry in entries:
                path = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    reason = self.against or self._reason_against_folder(path, entry.name)
                    if not reason or self._may_hold_included(path, reason):
                        below.append((path, self.ignoring, reason))
                    else:
                        self.listing.skipped[path] = reason
                else:
                    self._add(path, entry)
            stack += reversed(below)
        return self.listing

    def _reason_against_folder(self, path: str, name: str) -> str:
        if path in self.skipped:
            return self.skipped[path]
        if path in self.folders and not self.include_heads:
            return ""
        environment = os.path.lexists(os.path.join(self.root, path, "pyvenv.cfg"))
        cases = {
            "a name that is not UTF-8": _NOT_UTF8.search(name),
            "too deep": path.count("/") >= MAX_DEPTH,
            "excluded": _matches(path, self.exclude),
            "vendored": environment or name.lower() in _VENDORED,
            "made by a tool": name in SKIPPED_FOLDERS,
            "ignored": self._ignored(path + "/"),
        }
        return next((reason for reason, holds in cases.items() if holds), "")

    def _may_hold_included(self, path: str, reason: str) -> bool:
        if reason not in ("vendored", "made by a tool", "ignored"):
            return False
        below = path + "/"
        return any(head.startswith(below) or below.startswith(head) for head in self.include_heads if head)

    def _add(self, path: str, entry: os.DirEntry) -> None:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            self.listing.skipped[path] = "unreadable"
            return
        if not stat.S_ISREG(status.st_mode):
            self.listing.skipped[path] = "link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
            return
        included = _matches(path, self.include)
        large = status.st_size > MAX_DATA_BYTES
        reason = "" if path in self.known else self.skipped.get(path, "")
        if path not in self.known and (not reason or (reason == "data" and not large)):
            reason = self._reason_against_file(path, entry.name, included)
        if not reason and not included and large and path.lower().endswith(_DATA_IF_LARGE):
            reason = "data"
        if reason:
            self.listing.skipped[path] = reason
        else:
            self.listing.files[path] = status.st_size, status.st_mtime_ns

    def _reason_against_file(self, path: str, name: str, included: bool) -> str:
        lower = name.lower()
        if _NOT_UTF8.search(name):
            return "a name that is not UTF-8"
        if _SECRET.match(lower) and not _HARMLESS.match(lower):
            return "secret"
        if _matches(path, self.exclude):
            return "excluded"
        if included:
            return ""
        kind = next((kind for kind, ends in _KINDS.items() if lower.endswith(ends)), "")
        return self.against or kind or ("ignored" if self._ignored(path) else "")

    def _ignored(self, path: str) -> bool:
        """Returns True if the innermost ignore file that mentions the path ignores it; `!` takes a path back."""
        for prefix in reversed(self.ignoring):
            if prefix not in self.rules:
                self.rules[prefix] = _read_rules(os.path.join(self.root, prefix, IGNORE_FILE))
            answer = self.rules[prefix].check_file(path[len(prefix) :]).include
            if answer is not None:
                return answer
        return False


def _read_rules(path: str):
    import pathspec  # 25 ms, and a tree without new files needs no answer

    source = read_regular(path, 1 << 16)
    patterns = []
    for line in source.decode("utf-8-sig", "replace").splitlines() if isinstance(source, bytes) else []:
        with suppress(ValueError):  # git passes over a bad pattern too
            patterns += pathspec.GitIgnoreSpec.from_lines([line]).patterns
    return pathspec.GitIgnoreSpec(patterns)


def _matches(path: str, patterns: list[re.Pattern[str]]) -> bool:
    return any(pattern.fullmatch(path) for pattern in patterns)


def maybe_vendored(path: str) -> bool:
    """Returns True if a folder of the path has a name such as `external`, which often means other people's code."""
    return not _MAYBE_VENDORED.isdisjoint(path.lower().split("/")[:-1])


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """Compiles a path pattern. `**` spans folders, `*` and `?` do not; without `/` it matches any file or folder."""
    pattern = pattern.removeprefix("./")
    if pattern.endswith("/"):
        pattern += "**"
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    expression = "".join(wild.get(part, re.escape(part)) for part in parts)
    if "/" not in pattern:
        expression = f"(?:.*/)?{expression}"
    return re.compile(rf"(?s:{expression}(?:/.*)?)")
