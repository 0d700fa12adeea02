"""The package's folders form layers, in the order in which data flows. No module imports a higher layer."""

import ast
from functools import cache
from pathlib import Path

import soft_trainer

PACKAGE = Path(soft_trainer.__file__).parent
# From top to bottom. Layers on the same line do not import each other.
ORDER = [
    ("cli",),
    ("studies",),
    ("shell",),
    ("sentence_transformers",),
    ("search",),
    ("trainer",),
    ("run",),
    ("training",),
    ("merging",),
    ("hub", "model_card"),
    ("evaluation",),
    ("estimators",),
    ("data",),
    ("options",),
    ("mining",),
    ("encoders",),
    ("criterion",),
    ("loss_options",),
    ("option_spec",),
    ("losses", "weights"),
    ("dataflow",),
    ("source",),
    ("metrics",),
    ("references",),
    ("shares",),
    ("choices",),
    ("cards",),
    ("hub_files",),
    ("packaged",),
    ("fingerprints",),
    ("files",),
    ("terminal",),
    ("distributed",),
    ("errors",),
]
# All layers that search may import.
SEARCH_IMPORTS = set("dataflow encoders errors files fingerprints mining packaged source terminal".split())
# The folders of search form layers too, with the modules in its root between them.
SEARCH_ORDER = ["measuring", "serving", "code_index", "searching", "view", "snapshot", "ranking", "index"]
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


@cache
def tree_of(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


def test_nothing_imports_what_stands_above_it():
    assert {layer_of(path) for path in FILES} - {"__init__"} <= LEVEL.keys(), "a layer is missing from ORDER"
    wrong = []
    for path in FILES:
        layers = imported_layers(tree_of(path))
        own = layer_of(path)
        above = {layer for layer in layers - {own} if own != "__init__" and LEVEL[own] >= LEVEL[layer]}
        if own not in ("cli", "search"):
            above |= layers & {"search"}  # only the command line enters it
        if own not in ("cli", "hub") and path != PACKAGE / "run" / "trainer.py":
            above |= layers & {"hub"}  # only the publisher pushes
        if own == "data":
            above |= layers & {"options", "mining"}
        wrong += [f"{path}: {own} imports {layer}" for layer in above]
    assert not wrong


def test_search_imports_few_layers_and_its_folders_form_layers():
    wrong = []
    for path in (PACKAGE / "search").rglob("*.py"):
        foreign = imported_layers(tree_of(path)) - {"search"} - SEARCH_IMPORTS
        wrong += [f"{path}: search imports {layer}" for layer in foreign]
        own = path.relative_to(PACKAGE / "search").with_suffix("").parts[0]
        for node in ast.walk(tree_of(path)):
            if (
                own != "__init__"
                and isinstance(node, ast.ImportFrom)
                and node.module.startswith("soft_trainer.search.")
            ):
                layer = node.module.split(".")[2]
                if SEARCH_ORDER.index(own) > SEARCH_ORDER.index(layer):
                    wrong.append(f"{path}: {own} imports {layer}")
    assert not wrong


def test_modules_import_one_another_without_circles():
    imports = {}
    for path in FILES:
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        imports[name] = {
            node.module if f"{node.module}.{alias.name}" not in MODULES else f"{node.module}.{alias.name}"
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ImportFrom) and node.module in MODULES
            for alias in node.names
        }
    finished = set()
    while ready := [name for name in imports.keys() - finished if imports[name] & imports.keys() <= finished | {name}]:
        finished.update(ready)
    assert imports.keys() == finished
