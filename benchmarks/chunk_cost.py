"""Measures the constants of `training.collator.ChunkCost` on this machine, and compares ways to make chunks.

    python benchmarks/chunk_cost.py --data_dir DIR [--size 256x4 | --model FOLDER] [--lengths 128,256] [--device cuda]

The first part times a forward and backward pass of the encoder on a grid of rows and lengths. Gradients are added up,
as they are from chunk to chunk of a batch. The model `a token's time x (overhead + n L (1 + attention L))` is fitted
to the times by least relative squares and shown with the constants of `ChunkCost.of`. A second fit has frozen word
embeddings: the difference is the cost of their gradient, which is as large as the vocabulary, in every chunk.

The second part takes random batches of real rows and splits each side in several ways, in turn: by the constants in
use, by these with another overhead, by the fitted constants, and into equal parts of the sorted rows. The column
"times" compares with the constants in use, batch by batch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from measuring import draw, machine, numbers, parser_of, ratios, seconds, set_up, spread, turns
from scipy.optimize import nnls
from starting_point import StartingPoint, add_encoder_options, begin, label

from soft_trainer.data.tokens import SIDES, column_of
from soft_trainer.encoders.encoding import Encoder, encode, pad
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.terminal import table
from soft_trainer.training.collator import STEP, ChunkCost, chunk_by_length

Split = Callable[[np.ndarray], list[np.ndarray]]  # lengths -> rows of each chunk


def passes(encoder: Encoder, device: str, items: Sequence, chunks: list[np.ndarray]) -> None:
    """Runs forward and backward passes of rows, chunk by chunk, as a training step does. Adds up the gradients."""
    parts = []
    for chunk in chunks:
        inputs = pad([items[row] for row in chunk], encoder.tokenizer.pad_token_id)
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            parts.append(encode(encoder.model, encoder.profile, inputs))
    embeddings = torch.cat(parts)
    embeddings.backward(torch.ones_like(embeddings))


def grid_times(encoder: Encoder, arguments: argparse.Namespace) -> dict[tuple[int, int], float]:
    """(rows, length) -> median seconds of one chunk. The repetitions are interleaved over the grid."""
    lengths = [length for length in numbers(arguments.grid_lengths) if length <= max(numbers(arguments.lengths))]
    cells = [(rows, length) for rows in numbers(arguments.grid_rows) for length in lengths]
    taken: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    for repetition, cell in turns(cells, arguments.repetitions + 1):
        rows, length = cell
        items = np.random.default_rng(repetition).integers(5, len(encoder.tokenizer), (rows, length))
        call = partial(passes, encoder, arguments.device, items, [np.arange(rows)])
        taken[cell].append(seconds(call, arguments.device))
    return {cell: statistics.median(times[1:]) for cell, times in taken.items()}


def fit(times: dict[tuple[int, int], float]) -> tuple[float, ChunkCost, dict[tuple[int, int], float]]:
    """Seconds of a token, the fitted cost, and the relative error of each cell.

    The model is linear in the seconds of a chunk, of a token and of a pair of tokens. None of them is negative.
    """
    rows, lengths = np.array(list(times)).T.astype(float)
    measured = np.array(list(times.values()))
    terms = np.stack([np.ones_like(rows), rows * lengths, rows * lengths**2], 1)
    (chunk, token, pair), _ = nnls(terms / measured[:, None], np.ones_like(measured))
    errors = terms @ np.array([chunk, token, pair]) / measured - 1
    return token, ChunkCost(chunk / token, pair / token), dict(zip(times, errors.tolist(), strict=True))


def equal_parts(count: int) -> Split:
    """A function that splits the rows, sorted by length, into parts of equally many rows."""
    return lambda lengths: [part for part in np.array_split(np.argsort(-lengths, kind="stable"), count) if len(part)]


def splits(used: ChunkCost, fitted: ChunkCost) -> dict[str, Split]:
    """Name -> a way to make chunks."""
    costs = {"constants in use": used, "fitted constants": fitted}
    for factor in (1 / 16, 1 / 4, 1 / 2, 2, 4, 16):
        costs[f"overhead x {factor:g}"] = replace(used, overhead=used.overhead * factor)
    by_cost = {name: partial(chunk_by_length, cost=cost) for name, cost in costs.items()}
    return by_cost | {f"{count} equal parts": equal_parts(count) for count in (1, 2, 4, 8, 16)}


def compare(
    start: StartingPoint, encoder: Encoder, ways: dict[str, Split], batch_size: int, repetitions: int
) -> list[list]:
    """The rows of the second table: seconds of both sides of random batches, for every way to make chunks."""
    columns = {side: column_of(start.rows, side, encoder.profile, encoder.tokenizer) for side in SIDES}
    generator = np.random.default_rng(0)
    batches = [draw(len(start.rows), batch_size, generator) for _ in range(repetitions + 1)]
    taken, counts, padding = ({name: [] for name in ways} for _ in range(3))
    for repetition, name in turns(list(ways), len(batches)):
        total, chunks, computed, real = 0.0, 0, 0, 0
        encoder.model.zero_grad()
        for column in columns.values():
            items = [column[int(row)] for row in batches[repetition]]
            lengths = np.array([len(item) for item in items])
            parts = ways[name](lengths)
            total += seconds(partial(passes, encoder, start.device, items, parts), start.device)
            chunks += len(parts)
            computed += sum(len(chunk) * int(lengths[chunk].max()) for chunk in parts)
            real += int(lengths.sum())
        if repetition:
            taken[name].append(total)
            counts[name].append(chunks)
            padding[name].append(1 - real / computed)
    base = taken["constants in use"]
    return [
        [batch_size, name, f"{statistics.mean(counts[name]):.1f}", f"{statistics.mean(padding[name]):.1%}"]
        + [f"{1e3 * statistics.median(times):,.0f}", spread(ratios(times, base))]
        for name, times in taken.items()
    ]


def run(arguments: argparse.Namespace, folder: str) -> None:
    """Measures, fits, compares and prints."""
    start = begin(arguments, folder)
    encoder = load_encoder(folder, device=start.device)
    encoder.model.train()
    words, grids = encoder.model.get_input_embeddings().weight, {}
    for name, trained in (("fitted", True), ("word embeddings frozen", False)):
        words.requires_grad_(trained)
        grids[name] = grid_times(encoder, arguments)
        sys.stderr.write(f"grid, {name}: measured\n")
    words.requires_grad_(True)
    fits = {name: fit(times) for name, times in grids.items()}
    used = ChunkCost.of(encoder.model.config.hidden_size, start.device)
    lines = []
    for batch_size in numbers(arguments.batch_sizes):
        lines += compare(start, encoder, splits(used, fits["fitted"][1]), batch_size, arguments.repetitions)
        sys.stderr.write(f"batches of {batch_size} are measured\n")
    print(f"## Cost of a chunk: {label(arguments)}\n\n{machine(start.device)}, {arguments.repetitions} repetitions\n")
    print("Milliseconds of a chunk, and the relative error of the fit:\n")
    print(grid_table(grids["fitted"], fits["fitted"][2]), "\n")
    print(constants_table(used, fits, encoder.model.config.hidden_size))
    print(f"\nBatches of real rows, both sides, lengths compared in steps of {STEP}:\n")
    print(table(["batch", "cut", "chunks of both", "padding", "ms", "times"], lines))


def grid_table(times: dict[tuple[int, int], float], errors: dict[tuple[int, int], float]) -> str:
    """Times and errors of the fit, rows by lengths."""
    lengths = sorted({length for _, length in times})
    cells = [
        [rows, *(f"{1e3 * times[rows, length]:.1f} ({errors[rows, length]:+.0%})" for length in lengths)]
        for rows in sorted({rows for rows, _ in times})
    ]
    return table(["rows, tokens:", *lengths], cells)


def constants_table(used: ChunkCost, fits: dict, hidden: int) -> str:
    """Returns a table of the constants in use and the constants of every fit."""
    tokens = {"in use": (None, used)} | {name: (token, cost) for name, (token, cost, _) in fits.items()}
    flops = 24 * hidden**2
    rows = {
        "a token's time": [f"{1e6 * token:.1f} us" if token else None for token, _ in tokens.values()],
        "overhead": [f"{cost.overhead:.1f} tokens" for _, cost in tokens.values()],
        "LAYER_OVERHEAD": [f"{cost.overhead * flops:.2e} operations" for _, cost in tokens.values()],
        "attention": [f"{1e6 * cost.attention:.0f} millionths" for _, cost in tokens.values()],
        "attention x 6 hidden": [f"{cost.attention * 6 * hidden:.2f} times" for _, cost in tokens.values()],
        "error, mean": [None, *(f"{np.abs(list(errors.values())).mean():.1%}" for *_, errors in fits.values())],
        "error, largest": [None, *(f"{np.abs(list(errors.values())).max():.1%}" for *_, errors in fits.values())],
    }
    return table(["", *tokens], [[name, *cells] for name, cells in rows.items()])


def main() -> None:
    """Reads the options and runs."""
    parser = parser_of(__doc__)
    add_encoder_options(parser)
    parser.add_argument("--batch_sizes", default="32,128")
    parser.add_argument("--grid_rows", default="1,2,4,8,16,32")
    parser.add_argument("--grid_lengths", default="8,16,32,64,128,256")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    set_up(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        run(arguments, folder)


if __name__ == "__main__":
    main()
