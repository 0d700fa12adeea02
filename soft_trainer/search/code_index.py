"""Builds, opens, updates and searches the index of one folder."""

from __future__ import annotations

import json
import math
import os
import shlex
import sqlite3
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import compress
from pathlib import Path

import numpy as np

from soft_trainer.encoders import text_encoder
from soft_trainer.encoders.text_encoder import TextEncoder
from soft_trainer.errors import UserError
from soft_trainer.search import searching
from soft_trainer.search.index import store, vectors
from soft_trainer.search.index.stored import prune
from soft_trainer.search.index.updating import apply_changes, find_changes, tidy
from soft_trainer.search.ranking.results import SearchResult
from soft_trainer.search.snapshot import Snapshot
from soft_trainer.source.grammars import check_grammars
from soft_trainer.source.repositories import is_git_dir
from soft_trainer.source.source_files import decoded
from soft_trainer.system.packaged import BASE

DEFAULT_ENCODER: str | None = BASE  # of a new index
NO_ENCODER = ("", "none")
LIBRARY_TESTS = ("test", "tests", "idle_test")  # folders that a new index of the standard library excludes
MAX_WAIT = 2.0  # seconds that a search may spend on embedding changed files
MAX_NOTICES = 20  # the latest notices that an index keeps


class CodeIndex:
    """A search index of one folder; see `build` and `open`.

    Several threads may use an index. They take turns, so a search waits for an update that another thread has started.

    Attributes:
        folder: the folder to search, which is the indexed folder or a folder in it. Paths are relative to this folder.
        root: the indexed folder.
        ranked_by: what the latest search ranked results by: always "words", plus the encoder's name if it was used.
        notices: messages for the user about the latest searches and updates, for example about missing embeddings.

    Example:
        >>> index = CodeIndex.build("my_repository")
        >>> for result in index.search("parse a date", limit=3):
        ...     print(f"{result.path}:{result.start_line} {result.name}")
    """

    def __init__(self, index_dir: str | Path, database: sqlite3.Connection):
        self.lock = threading.RLock()
        self.index_dir = Path(index_dir)
        self.database = database
        self.root: str = self._settings.get("folder")
        self.folder = self.root
        self.prefix = ""  # the path of `folder` in `root`, with a slash at its end
        self.remedy = ""  # advice for notices about missing embeddings, to use instead of the shell command
        self.encoders: dict[tuple, TextEncoder] = {}
        self.ranked_by = ["words"]
        self.notices: list[str] = []
        self._cached_version: tuple | None = None

    def __repr__(self) -> str:
        files, chunks = self._counts()
        return f"CodeIndex({self.folder!r}, files={files}, chunks={chunks}, model={self.model!r})"

    @classmethod
    def build(
        cls,
        folder: str | Path,
        index_dir: str | Path | None = None,
        model: str | Path | None = None,
        progress: bool = False,
        truncate_dim: int | None = None,
        exclude: str | Sequence[str] | None = None,
        include: str | Sequence[str] | None = None,
        words_only: bool = False,
        rebuild: bool = False,
    ) -> CodeIndex:
        """Indexes a folder, or updates its index.

        Args:
            index_dir: where to store the index. By default, in the user's cache directory. An existing index of
                another folder can be reused if that folder no longer exists, for example because it was moved.
            model: the folder or Hub name of an encoder, or "none". By default, a new index gets `base`, the encoder in
                the package, and an existing index keeps its encoder.
            truncate_dim: the number of leading dimensions to keep of every embedding. See `update`.
            exclude: patterns for files and folders to skip, such as `docs/**` or `*.md`. By default, the index keeps
                its patterns. A new index of Python's standard library excludes the library's tests.
            include: patterns for files to index even if an ignore file, their folder or their type (translations,
                data, lock files) would exclude them. By default, the index keeps its patterns.
            words_only: True to index only words. `encode` can add embeddings later.
            rebuild: True to read and encode all files again. The settings of an existing index stay.

        Raises:
            UserError: the folder does not exist or is a bare repository, `index_dir` cannot be used, the model cannot
                be loaded, or the model has fewer dimensions than `truncate_dim`.
        """
        check_grammars()
        real = store.real_folder(folder)
        if is_git_dir(real):
            raise UserError(f"{folder}: a git repository without a working tree; clone it, and index the clone")
        target = Path(index_dir or store.default_index_dir(real))
        if truncate_dim is not None and model is None and not (target / store.DATABASE).is_file():
            raise UserError(f"truncate_dim={truncate_dim}: the index has no encoder; set one with model=NAME")
        store.make_index_dir(target, real)
        with _disk_errors(target), store.write_lock(target):
            settings = store.read_settings(target)
            kept = settings.get("folder", real)
            if kept != real and os.path.isdir(kept):
                raise UserError(f"{target}: already contains the index of {kept}; choose another index_dir")
            patterns = settings.get("patterns", {})
            for kind, given in (("exclude", exclude), ("include", include)):
                if isinstance(given, str):
                    given = [given]
                if given is not None:
                    patterns = patterns | {kind: [pattern for pattern in given if pattern]}
            if not settings and not patterns and real == os.path.realpath(os.path.dirname(os.__file__)):
                patterns = {"exclude": list(LIBRARY_TESTS)}
            with closing(store.connect(target, create=True, again=rebuild)) as database:
                if patterns != settings.get("patterns"):
                    database.execute("DELETE FROM skipped")  # so that these files are read again
                unparsed = "UPDATE files SET digest = NULL, changed = NULL WHERE substr(traits, ?, 1) = x'02'"
                database.execute(unparsed, (store.TRAITS.index("broken") + 1,))  # so are files that took too long
            store.write_settings(target, folder=real, patterns=patterns)
        if not settings:
            prune()
        index = cls.open(target)
        if not settings and model is None and DEFAULT_ENCODER:
            try:
                index.use_encoder(DEFAULT_ENCODER)
            except UserError as error:
                index.notify(f"searching only by words: {error}")
        if words_only:
            index._update_words(progress, wait=True)
        else:
            index.update(model=model, progress=progress, truncate_dim=truncate_dim)
        return index

    @classmethod
    def open(cls, index_dir: str | Path, folder: str | Path | None = None) -> CodeIndex:
        """Opens an existing index.

        Args:
            folder: a folder inside the indexed folder. Only its files are searched, as paths relative to it.

        Raises:
            UserError: the index does not exist, cannot be read or may have been written by another user, or `folder`
                is not in the indexed folder.
        """
        with _disk_errors(Path(index_dir)):
            index = cls(index_dir, store.connect(Path(index_dir)))
        if index.root is None:
            raise UserError(f"{index_dir}: no index there; {store.HOW_TO_INDEX}")
        if folder is not None:
            index.folder = os.path.realpath(folder)
            inside = os.path.relpath(index.folder, index.root)
            if inside.split("/")[0] == "..":
                raise UserError(f"{folder}: not in {index.root}, the folder that {index_dir} indexes")
            if inside != ".":
                index.prefix = f"{inside}/"
        return index

    def notify(self, notice: str) -> None:
        """Adds a notice, unless the same notice is already there. Only the latest notices are kept."""
        if notice not in self.notices:
            self.notices.append(notice)
        del self.notices[:-MAX_NOTICES]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Waits until no other thread uses the index. Turns disk and database errors into one-line errors."""
        with self.lock, _disk_errors(self.index_dir):
            yield

    def __enter__(self) -> CodeIndex:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Closes the database."""
        self.database.close()

    def search(
        self,
        query: str,
        limit: int = 10,
        path: str | None = None,
        language: str | None = None,
        name: str | None = None,
        lexical: bool = False,
        tests: str | None = None,
    ) -> list[SearchResult]:
        """Finds the chunks that answer a query, best first. An empty query finds nothing.

        Args:
            query: a name, words, a sentence, or a text of several lines, such as an issue or the output of a failing
                command.
            limit: the maximum number of results.
            path: search only files that match this pattern, such as `src/**`, `*.{ts,tsx}` or `**/views/*`. The
                pattern may start with the full path of the folder.
            language: search only files in this language.
            name: search only functions and classes with this name, such as `get`, `Session.get` or `Session.*`.
            lexical: ignore embeddings.
            tests: "only" to search only tests, "no" to search everything else.

        Raises:
            UserError: nothing is indexed, no file matches the path or is in this language, `tests` has another value,
                or the limit is not a positive whole number.
        """
        return searching.search(self, query, limit, path, language, name, lexical, tests)

    def similar(self, path: str, line: int, limit: int = 10, lexical: bool = False) -> list[SearchResult]:
        """Finds chunks similar to the chunk at a line of a file, best first.

        Similar chunks share rare words with that chunk and, if there is an encoder, have a similar embedding.

        Raises:
            UserError: the file is not in the index or has no chunk at this line, or the limit is not a positive whole
                number.
        """
        return searching.similar(self, path, line, limit, lexical)

    def update(self, model: str | Path | None = None, progress: bool = False, truncate_dim: int | None = None) -> bool:
        """Reads the files that have changed since the last update, and encodes new chunks.

        Args:
            model: a new encoder for the index. "none" removes the encoder and all embeddings.
            truncate_dim: the number of leading dimensions to keep of every embedding, for an encoder that was trained
                for this. By default, the number stays the same. After a change, every chunk is encoded again.

        Returns:
            True if files have changed.

        Raises:
            UserError: the folder no longer exists, the disk is full, the model cannot be loaded, or the model has
                fewer dimensions than `truncate_dim`.
        """
        if model in NO_ENCODER:
            with self._turn(), store.write_lock(self.index_dir, True, store.ENCODING_LOCK):
                with store.transaction(self.database):
                    self.database.execute("DELETE FROM vectors")
                    self.database.execute("DELETE FROM meta WHERE key = 'vectors'")
                with store.write_lock(self.index_dir):
                    store.write_settings(self.index_dir, model=None, truncate_dim=None)
                self.database.executescript("PRAGMA incremental_vacuum")
            model = None
        self._choice(model, truncate_dim)  # raises an error before the files are read
        changed = self._update_words(progress, wait=True)
        self.encode(model, progress, truncate_dim)
        return changed

    def _update_words(self, progress: bool, wait: bool) -> bool:
        """Indexes changed files. Returns True if there were changes.

        If another process is writing to the index, waits for that process or, if `wait` is False and files are indexed
        already, gives up.
        """
        if not os.path.isdir(self.root):
            raise UserError(f"{self.root}: the indexed folder is missing; search without an update, or index again")
        with self._turn():
            changes = find_changes(self.database, self.root, self.patterns)
            if changes.listing.without_git:
                self.notify(f"{self.root}: git is missing or failed, so files that git ignores were also indexed")
            if not changes.any:
                return False
            with store.write_lock(self.index_dir, wait or not self._counts()[0]) as held:
                if not held:
                    self.notify("another process is updating the index, so results may be out of date")
                    return False
                changes = find_changes(self.database, self.root, self.patterns)
                if changes.any:
                    apply_changes(self.database, self.root, changes, progress)
                tidy(self.database)
        return changes.any

    def encode(
        self,
        model: str | Path | None = None,
        progress: bool = False,
        truncate_dim: int | None = None,
        wait: bool = True,
        seconds: float = math.inf,
    ) -> None:
        """Encodes the chunks that have no embedding, if the index has an encoder.

        Searches and word updates can run at the same time.

        Args:
            model, progress, truncate_dim: see `update`.
            wait: True to wait if another process is encoding, False to leave the work to that process. If False,
                nothing is encoded after a change of encoder, because every chunk would have to be encoded again.
            seconds: about how long to encode.
        """
        if model not in NO_ENCODER and (model, truncate_dim) != (None, None):
            self.use_encoder(model, truncate_dim)
        if self.model is None or not (wait or self._embeddings) or not vectors.unencoded(self.database):
            return
        with self._turn(), store.write_lock(self.index_dir, wait, store.ENCODING_LOCK) as held:
            if not held:
                return
            name = self.model
            truncate_dim = self.truncate_dim
            try:
                encoder = self._encoder(name, truncate_dim, self._runtime)
            except UserError as error:
                raise UserError(
                    f"{error}; `{self.command('--model', 'none')}` continues without an encoder"
                ) from error
            if wait or encoder.fingerprint == self._embeddings["fingerprint"]:
                vectors.start_encoding(self.database, name, truncate_dim, encoder)
                vectors.embed_chunks(self.database, encoder, progress, seconds)
                self._keep(name, truncate_dim, encoder)

    def use_encoder(self, model: str | Path | None = None, truncate_dim: int | None = None) -> None:
        """Loads an encoder for the index, and deletes embeddings that came from a different encoder.

        Call `encode` to encode the chunks. Until then, a search finds chunks by words.

        Args:
            model, truncate_dim: see `update`.

        Raises:
            UserError: the encoder cannot be loaded.
        """
        name, truncate_dim = self._choice(model, truncate_dim)
        with self._turn(), store.write_lock(self.index_dir, True, store.ENCODING_LOCK):
            encoder = self._encoder(name, truncate_dim, self._runtime if model is None else None)
            with store.write_lock(self.index_dir):
                store.write_settings(self.index_dir, model=name, truncate_dim=truncate_dim)
            vectors.start_encoding(self.database, name, truncate_dim, encoder)
            self._keep(name, truncate_dim, encoder)

    def _choice(self, model: str | Path | None, truncate_dim: int | None) -> tuple[str | None, int | None]:
        """Returns the name and number of dimensions of the encoder to use. By default, both come from the index.

        Raises:
            UserError: `truncate_dim` is set, but there is no encoder.
        """
        if model is None:
            name = self.model
        elif os.path.isdir(model) and model != BASE:
            name = os.path.realpath(model)  # valid from any folder
        else:
            name = os.fspath(model)
        if name is None and truncate_dim is not None:
            raise UserError(f"truncate_dim={truncate_dim}: the index has no encoder; set one with model=NAME")
        if truncate_dim is None and name == self.model:
            truncate_dim = self.truncate_dim
        return name, truncate_dim

    def refresh(self, encode: bool = True) -> None:
        """Updates the words before a search, and spends up to about two seconds on embeddings."""
        try:
            self._update_words(progress=True, wait=False)
        except UserError as error:
            self.notify(f"the index was not updated: {error}")
        if encode:
            with suppress(UserError):  # the search reports the error
                self.encode(wait=False, seconds=MAX_WAIT)

    def command(self, *options: str) -> str:
        """Returns the shell command that updates this index."""
        default = self.index_dir == store.default_index_dir(self.root)
        stored = () if default else ("--index_dir", str(self.index_dir))
        return shlex.join(["soft-trainer", "index", self.root, *stored, *options])

    @property
    def model(self) -> str | None:
        """The encoder that computes the embeddings, or None if the index has only words."""
        return self._settings.get("model")

    @property
    def truncate_dim(self) -> int | None:
        """The number of dimensions of every embedding, or None for the encoder's default."""
        return self._settings.get("truncate_dim")

    @property
    def patterns(self) -> dict[str, list[str]]:
        """The patterns for files to `exclude` and to `include`."""
        return self._settings.get("patterns", {})

    @property
    def _settings(self) -> dict:
        return store.read_settings(self.index_dir)

    @property
    def _embeddings(self) -> dict:
        """The stored state of the embeddings, such as the encoder's `fingerprint`, or {} without embeddings."""
        return store.get_meta(self.database, "vectors", {})

    @property
    def _runtime(self) -> str | None:
        """The runtime that computes the embeddings (see `TextEncoder`), or None if the index has only words."""
        return self._embeddings.get("runtime")

    def _encoder(self, name: str, truncate_dim: int | None, runtime: str | None) -> TextEncoder:
        """Returns the encoder with this name or in this folder, and caches the encoder.

        Loads the encoder again if another process has embedded the index with newer weights of the same name.

        Raises:
            UserError: the encoder cannot be loaded.
        """
        known = self.encoders.get((name, truncate_dim, self._embeddings.get("fingerprint")))
        if known:
            return known
        encoder = text_encoder.open_encoder(name, truncate_dim, light=runtime != "torch")
        self._keep(name, truncate_dim, encoder)
        return encoder

    def _keep(self, name: str, truncate_dim: int | None, encoder: TextEncoder) -> None:
        """Caches an encoder in memory until the embeddings change."""
        choice = name, truncate_dim, self._embeddings.get("fingerprint")
        if choice not in self.encoders:  # another thread may be reading it
            self.encoders.clear()
            self.encoders[choice] = encoder

    def statistics(self) -> dict:
        """Returns statistics such as the number of files, chunks, skipped files and encoded chunks."""
        with self._turn():
            files, chunks = self._counts()
            reasons = Counter(self.skipped().values())
            skipped = dict(sorted(reasons.items(), key=lambda row: (-row[1], row[0])))
            traits = store.Segments(self.database).traits
            size = sum(entry.stat().st_size for entry in self.index_dir.iterdir() if entry.is_file())
            counts = {"files": files, "chunks": chunks, "skipped": skipped, "bytes": size, "model": self.model}
            counts |= {trait: int((traits[trait] > 0).sum()) for trait in ("vendored", "broken")}
            if self.model:
                counts["encoded"] = chunks - vectors.unencoded(self.database)
            if self.truncate_dim:
                counts["truncate_dim"] = self.truncate_dim
            return counts

    def skipped(self) -> dict[str, str]:
        """Returns the skipped files as `{path: reason}`. A path that ends with `/` stands for a whole folder."""
        with self._turn():
            return dict(self.database.execute("SELECT path, reason FROM skipped ORDER BY path"))

    def broken_files(self) -> list[str]:
        """Returns the indexed files in which syntax errors may hide functions."""
        with self._turn():
            segments = store.Segments(self.database)
            return list(compress(segments.paths, segments.traits["broken"]))

    def _counts(self) -> tuple[int, int]:
        """Returns the numbers of files and chunks."""
        return self.database.execute("SELECT count(*), coalesce(sum(count), 0) FROM files").fetchone()

    def text_of(self, path: str) -> str | None:
        """Returns the text that a file had when it was indexed, or None if the file is not in the index."""
        with self.snapshot() as snapshot:
            return snapshot.text_of(self.inside(path))

    def inside(self, path: str) -> str:
        """Returns a path as results have it, without `./` or the path of the folder at the start."""
        if f"{path}/".startswith(f"{self.folder}/"):
            return path[len(self.folder) + 1 :]
        return path.removeprefix("./")

    def files_by_language(self) -> dict[str, int]:
        """Returns the number of files in each language."""
        query = "SELECT language, count(*) FROM files WHERE substr(path, 1, length(?1)) = ?1 GROUP BY 1"
        with self._turn():
            return dict(self.database.execute(query, (self.prefix,)))

    def load_encoder(self) -> TextEncoder | None:
        """Returns the index's encoder, if it has one. Loading takes seconds. Raises UserError if loading fails."""
        if self.model is None:
            return None
        return self._encoder(self.model, self.truncate_dim, self._runtime)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Yields a consistent view of the database for a search. The view is cached until the database changes."""
        with self._turn():
            self.database.execute("BEGIN")
            try:
                version = (self.database.execute("PRAGMA data_version").fetchone()[0], self.database.total_changes)
                if version != self._cached_version:
                    self._cached = Snapshot(self.database, self.prefix, self.load_encoder)
                    self._cached_version = version
                yield self._cached
            finally:
                self.database.execute("COMMIT")

    def similarity_to(self, query: str, snapshot: Snapshot) -> np.ndarray:
        """Computes the similarity of every chunk to the query, float32[chunks].

        The similarity is NaN for chunks without an embedding, and for all chunks if the encoder cannot be used.
        """
        chunks = len(snapshot.slots)
        if snapshot.missing:
            remedy = self.remedy or f"`{self.command()}` encodes the others"
            self.notify(f"{chunks - snapshot.missing:,} of {chunks:,} chunks have embeddings; {remedy}")
        unknown = np.full(chunks, np.nan, np.float32)
        if snapshot.missing == chunks:
            return unknown
        name = snapshot.state["model"]
        try:
            encoder = self.load_encoder()
            embedding = encoder.encode([query], "query")[0]
            if encoder.fingerprint != snapshot.state["fingerprint"]:
                command = self.command("--model", name)
                raise UserError(f"{name} has changed; `{command}` updates the embeddings")
            if not embedding.any():
                raise UserError(f"{name} knows no word of the query")
        except UserError as error:
            self.notify(f"searching only by words: {error}")
            return unknown
        return snapshot.similarity(embedding)


def open_for(folder: str | Path) -> CodeIndex | None:
    """Opens a folder's index, or the index of the nearest indexed parent folder, limited to the folder.

    Returns:
        The index, or None if no such index contains files from the folder.

    Raises:
        UserError: the folder does not exist, or the index cannot be read.
    """
    index_dir = store.find_index_dir(folder)
    if index_dir is None:
        return None
    index = CodeIndex.open(index_dir, folder)
    # The parent's index has no files from a folder that is new or ignored, or whose name is not UTF-8.
    if index.prefix and (decoded(os.fsencode(index.prefix)) is None or not index.files_by_language()):
        index.close()
        return None
    return index


@contextmanager
def _disk_errors(index_dir: Path) -> Iterator[None]:
    """Turns errors of the disk, and damage to the database, into one-line errors."""
    try:
        yield
    except (sqlite3.Error, OSError, zlib.error, json.JSONDecodeError) as error:
        if isinstance(error, sqlite3.ProgrammingError):  # the index was closed
            raise
        remedy = "free some space if the disk is full; if the index is damaged, `soft-trainer index DIR --rebuild`"
        raise UserError(f"{index_dir}: {error}; {remedy} makes it again") from error
