"""A search for an error message finds the chunk that raises it."""

import pytest
from trees import write_tree

from soft_trainer.search import CodeIndex

# Speaks more about the messages than the code that raises them.
DECOY = '''
    def resolved_template(template, folder):
        """Says "no template found in folder": a template that no folder has found, in the folder."""
        # no template found in folder; template found, folder found
        return template.found(folder)
    '''
RAISING = {
    "a.py": 'def f(x):\n    raise E("no template "\n        f"found in folder {x!r}, tried {x}")\n',
    "a.js": "function f(x) {\n  throw new Error(`no template found in folder ${x}`);\n}\n",
    "a.ts": "function f(x: X): X {\n  throw new Error('no template found in folder ' + x);\n}\n",
    "a.go": 'package a\n\nfunc f(x X) error {\n\treturn errors.New("no template found in folder")\n}\n',
    "a.rs": 'fn f(x: X) {\n    panic!("no template found in folder {}", x);\n}\n',
    "a.java": 'class A {\n  void f(X x) {\n    throw new E("no template found in folder " + x);\n  }\n}\n',
    "a.kt": 'fun f(x: X) {\n    error("no template found in folder $x")\n}\n',
    "a.cs": 'class A {\n  void F(X x) {\n    throw new E($"no template found in folder {x}");\n  }\n}\n',
    "a.rb": 'def f(x)\n  raise E, "no template found in folder #{x}"\nend\n',
    "a.php": "<?php\nfunction f($x) {\n  throw new E(sprintf('no template found in folder %s', $x));\n}\n",
    "a.c": 'int f(X *x) {\n  die("no template found in folder %s", x);\n}\n',
    "a.cpp": 'int g::f(X &x) {\n  throw std::runtime_error("no template found in folder");\n}\n',
}


@pytest.mark.parametrize("path", RAISING)
@pytest.mark.parametrize("kind", ["", "java.lang.IllegalStateException: "])
def test_a_message_finds_the_chunk_that_raises_it(tmp_path, path, kind):
    files = {"templates.py": DECOY, f"deep/down/{path}": RAISING[path] + "x\n" * 90}
    index = CodeIndex.build(write_tree(tmp_path / "tree", files))
    found = index.search(f"{kind}no template found in folder 'pages'")
    assert found[0].path == f"deep/down/{path}" and found[0].score > found[1].score > 0
    assert index.search(f"{kind}no template found in folder", path="*.py")[-1].path == "templates.py"


RAISED = {
    "app.py": """
        def first(x):
            raise E("Missing command.")

        def second(x):
            raise E(f"Invalid value for {x}: it's {x} times\\ttoo long")

        def third(x):
            raise E("a missing command is not an error of this kind")
        """,
    "tests/test_app.py": """
        def test_second(x):
            assert message(x) == "Invalid value for 'count': it's 3 times too long"
        """,
    "docs.py": DECOY.replace("template", "command").replace("found", "missing value")
    + "    # command missing: Missing, command, too long, invalid value, value for value",
}


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("Missing command.", "first"),
        ("Error: Missing command", "first"),
        ("Invalid value for 'count': it's 3 times too long", "second"),  # the whole message is in a test
        ("Error: value for x: it's 7 times too long", "second"),
        ("which value for a column is too long", "resolved_command"),  # half of these words, but not most of a literal
        ("missing value of a command", "resolved_command"),  # two words of a literal, and comments, are no message
        ("command missing", "resolved_command"),
    ],
)
def test_half_of_a_message_is_enough_if_it_is_most_of_a_literal(tmp_path, query, name):
    assert CodeIndex.build(write_tree(tmp_path / "tree", RAISED)).search(query)[0].name == name
