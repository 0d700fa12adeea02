"""Searches in one index, or in several as if they were one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.search import ranking
from soft_trainer.search.results import SearchResult
from soft_trainer.search.view import View

if TYPE_CHECKING:
    from soft_trainer.search.index import CodeIndex


class CodeIndexes(AbstractContextManager):
    """Several indexes that are searched as if they were one: their scores can be compared.

    The paths of results start with the name of their folder, or with its whole path where two have one name.

    Example:
        >>> both = CodeIndexes([CodeIndex.build("server"), CodeIndex.build("client")])
        >>> both.search("parse a date")[0].path
        'server/dates.py'
    """

    def __init__(self, indexes: Sequence[CodeIndex]):
        self.members = list(indexes)
        if not self.members:
            raise UserError("indexes: one or more are expected")
        names = Counter(os.path.basename(index.folder) for index in self.members)
        self._by_label: dict[str, CodeIndex] = {}
        for index in self.members:
            name = os.path.basename(index.folder)
            label = name if name and names[name] == 1 else index.folder
            self._by_label[f"{label.rstrip('/')}/"] = index

    def __repr__(self) -> str:
        return f"CodeIndexes({self.members!r})"

    @property
    def folder(self) -> str:
        """The folders, for people."""
        return ", ".join(index.folder for index in self.members)

    @property
    def notices(self) -> list[str]:
        """The notices of all indexes, each once."""
        return list(dict.fromkeys(notice for index in self.members for notice in index.notices))

    def search(
        self,
        query: str,
        limit: int = 10,
        path: str | None = None,
        language: str | None = None,
        name: str | None = None,
        lexical: bool = False,
    ) -> list[SearchResult]:
        """Finds the pieces that answer a query; see `CodeIndex.search`. `path` may start with the name of a folder."""
        return search(self._by_label, query, limit, lexical, path=path, language=language, name=name)

    def similar(self, path: str, line: int, limit: int = 10, lexical: bool = False) -> list[SearchResult]:
        """Finds pieces like the one that holds a line of a file; see `CodeIndex.similar`."""
        return similar(self._by_label, path, line, limit, lexical)

    def update(self, progress: bool = False) -> bool:
        """Brings all indexes up to date; returns True if any had changed."""
        return any([index.update(progress=progress) for index in self.members])

    def refresh(self, encode: bool = True) -> None:
        """Brings all indexes up to date before a search; see `CodeIndex.refresh`."""
        for index in self.members:
            index.refresh(encode)

    def languages(self) -> list[str]:
        """Lists the languages of all files, the most common of each index first."""
        return list(dict.fromkeys(language for index in self.members for language in index.languages()))

    def text_of(self, path: str) -> str | None:
        """Returns the text of an indexed file; None for any other path."""
        for label, index in self._by_label.items():
            text = index.text_of(path.removeprefix(label)) if path.startswith(label) else None
            if text is not None:
                return text
        return None

    def full_path(self, path: str) -> str:
        """Returns where a file of a result lies."""
        for label, index in self._by_label.items():
            if path.startswith(label):
                return index.full_path(path.removeprefix(label))
        return path

    def close(self) -> None:
        """Closes all indexes."""
        for index in self.members:
            index.close()

    def __exit__(self, *_) -> None:
        self.close()


def search(
    indexes: Mapping[str, CodeIndex],
    query: str,
    limit: int,
    lexical: bool,
    commits: bool = True,
    **filters: str | None,
) -> list[SearchResult]:
    """Finds the pieces that answer a query, best first. An empty query finds nothing.

    Args:
        indexes: by the label that is put in front of their paths.

    Raises:
        UserError: nothing is indexed, or no file is in the language of the filter.
    """
    parsed = ranking.parse_query(query)
    if limit < 1 or not (parsed.terms or parsed.words):
        return []
    with ExitStack() as stack:
        view = _view(indexes, stack)
        allowed = view.allowed(**filters)
        if allowed is not None and not allowed.any():
            return []
        similarity = None if lexical else _similarity(indexes, view, query)
        results, matched = view.search(parsed, similarity, allowed, limit, view.votes(parsed) if commits else ())
        return results if matched or _stands_out(indexes, view, similarity) else []


def similar(indexes: Mapping[str, CodeIndex], path: str, line: int, limit: int, lexical: bool) -> list[SearchResult]:
    """Finds pieces like the one that holds a line of a file, by its rare words and its embedding; best first.

    Raises:
        UserError: no such file in the indexes, or no piece there.
    """
    with ExitStack() as stack:
        view = _view(indexes, stack)
        piece = view.piece_at(path, line)
        query = view.query_like(view.result(piece, 0.0))
        similarity = None if lexical else view.similarity_to_piece(piece)
        others = np.ones(len(view.segments.lengths), bool)
        others[piece] = False
        results, _ = view.search(query, similarity, others, limit)
        return results


def _view(indexes: Mapping[str, CodeIndex], stack: ExitStack) -> View:
    """Opens a view, which ends with the stack; a UserError if nothing is indexed."""
    view = View({label: stack.enter_context(index.snapshot()) for label, index in indexes.items()})
    empty = not view.segments.live.any()
    if empty:
        folders = ", ".join(index.folder for index in indexes.values())
        commands = "; ".join(f"`{index.command('--skipped')}`" for index in indexes.values())
        raise UserError(f"nothing is indexed of {folders}; {commands} indexes it and lists what is left out")
    return view


def _similarity(indexes: Mapping[str, CodeIndex], view: View, query: str) -> np.ndarray | None:
    """Computes the similarity of all pieces to a query; None without embeddings, or if they cannot be compared."""
    parts = []
    encoders = set()
    for label, snapshot in view.snapshots.items():
        part = indexes[label].similarity_to(query, snapshot)
        if part is None:
            part = np.full(len(snapshot.segments.lengths), np.nan, np.float32)
        else:
            encoders.add(snapshot.state["identity"])
        parts.append(part)
    if len(encoders) > 1:
        first = next(iter(indexes.values()))
        first.notices.append("searching by words alone: the indexes have different encoders, so name one with --model")
    return np.concatenate(parts) if len(encoders) == 1 else None


def _stands_out(indexes: Mapping[str, CodeIndex], view: View, similarity: np.ndarray | None) -> bool:
    """Returns True if some piece is more similar to the query than every piece is to random letters."""
    if similarity is None:
        return False
    for (label, snapshot), first in zip(view.snapshots.items(), view.first_pieces, strict=False):
        own = similarity[first : first + len(snapshot.segments.lengths)]
        if not np.isnan(own).all() and np.nanmax(own) > indexes[label].noise(snapshot):
            return True
    return False
