"""A Hub on the loopback address: the HTTP API that the official clients call, in memory, with injected faults.

    python server.py            prints its port and serves until its standard input closes

Only tests use the paths below `/-/`. `POST /-/faults` sets how often a fault occurs (-1 for ever), `GET /-/log` lists
the requests so far, `GET /-/holding/{text}` lists where a text occurs, and `DELETE /-/repos/{type}s/{id}` deletes a
repository.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

WRITE_TOKEN = "hf_loopbackWriteTokenOfAnn"
READ_TOKEN = "hf_loopbackReadTokenOfAnn"
FINE_TOKEN = "hf_loopbackFineGrainedTokenOfAnn"
FINE_REPO = "ann/fine"
ROLES = {WRITE_TOKEN: "write", READ_TOKEN: "read", FINE_TOKEN: "fineGrained"}
NAMESPACES = ("ann", "lab", "code-search-net", "microsoft", "sentence-transformers")  # the last three publish here
DATE = "2026-01-01T00:00:00.000Z"
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".pkl", ".gz", ".npy", ".npz", ".parquet", ".png")
REVISION = r"(?P<revision>refs/convert/\w+|[^/]+)"
REPO = r"(?P<kind>models|datasets|spaces)/(?P<id>[^/]+/[^/]+)"
FILES = r"/(?P<kind>datasets/|spaces/|)(?P<id>[^/]+/[^/]+?)"


class Refusal(Exception):
    """An HTTP error response with the Hub's headers."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


class Commit(NamedTuple):
    files: dict[str, bytes]
    title: str
    parent: str | None


@dataclass
class Repo:
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes], title: str) -> str:
        parent = self.branches.get(branch)
        sha = self.branches[branch] = hashlib.sha1(f"{parent} {title} {len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = Commit(files, title, parent)
        return sha

    def files(self, revision: str) -> dict[str, bytes]:
        return self.commits[self.resolve(revision)].files

    def resolve(self, revision: str) -> str:
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha


REPOS: dict[tuple[str, str], Repo] = {}
OBJECTS: dict[str, bytes] = {}
FAULTS: dict[str, int] = {}
LOG: list[str] = []
LOCK = threading.RLock()


def oids(content: bytes) -> tuple[str, str]:
    """Returns the hashes of a content in git and in git LFS."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(), hashlib.sha256(content).hexdigest()


def described(path: str, content: bytes) -> dict:
    oid, sha256 = oids(content)
    entry = {"type": "file", "path": path, "oid": oid, "size": len(content)}
    lfs = {"lfs": {"oid": sha256, "size": len(content), "pointerSize": 130}}
    return entry | (lfs if path.endswith(LFS_SUFFIXES) else {})


def strikes(fault: str) -> bool:
    """Returns True if a fault occurs now, and counts it down."""
    with LOCK:
        left = FAULTS.get(fault, 0)
        FAULTS[fault] = left - 1 if left > 0 else left
        return left != 0


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def handle_any(self):
        url = urlsplit(self.path)
        self.url, self.query = unquote(url.path), parse_qs(url.query)
        LOG.append(f"{self.command} {self.url}")
        if self.command == "PUT" and strikes("cut_upload"):
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
            return self.cut()
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            self.check_token()
            for method, pattern, handler in ROUTES:
                match = re.fullmatch(pattern, self.url)
                if match and self.command in method:
                    with LOCK:
                        return handler(self, **match.groupdict())
            raise Refusal(404, f"no such endpoint: {self.command} {self.url}")
        except Refusal as refusal:
            headers = {"X-Error-Message": str(refusal)} | ({"X-Error-Code": refusal.code} if refusal.code else {})
            return self.answer({"error": str(refusal)}, refusal.status, headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def cut(self):
        """Closes the connection without a response."""
        self.close_connection = True
        self.connection.close()

    def json(self) -> dict:
        return json.loads(self.body or b"{}")

    def answer(self, value, status: int = 200, headers: dict[str, str] | None = None):
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        usual = {"Content-Type": "application/json", "Content-Length": len(content)}
        for name, text in (usual | (headers or {})).items():
            self.send_header(name, str(text))
        self.end_headers()
        cut = self.command == "GET" and len(content) > 10_000 and strikes("cut_download")
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.wfile.flush()
            self.cut()

    # ---- Rights ----

    @property
    def token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def check_token(self):
        if self.token and self.token not in ROLES:
            raise Refusal(401, "Invalid user token.")

    def repo(self, kind: str, id: str, write: bool = False) -> Repo:
        repo = REPOS.get((kind.rstrip("/") or "models", id))
        if repo is None or (repo.private and not self.token):
            raise Refusal(404 if self.token else 401, "Repository not found", "RepoNotFound")
        if write:
            self.check_write(id)
        return repo

    def check_write(self, id: str):
        if not self.token:
            raise Refusal(401, "Invalid username or password.")
        role = ROLES[self.token]
        if role == "read" or id.split("/")[0] not in NAMESPACES or (role == "fineGrained" and id != FINE_REPO):
            raise Refusal(403, f"You don't have the rights to write to {id} with this token")

    # ---- The API ----

    def whoami(self):
        if not self.token:
            raise Refusal(401, "Invalid username or password.")
        scopes = {"scoped": [{"entity": {"type": "model", "name": FINE_REPO}, "permissions": ["repo.write"]}]}
        access = {"displayName": "test", "role": ROLES[self.token], "fineGrained": scopes}
        orgs = [{"name": "lab", "roleInOrg": "write"}, {"name": "readers", "roleInOrg": "read"}]
        auth = {"type": "access_token", "accessToken": access}
        self.answer({"type": "user", "name": "ann", "fullname": "Ann", "orgs": orgs, "auth": auth})

    def create(self):
        wanted = self.json()
        kind, id = wanted.get("type", "model") + "s", f"{wanted.get('organization') or 'ann'}/{wanted['name']}"
        self.check_write(id)
        url = f"http://{self.headers['Host']}/{'' if kind == 'models' else kind + '/'}{id}"
        if (kind, id) in REPOS:
            return self.answer({"error": "You already created this repo", "url": url}, 409)
        repo = REPOS[kind, id] = Repo(wanted.get("visibility") == "private")
        repo.commit("main", {".gitattributes": b""}, "initial commit")
        return self.answer({"url": url, "name": id})

    def validate_yaml(self):
        header = re.match(r"---\n(.*?\n)---\n", self.json()["content"], re.S)
        errors = [] if header else [{"message": "empty or missing yaml metadata"}]
        self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)

    def auth_check(self, kind, id, write):
        self.repo(kind, id, write=bool(write))
        self.answer({})

    def preupload(self, kind, id, revision):
        repo = self.repo(kind, id, write=True)
        if strikes("preupload"):
            raise Refusal(503, "Service unavailable")
        known = repo.files(revision)
        files = []
        for file in self.json()["files"]:
            path, lfs = file["path"], file["path"].endswith(LFS_SUFFIXES)
            oid = oids(known[path])[lfs] if path in known else None
            mode = "lfs" if lfs else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer({"files": files})

    def batch(self, kind, id):
        self.repo(kind, id, write=True)
        objects = []
        for wanted in self.json()["objects"]:
            where = {"href": f"http://{self.headers['Host']}/-/objects/{wanted['oid']}"}
            missing = wanted["oid"] not in OBJECTS
            objects.append(wanted | ({"actions": {"upload": where}} if missing else {}))
        self.answer({"transfer": "basic", "objects": objects})

    def put_object(self, oid):
        if strikes("upload"):
            raise Refusal(500, "Internal error: upload")
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, "hash mismatch")
        OBJECTS[oid] = self.body
        self.answer({})

    def commit(self, kind, id, revision):
        if strikes("gone"):
            self.repo(kind, id, write=True)
            del REPOS[kind, id]
        repo = self.repo(kind, id, write=True)
        if strikes("commit"):
            raise Refusal(500, "Internal error: commit")
        lines = [json.loads(line) for line in self.body.splitlines()]
        files, title = dict(repo.files(revision)), ""
        for key, value in ((line["key"], line["value"]) for line in lines):
            if key == "header":
                title = value["summary"]
                if value.get("parentCommit", repo.branches[revision]) != repo.branches[revision]:
                    raise Refusal(412, "A commit has happened since.")
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = OBJECTS[value["oid"]]
            elif key == "deletedFile":
                files.pop(value["path"], None)
        sha = repo.commit(revision, files, title)
        self.answer({"commitUrl": f"http://{self.headers['Host']}/{id}/commit/{sha}", "commitOid": sha})

    def branch(self, kind, id, name):
        repo = self.repo(kind, id, write=True)
        if name in repo.branches:
            raise Refusal(409, "Reference already exists")
        repo.branches[name] = repo.resolve(self.json().get("startingPoint", "main"))
        self.answer({})

    def info(self, kind, id, revision=None):
        repo = self.repo(kind, id)
        sha = repo.resolve(revision or "main")
        siblings = [{"rfilename": path} for path in repo.files(sha)]
        facts = {"id": id, "sha": sha, "private": repo.private, "siblings": siblings, "tags": [], "lastModified": DATE}
        known = {"author": id.split("/")[0], "downloads": 0, "likes": 0, "disabled": False, "gated": False}
        self.answer(facts | known)

    def tree(self, kind, id, revision, folder=None):
        repo = self.repo(kind, id)
        prefix, files = f"{folder}/" if folder else "", repo.files(revision)
        inside = {path: content for path, content in files.items() if path.startswith(prefix)}
        if prefix and not inside:
            raise Refusal(404, f"{folder} does not exist", "EntryNotFound")
        folders = {path[: at.start()] for path in inside for at in re.finditer("/", path) if at.start() > len(prefix)}
        recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders]
        entries += [described(path, content) for path, content in inside.items()]
        self.answer([entry for entry in entries if recursive or "/" not in entry["path"][len(prefix) :]])

    def commits(self, kind, id, revision):
        repo = self.repo(kind, id)
        listing, sha = [], repo.resolve(revision)
        while sha:
            commit = repo.commits[sha]
            listing.append({"id": sha, "title": commit.title, "message": "", "authors": [], "date": DATE})
            sha = commit.parent
        self.answer(listing)

    def file(self, kind, id, revision, path):
        repo = self.repo(kind, id)
        sha = repo.resolve(revision)
        headers = {"X-Repo-Commit": sha, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        content, lfs = repo.files(sha).get(path), path.endswith(LFS_SUFFIXES)
        if content is None:
            return self.answer({"error": "Entry not found"}, 404, headers | {"X-Error-Code": "EntryNotFound"})
        headers["ETag"] = f'"{oids(content)[lfs]}"'
        if lfs:
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": len(content)}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if span is None:
            return self.answer(content, 200, headers)
        first, last = int(span[1]), min(int(span[2] or len(content)), len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return self.answer(content[first : last + 1], 206, headers)

    # ---- For tests ----

    def faults(self):
        FAULTS.update(self.json())
        self.answer(FAULTS)

    def log(self):
        self.answer(LOG)

    def holding(self, text):
        commits = [commit for repo in REPOS.values() for commit in repo.commits.values()]
        files = [file for commit in commits for file in commit.files.items()]
        contents = [*files, *OBJECTS.items(), *((line, line.encode()) for line in LOG[:-1])]
        self.answer([name for name, content in contents if text.encode() in content])

    def reset(self):
        for state in (REPOS, OBJECTS, FAULTS, LOG):
            state.clear()
        self.answer({})

    def remove(self, kind, id):
        del REPOS[kind, id]
        self.answer({})


ROUTES = [
    ("POST", r"/-/faults", Hub.faults),
    ("GET", r"/-/log", Hub.log),
    ("GET", r"/-/holding/(?P<text>.+)", Hub.holding),
    ("POST", r"/-/reset", Hub.reset),
    ("DELETE", rf"/-/repos/{REPO}", Hub.remove),
    ("PUT", r"/-/objects/(?P<oid>\w+)", Hub.put_object),
    ("GET", r"/api/whoami-v2", Hub.whoami),
    ("POST", r"/api/repos/create", Hub.create),
    ("POST", r"/api/validate-yaml", Hub.validate_yaml),
    ("GET", rf"/api/{REPO}/auth-check(?P<write>/write)?", Hub.auth_check),
    ("POST", rf"/api/{REPO}/preupload/(?P<revision>.+)", Hub.preupload),
    ("POST", rf"/api/{REPO}/commit/(?P<revision>.+)", Hub.commit),
    ("POST", rf"/api/{REPO}/branch/(?P<name>.+)", Hub.branch),
    ("GET", rf"/api/{REPO}/tree/{REVISION}(?:/(?P<folder>.+))?", Hub.tree),
    ("GET", rf"/api/{REPO}/commits/(?P<revision>.+)", Hub.commits),
    ("GET", rf"/api/{REPO}(?:/revision/(?P<revision>.+))?", Hub.info),
    ("POST", rf"{FILES}\.git/info/lfs/objects/batch", Hub.batch),
    ("GET HEAD", rf"{FILES}/resolve/{REVISION}/(?P<path>.+)", Hub.file),
]


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)  # noqa: T201
    sys.stdin.read()
