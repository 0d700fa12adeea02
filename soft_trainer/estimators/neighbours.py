"""Finds the functions most similar to each query, exactly or, if there are many functions, with an approximate index.

Memory grows linearly with the number of rows. The result is deterministic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from soft_trainer.data.array_cache import load_arrays, store_arrays
from soft_trainer.data.split import RelevantCodes
from soft_trainer.errors import UserError, extra_needed
from soft_trainer.system import distributed
from soft_trainer.system.fingerprints import fingerprint
from soft_trainer.system.terminal import print_on_main, progress_bar

EXACT_ROWS = 50_000  # up to this many functions, every query is compared with every function
SMALLEST_INDEX = 1000  # with fewer functions, no index is built
ENTRIES = 1 << 24  # similarities in memory at once
MOST_ENTRIES = 1 << 30  # the same on a GPU with much memory
GROUP = 64  # columns in a group
CELLS = 2.0  # cells of the index, as a multiple of the square root of the number of functions
FITTED = 64  # functions per cell on which k-means runs
# The number of cells to search is tuned on this many queries, each with this many neighbours.
SAMPLE = 512
SAMPLE_K = 10
RECALL = 0.95  # the fraction of the sample's neighbours that must be found
FETCHED = 4  # candidates to score exactly, as a multiple of the number of neighbours
MOST_FETCHED = 4096  # the most candidates to fetch for a query if nearly all are excluded
SEARCHED_AT_ONCE = 4096  # queries to search the index for at once
ADDED_AT_ONCE = 1 << 16  # functions to add to the index at once


@dataclass(frozen=True)
class Neighbours:
    """The k functions most similar to each of n queries, except the query's positive.

    Args:
        rows (`int64[n, k]`): the indices of the functions, nearest first, padded with -1.
        scores (`float32[n, k]`): the similarities of the functions, padded with -inf.
        own (`float32[n]`): the similarity between each query and its positive.
    """

    rows: np.ndarray
    scores: np.ndarray
    own: np.ndarray

    @classmethod
    def joined(cls, parts: Iterable[Neighbours], progress: str | None = None, rows: int = 0) -> Neighbours:
        """Concatenates the neighbours of several blocks of queries.

        Args:
            parts: the neighbours of each block.
            progress: the label of a progress bar, or None for no bar.
            rows: the total number of queries, for the progress bar.
        """
        found = []
        with progress_bar(progress, rows, "row") as bar:
            for part in parts:
                found.append((part.rows, part.scores, part.own))
                bar.update(len(part.own))
        return cls(*map(np.concatenate, zip(*found, strict=True)))


@dataclass(frozen=True)
class Excluded:
    """The functions that must not be returned as neighbours of a query: its positive and other relevant functions.

    Args:
        own (`int64[n]`): the positive of each query.
        answers: a look-up of other relevant functions. If None, only the positive is excluded.
    """

    own: np.ndarray
    answers: RelevantCodes | None = None

    @property
    def key(self) -> list:
        """The arrays that determine the excluded functions, for the cache key of neighbours."""
        return [self.own, None if self.answers is None else self.answers.key]

    def drop_from(self, scores: Tensor, queries: np.ndarray) -> Tensor:
        """Sets the scores of excluded functions to -inf, in place.

        Args:
            scores: Tensor[B, C], the scores of all functions for B queries.
            queries: int64[B], the indices of the queries.

        Returns:
            The original scores of the queries' positives, Tensor[B].
        """
        line = torch.arange(len(queries))
        own = torch.from_numpy(self.own[queries])
        own_scores = scores[line, own].float().cpu()
        scores[line, own] = -torch.inf
        if self.answers is not None:
            positions, codes = self.answers.everywhere(queries)
            scores[torch.from_numpy(positions), torch.from_numpy(codes)] = -torch.inf
        return own_scores

    def contain(self, queries: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Tests whether functions are excluded for their query: int64[B] and int64[B, K] give bool[B, K]."""
        own = codes == self.own[queries][:, None]
        return own if self.answers is None else own | self.answers.contain(queries, codes)

    def among(self, codes: np.ndarray) -> Excluded:
        """Renumbers the exclusions for a subset of the functions. The subset is sorted and contains all positives."""
        answers = self.answers and self.answers.restricted(codes)
        return Excluded(np.searchsorted(codes, self.own), answers)


def nearest_rows(
    queries: np.ndarray,
    codes: np.ndarray,
    k: int,
    excluded: Excluded,
    *,
    exact_up_to: int = EXACT_ROWS,
    progress: str | None = None,
    device: str | torch.device = "cpu",
    rows: np.ndarray | None = None,
) -> Neighbours:
    """Finds the k functions with the largest dot product with each query's vector.

    A GPU always computes all products. So does a CPU for up to `exact_up_to` functions. For more functions, a CPU
    takes candidates from a faiss index and scores them exactly. The search visits enough cells of the index to find 95
    % of the ten nearest functions for a sample of queries, and the recall is printed.

    Args:
        queries: [n, d], float32 or float16, in memory or memory-mapped.
        codes: [m, d], like `queries`.
        k: the number of neighbours per query.
        excluded: the functions that must not be returned.
        progress: the label of the progress bar, or None for no bar.
        device: the device on which products are computed.
        rows: the queries to find neighbours of, on a GPU. By default, all queries.
    """
    # A GPU computes all products between a million queries and a million functions in minutes.
    if len(codes) <= max(exact_up_to, SMALLEST_INDEX) or torch.device(device).type != "cpu":
        score = _dot_products(queries, codes, device)
        rows = np.arange(len(queries)) if rows is None else rows
        return exact_neighbours(score, rows, len(codes), k, excluded, progress, entries=entries_on(device))
    return _through_index(queries, codes, k, excluded, progress)


def entries_on(device: str | torch.device) -> int:
    """Returns how many similarities may be in memory at once. On a GPU, that is a sixteenth of its free bytes."""
    if torch.device(device).type != "cuda":
        return ENTRIES
    free, _ = torch.cuda.mem_get_info(device)
    return max(min(free // 16, MOST_ENTRIES), ENTRIES)


def cached_neighbours(
    folder: str | Path | None,
    inputs: Sequence,
    k: int,
    build: Callable[..., Neighbours],
    shared: int | None = None,
) -> Neighbours:
    """Returns the neighbours cached for `inputs` and k, or calls `build` and caches the result.

    By default, only the main process calls `build`, so that neighbours do not depend on the number of processes. The
    other processes memory-map the files if they share the folder, and otherwise receive the arrays.

    Args:
        folder: the cache folder. If None, neighbours stay in memory only.
        inputs: everything that the neighbours depend on, such as the embeddings.
        build: returns the neighbours of all queries or, if `shared` is set, of the queries in its argument, int64[n].
        shared: the number of queries, if each process finds the neighbours of some, on its GPU.

    Raises:
        UserError: `build` raised a UserError. Every process raises the same error.
    """
    key = fingerprint(k, list(inputs))
    neighbours = None
    rank, processes = distributed.rank_and_world_size()
    stored = load_arrays(folder, key) if rank == 0 else None
    if stored is not None:
        neighbours = Neighbours(**stored)
    together = shared is not None and distributed.any_process(rank == 0 and stored is None)
    if together:
        found = build(np.arange(shared)[distributed.shard(shared, rank, processes)])
        parts = []
        for part in vars(found).values():
            local = torch.from_numpy(part).to(distributed.device())
            parts.append(distributed.gather(local).cpu().numpy())
        neighbours = Neighbours(*parts)

    def complete() -> None:
        nonlocal neighbours
        if neighbours is None:
            neighbours = build()
        if stored is None and folder is not None:
            store_arrays(folder, key, vars(neighbours))

    distributed.on_main(complete)
    kept = load_arrays(folder, key)
    if not distributed.any_process(kept is None):
        return Neighbours(**kept)
    return neighbours if together else distributed.from_main(neighbours)


def _dot_products(queries: np.ndarray, codes: np.ndarray, device) -> Callable[[np.ndarray], Tensor]:
    everything = _vectors(codes, slice(None), device)
    return lambda block: _vectors(queries, block, device) @ everything.T


def _vectors(values: np.ndarray, rows, device) -> Tensor:
    chosen = np.asarray(values[rows], dtype=np.float32)
    # Torch warns about read-only memory, such as a memory-mapped file.
    return torch.from_numpy(chosen if chosen.flags.writeable else chosen.copy()).to(device)


def exact_neighbours(
    score: Callable[[np.ndarray], Tensor],
    queries: np.ndarray,
    codes: int,
    k: int,
    excluded: Excluded,
    progress: str | None = None,
    *,
    above: float = -np.inf,
    entries: int = ENTRIES,
    at_once: int = 1,
) -> Neighbours:
    """Finds the neighbours of selected queries by scoring every function.

    Args:
        score: computes the scores of a block of queries, Tensor[block, codes]. The result may be overwritten.
        queries: the indices of the queries.
        codes: the number of functions.
        above: only functions with a higher score can be neighbours.
        entries: the maximum number of scores that each thread keeps in memory.
        at_once: the number of blocks to score at the same time.
    """

    def nearest(block: np.ndarray) -> Neighbours:
        """Finds the neighbours of a block of queries."""
        scores = score(block)
        own = excluded.drop_from(scores, block)
        values, columns = (part.cpu() for part in _largest(scores, k))
        values = values.float().masked_fill(values <= above, -torch.inf)
        return _padded(columns, values, own, k)

    with threads(at_once) as pool:
        return Neighbours.joined(pool.map(nearest, blocks(queries, codes, entries)), progress, len(queries))


@contextlib.contextmanager
def threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """Starts threads that compute at the same time. Several threads use one core each."""
    before = torch.get_num_threads()
    alone = {"initializer": torch.set_num_threads, "initargs": (1,)} if number > 1 else {}
    try:
        with ThreadPoolExecutor(number, **alone) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def _padded(codes: Tensor, scores: Tensor, own: Tensor, k: int) -> Neighbours:
    """Turns functions and scores, best first, into `Neighbours`. Drops scores of -inf, and pads to k."""
    missing = (0, k - scores.shape[1])
    codes = F.pad(codes.masked_fill(scores == -torch.inf, -1), missing, value=-1)
    return Neighbours(codes.numpy(), F.pad(scores, missing, value=-torch.inf).numpy(), own.numpy())


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns `scores.topk(k)`, but faster: it searches only the k groups of columns with the largest maxima."""
    rows, width = scores.shape
    groups = width // GROUP
    if groups <= k:
        return scores.topk(min(k, width), dim=1)
    best = scores[:, : groups * GROUP].unflatten(1, (groups, GROUP)).amax(2).topk(k, sorted=False).indices
    member = torch.arange(GROUP, device=scores.device)
    rest = torch.arange(groups * GROUP, width, device=scores.device)
    columns = torch.cat([(best[:, :, None] * GROUP + member).flatten(1), rest.expand(rows, -1)], dim=1)
    values, best = scores.gather(1, columns).topk(k, dim=1)
    return values, columns.gather(1, best)


def _through_index(queries, codes, k, excluded, progress) -> Neighbours:
    """Finds all queries' neighbours by exact scoring of candidates from an index of compressed vectors."""
    generator = np.random.default_rng(0)
    index = _index(codes, generator)
    sample = np.sort(generator.choice(len(queries), min(SAMPLE, len(queries)), replace=False))
    expected = exact_neighbours(_dot_products(queries, codes, "cpu"), sample, len(codes), SAMPLE_K, excluded).rows
    search = partial(_search, index, queries, codes, excluded)
    while True:
        recall = recall_of(search(sample, SAMPLE_K).rows, expected)
        if recall >= RECALL or index.nprobe >= index.nlist:
            break
        index.nprobe *= 2
    print_on_main(
        f"neighbours among {len(codes):,} functions: recall@{SAMPLE_K} {recall:.3f} on {len(sample)} queries"
    )
    parts = (search(block, k) for block in blocks(np.arange(len(queries)), 1, SEARCHED_AT_ONCE))
    return Neighbours.joined(parts, progress, len(queries))


def _index(codes: np.ndarray, generator: np.random.Generator):
    """Builds a faiss index of all functions: an inverted file with k-means cells and four bits per two dimensions."""
    try:
        import faiss  # an optional dependency
    except ImportError as error:
        what = f"finding neighbours among {len(codes):,} functions on a CPU"
        raise UserError(extra_needed(what, "faiss")) from error
    faiss.omp_set_num_threads(distributed.cores())
    width = codes.shape[1]
    cells = int(CELLS * len(codes) ** 0.5)
    coding = "Flat" if width % 2 else f"PQ{width // 2}x4fs"
    index = faiss.index_factory(width, f"IVF{cells},{coding}", faiss.METRIC_INNER_PRODUCT)
    index.cp.niter = 10
    index.cp.min_points_per_centroid = 1
    index.cp.max_points_per_centroid = FITTED
    sample = np.sort(generator.choice(len(codes), min(FITTED * cells, len(codes)), replace=False))
    index.train(_vectors(codes, sample, "cpu").numpy())
    for start in range(0, len(codes), ADDED_AT_ONCE):
        index.add(_vectors(codes, slice(start, start + ADDED_AT_ONCE), "cpu").numpy())
    index.nprobe = min(8, cells)
    return index


def _search(index, queries, codes, excluded, rows: np.ndarray, k: int, fetched: int | None = None) -> Neighbours:
    """Finds the neighbours of the queries `rows` with an index. Fetches more candidates if too many are excluded."""
    fetched = min(fetched or FETCHED * (k + 1), len(codes))
    query = _vectors(queries, rows, "cpu")
    found = index.search(query.numpy(), fetched)[1]
    parts = []
    for part in blocks(np.arange(len(rows)), fetched * codes.shape[1], ENTRIES):
        block = rows[part]
        near = found[part]
        vectors = _vectors(codes, near.clip(0).reshape(-1), "cpu").view(*near.shape, -1)
        scores = torch.bmm(vectors, query[part, :, None])[:, :, 0]
        unfit = (near < 0) | excluded.contain(block, near.clip(0))
        scores, columns = scores.masked_fill(torch.from_numpy(unfit), -torch.inf).topk(min(k, fetched), dim=1)
        own = (query[part] * _vectors(codes, excluded.own[block], "cpu")).sum(1)
        parts.append(_padded(torch.from_numpy(near).gather(1, columns), scores, own, k))
    nearest = Neighbours.joined(parts)
    short = np.flatnonzero(nearest.rows[:, -1] < 0)
    if len(short) and fetched < min(len(codes), MOST_FETCHED):
        cells = index.nprobe
        index.nprobe = min(4 * index.nprobe, index.nlist)
        more = _search(index, queries, codes, excluded, rows[short], k, 4 * fetched)
        index.nprobe = cells
        nearest.rows[short] = more.rows
        nearest.scores[short] = more.scores
    return nearest


def recall_of(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the fraction of the expected neighbours, int[n, k] padded with -1, that were found."""
    pairs = zip(found.tolist(), expected.tolist(), strict=True)
    return sum(len(set(row) & set(best) - {-1}) for row, best in pairs) / max(int((expected >= 0).sum()), 1)


def blocks(rows: np.ndarray, width: int, entries: int) -> Iterator[np.ndarray]:
    """Splits `rows` into blocks, so that a matrix [block, width] has at most `entries` entries."""
    size = max(1, entries // max(width, 1))
    return (rows[start : start + size] for start in range(0, len(rows), size))
