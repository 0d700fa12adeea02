"""One index or several as a search sees them: as one, with joined numbers of files and pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.search import ranking
from soft_trainer.search.memory import Votes
from soft_trainer.search.results import SearchResult
from soft_trainer.search.snapshot import Snapshot
from soft_trainer.search.store import Segments
from soft_trainer.search.words import source_words, terms

# A filter by language finds these with it.
_RELATED = {"typescript": ["tsx"], "c++": ["cpp"], "c#": ["csharp"], "js": ["javascript"], "ts": ["typescript", "tsx"]}
SIMILAR_TERMS = 16  # that stand for a piece in the search for similar ones


class JoinedSegments:
    """The segments of several indexes, with the attributes of `Segments`."""

    def __init__(self, parts: tuple[Segments, ...]):
        self.parts = parts
        self.first_files = np.cumsum([0, *(len(part.languages) for part in parts)])
        self.first_pieces = np.cumsum([0, *(len(part.lengths) for part in parts)])
        self.lengths, self.kinds, self.languages, self.live = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("lengths", "kinds", "languages", "live")
        )
        self.traits = np.concatenate([part.traits for part in parts])
        self.owners = np.concatenate([part.owners + first for part, first in self._with(self.first_files)])
        firsts = [part.firsts[:-1] + first for part, first in self._with(self.first_pieces)]
        self.firsts = np.concatenate([*firsts, self.first_pieces[-1:]])

    def postings(self, term: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns what `Segments.postings` returns, with joined numbers."""
        found = [(part.postings(term), first) for part, first in self._with(self.first_pieces)]
        pieces = np.concatenate([pieces + first for (pieces, _), first in found])
        return pieces, np.concatenate([counts for (_, counts), _ in found])

    def _with(self, firsts: np.ndarray) -> list[tuple[Segments, int]]:
        return list(zip(self.parts, firsts.tolist(), strict=False))


@lru_cache(maxsize=2)
def _joined(parts: tuple[Segments, ...]) -> Segments | JoinedSegments:
    return parts[0] if len(parts) == 1 else JoinedSegments(parts)


class View:
    """Snapshots of indexes, as one.

    Args:
        snapshots: by label, which is put in front of paths; the label of a single index is empty.
    """

    def __init__(self, snapshots: Mapping[str, Snapshot]):
        self.snapshots = dict(snapshots)
        self.segments = _joined(tuple(snapshot.segments for snapshot in self.snapshots.values()))
        sizes = [len(snapshot.segments.lengths) for snapshot in self.snapshots.values()]
        self.first_pieces = np.cumsum([0, *sizes]).tolist()

    def allowed(self, path: str | None, language: str | None, name: str | None) -> np.ndarray | None:
        """Returns the pieces that the filters leave, bool[pieces]; None without a filter.

        Raises:
            UserError: no file is in this language.
        """
        if path is None and language is None and name is None:
            return None
        languages = None
        if language is not None:
            known = {one for snapshot in self.snapshots.values() for one in snapshot.languages}
            languages = known & {language.lower(), *_RELATED.get(language.lower(), ())}
            if not languages:
                raise UserError(f"language={language!r}: the index has {', '.join(sorted(known))}")
        parts = [snapshot.allowed(path, languages, name, label) for label, snapshot in self.snapshots.items()]
        return np.concatenate(parts)

    def search(
        self,
        query: ranking.Query,
        similarity: np.ndarray | None,
        allowed: np.ndarray | None,
        limit: int,
        votes: Sequence[Votes] = (),
    ) -> tuple[list[SearchResult], bool]:
        """Returns the best results, and whether a word of the query was found, be it by commits."""
        shares = np.concatenate([part.shares for part in votes]) if votes else None
        scores = ranking.score(query, self.segments, similarity, shares, self._similarity_weight())
        best = ranking.order_pieces(scores, self.segments, allowed, limit)
        return [self.result(piece, score, votes) for piece, score in best], scores.matched

    def _similarity_weight(self) -> float:
        """Returns the weight of the encoder, which is the same in all indexes that can be compared."""
        return min(snapshot.similarity_weight for snapshot in self.snapshots.values())

    def votes(self, query: ranking.Query) -> list[Votes]:
        """Returns the weighted votes of each index's commits."""
        return [snapshot.memory.weighted_votes(query) for snapshot in self.snapshots.values()]

    def result(self, piece: int, score: float, votes: Sequence[Votes] = ()) -> SearchResult:
        """Reads a piece with its text and the commits that voted for it."""
        number = int(np.searchsorted(self.first_pieces, piece, "right")) - 1
        label, snapshot = list(self.snapshots.items())[number]
        own = piece - self.first_pieces[number]
        commits = votes[number].commits.get(own, ()) if votes else ()
        return snapshot.result(own, score, label, commits)

    def piece_at(self, path: str, line: int) -> int:
        """Finds the piece that holds a line of a file.

        Raises:
            UserError: no such file, or no piece there.
        """
        for (label, snapshot), first in zip(self.snapshots.items(), self.first_pieces, strict=False):
            if path.startswith(label):
                piece = snapshot.piece_at(path.removeprefix(label), line)
                if piece is not None:
                    return first + piece
        raise UserError(f"{path}:{line}: not in the index; give path and line as a search does")

    def similarity_to_piece(self, piece: int) -> np.ndarray | None:
        """Computes the similarity of all pieces to one of them; None if it has no embedding."""
        number = int(np.searchsorted(self.first_pieces, piece, "right")) - 1
        snapshots = list(self.snapshots.values())
        embedding = snapshots[number].embedding(piece - self.first_pieces[number])
        if embedding is None:
            return None
        made_by = snapshots[number].state["identity"]
        parts = []
        for snapshot in snapshots:
            same = snapshot.state is not None and snapshot.state.get("identity") == made_by
            unknown = np.full(len(snapshot.segments.lengths), np.nan, np.float32)
            parts.append(snapshot.similarity(embedding) if same else unknown)
        return np.concatenate(parts)

    def query_like(self, result: SearchResult) -> ranking.Query:
        """Makes a query of the words that tell a piece from most others and that some others have."""
        total = len(self.segments.lengths)
        counts = Counter(term for word in source_words(result.text.encode()) for term in terms(word))
        weights = {}
        for term, count in counts.items():
            others = len(self.segments.postings(term)[0]) - 1
            if others > 0:
                weights[term] = count / (count + 1) * np.log(total / others)
        chosen = sorted(weights, key=lambda term: (-weights[term], term))[:SIMILAR_TERMS]
        return ranking.Query("sentence", (), dict.fromkeys(chosen, 1.0))
