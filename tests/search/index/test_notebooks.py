"""Notebooks are split into cells and keep their line numbers."""

import json

import pytest
from trees import write_tree

from soft_trainer.search import CodeIndex
from soft_trainer.search.index.notebooks import notebook_text


def cell(kind, *lines, **more):
    source = [f"{line}\n" for line in lines[:-1]] + [*lines[-1:]]
    return {"cell_type": kind, "metadata": {}, **more, "source": source}


NOTEBOOK = {
    "cells": [
        cell("markdown", "# Prices", "", "How we add them up."),
        cell(
            "code",
            "import decimal",
            "",
            "def total_price(items):",
            '    """Sum up the prices."""',
            "    return sum(items)",
            outputs=[{"output_type": "stream", "text": ["secret_output\n"]}, {"data": {"image/png": "A" * 3_000_000}}],
        ),
        cell("code"),
        cell("raw", "raw_words"),
    ],
    "metadata": {"language_info": {"name": "python"}},
    "nbformat": 4,
}


@pytest.mark.parametrize("indent", [1, 4])
def test_a_cell_is_found_where_it_stands_in_the_file(tmp_path, indent):
    tree = write_tree(tmp_path / "tree", {"shop.ipynb": json.dumps(NOTEBOOK, indent=indent)})
    index = CodeIndex.build(tree)
    best = index.search("total price")[0]
    assert (best.path, best.name, best.language) == ("shop.ipynb", "total_price", "python")
    assert best.text.split("\n")[-3:] == [
        "def total_price(items):", '    """Sum up the prices."""', "    return sum(items)",
    ]  # fmt: skip
    lines = (tree / "shop.ipynb").read_text().split("\n")
    assert "return sum(items)" in lines[best.end_line - 1] and "def total_price" in lines[best.start_line - 1]
    words = index.search("how we add them up")[0]
    assert words.text == "# Prices\n\nHow we add them up." and "add them up" in lines[words.end_line - 1]
    assert index.search("secret_output") == [] and index.search("raw_words")
    assert len(index.text_of("shop.ipynb").split("\n")) == len(lines)


def test_a_text_in_one_string_has_the_lines_that_jupyter_would_write():
    whole = {**NOTEBOOK, "cells": [{"cell_type": "code", "source": "a = 1\nb = 2\n"}], "metadata": {}}
    text, language = notebook_text(json.dumps(whole).encode())
    assert language == "python"
    assert text.decode().split("\n")[3:7] == ["# %% [code]", "", "a = 1", "b = 2"]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"cells": [1]}', '{"cells": [{"cell_type": "code"}]}', "[" * 5_000, '{"cells": 3}']
)
def test_an_invalid_notebook_is_read_as_text(tmp_path, content):
    assert notebook_text(content.encode()) is None
    tree = write_tree(tmp_path / "tree", {"broken.ipynb": content})
    assert CodeIndex.build(tree).search("broken")[0].path == "broken.ipynb"
