"""Runs a function over many items in several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from soft_trainer.terminal import Progress


def each_in_order(
    run: Callable[[Any], Any],
    items: Sequence,
    num_workers: int | None,
    unit: str,
    chunk: int,
    start: Callable[..., None] | None = None,
    arguments: tuple = (),
) -> Iterator[Any]:
    """Yields `run(item)` of every item in order, computed in processes, and shows how far they are.

    Args:
        num_workers: processes; None means one a CPU core. The results are the same for any number.
        unit: one item, in words.
        chunk: items that a process takes at once.
        start: called with `arguments` in every process before its first item.
    """
    workers = min(num_workers or os.cpu_count() or 1, -(-len(items) // chunk))
    with ExitStack() as stack:
        bar = stack.enter_context(Progress("Mining", len(items), unit))
        if workers > 1:
            pool = stack.enter_context(multiprocessing.Pool(workers, start, arguments))
            results = pool.imap(run, items, chunksize=chunk)
        else:
            if start:
                start(*arguments)
            results = map(run, items)
        for result in results:
            bar.update(1)
            yield result
