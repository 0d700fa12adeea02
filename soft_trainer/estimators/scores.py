"""Defines estimators that know only how similar a query is to its positive and its hard negatives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from soft_trainer.data.array_cache import DEFAULT_FOLDER, cached_rows
from soft_trainer.data.columns import text_ids
from soft_trainer.data.split import Split
from soft_trainer.data.tokens import encoder_texts
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator, Rows, as_array, check_fitted
from soft_trainer.hub.files import reading, split_revision
from soft_trainer.system import distributed
from soft_trainer.system.fingerprints import fingerprint, model_fingerprint, tokenizer_fingerprint
from soft_trainer.system.terminal import print_on_main, progress_bar

BATCHES_AT_ONCE = 16  # batches of a cross-encoder between two updates of the progress bar


class ScoresEstimator(Estimator):
    """Takes similarities from the scores that came with the rows, such as a column `scores` from a reranker.

    The similarity of all other pairs is unknown (`partial`). The default settings fit cosine similarities.

    Args:
        cache_dir: not used, because there is nothing to compute.
    """

    alpha = 1.3
    beta = 0.7
    temperature = 0.25
    positive_temperature = 0.05
    distill_temperature = 0.05
    partial = True
    in_workers = True

    def __init__(self, cache_dir=None):
        self.cache_dir = cache_dir

    def check(self, split: Split) -> None:
        """Raises UserError if the rows have no scores of hard negatives."""
        if not split.judgments.scored_negatives():
            raise UserError(
                "estimator=scores: the rows have no scores of hard negatives; add a column 'scores' with the score of "
                "the positive and then of each negative"
            )

    def fit(self, split: Split) -> None:
        """Collects the scores of the rows."""
        self.check(split)
        self._scores = split.judgments.scores()
        negatives = split.judgments.scored_negatives()
        print_on_main(f"scores: of {self._scores.nnz - negatives:,} positives and {negatives:,} hard negatives")

    def similarity(self, query_rows: Rows, code_rows: Rows) -> Tensor:
        """Returns the scores of C functions for Q queries, Tensor[Q, C] in float32. Unknown scores are NaN."""
        check_fitted(self, "_scores")
        known = self._scores[as_array(query_rows)][:, as_array(code_rows)].tocoo()
        similarity = np.full(known.shape, np.nan, dtype=np.float32)
        similarity[known.row, known.col] = known.data
        return torch.from_numpy(similarity)


class CrossEncoderEstimator(ScoresEstimator):
    """Scores each query with its positive and its hard negatives by a cross-encoder, which reads both texts at once.

    sentence-transformers loads the model. The similarities are its outputs before the activation function (logits).
    They are computed once, before training.

    Args:
        model_name_or_path: the cross-encoder's folder or its name on the Hub. `NAME@REVISION` pins a revision.
        cache_dir: the folder in which to cache scores for later runs. None keeps them in memory only.
        batch_size: the number of pairs to score at once.
        trust_remote_code: whether to run code that comes with the model. Read that code first.

    Attributes:
        encoder_identity: the hash of the model's content, or None before `fit`.
    """

    temperature = 5.0
    positive_temperature = 1.0
    distill_temperature = 1.0
    encoder_identity: str | None = None

    def __init__(
        self,
        model_name_or_path: str,
        cache_dir: str | Path | None = DEFAULT_FOLDER,
        batch_size: int = 32,
        trust_remote_code: bool = False,
    ):
        super().__init__(cache_dir)
        self.model_name_or_path = str(model_name_or_path)
        self.batch_size = batch_size
        self.trust_remote_code = trust_remote_code

    def check(self, split: Split) -> None:
        """Raises UserError if the rows have no hard negatives."""
        if split.judgments.negatives is None or not split.judgments.negatives.nnz:
            raise UserError(
                f"{self.model_name_or_path}: a cross-encoder scores each query with its positive and its hard "
                "negatives, and these rows name none; add a column 'negatives'"
            )

    def load(self):
        """Loads the `CrossEncoder` of sentence-transformers onto this process's device."""
        from sentence_transformers import CrossEncoder  # slow to import

        name, revision = split_revision(self.model_name_or_path)
        with reading(name, revision):
            return CrossEncoder(
                name, revision=revision, device=str(distributed.device()), trust_remote_code=self.trust_remote_code
            )

    def fit(self, split: Split) -> None:
        """Scores all pairs of a query with its positive or a hard negative, or reads the scores from the cache.

        Raises:
            UserError: the rows have no hard negatives, or a score is NaN or infinite.
        """
        self.check(split)
        model = self.load()
        negatives = np.stack(split.judgments.negatives.nonzero(), axis=1)
        pairs = np.unique(np.concatenate([split.judgments.pairs(), negatives]), axis=0)
        profile = EncoderProfile()
        queries = list(encoder_texts(split.queries, "query", profile))
        codes = list(encoder_texts(split.corpus, "code", profile))
        ids = np.stack([text_ids(queries)[pairs[:, 0]], text_ids(codes)[pairs[:, 1]]], axis=1)
        _, firsts, groups = np.unique(ids, axis=0, return_index=True, return_inverse=True)
        texts = [(queries[query], codes[code]) for query, code in pairs[firsts]]
        self.encoder_identity = fingerprint(
            model_fingerprint(model.model, model.model.state_dict()),
            tokenizer_fingerprint(model.tokenizer),
            [model.max_seq_length, model.prompts, model.default_prompt_name],
        )
        key = fingerprint("cross-encoder", self.encoder_identity, ids[firsts])
        scores = cached_rows(self.cache_dir, key, np.dtype(np.float32), lambda: self._predicted(model, texts))[:, 0]
        if not np.isfinite(scores).all():
            raise UserError(f"{self.model_name_or_path}: a score is NaN or infinite; choose another teacher")
        entries = (scores[groups.ravel()], pairs.T)
        self._scores = sparse.csr_matrix(entries, shape=split.judgments.stored.shape)

    def _predicted(self, model, texts: Sequence[tuple[str, str]]) -> Tensor:
        """Scores pairs of texts, the longest first, so that batches have little padding. Returns Tensor[pairs, 1]."""
        rank, processes = distributed.rank_and_world_size()
        order = np.argsort([-len(query) - len(code) for query, code in texts], kind="stable")
        own = order[rank::processes]
        at_once = BATCHES_AT_ONCE * self.batch_size
        found = [torch.empty(0)]
        with progress_bar(f"{self.model_name_or_path}: scoring", len(own), "pair") as bar:
            for start in range(0, len(own), at_once):
                part = own[start : start + at_once]
                options = {"batch_size": self.batch_size, "show_progress_bar": False, "convert_to_tensor": True}
                scores = model.predict([texts[pair] for pair in part], activation_fn=torch.nn.Identity(), **options)
                found.append(scores.float().cpu())
                bar.update(len(part))
        scores = distributed.gather(torch.cat(found).to(distributed.device())).cpu()
        numbers = np.concatenate([order[process::processes] for process in range(processes)])
        return scores[torch.from_numpy(np.argsort(numbers))].unsqueeze(1)
