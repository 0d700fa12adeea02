"""Helps the benchmarks measure: description of the machine, interleaved timing, ratios and spread, roofline."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import datasets
import numpy as np
import torch
import transformers

from soft_trainer.encoders.passes import computes_bf16

ROOF_SIZE = {"cpu": 2048, "cuda": 8192}  # rows of the square matrices in `matrix_rate`


def parser_of(description: str) -> argparse.ArgumentParser:
    """Returns a parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True, help="folder with train.jsonl or train.jsonl.gz")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser


def set_up(threads: int) -> None:
    """Gives torch and the tokenizers of all libraries the same number of threads. Turns off progress bars."""
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"


def machine(device: str = "cpu") -> str:
    """Returns the line above a table: date, processor, threads and versions."""
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    return (
        f"{datetime.date.today()}, {name}, {torch.get_num_threads()} threads of {os.cpu_count()} cores, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"sentence-transformers {version('sentence-transformers')}"
    )


def _processor() -> str:
    """Returns the processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def numbers(text: str) -> list[int]:
    """Parses numbers: `"32,128"` gives [32, 128]."""
    return [int(part) for part in text.split(",")]


def seconds(call: Callable[[], object], device: str = "cpu") -> float:
    """Returns the seconds that a call takes, including the work that it starts on the device."""
    finish(device)
    start = time.perf_counter()
    call()
    finish(device)
    return time.perf_counter() - start


def finish(device: str) -> None:
    """Waits until the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()


def turns(names: Sequence[str], repetitions: int) -> Iterator[tuple[int, str]]:
    """Yields (repetition, name), shuffled within a repetition because a measurement influences the next."""
    generator = np.random.default_rng(0)
    for repetition in range(repetitions):
        yield from ((repetition, names[number]) for number in generator.permutation(len(names)))


def draw(rows: int, size: int, generator: np.random.Generator) -> np.ndarray:
    """Draws the row numbers of a random batch. A row occurs twice only if there are too few rows."""
    return generator.choice(rows, size, replace=size > rows)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Formats the median and the range of some values."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Divides each value by the value of `base` in the same repetition."""
    return [value / other for value, other in zip(values, base, strict=True)]


def matrix_rate(device: str, dtype: torch.dtype, size: int | None = None, repetitions: int = 15) -> float:
    """Measures the machine's peak rate: the median operations per second of products of large square matrices.

    Returns NaN if bfloat16 is emulated, because one product would take minutes.
    """
    if dtype == torch.bfloat16 and not computes_bf16(torch.device(device)):
        return math.nan
    size = size or ROOF_SIZE[device]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.mm(a, b)
    taken = [seconds(lambda: torch.mm(a, b, out=out), device) for _ in range(repetitions)]
    return 2 * size**3 / statistics.median(taken)
