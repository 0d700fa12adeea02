"""Train the sentence encoder behind the SimCSE estimator, unsupervised, on queries alone (Section 4.1).

A text is encoded twice, with another dropout each time, and has to find itself among the texts of its batch. The
output folder loads with `SimCSEEstimator` and with `SentenceTransformer`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict, concatenate_datasets
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import TrainingArguments, set_seed

from soft_trainer import distributed
from soft_trainer.data.batches import TrainBatches
from soft_trainer.data.codesearchnet import check_languages, load_folder, load_hub
from soft_trainer.data.tokens import SIDES, text_column, texts
from soft_trainer.encoders.encoding import embed_sharded, prompt_length
from soft_trainer.encoders.loading import load_model, load_tokenizer
from soft_trainer.encoders.options import PretrainedOptions
from soft_trainer.encoders.profiles import EncoderProfile, resolve_profile
from soft_trainer.errors import UserError
from soft_trainer.estimators.simcse import PAPER_MODEL
from soft_trainer.evaluation.figures import COLORS, new_figure, save_png
from soft_trainer.files import last_checkpoint, write_results
from soft_trainer.options.fields import LANGUAGES, SoftInfoNCEOptions, option
from soft_trainer.terminal import print_on_main, table
from soft_trainer.trainer import SoftInfoNCETrainer

MEASURES = ("alignment", "uniformity")


@dataclass
class SimCSEArguments(PretrainedOptions):
    """The encoder to start from, and the queries to train on."""

    model_name_or_path: str = option(PAPER_MODEL, "Encoder to start from: a Hub name or a folder.")
    model_revision: str | None = option(None, "Branch, tag or commit of the encoder on the Hub.")
    query_length: int = option(128, "Tokens kept of a query, special tokens included.")
    data_dirs: list[str] | None = option(
        None, "Folders with train and valid as .jsonl or .jsonl.gz. Default: CodeSearchNet from the Hub."
    )
    languages: list[str] | None = option(None, f"Languages to take from the Hub. Default: {' '.join(LANGUAGES)}.")
    dataset_name: str = option("code-search-net/code_search_net", "Data set on the Hub, in CodeSearchNet's columns.")
    query_columns: str | None = option(None, "Columns to read the query from, by comma; the first that exists.")
    max_train_rows: int | None = option(None, "Train on so many distinct queries only, drawn by --seed.")
    max_eval_rows: int = option(2048, "Held-out queries that alignment and uniformity are measured on.")


@dataclass
class SimCSETrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` with the defaults of the published run and twenty evaluations."""

    output_dir: str | None = option("outputs/simcse", "Where to write.")
    temperature: float = option(0.07, "Temperature of InfoNCE: cosines are divided by it.")
    per_device_train_batch_size: int = option(256, "Queries in a batch, per process.")
    per_device_eval_batch_size: int = option(256, "Queries encoded at once in evaluation, per process.")
    learning_rate: float = option(5e-4, "Peak learning rate of AdamW.")
    num_train_epochs: float = option(10.0, "Passes over the queries.")
    logging_steps: float = option(50, "Steps between two lines of the log.")
    logging_nan_inf_filter: bool = option(False, "Hide NaN and infinite losses from the log.")
    eval_strategy: str = option("steps", "When to measure alignment and uniformity: no, steps or epoch.")
    eval_steps: float | None = option(0.05, "Steps between two measurements; below 1 a share of all steps.")
    eval_on_start: bool = option(True, "Measure before the first step.")
    save_strategy: str = option("epoch", "When to save a checkpoint: no, steps, epoch or best.")
    save_total_limit: int | None = option(1, "How many checkpoints to keep.")
    dataloader_drop_last: bool = option(True, "Leave out the last batch of an epoch if it is not full.")
    remove_unused_columns: bool = option(False, "Not used: the query's column is always kept.")
    ddp_broadcast_buffers: bool | None = option(False, "Broadcast buffers before every forward pass.")


class SimCSETrainer(SoftInfoNCETrainer):
    """Unsupervised SimCSE: InfoNCE (Eq. 1) between two dropout views of every query of the global batch.

    Batches and evaluation differ from `SoftInfoNCETrainer`: the query's tokens stand on both sides of a pair, and each
    side is a forward pass with its own dropout. The profile's score is cosine over the temperature.

    Raises:
        UserError: the model has no dropout, so its two views would be equal.
    """

    METRICS = MEASURES

    def __init__(self, model=None, args: TrainingArguments | None = None, **kwargs):
        super().__init__(model, args, **kwargs)
        if not any(isinstance(module, nn.Dropout) and module.p > 0 for module in self.model.modules()):
            raise UserError(
                f"{self.model.config._name_or_path or 'the model'} has no dropout, so both views of a query would be "
                "the same: set its probability in config.json (hidden_dropout_prob, for DistilBERT dropout) to 0.1"
            )

    @property
    def options(self) -> SoftInfoNCEOptions:
        """The options of the loss. No query occurs twice, so nothing is masked: `load_queries` keeps the first."""
        return dataclasses.replace(SoftInfoNCEOptions(), duplicates="ignore")

    def prepare_rows(self) -> None:
        """Prepares nothing: a query has no negatives of its own."""

    @property
    def prompt_lengths(self) -> dict[str, int]:
        """The tokens of the query's prompt, on both sides."""
        return dict.fromkeys(SIDES, prompt_length(self.processing_class, self.encoder, "query"))

    def _train_batches(self) -> TrainBatches:
        queries = self._tokens(self.train_dataset, "query")
        return self._batches({side: queries for side in SIDES})

    def evaluate(
        self,
        eval_dataset: Dataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Measures alignment and uniformity (Wang & Isola, 2020) of held-out queries; lower is better for both.

        Uniformity is measured on the embeddings without dropout. A query has no known paraphrase here, so alignment is
        measured on two dropout views, as in training. It shows whether the views stay together while the queries
        spread; it says nothing about two wordings of one thing. The dropout is the same in every evaluation, and
        training draws the same dropout as without it.
        """
        start = time.perf_counter()
        tokens = self._tokens(self.eval_dataset if eval_dataset is None else eval_dataset, "query")
        pad, size = self.processing_class.pad_token_id, self.args.per_device_eval_batch_size
        with self.accelerator.autocast():
            prompt = self.prompt_lengths["query"]
            embeddings = embed_sharded(self.model, self.encoder, tokens, pad, size, prompt_length=prompt)
            views = self._dropout_views(tokens)
        metrics = {"alignment": alignment(*views), "uniformity": uniformity(embeddings)}
        metrics = {name: float(value) for name, value in metrics.items()}
        metrics |= {"queries": len(tokens), "runtime": time.perf_counter() - start}
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def check_evaluation(self) -> None:
        """Accepts every evaluation: held-out queries need no corpus."""

    @torch.no_grad()
    def _dropout_views(self, tokens) -> list[Tensor]:
        """Two embeddings of every text, each Tensor[n, d]; each process encodes its share."""
        size, was_training = self.args.per_device_eval_batch_size, self.model.training
        rank, processes = distributed.rank_and_world_size()
        share = range(len(tokens))[distributed.shard(len(tokens), rank, processes)]
        size_of_share = len(share)
        # All processes make as many forward passes, since a collective inside of one waits for all.
        share = [*share, *[0] * (-(-len(tokens) // processes) - size_of_share)]
        views = []
        self.model.train()
        with torch.random.fork_rng():
            torch.manual_seed(self.args.seed)
            for start in range(0, len(share), size):
                ids = [tokens[row] for row in share[start : start + size]]
                batch = self.data_collator([{f"{side}_ids": row for side in SIDES} for row in ids])
                sides = [batch[side].mapped(lambda tensor: tensor.to(self.args.device)) for side in SIDES]
                views.append(torch.stack([self.embeddings(self.model, side) for side in sides], 1))
        self.model.train(was_training)
        return list(distributed.gather(torch.cat(views)[:size_of_share]).unbind(1))


def alignment(a: Tensor, b: Tensor) -> Tensor:
    """Mean squared distance of positive pairs (Wang & Isola, 2020), 0 to 4, a scalar, from Tensor[n, d] each."""
    return (F.normalize(a, dim=1) - F.normalize(b, dim=1)).square().sum(1).mean()


def uniformity(embeddings: Tensor) -> Tensor:
    """Logarithm of the mean of exp(-2 squared distance) over all pairs (Wang & Isola, 2020), a scalar.

    It is 0 if all points are equal, and near -4 if Tensor[n, d] is spread evenly in many dimensions.
    """
    return F.pdist(F.normalize(embeddings, dim=1)).square().mul(-2).exp().mean().log()


def load_queries(arguments: SimCSEArguments, profile: EncoderProfile, seed: int) -> DatasetDict:
    """Loads the distinct queries of all folders or languages: `train`, and `valid` without those of `train`.

    Raises:
        UserError: the data cannot be loaded or hold no query.
    """
    loaded = _sources(arguments)
    kept, rows, seen = {}, [], set()
    for split, limit in (("train", arguments.max_train_rows), ("valid", arguments.max_eval_rows)):
        parts = []
        for source, data in loaded.items():
            column = text_column(data[split], profile.query_columns, "query")
            new = _first_of_each(texts(data[split][column]), seen)
            parts.append(data[split].select_columns(column).select(new))
            rows.append((source, split, len(data[split]), len(new)))
        queries = concatenate_datasets(parts)
        if not len(queries):
            raise UserError(f"{split}: no queries in {column!r}; --query_columns names the column that they are in")
        kept[split] = queries.shuffle(seed=seed).select(range(min(len(queries), limit or len(queries))))
    print_on_main(table(("queries of", "split", "rows", "distinct and new"), rows))
    return DatasetDict(kept)


def _sources(arguments: SimCSEArguments) -> dict[str, DatasetDict]:
    """The data of every folder, or of every language on the Hub."""
    if arguments.data_dirs:
        return {folder: load_folder(folder, ("train", "valid")) for folder in arguments.data_dirs}
    languages = arguments.languages or LANGUAGES
    check_languages(languages)
    return {language: load_hub(arguments.dataset_name, language) for language in languages}


def _first_of_each(queries: Iterable[str], seen: set[str]) -> list[int]:
    """The rows whose text is neither blank nor in `seen`; their texts are added to it. White space does not count."""
    new = []
    for row, text in enumerate(queries):
        text = " ".join(text.split())
        if text and text not in seen:
            seen.add(text)
            new.append(row)
    return new


def _measured(trainer: SimCSETrainer) -> dict[int, dict[str, float]]:
    """The measurements by step."""
    return {entry["step"]: entry for entry in trainer.state.log_history if "eval_alignment" in entry}


def draw_curves(curves: dict[int, dict[str, float]]):
    """Draws alignment and uniformity by step, from `{step: {"eval_alignment": ..., "eval_uniformity": ...}}`."""
    figure = new_figure(10, 3.6)
    steps = sorted(curves)
    for axes, name, color in zip(figure.subplots(1, 2), MEASURES, COLORS, strict=False):
        values = [curves[step][f"eval_{name}"] for step in steps]
        axes.plot(steps, values, "o-", color=color, markersize=4)
        axes.set_title(f"{name} of held-out queries: {values[0]:.3f} to {values[-1]:.3f}", fontsize=11)
        axes.set(xlabel="step", ylabel="lower is better")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    return figure


def build_trainer(arguments: SimCSEArguments, args: SimCSETrainingArguments) -> SimCSETrainer:
    """Builds the trainer of a run: queries, and an encoder with mean pooling, normalised, and cosine scores."""
    name, revision, length = arguments.model_name_or_path, arguments.model_revision, arguments.query_length
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
    return SimCSETrainer(
        load_model(name, profile, revision, trust, arguments.attn_implementation, arguments.dtype),
        args,
        train_dataset=data["train"],
        eval_dataset=data["valid"],
        processing_class=load_tokenizer(name, profile, revision, trust),
        encoder=profile,
    )


def report(trainer: SimCSETrainer, metrics: dict[str, float]) -> None:
    """Writes the results and the picture, and prints how alignment and uniformity changed."""
    curves, folder = _measured(trainer), Path(trainer.args.output_dir)
    measured = list(curves.values())
    last = {f"eval_{name}": measured[-1][f"eval_{name}"] for name in MEASURES}
    write_results(folder, {"train": metrics, "measured": measured}, train=metrics, eval=last)
    picture = save_png(draw_curves(curves), folder / "alignment_uniformity.png")
    ends = [min(curves), max(curves)]
    shown = [(name, *(curves[step][f"eval_{name}"] for step in ends)) for name in MEASURES]
    print_on_main(table(("held-out queries (lower is better)", *(f"step {step}" for step in ends)), shown))
    print_on_main(f"Written to {folder}, the picture to {picture}")


def train(arguments: SimCSEArguments, args: SimCSETrainingArguments) -> None:
    """Trains the SimCSE encoder that the options describe.

    Raises:
        UserError: a temperature that is not above 0, no matplotlib, or data that cannot be loaded.
    """
    if not args.temperature > 0:
        raise UserError(f"temperature={args.temperature:g}: must be above 0")
    new_figure(1, 1)  # fails now, not after ten epochs, if matplotlib is missing
    set_seed(args.seed)
    trainer = build_trainer(arguments, args)
    result = trainer.train(resume_from_checkpoint=last_checkpoint(args.resume_from_checkpoint, args.output_dir))
    if trainer.state.global_step not in _measured(trainer):
        trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    if distributed.rank_and_world_size()[0] == 0:
        report(trainer, result.metrics)
    distributed.close()
