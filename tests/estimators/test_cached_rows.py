"""A cache that lived through any changes of rows and encoders gives what an estimator without a cache computes."""

import json
import random
import shutil

import numpy as np
import pytest
from datasets import Dataset
from safetensors.torch import load_file, save_file

from soft_trainer import SimCSEEstimator, TrainedModelEstimator
from soft_trainer.data.split import Split
from soft_trainer.estimators.neighbours import Excluded


def change_json(path, draw, choices):
    """Sets one of the fields in a JSON file to one of its choices."""
    content = json.loads(path.read_text())
    name = draw.choice(list(choices))
    content[name] = draw.choice(choices[name])
    path.write_text(json.dumps(content))


def weights(folder, rows, cache, draw):
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"] *= draw.choice((0.5, 1.5))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configuration(folder, rows, cache, draw):
    change_json(folder / "config.json", draw, {"hidden_act": ["relu", "gelu"], "layer_norm_eps": [1e-5, 0.1]})


def profile(folder, rows, cache, draw):
    choices = {
        "query_length": [4, 16],
        "code_length": [8, 32],
        "query_prefix": ["find ", ""],
        "pooling": ["cls", "mean"],
    }
    change_json(folder / "soft_trainer.json", draw, choices)


def vocabulary(folder, rows, cache, draw):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = draw.choice([None, {"type": "Lowercase"}])
    (folder / "tokenizer.json").write_text(json.dumps(content))


def text(folder, rows, cache, draw):
    row = draw.choice(rows)
    row["docstring_tokens"] = [*row["docstring_tokens"][:3], draw.choice(("twice", "never"))]


def code(folder, rows, cache, draw):
    row = draw.choice(rows)
    row["code_tokens"] = [*row["code_tokens"][:5], draw.choice(("+", "-")), "x"]


def order(folder, rows, cache, draw):
    draw.shuffle(rows)


def fewer(folder, rows, cache, draw):
    if len(rows) > 12:
        rows.pop(draw.randrange(len(rows)))


def damage(folder, rows, cache, draw):
    files = sorted(path for path in cache.rglob("*") if path.is_file())
    if files:
        path = draw.choice(files)
        data = path.read_bytes()
        path.write_bytes(draw.choice((b"", data[: len(data) // 2], data[:-4] + b"abcd")))


CHANGES = [weights, configuration, profile, vocabulary, text, code, order, fewer, damage]


def results(kind, folder, rows, cache) -> list:
    """Returns all similarities of an estimator, and the three nearest functions of each query."""
    split = Split.from_pairs(Dataset.from_list(rows))
    estimator = kind(folder, cache_dir=cache)
    estimator.fit(split)
    numbers = range(len(rows))
    nearest = estimator.neighbours(3, Excluded(np.arange(len(rows))))
    return [estimator.similarity(numbers, numbers).tolist(), nearest.rows.tolist(), nearest.scores.tolist()]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 3))])
def test_any_changes_of_rows_and_encoder(rows, encoder_dir, tmp_path, seed):
    draw = random.Random(seed)
    folder = shutil.copytree(encoder_dir, tmp_path / "encoder")
    rows = [dict(row) for row in rows]
    history = []
    for _ in range(4):
        for change in draw.sample(CHANGES, 2):
            change(folder, rows, tmp_path / "cache", draw)
            history.append(change.__name__)
        for kind in (SimCSEEstimator, TrainedModelEstimator):
            assert results(kind, folder, rows, tmp_path / "cache") == results(kind, folder, rows, None), history
