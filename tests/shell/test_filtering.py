import pytest
from datasets import Dataset

from soft_trainer.errors import UserError
from soft_trainer.mining.rules import (
    COLUMNS,
    RULES,
    first_broken,
)
from soft_trainer.shell.filtering import filter_rows

pytestmark = pytest.mark.usefixtures("own_cache")

CODE = "def add(a, b):\n    c = a + b\n    return c"


def row(code=CODE, query="add two numbers", name="add", path="shop/cart.py", language="python"):
    texts = {"code": code, "code_tokens": code.split(), "docstring_tokens": query.split()}
    return {"func_name": name, "path": path, "language": language, **texts}


@pytest.mark.parametrize(
    ("rule", "dropped", "kept"),
    [
        ("short_functions", row("def f():\n\n    return 1"), row("def f():\n    x = 1\n    return x")),
        ("tests", row(name="Cart.test_add"), row(name="Cart.latest")),
        ("tests", row(path="src/test/CartTest.java"), row(path="contest/testimony.py", name="TestCase.run")),
        ("tests", row(path="spec/cart.rb", language="ruby"), row(path="crypto/spec/key.java", language="java")),
        ("constructors", row(name="Cart.__init__"), row(name="initialize")),
        ("constructors", row(name="Cart.initialize", language="ruby"), row(name="Cart.init", language="ruby")),
        ("constructors", row(name="Shop.Cart.Cart", language="java"), row(name="Cart.cart", language="java")),
        ("constructors", row(name="Cart.constructor", language="javascript"), row(name="NewCart", language="go")),
        ("magic_methods", row(name="Cart.__str__"), row(name="Cart.__str")),
        ("magic_methods", row(name="Cart.<=>", language="ruby"), row(name="Cart.compare", language="ruby")),
        ("magic_methods", row(name="Cart.toString", language="java"), row(name="toString")),
        ("magic_methods", row(name="Cart.__get", language="php"), row(name="Cart._get", language="php")),
        ("document_length", row(query="two words"), row(query="now three words")),
        ("document_length", row(query="word " * 257), row(query="word " * 256)),
        ("images", row(query="see < img src = x >"), row(query="see an image or img")),
        ("links", row(query="see https : / / a . b"), row(query="send an http request")),
        ("links", row(query="see http://a.b please"), row(query="see a : / / b")),
        ("not_ascii", row(query="计算 two numbers"), row(query="it's 100 % ASCII")),
    ],
)
def test_row_rules(rule, dropped, kept):
    assert first_broken(dropped, [rule]) == rule
    assert first_broken(kept, [rule]) == ""


def test_filter_rows_counts_each_row_once():
    rows = [
        row(),
        row(query="no"),
        row("def broken(:\n    x = 1\n    return", query="is broken anyway"),
        row(),  # a duplicate
        row(name="test_add", query="no"),  # the first rule counts
        row("def sub(a, b):\n    d = a - b  # why\n    return d", query="subtract two numbers"),
    ]
    kept, counts = filter_rows(Dataset.from_list(rows), list(reversed(RULES)))
    assert kept["func_name"][:] == ["add", "add"]
    assert kept["code"][0] == CODE
    assert [line.strip() for line in kept["code"][1].splitlines()] == ["def sub(a, b):", "d = a - b", "return d"]
    assert kept["code_tokens"][0] == CODE.split()  # untouched
    assert kept["code_tokens"][1][-4:] == ["-", "b", "return", "d"]
    assert kept.column_names == list(rows[0])
    assert list(counts) == list(RULES)
    expected = {"comments": 1, "unparseable": 1, "tests": 1, "document_length": 1, "duplicates": 1}
    assert {name: count for name, count in counts.items() if count} == expected


@pytest.mark.parametrize("rule", RULES)
def test_a_column_that_a_rule_needs_is_named_with_the_rule(rule):
    rows = [row(), row(query="a b c d")]
    assert COLUMNS[rule]
    for column in COLUMNS[rule]:
        with pytest.raises(UserError, match=f"^valid: no column '{column}', which the filter {rule!r} needs$"):
            filter_rows(Dataset.from_list(rows).remove_columns(column), [rule], name="valid")
        holes = Dataset.from_list([rows[0], rows[1] | {column: None}])
        with pytest.raises(UserError, match=f"^rows: row 2 has no '{column}', which the filter {rule!r} needs$"):
            filter_rows(holes, [rule])
        filter_rows(holes.select([0]), [rule])
    filter_rows(Dataset.from_list(rows).select_columns([*COLUMNS[rule]]), [rule])


def test_no_rows_stay_no_rows():
    rows = Dataset.from_list([row()]).select([])
    kept, counts = filter_rows(rows, list(RULES))
    assert len(kept) == 0 and kept.column_names == rows.column_names and counts == dict.fromkeys(RULES, 0)


def test_processes_change_nothing():
    rows = Dataset.from_list([row(query="w " * number, name=f"f{number % 3}") for number in range(1, 8)])
    one, two = (filter_rows(rows, ["document_length", "near_duplicates"], num_proc=n) for n in (None, 2))
    assert one[1] == two[1] == {"document_length": 2, "near_duplicates": 4}
    assert one[0].to_list() == two[0].to_list()
