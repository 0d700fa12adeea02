"""Adds results to the `model-index` of an existing card and leaves the rest unchanged."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, metadata_load, metadata_save
from huggingface_hub.repocard_data import eval_results_to_model_index

from soft_trainer.errors import UserError
from soft_trainer.files import reporting_disk_errors, written_aside

_KEY = "model-index"


def add_eval_results(card: str | Path, results: Sequence[EvalResult]) -> None:
    """Adds results to a card, replacing earlier ones from the same source on the same data.

    The other keys of the header keep their values and order, but lose their comments. The text below the header is
    preserved byte for byte. The card is written atomically.

    Raises:
        UserError: the card is not UTF-8, its header is not YAML, its `model-index` is malformed, or the card cannot be
            written.
    """
    path = Path(card)
    header = _header(path)
    (new,) = eval_results_to_model_index(path.resolve().parent.name, list(results))
    header[_KEY] = _merged(header.get(_KEY), new)
    with reporting_disk_errors(path.parent), written_aside(path) as aside:
        shutil.copyfile(path, aside)
        metadata_save(aside, header)


def check_card(card: str | Path) -> None:
    """Makes sure that results can be added to a card.

    Raises:
        UserError: they cannot be added; see `add_eval_results`.
    """
    _header(Path(card))


def _header(path: Path) -> dict:
    """Reads the header of a card; its `model-index` must have the form that the Hub reads."""
    try:
        header = metadata_load(path) or {}
        _ = [_identity(result) for model in header.get(_KEY) or [] for result in model["results"]]
        return header
    except (ValueError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:100]
        raise UserError(f"{path}: results cannot be added: its header has no usable {_KEY} ({reason})") from None


def _merged(index: list[dict] | None, new: dict) -> list[dict]:
    """Adds the new results to the first model of `index`, replacing earlier ones with the same identity."""
    if not index:
        return [new]
    replaced = {_identity(result) for result in new["results"]}
    kept = [result for result in index[0]["results"] if _identity(result) not in replaced]
    return [index[0] | {"results": kept + new["results"]}, *index[1:]]


def _identity(result: dict) -> tuple:
    """Identifies a measurement: a new result replaces an earlier one with the same identity."""
    dataset = result["dataset"]
    source = (result.get("source") or {}).get("name")
    return (source, result["task"]["type"], *(dataset.get(name) for name in ("name", "config", "split")))
