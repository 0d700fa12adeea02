"""Lists the layouts that a folder of data may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from soft_trainer.data.folders import Files
from soft_trainer.data.layouts import beir, judged, tables
from soft_trainer.data.make_splits import Context
from soft_trainer.data.split import Split


class Layout(NamedTuple):
    """A layout of the files in a folder.

    Args:
        name: what messages call the layout. Judged queries are a split of this name.
        finds: returns True if a folder has this layout, perhaps beside others, from the names of its files.
        read: returns the splits, keyed by name. Errors are one line with the file and the row.
    """

    name: str
    finds: Callable[[Files], bool]
    read: Callable[[Files, Context], dict[str, Split]]


BEIR = Layout("BEIR", beir.finds, beir.read)
JUDGED = Layout(judged.NAME, judged.finds, judged.read)  # queries that are judged against a corpus of rows
TABLES = Layout("rows", tables.finds, tables.read)
LAYOUTS = (BEIR, JUDGED, TABLES)
