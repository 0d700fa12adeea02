"""Metrics of Matryoshka embeddings: the MRR by the first dimensions, such as `mrr_256`, in addition to `mrr`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from soft_trainer.evaluation.ranking import Ranking, retrieval_metrics

_PREFIX = "mrr_"


def shorter_metric(dim: int) -> str:
    """Returns the name of the MRR by the first `dim` dimensions."""
    return f"{_PREFIX}{dim}"


def shorter_titles(metrics: Iterable[str]) -> dict[str, str]:
    """Finds the MRRs by first dimensions among `metrics`; returns name -> title, most dimensions first."""
    dims = {int(name.removeprefix(_PREFIX)) for name in metrics if is_shorter_metric(name)}
    return {shorter_metric(dim): f"MRR by {dim} dimensions" for dim in sorted(dims, reverse=True)}


def is_shorter_metric(name: str) -> bool:
    """True for the name of an MRR by first dimensions."""
    return name.startswith(_PREFIX) and name.removeprefix(_PREFIX).isdecimal()


def mrr_by_dims(rankings: Mapping[int, Ranking], pool_size: int) -> dict[str, float]:
    """Computes the MRR of each ranking of `pool_size` codes; the rankings are keyed by their number of dimensions."""
    return {
        shorter_metric(dim): retrieval_metrics(ranking.ranks, pool_size)["mrr"] for dim, ranking in rankings.items()
    }
