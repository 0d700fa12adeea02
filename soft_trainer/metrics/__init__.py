"""Metrics for `evaluate.load`. Each subfolder can be pushed to the Hub as a Space."""

from pathlib import Path

import evaluate


def load_mrr() -> evaluate.Metric:
    """Loads the mean reciprocal rank as a metric of `evaluate`. Needs no network.

    Example:
        >>> load_mrr().compute(predictions=[1, 4], references=[1000, 1000])  # ranks, and the size of the corpus
        {'mrr': 0.625, 'queries': 2, 'pool_size': 1000}
    """
    return evaluate.load(str(Path(__file__).with_name("mrr")))
