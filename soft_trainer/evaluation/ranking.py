"""Ranks every query's own code among a whole codebase: exactly, by blocks, without the query x code matrix.

A block of scores is one float32 matrix product. Rounding can move a score by a bounded amount only, so most codes are
certainly above or below a query's own; the few pairs inside the bound are compared again in float64, and those that
float64 cannot tell apart by a sum without rounding. Both sides are centred first: taking one vector from all codes
changes no rank, and it keeps the bound small where all embeddings point nearly one way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from soft_trainer.errors import UserError

_CHUNK = 32  # codes that share one maximum: the unit in which candidates are looked for
_STEP = 256  # dimensions summed at a time
_SAMPLE = 1024  # rows that the centre is the mean of
_HASHED = 64  # numbers of a row by which copies are found
_SPARE = 4  # candidates kept beyond the top k, so that float64 may put them in another order
_PAIR_NUMBERS = 2**17  # numbers in one batch of pairs compared again: 1 MB in float64, and 128 MB on a GPU
_FLOAT32, _FLOAT64 = 2.0**-24, 2.0**-53  # unit roundoffs


@dataclass(frozen=True)
class Ranking:
    """Where each query's own code came, and what came first.

    Args:
        ranks (`LongTensor[Q]`): 1 is best; a tie counts against the query's own code.
        top_indices (`LongTensor[Q, K]`): rows of the best codes, best first, the lower row first where scores tie.
        top_scores (`Tensor[Q, K]`): their scores, times the score scale.
    """

    ranks: Tensor
    top_indices: Tensor
    top_scores: Tensor


@torch.no_grad()
def rank_codes(
    query_embeddings: Tensor,
    code_embeddings: Tensor,
    targets: Tensor,
    top_k: int = 10,
    score_scale: float = 1.0,
    block_size: int | None = None,
) -> Ranking:
    """Ranks the codebase for every query by dot product (normalise both sides first for cosine).

    A rank is 1 + the codes that score higher than the query's own + the others that score the same, as in exact
    arithmetic on the given numbers. The top codes are found in float32 and put in order by their float64 scores.
    Memory grows with `Q + C` and the block, never with `Q * C`; the work is done where the embeddings are.

    Args:
        query_embeddings (`Tensor[Q, d]`): any floating type.
        code_embeddings (`Tensor[C, d]`): the codebase, on the same device.
        targets (`LongTensor[Q]`): row of each query's own code.
        top_k (`int`, *optional*, defaults to 10): best codes to return, at most `C`.
        score_scale (`float`, *optional*, defaults to 1.0): multiplies the returned scores; positive.
        block_size (`int`, *optional*): queries and codes in a block; by default what suits the device.

    Raises:
        UserError: shapes that do not fit, a target outside the codebase, NaN or infinity in an embedding.
    """
    if query_embeddings.device.type == "mps":  # which has no float64
        query_embeddings, code_embeddings = query_embeddings.cpu(), code_embeddings.cpu()
    targets = torch.as_tensor(targets, device=query_embeddings.device)
    _check(query_embeddings, code_embeddings, targets, top_k, score_scale, block_size)
    size = block_size or (3072 if query_embeddings.device.type == "cpu" else 8192)
    top_k = min(top_k, len(code_embeddings))
    if len(query_embeddings) == 0:  # a process may have no share of few queries
        return Ranking(targets, targets.new_empty(0, top_k), query_embeddings.new_empty(0, top_k).float())
    queries, codes = _Side("query", query_embeddings), _Side("code", code_embeddings)
    codes.summarise(queries.centre64)
    rank = partial(_rank_block, queries, codes, targets, top_k, size)
    with _full_precision(query_embeddings.device):
        parts = _map_blocks(rank, len(query_embeddings), size, query_embeddings.device)
    ranks, indices, scores = (torch.cat(part) for part in zip(*parts, strict=True))
    scale = score_scale / (queries.scale * codes.scale)
    scores = (scores * scale).to(torch.promote_types(query_embeddings.dtype, torch.float32))
    return Ranking(ranks, indices, scores)


def retrieval_metrics(ranks: Tensor, pool_size: int, max_rank: int | None = None) -> dict[str, float]:
    """Mean reciprocal rank and recall of ranks over a pool of codes.

    Args:
        ranks (`LongTensor[Q]`): 1 is best.
        pool_size (`int`): number of codes that each query was ranked against.
        max_rank (`int`, *optional*): a rank beyond it counts 0; the published scripts cut at 1000.

    Returns:
        `dict`: `mrr`, `recall@1`, `recall@5`, `recall@10`, `pool_size`, `queries`.
    """
    ranks = torch.as_tensor(ranks)
    if len(ranks) == 0:
        raise UserError("There are no ranks to average: the evaluation set is empty.")
    counted = ranks <= (max_rank or pool_size)
    metrics = {"mrr": (counted / ranks.double()).mean().item()}
    metrics |= {f"recall@{k}": (counted & (ranks <= k)).double().mean().item() for k in (1, 5, 10)}
    return metrics | {"pool_size": pool_size, "queries": len(ranks)}


def _check(
    queries: Tensor, codes: Tensor, targets: Tensor, top_k: int, score_scale: float, block_size: int | None
) -> None:
    """Refuses what cannot be ranked, in one line."""
    if queries.ndim != 2 or codes.ndim != 2 or queries.shape[1] != codes.shape[1]:
        raise UserError(
            f"Embeddings must be [queries, d] and [codes, d], not {list(queries.shape)} and {list(codes.shape)}."
        )
    if len(codes) == 0:
        raise UserError("The codebase is empty: there is nothing to rank.")
    if targets.shape != queries.shape[:1]:
        raise UserError(f"targets must hold one row for each of {len(queries)} queries, not {list(targets.shape)}.")
    outside = ((targets < 0) | (targets >= len(codes))).nonzero()
    if len(outside):
        row = int(outside[0])
        raise UserError(f"targets[{row}] is {int(targets[row])}, outside the codebase of {len(codes)} codes.")
    if top_k < 1 or score_scale <= 0 or (block_size is not None and block_size < 1):
        raise UserError(
            f"top_k, score_scale and block_size must be positive, not {top_k}, {score_scale} and {block_size}."
        )


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Keeps autocast, TF32 and bfloat16 products out of the scores: the bound is that of float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Side:
    """The embeddings of one side, and the `centre` that is taken from them, so that float32 scores are fine.

    Very large and very small numbers are brought near 1 by a power of two (`scale`), which rounds nothing.
    """

    def __init__(self, name: str, rows: Tensor):
        low, high = rows.aminmax()
        largest = float(torch.maximum(-low, high))
        if not math.isfinite(largest):
            row = int((~torch.isfinite(rows)).any(1).nonzero()[0])
            raise UserError(f"The {name} embedding in row {row} holds NaN or infinity: it cannot be ranked.")
        exponent = min(max(math.frexp(largest)[1], -1000), 1000)
        self.scale = 1.0 if abs(exponent) < 30 else 2.0**-exponent
        self.rows = rows if self.scale == 1.0 else rows.double() * self.scale
        sample = self.rows[:: -(-len(rows) // _SAMPLE)].double()  # any centre is right, a near one is fast
        self.centre = sample.mean(0).to(torch.promote_types(self.rows.dtype, torch.float32))
        self.centre64 = self.centre.double()
        self.dim = rows.shape[1]

    def summarise(self, query_centre: Tensor) -> None:
        """Keeps what comparisons need: which codes are copies, products with the queries' centre, the largest norm."""
        self.copies = _copies(self.rows)
        products, norms = [], []
        for (rows,) in _batches(self.dim, self.rows):
            products.append(rows.double() @ query_centre)
            norms.append((rows - self.centre).norm(dim=1).max())
        self.products = torch.cat(products) - self.centre64 @ query_centre
        self.norm, self.product = torch.stack(norms).max().double(), self.products.abs().max()

    def operand(self, index: slice, column: Tensor | float, fill: float = 0.0) -> Tensor:
        """Centred rows in float32 and one more column; rows of zeros and `fill` complete the last chunk."""
        rows = self.rows[index]
        height = -(-len(rows) // _CHUNK) * _CHUNK
        block = torch.empty(height, self.dim + 1, dtype=torch.float32, device=rows.device)
        torch.sub(rows, self.centre, out=block[: len(rows), :-1])
        block[: len(rows), -1] = column
        block[len(rows) :, :-1] = 0
        block[len(rows) :, -1] = fill
        return block


def _copies(rows: Tensor) -> Tensor:
    """For each row the first identical row, LongTensor[C]: found by a hash of some of the bits, then compared."""
    some = rows[:, :: -(-rows.shape[1] // _HASHED)].contiguous()
    bits = some.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()])
    factors = torch.randint(-(2**63), 2**63 - 1, some.shape[1:], generator=torch.Generator().manual_seed(0))
    _, group = (bits * factors.to(rows.device)).sum(1).unique(return_inverse=True)
    order = torch.arange(len(rows), device=rows.device)
    first = torch.full_like(order, len(rows)).scatter_reduce(0, group, order, "amin")[group]
    later = (first != order).nonzero().squeeze(1)
    for (row,) in _batches(rows.shape[1], later):
        same = (rows[row] == rows[first[row]]).all(1)
        first[row] = torch.where(same, first[row], row)
    return first


def _map_blocks(rank: Callable[[slice], tuple], queries: int, size: int, device: torch.device) -> list[tuple]:
    """Blocks of queries in turn; on a CPU each thread takes whole blocks, so that no operation waits for another."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    rounds = -(-queries // (threads * size))
    step = -(-queries // (threads * rounds))
    blocks = [slice(start, start + step) for start in range(0, queries, step)]
    if threads == 1:
        return [rank(block) for block in blocks]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(rank, blocks))
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def _rank_block(queries: _Side, codes: _Side, targets: Tensor, top_k: int, size: int, index: slice) -> tuple:
    """Ranks, top rows and top scores (float64, scaled) of one block of queries."""
    centred = queries.operand(index, 1.0)[: len(targets[index])]
    own = _Own(queries, codes, index, targets[index], centred[:, :-1].norm(dim=1))
    best = _Best(len(centred), top_k + _SPARE, centred.device)
    ranks = torch.ones_like(own.target)
    chunks = -(-min(size, len(codes.rows)) // _CHUNK)
    scores = centred.new_empty(chunks, _CHUNK, len(centred))
    for start in range(0, len(codes.rows), size):
        block = slice(start, start + size)
        operand = codes.operand(block, codes.products[block], -math.inf)
        chunks = len(operand) // _CHUNK
        _multiply(operand, centred, scores[:chunks])
        maxima = _maxima(scores[:chunks])
        above, rows, columns = own.compare(scores[:chunks], maxima)
        ranks += above + own.not_above(rows, columns + start)
        best.add(scores[:chunks], maxima, start)
    return ranks, *_top(own.queries, codes, best.codes(), top_k)


def _multiply(codes: Tensor, queries: Tensor, scores: Tensor) -> None:
    """Products of all codes and queries into `scores`, summed by steps so that less is rounded."""
    steps = -(-(queries.shape[1] - 1) // _STEP)
    scores = scores.view(len(codes), len(queries))
    for step, (code, query) in enumerate(zip(codes.chunk(steps, 1), queries.chunk(steps, 1), strict=True)):
        torch.addmm(scores, code, query.T, beta=min(step, 1), out=scores)


def _maxima(scores: Tensor) -> Tensor:
    """The largest score of every chunk; NumPy needs half the time of torch on a CPU."""
    return torch.from_numpy(scores.numpy().max(1)) if scores.device.type == "cpu" else scores.amax(1)


def _counts(compare: str, scores: Tensor, threshold: Tensor) -> Tensor:
    """How many scores of every chunk are above ("greater") or at least ("greater_equal") each query's threshold.

    ByteTensor[N / chunk, B]. On a CPU NumPy, which compares and adds in bytes, two chunks at a time: they stay in the
    processor's cache.
    """
    if scores.device.type != "cpu":
        return getattr(torch, compare)(scores, threshold).sum(1, dtype=torch.uint8)
    scores, threshold, compare = scores.numpy(), threshold.numpy(), getattr(np, compare)
    counts = np.empty((len(scores), scores.shape[2]), np.uint8)
    held = np.empty((2, *scores.shape[1:]), bool)
    for start in range(0, len(scores), 2):
        some = scores[start : start + 2]
        true = compare(some, threshold, out=held[: len(some)]).view(np.uint8)
        np.add.reduce(true, axis=1, dtype=np.uint8, out=counts[start : start + 2])
    return torch.from_numpy(counts)


def _batches(dim: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Splits along the first dimension so that as many vectors of `dim` numbers stay in a processor's cache."""
    numbers = _PAIR_NUMBERS * (1 if tensors[0].device.type == "cpu" else 128)
    return zip(*(tensor.split(max(1, numbers // dim)) for tensor in tensors), strict=True)


class _Own:
    """The score of each query's own code in a block of queries, and comparisons with it.

    For any order of summation a dot product of n numbers is off by at most n u sum |x_i y_i| (1 + O(n u)), and by
    Cauchy-Schwarz the sum is at most |x| |y|; a few u more for centring, for the added column and for thresholds.
    """

    def __init__(self, queries: _Side, codes: _Side, index: slice, target: Tensor, centred_norms: Tensor):
        self.codes, self.target, self.queries = codes, target, queries.rows[index].double()
        own = [(query, codes.rows[row].double()) for query, row in _batches(codes.dim, self.queries, target)]
        self.score = torch.cat([(query * code).sum(1) for query, code in own])
        centred = torch.cat([(query * (code - codes.centre64)).sum(1) for query, code in own])
        norms = self.queries.norm(dim=1) + queries.centre64.norm()
        self.doubt = 2.02 * (codes.dim + 8) * _FLOAT64 * norms * (codes.norm + codes.centre64.norm())
        terms = 1.01 * (min(codes.dim, _STEP) + codes.dim / _STEP + 12)
        margin = terms * _FLOAT32 * (centred_norms.double() * codes.norm + codes.product) + self.doubt
        margin += 8 * codes.dim * torch.finfo(torch.float32).tiny
        self.low, self.high = (centred - margin).float(), (centred + margin).float()

    def compare(self, scores: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The number of scores surely above each query's own, and the (query, code) pairs that rounding may decide."""
        hot = maxima >= self.low
        count = torch.zeros_like(self.target)
        if hot.count_nonzero() > hot.numel() // 8:
            above = _counts("greater", scores, self.high)
            hot = _counts("greater_equal", scores, self.low) != above
            count += above.masked_fill_(hot, 0).sum(0)
        chunks, rows = hot.nonzero(as_tuple=True)
        values = scores[chunks, :, rows]
        above = values > self.high[rows, None]
        count.index_add_(0, rows, above.sum(1))
        entries, offsets = ((values >= self.low[rows, None]) ^ above).nonzero(as_tuple=True)
        return count, rows[entries], chunks[entries] * _CHUNK + offsets

    def not_above(self, rows: Tensor, columns: Tensor) -> Tensor:
        """For each query the number of these codes, its own left out, that its own does not exceed; LongTensor[B]."""
        own = self.target[rows]
        copy = self.codes.copies[columns] == self.codes.copies[own]
        counts = rows[copy & (columns != own)].bincount(minlength=len(self.target))
        for row, column in _batches(self.codes.dim, rows[~copy], columns[~copy]):
            # To float64 first: a product of two types is several times slower.
            code = self.codes.rows.index_select(0, column).double()
            value = code.mul_(self.queries.index_select(0, row)).sum(1) - self.score[row]
            unsure = value.abs() <= self.doubt[row]
            if unsure.any():
                row_, code = row[unsure], self.codes.rows[column[unsure]].double()
                value[unsure] = _exact_sign(self.queries[row_], code, self.codes.rows[self.target[row_]].double())
            counts += row[value >= 0].bincount(minlength=len(counts))
        return counts


def _exact_sign(query: Tensor, code: Tensor, own: Tensor) -> Tensor:
    """Sign of `query . code - query . own` without any rounding, Tensor[P].

    Numbers are cut in two, so that their products are exact. High parts on one grid then add up exactly; their sum
    joins what is left over until it outweighs all of it (Rump, Ogita and Oishi, Accurate Floating-Point Summation).
    """
    products = [sign * x * y for sign, z in ((1, code), (-1, own)) for x in _halves(query) for y in _halves(z)]
    terms = torch.cat(products, 1)
    terms = terms.where(terms.abs() > 2.0**-900, 0.0)
    while True:
        largest = terms.abs().amax(1, keepdim=True)
        grid = torch.exp2(largest.log2().ceil() + math.ceil(math.log2(terms.shape[1])) + 1).clamp(min=2.0**-1000)
        high = (terms + grid) - grid
        rest, total = terms - high, high.sum(1)
        left = rest.abs().amax(1) * terms.shape[1]
        if (total.abs() > left).logical_or(left == 0).all():
            return total.sign()
        terms = torch.cat([rest, total[:, None]], 1)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers of at most 26 bits each that add up to each float64 number (Veltkamp)."""
    shifted = x * (2.0**27 + 1)
    high = shifted - (shifted - x)
    return high, x - high


class _Best:
    """The best `number` codes of each query so far, by float32 score; the lower row wins a tie."""

    def __init__(self, queries: int, number: int, device: torch.device):
        self.number = number
        self.scores = torch.full((queries, number), -math.inf, dtype=torch.float32, device=device)
        self.rows = torch.zeros((queries, number), dtype=torch.int64, device=device)
        self.floor = self.scores[:, -1]
        self.pile, self.height = [], 0

    def add(self, scores: Tensor, maxima: Tensor, start: int) -> None:
        """Puts what beats the floor of its query on the pile; Tensor[N / chunk, chunk, B] of codes `start` and on."""
        if start == 0 and len(maxima) >= self.number:
            lowest = maxima.topk(self.number, 0).values[-1]
            self.floor = torch.nextafter(lowest, lowest.new_tensor(-math.inf))
        chunk, query = (maxima > self.floor).nonzero(as_tuple=True)
        values = scores[chunk, :, query]
        entries, offsets = (values > self.floor[query, None]).nonzero(as_tuple=True)
        self.pile.append((query[entries], start + chunk[entries] * _CHUNK + offsets, values[entries, offsets]))
        self.height += len(entries)
        if self.height > 2 * self.number * scores.shape[2]:
            self.merge()

    def merge(self) -> None:
        """Keeps the best of the pile and of what was kept before. Stable sorts: earlier means a lower row."""
        queries, number = self.scores.shape
        held = torch.arange(queries, device=self.scores.device).repeat_interleave(number)
        pile = [(held, self.rows.flatten(), self.scores.flatten()), *self.pile]
        query, row, score = (torch.cat(part) for part in zip(*pile, strict=True))
        order = score.argsort(descending=True, stable=True)
        order = order[query[order].argsort(stable=True)]
        counts = query.bincount(minlength=queries)
        place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        order = order[place < number]
        self.rows, self.scores = row[order].view(queries, number), score[order].view(queries, number)
        self.floor, self.pile, self.height = self.scores[:, -1].contiguous(), [], 0

    def codes(self) -> Tensor:
        """Rows of the codes held, LongTensor[B, number], -1 where there are fewer."""
        self.merge()
        return self.rows.masked_fill(self.scores == -math.inf, -1)


def _top(queries: Tensor, codes: _Side, candidates: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The best `top_k` candidates of each query and their scores, in order of float64 score, then of row."""
    candidates = candidates.sort(dim=1).values
    parts = _batches(codes.dim * candidates.shape[1], queries, candidates.clamp(min=0))
    scores = torch.cat([codes.rows[rows].double().mul_(query[:, None]).sum(2) for query, rows in parts])
    scores, order = scores.masked_fill(candidates < 0, -math.inf).sort(dim=1, descending=True, stable=True)
    return candidates.gather(1, order)[:, :top_k], scores[:, :top_k]
