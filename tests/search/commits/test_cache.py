"""All indexes of a repository share what was parsed of its commits."""

import multiprocessing
import os
import signal
import sqlite3
import time

import pytest
from git_repositories import grown

from soft_trainer.search import CodeIndex
from soft_trainer.search.commits import cache, reading
from soft_trainer.search.index import store

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def parsed(monkeypatch):
    """Returns the list of the commits that are parsed from now on."""
    commits = []
    read = reading.ChangeReader.read
    monkeypatch.setattr(
        reading.ChangeReader, "read", lambda self, commit: (commits.append(commit), read(self, commit))[1]
    )
    return commits


@pytest.fixture
def repository(tmp_path):
    """Returns a repository with 21 commits and two working trees, `tree` and `linked`."""
    made = grown(tmp_path / "tree")
    made.git.checkout("HEAD", strategy=2)
    made.git.add_worktree("linked", str(tmp_path / "linked"))
    return made


def table(index):
    """Returns the commits of an index without their numbers, which depend on the order of reading."""
    columns = "id, date, subject, functions"
    return index.database.execute(f"SELECT {columns} FROM commits ORDER BY number").fetchall()


def cached():
    (path,) = store.commit_caches().glob("*.sqlite")
    with sqlite3.connect(path) as database:
        return {commit for (commit,) in database.execute("SELECT id FROM commits")}


def test_a_second_worktree_and_a_switch_parse_nothing(repository, parsed, tmp_path):
    first = CodeIndex.build(repository.path)
    assert len(parsed) == 21 == len(cached())
    assert table(CodeIndex.build(tmp_path / "linked")) == table(first)
    expected = table(first)
    old = list(repository.git.walk(repository.git.head.target))[8].id
    for target in (old, repository.git.head.target):
        repository.git.set_head(target)
        first.update()
    assert len(parsed) == 21 and table(first) == expected
    assert (store.commit_caches().stat().st_mode & 0o777) == 0o700


def test_a_commit_that_the_repository_lost_leaves_the_cache(repository):
    index = CodeIndex.build(repository.path)
    git = repository.git
    secret = git.head.target
    git.references["refs/heads/main"].set_target(git.head.peel().parent_ids[0])
    repository.commit("Make the sum larger without the secret", {"src/f0.py": "def f0(value):\n    return 7\n"})
    index.update()
    assert str(secret) in cached()  # `git reflog` still has it
    name = str(secret)
    (repository.path / ".git/objects" / name[:2] / name[2:]).unlink()
    repository.commit("Make the sum larger once more", {"src/f0.py": "def f0(value):\n    return 8\n"})
    index.update()
    assert name not in cached() and len(cached()) == 22


def test_what_a_clone_lacks_is_not_kept(repository, tmp_path, parsed):
    commits = [str(commit.id) for commit in repository.git.walk(repository.git.head.target)]
    blob = repository.git.revparse_single("HEAD~3:src/f2.py").id
    file = repository.path / ".git/objects" / str(blob)[:2] / str(blob)[2:]
    content = file.read_bytes()
    file.chmod(0o600)
    file.unlink()
    (repository.path / ".git/shallow").write_text(f"{commits[10]}\n")
    index = CodeIndex.build(repository.path)
    lacking = set(commits[:11]) - cached()
    assert commits[10] in lacking and len(lacking) > 1
    file.write_bytes(content)
    (repository.path / ".git/shallow").unlink()
    parsed.clear()
    fresh = CodeIndex.build(tmp_path / "linked")
    index = CodeIndex.build(repository.path)
    assert set(parsed) == lacking | set(commits[11:]) and len(cached()) == 21
    assert len(table(fresh)) == 21 and table(index) == table(fresh)


@pytest.mark.parametrize("broken", ["damaged", "format", "a folder", "no cache"])
def test_a_cache_that_cannot_be_used_costs_nothing_but_time(repository, parsed, tmp_path, broken):
    CodeIndex.build(repository.path)
    (path,) = store.commit_caches().glob("*.sqlite")
    if broken == "damaged":
        path.write_bytes(b"x" * 5000)
    elif broken == "format":
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA user_version = 1")
    else:
        path.unlink()
        path.mkdir() if broken == "a folder" else (path.parent.rmdir(), path.parent.write_text(""))
    assert len(table(CodeIndex.build(tmp_path / "linked"))) == 21 and len(parsed) == 42
    if broken in ("damaged", "format"):
        assert len(cached()) == 21


def test_another_process_is_waited_for_but_not_for_ever(repository, parsed, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "WAIT_SECONDS", 0)
    CodeIndex.build(repository.path)
    repository.commit("Make the sum larger once more", {"src/f0.py": "def f0(value):\n    return 8\n"})
    (path,) = store.commit_caches().glob("*.sqlite")
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        index = CodeIndex.build(repository.path)
        assert index.statistics()["commits"]["read"] == 22 and len(cached()) == 21


def _index(folder, slow, counts):
    read = reading.ChangeReader.read
    counted = []

    def slowly(self, commit):
        counted.append(commit)
        time.sleep(slow)
        return read(self, commit)

    reading.ChangeReader.read = slowly
    reading._AT_ONCE = 3
    CodeIndex.build(folder)
    counts.put(len(counted))


@pytest.mark.slow
def test_two_worktrees_at_once_parse_each_commit_once(repository, tmp_path):
    counts = FORK.SimpleQueue()
    folders = [repository.path, tmp_path / "linked"]
    processes = [FORK.Process(target=_index, args=(folder, 0.05, counts)) for folder in folders]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert counts.get() + counts.get() == 21
    both = [CodeIndex.open(store.find_index_dir(folder)) for folder in folders]
    assert len(cached()) == 21 == len(table(both[0])) and table(both[0]) == table(both[1])


@pytest.mark.slow
def test_a_kill_in_the_middle_loses_little(repository, tmp_path, parsed):
    process = FORK.Process(target=_index, args=(repository.path, 0.2, FORK.SimpleQueue()))
    process.start()
    while not list(store.commit_caches().glob("*.sqlite")) or len(cached()) < 6:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    kept = len(cached())
    assert 6 <= kept < 21
    indexes = [CodeIndex.build(folder) for folder in (tmp_path / "linked", repository.path)]
    assert len(parsed) == 21 - kept and table(indexes[0]) == table(indexes[1]) and len(table(indexes[0])) == 21
