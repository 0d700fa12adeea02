"""Text to terms."""

import pytest
from trees import write_tree

from soft_trainer.search import CodeIndex, updating
from soft_trainer.search import terms as terms_of_files
from soft_trainer.search.terms import Reader
from soft_trainer.search.words import WORD, source_words, stem, terms


@pytest.mark.parametrize(
    "forms",
    [
        "validate validates validated validating validator validators validation",
        "parse parses parsed parsing parser parsers",
        "render renders rendered rendering renderer",
        "query queries",
        "class classes",
        "alias aliases",
        "compose composition",
        "update updates updating updated",
        "response responses",
        "string strings",
    ],
)
def test_forms_of_a_word_meet(forms):
    assert len({stem(word) for word in forms.split()}) == 1


@pytest.mark.parametrize("pair", ["class clause", "test text", "server session", "list link", "access accept"])
def test_different_words_stay_apart(pair):
    first, second = pair.split()
    assert stem(first) != stem(second)


def test_identifiers_are_found_whole_and_by_their_parts():
    assert len({terms(name)[0] for name in ("parse_url", "parseUrl", "ParseURL", "PARSE_URL")}) == 1
    assert set(terms("parse_url")[1:]) == {stem("parse"), stem("url")}
    assert set(terms("HTTPServer2")[1:]) == {"http", stem("server"), "2"}


def test_hashes_and_signs_are_no_terms():
    assert terms("a" * 65) == () and terms("_") == ()


def test_a_long_name_is_found():
    name = "test_a_missing_corpus_is_named_before_a_training_that_would_choose_by_it"
    assert len(name) > 64 and stem("corpus") in terms(name)


def test_letters_of_other_scripts_are_words():
    assert terms("größe") == ("größe",) and terms("日付") == ("日付",)


@pytest.mark.parametrize(
    "source", [bytes(range(128)), b"a_b1 x.y\x1fz\x00", "größe_2 日付".encode(), b"caf\xe9 a\xff_b \xe2"]
)
def test_words_of_a_source_are_those_of_its_text(source):
    assert source_words(source) == WORD.findall(source.decode(errors="replace"))


def test_a_reader_counts_terms_and_names_each_of_them_once(tmp_path):
    (tmp_path / "a.py").write_text("def parse():\n    return go(go(go(1)))\n")
    (tmp_path / "b.py").write_text("def parse():\n    return stop(go)\n")
    reader = Reader(str(tmp_path))
    first, second = reader.read(["a.py"]), reader.read(["b.py"])
    vocabulary = first.new_terms + second.new_terms
    assert len(set(vocabulary)) == len(vocabulary) and "go" in first.new_terms and "stop" in second.new_terms
    counts = [dict(zip((vocabulary[n] for n in b.term), b.count.tolist(), strict=True)) for b in (first, second)]
    assert [(c["go"], c.get("stop"), c["=parse"]) for c in counts] == [(3, None, 1), (1, 1, 1)]


def test_a_term_is_counted_up_to_255(tmp_path):
    (tmp_path / "a.py").write_text(("go " * 30 + "\n") * 20)
    batch = Reader(str(tmp_path)).read(["a.py"])
    assert batch.count[batch.term == batch.new_terms.index("go")].tolist() == [255]


def test_a_full_vocabulary_changes_no_posting(tmp_path, monkeypatch):
    files = {f"m{n}.py": f"def name_{n}(x):\n    return shared_{n % 3}(x, word_{n})\n" for n in range(12)}
    tree = write_tree(tmp_path / "tree", files)
    monkeypatch.setattr(updating, "BATCH_FILES", 2)
    postings = []
    for most in (400_000, 5):
        monkeypatch.setattr(terms_of_files, "MAX_WORDS", most)
        index = CodeIndex.build(tree, tmp_path / str(most))
        postings.append(index.database.execute("SELECT * FROM postings ORDER BY term, segment").fetchall())
        index.close()
    assert postings[0] == postings[1] and len(postings[0]) > 20
