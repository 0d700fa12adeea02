import json
import os
import re
import shutil
import time
from collections import Counter

import pygit2
import pytest
from git_repositories import LINK, SUBMODULE, Repository, function, grown
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.data.layouts.codesearchnet import load_folder
from soft_trainer.encoders.profiles import PROFILES
from soft_trainer.mining.changes import ChangeReader
from soft_trainer.mining.history import history_language, mine_history
from soft_trainer.options.fields import DataArguments
from soft_trainer.shell.evaluation_sets import load_evaluation_sets
from soft_trainer.source.definitions import parse
from soft_trainer.source.functions import FileFunctions


def mine(repository, language="python", **options):
    return mine_history(getattr(repository, "path", repository), language, num_workers=1, **options)


@pytest.fixture
def repository(tmp_path):
    return grown(tmp_path)


def sizes(mined):
    return {split: len(rows) for split, rows in mined.rows.items()}


def numbered(numbers, value="value += {}"):
    """Returns source files with the functions f0, f1, ..., each of which adds its number."""
    return {f"src/f{i}.py": function(f"f{i}", value.format(number)) for i, number in numbers}


def test_a_pair_is_a_subject_and_the_function_as_it_was_before_or_as_it_was_added(repository):
    mined = mine(repository)
    assert sizes(mined) == {"train": 20, "valid": 2, "test": 3, "codebase": 5}
    queries = [row["docstring"] for row in mined.rows["train"]]
    assert queries[:2] == ["Make the sum number 15 larger", "Make the sum number 14 larger"]
    row = mined.rows["train"][queries.index("Make the sum number 12 larger")]
    assert row["code"] == "def f2(value):\n    value += 1007\n    return value"
    assert row["docstring_tokens"] == "Make the sum number 12 larger".split()
    assert (row["url"], row["path"], row["func_name"]) == ("src/f2.py#f2", "src/f2.py", "f2")
    assert (row["repo"], row["partition"], row["source"]) == (repository.path.name, "train", "history")
    first = [row for row in mined.rows["train"] if row["docstring"] == "Start with five functions of numbers"]
    assert [row["func_name"] for row in first] == [f"f{i}" for i in range(5)]


def test_the_corpus_is_the_tree_before_the_oldest_test_commit(repository):
    mined = mine(repository)
    assert {row["url"]: row["code"].split()[4] for row in mined.rows["codebase"]} == {
        f"src/f{i}.py#f{i}": str(number) for i, number in enumerate((1015, 1016, 1017, 1013, 1014))
    }
    assert not any(row["docstring"] or row["docstring_tokens"] for row in mined.rows["codebase"])
    assert mined.relevance == [
        {"query": f"Make the sum number {n} larger", "url": f"src/f{n % 5}.py#f{n % 5}", "relevance": 1.0}
        for n in (20, 19, 18)
    ]


def test_nothing_from_after_a_cut_reaches_what_is_before_it(tmp_path):
    repository = grown(tmp_path, 12)
    base = repository.git.head.target
    late, later = ({"src/g.py": function("g", f"value += {number}")} for number in (7777, 8888))
    # A branch that starts long before the cut of the test queries, and is merged after the cut.
    side = repository.commit("Add a function on a branch", late, [base], branch="refs/heads/side")
    side = repository.commit("Change the function on the branch", later, [side], branch="refs/heads/side")
    files = {}
    for number in range(13, 31):
        files[f"src/f{number}.py"] = function(f"f{number}", f"value += {1000 + number}")
        repository.commit(f"Add the function number {number}", files)
    tip = repository.git.head.target
    repository.commit("Merge the branch of old", files | late, [tip, side])
    for number in range(31, 34):
        files[f"src/f{number}.py"] = function(f"f{number}", f"value += {1000 + number}")
        files["src/f14.py"] = function("f14", f"value += {1000 + number}")
        repository.commit(f"Add the function number {number}", files | late)
    mined = mine(repository, source_dir=tmp_path)
    numbers, queries = {}, {}
    for split, rows in mined.rows.items():
        numbers[split] = {int(word) for row in rows for word in row["code_tokens"] if word.isdigit()}
        queries[split] = {int(number) for row in rows for number in re.findall(r"\d+$", row["docstring"])}
    assert queries["test"] and min(queries["test"]) > max(queries["train"] | queries["valid"])
    assert min(queries["valid"]) > max(queries["train"])
    cut, train_cut = 999 + min(queries["test"]), 999 + min(queries["valid"])
    assert max(numbers["codebase"]) <= cut
    assert max(numbers["train"]) <= train_cut
    assert not {7777, 8888} & (numbers["train"] | numbers["valid"] | numbers["codebase"])
    assert mined.commits["on a branch merged after a cut"] == 1  # the first of the branch removes too many functions


NOTHING = "no function changed, or only its layout and comments"
LEFT_OUT = [
    ("Make the layout of it nicer", "def f0( value ):\n    # a comment\n    return  value\n", NOTHING),
    ("Change a constant of it", function("f0") + "LIMIT = 5\n", NOTHING),
    ('Revert "Make it larger again"', function("f0", "value += 1"), "revert"),
    ("Change six functions at once", "".join(function(f"h{i}") for i in range(6)), "over 5 functions"),
    ("Break the syntax of it", "def f0(value):\n    return value +\n", "kept"),
]


@pytest.mark.parametrize(("message", "text", "outcome"), LEFT_OUT, ids=[case[0] for case in LEFT_OUT])
def test_commits_without_a_searchable_change_are_skipped(repository, message, text, outcome):
    rest = {f"src/f{i}.py": function(f"f{i}") for i in range(1, 5)}
    repository.commit("Make all functions short again", {"src/f0.py": function("f0")} | rest)
    before = mine(repository).commits
    repository.commit(message, {"src/f0.py": text} | rest)
    changes = mine(repository).commits
    changes.subtract(before)
    kept = sum(changes.pop(split, 0) for split in ("train", "valid", "test"))
    assert (kept, +changes) == ((1, {}) if outcome == "kept" else (0, {outcome: 1}))


def overloaded(*overloads):
    """Returns a Java class with one method `put` for each of these parameter lists and bodies."""
    methods = "".join(f"  void put({parameters}) {{\n    {body}\n  }}\n" for parameters, body in overloads)
    return {"src/Box.java": f"class Box {{\n{methods}}}\n"}


def test_a_commit_is_paired_with_the_overload_that_it_changes(tmp_path):
    repository = Repository(tmp_path)
    number = ("int number", "numbers.add(number);")
    text = ("String text", "texts.add(text);")
    repository.commit("Put numbers into a box", overloaded(number))
    repository.commit("Put texts into a box too", overloaded(text, number))
    repository.commit("Count the numbers in the box", overloaded(text, (number[0], "count += 1;")))
    repository.commit("Take the texts out again", overloaded((number[0], "count += 1;")))
    last = overloaded((number[0], "count += 1;"))
    for size in range(30):
        code = f"class Size {{ int f() {{ return {size}; }} }}"
        repository.commit(f"Grow the box to size {size}", {**last, "src/Size.java": code})
    rows = mine(repository, "java").rows["train"]
    paired = [(row["docstring"], row["code"].split("\n")[1].strip()) for row in rows if "Box" in row["path"]]
    assert paired[::-1] == [
        ("Put numbers into a box", number[1]),
        ("Put texts into a box too", text[1]),
        ("Count the numbers in the box", number[1]),
        ("Take the texts out again", text[1]),
    ]


def test_authors_and_addresses_are_excluded(repository):
    message = "Make it nicer for ann@example.org\n\nSo Bob said.\nCo-authored-by: Ann Author <ann@example.org>"
    repository.commit(message, {"src/f0.py": function("f0")}, author="Ann Author")
    mined = mine(repository)
    assert mined.relevance[0]["query"] == "Make it nicer for"
    text = json.dumps([mined.rows, mined.relevance])
    assert "Ann Author" not in text and "example.org" not in text


def test_tests_and_other_languages_do_not_count(repository):
    files = {"tests/test_f.py": function("test_f"), "f.js": "function f() { return 1; }", "src/f0.py": function("f0")}
    repository.commit("Change one function, and add its test", files)
    newest = mine(repository).rows["test"][0]
    assert (newest["docstring"], newest["func_name"]) == ("Change one function, and add its test", "f0")


def test_renamed_files_keep_their_functions(repository):
    texts = {i: function(f"f{i}", "value += 1", "value -= 2", document=f"Adds the {i}th number.") for i in range(5)}
    commits = [(number, number % 5, "src") for number in range(20, 24)] + [(None, 0, "lib")]
    commits += [(number, 0, "lib") for number in range(30, 40)] + [(None, 0, "kit"), (99, 0, "kit")]
    for number, changed, folder in commits:
        if number:
            texts[changed] = function(f"f{changed}", f"value += {number}", "value -= 2", "value *= 3")
        message = f"Set the number {number} of it" if number else "Move all files to another folder"
        repository.commit(message, {f"{folder}/f{i}.py": text for i, text in texts.items()})
    rows = mine(repository).rows
    assert {row["url"] for row in rows["codebase"]} == {f"lib/f{i}.py#f{i}" for i in range(5)}
    newest, (old,) = rows["test"][0], [row for row in rows["train"] if row["docstring"] == "Set the number 22 of it"]
    assert newest["docstring"] == "Set the number 99 of it"
    assert (newest["path"], newest["url"]) == ("kit/f0.py", "lib/f0.py#f0")
    assert (old["path"], old["url"]) == ("src/f2.py", "lib/f2.py#f2")


def test_queries_whose_subject_or_patch_occurs_before_the_cut_are_dropped(repository):
    files = numbered((i, 5) for i in range(5))
    repository.commit("Make the sum number 3 larger", files)
    # the same patch as an earlier commit
    for number, subject in ((1005, "Go back to what it was"), (1010, "Set it to the greater number")):
        changed = function("f0", f"value += {number}", document="Adds the 0th number.")
        repository.commit(subject, files | {"src/f0.py": changed})
    mined = mine(repository)
    assert mined.commits["test: subject or patch occurs before"] == 2
    tested = {row["docstring"] for row in mined.rows["test"]}
    assert not tested & {"Make the sum number 3 larger", "Set it to the greater number"}


def test_documentation_and_commits_are_rows_of_the_same_tree(repository, tmp_path):
    mined = mine(repository, source_dir=tmp_path / "src")
    rows = [row for row in mined.rows["train"] if row["source"] == "documentation"]
    assert [row["docstring"] for row in rows] == [f"Adds the {i}th number." for i in range(5)]
    assert [row["url"] for row in rows] == [f"src/f{i}.py#f{i}" for i in range(5)]
    assert Counter(row["source"] for row in mined.rows["train"]) == {"documentation": 5, "history": 20}
    with refused("not a folder in the repository"):
        mine(tmp_path, source_dir=tmp_path.parent)


NESTED = b"""function outer() {
  const inner = function () {
    return 1;
  };
  return 2;
}
class A {
  get x() { return 3; }
  set x(v) { this.v = 4; }
}
"""


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        ({3}, {"inner"}),
        ({5}, {"outer"}),
        ({1, 2, 3, 4, 5}, {"outer", "inner"}),
        ({8}, {"A.x()"}),
        ({9}, {"A.x(v)"}),
        ({-1, 7, 10, 11}, set()),
    ],
)
def test_a_line_belongs_to_the_innermost_function(lines, names):
    file = FileFunctions(parse(NESTED, "javascript"), NESTED, "javascript", "a.js")
    assert file.at(lines) == names


def test_the_folder_is_read_by_training_and_evaluation(tmp_path, capsys):
    grown(tmp_path / "repo")
    out = tmp_path / "out"
    run_command(["mine", "--history", str(tmp_path / "repo"), "--output_dir", str(out)])
    printed = capsys.readouterr().out
    assert printed.startswith("language: python, the most common one\n") and "| commits | train" in printed
    names = ("codebase", "relevance", "test", "train", "valid")
    assert sorted(os.listdir(out)) == [f"{name}.jsonl.gz" for name in names]
    assert len(load_folder(out)["train"]) == 20
    sets = load_evaluation_sets(DataArguments(language="python", eval_data_dir=str(out)), PROFILES["codebert"])
    assert {name: len(split.queries) for name, split in sets.items()} == {"out-relevance": 3, "out-test": 3}


def test_bare_repositories_and_merges(tmp_path):
    path = tmp_path / "repo.git"
    repository = grown(path, bare=True)
    files = numbered((i, 3) for i in range(5))
    tip = repository.git.head.target
    side = repository.commit("Change one on another branch", files, [tip], branch="refs/heads/side")
    repository.commit("Merge the other branch into it", files, [tip, side])
    mined = mine(repository)
    assert mined.commits["merge"] == 1
    assert mined.rows["train"][0]["repo"] == "repo"
    (path / "config").unlink()  # libgit2 then takes the parent for the working tree
    sources = Counter(row["source"] for row in mine(repository, source_dir=path).rows["train"])
    assert sources == {"documentation": 5, "history": len(mined.rows["train"])}


def test_links_submodules_and_odd_names_are_left_alone(repository):
    target = repository.git.create_blob(b"/etc/passwd")
    others = [("link.py", LINK, target), ("kit.py", SUBMODULE, repository.git.head.target)]
    files = {"src/f0.py": function("f0"), **{f"src/f{i}.py": function(f"f{i}") for i in range(1, 5)}}
    for number in range(30, 40):
        files["src/f0.py"] = function("f0", f"value += {number}")
        repository.commit(f"Set the number {number} of it", files, others=others)
    assert {row["path"] for row in mine(repository).rows["codebase"]} == {f"src/f{i}.py" for i in range(5)}


def test_a_working_tree_of_a_shallow_clone_is_mined(repository, tmp_path, capsys):
    commits = list(repository.git.walk(repository.git.head.target))
    for commit in commits[13:]:
        remove(repository, str(commit.id))
    (tmp_path / ".git/shallow").write_text(f"{commits[12].id}\n")
    linked = tmp_path.with_name("linked")
    repository.git.add_worktree("linked", str(linked))
    mined = mine(linked)
    assert "a shallow clone with 13 commits" in capsys.readouterr().err
    assert mined.commits["end of a shallow clone"] == 1
    assert sizes(mined) == {"train": 10, "valid": 1, "test": 1, "codebase": 5}


def remove(repository, revision):
    oid = str(repository.git.revparse_single(revision).id)
    (repository.path / ".git/objects" / oid[:2] / oid[2:]).unlink()


@pytest.mark.parametrize("workers", [1, 2])
def test_commits_and_files_that_lack_an_object_are_skipped_and_counted(tmp_path, capsys, workers):
    repository = grown(tmp_path, 40)
    whole = mine(repository)
    remove(repository, "HEAD~30:src/f0.py")
    remove(repository, f"{whole.cut}:src/f1.py")
    mined = mine_history(tmp_path, "python", tmp_path, workers)
    err = capsys.readouterr().err
    assert f"{tmp_path}: skipped 4 of 41 commits, because objects are missing; `git fetch" in err
    assert "skipped 1 source files that are missing from the trees" in err
    assert mined.commits["an object is missing"] == 4 and mined.cut == whole.cut
    assert {row["path"] for row in mined.rows["codebase"]} == {f"src/f{i}.py" for i in (0, 2, 3, 4)}
    assert {row["path"] for row in mined.rows["train"] if row["source"] == "documentation"} >= {"src/f0.py"}


def test_places_without_a_history_get_one_line(tmp_path, capsys):
    Repository(tmp_path / "empty")
    (tmp_path / "folder").mkdir()
    grown(tmp_path / "short", 2)
    damaged = grown(tmp_path / "damaged")
    remove(damaged, "HEAD~8")
    for name, message in {
        "empty": "has no commit",
        "folder": "not a readable git repository",
        "missing": "not a readable git repository",
        "short": "only 2 of 3 commits change python functions",
        "damaged": "Clone it again",
    }.items():
        for workers in (1, 2):
            with refused(message):
                mine_history(tmp_path / name, "python", num_workers=workers)
    with refused("language='cobol'"):
        mine(tmp_path / "short", "cobol")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs the right to give files away")
def test_repositories_of_another_owner_work(tmp_path):
    grown(tmp_path)
    for path in [tmp_path, *tmp_path.rglob("*")]:
        os.chown(path, 12345, 12345)
    before = pygit2.settings.owner_validation
    assert len(mine(tmp_path).rows["test"]) == 3
    assert pygit2.settings.owner_validation == before


def test_a_hostile_configuration_starts_nothing(tmp_path):
    repository = grown(tmp_path / "repo")
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\ncat\n")
    trap.chmod(0o755)
    settings = [
        "[core]", f"\tfsmonitor = {trap}", f"\tpager = {trap}", f"\thooksPath = {tmp_path}", f"\tsshCommand = {trap}",
        "[diff]", f"\texternal = {trap}", '[diff "py"]', f"\ttextconv = {trap}", f"\tcommand = {trap}",
        '[filter "py"]', f"\tclean = {trap}", f"\tsmudge = {trap}", f"\tprocess = {trap}", "\trequired = true",
        '[remote "origin"]', "\turl = ext::" + str(trap), "\tpromisor = true",
    ]  # fmt: skip
    with open(tmp_path / "repo/.git/config", "a") as file:
        file.write("\n".join(settings) + "\n")
    (tmp_path / "repo/.git/info").mkdir(exist_ok=True)
    (tmp_path / "repo/.git/info/attributes").write_text("*.py diff=py filter=py\n")
    for hook in ("post-checkout", "reference-transaction", "fsmonitor-watchman"):
        shutil.copy(trap, tmp_path / "repo/.git/hooks" / hook)
    assert len(mine(repository).rows["test"]) == 3
    assert not (tmp_path / "sprung").exists()


@pytest.mark.slow
def test_ten_thousand_commits_take_a_few_minutes(tmp_path):
    grown(tmp_path, 1000)
    started = time.process_time()
    mine(tmp_path)
    assert time.process_time() - started < 18  # 10,000 commits in three minutes, on one core


def test_a_header_in_cpp_is_in_a_history_of_cpp_and_not_of_c(tmp_path):
    repository = Repository(tmp_path / "repository")
    header = "namespace shop {\nint total(int a) {\n  return a + 1;\n}\n}\n"
    files = {"shop.h": header, "till.h": "class Till;\n", "plain.h": "int a;\n"}
    commit = str(repository.commit("Add up the prices of the cart", files))
    assert history_language(repository.path) == "cpp"
    found = {}
    for language in ("c", "cpp"):
        found[language] = [
            row["func_name"] for row in ChangeReader(repository.path, [language]).read(commit).functions
        ]
    assert found == {"c": [], "cpp": ["shop.total"]}
