"""Cached and stored results are reused only if everything that they were made from is unchanged."""

import copy
import dataclasses
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, load_from_disk

from soft_trainer.data import array_cache, tokens
from soft_trainer.data.layouts import tables
from soft_trainer.data.split import Split
from soft_trainer.encoders import scratch
from soft_trainer.estimators.bm25 import BM25Estimator
from soft_trainer.estimators.neighbours import Excluded
from soft_trainer.options.fields import DataArguments
from soft_trainer.shell import rows as shell_rows
from soft_trainer.system import fingerprints
from soft_trainer.system.fingerprints import rows_fingerprint

CODE = [
    (
        "read the lines of a file",
        "def read(path):\n    # a comment\n    file = open(path)\n    return file.readlines()",
    ),
    ("sum all of the numbers", "def total(numbers):\n    result = sum(numbers)\n    return result"),
    ("sort a list of names", "def order(names):\n    ranked = sorted(names)\n    return ranked"),
]


@dataclasses.dataclass
class World:
    """Everything that a cache may depend on. Tests change one part and read the cache again."""

    folder: Path
    rows: list[dict]
    model: torch.nn.Module
    tokenizer: object
    profile: object
    options: int = 0

    def dataset(self) -> Dataset:
        """Returns the rows as a data set on disk, at the same path whatever their content."""
        path = self.folder / "rows"
        Dataset.from_list(self.rows).save_to_disk(path)
        return load_from_disk(path)

    def file(self, name: str) -> Path:
        """Writes the rows to a JSON Lines file."""
        path = self.folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        return path


@pytest.fixture
def world(tmp_path, model, tokenizer, profile, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(scratch, "TOKENIZERS", tmp_path / "tokenizers")
    monkeypatch.setattr(shell_rows, "MINED", tmp_path / "mined")
    rows = [
        {
            "url": f"u{number}",
            "path": f"part_{number}.py",
            "func_name": "f",
            "language": "python",
            "original_string": code,
            "code": code,
            "code_tokens": code.split(),
            "docstring": query,
            "docstring_tokens": query.split(),
        }
        for number, (query, code) in enumerate(CODE)
    ]
    return World(tmp_path, rows, model, copy.deepcopy(tokenizer), profile)


# ---- The readers ----


def jsonl(world):
    return tables.read_file(world.file("rows.jsonl"))


def json_of_any_columns(world):
    return tables.read_file(world.file("any.jsonl"))


def ids(world):
    profile = world.profile.replace(query_length=16 + world.options)
    return tokens.tokenized(world.dataset(), "query", profile, world.tokenizer)


def data_flow(world):
    profile = world.profile.replace(data_flow_length=8 + world.options)
    column = tokens.token_column(world.dataset(), "code", profile, world.tokenizer)
    rows = (column[row] for row in range(len(column)))
    return [{name: values.tolist() for name, values in row.items()} for row in rows]


def flattened(world):
    return array_cache.flat(world.dataset().select([2, 0, 1]))


def split(world):
    return Split.from_pairs(world.dataset().select([2, 0, 1])).queries


def trained_tokenizer(world):
    texts = [row["code"] for row in world.rows]
    known = rows_fingerprint(Dataset.from_list(world.rows), ["code"])
    return scratch.kept_tokenizer(texts, known, world.profile, 300 + world.options).get_vocab()


def nearest(world):
    estimator = BM25Estimator(cache_dir=world.folder / "neighbours")
    estimator.fit(Split.from_pairs(world.dataset()))
    return torch.tensor(estimator.neighbours(1 + world.options, Excluded(np.arange(3))).scores)


def tree(world):
    source = world.folder / "tree"
    for row in world.rows:
        path = source / Path(row["path"]).stem / row["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        first, rest = row["code"].split("\n", 1)
        path.write_text(f'{first}\n    """{row["docstring"].capitalize()}."""\n{rest}\n')
    return mined(world, source_dir=str(source), mining_keep=["constructors", "magic_methods"][world.options])


def mined(world, **options):
    arguments = DataArguments(language="python", **options)
    folder = shell_rows._mined(arguments, "python")
    return {path.name: tables.read_file(path)[:] for path in sorted(folder.glob("[tv]*.jsonl.gz"))}


# reader -> the parts of `World` that it depends on, besides the rows, the format and the cached files
READERS = {
    jsonl: (),
    json_of_any_columns: (),
    flattened: (),
    split: (),
    ids: ("tokenizer", "options"),
    data_flow: ("tokenizer", "options"),
    trained_tokenizer: ("options",),
    nearest: ("options",),
    tree: ("options",),
}


# ---- Changes that readers detect ----


def change(world, part, monkeypatch):
    if part == "rows":
        row = world.rows[0]
        row |= {name: row[name].replace("read", "load") for name in ("docstring", "code", "original_string")}
        row["code_tokens"] = row["code"].split()
        row["docstring_tokens"] = [*row["docstring"].split(), "lines"]
    elif part == "tokenizer":
        world.tokenizer.truncation_side = "left"
    elif part == "options":
        world.options = 1
    elif part == "format":
        monkeypatch.setattr(fingerprints, "CACHE_FORMAT", 0)
    else:
        for path in world.folder.rglob("*"):
            cached = path.suffix in (".arrow", ".npy", ".gz", ".tokenizer") and not path.name.startswith("data-")
            if cached and path.is_file():
                content = path.read_bytes()
                path.unlink()
                path.write_bytes(content[: len(content) // 2])


def content_of(result):
    return result.to_list() if isinstance(result, Dataset) else result


def equal(one, other) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_a_cache_is_read_only_if_nothing_has_changed(reader, world, monkeypatch):
    last = []  # whether the cache had the result
    find = fingerprints.kept_files

    def spy(*asked):
        files = find(*asked)
        last.append(files is not None)
        return files

    for module in (array_cache, scratch, shell_rows):
        monkeypatch.setattr(module, "kept_files", spy)
    result = content_of(reader(world))
    assert last and not all(last)
    for part in ("damage", "format", *READERS[reader], "rows"):
        last.clear()
        assert equal(content_of(reader(world)), result)
        assert all(last)
        last.clear()
        change(world, part, monkeypatch)
        again = content_of(reader(world))
        assert not all(last), part
        if part in ("damage", "format"):
            assert equal(again, result)
        result = again
