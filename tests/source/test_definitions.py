"""Definitions have the names that their languages give them, also where macros stand between."""

import time
from unittest.mock import Mock

import pytest

from soft_trainer.source.definitions import _without_macros, definitions, parse, parse_file
from soft_trainer.source.functions import FileFunctions

# (language, a file, the names of its definitions). The names are universal-ctags', except for macros that define
# functions: ctags names those after the macro.
# fmt: off
NAMES = [
    ("cpp", "class LIB_API Cart : public Base {\n int total() { return 1; }\n};\n", ["Cart", "total"]),
    ("cpp", "struct EXPORT(2) Cart final {\n int total() { return 1; }\n};\n", ["Cart", "total"]),
    ("cpp", "template <> class LIB_API Cart<int> {};\n", ["Cart"]),
    ("cpp", "LIB_BEGIN namespace shop {\nint total() { return 1; }\n}\n", ["shop", "total"]),
    ("cpp", "LIB_BEGIN\nclass Cart {};\n", ["Cart"]),
    ("cpp", "LIB_API std::string total(int a) { return a; }\n", ["total"]),
    ("cpp", "int Cart::total() const\n    REQUIRES(mutex) {\n  return 1;\n}\n", ["Cart.total"]),
    ("cpp", "API Cart::Cart(int a) : a(a) {}\nAPI shop::Cart<T>::~Cart() {}\n", ["Cart.Cart", "shop.Cart.~Cart"]),
    ("cpp", "API(a) INLINE Packet total(int a) { return a; }\n", ["total"]),
    ("cpp", "template <> API Packet total<Packet>(int a) { return a; }\n", ["total"]),
    ("cpp", "TEST_F(CartTest, Total) { int a; }\nclass CART { CART(int); };\n", ["CartTest.Total", "CART"]),
    ("cpp", "struct CART cart(int a) { return {}; }\n", ["cart"]),
    ("c", "PUBLIC int CALL total(int count UNUSED, char *name UNUSED) { return 1; }\n", ["total"]),
    ("c", "PUBLIC CartPtr CALL\ntotal(void) { return 0; }\n", ["total"]),
    ("c", "static void CALL FORMAT(2,3)\ntotal(void) { }\n", ["total"]),
    ("c", "static U32 total(U32 a) { return a; }\nBYTE\nother(BYTE b) { return b; }\n", ["total", "other"]),
    ("c", "struct CART cart(int a) { return c; }\nconst U32 other(U32 LEN, int SIZE) { return 1; }\n",
     ["cart", "other"]),
    ("c", "int total(int a) {\n  CHECK(a) if (a) { return 1; }\n  return 2;\n}\n", ["total"]),
    ("c", "PHP_FUNCTION(total) { int a; }\n", ["total"]),
    ("c", "typedef void (*callback)(int);\ntypedef int (CALL *other)(int);\n", ["callback", "other"]),
    ("ruby", "class Cart\n  def ==(other) = true\n  def [](at)\n    at\n  end\nend\n", ["Cart", "==", "[]"]),
    ("csharp", "class Cart {\n  ~Cart() {}\n  public static bool operator !=(Cart a, Cart b) => true;\n"
     "  public static explicit operator checked int(Cart a) => 1;\n  int this[int a] => 1;\n  int Total => 1;\n}\n",
     ["Cart", "~Cart", "operator!=", "operator checked int", "this", "Total"]),
    ("typescript", "interface Cart { total(a: string): void; name: string }\ndeclare function sum(a: number): void;\n"
     "declare module 'shop' { function sell(): void }\nabstract class A { abstract add(): void }\n",
     ["Cart", "total", "sum", "shop", "sell", "A", "add"]),
    ("typescript", "export function f(a: string): void;\nexport function f(a: any) {}\n", ["f", "f"]),
    ("javascript", "const Cart = class { total() {} };\nCart.prototype.sum = sum;\n",
     ["Cart", "total", "Cart.prototype.sum"]),
    ("javascript", "Cart.prototype.sum = function add() {};\nexports.a = function b() {};\n",
     ["Cart.prototype.sum", "Cart.prototype.sum", "b"]),
    ("cpp", "struct Cart { operator std::vector<int, B<C>>() { return 1; } };\n"
     "Cart<T>::operator Foo<T>() { return 1; }\n",
     ["Cart", "operator std.vector<int,B<C>>", "Cart.operator Foo<T>"]),
    ("java", "public @interface Cart { int value() default 1; }\ninterface Shop { void sell(); }\n",
     ["Cart", "value", "Shop", "sell"]),
    ("rust", "trait Cart {\n  type Item;\n  fn total(&self);\n}\nextern \"C\" { fn sum(a: i32); }\n",
     ["Cart", "Item", "total", "sum"]),
]
# fmt: on


@pytest.mark.parametrize(("language", "source", "expected"), NAMES)
def test_names(language, source, expected):
    text = source.encode()
    found = definitions(parse(text, language), text, language)
    assert [each.name for each in found] == expected


def functions_of(source: str, language: str) -> dict:
    text = source.encode()
    found = FileFunctions(parse(text, language), text, language, "path").functions
    return {function.name: function for function in found}


@pytest.mark.parametrize("language", ["java", "rust", "typescript", "c", "cpp"])
def test_a_signature_without_a_body_is_not_a_function(language):
    for declared, source, _ in NAMES:
        if declared == language:
            for function in functions_of(source, language).values():
                assert function.body.type in ("block", "compound_statement", "statement_block")


def test_macros_in_strings_comments_and_directives_stay():
    source = (
        '#define API\n// int API total(int)\n/* API int total( */\nchar *a = "API int a(";\nint API total(int a) {}\n'
    )
    (function,) = functions_of(source, "c").values()
    assert (function.name, function.lines, function.broken) == ("total", (5, 5), False)


def test_a_function_in_c_is_judged_by_its_signature():
    body = "{\n  FOR_EACH(a, b) { a++; }\n  return MAX(int, a, ) b;\n}\n"
    broken = {name: function.broken for name, function in functions_of(f"int total(int a) {body}", "c").items()}
    assert broken == {"total": False}
    assert functions_of("int total(int a, [) { return 1; }\n", "c")["total"].broken
    assert functions_of("def total(a):\n    return )\n", "python")["total"].broken


def test_a_condition_that_closes_no_bracket_hides_no_function():
    unbalanced = "int total(int a) {\n#ifdef A\n  if (a) {\n#else\n  while (a) {\n#endif\n    a++;\n  }\n}\n"
    after = "".join(f"int f{number}(void) {{\n  return 1;\n}}\n" for number in range(3))
    assert list(functions_of(unbalanced + after, "c")) == ["f0", "f1", "f2"]


# (language, a file that its grammar cannot parse whole, the lines of its other functions)
# fmt: off
BROKEN = [
    ("kotlin", "class A {\n  fun a() {}\n  fun suspend(a: Int) {\n    b()\n  }\n  fun b() {}\n  class C {\n"
     "    fun d() {}\n  }\n}\nfun e() {}\n", {"A.a": 2, "A.b": 6, "A.C.d": 8, "e": 11}),
    ("kotlin", "actual open class A\ninternal actual constructor(\n  val a: Int,\n) : B {\n  @C\n  fun d() {}\n\n"
     "  companion object {\n    fun e() {}\n  }\n}\n", {"A.d": 5, "A.e": 9}),
    ("kotlin", "fun a(b: Any) {\n  when (b) {\n    is Int when b > 1 -> c()\n  }\n}\nclass D(\n  val e: Int,\n) {\n"
     "  fun f() = 1\n}\n", {"D.f": 9}),
    ("kotlin", "class A {\n  val a: Int\n    get() {\n      return 1\n    }\n  fun suspend(a: Int) {\n  }\n"
     "  val b: Int\n    get() {\n      fun suspend(a: Int) {\n      }\n    }\n}\n", {"A.a": 2}),
    ("csharp", "class A {\n  (\n  int b;\n  void c() {\n    d();\n  }\n}\nclass E {\n  void f() {\n    d();\n  }\n}\n",
     {"A.c": 4, "E.f": 9}),
    ("php", "<?php\nf(a,\nclass B {\n  function c() {\n    d();\n  }\n}\nfunction e() {\n  d();\n}\n",
     {"B.c": 4, "e": 8}),
    ("ruby", "def a\n  x(<<~A)\n    b #{y(<<~B)} c\n      inner\n    B\n  A\nend\n\ndef c\n  1\nend\n\n"
     "def d\n  2\nend\n", {"c": 9, "d": 13}),
    ("javascript", "function a() {\n  if (b) {\n    c()\n}\n\nfunction d() {\n  c()\n}\n", {"a": 1, "d": 6}),
    ("go", "package a\n\nfunc a() {\n\tb()\n}\n\nfunc c(a, {\n\tb()\n}\n\nfunc d() {\n\tb()\n}\n", {"a": 3, "d": 11}),
]
# fmt: on


@pytest.mark.parametrize(("language", "source", "expected"), BROKEN)
def test_a_syntax_error_hides_no_other_function(language, source, expected):
    assert not parse_file(source.encode(), language)[1]
    assert {name: function.lines[0] for name, function in functions_of(source, language).items()} == expected


@pytest.mark.parametrize(
    ("language", "source"),
    [
        ("kotlin", "class A {\n  fun a() {\n    b()\n  }\n}\n"),
        ("java", "class A {\n  void a() {\n    b(;\n  }\n}\n"),
        ("c", "API_BEGIN\nint a(void) {\n  return 1;\n}\n"),
    ],
)
def test_an_error_in_a_function_or_on_one_line_hides_none(language, source):
    assert parse_file(source.encode(), language)[1]


def test_a_googletest_case_is_not_a_function():
    assert not functions_of("TEST_F(CartTest, Total) {\n  int a;\n}\nTEST(Cart, Sum) {\n  int a;\n}\n", "cpp")


@pytest.mark.parametrize(
    "text", ["A ", "int A ", "API\n", "class A ", "f(int a A, ", '"', "/*", "#", "f(A(", "A B(", ") A "]
)
def test_files_made_to_be_slow_take_little_time(text):
    source = text.encode() * 20_000
    started = time.process_time()
    assert len(_without_macros(source)) == len(source)
    assert time.process_time() - started < 2


def test_ctrl_c_in_the_parser_stays_ctrl_c(monkeypatch):
    monkeypatch.setattr(
        "soft_trainer.source.definitions.time.thread_time", Mock(side_effect=[0, KeyboardInterrupt, 1, 1, 1])
    )
    with pytest.raises(KeyboardInterrupt):
        parse(b"x = 1\n" * 20_000, "python")


def test_only_parsing_has_a_limit_and_it_is_in_cpu_time():
    """A query compares texts through the parser's `read`, and never ends if `read` gives no text."""
    source = b"Foo.prototype.bar = function () { return 1; };\n"
    assert parse(source * 20_000, "javascript", 0.05) is None
    root = parse(source, "javascript", 0.1)
    time.sleep(0.1)
    ended = time.thread_time() + 0.15
    while time.thread_time() < ended:
        pass
    names = [(found.kind, found.name) for found in definitions(root, source, "javascript")]
    assert names == [("signature", "Foo.prototype.bar"), ("function", "Foo.prototype.bar")]
