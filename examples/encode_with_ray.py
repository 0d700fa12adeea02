# /// script
# requires-python = ">=3.11"
# dependencies = ["soft-trainer", "ray[data]>=2.50"]
# ///
"""Encodes Parquet shards with Ray Data, on one machine or on a cluster.

    python examples/encode_with_ray.py MODEL SHARDS OUTPUT_DIR --column code --workers 8 --gpus 1

SHARDS is a folder of Parquet files, on a disk or in a bucket that Ray reads. OUTPUT_DIR gets the same rows with a
column `vector`, as Parquet. Each worker loads the encoder once. docs/beyond_one_machine.md uses the vectors.
"""

import argparse

import pandas as pd
import ray

from soft_trainer import load_encoder


class Encode:
    """Adds the embeddings of a column to batches of rows.

    Args:
        model: the encoder's folder or name on the Hub.
        column: the column to encode.
        side: "query" or "code".
    """

    def __init__(self, model: str, column: str, side: str):
        encoder = load_encoder(model)
        self.encode = encoder.encode_queries if side == "query" else encoder.encode_codes
        self.column = column

    def __call__(self, rows: pd.DataFrame) -> pd.DataFrame:
        vectors = self.encode(rows[self.column].tolist()).float().cpu().numpy()
        return rows.assign(vector=list(vectors))


def main() -> None:
    """Reads the shards, encodes them and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("shards")
    parser.add_argument("output_dir")
    parser.add_argument("--column", default="code")
    parser.add_argument("--side", default="code", choices=["query", "code"])
    parser.add_argument("--batch_size", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each worker")
    options = parser.parse_args()

    ray.data.read_parquet(options.shards).map_batches(
        Encode,
        fn_constructor_args=(options.model, options.column, options.side),
        batch_format="pandas",
        batch_size=options.batch_size,
        concurrency=options.workers,
        num_gpus=options.gpus,
    ).write_parquet(options.output_dir)


if __name__ == "__main__":
    main()
