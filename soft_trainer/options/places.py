"""Finds the options whose values are places on this machine, and the names that may leave it instead."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PureWindowsPath

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from soft_trainer.encoders.hub_files import published_name
from soft_trainer.options.declared import references

PLACES = "places of the machine"  # the part of a record with the places, which is never pushed
HIDDEN = "local"  # the name of a place whose path has no last part


def shared_name(value: str, may_be_on_hub: bool = True, roots: Iterable[Path] = ()) -> str:
    """Returns a name on the Hub unchanged. Of any other place, it returns the last part of the path.

    Args:
        roots: folders in which a relative path may exist, besides the current one.
    """
    name = published_name(value)
    exists = any(os.path.exists(os.path.join(root, value)) for root in ("", *roots))
    if may_be_on_hub and (name != value.rstrip("/") or not exists):
        try:
            validate_repo_id(name.partition("@")[0])
            return name
        except HFValidationError:  # not a name on the Hub
            pass
    # A Windows path has both kinds of separators.
    return PureWindowsPath(os.path.abspath(os.path.expanduser(value))).name or HIDDEN


def local_names(kinds: Iterable, options: Mapping[str, object], roots: Iterable[Path] = ()) -> dict[str, str]:
    """Returns the places on this machine that options name, each with the name that may leave it.

    Call it where the run is made: elsewhere, a relative path cannot be told from a name on the Hub.

    Args:
        kinds, options: see `references`.
        roots: see `shared_name`.
    """
    names = {}
    for reference in references(kinds, options):
        if reference.kind == "code" and not any("/" in value or "\\" in value for value in reference.values):
            continue  # a function, a class, or a folder here
        may_be_on_hub = reference.kind in ("rows", "encoder")
        shared = [shared_name(value, may_be_on_hub, roots) for value in reference.values]
        names |= dict(zip(reference.values, shared, strict=True))
        names[str(options[reference.option])] = ",".join(shared)
    return {value: name for value, name in names.items() if value != name}


def without_places(value, names: Mapping[str, str]):
    """Replaces the strings in a JSON value that are places on this machine."""
    if isinstance(value, dict):
        return {names.get(key, key): without_places(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_places(inner, names) for inner in value]
    if isinstance(value, str):
        return names.get(value, value)
    return value
