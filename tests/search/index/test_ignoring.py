"""The files that git leaves out: the lists are git's own."""

import os
import random
import subprocess
from pathlib import Path

import pytest
from refusals import refused
from trees import write_tree

from soft_trainer.search import CodeIndex
from soft_trainer.search.index import ignoring
from soft_trainer.search.index.listing import list_tree

NAMES = ["a", "b", "ab", "abc", "a.py", "b.py", "a.md", "x b", "é", "[a]", "a*", "foo", "#c", "!d", " e", "f ", "\\g"]
PARTS = [
    *NAMES, "*", "*", "*", "**", "**", "*.py", "*.md", "*a", "**b", "a*", "f*", "b?", "?", "a**", "*a*", "***", "[ab]",
    "[!a]", "[a-c]*", "[^b]*", "[]a]", "[a", "[[:alpha:]]", "[[:foo:]]", "[a/]b", "[\\a]", "[a-]", "[[:digit:]a]*",
    "[b-a]", "[--a]", "[[:]", "\\a", "a\\", "\\#c", "\\!d", "\\*", "f\\ ", "\\\\g", "\\[a]",
]  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home without settings of git."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL", "GIT_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def some_rules(rng):
    lines = []
    for _ in range(rng.randint(1, 6)):
        between = rng.choice(["/", "/", "/", "\\/", "//"])
        line = between.join(rng.choice(PARTS) for _ in range(rng.choice([1, 1, 1, 2, 2, 3])))
        start = rng.choice(["", "", "", "/", "!", "!/"])
        end = rng.choice(["", "", "", "", "/", "/", " ", "\\ ", "\t", "\r"])
        lines.append(start + line + end)
    if rng.random() < 0.25:
        lines = ["*", "!*/", "!*.py", *lines[:3]]
    mark = rng.choice(["", "", "", "\ufeff"])
    return (mark + rng.choice(["\n", "\r\n"]).join(lines) + rng.choice(["", "\n"])).encode()


def some_repository(seed, folder):
    """Writes a random tree with random ignore files, some of them in `.git` and in the user's settings."""
    rng = random.Random(seed)
    folders = [folder]
    for _ in range(rng.randint(2, 8)):
        folders.append(rng.choice(folders) / rng.choice(NAMES))
    for one in folders:
        one.mkdir(parents=True, exist_ok=True)
        for name in rng.choices(NAMES, k=rng.randint(0, 5)):
            if one / name not in folders:
                (one / name).write_text("x")
    for one in [folder, *rng.sample(folders, len(folders) // 3)]:
        (one / ".gitignore").write_bytes(some_rules(rng))
    config = "[core]\n\trepositoryformatversion = 0\n"
    files = {"HEAD": "ref: refs/heads/main\n", "objects/a": "", "refs/heads/.a": ""}
    if rng.random() < 0.4:
        files["info/exclude"] = some_rules(rng)
    if rng.random() < 0.4:
        config += '\texcludesFile = "../rules" ; the user\'s\n'
        (folder.parent / "rules").write_bytes(some_rules(rng))
    write_tree(folder / ".git", files | {"config": config})
    if rng.random() < 0.4:
        tracked = [path for path in folder.rglob("*") if path.is_file() and ".git/" not in str(path)]
        names = [str(path.relative_to(folder)) for path in rng.sample(tracked, len(tracked) // 3)]
        words = ["git", "update-index", "--index-version", str(rng.choice([2, 4])), "--add", "--", *names]
        subprocess.run(words, cwd=folder, check=True)
    return folder


def listed_by_git(folder):
    words = ["git", "-C", str(folder), "ls-files", "-coz", "--exclude-standard"]
    return sorted(subprocess.run(words, capture_output=True, check=True).stdout.split(b"\0")[:-1])


def agrees_with_git(seed, folder):
    repository = some_repository(seed, folder / str(seed) / "tree")
    mine = sorted(map(os.fsencode, list_tree(str(repository)).files))
    return mine == listed_by_git(repository)


def test_a_few_random_trees_are_listed_as_git_does(tmp_path):
    assert [seed for seed in range(12) if not agrees_with_git(seed, tmp_path)] == []


@pytest.mark.slow
def test_random_trees_are_listed_as_git_does(tmp_path):
    assert [seed for seed in range(1000, 1500) if not agrees_with_git(seed, tmp_path)] == []


def files_of(folder, **files):
    """Writes files, whose names have `__` for `/`, and lists all but the ignore files."""
    write_tree(folder, files)
    return {path for path in list_tree(str(folder)).files if not path.endswith(".gitignore")}


def test_an_inner_file_that_takes_a_folder_back_says_nothing_about_what_is_in_it(tmp_path):
    rules = {".gitignore": "private_*.md\nbuild_tools/\n", "app/.gitignore": "!build_tools/\n"}
    names = ["app/build_tools/a.py", "app/build_tools/private_a.md", "build_tools/b.py", "app/private_b.md"]
    assert files_of(tmp_path, **rules, **dict.fromkeys(names, "x")) == {"app/build_tools/a.py"}


def test_the_usual_list_of_what_is_allowed(tmp_path):
    names = ["a.py", "a.md", "b/c/a.py", "b/c/a.md"]
    rules = {".gitignore": "*\n!*/\n!*.py\n"}
    assert files_of(tmp_path, **rules, **dict.fromkeys(names, "x")) == {"a.py", "b/c/a.py"}


def test_a_large_ignore_file_counts(tmp_path, monkeypatch):
    long = "".join(f"/some/folder/with/a/long/name/{n}\n" for n in range(2_000))
    assert files_of(tmp_path, **{".gitignore": long + "secret.py\n", "secret.py": "x", "a.py": "x"}) == {"a.py"}
    # one that cannot be read speaks against all around it
    monkeypatch.setattr(ignoring, "MAX_BYTES", 100)
    assert list_tree(str(tmp_path)).skipped == {"": "an ignore file that cannot be read"}


def test_rules_beside_the_tree(tmp_path, home):
    repository = write_tree(tmp_path / "repository", {".git/info/exclude": "one.py\n", ".git/config": "[core]\n"})
    names = dict.fromkeys(["one.py", "two.py", "three.py", "four.py"], "x")
    assert files_of(repository, **names) == {"two.py", "three.py", "four.py"}
    write_tree(home, {".config/git/ignore": "two.py\n"})
    assert files_of(repository) == {"three.py", "four.py"}
    write_tree(home, {".gitconfig": "[include]\n\tpath = more # and\n", "more": '[Core]\nExcludesFile = "~/mine"\n'})
    write_tree(home, {"mine": "three.py\n"})
    assert files_of(repository) == {"two.py", "four.py"}
    write_tree(repository, {".git/config": "[core] excludesfile = rules\\\n.txt\n", "rules.txt": "!one.py\nfour.py\n"})
    assert files_of(repository) == {"rules.txt", "two.py", "three.py"}
    write_tree(repository, {".git/config": f"[core]\nexcludesFile = {tmp_path}\n"})
    with refused("core.excludesFile cannot be read"):
        list_tree(str(repository))


def test_a_working_tree_with_its_data_elsewhere(tmp_path):
    write_tree(tmp_path, {"data/info/exclude": "secret.py\n", "data/worktrees/w/commondir": "../..\n"})
    names = {".git": "gitdir: ../data/worktrees/w\n", "secret.py": "x", "a.py": "x"}
    assert files_of(tmp_path / "tree", **names) == {"a.py"}


def test_a_folder_of_a_repository_follows_the_rules_above_it(tmp_path):
    names = dict.fromkeys(
        ["app/a.py", "app/private_a.md", "app/deep/private_b.md", "out/b.py", "out/private_b.md"], "x"
    )
    write_tree(tmp_path, {".git/HEAD": "", ".gitignore": "private_*\n/app/deep/*.md\nout/\n", **names})
    assert files_of(tmp_path / "app") == {"a.py"}
    # who names a folder that is left out wants it
    assert files_of(tmp_path / "out") == {"b.py", "private_b.md"}


@pytest.mark.parametrize("version", [2, 3, 4])
def test_tracked_files_count_whatever_the_rules_say(tmp_path, version):
    rules = {".gitignore": "*\n", ".git/HEAD": "ref: refs/heads/main\n", ".git/objects/a": "", ".git/refs/.a": ""}
    long = "/".join(["a-long-name-of-a-folder"] * 8)
    names = ["a.py", "b.py", "deep/in/c.py", "deep/in/d.py", "secret/e.py", f"{long}/f.py", f"{long}/g.py", "é.py"]
    tree = write_tree(tmp_path, rules | dict.fromkeys(names, "x"))
    kept = {"a.py", "deep/in/c.py", f"{long}/g.py", "é.py"}
    words = ["git", "update-index", "--index-version", str(version), "--add", "--", *kept]
    subprocess.run(words, cwd=tree, check=True)
    if version == 3:  # which git writes only for such entries
        subprocess.run(["git", "update-index", "--skip-worktree", "a.py"], cwd=tree, check=True)
    assert files_of(tree) == kept
    assert files_of(tree / "deep") == {"in/c.py", "in/d.py"}  # which is left out as a whole, but named
    index = tree / ".git/index"
    index.write_bytes(index.read_bytes()[:100])
    assert files_of(tree) <= kept


def reasons(index):
    return dict(index.database.execute("SELECT path, reason FROM skipped"))


def test_no_reason_outlives_its_cause(tmp_path):
    tree = write_tree(
        tmp_path / "tree", {"env/pyvenv.cfg": "", "env/a.py": "in_env = 1\n", "build/b.py": "built = 1\n"}
    )
    (tree / ".gitignore").write_text("build/\n")
    index = CodeIndex.build(tree)
    assert reasons(index) == {"env/": "vendored", "build/": "ignored"}
    (tree / "env/pyvenv.cfg").unlink()
    (tree / "build/b.py").unlink()
    (tree / "build").rmdir()
    (tree / "build").write_text("built = 1\n")
    assert index.update() is True and reasons(index) == {} and index.update() is False
    assert index.search("in_env")[0].path == "env/a.py" and index.search("built")[0].path == "build"
    (tree / "build").unlink()
    write_tree(tree, {"build/b.py": "built = 1\n", "env/pyvenv.cfg": ""})
    assert index.update() is True and reasons(index) == {"env/": "vendored", "build/": "ignored"}
    assert index.search("built") == [] == index.search("in_env")


def test_a_file_that_was_read_and_is_ignored_later_has_one_reason(tmp_path):
    tree = write_tree(tmp_path / "tree", {"a.py": b"\0", "b.py": "x = 1\n"})
    index = CodeIndex.build(tree)
    assert reasons(index) == {"a.py": "binary"}
    write_tree(tree, {".gitignore": "a.py\n"})
    assert index.update() is True and reasons(index) == {"a.py": "ignored"} and index.update() is False
    (tree / ".gitignore").unlink()
    assert index.update() is True and reasons(index) == {"a.py": "binary"}


def test_data_of_a_repository_stays_out_even_if_it_is_included(tmp_path):
    write_tree(
        tmp_path, {".git/config": "[remote]\nurl = https://me:token@host\n", "sub/.git": "gitdir: /home/me/x\n"}
    )
    write_tree(tmp_path, {"a.py": "x"})
    assert set(list_tree(str(tmp_path), include=[".git/**", "sub/**", "*.git"]).files) == {"a.py"}
    assert Path(tmp_path, ".git/config").exists()
