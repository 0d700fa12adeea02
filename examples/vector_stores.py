# /// script
# requires-python = ">=3.11"
# dependencies = ["soft-trainer", "qdrant-client>=1.15"]
# ///
"""Stores the embeddings of a corpus in FAISS and in Qdrant, and searches both stores.

python examples/vector_stores.py MODEL ROWS OUTPUT_DIR "sort a list"
"""

import argparse
import sys
from pathlib import Path

import faiss
from qdrant_client import QdrantClient, models

from soft_trainer import load_encoder, load_rows

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("rows")
parser.add_argument("output_dir", type=Path)
parser.add_argument("query")
options = parser.parse_args()
options.output_dir.mkdir(parents=True, exist_ok=True)

codes = load_rows(options.rows)["test"].corpus["code"]
encoder = load_encoder(options.model)
# Vectors are scaled to unit length, so that their dot product is the cosine. For an encoder with score_function "dot",
# remove the two calls of `normalize_L2`, and use `models.Distance.DOT` below.
vectors = encoder.encode_codes(codes).float().cpu().numpy()
query = encoder.encode_queries([options.query]).float().cpu().numpy()
faiss.normalize_L2(vectors)
faiss.normalize_L2(query)

index = faiss.IndexFlatIP(vectors.shape[1])
index.add(vectors)
faiss.write_index(index, str(options.output_dir / "codes.faiss"))
_, rows = index.search(query, 3)

client = QdrantClient(path=str(options.output_dir / "qdrant"))  # for a server, QdrantClient(url=...)
client.create_collection(
    "codes", vectors_config=models.VectorParams(size=vectors.shape[1], distance=models.Distance.COSINE)
)
client.upload_collection("codes", vectors=vectors, payload=[{"code": code} for code in codes], ids=range(len(codes)))
points = client.query_points("codes", query=query[0].tolist(), limit=3).points
client.close()

for row, point in zip(rows[0], points, strict=True):
    sys.stdout.write(f"FAISS {row}: {codes[row]}\nQdrant {point.id}: {point.payload['code']}\n")
