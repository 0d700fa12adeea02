"""Chunks similar to a chunk are found, and a search says what took part."""

import pytest
from refusals import refused
from trees import write_tree

from soft_trainer.search import CodeIndex

OTHER = {
    "client/dates.py": '''
        import datetime

        def read_iso(text):
            """Read an ISO date."""
            return datetime.date.fromisoformat(text)
        ''',
    "client/menu.py": "def show_menu(menu):\n    return [entry.title for entry in menu]\n",
}


@pytest.mark.parametrize("model", [None, "stub"])
def test_similar_chunks(tree, stub, model):
    index = CodeIndex.build(write_tree(tree, OTHER), model=model)
    found = index.similar("src/shop/dates.py", 4)
    assert found[0].name in ("read_iso", "format_date") and "parse_date" not in [result.name for result in found]
    assert "read_iso" in [result.name for result in found[:2]]
    assert [found[0]] == index.similar(f"{tree}/src/shop/dates.py", 4, limit=1)
    for path, line in (("missing.py", 1), ("src/shop/dates.py", 10_000)):
        with refused("not in the index"):
            index.similar(path, line)


def test_the_command_finds_similar_chunks(command, tree):
    code, out, err = command("search", "--folder", write_tree(tree, OTHER), "--similar", "client/dates.py:5", "-n", 1)
    assert code == 0 and "ranked by words" in err and out.startswith("src/shop/dates.py")


def test_an_index_without_files_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    with refused("no files are indexed", "--skipped` indexes again and lists skipped files"):
        CodeIndex.build(tmp_path / "a").search("x")


def test_the_first_line_names_what_took_part(command, tree, stub):
    CodeIndex.build(tree, model="stub").close()
    for options, expected in (((), "words, encoder stub"), (("--lexical",), "words")):
        assert f"ranked by {expected};" in command("search", "--folder", tree, "parse date", *options)[2]
