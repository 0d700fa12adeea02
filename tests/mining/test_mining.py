"""Source trees are mined into rows: the splits, the rules, the skipped files, and the command."""

import gc
import os
import re
from collections import Counter
from unittest.mock import Mock

import pytest
from git_repositories import committed, git
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.mining.packages import package_names
from soft_trainer.mining.tree import _each_in_order, mine, mine_to, mining_table, tree_language
from soft_trainer.shares import assign_splits
from soft_trainer.system.files import read_json_lines


def python_tree(folder, packages=12):
    """Writes a tree of small packages, each with two documented functions and an undocumented one."""
    source = """
def first{0}(a):
    'Give the first of {0}.'
    b{0} = a[{0}]
    return b{0}
def last{0}(c):
    'Give the last of {0}.'
    d = {0} * c[-{0}]
    return -d
def other{0}(e):
    f{0} = e({0})
    return f{0} or {0}
"""
    for number in range(packages):
        package = folder / f"package{number}"
        package.mkdir(parents=True)
        package.joinpath("code.py").write_text(source.format(number))
    return folder


def read(folder, split):
    return [row for _, row in read_json_lines(folder / f"{split}.jsonl.gz")]


def test_output_folder(tmp_path):
    tree = python_tree(tmp_path / "tree")
    mined = mine_to(tree, "python", tmp_path / "out", num_workers=1)
    rows = {split: read(tmp_path / "out", split) for split in ("train", "valid", "test", "codebase")}
    assert mined.rows == rows
    assert {split: len(found) for split, found in rows.items()} == {"train": 20, "valid": 2, "test": 2, "codebase": 6}
    columns = "repo path func_name original_string language code code_tokens docstring docstring_tokens url partition"
    assert list(rows["train"][0]) == columns.split()
    packages = {split: {row["repo"] for row in rows[split]} for split in ("train", "valid", "test")}
    assert sum(map(len, packages.values())) == len(set.union(*packages.values())) == 12
    assert all(row["partition"] == split for split in packages for row in rows[split])
    pool = {row["url"]: row for row in rows["codebase"]}
    assert len(pool) == 6
    assert all(pool[row["url"]]["code"] == row["code"] for row in rows["valid"] + rows["test"])
    assert not packages["train"] & {row["repo"] for row in rows["codebase"]}
    assert all(row["docstring"] == "" and row["docstring_tokens"] == [] for row in rows["codebase"])
    assert not list((tmp_path / "out").glob("*.tmp"))
    assert "undocumented" in mining_table(mined)


def test_an_undecodable_name_is_counted_and_a_wrong_path_refused_at_once(tmp_path, monkeypatch):
    tree = python_tree(tmp_path / "tree")
    os.rename(tree / "package3/code.py", os.path.join(os.fsencode(tree), b"package3/caf\xe9.py"))
    mined = mine_to(tree, "python", tmp_path / "out", num_workers=1)
    assert mined.files == {"mined": 11, "name that is not UTF-8": 1}
    (tmp_path / "file").touch()
    monkeypatch.setattr("soft_trainer.mining.tree.mine", Mock(side_effect=AssertionError))
    with refused("file/out:", "is a file, not a folder"):
        mine_to(tree, "python", tmp_path / "file" / "out")


RULE_BREAKERS = """
class A:
    def __init__(self):
        'Make one of these.'
        self.a = 1
        self.b = 2
    def __len__(self):
        'Give the length of it.'
        n = self.a
        return n
    def short(self):
        'Give it as it is.'
        return self
    def is_test(self):
        'Tell if it is one.'
        t = self.t
        return t
def broken(a):
    'Gives nothing back at all.'
    b = (a -
    return b +
"""
BAD_DOCUMENTS = {7: "Do.", 8: "See https://a.b for more.", 9: "Gibt es zurück an dich."}
LONG = """def {0}(self):
    'Do it all, by {0}.'
    x = self.a + self.b * self.c - self.d
    y = [f(x, self.a), g(self.b, self.c), h(self.d), len(self.e), sum(self.g) / 2]
    return x {1} y
"""


def test_rules_and_duplicates_are_counted(tmp_path):
    tree = python_tree(tmp_path / "tree")
    documented = "def f{0}(a):\n    '{1}'\n    b = a - {0}\n    return b\n"
    tree.joinpath("more.py").write_text(
        "".join(documented.format(*case) for case in BAD_DOCUMENTS.items()) + RULE_BREAKERS
    )
    tree.joinpath("same.py").write_text(LONG.format("same", "+") + LONG.format("same", "+"))
    tree.joinpath("near.py").write_text(LONG.format("near", "-"))
    mined = mine(tree, "python", num_workers=1)
    once = "constructors magic_methods short_functions tests document_length links not_ascii unparseable"
    expected = dict.fromkeys([*once.split(), "duplicates", "near_duplicates"], 1)
    expected |= {"undocumented": 12, "kept as pairs": 25}
    assert mined.functions == expected
    kept = mine(tree, "python", num_workers=1, keep=["constructors", "links"])
    del expected["constructors"], expected["links"]
    assert kept.functions == {**expected, "kept as pairs": 27}


def test_unfit_files_are_skipped_and_counted(tmp_path):
    tree = python_tree(tmp_path / "tree")
    files = {
        "binary.py": b"x = 1\n\0\0",
        "latin.py": "x = 'é'\n".encode("latin-1"),
        "large.py": b"# line\n" * 200_000,
        "minified.py": b"x=" + b"1+" * 3000 + b"1\n",
        "made.py": b"# Code generated by a tool. DO NOT EDIT.\nx = 1\n",
        "error.py": b"(" * 11_000 + b"\n" * 500,
        "test_it.py": b"x = 1\n",
        "bom.py": b"\xef\xbb\xbfx = 1\r\n",
    }
    for name, content in files.items():
        tree.joinpath(name).write_bytes(content)
    tree.joinpath("link.py").symlink_to(tree / "bom.py")
    tree.joinpath("loop").symlink_to(tree, target_is_directory=True)
    tree.joinpath("dangling.py").symlink_to(tree / "nothing.py")
    os.mkfifo(tree / "pipe.py")
    for folder in ("node_modules", ".git"):
        python_tree(tree / folder, packages=1)
    assert mine(tree, "python", num_workers=1).files == {
        "mined": 13, "binary": 1, "not UTF-8": 1, "over 1,000,000 bytes": 1, "minified": 1, "generated": 1, "test": 1,
        "link": 2, "not a regular file": 1, "unparseable": 1,
    }  # fmt: skip


def test_files_with_syntax_errors_are_counted_and_named(tmp_path):
    for number, word in enumerate("one two three four five six seven eight nine ten eleven twelve".split()):
        calls = "".join(f"    {word}{call}({call}, {number})\n" for call in range(9))
        function = f"  /** Adds the numbers of {word}. */\n  fun {word}(a: Int) {{\n{calls}  }}\n"
        broken = "  fun suspend(a: Int) {\n  }\n" if number else ""
        (tmp_path / f"{number:02}.kt").write_text(f"class A {{\n{broken}{function}}}\n")
    mined = mine(tmp_path, "kotlin", num_workers=1)
    assert mined.files == {"mined": 1, "mined in part": 11} and mined.functions == {"kept as pairs": 12}
    assert all(row["func_name"].startswith("A.") for row in mined.rows["codebase"])
    assert mining_table(mined).endswith("syntax errors: " + ", ".join(mined.broken[:10]) + " and 1 more")


def test_linked_worktrees_are_skipped_and_counted(tmp_path, monkeypatch):
    tree = committed(python_tree(tmp_path / "tree"))
    for folder in ("copy", "package1/copy"):
        git(tree, "worktree", "add", "-q", "--detach", folder)
    python_tree(tree / "clone", packages=1)
    git(tree / "clone", "init", "-q")  # another repository
    monkeypatch.chdir(tmp_path)
    for source in (tree, "tree"):
        mined = mine(source, "python", num_workers=1)
        assert mined.files == {"mined": 13, "linked worktree (a folder)": 2}
        assert "| files | linked worktree (a folder) | 2 |" in re.sub(" +", " ", mining_table(mined))
    assert mine(tree / "copy", "python", num_workers=1).files == {"mined": 12}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"json/decoder.py": 4, "json.py": 1, "shutil.py": 5, "os/path.py": 40},
         {"json/a/b.py": "json", "json.py": "json", "new.py": "new"}),
        (dict.fromkeys((f"src/shop/{name}" for name in ("a.py", "b/c.py", "b/d.py", "b/e.py", "f.py")), 5),
         {"src/shop/a.py": "src/shop/a", "src/shop/b/c.py": "src/shop/b", "src/x.py": "src/x"}),
        ({"lib/shop.rb": 2, "lib/shop/a.rb": 30, "lib/shop/b.rb": 3, "lib/shop/c.rb": 3},
         {"lib/shop.rb": "lib/shop", "lib/shop/a.rb": "lib/shop/a", "bin/x.rb": "bin"}),
    ],
    ids=["folders", "files of one package", "a large file"],
)  # fmt: skip
def test_packages(sizes, expected):
    package = package_names(Counter(sizes))
    assert {path: package(path) for path in expected} == expected


def test_splits():
    sizes = Counter({f"package{number}": 1 + number % 7 for number in range(200)})
    splits = assign_splits(sizes)
    pairs = Counter()
    for package, size in sizes.items():
        pairs[splits[package]] += size
    assert pairs["train"] / sizes.total() == pytest.approx(0.8, abs=0.01)
    assert pairs["valid"] / sizes.total() == pytest.approx(0.1, abs=0.01)
    assert splits == assign_splits(Counter(dict(reversed(sizes.items()))))
    assert sorted(assign_splits(Counter(a=50, b=30, c=20)).values()) == ["test", "train", "valid"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing", "--language", "python"], "missing: no such folder"),
        (["tree", "--language", "perl"], "language='perl': use one of ruby, python"),
        (["tree", "--language", "go"], "no go files to mine (.go)"),
        (["tree", "--language", "python", "--keep", "commas"], "keep=['commas']: no such rule; use short_functions"),
        (["bare", "--language", "python"], "bare: no documented functions; undocumented: 1"),
        (
            ["small", "--language", "python"],
            "only 2 files or packages have documented functions (package0/code, package1/code)",
        ),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    python_tree(tmp_path / "tree")
    python_tree(tmp_path / "small", packages=2)
    tmp_path.joinpath("bare").mkdir()
    tmp_path.joinpath("bare", "a.py").write_text("def f(a):\n    b = a\n    return b\n")
    with refused(message):
        run_command(["mine", *arguments, "--output_dir", "out", "--num_workers", "1"])
    assert not (tmp_path / "out").exists()


def test_command_line_and_workers_change_nothing(tmp_path, capsys):
    tree = python_tree(tmp_path / "tree")
    for workers in ("1", "2"):
        words = ["--language", "python", "--output_dir", str(tmp_path / workers), "--num_workers", workers]
        assert run_command(["mine", str(tree), *words]) == 0
        assert re.search(r"\| rows +\| train +\| +20 \|", capsys.readouterr().out)
    assert len(read(tmp_path / "1", "train")) == 20
    for file in (tmp_path / "1").iterdir():
        assert file.read_bytes() == (tmp_path / "2" / file.name).read_bytes()


def test_the_command_knows_the_names_of_trees(tmp_path, capsys, monkeypatch):
    tree = python_tree(tmp_path / "tree")
    monkeypatch.setattr(os, "__file__", str(tree / "os.py"))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tree)})
    for name in ("stdlib", "installed"):
        assert run_command(["mine", name, "--output_dir", str(tmp_path / name), "--num_workers", "1"]) == 0
        assert len(read(tmp_path / name, "train")) == 20


class Threaded:
    """An object that records the processes in which it is freed. A forked process must not free it."""

    def __init__(self, path):
        self.path = path
        self.itself = self

    def __del__(self):
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()}\n")


def _collect(number: int) -> int:
    gc.collect()
    return number


def test_a_worker_does_not_collect_what_it_inherits(tmp_path):
    path = tmp_path / "collected"
    gc.disable()
    try:
        Threaded(path)
        assert list(_each_in_order(_collect, range(16), 2)) == list(range(16))
    finally:
        gc.enable()
    gc.collect()
    assert path.read_text() == f"{os.getpid()}\n"


def cpp_tree(folder):
    """Writes a tree with a class in C++ that is documented in its header, and a header in C."""
    for name in ("cart", "shop", "till"):
        head = f"namespace {name} {{\nclass Box {{\n public:\n"
        declared = (
            "  /// Adds up all prices in a box.\n  int total(int start);\n  /// Sells one.\n  int sell(int a);\n"
        )
        overload = "  int sell(float a);\n"
        empty = f"  /** Says whether nothing is inside. */\n  bool empty() {{\n    return {name}_a;\n  }}\n}};\n}}\n"
        bodies = (
            f"namespace {name} {{\nint Box::total(int start) {{\n  return start + {len(name)} * {name}_price;\n}}\n"
            f"int Box::sell(int a) {{\n  return a * {name}_a;\n}}\n"
            f"int Box::sell(float a) {{\n  return a / {name}_b - 1;\n}}\n}}\n"
        )
        folder.joinpath(name).mkdir(parents=True)
        folder.joinpath(name, "box.h").write_text(head + declared + overload + empty)
        folder.joinpath(name, "box.cpp").write_text(bodies)
    folder.joinpath("plain.h").write_text("/** Adds one to a number. */\nint add(int a)\n{\n  return a + 1;\n}\n")
    return folder


def test_headers_in_cpp_are_mined_and_prototypes_have_the_documentation(tmp_path):
    tree = cpp_tree(tmp_path / "tree")
    assert tree_language(tree) == "cpp"
    mined = mine(tree, "cpp", num_workers=1)
    pairs = {row["func_name"]: row for split in ("train", "valid", "test") for row in mined.rows[split]}
    names = [f"{name}.Box.{function}" for name in ("cart", "shop", "till") for function in ("empty", "total")]
    assert sorted(pairs) == names  # `sell` has two definitions
    assert pairs["cart.Box.total"]["docstring"] == "Adds up all prices in a box."
    assert pairs["cart.Box.total"]["path"] == "cart/box.cpp"
    assert mined.functions["undocumented"] == 6 and mined.files["other language"] == 1
