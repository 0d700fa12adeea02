"""The rows that train `base` exclude the rows of evaluation sets (`benchmarks/base_encoder.py`)."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("base_encoder")


NAMES = [
    ("npm/jquery", "jquery"),
    ("ruby-mongo", "mongo"),
    ("python-git", "git"),
    ("golang-github-labstack-echo", "echo"),
    ("pallets/click", "click"),
    ("sentence_transformers", "sentence-transformers"),
]


@pytest.mark.parametrize("name, plain", NAMES)
def test_a_package_is_known_under_its_names_in_other_places(script, name, plain):
    assert script.plain_name(name) == plain


def row_of(repo: str, query: str, code: str, **others) -> dict:
    row = {"repo": repo, "url": f"deb:{repo}/file#L1", "path": "file"}
    return {**row, "docstring_tokens": query.split(), "code_tokens": code.split(), **others}


BODY = " ".join(f"name_{number} = {number}" for number in range(30))
ROWS = [
    (row_of("kept", "Sort a list", "def sort"), ""),
    (row_of("ruby-rack", "Serve", "def serve"), "measured package"),
    (row_of("bs4", "Parse a page", "def parse"), "measured package"),
    (row_of("kept", "Call", "def call", path="src/github.com/rivo/tview/box.go"), "measured package"),
    (row_of("kept", "Draw", "def draw", url="https://github.com/rivo/tview/blob/main/box.go#L1"), "measured package"),
    (row_of("kept", "Log in", "def login", url="/tmp/scratch/lib/rack/login.rb#L1"), ""),
    (row_of("kept", "REMOVE A FILE", "def other"), "query of a test set"),
    (row_of("kept", "Delete", "def remove"), "function of a test set"),
    (row_of("kept", "Assign", f"def f {BODY}"), ""),
    (row_of("kept", "Assign again", f"def g {BODY}"), "near-duplicate"),
]


def test_measured_rows_are_excluded_and_near_duplicates_count_once(script):
    tests = SimpleNamespace(queries={"remove a file"}, codes=[["def", "remove"]])
    names = {"rack", "beautifulsoup4", "rivo/tview"}
    left, dropped = script.kept([row for row, _ in ROWS], names, tests)
    assert left == [row for row, reason in ROWS if not reason]
    assert dict(dropped) == {
        "measured package": 4,
        "query of a test set": 1,
        "function of a test set": 1,
        "near-duplicate": 1,
    }
