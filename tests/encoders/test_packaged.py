"""The encoder `base`, which comes with the package, is expanded into the cache and loads in every library."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from model2vec import StaticModel as Model2Vec
from refusals import refused
from safetensors.numpy import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from soft_trainer import SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_encoder
from soft_trainer.encoders import packaged
from soft_trainer.encoders.hub_files import lasting_name, published_name
from soft_trainer.encoders.packaged import BASE, INT8, PACKAGED, SCALES, VECTORS, WEIGHTS, common_words, located
from soft_trainer.encoders.text_encoder import open_encoder

ROOT = Path(__file__).parents[2]
TEXTS = ["sort a list", "def quickSort(xs):\n    return sorted(xs)", "remove_file_if_exists", "()"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Provides an empty cache, so that the first use of `base` has to write its folder."""
    monkeypatch.setattr(packaged, "EXPANDED", tmp_path / "cache")
    packaged._expanded.cache_clear()
    yield tmp_path / "cache"
    packaged._expanded.cache_clear()


def test_it_takes_at_most_eight_megabytes():
    assert sum(path.stat().st_size for path in PACKAGED.rglob("*")) <= 8_000_000


def test_every_library_reads_the_same_vectors():
    folder = located(BASE)
    expected = load_encoder(BASE, device="cpu").encode_codes(TEXTS).numpy()
    assert np.linalg.norm(expected, axis=1) == pytest.approx([1, 1, 1, 0], abs=1e-6)
    static = open_encoder(BASE)
    assert static.runtime == "static"
    assert np.allclose(static.encode(TEXTS, "code"), expected, atol=1e-6)
    assert np.allclose(SentenceTransformer(str(folder), device="cpu").encode(TEXTS), expected, atol=1e-6)
    assert np.allclose(Model2Vec.from_pretrained(folder).encode(TEXTS), expected, atol=1e-6)
    model = AutoModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, row in zip(TEXTS[:3], expected, strict=False):
        mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).detach()
        assert np.allclose(mean / mean.norm(), row, atol=1e-6)


def test_it_finds_a_function_by_its_description():
    encoder = load_encoder(BASE, device="cpu")
    codes = encoder.encode_codes(
        ["def quick_sort(xs): ...", "def write_text(path, text): ...", "def connect(host): ..."]
    )
    queries = encoder.encode_queries(["order a list", "save words to disk", "open a network connection"])
    assert encoder.score(queries, codes).argmax(1).tolist() == [0, 1, 2]


def test_the_vectors_are_those_of_the_package_and_are_written_once(cache):
    folder = located(BASE)
    stored = load_file(PACKAGED / WEIGHTS)
    written = load_file(folder / WEIGHTS)
    for name in VECTORS:
        assert written[name].dtype == np.float32
        assert np.array_equal(written[name], stored[INT8] * stored[SCALES][:, None])
    before = (folder / WEIGHTS).stat().st_mtime_ns
    packaged._expanded.cache_clear()
    assert located(BASE) == folder
    assert (folder / WEIGHTS).stat().st_mtime_ns == before
    assert [path.name for path in cache.iterdir()] == [folder.name]


def test_a_cache_that_cannot_be_written_is_one_line(cache):
    cache.write_text("not a folder")
    with refused("cannot write the encoder `base` there", "set HF_HOME"):
        located(BASE)


def test_the_name_means_the_package_even_beside_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(BASE).mkdir()
    assert located(BASE) != BASE
    assert located("./base") == "./base"
    assert lasting_name(BASE) == BASE
    assert published_name(located(BASE)) == BASE


def test_common_words_are_words_from_frequent_to_rare():
    words = common_words()
    assert words["the"] > words["string"] > words["quaternion"]
    assert not [word for word in words if not word.isalnum()]


@pytest.mark.slow
def test_it_trains_and_the_card_names_it(rows, tmp_path):
    arguments = SoftInfoNCETrainingArguments(str(tmp_path), max_steps=1, per_device_train_batch_size=8, use_cpu=True)
    trainer = SoftInfoNCETrainer(BASE, arguments, Dataset.from_list(rows))
    assert trainer.args.learning_rate == 3e-3
    trainer.train()
    trainer.save_model()
    card = trainer.create_model_card().read_text()
    assert "It is `base`, fine-tuned" in card
    assert "license: apache-2.0" in card
    assert str(located(BASE)) not in card
    before = load_encoder(BASE, device="cpu").encode_codes(TEXTS[:3])
    assert not np.allclose(load_encoder(tmp_path, device="cpu").encode_codes(TEXTS[:3]), before, atol=1e-6)


@pytest.mark.slow
def test_search_with_it_needs_neither_torch_nor_a_download(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.py").write_text("def quick_sort(xs):\n    return sorted(xs)\n\n\ndef read(path):\n    return path\n")
    code = f"""
import sys
from soft_trainer.search import CodeIndex
with CodeIndex.build({str(tree)!r}, {str(tmp_path / "index")!r}, model="base") as index:
    print(index.model, index.search("sort a list")[0].name)
print(sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    found = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)
    assert found.splitlines() == ["base quick_sort", "[]"]
