"""Defines the mean reciprocal rank (MRR) for queries with one relevant item each, as a metric for `evaluate.load`."""

import datasets
import evaluate
import numpy as np

_DESCRIPTION = """\
Mean reciprocal rank (MRR) of retrieval with one relevant item for each query, as in code search: the mean of 1 / rank.
Rank 1 is best. Ties count against the relevant item: its rank is 1, plus the number of items with a higher score, plus
the number of other items with the same score. MRRs are comparable only for corpora of the same size, which the result
contains as `pool_size`.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions: one entry for each query, in one of three forms (the same for all queries):
        scores of every function in the corpus (list of float), or
        ids of the best functions, best first (list of str), or
        the rank of the relevant function (int, 1 is best).
    references: one entry for each query, in a form that depends on the predictions:
        for scores, the index of the relevant function (int);
        for ids, the id of the relevant function (str); a query whose relevant function is not predicted contributes 0;
        for ranks, the number of functions in the corpus (int).
    max_rank (int, optional): larger ranks contribute 0. By default, all ranks count; published code-search scripts
        use 1000.
    pool_size (int, optional): the number of functions in the corpus, if the predictions are ids.

Returns:
    mrr (float): the mean reciprocal rank, from 0 to 1.
    queries (int): the number of queries.
    pool_size (int, float or None): the number of functions in the corpus, its mean if queries have different corpora,
        or None if it is unknown.

Examples:
    >>> from soft_trainer.metrics import load_mrr
    >>> mrr = load_mrr()
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
    """Mean reciprocal rank of the relevant function, from scores, ids or ranks."""

    def _info(self):
        ids = datasets.Value("string")
        scores = datasets.Value("float64")
        number = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=[  # the first match is used: text comes first, because quoted digits match numbers too
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
            for given, relevant in pairs:
                ids = list(given)
                ranks.append(ids.index(relevant) + 1 if relevant in ids else np.inf)
            pools = [pool_size]
        elif np.ndim(predictions[0]):
            ranks = []
            pools = [len(scores) for scores in predictions]
            for row, (given, relevant) in enumerate(pairs):
                scores = np.asarray(given)
                if not 0 <= relevant < len(scores):
                    raise ValueError(
                        f"references[{row}] is {relevant}, but predictions[{row}] has {len(scores)} scores."
                    )
                if np.isnan(scores).any():
                    raise ValueError(f"predictions[{row}] contains NaN, so the functions cannot be ranked.")
                ranks.append((scores >= scores[relevant]).sum())  # others with the same score come first
        else:
            ranks = predictions
            for row, (rank, pool) in enumerate(pairs):
                if not 1 <= rank <= pool:
                    corpus = f"references[{row}] is {pool}, the number of functions in the corpus. Rank 1 is best."
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
