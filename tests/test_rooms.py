"""The folders of the package form layers, in the order in which data passes them. Nothing imports a higher layer."""

import ast
from pathlib import Path

import pytest

import soft_trainer

PACKAGE = Path(soft_trainer.__file__).parent
# From the top to the bottom; rooms of one line may not import each other.
ORDER = [
    ("cli",),
    ("studies",),
    ("run",),
    ("sentence_transformers",),
    ("search",),
    ("trainer",),
    ("training",),
    ("merging",),
    ("hub",),
    ("evaluation",),
    ("estimators",),
    ("data",),
    ("options",),
    ("mining",),
    ("encoders",),
    ("objective",),
    ("comparisons",),
    ("losses", "weights"),
    ("dataflow",),
    ("source",),
    ("metrics",),
    ("choices",),
    ("fingerprints",),
    ("files",),
    ("terminal",),
    ("distributed",),
    ("errors",),
]
# Search is a house with one door: these are all the rooms that it enters.
SEARCH_ENTERS = {"dataflow", "encoders", "errors", "files", "fingerprints", "mining", "source", "terminal"}
# The folders of search form layers too, with the modules at its root between them.
SEARCH_ORDER = ["measuring", "serving", "code_index", "searching", "snapshot", "commits", "ranking", "index"]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for path in FILES
}
# The room that each name comes from which the package itself exports.
HOMES = {
    alias.name: node.module.split(".")[0]
    for node in ast.parse((PACKAGE / "__init__.pyi").read_text()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}


def imported_rooms(tree: ast.AST) -> set[str]:
    """Returns the rooms that a module imports."""
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "soft_trainer":
            names = [f"soft_trainer.{alias.name}" for alias in node.names] if node.module == "soft_trainer" else []
            names = names or [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        parts = [name.split(".")[1] for name in names if name.startswith("soft_trainer.")]
        # A name imported from the package itself counts as the room that it comes from.
        found |= {HOMES.get(part, part) for part in parts}
    return found


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_nothing_imports_what_stands_above_it(path):
    own = room_of(path)
    if own == "__init__":
        return
    for room in imported_rooms(ast.parse(path.read_text())) - {own}:
        assert room in LEVEL, f"{path}: {room} is in no room of ORDER"
        assert LEVEL[own] < LEVEL[room], f"{own} imports {room}, which is not below it"


@pytest.mark.parametrize("path", (PACKAGE / "search").rglob("*.py"), ids=lambda path: path.stem)
def test_search_is_a_house_with_one_door(path):
    tree = ast.parse(path.read_text())
    assert imported_rooms(tree) - {"search"} <= SEARCH_ENTERS
    own = path.relative_to(PACKAGE / "search").with_suffix("").parts[0]
    for node in ast.walk(tree):
        if own != "__init__" and isinstance(node, ast.ImportFrom) and node.module.startswith("soft_trainer.search."):
            room = node.module.split(".")[2]
            assert SEARCH_ORDER.index(own) <= SEARCH_ORDER.index(room), f"{path}: {own} imports {room}, above it"


def test_only_the_command_line_and_search_itself_enter_search():
    for path in FILES:
        if room_of(path) not in ("cli", "search"):
            assert "search" not in imported_rooms(ast.parse(path.read_text())), path


def test_rows_know_no_options_of_a_run():
    for path in (PACKAGE / "data").rglob("*.py"):
        assert imported_rooms(ast.parse(path.read_text())).isdisjoint({"options", "run"}), path


def test_modules_import_one_another_without_circles():
    imports = {}
    for path in FILES:
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        imports[name] = {
            node.module if f"{node.module}.{alias.name}" not in MODULES else f"{node.module}.{alias.name}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module in MODULES
            for alias in node.names
        }
    finished = set()
    while ready := [name for name in imports.keys() - finished if imports[name] & imports.keys() <= finished | {name}]:
        finished.update(ready)
    assert imports.keys() == finished


def test_an_import_inside_a_function_says_why():
    for path in [*FILES, PACKAGE.parent / "run_codesearch.py"]:
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                inner = [each for each in node.body if isinstance(each, ast.Import | ast.ImportFrom)]
                if inner:
                    around = "\n".join(lines[inner[0].lineno - 3 : inner[-1].end_lineno])
                    assert "#" in around, f"{path}:{inner[0].lineno} {node.name} hides an import"


def test_every_room_has_its_place():
    assert {room_of(path) for path in FILES} - {"__init__"} <= LEVEL.keys()


def test_the_package_is_small_enough_to_read():
    modules = [path for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= 13
    for path in FILES:
        # The trainer's whole story is in one file.
        most = 650 if path == PACKAGE / "trainer.py" else 400
        assert len(path.read_text().splitlines()) <= most, f"{path} is too long"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name} is too long"


def test_training_takes_what_it_needs_and_no_trainer():
    for path in (PACKAGE / "training").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arguments):
                names = {argument.arg for argument in [*node.posonlyargs, *node.args, *node.kwonlyargs]}
                assert "trainer" not in names, f"{path}: a function takes the trainer"


def test_docstrings_begin_with_what_they_speak_of():
    for path in [*FILES, *PACKAGE.parent.glob("benchmarks/*.py"), *PACKAGE.parent.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                first = (ast.get_docstring(node) or "").split(" ")[0]
                assert first not in ("What", "Which", "Who", "Where", "How"), f"{path}: {ast.get_docstring(node)}"
