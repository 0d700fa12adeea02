"""A tiny sentence-transformers model, and the shared pairs as data sets for sentence-transformers."""

import copy

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer

from soft_trainer.encoders.export import export_encoder
from soft_trainer.sentence_transformers import with_rows


@pytest.fixture(scope="session")
def long_profile(profile):
    """The shared profile, with lengths that truncate no text."""
    return profile.replace(query_length=32, code_length=32)


@pytest.fixture(scope="session")
def encoder_folder(_model, tokenizer, long_profile, tmp_path_factory):
    return export_encoder(_model, tokenizer, long_profile, tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def _sentence_transformer(encoder_folder, tmp_path_factory):
    # Saved once more, the encoder has a pooler, which sentence-transformers needs to resume from a checkpoint.
    folder = str(tmp_path_factory.mktemp("sentence_transformer"))
    SentenceTransformer(str(encoder_folder), device="cpu").save_pretrained(folder)
    model = SentenceTransformer(folder, device="cpu")
    model.max_seq_length = 32
    return model


@pytest.fixture
def sentence_transformer(_sentence_transformer):
    """A fresh copy of the tiny encoder as a `SentenceTransformer`."""
    return copy.deepcopy(_sentence_transformer)


@pytest.fixture(scope="session")
def pairs(rows):
    """The pairs with two duplicates: row 22 has the query of row 0, and row 23 has the code of row 1."""
    queries, codes = [row["docstring"] for row in rows], [row["code"] for row in rows]
    queries[22], codes[23] = queries[0], codes[1]
    return Dataset.from_dict({"anchor": queries, "positive": codes})


@pytest.fixture(scope="session")
def tuples(pairs):
    """The pairs with two negatives each. Some negatives are not the code of any row."""
    codes = pairs["positive"][:]
    first = [codes[(row + 1) % len(codes)] for row in range(len(codes))]
    further = [f"def other(): return {row}" for row in range(len(codes))]
    second = [codes[(row * 7 + 5) % len(codes)] if row % 3 else further[row] for row in range(len(codes))]
    return pairs.add_column("negative_1", first).add_column("negative_2", second)


@pytest.fixture
def features_of():
    """Returns a function that makes a batch's features and labels, as `SentenceTransformerTrainer` passes them."""

    def make(model, dataset, rows):
        batch = dataset.select(rows)
        texts = [name for name in batch.column_names if name != "label"]
        return [model.preprocess(batch[name][:]) for name in texts], torch.tensor(batch["label"][:])

    return make


@pytest.fixture(scope="session")
def train_dataset(pairs):
    return with_rows(pairs)
