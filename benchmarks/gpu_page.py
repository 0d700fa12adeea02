"""Writes the figures of `gpu.md`, from the JSON file of `gpu.py`: `python benchmarks/gpu_page.py`.

The text between the two comments in `gpu.md` is replaced.
"""

from __future__ import annotations

import json
from pathlib import Path

from soft_trainer.system.files import write_text
from soft_trainer.system.terminal import table

FOLDER = Path(__file__).parent
PAGE = FOLDER / "gpu.md"
BEGIN, END = "<!-- figures -->\n", "<!-- end of the figures -->\n"
PEER = "sentence-transformers"


def measured() -> dict[str, dict]:
    """Returns the tables and values of each part, keyed by part."""
    return json.loads((FOLDER / "gpu_h100.json").read_text())["parts"]


def rows_of(part: dict, number: int = 0) -> list[dict]:
    """Returns the rows of one of a part's tables, as dicts keyed by column."""
    found = part["tables"][number]
    return [dict(zip(found["headers"], row, strict=True)) for row in found["rows"]]


def steps(parts: dict[str, dict]) -> list[dict]:
    """Returns a row for each batch and way of training: milliseconds a step, ratio to ours, peak memory in GiB."""
    memory = {(row["batch"], row["way"]): row["peak, GiB"] for row in rows_of(parts["memory"])}
    found = []
    for row in rows_of(parts["step"]):
        half = row["precision"] == "bfloat16"
        peak = memory.get((row["batch"], row["way"])) if half else None
        found.append(row | {"peak memory, GiB": peak})
    return found


def page() -> str:
    """Returns the text between the two comments."""
    parts = measured()
    machine = parts["machine"]["tables"][0]["rows"]
    packed = rows_of(parts["packed"])
    dropout = rows_of(parts["packed"], 1)[1]
    waits = {row["way"]: row["waits"] for row in rows_of(parts["waits"]) if row["way"]}
    without = [way for way, number in waits.items() if number == 0]
    resumed = max(row["largest difference of a weight"] or 0 for row in rows_of(parts["resume"]))
    columns = ["batch", "way", "precision", "ms a step", "ours is faster", "peak memory, GiB"]
    loops = ["way", "workers", "examples/s", "s before the first step", "GiB"]
    return f"""\
{machine[0][1]}. {machine[8][1]}.

A step, medians and ranges of seven repetitions. *Ours is faster* is paired: both ways get the same batch.

{table(columns, [[row[name] for name in columns] for row in steps(parts)], ".1f", ["ms a step"])}

{parts["step"]["notes"][1]}

{parts["loops"]["tables"][0]["title"]}:

{table(loops, [[row[name] for name in loops] for row in rows_of(parts["loops"])], ".1f")}

Waits of the host for the GPU in a step: {waits[PEER]} with {PEER}, none in ours ({"; ".join(without)}).

One batch of 64 pairs without dropout, relative differences from float32:

{table(list(packed[0]), [list(row.values()) for row in packed], ".4f")}

With a dropout of {dropout["dropout"]}, {dropout["probabilities that are 0"]:.4f} of the attention probabilities are 0,
because torch's kernel rounds the rate to a multiple of 1/256. No token attends to another text.

Gradient caching:

{table(["batch", "passes", "s a step", "peak, GiB"], parts["cache"]["tables"][0]["rows"], ".2f")}

After a run with `full_determinism` is interrupted and resumed, the largest difference of a weight is {resumed:g}.
"""


def main() -> None:
    """Replaces the figures of the page."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    write_text(PAGE, before + BEGIN + page() + END + after)


if __name__ == "__main__":
    main()
