"""Results that match by chance are marked as weak."""

import json

import pytest

from soft_trainer.search import CodeIndex


@pytest.mark.parametrize(
    ("query", "weak"),
    [
        ("xqzv parse", True),
        ("parse_xqzv", True),
        ("parse", False),
        ("parse date", False),
        ("the parsing of parsers", False),
        ("Cart.parse_xqzv", True),
        ("shop cart", False),  # a folder and a name
        ("how is a date parsed by the xqzv wvvq", False),
    ],
)
def test_a_stray_word_gives_a_weak_result(tree, query, weak):
    assert CodeIndex.build(tree).search(query)[0].weak == weak


def test_code_like_a_chunk_is_never_weak(tree):
    assert not any(result.weak for result in CodeIndex.build(tree).similar("src/shop/dates.py", 4))


def test_an_embedding_that_stands_out_is_not_weak(tree, stub):
    words = CodeIndex.build(tree).search("xqzv parse")
    assert words[0].weak
    index = CodeIndex.build(tree, model="stub")
    with index.snapshot() as snapshot:
        snapshot.noise = lambda: 2.0  # more than any similarity
    assert index.search("xqzv parse")[0].weak
    snapshot.noise = lambda: -2.0
    assert not any(result.weak for result in index.search("xqzv parse"))


def test_the_noise_of_a_snapshot_is_computed_once(tree, stub):
    index = CodeIndex.build(tree, model="stub")
    asked = []
    embed = stub.queries
    stub.queries = lambda self, texts: asked.append(len(texts)) or embed(self, texts)
    index.search("xqzv parse")
    index.search("xqzv wvvq cart")
    assert asked == [1, 24, 1]


def test_the_shell_says_which_results_are_weak(tree, command):
    command("index", tree)
    code, out, err = command("search", "--folder", tree, "xqzv parse", "-n", 1)
    assert code == 0 and out.splitlines()[0].endswith("  weak") and err.startswith("only weak results")
    row = json.loads(command("search", "--folder", tree, "xqzv parse", "-n", 1, "--json")[1])
    assert row["weak"] is True
    _, out, err = command("search", "--folder", tree, "parse date", "-n", 1)
    assert "weak" not in out + err
