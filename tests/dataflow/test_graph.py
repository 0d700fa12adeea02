"""Graphs equal graphs drawn by hand: `sum:2` is the second token `sum`, `<` comes from, `=` is computed from."""

from collections import Counter

import pytest
from refusals import refused

from soft_trainer.dataflow import DATA_FLOW_LANGUAGES, extract_data_flow

EDGES = {
    "ruby": """sum:1 = 0:1, prices:2 < prices:1, sum:2 = price:2, price:2 < price:1, sum:3 = sum:4 rate:2,
        sum:4 < sum:2, rate:2 < rate:1, rate:3 < rate:1, sum:5 < sum:3""",
    "python": """rate:1 < 2:1, sum:1 = 0:1, price:1 = prices:2, prices:2 < prices:1, sum:2 = sum:3 price:2,
        sum:3 < sum:1 sum:2, price:2 < price:1, rate:2 < rate:1, sum:4 = rate:3, rate:3 < rate:1, sum:5 = 1:1,
        sum:6 < sum:4 sum:5""",
    "java": """sum:1 < 0:1, price:1 = prices:2, prices:2 < prices:1, sum:2 = sum:3 price:2, sum:3 < sum:1 sum:2,
        price:2 < price:1, rate:2 < rate:1, sum:4 = rate:3, rate:3 < rate:1, sum:5 < sum:2 sum:4""",
    "javascript": """rate:1 = 2:1, sum:1 < 0:1, rate:2 < rate:1 rate:3, sum:2 = prices:2 pop:1, prices:2 < prices:1,
        rate:3 = rate:3, sum:3 < sum:2""",
    "php": """rate:1 < 2:1, sum:1 = 0:1, prices:2 < prices:1, key:1 = this:1 prices:2, price:1 = this:1 prices:2,
        sum:2 = price:2, price:2 < price:1, rate:2 < rate:1, sum:3 = rate:3, rate:3 < rate:1, sum:4 = sum:4""",
    "go": """sum:1 < 0:1, i:2 < i:1, rate:2 < rate:1, i:3 = i:3, sum:2 = sum:3 prices:2 i:4, sum:3 < sum:1 sum:2,
        prices:2 < prices:1, i:4 < i:3, rate:3 < rate:1, sum:4 = rate:4, rate:4 < rate:1, sum:5 < sum:2 sum:4""",
}
SIGNS = {"comesFrom": "<", "computedFrom": "="}


def drawn(code: str, language: str) -> list[str]:
    """Formats the edges of `code` that have a source, one per line, such as `sum:2 < sum:1`."""
    tokens, edges = extract_data_flow(code, language)
    seen, names = Counter(), []
    for token in tokens:
        seen[token] += 1
        names.append(f"{token}:{seen[token]}")
    return [
        " ".join([names[edge.target], SIGNS[edge.relation], *(names[token] for token in edge.sources)])
        for edge in edges
        if edge.sources
    ]


@pytest.mark.parametrize("language", DATA_FLOW_LANGUAGES)
def test_edges_of_a_small_function(functions, language):
    assert drawn(functions[language], language) == [edge.strip() for edge in EDGES[language].split(",")]
    # A first mention that others come from is a node without sources. Any other occurrence without an edge is none.
    edges = extract_data_flow(functions[language], language).edges
    sources = {token for edge in edges for token in edge.sources}
    alone = {edge.target for edge in edges if not edge.sources}
    assert alone and alone <= sources | {edge.target for edge in edges if edge.sources}


@pytest.mark.parametrize(
    ("language", "code", "expected"),
    [
        ("python", "a, b = b, a", ["a:1 = b:2", "b:1 = a:2"]),
        ("python", "def f(o):\n    o.x = 'text'", ["o:2 = 'text':1", "x:1 = 'text':1"]),
        ("python", "y = [x for x in xs]", ["y:1 = x:1 x:2 xs:1", "x:1 < x:2", "x:2 = xs:1"]),
        ("ruby", "a, b = c.d(e)", ["a:1 = c:1 d:1", "b:1 = e:1"]),
        ("ruby", "x[0] = /a\\d+/", ["x:1 = \\d:1", "0:1 = \\d:1"]),
        ("java", "void f() { for (int i = 0; i < 9; i++) { } }", ["i:1 < 0:1", "i:2 < i:1", "i:3 = i:3"]),
        ("javascript", "function f(a) { const b = a?.c; }", ["b:1 < a:2", "b:1 < c:1", "a:2 < a:1"]),
        ("javascript", "function(a) { return a; }", ["a:2 < a:1"]),
        ("php", "function f($a) { $b = &$a; $c = (int) $b; }", ["b:1 = a:2", "a:2 < a:1", "c:1 = b:2", "b:2 < b:1"]),
        ("go", "func f() { g(T{y: 1}, y) }", []),
    ],
)
def test_todays_grammars_give_the_published_rules(language, code, expected):
    assert drawn(code, language) == expected


def test_a_method_and_its_class_give_the_same_edges_and_docstrings_and_comments_are_no_tokens(functions):
    for language in ("java", "javascript", "php"):
        whole = f"class C {{ {functions[language]} }}"
        assert drawn(whole, language)[-3:] == drawn(functions[language], language)[-3:]
    for language, words in {"python": ("Add up", "grows"), "ruby": ("the end",), "go": ("scale",)}.items():
        text = " ".join(extract_data_flow(functions[language], language).tokens)
        assert not any(word in text for word in words)


def test_many_pairs_become_one_edge_a_target():
    left, right = (", ".join(f"{name}{i}" for i in range(400)) for name in "ab")
    edges = extract_data_flow(f"function f() {{ const [{left}] = [{right}]; }}", "javascript").edges
    assert sum(len(edge.sources) for edge in edges) == 400 * 400
    assert len(edges) < 1000


def test_an_unknown_language_names_the_known():
    with refused("rust", "ruby, python, java, javascript, php, go"):
        extract_data_flow("fn main() {}", "rust")
