"""Train the sentence encoder behind the SimCSE estimator, unsupervised, on queries alone (Section 4.1).

A text is encoded twice, with another dropout each time, and has to find itself among the texts of its batch. The
output folder loads with `SimCSEEstimator` and with `SentenceTransformer`.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import TrainingArguments, set_seed

from soft_trainer import distributed
from soft_trainer.data.codesearchnet import check_languages, load_folder, load_hub
from soft_trainer.data.tokens import column_texts, text_column
from soft_trainer.encoders.loading import load_model, load_tokenizer
from soft_trainer.encoders.profiles import EncoderProfile, resolve_profile
from soft_trainer.errors import UserError
from soft_trainer.files import last_checkpoint, mark_complete, write_results, write_text
from soft_trainer.hub.export import export_encoder
from soft_trainer.hub.publishing import Publisher
from soft_trainer.options.commands import SimCSEArguments
from soft_trainer.options.declared import check_values
from soft_trainer.options.fields import LANGUAGES
from soft_trainer.options.training import SimCSETrainingArguments
from soft_trainer.terminal import print_on_main, table
from soft_trainer.training.checkpoints import stoppable
from soft_trainer.training.finite import NotFiniteError
from soft_trainer.training.messages import use_lines

MEASURES = ("eval_alignment", "eval_uniformity")


def load_queries(arguments: SimCSEArguments, profile: EncoderProfile, seed: int) -> DatasetDict:
    """Loads the column `query` of two splits: the distinct queries of all sources, in `valid` those not in `train`.

    Raises:
        UserError: the data cannot be loaded or hold no query.
    """
    if arguments.data_dirs:
        loaded = {folder: load_folder(folder, ("train", "valid")) for folder in arguments.data_dirs}
    else:
        languages = arguments.languages or LANGUAGES
        check_languages(languages)
        loaded = {language: load_hub(arguments.dataset_name, language) for language in languages}
    kept = {}
    rows = []
    seen = {""}
    for split, limit in (("train", arguments.max_train_rows), ("valid", arguments.max_eval_rows)):
        queries = []
        for source, data in loaded.items():
            column = text_column(data[split], profile.query_columns, "query")
            by_words = {" ".join(text.split()): text for text in column_texts(data[split], column)}
            new = {words: text for words, text in by_words.items() if words not in seen}
            seen |= new.keys()
            queries += new.values()
            rows.append((source, split, len(data[split]), len(new)))
        if not queries:
            raise UserError(f"{split}: no queries in {column!r}; --query_columns names the column that they are in")
        drawn = Dataset.from_dict({"query": queries}).shuffle(seed=seed)
        kept[split] = drawn.select(range(min(len(queries), limit or len(queries))))
    print_on_main(table(("queries of", "split", "rows", "distinct and new"), rows))
    return DatasetDict(kept)


def build_trainer(arguments: SimCSEArguments, args: SimCSETrainingArguments) -> tuple[SimCSETrainer, object]:
    """Builds the trainer of a run, with an encoder of mean pooling and cosine scores, and the tokenizer.

    Raises:
        UserError: the data cannot be loaded, are less than a batch, or the model has no dropout, so that its two views
            would be equal.
    """
    name = arguments.model_name_or_path
    revision = arguments.model_revision
    length = arguments.query_length
    trust = arguments.trust_remote_code
    profile = resolve_profile(name, revision=revision).replace(
        pooling="mean",
        normalize=True,
        query_length=length,
        code_length=length,
        score_function="cosine",
        score_scale=1 / args.temperature,
        query_columns=tuple(arguments.query_columns.split(",")) if arguments.query_columns else None,
    )
    with args.main_process_first(desc="loading queries"):
        data = load_queries(arguments, profile, args.seed)
    trained = len(data["train"])
    measured = len(data["valid"])
    number = args.per_device_train_batch_size * args.world_size
    least = max(2, args.world_size)
    if args.dataloader_drop_last and trained < number:
        raise UserError(
            f"train: {trained} queries are less than a batch of {number}: lower --per_device_train_batch_size"
        )
    if measured < least:
        raise UserError(f"valid: {measured} queries, {least} or more are needed")
    model = load_model(name, profile, revision, trust, arguments.attn_implementation, arguments.dtype)
    if not any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        raise UserError(
            f"{name} has no dropout, so both views of a query would be the same: set its probability in config.json "
            "(hidden_dropout_prob, for DistilBERT dropout) to 0.1"
        )
    tokenizer = load_tokenizer(name, profile, revision, trust)
    folder = Path(args.output_dir) / "untrained"  # where all processes find it; only the first one can write it
    with args.main_process_first(local=False, desc="exporting the encoder"):
        if args.process_index == 0:
            export_encoder(model, tokenizer, profile, folder)
    options = {"attn_implementation": model.config._attn_implementation}
    student = SentenceTransformer(str(folder), device=str(args.device), model_kwargs=options)
    distributed.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(TrainingArguments) if field.init}
    given = SentenceTransformerTrainingArguments(**given | {"push_to_hub": False})
    print_on_main(f"each query has {number - 1:,} negatives; {args.world_size} processes")
    return SimCSETrainer(student, given, data["train"], data["valid"], profile), tokenizer


def train_simcse(arguments: SimCSEArguments, args: SimCSETrainingArguments) -> None:
    """Trains the SimCSE encoder that the options describe.

    Raises:
        UserError: a value that an option does not take, data that cannot be loaded, or a repository that cannot be
            pushed to.
        SystemExit: stopped by SIGTERM (code 143), after a checkpoint.
    """
    check_values(args)
    on_main = args.process_index == 0
    publisher = Publisher(args) if args.push_to_hub and on_main else None
    set_seed(args.seed)
    trainer, tokenizer = build_trainer(arguments, args)
    use_lines(trainer)
    with stoppable(trainer):
        result = trainer.train(last_checkpoint(args.resume_from_checkpoint, args.output_dir))
    if trainer.state.global_step not in (entry["step"] for entry in trainer.measured):
        trainer.evaluate()
    trainer.save_state()
    if on_main:
        export_encoder(trainer.model.transformers_model, tokenizer, trainer.profile, args.output_dir)
        write_text(Path(args.output_dir) / "training_args.json", args.to_json_string() + "\n")
        first = trainer.measured[0]
        last = trainer.measured[-1]
        numbers = {"train": result.metrics, "eval": {name: last[name] for name in MEASURES}}
        write_results(args.output_dir, {"train": result.metrics, "measured": trainer.measured}, **numbers)
        rows = [(name.removeprefix("eval_"), first[name], last[name]) for name in MEASURES]
        steps = (f"step {entry['step']}" for entry in (first, last))
        print_on_main(table(("held-out queries (lower is better)", *steps), rows))
        print_on_main(f"Written to {args.output_dir}")
    if publisher:
        print_on_main(f"Pushed: {publisher.conclude('End of training')}")
    distributed.close()


# ---- The trainer and its measures ----


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
