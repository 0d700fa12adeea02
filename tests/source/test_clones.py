"""Shallow and partial clones lack objects. They are read as far as possible, and nothing is fetched."""

import os
import shutil
import subprocess

import pytest
from git_repositories import grown
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.mining.history import history_state, mine_history
from soft_trainer.search import CodeIndex

ALONE = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("git"), reason="needs git")]


def git(*words, cwd):
    subprocess.run(["git", *map(str, words)], cwd=cwd, check=True, capture_output=True, env=os.environ | ALONE)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Returns a function that clones a repository with these options, and deletes the original unless it is kept."""

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def clone(*options, kept=False):
        origin = grown(tmp_path / "origin", 40)
        files = {"src/new.py": "def brand_new(value):\n    return value\n"}
        origin.commit("Add a brand new function for values", files)
        git("config", "uploadpack.allowFilter", "true", cwd=origin.path)
        git("clone", "-q", *options, f"file://{origin.path}", tmp_path / "clone", cwd=tmp_path)
        if not kept:
            shutil.rmtree(origin.path)
        return tmp_path / "clone"

    return clone


CLONES = [["--filter=blob:none"], ["--filter=tree:0"], ["--depth", "1"], ["--depth", "5", "--filter=blob:none"]]


@pytest.mark.parametrize("options", CLONES)
def test_a_clone_without_its_past_is_searched_and_has_too_few_commits_to_mine(clone, options, capsys):
    folder = clone(*options)
    assert run_command(["index", str(folder)]) in (0, None)
    err = capsys.readouterr().err
    assert ("objects are missing" in err) == (options[-1] != "1")
    assert run_command(["search", "--folder", str(folder), "brand new"]) == 0
    assert capsys.readouterr().out.startswith("src/new.py:1  brand_new")
    with refused("commits change python functions"):
        mine_history(folder, "python", num_workers=1)
    err = capsys.readouterr().err
    assert ("`git fetch --refetch --no-filter`" in err) == (options[-1] != "1")
    assert ("`git fetch --unshallow`" in err) == ("--depth" in options)


def test_a_partial_clone_gives_the_rest_once_it_has_been_fetched(clone, capsys):
    folder = clone("--filter=blob:none", kept=True)
    index = CodeIndex.build(folder)
    assert index.statistics()["commits"]["kept"] < 3
    before = history_state(folder)
    git("fetch", "-q", "--refetch", "--no-filter", cwd=folder)
    assert history_state(folder) != before
    capsys.readouterr()
    mined = mine_history(folder, "python", num_workers=1)
    assert "an object" not in capsys.readouterr().err and mined.commits["an object is missing"] == 0
    CodeIndex.build(folder, history=False)
    assert CodeIndex.build(folder, history=True).statistics()["commits"]["kept"] > 40


def test_a_shallow_clone_is_mined_once_it_has_been_deepened(clone):
    folder = clone("--depth", "1", kept=True)
    before = history_state(folder)
    git("fetch", "-q", "--unshallow", cwd=folder)
    assert history_state(folder) != before
    assert len(mine_history(folder, "python", num_workers=1).rows["codebase"]) == 5
