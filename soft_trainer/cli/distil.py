"""Distil an encoder into a static encoder, which embeds a text as the average of its word vectors.

soft-trainer distil MODEL
soft-trainer distil sentence-transformers/all-MiniLM-L6-v2 --output_dir outputs/static --texts my_repository

The result can be trained like any encoder (`train --model_name_or_path DIR`), hundreds of times as fast as the
original. `SentenceTransformer(DIR, trust_remote_code=True)` loads it too, where soft-trainer is installed.
"""

from __future__ import annotations

import argparse

from soft_trainer.cli.shared_options import add_overwrite
from soft_trainer.encoders.static_numpy import default_static_folder
from soft_trainer.system.terminal import print_on_main


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `soft-trainer distil` to a parser."""
    parser.add_argument("model", metavar="MODEL", help="the encoder: a name on the Hub, or a folder")
    parser.add_argument(
        "--output_dir", help="folder for the static encoder, new or empty (default: in the user's cache directory)"
    )
    parser.add_argument(
        "--dimensions", type=int, default=256, help="number of dimensions of an embedding (default: %(default)s)"
    )
    parser.add_argument(
        "--texts", help="a file or source tree whose words become the vocabulary (default: common words of code)"
    )
    parser.add_argument(
        "--vocabulary_size", type=int, default=32768, help="maximum number of words (default: %(default)s)"
    )
    add_overwrite(parser, "an earlier encoder")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the code that comes with a model")


def run(arguments: argparse.Namespace) -> None:
    """Distils an encoder into a static encoder and prints the output folder."""
    from soft_trainer.encoders.distilling import distil_static  # imports torch, which takes seconds

    options = vars(arguments)
    if arguments.output_dir is None:
        options |= {"output_dir": default_static_folder(), "overwrite": True}
    print_on_main(f"Written to {distil_static(**options)}")
