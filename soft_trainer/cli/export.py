"""Export an encoder to ONNX, so that searches and other programs can run it without torch.

soft-trainer export DIR
soft-trainer export DIR --int8
soft-trainer export USER/NAME --output_dir DIR

This writes DIR/onnx/model.onnx and, with --int8, also a smaller and faster model with 8-bit integer weights.
`load_encoder(DIR, backend="onnx")` loads the first, and `load_encoder(DIR, backend="int8")` the second. So does
`SentenceTransformer(DIR, backend="onnx")`, which needs the package optimum-onnx, and for the second
`model_kwargs={"file_name": NAME}`. An index exports its encoder automatically.
"""

from __future__ import annotations

import argparse

from soft_trainer.terminal import print_on_main


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `soft-trainer export` to a parser."""
    parser.add_argument("model", metavar="DIR", help="the encoder's folder, or with --output_dir a name on the Hub")
    parser.add_argument("--onnx", action="store_true", help="export to ONNX, which is the default and only format")
    parser.add_argument("--int8", action="store_true", help="also write a model with 8-bit integer weights")
    parser.add_argument("--output_dir", help="folder for the subfolder onnx/ (default: the encoder's folder)")


def run(arguments: argparse.Namespace) -> None:
    """Exports an encoder to ONNX and prints the name and size of each file written."""
    from soft_trainer.encoders.onnx_export import export_onnx  # imports torch, which takes seconds

    for path in export_onnx(arguments.model, arguments.output_dir, arguments.int8):
        print_on_main(f"Wrote {path} ({path.stat().st_size / 2**20:,.0f} MiB)")
