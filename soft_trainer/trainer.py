"""SoftInfoNCETrainer: encode, gather, weigh, loss; and evaluation by retrieval."""

from __future__ import annotations

import time

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainingArguments
from transformers.trainer_utils import speed_metrics

from soft_trainer import distributed
from soft_trainer.arguments import SoftInfoNCETrainingArguments
from soft_trainer.callbacks import EstimatorCallback, SaveOnTermination
from soft_trainer.data.batches import TrainBatches, text_ids
from soft_trainer.data.chunks import ChunkCost
from soft_trainer.data.collator import PairCollator
from soft_trainer.data.sampling import EpochDataLoader, GlobalBatchSampler, languages_of
from soft_trainer.data.tokens import (
    SIDES,
    GraphColumn,
    TokenColumn,
    column_of,
    column_texts,
    side_settings,
    text_column,
)
from soft_trainer.encoders.encoding import embed_sharded, encode
from soft_trainer.encoders.loading import register_prefix_tokens
from soft_trainer.encoders.pooling import comparable, score
from soft_trainer.encoders.profiles import PROFILES, EncoderProfile, resolve_profile
from soft_trainer.errors import UserError
from soft_trainer.evaluation.ranking import Ranking, rank_codes, retrieval_metrics
from soft_trainer.evaluation.retrieval import RetrievalOutput, target_rows
from soft_trainer.terminal import print_on_main
from soft_trainer.training.checks import banner, check_run, make_objective, options_of
from soft_trainer.training.gradient_cache import cached_backward
from soft_trainer.training.guard import FiniteGuard, OverflowCounter
from soft_trainer.training.saving import SavingTrainer

LOSS_BLOCK = 256  # queries whose scores against all codes are in memory at once, with gradient caching


class SoftInfoNCETrainer(SavingTrainer):
    """Fine-tunes a code-search encoder with Soft-InfoNCE (Eq. 3) or one of the paper's other losses.

    Args:
        model: a plain `PreTrainedModel` encoder, so that what is saved loads with `AutoModel`.
        args: `SoftInfoNCETrainingArguments`, or plain `transformers.TrainingArguments`, which mean Soft-InfoNCE where
            there is an estimator and InfoNCE where there is none.
        train_dataset: rows in CodeSearchNet's columns. A row's number is its position here.
        eval_dataset: rows with `url` and a query, or a dict of them.
        codebase: rows with `url` and a code, the pool that queries are ranked against, or a dict with the keys of
            `eval_dataset`.
        processing_class: the tokenizer.
        encoder: pooling, prefix, lengths and score; known from the model when None.
        data_collator: features with `query_ids` and `code_ids` -> `{"query": inputs, "code": inputs}`.
        callbacks: among them an `EstimatorCallback`, for weights.

    Raises:
        UserError: settings or data that cannot work, before any training.
    """

    # InfoNCE is a mean over a batch: without this, accumulation would log a multiple of the loss.
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        model=None,
        args: TrainingArguments | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        codebase: Dataset | dict[str, Dataset] | None = None,
        processing_class=None,
        encoder: EncoderProfile | None = None,
        data_collator=None,
        callbacks=None,
        **kwargs,
    ):
        args = args or SoftInfoNCETrainingArguments()
        args.output_dir = args.output_dir or "outputs"
        if processing_class is None:
            raise UserError("processing_class: SoftInfoNCETrainer needs the encoder's tokenizer")
        name = model.config._name_or_path
        self.encoder = encoder or (resolve_profile(name) if name else PROFILES["auto"])
        register_prefix_tokens(processing_class, self.encoder)
        self.options = options_of(args)
        self.estimator_callback = next((c for c in callbacks or () if isinstance(c, EstimatorCallback)), None)
        estimator = self.estimator_callback.estimator if self.estimator_callback else None
        check_run(args, estimator, train_dataset)
        self.objective = make_objective(self.options, estimator)
        self.codebase = codebase
        collator = data_collator or PairCollator(
            processing_class.pad_token_id,
            ChunkCost.of(model.config.hidden_size, args.device.type) if self.options.chunk_by_length else None,
            self.options.gradient_cache_chunk_size,
        )
        super().__init__(
            model,
            args,
            data_collator=collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            **kwargs,
        )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            self._keep_in_step(collator)
        self._duplicates_masked = 0
        self._guard: FiniteGuard | None = None
        scaler = self.accelerator.scaler
        self._overflows = OverflowCounter(scaler) if scaler is not None else None
        if self._overflows is not None:
            self.add_callback(self._overflows)
        self._termination = SaveOnTermination()
        self.add_callback(self._termination)
        if self.estimator_callback is not None:
            self.estimator_callback.bind(train_dataset)

    def _keep_in_step(self, collator) -> None:
        """Sharded weights are gathered in every forward pass: all processes must make equally many of them."""
        if self.options.gradient_cache_chunk_size is not None:
            raise UserError(
                "gradient_cache_chunk_size: works on one process and under DDP, not under FSDP or DeepSpeed"
            )
        if isinstance(collator, PairCollator):
            collator.cost = None

    # ---- What meets in a batch ----

    @property
    def gathers(self) -> bool:
        """Whether the codes of every process are negatives."""
        gather = self.options.gather_negatives
        return self.args.world_size > 1 and (gather is None or gather)

    @property
    def global_batch_size(self) -> int:
        """N, the codes that each query meets."""
        return self.args.per_device_train_batch_size * (self.args.world_size if self.gathers else 1)

    @property
    def precision(self) -> str:
        """What the forward pass computes in, whether the launcher or the arguments chose it."""
        return self.accelerator.mixed_precision.replace("no", "float32")

    def get_train_dataloader(self) -> EpochDataLoader:
        """Joined batches of rows, of which every process's workers collate its own part."""
        args, strategy, batches = self.args, self.args.train_sampling_strategy, self._train_batches()
        needs = {
            "no_duplicates": lambda: {"text_ids": tuple((batches.text_ids or self._text_ids()).values())},
            "group_by_length": lambda: {"lengths": batches.lengths()},
            "one_language": lambda: {"languages": languages_of(self.train_dataset)},
        }
        sampler = GlobalBatchSampler(
            len(self.train_dataset),
            args.per_device_train_batch_size * args.world_size,
            strategy=strategy,
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last,
            **needs.get(strategy, dict)(),
        )
        return EpochDataLoader(
            batches,
            batch_sampler=sampler,
            collate_fn=_as_is,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def _train_batches(self) -> TrainBatches:
        """The training rows as token ids, with what the workers compute ahead."""
        rows = self.train_dataset
        ahead = self.objective.needs_similarity and getattr(self.estimator_callback.estimator, "in_workers", False)
        return TrainBatches(
            {side: self._tokens(rows, side) for side in SIDES},
            self.data_collator,
            estimate=self._estimate if ahead else None,
            text_ids=self._text_ids() if self.options.mask_duplicates else None,
            gather=self.gathers,
        )

    def _text_ids(self) -> dict[str, np.ndarray]:
        """For either side a number for every row's text, equal for equal texts."""
        rows = self.train_dataset
        columns = {side: text_column(rows, side_settings(self.encoder, side)["columns"], side) for side in SIDES}
        return {side: text_ids(column_texts(rows, column)) for side, column in columns.items()}

    def _tokens(self, rows: Dataset, side: str) -> TokenColumn | GraphColumn:
        """What the encoder reads of one side of `rows`; the main process prepares it, the others read its cache."""
        with self.args.main_process_first(desc=f"tokenising {side}"):
            return column_of(rows, side, self.encoder, self.processing_class)

    # ---- The step ----

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The objective of this process's queries against the codes of the global batch."""
        queries, codes = (self.embeddings(model, inputs[side]) for side in SIDES)
        loss = self.batch_loss(queries, codes, inputs)
        return (loss, {"query": queries, "code": codes}) if return_outputs else loss

    def embeddings(self, model, side: dict) -> Tensor:
        """Embeddings Tensor[B, d] of one side of a batch, in the batch's order."""
        if "chunks" not in side:
            return encode(model, self.encoder, side)
        return torch.cat([encode(model, self.encoder, chunk) for chunk in side["chunks"]])[side["order"]]

    def batch_loss(self, queries: Tensor, codes: Tensor, batch: dict) -> Tensor:
        """The loss from embeddings Tensor[B, d] of this process's queries and codes, and the batch they are of."""
        if self.gathers:
            codes = distributed.gather_with_gradient(codes, batch["sizes"])
        return self._share_of_loss(queries, codes, batch, slice(0, len(queries)))

    def _share_of_loss(self, queries: Tensor, codes: Tensor, batch: dict, block: slice) -> Tensor:
        """What a block of this process's queries adds to its loss, against the codes Tensor[N, d] of all.

        The loss of a process is scaled so that the gradients that processes average are those of one process on the
        global batch.
        """
        scores = score(self.encoder, queries, codes)
        positives = batch["positives"][block]
        negatives = batch["negatives"][block] if "negatives" in batch else None
        estimated = self._estimated(batch, block, positives, negatives)
        loss = self.objective(scores, positives, negatives=negatives, **estimated)
        if "weights" in estimated and block.start == 0 and self._is_logging_step():
            self.estimator_callback.observe(estimated["weights"], self.objective.floor)
        sizes = batch["sizes"]
        return loss * (len(queries) * len(sizes) / sum(sizes)) if self._is_uneven(batch, queries) else loss

    def _is_uneven(self, batch: dict, queries: Tensor) -> bool:
        """Whether the mean over these queries is not yet their share of the mean over the global batch."""
        return len(set(batch["sizes"])) > 1 or len(queries) != len(batch["rows"])

    def training_step(self, model, inputs, num_items_in_batch=None):
        """A step of any `Trainer`, or one with gradient caching, whose loss must be finite."""
        self._duplicates_masked += inputs["duplicates"]
        step = super().training_step if self.options.gradient_cache_chunk_size is None else self._cached_step
        loss = step(model, inputs, num_items_in_batch)
        if self._guard is not None:
            self._guard.watch(self.state.global_step + 1, loss, inputs["rows"])
        return loss

    def _cached_step(self, model, inputs, num_items_in_batch=None) -> Tensor:
        """Forward and backward with gradient caching."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        accumulated = self.current_gradient_accumulation_steps
        loss = cached_backward(
            lambda chunk: encode(model, self.encoder, chunk),
            inputs,
            lambda queries, codes, block: self._share_of_loss(queries, codes, inputs, block) / accumulated,
            self.accelerator.backward,
            self.gathers,
            block_size=max(self.options.gradient_cache_chunk_size, LOSS_BLOCK),
            no_sync=lambda: self.accelerator.no_sync(model),
        )
        return loss.to(self.args.device)

    def _estimated(self, batch: dict, block: slice, positives: Tensor, negatives: Tensor | None) -> dict[str, Tensor]:
        """What the loss reads of the estimator for a block of queries, computed ahead or now."""
        if not self.objective.needs_similarity:
            return {}
        ahead = {name: batch[name][block] for name in ("weights", "similarity") if name in batch}
        return ahead or self._estimate(batch["rows"][block], batch["code_rows"], positives, negatives)

    def _estimate(self, query_rows, code_rows, positives: Tensor, negatives: Tensor | None) -> dict[str, Tensor]:
        """Weights or similarities Tensor[B, N], on the device of `positives`."""
        similarity = self.estimator_callback.similarity(query_rows, code_rows).to(positives.device)
        with torch.no_grad():
            return self.objective.prepared(similarity, positives, negatives)

    def _is_logging_step(self) -> bool:
        return (self.state.global_step + 1) % max(int(self.state.logging_steps or 1), 1) == 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the weights' statistics beside a training loss."""
        if "loss" in logs and self.estimator_callback is not None:
            logs.update(self.estimator_callback.statistics())
        if "loss" in logs and self.options.mask_duplicates:
            logs["duplicates_masked"] = self._duplicates_masked
        if "loss" in logs and self._overflows is not None:
            logs["fp16_overflows"] = self._overflows.count
        super().log(logs, start_time)

    def floating_point_ops(self, inputs) -> int:
        """6 x parameters x tokens, of the tokens that are computed, padding included."""
        tokens = sum(chunk["input_ids"].numel() for side in SIDES for chunk in inputs[side].get("chunks", ()))
        return 6 * tokens * self.model.num_parameters(exclude_embeddings=True)

    # ---- Evaluation ----

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        codebase: Dataset | None = None,
    ) -> dict[str, float]:
        """Rank every query of `eval_dataset` against the whole codebase.

        Returns:
            `PREFIX_mrr`, `PREFIX_recall@1` (5, 10), `PREFIX_pool_size`, ..., the same on every process. A dict of data
            sets adds its key to the prefix.
        """
        eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, dict):
            metrics = {}
            for key, rows in eval_dataset.items():
                metrics |= self.evaluate(
                    rows, ignore_keys, f"{metric_key_prefix}_{key}", codebase or self._codebase(key)
                )
            return metrics
        metrics = self.predict(eval_dataset, codebase, metric_key_prefix=metric_key_prefix).metrics
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
        """Ranks and top codes of every query of `dataset`, on every process.

        Args:
            dataset: rows with `url` and a query.
            codebase: rows with `url` and a code; the trainer's own when None.
            top_k: how many codes to keep of each query's ranking.
            codes: `embed_rows(codebase, "code")`, where the caller ranks several sets in one codebase.

        Raises:
            UserError: no codebase, or a query whose url is not in it.
        """
        start = time.time()
        codebase = self._codebase() if codebase is None else codebase
        targets = target_rows(dataset, codebase)
        queries = self.embed_rows(dataset, "query")
        codes = self.embed_rows(codebase, "code") if codes is None else codes
        mine = distributed.shard(len(queries), *distributed.rank_and_world_size())
        local = rank_codes(queries[mine], codes, targets[mine], top_k=top_k, score_scale=self.encoder.score_scale)
        ranking = Ranking(*(distributed.gather(t) for t in (local.ranks, local.top_indices, local.top_scores)))
        metrics = retrieval_metrics(ranking.ranks, len(codebase))
        metrics |= speed_metrics("", start, num_samples=len(dataset))
        metrics = {f"{metric_key_prefix}_{key.lstrip('_')}": value for key, value in metrics.items()}
        return RetrievalOutput(ranking, metrics)

    def _codebase(self, key: str | None = None) -> Dataset:
        """The pool to rank, that of `key` where there are several."""
        codebase = self.codebase[key] if isinstance(self.codebase, dict) and key is not None else self.codebase
        if not isinstance(codebase, Dataset):
            raise UserError("evaluation needs a codebase: pass codebase= (rows with url and code)")
        return codebase

    def embed_rows(self, rows: Dataset, side: str) -> Tensor:
        """Embeddings Tensor[n, d] of one side of `rows`, "query" or "code", comparable by dot product.

        Each process encodes its share and gets all.
        """
        with self.accelerator.autocast():
            embeddings = embed_sharded(
                self.model,
                self.encoder,
                self._tokens(rows, side),
                self.processing_class.pad_token_id,
                self.args.per_device_eval_batch_size,
                progress=None if self.args.disable_tqdm else f"Encoding {side}",
            )
        return comparable(self.encoder, embeddings)

    # ---- Before the first step, and after the last ----

    def _save_checkpoint(self, model, trial) -> None:
        """A checkpoint, unless the loss before it was not finite."""
        if self._guard is not None:
            self._guard.check()
        super()._save_checkpoint(model, trial)

    def train(self, *args, **kwargs):
        """Train, after a banner that says what will be trained.

        Raises:
            NotFiniteError: the loss became NaN or infinite.
            SystemExit: told to end by SIGTERM (code 143), after a checkpoint.
        """
        print_on_main(banner(self))
        self._guard = FiniteGuard(self.train_dataset["url"]) if "url" in self.train_dataset.column_names else None
        try:
            output = super().train(*args, **kwargs)
        finally:
            self._termination.release()
        if self._termination.terminated:
            print_on_main(
                f"told to end at step {self.state.global_step}: --resume_from_checkpoint last goes on from there"
            )
            raise SystemExit(143)
        if self._guard is not None:
            self._guard.check()
        return output


def _as_is(batch):
    return batch
