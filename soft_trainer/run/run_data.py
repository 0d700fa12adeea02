"""Defines a run's rows: the tables as they were read, and the splits for training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from datasets import DatasetDict

from soft_trainer.data.any_rows import splits_of
from soft_trainer.data.codesearchnet import rows_in
from soft_trainer.data.judgments import Split


@dataclass(frozen=True)
class RunData:
    """The rows of a run.

    Args:
        tables: the tables that exist, out of train (a query and a code per row), valid and test (queries), and
            codebase.
        splits: train, valid and test, each with its corpus and judgments.
    """

    tables: DatasetDict
    splits: dict[str, Split]

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

    def evaluated(self, name: str, languages: Sequence[str]) -> Split | dict[str, Split] | None:
        """Returns valid or test, or None. If there are several languages, each has its own split and corpus."""
        if name not in self.splits or len(languages) < 2:
            return self.splits.get(name)
        return {
            language: Split.from_urls(rows_in(self.tables[name], language), rows_in(self.tables["codebase"], language))
            for language in languages
        }
