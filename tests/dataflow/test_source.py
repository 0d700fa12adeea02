import pytest

from soft_trainer.dataflow import DATA_FLOW_LANGUAGES, code_tokens, remove_comments
from soft_trainer.errors import UserError
from soft_trainer.mining.rules import unparseable
from soft_trainer.source.grammars import parser


def test_one_parser_a_language():
    assert all(parser(language) is parser(language) for language in DATA_FLOW_LANGUAGES)
    for function in (code_tokens, unparseable, remove_comments):
        with pytest.raises(UserError, match="ruby, python"):
            function("", "cobol")


@pytest.mark.parametrize("language", DATA_FLOW_LANGUAGES)
def test_functions_parse_and_comments_are_removed_and_nothing_else(functions, language):
    assert not unparseable(functions[language], language)
    assert unparseable(functions[language][:-12] + "(", language)
    code = remove_comments(functions[language], language)
    assert not any(text in code for text in ("#", "//", "/*", "Add up", "\n\n"))
    assert code_tokens(code, language) == code_tokens(functions[language], language)


@pytest.mark.parametrize(
    ("language", "code", "expected"),
    [
        ("ruby", 'x = "# no" # yes', 'x = "# no" '),
        ("python", 'def f():\n    "doc"\n\n    return "# no"  # yes', 'def f():\n    return "# no"  '),
        ("python", 'x = "no doc"', 'x = "no doc"'),
        ("java", 'f("// no", \'"\'); // yes', 'f("// no", \'"\');  '),
        ("go", "a /* b\n c */ d", "a   d"),
    ],
)
def test_other_text_is_kept(language, code, expected):
    assert remove_comments(code, language) == expected


@pytest.mark.parametrize(
    ("language", "code", "expected"),
    [
        ("ruby", "f 'a b'", ["f", "'a b'"]),
        ("python", "x = '''a\nb'''", ["x", "=", "'''ab'''"]),
        ("java", 'f("a");', ["f", "(", '"a"', ")", ";"]),
        ("javascript", "f(`a${b}c`);", ["f", "(", "`", "${", "b", "}", "`", ")", ";"]),
        ("php", 'f("a $b");', ["<?php", "f", "(", '"a $b"', ")", ";", "?>"]),
        ("php", "public function f() {}", ["<?php", "public", "function", "f", "(", ")", "{", "}", "?>"]),
        ("go", "package é", ["package", "é"]),
    ],
)
def test_tokens(language, code, expected):
    assert code_tokens(code, language) == expected
