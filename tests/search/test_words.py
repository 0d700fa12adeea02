"""Text to terms."""

import pytest

from soft_trainer.mining.words import stem, terms


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


def test_letters_of_other_scripts_are_words():
    assert terms("größe") == ("größe",) and terms("日付") == ("日付",)
