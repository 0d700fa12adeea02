"""Answers queries with an index, and keeps the index up to date. Chunks are encoded in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from soft_trainer.errors import UserError
from soft_trainer.search.code_index import CodeIndex
from soft_trainer.search.ranking.results import SearchResult
from soft_trainer.search.searching import Search

# A look for changed files comes before every search, unless a look takes longer than this many seconds.
CHECK_ALWAYS = 0.5
CHECK_SECONDS = 5.0  # from one look at such a large tree to the next


class ServedIndex:
    """Answers queries from a search page or an agent, one query at a time.

    Args:
        update: whether to read changed files before a search, and encode new chunks between searches.
        lexical: whether to ignore embeddings.
        model: an encoder to use instead of the indexes' encoders. It is loaded in the background.
    """

    def __init__(self, index: Search, update: bool = True, lexical: bool = False, model: str | None = None):
        self.index = index
        self.update = update
        self.lexical = lexical
        self.lock = threading.Lock()  # threads share SQLite's connections
        self.keepers = [_Keeper(member, update, lexical, model) for member in index.members]

    def search(self, query: str, limit: int, **filters: str | None) -> tuple[list[SearchResult], list[str]]:
        """Returns results and notices. Until the encoder is loaded, the search uses only words."""
        return self._answer(partial(self.index.search, query, limit, **filters))

    def similar(self, path: str, line: int, limit: int) -> tuple[list[SearchResult], list[str]]:
        """Returns the chunks most similar to the chunk at a line of a file, and notices."""
        return self._answer(partial(self.index.similar, path, line, limit))

    def text_of(self, path: str) -> str | None:
        """Returns the text of a file as it is now, or None if the file is not in the index."""
        with self.lock:
            self._refresh(self.index.full_path(path))
            return self.index.text_of(path)

    def _refresh(self, path: str = "") -> None:
        for keeper in self.keepers:
            keeper.refresh(path)

    def _answer(self, ask: Callable[..., list[SearchResult]]) -> tuple[list[SearchResult], list[str]]:
        with self.lock:
            self._refresh()
            ready = [keeper.ready() for keeper in self.keepers]
            results = ask(lexical=self.lexical or not all(ready))
            notices = list(self.index.notices)
            for keeper, was_ready in zip(self.keepers, ready, strict=True):
                notices += keeper.take_notices(was_ready)
        return results, list(dict.fromkeys(notices))


class _Keeper:
    """Keeps one index up to date. Reads files on request. Encodes chunks in the background."""

    def __init__(self, index: CodeIndex, update: bool, lexical: bool, model: str | None):
        self.index = index
        self.new_model = model
        self.update = update
        self.lexical = lexical
        self.next_check = 0.0
        self.looked = True
        self.loaded = threading.Event()
        self.work = threading.Event()
        self.problem = ""
        self.encodes = False
        if update:
            index.remedy = "the others are being encoded"
        self._start_encoder()

    def ready(self) -> bool:
        """Returns True if a search does not have to wait for the encoder."""
        return self.loaded.is_set() or not self._has_encoder()

    def _has_encoder(self) -> bool:
        return bool(self.new_model or self.index.model)

    def take_notices(self, was_ready: bool) -> list[str]:
        """Returns notices about the encoder and about a look that was put off, and clears the index's notices."""
        self.index.notices = []
        found = []
        if self.update and not self.looked:
            found.append(f"changes of the last {CHECK_SECONDS:g} seconds may be missing, because the tree is large")
        if self.lexical or not self._has_encoder():
            return found
        if not was_ready:
            found.append(f"searching only by words: {self.problem or 'the encoder is being loaded'}")
        elif self.problem:
            found.append(f"new chunks are not encoded: {self.problem}")
        return found

    def refresh(self, path: str) -> None:
        """Reads changed files, unless the last look at a large tree was recent.

        Args:
            path: a file that is read, whose change is always noticed, or "".
        """
        self._start_encoder()
        due = time.monotonic() >= self.next_check
        self.looked = due or self.index.is_outdated(path)
        if self.update and self.looked:
            self.index.refresh(encode=False)
            self.work.set()
            if self.index.look_seconds > CHECK_ALWAYS:
                self.next_check = time.monotonic() + CHECK_SECONDS

    def _start_encoder(self) -> None:
        """Starts the encoding thread if the index has an encoder and the thread is not running yet."""
        if self._has_encoder() and not (self.lexical or self.encodes):
            self.encodes = True
            threading.Thread(target=self._encode, daemon=True).start()

    def _encode(self) -> None:
        """Loads the encoder, then keeps encoding new chunks."""
        while True:
            try:
                with CodeIndex.open(self.index.index_dir) as index:  # a thread has its own connection
                    index.encoders = self.index.encoders
                    if self.new_model:
                        index.use_encoder(self.new_model)
                        self.new_model = None
                    index.load_encoder()
                    self.problem = ""
                    self.loaded.set()
                    if self.update:
                        index.encode(wait=False)
            except Exception as error:  # no caller reads the error of this thread
                cause = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                self.problem = cause + " ".join(str(error).split())
            self.work.wait()
            self.work.clear()
