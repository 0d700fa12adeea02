"""The codes most similar to the query of each training row: exactly, or through cells of alike codes where there are
many. Memory is linear in the rows, and the same input and seed give the same neighbours."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import xxhash
from scipy import sparse
from sklearn.cluster import MiniBatchKMeans
from torch import Tensor
from tqdm.auto import tqdm
from transformers.utils import logging

from soft_trainer import distributed
from soft_trainer.errors import UserError
from soft_trainer.files import write_json, written_aside

logger = logging.get_logger(__name__)

EXACT_ROWS = 50_000  # codes up to which every query is compared with every code
ENTRIES = 1 << 24  # similarities held at once
CELLS = 2.0  # cells for each square root of the number of codes
FITTED = 64  # codes a cell that k-means looks at
SAMPLE, SAMPLE_K = 512, 10  # queries, and neighbours of each, by which the number of cells to look into is chosen
RECALL = 0.93  # share of the sample's neighbours that the cells must hold
KEY_ROWS = 1 << 16  # rows of an array that its key reads at once
COMMON = 0.05  # share of the documents above which a term is multiplied as a dense column


@dataclass(frozen=True)
class Neighbours:
    """The k codes most similar to the query of each of n rows, the row's own code left out.

    Args:
        rows (`int64[n, k]`): numbers of the codes, nearest first; -1 where a row has fewer.
        scores (`float32[n, k]`): their similarities; -inf where a row has fewer.
        own (`float32[n]`): the similarity of the row's query to its own code.
    """

    rows: np.ndarray
    scores: np.ndarray
    own: np.ndarray


def nearest_rows(
    queries: np.ndarray,
    codes: np.ndarray | None = None,
    k: int = 32,
    *,
    text_ids: Sequence[np.ndarray] = (),
    exact_up_to: int = EXACT_ROWS,
    seed: int = 0,
    progress: str | None = None,
    device: str | torch.device = "cpu",
) -> Neighbours:
    """The nearest codes of each row by dot product of vectors.

    Above `exact_up_to` codes they come from cells that k-means finds among the codes. Queries nearest to the same cell
    are compared with the codes of the cells nearest to them all, of so many that they hold 93 % of the nearest ten
    codes of a sample of queries, which are compared with all codes.

    Args:
        queries: [n, d], float32 or float16, in memory or memory-mapped.
        codes: [m, d], m >= n; the code of row i is code i. Default: `queries`.
        k: neighbours of each row.
        text_ids: arrays of n or m numbers, equal for equal texts; a code whose text equals the row's is passed over.
            An array of n says nothing of the codes beyond the rows.
        seed: of the cells.
        progress: the label of a progress bar, None for no bar.
        device: the device that multiplies.
    """
    codes = queries if codes is None else codes
    if len(codes) <= exact_up_to:
        score = _dot_products(queries, codes, device)
        return _exact(score, np.arange(len(queries)), len(codes), k, text_ids, progress)
    return _through_cells(queries, codes, k, text_ids, seed, progress, device)


def nearest_by_similarity(
    similarity: Callable[[np.ndarray, np.ndarray], Tensor],
    rows: int,
    codes: int,
    k: int,
    *,
    text_ids: Sequence[np.ndarray] = (),
    progress: str | None = None,
) -> Neighbours:
    """The nearest codes of each row by any similarity, exactly.

    Args:
        similarity: (query rows int64[Q], code rows int64[C]) -> raw similarity Tensor[Q, C], as an estimator gives it.
        rows, codes: how many rows, and how many codes; the code of row i is code i.
        k, text_ids, progress: as in `nearest_rows`.
    """
    everything = np.arange(codes)
    return _exact(lambda block: similarity(block, everything), np.arange(rows), codes, k, text_ids, progress)


def nearest_by_terms(
    queries: sparse.csr_matrix,
    documents: sparse.csr_matrix,
    k: int,
    *,
    text_ids: Sequence[np.ndarray] = (),
    progress: str | None = None,
) -> Neighbours:
    """The nearest documents of each row by product of sparse matrices, such as BM25's; exactly, without a model.

    A document that scores 0 or less is no neighbour.

    Args:
        queries: term counts, [n, terms].
        documents: weights of the terms, [m, terms], m >= n; the document of row i is document i.
        k, text_ids, progress: as in `nearest_rows`.
    """
    score = _products(queries.tocsr().astype(np.float32), documents.tocsr().astype(np.float32))
    rows = np.arange(queries.shape[0])
    return _exact(score, rows, documents.shape[0], k, text_ids, progress, above=0.0)


def neighbours_key(vectors: Sequence[np.ndarray | sparse.csr_matrix], **settings) -> str:
    """A name that changes with any number of the vectors and with any of `settings`."""
    digest = xxhash.xxh3_128(repr(sorted(settings.items())).encode())
    for values in vectors:
        arrays = (values.indptr, values.indices, values.data) if sparse.issparse(values) else (values,)
        for array in arrays:
            digest.update(f"{array.shape} {array.dtype}".encode())
            for start in range(0, len(array), KEY_ROWS):
                digest.update(np.ascontiguousarray(array[start : start + KEY_ROWS]).data)
    return digest.hexdigest()


def cached_neighbours(folder: str | Path | None, key: str, build: Callable[[], Neighbours]) -> Neighbours:
    """The neighbours stored under `key`, or what `build` makes of it, stored for the next time.

    The main process alone builds, so that all processes have the same neighbours, however many there are. They read
    the files of a common folder, memory-mapped, or are sent the arrays.

    Args:
        folder: where to keep them; None keeps them in memory only.

    Raises:
        UserError: `build` raised one; on every process.
    """
    neighbours, problem = None, None
    if distributed.rank_and_world_size()[0] == 0:
        try:
            neighbours = _load(folder, key, warn=True)
            if neighbours is None:
                neighbours = build()
                _store(folder, key, neighbours)
        except UserError as error:
            problem = str(error)
    problem = distributed.from_main(problem)
    if problem is not None:
        raise UserError(problem)
    kept = _load(folder, key)
    if distributed.any_process(kept is None):
        kept = Neighbours(*distributed.from_main(neighbours and astuple(neighbours)))
    return kept


def _load(folder: str | Path | None, key: str, warn: bool = False) -> Neighbours | None:
    """The stored neighbours, None where they are missing or damaged."""
    if folder is None or not (Path(folder) / f"{key}.json").exists():
        return None
    try:
        recorded = json.loads((Path(folder) / f"{key}.json").read_text())
        arrays = {}
        for name, checksum in recorded.items():
            arrays[name] = np.load(Path(folder) / f"{key}.{name}.npy", mmap_mode="r", allow_pickle=False)
            if zlib.crc32(arrays[name].reshape(-1).view(np.uint8)) != checksum:
                raise ValueError(f"the checksum of {name} is wrong")
        return Neighbours(**arrays)
    except (OSError, EOFError, ValueError, TypeError) as error:
        if warn:
            logger.warning(f"{Path(folder) / key} is damaged ({error}) and is built again")
        return None


def _store(folder: str | Path | None, key: str, neighbours: Neighbours) -> None:
    """Write the arrays and then their checksums; a warning where the disk fails: the run goes on with the memory."""
    if folder is None:
        return
    checksums = {}
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for field in fields(neighbours):
            values = np.ascontiguousarray(getattr(neighbours, field.name))
            with written_aside(Path(folder) / f"{key}.{field.name}.npy") as aside, open(aside, "wb") as file:
                np.save(file, values, allow_pickle=False)
            checksums[field.name] = zlib.crc32(values.reshape(-1).view(np.uint8))
        write_json(Path(folder) / f"{key}.json", checksums)
    except OSError as error:
        logger.warning(f"{folder} could not be written ({error.strerror}): the next run computes it again")


def _dot_products(queries: np.ndarray, codes: np.ndarray, device) -> Callable[[np.ndarray], Tensor]:
    """Similarities of some rows' queries to all codes."""
    everything = _vectors(codes, slice(None), device)
    return lambda block: _vectors(queries, block, device) @ everything.T


def _products(queries: sparse.csr_matrix, documents: sparse.csr_matrix) -> Callable[[np.ndarray], Tensor]:
    """Products of some rows with all documents.

    Few terms make most of the entries of a sparse product; as dense columns they are multiplied several times faster.
    """
    common = np.bincount(documents.indices, minlength=documents.shape[1]) > COMMON * documents.shape[0]
    rare = sparse.diags_array((~common).astype(np.float32))
    dense = [torch.from_numpy(side[:, common].toarray()) for side in (queries, documents)]
    rare_queries, postings = (queries @ rare).tocsr(), (documents @ rare).T.tocsr()
    for matrix in (rare_queries, postings):
        matrix.eliminate_zeros()

    def score(rows: np.ndarray) -> Tensor:
        products = torch.from_numpy((rare_queries[rows] @ postings).toarray())
        return products.addmm_(dense[0][rows], dense[1].T)

    return score


def _vectors(values: np.ndarray, rows, device) -> Tensor:
    chosen = np.asarray(values[rows], dtype=np.float32)
    # Torch warns of memory that it may not write, such as a file's.
    return torch.from_numpy(chosen if chosen.flags.writeable else chosen.copy()).to(device)


def _exact(
    score: Callable[[np.ndarray], Tensor],
    rows: np.ndarray,
    codes: int,
    k: int,
    text_ids: Sequence[np.ndarray],
    progress: str | None,
    above: float = -np.inf,
) -> Neighbours:
    """The neighbours of some rows, compared with all codes; none that does not score more than `above`."""
    best = _Best(len(rows), k)
    own = np.empty(len(rows), np.float32)
    everything = np.arange(codes)
    with _bar(progress, len(rows), "row") as bar:
        for places in _blocks(np.arange(len(rows)), codes):
            block = rows[places]
            scores = score(block)
            own[places] = scores[torch.arange(len(block)), torch.from_numpy(block)].cpu()
            best.add(places, block, everything, _without_equal_texts(scores, block, everything, text_ids), above)
            bar.update(len(places))
    return best.neighbours(own)


def _through_cells(queries, codes, k, text_ids, seed, progress, device) -> Neighbours:
    """The neighbours of all rows; queries nearest to one cell are compared with the codes of the same cells."""
    generator = np.random.default_rng(seed)
    centres = _centres(codes, generator, device)
    cell_of = _nearest_cell(codes, centres, device, by_distance=True)
    group_of = _nearest_cell(queries, centres, device)
    cells = _cells_by_group(queries, centres, group_of, device)
    looked_into = _number_of_cells(queries, codes, cells, cell_of, group_of, text_ids, generator, device)
    members, groups = _by_number(cell_of, len(centres)), _by_number(group_of, len(centres))
    best, own = _Best(len(queries), k), np.empty(len(queries), np.float32)
    with _bar(progress, len(queries), "row") as bar:
        for group, rows in enumerate(groups):
            near = np.concatenate([members[cell] for cell in cells[group, :looked_into].tolist()])
            vectors = _vectors(codes, near, device).T if len(rows) else None
            for block in _blocks(rows, max(len(near), 1)):
                query = _vectors(queries, block, device)
                own[block] = (query * _vectors(codes, block, device)).sum(1).cpu()
                if len(near):
                    best.add(block, block, near, _without_equal_texts(query @ vectors, block, near, text_ids))
                bar.update(len(block))
    return best.neighbours(own)


def _centres(codes: np.ndarray, generator: np.random.Generator, device) -> Tensor:
    """Centres of cells by k-means over a sample of the codes, Tensor[cells, d]."""
    number = min(int(CELLS * len(codes) ** 0.5), len(codes))
    sample = np.sort(generator.choice(len(codes), min(FITTED * number, len(codes)), replace=False))
    seed = int(generator.integers(2**31))
    means = MiniBatchKMeans(number, batch_size=4096, n_init=1, max_iter=10, random_state=seed)
    means.fit(_vectors(codes, sample, "cpu").numpy())
    return torch.from_numpy(means.cluster_centers_.astype(np.float32)).to(device)


def _nearest_cell(vectors: np.ndarray, centres: Tensor, device, by_distance: bool = False) -> np.ndarray:
    """The cell nearest to each vector by dot product, or by distance; int64[n]."""
    offset = (centres**2).sum(1) / 2 if by_distance else 0.0
    nearest = np.empty(len(vectors), np.int64)
    for block in _blocks(np.arange(len(vectors)), len(centres)):
        nearest[block] = (_vectors(vectors, block, device) @ centres.T - offset).argmax(1).cpu()
    return nearest


def _cells_by_group(queries: np.ndarray, centres: Tensor, group_of: np.ndarray, device) -> np.ndarray:
    """For each group of queries all cells, the nearest to the sum of its queries first; int64[groups, cells]."""
    sums = torch.zeros_like(centres)
    for block in _blocks(np.arange(len(queries)), queries.shape[1]):
        sums.index_add_(0, torch.from_numpy(group_of[block]).to(device), _vectors(queries, block, device))
    return (sums @ centres.T).argsort(dim=1, descending=True).cpu().numpy()


def _number_of_cells(queries, codes, cells, cell_of, group_of, text_ids, generator, device) -> int:
    """The number of cells for each group that hold `RECALL` of the nearest codes of a sample of queries."""
    sample = np.sort(generator.choice(len(queries), min(SAMPLE, len(queries)), replace=False))
    nearest = _exact(_dot_products(queries, codes, device), sample, len(codes), SAMPLE_K, text_ids, None).rows
    places = np.argsort(cells, axis=1)[group_of[sample]]
    needed = np.take_along_axis(places, cell_of[nearest], axis=1)[nearest >= 0]
    return int(np.quantile(needed, RECALL, method="higher")) + 1 if len(needed) else 1


def _by_number(numbers: np.ndarray, total: int) -> list[np.ndarray]:
    """For each number below `total` where it stands."""
    return np.split(np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers, minlength=total))[:-1])


def _without_equal_texts(
    scores: Tensor, rows: np.ndarray, codes: np.ndarray, text_ids: Sequence[np.ndarray]
) -> Tensor:
    """Scores, Tensor[rows, codes], -inf where a code has a text of the row's."""
    for ids in text_ids:
        known = codes < len(ids)
        texts = torch.from_numpy(ids[np.where(known, codes, 0)].view(np.int64))
        same = torch.from_numpy(ids[rows].view(np.int64))[:, None] == texts
        same = same if known.all() else same & torch.from_numpy(known)
        scores = scores.masked_fill(same.to(scores.device), -torch.inf)
    return scores


def _blocks(rows: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """Parts of `rows` so that a matrix with `width` columns for each row stays small."""
    size = max(1, ENTRIES // max(width, 1))
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _bar(progress: str | None, total: int, unit: str) -> tqdm:
    hidden = progress is None or distributed.rank_and_world_size()[0] != 0
    return tqdm(total=total, desc=progress, disable=hidden, leave=False, unit=unit)


class _Best:
    """The best k codes of each row so far."""

    def __init__(self, rows: int, k: int):
        self.scores = torch.full((rows, k), -torch.inf)
        self.codes = torch.full((rows, k), -1)

    def add(
        self, places: np.ndarray, rows: np.ndarray, codes: np.ndarray, scores: Tensor, above: float = -np.inf
    ) -> None:
        """Take scores, Tensor[rows, codes], into account, those of the rows' own codes and up to `above` left out.

        Args:
            places: where the rows stand here, int64[rows].
        """
        k = self.scores.shape[1]
        best, columns = scores.topk(min(k + 1, scores.shape[1]), dim=1)
        best, found = best.float().cpu(), torch.from_numpy(codes)[columns.cpu()]
        best = best.masked_fill((found == torch.from_numpy(rows)[:, None]) | (best <= above), -torch.inf)
        places = torch.from_numpy(places)
        best, found = torch.cat([self.scores[places], best], 1), torch.cat([self.codes[places], found], 1)
        best, columns = best.topk(k, dim=1)
        self.scores[places], self.codes[places] = best, found.gather(1, columns)

    def neighbours(self, own: np.ndarray) -> Neighbours:
        return Neighbours(self.codes.masked_fill(self.scores == -torch.inf, -1).numpy(), self.scores.numpy(), own)
