"""A function has the documentation that its language's own tool gives it."""

import ast
import asyncio
import email
import json
from pathlib import Path

import pytest

from soft_trainer.source.definitions import parse
from soft_trainer.source.documentation import summary
from soft_trainer.source.functions import FileFunctions
from soft_trainer.source.languages import SOURCE_LANGUAGES

# (language, what is between the documentation and the function, a file, its functions and the beginning of their
# documentation). The documentation is what the language's own tool says: the TypeScript compiler for JavaScript and
# TypeScript, go/parser, javac's DocTrees, php-ast, YARD, syn, and doxygen for C and C++. But a
# licence and a comment with four stars are no documentation, as in JSDoc, though the compiler takes them.
# fmt: off
DOCUMENTED = [
    ("javascript", "blank lines", "let a;\n\n/** Adds. */\n\n\nfunction add() {}\n", {"add": "Adds."}),
    ("javascript", "another comment", "/** Adds. */\n/* istanbul ignore next */\n// eslint-disable-next-line\n"
     "function add() {}\n", {"add": "Adds."}),
    ("javascript", "a mark for a bundler", "/** Adds. */\nconst add = /*#__PURE__*/ function () {}\n"
     "", {"add": "Adds."}),
    ("javascript", "nothing", "/** Adds. */ function add() {}\n/**\n * Halves.\n */ const halve = (a) => a / 2\n",
     {"add": "Adds.", "halve": "Halves."}),
    ("javascript", "nothing, after another comment", "/* one\n */ /** Adds. */ function add() {}\n", {"add": "Adds."}),
    ("javascript", "another definition", "/** A number. */\nlet a = 1\n\nfunction add() {}\n", {"add": ""}),
    ("javascript", "a blank line after a licence",
     "/** Copyright 2020 A. Author\n * @license MIT\n */\n\nfunction add() {}\n", {"add": ""}),
    ("javascript", "nothing, but it is the file's", "/** @fileoverview Numbers. */\nfunction add() {}\n", {"add": ""}),
    ("javascript", "no documentation", "/**** Adds. ****/\nfunction add() {}\n", {"add": ""}),
    ("javascript", "calls of React",
     "/** Adds. */\nconst Add = memo(() => 1)\n/** Halves. */\nexport const Halve = React.forwardRef((p, ref) => 1)\n"
     "/** Ends. */\nA.End = memo(forwardRef(function () {}), same)\n/** Named. */\n"
     "export default memo(function Own() {})\n/** Others. */\nconst others = all.map(function () {})\n",
     {"Add": "Adds.", "Halve": "Halves.", "A.End": "Ends.", "Own": "Named."}),
    ("tsx", "a call of React with types", "/** Adds. */\n"
     "export const Add = memo<Props>((p: Props) => <p>A, &amp; c</p>)\n",
     {"Add": "Adds."}),
    ("typescript", "blank lines", "class A {\n  /** Adds. */\n\n  add(): void {}\n\n  bare() {}\n}\n",
     {"A.add": "Adds.", "A.bare": ""}),
    ("typescript", "a decorator and a blank line", "class A {\n  /** Adds. */\n\n  @Get()\n  // slow\n"
     "  add(): void {}\n}\n",
     {"A.add": "Adds."}),
    ("go", "nothing", "package a\n\n// Add adds.\n// It may fail.\nfunc Add() {}\n", {"Add": "Add adds."}),
    ("go", "directives", "package a\n\n// Add adds.\n//lint:ignore U1000 slow\n//dupl:ignore\n//gosec:disable\n"
     "//extern add\n//line a.go:1\n//export Add\n//go:noinline\n//http://x is no directive\nfunc Add() {}\n",
     {"Add": "Add adds.\nhttp://x is no directive"}),
    ("go", "a blank line", "package a\n\n// Add adds.\n\nfunc Add() {}\n", {"Add": ""}),
    ("go", "a blank line above a line", "package a\n\n// Numbers.\n\n// Add adds.\nfunc Add() {}\n"
     "", {"Add": "Add adds."}),
    ("java", "blank lines and an annotation",
     "class A {\n  /** Adds. */\n\n  @Override\n\n  // slow\n  int add() { return 1; }\n"
     "  int bare() { return 1; }\n}\n",
     {"A.add": "Adds.", "A.bare": ""}),
    ("java", "a field", "class A {\n  /** A number. */\n  int a;\n\n  int add() { return 1; }\n}\n", {"A.add": ""}),
    ("php", "a blank line and a comment", "<?php\n$a = 1;\n\n/** Adds. */\n\n// slow\nfunction add() { return 1; }\n",
     {"add": "Adds."}),
    ("ruby", "a blank line", "x = 1\n# Adds.\n\ndef add\n  1\nend\n", {"add": "Adds."}),
    ("ruby", "a visibility", "class A\n  # Adds.\n  public\n\n  def add\n    1\n  end\n  # Halves.\n"
     "  module_function\n  def halve\n    1\n  end\n  # Of all.\n  attributes\n  def bare\n    1\n  end\nend\n",
     {"A.add": "Adds.", "A.halve": "Halves.", "A.bare": ""}),
    ("ruby", "two blank lines", "x = 1\n# Adds.\n\n\ndef add\n  1\nend\n", {"add": ""}),
    ("ruby", "the end of other code", "x = 1 # one\ndef add\n  1\nend\n", {"add": ""}),
    ("rust", "a blank line, an attribute and a comment", "/// Adds.\n\n#[inline]\n// slow\nfn add() {}\n"
     "fn bare() {}\n",
     {"add": "Adds.", "bare": ""}),
    ("rust", "blank lines, a block and other comments", "/// Adds.\n\n/** Slowly. */\n"
     "// slow\n/// Surely.\nfn add() {}\n",
     {"add": "Adds.\nSlowly.\nSurely."}),
    ("rust", "attributes that are documentation", "#[doc = \" Adds \\\"a\\\".\"]\n#[inline]\n"
     "#[doc = r#\"And \"b\".\"#]\nfn add() {}\n"
     "#[doc(hidden)]\nfn bare() {}\n", {"add": "Adds \"a\".\nAnd \"b\".", "bare": ""}),
    ("rust", "a condition and a composed text", "#[cfg_attr(feature = \"a, b\", doc = \"Adds.\")]\nfn add() {}\n"
     "#[doc = concat!(\"One \", r#\"\"two\".\"#)]\nfn two() {}\n#[doc = include_str!(\"a.md\")]\nfn bare() {}\n",
     {"add": "Adds.", "two": "One \"two\".", "bare": ""}),
    ("rust", "the start of the body", "/// Adds.\nfn add() {\n    //! Slowly.\n    //! Surely.\n    sum()\n}\n"
     "fn halve() {\n    /*! Halves. */\n    // slow\n    sum()\n}\nfn bare() {\n    sum(); //! no\n}\n",
     {"add": "Adds.\nSlowly.\nSurely.", "halve": "Halves.", "bare": ""}),
    ("kotlin", "annotations after another declaration", "val x = 1\n\n/** Adds. */\n@Throws(A::class)\nfun add() { }\n"
     "class A\n/** Halves. */\n@Deprecated(\"no\", ReplaceWith(\"y\"))\n@JvmName(\"b\")\ninline fun halve(): Int = 1\n"
     "@Suppress(\"a\")\nfun bare() = 2\n",
     {"add": "Adds.", "halve": "Halves.", "bare": ""}),
    ("kotlin", "a guard", "/** Adds. */\nfun add(x: Any) = when (x) {\n    is String if x.length > 3 -> 1\n"
     "    A.B if (x != 2) -> 2\n    else if x == 3 -> 4\n    else -> 5\n}\n/** Halves. */\nfun halve() = 1\n",
     {"add": "Adds.", "halve": "Halves."}),
    ("csharp", "a block of extensions", "static class E {\n  extension<T>(List<T> a) where T : class {\n"
     "    /// Adds.\n    public int Add() => 1;\n    /// Halves.\n    public int Halve() { return 1; }\n  }\n"
     "  extension(string a)\n  {\n    /// Counts.\n    public int Count() => 1;\n  }\n}\n",
     {"E.Add": "Adds.", "E.Halve": "Halves.", "E.Count": "Counts."}),
    ("cpp", "an inline namespace", "namespace a::inline v1 {\n/** Adds. */\nint add() { return 1; }\n}\n",
     {"a.v1.add": "Adds."}),
    ("rust", "no documentation", "//// Adds.\nfn add() {}\n/*** Halves. */\nfn halve() {}\n"
     "", {"add": "", "halve": ""}),
    ("c", "blank lines", "int a;\n/** Adds. */\n\n\nint add(void) { return 1; }\nint bare(void) { return 1; }\n",
     {"add": "Adds.", "bare": ""}),
    ("c", "macros and another comment", "/** Adds. */\nEXPORT\nDEPRECATED(\"2.0\")\n/* slow */\n"
     "int add(void) { return 1; }\n",
     {"add": "Adds."}),
    ("c", "a declaration", "/** A number. */\nint a;\n\nint add(void) { return 1; }\n", {"add": ""}),
    ("c", "a macro that defines another function", "/** Halves. */\nDEFINE(halve);\n\nint add(void) { return 1; }\n",
     {"add": ""}),
    ("c", "nothing, but it is the file's", "/** @file a.c Numbers. */\nint add(void) { return 1; }\n", {"add": ""}),
    ("c", "nothing, but it is about what precedes", "enum a {\n  ONE\n  /**< One. */\n};\n"
     "int add(void) { return 1; }\n",
     {"add": ""}),
    ("javascript", "a type", "/** A pair.\n * @typedef {Object} Pair\n */\nfunction add() {}\n", {"add": ""}),
    ("javascript", "a type of functions", "/**\n * Is called.\n * @callback Done\n * @param {number} a\n */\n\n"
     "const add = () => 1\n", {"add": ""}),
    ("typescript", "an event", "class A {\n  /** Has changed. @event */\n  /** @event A#change Has changed. */\n"
     "  add(): void {}\n}\n", {"A.add": ""}),
    ("c", "a group", "/** @defgroup numbers Numbers\n * All of them. */\n\nint add(void) { return 1; }\n",
     {"add": ""}),
    ("c", "another function", "/*! \\fn int halve(int add)\n * Halves. */\nint add(void) { return 1; }\n",
     {"add": ""}),
    ("c", "a macro", "/** @def MAX(a, b)\n * The larger one. */\nint add(void) { return 1; }\n", {"add": ""}),
    ("cpp", "nothing, but its name", "/// \\fn int shop::add(int) const\n/// Adds.\nint shop::add(int a) const "
     "{ return 1; }\n", {"shop.add": "\\fn"}),
    ("cpp", "a friend", "class A {\n  /** Adds. */\n  friend A operator+(A a, A b) { return a; }\n  /** Halves. */\n"
     "  template <typename T>\n  friend A halve(T a) { return 1; }\n  friend int bare(A a) { return 1; }\n};\n",
     {"A.operator+": "Adds.", "A.halve": "Halves.", "A.bare": ""}),
    ("cpp", "a linkage", "/** Adds. */\nextern \"C\" int add(int a) { return a; }\n/** Halves. */\nextern \"C\"\n"
     "__attribute__((cold)) int halve() { return 1; }\n/** All of them. */\nextern \"C\" {\n"
     "int bare() { return 1; }\n/** Ends. */\nint end() { return 1; }\n}\n",
     {"add": "Adds.", "halve": "Halves.", "bare": "", "end": "Ends."}),
    ("cpp", "nothing, before a body that is an attempt",
     "/** Makes it. */\nA::A(int a) try : a(a) {} catch (...) {}\nclass B {\n  /** Ends. */\n"
     "  ~B() try {} catch (...) {}\n  B() = default;\n};\n",
     {"A.A": "Makes it.", "B.~B": "Ends."}),
    ("csharp", "nothing, before members of other kinds",
     "class A {\n  /// Adds.\n  public static A operator +(A a, A b) { return a; }\n"
     "  /// Ends it.\n  ~A() { End(); }\n  public static implicit operator int(A a) => 1;\n"
     "  public static explicit operator List<string>(A a) => a.b;\n  public static bool operator true(A a) => true;\n"
     "  /// An item.\n  public int this[int i] { get { return 1; } }\n  int this[A a] { get; set; }\n"
     "  /// A number.\n  int B { get => 1; set => C(value); }\n  int D { get; } = 1;\n}\n"
     "interface I { int this[int i] { get; } }\nclass J { public int this[string s] => 1; }\n",
     {"A.operator+": "Adds.", "A.~A": "Ends it.", "A.operator int": "", "A.operator List<string>": "",
      "A.operator true": "", "A.this": "An item.", "A.B": "A number.", "J.this": ""}),
    ("kotlin", "nothing, before members of other kinds",
     "class A {\n  /** Makes it. */\n  constructor(a: Int) : this() { b() }\n  /** A number. */\n  var c = 1\n"
     "    get() { return 1 }\n    private set\n  var d: Int\n    get() = 1\n    @B set(v) { e = v }\n"
     "  val String.last get() = this[0]\n  var f = 1\n    private set\n  val g by lazy { 1 }\n}\n",
     {"A.constructor": "Makes it.", "A.c": "A number.", "A.d": "", "A.last": ""}),
    ("kotlin", "context parameters",
     "/** Adds. */\ncontext(Logger)\nfun add(): Int { return 1 }\nclass A {\n  /** Halves. */\n"
     "  context(a: Logger, b: () -> Unit)\n  private fun halve() { context(\"x\") { end() } }\n"
     "  fun bare() { a() }\n}\n",
     {"add": "Adds.", "A.halve": "Halves.", "A.bare": ""}),
    ("cpp", "a template and a blank line", "/// Adds.\n\ntemplate <typename T>\nT add(T a) { return a; }\n"
     "", {"add": "Adds."}),
]
# fmt: on


def documentation(source: str, language: str) -> dict[str, str]:
    text = source.encode()
    file = FileFunctions(parse(text, language), text, language, "path")
    return {function.name: file.docstring(function) for function in file.functions}


@pytest.mark.parametrize(("language", "between", "source", "expected"), DOCUMENTED)
def test_a_function_has_the_documentation_that_its_tool_gives_it(language, between, source, expected):
    found = documentation(source, language)
    assert list(found) == list(expected)
    for name, beginning in expected.items():
        assert found[name].startswith(beginning) and bool(found[name]) == bool(beginning)


LITERALS = [
    '"Adds."',
    """'''Adds.\n\n    More.\n\n      Indented.\n    '''""",
    '"""\\\n    Adds."""',
    'r"A \\d"',
    'u"Adds."',
    r'"A \d, \u00e9, \t and \N{BULLET}."',
    r'"Half of \ud83d"',
    '"Adds " "numbers."',
    """"Adds " r'numb\\ers'""",
    '"Adds " \\\n    "numbers."',
    '("Adds.")',
    '("Adds "  # and more\n     "numbers.")',
    '"Adds."; a += 1',
    '# first\n    "Adds."  # last',
    'f"Adds."',
    '"Adds " f"{a}"',
    'b"Adds."',
    '"Adds", "numbers"',
    '"Adds %s" % a',
    '("Adds", )',
    '"A \\x"',
    '""',
]


@pytest.mark.parametrize("literal", LITERALS)
def test_a_docstring_in_python_is_what_ast_gives(literal, recwarn):
    source = f"def add(a):\n    {literal}\n    return a\n"
    expected = ""
    if literal != '"A \\x"':  # an error for Python
        expected = (ast.get_docstring(ast.parse(source).body[0]) or "").strip()
    recwarn.clear()  # of `ast`
    (row,) = FileFunctions(parse(source.encode(), "python"), source.encode(), "python", "path").rows()
    assert row["docstring"] == expected.encode(errors="replace").decode()
    documented = bool(expected) or literal == '""'
    assert documented != any(token.endswith(('"', "'")) for token in row["code_tokens"])
    assert not recwarn


def test_docstrings_of_the_standard_library_are_what_ast_gives():
    count = 0
    for package in (asyncio, email, json):
        for path in Path(package.__file__).parent.glob("*.py"):
            source = path.read_bytes()
            expected = {}
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    expected[node.lineno] = (ast.get_docstring(node) or "").strip()
            file = FileFunctions(parse(source, "python"), source, "python", path.name)
            for function in file.functions:
                assert file.docstring(function) == expected[function.node.start_point.row + 1]
                count += 1
    assert count > 1000


# (language, a file, the summary of its function's documentation), as gtk-doc, YARD, JSDoc and RDoc read it. A mark of
# SimpleCov is no documentation, and neither is a heading.
# fmt: off
SUMMARIES = [
    ("c", "/**\n * add:\n * @a: a number\n *     of any size\n * @...: more of them\n *\n * Adds numbers.\n *\n"
     " * Returns: their sum\n */\nint add(int a) { return 1; }\n", "Adds numbers."),
    ("c", "/**\n * add: (skip)\n *\n * Adds numbers.\n */\nint add(void) { return 1; }\n", "Adds numbers."),
    ("c", "/**\n * SECTION:numbers\n *\n * About numbers.\n */\nint add(void) { return 1; }\n", ""),
    ("ruby", "# @!macro [attach] numbers\n#   Made of $1\n# @api private\n# Adds numbers.\n# @return [Integer]\n"
     "def add\n  1\n"
     "end\n", "Adds numbers."),
    ("ruby", "# @param [Hash] options\n#   the options\n#\n#   :a is a number\n#\n# Adds numbers.\n"
     "def add(options)\n  1\nend\n",
     "Adds numbers."),
    ("ruby", "# :nocov:\n# Adds numbers.\ndef add\n  1\nend\n", "Adds numbers."),
    ("ruby", "# == Sums\n#\n# Adds numbers.\n#   add # => 1\ndef add\n  1\nend\n", "Adds numbers."),
    ("javascript", "/**\n * @function\n * @name add\n * @memberof numbers\n * @description Adds numbers.\n"
     " * @param {number} a\n"
     " */\nfunction add(a) {}\n", "Adds numbers."),
    ("javascript", "/**\n * Adds numbers.\n * @param {number} a\n * @description More of it.\n */\n"
     "function add(a) {}\n",
     "Adds numbers."),
    ("java", "class A {\n  /**\n   * @Title: add\n   * @Description: Adds numbers.\n   * @param a x\n   */\n"
     "  int add(int a) { return 1; }\n}\n", "Adds numbers."),
    ("java", "class A {\n  /** Adds {@snippet : if (a) { b({1}); } } numbers. */\n  int add(int a) { return 1; }\n}\n",
     "Adds  numbers."),
    ("python", 'def add(a):\n    """add(a, b=(1, 2)) -> int\n    numbers.add(a)\n\n    Adds numbers.\n    """\n',
     "Adds numbers."),
    ("python", 'def add(a):\n    """add(a)"""\n', "add(a)"),
    ("python", 'def add(a):\n    """add(a) adds numbers (all of them)\n    at once."""\n',
     "add(a) adds numbers (all of them)\nat once."),
    ("go", "package a\n\n// Add adds a[i] to [Sum].\nfunc Add() {}\n", "Add adds a[i] to Sum."),
]
# fmt: on


@pytest.mark.parametrize(("language", "source", "expected"), SUMMARIES)
def test_a_summary_is_the_description(language, source, expected):
    (found,) = documentation(source, language).values()
    assert summary(found, SOURCE_LANGUAGES[language].style) == expected
