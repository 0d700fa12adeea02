"""Measures an encoder on evaluation sets before and after training, with lexical BM25 for comparison."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from datasets import Dataset
from torch import Tensor

from soft_trainer import distributed
from soft_trainer.data.split import Split
from soft_trainer.data.tokens import column_texts, text_column
from soft_trainer.errors import UserError
from soft_trainer.evaluation.lexical import lexical_rankings
from soft_trainer.evaluation.ranking import Ranking, retrieval_metrics
from soft_trainer.evaluation.results import CHANGE, MARGIN, change_of_mrr, metrics_table
from soft_trainer.evaluation.retrieval import RetrievalOutput, answer_pairs, by_query, means
from soft_trainer.terminal import print_on_main


class Measurements:
    """Ranks evaluation sets with a trainer's encoder and with BM25, and stores the metrics and rankings.

    Args:
        trainer: a `SoftInfoNCETrainer`.
        sets: the evaluation sets, keyed by name.

    Attributes:
        results: `{set: {system: metrics}}`. A system is "untrained" (before training), "trained", "lexical" (BM25) or
            "combined" (the encoder with BM25).
        rankings: the encoder's latest ranking of each set.
        ranks_before: for each set, the ranks of the relevant functions before training, int64[Q].
    """

    def __init__(self, trainer, sets: Mapping[str, Split]):
        self.trainer = trainer
        self.measured = dict(sets)
        self.results: dict[str, dict[str, dict]] = {name: {} for name in sets}
        self.rankings: dict[str, Ranking] = {}
        self.ranks_before: dict[str, Tensor] = {}

    def measure(self, system: str, lexical: bool = False) -> None:
        """Ranks the queries of all sets with the encoder's current weights.

        Args:
            system: the name of these weights in the results: "untrained" or "trained".
            lexical: whether to also rank with lexical BM25, a baseline that needs no training, and with both combined.
                This is slow for a large corpus, so do it only once.
        """
        with_corpus = defaultdict(dict)  # each corpus is encoded once
        for name, split in self.measured.items():
            with_corpus[split.corpus._fingerprint][name] = split
        for sets in with_corpus.values():
            codes = self.trainer.embed_rows(next(iter(sets.values())).corpus, "code")
            for name, split in sets.items():
                queries = self.trainer.embed_rows(split.queries, "query")
                output = self.trainer.predict(split, None, name, codes=codes, queries=queries)
                metrics = {key.removeprefix(f"{name}_"): value for key, value in output.metrics.items()}
                self.add(name, system, dataclasses.replace(output, metrics=metrics))
                if lexical and distributed.rank_and_world_size()[0] == 0:
                    self._measure_lexical(name, split, queries, codes)

    def _measure_lexical(self, name: str, split: Split, embedded: Tensor, codes: Tensor) -> None:
        """Ranks a corpus with lexical BM25, and with BM25 and the encoder combined. Skips a corpus without words."""
        profile = self.trainer.encoder
        columns = profile.code_columns
        if profile.data_flow_length:
            # `original_string` contains the query as a docstring, which GraphCodeBERT removes but BM25 would match.
            columns = [name for name in ("code_tokens", "code", *columns) if name != "original_string"]
        queries = _words(split.queries, profile.query_columns, "query")
        words = _words(split.corpus, columns, "code")
        rows, targets = answer_pairs(split.judgments)
        asked = [queries[row] for row in rows.tolist()]
        try:
            excluded = None
            if (unranked := split.unranked()) is not None:
                excluded = torch.from_numpy(unranked)[rows]
            both = (embedded[rows.to(embedded.device)], codes)
            rankings = lexical_rankings(asked, words, targets, both, excluded=excluded)
        except UserError as error:
            print_on_main(f"{name}: skipped lexical BM25. {error}")
            return
        for system, of_pairs in rankings.items():
            ranking, measured = by_query(of_pairs, split.judgments)
            metrics = retrieval_metrics(ranking.ranks, len(split.corpus)) | means(measured)
            self.add(name, system, RetrievalOutput(ranking, metrics, by_query=measured))

    def add(self, name: str, system: str, output: RetrievalOutput) -> None:
        """Stores a set's ranking and metrics. After training, also adds the change in MRR to the metrics."""
        metrics = output.metrics
        if system == "untrained":
            self.ranks_before[name] = output.ranking.ranks
        if system == "trained" and name in self.ranks_before:
            metrics |= change_of_mrr(self.ranks_before[name], output.ranking.ranks)
        self.results[name][system] = metrics
        if system not in ("lexical", "combined"):
            self.rankings[name] = output.ranking

    def table(self) -> str:
        """Returns all results as a table, with a note for each set that is too small to show its change in MRR."""
        lines = [metrics_table(self.results)]
        for name, systems in self.results.items():
            metrics = systems.get("trained", {})
            if "untrained" in systems and metrics.get("queries") == 1:
                lines.append(f"{name}: one query is too few to show any change")
            if CHANGE in metrics and abs(metrics[CHANGE]) < metrics[MARGIN]:
                lines.append(
                    f"{name}: {metrics['queries']:,} queries are too few to show a change below {metrics[MARGIN]:.3f}"
                )
        return "\n".join(lines)


def _words(rows: Dataset, columns: Sequence[str], side: str) -> list[list[str]]:
    return [text.split() for text in column_texts(rows, text_column(rows, columns, side))]
