"""Soft-InfoNCE as a loss of sentence-transformers, plain and with gradient caching."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import CachedLossMixin, has_static_embedding_input
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.util import cos_sim, similarity_fct_name
from torch import Tensor, nn

from soft_trainer import distributed, losses
from soft_trainer.callbacks import EstimatorCallback
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import members_of
from soft_trainer.estimators.bm25 import BM25Estimator
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.loss_settings import LossSettings
from soft_trainer.options.declared import Values, effective_options
from soft_trainer.options.fields import LossOptions, SoftInfoNCEOptions
from soft_trainer.options.resolve import check_codes, resolve_loss
from soft_trainer.sentence_transformers.estimator import SentenceTransformerEstimator
from soft_trainer.sentence_transformers.rows import Columns, LabelledRows, columns_of
from soft_trainer.training.gradient_cache import loss_in_blocks
from soft_trainer.training.hard_batches import check_code_only

# Fields of `SoftInfoNCEOptions` that the loss takes. The others are about batches, which the trainer draws.
OPTIONS = (*(field.name for field in fields(LossSettings)), "duplicates", "negatives_meet")
CITATION = """
@inproceedings{li-etal-2023-rethinking,
    title = "Rethinking Negative Pairs in Code Search",
    author = "Li, Haochen and Zhou, Xin and Luu, Anh Tuan and Miao, Chunyan",
    booktitle = "Proceedings of the 2023 Conference on Empirical Methods in Natural Language Processing",
    year = "2023",
}
"""


class SoftInfoNCELoss(nn.Module):
    """InfoNCE whose negatives carry weights, for `SentenceTransformerTrainer`.

    `MultipleNegativesRankingLoss` counts every other code of the batch as equally wrong for a query. Here an estimator
    says how similar the codes are to the query, and those that are close to right count less (Li et al., 2023). The
    estimator is frozen: it is fitted on the training rows when the loss is made.

    Where gradients are off, as in an evaluation, the value is plain InfoNCE without weights: the rows of an evaluation
    set are not training rows, and its labels are not read.

    What `SoftInfoNCETrainer` can do and this cannot: resume with exactly the batches of an uninterrupted run; compute
    the weights in data workers, ahead of the step (here the step computes them, and waits for the labels of its
    batch); draw new own negatives in each epoch, or batches of similar rows; log statistics of the weights.

    Args:
        model: the `SentenceTransformer` in training.
        estimator: for example `BM25Estimator()`, `SimCSEEstimator(NAME)`, `TrainedModelEstimator(NAME)` or
            `SentenceTransformerEstimator()`, the model before training. None: InfoNCE. The loss fits a copy of it.
        train_dataset: the data set that `with_rows` gives, with the texts of queries, of codes, and then of own
            negatives. The trainer gets the same one.
        scale: the factor on similarities.
        similarity_fct: Tensor[B, d] and Tensor[N, d] -> Tensor[B, N].
        gather_across_devices: take the codes of all processes as negatives.
        options: fields of `SoftInfoNCEOptions`: `loss`, `weighting` ("eq4" or "positive_aware"), `alpha`, `beta`,
            `temperature`, `floor`, `margin`, `cancel`, `cancel_k`, `cancel_ratio`, `order_loss_weight`,
            `order_loss_scale`, `distill_weight`, `distill_temperature`, `infonce_weight`, `kl_weight`,
            `clamp_negative_scores` and `duplicates`, with the same defaults; and `negatives_meet`, "all" (as in
            sentence-transformers) or "own".

    Raises:
        UserError: options, rows or an estimator that cannot work together; in the first step, a batch that is too
            small; in any step, labels that are not row numbers of `train_dataset`.

    Example:
        >>> train_dataset = with_rows(train_dataset)
        >>> loss = SoftInfoNCELoss(model, BM25Estimator(), train_dataset)
        >>> trainer = SentenceTransformerTrainer(model, args, train_dataset, loss=loss)
    """

    def __init__(
        self,
        model: SentenceTransformer,
        estimator,
        train_dataset: Dataset,
        *,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        gather_across_devices: bool = False,
        **options,
    ):
        super().__init__()
        if not scale > 0:
            raise UserError(f"scale={scale}: must be above 0")
        self.model, self.scale, self.similarity_fct = model, scale, similarity_fct
        self.gather_across_devices = gather_across_devices
        self.options = _checked_options(options)
        _check_estimator(estimator)
        self.estimator = _own_estimator(estimator, model)
        self.loss_settings = resolve_loss(self.options, self.estimator)
        self.rows = LabelledRows.of(train_dataset)
        if self.loss_settings.needs_similarity:
            check_code_only(self.estimator, self.rows.code_only)
            EstimatorCallback(self.estimator).fit(self.rows.rows)
        self._batch_checked = False

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        """Returns the mean loss of a batch, a scalar; the features are of queries, codes and then own negatives."""
        features = list(sentence_features)
        self._check_columns(len(features))
        return self.compute_loss_from_embeddings(embed_columns(self.model, features), labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None) -> Tensor:
        """Returns the loss of queries, codes and own negatives, Tensor[B, d] each; `labels` are row numbers."""
        sizes, rank = self._sizes(len(embeddings[0]))
        if not torch.is_grad_enabled():
            return self._evaluation_loss(*self._both_sides(embeddings, sizes), sizes, rank, len(embeddings) - 1)
        columns = self._columns(labels, sizes, rank)
        queries, codes = self._both_sides(embeddings, sizes)
        return self._block_loss(queries, codes[columns.places.to(codes.device)], columns, sizes)

    def _sizes(self, size: int) -> tuple[list[int], int]:
        """Returns the numbers of queries of the processes that share negatives, and this process's place."""
        if not self.gather_across_devices:
            return [size], 0
        return distributed.gather_numbers(size), distributed.rank_and_world_size()[0]

    def _both_sides(self, embeddings: list[Tensor], sizes: list[int]) -> tuple[Tensor, Tensor]:
        """Queries of this process and codes of all those in `sizes`, in float32 or higher."""
        queries, *codes = (side if side.dtype == torch.float64 else side.float() for side in embeddings)
        codes = torch.cat(codes)
        if self.gather_across_devices:
            codes = distributed.gather_with_gradient(codes, [size * (len(embeddings) - 1) for size in sizes])
        return queries, codes

    def _columns(self, labels: Tensor | None, sizes: list[int], rank: int) -> Columns:
        """Returns the columns of the batch's scores. The first batch must be large enough for the weights."""
        rows = self.rows.find(labels, sizes[rank])
        rows_of = [rows]
        if self.gather_across_devices:
            gathered = distributed.gather(torch.from_numpy(rows).to(labels.device)).numpy(force=True)
            rows_of = np.split(gathered, np.cumsum(sizes)[:-1])
        meet_all, duplicates = self.options.negatives_meet == "all", self.options.duplicates
        columns = columns_of(self.rows, rows_of, rank, meet_all, duplicates)
        if not self._batch_checked:
            check_codes(self.loss_settings, columns.fewest)
            self._batch_checked = True  # a later batch may be the short one at the end of an epoch
        return columns

    def _scores(self, queries: Tensor, codes: Tensor) -> Tensor:
        """Returns scaled similarities, Tensor[B, N], whose precision no autocast lowers."""
        with torch.autocast(queries.device.type, enabled=False):
            return self.similarity_fct(queries, codes) * self.scale

    def _block_loss(
        self, queries: Tensor, codes: Tensor, columns: Columns, sizes: list[int], block: slice = slice(None)
    ) -> Tensor:
        """Returns the part of a block of queries in this process's loss, against the codes Tensor[N, d]."""
        device = queries.device
        positives = columns.positives[block].to(device)
        negatives, also = (
            None if mask is None else mask[block].to(device) for mask in (columns.negatives, columns.also)
        )
        inputs = {}
        if self.loss_settings.needs_similarity:
            rows = columns.rows[block], columns.code_rows
            inputs = self.loss_settings.weigh(self.estimator, *rows, positives, negatives)
        loss = self.loss_settings(self._scores(queries, codes), positives, negatives=negatives, also=also, **inputs)
        # Gradients are averaged over processes: with this factor they are those of one process on the global batch.
        return loss * (len(queries) * len(sizes) / sum(sizes))

    def _evaluation_loss(self, queries: Tensor, codes: Tensor, sizes: list[int], rank: int, width: int) -> Tensor:
        """Returns InfoNCE of the batch against all its codes."""
        start = sum(sizes[:rank]) * width
        positives = torch.arange(start, start + len(queries), device=codes.device)
        return losses.info_nce(self._scores(queries, codes), positives)

    def _check_columns(self, given: int) -> None:
        """Refuses a batch with other columns of texts than the training rows have."""
        expected = 2 + self.rows.negatives.shape[1]
        if given < 2 or (given != expected and torch.is_grad_enabled()):
            raise UserError(
                f"{type(self).__name__}: a batch of {given} columns of texts, but the train_dataset that the loss was "
                f"made with has {expected}: give loss and trainer the same data set"
            )

    def get_config_dict(self) -> dict[str, Any]:
        """Returns the settings that have an effect, for the model card."""
        config = {"estimator": _name(self.estimator)} | effective_options(LossOptions, Values(self.loss_settings))
        config |= {"duplicates": self.options.duplicates, "negatives_meet": self.options.negatives_meet}
        config |= {"scale": self.scale, "similarity_fct": similarity_fct_name(self.similarity_fct)}
        return config | {"gather_across_devices": self.gather_across_devices}

    @property
    def citation(self) -> str:
        """The paper, for the model card."""
        return CITATION


class CachedSoftInfoNCELoss(CachedLossMixin, SoftInfoNCELoss):
    """`SoftInfoNCELoss` for batches of any size in the memory of a mini-batch, with the same gradients.

    Every text is encoded twice, so a step takes about 1.3 times as long or more.

    Args:
        mini_batch_size: the number of texts encoded at once.
        mini_batch_num_tokens: encode as many texts at once as have this many tokens, in place of `mini_batch_size`.
        show_progress_bar: show the progress within a batch.
        model, estimator, train_dataset, settings: as in `SoftInfoNCELoss`.

    Raises:
        UserError: as `SoftInfoNCELoss`, and static embeddings, which have no batches.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        estimator,
        train_dataset: Dataset,
        *,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
        **settings,
    ):
        if has_static_embedding_input(model):
            raise UserError("model: static embeddings cannot be encoded in mini-batches; use SoftInfoNCELoss")
        super().__init__(model, estimator, train_dataset, **settings)
        self.mini_batch_size, self.mini_batch_num_tokens = mini_batch_size, mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        """Returns the mean loss of a batch: a scalar, whose backward pass encodes the texts again."""
        features = list(sentence_features)
        self._check_columns(len(features))
        return self.forward_cached(features, labels)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Returns the loss of each column's mini-batches; `with_backward` sends gradients into them."""
        embeddings = [torch.cat(parts) for parts in reps]
        if not with_backward:
            return self.compute_loss_from_embeddings(embeddings, labels)
        sizes, rank = self._sizes(len(embeddings[0]))
        columns = self._columns(labels, sizes, rank)
        queries, codes = self._both_sides(embeddings, sizes)

        def loss_of(queries: Tensor, codes: Tensor, block: slice) -> Tensor:
            return self._block_loss(queries, codes, columns, sizes, block)

        codes = codes[columns.places.to(codes.device)]
        return loss_in_blocks(queries, codes, loss_of, Tensor.backward, self.mini_batch_size)

    def get_config_dict(self) -> dict[str, Any]:
        """Returns the settings that have an effect, for the model card."""
        size = ("mini_batch_size", "mini_batch_num_tokens")[self.mini_batch_num_tokens is not None]
        return super().get_config_dict() | {size: getattr(self, size)}


def _checked_options(options: dict) -> SoftInfoNCEOptions:
    """Returns the options of the loss; own negatives meet all queries unless they say otherwise."""
    for name in options:
        if name not in OPTIONS:
            raise UserError(f"{name}: no option of SoftInfoNCELoss; use {', '.join(OPTIONS)}")
    return SoftInfoNCEOptions(**{"negatives_meet": "all"} | options)


def _check_estimator(estimator) -> None:
    """Refuses a class, a name, and any object that is not an estimator."""
    for member in members_of(estimator):
        methods = (getattr(member, name, None) for name in ("fit", "similarity"))
        if isinstance(member, type) or not all(map(callable, methods)):
            given = f"the class {member.__name__}" if isinstance(member, type) else repr(member)
            raise UserError(f"estimator: an object such as BM25Estimator() is expected, not {given}")


def _own_estimator(estimator, model: SentenceTransformer):
    """Returns a copy of the estimator, which one loss fits; it may take the model in training."""
    if estimator is None:
        return None
    estimator = copy.copy(estimator)
    if hasattr(estimator, "members"):
        estimator.members = [copy.copy(member) for member in estimator.members]
    for member in members_of(estimator):
        if isinstance(member, InitialModelEstimator):
            raise UserError("InitialModelEstimator belongs to SoftInfoNCETrainer: use SentenceTransformerEstimator()")
        if isinstance(member, SentenceTransformerEstimator) and member.model is None:
            member.model = model
    return estimator


def _name(estimator) -> str | None:
    """Returns the name of an estimator's class, with its members or the column that BM25 scores against."""
    if estimator is None:
        return None
    name = type(estimator).__name__
    if hasattr(estimator, "members"):
        return f"{name}({', '.join(map(_name, estimator.members))})"
    if isinstance(estimator, BM25Estimator) and estimator.document_column != estimator.column:
        return f"{name}(document_column={estimator.document_column!r})"
    return name
