"""Example queries come from the index, and each finds the function that it comes from."""

import pytest
from trees import write_tree

from soft_trainer.search import CodeIndex, Search
from soft_trainer.search.serving.examples import example_queries


def test_examples_are_names_and_sentences_that_are_found_first(tree):
    index = CodeIndex.build(tree)
    examples = example_queries(Search([index]))
    assert len(examples) == 3 and examples == example_queries(Search([CodeIndex.open(index.index_dir)]))
    assert not any(index.search(query)[0].weak for query in examples)
    names = {"ShoppingCart", "add_item", "total_price", "parse_date", "format_date", "ListenAndServe"}
    sentences = {
        "Holds what a customer wants to buy",
        "Put an item into the cart",
        "Sum up the prices of all items",
        "Parse an ISO date",
        "ListenAndServe opens the port and waits for requests",
    }
    assert names & set(examples) and sentences & set(examples) and set(examples) <= names | sentences


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.py", 'def one_two():\n    """Reads all the rows.\n\n    Slowly.\n    """\n', "Reads all the rows"),
        ("a.js", "/**\n * Reads all\n * the rows.\n */\nfunction oneTwo() {\n  return 1;\n}\n", "Reads all the rows"),
        (
            "a.go",
            "package a\n\n// OneTwo reads all rows.\nfunc OneTwo() int {\n\treturn 1\n}\n",
            "OneTwo reads all rows",
        ),
        ("a.py", 'def one_two():\n    """Reads `rows` (see https://example.org)."""\n', None),
        ("a.py", 'def one_two():\n    """Rows."""\n', None),
    ],
)
def test_sentences_of_documentation(tmp_path, name, text, sentence):
    other = text.replace("one_two", "three_four").replace("neTwo", "neThree").replace("all", "some")
    index = CodeIndex.build(write_tree(tmp_path / "tree", {name: text, f"b/{name}": other}))
    found = {query for query in example_queries(Search([index])) if " " in query}
    assert found <= {sentence, sentence and sentence.replace("all", "some").replace("OneTwo", "OneThree")}
    assert bool(found) == bool(sentence)


def test_tests_and_texts_give_no_examples_and_an_empty_index_gives_none(tmp_path):
    texts = {"tests/test_a.py": "def test_of_rows():\n    pass\n", "a.md": "# parse_date\n", "b.py": "x = 1\n"}
    index = CodeIndex.build(write_tree(tmp_path / "tree", texts))
    (tmp_path / "empty").mkdir()
    empty = CodeIndex.build(tmp_path / "empty")
    assert example_queries(Search([index])) == [] == example_queries(Search([index, empty]))
