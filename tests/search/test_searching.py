"""Several indexes are searched as one, and chunks similar to a chunk are found."""

import json

import pytest
from refusals import refused
from trees import write_tree

from soft_trainer.search import CodeIndex, Search
from soft_trainer.search.serving.served_index import ServedIndex
from soft_trainer.search.serving.server import PageServer

CLIENT = {
    "dates.py": '''
        import datetime

        def read_iso(text):
            """Read an ISO date."""
            return datetime.date.fromisoformat(text)
        ''',
    "button.ts": "export function pressButton(button: Button) {\n    return button.press();\n}\n",
    "menu.py": "def show_menu(menu):\n    return [entry.title for entry in menu]\n",
}


@pytest.fixture
def both(tree, tmp_path):
    client = write_tree(tmp_path / "client", CLIENT)
    return Search([CodeIndex.build(tree), CodeIndex.build(client)])


def shown(results):
    return [(result.path, result.start_line, round(result.score, 5)) for result in results]


QUERIES = ["parse_date", "read an ISO date", "how is the total price summed up", "button", "text"]


@pytest.mark.parametrize("query", QUERIES)
def test_several_indexes_rank_as_one_of_all_their_files(both, tree, tmp_path, query):
    for index in both.members:
        write_tree(tmp_path / "joined" / index.folder.rpartition("/")[2], {p: index.text_of(p) for p in files(index)})
    joined = CodeIndex.build(tmp_path / "joined")
    assert shown(both.search(query, limit=5)) == shown(joined.search(query, limit=5)) != []


def files(index):
    return [path for (path,) in index.database.execute("SELECT path FROM files")]


def test_filters_and_texts_of_several_indexes(both, tree):
    found = {result.path for result in both.search("date text menu", path="client/**")}
    assert found == {"client/dates.py", "client/menu.py"}
    assert {result.path for result in both.search("date", path="*.md")} == set()
    assert {result.path for result in both.search("date button", language="ts")} == {"client/button.ts"}
    with refused("language='cobol': no such files; the index has go, markdown, python, text, typescript"):
        both.search("date", language="cobol")
    assert both.text_of("client/menu.py") == CLIENT["menu.py"] and both.text_of("menu.py") is None
    assert both.search("tree/README.md:1")[0].path == both.search(f"{tree}/README.md")[0].path == "tree/README.md"
    assert both.full_path("tree/src/server.go") == f"{tree}/src/server.go"
    assert "client" in repr(both) and both.search("") == []


def test_folders_of_one_name_are_told_apart_by_their_whole_path(tmp_path):
    folders = [write_tree(tmp_path / name / "app", {"a.py": f"def in_{name}(): pass\n"}) for name in ("one", "two")]
    both = Search([CodeIndex.build(folder) for folder in folders])
    assert both.search("in_two")[0].path == f"{folders[1]}/a.py" == both.full_path(f"{folders[1]}/a.py")


def test_updates_notices_and_encoders_of_several_indexes(tree, tmp_path, stub):
    client = write_tree(tmp_path / "client", CLIENT)
    both = Search([CodeIndex.build(tree, model="stub"), CodeIndex.build(client, model="stub")])
    assert both.search("zzz nothing") == [] or both.notices == []
    write_tree(client, {"new.py": "def brand_new(): pass\n"})
    assert both.update() is True and both.update() is False
    assert both.search("brand_new")[0].path == "client/new.py" and both.notices == []
    for model in ("other", ""):
        CodeIndex.build(client, model=model)
        for index in both.members:
            index.notices.clear()
        assert both.search("brand_new")[0].path == "client/new.py" and both.ranked_by == ["words"]
        why = "the indexes do not all have the same encoder; set one with model=NAME"
        assert both.notices == [f"searching only by words: {why}"]
        assert both.similar("tree/src/shop/dates.py", 4) and both.ranked_by == ["words"]


def test_no_index_at_all_is_refused(tmp_path):
    with refused("expected at least one"):
        Search([])
    (tmp_path / "a").mkdir()
    with refused("no files are indexed", "--skipped` indexes again and lists skipped files"):
        Search([CodeIndex.build(tmp_path / "a")]).search("x")


@pytest.mark.parametrize("model", [None, "stub"])
def test_similar_chunks(tree, tmp_path, stub, model):
    client = write_tree(tmp_path / "client", CLIENT)
    index = CodeIndex.build(tree, model=model)
    both = Search([index, CodeIndex.build(client, model=model)])
    found = both.similar("tree/src/shop/dates.py", 4)
    assert found[0].name == "read_iso" and "parse_date" not in [result.name for result in found]
    assert [result.name for result in index.similar("src/shop/dates.py", 4, limit=1)] == ["format_date"]
    for path, line in (("missing.py", 1), ("src/shop/dates.py", 10_000)):
        with refused("not in the index"):
            index.similar(path, line)


def test_the_command_searches_several_folders_and_similar_chunks(command, tree, tmp_path):
    client = write_tree(tmp_path / "client", CLIENT)
    code, out, err = command("search", "--folder", tree, "--folder", client, "ISO date", "--json")
    assert code == 0 and err.count("making one") == 2
    paths = [json.loads(line)["path"] for line in out.splitlines()]
    assert set(paths[:2]) == {"client/dates.py", "tree/src/shop/dates.py"}
    code, out, err = command("search", "--folder", tree, "--folder", client, "--similar", paths[0] + ":5", "-n", 1)
    assert code == 0 and err.startswith("ranked by words; ") and out.startswith(paths[1])


@pytest.mark.parametrize("own_index", [False, True])
def test_a_folder_in_another_is_searched_once(command, tree, own_index):
    inner = tree / "src" / "shop"
    if own_index:
        CodeIndex.build(inner).close()
    for folders in ((tree, inner), (inner, tree)):
        asked = [word for folder in folders for word in ("--folder", folder)]
        out = command("search", *asked, "parse date", "--json")[1]
        rows = [json.loads(line) for line in out.splitlines()]
        chunks = [(row["text"], row["start_line"]) for row in rows]
        assert rows[0]["path"] == "src/shop/dates.py" and len(chunks) == len(set(chunks))


def test_an_ignored_folder_in_another_is_searched_too(tree):
    write_tree(tree, {"node_modules/kit/moons.py": "def count_moons():\n    return 1\n"})
    indexes = [CodeIndex.build(tree), CodeIndex.build(tree / "node_modules" / "kit")]
    assert Search(indexes).search("count moons")[0].path == "kit/moons.py"


def test_the_first_line_names_what_took_part(command, tree, stub):
    CodeIndex.build(tree, model="stub").close()
    for options, expected in (((), "words, encoder stub"), (("--lexical",), "words")):
        assert f"ranked by {expected};" in command("search", "--folder", tree, "parse date", *options)[2]


def test_a_page_of_several_indexes(both):
    server = PageServer(ServedIndex(both))
    try:
        found = server.search({"q": "ISO date"})
        first = found["results"][0]
        assert first["editor"].endswith("dates.py:1") and "/client/dates.py" in str(found)
        like = server.search({"like": f"{first['path']}:{first['start_line']}"})["results"]
        assert like[0]["path"] != first["path"] and like[0]["path"].endswith("dates.py")
        assert "typescript" in server.about({})["languages"]
    finally:
        server.server_close()
