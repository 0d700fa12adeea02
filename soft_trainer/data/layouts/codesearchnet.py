"""Reads rows with CodeSearchNet's columns from the Hub or from a folder of JSON Lines files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
from datasets import Dataset, DatasetDict, Features, List, Value
from datasets.arrow_writer import ArrowWriter
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from soft_trainer.data.array_cache import cached_dataset, flat
from soft_trainer.data.column_names import (
    CODE_COLUMNS,
    NEGATIVE,
    NEGATIVES,
    PAIRS,
    QUERY_COLUMNS,
    SCORE,
    SCORES,
    SCORES_OF,
)
from soft_trainer.data.columns import name_unused
from soft_trainer.data.languages import tables_in
from soft_trainer.data.layouts.files import SPLITS, files_of_splits
from soft_trainer.data.layouts.published import load_published, reading_hub
from soft_trainer.data.layouts.tables import HUB_NAME, named_splits, row_files
from soft_trainer.data.plain_columns import concatenated
from soft_trainer.data.split import Split
from soft_trainer.errors import UserError
from soft_trainer.files import read_json_lines, written_aside
from soft_trainer.fingerprints import file_fingerprint, fingerprint
from soft_trainer.terminal import nearest_file, print_on_main

TEXTS = ("repo", "path", "func_name", "original_string", "language", "code", "docstring", "url", "partition")
TOKEN_LISTS = ("code_tokens", "docstring_tokens")
FEATURES = Features({name: Value("string") for name in TEXTS} | {name: List(Value("string")) for name in TOKEN_LISTS})
# A user's file may also have `negatives`: urls or texts of functions that do not answer the row's query.
FILE_FEATURES = Features(FEATURES | {"source": Value("string"), "negatives": List(Value("string"))})
FILE_FEATURES["scores"] = List(Value("float64"))  # of the function, then of the negatives

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
HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
WRITTEN_AT_ONCE = 1000  # rows


def is_codesearchnet(folder: Path) -> bool:
    """Returns True if a folder has only JSON Lines files named after splits, with CodeSearchNet's columns in row 1."""
    files = files_of_splits(folder, _split_of)
    if not files or files != row_files(folder):
        return False  # a split has another name or format, such as `dev.jsonl` or `test.csv`
    try:
        first = min(files, key=SPLITS.index)
        _, row = next(read_json_lines(files[first][0]), (None, {}))
    except UserError:
        return True  # `load_folder` raises a better error
    if any(NEGATIVE.fullmatch(name) and name != NEGATIVES for name in row):
        return False  # `load_jsonl` does not read these columns
    if not {SCORE, *itertools.chain.from_iterable(SCORES_OF)}.isdisjoint(row):
        return False
    if row and not row.keys() & {*QUERY_COLUMNS, *CODE_COLUMNS}:
        return False
    return not any({*pair} <= row.keys() for pair in PAIRS)


def load_folder(folder: str | Path, splits: Sequence[str] = SPLITS) -> DatasetDict:
    """Reads splits from a folder with files such as `train.jsonl` or `test.jsonl.gz`. Caches and memory-maps the rows.

    Args:
        splits: the splits to read. A split without a file is skipped.

    Raises:
        UserError: a row is not a JSON object. The message gives the file and the row.
    """
    files = files_of_splits(Path(folder), _split_of)
    return DatasetDict({split: load_jsonl(files[split][0]) for split in splits if split in files})


def _split_of(name: str) -> str | None:
    split = name.removesuffix(".jsonl")
    if name != split and split in SPLITS:
        return split
    return None


def load_jsonl(path: Path) -> Dataset:
    """Reads CodeSearchNet's columns and `negatives` from a JSON Lines file, plain or gzipped.

    Raises:
        UserError: a row is not a JSON object, or a value has the wrong type. The message gives the file and the row.
    """
    first = next(_read_rows(path), {})
    if not first:
        raise UserError(f"{path}: no rows")
    name_unused(next(read_json_lines(path))[1], FILE_FEATURES, str(path))
    if all(value is None for value in first.values()):
        raise UserError(f"{path}: row 1 has none of the columns {', '.join(FILE_FEATURES)}; rename its columns")
    made_from = fingerprint(file_fingerprint(path), path.suffix, str(FILE_FEATURES))

    def build(stored: Path) -> Dataset:
        with written_aside(stored) as aside, ArrowWriter(path=str(aside), features=FILE_FEATURES) as writer:
            rows = _read_rows(path)
            while batch := list(itertools.islice(rows, WRITTEN_AT_ONCE)):
                writer.write_table(pa.Table.from_pylist(batch, schema=FILE_FEATURES.arrow_schema))
            writer.finalize()
        return Dataset.from_file(str(stored))

    rows = cached_dataset(made_from, build)
    # An empty column is removed, so that the text is read from another column (see `text_column`).
    return rows.remove_columns([name for name in FILE_FEATURES if rows.data.column(name).null_count == len(rows)])


def _read_rows(path: Path) -> Iterator[dict]:
    """Yields the rows of a JSON Lines file with exactly the columns of FILE_FEATURES. Missing values are None."""
    for place, row in read_json_lines(path):
        values = {name: row.get(name) for name in FILE_FEATURES}
        for name, value in values.items():
            if isinstance(FILE_FEATURES[name], List):
                kind = list
            else:
                kind = str
            if kind is list and isinstance(value, str):
                values[name] = value = value.split() if name in TOKEN_LISTS else [value]
            if value is not None and not isinstance(value, kind):
                raise UserError(f"{place}: {name} is {type(value).__name__}, expected {kind.__name__}")
            of_item, what = (float | int | None, "a number") if name == SCORES else (str, "text")
            if kind is list and not all(isinstance(item, of_item) for item in value or ()):
                raise UserError(f"{place}: {name} contains a value that is not {what}")
        yield values


def load_hub(name: str, configuration: str | None = None, revision: str | None = None) -> dict[str, Dataset]:
    """Reads the splits of a data set on the Hub, which may be one that `--push_data_to_hub` pushed.

    CodeSearchNet's columns on the Hub get the names that its JSON Lines files use. If no split has a known name, all
    rows become train.

    Args:
        configuration: the data set's configuration, such as a language of CodeSearchNet. In a data set that
            `--push_data_to_hub` made, this selects rows by the column `language`.
        revision: a branch, tag or commit.

    Raises:
        UserError: `name` is not a name on the Hub, the data set does not exist, the Hub cannot be reached, or no row
            is in the language.
    """
    if not HUB_NAME.fullmatch(name):
        raise UserError(f"{name}: no such folder or file, and not a name on the Hub (USER/NAME){nearest_file(name)}")
    with reading_hub(f"{name} ({configuration})" if configuration else name):
        folder = _pushed_folder(name, revision)
    if folder is None:
        return named_splits(
            {split: _as_files(rows) for split, rows in load_published(name, configuration, revision).items()}
        )
    loaded = load_folder(folder)
    if configuration is None:
        return dict(loaded)
    return tables_in(loaded, configuration, name)


def _as_files(rows: Dataset) -> Dataset:
    """Renames CodeSearchNet's Hub columns to the names in its files: `whole_func_string` becomes `original_string`."""
    rows = rows.rename_columns({old: new for old, new in HUB_COLUMNS.items() if old in rows.column_names})
    if FEATURES.keys() <= {*rows.column_names}:
        return rows.select_columns(list(FEATURES)).cast(FEATURES)
    return rows


def _pushed_folder(name: str, revision: str | None) -> Path | None:
    """Downloads a data set with files such as `train.jsonl.gz`. Returns None if there are no such files."""
    patterns = ["README.md"]  # without any match, the client would print a warning
    for split in SPLITS:
        patterns += [f"{split}.jsonl", f"{split}.jsonl.gz"]
    try:
        folder = Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except LocalEntryNotFoundError:  # without a network, `datasets` may still have a cached copy
        return None
    if files_of_splits(folder, _split_of):
        return folder
    return None


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
