"""The rows of a run as a data set on the Hub: the folder that `--data_dir` reads, with a card."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, DatasetInfo
from datasets.info import DatasetInfosDict
from huggingface_hub import DatasetCard, DatasetCardData
from transformers import TrainingArguments

from soft_trainer import distributed
from soft_trainer.arguments import DataArguments
from soft_trainer.data.codesearchnet import FEATURES, HUB_SPLITS
from soft_trainer.errors import UserError
from soft_trainer.files import reporting_disk_errors, write_rows
from soft_trainer.hub.push import PUSHED_ROWS, check_push, push_folder
from soft_trainer.terminal import print_on_main, table

USED_FOR = {
    "train": "pairs to train on",
    "valid": "queries of known functions, to choose by",
    "test": "queries of known functions, to report",
    "codebase": "the functions that queries are ranked against",
}
COLUMNS = {
    "repo, path, func_name": "where the function stands",
    "language": "its programming language",
    "code, code_tokens": "the function without its documentation, as text and as tokens",
    "docstring, docstring_tokens": "what its documentation says it does, as text and as tokens: the query",
    "original_string": "the function as it stands in its file",
    "url": "an id: a query and the function of the codebase that answers it have the same",
    "partition": "its split",
}
LARGEST = 5  # repositories that the card names


def check_data_push(arguments: DataArguments, args: TrainingArguments) -> None:
    """Make sure, before anything is mined, that `--push_data_to_hub` can be done.

    Raises:
        UserError: rows that are on the Hub already, or what `check_push` refuses.
    """
    if not arguments.push_data_to_hub:
        return
    if not (arguments.source_dir or arguments.data_dir):
        raise UserError("push_data_to_hub: give rows of your own with --source_dir or --data_dir")
    check_push(arguments.push_data_to_hub, args.hub_token, args.hub_private_repo, "dataset")


def push_data(data: DatasetDict, arguments: DataArguments, args: TrainingArguments) -> None:
    """Push the rows of a run, where `--push_data_to_hub` asks for it; the main process does.

    Raises:
        UserError: the push failed for good; the folder is whole, and the message says how to push it later.
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
    """Write `SPLIT.jsonl.gz` with every column of CodeSearchNet, and the card, into `folder`.

    Raises:
        UserError: the disk is full or the folder cannot be written.
    """

    folder = Path(folder)
    with reporting_disk_errors(folder):
        write_rows({split: _complete(rows) for split, rows in data.items()}, folder)
        (folder / "README.md").write_text(str(data_card(data, arguments)), encoding="utf-8")
    return folder


def _complete(rows: Dataset) -> Iterator[dict]:
    """Rows with every column of FEATURES, None where they have none."""
    return ({name: row.get(name) for name in FEATURES} for row in rows)


def data_card(data: DatasetDict, arguments: DataArguments) -> DatasetCard:
    """The card: a header by which `datasets.load_dataset` finds splits and columns, and a body for people."""
    name, languages = arguments.rows_name, arguments.languages
    counts = [(split, len(rows), USED_FOR[split]) for split, rows in data.items()]
    sections = {
        "Use": _USE.format(name=name, language=",".join(languages)),
        "Where from": _origin(data, arguments),
        "Rows": table(["split", "rows", "what for"], counts),
        "Columns": table(["columns", "meaning"], list(COLUMNS.items())),
        "Licence": _LICENCE,
    }
    body = "\n\n".join(f"## {title}\n\n{text.strip()}" for title, text in sections.items())
    introduction = f"Functions ({', '.join(languages)}) and what their documentation says they do, for code search."
    title = name.rsplit("/", 1)[-1]
    return DatasetCard(f"---\n{_header(data, languages).to_yaml()}\n---\n\n# {title}\n\n{introduction}\n\n{body}\n")


def _header(data: DatasetDict, languages: list[str]) -> DatasetCardData:
    files = [{"split": HUB_SPLITS.get(split, split), "path": f"{split}.jsonl.gz"} for split in data]
    header = DatasetCardData(
        language=["code"],
        license="other",
        task_categories=["text-retrieval"],
        tags=["code-search", "soft-infonce", *languages],
        configs=[{"config_name": "default", "data_files": files}],
    )
    DatasetInfosDict({"default": DatasetInfo(features=FEATURES)}).to_dataset_card_data(header)
    return header


def _origin(data: DatasetDict, arguments: DataArguments) -> str:
    """Where the rows are from, and what was done to them."""
    source = arguments.source_dir
    tree = "the standard library of Python" if source == "stdlib" else "a source tree"
    texts = [f"Mined by `soft_trainer` from {tree}." if source else "Rows of a folder of JSON lines."]
    split, rows = next(iter(data.items()))
    if "repo" in rows.column_names:
        counted = sorted(pc.value_counts(rows.with_format("arrow")[:]["repo"]).to_pylist(), key=_most)
        largest = ", ".join(f"{entry['values']} ({entry['counts']:,})" for entry in counted[:LARGEST])
        texts.append(f"Those of {split} are from {len(counted):,} repositories or packages; the largest: {largest}.")
    if arguments.filters:
        texts.append(f"Filters: {arguments.filters}.")
    return " ".join(texts)


def _most(entry: dict) -> tuple:
    return -entry["counts"], str(entry["values"])


_USE = """
```bash
accelerate launch run_codesearch.py --dataset_name {name} --language {language}
```

```python
from datasets import load_dataset

rows = load_dataset("{name}")
print(rows["train"][0]["docstring"])
```
"""
_LICENCE = """
Every function keeps the licence of the repository or package that it is from (`repo`, `path`); nothing is licensed
anew here. Look there before you pass the rows on, or what was trained on them.
"""
