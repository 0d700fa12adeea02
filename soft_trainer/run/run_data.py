"""Defines a run's rows: the tables as they were read, and the splits for training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from datasets import DatasetDict

from soft_trainer.data.any_rows import splits_of
from soft_trainer.data.joining import join_sources
from soft_trainer.data.judgments import Split
from soft_trainer.data.languages import rows_in
from soft_trainer.encoders.profiles import EncoderProfile


@dataclass(frozen=True)
class RunData:
    """The rows of a run.

    Args:
        tables: the tables that exist, out of train (a query and a code per row), valid and test (queries), and
            codebase.
        splits: train, valid and test, each with its corpus and judgments.
        sources: the rows of each source, keyed by name, if there are several. Then `tables` and `splits` only have
            their training rows.
    """

    tables: DatasetDict
    splits: dict[str, Split]
    sources: Mapping[str, RunData] = field(default_factory=dict)

    @classmethod
    def of_tables(cls, tables: DatasetDict) -> RunData:
        """Makes splits from tables. A code answers the queries with the same url."""
        return cls(tables, splits_of(tables))

    @classmethod
    def of_splits(cls, splits: dict[str, Split]) -> RunData:
        """Makes tables from splits. Valid and test must have the same corpus."""
        tables = DatasetDict()
        for name, split in splits.items():
            if name == "train":
                tables[name] = split.pair_rows()
            else:
                tables[name] = split.queries
            if name != "train":
                tables["codebase"] = split.corpus
        return cls(tables, splits)

    @classmethod
    def of_sources(cls, sources: Mapping[str, RunData], profile: EncoderProfile) -> RunData:
        """Joins the training rows of several sources. Valid and test stay apart."""
        parts = {name: data.splits["train"] for name, data in sources.items() if "train" in data.splits}
        if not parts:
            return cls(DatasetDict(), {}, sources)
        train = join_sources(parts, profile)
        return cls(DatasetDict(train=train.pair_rows()), {"train": train}, sources)

    def evaluated(self, name: str, languages: Sequence[str]) -> Split | dict[str, Split] | None:
        """Returns valid or test, or None. Each of several languages or sources has its own split and corpus."""
        if self.sources:
            sets = {source: data.splits[name] for source, data in self.sources.items() if name in data.splits}
            return sets or None
        if name not in self.splits or len(languages) < 2:
            return self.splits.get(name)
        return {
            language: Split.from_urls(rows_in(self.tables[name], language), rows_in(self.tables["codebase"], language))
            for language in languages
        }
