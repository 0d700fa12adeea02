"""Rows read with a cache that lived through any changes of their files equal rows read with an empty cache."""

import json
import os
import random

import datasets
import pytest

from soft_trainer import load_rows
from soft_trainer.data.tokens import token_column

WORDS = ("find", "sort", "open", "pack")


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def text(folder, cache, draw):
    """Replaces a word by one of the same length, and keeps the time of the file."""
    path = draw.choice(sorted(folder.glob("train-*.jsonl")))
    rows = rows_of(path)
    draw.choice(rows)["query"] = " ".join(draw.choices(WORDS, k=3))
    before = path.stat()
    write(path, rows)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def column(folder, cache, draw):
    name = draw.choice(("code", "answer"))
    for path in folder.glob("*.jsonl"):
        write(path, [{"query": row["query"], name: row.get("code", row.get("answer"))} for row in rows_of(path)])


def order(folder, cache, draw):
    path = draw.choice(sorted(folder.glob("train-*.jsonl")))
    write(path, draw.sample(rows_of(path), len(rows_of(path))))


def shards(folder, cache, draw):
    """Divides the training rows among another number of files."""
    paths = sorted(folder.glob("train-*.jsonl"))
    rows = [row for path in paths for row in rows_of(path)]
    for path in paths:
        path.unlink()
    number = draw.randint(1, 3)
    for shard in range(number):
        write(folder / f"train-{shard:05}-of-{number:05}.jsonl", rows[shard::number])


def split(folder, cache, draw):
    """Exchanges valid and test."""
    other = folder / "test.jsonl"
    valid = folder / "valid.jsonl"
    first, second = valid.read_text(), other.read_text()
    valid.write_text(second)
    other.write_text(first)


def damage(folder, cache, draw):
    """Cuts or removes a file of the cache."""
    files = sorted(path for path in cache.rglob("*") if path.is_file())
    if files:
        path = draw.choice(files)
        if draw.random() < 0.5:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


CHANGES = [text, text, column, order, shards, split, damage]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 3))])
def test_any_changes_of_files(rows, tokenizer, profile, tmp_path, monkeypatch, seed):
    draw = random.Random(seed)
    folder = tmp_path / "rows"
    folder.mkdir()
    pairs = [{"query": " ".join(row["docstring_tokens"]), "code": row["code"]} for row in rows]
    for name, chosen in {"train-00000-of-00001": pairs[:16], "valid": pairs[16:20], "test": pairs[20:]}.items():
        write(folder / f"{name}.jsonl", chosen)

    def read(cache):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        splits = load_rows(str(folder))
        found = []
        for name in sorted(splits):
            queries = splits[name].queries
            tokens = token_column(queries, "query", profile, tokenizer)
            found.append(
                (name, list(queries), list(splits[name].corpus), [list(tokens[row]) for row in range(len(queries))])
            )
        return found

    history = []
    for step in range(5):
        assert read(tmp_path / "cache") == read(tmp_path / f"fresh-{step}"), history
        change = draw.choice(CHANGES)
        change(folder, tmp_path / "cache", draw)
        history.append(change.__name__)
