"""An index with embeddings, which in most tests come from a stub encoder."""

import numpy as np
import pytest
from refusals import refused
from trees import write_tree

from soft_trainer.encoders.text_encoder import open_encoder
from soft_trainer.search import CodeIndex
from soft_trainer.search.index import store, vectors
from soft_trainer.search.ranking import ranking

# The letters of README.md without any of its words, so that only the stub's embedding finds it.
BACKWARDS = "pohssllssgnihtredivorptnemyapasdeentuokcehceht"


def test_both_count_and_nonsense_finds_nothing(tree, stub):
    index = CodeIndex.build(tree, model="stub")
    assert index.model == "stub" and index.statistics()["encoded"] == index.statistics()["chunks"]
    assert index.search("parse date")[0].name == "parse_date"
    assert len(index.search(BACKWARDS)) and not index.search(BACKWARDS, lexical=True)
    assert not any(index.search(nonsense) for nonsense in ("zzzqqq", "qx", "bcdfgh jkl"))


def test_only_new_texts_are_encoded(tree, stub):
    index = CodeIndex.build(tree, model="stub")
    stub.encoded.clear()
    assert index.update() is False and not stub.encoded
    with open(tree / "src/shop/dates.py", "a") as file:
        file.write("\n\ndef brand_new(): return 1\n")
    (tree / "src/server.go").touch()
    index.update()
    assert len(stub.encoded) == 1 and "brand_new" in stub.encoded[0]


@pytest.mark.parametrize("tidied", [False, True])
def test_a_branch_that_comes_back_has_its_embeddings(tree, stub, monkeypatch, tidied):
    monkeypatch.setattr(store, "MAX_DEAD_SHARE", -1 if tidied else 100)
    branches = [{f"m{n}.py": f"def on_{branch}_{n}(): pass\n" for n in range(9)} for branch in ("main", "other")]
    index = CodeIndex.build(write_tree(tree, branches[0]), model="stub")
    for number, encoded in enumerate((9, 0, 0), 1):
        stub.encoded.clear()
        write_tree(tree, branches[number % 2])
        index.refresh()
        assert len(stub.encoded) == encoded and index.statistics()["encoded"] == index.statistics()["chunks"]
    with CodeIndex.build(tree, tree.parent / "fresh", model="stub") as fresh:
        for query in ("on_other_3", BACKWARDS, "a function on a branch"):
            assert index.search(query) == fresh.search(query)


def test_words_change_while_chunks_are_encoded(tree, stub, monkeypatch):
    monkeypatch.setattr(vectors, "COMMIT_TEXTS", 4)
    original = stub.codes

    def changing(self, texts, languages):  # what another process may do meanwhile
        if len(stub.encoded) == 5:
            (tree / "README.md").unlink()
            write_tree(tree, {"new.py": "def brand_new(): pass\n"})
            other = CodeIndex.open(store.default_index_dir(tree))
            other.refresh()
            assert other.search("brand_new", lexical=True)[0].path == "new.py" and not other.notices
            with store.transaction(other.database):
                monkeypatch.setattr(store, "MAX_DEAD_SHARE", -1)
                store.compact(other.database)  # gives files other numbers
        return original(self, texts, languages)

    stub.codes = changing
    index = CodeIndex.build(tree, model="stub")
    fresh = CodeIndex.build(tree, tree.parent / "fresh", model="stub")
    assert index.statistics()["encoded"] == index.statistics()["chunks"]
    for query in ("brand_new", "mmm nnn", "sum up prices"):
        found = [[(r.path, r.start_line, r.score) for r in one.search(query)] for one in (index, fresh)]
        assert found[0] == found[1]


def test_another_model_and_other_weights_are_noticed(tree, stub):
    index = CodeIndex.build(tree, model="stub")
    count = len(stub.encoded)
    CodeIndex.build(tree, model="another")
    assert len(stub.encoded) == 2 * count and index.model == "another"
    # the second change does not affect the embeddings of queries
    for number, (name, value) in enumerate({"weights": 5.0, "code_side": "another prompt for codes"}.items(), 3):
        setattr(stub, name, value)
        assert index.search("parse date") and "has changed" in index.notices[-1]
        CodeIndex.build(tree, model="another")
        assert len(stub.encoded) == number * count


def test_the_number_of_dimensions_is_kept_and_another_one_encodes_again(tree, stub):
    index = CodeIndex.build(tree, model="stub", truncate_dim=8)
    count = len(stub.encoded)
    assert index.truncate_dim == 8 and index.statistics()["truncate_dim"] == 8
    opened = CodeIndex.open(index.index_dir)
    assert opened.search(BACKWARDS) and not opened.notices
    assert opened._cached.vectors.shape[1] == 8
    CodeIndex.build(tree)
    CodeIndex.build(tree, model="stub")
    assert len(stub.encoded) == count and opened.truncate_dim == 8
    CodeIndex.build(tree, truncate_dim=4)
    assert len(stub.encoded) == 2 * count and (opened.model, opened.truncate_dim) == ("stub", 4)
    assert opened.search(BACKWARDS) and opened._cached.vectors.shape[1] == 4
    CodeIndex.build(tree, model="another")
    assert opened.truncate_dim is None


def test_dimensions_without_an_encoder_are_refused_before_anything_is_read(tree):
    with refused("truncate_dim=8: the index has no encoder; set one with model=NAME"):
        CodeIndex.build(tree, tree.parent / "words", truncate_dim=8)
    assert not (tree.parent / "words").exists()
    index = CodeIndex.build(tree)
    write_tree(tree, {"new.py": "def brand_new(): pass\n"})
    with refused("truncate_dim=8: the index has no encoder; set one with model=NAME"):
        index.update(truncate_dim=8)
    assert index.text_of("new.py") is None


def test_a_search_never_encodes_everything_again(tree, stub):
    index = CodeIndex.build(tree, model="stub")
    stub.weights = 5.0
    write_tree(tree, {"new.py": "def brand_new(): pass\n"})
    stub.encoded.clear()
    index.refresh()
    assert not stub.encoded and index.search("brand_new")[0].path == "new.py"
    assert "stub has changed; `soft-trainer index " in index.notices[-1]
    index.update()
    assert len(stub.encoded) > index.statistics()["chunks"]


def test_weights_that_another_process_has_encoded_with_are_loaded(tree, stub):
    loaded = []

    def load(self, name, truncate_dim=None):
        self.name, self.truncate_dim, self.weights = name, truncate_dim, stub.weights
        loaded.append(self.weights)

    stub.__init__ = load
    index = CodeIndex.build(tree, model="stub")
    index.search("parse date")
    assert loaded == [1.0]
    stub.weights = 5.0
    CodeIndex.build(tree, model="stub")
    for _ in range(3):
        assert index.search("parse date") and not index.notices
    assert loaded == [1.0, 5.0, 5.0]


def test_an_encoder_stays_while_it_encodes_new_chunks(tree, stub):
    class Shared(dict):
        clear = None  # another thread looks for the encoder at any time

    index = CodeIndex.build(tree, model="stub")
    index.encoders = Shared(index.encoders)
    write_tree(tree, {"new.py": "def brand_new(): pass\n"})
    assert index.update() and index.statistics()["encoded"] == index.statistics()["chunks"]


@pytest.mark.slow
def test_unused_embeddings_are_deleted(tree, stub):
    index = CodeIndex.build(tree, model="stub")
    for number in range(20):
        text = "\n\n\n\n".join(f"def f{number}_{k}(x):\n    y = x + {number}\n    return y" for k in range(30))
        write_tree(tree, {"src/many.py": text})
        index.update()
    (rows,) = index.database.execute("SELECT sum(length(digests)) / 8 FROM vectors").fetchone()
    assert rows <= 2.1 * index.statistics()["chunks"] + 16
    with index.snapshot() as snapshot:  # every chunk still has its own embedding
        values = index.similarity_to("def f19_3(x):\n    y = x + 19\n    return y", snapshot)
    assert not np.isnan(values).any()


def test_queries_and_chunks_do_not_share_the_limit_of_a_tokenizer(model, tokenizer, profile, tmp_path):
    from soft_trainer.encoders.export import export_encoder

    export_encoder(model, tokenizer, profile.replace(query_length=8, code_length=24), tmp_path)
    encoder = open_encoder(tmp_path, light=False)
    encoder.encode(["a b c"], "query")
    encoder.encode(["def f(): pass"], "code")  # what another thread may do meanwhile
    assert encoder.tokenizer.backend_tokenizer.truncation["max_length"] == 8


@pytest.mark.filterwarnings("error")
def test_a_tree_without_an_embedding_is_searched_by_words(tmp_path, stub):
    index = CodeIndex.build(write_tree(tmp_path / "one", {"a.py": "def old(): pass\n"}), model="stub")
    write_tree(tmp_path / "one", {"a.py": "def brand_new(): pass\n"})
    index.refresh(encode=False)
    assert index.search("brand_new") and not index.search("zzzqqq")


def test_a_cut_encoder_with_data_flow_keeps_the_order_of_its_chunks(model, tokenizer, profile, tmp_path):
    from soft_trainer.encoders.export import export_encoder

    export_encoder(model, tokenizer, profile.replace(code_length=24, data_flow_length=8), tmp_path)
    texts, languages = ["def f(a): return a", "class A {}", "x = 1", "a b c"], ["python", "java", "python", "text"]
    cut, whole = (open_encoder(tmp_path, dim, light=False).encode(texts, "code", languages) for dim in (8, 32))
    expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, expected, atol=1e-5)
    for number, (text, language) in enumerate(zip(texts, languages, strict=True)):
        alone = open_encoder(tmp_path, 8, light=False).encode([text], "code", [language])
        np.testing.assert_allclose(alone[0], cut[number], atol=1e-5)


@pytest.mark.parametrize("size", [1, 400])
def test_similarities_are_those_of_float32(size):
    rng = np.random.default_rng(0)
    rows = (size * rng.normal(size=(3000, 32))).astype(np.float16)
    query = (size * rng.normal(size=32)).astype(np.float32)
    exact = rows.astype(np.float32) @ (query / np.linalg.norm(query))
    scores = vectors.similarities(rows, query)
    assert np.argsort(-scores)[:50].tolist() == np.argsort(-exact)[:50].tolist()
    assert np.abs(scores - exact).max() < 0.02 * size


@pytest.mark.parametrize("scale", [1e-3, 300, 1e5])
def test_dot_products_beyond_half_precision_rank(tmp_path, tree, stub, scale):
    plain = CodeIndex.build(tree, tmp_path / "plain", model="stub").search("sum up prices of items", 20)
    original = stub._embed
    stub._embed = lambda self, texts: scale * original(self, texts)
    large = CodeIndex.build(tree, tmp_path / "large", model="stub").search("sum up prices of items", 20)
    assert [(r.path, r.name, pytest.approx(r.score, abs=0.01)) for r in large] == [
        (r.path, r.name, r.score) for r in plain
    ]


def test_a_few_embeddings_do_not_outweigh_the_words():
    some = np.array([0.9, 0.1, 0.2] + [np.nan] * 7, np.float32)
    assert ranking._share(some).max() == pytest.approx(0.3)
    assert ranking._share(some[:3]).max() == pytest.approx(1)
