"""What SimCSE and a trained model share: rows encoded once by a frozen encoder, looked up by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from soft_trainer import distributed
from soft_trainer.data.tokens import column_of
from soft_trainer.encoders.encoding import embed_sharded
from soft_trainer.encoders.loading import Encoder, load_encoder
from soft_trainer.encoders.pooling import comparable
from soft_trainer.estimators.base import Estimator, Rows, as_array
from soft_trainer.estimators.row_cache import DEFAULT_FOLDER, cached_rows, row_key


class EncodedRowsEstimator(Estimator):
    """Similarity of row embeddings that a frozen encoder gave once, before training.

    Args:
        model_name_or_path: folder or Hub name of the encoder; `NAME@REVISION` pins a revision.
        cache_dir: where row embeddings are kept for the next run; None keeps them in memory only.
        batch_size: texts encoded at once.
    """

    in_workers = True

    def __init__(self, model_name_or_path: str, cache_dir: str | Path | None = DEFAULT_FOLDER, batch_size: int = 64):
        self.model_name_or_path, self.cache_dir, self.batch_size = str(model_name_or_path), cache_dir, batch_size

    def load(self) -> Encoder:
        """The frozen encoder."""
        name, _, revision = self.model_name_or_path.partition("@")
        return load_encoder(name, revision=revision or None, device=distributed.device())

    def encode_rows(self, dataset, side: str, encoder: Encoder) -> np.ndarray:
        """Embeddings of one side of every row, [rows, d], comparable by dot product; from the cache where it has them.

        In half precision where the device is fast in it.
        """
        on_gpu = encoder.model.device.type != "cpu"
        dtype = np.dtype(np.float16 if on_gpu else np.float32)
        tokens = column_of(dataset, side, encoder.profile, encoder.tokenizer)

        def build() -> Tensor:
            with torch.autocast(encoder.model.device.type, dtype=torch.float16, enabled=on_gpu):
                embeddings = embed_sharded(
                    encoder.model,
                    encoder.profile,
                    tokens,
                    encoder.tokenizer.pad_token_id,
                    self.batch_size,
                    progress=f"{type(self).__name__}: encoding {side}",
                )
            return comparable(encoder.profile, embeddings)

        key = row_key(tokens, encoder.model, encoder.profile, str(dtype))
        return cached_rows(self.cache_dir, key, len(tokens), encoder.model.config.hidden_size, dtype, build)


def dot_products(queries: np.ndarray, codes: np.ndarray, query_rows: Rows, code_rows: Rows) -> Tensor:
    """Dot products of the chosen rows, Tensor[Q, C] in float32."""
    chosen = (values[as_array(rows)] for values, rows in ((queries, query_rows), (codes, code_rows)))
    q, c = (torch.from_numpy(np.asarray(rows, dtype=np.float32)) for rows in chosen)
    return q @ c.T
