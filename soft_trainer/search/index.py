"""The index of one folder: built, opened, brought up to date and searched."""

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

from soft_trainer.errors import UserError
from soft_trainer.search import store, vectors
from soft_trainer.search.listing import maybe_vendored
from soft_trainer.search.repositories import repository_of
from soft_trainer.search.searching import Searchable
from soft_trainer.search.snapshot import Snapshot
from soft_trainer.search.updating import apply_changes, find_changes, tidy

_NO_ENCODER = "the index has no encoder; name one with --model"
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
        self.remedy = ""  # against missing embeddings, if not the command
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
            index_dir: the place of the index; by default in the user's cache directory. The index of a folder that is
                gone becomes that of this one, such as the same tree in another place.
            model: folder or Hub name of an encoder; None keeps the one that the index has, if it has one.
            truncate_dim: keep this many dimensions of every embedding; see `update`.
            exclude: patterns of files and folders to leave out, such as `docs/**` or `*.md`; None keeps those that the
                index has.
            include: patterns of files to index although an ignore file, their folder or their kind (translations,
                data, lock files) speaks against them; None keeps those that the index has.
            history: read the commits of the folder's git repository; None keeps the choice of the index (first True).

        Raises:
            UserError: no such folder, an index_dir that cannot be used, a model that cannot be loaded, or dimensions
                that its embeddings do not have.
        """
        real = os.path.realpath(folder)
        if not os.path.isdir(real):
            raise UserError(f"{folder}: no such folder; give the root of a source tree")
        target = Path(index_dir or store.default_index_dir(real))
        if truncate_dim is not None and model is None and not (target / store.DATABASE).is_file():
            raise UserError(f"truncate_dim={truncate_dim}: {_NO_ENCODER}")
        store.make_index_dir(target, real)
        with _disk_errors(target), store.write_lock(target):
            database = store.connect(target, create=True)
            kept = store.get_meta(database, "folder", real)
            if kept != real and os.path.isdir(kept):
                raise UserError(f"{target}: it is the index of {kept}; choose another index_dir")
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
        """Opens an index that `build` made; a UserError if there is none, or if it cannot be trusted or read."""
        with _disk_errors(Path(index_dir)):
            index = cls(index_dir, store.connect(Path(index_dir)))
        if index.folder is None:
            raise UserError(f"{index_dir}: no index there; make one with `soft-trainer index DIR`")
        return index

    def update(
        self, model: str | os.PathLike[str] | None = None, progress: bool = False, truncate_dim: int | None = None
    ) -> bool:
        """Reads the files changed since the last update, and encodes new pieces; returns True if there were any.

        Args:
            model: an encoder to replace the one in the index.
            truncate_dim: keep this many dimensions of every embedding, for an encoder that was trained for it. None
                keeps the number that the index uses. Another number encodes every piece again.

        Raises:
            UserError: the folder is gone, the disk is full, the model cannot be loaded, or its embeddings have fewer
                dimensions.
        """
        self._choice(model, truncate_dim)  # refused before the words are read rather than after
        changed = self._update_words(progress, wait=True)
        self.encode(model, progress, truncate_dim)
        self.remember(progress)
        return changed

    def _update_words(self, progress: bool, wait: bool) -> bool:
        """Reads changed files. If another process is writing the index, waits for it or leaves the work to it."""
        if not os.path.isdir(self.folder):
            raise UserError(f"{self.folder}: the indexed folder is gone; search with --no_update, or index again")
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
                # Texts of dead files may stand elsewhere now: until all are encoded, their embeddings are kept, unless
                # that takes long, as it does if the encoder is gone.
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
        """Encodes the pieces that lack an embedding, if the index has an encoder. Takes the arguments of `update`.

        Searches and updates of the words may go on meanwhile. Without `wait`, it is left to a process that encodes.
        Nothing is encoded then either if the encoder has changed, since every piece would have to be encoded again.
        """
        asked = (model, truncate_dim) != (None, None)
        name, truncate_dim = self._choice(model, truncate_dim)
        if name is None or not (asked or vectors.unencoded(self.database)):
            return
        with _disk_errors(self.index_dir), store.write_lock(self.index_dir, wait, store.ENCODING_LOCK) as held:
            if not held:
                return
            encoder = self._encoder(name, truncate_dim)
            if wait or encoder.identity == self._embeddings.get("identity"):
                vectors.embed_pieces(self.database, self.index_dir, encoder, progress)
                self._keep(encoder)
                with store.write_lock(self.index_dir):
                    tidy(self.database)

    def remember(self, progress: bool = False, wait: bool = True, **history: str) -> None:
        """Reads new commits of the folder's git repository, if it has one. Errors become notices.

        Args:
            wait: until another process has read them; else it is left to that one.
            history: `repository` and `tip`, where the folder is the tree of a commit.
        """
        if not (history or repository_of(self.folder)):
            return
        from soft_trainer.search.remembering import remember  # imports pygit2, which a search does not need

        with _disk_errors(self.index_dir), store.write_lock(self.index_dir, wait, store.MEMORY_LOCK) as held:
            if held:
                self.notices += remember(self.database, self.folder, progress, **history)

    def _choice(self, model: str | os.PathLike[str] | None, truncate_dim: int | None) -> tuple[str | None, int | None]:
        """Returns the encoder and its dimensions, by default the index's; UserError for dimensions alone."""
        if model is None:
            name = self.model
        elif os.path.isdir(model):
            name = os.path.realpath(model)  # a whole path is found from anywhere
        else:
            name = os.fspath(model)
        if name is None and truncate_dim is not None:
            raise UserError(f"truncate_dim={truncate_dim}: {_NO_ENCODER}")
        if truncate_dim is None and name == self.model:
            truncate_dim = self.truncate_dim
        return name, truncate_dim

    def refresh(self, encode: bool = True) -> None:
        """Brings the words up to date before a search, and the embeddings if that takes at most a second."""
        try:
            self._update_words(progress=True, wait=False)
        except UserError as error:
            self.notices.append(f"the index is as it was: {error}")
        rate = self._embeddings.get("rate", vectors.SLOW_RATE)
        if encode and self.model and vectors.unencoded(self.database) <= MAX_WAIT * rate:
            with suppress(UserError):  # the search will say why
                self.encode(wait=False)

    def command(self, *options: str) -> str:
        """Returns the shell command that brings this index up to date."""
        default = self.index_dir == store.default_index_dir(self.folder)
        place = () if default else ("--index_dir", str(self.index_dir))
        return shlex.join(["soft-trainer", "index", self.folder, *place, *options])

    def noise(self, snapshot: Snapshot) -> float:
        """Returns the largest similarity of any piece to meaningless random letters."""
        letters = random.Random(0)
        texts = []
        for _ in range(24):
            word = letters.choices("bcdfghjklmnpqrstvwxyz", k=letters.randint(3, 9))
            texts.append("".join(word))
        embeddings = self._encoder(self.model, self.truncate_dim).queries(texts)
        similarity = [snapshot.similarity(embedding) for embedding in embeddings]
        return float(np.nanmax(similarity))

    @property
    def model(self) -> str | None:
        """The encoder of the embeddings, None for a lexical index."""
        return self._embeddings.get("model")

    @property
    def truncate_dim(self) -> int | None:
        """The number of dimensions kept of every embedding; None for the encoder's default."""
        return self._embeddings.get("truncate_dim")

    @property
    def patterns(self) -> dict[str, list[str]]:
        """The patterns to `exclude` and to `include`."""
        return store.get_meta(self.database, "patterns", {})

    @property
    def _embeddings(self) -> dict:
        """The state of the embeddings, such as the `identity` of the encoder that made them; empty without one."""
        return store.get_meta(self.database, "vectors", {})

    def _encoder(self, name: str, truncate_dim: int | None) -> vectors.SearchEncoder:
        """Returns an encoder; a UserError if it cannot be loaded.

        It is loaded once, and again after another process has made the embeddings with newer weights of that name.
        """
        known = self.encoders.get((name, truncate_dim, self._embeddings.get("identity")))
        return known or self._keep(vectors.open_encoder(name, truncate_dim))

    def _keep(self, encoder: vectors.SearchEncoder) -> vectors.SearchEncoder:
        """Keeps this encoder in memory until the embeddings change."""
        choice = encoder.name, encoder.truncate_dim, self._embeddings.get("identity")
        if choice not in self.encoders:  # another thread may be looking for it
            self.encoders.clear()
            self.encoders[choice] = encoder
        return encoder

    def statistics(self) -> dict:
        """Counts files, pieces, files that may be vendored, skipped files by reason, encoded pieces, bytes on disk."""
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
        """Returns the reason for each file that was left out, by path; a path that ends with `/` is a whole folder."""
        return dict(self.database.execute("SELECT path, reason FROM skipped ORDER BY path"))

    def _counts(self) -> tuple[int, int]:
        """Counts files and pieces."""
        return self.database.execute("SELECT count(*), coalesce(sum(count), 0) FROM files").fetchone()

    def indexed_text(self, path: str) -> str | None:
        """Returns the text of a file as it was when it was indexed; None for any other path."""
        query = "SELECT text FROM contents JOIN files ON file = id WHERE path = ?"
        row = self.database.execute(query, (path,)).fetchone()
        return zlib.decompress(row[0]).decode(errors="replace") if row else None

    def load_encoder(self) -> None:
        """Loads the encoder of the index, which takes seconds; a UserError if it cannot be loaded."""
        if self.model is not None:
            self._encoder(self.model, self.truncate_dim)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Yields one view of the database for a whole search, read again only if the database has changed."""
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
        """Computes the similarity of every piece to the query; NaN without an embedding, or without their encoder."""
        missing = vectors.unencoded(self.database)
        if missing:
            _, pieces = self._counts()
            remedy = self.remedy or f"`{self.command()}` finishes"
            self.notices.append(f"{pieces - missing:,} of {pieces:,} pieces have embeddings; {remedy}")
        unknown = np.full(len(snapshot.slots), np.nan, np.float32)
        if (snapshot.slots < 0).all():
            return unknown
        name = snapshot.state["model"]
        try:
            encoder = self._encoder(name, snapshot.state["truncate_dim"])
            embedding = encoder.queries([query])[0]
            if encoder.identity != snapshot.state["identity"]:
                raise UserError(f"{name} has changed; `{self.command('--model', name)}` encodes with it as it is now")
        except UserError as error:
            self.notices.append(f"searching by words alone: {error}")
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
