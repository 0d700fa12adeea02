"""Static encoders, distilled or with random vectors, load in every library with equal embeddings."""

import dataclasses
import json
import math
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from model2vec import StaticModel as Model2Vec
from refusals import refused
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from soft_trainer import load_encoder
from soft_trainer.encoders.distilling import distil_static
from soft_trainer.encoders.encoding import Encoder, encode, pad
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import check_model, given_encoder
from soft_trainer.encoders.onnx import normalized
from soft_trainer.encoders.profiles import PROFILES, EncoderProfile
from soft_trainer.encoders.scratch import random_model, train_tokenizer
from soft_trainer.encoders.static_torch import (
    CHARACTERS,
    SPECIAL,
    count_words,
    distilled,
    static_model,
    word_tokenizer,
)
from soft_trainer.encoders.text_encoder import open_encoder
from soft_trainer.files import PROFILE_FILE
from soft_trainer.losses import info_nce
from soft_trainer.packaged import located

WORDS = "sort a list with quick sort write text to file read all lines remove if it exists reverse string".split()
LONG = " ".join(np.random.default_rng(0).choice(WORDS, 5000))
SCRIPTS = [
    "sort a list 读取文件",
    "读取文件",
    "ファイルを sort する",
    "ファイル",
    "прочитать",
    "прочитать и sort",
    "قراءة ملف",
    "قراءة sort ملف",
    "ταξινόμηση",
    "sort ταξινόμηση text",
    "x" * 120 + " sort",
    "sort über größe",
]
TEXTS = ["sort a list", "def quickSort(xs): return xs", "read_lines", LONG]


@pytest.fixture
def static(tmp_path, model, tokenizer, profile):
    """Returns a static encoder and the folder that it was exported to."""
    encoder = distilled(Encoder(model, tokenizer, profile), count_words(TEXTS * 2), 16)
    export_encoder(encoder.model, encoder.tokenizer, encoder.profile, tmp_path)
    return encoder, tmp_path


@pytest.fixture
def plain(static):
    """Returns the same encoder with the plain mean, which all libraries compute, and its folder."""
    encoder, folder = static
    profile = encoder.profile.replace(token_weights="count")
    profile.save(folder)
    return dataclasses.replace(encoder, profile=profile), folder


def repeating(tokenizer, length, kinds):
    """Makes a text of `length` tokens, of which at most `kinds` are different."""
    words = sorted(word for word in tokenizer.get_vocab() if word.isalnum())
    generator = np.random.default_rng(length + kinds)
    return " ".join(generator.choice(generator.choice(words, kinds), length))


@pytest.mark.parametrize(
    ("weights", "length"), [*(("log", length) for length in (1, 2, 30, 300, 5000)), ("count", 1), ("count", 30)]
)
def test_an_embedding_is_the_weighted_mean_in_training_evaluation_and_search(request, weights, length):
    encoder, folder = request.getfixturevalue({"log": "static", "count": "plain"}[weights])
    vectors = encoder.model.word_embedding.weight.detach().double().numpy()
    texts = [repeating(encoder.tokenizer, length, kinds) for kinds in (1, 2, 5, 30)] + ["ж " * length + "sort"]
    expected = []
    items = encoder.tokenizer(texts, verbose=False)["input_ids"]
    for ids in items:
        counts = Counter(ids)
        del counts[encoder.tokenizer.unk_token_id]
        share = [math.log1p(count) if weights == "log" else count for count in counts.values()]
        total = share @ vectors[list(counts)]
        expected.append(total / np.linalg.norm(total))
    lightly = open_encoder(folder)
    found = {
        "evaluation": load_encoder(folder, device="cpu").encode_queries(texts).numpy(),
        "training": encode(encoder.model.train(), encoder.profile, pad(items, 0)).numpy(force=True),
        "NumPy, queries": lightly.encode(texts, "query"),
        "NumPy, functions": lightly.encode(texts, "code"),
    }
    for path, embeddings in found.items():
        assert np.allclose(embeddings, expected, rtol=0, atol=1e-6), path


def test_tokens_that_pooling_skips_and_tokens_beyond_the_length_do_not_count(static):
    encoder, folder = static
    skipping = encoder.profile.replace(include_prompt=False, query_prefix="sort ")
    prompted = dataclasses.replace(encoder, profile=skipping)
    torch.testing.assert_close(prompted.encode_queries(["sort a list"]), encoder.encode_queries(["sort a list"]))
    cut = encoder.profile.replace(query_length=3, code_length=3)
    cut.save(folder)
    text = "sort sort list list list list list"
    expected = encoder.encode_queries(["sort sort list"])
    for side in ("query", "code"):
        for found in (dataclasses.replace(encoder, profile=cut), open_encoder(folder)):
            assert np.allclose(found.encode([text], side), expected, atol=1e-6)


def test_a_folder_without_the_field_is_a_plain_mean(plain):
    encoder, folder = plain
    known = load_encoder(folder, device="cpu")
    fields = json.loads((folder / PROFILE_FILE).read_text())
    del fields["token_weights"]
    (folder / PROFILE_FILE).write_text(json.dumps(fields))
    loaded = load_encoder(folder, device="cpu")
    assert torch.equal(loaded.encode_codes(TEXTS), known.encode_codes(TEXTS))
    assert loaded.fingerprint == known.fingerprint
    vectors = encoder.model.word_embedding.weight.detach().numpy()
    query = vectors[encoder.tokenizer("sort sort list")["input_ids"]].sum(0)
    assert np.array_equal(open_encoder(folder).encode(["sort sort list"], "query"), normalized(query[None]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_weights": "sqrt"}, "token_weights='sqrt': use one of count, log"),
        ({"token_weights": "log", "pooling": "cls"}, "token_weights=log: needs pooling=mean, not cls"),
        ({"token_weights": "log", "pooling": "mean"}, "token_weights=log: RobertaModel is not a static encoder"),
    ],
)
def test_other_weights_are_refused(model, profile, changes, message):
    with refused(message):
        check_model(model, profile.replace(**changes))


@pytest.mark.slow
def test_every_library_gives_the_same_embeddings(plain):
    encoder, folder = plain
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


def test_the_files_of_sentence_transformers_give_the_same_encoder(static, tmp_path):
    encoder, folder = static
    model = SentenceTransformer(str(folder), device="cpu")
    given = Encoder(*given_encoder(model))
    assert given.profile.query_length == encoder.profile.query_length
    torch.testing.assert_close(given.encode_codes(TEXTS), encoder.encode_codes(TEXTS), atol=1e-6, rtol=0)
    model.save(str(tmp_path / "again"), create_model_card=False)
    again = load_encoder(tmp_path / "again", device="cpu")
    plain = dataclasses.replace(encoder, profile=encoder.profile.replace(token_weights="count"))
    torch.testing.assert_close(again.encode_codes(TEXTS), plain.encode_codes(TEXTS), atol=1e-6, rtol=0)


@pytest.fixture(params=["base", "distilled"])
def with_unknown_words(request, plain, tmp_path):
    """Returns a folder of a static encoder with the plain mean, and the encoder."""
    if request.param == "distilled":
        return plain[1], plain[0]
    folder = shutil.copytree(located("base"), tmp_path / "base")
    EncoderProfile.load(folder / PROFILE_FILE).replace(token_weights="count").save(folder)
    return folder, load_encoder(folder, device="cpu")


@pytest.mark.slow
def test_every_library_excludes_unknown_words(with_unknown_words):
    folder, encoder = with_unknown_words
    expected = encoder.encode_codes(SCRIPTS).numpy()
    lengths = np.linalg.norm(expected, axis=1)
    assert np.allclose(lengths, ["sort" in text for text in SCRIPTS], atol=1e-6)
    found = {
        "model2vec": Model2Vec.from_pretrained(folder).encode(SCRIPTS),
        "sentence-transformers": SentenceTransformer(str(folder), device="cpu").encode(SCRIPTS),
        "NumPy, queries": open_encoder(folder).encode(SCRIPTS, "query"),
        "NumPy, functions": open_encoder(folder).encode(SCRIPTS, "code"),
    }
    model = AutoModel.from_pretrained(folder).eval()
    inputs = AutoTokenizer.from_pretrained(folder)(SCRIPTS, return_tensors="pt", padding=True)
    states = model(**inputs).last_hidden_state.detach() * inputs["attention_mask"][:, :, None]
    found["AutoModel"] = torch.nn.functional.normalize(states.sum(1)).numpy()
    for library, embeddings in found.items():
        assert np.allclose(embeddings, expected, atol=1e-6), library


def test_unknown_words_have_no_gradient_and_do_not_stop_the_others(with_unknown_words):
    _, encoder = with_unknown_words
    texts = ["读取", "sort a list", "ж" * 120, "write text to file"]
    inputs = pad([encoder.tokenizer(text)["input_ids"] for text in texts], 0)
    embeddings = encode(encoder.model.train(), encoder.profile, inputs)
    info_nce(embeddings[:2] @ embeddings[2:].T * 20).backward()
    gradient = encoder.model.get_input_embeddings().weight.grad
    assert not gradient[encoder.tokenizer.unk_token_id].any()
    assert 1e-3 < gradient.norm() < 1e3


def test_an_unknown_vector_that_an_earlier_release_trained_is_excluded(static):
    encoder, folder = static
    expected = encoder.encode_codes(SCRIPTS).numpy()
    tensors = load_file(folder / "model.safetensors")
    for name in ("word_embedding.weight", "embeddings"):
        tensors[name][encoder.tokenizer.unk_token_id] = 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert np.allclose(load_encoder(folder, device="cpu").encode_codes(SCRIPTS), expected, atol=1e-6)
    assert np.allclose(open_encoder(folder).encode(SCRIPTS, "code"), expected, atol=1e-6)


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


def test_a_prompt_is_skipped_in_training_too(static):
    encoder, _ = static
    profile = encoder.profile.replace(include_prompt=False, query_prefix="sort ")
    ids = encoder.tokenizer([f"sort {text}" for text in TEXTS], verbose=False)["input_ids"]
    inputs = pad(ids, encoder.tokenizer.pad_token_id, prompt_length=1)
    expected = encode(encoder.model.eval(), profile, inputs)
    torch.testing.assert_close(encode(encoder.model.train(), profile, inputs), expected)


def test_training_stores_no_vector_of_a_token(static):
    model = static[0].model.train()
    model.word_embedding.forward = None
    encode(model, static[0].profile, pad([[5, 6], [7]], 0))


def test_special_tokens_count_for_nothing(static):
    encoder, _ = static
    assert not encoder.model.word_embedding.weight[encoder.tokenizer.all_special_ids].any()
    assert not set(encoder.tokenizer("sort a list")["input_ids"]) & set(encoder.tokenizer.all_special_ids)


@pytest.mark.parametrize(
    "text, words",
    [
        ("sort list", ["sort", "list"]),
        ("sortList", ["sort", "list"]),
        ("sort__list", ["sort", "list"]),
        ("HTTPSort", ["http", "sort"]),
        ("sort(list[0]) -> 'Größe'; x != y", ["sort", "list", "0", "große", "x", "y"]),
        ("sorting", ["sort", "i", "n", "g"]),  # the longest known start, then the rest
        ("listsort", ["list", "sort"]),
        ("ж", ["[UNK]"]),
        ("()", []),
        ("s" * 101, ["[UNK]"]),
    ],
)
def test_texts_become_words_and_unknown_words_their_longest_known_parts(text, words):
    known = ["http", "sort", "list", "große"]
    assert word_tokenizer([*SPECIAL, *CHARACTERS, *known]).tokenize(text) == words


def test_words_are_parts_of_identifiers_that_occur_twice():
    counts = count_words(["def readLines(path):", "read_lines(PATH)", "once", "s" * 101 + " " + "s" * 101])
    assert counts == {"read": 2, "lines": 2, "path": 2}


def test_the_most_frequent_words_are_kept_and_count_less(model, tokenizer, profile):
    encoder = Encoder(model, tokenizer, profile)
    words = {"sort": 1000, "list": 10, "rare": 2}
    static = distilled(encoder, words, 16, vocabulary_size=len(SPECIAL) + len(CHARACTERS) + 2)
    vocabulary = static.tokenizer.get_vocab()
    assert {"sort", "list", *CHARACTERS} <= vocabulary.keys()
    assert "rare" not in vocabulary
    again = distilled(encoder, words | {"sort": 2, "list": 1000}, 16)
    lengths = [each.model.word_embedding.weight[each.tokenizer.vocab["sort"]].norm() for each in (static, again)]
    assert lengths[0] < 0.1 * lengths[1]


def test_too_few_words_for_the_dimensions_are_refused(tokenizer):
    encoder = Encoder(static_model(len(tokenizer), 64, tokenizer.pad_token_id), tokenizer, PROFILES["static"])
    with refused("dimensions=64: the vocabulary has only 39 entries; use more texts"):
        distilled(encoder, {"word": 2}, 64)


def test_only_the_vectors_are_trained(static):
    _, folder = static
    model = load_encoder(folder, device="cpu").model
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["word_embedding.weight"]


def test_a_checkpoint_leaves_no_tensor_unread(static):
    """When training resumes, Trainer would report an unread tensor as if weights had not been loaded."""
    encoder, folder = static
    model = static_model(len(encoder.tokenizer), encoder.dimensions, 0)
    report = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not report.unexpected_keys and not report.missing_keys
    assert torch.equal(model.word_embedding.weight, encoder.model.word_embedding.weight)


def test_an_encoder_from_scratch_without_layers_is_static(tmp_path):
    profile = PROFILES["static"].replace(query_length=16, code_length=32, token_weights="count")
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
    (tmp_path / "texts" / "a.py").write_text("def sort_list(): sort(list)\n")
    folder = distil_static(tmp_path / "base", tmp_path / "static", 8, tmp_path / "texts")
    static = load_encoder(folder, device="cpu")
    assert {"sort", "list"} <= static.tokenizer.get_vocab().keys()
    assert static.encode_queries(["sort"]).shape == (1, 8)
    assert static.profile.teacher == str(tmp_path / "base")
    assert static.profile.teacher_identity == load_encoder(tmp_path / "base", device="cpu").fingerprint
    assert static.fingerprint == dataclasses.replace(static, profile=static.profile.replace(teacher="x")).fingerprint
    words = static.encode_queries(["sort"])
    (tmp_path / "texts" / ".git").mkdir()
    (tmp_path / "texts" / ".git" / "packed").write_text("sort sort\n" * 50)
    (tmp_path / "texts" / "image.bin").write_bytes(b"sort\0sort\n" * 50)
    folder = distil_static(tmp_path / "base", tmp_path / "again", 8, tmp_path / "texts")
    assert torch.equal(load_encoder(folder, device="cpu").encode_queries(["sort"]), words)
    with refused("texts="):
        distil_static(tmp_path / "base", tmp_path / "small", 8, tmp_path / "none")
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "run.json").touch()
    with refused("small: the folder has the run.json of another encoder"):
        distil_static(tmp_path / "base", tmp_path / "small", 8, overwrite=True)
    (tmp_path / "small" / "run.json").unlink()
    with refused("dimensions=64: must be from 1 to 32"):
        distil_static(tmp_path / "base", tmp_path / "small", 64)
    with refused("vocabulary_size=30: must be at least 38"):
        distil_static(tmp_path / "base", tmp_path / "small", 8, vocabulary_size=30)
