"""The table of statistics at the start of a run: rows, lengths, truncation, duplicates, and the paper's counts."""

import pytest
from datasets import DatasetDict

from soft_trainer.data.load import make_splits
from soft_trainer.data.statistics import data_statistics, statistics_table
from soft_trainer.options.fields import DataArguments

# Table 6 of the paper: training, validation, test, codebase.
PAPER = {
    "ruby": ("24,927", "1,400", "1,261", "4,360"),
    "go": ("167,288", "7,325", "8,122", "28,120"),
}


def test_a_language_may_be_in_capitals():
    arguments = DataArguments(language=" Ruby")
    assert (arguments.language, arguments.languages) == ("ruby", ["ruby"])
    assert "rows in the paper" in statistics_table({}, arguments.language)


@pytest.fixture
def data(dataset):
    """Splits in which train contains two rows twice."""
    parts = {"train": [0, 1, 2, 3, 0, 1], "valid": [16, 17], "test": [20, 21, 22], "codebase": range(16, 24)}
    return DatasetDict({split: dataset.select(rows) for split, rows in parts.items()})


def cells(table: str) -> dict[str, list[str]]:
    """Parses a Markdown table to a dict from each row's first cell to its other cells."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {first: others for first, *others in lines}


def test_rows_and_duplicates_by_split_on_the_sides_that_are_read(data, profile, tokenizer):
    statistics = data_statistics(make_splits(data), profile, tokenizer)
    rows = {split: values["rows"] for split, values in statistics.items()}
    assert rows == {"train": 6, "valid": 2, "test": 3, "codebase": 8}
    sides = {split: set(values) - {"rows"} for split, values in statistics.items()}
    assert sides == {"train": {"query", "code"}, "valid": {"query"}, "test": {"query"}, "codebase": {"code"}}
    assert statistics["train"]["query"]["duplicates"] == statistics["train"]["code"]["duplicates"] == 2
    assert statistics["test"]["query"]["duplicates"] == 0


def test_lengths_are_before_the_cut(data, profile, tokenizer):
    lengths = sorted(len(tokenizer(" ".join(words))["input_ids"]) for words in data["codebase"]["code_tokens"])
    for longest in (20, lengths[-1] - 1, lengths[-1]):
        found = data_statistics(make_splits(data), profile.replace(code_length=longest), tokenizer)["codebase"]["code"]
        assert found["mean"] == pytest.approx(sum(lengths) / 8)
        assert found["p95"] == pytest.approx(lengths[6] + 0.65 * (lengths[7] - lengths[6]))
        assert found["cut"] == sum(length > longest for length in lengths) / 8
        assert (found["cut"] > 0) == (longest < lengths[-1])


@pytest.fixture
def statistics():
    side = {"mean": 10.4, "p95": 19.6, "cut": 0.125, "duplicates": 3}
    return {
        "train": {"rows": 12345, "query": side, "code": side | {"mean": 100.0}},
        "valid": {"rows": 20, "query": side},
        "test": {"rows": 30, "query": side},
        "codebase": {"rows": 50, "code": side},
    }


def test_the_table_shows_all_that_was_measured_and_for_codesearchnet_the_papers_counts(statistics):
    shown = cells(statistics_table(statistics))
    assert shown["train"] == ["12,345", "10", "20", "12.5%", "3", "100", "20", "12.5%", "3"]
    assert shown["codebase"] == ["50", "", "", "", "", "10", "20", "12.5%", "3"]
    assert "paper" not in statistics_table(statistics)
    for language, counts in PAPER.items():
        shown = cells(statistics_table(statistics, language))
        assert tuple(shown[split][1] for split in ("train", "valid", "test", "codebase")) == counts
        assert shown["train"][0] == "12,345" and "rows in the paper" in shown["split"]
    del statistics["valid"]
    assert "| valid: none |" in (shown := statistics_table(statistics)) and "test: none" not in shown
