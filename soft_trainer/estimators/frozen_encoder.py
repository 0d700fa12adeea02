"""Defines estimators that compare the embeddings of a frozen encoder: SimCSE, a trained model or the initial one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from soft_trainer.data.array_cache import DEFAULT_FOLDER, cached_rows
from soft_trainer.data.split import Split
from soft_trainer.data.tokens import token_column
from soft_trainer.encoders.attention import running
from soft_trainer.encoders.encoding import Encoder, comparable, embed_sharded, placed, prompt_length
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.encoders.packing import Passes
from soft_trainer.encoders.passes import HALF, computes_bf16, decide_passes
from soft_trainer.encoders.profiles import resolve_profile
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import CodeValues, NeighbourEstimator, Rows, as_array, check_fitted
from soft_trainer.estimators.neighbours import Excluded, Neighbours, cached_neighbours, nearest_rows
from soft_trainer.hub.files import split_revision
from soft_trainer.system import distributed
from soft_trainer.system.fingerprints import fingerprint


def frozen_precision(device: torch.device) -> str:
    """Returns the precision in which a frozen encoder runs on a device: bf16 if the device computes in it.

    Other GPUs, such as T4 and V100, use fp16, which can overflow. Other CPUs use float32.
    """
    if computes_bf16(device):
        return "bf16"
    return {"cuda": "fp16", "cpu": "float32"}.get(device.type, "bf16")


class EncodedRowsEstimator(NeighbourEstimator):
    """Base class for estimators whose similarities are dot products of embeddings from a frozen encoder.

    All rows are encoded once, before training.

    Args:
        model_name_or_path: the encoder's folder or its name on the Hub. `NAME@REVISION` pins a revision.
        cache_dir: the folder in which to cache embeddings and neighbours for later runs. None keeps them in memory
            only.
        batch_size: the number of texts to encode at once.
        trust_remote_code: whether to run code that comes with the encoder. Read that code first.

    Attributes:
        encoder_identity: the hash of the encoder's content, or None before `fit`. A resumed run compares this hash
            instead of the encoder's path.
    """

    in_workers = True
    encoder_identity: str | None = None
    _passes: Passes | None = None  # of the encoder that `load` returned last, if decided
    _scale = 1.0  # the factor on the dot products of `_queries` and `_codes`; `fit` sets it
    _code_values = CodeValues()

    def __init__(
        self,
        model_name_or_path: str,
        cache_dir: str | Path | None = DEFAULT_FOLDER,
        batch_size: int = 64,
        trust_remote_code: bool = False,
    ):
        self.model_name_or_path = str(model_name_or_path)
        self.cache_dir = cache_dir
        self.batch_size = batch_size
        self.trust_remote_code = trust_remote_code
        self._name, self._revision = split_revision(self.model_name_or_path)

    def __getstate__(self) -> dict:
        """Returns the state to pickle. Memory-mapped arrays become paths, which data workers map again."""
        mapped = {name: str(value.filename) for name, value in vars(self).items() if isinstance(value, np.memmap)}
        return vars(self) | {"_mapped": mapped} | dict.fromkeys(mapped)

    def __setstate__(self, state: dict) -> None:
        paths = state.pop("_mapped").items()
        vars(self).update(state, **{name: np.load(path, mmap_mode="r") for name, path in paths})

    def load(self) -> Encoder:
        """Loads the frozen encoder onto this process's device."""
        self._passes = None
        return load_encoder(self._name, self._revision, distributed.device(), self.trust_remote_code)

    def encode_rows(self, dataset, side: str, encoder: Encoder) -> np.ndarray:
        """Encodes all queries or all functions of a data set as an array [rows, d], to be compared by dot product.

        The embeddings are cached if the estimator has a cache folder. They are computed in `frozen_precision`, and
        stored as float16 if that is half precision.

        Args:
            side: "query" or "code".

        Raises:
            UserError: an embedding contains NaN, infinity or a value that is too large to store. Nothing is cached in
                that case.
        """
        profile = encoder.profile
        tokenizer = encoder.tokenizer
        device = distributed.device()
        precision = frozen_precision(device)
        dtype = np.dtype(np.float16 if precision in HALF else np.float32)
        with distributed.main_process_first():
            tokens = token_column(dataset, side, profile, tokenizer)
        prompt = prompt_length(tokenizer, profile, side)
        progress = f"{type(self).__name__}: encoding {side}"

        def build() -> Tensor:
            model = encoder.model
            if self._passes is None:
                self._passes = decide_passes(model, profile, device, precision, self.packing)
            passes = self._passes
            with (
                placed(model, device),
                running(model, passes.packed),
                torch.autocast(device.type, HALF.get(precision), enabled=precision in HALF),
            ):
                ready = dataclasses.replace(encoder, passes=passes)
                embeddings = embed_sharded(ready, tokens, side, self.batch_size, progress)
            embeddings = comparable(profile, embeddings)
            if not (embeddings.abs() <= float(np.finfo(dtype).max)).all():
                raise UserError(
                    f"{self.model_name_or_path}: the {side} embeddings contain NaN, infinity or numbers too large for "
                    f"{dtype}; choose another estimator model"
                )
            return embeddings

        self.encoder_identity = encoder.fingerprint
        key = fingerprint(self.encoder_identity, prompt, str(dtype), tokens.fingerprint())
        return cached_rows(self.cache_dir, key, dtype, build)

    def similarity(self, query_rows: Rows, code_rows: Rows) -> Tensor:
        """Computes the scores of C functions for Q queries, Tensor[Q, C] in float32. Raises UserError before `fit`."""
        check_fitted(self, "_queries")
        sides = self._queries[as_array(query_rows)], self._codes[self._code_values.rows(code_rows)]
        queries, codes = (torch.from_numpy(np.asarray(side, dtype=np.float32)) for side in sides)
        return queries @ codes.T * self._scale

    def neighbours(
        self, k: int, excluded: Excluded, codes: np.ndarray | None = None, progress: str | None = None
    ) -> Neighbours:
        """Finds the k functions with the highest score for each query, or reads them from the cache.

        Raises UserError before `fit`.
        """
        check_fitted(self, "_queries")

        def find(vectors: np.ndarray, excluded: Excluded) -> Neighbours:
            device = distributed.device()
            shared = None if device.type == "cpu" else len(self._queries)

            def build(rows: np.ndarray | None = None) -> Neighbours:
                options = {"progress": progress, "device": device, "rows": rows}
                return nearest_rows(self._queries, vectors, k, excluded, **options)

            return cached_neighbours(self.cache_dir, [self._queries, vectors, *excluded.key], k, build, shared)

        nearest = self._code_values.neighbours(self._codes, codes, excluded, find)
        return Neighbours(nearest.rows, nearest.scores * self._scale, nearest.own * self._scale)


class SimCSEEstimator(EncodedRowsEstimator):
    """Estimates the similarity of queries and functions by the cosine of two query embeddings (Section 3.2, "SimCSE").

    A function is represented by the query in its first training pair. The sentence encoder is a sentence-transformers
    model with its pooling, or a plain `AutoModel` with mean pooling. The paper fine-tunes `choices.PAPER_MODEL` for
    this estimator; `examples/simcse.py` shows how.
    """

    alpha = 1.3
    beta = 0.7
    temperature = 0.1
    distill_temperature = 0.07  # the temperature at which SimCSE is trained, as published
    compares_codes = False

    def fit(self, split: Split) -> None:
        """Encodes every query of the split, or reads the embeddings from the cache."""
        encoder = self.load()
        profile = encoder.profile.replace(normalize=True, score_function="dot")
        encoder = dataclasses.replace(encoder, profile=profile)
        self._queries = self._codes = self.encode_rows(split.queries, "query", encoder)
        self._code_values = CodeValues(split.judgments.first_queries())


class TrainedModelEstimator(EncodedRowsEstimator):
    """Estimates similarities as the scores of an encoder trained with InfoNCE (Section 3.2, "Trained Model").

    The tokenizer, lengths, pooling, score function and score scale come from that encoder's folder. They may differ
    from the settings of the encoder that is being trained.
    """

    alpha = 1.3
    beta = 0.7
    temperature = 5.0

    @property
    def positive_temperature(self) -> float:
        """The default temperature of positive-aware weights: 0.05 times the frozen encoder's score scale."""
        return 0.05 * self.score_scale

    @property
    def score_scale(self) -> float:
        """The factor by which the frozen encoder multiplies its scores."""
        return resolve_profile(self._name, revision=self._revision).score_scale

    def fit(self, split: Split) -> None:
        """Encodes every query and every function of the split, or reads the embeddings from the cache."""
        encoder = self.load()
        self._scale = encoder.profile.score_scale
        self._queries = self.encode_rows(split.queries, "query", encoder)
        self._codes = self.encode_rows(split.corpus, "code", encoder)


class InitialModelEstimator(TrainedModelEstimator):
    """Estimates similarities as the scores of the encoder before training, so that no other model is needed.

    The trainer passes its encoder to `bind`. The estimator is fitted before the first step and before a checkpoint is
    loaded, so a resumed run gets the same scores.
    """

    # Scores before training (cosine x 20) differ little, so Table 7's 5.0 would make all weights nearly equal.
    temperature = 2.0

    def __init__(self, cache_dir=DEFAULT_FOLDER):
        super().__init__("initial_model", cache_dir)
        self._encoder: Encoder | None = None

    @property
    def score_scale(self) -> float:
        """The factor by which the encoder multiplies its scores, or 1 if no encoder is bound yet."""
        return self._encoder.profile.score_scale if self._encoder else 1.0

    def bind(self, encoder: Encoder) -> None:
        """Receives the trainer's encoder."""
        self._encoder = encoder

    def load(self) -> Encoder:
        """Returns the trainer's encoder with its current weights. Raises UserError if no encoder is bound."""
        self._passes = None
        if self._encoder is None:
            raise UserError("estimator=initial_model needs a SoftInfoNCETrainer, which supplies the encoder")
        return self._encoder

    def __getstate__(self) -> dict:
        """Returns the state to pickle, without the model and tokenizer, which a fitted estimator no longer needs."""
        profile_only = self._encoder and dataclasses.replace(self._encoder, model=None, tokenizer=None)
        return super().__getstate__() | {"_encoder": profile_only}
