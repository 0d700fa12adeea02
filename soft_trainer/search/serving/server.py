"""Serves a search page on the loopback address. The page does not load anything from other hosts."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

from soft_trainer.errors import UserError
from soft_trainer.search.index.words import telling_terms
from soft_trainer.search.ranking.ranking import parse_query
from soft_trainer.search.ranking.results import parse_location, weak_notices
from soft_trainer.search.serving.served_index import ServedIndex

PAGE = Path(__file__).with_name("page.html")
MAX_RESULTS = 50
MAX_QUERY = 16_000  # characters, as on the page; a request has at most 65,536 bytes
EDITOR = "vscode://file/{path}:{line}"
_NO_TOKEN = b"This address lacks its token: use the whole address that `soft-trainer search --serve` printed.\n"


class PageServer(ThreadingHTTPServer):
    """Serves an index's search page. The `url` contains a random token that other pages cannot guess."""

    daemon_threads = True

    def __init__(self, served: ServedIndex, port: int = 0, editor: str = EDITOR):
        super().__init__(("127.0.0.1", port), _Handler)
        self.served = served
        self.editor = editor
        self.token = secrets.token_urlsafe(24)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request, client_address) -> None:
        """Prints an error, unless the browser has closed the connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def search(self, options: dict[str, str]) -> dict:
        """Returns a query's results, as JSON values for the page."""
        query = options.get("q", "")[:MAX_QUERY]
        filters = {name: options.get(name) for name in ("path", "language", "tests")}
        started = time.perf_counter()
        if options.get("like"):
            results, notices = self.served.similar(*parse_location(options["like"]), MAX_RESULTS)
        else:
            results, notices = self.served.search(query, MAX_RESULTS, **filters)
        wanted = set(telling_terms(query))
        rows = []
        for result in results:
            lines = [number for number, _ in result.telling_lines(wanted)]
            path = quote(os.fsencode(f"{self.served.index.folder}/{result.path}"))  # may not be UTF-8
            link = self.editor.replace("{path}", path).replace("{line}", str(result.start_line))
            rows.append(result.as_dict() | {"lines": lines, "editor": link})
        notices += weak_notices(results)
        telling = [word.lower() for word in parse_query(query).words]
        taken = 1000 * (time.perf_counter() - started)
        return {"results": rows, "words": telling, "milliseconds": taken, "notices": notices}

    def lines(self, options: dict[str, str]) -> dict:
        """Returns lines `start` to `end` of an indexed file."""
        text = self.served.text_of(options.get("path", ""))
        try:
            start = max(int(options["start"]), 1)
            end = int(options["end"])
        except (KeyError, ValueError) as error:
            raise UserError("start and end: expected whole numbers") from error
        if text is None:
            raise UserError("path: not in the index")
        shown = "\n".join(text.split("\n")[start - 1 : end])
        return {"start_line": start, "text": shown}

    def about(self, _: dict[str, str]) -> dict:
        """Returns what the start page shows: the folder, the number of files and the languages.

        `update` is whether searches look for changed files.
        """
        index = self.served.index
        with self.served.lock:
            files = index.files_by_language()
        languages = sorted(files, key=files.get, reverse=True)
        return {
            "folder": index.folder,
            "files": sum(files.values()),
            "languages": languages,
            "update": self.served.update,
        }


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:  # noqa: N802, the name that the standard library calls
        """Sends the page or data. Rejects requests without the token or for another host."""
        try:
            address = urlsplit(self.path)
            options = {name: values[0] for name, values in parse_qs(address.query, max_num_fields=10).items()}
        except ValueError as error:  # such as `http://[::1/`, or too many fields
            return self._send(400, "text/plain", str(error).encode())
        parts = address.path.split("/")
        # Another site may point its host name at this address. The header then contains that name.
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            return self._send(403, "text/plain", b"wrong host")
        if len(parts) != 3 or not secrets.compare_digest(parts[1].encode(), self.server.token.encode()):
            return self._send(404, "text/plain", _NO_TOKEN)
        try:
            if parts[2] == "":
                nonce = secrets.token_urlsafe(16)
                page = PAGE.read_text(encoding="utf-8").replace("NONCE", nonce)
                return self._send(200, "text/html", page.encode(), nonce)
            if parts[2] in ("search", "lines", "about"):
                answer = getattr(self.server, parts[2])(options)
                return self._send(200, "application/json", json.dumps(answer).encode())
        except UserError as error:
            return self._send(400, "application/json", json.dumps({"error": str(error)}).encode())
        return self._send(404, "text/plain", b"not found")

    def _send(self, status: int, kind: str, body: bytes, nonce: str = "") -> None:
        policy = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        if nonce:
            policy += f"; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'"
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        for header in headers.items():
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        """Suppresses the log, because every key press would print a line."""


def serve_page(served: ServedIndex, query: str = "", port: int = 0, editor: str = EDITOR) -> None:
    """Prints the address and serves the page until the user stops the server.

    Raises:
        UserError: the port is taken.
    """
    try:
        server = PageServer(served, port, editor)
    except (OSError, OverflowError) as error:
        raise UserError(f"port={port}: {str(error).rstrip('.')}; choose another, or 0 for any free port") from error
    with server:
        sys.stdout.write(f"{server.url}{query and f'#q={quote(query)}'}\nStop with Ctrl+C.\n")
        sys.stdout.flush()
        server.serve_forever()
