"""Writes the rows of a run as a data set for the Hub: the folder that `--data_dir` reads, with a card."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from datasets import DatasetDict, DatasetInfo, Features
from datasets.info import DatasetInfosDict
from huggingface_hub import DatasetCard, DatasetCardData

from soft_trainer.data.codesearchnet import FEATURES, FILE_FEATURES, HUB_SPLITS
from soft_trainer.files import reporting_disk_errors, write_rows, write_text
from soft_trainer.options.fields import DataArguments
from soft_trainer.terminal import table

USES = {
    "train": "pairs to train on",
    "valid": "queries that choose the best checkpoint",
    "test": "queries that the result is reported on",
    "codebase": "the corpus: the functions that queries are ranked against",
}
LARGEST = 5  # repositories that the card names
_TEMPLATE = Path(__file__).with_name("data_card.md.jinja")


def write_data(data: DatasetDict, arguments: DataArguments, folder: str | Path) -> Path:
    """Writes `SPLIT.jsonl.gz` with every column of CodeSearchNet, and the card, into `folder`.

    If any split has `source` or `negatives`, all splits get the column.

    Raises:
        UserError: the disk is full or the folder cannot be written.
    """
    folder, columns = Path(folder), _features(data)
    with reporting_disk_errors(folder):
        parts = {split: ({name: row.get(name) for name in columns} for row in rows) for split, rows in data.items()}
        write_rows(parts, folder)
        write_text(folder / "README.md", str(data_card(data, arguments)))
    return folder


def _features(data: DatasetDict) -> Features:
    """Returns the columns of the files."""
    given = {name for rows in data.values() for name in rows.column_names}
    return Features({name: kind for name, kind in FILE_FEATURES.items() if name in FEATURES or name in given})


def data_card(data: DatasetDict, arguments: DataArguments) -> DatasetCard:
    """Fills in the card: a header that tells `datasets.load_dataset` the splits and columns, and text for people."""
    files = [{"split": HUB_SPLITS.get(split, split), "path": f"{split}.jsonl.gz"} for split in data]
    header = DatasetCardData(
        language=["code"],
        license="other",
        task_categories=["text-retrieval"],
        tags=["code-search", "soft-infonce", *arguments.languages],
        configs=[{"config_name": "default", "data_files": files}],
    )
    DatasetInfosDict({"default": DatasetInfo(features=_features(data))}).to_dataset_card_data(header)
    split, rows = next(iter(data.items()))
    repositories = Counter(rows["repo"][:] if "repo" in rows.column_names else [])
    return DatasetCard.from_template(
        header,
        template_path=str(_TEMPLATE),
        title=arguments.rows_name.rsplit("/", 1)[-1],
        name=arguments.rows_name,
        languages=arguments.languages,
        source=arguments.history or arguments.source_dir,
        history=bool(arguments.history),
        filters=arguments.filters,
        split=split,
        repositories=len(repositories),
        largest=", ".join(f"{name} ({count:,})" for name, count in repositories.most_common(LARGEST)),
        negatives="negatives" in _features(data),
        rows=table(["split", "rows", "use"], [(name, len(part), USES[name]) for name, part in data.items()]),
    )
