"""Reads rows in CodeSearchNet's columns from the Hub or a folder of JSON lines, and checks them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, Features, List, Value, concatenate_datasets
from datasets.arrow_writer import ArrowWriter
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from soft_trainer.data.array_cache import cached_dataset
from soft_trainer.data.published import load_published, reading_hub
from soft_trainer.data.tokens import check_language_column, text_column
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.files import read_json_lines, written_aside
from soft_trainer.identity import code_fingerprint, file_fingerprint, fingerprint
from soft_trainer.mining.languages import SOURCE_LANGUAGES
from soft_trainer.options.fields import CODESEARCHNET_LANGUAGES
from soft_trainer.terminal import print_on_main, table

TEXTS = ("repo", "path", "func_name", "original_string", "language", "code", "docstring", "url", "partition")
TOKEN_LISTS = ("code_tokens", "docstring_tokens")
FEATURES = Features({name: Value("string") for name in TEXTS} | {name: List(Value("string")) for name in TOKEN_LISTS})
# A user's file may also have `negatives`: urls or texts of codes that are wrong for the row's query.
FILE_FEATURES = Features(FEATURES | {"source": Value("string"), "negatives": List(Value("string"))})
SPLITS = ("train", "valid", "test", "codebase")
SIDES_OF = {"train": ("query", "code"), "valid": ("query",), "test": ("query",), "codebase": ("code",)}

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
SHOWN = 5  # rows to list in an error message


def check_languages(languages: Sequence[str], reader: str | None = "CodeSearchNet") -> None:
    """Checks the names of languages.

    Args:
        reader: the part of the run that supports only some languages, for the message. None allows any name.

    Raises:
        UserError: `reader` does not support a language, or a name is empty or repeated.
    """
    if reader == "mining":
        known = tuple(SOURCE_LANGUAGES)
    else:
        known = CODESEARCHNET_LANGUAGES
    for name in languages:
        if not name or languages.count(name) > 1:
            raise UserError(f"language={name!r}: name every language once, comma-separated")
        if reader and name not in known:
            raise UserError(f"language={name!r}: {reader} knows only {', '.join(known)}")


def load_folder(
    folder: str | Path, splits: Sequence[str] = SPLITS, needed: Sequence[str] | None = None
) -> DatasetDict:
    """Reads the splits of a folder from `SPLIT.jsonl` or `SPLIT.jsonl.gz`. The rows are cached and memory-mapped.

    Args:
        needed: the splits that must exist. By default, all of `splits`.

    Raises:
        UserError: a file is missing, or a row is not a JSON object. The message gives the file and the row.
    """
    folder = Path(folder)
    files = split_files(folder)
    for split in splits:
        if split not in files and (needed is None or split in needed):
            others = ", ".join(sorted(path.name for path in folder.glob(f"{split}.*") if path.is_file()))
            hint = ""
            if others:
                hint = f"; rows are read from JSON lines, not from {others}"
            if not folder.is_dir():
                hint = ": no such folder"
            raise UserError(f"{folder}: neither {split}.jsonl nor {split}.jsonl.gz is there{hint}")
    return DatasetDict({split: load_jsonl(files[split]) for split in splits if split in files})


def split_files(folder: Path) -> dict[str, Path]:
    """Returns the file of each split in a folder. A plain file takes precedence over a gzipped one."""
    files = {}
    for split in SPLITS:
        for ending in (".gz", ""):
            path = folder / f"{split}.jsonl{ending}"
            if path.is_file():
                files[split] = path
    return files


def load_jsonl(path: Path) -> Dataset:
    """Reads CodeSearchNet's columns and `negatives` from a file of JSON lines, plain or gzipped.

    Raises:
        UserError: a row is not a JSON object, or a value has the wrong type. The message gives the file and the row.
    """
    first = next(_read_rows(path), {})
    if not first:
        raise UserError(f"{path}: no rows")
    if all(value is None for value in first.values()):
        raise UserError(f"{path}: row 1 has none of the columns {', '.join(FILE_FEATURES)}; rename its columns")
    code = code_fingerprint(__name__, "soft_trainer.files")
    made_from = fingerprint(file_fingerprint(path), path.suffix, str(FILE_FEATURES), code)

    def build(stored: Path) -> Dataset:
        with written_aside(stored) as aside, ArrowWriter(path=str(aside), features=FILE_FEATURES) as writer:
            rows = _read_rows(path)
            while batch := list(itertools.islice(rows, WRITTEN_AT_ONCE)):
                writer.write_table(pa.Table.from_pylist(batch, schema=FILE_FEATURES.arrow_schema))
            writer.finalize()
        return Dataset.from_file(str(stored))

    rows = cached_dataset(made_from, build)
    # Without its empty columns, the data set is read from other columns instead (see `text_column`).
    return rows.remove_columns([name for name in FILE_FEATURES if rows.data.column(name).null_count == len(rows)])


def _read_rows(path: Path) -> Iterator[dict]:
    """Yields rows with all columns of FILE_FEATURES. A value is None if the row lacks the column."""
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
            if kind is list and not all(isinstance(item, str) for item in value or ()):
                raise UserError(f"{place}: {name} holds a value that is not text")
        yield values


def load_hub(dataset_name: str, language: str | None) -> DatasetDict:
    """Reads a data set on the Hub: CodeSearchNet, or a folder that `--push_data_to_hub` pushed.

    Without a language, all rows are read. CodeSearchNet's columns are renamed to the columns of the JSON lines. Its
    corpus is valid and test together, with each url once. `--split_urls` selects the published corpus.

    Raises:
        UserError: there is no such data set, the Hub cannot be reached, or a split, a column or the language is
            missing.
    """
    if language:
        name = f"{dataset_name} ({language})"
    else:
        name = dataset_name
    with reading_hub(name):
        folder = _pushed_folder(dataset_name)
    if folder is not None:
        loaded = load_folder(folder, needed=())
        for split, rows in loaded.items():
            if language is None or "language" not in rows.column_names:
                continue
            loaded[split] = rows_in(rows, language)
            if not loaded[split]:
                others = ", ".join(sorted(set(rows["language"][:]) - {None}))
                found = f"{split} has no row in {language}, only {others}"
                raise UserError(f"{dataset_name}: {found}; choose with --language")
        return loaded
    loaded = load_published(dataset_name, language)
    splits = {}
    for split, hub_split in HUB_SPLITS.items():
        if hub_split not in loaded:
            raise UserError(f"{name}: no split {hub_split}, only {', '.join(loaded)}")
        rows = loaded[hub_split]
        rows = rows.rename_columns({a: b for a, b in HUB_COLUMNS.items() if a in rows.column_names})
        if missing := FEATURES.keys() - {*rows.column_names}:
            raise UserError(f"{name}: {hub_split} has no column {', '.join(sorted(missing))}")
        splits[split] = rows.select_columns(list(FEATURES)).cast(FEATURES)
    return DatasetDict(splits | {"codebase": corpus_of([splits["valid"], splits["test"]])})


def _pushed_folder(dataset_name: str) -> Path | None:
    """Returns the local copy of a data set that was pushed as a folder of JSON lines, or None for other data sets."""
    patterns = ["README.md"]  # without any match, the client would print a warning
    for split in SPLITS:
        patterns += [f"{split}.jsonl", f"{split}.jsonl.gz"]
    try:
        folder = Path(snapshot_download(dataset_name, repo_type="dataset", allow_patterns=patterns))
    except LocalEntryNotFoundError:  # without a network, `datasets` may still have a cached copy
        return None
    if split_files(folder):
        return folder
    return None


def corpus_of(parts: Sequence[Dataset]) -> Dataset:
    """Returns the rows with each url once, to serve as a corpus."""
    rows = concatenate_datasets(list(parts))
    repeated = pd.Series(rows["url"][:]).duplicated().to_numpy()
    return rows.select(np.flatnonzero(~repeated))


def rows_in(rows: Dataset, language: str) -> Dataset:
    """Selects the rows of one language."""
    places = np.flatnonzero(np.array(rows["language"][:], dtype=object) == language)
    if len(places) == len(rows):
        return rows
    return rows.select(places)


def languages_in(data: Mapping[str, Dataset]) -> list[str]:
    """Returns the languages of rows, the most common first.

    They come from the column `language`, or from file endings if there is no such column. If neither is known, the
    list is empty.
    """
    endings = {ending: name for name, table in SOURCE_LANGUAGES.items() for ending in table.extensions}
    counts: Counter[str] = Counter()
    for rows in data.values():
        if "language" in rows.column_names:
            counts.update(filter(None, rows["language"]))
        elif "path" in rows.column_names:
            suffixes = Counter(PurePosixPath(path or "").suffix for path in rows["path"])
            for ending, count in suffixes.items():
                if ending in endings:
                    counts[endings[ending]] += count
    return [name for name, _ in counts.most_common()]


def select_by_urls(data: DatasetDict, folder: str | Path) -> DatasetDict:
    """Makes splits from lists of urls. `folder/SPLIT.txt` lists the rows of `data` that belong to SPLIT.

    As in the published code, urls without a row are dropped. Prints how many.

    Raises:
        UserError: a list is missing, or the rows have no column `url`.
    """
    rows = concatenate_datasets([data[split] for split in SPLITS if split in data])
    if "url" not in rows.column_names:
        raise UserError("--split_urls selects rows by url, but no row has the column 'url'")
    first: dict[str, int] = {}
    for row, url in enumerate(rows["url"][:]):
        first.setdefault(url, row)
    chosen = {}
    for split in SPLITS:
        path = Path(folder) / f"{split}.txt"
        if not path.is_file():
            raise UserError(f"{path}: no such file; --split_urls needs {', '.join(f'{s}.txt' for s in SPLITS)}")
        urls = dict.fromkeys(filter(None, map(str.strip, path.read_text().splitlines())))
        places = [first[url] for url in urls if url in first]
        if dropped := len(urls) - len(places):
            print_on_main(f"{path.name}: {dropped:,} of {len(urls):,} urls have no row and are dropped")
        chosen[split] = rows.select(places)
    return DatasetDict(chosen)


def check_rows(data: DatasetDict, profile: EncoderProfile) -> None:
    """Checks that training and evaluation can use the rows. Training rows need no url.

    Raises:
        UserError: a split is empty, a column is missing, a row has no text, or the queries fail `check_targets`.
    """
    for split, rows in data.items():
        check_texts(rows, split, profile)
    check_urls(data)


def check_texts(rows: Dataset, split: str, profile: EncoderProfile) -> None:
    """Checks that rows have the texts that are needed in this split.

    Raises:
        UserError: there are no rows, a column is missing, or rows have no text. The message lists the rows.
    """
    if len(rows) == 0:
        raise UserError(f"{split}: no rows")
    columns = [text_column(rows, getattr(profile, f"{side}_columns"), side) for side in SIDES_OF[split]]
    if profile.data_flow_length and "code" in SIDES_OF[split]:
        check_language_column(rows, split)
        columns.append("language")
    for column in columns:
        _check_filled(rows, column, split)


def check_urls(data: DatasetDict) -> None:
    """Checks that the code of each query is in the corpus. Raises UserError if the queries fail `check_targets`."""
    for split in [split for split in ("valid", "test") if split in data]:
        check_targets(data[split], data.get("codebase"), split)


def check_targets(queries: Dataset, corpus: Dataset | None, name: str = "eval_dataset") -> None:
    """Checks that exactly one code of the corpus has the url of each query.

    Args:
        queries: rows with `url`.
        corpus: rows with `url`, the codes that the queries are ranked against.
        name: the name of the queries in messages.

    Raises:
        UserError: there are no queries or there is no corpus, a url is missing or empty, the corpus repeats a url, or
            it lacks the url of a query.
    """
    if queries is None:
        raise UserError(f"{name}: no queries; pass eval_dataset= here or to the trainer")
    if not queries:
        raise UserError(f"{name}: there are no rows")
    if corpus is None:
        raise UserError(
            f"{name}: no corpus to rank these queries against; add codebase.jsonl or codebase.jsonl.gz to the folder "
            "(in Python: codebase=)"
        )
    for part, rows in ((name, queries), ("codebase", corpus)):
        _check_filled(rows, "url", part)
    urls = pd.Series(corpus["url"][:], dtype=object)
    own = pd.Series(queries["url"][:], dtype=object)
    repeated = np.flatnonzero(urls.duplicated())
    if len(repeated):
        row = int(repeated[0])
        first = int(np.flatnonzero(urls == urls[row])[0])
        raise UserError(f"codebase: row {row + 1} repeats the url of row {first + 1}: {urls[row]}")
    missing = np.flatnonzero(~own.isin(urls)).tolist()
    if missing:
        if len(missing) == 1:
            verb = "has"
        else:
            verb = "have"
        raise UserError(f"{name}: {_rows(missing)} {verb} a url that is not in the codebase ({own[missing[0]]})")


def drop_unusable_rows(data: DatasetDict, profile: EncoderProfile) -> DatasetDict:
    """Drops rows without a text, and queries whose code was dropped. Prints how many were dropped from each split.

    Raises:
        UserError: a split lacks a column.
    """
    kept = {}
    counts = []
    for split in reversed([split for split in SPLITS if split in data]):  # the corpus first
        rows = data[split]
        unusable = set()
        for side in SIDES_OF[split]:
            unusable |= {*blank_rows(rows, text_column(rows, getattr(profile, f"{side}_columns"), side))}
        if split in ("valid", "test") and "codebase" in kept and "url" in rows.column_names:
            # A query whose url was never in the corpus stays, and causes an error later.
            lost = set(data["codebase"]["url"]) - set(kept["codebase"]["url"])
            unusable |= {row for row, url in enumerate(rows["url"]) if url in lost}
        if unusable:
            kept[split] = rows.select([row for row in range(len(rows)) if row not in unusable])
        else:
            kept[split] = rows
        counts.append((split, len(rows), len(unusable)))
    print_on_main(table(("split", "rows", "left out as unusable"), counts[::-1]))
    return DatasetDict({split: kept[split] for split in reversed(kept)})


def _check_filled(rows: Dataset, column: str, split: str) -> None:
    if column not in rows.column_names:
        raise UserError(f"{split}: no column {column!r}")
    if empty := blank_rows(rows, column):
        if rows.data.column(column).null_count == len(rows):
            state = "missing"
        else:
            state = "missing or empty"
        if column in ("url", "language"):
            hint = ""
        else:
            hint = "; --drop_unusable true leaves such rows out"
        raise UserError(f"{split}: column {column!r} is {state} in {_rows(empty)}{hint}")


def blank_rows(rows: Dataset, column: str) -> list[int]:
    """Finds the rows whose value is missing, blank or an empty list. Raises UserError if the type is wrong."""
    values = rows.select_columns(column).with_format("arrow")[:][column]
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        lengths = pc.list_value_length(values)
    elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type) or pa.types.is_null(values.type):
        lengths = pc.utf8_length(pc.utf8_trim_whitespace(values.cast(pa.string())))
    else:
        raise UserError(f"column {column!r} holds {values.type}, text is expected")
    return pc.indices_nonzero(pc.equal(lengths.fill_null(0), 0)).to_pylist()


def _rows(places: Sequence[int]) -> str:
    shown = ", ".join(str(place + 1) for place in places[:SHOWN])
    more = ""
    if len(places) > SHOWN:
        more = f" and {len(places) - SHOWN:,} more"
    return f"{'row' if len(places) == 1 else 'rows'} {shown}{more}"
