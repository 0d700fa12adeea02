"""One run of the script: what it measured, where it writes, how it picks up again."""

from __future__ import annotations

import os
from pathlib import Path

from datasets import DatasetDict

from soft_trainer import distributed
from soft_trainer.arguments import DataArguments, ModelArguments, SoftInfoNCETrainingArguments
from soft_trainer.checkpoints import newest_complete
from soft_trainer.console import say, write_json
from soft_trainer.data.tokens import text_column, texts
from soft_trainer.encoders.building import model_label, model_name
from soft_trainer.errors import SetupError
from soft_trainer.evaluation.lexical import lexical_ranks
from soft_trainer.evaluation.ranking import Ranking, retrieval_metrics
from soft_trainer.evaluation.results import examples, results_table, save_ranks
from soft_trainer.evaluation.retrieval import target_rows
from soft_trainer.hub.model_card import environment, write_model_card
from soft_trainer.trainer import SoftInfoNCETrainer


def default_output_dir(model: ModelArguments, data: DataArguments, args: SoftInfoNCETrainingArguments) -> str:
    """`outputs/MODEL-LANGUAGE-LOSS-ESTIMATOR`."""
    estimator = (data.estimator or "none").replace(":", ".").replace("+", "-")
    loss = args.loss or ("info_nce" if estimator == "none" else "soft_info_nce")
    return f"outputs/{model_label(model)}-{data.language}-{loss}-{estimator}"


def last_checkpoint(args: SoftInfoNCETrainingArguments) -> str | None:
    """The checkpoint that `--resume_from_checkpoint` means: a folder, or the last of the output folder for `last`.

    Raises:
        SetupError: a folder that does not exist.
    """
    wanted = args.resume_from_checkpoint
    if wanted is None or str(wanted).lower() in ("false", "no"):
        return None
    if str(wanted).lower() in ("true", "last", "yes"):
        found = newest_complete(args.output_dir)
        if found is None:
            say(f"{args.output_dir} holds no whole checkpoint to resume from: starting at the first step")
        return found
    if not Path(wanted).is_dir():
        raise SetupError(
            f"resume_from_checkpoint={wanted}: no such folder; `last` takes the newest of the output folder"
        )
    return str(wanted)


class Run:
    """Measures a trainer's encoder before and after training, and writes what it found to the output folder.

    Args:
        trainer: the trainer.
        data: the splits train, valid, test and codebase.
        statistics: of `data_statistics`.
    """

    def __init__(
        self,
        trainer: SoftInfoNCETrainer,
        data: DatasetDict,
        model_args: ModelArguments,
        data_args: DataArguments,
        statistics: dict,
    ):
        self.trainer, self.data, self.statistics = trainer, data, statistics
        self.model_args, self.data_args = model_args, data_args
        self.folder = Path(trainer.args.output_dir)
        self.results: dict[str, dict[str, dict]] = {split: {} for split in self._splits()}
        self.rankings: dict[str, Ranking] = {}

    def measure(self, system: str) -> None:
        """Rank the queries of valid and test with the encoder as it is now."""
        codes = self.trainer.embed_rows(self.data["codebase"], "code") if self.results else None
        for split in self.results:
            output = self.trainer.predict(self.data[split], self.data["codebase"], split, codes=codes)
            metrics = {key.removeprefix(f"{split}_"): value for key, value in output.metrics.items()}
            self._add(split, system, output.ranking, metrics)

    def measure_lexical(self) -> None:
        """Rank the queries of valid and test with lexical BM25 over the same pool: a line to beat."""
        if distributed.world()[0] != 0:
            return
        profile, pool = self.trainer.encoder, self.data["codebase"]
        codes = _words(pool, profile.code_columns, "code")
        for split in self.results:
            queries = _words(self.data[split], profile.query_columns, "query")
            ranking = lexical_ranks(queries, codes, target_rows(self.data[split], pool))
            self._add(split, "lexical", ranking, retrieval_metrics(ranking.ranks, len(pool)))

    def finish(self) -> None:
        """Print the comparison and examples, and write `all_results.json`."""
        if distributed.world()[0] != 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        record = self.record()
        write_json(self.folder / "all_results.json", record)
        if self.data_args.model_card and "model.safetensors" in os.listdir(self.folder):
            write_model_card(self.folder, record)
        say(f"\n{results_table(self.results)}\n")
        split = "test" if "test" in self.rankings else next(iter(self.rankings), None)
        if split and self.data_args.examples:
            encoder, data = self.trainer.encoder, self.data
            query = text_column(data[split], encoder.query_columns, "query")
            code = text_column(data["codebase"], ("code", *encoder.code_columns), "code")
            shown = examples(data[split], data["codebase"], self.rankings[split], self.data_args.examples, query, code)
            say(f"Queries of {split}, each with its top three functions (=> is the true one):\n\n{shown}\n")
        say(f"Written to {self.folder}")

    def record(self) -> dict:
        """All that is known of the run, as `hub.model_card` describes it: the card and the report are made from it."""
        trainer, args, data = self.trainer, self.trainer.args, self.data_args
        objective, estimator = trainer.objective, trainer.estimator_callback
        loss = {"loss": objective.loss, "estimator": type(estimator.estimator).__name__ if estimator else None}
        if objective.needs_similarity:
            loss |= {name: getattr(objective, name) for name in ("alpha", "beta", "temperature", "floor")}
        training = {
            "pairs in a batch, per process": args.per_device_train_batch_size,
            "processes": args.world_size,
            "codes that each query meets": trainer.joined_batch_size,
            "precision": trainer.precision,
            "epochs": args.num_train_epochs,
            "steps": trainer.state.global_step,
            "learning rate": args.learning_rate,
            "seed": args.seed,
        }
        return {
            "model_id": trainer.hub_model_id,
            "base_model": None if self.model_args.from_scratch else model_name(self.model_args),
            "dataset": data.dataset_name if data.paper_language else Path(data.data_dir or data.source_dir).name,
            "languages": [data.language],
            "loss": loss,
            "training": training,
            "results": self.results,
            "statistics": self.statistics,
            "environment": environment(),
        }

    def _splits(self) -> list[str]:
        args = self.trainer.args
        return [split for split, wanted in (("valid", args.do_eval), ("test", args.do_predict)) if wanted]

    def _add(self, split: str, system: str, ranking: Ranking, metrics: dict) -> None:
        self.results[split][system] = metrics
        if system != "lexical":
            self.rankings[split] = ranking
        if distributed.world()[0] == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_ranks(
                self.folder / f"ranks-{split}-{system}.parquet", self.data[split], self.data["codebase"], ranking
            )


def _words(rows, columns, side: str) -> list[list[str]]:
    return [text.split() for text in texts(rows[text_column(rows, columns, side)])]
