"""Ranks a corpus for each query and computes MRR and recall, in blocks of queries to limit memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from soft_trainer.encoders.encoding import where_float64_exists
from soft_trainer.errors import UserError

_BLOCK = 2**25  # scores in memory at once
_FEWEST = 128  # queries in a block, because each block converts the embeddings of a large corpus to float64 again
_CORPUS = 2**26  # numbers of the corpus in float64 at once
_HASHED = 2**22  # numbers to hash at once


@dataclass(frozen=True)
class Ranking:
    """The rank of each query's positive in the corpus, and the K best functions for each query.

    Args:
        ranks (`LongTensor[Q]`): the ranks, starting at 1. Ties are broken against the query's positive.
        top_indices (`LongTensor[Q, K]`): the corpus indices of the best functions, best first. Functions with equal
            scores are ordered by index.
        top_scores (`Tensor[Q, K]`): the scores of the best functions, multiplied by the score scale.
    """

    ranks: Tensor
    top_indices: Tensor
    top_scores: Tensor

    @classmethod
    def join(cls, blocks: list[Ranking]) -> Ranking:
        """Concatenates the rankings of several blocks of queries."""
        parts = [(block.ranks, block.top_indices, block.top_scores) for block in blocks]
        return cls(*map(torch.cat, zip(*parts, strict=True)))


class Corpus:
    """Scores a corpus of embeddings. Identical embeddings get bit-identical scores, so they tie.

    Args:
        code_embeddings (`Tensor[C, d]`): the embeddings, of any floating-point type.
    """

    def __init__(self, code_embeddings: Tensor):
        self.parts = code_embeddings.split(max(1, _CORPUS // code_embeddings.shape[1]))
        if len(self.parts) == 1:
            self.parts = (code_embeddings.double(),)  # once, for all blocks of queries
        keys = _keys(code_embeddings)
        distinct, numbers = keys.unique(return_inverse=True)
        rows = torch.arange(len(keys), device=keys.device)
        originals = rows.new_empty(len(distinct)).scatter(0, numbers, rows)[numbers]
        self.copies = (originals != rows).nonzero().flatten()
        self.originals = originals[self.copies]

    @property
    def longest(self) -> Tensor:
        """The largest length (Euclidean norm) of an embedding, a scalar."""
        return torch.stack([part.double().norm(dim=1).max() for part in self.parts]).max()

    def scores(self, query_embeddings: Tensor) -> Tensor:
        """Computes the dot products of B queries with all functions, Tensor[B, C] in float64."""
        queries = query_embeddings.double()
        products = queries.new_empty(len(queries), sum(map(len, self.parts)))
        start = 0
        for part in self.parts:
            end = start + len(part)
            torch.mm(queries, part.double().T, out=products[:, start:end])
            start = end
        products[:, self.copies] = products[:, self.originals]
        return products


def _keys(embeddings: Tensor) -> Tensor:
    """Hashes embeddings to 64 bits, LongTensor[n]. Equal embeddings have equal hashes.

    The probability that any two of a million different embeddings share a hash is 3e-8.
    """
    salts = torch.randint(-(2**63), 2**63 - 1, embeddings.shape[1:], generator=torch.Generator().manual_seed(0))
    salts = salts.to(embeddings.device)
    keys = []
    for part in embeddings.split(max(1, _HASHED // embeddings.shape[1])):
        bits = (part.double() + 0.0).view(torch.int64) + salts  # adding 0.0 turns -0.0 into 0.0
        # The finalizer of SplitMix64, Steele et al., 2014, "Fast splittable pseudorandom number generators".
        bits = (bits ^ (bits >> 30)) * -0x40A7B892E31B1A47
        bits = (bits ^ (bits >> 27)) * -0x6B2FB644ECCEEE15
        keys.append((bits ^ (bits >> 31)).sum(1))
    return torch.cat(keys)


@torch.no_grad()
def rank_codes(
    query_embeddings: Tensor,
    code_embeddings: Tensor,
    targets: Tensor,
    top_k: int = 10,
    score_scale: float = 1.0,
    block_size: int | None = None,
    excluded: Tensor | None = None,
) -> Ranking:
    """Ranks the corpus for each query by dot product. For cosine similarity, normalise the embeddings first.

    A rank is 1, plus the number of functions with a higher score than the query's positive, plus the number of other
    functions with the same score. Scores are always computed in float64, on the embeddings' device, regardless of
    precision settings. Memory grows with `Q + C` and the size of a block, never with `Q * C`.

    Args:
        query_embeddings (`Tensor[Q, d]`): the queries, of any floating-point type.
        code_embeddings (`Tensor[C, d]`): the corpus, on the same device.
        targets (`LongTensor[Q]`): the corpus index of each query's positive.
        top_k (`int`, *optional*, defaults to 10): the number of best functions to return, at most `C`.
        score_scale (`float`, *optional*, defaults to 1.0): a positive factor for the returned scores.
        block_size (`int`, *optional*): the number of queries in a block. By default, a block takes at most 256 MiB, or
            has 128 queries.
        excluded (`LongTensor[Q]`, *optional*): the corpus index of a function that is not ranked for the query, or -1.

    Raises:
        UserError: the shapes do not match, a target is outside the corpus, or an embedding contains NaN or infinity.
    """
    query_embeddings, code_embeddings = map(where_float64_exists, (query_embeddings, code_embeddings))
    targets = torch.as_tensor(targets, device=query_embeddings.device)
    _check(query_embeddings, code_embeddings, targets)
    size = block_size or max(_FEWEST, _BLOCK // len(code_embeddings))
    corpus = Corpus(code_embeddings)
    if excluded is None:
        excluded = torch.full_like(targets, -1)
    ranked = []
    for queries, positives, unranked in zip(
        query_embeddings.split(size), targets.split(size), excluded.to(targets.device).split(size), strict=True
    ):
        ranked.append(rank_scores(without(corpus.scores(queries), unranked), positives, top_k))
    ranking = Ranking.join(ranked)
    scores = ranking.top_scores * score_scale
    scores = scores.to(torch.promote_types(query_embeddings.dtype, torch.float32))
    return Ranking(ranking.ranks, ranking.top_indices, scores)


def without(scores: Tensor, excluded: Tensor) -> Tensor:
    """Sets the score of each query's excluded function to -inf, and returns `scores`.

    Args:
        scores (`Tensor[B, C]`): the score of each query with each function.
        excluded (`LongTensor[B]`): the column of a function, or -1.
    """
    rows = (excluded >= 0).nonzero().flatten()
    scores[rows, excluded[rows]] = -torch.inf
    return scores


def rank_scores(scores: Tensor, targets: Tensor, top_k: int = 10) -> Ranking:
    """Turns a block of scores into the rank of each query's positive and the best functions.

    Args:
        scores (`Tensor[B, C]`): the score of each query with each function.
        targets (`LongTensor[B]`): the column of each query's positive.
        top_k (`int`, *optional*, defaults to 10): the number of best functions to return, at most `C`.
    """
    codes = scores.shape[1]
    top_k = min(top_k, codes)
    positive = scores.gather(1, targets[:, None])
    ranks = (scores >= positive).view(torch.uint8).sum(dim=1, dtype=torch.int32).long()  # summing bool is slower
    best, columns = scores.topk(min(top_k + 1, codes))
    if top_k < codes:
        # If columns tie for rank K, `topk` may return any of them.
        for row in (best[:, top_k - 1] == best[:, top_k]).nonzero().flatten().tolist():
            candidates = (scores[row] >= best[row, top_k]).nonzero().flatten()
            order = scores[row, candidates].argsort(descending=True, stable=True)
            columns[row, :top_k] = candidates[order[:top_k]]
    columns = columns[:, :top_k].sort(dim=1).values
    best, order = scores.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return Ranking(ranks, columns.gather(1, order), best)


def retrieval_metrics(ranks: Tensor, pool_size: int, max_rank: int | None = None) -> dict[str, float]:
    """Computes mean reciprocal rank and recall from the ranks of the queries' positives.

    Args:
        ranks (`LongTensor[Q]`): the ranks, starting at 1.
        pool_size (`int`): the number of functions in the corpus.
        max_rank (`int`, *optional*): larger ranks count as not found. The published scripts use 1000.

    Returns:
        `dict`: `mrr`, `recall@1`, `recall@5`, `recall@10`, `pool_size`, `queries`.

    Raises:
        UserError: the evaluation set is empty.
    """
    ranks = torch.as_tensor(ranks)
    if len(ranks) == 0:
        raise UserError("There are no ranks to average: the evaluation set is empty.")
    counted = ranks <= (max_rank or pool_size)
    metrics = {"mrr": (counted / ranks.double()).mean().item()}
    metrics |= {f"recall@{k}": (counted & (ranks <= k)).double().mean().item() for k in (1, 5, 10)}
    return metrics | {"pool_size": pool_size, "queries": len(ranks)}


def _check(queries: Tensor, codes: Tensor, targets: Tensor) -> None:
    """Raises UserError if the shapes do not match, a target is out of range, or an embedding is not finite."""
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
        raise UserError(f"targets[{row}] is {int(targets[row])}, outside the corpus of {len(codes)} functions.")
    for side, rows in (("query", queries), ("code", codes)):
        wrong = (~torch.isfinite(rows)).any(dim=1).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise UserError(f"The {side} embedding in row {row} contains NaN or infinity and cannot be ranked.")
