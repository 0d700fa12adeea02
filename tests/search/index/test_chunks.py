"""Files are split into functions, classes and blocks of lines."""

import http.client
import logging
import re
import shutil
import socket
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from soft_trainer.search.index import chunks
from soft_trainer.search.index.chunks import MAX_LINES, first_paragraph, language_of, split
from soft_trainer.source.definitions import parse
from soft_trainer.source.grammars import GRAMMARS

SOURCES = {
    "ruby": ("class Cart\n  def add(item)\n    @items << item\n  end\nend\n", {"Cart", "add"}),
    "python": ("LIMIT = 3\n\n\n\n\nclass Cart:\n    def add(self, item):\n        pass\n", {"LIMIT", "Cart", "add"}),
    "java": ("class Cart {\n  int add(int i) {\n    return i;\n  }\n}\n", {"Cart", "add"}),
    "javascript": (
        "class Cart {\n  add(i) {\n    return i\n  }\n}\nexports.f = function () {\n}\n",
        {"Cart", "add", "f"},
    ),
    "php": ("<?php\nclass Cart {\n  function add($i) {\n    return $i;\n  }\n}\n", {"Cart", "add"}),
    "go": ("package a\n\n\n\n\ntype Cart struct {\n}\n\nfunc (c *Cart) Add() {\n}\n", {"Cart", "Add"}),
    "typescript": ("interface Cart {\n  n: number\n}\nexport const add = (n: number) => n\n", {"Cart", "add"}),
    "tsx": ("export function View(p: P) {\n  return <div>{p.a}</div>\n}\ntype P = { a: string }\n", {"View", "P"}),
    "c": ("struct cart {\n  int n;\n};\nstatic int *add(int n)\n{\n  return 0;\n}\n", {"cart", "add"}),
    "cpp": (
        "namespace shop {\nclass Cart {\n int add() { return 1; }\n};\n}\n"
        "int Cart::more() { return 2; }\n",
        {"shop", "Cart", "add", "more"},
    ),
    "csharp": ("namespace N;\nclass Cart {\n  public int Add(int n) {\n    return n;\n  }\n}\n", {"Cart", "Add"}),
    "rust": ("struct Cart {\n}\nimpl Cart {\n  fn add(&self) {\n  }\n}\n", {"Cart", "add"}),
    "kotlin": ("class Cart {\n  fun add(n: Int): Int {\n    return n\n  }\n}\n", {"Cart", "add"}),
}  # fmt: skip


@pytest.mark.parametrize("language", GRAMMARS)
def test_chunks_have_all_definitions_and_every_line_with_a_word_once(language):
    source, names = SOURCES[language]
    chunks = split(source.encode(), language)
    assert names <= {name for chunk in chunks for name in chunk.defines}
    covered = [line for chunk in chunks for line in range(chunk.start, chunk.end + 1)]
    assert len(covered) == len(set(covered))
    lines = enumerate(source.split("\n"), 1)
    assert {number for number, line in lines if any(map(str.isalnum, line))} <= set(covered)


# Names outside functions that universal-ctags lists, in the chunk that holds them.
CONSTANTS = {
    "python": (
        "LIMIT = 10\nclass Cart:\n    SIZE: Final = 1\n\n    def f(self):\n        INNER = 2\n",
        ["LIMIT", "SIZE"],
    ),
    "rust": (
        "pub const LIMIT: u8 = 1;\npub(crate) static mut COUNT: u8 = 1;\nfn f() {\n    let inner = 2;\n}\n",
        ["LIMIT", "COUNT"],
    ),
    "go": (
        "package a\n\nconst Limit int = 1\n\nvar (\n\tFirst = iota // 0\n\tSecond\n)\n\nfunc f() {\n\tinner := 2\n}\n",
        ["Limit", "First", "Second"],
    ),
    "javascript": ("export const LIMIT = 1;\nfunction f() {\n  const inner = 2;\n}\n", ["LIMIT"]),
    "java": (
        "class Cart {\n  public static final int LIMIT = 1;\n  int f() {\n    int INNER = 2;\n  }\n}\n",
        ["LIMIT"],
    ),
    "php": ("<?php\nclass Cart {\n  const LIMIT = 1;\n  function f() {\n    $INNER = 2;\n  }\n}\n", ["LIMIT"]),
    "ruby": (
        "Point = Struct.new(:x)\nclass Cart\n  LIMIT = 1\n  attr_reader :size, :owner\n  alias count size\n"
        "  alias_method :empty?, :blank?\n  def f\n    inner = 2\n  end\nend\n",
        ["Point", "LIMIT", "size", "owner", "count", "empty?"],
    ),
}


@pytest.mark.parametrize("language", CONSTANTS)
def test_constants_attributes_and_aliases_are_names_of_the_chunk_that_holds_them(language):
    source, names = CONSTANTS[language]
    chunks = split(source.encode(), language)
    found = [name for chunk in chunks for name in chunk.defines]
    assert [name for name in found if name in names] == names and not {"inner", "INNER"} & set(found)
    for name in names:
        (holding,) = (chunk for chunk in chunks if name in chunk.defines)
        assert name in "\n".join(source.split("\n")[holding.start - 1 : holding.end])


@pytest.mark.skipif(not shutil.which("ctags"), reason="needs universal-ctags")
def test_constants_that_ctags_lists_are_names():
    words = ["ctags", "--languages=Python", "--kinds-Python=v", "--fields=ks", "-f", "-"]
    listed = missing = 0
    for module in (http.client, logging, socket, tarfile):
        tags = subprocess.run([*words, module.__file__], capture_output=True, text=True, check=True).stdout
        wanted = set(re.findall(r"^([A-Z][A-Z0-9_]+)\t", tags, re.MULTILINE))
        chunks = split(Path(module.__file__).read_bytes(), "python")
        listed += len(wanted)
        missing += len(wanted - {name for chunk in chunks for name in chunk.defines})
    assert listed > 40 and missing / listed < 0.03


def test_a_header_of_blank_lines_takes_no_time():
    started = time.process_time()
    assert language_of("a.h", b"\n" * 100_000 + b"  namespace a {\n") == "cpp"
    assert time.process_time() - started < 1


def test_a_short_file_that_stalls_its_grammar_is_split_by_lines(monkeypatch):
    blank, xs = "\n  \n\n\n\n  ", " x\n" * 34
    function = "fun add(n: Int): Int { "
    source = (
        f"class Cart {{   {function}{blank}{function}{blank}  x\n x\n # x\n{xs} return n \n   }} \n }} \n ".encode()
    )
    assert parse(source, "kotlin", 0.2) is None
    monkeypatch.setattr(chunks, "PARSE_SECONDS", 0.2)
    assert [(chunk.start, chunk.name) for chunk in split(source, "kotlin")] == [(1, "")]


def test_a_method_has_the_name_of_its_class_and_its_comments_and_decorators():
    source = "class A:\n    x = 1\n\n    # doubles\n    @cached\n    def f(self):\n        return 2\n"
    chunks = split(source.encode(), "python")
    assert [(chunk.start, chunk.end, chunk.name) for chunk in chunks] == [(1, 2, "A"), (4, 7, "A.f")]


def test_the_decorators_of_a_class_do_not_belong_to_its_last_method():
    method = "\n    def f(self):\n        return self.number\n\n"
    source = f"import a\n\n\n\n@dataclass\nclass A:\n    number: int\n{method}{method.replace(' f(', ' g(')}"
    found = [(chunk.start, chunk.end, chunk.name) for chunk in split(source.encode(), "python")]
    assert found[1:] == [(5, 7, "A"), (9, 10, "A.f"), (13, 14, "A.g")]


def test_the_lines_of_a_class_around_its_methods_are_told_from_definitions():
    source = "import a\n" * 4 + "\nclass A:\n    x = 1\n\n    def f(self):\n        return 2\n\nclass B:\n    y = 1\n"
    found = [(chunk.name, chunk.kind) for chunk in split(source.encode(), "python")]
    assert found == [("", chunks.LINES), ("A", chunks.CLASS), ("A.f", chunks.WHOLE), ("B", chunks.WHOLE)]


def test_long_functions_are_cut_and_keep_their_name():
    source = "def f():\n" + "    x = 1\n" * (3 * MAX_LINES)
    chunks = split(source.encode(), "python")
    assert len(chunks) > 3 and {chunk.name for chunk in chunks} == {"f"}
    assert max(chunk.end - chunk.start + 1 for chunk in chunks) <= MAX_LINES
    assert [chunk.defines for chunk in chunks if chunk.defines] == [["f"]]


def test_other_texts_are_blocks_of_lines():
    chunks = split(b"# Title\n\ntext\n" * 50, "markdown")
    assert len(chunks) == 3 and chunks[0].start == 1 and not any(chunk.name for chunk in chunks)
    assert split(b"", "text") == [] and split(b"\n \n", "text") == []


@pytest.mark.parametrize(
    ("path", "source", "language"),
    [
        ("a/b.RS", b"", "rust"),
        ("Makefile", b"", "text"),
        ("a.h", b"int f(void);", "c"),
        ("a.h", b"namespace a {", "cpp"),
        ("a.pyi", b"", "python"),
        ("a.pyw", b"", "python"),
        ("a.gemspec", b"", "ruby"),
        ("a.C", b"", "cpp"),
        ("a.c", b"", "c"),
        ("a.H", b"namespace a {", "cpp"),
        ("a.tpp", b"", "cpp"),
        ("a.ipp", b"", "cpp"),
        ("a.inl", b"", "cpp"),
        ("a.INO", b"", "cpp"),
        ("bin/run", b"#!/usr/bin/env python3\n", "python"),
        ("bin/run", b"#! /usr/bin/env -S ruby -w\n", "ruby"),
        ("bin/run", b"#!/usr/local/bin/node\n", "javascript"),
        ("bin/run", b"#!/bin/bash -e\n", "shell"),
        ("bin/run", b"#!/usr/bin/awk -f\n", "text"),
        ("bin/run", b"# python\n", "text"),
        ("a.txt", b"#!/usr/bin/python\n", "text"),
    ],
)
def test_languages(path, source, language):
    assert language_of(path, source) == language


@pytest.mark.parametrize(
    ("language", "source", "expected"),
    [
        ("typescript", "interface Cart {\n  add(a: string): void;\n  sum(): number;\n}\n", [["Cart", "add", "sum"]]),
        ("typescript", "declare function add(a: number): void;\ndeclare function sum(): void;\n", [["add", "sum"]]),
        ("typescript", "function f(a: string): void;\nfunction f(a: any) {\n  return a\n}\n", [["f"]]),
        (
            "rust",
            "trait Cart {\n    fn add(&self);\n    fn sum(&self) -> i32 {\n        1\n    }\n}\n",
            [["Cart", "add"], ["sum"]],
        ),
        ("javascript", "function add() {\n}\nCart.prototype.sum = add;\n", [["add"], ["sum"]]),
        ("cpp", "TEST_F(CartTest, Total) {\n  int a;\n}\n", [["Total"]]),
    ],
)
def test_signatures_without_a_body_are_names_of_the_chunk_that_contains_them(language, source, expected):
    assert [chunk.defines for chunk in split(source.encode(), language)] == expected


def test_a_macro_on_a_separate_line_and_the_comment_above_it_belong_to_their_function():
    before = "int a;\n" * 5
    source = f"{before}/** Adds. */\nEXPORT\nDEPRECATED(2)\nint add(int a)\n{{\n  return a;\n}}\n"
    chunks = split(source.encode(), "c")
    assert [(chunk.name, chunk.start) for chunk in chunks] == [("", 1), ("add", 6)]


@pytest.mark.parametrize("text", [b"(function(){" * 40_000, b"'`" * 100_000, b"[{" * 100_000, b"<a " * 50_000])
@pytest.mark.parametrize("language", ["javascript", "python", "cpp"])
@pytest.mark.slow
def test_files_made_to_be_slow_end_in_time(text, language):
    started = time.process_time()
    split(text, language)
    assert time.process_time() - started < 15


@pytest.mark.parametrize(
    ("text", "paragraph"),
    [
        ('def f():\n    """Parse a date.\n\n    More."""\n', "Parse a date."),
        ("/** Parses a date.\n *\n * @param a b\n */\nint f();", " Parses a date."),
        ("// Parse parses\n// a date.\nfunc Parse() {\n\t// not this\n}", "// Parse parses\n// a date.\n"),
        ("x = 1", ""),
    ],
)
def test_the_first_paragraph_of_documentation(text, paragraph):
    assert first_paragraph(text.encode()).decode().strip() == paragraph.strip()
