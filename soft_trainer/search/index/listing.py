"""Lists the files in a tree that are worth indexing: files that git lists, unless their names rule them out.

Git runs in an empty repository, so that nothing in the tree is executed (see `git_listing`). Links are not followed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from fnmatch import translate

from soft_trainer.errors import UserError
from soft_trainer.search.index.git_listing import list_files, marked_as_generated
from soft_trainer.search.index.globs import path_filter
from soft_trainer.search.index.words import composed
from soft_trainer.source.repositories import is_linked_worktree
from soft_trainer.source.source_files import MAX_DEPTH, SKIPPED_FOLDERS

_REPOSITORIES = frozenset(".git .hg .svn .bzr .jj".split())
_SECRETS = """.env .env.* .env-* .env_* *.env .envrc *.pem *.key *.crt *.cer *.der *.p12 *.pfx *.jks *.keystore
    *.keytab *.kdbx *.ppk *.gpg id_rsa* id_dsa* id_ecdsa* id_ed25519* .netrc .npmrc .pypirc .pgpass .htpasswd
    .git-credentials credentials *credentials.json client_secret*.json kubeconfig .dockercfg *.tfstate
    *.tfstate.backup *.tfvars secrets.yml secrets.yaml secrets.json secrets.toml"""
_SECRET, _HARMLESS = (
    re.compile("|".join(map(translate, names.split())))
    for names in (_SECRETS, ".env[._-]example .env[._-]sample .env[._-]template .env[._-]dist *.pub")
)
_SECRET_PATHS = ("/.docker/config.json", "/.kube/config")
# Types of files that contain no code worth finding, with the endings of their names.
_KINDS = {
    "lock file": ("package-lock.json", "npm-shrinkwrap.json", "pnpm-lock.yaml", "go.sum", ".lock"),
    "minified": (".min.js", ".min.css", ".min.mjs", ".min.html", ".js.map", ".css.map"),
    "translation": (".po", ".pot", ".xlf", ".xliff"),
    "snapshot": (".snap", ".ambr"),
    "data": (".csv", ".tsv", ".jsonl", ".ndjson", ".geojson", ".svg", ".parquet"),
}
_DATA_IF_LARGE = (".json", ".xml", ".yaml", ".yml", ".sql", ".html", ".txt")
MAX_DATA_BYTES = 100_000
# Names of folders for third-party code. Some projects also use the second set for their own code.
_VENDORED = frozenset(
    """vendor vendored _vendor _vendored node_modules bower_components site-packages dist-packages third_party
    third-party thirdparty 3rdparty 3rd_party""".split()
)
_MAYBE_VENDORED = frozenset("external externals extern deps".split())
# Most names in a tree match this pattern, and no pattern above matches such a name. Checking it first makes a walk
# faster by a third.
_ORDINARY = re.compile(
    "(?!id_)[A-Za-z0-9_]+[.](?:py|pyi|go|js|jsx|ts|tsx|java|rb|rs|php|c|h|cc|cpp|hpp|cs|kt|md|rst)", re.ASCII
)
# Reasons to skip a folder that an `include` pattern overrides.
_OVERRIDDEN = ("vendored", "made by a tool", "linked worktree")
_NOT_UTF8 = re.compile("[\ud800-\udfff]")  # surrogates represent bytes that cannot be decoded
# The size in bytes, and the times of the last change of the content and of the file in ns. A program can set the first
# time back (`rsync -t`, `touch -r`), but not the second one, which Windows lacks.
Stat = tuple[int, int, int]


def list_tree(root: str, exclude: Sequence[str] = (), include: Sequence[str] = ()) -> Listing:
    """Lists the files below `root` as relative paths with `/`.

    Args:
        exclude: patterns for files and folders to skip; see `path_filter`.
        include: patterns for files to list even if their type, their folder or an ignore file would exclude them.
            Secrets are never listed.

    Raises:
        UserError: the folder cannot be read.
    """
    listing = Listing(os.path.realpath(root), exclude, include)  # git fails on a relative path
    listing.run()
    return listing


class Listing:
    """The files to index in a tree, and the skipped files with the reason for skipping each.

    A skipped path that ends with a slash stands for a whole folder. Files that git ignores are not listed at all.

    Attributes:
        included: the files that an `include` pattern matches.
        without_git: True if git is missing or failed, so ignore files had no effect.
    """

    def __init__(self, root: str, exclude: Sequence[str], include: Sequence[str]):
        self.files: dict[str, Stat] = {}
        self.skipped: dict[str, str] = {}
        self.included: set[str] = set()
        self.generated: set[str] = set()  # files that `.gitattributes` marks as generated
        self.without_git = False
        self.root = root
        self.exclude = list(map(path_filter, exclude))
        self.include = list(map(path_filter, include))
        # Only a pattern that starts with a folder's name reaches into skipped folders.
        self.include_deep = [path_filter(pattern) for pattern in include if re.match(r"(\./|/)?[^*?{/]+/", pattern)]
        self.top = ""  # the root of the enclosing repository, or `root`
        self.reasons: dict[str, str] = {"": ""}  # the reason to skip each folder, or ""

    def run(self) -> None:
        """Decides whether to list or skip each file in the tree, including files in nested repositories."""
        try:
            os.scandir(self.root).close()
        except OSError as error:
            raise UserError(f"{self.root}: the folder cannot be read ({error.strerror})") from error
        repositories = [""]
        while repositories:
            prefix = repositories.pop()
            folder = f"{self.root}/{prefix}".rstrip("/")
            top, listed = list_files(folder)
            self.top = self.top or os.path.realpath(top)
            if listed is None:
                self.without_git = True
                listed = self._walk(prefix)
            else:
                self.generated.update(prefix + name for name in marked_as_generated(top, folder, listed))
            for name in dict.fromkeys(listed):  # git lists a file with a merge conflict several times
                path = f"{prefix}{name}".rstrip("/")
                if self._add(path):
                    repositories.append(path + "/")
            if self.include and not self.without_git:
                for name in self._walk(prefix):
                    if _matches(prefix + name, self.include):
                        self._add(prefix + name)

    def _add(self, path: str) -> bool:
        """Lists a path, or records the reason to skip the path. Returns True if the path is a nested repository."""
        folder, _, name = path.rpartition("/")
        against = self.reasons.get(folder)
        if against is None:
            against = self._reason_against(folder)
        if against and (against not in _OVERRIDDEN or not _matches(path, self.include_deep)):
            return False
        if self.include and _matches(path, self.include):
            self.included.add(path)
        try:
            status = os.lstat(f"{self.root}/{path}")
        except (FileNotFoundError, NotADirectoryError):  # still tracked
            return False
        except OSError:
            self.skipped[path] = "unreadable"
            return False
        if stat.S_ISDIR(status.st_mode):
            return not self._reason_against(path) and os.path.lexists(f"{self.root}/{path}/.git")
        reason = ""
        ordinary = stat.S_ISREG(status.st_mode) and _ORDINARY.fullmatch(name) and path not in self.generated
        if self.exclude or not ordinary:
            reason = self._reason_against_file(path, name, status)
        if reason:
            self.skipped[path] = reason
        else:
            self.files[path] = file_stat(status)
        return False

    def _walk(self, prefix: str) -> list[str]:
        """Returns the files below a folder, as paths relative to the folder.

        A skipped folder is entered only if an `include` pattern may reach into it.
        """
        found = []
        stack = [prefix]
        while stack:
            folder = stack.pop()
            try:
                with os.scandir(f"{self.root}/{folder}") as scan:
                    entries = list(scan)
            except OSError:
                self.skipped[folder] = "unreadable"
                continue
            for entry in entries:
                path = folder + entry.name
                if not entry.is_dir(follow_symlinks=False):
                    found.append(path.removeprefix(prefix))
                    continue
                reason = self._reason_against(path)
                if not reason or (self.include_deep and reason in _OVERRIDDEN):
                    stack.append(path + "/")
        return found

    def _reason_against(self, folder: str) -> str:
        """Returns why a folder or one of its parents is skipped, or "" if the folder is not skipped."""
        if folder.count("/") > MAX_DEPTH:
            folder = "/".join(folder.split("/", MAX_DEPTH + 1)[: MAX_DEPTH + 1])
        if folder not in self.reasons:
            around, _, name = folder.rpartition("/")
            reason = self._reason_against(around)
            if not reason:
                reason = self._reason_against_folder(folder, name)
                if reason:
                    self.skipped[folder + "/"] = reason
            self.reasons[folder] = reason
        return self.reasons[folder]

    def _reason_against_folder(self, path: str, name: str) -> str:
        if _NOT_UTF8.search(name):
            return "a name that is not UTF-8"
        if name in _REPOSITORIES or (name.endswith((".git", ".bare")) and os.path.lexists(f"{self.root}/{path}/HEAD")):
            return "data of a repository"  # the second one is bare; its configuration may hold passwords too
        if path.count("/") >= MAX_DEPTH:
            return "too deep"
        if os.path.islink(f"{self.root}/{path}"):  # a link that has replaced a tracked folder
            return "link"
        if _matches(path, self.exclude):
            return "excluded"
        if name.lower() in _VENDORED or os.path.lexists(f"{self.root}/{path}/pyvenv.cfg"):
            return "vendored"
        if name in SKIPPED_FOLDERS:
            return "made by a tool"
        if is_linked_worktree(f"{self.root}/{path}", self.top):
            return "linked worktree"
        return ""

    def _reason_against_file(self, path: str, name: str, status: os.stat_result) -> str:
        if not stat.S_ISREG(status.st_mode):
            return "link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
        lower = name.lower()
        if _NOT_UTF8.search(name):
            return "a name that is not UTF-8"
        if name in _REPOSITORIES:
            return "data of a repository"
        if (_SECRET.match(lower) and not _HARMLESS.match(lower)) or f"{self.root}/{path}".endswith(_SECRET_PATHS):
            return "secret"
        if _matches(path, self.exclude):
            return "excluded"
        if path in self.included:
            return ""
        if path in self.generated:
            return "generated"
        for kind, ends in _KINDS.items():
            if lower.endswith(ends):
                return kind
        if status.st_size > MAX_DATA_BYTES and lower.endswith(_DATA_IF_LARGE):
            return "data"
        return ""


def _matches(path: str, patterns: list[re.Pattern[str]]) -> bool:
    return any(pattern.fullmatch(composed(path)) for pattern in patterns)


def file_stat(status: os.stat_result) -> Stat:
    """Returns what tells whether a file has changed."""
    return status.st_size, status.st_mtime_ns, 0 if os.name == "nt" else status.st_ctime_ns


def maybe_vendored(path: str) -> bool:
    """Returns True if a folder in the path has a name typical of third-party code, such as `external`."""
    return not _MAYBE_VENDORED.isdisjoint(path.lower().split("/")[:-1])
