"""The index of one folder: built, opened, brought up to date and searched."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import zlib
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import soft_trainer
from soft_trainer.errors import UserError
from soft_trainer.search import ranking, store, vectors
from soft_trainer.search.listing import count_reasons, glob_pattern
from soft_trainer.search.terms import DEFINED
from soft_trainer.search.updating import apply_changes, find_changes, tidy
from soft_trainer.search.words import STOP_WORDS, WORD, terms, whole, words

# A filter by language finds these with it.
_RELATED = {
    "typescript": ("tsx",),
    "c++": ("cpp",),
    "c#": ("csharp",),
    "js": ("javascript",),
    "ts": ("typescript", "tsx"),
}

SHOWN_LINES = 4
MAX_WAIT = 1.0  # seconds that a search spends on embeddings of changed files


@dataclass(frozen=True)
class SearchResult:
    """A piece of a file: a function, a class or some lines.

    `path` is relative to the indexed folder, with `/`; lines count from 1, both included; `name` is that of the
    function or class, those around it in front, or empty; a larger `score` is better, within one query alone.
    """

    path: str
    start_line: int
    end_line: int
    language: str
    name: str
    score: float
    text: str

    def as_dict(self) -> dict:
        """The fields by name, as `--json` prints them."""
        return asdict(self) | {"score": round(self.score, 4)}

    def signature(self) -> str:
        """The line that defines the name, or the first line with a word."""
        lines = [line.strip() for line in self.text.split("\n") if WORD.search(line)] or [""]
        own = re.split(r"[.:#]+", self.name)[-1]
        named = re.compile(rf"(?<!\w){re.escape(own)}(?!\w)") if own else WORD
        return next(filter(named.search, lines), lines[0])[:200]

    def telling_lines(self, wanted: set[str]) -> list[tuple[int, str]]:
        """(number, text) of the first line with a word and of those that hold most of the wanted terms, in order."""
        lines = [
            (number, line) for number, line in enumerate(self.text.split("\n"), self.start_line) if WORD.search(line)
        ]
        hits = {
            number: len(wanted & {term for word in WORD.findall(line[:1000]) for term in terms(word)})
            for number, line in lines
        }
        best = sorted(lines[1:], key=lambda line: (-hits[line[0]], line[0]))[: SHOWN_LINES - 1]
        return sorted(lines[:1] + best)


class CodeIndex:
    """An index of one folder; see `build` and `open`.

    Example:
        >>> index = CodeIndex.build("my_repository")
        >>> for result in index.search("parse a date", limit=3):
        ...     print(f"{result.path}:{result.start_line} {result.name}")
    """

    def __init__(self, index_dir: str | os.PathLike[str], database: sqlite3.Connection):
        self.index_dir = Path(index_dir)
        self.database = database
        self.folder: str = store.get_meta(database, "folder")
        self.remedy = f"`soft-trainer index {self.folder}` finishes"
        self.encoders: dict[tuple, vectors.LazyEncoder] = {}
        self._cached_version: tuple | None = None
        version, self.notices = store.get_meta(database, "version"), []
        if version not in (None, soft_trainer.__version__):
            self.notices.append(f"version {version} of soft_trainer made this index; `soft-trainer index` renews it")

    @classmethod
    def build(
        cls,
        folder: str | os.PathLike[str],
        index_dir: str | os.PathLike[str] | None = None,
        model: str | os.PathLike[str] | None = None,
        progress: bool = False,
        truncate_dim: int | None = None,
    ) -> CodeIndex:
        """Index a folder, or bring its index up to date.

        Args:
            index_dir: the place of the index; by default in the user's cache directory.
            model: folder or Hub name of an encoder; None keeps the one that the index has, if it has one.
            truncate_dim: keep this many dimensions of every embedding; see `update`.

        Raises:
            UserError: no such folder, an index_dir that cannot be used, a model that cannot be loaded, or dimensions
                that its embeddings do not have.
        """
        real = os.path.realpath(folder)
        if not os.path.isdir(real):
            raise UserError(f"{folder}: no such folder; give the root of a source tree")
        target = Path(index_dir) if index_dir is not None else store.default_index_dir(real)
        if not (target / store.DATABASE).exists():
            _check_truncate_dim(truncate_dim, model)
        store.make_index_dir(target, real)
        with _disk_errors(target), store.write_lock(target):
            database = store.connect(target, create=True)
            kept = store.get_meta(database, "folder")
            if kept not in (None, real):
                raise UserError(f"{target}: it is the index of {kept}; choose another index_dir")
            with store.transaction(database):
                store.set_meta(database, "folder", real)
        index = cls(target, database)
        index.notices.clear()  # this version makes it
        index.update(model=model, progress=progress, truncate_dim=truncate_dim)
        with store.transaction(database):
            store.set_meta(database, "version", soft_trainer.__version__)
        return index

    @classmethod
    def open(cls, index_dir: str | os.PathLike[str]) -> CodeIndex:
        """Open an index that `build` made; a UserError where there is none, or none that can be trusted or read."""
        with _disk_errors(Path(index_dir)):
            database = store.connect(Path(index_dir))
            if store.get_meta(database, "folder") is None:
                raise UserError(f"{index_dir}: no index there; make one with `soft-trainer index DIR`")
        return cls(index_dir, database)

    def update(
        self,
        model: str | os.PathLike[str] | None = None,
        progress: bool = False,
        wait: bool = True,
        encode: bool = True,
        truncate_dim: int | None = None,
    ) -> bool:
        """Read again what changed in the folder since the last time; returns whether anything had.

        Args:
            model: another encoder than the one that the index has.
            wait: wait for another process that writes the index; else leave it to that one.
            encode: encode new pieces, where the index has an encoder.
            truncate_dim: keep this many dimensions of every embedding, for an encoder that was trained for it. None
                keeps the number that the index has of this encoder. Another number encodes every piece again.

        Raises:
            UserError: the folder is gone, the disk is full, the model cannot be loaded, or its embeddings have fewer
                dimensions.
        """
        if not os.path.isdir(self.folder):
            raise UserError(f"{self.folder}: the indexed folder is gone; search with --no_update, or index again")
        with _disk_errors(self.index_dir):
            changed = bool(find_changes(self.database, self.folder)) and self._update_words(progress, wait)
        if encode:
            self.encode(model, truncate_dim, progress, wait)
        return changed

    def _update_words(self, progress: bool, wait: bool) -> bool:
        with store.write_lock(self.index_dir, wait) as held:
            if not held:
                self.notices.append("another process is updating the index: this is what it holds now")
                return False
            changes = find_changes(self.database, self.folder)
            apply_changes(self.database, self.folder, changes, progress)
            # Texts of dead files may stand elsewhere now: until all are encoded, their embeddings are kept.
            if self.model is None or not vectors.unencoded(self.database):
                tidy(self.database)
        return bool(changes)

    def encode(
        self,
        model: str | os.PathLike[str] | None = None,
        truncate_dim: int | None = None,
        progress: bool = False,
        wait: bool = True,
    ) -> None:
        """Encode the pieces that have no embedding, where the index has an encoder. Arguments are those of `update`.

        Searches and updates of the words may go on meanwhile.
        """
        choice = self._encoder(model, truncate_dim)
        asked = model is not None or truncate_dim is not None
        if choice["model"] is None or not (asked or vectors.unencoded(self.database)):
            return
        with _disk_errors(self.index_dir), store.write_lock(self.index_dir, wait, store.ENCODING_LOCK) as held:
            if held:
                vectors.embed_pieces(self.database, self.index_dir, self._loaded(choice), progress)
                with store.write_lock(self.index_dir):
                    tidy(self.database)

    def refresh(self, encode: bool = True) -> None:
        """Bring the words up to date before a search, and the embeddings where that takes no more than a second."""
        try:
            self.update(progress=True, wait=False, encode=False)
        except UserError as error:
            self.notices.append(f"the index is as it was: {error}")
        if encode and self.model and vectors.seconds_to_encode(self.database) <= MAX_WAIT:
            with suppress(UserError):  # the search will say why
                self.encode(wait=False)

    def search(
        self,
        query: str,
        limit: int = 10,
        path: str | None = None,
        language: str | None = None,
        name: str | None = None,
        lexical: bool = False,
    ) -> list[SearchResult]:
        """Find the pieces that fit a query, best first. An empty query finds nothing.

        Args:
            query: a name, words, or a sentence.
            limit: the most results.
            path: only files that match this pattern: `src/**`, `*.py`, `**/views/*`.
            language: only files in this language.
            name: only functions and classes of this name; `*` stands for anything.
            lexical: leave the embeddings out, if there are any.
        """
        parsed = ranking.parse_query(query)
        if limit < 1 or not (parsed.terms or parsed.words):
            return []
        with _disk_errors(self.index_dir), self._snapshot():
            segments = self._segments
            if not segments.live.any():
                raise UserError(f"nothing is indexed of {self.folder}; run `soft-trainer index {self.folder}`")
            allowed = self._allowed(path, language, name)
            if allowed is not None and not allowed.any():
                return []
            similarity = None if lexical else self._similarity(query)
            scores = ranking.score(parsed, segments, self._postings, similarity)
            return [self._result(*pair) for pair in ranking.order_pieces(scores, segments, allowed, limit)]

    @property
    def model(self) -> str | None:
        """The encoder of the embeddings, None for a lexical index."""
        return self._kept_encoder["model"]

    @property
    def truncate_dim(self) -> int | None:
        """The number of dimensions that are kept of every embedding, None without a choice."""
        return self._kept_encoder["truncate_dim"]

    @property
    def _kept_encoder(self) -> dict:
        return vectors.encoder_of(store.get_meta(self.database, "vectors"))

    def _encoder(self, model: str | os.PathLike[str] | None, truncate_dim: int | None) -> dict:
        """Name and `truncate_dim` of the encoder to use; what is None stays as the index has it."""
        kept = self._kept_encoder
        name = kept["model"] if model is None else _model_name(model)
        if truncate_dim is None:
            truncate_dim = kept["truncate_dim"] if name == kept["model"] else None
        _check_truncate_dim(truncate_dim, name)
        return {"model": name, "truncate_dim": truncate_dim}

    def _loaded(self, encoder: dict) -> vectors.LazyEncoder:
        """The encoder of this name and `truncate_dim`, the same object each time."""
        key = encoder["model"], encoder["truncate_dim"]
        return self.encoders.setdefault(key, vectors.LazyEncoder(*key))

    def statistics(self) -> dict:
        """Counts of files, pieces, skipped files by reason, encoded pieces, and bytes on disk."""
        files, pieces = self.database.execute("SELECT count(*), coalesce(sum(count), 0) FROM files").fetchone()
        skipped = dict(count_reasons(dict(self.database.execute("SELECT path, reason FROM skipped"))))
        size = sum(entry.stat().st_size for entry in self.index_dir.iterdir() if entry.is_file())
        counts = {"files": files, "pieces": pieces, "skipped": skipped, "bytes": size, "model": self.model}
        counts |= {"truncate_dim": self.truncate_dim} if self.truncate_dim else {}
        return counts | ({"encoded": pieces - vectors.unencoded(self.database)} if self.model else {})

    def text_of(self, path: str) -> str | None:
        """The text of an indexed file, as it was when it was indexed; None for any other path."""
        row = self.database.execute(
            "SELECT text FROM contents JOIN files ON file = id WHERE path = ?", (path,)
        ).fetchone()
        return zlib.decompress(row[0]).decode(errors="replace") if row else None

    def load_encoder(self) -> None:
        """Load the encoder that the index has, which takes seconds; a UserError where it cannot be loaded."""
        if (state := store.get_meta(self.database, "vectors")) is not None:
            self._loaded(vectors.encoder_of(state)).identity  # noqa: B018, which loads it

    def close(self) -> None:
        """Close the database."""
        self.database.close()

    def __enter__(self) -> CodeIndex:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @contextmanager
    def _snapshot(self):
        """One view of the database for a whole search, with arrays that belong to it."""
        self.database.execute("BEGIN")
        try:
            version = (self.database.execute("PRAGMA data_version").fetchone()[0], self.database.total_changes)
            if version != self._cached_version:
                self._segments = store.load_segments(self.database)
                self._languages = store.get_meta(self.database, "languages", [])
                state = store.get_meta(self.database, "vectors")
                self._vectors = vectors.open_vectors(self.index_dir, state) if state else None
                if state:
                    self._slots = vectors.piece_slots(
                        self.database, self._segments.firsts, len(self._segments.lengths)
                    )
                self._cached_version = version
            yield
        finally:
            self.database.execute("COMMIT")

    def _postings(self, term: str) -> tuple[np.ndarray, np.ndarray]:
        query = "SELECT width, pieces, counts FROM postings WHERE term = ? ORDER BY segment"
        rows = self.database.execute(query, (term,)).fetchall()
        if not rows:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        pieces = np.concatenate([store.unpack(width, blob) for width, blob, _ in rows])
        counts = np.frombuffer(b"".join(counts for _, _, counts in rows), np.uint8).astype(np.float32)
        if not self._segments.live.all():
            live = self._segments.live[self._segments.owners[pieces]]
            pieces, counts = pieces[live], counts[live]
        return pieces, counts

    def _similarity(self, query: str) -> np.ndarray | None:
        """The similarity of every piece to the query, None where there are no embeddings or their model is gone."""
        state = store.get_meta(self.database, "vectors")
        if state is None:
            return None
        if missing := vectors.unencoded(self.database):
            pieces = self.database.execute("SELECT sum(count) FROM files").fetchone()[0]
            self.notices.append(f"{pieces - missing:,} of {pieces:,} pieces have embeddings; {self.remedy}")
        if not len(self._vectors):
            return None
        try:
            encoder = self._loaded(vectors.encoder_of(state))
            embedding, identity = encoder.queries([query])[0], encoder.identity
        except UserError as error:
            self.notices.append(f"searching by words alone: {error}")
            return None
        if identity != state.get("identity"):
            name = state["model"]
            self.notices.append(
                f"searching by words alone: {name} has changed; `soft-trainer index {self.folder} --model {name}` "
                "encodes with it as it is now"
            )
            return None
        similarity = np.append(vectors.similarities(self._vectors, embedding), np.float32(np.nan))
        return similarity[self._slots]

    def _allowed(self, path: str | None, language: str | None, name: str | None) -> np.ndarray | None:
        """The pieces that the filters leave, bool[pieces]; None without a filter."""
        segments = self._segments
        if path is None and language is None and name is None:
            return None
        files = segments.live.copy()
        if language is not None:
            wanted = {language.lower(), *_RELATED.get(language.lower(), ())}
            numbers = [number for number, known in enumerate(self._languages) if known in wanted]
            if not numbers:
                raise UserError(f"language={language!r}: the index has {', '.join(sorted(self._languages))}")
            files &= np.isin(segments.languages, numbers)
        if path is not None:
            pattern = glob_pattern(path)
            matching = [
                file for file, own in self.database.execute("SELECT id, path FROM files") if pattern.fullmatch(own)
            ]
            chosen = np.zeros(len(files), bool)
            chosen[matching] = True
            files &= chosen
        pieces = files[segments.owners]
        if name is not None:
            pieces &= self._named(name)
        return pieces

    def _named(self, name: str) -> np.ndarray:
        """The pieces that define a name, which may hold `*`."""
        named = np.zeros(len(self._segments.lengths), bool)
        key = DEFINED + whole(re.split(r"[.:#]+", name)[-1])
        if "*" not in key:
            named[self._postings(key)[0]] = True
            return named
        pattern = re.compile(".*".join(re.escape(part) for part in key.split("*")))
        terms = self.database.execute("SELECT DISTINCT term FROM postings WHERE term >= '=' AND term < '>'").fetchall()
        for (term,) in terms:
            if pattern.fullmatch(term):
                named[self._postings(term)[0]] = True
        return named

    def _result(self, piece: int, score: float) -> SearchResult:
        file = int(self._segments.owners[piece])
        query = "SELECT path, language, pieces, text FROM files JOIN contents ON file = id WHERE id = ?"
        path, language, pieces, text = self.database.execute(query, (file,)).fetchone()
        start, end, name = json.loads(pieces)[piece - int(self._segments.firsts[file])]
        lines = zlib.decompress(text).split(b"\n", end)[start - 1 : end]
        return SearchResult(path, start, end, language, name, score, b"\n".join(lines).decode(errors="replace"))


def check_query(query: str, limit: int) -> None:
    """Raises a UserError for an empty query or a limit below 1."""
    if not query.strip():
        raise UserError('an empty query; say what to look for, such as "parse a date"')
    if limit < 1:
        raise UserError(f"limit={limit}: 1 or more is expected")


def query_terms(query: str) -> set[str]:
    """The terms that are marked in a result."""
    return {term for word in words(query) if word.lower() not in STOP_WORDS for term in terms(word)}


def _check_truncate_dim(truncate_dim: int | None, model: str | os.PathLike[str] | None) -> None:
    """Refuses dimensions without an encoder, and fewer than one."""
    if truncate_dim is not None and model is None:
        raise UserError(f"truncate_dim={truncate_dim}: the index has no encoder; name one with --model")
    if truncate_dim is not None and truncate_dim < 1:
        raise UserError(f"truncate_dim={truncate_dim}: must be 1 or more")


def _model_name(model: str | os.PathLike[str]) -> str:
    """A folder as a whole path, so that it is found from anywhere; else a name on the Hub."""
    return os.path.realpath(model) if os.path.isdir(model) else os.fspath(model)


@contextmanager
def _disk_errors(index_dir: Path):
    """Turn a disk that is full or cannot be written into one line."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise UserError(
            f"{index_dir}: {error}; make room or choose another index_dir. What was committed before is still there"
        ) from error
