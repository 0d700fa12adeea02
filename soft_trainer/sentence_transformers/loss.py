"""Defines Soft-InfoNCE losses for sentence-transformers, with and without gradient caching, and an estimator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import CachedLossMixin, has_static_embedding_input
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.util import cos_sim, similarity_fct_name
from torch import Tensor, nn

from soft_trainer import losses
from soft_trainer.criterion import Criterion, Targets
from soft_trainer.data.split import Split
from soft_trainer.encoders.encoding import at_least_float32
from soft_trainer.encoders.profiles import COSINE_SCALE, is_cross_encoder
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator, Rows, as_array, codes_without_query
from soft_trainer.estimators.bm25 import BM25Estimator
from soft_trainer.estimators.callback import EstimatorCallback
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator, TrainedModelEstimator
from soft_trainer.estimators.scores import CrossEncoderEstimator
from soft_trainer.hub.files import split_revision
from soft_trainer.options.defaults import teacher_settings
from soft_trainer.options.fields import SoftInfoNCEOptions
from soft_trainer.options.resolve import check_codes, resolve_loss
from soft_trainer.sentence_transformers.rows import LabelledRows, batch_columns, check_labels
from soft_trainer.system import distributed
from soft_trainer.system.terminal import print_on_main
from soft_trainer.training.gradient_cache import loss_in_blocks
from soft_trainer.training.targets import TargetMaker

# The fields of `SoftInfoNCEOptions` that configure the loss. The other fields configure batches.
OPTIONS = (*(field.name for field in fields(Criterion)), "false_negatives", "teacher")
CITATION = """
@inproceedings{li-etal-2023-rethinking,
    title = "Rethinking Negative Pairs in Code Search",
    author = "Li, Haochen and Zhou, Xin and Luu, Anh Tuan and Miao, Chunyan",
    booktitle = "Proceedings of the 2023 Conference on Empirical Methods in Natural Language Processing",
    year = "2023",
}
"""


class SoftInfoNCELoss(nn.Module):
    """InfoNCE with weighted negatives, as a loss for `SentenceTransformerTrainer`.

    `MultipleNegativesRankingLoss` treats all other functions in a batch as equally irrelevant. This loss gives smaller
    weights to negatives that an estimator finds similar to the query (Li et al., 2023). The estimator is frozen, and
    is fitted on the training rows when the loss is created.

    When gradients are off, as in evaluation, the loss is plain InfoNCE and ignores labels, because the estimator is
    fitted only on training rows.

    `docs/sentence_transformers.md` lists what only `SoftInfoNCETrainer` can do, such as resume with the same batches.

    Args:
        model: the `SentenceTransformer` to train.
        estimator: for example `BM25Estimator()`, `SimCSEEstimator(NAME)`, `TrainedModelEstimator(NAME)`, or
            `SentenceTransformerEstimator()` for the model before training. None means InfoNCE. The loss fits a copy of
            the estimator.
        train_dataset: the result of `with_rows`, with columns for queries, functions, and optionally negatives. Pass
            the same data set to the trainer.
        scale: the factor by which similarities are multiplied.
        similarity_fct: computes similarities, Tensor[B, N], from Tensor[B, d] and Tensor[N, d].
        gather_across_devices: whether to use the functions of all processes as negatives.
        options: fields of `SoftInfoNCEOptions`, with the same defaults: `loss`, `weighting` ("linear" or
            "positive_aware"), `alpha`, `beta`, `temperature`, `floor`, `margin`, `cancel`, `cancel_k`, `cancel_ratio`,
            `distill_weight`, `distill_temperature`, `infonce_weight`, `kl_weight`, `false_negatives`, and `teacher`,
            the folder or name of a stronger encoder to learn from, or of a cross-encoder, instead of an estimator.

    Raises:
        UserError: the options, rows and estimator are incompatible. The first step also raises UserError if the batch
            is too small, and any step does if a row is not in `train_dataset`.

    Example:
        >>> train_dataset = with_rows(train_dataset)
        >>> loss = SoftInfoNCELoss(model, BM25Estimator(), train_dataset)
        >>> trainer = SentenceTransformerTrainer(model, args, train_dataset, loss=loss)
    """

    citation = CITATION  # for the model card

    def __init__(
        self,
        model: SentenceTransformer,
        estimator=None,
        train_dataset: Dataset | None = None,
        *,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        gather_across_devices: bool = False,
        **options,
    ):
        super().__init__()
        unknown = next(iter(options.keys() - set(OPTIONS)), None)
        if unknown:
            known = ", ".join(("scale", "similarity_fct", "gather_across_devices", *OPTIONS))
            raise UserError(f"SoftInfoNCELoss has no option {unknown}; use {known}")
        if not scale > 0:
            raise UserError(f"scale={scale}: must be above 0")
        self.model = model
        self.scale = scale
        self.similarity_fct = similarity_fct
        self.gather_across_devices = gather_across_devices
        teacher = options.get("teacher")
        if teacher is not None:
            if estimator is not None:
                other = type(estimator).__name__
                raise UserError(
                    f"teacher={teacher}: a teacher is the estimator, so it cannot be combined with {other}"
                )
            settings = teacher_settings(teacher)
            options = {name: settings[name] for name in OPTIONS if name in settings} | options
            kind = TrainedModelEstimator
            if is_cross_encoder(*split_revision(teacher)):
                kind = CrossEncoderEstimator
            estimator = kind(teacher)
        self.options = SoftInfoNCEOptions(**options)
        self.estimator = _own_estimator(estimator, model)
        if self.estimator is None and self.options.loss is None:
            print_on_main(f"{type(self).__name__} without an estimator or a teacher is InfoNCE: all weights are 1")
        self.criterion = resolve_loss(self.options, self.estimator)
        if train_dataset is None:
            raise UserError(f"{type(self).__name__}: pass train_dataset=, the rows that `with_rows` returns")
        self.rows = LabelledRows(train_dataset)
        without_query = None
        if self.criterion.needs_similarity:
            split = self.rows.split
            EstimatorCallback(self.estimator).fit(split)
            without_query = codes_without_query(self.estimator, split)
        false_negatives = self.options.false_negatives
        self.target_maker = TargetMaker(
            self.criterion,
            self.estimator,
            relevant=None if false_negatives == "ignore" else self.rows.answers,
            keeps_positives=false_negatives == "positives",
            without_query=without_query,
        )
        self._labels = distributed.NumberExchange()
        self._batch_checked = False

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        """Computes the mean loss of a batch from the tokenised queries, functions and optional negatives."""
        return self.compute_loss_from_embeddings(embed_columns(self.model, list(sentence_features)), labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None) -> Tensor:
        """Computes the mean loss of a batch from embeddings.

        Args:
            embeddings: the embeddings of queries, functions and negatives, Tensor[B, d] each.
            labels: the row hashes from `with_rows`, LongTensor[B].
        """
        if torch.is_grad_enabled():
            queries, codes, targets, sizes = self._training_batch(embeddings, labels)
            return self._block_loss(queries, codes, targets, slice(None), sizes)
        queries, codes = self._sides(embeddings)
        first = 0
        if self.gather_across_devices:
            columns = len(embeddings) - 1
            sizes = [columns * size for size in distributed.gather_numbers(len(queries))]
            codes = distributed.gather_with_gradient(codes, sizes)
            first = sum(sizes[: distributed.rank_and_world_size()[0]])
        positives = torch.arange(first, first + len(queries), device=codes.device)
        return losses.info_nce(self._scores(queries, codes), positives)

    def _training_batch(
        self, embeddings: list[Tensor], labels: Tensor | None
    ) -> tuple[Tensor, Tensor, Targets, list[int]]:
        """Returns the queries, the N functions to compare them with, the targets, and the processes' query counts.

        If `gather_across_devices` is set, the functions come from all processes, which takes two collectives.
        """
        queries, codes = self._sides(embeddings)
        check_labels(labels, len(queries))
        labels_of = [labels]
        rank = 0
        if self.gather_across_devices:
            labels_of = self._labels.gather(labels)
            rank = distributed.rank_and_world_size()[0]
        sizes = list(map(len, labels_of))
        if self.gather_across_devices:
            codes = distributed.gather_with_gradient(codes, [size * self.rows.codes.shape[1] for size in sizes])
        positions, targets = self._targets(labels_of, rank, codes.device)
        return queries, codes[positions], targets, sizes

    def _sides(self, embeddings: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Separates the embeddings of this process's queries from the embeddings of its functions."""
        given = len(embeddings)
        expected = 1 + self.rows.codes.shape[1]
        if given < 2 or (given != expected and torch.is_grad_enabled()):
            raise UserError(
                f"{type(self).__name__}: the batch has {given} columns of texts, but the loss's train_dataset has "
                f"{expected}. Pass the same data set to the loss and the trainer"
            )
        queries, *codes = map(at_least_float32, embeddings)
        return queries, torch.cat(codes)

    def _targets(self, labels_of: list[Tensor], rank: int, device: torch.device) -> tuple[Tensor, Targets]:
        """Finds a batch's training rows from all processes' labels, and computes the targets of process `rank`.

        Functions that occur several times in a batch are merged into one of the N columns.

        Returns:
            The position of each column's function in the encoded functions, LongTensor[N], and the targets.

        Raises:
            UserError: the first batch is too small for the weights, or a label belongs to no row.
        """
        rows_of = [self.rows.find(labels) for labels in labels_of]
        rows = rows_of[rank]
        columns = batch_columns(self.rows, rows_of, rank)
        if not self._batch_checked:
            check_codes(self.criterion, len(columns.code_rows))
            self._batch_checked = True  # a later batch may be the short last batch of an epoch
        targets, _ = self.target_maker.find_positives(rows, columns.code_rows, columns.positives)
        targets = targets.mapped(lambda tensor: tensor.to(device))
        return columns.positions.to(device), self.target_maker.add_weights(targets, rows, columns.code_rows)

    def _scores(self, queries: Tensor, codes: Tensor) -> Tensor:
        """Computes scaled similarities, Tensor[B, N], in full precision even under autocast."""
        with torch.autocast(queries.device.type, enabled=False):
            return self.similarity_fct(queries, codes) * self.scale

    def _block_loss(self, queries: Tensor, codes: Tensor, targets: Targets, block: slice, sizes: list[int]) -> Tensor:
        """Computes the loss of a block of this process's queries, Tensor[B, d], and all functions, Tensor[N, d]."""
        targets = targets[block]
        loss = self.criterion(self._scores(queries[block], codes), targets)
        # With this factor, the gradient averaged over processes equals the gradient of the global batch.
        return loss * (len(targets) * len(sizes) / sum(sizes))

    def get_config_dict(self) -> dict[str, Any]:
        """Returns the settings that affect the loss, for the model card."""
        return {
            "estimator": _name(self.estimator),
            **self.criterion.effective,
            "false_negatives": self.options.false_negatives,
            "scale": self.scale,
            "similarity_fct": similarity_fct_name(self.similarity_fct),
            "gather_across_devices": self.gather_across_devices,
        }


class CachedSoftInfoNCELoss(CachedLossMixin, SoftInfoNCELoss):
    """`SoftInfoNCELoss` with gradient caching: exact gradients of a large batch, using the memory of a mini-batch.

    Every text is encoded twice, so a step takes at least 1.3 times as long.

    Args:
        mini_batch_size: the number of texts to encode at once.
        mini_batch_num_tokens: the number of tokens to encode at once, instead of `mini_batch_size`.
        show_progress_bar: whether to show a progress bar for each batch.
        model, estimator, train_dataset, settings: see `SoftInfoNCELoss`.

    Raises:
        UserError: the model has static embeddings, or `SoftInfoNCELoss` would raise an error.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        estimator=None,
        train_dataset: Dataset | None = None,
        *,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
        **settings,
    ):
        if has_static_embedding_input(model):
            raise UserError("model: static embeddings cannot be encoded in mini-batches; use SoftInfoNCELoss")
        super().__init__(model, estimator, train_dataset, **settings)
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        """Computes the mean loss of a batch. The backward pass encodes the texts again."""
        return self.forward_cached(sentence_features, labels)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Computes the loss from embeddings and, if `with_backward`, the gradients of the embeddings.

        Args:
            reps: the embeddings of queries, functions and negatives, each as a list of mini-batches.
            labels: the row hashes from `with_rows`.
        """
        embeddings = [torch.cat(parts) for parts in reps]
        if not with_backward:
            return self.compute_loss_from_embeddings(embeddings, labels)
        queries, codes, targets, sizes = self._training_batch(embeddings, labels)

        def loss_of(queries: Tensor, codes: Tensor, block: slice) -> Tensor:
            return self._block_loss(queries, codes, targets, block, sizes)

        return loss_in_blocks(queries, codes, loss_of, Tensor.backward, self.mini_batch_size)

    def get_config_dict(self) -> dict[str, Any]:
        """Returns the settings that affect the loss, for the model card."""
        if self.mini_batch_num_tokens is None:
            size = {"mini_batch_size": self.mini_batch_size}
        else:
            size = {"mini_batch_num_tokens": self.mini_batch_num_tokens}
        return super().get_config_dict() | size


class SentenceTransformerEstimator(Estimator):
    """Estimates the similarity of queries and functions with a frozen sentence-transformers model.

    All rows are encoded once, when the loss is created, with the model's prompts for queries and documents.
    Similarities come from the model's similarity function. Cosines are multiplied by 20.

    Args:
        model: the frozen model. By default, the model to be trained, with its weights before training.
        batch_size: the number of texts to encode at once.
    """

    # The same defaults as InitialModelEstimator, because the scores are the same.
    alpha = 1.3
    beta = 0.7
    temperature = 2.0

    def __init__(self, model: SentenceTransformer | None = None, batch_size: int = 64):
        self.model = model
        self.batch_size = batch_size

    @property
    def score_scale(self) -> float:
        """The factor by which the model's similarities are multiplied: 20 for cosines, otherwise 1."""
        if self.model is None or self.model.similarity_fn_name == "cosine":
            return COSINE_SCALE
        return 1.0

    @property
    def positive_temperature(self) -> float:
        """The default temperature of positive-aware weights: 0.05 times the score scale."""
        return 0.05 * self.score_scale

    def fit(self, split: Split) -> None:
        """Encodes all queries and functions of the split. Each process encodes a shard."""
        self._queries = self._embeddings(self.model.encode_query, split.queries["docstring"][:])
        self._codes = self._embeddings(self.model.encode_document, split.corpus["code"][:])

    def similarity(self, query_rows: Rows, code_rows: Rows) -> Tensor:
        """Computes the scaled similarities of Q queries and C functions, Tensor[Q, C] in float32."""
        return self._scores(self._queries[as_array(query_rows)], self._codes[as_array(code_rows)])

    def _scores(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.model.similarity(rows, columns) * self.score_scale

    def _embeddings(self, encode, texts: list[str]) -> Tensor:
        share = texts[distributed.shard(len(texts), *distributed.rank_and_world_size())]
        was_training = self.model.training
        embeddings = encode(share, batch_size=self.batch_size, convert_to_tensor=True, show_progress_bar=False)
        self.model.train(was_training)
        return distributed.gather(torch.as_tensor(embeddings)).float().cpu()


def _own_estimator(estimator, model: SentenceTransformer):
    """Returns the estimator for a loss: a copy of the given estimator, or None.

    A `SentenceTransformerEstimator` without a model gets the model to be trained.

    Raises:
        UserError: the estimator does not work with this loss.
    """
    if estimator is None:
        return None
    if isinstance(estimator, type) or not hasattr(estimator, "fit") or not hasattr(estimator, "similarity"):
        raise UserError(f"estimator: expected an object such as BM25Estimator(), not {estimator!r}")
    estimator = copy.copy(estimator)
    if isinstance(estimator, InitialModelEstimator):
        raise UserError("InitialModelEstimator works only with SoftInfoNCETrainer: use SentenceTransformerEstimator()")
    if isinstance(estimator, SentenceTransformerEstimator) and estimator.model is None:
        estimator.model = model
    return estimator


def _name(estimator) -> str | None:
    """Returns an estimator's class name, plus BM25's document column if set, or None if there is no estimator."""
    if estimator is None:
        return None
    name = type(estimator).__name__
    if isinstance(estimator, BM25Estimator) and estimator.document_column != estimator.column:
        return f"{name}(document_column={estimator.document_column!r})"
    return name
