"""Functions and their documentation are found in source files of every language."""

import re
import time

import pytest

from soft_trainer.dataflow import DATA_FLOW_LANGUAGES
from soft_trainer.mining.rules import CODE_RULES, DOCUMENT_RULES, first_broken, unparseable
from soft_trainer.source.definitions import _without_inner_comments, parse
from soft_trainer.source.documentation import document_tokens, summary
from soft_trainer.source.functions import FileFunctions
from soft_trainer.source.languages import SOURCE_LANGUAGES

# language -> source, and its expected rows: name, query, code, documentation
# fmt: off
SOURCES = {
    "python": ('''
class Cart:
    @property
    def total(self):
        """Add up the *prices* of :class:`~shop.Item` in ``items``.

        :param x: none
        """
        price = 0  # in cents

        # every item once
        for item in self.items:
            price += item.price
        return f"{price}"

    def empty(self):
        """Nothing else in it.
        """
''', [
        ("Cart.total", "Add up the prices of shop.Item in items.",
         "def total(self):\n        price = 0\n\n        for item in self.items:\n"
         '            price += item.price\n        return f"{price}"',
         "Add up the *prices* of :class:`~shop.Item` in ``items``.\n\n:param x: none"),
        ("Cart.empty", "Nothing else in it.", "def empty(self):", "Nothing else in it."),
    ]),
    "ruby": ("""
module Shop
  class Cart
    # :call-seq:
    #   total -> Integer
    #
    # Adds up the +prices+ of {Item} in <tt>items</tt>.
    #   cart.total # => 3
    #
    # @return [Integer]
    def total
      # every item once
      items.sum(&:price)
    end

    # rubocop:disable Style
    # Empties it.
    private def self.clear(*names) = names.clear
  end
end
""", [
        ("Shop.Cart.total", "Adds up the prices of Item in items.", "def total\n      items.sum(&:price)\n    end",
         ":call-seq:\n  total -> Integer\n\nAdds up the +prices+ of {Item} in <tt>items</tt>.\n"
         "  cart.total # => 3\n\n@return [Integer]"),
        ("Shop.Cart.clear", "Empties it.", "def self.clear(*names) = names.clear", "Empties it."),
    ]),
    "java": ("""
class Cart {
    /**
     * Adds up the {@code List<Price>} of every {@link Item#price() price}.
     * <p>More of it.
     * @return cents
     */
    @Override
    public int total() {
        return 1; // cents
    }

    /// {@return the {@code n}th item}
    Item at(int n) { return items.get(n); }

    /* no documentation */
    int size() { return 0; }

    abstract int none();
}
""", [
        ("Cart.total", "Adds up the List<Price> of every price.",
         "@Override\n    public int total() {\n        return 1;\n    }",
         "Adds up the {@code List<Price>} of every {@link Item#price() price}.\n<p>More of it.\n@return cents"),
        ("Cart.at", "Returns the nth item", "Item at(int n) { return items.get(n); }",
         "{@return the {@code n}th item}"),
        ("Cart.size", "", "int size() { return 0; }", ""),
    ]),
    "javascript": ("""
(function () {
  /**
   * Adds up `prices`, see [here](x.html).
   *
   * @param {Item[]} items
   */
  // eslint-disable-next-line
  exports.total = function (items) {
    return items.map(item => item.price);
  };

  class Cart {
    /** @description Empties it. */
    static async clear() { await 1; }
  }
  const cart = {
    /** Sells it. */
    sell: async (a) => `${a}`,
  };
  // no documentation
  function plain() {}
})();
""", [
        ("exports.total", "Adds up prices, see here.",
         "exports.total = function (items) {\n    return items.map(item => item.price);\n  }",
         "Adds up `prices`, see [here](x.html).\n\n@param {Item[]} items"),
        ("Cart.clear", "Empties it.", "static async clear() { await 1; }", "@description Empties it."),
        ("sell", "Sells it.", "sell: async (a) => `${a}`", "Sells it."),
        ("plain", "", "function plain() {}", ""),
    ]),
    "php": ("""<?php
namespace Shop;
final class Cart
{
    /**
     * Adds up the {@see Item::$price} of all <b>items</b>.
     *
     * @return int
     */
    #[Pure]
    public function total(): int
    {
        /* every item once */
        return array_sum($this->prices); # cents
    }

    /** {@inheritdoc} */
    public function none() { return 0; }
}
""", [
        ("Cart.total", "Adds up the Item::$price of all items.",
         "#[Pure]\n    public function total(): int\n    {\n        return array_sum($this->prices);\n    }",
         "Adds up the {@see Item::$price} of all <b>items</b>.\n\n@return int"),
        ("Cart.none", "", "public function none() { return 0; }", "{@inheritdoc}"),
    ]),
    "go": ("""package shop

// Total adds up the prices in a [Cart].
// It never fails.
//
//	c.Total()
//
//go:noinline
func (c *Cart[T]) Total() int {
	// every item once
	return c.sum // cents
}

// not for it

func helper() {}
""", [
        ("Cart.Total", "Total adds up the prices in a Cart. It never fails.",
         "func (c *Cart[T]) Total() int {\n\treturn c.sum\n}",
         "Total adds up the prices in a [Cart].\nIt never fails.\n\n       c.Total()"),
        ("helper", "", "func helper() {}", ""),
    ]),
}
# language without data flow -> source, and the name and query of its function
SHORT_SOURCES = {
    "typescript": ("/** Adds numbers. */\nexport const add = (a: number) => { return a }\n", "add", "Adds numbers."),
    "tsx": ("/** Shows it. */\nexport function View(p: P) { return <div>{p.a}</div> }\n", "View", "Shows it."),
    "c": ("/** Adds one.\n * @param a x */\nstatic int *add(int a)\n{\n return &a;\n}\n", "add", "Adds one."),
    "cpp": ("/// Adds one.\nint &shop::Cart::add(int x) { return x; }\n", "shop.Cart.add", "Adds one."),
    "csharp": ("class Cart {\n  /// <summary>Adds one.</summary>\n  int Add(int x) { return x; }\n}\n", "Cart.Add",
               "Adds one."),
    "rust": ("impl<T> Cart<T> {\n  /// Adds one.\n  ///\n  /// # Errors\n  fn add(&self) {}\n}\n", "Cart.add",
             "Adds one."),
    "kotlin": ("/**\n * Adds one.\n * @param x y\n */\nfun add(x: Int): Int { return x }\n", "add", "Adds one."),
}
# language -> functions with an empty body and no documentation
EMPTY_BODIES = {
    "python": ["def f():", "def f():\n    # nothing\n", "class A:\n    def f(self):\n"],
    "ruby": ["def f\nend", "def f\n  # nothing\nend"],
    "java": ["class A { void f() {} }", "class A { void f() { /* nothing */ } }", "class A { A() {} }"],
    "javascript": ["function f() {}", "const f = () => {}", "class A { f() { /* nothing */ } }"],
    "php": ["<?php function f() {}", "<?php function f() { /* nothing */ }"],
    "go": ["package a\nfunc f() {}", "package a\nfunc f() { /* nothing */ }"],
    "typescript": ["function f(): void {}", "const f = (): void => { /* nothing */ }"],
    "tsx": ["function F() {}", "const F = () => { /* nothing */ }"],
    "c": ["void f(void) {}", "void f() { /* nothing */ }"],
    "cpp": ["void f() {}", "A::A() {}", "void f() { /* nothing */ }"],
    "csharp": ["class A { void F() {} }", "class A { void F() { /* nothing */ } }"],
    "rust": ["fn f() {}", "fn f() { /* nothing */ }"],
    "kotlin": ["fun f() {}", "fun f() { /* nothing */ }"],
}
# fmt: on


def rows_of(source: str, language: str) -> list[dict]:
    text = source.encode()
    return FileFunctions(parse(text, language), text, language, "path").rows()


@pytest.mark.parametrize("language", SOURCES)
def test_functions_of_a_file(language):
    source, expected = SOURCES[language]
    rows = rows_of(source, language)
    assert [row["func_name"] for row in rows] == [name for name, *_ in expected]
    for row, (_, query, code, docstring) in zip(rows, expected, strict=True):
        assert row["docstring"] == docstring
        assert row["docstring_tokens"] == document_tokens(query)
        assert row["code"] == code
        assert "".join(row["code_tokens"]) == "".join(code.split())
        first, last = map(int, re.search(r"#L(\d+)-L(\d+)$", row["url"]).groups())
        assert row["original_string"] in "\n".join(source.splitlines()[first - 1 : last])
        assert not unparseable(row["code"], language) or row["func_name"] == "Cart.empty"


@pytest.mark.parametrize("language", sorted(set(SOURCE_LANGUAGES) - set(DATA_FLOW_LANGUAGES)))
def test_a_documented_function_of_a_language_without_data_flow(language):
    source, name, query = SHORT_SOURCES[language]
    (row,) = rows_of(source, language)
    assert (row["func_name"], row["docstring_tokens"]) == (name, document_tokens(query))
    assert query not in row["code"] and row["code_tokens"]
    assert first_broken(row, [*CODE_RULES, *DOCUMENT_RULES]) == "short_functions" or language == "c"


@pytest.mark.parametrize("language", SOURCE_LANGUAGES)
def test_a_function_with_an_empty_body_has_no_documentation(language):
    for source in EMPTY_BODIES[language]:
        rows = rows_of(source, language)
        assert len(rows) == (language != "ruby"), source  # in Ruby's grammar such a method has no body, hence no row
        for row in rows:
            assert (row["docstring"], row["docstring_tokens"]) == ("", [])
            assert row["code"] and row["code_tokens"]


def test_two_comments_on_a_line_take_the_line_with_them():
    (row,) = rows_of("def f(a):\n    'Gives it back.'  # fmt: skip\n    return a\n", "python")
    assert row["code"] == "def f(a):\n    return a"


def test_functions_of_one_name_are_all_rows():
    source = "var a = {\n" + "".join(f"  {name}: function () {{ return 1 }},\n" for name in "xyx") + "}\n"
    assert [row["func_name"] for row in rows_of(source, "javascript")] == ["x", "y", "x"]


@pytest.mark.parametrize(
    ("language", "docstring", "query"),
    [
        ("python", "Sum.\n\nMore.", "Sum."),
        ("python", "Args:\n  x: a number", ""),
        (
            "python",
            "``x`` for *args and **kwargs, `name' or a[0][1].\n----",
            "x for *args and **kwargs, 'name' or a[0][1].",
        ),
        ("python", "Take a look. For example::\n\n  f()", "Take a look."),
        ("python", "Add.\n:param x: a number", "Add."),
        ("java", "A&nbsp;&lt;b&gt;\n<ul><li>c", "A\xa0<b>"),
        ("java", "{@link #f(int, int)} or {@linkplain A#b c d}", "f(int, int) or c d"),
        ("java", "@return x", ""),
        ("php", "{@inheritDoc}", ""),
        ("javascript", "Makes `it`.\n```js\nit()\n```", "Makes it."),
        ("ruby", "Call \\Foo with +a+ or {label}[http://x]. Options:\n\n* b", "Call Foo with a or label. Options:"),
        ("ruby", "name:: of it", ""),
        ("go", "F calls [pkg.G].\nDeprecated: call G", "F calls pkg.G."),
        ("c", "@brief Reads the header.\n@param[in] x a number", "Reads the header."),
        ("c", r"\brief Reads \p size bytes. \param size a number \return bytes", "Reads size bytes."),
        ("c", "\\fn int read(int)\n\\ingroup io\n\nReads it.\n\\details Slowly.", "Reads it."),
        ("cpp", "\\returns the sum\n  of all\n\n\\sa other\n\nAdds numbers.\n\nMore.", "Adds numbers."),
        ("cpp", "\\returns the sum\n\n\\param a a number", ""),
        ("c", "@brief Reads\n  two lines.\n\nMore.", "Reads two lines."),
        (
            "cpp",
            r'Fills \ref buffer "the buffer" with \link Item items\endlink, 5\% at once.',
            "Fills the buffer with items, 5% at once.",
        ),
        ("cpp", "@copydoc other()", ""),
        ("cpp", "Mail to ann@return.org, not @ann.", "Mail to ann@return.org, not @ann."),
        ("csharp", '<summary>\nReads the <see cref="Order"/> date.\n</summary>', "Reads the Order date."),
        (
            "csharp",
            '<summary>Maps <paramref name="x"/> to <see cref="T:List{T}"/>.</summary><returns>it</returns>',
            "Maps x to List<T>.",
        ),
        ("csharp", '<param name="x">a number</param>\n<summary>Reads it.</summary>', "Reads it."),
        ("csharp", '<summary><see href="x.html">Reads</see> a <c>b &lt; c</c>.</summary>', "Reads a b < c."),
        ("csharp", '<inheritdoc cref="Order"/>', ""),
    ],
)
def test_summary(language, docstring, query):
    assert document_tokens(summary(docstring, SOURCE_LANGUAGES[language].style)) == document_tokens(query)


# language -> a source, and the documentation of each function
DOC_COMMENTS = {
    "rust": (
        """
impl A {
    /// Reads it,
    /// slowly.
    #[inline] // small
    #[cfg(
        feature = "a"
    )]
    // SAFETY: none
    pub fn documented() {}
    #[test] fn on_one_line() {}
    fn below_an_attribute_of_another() {}
    /** A block. */
    #[must_use]
    fn block() {}
}
""",
        ["Reads it,\nslowly.", "", "", "A block."],
    ),
    "typescript": (
        """
class A {
  /** Above decorators. */
  @Get() @Http(200)
  @Auth({
    role: "x",
  })
  decorated() {}

  /** A parameter has a decorator. */
  constructor(@Inject() private a: B) {}
  undocumented() {}

  /** Above a signature. */
  overloaded(a: string): void;

  overloaded(a: number): void;
  overloaded(a: any) {}
}
class Other { overloaded(a: any) {} }
/** Exported. */
export function exported(a: string): void;
export function exported(a: any) {}
""",
        ["Above decorators.", "A parameter has a decorator.", "", "Above a signature.", "", "Exported."],
    ),
    "javascript": ("class A {\n  @A()\n  /** Between decorators. */\n  @B() f() {}\n}\n", ["Between decorators."]),
    "java": (
        """
class A {
    @Override
    /** Below an annotation. */
    public int below() { return 1; }
    @Named(
        // no documentation
        value = 1)
    int undocumented() { return 1; }
}
""",
        ["Below an annotation.", ""],
    ),
    "kotlin": ("class A {\n  @Test\n  /** Below it. */\n  fun f(): Int { return 1 }\n}\n", ["Below it."]),
    "php": ("<?php class A {\n  #[Pure]\n  /** Below it. */\n  function f() { return 1; }\n}\n", ["Below it."]),
    "ruby": ("# Above a signature.\nsig { params(x: Integer).void }\ndef f(x)\n  x\nend\n", ["Above a signature."]),
    "c": (
        """
/*! Of Qt.
 *  Two lines. */
int qt(void) { return 1; }
//! One line.
/* not this one */
//! Two lines.
int line(void) { return 1; }
/// Kept.
// not this one
__attribute__((unused))
int kept(void) { return 1; }
""",
        ["Of Qt.\nTwo lines.", "Two lines.", "Kept."],
    ),
}


@pytest.mark.parametrize("language", DOC_COMMENTS)
def test_a_doc_comment_above_or_below_attributes_decorators_and_overloads(language):
    source, expected = DOC_COMMENTS[language]
    assert [row["docstring"] for row in rows_of(source, language)] == expected


# directives after which tree-sitter's grammar for C would lose a function
DIRECTIVES = [
    "#define SWAP(a, b) /* both */ \\\n  do { /* inner */ \\\n    swap(a, b); \\\n  } while (0)",
    "#define FAIL do { /*nothing*/; } while (0)",
    "#define SUM a /* first */ + /* second */ b /* third */",
    "#define MANY 1 /* a comment\n  of two lines */ + 2",
    '#define GLOB "src/*" ".c"',
    "# define QUIET(x) /* x */ (x) // note /* more */",
    "#pragma omp /* all */ parallel",
]


@pytest.mark.parametrize("directive", DIRECTIVES)
@pytest.mark.parametrize("language", ["c", "cpp"])
def test_a_comment_in_a_directive_loses_no_function(language, directive):
    source = f"{directive}\n\n/** Adds one. */\nint add(int a)\n{{\n  return a + 1; /* one */\n}}\n"
    (row,) = rows_of(source, language)
    assert (row["func_name"], row["docstring"]) == ("add", "Adds one.")
    assert row["code"] == "int add(int a)\n{\n  return a + 1;\n}"


@pytest.mark.parametrize(
    "text", [b"#define /*", b"#define A /*\n", b'#define A "/*"\n', b"#define A /**/ x\n", b'#define "']
)
def test_directives_made_to_be_slow_take_little_time(text):
    started = time.process_time()
    assert len(_without_inner_comments(text * 2_000)) == len(text) * 2_000
    assert time.process_time() - started < 0.5
