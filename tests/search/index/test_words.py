"""Texts are split into stemmed terms."""

import pytest
from trees import write_tree

from soft_trainer.search.index.parsing import read_batch
from soft_trainer.search.index.words import WORD, parts, source_words, stem, terms

FORMS = """validate validates validated validating validator validators validation
    parse parses parsed parsing parser parsers
    render renders rendered rendering renderer
    query queries
    class classes
    alias aliases
    compose composition
    update updates updating updated
    response responses
    string strings"""


@pytest.mark.parametrize("forms", FORMS.split("\n"))
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
    assert terms("größe") == ("größe",) and terms("日付") == ("日付",)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("日付を解析", ["日付", "付を", "を解", "解析"]),
        ("解析", ["解析"]),
        ("的", ["的"]),
        ("カート", ["カー", "ート"]),
        ("Python的列表", ["python", "的列", "列表"]),
        ("解析URL", ["解析", "url"]),
        ("날짜를", ["날짜", "짜를"]),  # 날짜 and a particle
    ],
)
def test_a_script_without_spaces_is_read_by_pairs(word, expected):
    assert list(parts(word)) == expected
    assert set(expected) <= set(terms(word))


def test_a_sentence_without_spaces_is_not_a_hash():
    assert len(terms("文字" * 100)) == 199


def test_hashes_are_no_terms_and_long_names_are():
    assert terms("a" * 65) == () and terms("_") == ()
    assert stem("corpus") in terms("test_a_missing_corpus_is_named_before_a_training_that_would_choose_by_it")


@pytest.mark.parametrize(
    "source", [bytes(range(128)), b"a_b1 x.y\x1fz\x00", "größe_2 日付".encode(), b"caf\xe9 a\xff_b \xe2"]
)
def test_words_of_a_source_are_those_of_its_text(source):
    assert source_words(source) == WORD.findall(source.decode(errors="replace"))


def test_terms_are_counted_up_to_255(tmp_path):
    write_tree(tmp_path, {"a.py": "def parse():\n    return go(go(go(1)))\n", "b.py": "x = 1\n", "c.txt": "go " * 300})
    batch = read_batch(str(tmp_path), dict.fromkeys(["a.py", "b.py", "c.txt"]))
    assert len(set(batch.vocabulary)) == len(batch.vocabulary)
    counts = {
        (batch.vocabulary[term], chunk): count
        for term, chunk, count in zip(batch.term.tolist(), batch.chunk.tolist(), batch.count.tolist(), strict=True)
    }
    assert [counts.get(("go", chunk)) for chunk in range(3)] == [3, None, 255]
    assert counts["=parse", 0] == 1 and ("=parse", 1) not in counts
