"""The package's folders form layers, in the order in which data flows. No module imports a higher layer."""

import ast
from pathlib import Path

import pytest

import soft_trainer

PACKAGE = Path(soft_trainer.__file__).parent
# From top to bottom. Layers on the same line do not import each other.
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
    ("criterion",),
    ("losses", "weights"),
    ("dataflow",),
    ("source",),
    ("metrics",),
    ("references",),
    ("choices",),
    ("fingerprints",),
    ("files",),
    ("terminal",),
    ("distributed",),
    ("errors",),
]
# All layers that search may import.
SEARCH_IMPORTS = {"dataflow", "encoders", "errors", "files", "fingerprints", "mining", "source", "terminal"}
# The folders of search form layers too, with the modules in its root between them.
SEARCH_ORDER = ["measuring", "serving", "code_index", "searching", "snapshot", "commits", "ranking", "index"]
LEVEL = {layer: level for level, layers in enumerate(ORDER) for layer in layers}
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for path in FILES
}
# The layer of each name that the package exports.
HOMES = {
    alias.name: node.module.split(".")[0]
    for node in ast.parse((PACKAGE / "__init__.pyi").read_text()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}


def imported_layers(tree: ast.AST) -> set[str]:
    """Returns the layers that a module imports."""
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "soft_trainer":
            names = [f"soft_trainer.{alias.name}" for alias in node.names] if node.module == "soft_trainer" else []
            names = names or [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        parts = [name.split(".")[1] for name in names if name.startswith("soft_trainer.")]
        # A name imported from the package counts as an import from the name's layer.
        found |= {HOMES.get(part, part) for part in parts}
    return found


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_nothing_imports_what_stands_above_it(path):
    own = layer_of(path)
    if own == "__init__":
        return
    for layer in imported_layers(ast.parse(path.read_text())) - {own}:
        assert layer in LEVEL, f"{path}: {layer} is missing from ORDER"
        assert LEVEL[own] < LEVEL[layer], f"{own} imports {layer}, which is not below it"


@pytest.mark.parametrize("path", (PACKAGE / "search").rglob("*.py"), ids=lambda path: path.stem)
def test_search_imports_few_layers(path):
    tree = ast.parse(path.read_text())
    assert imported_layers(tree) - {"search"} <= SEARCH_IMPORTS
    own = path.relative_to(PACKAGE / "search").with_suffix("").parts[0]
    for node in ast.walk(tree):
        if own != "__init__" and isinstance(node, ast.ImportFrom) and node.module.startswith("soft_trainer.search."):
            layer = node.module.split(".")[2]
            assert SEARCH_ORDER.index(own) <= SEARCH_ORDER.index(layer), f"{path}: {own} imports {layer}, above it"


def test_only_the_command_line_and_search_itself_enter_search():
    for path in FILES:
        if layer_of(path) not in ("cli", "search"):
            assert "search" not in imported_layers(ast.parse(path.read_text())), path


def test_rows_know_no_options_of_a_run():
    for path in (PACKAGE / "data").rglob("*.py"):
        assert imported_layers(ast.parse(path.read_text())).isdisjoint({"options", "run"}), path


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


def test_every_module_belongs_to_a_layer():
    assert {layer_of(path) for path in FILES} - {"__init__"} <= LEVEL.keys()
