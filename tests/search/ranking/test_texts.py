"""A text of several lines is searched by its first line, its opening, the whole text, and the files it mentions."""

import time

import pytest
from trees import write_tree

from soft_trainer.search import CodeIndex, Search
from soft_trainer.search.index.words import stem
from soft_trainer.search.ranking.ranking import MAX_WORDS, parse_query
from soft_trainer.search.ranking.texts import named_files, parse_text

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


@pytest.mark.parametrize("text", ["x\n" + "a" * 100_000, "x\n" + "a/" * 50_000, ".".join(["Parser"] * 50_000)])
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


def test_a_text_without_a_known_word_finds_nothing(index):
    assert index.search("zzzqqq\n\nwvvq xqzv") == []
    assert index.search("\n\n") == []
