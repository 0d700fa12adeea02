"""Answers queries with an index, and keeps the index up to date. Chunks are encoded in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from soft_trainer.errors import UserError
from soft_trainer.search.code_index import CodeIndex
from soft_trainer.search.ranking.results import SearchResult


class ServedIndex:
    """Answers queries from a search page or an agent, one query at a time.

    Args:
        update: whether to read changed files before a search, and encode new chunks between searches.
        lexical: whether to ignore embeddings.
        model: an encoder to use instead of the index's encoder. It is loaded in the background.
    """

    def __init__(self, index: CodeIndex, update: bool = True, lexical: bool = False, model: str | None = None):
        self.index = index
        self.update = update
        self.lexical = lexical
        self.model = model
        self.lock = threading.Lock()  # threads share SQLite's connection
        self.work = threading.Event()
        self.loaded = threading.Event()
        self.problem = "the encoder is being loaded"
        index.remedy = "the others are being encoded"
        threading.Thread(target=self._keep, daemon=True).start()

    def search(self, query: str, limit: int, **filters: str | None) -> tuple[list[SearchResult], list[str]]:
        """Returns results and notices. Until the encoder is loaded, the search uses only words."""
        return self._answer(partial(self.index.search, query, limit, **filters))

    def similar(self, path: str, line: int, limit: int) -> tuple[list[SearchResult], list[str]]:
        """Returns the chunks most similar to the chunk at a line of a file, and notices."""
        return self._answer(partial(self.index.similar, path, line, limit))

    def text_of(self, path: str) -> str | None:
        """Returns the text of a file as it is now, or None if the file is not in the index."""
        with self.lock:
            self._refresh()
            return self.index.text_of(path)

    def _refresh(self) -> None:
        """Reads changed files."""
        if self.update:
            self.index.refresh(encode=False)
        self.work.set()

    def _answer(self, ask: Callable[..., list[SearchResult]]) -> tuple[list[SearchResult], list[str]]:
        with self.lock:
            self._refresh()
            encoded = not self.lexical and (self.model or self.index.model)
            ready = self.loaded.is_set()
            results = ask(lexical=self.lexical or not ready)
            notices = self.index.notices
            self.index.notices = []
            problem = self.problem
        if encoded and problem:
            notices.append(f"{'new chunks are not encoded' if ready else 'searching only by words'}: {problem}")
        return results, notices

    def _keep(self) -> None:
        """Loads the encoder, then keeps encoding new chunks."""
        while True:
            try:
                with CodeIndex.open(self.index.index_dir) as own:  # a thread has its own connection
                    own.encoders = self.index.encoders
                    if self.model:
                        own.use_encoder(self.model)
                    if not self.lexical:
                        own.load_encoder()
                    self.model = None
                    self.problem = ""
                    self.loaded.set()
                    if self.update:
                        own.encode(wait=False)
            except Exception as error:  # no caller reads the error of this thread
                cause = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                self.problem = cause + " ".join(str(error).split())
            self.work.wait()
            self.work.clear()
