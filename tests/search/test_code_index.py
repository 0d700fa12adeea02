"""Building, updating and searching an index."""

import os
import shlex
import sqlite3
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from refusals import refused
from trees import FILES, write_tree

from soft_trainer.errors import UserError
from soft_trainer.search import CodeIndex
from soft_trainer.search.index import chunks, store, updating


def paths(results):
    return [result.path for result in results]


@pytest.fixture
def index(tree):
    return CodeIndex.build(tree)


@pytest.mark.parametrize(
    ("query", "path", "name"),
    [
        ("ShoppingCart", "src/shop/cart.py", "ShoppingCart"),
        ("parse date", "src/shop/dates.py", "parse_date"),
        ("parse_date " * 10_000, "src/shop/dates.py", "parse_date"),
        ("how are the prices of items summed up?", "src/shop/cart.py", "ShoppingCart.total_price"),
        ("ListenAndServe", "src/server.go", "Server.ListenAndServe"),
        ("payment provider", "README.md", ""),
        ("ShoppingCart.total_price", "src/shop/cart.py", "ShoppingCart.total_price"),
        ("ShoppingCart::total_price()", "src/shop/cart.py", "ShoppingCart.total_price"),
        ("Cart#totalPrice", "src/shop/cart.py", "ShoppingCart.total_price"),
    ],
)
def test_finds_by_symbol_words_and_sentence(index, query, path, name):
    best = index.search(query)[0]
    assert (best.path, best.name) == (path, name)
    lines = (index.folder / Path(path)).read_text().split("\n")
    assert best.text == "\n".join(lines[best.start_line - 1 : best.end_line]) and name.rsplit(".", 1)[-1] in best.text


def test_scores_fall_and_neither_a_file_nor_a_test_comes_too_early(index):
    results = index.search("cart item price date", limit=20)
    assert [result.score for result in results] == sorted((result.score for result in results), reverse=True)
    assert len(set(paths(results)[:5])) >= 3
    assert len(index.search("cart item price date", limit=2)) == 2
    found = paths(index.search("total_price"))
    assert found.index("src/shop/cart.py") < found.index("tests/test_cart.py")


@pytest.mark.parametrize(
    ("query", "filters", "found"),
    [
        ("date cart", {"path": "src/**"}, {"src/shop/cart.py", "src/shop/dates.py"}),
        ("date cart server", {"path": "*.go"}, {"src/server.go"}),
        ("port", {"language": "go"}, {"src/server.go"}),
        ("port", {"language": "", "path": "", "tests": ""}, {"src/server.go"}),
        ("cart price", {"tests": "only"}, {"tests/test_cart.py"}),
        ("cart price", {"tests": "no"}, {"src/shop/cart.py"}),
        ("parse_date", {"name": "", "path": "src/shop/dates.py"}, {"parse_date", "format_date"}),
        ("date", {"name": "parse_date"}, {"parse_date"}),
        ("date", {"name": "*_date"}, {"parse_date", "format_date"}),
        ("date", {"name": "Dates::parse_date()"}, set()),
        ("cart", {"name": "ShoppingCart::add_item()"}, {"ShoppingCart.add_item"}),
        (
            "cart",
            {"name": "ShoppingCart.*_*"},
            {f"ShoppingCart.{name}" for name in ("__init__", "add_item", "total_price")},
        ),
        ("cart", {"name": "*Cart.ADD*"}, {"ShoppingCart.add_item"}),
        ("cart", {"name": "ShoppingCart::ADD_item"}, {"ShoppingCart.add_item"}),
        ("date", {"name": "parse_date?"}, {"parse_date"}),
        ("date", {"name": "nothing"}, set()),
    ],
)
def test_filters(index, query, filters, found):
    assert {r.name if "name" in filters else r.path for r in index.search(query, **filters)} == found


@pytest.mark.parametrize(
    "query",
    [
        "",
        "  ",
        "?!",
        "zzzzzz",
        '"',
        "'; DROP TABLE files; --",
        "NEAR(",
        "a" * 100_000,
        "word " * 10_000,
        "zz\n\nxqzv",
        "\n\n",
    ],
)
def test_queries_that_find_nothing(index, query):
    assert index.search(query) == []


def test_a_query_that_is_not_utf_8_is_searched_with_an_encoder(tree):
    index = CodeIndex.build(tree, model="base")
    assert index.search("caf\udce9 parse date")[0].name == "parse_date"


def test_secrets_and_ignored_files_are_not_found(index):
    assert index.search("secret_parse_date") and ".env" not in paths(index.search("secret parse date PASSWORD"))
    assert index.search("parse_date_generated", limit=50)
    assert "build/out.py" not in paths(index.search("generated", limit=50))
    assert index.statistics()["skipped"] == {"secret": 1}


def test_update_reads_only_what_changed(index, tree, monkeypatch):
    assert index.update() is False
    numbers = index.database.execute("SELECT id, path FROM files ORDER BY id").fetchall()
    os.utime(tree / "README.md", (1, 1))
    assert index.update() is True and index.update() is False
    # the content has not changed
    assert index.database.execute("SELECT id, path FROM files ORDER BY id").fetchall() == numbers
    read = []
    original = updating.read_batch
    monkeypatch.setattr(
        updating, "read_batch", lambda root, known, **options: read.extend(known) or original(root, known)
    )
    change = {"src/shop/dates.py": "def parse_time(text):\n    return text\n", "new.py": "def brand_new(): pass\n"}
    write_tree(tree, change)
    (tree / "README.md").unlink()
    assert index.update() is True and index.update() is False
    assert sorted(read) == ["new.py", "src/shop/dates.py"]
    assert index.search("brand_new")[0].path == "new.py" and index.search("parse_time")
    assert "README.md" not in paths(index.search("payment provider"))
    assert "parse_date" not in [result.name for result in index.search("parse_date")]


def test_a_fault_elsewhere_is_not_taken_for_damage(tree, index, monkeypatch):
    other = CodeIndex.open(index.index_dir)
    other.close()
    with pytest.raises(sqlite3.ProgrammingError):
        other.search("parse_date")
    with monkeypatch.context() as patch:
        patch.setattr("soft_trainer.search.ranking.ranking.score", Mock(side_effect=IndexError("a fault of ours")))
        with pytest.raises(IndexError):
            index.search("parse_date")
    assert index.search("parse_date")


DATES = FILES["src/shop/dates.py"]
GENERATED = {
    "src/shop/a_dates.py": f"# Code generated by a tool. DO NOT EDIT.\n{DATES}".replace("(text)", "(text, 1)"),
    "src/shop/z_dates.py": DATES.replace("(text)", "(text, 2)"),
}
# story -> steps: files that are written, a query, and all paths that it then finds, in order. None removes a file.
CHANGES = {
    "data that has become small is read": [
        ({"data.json": "xylophone\n" * 20_000}, "xylophone", []),
        ({"data.json": "xylophone\n"}, "xylophone", ["data.json"]),
    ],
    "a generated file comes last, unless no other has the word": [
        (GENERATED, '"parse an ISO date"', ["src/shop/dates.py", "src/shop/z_dates.py", "src/shop/a_dates.py"]),
        (
            {"src/made.py": "# Auto-generated by a tool\ndef only_here():\n    return 1\n"},
            "only_here",
            ["src/made.py"],
        ),
    ],
    "an ignore file that ignores itself is read again when it changes": [
        ({".gitignore": ".*\n", "private/b.py": "secret_name = 1\n"}, "gitignore", []),
        ({}, "secret_name", ["private/b.py"]),
        ({".gitignore": ".*\nprivate/\n"}, "secret_name", []),
        ({".gitignore": None}, "secret_name", ["private/b.py"]),
    ],
}


@pytest.mark.parametrize("story", CHANGES)
def test_a_change_is_found_after_an_update(tree, story):
    index = None
    for files, query, expected in CHANGES[story]:
        for path, text in files.items():
            if text is None:
                (tree / path).unlink()
            else:
                write_tree(tree, {path: text})
        if index is None:
            index = CodeIndex.build(tree)
        else:
            assert index.update() is bool(files)
        assert index.update() is False
        found = paths(index.search(query))
        assert list(dict.fromkeys(found)) == expected


def test_a_language_whose_files_are_gone_is_not_listed(tree, index):
    (tree / "src/server.go").unlink()
    index.update()
    assert sorted(index.files_by_language()) == ["markdown", "python", "text"]
    with refused("language='go': no such files; the index has markdown, python, text"):
        index.search("port", language="go")


def test_a_file_that_took_too_long_is_read_again(tree, monkeypatch):
    with monkeypatch.context() as busy:
        busy.setattr(chunks, "PARSE_SECONDS", 0.0)
        index = CodeIndex.build(tree)
        assert {result.name for result in index.search("parse_date")} == {""} and len(index.broken_files()) > 1
    assert index.update() is False
    index = CodeIndex.build(tree)
    assert index.search("parse_date")[0].name == "parse_date" and index.broken_files() == []


def test_where_there_are_no_locks_none_is_taken(tree, monkeypatch):
    monkeypatch.setattr("soft_trainer.system.files.fcntl", None)
    assert CodeIndex.build(tree).search("parse_date")[0].name == "parse_date"


@pytest.mark.slow
def test_the_package_is_imported_where_there_are_no_locks():
    code = "import sys; sys.modules['fcntl'] = None; import soft_trainer.run.folder, soft_trainer.search.code_index"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("language", "ending"), [("py", ".py"), ("GO", ".go"), ("md", ".md")])
def test_a_language_may_be_named_by_the_ending_of_its_files(index, language, ending):
    endings = {Path(path).suffix for path in paths(index.search("parse date server shop", language=language))}
    assert endings == {ending}


@pytest.mark.parametrize("limit", [0, -1, 2.5, "3"])
def test_a_limit_is_a_positive_whole_number(index, limit):
    for ask in (lambda: index.search("cart", limit), lambda: index.similar("src/server.go", 4, limit)):
        with refused(f"limit={limit}: expected a whole number of at least 1"):
            ask()


def test_an_index_whose_encoder_is_gone_can_be_repaired(tree, stub, command):
    CodeIndex.build(tree, model="stub").close()
    write_tree(tree, {"new.py": "def brand_new(): pass\n"})

    def gone(self, *_):
        raise UserError("stub: no such folder")

    stub.__init__ = gone
    code, _, err = command("index", tree)
    assert code == 2 and "stub: no such folder; `soft-trainer index" in err
    assert command(*shlex.split(err.split("`")[1])[1:])[0] == 0
    index = CodeIndex.build(tree)
    assert index.model is None and index.search("brand_new") and not list(index.index_dir.glob("vectors-*"))


def test_batches_segments_and_processes_of_any_number_give_the_same_index(tmp_path, monkeypatch):
    monkeypatch.setattr(updating, "_may_fork", lambda: True)  # torch has been imported here, and does nothing
    files = {f"m{n}.py": f"def func_{n}(x):\n    return helper_{n % 7}(x)\n" for n in range(100)}
    tree = write_tree(tmp_path / "tree", files)
    postings = []
    for size, most, parallel in ((64, 8_000_000, 200), (8, 8_000_000, 200), (8, 400, 200), (8, 400, 10)):
        monkeypatch.setattr(updating, "BATCH_FILES", size)
        monkeypatch.setattr(updating, "SEGMENT_POSTINGS", most)
        monkeypatch.setattr(updating, "MIN_PARALLEL_FILES", parallel)
        index = CodeIndex.build(tree, tmp_path / f"{size} {most} {parallel}")
        postings.append(index.database.execute("SELECT * FROM postings ORDER BY term, segment").fetchall())
        assert index.search("func_50")[0].path == "m50.py"
        callers = {f"m{n}.py" for n in range(100) if n % 7 == 3}
        assert set(paths(index.search("helper_3", limit=len(callers)))) == callers
    assert postings[1:] == postings[:1] * 3 and len(postings[0]) > 200


def test_the_index_lies_in_the_cache(index, cache, tree):
    assert index.index_dir.parent == cache
    assert store.find_index_dir(tree / "src") == index.index_dir


@pytest.mark.parametrize(("exists", "mode"), [(False, 0o700), (True, 0o755)])
def test_files_are_private_and_a_folder_that_exists_keeps_its_mode(tree, tmp_path, exists, mode):
    index_dir = tmp_path / "index"
    if exists:
        index_dir.mkdir()
        index_dir.chmod(mode)
    index = CodeIndex.build(tree, index_dir)
    modes = {name: stat.S_IMODE((index_dir / name).stat().st_mode) for name in ("", store.DATABASE, store.SETTINGS)}
    assert modes == {"": mode, store.DATABASE: 0o600, store.SETTINGS: 0o600}
    assert index.index_dir == index_dir


def test_what_cannot_be_opened_is_named(tree, tmp_path, index):
    write_tree(tmp_path, {"other/a.py": "x = 1", f"broken/{store.DATABASE}": b"no database" * 1000})
    (tmp_path / "link").symlink_to(tree)
    (tmp_path / "linked").symlink_to(tmp_path / "broken")
    cases = [
        ("inside the indexed tree", CodeIndex.build, tree, tree),
        ("inside the indexed tree", CodeIndex.build, tree, tmp_path / "link" / "index"),
        ("not trusted", CodeIndex.build, tree, tmp_path / "linked"),
        ("no such folder", CodeIndex.build, tmp_path / "missing"),
        ("'': no such folder", CodeIndex.build, ""),
        ("no such folder", CodeIndex.build, "a\0b"),
        ("already contains the index of", CodeIndex.build, tmp_path / "other", index.index_dir),
        ("no index there", CodeIndex.open, tmp_path),
        ("the index is damaged", CodeIndex.open, tmp_path / "broken"),
    ]
    for words, act, *paths in cases:
        with refused(words):
            act(*paths)


def test_a_folder_without_files_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    empty = CodeIndex.build(tmp_path / "empty")
    assert empty.statistics()["files"] == 0
    with refused("no files are indexed"):
        empty.search("parse_date")


def gone(tree, index, patch):
    tree.rename(tree.with_name("elsewhere"))


def unreadable(tree, index, patch):
    patch.setattr(os, "scandir", Mock(side_effect=PermissionError(13, "Permission denied")))


def full(tree, index, patch):
    index.database.execute(f"PRAGMA max_page_count = {index.database.execute('PRAGMA page_count').fetchone()[0]}")
    numbers = np.random.default_rng(0).integers(1e9, size=20_000)
    write_tree(tree, {"big.py": "\n".join(f"name_{number} = 1" for number in numbers)})


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (gone, "folder is missing"),
        (unreadable, "the folder cannot be read (Permission denied)"),
        pytest.param(full, "full", marks=pytest.mark.slow),
    ],
)
def test_what_prevents_an_update_leaves_the_old_index(tree, index, monkeypatch, happens, words):
    with monkeypatch.context() as patch:
        happens(tree, index, patch)
        with refused(words):
            index.update()
    assert index.search("parse_date")
    assert CodeIndex.open(index.index_dir).search("parse_date")[0].name == "parse_date"
    if happens is unreadable:
        assert index.update() is False


def test_an_index_describes_itself(tree, index):
    assert repr(index) == f"CodeIndex({str(tree)!r}, files=6, chunks=12, model=None)"
    assert index.skipped() == {".env": "secret"}


def test_an_older_format_is_made_again_with_its_settings(tree, stub):
    index = CodeIndex.build(tree, model="stub", exclude="*.md", include="*.log", truncate_dim=4)
    index.database.execute("PRAGMA user_version = 1")
    index.database.execute("DROP TABLE postings")
    index.close()
    index = CodeIndex.build(tree)
    assert index.patterns == {"exclude": ["*.md"], "include": ["*.log"]}
    assert (index.model, index.truncate_dim) == ("stub", 4)
    assert "README.md" not in paths(index.search("payment provider")) and index.search("parse_date")
    assert index.statistics()["encoded"] == index.statistics()["chunks"]


def test_one_index_answers_several_threads(tree, stub):
    index = CodeIndex.build(tree, model="stub")
    write_tree(tree, {"new.py": "def brand_new(): pass\n"})
    index.refresh(encode=False)  # its chunk has no embedding, which is a notice

    def ask(number):
        if number % 10 == 0:
            write_tree(tree, {"other.py": f"def other_{number}(): pass\n"})
            index.refresh(encode=False)
        return index.search(["parse_date", "cart", "payment provider", "brand_new"][number % 4])[0].path

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(80)))
    assert found == ["src/shop/dates.py", "src/shop/cart.py", "README.md", "new.py"] * 20
    assert len(index.notices) <= 2


def cut(content):
    return content[: len(content) // 2]


def overwritten(share):
    def damage(content):
        start = int(share * len(content))
        return (content[:start] + bytes(20_000) + content[start + 20_000 :])[: len(content)]

    return damage


@pytest.mark.parametrize("damage", [cut, *map(overwritten, (0.0, 0.2, 0.5, 0.8))])
def test_a_damaged_index_is_named_and_made_again(command, tree, stub, damage):
    command("index", tree, "--exclude", "*.md", "--model", "stub")
    index_dir = store.default_index_dir(tree)
    database = index_dir / store.DATABASE
    damaged = damage(database.read_bytes())
    database.write_bytes(damaged)
    for _ in range(2):
        code, _, err = command("search", "--folder", tree, "parse_date", "--no_update")
        assert code in (0, 2) and "Traceback" not in err and database.read_bytes() == damaged
        if code:
            assert err.startswith(f"error: {index_dir}: ") and "if the index is damaged, `soft-trainer index" in err
    assert command("index", tree, "--rebuild")[0] == 0
    code, out, err = command("search", "--folder", tree, "parse_date")
    assert code == 0 and err.startswith("ranked by words, encoder stub; ") and out.startswith("src/shop/dates.py")
    assert CodeIndex.open(index_dir).patterns == {"exclude": ["*.md"]}


@pytest.mark.parametrize("content", ["", "[]", '{"folder'])
def test_settings_that_cannot_be_read_are_made_again(tree, index, content):
    (index.index_dir / store.SETTINGS).write_text(content)
    with refused("no index there; `soft-trainer index DIR` makes one"):
        CodeIndex.open(index.index_dir)
    assert CodeIndex.build(tree).search("parse_date") and CodeIndex.open(index.index_dir).folder == str(tree)


def test_a_reader_sees_the_old_index_until_the_new_one_is_committed(tree, index):
    other = CodeIndex.open(index.index_dir)
    write_tree(tree, {"new.py": "def brand_new(): pass\n"})
    with store.write_lock(index.index_dir):
        other.refresh()
        assert "another process" in other.notices[0]
    assert other.search("parse_date") and not other.search("brand_new", name="brand_new")
    index.update()
    assert other.search("brand_new")[0].path == "new.py"


def test_a_search_waits_for_the_first_index(command, tmp_path):
    (tmp_path / "tree").mkdir()
    index = CodeIndex.build(tmp_path / "tree")  # as another process that has not written any file yet
    write_tree(tmp_path / "tree", FILES)
    with ThreadPoolExecutor(1) as pool:
        with store.write_lock(index.index_dir):
            waiting = pool.submit(command, "search", "--folder", tmp_path / "tree", "parse_date")
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.3)
        code, out, err = waiting.result()
    assert code == 0 and out.startswith("src/shop/dates.py") and "another process is writing" in err
