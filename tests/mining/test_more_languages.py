"""Functions and their documentation in the languages whose data flow is not extracted."""

import pytest

from soft_trainer.dataflow import extract_data_flow
from soft_trainer.errors import UserError
from soft_trainer.mining.definitions import parse
from soft_trainer.mining.functions import functions
from soft_trainer.mining.languages import SOURCE_LANGUAGES
from soft_trainer.mining.rules import CODE_RULES, DOCUMENT_RULES, first_broken

SOURCES = {
    "typescript": ("/** Add numbers. */\nexport const add = (a: number) => { return a }\n", "add", "Add numbers ."),
    "tsx": ("/** Shows it. */\nexport function View(p: P) { return <div>{p.a}</div> }\n", "View", "Shows it ."),
    "c": ("/** Adds one.\n * @param a x */\nstatic int *add(int a)\n{\n return &a;\n}\n", "add", "Adds one ."),
    "cpp": ("/// Adds one.\nint &shop::Cart::add(int x) { return x; }\n", "shop.Cart.add", "Adds one ."),
    "csharp": (
        "class Cart {\n  /// <summary>Adds one.</summary>\n  int Add(int x) { return x; }\n}\n",
        "Cart.Add",
        "Adds one .",
    ),
    "rust": (
        "impl<T> Cart<T> {\n  /// Adds one.\n  ///\n  /// # Errors\n  fn add(&self) {}\n}\n",
        "Cart.add",
        "Adds one .",
    ),
    "kotlin": ("/**\n * Adds one.\n * @param x y\n */\nfun add(x: Int): Int { return x }\n", "add", "Adds one ."),
}


@pytest.mark.parametrize("language", SOURCES)
def test_a_documented_function(language):
    text, name, document = SOURCES[language]
    rows = [row for row, _ in functions(parse(text.encode(), language), text.encode(), language, "a")]
    assert [(row["func_name"], " ".join(row["docstring_tokens"])) for row in rows] == [(name, document)]
    assert "Adds" not in rows[0]["code"] and rows[0]["code_tokens"]
    assert isinstance(first_broken(rows[0], [*CODE_RULES, *DOCUMENT_RULES]), str)


def test_data_flow_stays_with_six_languages():
    assert set(SOURCES) < set(SOURCE_LANGUAGES)
    with pytest.raises(UserError, match="use one of ruby, python"):
        extract_data_flow("fn f() {}", "rust")
