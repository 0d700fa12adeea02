"""Merge trained encoders with the encoder they were trained from, so that the result forgets less.

soft-trainer merge BASE MODEL --ratio 0.5 --output_dir DIR
soft-trainer merge sentence-transformers/all-MiniLM-L6-v2 outputs/mine --ratio 0.5 --output_dir outputs/merged

Every weight becomes (1 - ratio) x BASE + ratio x the mean of the MODELs.
"""

from __future__ import annotations

import argparse

from soft_trainer.terminal import print_on_main


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `soft-trainer merge` to a parser."""
    parser.add_argument("base", metavar="BASE", help="the encoder before training: a name on the Hub, or a folder")
    parser.add_argument("models", metavar="MODEL", nargs="+", help="the encoder after training; several are averaged")
    parser.add_argument("--ratio", type=float, required=True, help="from 0 (BASE) to 1 (the mean of the MODELs)")
    parser.add_argument("--output_dir", required=True, help="folder for the merged encoder, new or empty")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the code that comes with a model")


def run(arguments: argparse.Namespace) -> None:
    """Merges the encoders and prints the output folder."""
    from soft_trainer.merging import merge_encoders  # imports torch, which takes seconds

    print_on_main(f"Written to {merge_encoders(**vars(arguments))}")
