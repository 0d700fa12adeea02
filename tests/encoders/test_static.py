"""Static encoders: distilled or from random vectors, and loaded by every library with equal embeddings."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from model2vec import StaticModel as Model2Vec
from refusals import refused
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from soft_trainer import load_encoder
from soft_trainer.encoders.distilling import distil_static
from soft_trainer.encoders.encoding import Encoder, encode, pad
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.profiles import PROFILES
from soft_trainer.encoders.scratch import random_model, train_tokenizer
from soft_trainer.encoders.static import distilled, splitting_tokenizer

WORDS = "sort a list with quick sort write text to file read all lines remove if it exists reverse string".split()
LONG = " ".join(np.random.default_rng(0).choice(WORDS, 5000))
TEXTS = ["sort a list", "def quickSort(xs): return xs", "read_lines", LONG]


@pytest.fixture
def static(tmp_path, model, tokenizer, profile):
    """A static encoder, and the folder that holds it."""
    encoder = distilled(Encoder(model, tokenizer, profile), 16)
    export_encoder(encoder.model, encoder.tokenizer, encoder.profile, tmp_path)
    return encoder, tmp_path


def test_an_embedding_is_the_mean_of_the_vectors_of_the_tokens(static):
    encoder, _ = static
    vectors = encoder.model.word_embedding.weight.detach()
    for text in TEXTS:
        ids = encoder.tokenizer(text, verbose=False)["input_ids"]
        mean = vectors[ids].double().mean(0)
        expected = mean / mean.norm()
        assert torch.allclose(encoder.encode_codes([text])[0].double(), expected, atol=1e-6)


def test_every_library_gives_the_same_embeddings(static):
    encoder, folder = static
    expected = encoder.encode_codes(TEXTS).numpy()
    assert np.allclose(load_encoder(folder, device="cpu").encode_queries(TEXTS), expected, atol=1e-6)
    assert np.allclose(SentenceTransformer(str(folder), device="cpu").encode(TEXTS), expected, atol=1e-6)
    theirs = Model2Vec.from_pretrained(folder).encode(TEXTS)
    assert np.allclose(theirs[:3], expected[:3], atol=1e-6)
    assert np.allclose(theirs[3], expected[3], atol=1e-5)  # it adds 5,000 vectors in float32, one after the other
    model = AutoModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, row in zip(TEXTS, expected, strict=True):
        mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).detach()
        assert np.allclose(mean / mean.norm(), row, atol=1e-6)


def test_means_and_gradients_are_those_of_an_xlnet_over_all_tokens(static):
    encoder, folder = static
    xlnet = AutoModel.from_pretrained(folder)
    texts = [*TEXTS[:3], LONG[:500], ""]
    inputs = pad([encoder.tokenizer(text, verbose=False)["input_ids"] for text in texts], 0, prompt_length=1)
    target = torch.randn(len(texts), 16)
    both = []
    gradients = []
    for model in (encoder.model.train(), xlnet):
        embeddings = encode(model, encoder.profile, inputs)
        (embeddings * target).sum().backward()
        both.append(embeddings)
        gradients.append(model.get_input_embeddings().weight.grad)
    assert not embeddings[-1].any()
    assert torch.allclose(*both, atol=1e-6)
    assert gradients[0].any()
    assert torch.allclose(*gradients, atol=1e-6)


def test_training_stores_no_vector_of_a_token(static):
    model = static[0].model.train()
    model.word_embedding.forward = None
    encode(model, static[0].profile, pad([[5, 6], [7]], 0))


def test_special_tokens_count_for_nothing(static):
    encoder, _ = static
    assert not encoder.model.word_embedding.weight[encoder.tokenizer.all_special_ids].any()
    assert not set(encoder.tokenizer("sort a list")["input_ids"]) & set(encoder.tokenizer.all_special_ids)


def test_identifiers_are_split_into_words(tokenizer):
    splitting = splitting_tokenizer(tokenizer)
    words = splitting("sort list")["input_ids"]
    for text in ("sortList", "sort_list", "sort__list"):
        assert splitting(text)["input_ids"] == words


def test_frequent_tokens_count_less(model, tokenizer, profile):
    encoder = Encoder(model, tokenizer, profile)
    word = tokenizer("sort", add_special_tokens=False)["input_ids"][0]
    rare = distilled(encoder, 16, ["read a file"] * 10)
    frequent = distilled(encoder, 16, ["sort sort sort"] * 10)
    lengths = [each.model.word_embedding.weight[word].norm() for each in (rare, frequent)]
    assert lengths[1] < 0.01 * lengths[0]


def test_only_the_vectors_are_trained(static):
    _, folder = static
    model = load_encoder(folder, device="cpu").model
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["word_embedding.weight"]


def test_an_encoder_from_scratch_without_layers_is_static(tmp_path):
    profile = PROFILES["static"].replace(query_length=16, code_length=32)
    tokenizer = train_tokenizer(TEXTS, profile, 300, ends=False)
    encoder = Encoder(random_model("32x0", tokenizer, profile).eval(), tokenizer, profile)
    export_encoder(encoder.model, tokenizer, profile, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["max_length"] == 32
    expected = encoder.encode_codes(TEXTS[:3]).numpy()
    assert np.allclose(Model2Vec.from_pretrained(tmp_path).encode(TEXTS[:3]), expected, atol=1e-6)
    assert np.allclose(SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS[:3]), expected, atol=1e-6)


def test_a_folder_is_distilled_from_a_folder(tmp_path, model, tokenizer, profile):
    export_encoder(model, tokenizer, profile, tmp_path / "base")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.py").write_text("def sort_list(): pass\n")
    folder = distil_static(tmp_path / "base", tmp_path / "static", 8, tmp_path / "texts")
    static = load_encoder(folder, device="cpu")
    assert static.encode_queries(["sort"]).shape == (1, 8)
    assert static.profile.teacher == str(tmp_path / "base")
    assert static.profile.teacher_identity == load_encoder(tmp_path / "base", device="cpu").identity()
    assert static.identity() == dataclasses.replace(static, profile=static.profile.replace(teacher="x")).identity()
    words = static.encode_queries(["sort"])
    (tmp_path / "texts" / ".git").mkdir()
    (tmp_path / "texts" / ".git" / "packed").write_text("sort sort\n" * 50)
    (tmp_path / "texts" / "image.bin").write_bytes(b"sort\0sort\n" * 50)
    folder = distil_static(tmp_path / "base", tmp_path / "again", 8, tmp_path / "texts")
    assert torch.equal(load_encoder(folder, device="cpu").encode_queries(["sort"]), words)
    with refused("texts="):
        distil_static(tmp_path / "base", tmp_path / "static", 8, tmp_path / "none")
    with refused("dimensions=64: must be from 1 to 32"):
        distil_static(tmp_path / "base", tmp_path / "static", 64)
