"""Reads recipes, which are YAML files of options."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import yaml

from soft_trainer.errors import UserError

# A wheel has the recipes inside the package. A checkout has them next to it.
_PACKAGE = Path(__file__).parents[1]
RECIPES = _PACKAGE / "recipes" if (_PACKAGE / "recipes").is_dir() else _PACKAGE.parent / "recipes"


_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """Reads scalars as YAML 1.2 does, so that `no` is a word and `1e-5` a number. Refuses a key that occurs twice."""

    def construct_mapping(self, node, deep=False):
        """Returns the mapping of a node. Raises UserError for a key that occurs twice."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise UserError(f"{key} is set twice; keep one of the lines")
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOL, _FLOAT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_NUMBER = r"(?:[-+]?(?:(?:\.\d+|\d+(?:\.\d*)?)(?:[eE][-+]?\d+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))$"
_Loader.add_implicit_resolver(_FLOAT, re.compile(_NUMBER), list("-+.0123456789"))


def recipe_path(name: str | Path) -> Path:
    """Returns the path of a recipe: `name` itself if it is a file, otherwise the package's recipe with that name.

    Raises:
        UserError: neither exists. The message suggests similar names.
    """
    for path in (Path(name), RECIPES / f"{str(name).removesuffix('.yaml')}.yaml"):
        if path.is_file():
            return path
    files = (file for file in sorted(RECIPES.rglob("*.yaml")) if file.parent.name != "accelerate")
    names = [file.relative_to(RECIPES).with_suffix("").as_posix() for file in files]
    near = difflib.get_close_matches(str(name), names, n=5) or [key for key in names if str(name) in key.split("/")]
    listed = f"did you mean {' or '.join(near)}?" if near else f"the recipes are {', '.join(names)}"
    raise UserError(f"{name}: neither a file nor the name of a recipe; {listed}")


def read_recipe(path: str | Path, readers: tuple[Path, ...] = ()) -> dict:
    """Reads a recipe and its `base`, and returns their options. The recipe's values override the base's values.

    Args:
        readers: the recipes whose `base` led to this recipe, to detect a cycle.

    Raises:
        UserError: the recipe cannot be read.
    """
    path = Path(path)
    if path.resolve() in readers:
        raise UserError(f"{path}: the recipe is its own base")
    try:
        options = yaml.load(path.read_bytes(), _Loader) or {}  # given bytes, YAML detects the encoding
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(options, dict):
        raise UserError(f"{path}: expected a mapping of options")
    base = options.pop("base", None)
    if not isinstance(base, str | None):
        raise UserError(f"{path}: base={base!r}: expected the path of one file")
    if base is None:
        return options
    return read_recipe(path.parent / base, (*readers, path.resolve())) | options
