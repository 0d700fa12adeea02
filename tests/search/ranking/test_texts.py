"""A text of several lines is searched by its first line, its opening, the whole text, and the files it mentions."""

import time
from pathlib import Path

import pytest
from trees import write_tree

from soft_trainer.search import CodeIndex
from soft_trainer.search.index.words import stem
from soft_trainer.search.ranking.ranking import MAX_WORDS, parse_query
from soft_trainer.search.ranking.texts import failure_first, is_prose, named_files, parse_text, plain

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
        known = snapshot.segments.paths
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


def test_a_file_in_a_traceback_is_found(index):
    write_tree(Path(index.folder), {"night.py": "def crash():\n    return 'the night stops'\n"})
    index.update()
    assert "src/requests/models.py" in [result.path for result in index.search(TRACEBACK)[:2]]
    assert index.search(TRACEBACK, path="night.py")[0].path == "night.py"
    found = {result.path for result in index.search(TRACEBACK, path="src/**")}
    assert found <= {"src/requests/models.py", "src/requests/adapters.py"}


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


# What the programs print for a failing test or for code that does not compile, and the line that says what is wrong.
FAILURES = {
    "cargo": "thread 'tests::cents' (6452) panicked at src/lib.rs:12:9:",
    "cargo_compile": "error[E0432]: unresolved import `crate::taxes`",
    "go": "--- FAIL: TestParsePrice (0.00s)",
    "go_compile": "./bad_test.go:6:5: undefined: AddTax",
    "go_verbose": "--- FAIL: TestParsePrice (0.00s)",
    "gradle": "java.lang.AssertionError at PricesTest.java:10",
    "gradle_compile": ":compileJava/home/me/shop/src/main/java/shop/Prices.java:6: error: cannot find symbol",
    "jest": "RangeError: not a price: $1,250.00",
    "maven": "java.lang.AssertionError: expected:<29> but was:<28>",
    "maven_compile": "[ERROR] /home/me/shop/src/main/java/shop/Prices.java:[6,74] cannot find symbol",
    "pytest_native": "ValueError: could not convert string to float: '1,250.00'",
    "pytest_short": "E   ValueError: could not convert string to float: '1,250.00'",
    "pytest": "E       ValueError: could not convert string to float: '1,250.00'",
    "phpunit": "InvalidArgumentException: not a price: $1,250.00",
    "pytest_import": "ImportError while importing test module '/home/me/shop/tests/test_taxes.py'.",
    "rspec": 'Failure/Error: expect(parse_price("$0.29")).to eq(29)',
    "tsc": "src/prices.ts(1,24): error TS2307: Cannot find module './taxes' or its corresponding type declarations.",
    "tsc_pretty": (
        "src/prices.ts:1:24 - error TS2307: Cannot find module './taxes' or its corresponding type declarations."
    ),
    "unittest": "ERROR: test_thousands (test_prices.PriceTest.test_thousands)",
    "vitest": "AssertionError: expected 28 to be 29 // Object.is equality",
}
SHOP = {
    "shop/prices.py": """
        def parse_price(text):
            # dollars
            return int(float(text.lstrip("$")) * 100)


        def total(prices):
            return sum(parse_price(price) for price in prices)
        """,
    "tests/test_prices.py": """
        from shop.prices import parse_price

        def test_thousands():
            assert total(["$1,250.00"]) == 125000


        def test_cents():
            assert parse_price("$0.29") == 29
        """,
    "src/prices.js": "function parsePrice(text) {\n  if (!text.match(/[0-9]/))\n    throw new Error('no price');\n}\n",
    "prices.go": "package shop\n\nfunc ParsePrice(text string) (int, error) {\n\treturn 0, nil\n}\n",
    "prices_test.go": "package shop\n\nfunc TestParsePrice(t *testing.T) {\n\tgot, _ := ParsePrice(29)\n"
    "\tcheck(t, got)\n}\n\nfunc check(t *testing.T, got int) {\n\tt.Errorf(got)\n}\n",
    "src/Prices.php": "<?php\nclass Prices\n{\n  static function parse($text)\n  {\n    if (!is_numeric($text)) {\n"
    "      throw new E($text);\n    }\n    return (int) $text;\n  }\n\n"
    "  static function total($all)\n  {\n    return sum($all);\n  }\n}\n",
    "lib/prices.rb": "def parse_price(text)\n  # dollars\n  (Float(text) * 100).to_i\nend\n",
    "src/prices.ts": "import { tax } from './taxes'\n\nexport function price(text: string): string {\n"
    "  return 100 * text\n}\n",
    "src/main/java/shop/Prices.java": "package shop;\n\nclass Prices {\n  static int net(String text) {\n"
    "    // dollars\n    return Taxes.net(text);\n  }\n}\n",
}
# The definition in which each program's first error arose. A test that compares two values names what it calls.
FAILED_IN = {
    "pytest": "shop/prices.py parse_price",
    "pytest_short": "shop/prices.py parse_price",
    "pytest_native": "shop/prices.py parse_price",
    "unittest": "shop/prices.py parse_price",
    "jest": "src/prices.js parsePrice",
    "vitest": "src/prices.js parsePrice",
    "go": "prices.go ParsePrice",
    "phpunit": "src/Prices.php Prices.parse",
    "rspec": "lib/prices.rb parse_price",
    "tsc": "src/prices.ts price",
    "tsc_pretty": "src/prices.ts price",
    "maven_compile": "src/main/java/shop/Prices.java Prices.net",
    "gradle_compile": "src/main/java/shop/Prices.java Prices.net",
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    return CodeIndex.build(write_tree(folder / "tree", SHOP), folder / "index", model="none")


@pytest.mark.parametrize(("program", "error"), FAILURES.items())
def test_a_pasted_failure_is_searched_from_its_error_on_and_finds_where_it_arose(shop, program, error):
    output = (Path(__file__).parent / "failures" / f"{program}.txt").read_text(encoding="utf-8")
    turned = failure_first(plain(output))
    assert turned.splitlines()[0].strip() == error
    without_command = output.partition("\n")[2]
    assert failure_first(plain(without_command)).splitlines()[0].strip() == error
    first = shop.search(output)[0]
    assert f"{first.path} {first.name}" == FAILED_IN.get(program, f"{first.path} {first.name}")


GO_CACHE = """panic: no handler [recovered]

goroutine 7 [running]:
github.com/gin-gonic/gin.(*Context).Next(...)
\t/root/go/pkg/mod/github.com/gin-gonic/gin@v1.9.1/context.go:9
main.main()
\t/home/me/app/main.go:9 +0x1d
"""
BROWSER = "TypeError: no route\n    at load (http://localhost:5173/src/routes/[id]/+page.svelte:2:5)\n"
SCOPED = (
    "Error: no\n    at parse (/app/node_modules/.pnpm/@acme+core@1.0.2/node_modules/@acme/core/lib/parse.js:2:9)\n"
)
OVERLOADS = (
    'Traceback (most recent call last):\n  File "/app/main.py", line 2, in <module>\n    run()\n'
    '  File "/venv/site-packages/shop/core.py", line 3, in invoke\n    raise E\nE: no\n'
)
ODD_TREE = {
    "context.go": "package gin\n\ntype Context struct {\n\tNext int\n}\n\n"
    "func (c *Context) Abort() {\n\tc.index = 1\n}\n\nfunc (c *Context) Next() {\n\tc.index++\n}\n",
    "src/routes/[id]/+page.svelte": "<script>\n  const load = () => fetch('/')\n</script>\n",
    "packages/@acme/core/lib/parse.js": "function parse(text) {\n  throw new Error('no')\n}\n",
    "packages/@acme/more/lib/parse.js": "function parse(text) {\n  return text.trim()\n}\n",
    "shop/core.py": "@overload\ndef invoke(name: str) -> str: ...\n\n@overload\ndef invoke(name: int) -> int: ...\n\n"
    "\n\ndef invoke(name):\n    check(name)\n    return name\n",
    "shop/keys.py": 'MODE = os.environ.get("SHOP_MODE")\n\n\n\ndef mode_of(shop):\n    """The mode of the shop."""\n',
    "tests/test_keys.py": 'def test_mode(shop):\n    assert "SHOP_MODE" in shop.mode\n',
    "shop/options.py": 'def options(parser):\n    parser.add("--shop-mode")\n',
    "shop/a.py": "def shop_mode_skip(shop):\n    # --shop-mode of the shop; --shop-mode\n    return shop.mode\n",
    "docs/keys.md": "SHOP_MODE is the mode of the shop; requires-cash restores it\n",
    "pyproject.toml": '[tool.shop]\nrequires-cash = "no"\n',
} | {f"{folder}setup.py": "NAME = 1\n" for folder in ("", "a/", "b/", "c/")}


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    return CodeIndex.build(write_tree(folder / "tree", ODD_TREE), folder / "index", model="none")


@pytest.mark.parametrize(
    ("query", "path", "line"),
    [
        (GO_CACHE, "context.go", 11),
        (BROWSER, "src/routes/[id]/+page.svelte", 1),
        (SCOPED, "packages/@acme/core/lib/parse.js", 1),
        (OVERLOADS, "shop/core.py", 9),
        ("(*Context).Next", "context.go", 11),
        ("packages/@acme/more/lib/parse.js", "packages/@acme/more/lib/parse.js", 1),
        ("core/lib/parse.js:2", "packages/@acme/core/lib/parse.js", 1),
        ("context.go:8", "context.go", 7),
        ("/home/me/app/shop/core.py:9", "shop/core.py", 9),
        ("setup.py:1", "setup.py", 1),
        ("./setup.py", "setup.py", 1),
        ("TREE/setup.py", "setup.py", 1),
        ("SHOP_MODE", "shop/keys.py", 1),
        ("requires-cash", "pyproject.toml", 1),
        ("--requires-cash", "pyproject.toml", 1),
        ("--shop-mode", "shop/options.py", 2),
    ],
)
def test_frames_paths_and_keys_find_their_chunk(odd, query, path, line):
    first = odd.search(query.replace("TREE", odd.folder))[0]
    assert first.path == path and first.start_line <= line <= first.end_line and not first.weak


@pytest.mark.parametrize(
    ("query", "path", "notice"),
    [
        ("requires-chas invokee", "pyproject.toml", ""),  # a part of a word is in the index
        (
            "invokke contxet",
            "context.go",
            "no word of the query is in the index; searched for words like invoke, context",
        ),
        (  # the stem of `restore` has another stem
            "restorre",
            "docs/keys.md",
            "no word of the query is in the index; searched for words like restores",
        ),
        ("xyzzy qwrtp", None, "no word of the query is in the index"),
    ],
)
def test_misspelt_words_are_replaced_by_the_nearest(odd, query, path, notice):
    odd.notices.clear()
    results = odd.search(query)
    assert [result.path for result in results][:1] == [path][: len(results[:1])]
    assert (results or path is None) and odd.notices == [notice] * bool(notice)


ERROR = "\nIt does this when I run it on my own files:\n\nE   ValueError: no\n\n./a.go:1:2: undefined: b\n"


@pytest.mark.parametrize(
    "title",
    [
        "Parser fails on dates",
        "go test fails with an empty map",
        "pytest crashes",
        "make clean does nothing",
        "python -m pytest ignores conftest.py",
        "[Bug] wrong dates",
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
    assert failure_first(f"$ python run.py\n{heading}\n{frames}").startswith(frames.strip())
    assert failure_first(TRACEBACK) == TRACEBACK


PYTHON = """Traceback (most recent call last):
  File "/home/me/run.py", line 3, in <module>
    total(["1", "x"])
    ~~~~~^^^^^^^^^^^^
  File "/usr/lib/python3/site-packages/shop/prices.py", line 8, in total
    return sum(map(cents, lines))
  File "/usr/lib/python3/site-packages/shop/prices.py", line 4, in cents
    return json.loads(text)
  File "/usr/lib/python3.12/json/__init__.py", line 346, in loads
    return _default_decoder.decode(s)
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
"""
# What the programs print, and the first frame in the tree below.
TRACES = {
    "python": (PYTHON, "src/shop/prices.py", "cents"),
    "windows": (PYTHON.replace("/", "\\").replace("\n", "\r\n"), "src/shop/prices.py", "cents"),
    "moved": (PYTHON.replace("line 4,", "line 400,"), "src/shop/prices.py", "cents"),
    "java": (
        """Exception in thread "main" java.lang.IllegalStateException: no total
\tat org.acme.shop.Main.main(Main.java:9)
\tat java.base/java.lang.Thread.run(Thread.java:840)
Caused by: java.lang.NumberFormatException: For input string: "x"
\tat java.base/java.lang.Integer.parseInt(Integer.java:652)
\tat org.acme.util.Text$Line.lambda$cents$0(Text.java:5)
\t... 1 more
""",
        "src/main/java/org/acme/util/Text.java",
        "Text.Line.cents",
    ),
    "node": (
        """/home/me/shop/lib/prices.js:3
    throw new TypeError("no price");
    ^

TypeError: no price
    at cents (/home/me/shop/lib/prices.js:3:11)
    at Array.map (<anonymous>)
    at Object.<anonymous> (file:///home/me/shop/index.js:2:9)
    at Module._compile (node:internal/modules/cjs/loader:1105:14)
    at Module._extensions..js (node:internal/modules/cjs/loader:1159:10)
    at Module.load (node:internal/modules/cjs/loader:981:32)
    at node:internal/main/run_main_module:17:47
""",
        "lib/prices.js",
        "cents",
    ),
    "go": (
        """panic: runtime error: index out of range [1] with length 1

goroutine 1 [running]:
acme.org/shop/prices.(*Line).Cents(...)
\t/home/me/shop/prices/line.go:60
main.main()
\t/home/me/shop/main.go:9 +0x1d
exit status 2
""",
        "prices/line.go",
        "Line.Cents",
    ),
    "rust": (
        """thread 'main' (58) panicked at library/core/src/result.rs:2:25:
called `Result::unwrap()` on an `Err` value: ParseIntError { kind: InvalidDigit }
stack backtrace:
   0: core::result::unwrap_failed
             at /rustc/59807616e1/library/core/src/result.rs:1867:5
   1: shop::amounts::cents
             at ./src/amounts.rs:2:25
   2: shop::main
             at ./src/main.rs:4:5
""",
        "src/amounts.rs",
        "cents",
    ),
    "ruby": (
        """/usr/lib/ruby/3.1.0/uri/common.rb:3:in `decode': invalid (ArgumentError)
\tfrom lib/shop/amounts.rb:3:in `cents'
\tfrom app.rb:3:in `<main>'
""",
        "lib/shop/amounts.rb",
        "Shop.cents",
    ),
    "php": (
        """PHP Fatal error:  Uncaught InvalidArgumentException: no price in /usr/share/php/Number.php:6
#0 /home/me/shop/src/Prices.php(4): Number->parse()
#1 /home/me/shop/run.php(3): Prices->total()
#2 {main}
""",
        "src/Prices.php",
        "Prices.cents",
    ),
    "csharp": (
        """Unhandled exception. System.FormatException: no price
   at System.Int32.Parse(String s)
   at Acme.Prices.Cents(String s) in /_/src/Acme/Prices.cs:line 4
   at Program.Main(String[] args) in /home/me/Program.cs:line 5
""",
        "src/Acme/Prices.cs",
        "Prices.Cents",
    ),
}
TRACED = {
    "src/shop/prices.py": "import json\n\ndef cents(text):\n    return json.loads(text)\n\n\ndef total(lines):\n"
    "    return sum(map(cents, lines))\n",
    "src/shop/__init__.py": "def run():\n    return 1\n",
    "src/main/java/org/acme/util/Text.java": "package org.acme.util;\nclass Text {\n  static class Line {\n"
    "    int cents(String s) {\n      return Integer.parseInt(s);\n    }\n  }\n}\n",
    "src/main/java/org/acme/Text.java": "package org.acme;\nclass Text {\n  int total() {\n    return 1;\n  }\n}\n",
    "lib/prices.js": "function cents(text) {\n  if (!text)\n    throw new TypeError('no price');\n}\n",
    "index.js": "const prices = require('./lib/prices');\n[null].map(prices.cents);\n",
    "prices/line.go": "package prices\n\nfunc (l *Line) Text() int {\n\treturn 1\n}\n\n"
    "func (l *Line) Cents() int {\n\treturn l.parts[1]\n}\n\nfunc (l *Line) Total() int {\n\treturn 2\n}\n",
    "src/amounts.rs": "pub fn cents(text: &str) -> i64 {\n    text.parse::<i64>().unwrap()\n}\n",
    "src/main.rs": "fn main() {\n    println!(amounts::cents(1));\n}\n",
    "lib/shop/amounts.rb": "module Shop\n  def cents(text)\n    decode(text)\n  end\nend\n",
    "src/Prices.php": "<?php\nclass Prices {\n  function cents($s) {\n    return Number::parse($s);\n  }\n}\n",
    "src/Acme/Prices.cs": "class Prices {\n  int Cents(string s)\n  {\n    return int.Parse(s);\n  }\n}\n",
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    for name, files in (("tree", TRACED), ("other", FILES)):
        write_tree(folder / "trees" / name, files)
    return CodeIndex.build(folder / "trees", folder / "index", model="none")


@pytest.mark.parametrize(("text", "path", "name"), TRACES.values(), ids=TRACES)
def test_a_stack_trace_begins_at_its_innermost_frame_in_the_tree(traced, text, path, name):
    results = traced.search(text)
    assert (results[0].path, results[0].name) == (f"tree/{path}", name)
    scores = [result.score for result in results]
    assert scores == sorted(scores, reverse=True)
    assert f"tree/{path}" not in [result.path for result in traced.search(text, path="other/**")]


@pytest.mark.parametrize("text", [trace[0] for trace in TRACES.values()], ids=TRACES)
def test_an_issue_that_quotes_a_stack_trace_is_not_a_trace(text):
    assert not is_prose(text)
    assert is_prose(f"Prices are wrong\n\n```\n{text}```\n")
    assert is_prose("It says this when I sum my prices:\n\nI do not know why it is\n\n" + text)


@pytest.mark.parametrize("heading", ["## Error", "**Exception:**", "### Error message", "Error when I sum my prices"])
def test_a_heading_is_not_an_error(traced, heading):
    assert traced.search(f"Prices are wrong\n\n{heading}\n\n```\n{PYTHON}```\n")[0].name == "cents"


# Each form of a location is the second function's in a file of two. `{}` is the path of the file, and its line is 13.
FORMS = (
    "{}:13", "{}:13.", "{}:13,", "{}:13:5", "{}:13-15", "{}(13)", "{} (13,5)", "{}(13,5): error", "{}: line 13",
    "{}, line 13", "{} line 13", "{} on line 13", "{}#L13", "{}#L13-L15", "[{}:13]", "`{}:13`", "({}:13)", '"{}:13"',
    "`{}` line 13", "what does {}:13 do", "it stops in {}:13 and then ends", "see {}|13|", "file:///home/u/{}:13",
    "https://github.com/o/r/blob/main/{}#L13", "http://localhost:5173/{}?t=1712:13:5", "C:\\proj\\{}:13",
    '{}:13: error: Incompatible types in assignment  [assignment]', "{}:13:5: F841 Local variable `x` is never used",
    "{}:13:5: warning: unused variable 'x' [-Wunused-variable]", "{}(13,9): error TS2322: Type 'x' is not known.",
    "[ERROR] /home/u/{}:[13,9] cannot find symbol", "e: file:///home/u/{}:13:9 Unresolved reference 'x'.",
    "error[E0308]: mismatched types\n  --> {}:13:5\n   |", "F401 [*] `os` imported but unused\n --> {}:13:5",
    "{}\n  13:5  error  'x' is never used  no-unused-vars", "{}:13:in 'Integer#/': divided by 0 (ZeroDivisionError)",
    "PHP Warning:  Undefined variable in {} on line 13", "In file included from {}:13:\n/usr/include/x.h:3: note: x",
)  # fmt: skip
LOCATED = {
    "src/a.py": "def first():\n    return 1\n" + "\n" * 9 + "def second():\n    x = 2\n    return x\n",
    "src/main/kotlin/Till.kt": "package com.acme.pos.till\n\nclass Till {\n  fun step0() {\n    error(1)\n  }\n"
    "  fun step1() {\n    error(2)\n  }\n}\n",
    "src/main/kotlin/other/Till.kt": "package com.acme.other\n\nclass Till {\n  fun step0() {\n    f()\n  }\n}\n",
    "tests/test_a.py": "from a import second\n\ndef test_second():\n    assert second() == 3\n",
}


@pytest.fixture(scope="module")
def located(tmp_path_factory):
    folder = tmp_path_factory.mktemp("located")
    return CodeIndex.build(write_tree(folder / "tree", LOCATED), folder / "index", model="none")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_location_finds_its_chunk(located, form):
    assert located.search(form.replace("{}", "src/a.py"))[0].name == "second"


@pytest.mark.parametrize(
    ("package", "path"),
    [("com.acme.pos.till", "src/main/kotlin/Till.kt"), ("com.acme.other", "src/main/kotlin/other/Till.kt")],
)
def test_a_package_need_not_be_folders(located, package, path):
    trace = f"java.lang.IllegalStateException: 1\n\tat {package}.Till.step0(Till.kt:5)\n"
    first = located.search(trace)[0]
    assert (first.path, first.name) == (path, "Till.step0")


PYTEST = """F                                                                        [100%]
=================================== FAILURES ===================================
_________________________________ test_second __________________________________

    def test_second():
>       assert third() == 3

tests/test_a.py:4:
_ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _

    def second():
        x = 2
>       return x
E       ValueError: no third

src/a.py:14: ValueError
=========================== short test summary info ============================
FAILED tests/test_a.py::test_second - ValueError: no third
1 failed in 0.01s
"""
COMMANDS = (
    "", "$ pytest -q", "pytest -q", "PYTHONPATH=src pytest -q tests", "CI=1 npm test", "cd proj && pytest -q",
    "pytest -q 2>&1", "pytest -q | tail -30", "nox -s tests", "user@host:~/proj$ pytest -q", "PS C:\\proj> pytest",
    "(venv) me@host proj % pytest", "docker compose run --rm web pytest", "> hatch test", "make -C proj check",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_any_command_may_stand_above_an_output(located, command):
    assert located.search(f"{command}\n{PYTEST}".strip())[0].name == "second"


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/home/u/main.py", line 3, in <module>
  |     second()
  | ExceptionGroup: several (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/home/u/src/a.py", line 13, in second
    |     x = 2
    | ValueError: first
    +------------------------------------
"""
COLOURED = PYTEST.replace("src/a.py", "\x1b[1m\x1b[31msrc/a.py\x1b[0m").replace("E   ", "\x1b[1m\x1b[31mE   ")
LINKED = "\x1b]8;;file:///home/u/src/a.py\x1b\\src/a.py\x1b]8;;\x1b\\:\x1b[33m13\x1b[0m: error: no"


@pytest.mark.parametrize("text", [GROUP, COLOURED, LINKED], ids=["group", "coloured", "linked"])
def test_marks_of_a_terminal_and_of_exception_groups_do_not_count(located, text):
    assert located.search(text)[0].name == "second"


def test_a_line_of_any_length_takes_little_time(located):
    started = time.process_time()
    for line in ("a:1 " * 50_000, "at a.b.C.d(C.java:1)" * 10_000, '"' * 200_000 + "src/a.py:13", "Error " * 40_000):
        located.search(f"Error: no\n{line}\nsrc/a.py:13: no")
    assert time.process_time() - started < 6
