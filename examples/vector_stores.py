# /// script
# requires-python = ">=3.11"
# dependencies = ["soft-trainer", "qdrant-client>=1.15"]
# ///
"""Exports the embeddings of a corpus to FAISS and to Qdrant, and searches both.

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
# Of unit length, so that a dot product is the cosine; drop it for an encoder with score_function "dot".
vectors = encoder.encode_codes(codes).float().cpu().numpy()
query = encoder.encode_queries([options.query]).float().cpu().numpy()
faiss.normalize_L2(vectors)
faiss.normalize_L2(query)

index = faiss.IndexFlatIP(vectors.shape[1])
index.add(vectors)
faiss.write_index(index, str(options.output_dir / "codes.faiss"))
_, places = index.search(query, 3)

client = QdrantClient(path=str(options.output_dir / "qdrant"))  # a folder; QdrantClient(url=...) for a server
client.create_collection(
    "codes", vectors_config=models.VectorParams(size=vectors.shape[1], distance=models.Distance.COSINE)
)
client.upload_collection("codes", vectors=vectors, payload=[{"code": code} for code in codes], ids=range(len(codes)))
points = client.query_points("codes", query=query[0].tolist(), limit=3).points
client.close()

for place, point in zip(places[0], points, strict=True):
    sys.stdout.write(f"FAISS {place}: {codes[place]}\nQdrant {point.id}: {point.payload['code']}\n")
