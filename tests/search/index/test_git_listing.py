"""Git lists the files of a tree. A repository's settings can neither start a program nor hide files."""

import os
import random
import subprocess
from pathlib import Path

import pytest
from git_repositories import git
from refusals import refused
from trees import write_tree

from soft_trainer.search import CodeIndex
from soft_trainer.search.index import git_listing
from soft_trainer.search.index.listing import list_tree


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Makes a home without git settings, and a program that leaves a trace if it is run."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL", "GIT_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def repository(tmp_path):
    """Makes a repository with a tracked file, a tracked but ignored file, an untracked file and an ignored file."""
    tree = write_tree(tmp_path / "repository", {".gitignore": "*.log\nbuild/\n", "a.py": "x", "kept.log": "x"})
    write_tree(tree, {"new.py": "x", "debug.log": "x", "build/b.py": "x"})
    git(tree, "init", "-q")
    git(tree, "add", "a.py")
    git(tree, "add", "-f", "kept.log")
    git(tree, "commit", "-qm", "Add the first file")
    return tree


EXPECTED = {"a.py", "kept.log", "new.py"}


def listed(folder, **choice):
    """Returns the listed files of a tree, without `.gitignore` files."""
    return {path for path in list_tree(str(folder), **choice).files if not path.endswith(".gitignore")}


def test_tracked_files_and_those_that_are_not_ignored_are_listed(repository):
    assert listed(repository) == EXPECTED


def program(tmp_path, name="owned"):
    """Writes a program that creates a file when it is run, and returns its path."""
    script = write_tree(tmp_path, {"program": f"#!/bin/sh\ntouch {tmp_path / name}\n"}) / "program"
    script.chmod(0o755)
    return str(script)


def fsmonitor(tree, run):
    git(tree, "config", "core.fsmonitor", run)
    git(tree, "update-index", "--fsmonitor")
    Path(run).with_name("owned").unlink(missing_ok=True)


def other_programs(tree, run):
    for name in ("core.pager", "core.sshCommand", "core.editor", "filter.x.clean", "diff.external", "alias.ls-files"):
        git(tree, "config", name, f"!{run}" if name == "alias.ls-files" else run)
    write_tree(tree, {".gitattributes": "* filter=x\n"})
    (tree / ".gitattributes").unlink()


def hooks(tree, run):
    for name in ("post-index-change", "fsmonitor-watchman", "post-checkout", "reference-transaction"):
        (tree / ".git/hooks").mkdir(exist_ok=True)
        (tree / ".git/hooks" / name).symlink_to(run)


def working_tree_elsewhere(tree, run):
    write_tree(tree.parent / "elsewhere", {"z.py": "x"})
    git(tree, "config", "core.worktree", str(tree.parent / "elsewhere"))


def another_owner(tree, run):
    if os.geteuid() != 0:
        pytest.skip("only root may give files away")
    for path in [tree, *tree.rglob("*")]:
        os.chown(path, 4242, 4242)


def pipe_as_configuration(tree, run):
    (tree / ".git/config").unlink()
    os.mkfifo(tree / ".git/config")


def split_index(tree, run):
    git(tree, "update-index", "--split-index")
    (tree / "kept.log").unlink()  # only the index says that it is tracked
    write_tree(tree, {"kept.log": "x"})


def index_of_version_4(tree, run):
    git(tree, "update-index", "--index-version", "4")


def index_with_intent_to_add_and_flags(tree, run):
    git(tree, "add", "-N", "new.py")
    git(tree, "update-index", "--skip-worktree", "a.py")


def damaged_index(tree, run):
    index = tree / ".git/index"
    index.write_bytes(index.read_bytes()[:60])


def index_that_is_a_pipe(tree, run):
    (tree / ".git/index").unlink()
    os.mkfifo(tree / ".git/index")


def exclude_file_that_is_a_pipe(tree, run):
    (tree / ".git/info/exclude").unlink(missing_ok=True)
    (tree / ".git/info").mkdir(exist_ok=True)
    os.mkfifo(tree / ".git/info/exclude")


def index_of_sha256(tree, run):
    other = write_tree(tree.parent / "sha256", {"a.py": "x"})
    git(other, "init", "-q", "--object-format=sha256")
    git(other, "add", "-A")
    (other / ".git/index").replace(tree / ".git/index")


WITHOUT_INDEX = (damaged_index, index_that_is_a_pipe, index_of_sha256)


@pytest.mark.parametrize(
    "make",
    [
        fsmonitor,
        other_programs,
        hooks,
        working_tree_elsewhere,
        another_owner,
        pipe_as_configuration,
        index_of_version_4,
        index_with_intent_to_add_and_flags,
        exclude_file_that_is_a_pipe,
        split_index,
        *WITHOUT_INDEX,
    ],
)
def test_a_repository_runs_nothing_and_is_listed(repository, tmp_path, make):
    make(repository, program(tmp_path))
    expected = EXPECTED - {"kept.log"} if make in WITHOUT_INDEX else EXPECTED
    listing = list_tree(str(repository))
    assert set(listing.files) - {".gitignore"} == expected and not listing.without_git
    assert not (tmp_path / "owned").exists()


def test_a_partial_clone_with_a_sparse_index_runs_nothing_and_fetches_nothing(tmp_path):
    source = write_tree(tmp_path / "source", {"a/x.py": "x", "b/c/y.py": "x", "top.py": "x"})
    git(source, "init", "-q")
    git(source, "config", "uploadpack.allowFilter", "true")
    git(source, "config", "uploadpack.allowAnySHA1InWant", "true")
    git(source, "add", "-A")
    git(source, "commit", "-qm", "Add three files")
    git(tmp_path, "clone", "-q", "--filter=tree:0", "--no-checkout", f"file://{source}", "clone")
    clone = tmp_path / "clone"
    git(clone, "sparse-checkout", "init", "--cone", "--sparse-index")
    git(clone, "sparse-checkout", "set", "a")
    git(clone, "checkout", "-q")
    git(clone, "config", "remote.origin.uploadpack", program(tmp_path))
    for pack in (clone / ".git/objects/pack").iterdir():
        pack.unlink()  # `git ls-files` in the clone now runs the program
    assert listed(clone) == {"a/x.py", "top.py"} and not (tmp_path / "owned").exists()


def test_an_index_cannot_name_files_outside_the_tree(repository, tmp_path):
    write_tree(tmp_path, {"outside/x.py": "x", "repository/abc/x.py": "x", "repository/out/x.py": "x"})
    git(repository, "add", "abc/x.py", "out/x.py")
    (repository / "abc/x.py").unlink()
    (repository / "out/x.py").unlink()
    (repository / "out").rmdir()
    (repository / "out").symlink_to(tmp_path / "outside")  # git still lists out/x.py
    index = repository / ".git/index"
    content = index.read_bytes()
    (tmp_path / "x").write_text("x")
    for name in (b"../../xx", b"/tmp/x.p", b"./././xx", b"abc/x.py"):
        index.write_bytes(content.replace(b"abc/x.py", name))
        listing = list_tree(str(repository))
        assert set(listing.files) - {".gitignore"} == EXPECTED and listing.skipped["out/"] == "link"
    assert all(map(git_listing._leads_out, ("a/../b", "/etc/passwd", "..", "./a", "a//b")))
    assert not any(map(git_listing._leads_out, ("...", ".a/..b", "a/b/", "c..", ".gitignore")))


def test_the_environment_does_not_choose_another_repository(repository, tmp_path, monkeypatch):
    other = write_tree(tmp_path / "other", {"z.py": "x"})
    git(other, "init", "-q")
    git(other, "add", "-A")
    for name, value in (("GIT_DIR", ".git"), ("GIT_WORK_TREE", "."), ("GIT_INDEX_FILE", ".git/index")):
        monkeypatch.setenv(name, str(other / value))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.fsmonitor")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", program(tmp_path))
    assert listed(repository) == EXPECTED and not (tmp_path / "owned").exists()


def test_a_pipe_as_ignore_file_is_waited_for_but_not_for_ever(repository, monkeypatch):
    monkeypatch.setattr(git_listing, "SECONDS", 0.3)
    (repository / "sub").mkdir()
    os.mkfifo(repository / "sub/.gitignore")
    index = CodeIndex.build(repository)
    assert "git is missing or failed" in index.notices[0]
    assert index.statistics()["files"] == len(EXPECTED) + len([".gitignore", "debug.log", "build/b.py"])


def test_without_git_a_line_says_that_nothing_is_ignored(repository, monkeypatch, tmp_path, command):
    write_tree(repository, {"node_modules/a.js": "x", ".env": "secret", "sub/c.py": "x"})
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    listing = list_tree(str(repository))
    assert set(listing.files) - {".gitignore"} == {*EXPECTED, "debug.log", "build/b.py", "sub/c.py"}
    assert listing.skipped == {".git/": "data of a repository", ".env": "secret", "node_modules/": "vendored"}
    code, out, err = command("index", repository)
    assert code == 0 and err.count("git is missing or failed") == 1


def test_nested_repositories_and_submodules_are_listed_by_their_rules(repository, tmp_path):
    nested = write_tree(repository / "nested", {".gitignore": "*.tmp\n", "n.py": "x", "n.tmp": "x", "kept.tmp": "x"})
    git(nested, "init", "-q")
    git(nested, "add", "-f", "kept.tmp")
    write_tree(repository / "nested/deep", {"d.py": "x"})
    git(repository / "nested/deep", "init", "-q")
    source = write_tree(tmp_path / "source", {"s.py": "x", "kept.log": "x"})
    git(source, "init", "-q")
    git(source, "add", "-A")
    git(source, "commit", "-qm", "Add two files")
    git(repository, "submodule", "add", "-q", str(source), "module")
    write_tree(repository / "module", {"debug.log": "x"})
    found = {
        "nested/n.py",
        "nested/kept.tmp",
        "nested/deep/d.py",
        "module/s.py",
        "module/kept.log",
        "module/debug.log",
    }
    assert listed(repository) == EXPECTED | found | {".gitmodules"}
    assert listed(repository / "nested") == {"n.py", "kept.tmp", "deep/d.py"}


def test_a_linked_working_tree_has_the_rules_and_the_index_of_its_repository(repository, tmp_path):
    write_tree(repository, {".git/info/exclude": "secret.py\n"})
    git(repository, "worktree", "add", "-q", str(tmp_path / "linked"))
    linked = write_tree(
        tmp_path / "linked", {"secret.py": "x", "new.py": "x", "debug.log": "x", ".gitignore": "*.log\n"}
    )
    assert listed(linked) == EXPECTED


WORKTREES = (".agent/worktrees/a", "trees/b", ".trees/c")  # the last two are not ignored


@pytest.fixture
def with_worktrees(repository):
    write_tree(repository, {".gitignore": "*.log\nbuild/\n.agent/\n", "sub/c.py": "x"})
    git(repository, "add", "sub/c.py")
    git(repository, "commit", "-qm", "Add another file")
    for path in (*WORKTREES, "sub/tree", "../outside"):
        git(repository, "worktree", "add", "-q", path)
    return repository


def test_linked_worktrees_are_skipped_and_counted(with_worktrees, command):
    listing = list_tree(str(with_worktrees))
    assert set(listing.files) - {".gitignore"} == {*EXPECTED, "sub/c.py"}
    assert listing.skipped == dict.fromkeys([".trees/c/", "sub/tree/", "trees/b/"], "linked worktree")
    assert listed(with_worktrees / "sub") == {"c.py"}
    assert "linked worktree: 3" in command("index", with_worktrees)[1]


@pytest.mark.parametrize("folder", [*WORKTREES, "sub/tree", "../outside"])
def test_a_worktree_is_listed_if_it_is_the_indexed_folder(with_worktrees, folder):
    tree = with_worktrees / folder
    git(tree, "worktree", "add", "-q", "another")
    assert listed(tree) == {"a.py", "kept.log", "sub/c.py"}
    assert list_tree(str(tree)).skipped == {"another/": "linked worktree"}


def test_an_ignored_folder_of_worktrees_is_listed_if_it_is_named(with_worktrees):
    tree = with_worktrees / ".agent/worktrees"
    assert listed(tree) == {"a/a.py", "a/kept.log", "a/sub/c.py"}
    found = listed(with_worktrees, include=[".agent/worktrees/a/sub/**"])
    assert found == {*EXPECTED, "sub/c.py", ".agent/worktrees/a/sub/c.py"}


def test_submodules_in_a_worktree_are_listed(repository, tmp_path):
    source = write_tree(tmp_path / "source", {"s.py": "x"})
    git(source, "init", "-q")
    git(source, "add", "-A")
    git(source, "commit", "-qm", "Add a file")
    git(repository, "submodule", "add", "-q", str(source), "module")
    git(repository, "commit", "-qm", "Add a submodule")
    git(repository, "worktree", "add", "-q", "tree")
    git(repository / "tree", "submodule", "update", "-q", "--init")
    assert list_tree(str(repository)).skipped["tree/"] == "linked worktree"
    assert "module/s.py" in listed(repository) and "module/s.py" in listed(repository / "tree")


@pytest.mark.parametrize("name", [".git", ".bare"])
def test_the_worktrees_of_a_bare_repository_are_its_code(repository, tmp_path, name):
    project = tmp_path / "project"
    git(tmp_path, "clone", "-q", "--bare", str(repository), str(project / name))
    if name != ".git":
        write_tree(project, {".git": "gitdir: ./.bare\n"})
    for name in ("one", "two"):
        git(project, "worktree", "add", "-q", name)
    assert listed(project) == {"one/a.py", "one/kept.log", "two/a.py", "two/kept.log"}
    assert listed(project / "one") == {"a.py", "kept.log"}


def test_a_folder_of_a_repository_follows_the_rules_above_it(repository):
    write_tree(repository, {"app/a.py": "x", "app/b.log": "x", "app/sub/.gitignore": "!b.log\n", "app/sub/b.log": "x"})
    assert listed(repository / "app") == {"a.py", "sub/b.log"}


def test_an_ignored_folder_is_listed_if_it_is_named(repository):
    write_tree(
        repository, {"build/lib/c.py": "x", "build/c.log": "x", "build/.gitignore": "*.tmp\n", "build/d.tmp": "x"}
    )
    assert listed(repository / "build") == {"b.py", "lib/c.py", "c.log"}
    assert listed(repository / "build/lib") == {"c.py"}


def test_rules_beside_the_tree(repository, home):
    names = dict.fromkeys(["one.py", "two.py", "three.py"], "x")
    write_tree(repository, {".git/info/exclude": "one.py\n", **names})
    assert listed(repository) == {*EXPECTED, "two.py", "three.py"}
    write_tree(home, {".config/git/ignore": "two.py\n"})
    assert listed(repository) == {*EXPECTED, "three.py"}
    write_tree(home, {".gitconfig": "[core]\nexcludesFile = ~/mine\n", "mine": "three.py\n"})
    assert listed(repository) == {*EXPECTED, "two.py"}
    # this setting has no effect, because the repository's configuration is not read
    git(repository, "config", "core.excludesFile", str(home / ".config/git/ignore"))
    assert listed(repository) == {*EXPECTED, "two.py"}


def test_a_cache_that_cannot_be_written_is_named(repository, tmp_path, monkeypatch):
    write_tree(tmp_path, {"file": "x"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with refused("empty.git: cannot be created", "XDG_CACHE_HOME"):
        list_tree(str(repository))


NAMES = ["a", "b", "ab", "abc", "a.py", "b.py", "a.md", "x b", "é", "[a]", "a*", "foo", "#c", "!d", " e", "f ", "\\g"]
PARTS = [*NAMES, "*", "*", "**", "*.py", "*a", "**b", "a*", "b?", "?", "[ab]", "[!a]", "[a-c]*", "\\#c", "f\\ "]
MARKS = ["linguist-generated", "linguist-generated=true", "linguist-generated=false", "-linguist-generated", "text"]


@pytest.mark.slow
def test_random_trees_are_listed_as_git_does(tmp_path):
    for seed in range(40):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        folders = [folder]
        for _ in range(rng.randint(2, 8)):
            folders.append(rng.choice(folders) / rng.choice(NAMES))
        for one in folders:
            one.mkdir(parents=True, exist_ok=True)
            for name in rng.choices(NAMES, k=rng.randint(0, 5)):
                if one / name not in folders:
                    (one / name).write_text("x")
        for one in rng.sample(folders, len(folders) // 2):
            rules = [
                rng.choice(["", "", "/", "!"]) + "/".join(rng.choices(PARTS, k=rng.randint(1, 2))) for _ in range(4)
            ]
            (one / ".gitignore").write_text("\n".join(rules))
            marks = [f"{rng.choice(PARTS)} {rng.choice(MARKS)}" for _ in range(3)]
            (one / ".gitattributes").write_text("\n".join(marks))
        git(folder, "init", "-q")
        names = run_git(folder, b"", "ls-files", "-coz", "--exclude-standard").split(b"\0")[:-1]
        values = run_git(folder, b"\0".join(names), "check-attr", "-z", "--stdin", "linguist-generated").split(b"\0")
        expected = [name for name, value in zip(names, values[2::3], strict=True) if value not in (b"set", b"true")]
        assert sorted(map(os.fsencode, list_tree(str(folder)).files)) == sorted(expected), seed
        below = os.fsencode(rng.choice(folders).relative_to(folder)) + b"/"
        inside = sorted(name.removeprefix(below) for name in expected if name.startswith(below))
        if inside:
            assert sorted(map(os.fsencode, list_tree(str(folder / os.fsdecode(below))).files)) == inside, seed


def run_git(folder, given: bytes, *words) -> bytes:
    return subprocess.run(["git", *words], cwd=folder, input=given, capture_output=True, check=True).stdout


def reasons(index):
    return index.skipped()


def test_no_reason_outlives_its_cause(tmp_path):
    tree = write_tree(
        tmp_path / "tree", {"env/pyvenv.cfg": "", "env/a.py": "in_env = 1\n", "build/b.py": "built = 1\n"}
    )
    (tree / ".gitignore").write_text("build/\n")
    index = CodeIndex.build(tree)
    assert reasons(index) == {"env/": "vendored"}
    write_tree(tree, {".gitattributes": "*.ts linguist-generated\n", "c.ts": "c_ts\n"})
    assert index.update() is True and reasons(index) == {"env/": "vendored", "c.ts": "generated"}
    assert "c.ts" in listed(tree, include=["*.ts"])
    (tree / ".gitattributes").unlink()
    (tree / "env/pyvenv.cfg").unlink()
    (tree / "build/b.py").unlink()
    (tree / "build").rmdir()
    (tree / "build").write_text("built = 1\n")
    assert index.update() is True and reasons(index) == {} and index.update() is False
    assert index.search("in_env")[0].path == "env/a.py" and index.search("built")[0].path == "build"
    (tree / "build").unlink()
    write_tree(tree, {"build/b.py": "built = 1\n", "env/pyvenv.cfg": ""})
    assert index.update() is True and reasons(index) == {"env/": "vendored"}
    assert not {"env/a.py", "build/b.py"} & {result.path for result in index.search("in_env built")}


def test_data_of_a_repository_stays_out_even_if_it_is_included(tmp_path):
    tree = write_tree(tmp_path / "tree", {".git/config": "[remote]\nurl = https://me:token@host\n", "a.py": "x"})
    write_tree(tree, {"sub/.git": "gitdir: /home/me/x\n", ".hg/hgrc": "[paths]\n"})
    git(tree, "init", "-q", "--bare", "mirror.git")
    for include in ([".git/**", "sub/**", "*.git", ".hg/**", "mirror.git/**"], []):
        assert listed(tree, include=include) == {"a.py"}


def test_without_git_linked_worktrees_are_skipped_too(with_worktrees, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    skipped = list_tree(str(with_worktrees)).skipped
    assert {path for path, why in skipped.items() if why == "linked worktree"} == {
        f"{path}/" for path in (*WORKTREES, "sub/tree")
    }
