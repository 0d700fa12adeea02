"""Creates example queries for the start page from an index: a function's name, and sentences from documentation."""

from __future__ import annotations

import json
import random
import re
import sqlite3
import zlib
from collections.abc import Iterator

from soft_trainer.search.index.chunks import TEXT_LANGUAGES, first_paragraph
from soft_trainer.search.index.listing import maybe_vendored
from soft_trainer.search.index.store import files_below
from soft_trainer.search.searching import Search
from soft_trainer.source.names import identifier_words, is_test_path

EXAMPLES = 3
_FILES = 60  # the maximum number of files to read
_SENTENCE = re.compile(r"[A-Z]\w*(?:,? [\w'-]+){2,8}(?=\.|$)")  # without code, numbers in brackets, or addresses
_MARKS = re.compile(r"^[\s*/#]+", re.MULTILINE)  # of comments


def example_queries(index: Search) -> list[str]:
    """Returns up to three queries: a function's name, and the first sentences of functions' documentation.

    The same index always gives the same queries.
    """
    name = ""
    sentences: list[str] = []
    others: list[str] = []
    for member in index.members:
        for own, sentence in _functions(member.database, member.prefix):
            if not name:
                name = own
            elif sentence and sentence not in sentences:
                sentences.append(sentence)
            elif own not in (name, *others):
                others.append(own)
            if len(sentences) == EXAMPLES - 1:
                break
    chosen = [name, *sentences, *others]
    return [query for query in chosen if query][:EXAMPLES]


def _functions(database: sqlite3.Connection, prefix: str) -> Iterator[tuple[str, str]]:
    """Yields (name, sentence) for one function per file. `sentence` starts the function's documentation, or is ""."""
    files = files_below(database, prefix)
    query = "SELECT path, language, chunks, text FROM files JOIN contents ON file = id WHERE id = ?"
    for file in random.Random(0).sample(files, min(len(files), _FILES)):
        row = database.execute(query, (file,)).fetchone()
        if row[1] in TEXT_LANGUAGES or maybe_vendored(row[0]) or is_test_path(row[0], row[1]):
            continue
        lines = zlib.decompress(row[3]).split(b"\n")
        found = []
        for start, end, name in json.loads(row[2]):
            own = re.split(r"[.:#]+", name)[-1]
            if len(identifier_words(own)) > 1 and not own.startswith("_"):
                text = first_paragraph(b"\n".join(lines[start - 1 : end])).decode(errors="replace")
                sentence = _SENTENCE.match(" ".join(_MARKS.sub("", text).split()))
                if sentence:
                    found.append((own, sentence[0]))
                else:
                    found.append((own, ""))
        # A function with a sentence is a better example.
        yield from sorted(found, key=lambda pair: not pair[1])[:1]
