"""Computes the mean reciprocal rank of queries with one relevant item each, as an `evaluate` module."""

import datasets
import evaluate
import numpy as np

_DESCRIPTION = """\
Mean reciprocal rank (MRR) of retrieval with one relevant item for each query, as in code search: the mean of 1 / rank.
Rank 1 is best. A tie counts against the relevant item: its rank is 1 + the answers that score higher + the others that
score the same. An MRR can only be compared for corpora of the same size, so the result contains it as `pool_size`.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions: one entry for each query, in one of three forms (the same for all queries):
        scores of every code of the corpus (list of float), or
        ids of the best codes, best first (list of str), or
        the rank of the relevant code (int, 1 is best).
    references: one entry for each query, in the form that fits the predictions:
        with scores, the index of the relevant code (int);
        with ids, the id of the relevant code (str); if it is not among the predictions, the query counts 0;
        with ranks, the number of codes in the corpus (int).
    max_rank (int, optional): a rank beyond it counts 0. None by default; published code-search scripts cut at 1000.
    pool_size (int, optional): number of codes in the corpus, for predictions that hold only the first ids.

Returns:
    mrr (float): mean reciprocal rank, 0 to 1.
    queries (int): number of queries.
    pool_size (int, float or None): codes in the corpus; the mean where queries differ; None where unknown.

Examples:
    >>> mrr = evaluate.load("soft_trainer/metrics/mrr")
    >>> mrr.compute(predictions=[[0.9, 0.1, 0.4], [0.2, 0.8, 0.8]], references=[0, 2])
    {'mrr': 0.75, 'queries': 2, 'pool_size': 3}
    >>> mrr.compute(predictions=[1, 4], references=[1000, 1000])
    {'mrr': 0.625, 'queries': 2, 'pool_size': 1000}
"""

_CITATION = """\
@inproceedings{voorhees-1999-trec8,
    title = {The {TREC}-8 Question Answering Track Report},
    author = {Voorhees, Ellen M.},
    booktitle = {Proceedings of the Eighth Text {REtrieval} Conference},
    year = {1999},
}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class MRR(evaluate.Metric):
    """Computes the mean reciprocal rank."""

    def _info(self):
        ids = datasets.Value("string")
        scores = datasets.Value("float64")
        number = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=[  # the first that fits is taken: text before numbers, because quoted digits fit numbers too
                datasets.Features({"predictions": datasets.Sequence(ids), "references": ids}),
                datasets.Features({"predictions": datasets.Sequence(scores), "references": number}),
                datasets.Features({"predictions": number, "references": number}),
            ],
        )

    def _compute(self, predictions, references, max_rank=None, pool_size=None):
        pairs = list(zip(predictions, references, strict=True))
        pools = references
        if isinstance(references[0], str):
            ranks = []
            for given, right in pairs:
                ids = list(given)
                ranks.append(ids.index(right) + 1 if right in ids else np.inf)
            pools = [pool_size]
        elif np.ndim(predictions[0]):
            ranks = []
            pools = [len(scores) for scores in predictions]
            for row, (given, right) in enumerate(pairs):
                scores = np.asarray(given)
                if not 0 <= right < len(scores):
                    raise ValueError(f"references[{row}] is {right}, but predictions[{row}] has {len(scores)} scores.")
                if np.isnan(scores).any():
                    raise ValueError(f"predictions[{row}] holds NaN: its codes cannot be ranked.")
                ranks.append((scores >= scores[right]).sum())  # others with the same score come first
        else:
            ranks = predictions
            for row, (rank, pool) in enumerate(pairs):
                if not 1 <= rank <= pool:
                    corpus = f"references[{row}] is {pool}, the number of codes in the corpus. Rank 1 is best."
                    raise ValueError(f"predictions[{row}] is rank {rank}, but {corpus}")
        ranks = np.asarray(ranks, dtype=np.float64)
        if max_rank is None:
            max_rank = np.inf
        counted = ranks <= max_rank
        if len(set(pools)) == 1:
            size = pools[0]
        else:
            size = float(np.mean(pools))
        return {"mrr": float((counted / ranks).mean()), "queries": len(ranks), "pool_size": size}
