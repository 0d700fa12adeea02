"""A text of several lines is searched by its first line, its opening, the whole text, and the files it mentions."""

import time
from pathlib import Path

import pytest
from trees import write_tree

from soft_trainer.search import CodeIndex, Search
from soft_trainer.search.index.words import stem
from soft_trainer.search.ranking.ranking import MAX_WORDS, parse_query
from soft_trainer.search.ranking.texts import failure_first, named_files, parse_text

SEND = "def send(request):\n    return adapter(request)\n"
FILES = {
    "src/requests/models.py": "class Response:\n    def iter_content(self):\n        return self.raw.stream()\n",
    "src/requests/adapters.py": SEND,
    "tools/models.py": "def build():\n    return 1\n",
    "tests/test_models.py": "def test_iter_content(response):\n    assert response.raw.stream().iter_content\n",
} | {f"pkg{number}/setup.py": f"NUMBER = {number}\n" for number in range(4)}


@pytest.fixture
def index(tmp_path):
    return CodeIndex.build(write_tree(tmp_path / "tree", FILES))


@pytest.mark.parametrize(
    ("text", "queries"),
    [
        ("parse a date", ["parse a date"]),
        ("parse a date\n", ["parse a date\n"]),
        ("Title\nBody\n of it\n\nMore", ["Title", "Title\nBody\n of it", "Title\nBody\n of it\n\nMore"]),
        ("Title\r\n\r\nBody\r\n\r\nMore", ["Title\r", "Title\r\nBody", "Title\r\n\r\nBody\r\n\r\nMore"]),
    ],
)
def test_a_text_makes_three_queries(text, queries):
    assert parse_text(text) == [parse_query(query) for query in queries]


def test_a_text_is_read_up_to_a_thousand_different_words():
    words = [f"w{chr(97 + number % 26)}{number}" for number in range(2 * MAX_WORDS)]
    terms = parse_query(" ".join(["again", *words[: MAX_WORDS - 1], "again"])).terms
    assert stem("again") in terms and words[MAX_WORDS - 2] in terms
    assert words[MAX_WORDS - 1] not in parse_query(" ".join(["again", *words])).terms


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ('File "/usr/lib/site-packages/requests/models.py", line 2, in iter', ["src/requests/models.py"]),
        ("models.py", ["src/requests/models.py", "tools/models.py"]),
        ("tools/models.py and then adapters.py:1: error", ["src/requests/adapters.py", "tools/models.py"]),
        (r"C:\lib\requests\models.py", ["src/requests/models.py"]),
        ("setup.py, pkg2/setup.py.", ["pkg2/setup.py"]),  # four files are called `setup.py`
        ("nothing/of.this", []),
    ],
)
def test_files_that_a_text_names(index, text, paths):
    with index.snapshot() as snapshot:
        known = snapshot.segments.paths()
        assert [known[number] for number in named_files(text, snapshot.segments)] == paths


@pytest.mark.parametrize(
    "text", ["x\n" + "a" * 100_000, "x\n" + "a/" * 50_000, ".".join(["Parser"] * 50_000), "in " * 50_000]
)
def test_long_texts_without_spaces_take_little_time(index, text):
    started = time.process_time()
    index.search(text)
    assert time.process_time() - started < 3


TRACEBACK = """Crash at night
It stops while it is reading.

Traceback (most recent call last):
  File "/home/me/run.py", line 1, in <module>
    main()
  File "/usr/lib/python3/site-packages/requests/models.py", line 3, in reading
    night()
"""


def test_a_file_in_a_traceback_is_found(index, tmp_path):
    night = {"night.py": "def crash():\n    return 'the night stops'\n"}
    other = CodeIndex.build(write_tree(tmp_path / "other", night))
    both = Search([other, index])
    assert "tree/src/requests/models.py" in [result.path for result in both.search(TRACEBACK)[:2]]
    assert both.search(TRACEBACK, path="*/night.py")[0].path == "other/night.py"
    assert {result.path for result in both.search(TRACEBACK, path="tree/src/**")} <= {
        "tree/src/requests/models.py",
        "tree/src/requests/adapters.py",
    }


def test_tests_come_late_unless_the_first_line_speaks_of_tests(index):
    text = "stream of iter content is cut\n\ntest_iter_content and response.raw.stream fail: assert iter_content"
    assert index.search(text)[0].path == "src/requests/models.py"
    assert index.search(f"A test of {text}")[0].path == "tests/test_models.py"


def test_pages_come_after_code(tmp_path):
    files = {"src/a/b.py": "def cut(stream):\n    return stream.content\n", "other.py": "def f():\n    return 1\n"}
    files["docs/stream.md"] = "# Stream\n\nThe stream of iter content is cut: read the content again, and again.\n"
    index = CodeIndex.build(write_tree(tmp_path / "tree", files))
    text = "stream of iter content is cut\n\nIt is cut: I read the content of the stream again, and again.\n"
    assert [result.path for result in index.search(text)] == ["src/a/b.py", "docs/stream.md"]


def test_a_text_without_a_known_word_finds_nothing(index):
    assert index.search("zzzqqq\n\nwvvq xqzv") == []
    assert index.search("\n\n") == []


# What the programs print for a failing test or for code that does not compile, and the line that says what is wrong.
FAILURES = {
    "cargo": "thread 'tests::cents' (6452) panicked at src/lib.rs:12:9:",
    "cargo_compile": "error[E0432]: unresolved import `crate::taxes`",
    "go": "--- FAIL: TestParsePrice (0.00s)",
    "go_compile": "./bad_test.go:6:5: undefined: AddTax",
    "go_verbose": "--- FAIL: TestParsePrice (0.00s)",
    "gradle": "java.lang.AssertionError at PricesTest.java:10",
    "gradle_compile": ":compileJava/home/me/shop/src/main/java/shop/Prices.java:6: error: cannot find symbol",
    "jest": "● parsePrice › keeps cents",
    "maven": "java.lang.AssertionError: expected:<29> but was:<28>",
    "maven_compile": "[ERROR] /home/me/shop/src/main/java/shop/Prices.java:[6,74] cannot find symbol",
    "pytest": "E       ValueError: could not convert string to float: '1,250.00'",
    "pytest_import": "ImportError while importing test module '/home/me/shop/tests/test_taxes.py'.",
    "rspec": 'Failure/Error: expect(parse_price("$0.29")).to eq(29)',
    "tsc": "src/prices.ts(1,24): error TS2307: Cannot find module './taxes' or its corresponding type declarations.",
    "tsc_pretty": (
        "src/prices.ts:1:24 - error TS2307: Cannot find module './taxes' or its corresponding type declarations."
    ),
    "unittest": "ERROR: test_thousands (test_prices.PriceTest.test_thousands)",
    "vitest": "AssertionError: expected 28 to be 29 // Object.is equality",
}
UNKNOWN_WITHOUT_COMMAND = ("gradle", "gradle_compile")  # old versions begin with the name of a task


@pytest.mark.parametrize(("program", "error"), FAILURES.items())
def test_a_pasted_failure_is_searched_from_its_error_on(program, error):
    output = (Path(__file__).parent / "failures" / f"{program}.txt").read_text(encoding="utf-8")
    turned = failure_first(output)
    assert turned.strip().splitlines()[0] == error
    assert output.splitlines()[0] not in turned  # the command
    assert failure_first(output.removeprefix("$ ")) == turned
    without_command = output.partition("\n")[2]
    if program not in UNKNOWN_WITHOUT_COMMAND:
        assert failure_first(without_command).strip().splitlines()[0] == error


ERROR = "\nE   ValueError: no\n\n./a.go:1:2: undefined: b\n"


@pytest.mark.parametrize(
    "title",
    [
        "Parser fails on dates",
        "go test fails with an empty map",
        "pytest crashes",
        "make clean does nothing",
        "python -m pytest ignores conftest.py",
        "[Bug] wrong dates",
        "ValueError: no",
        "Running `pytest tests` prints nothing",
        "# Crash",
        "FAILED to parse",
    ],
)
def test_an_issue_that_quotes_a_failure_begins_with_its_title(title):
    assert failure_first(title + ERROR) == title + ERROR


@pytest.mark.parametrize("text", ["", "$ go test ./...", "$ go test ./...\nok  \tshop\t0.01s\n", "=== a\nb"])
def test_a_text_without_an_error_stays_as_it_is(text):
    assert failure_first(text) == text


def test_a_traceback_is_searched_without_its_heading():
    heading, frames = TRACEBACK.split("\n\n")[1].split("\n", 1)
    assert failure_first(f"{heading}\n{frames}").strip() == frames.strip()
    assert failure_first(f"$ python run.py\n{heading}\n{frames}").strip() == frames.strip()
    assert failure_first(TRACEBACK) == TRACEBACK
