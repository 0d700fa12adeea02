"""The commands `index`, `search` and `evaluate-search`: their output and exit codes."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from git_repositories import git
from trees import write_tree

from soft_trainer.cli import search as output
from soft_trainer.errors import UserError
from soft_trainer.search import CodeIndex, code_index
from soft_trainer.search.code_index import open_for
from soft_trainer.search.index import store, vectors
from soft_trainer.search.ranking.results import SearchResult

ALONE = "compare scores only within this search\n"


@pytest.fixture
def search(command, tree):
    """Searches the tree."""
    return partial(command, "search", "--folder", tree)


def test_index_and_search(command, search, tree):
    code, out, _ = command("index", tree)
    assert code == 0 and "6 files" in out and "skipped: secret: 1" in out and f"--folder {tree}" in out
    code, out, _ = search("parse", "date", "-n", 1)
    assert code == 0 and out.startswith("src/shop/dates.py:1  parse_date  ") and "\x1b" not in out
    code, out, _ = search("parse date", "--json", "--path", "src/**")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and rows[0]["name"] == "parse_date"
    assert " ".join(rows[0]) == "path start_line end_line language name score text weak also_in"


def test_a_filter_for_tests_and_a_failure_as_the_query(command, tree):
    search = ("search", "--folder", tree, "-n", 1)
    assert command(*search, "total price", "--tests", "only")[1].startswith("tests/test_cart.py")
    assert command(*search, "total price", "--tests", "no")[1].startswith("src/shop/cart.py")
    assert "'only', 'no'" in command(*search, "total price", "--tests", "none")[2]
    assert "nothing found with --tests only" in command(*search, "ListenAndServe", "--tests", "only")[2]
    failure = "--- FAIL: TestTotalPrice (0.00s)\n    cart_test.go:3: total price of the cart is wrong\n"
    assert command(*search, "--", failure)[1].startswith("src/shop/cart.py")


@pytest.mark.parametrize("name", ["stdlib", "installed"])
def test_every_command_knows_the_names_of_trees(command, tree, monkeypatch, name):
    if name == "stdlib":
        monkeypatch.setattr(os, "__file__", str(tree / "os.py"))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tree)})
    code, out, _ = command("index", name)
    assert code == 0 and f"--folder {tree}" in out and ("excluded: 1" in out) == (name == "stdlib")
    assert command("search", "--folder", name, "parse_date", "--no_update")[1].startswith("src/shop/dates.py")
    assert "nDCG@10" in command("evaluate-search", "--folder", name)[1]


def test_a_search_that_is_stopped_while_it_encodes_has_answered(command, search, tree, stub, monkeypatch):
    command("index", tree, "--model", "stub")
    monkeypatch.setattr(CodeIndex, "encode", Mock(side_effect=[None, KeyboardInterrupt]))
    code, out, err = search("parse date")
    assert code == 0 and out.startswith("src/shop/dates.py:1") and err.endswith("stopped; the next search continues\n")


def test_indexes_of_deleted_folders_go(command, tree, tmp_path):
    command("index", tree)
    command("index", write_tree(tmp_path / "repository", {"a.py": "x = 1\n"}))
    shutil.rmtree(tmp_path / "repository")
    indexes = store.default_index_dir(tree).parent
    for days, left in ((29, 2), (31, 1)):
        for path in indexes.glob("repo*/*"):
            os.utime(path, (time.time() - days * 86400,) * 2)
        (tmp_path / f"new{days}").mkdir()
        command("index", tmp_path / f"new{days}")  # a new index deletes those that nobody has used for long
        assert len(list(indexes.glob("[rt]*"))) == left


@pytest.mark.parametrize("options", [("--no_update",), ("--lexical",)])
def test_what_a_search_puts_off_follows_the_options(command, search, tree, stub, options):
    command("index", tree, "--model", "stub")
    write_tree(tree, {"new.py": "def brand_new(): pass\n"})
    stub.encoded.clear()
    assert search("parse date", *options)[0] == 0 and not stub.encoded


def test_chunks_that_a_search_has_left_are_encoded_after_its_answer(command, search, tree, stub, monkeypatch):
    command("index", tree, "--model", "stub")
    write_tree(tree, {"new.py": "\n\n\n\n".join(f"def brand_new_{n}():\n    a = {n}\n    b = a" for n in range(99))})
    monkeypatch.setattr(code_index, "MAX_WAIT", 0)
    err = search("brand_new_7")[2]
    assert "28 of 111 chunks have embeddings; the others are encoded after this search" in err
    assert search("brand_new_7")[2] == f"ranked by words, encoder stub; {ALONE}"


def test_commands_that_are_shown_can_be_run(command, tree, stub):
    spaced, kept = tree.rename(tree.with_name("my tree")), tree.with_name("my index")
    out = command("index", spaced, "--index_dir", kept, "--model", "stub")[1]
    shown = shlex.split(out.split("Search it: soft-trainer ")[1])
    assert command(*shown)[0] == 0
    stub.weights = 5.0
    err = command("search", "--index_dir", kept, "parse date")[2]
    assert "stub has changed" in err and command(*shlex.split(err.split("`")[1])[1:])[0] == 0
    assert command("search", "--index_dir", kept, "parse date")[2] == f"ranked by words, encoder stub; {ALONE}"


def test_a_search_names_its_encoder_and_the_index_keeps_it(command, tree, stub):
    found = ("search", "--folder", tree, "parse date", "-n", 1)
    assert command(*found, "--model", "stub")[0] == 0
    encoded = len(stub.encoded)
    assert encoded > 6 and CodeIndex.open(store.find_index_dir(tree)).model == "stub"
    assert command(*found, "--model", "stub")[0] == 0 and len(stub.encoded) == encoded
    CodeIndex.build(tree, model="other").close()
    assert command(*found, "--model", "stub")[0] == 0
    assert CodeIndex.open(store.find_index_dir(tree)).model == "stub"


@pytest.mark.slow
def test_a_reader_may_leave_early(tree, tmp_path):
    CodeIndex.build(tree, tmp_path / "index").close()
    run = [
        sys.executable,
        "-m",
        "soft_trainer.cli",
        "search",
        "--index_dir",
        tmp_path / "index",
        "parse date",
        "--json",
    ]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_nothing_found_is_exit_code_1(command, search, tree):
    command("index", tree)
    write_tree(tree, {"new.py": "def brand_new(): pass\n"})
    assert search("brand_new", "--no_update", "--name", "brand_new")[0] == 1
    assert search("brand_new")[1].startswith("new.py:1")
    code, out, err = search("zzzzzz")
    assert (code, out, err.strip()) == (1, "", "no word of the query is in the index\nnothing found")
    assert search("zzzzzz", "--json")[:2] == (1, "")
    err = search("server", "--language", "markdown")[2]
    assert err.strip() == "nothing found with --language markdown"


def test_bad_input_is_one_line_and_exit_code_2(command, search, tree, tmp_path):
    code, out, err = command("search", "--index_dir", tmp_path, "x")
    assert code == 2 and not out and err.count("\n") == 1 and "soft-trainer index" in err
    assert command("index", tmp_path / "missing")[0] == 2
    assert command("index", tree, "--model", tmp_path / "missing")[0] == 2
    command("index", tree)
    code, _, err = search(" ")
    assert code == 2 and "query is empty" in err
    (tmp_path / "empty").mkdir()
    code, out, err = command("index", tmp_path / "empty")
    assert code == 1 and not out and "no text files" in err
    assert "no such folder" in command("search", "--folder", tmp_path / "missing", "x")[2]
    git(tmp_path, "init", "-q", "--bare", "bare.git")
    git(tmp_path, "init", "-q", "own")
    for folder in (tmp_path / "bare.git", tmp_path / "own" / ".git"):
        code, out, err = command("index", folder)
        assert code == 2 and not out and "a git repository without a working tree" in err and err.count("\n") == 1


def test_a_current_folder_that_is_gone_is_named(command, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for words in (("search", "x"), ("index", ".")):
        code, out, err = command(*words)
        assert code == 2 and not out and err == "error: .: no such folder; pass a source tree or a folder inside one\n"
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x", "-n", "0"], "limit=0: expected a whole number"),
        (["x", "--language", "cobol"], "language='cobol': no such files; the index has go, markdown, python, text"),
        (["--mcp", "--serve"], "not allowed with argument"),
        (["--similar", "src/shop/dates.py"], "expected PATH:LINE"),
    ],
)
def test_an_option_is_honoured_or_refused(command, search, tree, words, message):
    command("index", tree)
    code, out, err = search(*words)
    assert code == 2 and not out and message in err


def test_a_served_index_follows_no_update_lexical_and_the_query(command, search, tree, stub, monkeypatch):
    command("index", tree, "--model", "stub")
    write_tree(tree, {"new.py": "def brand_new(): pass\n"})
    seen = []

    def answer(self):
        seen.append((self.served.lexical, self.served.search("brand_new", 5, name="brand_new")[0]))

    monkeypatch.setattr("soft_trainer.search.serving.server.PageServer.serve_forever", answer)
    code, out, _ = search("--serve", "--no_update", "--lexical", "a", "b")
    assert code == 0 and out.splitlines()[0].endswith("/#q=a%20b") and seen == [(True, [])]
    search("--serve")
    assert seen[1][0] is False and seen[1][1][0].path == "new.py"


def test_a_tree_or_a_model_that_is_gone_leaves_the_old_index(command, tree, stub):
    command("index", tree, "--model", "stub")
    write_tree(tree, {"new.py": "def brand_new(): pass\n"})

    def gone(self, texts):
        raise UserError("stub: no such folder")

    stub.queries = gone
    code, out, err = command("search", "--folder", tree, "brand_new")
    assert code == 0 and out.startswith("new.py:1") and "searching only by words: stub" in err
    index_dir = store.default_index_dir(tree)
    tree.rename(tree.with_name("elsewhere"))
    code, out, err = command("search", "--index_dir", index_dir, "parse_date", "--lexical")
    assert code == 0 and out.startswith("src/shop/dates.py") and "folder is missing" in err


def test_the_first_search_makes_the_index(command, search, tree):
    code, _, err = search("parse_date", "--no_update")
    assert code == 2 and "no index yet" in err
    code, out, err = command("search", "--folder", tree / "src", "parse_date")
    assert code == 0 and out.startswith("shop/dates.py:1") and "no index yet, making one" in err
    assert command("search", "--folder", tree / "src", "parse_date")[2] == f"ranked by words; {ALONE}"
    code, _, err = command("search", "--folder", tree / "src" / "missing", "parse_date")
    assert code == 2 and "missing: no such folder" in err


def test_a_folder_shows_nothing_of_the_parent_whose_index_it_uses(command, tmp_path):
    files = {
        "secretproj/b.py": "def parse_secret_date(text):\n    return text\n",
        "client/c.rs": "fn parse_date() {}\n",
    }
    parent = write_tree(tmp_path / "par", files)
    command("index", parent)
    below = partial(command, "search", "--folder", parent / "client")
    code, out, err = below("parse date", "--json")
    assert [json.loads(line)["path"] for line in out.splitlines()] == ["c.rs"] and not err
    assert below("secret", "--json")[:2] == (1, "")
    assert below("--path", "c.rs", "parse date")[0] == 0
    assert below("--path", "secretproj/**", "parse date")[:2] == (2, "")
    assert "the index has rust" in below("--language", "x", "parse")[2]
    for location in ("secretproj/b.py:1", "../secretproj/b.py:1"):
        assert below("--similar", location)[0] == 2
    assert below("--similar", "c.rs:1")[:2] == (1, "")
    index = open_for(parent / "client")
    assert index.text_of("c.rs") and index.text_of("secretproj/b.py") is None
    assert index.files_by_language() == {"rust": 1}


def test_a_path_that_is_not_utf_8_is_not_in_the_index(command, tree):
    folder = os.fsdecode(os.path.join(os.fsencode(tree), b"\xff"))
    os.mkdir(folder)
    write_tree(Path(folder), {"x.py": "def brand_new(): pass\n"})
    assert "a name that is not UTF-8: 1" in command("index", tree)[1]
    with CodeIndex.open(store.find_index_dir(tree)) as index, pytest.raises(UserError, match="not in the index"):
        assert index.text_of("\udcff/x.py") is None
        index.similar("\udcff/x.py", 1)
    code, out, err = command("search", "--folder", folder, "brand_new")
    assert code == 0 and out.startswith("x.py:1") and "making one" in err


def test_a_folder_that_its_parent_ignores_gets_an_index(command, tree):
    command("index", tree)
    assert "no index yet" in command("search", "--folder", tree / "build", "--no_update", "generated")[2]
    code, out, err = command("search", "--folder", tree / "build", "generated")
    assert code == 0 and out.startswith("out.py:1") and "making one" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_cannot_be_written(command, tree, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    code, _, err = command("index", tree, "--index_dir", closed / "index")
    assert code == 2 and "choose another index_dir" in err


def test_results_cannot_steer_the_terminal():
    text = "def evil():\n    '\x1b]0;title\x07\x1b[31mred' # \u202e reversed \u2066\n\tx = '\x9b2J'\n"
    result = SearchResult("a\nb\x1b[2J.py", 1, 3, "python", "evil\r", 1.0, text)
    for colour in (False, True):
        shown = output.format_results([result], "evil reversed", colour)
        for code in (output._BOLD, output._GREEN, output._DIM, output._RED, output._END):
            shown = shown.replace(code, "")
        assert shown.isprintable() or not set("\x1b\x07\x9b\r\u202e\u2066") & set(shown)
        assert shown.splitlines()[0] == "a\ufffdb\ufffd[2J.py:1  evil\ufffd  1.00"
    assert "\x1b" not in json.dumps(result.as_dict())


def test_hostile_names_and_contents(command, search, tree):
    names = [
        "a\nb.py",
        "a\x1b[31m.py",
        "\u202egpj.py",
        "<img src=x>.py",
        "'; DROP TABLE files; --.py",
        "-n.py",
        "--json.py",
    ]
    write_tree(tree, {name: f"def hostile_name():\n    return {number}\n" for number, name in enumerate(names)})
    write_tree(tree, {"long.txt": "hostile_name " + "x" * 900_000, "long.md": "hostile_name " + "y " * 450_000})
    write_tree(tree, {".git/config": "[core]\n\tpager = touch owned\n", "index.sqlite": b"SQLite format 3\0"})
    assert command("index", tree)[0] == 0
    code, out, _ = search("hostile_name", "-n", 20)
    assert code == 0 and not set("\x1b\u202e") & set(out)
    rows = search("hostile_name", "-n", 20, "--json")[1].splitlines()
    assert set(names) <= {json.loads(row)["path"] for row in rows}
    assert not (tree / "owned").exists()


def test_the_lines_that_matter_are_shown():
    text = "\n".join(["def f():", *["    pass"] * 30, "    return total_price(items)", *["    pass"] * 30])
    result = SearchResult("a.py", 10, 71, "python", "f", 1.0, text)
    lines = result.telling_lines({"total", "pric"})
    assert lines[0] == (10, "def f():") and (41, "    return total_price(items)") in lines


def test_a_stopped_index_reports_what_is_kept_and_continues(command, tree, stub, monkeypatch):
    monkeypatch.setattr(vectors, "COMMIT_TEXTS", 4)
    original = stub.codes

    def stopping(self, texts, languages):
        if len(stub.encoded) > 4:
            raise KeyboardInterrupt
        return original(self, texts, languages)

    stub.codes = stopping
    code, out, err = command("index", tree, "--model", "stub")
    assert (code, out) == (130, "") and err.count("\n") == 1
    index = CodeIndex.open(store.default_index_dir(tree))
    kept = index.statistics()
    assert 0 < kept["encoded"] < kept["chunks"] and index.search("parse date")[0].name == "parse_date"
    assert "stopped: what was read and encoded is kept" in err
    stub.codes = original
    assert command("index", tree, "--model", "stub")[0] == 0
    assert index.statistics()["encoded"] == kept["chunks"] and len(stub.encoded) == len(set(stub.encoded))


def test_a_stopped_page_reports_what_is_kept(command, search, tree, monkeypatch):
    command("index", tree)

    def stop(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("soft_trainer.search.serving.server.PageServer.serve_forever", stop)
    code, _, err = search("--serve")
    assert code == 130 and err.count("\n") == 1
    assert "stopped; the index is kept" in err


@pytest.mark.slow
def test_the_processes_that_read_stop_without_a_word(tmp_path):
    tree = write_tree(tmp_path / "tree", {f"m{n}.py": "def f(x):\n    return x\n" * 2000 for n in range(400)})
    arguments = [sys.executable, "-m", "soft_trainer.cli", "index", str(tree), "--index_dir", str(tmp_path / "index")]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        while not (tmp_path / "index" / "lock").exists():
            time.sleep(0.01)
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        err = process.stderr.read()
    assert process.returncode == 130 and len(err.strip().splitlines()) == 1 and "stopped: " in err


@pytest.mark.slow
def test_ctrl_c_in_an_import_that_runs_text_exits_with_130(tmp_path):
    code = (
        "from soft_trainer.cli import __main__ as cli; from soft_trainer.search import CodeIndex, code_index\n"
        "CodeIndex.build = lambda *_, **__: exec('raise KeyboardInterrupt')\n"
        f"import sys; sys.argv[1:] = ['index', {str(tmp_path)!r}]; cli.main()"
    )
    (tmp_path / "script.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    run = subprocess.run([sys.executable, "-m", "script"], capture_output=True, text=True, env=environment)
    assert run.returncode == 130 and run.stderr.startswith("stopped: ")


@pytest.mark.slow
def test_a_lexical_search_imports_neither_torch_nor_transformers(tree, tmp_path):
    CodeIndex.build(tree, tmp_path / "index").close()
    code = (
        "import argparse, sys; from soft_trainer.cli import search; p = argparse.ArgumentParser();"
        "search.add_arguments(p);"
        f"assert search.run(p.parse_args(['parse date', '--index_dir', {str(tmp_path / 'index')!r}])) == 0;"
        "assert not {'torch', 'transformers', 'datasets', 'scipy', 'tqdm'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_evaluation_by_judged_queries_and_by_documentation(command, tree, tmp_path):
    rows = [
        {"repo": "tree", "query": "parse date", "relevant": ["src/shop/dates.py"], "category": "words"},
        {"repo": "tree", "query": "zzzzz", "relevant": ["README.md"], "secondary": [], "category": "none"},
    ]
    queries = tmp_path / "queries.jsonl"
    queries.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["evaluate-search", "--queries", queries, "--trees", tmp_path]
    code, out, _ = command(*words, "--output", tmp_path / "out.jsonl")
    assert code == 0 and "| all" in out and "0.500" in out and "category words" in out
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written[0]["paths"][0] == "src/shop/dates.py" and written[1]["paths"] == []
    code, out, _ = command("evaluate-search", "--folder", tree)
    assert code == 0 and "language python" in out
    assert command("evaluate-search", "--folder", tmp_path / "tree" / "build")[0] == 2
    assert command("evaluate-search", "--queries", queries)[0] == 2
    queries.write_text("{}\n")
    assert command(*words)[0] == 2


def test_an_index_that_an_evaluation_keeps_is_used_again(command, tree, stub, tmp_path):
    words = ["evaluate-search", "--folder", tree, "--model", "stub", "--index_dir", tmp_path / "kept"]
    first = command(*words)
    assert first[0] == 0 and stub.encoded
    stub.encoded.clear()
    assert command(*words, "--output", tmp_path / "new" / "out.jsonl")[0] == 0 and not stub.encoded
    assert (tmp_path / "new" / "out.jsonl").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--folder", "tree", "--max_queries", "0"], "max_queries=0: expected 1 or more"),
        (["--queries", "q", "--trees", "tree", "--max_queries", "5"], "max_queries: has no effect without --folder"),
        (["--folder", "tree", "--trees", "tree"], "give --queries and --trees, or --folder"),
        (["--folder", "tree", "--truncate_dim", "8"], "truncate_dim: has no effect without --model"),
        (["--folder", "missing"], "missing: the folder cannot be read (No such file or directory)"),
        (["--folder", "tree", "--output", "file/out.jsonl"], "output=file/out.jsonl: "),
        (
            ["--queries", "file", "--trees", "tree"],
            "tree/absent: no such folder; --trees needs a subfolder for each repo",
        ),
    ],
)
def test_an_evaluation_that_cannot_end_is_refused_before_anything_is_indexed(
    command, tree, tmp_path, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(CodeIndex, "build")
    rows = [{"repo": repo, "query": "q", "relevant": ["a.py"]} for repo in ("src", "absent")]
    (tmp_path / "file").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = command("evaluate-search", *words)
    assert code == 2 and not out and message in err


def test_an_index_of_short_embeddings(command, search, tree, stub):
    assert "16 dimensions" not in command("index", tree, "--model", "stub")[1]
    code, out, _ = command("index", tree, "--truncate_dim", 4)
    assert code == 0 and "chunks encoded with stub, 4 dimensions of each embedding" in out
    assert search("parse date")[2] == f"ranked by words, encoder stub; {ALONE}"
    assert command("evaluate-search", "--folder", tree, "--truncate_dim", 4)[0] == 2
    assert command("index", tree, "--index_dir", tree.parent / "new", "--truncate_dim", 4)[0] == 2
