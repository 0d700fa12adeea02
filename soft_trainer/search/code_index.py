"""Builds, opens, updates and searches the index of one folder."""

from __future__ import annotations

import os
import random
import shlex
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from soft_trainer.errors import UserError, for_caller, name_option
from soft_trainer.search.index import store, vectors
from soft_trainer.search.index.git_files import repository_of
from soft_trainer.search.index.listing import maybe_vendored
from soft_trainer.search.index.updating import apply_changes, find_changes, tidy
from soft_trainer.search.searching import Searchable
from soft_trainer.search.snapshot import Snapshot

MAX_WAIT = 1.0  # seconds that a search spends on embeddings of changed files


class CodeIndex(Searchable):
    """An index of one folder; see `build` and `open`.

    Example:
        >>> index = CodeIndex.build("my_repository")
        >>> for result in index.search("parse a date", limit=3):
        ...     print(f"{result.path}:{result.start_line} {result.name}")
    """

    def __init__(self, index_dir: str | os.PathLike[str], database: sqlite3.Connection):
        super().__init__({"": self})
        self.index_dir = Path(index_dir)
        self.database = database
        self.folder: str = store.get_meta(database, "folder")
        self.remedy = ""  # how missing embeddings are made, if not by the command
        self.encoders: dict[tuple, vectors.SearchEncoder] = {}
        self.notices: list[str] = []
        self._cached_version: tuple | None = None

    def __repr__(self) -> str:
        files, pieces = self._counts()
        return f"CodeIndex({self.folder!r}, files={files}, pieces={pieces}, model={self.model!r})"

    @classmethod
    def build(
        cls,
        folder: str | os.PathLike[str],
        index_dir: str | os.PathLike[str] | None = None,
        model: str | os.PathLike[str] | None = None,
        progress: bool = False,
        truncate_dim: int | None = None,
        exclude: str | Sequence[str] | None = None,
        include: str | Sequence[str] | None = None,
        history: bool | None = None,
    ) -> CodeIndex:
        """Indexes a folder, or brings its index up to date.

        Args:
            index_dir: where to store the index. By default, in the user's cache directory. An existing index can be
                reused for this folder if the folder that it was made for no longer exists, as after a move.
            model: the folder or Hub name of an encoder. By default, the index keeps the encoder that it has.
            truncate_dim: the number of leading dimensions to keep of every embedding. See `update`.
            exclude: patterns for files and folders to skip, such as `docs/**` or `*.md`. By default, the index keeps
                its patterns.
            include: patterns for files to index although an ignore file, their folder or their kind (translations,
                data, lock files) would exclude them. By default, the index keeps its patterns.
            history: whether to read the commits of the folder's git repository. By default, the index keeps its
                setting, which is True for a new index.

        Raises:
            UserError: the folder does not exist, `index_dir` cannot be used, the model cannot be loaded, or its
                embeddings have fewer dimensions than `truncate_dim`.
        """
        real = os.path.realpath(folder)
        if not os.path.isdir(real):
            raise UserError(f"{folder}: no such folder; give the root of a source tree")
        target = Path(index_dir or store.default_index_dir(real))
        if truncate_dim is not None and model is None and not (target / store.DATABASE).is_file():
            raise UserError(
                f"truncate_dim={truncate_dim}: the index has no encoder; name one with {name_option('model')}"
            )
        store.make_index_dir(target, real)
        with _disk_errors(target), store.write_lock(target):
            database = store.connect(target, create=True)
            kept = store.get_meta(database, "folder", real)
            if kept != real and os.path.isdir(kept):
                raise UserError(f"{target}: already the index of {kept}; choose another index_dir")
            patterns = store.get_meta(database, "patterns", {})
            for kind, given in (("exclude", exclude), ("include", include)):
                if isinstance(given, str):
                    given = [given]
                if given is not None:
                    patterns[kind] = [pattern for pattern in given if pattern]
            with store.transaction(database):
                store.set_meta(database, "folder", real)
                store.set_meta(database, "patterns", patterns)
                if history is not None:
                    store.set_meta(database, "history", history)
        index = cls(target, database)
        index.update(model=model, progress=progress, truncate_dim=truncate_dim)
        return index

    @classmethod
    def open(cls, index_dir: str | os.PathLike[str]) -> CodeIndex:
        """Opens an existing index.

        Raises:
            UserError: the index does not exist or cannot be read, or another user may have written to it.
        """
        with _disk_errors(Path(index_dir)):
            index = cls(index_dir, store.connect(Path(index_dir)))
        if index.folder is None:
            raise UserError(f"{index_dir}: no index there; {store.how_to_index()}")
        return index

    def update(
        self, model: str | os.PathLike[str] | None = None, progress: bool = False, truncate_dim: int | None = None
    ) -> bool:
        """Reads the files that have changed since the last update, encodes new pieces and reads new commits.

        Args:
            model: an encoder that replaces the index's encoder.
            truncate_dim: the number of leading dimensions to keep of every embedding, for an encoder that was trained
                for this. By default, the number stays the same. A different number makes every piece be encoded again.

        Returns:
            True if files have changed.

        Raises:
            UserError: the folder no longer exists, the disk is full, the model cannot be loaded, or its embeddings
                have fewer dimensions than `truncate_dim`.
        """
        self._choice(model, truncate_dim)  # raises an error before the files are read
        changed = self._update_words(progress, wait=True)
        self.encode(model, progress, truncate_dim)
        self.remember(progress)
        return changed

    def _update_words(self, progress: bool, wait: bool) -> bool:
        """Reads changed files. If another process is writing to the index, waits for it or leaves the work to it."""
        if not os.path.isdir(self.folder):
            remedy = for_caller(
                "search with --no_update, or index again", "search without `update`, or build it again"
            )
            raise UserError(f"{self.folder}: the indexed folder is missing; {remedy}")
        with _disk_errors(self.index_dir):
            if not find_changes(self.database, self.folder):
                return False
            with store.write_lock(self.index_dir, wait) as held:
                if not held:
                    self.notices.append("another process is updating the index: this is what it holds now")
                    return False
                changes = find_changes(self.database, self.folder)
                if changes:
                    apply_changes(self.database, self.folder, changes, progress)
                # The texts of removed files may be in other files now. Their embeddings are kept until all pieces are
                # encoded, unless that takes too long, as it does if the encoder is missing.
                waiting = self.model is not None and vectors.unencoded(self.database)
                if not waiting or store.count_segments(self.database) > store.MAX_SEGMENTS:
                    tidy(self.database)
        return bool(changes)

    def encode(
        self,
        model: str | os.PathLike[str] | None = None,
        progress: bool = False,
        truncate_dim: int | None = None,
        wait: bool = True,
    ) -> None:
        """Encodes pieces without an embedding, if the index has an encoder.

        Searches, and updates of the words, can run at the same time.

        Args:
            model, progress, truncate_dim: see `update`.
            wait: True to wait if another process is encoding, False to leave the work to it. If False, nothing is
                encoded after a change of encoder either, because every piece would have to be encoded again.
        """
        asked = (model, truncate_dim) != (None, None)
        name, truncate_dim = self._choice(model, truncate_dim)
        if name is None or not (asked or vectors.unencoded(self.database)):
            return
        with _disk_errors(self.index_dir), store.write_lock(self.index_dir, wait, store.ENCODING_LOCK) as held:
            if not held:
                return
            precision = None
            if not asked or (model is None and name == self.model):
                precision = self._precision
            encoder = self._encoder(name, truncate_dim, precision)
            if wait or encoder.identity == self._embeddings.get("identity"):
                vectors.embed_pieces(self.database, self.index_dir, encoder, progress)
                self._keep(encoder)
                with store.write_lock(self.index_dir):
                    tidy(self.database)

    def remember(self, progress: bool = False, wait: bool = True, **history: str) -> None:
        """Reads new commits if the folder belongs to a git repository. Errors become notices.

        Args:
            wait: True to wait if another process is reading commits, False to leave the work to it.
            history: `repository` and `tip`, if the folder is the tree of a commit.
        """
        if not (history or repository_of(self.folder)):
            return
        from soft_trainer.search.commits.remembering import remember  # imports pygit2, and a search does not need it

        with _disk_errors(self.index_dir), store.write_lock(self.index_dir, wait, store.MEMORY_LOCK) as held:
            if held:
                self.notices += remember(self.database, self.folder, progress, **history)

    def _choice(self, model: str | os.PathLike[str] | None, truncate_dim: int | None) -> tuple[str | None, int | None]:
        """Returns the encoder and its number of dimensions. By default, both are those of the index.

        Raises:
            UserError: a number of dimensions is given, but no encoder.
        """
        if model is None:
            name = self.model
        elif os.path.isdir(model):
            name = os.path.realpath(model)  # valid from any folder
        else:
            name = os.fspath(model)
        if name is None and truncate_dim is not None:
            raise UserError(
                f"truncate_dim={truncate_dim}: the index has no encoder; name one with {name_option('model')}"
            )
        if truncate_dim is None and name == self.model:
            truncate_dim = self.truncate_dim
        return name, truncate_dim

    def refresh(self, encode: bool = True) -> None:
        """Updates the words before a search, and the embeddings too if that takes no more than a second."""
        try:
            self._update_words(progress=True, wait=False)
        except UserError as error:
            self.notices.append(f"the index is as it was: {error}")
        rate = self._embeddings.get("rate", vectors.SLOW_RATE)
        if encode and self.model and vectors.unencoded(self.database) <= MAX_WAIT * rate:
            with suppress(UserError):  # the search reports the error
                self.encode(wait=False)

    def command(self, *options: str) -> str:
        """Returns the shell command that updates this index."""
        default = self.index_dir == store.default_index_dir(self.folder)
        place = () if default else ("--index_dir", str(self.index_dir))
        return shlex.join(["soft-trainer", "index", self.folder, *place, *options])

    def noise(self, snapshot: Snapshot) -> float:
        """Returns the highest similarity that any piece reaches to random letters, which mean nothing."""
        if snapshot.noise is not None:
            return snapshot.noise
        letters = random.Random(0)
        texts = []
        for _ in range(24):
            word = letters.choices("bcdfghjklmnpqrstvwxyz", k=letters.randint(3, 9))
            texts.append("".join(word))
        embeddings = self._encoder(self.model, self.truncate_dim, self._precision).queries(texts)
        similarity = [snapshot.similarity(embedding) for embedding in embeddings]
        snapshot.noise = float(np.nanmax(similarity))
        return snapshot.noise

    @property
    def model(self) -> str | None:
        """The encoder that makes the embeddings, or None if the index has only words."""
        return self._embeddings.get("model")

    @property
    def truncate_dim(self) -> int | None:
        """The number of dimensions of every embedding, or None for the encoder's default."""
        return self._embeddings.get("truncate_dim")

    @property
    def patterns(self) -> dict[str, list[str]]:
        """The patterns for files to `exclude` and to `include`."""
        return store.get_meta(self.database, "patterns", {})

    @property
    def _embeddings(self) -> dict:
        """The state of the embeddings, such as their encoder's `identity`, or {} if there are none."""
        return store.get_meta(self.database, "vectors", {})

    @property
    def _precision(self) -> str:
        """The precision of the embeddings; see `open_encoder`."""
        return self._embeddings.get("precision", vectors.TORCH)

    def _encoder(self, name: str, truncate_dim: int | None, precision: str | None) -> vectors.AnyEncoder:
        """Returns the encoder with this name or in this folder, and keeps it for the next call.

        It is loaded again if another process has embedded the index with newer weights from the same place.

        Raises:
            UserError: the encoder cannot be loaded.
        """
        known = self.encoders.get((name, truncate_dim, self._embeddings.get("identity")))
        return known or self._keep(vectors.open_encoder(name, truncate_dim, precision))

    def _keep(self, encoder: vectors.AnyEncoder) -> vectors.AnyEncoder:
        """Caches an encoder in memory until the embeddings change."""
        choice = encoder.name, encoder.truncate_dim, self._embeddings.get("identity")
        if choice not in self.encoders:  # another thread may be reading it
            self.encoders.clear()
            self.encoders[choice] = encoder
        return encoder

    def statistics(self) -> dict:
        """Returns the numbers of files, pieces, probably vendored files, skipped files, encoded pieces and bytes."""
        files, pieces = self._counts()
        query = "SELECT reason, count(*) FROM skipped GROUP BY 1 ORDER BY 2 DESC, 1"
        skipped = dict(self.database.execute(query).fetchall())
        vendored = sum(maybe_vendored(path) for (path,) in self.database.execute("SELECT path FROM files"))
        size = sum(entry.stat().st_size for entry in self.index_dir.iterdir() if entry.is_file())
        counts = {"files": files, "pieces": pieces, "vendored": vendored, "skipped": skipped, "bytes": size}
        counts["model"] = self.model
        if self.model:
            counts["encoded"] = pieces - vectors.unencoded(self.database)
        if self.truncate_dim:
            counts["truncate_dim"] = self.truncate_dim
        memory = store.get_meta(self.database, "memory")
        if memory:
            counts["commits"] = {name: memory[name] for name in ("read", "kept", "measured")}
        return counts

    def skipped(self) -> dict[str, str]:
        """Returns the reason for every file left out, keyed by path. A path that ends with `/` is a whole folder."""
        return dict(self.database.execute("SELECT path, reason FROM skipped ORDER BY path"))

    def _counts(self) -> tuple[int, int]:
        """Counts files and pieces."""
        return self.database.execute("SELECT count(*), coalesce(sum(count), 0) FROM files").fetchone()

    def indexed_text(self, path: str) -> str | None:
        """Returns a file's text as it was when indexed, or None if the path is not in the index."""
        query = "SELECT text FROM contents JOIN files ON file = id WHERE path = ?"
        row = self.database.execute(query, (path,)).fetchone()
        return zlib.decompress(row[0]).decode(errors="replace") if row else None

    def load_encoder(self) -> None:
        """Loads the index's encoder, which takes seconds. Raises UserError if it cannot be loaded."""
        if self.model is not None:
            self._encoder(self.model, self.truncate_dim, self._precision)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Yields a consistent view of the database for a search. The view is cached until the database changes."""
        with _disk_errors(self.index_dir):
            self.database.execute("BEGIN")
            try:
                version = (self.database.execute("PRAGMA data_version").fetchone()[0], self.database.total_changes)
                if version != self._cached_version:
                    self._cached = Snapshot(self.database, self.index_dir)
                    self._cached_version = version
                yield self._cached
            finally:
                self.database.execute("COMMIT")

    def similarity_to(self, query: str, snapshot: Snapshot) -> np.ndarray:
        """Computes every piece's similarity to the query. It is NaN for a piece without an embedding, or without an
        encoder.
        """
        missing = vectors.unencoded(self.database)
        if missing:
            _, pieces = self._counts()
            remedy = self.remedy or f"`{for_caller(self.command(), 'index.update()')}` encodes the others"
            self.notices.append(f"{pieces - missing:,} of {pieces:,} pieces have embeddings; {remedy}")
        unknown = np.full(len(snapshot.slots), np.nan, np.float32)
        if (snapshot.slots < 0).all():
            return unknown
        name = snapshot.state["model"]
        try:
            encoder = self._encoder(name, snapshot.state["truncate_dim"], self._precision)
            embedding = encoder.queries([query])[0]
            if encoder.identity != snapshot.state["identity"]:
                command = for_caller(self.command("--model", name), f'index.update(model="{name}")')
                raise UserError(f"{name} has changed; `{command}` encodes with it as it is now")
        except UserError as error:
            self.notices.append(f"searching only by words: {error}")
            return unknown
        return snapshot.similarity(embedding)


@contextmanager
def _disk_errors(index_dir: Path):
    """Turns a full or read-only disk into a one-line error."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        remedy = "make room or choose another index_dir. What was committed before is still there"
        raise UserError(f"{index_dir}: {error}; {remedy}") from error
