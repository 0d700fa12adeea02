"""The encoder `base`, which comes with the package, is expanded into the cache and loads in every library."""

from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from refusals import refused
from safetensors.numpy import load_file

from soft_trainer import SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_encoder
from soft_trainer.hub.files import lasting_name, published_name
from soft_trainer.system import packaged
from soft_trainer.system.packaged import BASE, INT8, PACKAGED, SCALES, VECTORS, WEIGHTS, common_words, located

TEXTS = ["sort a list", "def quickSort(xs):\n    return sorted(xs)", "remove_file_if_exists", "()"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Provides an empty cache, so that the first use of `base` has to write its folder."""
    monkeypatch.setattr(packaged, "EXPANDED", tmp_path / "cache")
    packaged._expanded.cache_clear()
    yield tmp_path / "cache"
    packaged._expanded.cache_clear()


def test_it_takes_at_most_twelve_megabytes():
    assert sum(path.stat().st_size for path in PACKAGED.rglob("*")) <= 12_000_000


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
    for name in (VECTORS,):
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
    assert (trainer.args.learning_rate, trainer.args.num_train_epochs) == (1e-3, 5)
    trainer.train()
    trainer.save_model()
    card = trainer.create_model_card().read_text()
    assert "It is `base`, fine-tuned" in card
    assert "license: apache-2.0" in card
    assert str(located(BASE)) not in card
    before = load_encoder(BASE, device="cpu").encode_codes(TEXTS[:3])
    assert not np.allclose(load_encoder(tmp_path, device="cpu").encode_codes(TEXTS[:3]), before, atol=1e-6)
