"""A search with a static encoder imports neither torch nor transformers."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from soft_trainer import load_encoder
from soft_trainer.encoders.encoding import Encoder
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.profiles import PROFILES
from soft_trainer.encoders.scratch import random_model, train_tokenizer
from soft_trainer.encoders.static_numpy import StaticEncoder, is_static_folder
from soft_trainer.encoders.static_torch import count_words, distilled
from soft_trainer.encoders.text_encoder import local_folder, open_encoder
from soft_trainer.search import CodeIndex

ROOT = Path(__file__).parents[2]
TEXTS = [
    "sort a list",
    "def quickSort(xs):\n\treturn [] if not xs else sorted(xs)\n",
    "# größer als  'null'",
    "   \n",
    "",
    "remove_file_if_exists",
    "a <mask> between </s> special_tokens <S>",
]


@pytest.fixture
def folder(model, tokenizer, profile, tmp_path):
    """Distils a static encoder from the tests' RoBERTa and returns its folder."""
    encoder = distilled(Encoder(model, tokenizer, profile), count_words(TEXTS * 2), 16)
    return export_encoder(encoder.model, encoder.tokenizer, encoder.profile, tmp_path / "distilled")


@pytest.fixture
def from_scratch(tmp_path):
    """Makes a static encoder with random vectors and a tokenizer trained for it, and returns its folder."""
    profile = PROFILES["static"].replace(query_length=8, code_length=12)
    tokenizer = train_tokenizer(TEXTS * 3, profile, 300, ends=False)
    return export_encoder(random_model("32x0", tokenizer, profile), tokenizer, profile, tmp_path / "scratch")


@pytest.mark.parametrize("name", ["folder", "from_scratch"])
def test_embeddings_are_those_of_torch(name, request):
    path = request.getfixturevalue(name)
    static = open_encoder(path, light=False)
    whole = load_encoder(path, device="cpu")
    assert (static.runtime, whole.runtime) == ("static", "torch")
    for side in ("query", "code"):
        assert np.allclose(static.encode(TEXTS, side), whole.encode(TEXTS, side), atol=1e-6)


def test_words_are_tokenised_once_where_the_tokenizer_splits_at_them(from_scratch, folder):
    static = StaticEncoder(from_scratch)
    assert static._splits_words
    plain = [each.ids for each in static._tokenizer.encode_batch_fast(TEXTS, add_special_tokens=False)]
    assert static._tokenized(TEXTS) == plain
    assert static._tokenized(TEXTS) == plain  # from the words that are known by now
    assert StaticEncoder(folder)._splits_words


def test_any_other_encoder_is_not_static(encoder_dir, tmp_path):
    assert not is_static_folder(encoder_dir)
    assert not is_static_folder(tmp_path)
    assert local_folder("nobody/nothing") is None


def test_wrong_numbers_of_dimensions_are_refused(folder):
    assert open_encoder(folder, 4).encode(["sort"], "query").shape == (1, 4)
    for number in (17, 2.5):
        with refused(f"truncate_dim={number}: must be a whole number from 1 to 16"):
            open_encoder(folder, number)


def test_the_fingerprint_changes_with_the_weights(folder):
    before = open_encoder(folder).fingerprint
    encoder = load_encoder(folder, device="cpu")
    encoder.model.embeddings.weight.data[7] += 1
    export_encoder(encoder.model, encoder.tokenizer, encoder.profile, folder)
    assert open_encoder(folder).fingerprint != before


@pytest.mark.slow
def test_index_and_search_import_neither_torch_nor_transformers(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.py").write_text(
        "def quick_sort(xs):\n    return sorted(xs)\n\n\ndef read(path):\n    return open(path)\n"
    )
    index = str(tmp_path / "index")
    slow = ["torch", "transformers", "datasets"]
    opened = {
        f"CodeIndex.build({str(tree)!r}, {index!r}, model='base')": slow,
        f"CodeIndex.open({index!r})": [*slow, "scipy", "numpy.ma"],
    }
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for index, modules in opened.items():
        code = f"""
import sys
from soft_trainer.search import CodeIndex
with {index} as index:
    print(index.search("sort a list")[0].name)
print(sorted(set({modules}) & set(sys.modules)))
"""
        lines = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).splitlines()
        assert lines == ["quick_sort", "[]"]


def test_a_query_without_a_known_word_is_searched_by_words_which_is_reported(folder, tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.py").write_text("def quick_sort(xs):\n    return sorted(xs)\n")
    with CodeIndex.build(tree, tmp_path / "index", model=folder) as index:
        assert not index.search("排序")
        assert any("knows no word of the query" in notice for notice in index.notices)
