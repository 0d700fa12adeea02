"""Puts results into `model-index` of a card that is there, and leaves everything else as it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index
from huggingface_hub.utils import yaml_dump

from soft_trainer.errors import UserError
from soft_trainer.files import reporting_disk_errors, written_aside

_HEADER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_KEY = "model-index"


def add_eval_results(card: str | Path, results: Sequence[EvalResult]) -> None:
    """Adds results to a card, in place of earlier ones from the same source on the same data.

    Only `model-index` of the header is written anew. The rest of the header and the text below it, which a person may
    have edited, stay byte for byte. The card is written as a whole file.

    Raises:
        UserError: the card is not UTF-8, its header is not YAML, its `model-index` has another form or cannot be taken
            out, or the card cannot be written.
    """
    path = Path(card)
    text = _text(path)
    line_break = "\r\n" if "\r\n" in text else "\n"
    header = _HEADER.match(text)
    (new,) = eval_results_to_model_index(path.resolve().parent.name, list(results))
    earlier, kept = _index(header[1] if header else "", path)
    index = _merged(earlier, new)
    block = yaml_dump({_KEY: index}, sort_keys=False, line_break=line_break)
    if header is None:
        text = f"---{line_break}{block}---{line_break}{text}"
    else:
        text = f"{text[: header.start(1)]}{kept}{block}{text[header.end(1) :]}"
    with reporting_disk_errors(path.parent), written_aside(path) as aside:
        aside.write_bytes(text.encode())


def check_card(card: str | Path) -> None:
    """Makes sure that results can be added to a card.

    Raises:
        UserError: they cannot; see `add_eval_results`.
    """
    header = _HEADER.match(_text(Path(card)))
    _index(header[1] if header else "", Path(card))


def _text(path: Path) -> str:
    """The text of a card, with its line breaks as they are."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: results cannot be added: it is not UTF-8 (byte {error.start}); save it so") from None


def _index(header: str, path: Path) -> tuple[list[dict], str]:
    """The `model-index` of a header, and the header without it."""
    try:
        data = yaml.safe_load(header) or {}
        index = data.get(_KEY) or []
        for model in index:
            _ = [_identity(result) for result in model["results"]]
        kept = _without_index(header)
        if (yaml.safe_load(kept) or {}) != {key: value for key, value in data.items() if key != _KEY}:
            raise TypeError(f"{_KEY} cannot be taken out of it; write the key at the start of a line, once")
        return index, kept
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:100]
        raise UserError(f"{path}: results cannot be added: its header has no usable {_KEY} ({reason})") from None


def _without_index(header: str) -> str:
    """The header without the lines from the key to the end of its value."""
    root = yaml.compose(header)
    for key, value in root.value if root else ():
        if key.value == _KEY:
            end = _last(value).end_mark.index
            if header[end - 1] != "\n":  # a text of several lines ends after its line break
                end = header.find("\n", end) + 1
            return header[: key.start_mark.index] + header[end:]
    return header


def _last(node: yaml.Node) -> yaml.Node:
    """The last node inside an indented node, whose own end stands after the comments that follow it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return node


def _merged(index: list[dict], new: dict) -> list[dict]:
    """The first model of `index` with the new results, in place of earlier ones of the same identity."""
    if not index:
        return [new]
    replaced = {_identity(result) for result in new["results"]}
    kept = [result for result in index[0]["results"] if _identity(result) not in replaced]
    return [index[0] | {"results": kept + new["results"]}, *index[1:]]


def _identity(result: dict) -> tuple:
    """Two results of one identity are results of the same measurement."""
    dataset = result["dataset"]
    source = (result.get("source") or {}).get("name")
    return (source, result["task"]["type"], *(dataset.get(name) for name in ("name", "config", "split")))
