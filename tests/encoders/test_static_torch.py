"""Static encoders, distilled or with random vectors, give equal embeddings in AutoModel and sentence-transformers."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch
from refusals import refused
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from soft_trainer import load_encoder
from soft_trainer.encoders.distilling import distil_static
from soft_trainer.encoders.encoding import Encoder, collator_of, encode, pad
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import check_model, given_encoder
from soft_trainer.encoders.profiles import PROFILES
from soft_trainer.encoders.scratch import random_model, train_tokenizer
from soft_trainer.encoders.static_numpy import token_weights
from soft_trainer.encoders.static_torch import (
    CHARACTERS,
    SPECIAL,
    count_words,
    distilled,
    static_model,
    word_tokenizer,
)
from soft_trainer.encoders.text_encoder import open_encoder
from soft_trainer.losses import info_nce

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


def repeating(tokenizer, length, kinds):
    """Makes a text of `length` tokens, of which at most `kinds` are different."""
    words = sorted(word for word in tokenizer.get_vocab() if word.isalnum())
    generator = np.random.default_rng(length + kinds)
    return " ".join(generator.choice(generator.choice(words, kinds), length))


def expected_embedding(encoder, text, side, prompt=""):
    """Returns the embedding of a text after a prompt, from one token after the other in double precision."""
    vectors = encoder.model.embeddings.weight.detach().double().numpy()
    unknown = encoder.tokenizer.unk_token_id
    before, ids = (encoder.tokenizer(each, verbose=False)["input_ids"] for each in (prompt, text))
    sums = Counter(token for token in before if token != unknown)
    for position, token in enumerate(token for token in ids if token != unknown):
        sums[token] += 8 / (1 + position / 4) if side == "code" else 1
    total = sum((math.log1p(sums[token]) * vectors[token] for token in sums), np.zeros(vectors.shape[1]))
    return total / max(np.linalg.norm(total), 1e-12)


@pytest.mark.parametrize("prompt", ["", "sort ж list: "])
@pytest.mark.parametrize("side", ["query", "code", "chunk"])
@pytest.mark.parametrize("length", [1, 2, 30, 300, 5000])
def test_all_readers_compute_the_weighted_sum(static, side, length, prompt):
    encoder, folder = static
    profile = encoder.profile.replace(query_prefix=prompt, code_prefix=prompt)
    export_encoder(encoder.model, encoder.tokenizer, profile, folder)
    texts = [repeating(encoder.tokenizer, length, kinds) for kinds in (1, 2, 5, 30)] + ["ж " * length + "sort", ""]
    expected = [expected_embedding(encoder, text, side, prompt) for text in texts]
    found = {"NumPy": open_encoder(folder).encode(texts, side)}
    if side != "chunk":
        loaded = load_encoder(folder, device="cpu")
        items = encoder.tokenizer([prompt + text for text in texts], verbose=False)["input_ids"]
        library = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
        collated = collator_of(loaded, torch.device("cpu"))(items, 0, 10_000, side)
        found["training"] = encode(loaded.model.train(), profile, collated)
        found["evaluation"] = loaded.encode(texts, side)
        found["sentence-transformers"] = (library.encode_query if side == "query" else library.encode_document)(texts)
    if side != "chunk" and not prompt:  # AutoModel does not know where a prompt ends
        inputs = encoder.tokenizer(texts, return_tensors="pt", padding=True, verbose=False)
        found["AutoModel"] = AutoModel.from_pretrained(folder)(**inputs, side=side).pooler_output
    for path, embeddings in found.items():
        assert np.allclose(torch.as_tensor(embeddings).detach(), expected, rtol=0, atol=1e-6), path


def test_tokens_beyond_the_length_do_not_count(static):
    encoder, folder = static
    cut = encoder.profile.replace(query_length=3, code_length=3)
    cut.save(folder)
    text = "sort sort list list list list list"
    library = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    assert np.allclose(library.encode([text]), encoder.encode_queries(["sort sort list"]), atol=1e-6)
    for side in ("query", "code"):
        for found in (dataclasses.replace(encoder, profile=cut), open_encoder(folder)):
            assert np.allclose(found.encode([text], side), encoder.encode(["sort sort list"], side), atol=1e-6)


def test_other_poolings_and_folders_of_earlier_releases_are_refused(static):
    encoder, folder = static
    with refused("pooling=mean: a static encoder has its own weighted mean; use pooling=pooler"):
        check_model(encoder.model, encoder.profile.replace(pooling="mean"))
    (folder / "config.json").write_text('{"model_type": "xlnet", "n_layer": 0}')
    with refused("a static encoder stored as an XLNet without layers; distil"):
        load_encoder(folder)


def test_sentence_transformers_gives_and_saves_the_same_encoder(static, tmp_path):
    encoder, folder = static
    model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    given = Encoder(*given_encoder(model))
    assert given.profile == encoder.profile
    model.save(str(tmp_path / "again"), create_model_card=False)
    again = load_encoder(tmp_path / "again", device="cpu")
    for each in (given, again):
        torch.testing.assert_close(each.encode_codes(TEXTS), encoder.encode_codes(TEXTS), atol=1e-6, rtol=0)


def test_a_library_without_this_package_says_so(static):
    with pytest.raises(ValueError, match="soft_trainer_static.StaticModule"):
        SentenceTransformer(str(static[1]), device="cpu")


@pytest.fixture(params=["base", "distilled"])
def with_unknown_words(request, static):
    """Returns a static encoder."""
    return static[0] if request.param == "distilled" else load_encoder("base", device="cpu")


def test_unknown_words_are_excluded(with_unknown_words):
    lengths = with_unknown_words.encode_codes(SCRIPTS).norm(dim=1)
    assert np.allclose(lengths, ["sort" in text for text in SCRIPTS], atol=1e-6)


def test_unknown_words_have_no_gradient_and_do_not_stop_the_others(with_unknown_words):
    encoder = with_unknown_words
    texts = ["读取", "sort a list", "ж" * 120, "write text to file"]
    inputs = pad([encoder.tokenizer(text)["input_ids"] for text in texts], 0)
    embeddings = encode(encoder.model.train(), encoder.profile, inputs)
    info_nce(embeddings[:2] @ embeddings[2:].T * 20).backward()
    gradient = encoder.model.get_input_embeddings().weight.grad
    assert not gradient[encoder.tokenizer.unk_token_id].any()
    assert 1e-3 < gradient.norm() < 1e3


def test_gradients_are_those_of_the_weighted_sum_over_all_tokens(static):
    encoder, _ = static
    model = encoder.model.train()
    items = [encoder.tokenizer(text, verbose=False)["input_ids"] for text in [*TEXTS[:3], LONG[:500], ""]]
    weights = torch.from_numpy(token_weights(items, len(encoder.tokenizer), "code").toarray())
    target = torch.randn(len(items), 16)
    vectors = model.embeddings.weight.detach().clone().requires_grad_()
    expected = torch.nn.functional.normalize(weights @ vectors)
    (expected * target).sum().backward()
    found = encode(model, encoder.profile, model.weigh(items, "code"))
    (found * target).sum().backward()
    assert not found[-1].any()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(model.embeddings.weight.grad, vectors.grad, atol=1e-5, rtol=1e-4)


def test_training_stores_no_vector_of_a_token(static):
    model = static[0].model.train()
    model.embeddings.forward = None
    encode(model, static[0].profile, model.weigh([[5, 6], [7]], "code"))


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
    assert not static.model.embeddings.weight[: len(SPECIAL)].any()
    vocabulary = static.tokenizer.get_vocab()
    assert {"sort", "list", *CHARACTERS} <= vocabulary.keys()
    assert "rare" not in vocabulary
    again = distilled(encoder, words | {"sort": 2, "list": 1000}, 16)
    lengths = [each.model.embeddings.weight[each.tokenizer.vocab["sort"]].norm() for each in (static, again)]
    assert lengths[0] < 0.1 * lengths[1]


def test_too_few_words_for_the_dimensions_are_refused(tokenizer):
    encoder = Encoder(static_model(tokenizer, 64), tokenizer, PROFILES["static"])
    with refused("dimensions=64: the vocabulary has only 39 entries; use more texts"):
        distilled(encoder, {"word": 2}, 64)


def test_only_the_vectors_are_trained(static):
    _, folder = static
    model = load_encoder(folder, device="cpu").model
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["embeddings.weight"]


def test_a_folder_has_the_vectors_once(static):
    encoder, folder = static
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == {"embeddings.weight"}
    assert torch.equal(tensors["embeddings.weight"], encoder.model.embeddings.weight)


def test_an_encoder_from_scratch_without_layers_is_static(tmp_path):
    profile = PROFILES["static"].replace(query_length=16, code_length=32)
    tokenizer = train_tokenizer(TEXTS, profile, 300, ends=False)
    encoder = Encoder(random_model("32x0", tokenizer, profile).eval(), tokenizer, profile)
    export_encoder(encoder.model, tokenizer, profile, tmp_path)
    library = SentenceTransformer(str(tmp_path), device="cpu", trust_remote_code=True)
    assert np.allclose(library.encode_document(TEXTS[:3]), encoder.encode_codes(TEXTS[:3]), atol=1e-6)


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
