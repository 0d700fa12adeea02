"""Draws the pictures of README and the site. Needs the extra `plots`, and `rich` for the terminal.

python benchmarks/pictures.py search          # docs/pictures/search.svg: the output of a search
python benchmarks/pictures.py curve FOLDER    # docs/pictures/curve.png: the MRR of `base` against the pairs seen
python benchmarks/pictures.py gpu             # docs/pictures/gpu.png: time and memory of a step, from gpu_h100.json

FOLDER is the output of `soft-trainer train --source_dir SYMPY --language python --model base --estimator none
--seed 1 --eval_strategy steps --eval_steps 0.1`, where SYMPY is the folder of the installed sympy. `base` has not
seen sympy.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import gpu_page

from soft_trainer.evaluation.figures import COLORS, new_figure, save_png
from soft_trainer.files import write_text

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
PROGRAM = Path(sys.executable).with_name("soft-trainer")
SEARCH = ("search", "--folder", "stdlib", "run a command and capture its output", "-n", "2")
COLUMNS = 84
BATCH = 128  # the default of static encoders


def search() -> None:
    """Draws a terminal with a search of the standard library."""
    from rich.console import Console
    from rich.text import Text

    found = subprocess.run([PROGRAM, *SEARCH], check=True, capture_output=True, text=True)
    command = shlex.join(["soft-trainer", *SEARCH]).replace("'", '"')
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ {command}", style="bold"))
    for line in found.stdout.splitlines():
        style = "" if line.startswith(" ") else "cyan"
        console.print(Text(line[:COLUMNS], style=style))
    picture = console.export_svg(title="soft-trainer search")
    # The fonts of the reader's machine do, and nothing is loaded from elsewhere.
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    write_text(FOLDER / "search.svg", picture)


def curve(folder: Path) -> None:
    """Draws the MRR on valid of a finished run with evaluations on the way."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    results = json.loads((folder / "all_results.json").read_text())
    points = [(0, results["valid_untrained_mrr"])]
    points += [(entry["step"] * BATCH, entry["eval_mrr"]) for entry in history if "eval_mrr" in entry]
    figure = new_figure(6, 3.4)
    axes = figure.add_subplot()
    axes.plot(*zip(*points, strict=True), color=COLORS[0], marker=".", label="encoder")
    axes.axhline(results["valid_lexical_mrr"], color=COLORS[1], ls="--", label="lexical BM25")
    axes.axhline(results["valid_combined_mrr"], color=COLORS[2], ls=":", label="both together, after training")
    axes.set_xlabel("pairs of a query and a function seen")
    axes.set_ylabel("MRR on valid")
    axes.legend(loc="lower right")
    save_png(figure, FOLDER / "curve.png")


def gpu() -> None:
    """Draws milliseconds a step and peak memory by batch and way, as `gpu.py` measured them."""
    rows = [row for row in gpu_page.steps(gpu_page.measured()) if row["precision"] == "bfloat16"]
    figure = new_figure(8, 2.6)
    time, memory = figure.subplots(1, 2, sharey=True)
    names = []
    colors = {"ours": COLORS[0], "ours padded": COLORS[5]}
    for height, row in enumerate(reversed(rows)):
        names.append(f"{row['way']}, batch {row['batch']}")
        color = colors.get(row["way"], COLORS[1])
        for axes, value in ((time, float(row["ms a step"].split()[0])), (memory, row["peak memory, GiB"])):
            if value is not None:
                axes.barh(height, value, color=color)
                axes.text(value, height, f" {value:.0f}", va="center", fontsize=8)
    time.set_yticks(range(len(names)), names, fontsize=8)
    time.set_xlabel("ms a step")
    memory.set_xlabel("peak memory, GiB")
    for axes in (time, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
    save_png(figure, FOLDER / "gpu.png")


def main() -> None:
    """Draws one picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pictures = parser.add_subparsers(dest="picture", required=True)
    pictures.add_parser("search")
    pictures.add_parser("gpu")
    pictures.add_parser("curve").add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.picture == "search":
        search()
    elif arguments.picture == "gpu":
        gpu()
    else:
        curve(arguments.folder)


if __name__ == "__main__":
    main()
