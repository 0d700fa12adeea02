"""A fingerprint changes if and only if the content changes."""

import copy
import json
import os

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from scipy import sparse
from transformers import PythonBackend

from soft_trainer.encoders.adapters import add_lora
from soft_trainer.options.model import ModelArguments
from soft_trainer.system.fingerprints import (
    encoder_fingerprint,
    fingerprint,
    folder_fingerprint,
    rows_fingerprint,
    source_fingerprint,
    tokenizer_fingerprint,
)

# ---- Values ----

DIFFERENT = [
    *((), (None,), (0,), (False,), (0.0,), ("",), ("0",), (b"0",), ([],), ({},), ([], []), ([[]],)),
    *(("ab", "c"), ("a", "bc"), (["ab", "c"],), ({"a": 1},), ({"a": "1"},), (["a", 1],)),
    (np.array([1, 2]),),
    (np.array([[1, 2]]),),
    (np.array([1, 2], np.int32),),
    (sparse.csr_matrix(np.eye(2)),),
    (sparse.csr_matrix(np.eye(2)[::-1]),),
]


def test_different_values_have_different_fingerprints():
    hashes = [fingerprint(*parts) for parts in DIFFERENT]
    assert len({*hashes}) == len(DIFFERENT)


def test_equal_values_have_equal_fingerprints():
    assert fingerprint({"a": 1, "b": [2, "x"]}) == fingerprint({"b": (2, "x"), "a": 1})
    assert fingerprint(np.arange(6).reshape(2, 3).T) == fingerprint(np.arange(6).reshape(2, 3).T.copy())


def test_what_has_no_content_to_read_is_refused():
    with pytest.raises(TypeError, match="object has no fingerprint"):
        fingerprint(object())


# ---- Rows ----

ROWS = {"text": ["a", None, "bc"], "tokens": [["x", "y"], [], None], "number": [1, 2, 3]}


@pytest.mark.parametrize(
    "change",
    [
        {"text": ["a", "", "bc"]},
        {"text": ["a", None, "bd"]},
        {"tokens": [["x"], ["y"], None]},
        {"tokens": [["x", "y"], None, []]},
        {"number": [1, 2, 4]},
        {"more": [0, 0, 0]},
    ],
    ids=str,
)
def test_a_change_of_the_rows_changes_their_fingerprint(change):
    assert rows_fingerprint(Dataset.from_dict(ROWS | change)) != rows_fingerprint(Dataset.from_dict(ROWS))


def test_rows_are_known_however_they_are_stored(tmp_path):
    rows = Dataset.from_dict({name: values * 7 for name, values in ROWS.items()})
    rows.save_to_disk(tmp_path / "rows")
    more = Dataset.from_dict({"text": ["z"], "tokens": [["z"]], "number": [9]}, features=rows.features)
    kinds = [
        Dataset.load_from_disk(tmp_path / "rows"),
        concatenate_datasets([rows.select(range(5)), rows.select(range(5, 21))]),
        concatenate_datasets([more, rows]).select(range(1, 22)),
        rows.select(np.arange(21)[::-1]).select(np.arange(21)[::-1]),
        rows.select_columns(["number", "tokens", "text"]),
    ]
    assert {rows_fingerprint(kind) for kind in kinds} == {rows_fingerprint(rows)}
    assert rows_fingerprint(rows, ["text"]) == rows_fingerprint(rows.select_columns("text"))
    assert rows_fingerprint(rows.select(np.arange(21)[::-1])) != rows_fingerprint(rows)


# ---- Tokenizers written in Python ----


class Words(PythonBackend):
    """A tokenizer whose ids depend on a vocabulary file and on a setting."""

    vocab_files_names = {"vocab_file": "vocab.json"}

    def __init__(self, vocab_file, lower=False, **kwargs):
        self.lower = lower
        with open(vocab_file) as file:
            self.vocab = json.load(file)
        super().__init__(unk_token="<unk>", pad_token="<unk>", lower=lower, **kwargs)

    vocab_size = property(lambda self: len(self.vocab))

    def get_vocab(self):
        return dict.fromkeys(self.vocab, 0)  # an incomplete description of the tokenizer

    def _tokenize(self, text):
        return text.lower().split() if self.lower else text.split()

    def _convert_token_to_id(self, token):
        return self.vocab.get(token, 0)

    def save_vocabulary(self, folder, filename_prefix=None):
        path = os.path.join(folder, "vocab.json")
        with open(path, "w") as file:
            json.dump(self.vocab, file)
        return (path,)


def test_tokenizers_written_in_python_are_known_by_their_files_and_settings(tmp_path):
    for name, words in (("one", ["<unk>", "a", "b"]), ("other", ["<unk>", "b", "a"])):
        (tmp_path / f"{name}.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))

    def known(name, **settings):
        return tokenizer_fingerprint(Words(str(tmp_path / f"{name}.json"), **settings))

    (tmp_path / "moved.json").write_bytes((tmp_path / "one.json").read_bytes())
    assert known("one") == known("one") == known("moved")
    assert len({known("one"), known("other"), known("one", lower=True)}) == 3


# ---- Files and code ----


def test_a_folder_is_known_by_the_names_and_contents_of_its_files(tmp_path):
    one = tmp_path / "one"
    for name in ("a.txt", "below/b.txt", ".hidden/c.txt"):
        (one / name).parent.mkdir(parents=True, exist_ok=True)
        (one / name).write_text(name)
    other = tmp_path / "other"
    one_hash = folder_fingerprint(one)
    one.rename(other)
    (other / ".hidden/c.txt").write_text("changed")
    assert folder_fingerprint(other) == one_hash
    (other / "below/b.txt").rename(other / "below/d.txt")
    assert folder_fingerprint(other) != one_hash


def test_rows_are_known_by_the_files_that_are_read(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    known = source_fingerprint(tmp_path)
    for name in ("train.log", "outputs/run.json", "outputs/checkpoint-1/state.json", ".hidden.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert source_fingerprint(tmp_path) == known
    for name in ("test.csv.gz", "qrels/test.tsv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
        assert source_fingerprint(tmp_path) != known
        known = source_fingerprint(tmp_path)


# ---- Encoders ----


def change_a_weight(model, tokenizer):
    with torch.no_grad():
        model.encoder.layer[0].output.dense.bias[0] += 1e-3


def change_an_adapter(model, tokenizer):
    model.peft_config["default"].lora_alpha *= 2


CHANGES = {
    "a weight": change_a_weight,
    "activation": lambda model, tokenizer: setattr(model.config, "hidden_act", "relu"),
    "epsilon": lambda model, tokenizer: setattr(model.config, "layer_norm_eps", 1e-3),
    "decoder": lambda model, tokenizer: setattr(model.config, "is_decoder", True),
    "side of the cut": lambda model, tokenizer: setattr(tokenizer, "truncation_side", "left"),
    "one more token": lambda model, tokenizer: tokenizer.add_tokens(["<one_more>"]),
    "an adapter": lambda model, tokenizer: add_lora(model, ModelArguments(lora_r=2)),
    "the settings of an adapter": change_an_adapter,
}
PROFILE_CHANGES = [
    {"code_length": 31},
    {"query_length": 15},
    {"code_prefix": "code: "},
    {"pooling": "cls"},
    {"include_prompt": False},
    {"normalize": True},
]


@pytest.mark.parametrize("change", [*CHANGES, *PROFILE_CHANGES], ids=str)
def test_a_change_changes_the_fingerprint(model, tokenizer, profile, change):
    if change == "the settings of an adapter":
        add_lora(model, ModelArguments(lora_r=2))
    before, tokenizer = encoder_fingerprint(model, tokenizer, profile), copy.deepcopy(tokenizer)
    assert encoder_fingerprint(model, tokenizer, profile) == before
    if isinstance(change, dict):
        profile = profile.replace(**change)
    else:
        CHANGES[change](model, tokenizer)
    assert encoder_fingerprint(model, tokenizer, profile) != before


def test_what_leaves_embeddings_as_they_are_leaves_the_fingerprint(model, tokenizer, profile):
    before = encoder_fingerprint(model, tokenizer, profile)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer(["a text"], truncation=True, max_length=5, padding=True)
    model.config._name_or_path = "elsewhere"
    profile = profile.replace(name="codebert", score_scale=7.0, code_columns=("text",))
    assert encoder_fingerprint(model, tokenizer, profile) == before
