"""Unsupervised SimCSE with sentence-transformers' trainer: two dropout views of every query find each other."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import batch_to_device
from torch import Tensor
from torch.nn import functional as F

from soft_trainer import distributed
from soft_trainer.encoders.loading import load_model
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.files import mark_complete
from soft_trainer.training.finite import NotFiniteError


class SimCSETrainer(SentenceTransformerTrainer):
    """Trains with InfoNCE (Eq. 1) between two dropout views of every query of the global batch.

    Args:
        queries, held_out: data sets with the column `query`.
        profile: of the encoder; its query prompt and scale are used.
    """

    def __init__(self, model: SentenceTransformer, args, queries: Dataset, held_out: Dataset, profile: EncoderProfile):
        self.profile = profile
        args.prompts = profile.query_prefix or None
        pairs = queries.rename_column("query", "anchor").add_column("positive", queries["query"][:])
        several = args.world_size > 1
        loss = MultipleNegativesRankingLoss(model, profile.score_scale, gather_across_devices=several)
        super().__init__(model, args, train_dataset=pairs, eval_dataset=held_out, loss=loss)

    @property
    def measured(self) -> list[dict]:
        """The measurements so far, by step."""
        by_step = {entry["step"]: entry for entry in self.state.log_history if "eval_alignment" in entry}
        return list(by_step.values())

    def evaluate(self, eval_dataset: Dataset | None = None, ignore_keys=None, metric_key_prefix: str = "eval"):
        """Measures alignment and uniformity (Wang & Isola, 2020) of held-out queries; lower is better for both.

        Uniformity is measured on the embeddings without dropout. A query has no known paraphrase here, so alignment is
        measured on two dropout views, as in training. It shows whether the views stay together while the queries
        spread; it says nothing about two wordings of one thing. The dropout is the same in every evaluation, and
        training draws the same dropout as without it.
        """
        start = time.perf_counter()
        queries = (self.eval_dataset if eval_dataset is None else eval_dataset)["query"][:]
        queries = queries[distributed.shard(len(queries), *distributed.rank_and_world_size())]
        size = self.args.per_device_eval_batch_size
        batches = [queries[row : row + size] for row in range(0, len(queries), size)]
        was_training = self.model.training
        self.model.eval()
        plain = distributed.gather(torch.cat([self._embed(batch) for batch in batches]))
        with torch.random.fork_rng():
            torch.manual_seed(self.args.seed)
            self.model.train()
            views = torch.cat([torch.stack([self._embed(batch), self._embed(batch)], 1) for batch in batches])
        self.model.train(was_training)
        metrics = {
            f"{metric_key_prefix}_alignment": float(alignment(*distributed.gather(views).unbind(1))),
            f"{metric_key_prefix}_uniformity": float(uniformity(plain)),
            f"{metric_key_prefix}_runtime": time.perf_counter() - start,
        }
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @torch.no_grad()
    def _embed(self, queries: list[str]) -> Tensor:
        """Embeds queries in the mode that the model is in, Tensor[n, d]."""
        inputs = self.model.preprocess(queries, prompt=self.args.prompts)
        with self.accelerator.autocast():
            return self.model(batch_to_device(inputs, self.args.device))["sentence_embedding"].float()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs, and stops the run if its loss is not finite."""
        super().log(logs, start_time)
        if not math.isfinite(logs.get("loss", 0.0)):
            raise NotFiniteError(f"the loss of step {self.state.global_step} is {logs['loss']}: lower learning_rate")

    def _save_checkpoint(self, model, trial) -> None:
        """Saves a checkpoint and marks it as whole."""
        super()._save_checkpoint(model, trial)
        distributed.barrier()
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save and folder.is_dir():  # `save_total_limit` may have removed it already
            mark_complete(folder)

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        """Loads the weights of a checkpoint. The inherited method would build a pooler that the encoder lacks."""
        weights = load_model(checkpoint_path, self.profile).state_dict()
        self.model.transformers_model.load_state_dict(weights)


def alignment(a: Tensor, b: Tensor) -> Tensor:
    """Computes the mean squared distance of positive pairs (Wang & Isola, 2020), 0 to 4, from two Tensor[n, d]."""
    return (F.normalize(a, dim=1) - F.normalize(b, dim=1)).square().sum(1).mean()


def uniformity(embeddings: Tensor) -> Tensor:
    """Computes the log of the mean of exp(-2 squared distance) over all pairs (Wang & Isola, 2020), a scalar.

    It is 0 if all points are equal, and near -4 if Tensor[n, d] is spread evenly in many dimensions.
    """
    return F.pdist(F.normalize(embeddings, dim=1)).square().mul(-2).exp().mean().log()
