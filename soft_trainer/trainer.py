"""Defines `SoftInfoNCETrainer`, which trains an encoder on query-code pairs and evaluates it by ranking a corpus.

The constructor reads the rows. Its base class in `run/trainer.py` resolves the settings into a plan, keeps the run's
folder, checkpoints and results, and saves. `transformers.Trainer` runs the loop:

    get_train_dataloader     returns the batches, which data workers build with `TrainBatches`
    get_batch_samples        weighs the batches that one optimizer step accumulates by their rows
    training_step            runs one step on a batch
        weighed              moves the batch to the device, and makes its weights there
        compute_loss         embeds the texts (packed in one pass, or padded), gathers the functions,
            block_loss       scores them and calls the criterion
        or _cached_step      does the same with gradient caching
    evaluate -> predict      embeds the queries and the corpus, and ranks the corpus for each query

Each process handles its shard of a global batch, of the texts to encode, and of the queries to rank, and
`distributed.py` gathers the results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping

import torch
from datasets import Dataset
from torch import Tensor
from transformers import EvalPrediction, TrainingArguments
from transformers.trainer_utils import denumpify_detensorize, speed_metrics

from soft_trainer.data.columns import ColumnNames
from soft_trainer.data.load import evaluation_splits, training_split
from soft_trainer.data.split import Split
from soft_trainer.data.tokens import GraphColumn, TokenColumn, token_column
from soft_trainer.encoders.encoding import comparable, embed_sharded, encode, placed, score
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator
from soft_trainer.evaluation.retrieval import RetrievalOutput, best_answers, by_corpus, mean_over_sets, rank_corpus
from soft_trainer.run import interruption, preflight
from soft_trainer.run.setup import RunDetails, set_up
from soft_trainer.run.trainer import RunTrainer
from soft_trainer.system import distributed
from soft_trainer.training.batches import Batch, TrainBatches
from soft_trainer.training.gradient_cache import cached_backward
from soft_trainer.training.prepared_rows import prepared_rows, train_loader
from soft_trainer.training.sampler import EpochDataLoader, data_seed
from soft_trainer.training.targets import TargetMaker

LOSS_BLOCK = 256  # with gradient caching, the scores of at least this many queries are computed at a time


class SoftInfoNCETrainer(RunTrainer):
    """Fine-tunes a code-search encoder with Soft-InfoNCE (Eq. 3) or one of the paper's other losses.

    Args:
        model: a plain `PreTrainedModel` encoder, so that the saved folder loads with `AutoModel`. It may have an
            adapter (`model.add_adapter`). A `PeftModel` is unwrapped, and so is a `SentenceTransformer` if an
            `EncoderProfile` can describe its modules. A folder or a name on the Hub is loaded with its tokenizer.
        args: `SoftInfoNCETrainingArguments` or plain `transformers.TrainingArguments`. Without an estimator among the
            callbacks, the former select the command line's default estimator, and the latter BM25. A subclass with its
            own `compute_loss` or `block_loss`, and batches of fewer than five pairs, train with InfoNCE by default.
        train_dataset: pairs of a query and a function with the columns that `load_rows` recognises, as a `Dataset`, a
            data frame or a list of dicts, or a `Split` of queries, corpus and judgments. The trainer stores the pairs
            as `train_dataset` and the `Split` as `train_split`.
        eval_dataset: pairs as in `train_dataset`, rows with a query and the `url` of its function, a `Split`, or a
            dict of any of these. The trainer converts them to splits.
        codebase: the corpus to rank for the queries, as rows with a `url` and a function, or as a dict with the keys
            of `eval_dataset`. By default, the functions of `eval_dataset`.
        processing_class: the tokenizer. By default, the tokenizer of a model that is passed by name.
        encoder: pooling, score, prompts and maximum lengths. By default, they are inferred from the model. A dict
            changes only some of the inferred settings, such as `{"query_length": 64, "score_scale": 20.0}`.
        data_collator: turns features with `query_ids` and `code_ids` into `{"query": inputs, "code": inputs}`. A
            custom collator works only with a single process.
        callbacks: the trainer's callbacks. An estimator or an `EstimatorCallback` among them supplies the weights.
        query_column, code_column, id_column, negatives_column: the names of the rows' columns, if `load_rows` does not
            recognise them.
        kwargs: any other arguments of `transformers.Trainer`.

    Raises:
        UserError: the settings and the data are incompatible. This is raised before training begins.
    """

    # InfoNCE is a mean over a batch: without this, accumulation would log a multiple of the loss.
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        model=None,
        args: TrainingArguments | None = None,
        train_dataset: Dataset | Split | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        codebase: Dataset | dict[str, Dataset] | None = None,
        processing_class=None,
        encoder: EncoderProfile | Mapping[str, object] | None = None,
        data_collator=None,
        callbacks=None,
        query_column: str | None = None,
        code_column: str | None = None,
        id_column: str | None = None,
        negatives_column: str | None = None,
        _details: RunDetails | None = None,
        **kwargs,
    ):
        starting = preflight.first_encoder(model, processing_class, encoder, kwargs)
        columns = ColumnNames(query_column, code_column, id_column, negatives_column)
        split = training_split(train_dataset, "train_dataset", columns, preflight.rows_of_steps(args))
        sets = evaluation_splits(eval_dataset, codebase, "eval_dataset", columns)
        details = _details or RunDetails()  # a script passes it: the sets to measure, and what to record
        own_loss = None
        for name in ("compute_loss", "block_loss"):
            if getattr(type(self), name) is not getattr(SoftInfoNCETrainer, name):
                own_loss = type(self).__name__
        compute_metrics = kwargs.get("compute_metrics")
        setup = set_up(starting, args, split, sets, callbacks, compute_metrics, details.about, own_loss)
        self.columns = columns
        self.codebase = codebase
        super().__init__(setup, details, data_collator=data_collator, **kwargs)

    # ---- Batches ----

    def get_train_dataloader(self) -> EpochDataLoader:
        """Returns the training data loader. Each process's data workers collate its shard of each global batch."""
        self.resolve()  # `auto_find_batch_size` may have made the batches smaller
        batches = self._train_batches()
        return train_loader(batches, self.ongoing.prepared, self.plan, self.args, self.train_split)

    def prepare_rows(self) -> None:
        """Fits the estimator, then finds hard negatives and similar pairs. Runs before a checkpoint is loaded."""
        if self.estimator is not None:
            if isinstance(self.estimator, Estimator):
                self.estimator.packing = getattr(self.args, "packing", "auto")
            self.estimator_callback.fit(self.train_split)
        seed = data_seed(self.args)
        self.ongoing.prepared = prepared_rows(self.train_split, self.plan, self.estimator, self.encoder, seed)

    def _train_batches(self) -> TrainBatches:
        """Returns the data set that data workers build training batches from: tokens, judgments and similarities."""
        if self.ongoing.prepared is None:
            self.prepare_rows()
        split = self.train_split
        maker = self.target_maker
        if not self.criterion.needs_similarity or not getattr(self.estimator, "in_workers", False):
            # Workers that cannot ask the estimator must not pickle it. `weighed` asks it once per step.
            maker = dataclasses.replace(maker, estimator=None)
        rank, world_size = distributed.rank_and_world_size()
        return TrainBatches(
            {"query": self._tokens(split.queries, "query"), "code": self._tokens(split.corpus, "code")},
            split.judgments.pairs(),
            self.data_collator,
            maker,
            gather=self.plan.gathers,
            hard_negatives=self.ongoing.prepared.negatives,
            rank=rank,
            world_size=world_size,
        )

    @property
    def target_maker(self) -> TargetMaker:
        """The object that computes a batch's positives, negatives and weights. Requires the prepared rows."""
        rows = self.ongoing.prepared
        false_negatives = self.plan.options.false_negatives
        relevant = None if false_negatives == "ignore" else rows.answers
        keeps = false_negatives == "positives"
        sends_float32 = self.args.device.type != "cpu"
        return TargetMaker(self.criterion, self.estimator, relevant, keeps, rows.without_query, sends_float32)

    def get_batch_samples(self, epoch_iterator, num_batches: int, device) -> tuple[list[Batch], None]:
        """Returns the batches of one optimizer step, each with its share of the step's rows."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        rows = sum(sum(batch.sizes) for batch in batches)
        for batch in batches:
            batch["share"] = sum(batch.sizes) * len(batches) / rows
        return batches, None

    # ---- The step ----

    def training_step(self, model, inputs: Batch, num_items_in_batch=None) -> Tensor:
        """Runs a training step, with gradient caching if planned."""
        inputs = self.weighed(inputs)
        self.ongoing.false_negatives += inputs.false_negatives
        chunk_size = self.plan.options.gradient_cache_chunk_size
        with interruption.explaining_out_of_memory(self.args, chunk_size, len(inputs.rows), len(inputs.codes)):
            if chunk_size is None:
                return super().training_step(model, inputs, num_items_in_batch)
            return self._cached_step(model, inputs)

    def compute_loss(self, model, batch: Batch, return_outputs=False, num_items_in_batch=None):
        """Returns the loss of this process's queries, scaled by `Batch.loss_scale` so that all rows weigh the same."""
        batch = self.weighed(batch)
        queries, codes = self.embeddings(model, batch)
        gathered = codes
        if self.plan.gathers:
            gathered = distributed.gather_with_gradient(codes, batch.code_sizes)
        loss = self.block_loss(queries, gathered, batch, slice(None))
        if return_outputs:
            return loss, {"query": queries, "code": codes}
        return loss

    def weighed(self, batch: Batch) -> Batch:
        """Returns a batch on this process's device with its weights, which are computed there."""
        batch = batch.to(self.args.device)
        if batch.has_weights or not self.criterion.needs_similarity or not len(batch.targets):
            return batch
        targets = self.target_maker.add_weights(batch.targets, batch.query_rows, batch.code_rows)
        return Batch(batch, targets=targets, has_weights=True)

    def embeddings(self, model, batch: Batch) -> tuple[Tensor, Tensor]:
        """Embeds the queries and the functions of a batch. Returns Tensor[B, d] and Tensor[C, d]."""
        # Several passes share the weights in half precision.
        with self.accelerator.autocast() if len(batch.passes) > 1 else contextlib.nullcontext():
            embeddings = torch.cat([encode(model, self.encoder, inputs) for inputs in batch.passes])
        return embeddings.index_select(0, batch.queries), embeddings.index_select(0, batch.codes)

    def block_loss(self, queries: Tensor, codes: Tensor, batch: Batch, block: slice) -> Tensor:
        """Returns the loss of one block of this process's queries against the functions of the batch.

        Args:
            queries: Tensor[B, d], this process's queries.
            codes: Tensor[N, d], the functions of all processes, or of this process if the plan does not gather
                functions.
            batch: the batch, on the device of the embeddings.
            block: the rows of `queries` to compute the loss of.
        """
        targets = batch.targets[block]
        if not len(targets):
            return 0.0 * (queries.sum() + codes.sum())  # other processes wait for this one's backward pass
        local = queries[block]
        scores = [score(self.encoder, local, codes, dim=dim) for dim in self.plan.dims or (None,)]
        if targets.weights is not None and not block.start:  # the first block is enough for the log
            self.estimator_callback.observe(targets, scores[0], self.criterion.floor)
        loss = sum(self.criterion(each, targets) for each in scores)
        # DDP averages over processes, and `Trainer` over accumulated batches. With this factor, rows weigh the same.
        return loss * batch.loss_scale(len(targets))

    def _cached_step(self, model, inputs: Batch) -> Tensor:
        """Runs the forward and backward pass of one step with gradient caching, and returns the loss."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        accumulated = self.current_gradient_accumulation_steps
        loss = cached_backward(
            lambda of_pass: encode(model, self.encoder, of_pass),
            inputs,
            lambda queries, codes, block: self.block_loss(queries, codes, inputs, block) / accumulated,
            self.accelerator.backward,
            self.plan.gathers,
            block_size=max(self.plan.options.gradient_cache_chunk_size, LOSS_BLOCK),
            no_sync=lambda: self.accelerator.no_sync(model),
        )
        return loss.to(self.args.device)

    # ---- Evaluation ----

    def evaluate(
        self,
        eval_dataset=None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        codebase=None,
    ) -> dict[str, float]:
        """Ranks the whole corpus for each query in `eval_dataset`, and returns metrics such as MRR and recall.

        Args:
            eval_dataset: rows with a `url` and a query, a `Split`, or a dict of either. By default, the trainer's
                evaluation rows. A string selects one key of the trainer's evaluation rows.
            codebase: the corpus, or a dict of corpora with the same keys. By default, the trainer's corpus.

        Returns:
            `PREFIX_mrr`, `PREFIX_recall@1` (5, 10), `PREFIX_pool_size` and so on, the same on all processes. If
            `evaluated_dims` contains 256, also `PREFIX_mrr_256`. For a dict of data sets, `PREFIX_KEY_mrr` and so on,
            and the mean over the sets as `PREFIX_mrr`. A corpus that several sets share is encoded once.
        """
        if isinstance(eval_dataset, str):
            eval_dataset = {eval_dataset: self.eval_dataset[eval_dataset]}
        sets = self._splits(self.eval_dataset if eval_dataset is None else eval_dataset, codebase, metric_key_prefix)
        metrics = self.metrics_of(sets, metric_key_prefix)
        self.evaluations.append((self.state.global_step, self.is_in_train, metrics))
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def metrics_of(self, sets: Split | Mapping[str, Split], prefix: str) -> dict[str, float]:
        """Returns the metrics of `evaluate` without logging them."""
        if not isinstance(sets, Mapping):
            return self.predict(sets, metric_key_prefix=prefix).metrics
        metrics = {}
        for output in self.predict_sets(sets, prefix).values():
            metrics |= output.metrics
        return metrics | mean_over_sets(metrics, prefix, tuple(sets))

    def predict(
        self,
        dataset: Dataset | Split,
        codebase: Dataset | None = None,
        metric_key_prefix: str = "test",
        codes: Tensor | None = None,
        queries: Tensor | None = None,
        top_k: int = 10,
    ) -> RetrievalOutput:
        """Ranks the corpus for each query in `dataset`, and returns ranks and metrics, the same on all processes.

        Args:
            dataset: rows with a `url` and a query, or a `Split`, which has its own corpus.
            codebase: the corpus, as rows with a `url` and a function. By default, the trainer's corpus.
            metric_key_prefix: the first part of each metric's name.
            codes, queries: the results of `embed_rows(codebase, "code")` and `embed_rows(dataset, "query")`, if you
                have already computed them.
            top_k: the number of top functions to return for each query.

        Raises:
            UserError: the corpus is missing, or it lacks a query's relevant function.
        """
        start = time.time()
        split = self._splits(dataset, codebase, metric_key_prefix)
        if queries is None:
            queries = self.embed_rows(split.queries, "query")
        if codes is None:
            codes = self.embed_rows(split.corpus, "code")
        output = rank_corpus(queries, codes, split, self.encoder, self.evaluated_dims, top_k)
        metrics = output.metrics
        label_ids = best_answers(split.judgments)
        if self.compute_metrics is not None:
            found = self.compute_metrics(EvalPrediction(output.predictions, label_ids))
            for name, value in denumpify_detensorize(found).items():
                metrics[name] = value.item() if getattr(value, "ndim", None) == 0 else value
        metrics |= speed_metrics("", start, num_samples=len(split.queries))
        prefix = f"{metric_key_prefix}_"  # the user's metrics may have it; speed metrics start with "_"
        metrics = {prefix + key.removeprefix(prefix).lstrip("_"): value for key, value in metrics.items()}
        return dataclasses.replace(output, metrics=metrics, label_ids=label_ids)

    def predict_sets(self, sets: Mapping[str, Split], metric_key_prefix: str = "test") -> dict[str, RetrievalOutput]:
        """Ranks the corpus of each split as `predict` does, and encodes a corpus that several splits share only once.

        Args:
            sets: the splits, keyed by name.
            metric_key_prefix: the metrics are called `PREFIX_KEY_mrr` and so on. The runtimes of splits that share a
                corpus exclude its encoding.

        Returns:
            The outputs of `predict`, with the keys of `sets`.
        """
        outputs = {}
        for group in by_corpus(sets):
            codes = None
            if len(group) > 1:
                codes = self.embed_rows(next(iter(group.values())).corpus, "code")
            for key, split in group.items():
                outputs[key] = self.predict(split, metric_key_prefix=f"{metric_key_prefix}_{key}", codes=codes)
        return {key: outputs[key] for key in sets}

    def _splits(self, sets, codebase, name: str) -> Split | dict[str, Split]:
        """Combines queries with a corpus into splits. A `codebase` replaces the corpus of a `Split`."""
        if sets is None:
            raise UserError(f"{name}: no queries; pass eval_dataset= here or to the trainer")
        if codebase is None:
            return evaluation_splits(sets, self.codebase, name, self.columns)
        if isinstance(sets, Split):
            sets = sets.queries
        elif isinstance(sets, Mapping):
            sets = {key: rows.queries if isinstance(rows, Split) else rows for key, rows in sets.items()}
        return evaluation_splits(sets, codebase, name, self.columns)

    def embed_rows(self, rows: Dataset, side: str) -> Tensor:
        """Embeds the queries or functions in `rows`. Returns Tensor[n, d] on every process. `side` is query or code.

        The dot products of the embeddings are the encoder's scores, before multiplication by the score scale.
        """
        self.use_averaged_weights()
        encoder = self.text_encoder
        with placed(self.model, self.args.device), self.running(), self.accelerator.autocast():
            label = None if self.args.disable_tqdm else f"Encoding {side}"
            tokens = self._tokens(rows, side)
            size = self.args.per_device_eval_batch_size
            embeddings = embed_sharded(encoder, tokens, side, size, label)
        return comparable(self.encoder, embeddings)

    def use_averaged_weights(self) -> None:
        """Switches a schedule-free optimizer to its averaged weights, because evaluation uses these weights."""
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()

    def _tokens(self, rows: Dataset, side: str) -> TokenColumn | GraphColumn:
        """Tokenises the queries or functions in `rows`, in one process per machine. The others read the cache."""
        with self.args.main_process_first(desc=f"tokenising {side}"):
            return token_column(rows, side, self.encoder, self.processing_class)
