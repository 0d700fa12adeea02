"""Compares the speed of encoding for evaluation, ours and `SentenceTransformer.encode`, on the same texts.

    python benchmarks/encode.py --data_dir DIR [--size 256x4 | --model FOLDER] [--lengths 128,256] [--max_rows 2000]
        [--dtype bfloat16] [--device cuda]

Both take turns with the same weights, texts, truncation, batch of 64, precision and threads. "texts" goes from
strings to embeddings. "evaluation" is `embed_rows` of the trainer, which tokenises the rows once for all evaluations
of a run. "speedup" divides the time of sentence-transformers by ours, within each repetition (median and range).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable

import torch
from measuring import machine, parser_of, ratios, seconds, set_up, spread, turns
from sentence_transformers import SentenceTransformer
from starting_point import StartingPoint, add_encoder_options, begin, label

from soft_trainer import SoftInfoNCETrainer, SoftInfoNCETrainingArguments
from soft_trainer.data.tokens import SIDES
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.terminal import table

BATCH = 64
PEER = "sentence-transformers"
HEADERS = ["side", "implementation", "texts/s", f"speedup over {PEER}", "difference of unit embeddings"]
ENCODE = {"query": ("encode_queries", "encode_query"), "code": ("encode_codes", "encode_document")}


def ways(start: StartingPoint, side: str, dtype: str) -> dict[str, Callable[[], torch.Tensor]]:
    """Name -> a call that returns the embeddings of all texts of a side, Tensor[n, d]."""
    encoder = load_encoder(start.folder, device=start.device)
    peer = SentenceTransformer(str(start.folder), device=start.device)
    trainer = SoftInfoNCETrainer(
        model=encoder.model,
        args=SoftInfoNCETrainingArguments(
            per_device_eval_batch_size=BATCH, dataloader_drop_last=False, **start.settings(dtype)
        ),
        train_dataset=start.rows,
        processing_class=encoder.tokenizer,
        encoder=encoder.profile,
    )
    texts, (own, other) = start.texts[side][:], ENCODE[side]
    options = {"batch_size": BATCH, "convert_to_tensor": True, "show_progress_bar": False}
    half = torch.autocast(start.device, torch.bfloat16, enabled=dtype == "bfloat16")
    return {
        PEER: half(lambda: getattr(peer, other)(texts, **options)),
        "ours, texts": half(lambda: getattr(encoder, own)(texts, batch_size=BATCH)),
        "ours, evaluation": lambda: trainer.embed_rows(start.rows, side),  # runs under autocast by itself
    }


def measure(start: StartingPoint, side: str, repetitions: int, dtype: str = "float32") -> list[list]:
    """The rows of the table for one side."""
    calls = ways(start, side, dtype)
    embeddings = {name: torch.nn.functional.normalize(call().float(), dim=-1) for name, call in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _, name in turns(list(calls), repetitions):
        taken[name].append(seconds(calls[name], start.device))
    count = len(start.rows)
    return [
        [
            side,
            name,
            f"{count / statistics.median(times):,.0f}",
            spread(ratios(taken[PEER], times)) if name != PEER else None,
            f"up to {float((embeddings[name] - embeddings[PEER]).abs().max()):.1e}" if name != PEER else None,
        ]
        for name, times in taken.items()
    ]


def run(arguments: argparse.Namespace, folder: str) -> None:
    """Measures both sides and prints the table."""
    start = begin(arguments, folder, arguments.max_rows)
    lines = [line for side in SIDES for line in measure(start, side, arguments.repetitions, arguments.dtype)]
    print(f"## Encoding {len(start.rows):,} texts: {label(arguments)}\n\n{machine(start.device)}, ", end="")
    print(f"{arguments.repetitions} repetitions, {arguments.dtype}\n")
    print(table(HEADERS, lines))


def main() -> None:
    """Reads the options and runs."""
    parser = parser_of(__doc__)
    add_encoder_options(parser)
    parser.add_argument("--max_rows", type=int, default=2000, help="texts of each side")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: by autocast")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    set_up(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        run(arguments, folder)


if __name__ == "__main__":
    main()
