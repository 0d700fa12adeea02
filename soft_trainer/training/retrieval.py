"""Evaluation of a `Trainer` by retrieval: every query is ranked against a whole corpus."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import EvalPrediction
from transformers.trainer_utils import speed_metrics

from soft_trainer import distributed
from soft_trainer.data.codesearchnet import target_rows
from soft_trainer.data.tokens import GraphColumn, TokenColumn, column_of
from soft_trainer.encoders.encoding import embed_sharded, prompt_length
from soft_trainer.encoders.matryoshka import shorten
from soft_trainer.encoders.pooling import comparable
from soft_trainer.errors import UserError
from soft_trainer.evaluation.dimensions import mrr_by_dims
from soft_trainer.evaluation.ranking import Ranking, rank_codes, retrieval_metrics
from soft_trainer.evaluation.results import METRICS
from soft_trainer.evaluation.retrieval import RetrievalOutput
from soft_trainer.training.saving import SavingTrainer

Corpora = Dataset | dict[str, Dataset] | None


class RetrievalTrainer(SavingTrainer):
    """A `Trainer` whose `evaluate` and `predict` rank codes for queries.

    Attributes:
        METRICS: the metrics that `evaluate` measures.
        encoder: the `EncoderProfile` of the model; a subclass sets it.
        codebase: the corpus, rows with `url` and a code, or a dict with the keys of `eval_dataset`.
        evaluated_dims: numbers of first dimensions of the embeddings whose MRR is measured too.
    """

    codebase: Corpora = None
    METRICS = tuple(METRICS)
    evaluated_dims: tuple[int, ...] = ()

    def check_evaluation(self) -> None:
        """Refuses evaluations that cannot be made during training.

        Raises:
            UserError: no evaluation rows, no corpus for them, or a query whose url is not in it.
        """
        if self.args.eval_strategy == "no" and not self.args.eval_on_start:
            return
        sets = self.eval_dataset
        if sets is None:
            raise UserError("eval_strategy, eval_on_start: pass eval_dataset= (rows with url and a query)")
        for key, queries in (sets if isinstance(sets, Mapping) else {None: sets}).items():
            target_rows(queries, self.corpus_of(key), "eval_dataset" if key is None else f"eval_dataset[{key!r}]")

    def evaluate(
        self,
        eval_dataset: Corpora = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        codebase: Corpora = None,
    ) -> dict[str, float]:
        """Ranks every query of `eval_dataset` against the whole corpus.

        Args:
            eval_dataset: rows with `url` and a query, or a dict of them; the trainer's own when None. A string names
                one of the trainer's own.
            codebase: the corpus, or a dict of them with the same keys; the trainer's own when None.

        Returns:
            `PREFIX_mrr`, `PREFIX_recall@1` (5, 10), `PREFIX_pool_size`, ..., the same on every process, and
            `PREFIX_mrr_256` for 256 of `evaluated_dims`. With a dict of
            data sets, `PREFIX_KEY_mrr` and so on for each, and the mean of each metric over the sets as `PREFIX_mrr`.
        """
        eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str):
            eval_dataset = {eval_dataset: self.eval_dataset[eval_dataset]}
        if isinstance(eval_dataset, Mapping):
            metrics = {}
            for key, rows in eval_dataset.items():
                prefix = f"{metric_key_prefix}_{key}"
                metrics |= self.predict(rows, self.corpus_of(key, codebase), prefix).metrics
            metrics |= _means(metrics, metric_key_prefix, tuple(eval_dataset))
        else:
            metrics = self.predict(eval_dataset, codebase, metric_key_prefix).metrics
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(
        self,
        dataset: Dataset,
        codebase: Dataset | None = None,
        metric_key_prefix: str = "test",
        top_k: int = 10,
        codes: Tensor | None = None,
    ) -> RetrievalOutput:
        """Ranks the corpus for every query of `dataset`, on every process.

        Args:
            dataset: rows with `url` and a query.
            codebase: the corpus, rows with `url` and a code; the trainer's own when None.
            top_k: the number of codes to keep of each query's ranking.
            codes: `embed_rows(codebase, "code")`, if the caller ranks several sets against one corpus.

        Raises:
            UserError: no corpus, or a query whose url is not in it.
        """
        start = time.time()
        corpus = self.corpus_of(None, codebase)
        targets = torch.from_numpy(target_rows(dataset, corpus, metric_key_prefix))
        queries = self.embed_rows(dataset, "query")
        codes = self.embed_rows(corpus, "code") if codes is None else codes
        ranking = self._rank(queries, codes, targets, top_k)
        dims = self.evaluated_dims
        shorter = {dim: self._rank(*self._shortened(dim, queries, codes), targets, top_k) for dim in dims}
        metrics = retrieval_metrics(ranking.ranks, len(corpus)) | mrr_by_dims(shorter, len(corpus))
        if self.compute_metrics is not None:
            predictions = (ranking.ranks.numpy(force=True), ranking.top_indices.numpy(force=True))
            metrics |= self.compute_metrics(EvalPrediction(predictions, targets.numpy()))
        metrics |= speed_metrics("", start, num_samples=len(dataset))
        prefix = f"{metric_key_prefix}_"
        metrics = {prefix + key.removeprefix(prefix).lstrip("_"): value for key, value in metrics.items()}
        return RetrievalOutput(ranking, metrics, shorter)

    def _rank(self, queries: Tensor, codes: Tensor, targets: Tensor, top_k: int) -> Ranking:
        """The ranking of the codes for every query; each process ranks for its share and gets all."""
        shard = distributed.shard(len(queries), *distributed.rank_and_world_size())
        local = rank_codes(queries[shard], codes, targets[shard], top_k=top_k, score_scale=self.encoder.score_scale)
        return Ranking(*(distributed.gather(t) for t in (local.ranks, local.top_indices, local.top_scores)))

    def _shortened(self, dim: int, *sides: Tensor) -> list[Tensor]:
        """The first `dim` dimensions of comparable embeddings, comparable again."""
        return [comparable(self.encoder, shorten(self.encoder, side, dim)) for side in sides]

    def hyperparameter_search(self, hp_space=None, compute_objective=None, n_trials=20, direction=None, **kwargs):
        """Searches hyperparameters as any `Trainer` does, for the best `metric_for_best_model`, or `METRICS[0]`.

        Args:
            compute_objective: metrics -> the number to optimise, if it is another one.
            direction: "maximize" when None.
        """
        name = (self.args.metric_for_best_model or self.METRICS[0]).removeprefix("eval_")
        objective = compute_objective or (lambda metrics: metrics[f"eval_{name}"])
        return super().hyperparameter_search(hp_space, objective, n_trials, direction or "maximize", **kwargs)

    def corpus_of(self, key: str | None = None, codebase: Corpora = None) -> Dataset:
        """The corpus for the evaluation set `key`: of `codebase`, or of the trainer when None.

        Raises:
            UserError: there is none.
        """
        corpus = self.codebase if codebase is None else codebase
        if isinstance(corpus, Mapping):
            if key not in corpus:
                raise UserError(f"codebase: no corpus for {key!r}, only for {', '.join(map(repr, corpus))}")
            corpus = corpus[key]
        if not isinstance(corpus, Dataset):
            raise UserError("evaluation needs a corpus: pass codebase= (a Dataset with url and code)")
        return corpus

    def embed_rows(self, rows: Dataset, side: str) -> Tensor:
        """Embeddings Tensor[n, d] of one side of `rows`, "query" or "code", comparable by dot product.

        Each process encodes its share and gets all.
        """
        if callable(getattr(self.optimizer, "eval", None)):  # schedule-free optimizers hold two sets of weights
            self.optimizer.eval()
        # FSDP and DeepSpeed place the model when training begins; until then it would be slow where it is.
        unplaced = self.model.device.type == "cpu" and self.args.device.type != "cpu"
        if unplaced:
            self.model.to(self.args.device)
        with self.accelerator.autocast():
            embeddings = embed_sharded(
                self.model,
                self.encoder,
                self._tokens(rows, side),
                self.processing_class.pad_token_id,
                self.args.per_device_eval_batch_size,
                progress=None if self.args.disable_tqdm else f"Encoding {side}",
                prompt_length=prompt_length(self.processing_class, self.encoder, side),
            )
        if unplaced:
            self.model.to("cpu")
        return comparable(self.encoder, embeddings)

    def _tokens(self, rows: Dataset, side: str) -> TokenColumn | GraphColumn:
        """The encoder's input of one side of `rows`; the main process prepares it, the others read its cache."""
        with self.args.main_process_first(desc=f"tokenising {side}"):
            return column_of(rows, side, self.encoder, self.processing_class)


def _means(metrics: dict[str, float], prefix: str, keys: tuple[str, ...]) -> dict[str, float]:
    """The mean over the sets of every metric that all of them have, counts and times left out."""
    names = [name.removeprefix(f"{prefix}_{keys[0]}_") for name in metrics if name.startswith(f"{prefix}_{keys[0]}_")]
    left_out = ("pool_size", "queries", "runtime", "per_second")
    means = {}
    for name in names:
        values = [metrics.get(f"{prefix}_{key}_{name}") for key in keys]
        if not name.endswith(left_out) and None not in values:
            means[f"{prefix}_{name}"] = float(np.mean(values))
    return means


def as_rows(rows, name: str) -> Dataset | None:
    """`rows` as a `datasets.Dataset`; a list of dicts becomes one.

    Raises:
        UserError: an empty list, or anything else, such as an `IterableDataset`, whose rows have no numbers.
    """
    if rows is None or isinstance(rows, Dataset):
        return rows
    if isinstance(rows, list) and not rows:
        raise UserError(f"{name}: there are no rows")
    if isinstance(rows, list) and all(isinstance(row, Mapping) for row in rows):
        return Dataset.from_list(rows)
    raise UserError(
        f"{name}: a datasets.Dataset (or a list of dicts) is expected, not {type(rows).__name__}; estimators and "
        "masks know a row by its number, so rows of a stream must be collected first"
    )


def as_row_sets(rows, name: str) -> Corpora:
    """`as_rows` of one set of rows, or of every set of a dict."""
    if isinstance(rows, Mapping):
        if not rows:
            raise UserError(f"{name}: the dict has no data set")
        return {key: as_rows(part, f"{name}[{key!r}]") for key, part in rows.items()}
    return as_rows(rows, name)
