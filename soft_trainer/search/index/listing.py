"""Lists the files in a tree that are worth indexing, judging by their names and the tree's ignore files.

Nothing in the tree is run, not even `git`, because a repository's configuration can start programs. Links are not
followed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from operator import attrgetter

from soft_trainer.errors import UserError
from soft_trainer.search.index.globs import path_filter
from soft_trainer.search.index.ignoring import IGNORE_FILE, Rules, TrackedFiles, ignored, rules_around, rules_of
from soft_trainer.source.source_files import MAX_DEPTH, SKIPPED_FOLDERS

_REPOSITORIES = frozenset(".git .hg .svn .bzr .jj".split())
_SECRETS = """.env .env.* *.env .envrc *.pem *.key *.crt *.cer *.der *.p12 *.pfx *.jks *.keystore *.keytab *.kdbx *.ppk
    *.gpg *.asc id_rsa* id_dsa* id_ecdsa* id_ed25519* .netrc .npmrc .pypirc .pgpass .htpasswd .git-credentials
    credentials kubeconfig .dockercfg *.tfstate *.tfvars"""
_SECRET, _HARMLESS = (
    re.compile("|".join(map(translate, names.split())))
    for names in (_SECRETS, ".env.example .env.sample .env.template .env.dist *.pub")
)
# Kinds of files that contain no code worth finding, with the endings of their names.
_KINDS = {
    "lock file": ("package-lock.json", "npm-shrinkwrap.json", "pnpm-lock.yaml", "go.sum", ".lock"),
    "minified": (".min.js", ".min.css", ".min.mjs", ".min.html", ".js.map", ".css.map"),
    "translation": (".po", ".pot", ".mo", ".xlf", ".xliff"),
    "snapshot": (".snap", ".ambr"),
    "data": (".csv", ".tsv", ".jsonl", ".ndjson", ".geojson", ".svg", ".parquet"),
}
_DATA_IF_LARGE = (".json", ".xml", ".yaml", ".yml", ".sql", ".html", ".txt")
MAX_DATA_BYTES = 100_000
# Names of folders for other people's code. Some projects also use the second set for folders with their own code.
_VENDORED = frozenset(
    """vendor vendored _vendor _vendored node_modules bower_components site-packages dist-packages third_party
    third-party thirdparty 3rdparty 3rd_party""".split()
)
_MAYBE_VENDORED = frozenset("external externals extern deps".split())
# Most names in a tree are like these, which no pattern above matches. Checking this one first makes a walk faster by a
# third.
_ORDINARY = re.compile(
    "(?!id_)[A-Za-z0-9_]+[.](?:py|pyi|go|js|jsx|ts|tsx|java|rb|rs|php|c|h|cc|cpp|hpp|cs|kt|md|rst)", re.ASCII
)
_NOT_UTF8 = re.compile("[\ud800-\udfff]")  # surrogates represent bytes that cannot be decoded
Stat = tuple[int, int]  # the size in bytes, and the time of the last change in ns


@dataclass
class Listing:
    """The files in a tree: those to read, and those to leave out, with the reasons.

    A skipped path that ends with a slash stands for a whole folder.
    """

    files: dict[str, Stat] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def list_tree(root: str, exclude: Sequence[str] = (), include: Sequence[str] = ()) -> Listing:
    """Lists the files below `root` as relative paths with `/`.

    Args:
        exclude: patterns for files and folders to leave out; see `path_filter`.
        include: patterns for files to list although their kind, their folder or an ignore file would exclude them.
            Secrets are never listed.

    Raises:
        UserError: the folder cannot be read.
    """
    return _Walk(root, exclude, include).run()


class _Walk:
    """One walk over a tree, folder by folder, without recursion."""

    def __init__(self, root: str, exclude: Sequence[str], include: Sequence[str]):
        self.root = root
        self.listing = Listing()
        self.exclude = list(map(path_filter, exclude))
        self.include = list(map(path_filter, include))
        self.include_heads = []  # the parts of patterns before the first wildcard
        for pattern in include:
            if "/" in pattern:
                self.include_heads.append(re.split(r"[*?]", pattern.removeprefix("./"))[0])

    def run(self) -> Listing:
        """Walks the tree. Folders are visited in alphabetical order."""
        self.place, around, tracked = rules_around(self.root)
        # Folders to visit, with the rules and tracked files that apply there. A reason against a folder also applies
        # to its files, except those that are included and, in an ignored folder, those that are tracked.
        stack: list[tuple[str, Rules, TrackedFiles | None, str]] = [("", around, tracked, "")]
        while stack:
            folder, around, self.tracked, self.against = stack.pop()
            entries = self._entries(folder)
            names = {entry.name for entry in entries}
            own: Rules | None = ()
            if not names.isdisjoint((".git", IGNORE_FILE)):
                own = rules_of(os.path.join(self.root, folder), self.place + folder)
            if own is None:
                self.listing.skipped[folder] = "an ignore file that cannot be read"
                continue
            self.rules = around + own
            if ".git" in names:
                self.tracked = TrackedFiles(os.path.join(self.root, folder), self.place + folder)
            below = []
            for entry in entries:
                path = folder + entry.name
                if entry.is_dir(follow_symlinks=False):
                    reason = self.against or self._reason_against_folder(path, entry.name)
                    if not reason or self._may_hold_included(path, reason):
                        below.append((path + "/", self.rules, self.tracked, reason))
                    else:
                        self.listing.skipped[path + "/"] = reason
                else:
                    self._add(path, entry)
            stack += reversed(below)
        return self.listing

    def _entries(self, folder: str) -> list[os.DirEntry]:
        try:
            with os.scandir(os.path.join(self.root, folder)) as scan:
                return sorted(scan, key=attrgetter("name"))
        except OSError as error:
            if not folder:
                raise UserError(f"{self.root}: the folder cannot be read ({error.strerror})") from error
            self.listing.skipped[folder] = "unreadable"
            return []

    def _reason_against_folder(self, path: str, name: str) -> str:
        if _NOT_UTF8.search(name):
            return "a name that is not UTF-8"
        if name in _REPOSITORIES:
            return "data of a repository"
        if path.count("/") >= MAX_DEPTH:
            return "too deep"
        if _matches(path, self.exclude):
            return "excluded"
        if name.lower() in _VENDORED or os.path.lexists(os.path.join(self.root, path, "pyvenv.cfg")):
            return "vendored"
        if name in SKIPPED_FOLDERS:
            return "made by a tool"
        if ignored(self.rules, self.place + path, True):
            return "ignored"
        return ""

    def _may_hold_included(self, path: str, reason: str) -> bool:
        if reason not in ("vendored", "made by a tool", "ignored"):
            return False
        if reason == "ignored" and self.tracked and self.tracked.holds_below(self.place + path):
            return True
        below = path + "/"
        return any(head.startswith(below) or below.startswith(head) for head in self.include_heads if head)

    def _add(self, path: str, entry: os.DirEntry) -> None:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            self.listing.skipped[path] = "unreadable"
            return
        reason = self._reason_against_file(path, entry.name, status)
        if reason:
            self.listing.skipped[path] = reason
        else:
            self.listing.files[path] = status.st_size, status.st_mtime_ns

    def _reason_against_file(self, path: str, name: str, status: os.stat_result) -> str:
        if not stat.S_ISREG(status.st_mode):
            return "link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
        ordinary = _ORDINARY.fullmatch(name)
        reason = "" if ordinary else _reason_against_name(name)
        if reason:
            return reason
        if self.exclude and _matches(path, self.exclude):
            return "excluded"
        if self.include and _matches(path, self.include):
            return ""
        if self.against not in ("", "ignored"):
            return self.against
        kind = "" if ordinary else _kind(name.lower(), status.st_size)
        if kind:
            return kind
        if self.against or (self.rules and ignored(self.rules, self.place + path, False)):
            tracked = self.tracked is not None and self.tracked.holds(self.place + path)
            if not tracked:
                return "ignored"
        return ""


def _reason_against_name(name: str) -> str:
    """Returns the reason to leave out a file with this name, even if it is included, or ""."""
    lower = name.lower()
    if _NOT_UTF8.search(name):
        return "a name that is not UTF-8"
    if name in _REPOSITORIES:
        return "data of a repository"
    if _SECRET.match(lower) and not _HARMLESS.match(lower):
        return "secret"
    return ""


def _kind(lower: str, size: int) -> str:
    """Returns the kind of a file that contains no code, or "". Its name is in lower case."""
    for kind, ends in _KINDS.items():
        if lower.endswith(ends):
            return kind
    if size > MAX_DATA_BYTES and lower.endswith(_DATA_IF_LARGE):
        return "data"
    return ""


def _matches(path: str, patterns: list[re.Pattern[str]]) -> bool:
    return any(pattern.fullmatch(path) for pattern in patterns)


def maybe_vendored(path: str) -> bool:
    """Returns True if a folder in the path has a name typical of third-party code, such as `external`."""
    return not _MAYBE_VENDORED.isdisjoint(path.lower().split("/")[:-1])
