"""The base class of SimCSE and the trained model: rows are encoded once by a frozen encoder, then looked up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from soft_trainer import distributed
from soft_trainer.data.array_cache import map_array
from soft_trainer.data.neighbours import Neighbours, cached_neighbours, nearest_rows, neighbours_key
from soft_trainer.data.tokens import column_of
from soft_trainer.encoders.encoding import embed_sharded, prompt_length
from soft_trainer.encoders.identity import encoder_identity
from soft_trainer.encoders.loading import Encoder, load_encoder
from soft_trainer.encoders.pooling import comparable
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator, Rows, as_array
from soft_trainer.estimators.row_cache import DEFAULT_FOLDER, cached_rows, row_key


@dataclass(frozen=True)
class _StoredRows:
    """Rows in a file, for pickling."""

    path: str


class EncodedRowsEstimator(Estimator):
    """Computes similarities of row embeddings that a frozen encoder computes once, before training.

    Args:
        model_name_or_path: folder or Hub name of the encoder; `NAME@REVISION` pins a revision.
        cache_dir: the folder that keeps row embeddings for the next run; None keeps them in memory only.
        batch_size: the number of texts encoded at once.
        trust_remote_code: run the code that comes with the encoder.
    """

    in_workers = True
    _scale = 1.0  # of the dot products of `_queries` and `_codes`, which `fit` sets

    def __init__(
        self,
        model_name_or_path: str,
        cache_dir: str | Path | None = DEFAULT_FOLDER,
        batch_size: int = 64,
        trust_remote_code: bool = False,
    ):
        self.model_name_or_path, self.cache_dir, self.batch_size = str(model_name_or_path), cache_dir, batch_size
        self.trust_remote_code = trust_remote_code

    def __getstate__(self) -> dict:
        """Returns the state with memory-mapped rows replaced by their paths, so that a worker maps them too."""
        state = self.__dict__.items()
        return {
            name: _StoredRows(str(value.filename)) if isinstance(value, np.memmap) else value for name, value in state
        }

    def __setstate__(self, state: dict) -> None:
        for name, value in state.items():
            setattr(self, name, map_array(value.path) if isinstance(value, _StoredRows) else value)

    def load(self) -> Encoder:
        """Loads the frozen encoder."""
        name, _, revision = self.model_name_or_path.partition("@")
        return load_encoder(name, revision or None, distributed.device(), self.trust_remote_code)

    def encode_rows(self, dataset, side: str, encoder: Encoder) -> np.ndarray:
        """Returns embeddings of one side of every row, [rows, d], comparable by dot product; cached if possible.

        On a GPU the encoder runs in half precision: in bfloat16 if the GPU has it, because float16 can overflow.

        Raises:
            UserError: an embedding is not finite. Nothing is stored then.
        """
        device = encoder.model.device.type
        on_gpu = device != "cpu"
        half = torch.bfloat16 if device != "cuda" or torch.cuda.is_bf16_supported() else torch.float16
        dtype = np.dtype(np.float16 if on_gpu else np.float32)
        tokens = column_of(dataset, side, encoder.profile, encoder.tokenizer)
        prompt = prompt_length(encoder.tokenizer, encoder.profile, side)

        def build() -> Tensor:
            with torch.autocast(device, dtype=half, enabled=on_gpu):
                embeddings = embed_sharded(
                    encoder.model,
                    encoder.profile,
                    tokens,
                    encoder.tokenizer.pad_token_id,
                    self.batch_size,
                    progress=f"{type(self).__name__}: encoding {side}",
                    prompt_length=prompt,
                )
            embeddings = comparable(encoder.profile, embeddings)
            largest = float(embeddings.abs().max()) if len(embeddings) else 0.0
            if not largest <= np.finfo(dtype).max:
                raise UserError(
                    f"{self.model_name_or_path}: the embeddings of the {side} side hold NaN, infinity or numbers too "
                    f"large for {dtype}; choose another estimator model"
                )
            return embeddings

        identity = encoder_identity(encoder.model, encoder.tokenizer, encoder.profile)
        key = row_key(tokens, identity, prompt, str(dtype))
        return cached_rows(self.cache_dir, key, len(tokens), encoder.model.config.hidden_size, dtype, build)

    def similarity(self, query_rows: Rows, code_rows: Rows) -> Tensor:
        """Computes the encoder's scores, Tensor[Q, C] in float32."""
        chosen = (values[as_array(rows)] for values, rows in ((self._queries, query_rows), (self._codes, code_rows)))
        q, c = (torch.from_numpy(np.asarray(rows, dtype=np.float32)) for rows in chosen)
        return q @ c.T * self._scale

    def neighbours(self, k: int, text_ids=(), progress=None, rows=None, codes=None) -> Neighbours:
        """Finds the k rows that score highest for each row's query, from the cache if possible."""
        vectors, device = (self._queries[:rows], self._codes[:codes]), distributed.device()
        nearest = cached_neighbours(
            self.cache_dir,
            neighbours_key([*vectors, *text_ids], k=k),
            lambda: nearest_rows(*vectors, k, text_ids=text_ids, progress=progress, device=device),
        )
        return Neighbours(nearest.rows, nearest.scores * self._scale, nearest.own * self._scale)
