"""Ranks each query's own code in a corpus, block by block, without the query x code matrix.

A block of scores is one float32 matrix product. Rounding moves such a score by a bounded amount, so most codes are
certainly above or below a query's own; the few pairs within the bound are scored again in float64. Both sides are
centred first: this changes no rank, and it keeps the bound small where all embeddings point in nearly one direction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from soft_trainer.errors import UserError

_GROUP = 32  # codes of which only the best is compared with the best so far
_SAMPLE = 1024  # rows whose mean is the centre
_MANY = 16  # doubtful pairs of a query in a block; about one is usual
_SPARE = 4  # candidates beyond the top k, so that float64 may put them in another order


@dataclass(frozen=True)
class Ranking:
    """The rank of each query's own code, and the best codes.

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
    """Ranks the corpus for every query by dot product (normalise both sides first for cosine).

    A rank is 1 + the codes that score higher than the query's own + the other codes that score the same. Scores are
    float64 sums over one pair in a fixed order, so that identical embeddings tie, on every device and in every block.
    The top codes are found in float32 and ordered by their float64 scores. Memory grows with `Q + C` and the block,
    never with `Q * C`. The work is done on the device of the embeddings.

    Args:
        query_embeddings (`Tensor[Q, d]`): any floating type.
        code_embeddings (`Tensor[C, d]`): the corpus, on the same device.
        targets (`LongTensor[Q]`): row of each query's own code.
        top_k (`int`, *optional*, defaults to 10): best codes to return, at most `C`.
        score_scale (`float`, *optional*, defaults to 1.0): multiplies the returned scores; positive.
        block_size (`int`, *optional*): queries and codes in a block; by default a size that suits the device.

    Raises:
        UserError: shapes that do not fit, a target outside the corpus, NaN or infinity in an embedding.
    """
    device = query_embeddings.device
    if device.type == "mps":  # MPS has no float64
        query_embeddings = query_embeddings.cpu()
        code_embeddings = code_embeddings.cpu()
        device = torch.device("cpu")
    targets = torch.as_tensor(targets, device=device)
    _check(query_embeddings, code_embeddings, targets)
    top_k = min(top_k, len(code_embeddings))
    if len(query_embeddings) == 0:  # with few queries a process may have none
        return Ranking(targets, targets.new_empty(0, top_k), query_embeddings.new_empty(0, top_k).float())
    queries, query_scale = _near_one("query", query_embeddings)
    codes, code_scale = _near_one("code", code_embeddings)
    size = block_size or (2048 if device.type == "cpu" else 8192)
    with _full_precision(device):
        corpus = _Corpus(codes, _centre(queries))
        blocks = zip(queries.split(size), targets.split(size), strict=True)
        ranked = [_rank_block(corpus, top_k, size, *block) for block in blocks]
    ranks, indices, scores = (torch.cat(parts) for parts in zip(*ranked, strict=True))
    scores = scores * (score_scale / (query_scale * code_scale))
    return Ranking(ranks, indices, scores.to(torch.promote_types(query_embeddings.dtype, torch.float32)))


def retrieval_metrics(ranks: Tensor, pool_size: int, max_rank: int | None = None) -> dict[str, float]:
    """Computes the mean reciprocal rank and recall.

    Args:
        ranks (`LongTensor[Q]`): 1 is best.
        pool_size (`int`): number of codes in the corpus.
        max_rank (`int`, *optional*): ranks beyond it count 0; the published scripts use 1000.

    Returns:
        `dict`: `mrr`, `recall@1`, `recall@5`, `recall@10`, `pool_size`, `queries`.

    Raises:
        UserError: there are no ranks.
    """
    ranks = torch.as_tensor(ranks)
    if len(ranks) == 0:
        raise UserError("There are no ranks to average: the evaluation set is empty.")
    counted = ranks <= (max_rank or pool_size)
    metrics = {"mrr": (counted / ranks.double()).mean().item()}
    metrics |= {f"recall@{k}": (counted & (ranks <= k)).double().mean().item() for k in (1, 5, 10)}
    return metrics | {"pool_size": pool_size, "queries": len(ranks)}


def _check(queries: Tensor, codes: Tensor, targets: Tensor) -> None:
    shapes = [list(each.shape) for each in (queries, codes, targets)]
    fit = len(shapes[0]) == 2 and shapes[1][1:] == shapes[0][1:] and shapes[2] == shapes[0][:1]
    if not fit:
        raise UserError(
            f"Embeddings and targets must be [queries, d], [codes, d] and [queries], not {str(shapes)[1:-1]}."
        )
    if len(codes) == 0:
        raise UserError("The corpus is empty: there is nothing to rank.")
    outside = ((targets < 0) | (targets >= len(codes))).nonzero()
    if len(outside):
        row = int(outside[0])
        raise UserError(f"targets[{row}] is {int(targets[row])}, outside the corpus of {len(codes)} codes.")


def _near_one(side: str, rows: Tensor) -> tuple[Tensor, float]:
    """Scales very large or very small numbers to near 1, by a power of two, so that nothing is rounded."""
    low, high = rows.aminmax()
    largest = float(torch.maximum(-low, high))
    if not math.isfinite(largest):
        row = int((~torch.isfinite(rows)).any(1).nonzero()[0])
        raise UserError(f"The {side} embedding in row {row} holds NaN or infinity: it cannot be ranked.")
    exponent = min(max(math.frexp(largest)[1], -1000), 1000)
    return (rows, 1.0) if abs(exponent) < 30 else (rows.double() * 2.0**-exponent, 2.0**-exponent)


def _centre(rows: Tensor) -> Tensor:
    """Returns the mean of some rows: any centre gives the same ranks, a close one gives them faster."""
    return rows[:: -(-len(rows) // _SAMPLE)].double().mean(0).float()


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Keeps autocast, TF32 and bfloat16 out of the matrix products, since the error bound assumes float32."""
    since_2_9 = hasattr(torch.backends, "fp32_precision")  # reading the old switch raises once the new ones are set
    switches = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul) if since_2_9 else ()
    before = [switch.fp32_precision for switch in switches] or torch.get_float32_matmul_precision()
    try:
        if not since_2_9:
            torch.set_float32_matmul_precision("highest")
        for switch in switches:
            switch.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if not since_2_9:
            torch.set_float32_matmul_precision(before)
        for switch, precision in zip(switches, before, strict=False):
            switch.fp32_precision = "none"  # the value of the switch above it, which may be what it had
            if switch.fp32_precision != precision:
                switch.fp32_precision = precision


class _Corpus:
    """The codes, centred so that `query . (code - centre) = (query - query_centre) . (code - centre) + offset`."""

    def __init__(self, rows: Tensor, query_centre: Tensor):
        self.rows = rows
        self.centre = _centre(rows)
        self.query_centre = query_centre
        # parts that stay in a processor's cache
        parts = rows.split(256)
        query_centre = query_centre.double()
        products = torch.cat([part.double() @ query_centre for part in parts])
        self.offsets = products - self.centre.double() @ query_centre
        self.norm = torch.stack([(part - self.centre).norm(dim=1).max() for part in parts]).max().double()

    @cached_property
    def copies(self) -> Tensor:
        """A number for each code, shared only by identical codes, LongTensor[C]."""
        return self.rows.unique(dim=0, return_inverse=True)[1]

    def scores(self, centred: Tensor, codes: slice) -> Tensor:
        """Computes the scores of centred queries and some codes, float32[B, N]."""
        return torch.addmm(self.offsets[codes].float(), centred, (self.rows[codes] - self.centre).float().T)

    def bounds(self, queries: Tensor, centred: Tensor, own_scores: Tensor) -> tuple[Tensor, Tensor]:
        """Returns bounds, float32[B, 1] each: scores outside them are certainly below or above the own code's.

        In any order of summation a dot product of n numbers is off by at most n u |x| |y| (1 + O(n u)), where u is
        the unit roundoff; a few u more for centring, for the offset and for the bounds themselves.
        """
        queries, centre, dim = queries.double(), self.centre.double(), queries.shape[1]
        terms = 1.01 * (dim + 12)
        margin = terms * 2.0**-24 * (centred.double().norm(dim=1) * self.norm + self.offsets.abs().max())
        norms = (queries.norm(dim=1) + self.query_centre.double().norm()) * (self.norm + centre.norm())
        margin += 4 * (dim + 8) * 2.0**-53 * norms + 8 * dim * torch.finfo(torch.float32).tiny
        own = own_scores - queries @ centre
        return (own - margin).float()[:, None], (own + margin).float()[:, None]


def _rank_block(corpus: _Corpus, top_k: int, size: int, queries: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Computes ranks, top rows and top scores of one block of queries."""
    own_scores = _pair_scores(queries, corpus.rows, torch.arange(len(queries), device=queries.device), targets)
    centred = (queries - corpus.query_centre).float()
    low, high = corpus.bounds(queries, centred, own_scores)
    number = min(top_k + _SPARE, len(corpus.rows))
    largest = centred.new_full((len(queries), number), -math.inf)  # of the groups' maxima so far
    ranks = torch.zeros_like(targets)
    candidates = []
    for start in range(0, len(corpus.rows), size):
        scores = corpus.scores(centred, slice(start, start + size))
        above = scores > high
        ranks += above.view(torch.uint8).sum(1, dtype=torch.int32)  # a sum of bool is slower
        floor = largest[:, -1:]
        largest = torch.cat([largest, F.max_pool1d(scores, _GROUP, ceil_mode=True)], 1).topk(number).values
        # A code that equals the new floor may be among the best, one that equals the floor of earlier rows may not.
        floor = torch.maximum(floor.nextafter(floor.new_tensor(math.inf)), largest[:, -1:])
        row, code = ((scores >= low) ^ above | (scores >= floor)).nonzero(as_tuple=True)
        score = scores[row, code]
        code = start + code
        top = score >= floor[row, 0]
        doubtful = (score >= low[row, 0]) & (score <= high[row, 0])
        candidates.append((row[top], code[top], score[top]))
        row = row[doubtful]
        code = code[doubtful]
        if len(row) > _MANY * len(ranks):  # a collapsed encoder: copies of the own code tie without being scored
            copy = corpus.copies[code] == corpus.copies[targets[row]]
            ranks += row[copy].bincount(minlength=len(ranks))
            row = row[~copy]
            code = code[~copy]
        at_least = _pair_scores(queries, corpus.rows, row, code) >= own_scores[row]  # the own code is among them
        ranks += row[at_least].bincount(minlength=len(ranks))
    row, code = _best(*(torch.cat(parts) for parts in zip(*candidates, strict=True)), number)
    scores = _pair_scores(queries, corpus.rows, row, code).view(-1, number)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    return ranks, code.view(-1, number).gather(1, order)[:, :top_k], scores[:, :top_k]


def _best(row: Tensor, code: Tensor, score: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Finds the `number` best codes of each query, lower codes first on ties; returns queries and codes, sorted."""
    order = score.argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    counts = row.bincount()
    place = torch.arange(len(order), device=row.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    order = order[place < number]
    return row[order], code[order].view(-1, number).sort(dim=1).values.flatten()


def _pair_scores(queries: Tensor, codes: Tensor, query_rows: Tensor, code_rows: Tensor) -> Tensor:
    """Computes float64 scores of P pairs by adding the upper half of the products to the lower until one is left."""
    # `sum` would add in an order that depends on the device and on the number of pairs.
    numbers = 2**24 if codes.is_cuda else 2**17  # in one batch of pairs: on a CPU they stay in its cache
    step = max(1, numbers // queries.shape[1])
    scores = []
    for query, code in zip(query_rows.split(step), code_rows.split(step), strict=True):
        # To float64 first: a product of two types is several times slower.
        products = codes.index_select(0, code).double().mul_(queries.index_select(0, query).double())
        while (width := products.shape[1]) > 1:
            half = (width + 1) // 2
            products[:, : width - half] += products[:, half:]
            products = products[:, :half]
        scores.append(products[:, 0])
    return torch.cat(scores)
