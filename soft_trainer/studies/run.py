"""One run of the script: what it measured, where it writes, how it picks up again."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset, DatasetDict

from soft_trainer import distributed
from soft_trainer.arguments import DataArguments, ModelArguments, SoftInfoNCETrainingArguments
from soft_trainer.data.codesearchnet import rows_in
from soft_trainer.data.sources import standard_library
from soft_trainer.data.tokens import column_texts, text_column
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.evaluation.evaluation_sets import EvaluationSet
from soft_trainer.evaluation.ranking import Ranking, retrieval_metrics
from soft_trainer.evaluation.results import examples, results_table, save_ranks
from soft_trainer.evaluation.retrieval import graded_ranking, target_rows
from soft_trainer.files import write_json
from soft_trainer.hub.model_card import environment, write_model_card
from soft_trainer.terminal import print_on_main
from soft_trainer.trainer import SoftInfoNCETrainer
from soft_trainer.training.building import model_label, model_name


def default_output_dir(model: ModelArguments, data: DataArguments, args: SoftInfoNCETrainingArguments) -> str:
    """`outputs/MODEL-LANGUAGE-LOSS-ESTIMATOR`."""
    estimator = (data.estimator or "none").replace(":", ".").replace("+", "-")
    loss = args.loss or ("info_nce" if estimator == "none" else "soft_info_nce")
    return f"outputs/{model_label(model)}-{'-'.join(data.languages)}-{loss}-{estimator}"


class Run:
    """Measures a trainer's encoder before and after training, and writes what it found to the output folder.

    Args:
        trainer: the trainer.
        data: the splits train, valid, test and codebase, as far as there are any.
        statistics: of `data_statistics`.
        evaluation_sets: what is measured beside valid and test.
    """

    def __init__(
        self,
        trainer: SoftInfoNCETrainer,
        data: DatasetDict,
        model_args: ModelArguments,
        data_args: DataArguments,
        statistics: dict,
        evaluation_sets: Sequence[EvaluationSet] = (),
    ):
        self.trainer, self.statistics = trainer, statistics
        self.model_args, self.data_args = model_args, data_args
        self.folder = Path(trainer.args.output_dir)
        self.sets = [*_own_sets(trainer.args, data, data_args.languages), *evaluation_sets]
        self.results: dict[str, dict[str, dict]] = {one.name: {} for one in self.sets}
        self.rankings: dict[str, tuple[Dataset, Ranking]] = {}

    def measure(self, system: str) -> None:
        """Rank the queries of every set with the encoder as it is now."""
        for pool, sets in _by_pool(self.sets):
            codes = self.trainer.embed_rows(pool, "code")
            for one in sets:
                output = self.trainer.predict(one.queries, pool, one.name, codes=codes)
                metrics = {key.removeprefix(f"{one.name}_"): value for key, value in output.metrics.items()}
                self._add(one, system, output.ranking, metrics)

    def measure_lexical(self) -> None:
        """Rank the queries of every set with lexical BM25 over the same pool: a line to beat.

        It needs no training, but comes after it: nobody shall wait for it, or for the import of scikit-learn, before
        the first step. Codes without a word lose this line and no more.
        """
        if distributed.rank_and_world_size()[0] != 0:
            return
        from soft_trainer.evaluation.lexical import lexical_ranks

        profile = self.trainer.encoder
        for pool, sets in _by_pool(self.sets):
            # `original_string`, which GraphCodeBERT parses without comments, holds the query itself.
            columns = [name for name in ("code_tokens", "code", *profile.code_columns) if name != "original_string"]
            codes = _words(pool, columns if profile.data_flow_length else profile.code_columns, "code")
            for one in sets:
                queries, targets = _words(one.queries, profile.query_columns, "query"), target_rows(one.queries, pool)
                try:
                    ranking = lexical_ranks(queries, codes, targets)
                except UserError as error:
                    print_on_main(f"{one.name}: no line of lexical BM25. {error}")
                    continue
                self._add(one, "lexical", ranking, retrieval_metrics(ranking.ranks, len(pool)))

    def finish(self) -> None:
        """Print the comparison and examples, and write `all_results.json`."""
        if distributed.rank_and_world_size()[0] != 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        record = self.record()
        write_json(self.folder / "all_results.json", record)
        if self.data_args.model_card and "model.safetensors" in os.listdir(self.folder):
            write_model_card(self.folder, record)
        if self.results:
            print_on_main(f"\n{results_table(self.results)}\n")
        if self.rankings and self.data_args.examples:
            self._show_examples(min(self.sets, key=lambda one: not one.name.startswith("test")))
        print_on_main(f"Written to {self.folder}")
        if self.data_args.source_dir and "model.safetensors" in os.listdir(self.folder):
            source = self.data_args.source_dir
            source = standard_library() if source == "stdlib" else source
            print_on_main(f"Search the same tree: soft-trainer index {source} --model {self.folder}")

    def record(self) -> dict:
        """All that is known of the run, as `hub.model_card` describes it: the card and the report are made from it."""
        trainer, args, data = self.trainer, self.trainer.args, self.data_args
        return {
            "model_id": trainer.hub_model_id,
            "revision": args.hub_revision,
            "base_model": None if self.model_args.from_scratch else model_name(self.model_args),
            "dataset": data.rows_name,
            "languages": data.languages,
            "encoder": _encoder_facts(self.model_args, trainer.encoder),
            "loss": _loss_facts(trainer),
            "estimator": _estimator_facts(data, trainer),
            "training": _training_facts(trainer),
            "results": self.results,
            "statistics": self.statistics,
            "weights": trainer.estimator_callback.histogram if trainer.estimator_callback else None,
            "environment": environment(),
        }

    def _show_examples(self, one: EvaluationSet) -> None:
        encoder, (queries, ranking) = self.trainer.encoder, self.rankings[one.name]
        query = text_column(queries, encoder.query_columns, "query")
        code = text_column(one.codebase, ("code", *encoder.code_columns), "code")
        shown = examples(queries, one.codebase, ranking, self.data_args.examples, query, code)
        print_on_main(f"Queries of {one.name}, each with its top three functions (=> is the true one):\n\n{shown}\n")

    def _add(self, one: EvaluationSet, system: str, ranking: Ranking, metrics: dict) -> None:
        """Keep a ranking, its metrics and, in a file, every query's rank."""
        queries = shown = one.queries
        if one.graded:
            graded = graded_ranking(ranking, one.queries["query_number"], one.queries["relevance"])
            ranking, shown = graded.ranking, one.queries.select(graded.pairs.tolist())
            queries = Dataset.from_dict(one.queries[one.first_pairs] | {"ndcg@10": graded.ndcg})
            metrics |= retrieval_metrics(ranking.ranks, len(one.codebase)) | {"ndcg@10": float(graded.ndcg.mean())}
        self.results[one.name][system] = metrics
        if system != "lexical":
            self.rankings[one.name] = (shown, ranking)
        if distributed.rank_and_world_size()[0] == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            path, encoder = self.folder / f"ranks-{one.name}-{system}.parquet", self.trainer.encoder
            columns = encoder.query_columns, ("code", *encoder.code_columns)
            save_ranks(path, queries, one.codebase, ranking, *columns)


def _own_sets(args: SoftInfoNCETrainingArguments, data: DatasetDict, languages: list[str]) -> list[EvaluationSet]:
    """Valid and test, as far as they are there and asked for; of several languages each against its own codes."""
    wanted = {"valid": args.do_eval, "test": args.do_predict}
    splits = [split for split, asked in wanted.items() if asked and split in data]
    if len(languages) == 1:
        return [EvaluationSet(split, data[split], data["codebase"]) for split in splits]
    pools = {language: rows_in(data["codebase"], language) for language in languages if splits}
    return [
        EvaluationSet(f"{split}-{language}", rows_in(data[split], language), pool)
        for split in splits
        for language, pool in pools.items()
    ]


def _by_pool(sets: Sequence[EvaluationSet]) -> list[tuple[Dataset, list[EvaluationSet]]]:
    """The sets of each codebase, so that it is encoded once."""
    pools: dict[int, list[EvaluationSet]] = {}
    for one in sets:
        pools.setdefault(id(one.codebase), []).append(one)
    return [(group[0].codebase, group) for group in pools.values()]


def _encoder_facts(model: ModelArguments, profile: EncoderProfile) -> dict:
    """What a text's embedding depends on, beside the weights."""
    names = ("pooling", "query_length", "code_length", "data_flow_length", "score_function", "score_scale")
    name = {"name": model_label(model), "profile": profile.name, "from_scratch": model.from_scratch}
    return name | {key: getattr(profile, key) for key in names}


def _loss_facts(trainer: SoftInfoNCETrainer) -> dict:
    """The loss with those settings that it reads."""
    objective, estimator = trainer.objective, trainer.estimator_callback
    facts = {"loss": objective.loss, "estimator": type(estimator.estimator).__name__ if estimator else None}
    read = ["alpha", "beta", "temperature", "floor"] if objective.needs_similarity else []
    read += ["infonce_weight", "kl_weight"] if objective.loss == "kl_regularization" else []
    read += {"none": [], "top_k": ["cancel", "cancel_k"], "ratio": ["cancel", "cancel_ratio"]}[objective.cancel]
    read += ["clamp_negative_scores"] if objective.clamp_negative_scores else []
    return facts | {name: getattr(objective, name) for name in read}


def _estimator_facts(data: DataArguments, trainer: SoftInfoNCETrainer) -> dict:
    """The estimator as the command line named it, with those of its settings that are not the default."""
    if trainer.estimator_callback is None or not trainer.objective.needs_similarity:
        return {"name": "none"}
    fields = (one for one in dataclasses.fields(data) if one.name.startswith(("bm25_", "mixture_")))
    changed = {one.name: value for one in fields if (value := getattr(data, one.name)) != one.default}
    return {"name": data.estimator, "estimator_model": data.estimator_model, **changed}


def _training_facts(trainer: SoftInfoNCETrainer) -> dict:
    """How long and on what batches was trained; times only of a run in one piece, evaluations in it included."""
    args, state = trainer.args, trainer.state
    facts = {
        "pairs in a batch, per process": args.per_device_train_batch_size,
        "processes": args.world_size,
        "codes that each query meets": trainer.global_batch_size,
        "precision": trainer.precision,
        "epochs": args.num_train_epochs,
        "steps": state.global_step,
        "learning rate": args.learning_rate,
        "seed": args.seed,
    }
    seconds = next((entry["train_runtime"] for entry in reversed(state.log_history) if "train_runtime" in entry), None)
    if seconds is not None and args.resume_from_checkpoint is None:
        facts |= {
            "train runtime, s": round(seconds, 1),
            "seconds a step": round(seconds / max(state.global_step, 1), 4),
        }
    return facts


def _words(rows, columns, side: str) -> list[list[str]]:
    return [text.split() for text in column_texts(rows, text_column(rows, columns, side))]
