"""Pushes the rows of a run to the Hub as a data set: the folder that `--data_dir` reads, with a card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from datasets import Dataset, DatasetDict, DatasetInfo, Features
from datasets.info import DatasetInfosDict
from huggingface_hub import DatasetCard, DatasetCardData
from transformers import TrainingArguments

from soft_trainer import distributed
from soft_trainer.data.codesearchnet import FEATURES, FILE_FEATURES, HUB_SPLITS
from soft_trainer.errors import UserError
from soft_trainer.files import reporting_disk_errors, write_rows, write_text
from soft_trainer.hub.push import PUSHED_ROWS, check_push, push_folder
from soft_trainer.options.fields import DataArguments
from soft_trainer.terminal import print_on_main, table

USES = {
    "train": "pairs to train on",
    "valid": "queries that choose the best checkpoint",
    "test": "queries that the result is reported on",
    "codebase": "the corpus: the functions that queries are ranked against",
}
LARGEST = 5  # repositories that the card names
_TEMPLATE = Path(__file__).with_name("data_card.md.jinja")


def check_data_push(arguments: DataArguments, args: TrainingArguments) -> None:
    """Makes sure, before anything is mined, that the push of `--push_data_to_hub` can succeed.

    Raises:
        UserError: the rows are already on the Hub, or `check_push` refuses.
    """
    if not arguments.push_data_to_hub:
        return
    if not (arguments.source_dir or arguments.history or arguments.data_dir):
        raise UserError("push_data_to_hub: give rows of your own with --source_dir, --history or --data_dir")
    check_push(arguments.push_data_to_hub, args.hub_token, args.hub_private_repo, "dataset")


def push_data(data: DatasetDict, arguments: DataArguments, args: TrainingArguments) -> None:
    """Pushes the rows of a run from the main process, if `--push_data_to_hub` is given.

    Raises:
        UserError: the push failed for good. The folder is complete, and the message says how to push it later.
    """
    name = arguments.push_data_to_hub
    if not name or distributed.rank_and_world_size()[0] != 0:
        return
    folder = write_data(data, arguments, Path(args.output_dir) / PUSHED_ROWS)
    url = push_folder(
        folder, name, args.hub_token, args.hub_private_repo, commit_message="Rows of a run", repo_type="dataset"
    )
    print_on_main(f"Rows pushed: {url}")


def write_data(data: DatasetDict, arguments: DataArguments, folder: str | Path) -> Path:
    """Writes `SPLIT.jsonl.gz` with every column of CodeSearchNet, and the card, into `folder`.

    If any split has `source` or `negatives`, all splits get the column.

    Raises:
        UserError: the disk is full or the folder cannot be written.
    """
    folder = Path(folder)
    with reporting_disk_errors(folder):
        columns = _features(data)
        write_rows({split: _complete(rows, columns) for split, rows in data.items()}, folder)
        write_text(folder / "README.md", str(data_card(data, arguments)))
    return folder


def _features(data: DatasetDict) -> Features:
    """Returns the columns of the files."""
    given = {name for rows in data.values() for name in rows.column_names}
    return Features({name: kind for name, kind in FILE_FEATURES.items() if name in FEATURES or name in given})


def _complete(rows: Dataset, columns: Iterable[str]) -> Iterator[dict]:
    """Yields the rows with all of the columns; missing values are None."""
    return ({name: row.get(name) for name in columns} for row in rows)


def data_card(data: DatasetDict, arguments: DataArguments) -> DatasetCard:
    """Fills in the card: a header that tells `datasets.load_dataset` the splits and columns, and text for people."""
    split, rows = next(iter(data.items()))
    repositories = Counter(rows["repo"][:] if "repo" in rows.column_names else [])
    return DatasetCard.from_template(
        _header(data, arguments.languages),
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


def _header(data: DatasetDict, languages: list[str]) -> DatasetCardData:
    files = [{"split": HUB_SPLITS.get(split, split), "path": f"{split}.jsonl.gz"} for split in data]
    header = DatasetCardData(
        language=["code"],
        license="other",
        task_categories=["text-retrieval"],
        tags=["code-search", "soft-infonce", *languages],
        configs=[{"config_name": "default", "data_files": files}],
    )
    DatasetInfosDict({"default": DatasetInfo(features=_features(data))}).to_dataset_card_data(header)
    return header
