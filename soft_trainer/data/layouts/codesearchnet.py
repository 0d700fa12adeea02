"""Reads rows with CodeSearchNet's columns from the Hub or from a folder of JSON Lines files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from datasets import Dataset, Features, List, Value
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from soft_trainer.data.array_cache import flat
from soft_trainer.data.columns import without_empty
from soft_trainer.data.folders import SPLITS, is_hub_name, list_files
from soft_trainer.data.languages import tables_in
from soft_trainer.data.layouts.published import load_published, reading_hub
from soft_trainer.data.layouts.tables import named_splits, read_tables
from soft_trainer.data.plain_columns import concatenated
from soft_trainer.data.split import Split
from soft_trainer.errors import UserError
from soft_trainer.system.terminal import nearest_file, print_on_main

TEXTS = ("repo", "path", "func_name", "original_string", "language", "code", "docstring", "url", "partition")
TOKEN_LISTS = ("code_tokens", "docstring_tokens")
FEATURES = Features({name: Value("string") for name in TEXTS} | {name: List(Value("string")) for name in TOKEN_LISTS})
# A user's file may also have `negatives`: urls or texts of functions that do not answer the row's query.

HUB_COLUMNS = {
    "repository_name": "repo",
    "func_path_in_repository": "path",
    "whole_func_string": "original_string",
    "func_code_string": "code",
    "func_code_tokens": "code_tokens",
    "func_documentation_string": "docstring",
    "func_documentation_tokens": "docstring_tokens",
    "split_name": "partition",
    "func_code_url": "url",
}


def load_folder(folder: str | Path, splits: Sequence[str] = SPLITS) -> dict[str, Dataset]:
    """Reads the tables of a folder, such as `train.jsonl` or `test.jsonl.gz`, without empty columns. Caches the rows.

    Args:
        splits: the splits to return, if the folder has them.

    Raises:
        UserError: the rows cannot be read.
    """
    tables = read_tables(list_files(folder))[0]
    return {split: without_empty(tables[split]) for split in splits if split in tables}


def load_hub(name: str, configuration: str | None = None, revision: str | None = None) -> dict[str, Dataset]:
    """Reads the splits of a data set on the Hub, which may be a folder of rows such as `soft-trainer mine` writes.

    CodeSearchNet's columns on the Hub get the names that its JSON Lines files use. If no split has a known name, all
    rows become train.

    Args:
        configuration: the data set's configuration, such as a language of CodeSearchNet. In a folder of
            rows, this selects rows by the column `language`.
        revision: a branch, tag or commit.

    Raises:
        UserError: `name` is not a name on the Hub, the data set does not exist, the Hub cannot be reached, or no row
            is in the language.
    """
    if not is_hub_name(name):
        raise UserError(f"{name}: no such folder or file, and not a name on the Hub (USER/NAME){nearest_file(name)}")
    with reading_hub(f"{name} ({configuration})" if configuration else name):
        folder = _pushed_folder(name, revision)
    if folder is None:
        splits = {}
        for split, rows in load_published(name, configuration, revision).items():
            rows = rows.rename_columns({old: new for old, new in HUB_COLUMNS.items() if old in rows.column_names})
            if FEATURES.keys() <= {*rows.column_names}:
                rows = rows.select_columns(list(FEATURES)).cast(FEATURES)
            splits[split] = rows
        return named_splits(splits)
    loaded = load_folder(folder)
    if configuration is None:
        return loaded
    return tables_in(loaded, configuration, name)


def _pushed_folder(name: str, revision: str | None) -> Path | None:
    """Downloads a data set with files such as `train.jsonl.gz`. Returns None if there are no such files."""
    patterns = ["README.md"]  # without any match, the client would print a warning
    for split in SPLITS:
        patterns += [f"{split}.jsonl", f"{split}.jsonl.gz"]
    try:
        folder = Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except LocalEntryNotFoundError:  # without a network, `datasets` may still have a cached copy
        return None
    names = list_files(folder).paths
    return folder if any(f"{split}.jsonl" in names for split in SPLITS) else None


def select_by_urls(splits: Mapping[str, Split], folder: str | Path) -> dict[str, Split]:
    """Regroups the rows of `splits` by lists of urls: `folder/SPLIT.txt` lists the urls that belong to SPLIT.

    As in the published code, urls without a row are dropped. The number of dropped urls is printed.

    Raises:
        UserError: a list is missing.
    """
    parts = [split.to_pairs() for split in splits.values()]
    for name, split in splits.items():
        if name != "train":
            parts += [split.queries, split.corpus]  # rows without a pair
    rows = concatenated(parts)
    first: dict[str, int] = {}
    for row, url in enumerate(rows["url"][:]):
        first.setdefault(url, row)
    chosen = {}
    for split in SPLITS:
        path = Path(folder) / f"{split}.txt"
        if not path.is_file():
            raise UserError(f"{path}: no such file; split_urls needs {', '.join(f'{s}.txt' for s in SPLITS)}")
        urls = dict.fromkeys(filter(None, map(str.strip, path.read_text().splitlines())))
        numbers = [first[url] for url in urls if url in first]
        if dropped := len(urls) - len(numbers):
            print_on_main(f"{path.name}: dropped {dropped:,} of {len(urls):,} urls, because they have no row")
        chosen[split] = rows.select(numbers)
    corpus = flat(chosen.pop("codebase"))
    found = {"train": Split.from_pairs(chosen.pop("train"))}
    return found | {name: Split.from_urls(queries, corpus) for name, queries in chosen.items()}
