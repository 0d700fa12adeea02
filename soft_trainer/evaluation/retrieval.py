"""What is retrieved by what: queries, their own codes in a codebase, and how well they were found."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor

from soft_trainer.errors import SetupError
from soft_trainer.evaluation.ranking import Ranking


@dataclass(frozen=True)
class RetrievalOutput:
    """What `SoftInfoNCETrainer.predict` returns: the ranking of every query's own code, and the metrics of it."""

    ranking: Ranking
    metrics: dict[str, float]

    @property
    def ranks(self) -> Tensor:
        """The rank of each query's own code, LongTensor[Q], 1 is best."""
        return self.ranking.ranks

    @property
    def top_indices(self) -> Tensor:
        """Rows of the codebase that came first, LongTensor[Q, k], best first."""
        return self.ranking.top_indices


def target_rows(dataset: Dataset, codebase: Dataset) -> Tensor:
    """The row of each query's own code in the codebase, LongTensor[Q], by `url`.

    Raises:
        SetupError: a query whose url is not in the codebase.
    """
    places = {url: row for row, url in enumerate(codebase["url"])}
    missing = [url for url in dataset["url"] if url not in places]
    if missing:
        raise SetupError(f"{len(missing)} queries have a url that is not in the codebase, the first: {missing[0]}")
    return torch.tensor([places[url] for url in dataset["url"]])
