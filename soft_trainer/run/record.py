"""Evaluates a run and writes its record: metrics, ranks, settings, and the model card."""

from __future__ import annotations

import dataclasses
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from soft_trainer import distributed
from soft_trainer.data.judgments import Split
from soft_trainer.data.languages import languages_in
from soft_trainer.data.tokens import column_texts, side_texts, text_column
from soft_trainer.errors import UserError, name_option
from soft_trainer.evaluation.lexical import lexical_rankings
from soft_trainer.evaluation.ranking import Ranking, retrieval_metrics
from soft_trainer.evaluation.results import change_of_mrr, examples, metrics_table, save_ranks
from soft_trainer.evaluation.retrieval import RetrievalOutput, answer_pairs, by_query, means
from soft_trainer.files import IDENTITY, PROFILE_FILE, RECORD, read_json, write_results
from soft_trainer.hub.model_card import write_model_card
from soft_trainer.options.declared import changed_options
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.places import PLACES, local_names, shared_name
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.run.building import model_label, model_name
from soft_trainer.run.evaluation_sets import EvaluationSet
from soft_trainer.run.folder import RunFolder, check_inputs_apart
from soft_trainer.run.picture import draw_training
from soft_trainer.run.run_data import RunData
from soft_trainer.terminal import print_on_main, shortened
from soft_trainer.trainer import SoftInfoNCETrainer
from soft_trainer.training.identity import OUTPUT_FOLDER, differences, option_values, run_identity, started
from soft_trainer.training.reporting import training_numbers

CARD_SAMPLES = 3  # training pairs


def default_output_dir(model: ModelArguments, data: DataArguments, args: SoftInfoNCETrainingArguments) -> str:
    """Returns `outputs/MODEL-LANGUAGE-LOSS-ESTIMATOR`. Without a language, the name of the rows takes its place."""
    names = "-".join(data.languages) or data.rows_name.rsplit("/", 1)[-1]
    estimator = data.estimator or "none"
    loss = args.loss or ("info_nce" if estimator == "none" else "soft_info_nce")
    weights = f"{loss}-{estimator}".replace(":", ".")
    return f"outputs/{model_label(model)}-{names}-{weights}"


def check_output_dir(model: ModelArguments, data: DataArguments, args: SoftInfoNCETrainingArguments) -> None:
    """Checks that the output folder does not contain another run, unless `overwrite` is set.

    Raises:
        UserError: the folder contains another run. The message gives the folder and what differs. Or an option names
            something in the folder that the run would remove.
    """
    if not (Path(args.output_dir) / RECORD).is_file():
        return
    if args.do_train:
        check_inputs_apart(args.output_dir, (model, data, args), option_values(model, data, args))
    if args.overwrite:
        return
    try:
        then = read_json(Path(args.output_dir) / RECORD)[IDENTITY]
    except (UserError, KeyError, TypeError):
        then = {}  # not the record of a training run, or that of another version
    identity = run_identity(option_values(model, data, args), started(args), args.output_dir)
    changed = differences(then, identity, OUTPUT_FOLDER)
    if changed or not then:
        reason = "; ".join(changed[:3]) if then else "its record is not that of a training run"
        raise UserError(
            f"{args.output_dir} contains another run ({reason}): set another {name_option('output_dir')}, or "
            f"{name_option('overwrite', True)}"
        )


def flat_results(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Flattens `{set: {system: metrics}}`. Keys are `SET_METRIC` for the trained encoder, else `SET_SYSTEM_METRIC`."""
    flat = {}
    for name, systems in results.items():
        for system, metrics in systems.items():
            prefix = name if system == "trained" else f"{name}_{system}"
            for metric, value in metrics.items():
                flat[f"{prefix}_{metric}"] = value
    return flat


class Run:
    """Evaluates a trainer's encoder before and after training, and writes the results to the output folder.

    Args:
        trainer: the trainer.
        data: the run's rows.
        statistics: the result of `data_statistics`.
        evaluation_sets: the sets to measure in addition to valid and test.
        files: the output folder, as it was before the run wrote to it.
    """

    def __init__(
        self,
        trainer: SoftInfoNCETrainer,
        data: RunData,
        model_args: ModelArguments,
        data_args: DataArguments,
        statistics: dict,
        evaluation_sets: Sequence[EvaluationSet] = (),
        files: RunFolder | None = None,
    ):
        self.trainer = trainer
        trainer.writes_card = False
        self.statistics = statistics
        self.model_args = model_args
        self.data_args = data_args
        self.folder = Path(trainer.args.output_dir)
        self.files = files or RunFolder(self.folder)
        options = option_values(model_args, data_args, trainer.args)
        self.identity = run_identity(options, started(trainer.args), self.folder)
        self.on_main = distributed.rank_and_world_size()[0] == 0
        self.languages = data_args.languages or languages_in(data.tables)
        self.evaluation_sets = evaluation_sets
        self.sets = [*split_sets(trainer.args, data, data_args.languages), *evaluation_sets]
        self.encoder_folder: str | Path | None = None  # of the encoder that was measured last
        self.results: dict[str, dict[str, dict]] = {evaluation_set.name: {} for evaluation_set in self.sets}
        self.rankings: dict[str, Ranking] = {}
        self.ranks_before: dict[str, Tensor] = {}
        trainer.add_callback(FollowOtherQueries(self))

    def measure(self, system: str, lexical: bool = False) -> None:
        """Ranks the queries of all sets with the encoder's current weights.

        Args:
            system: what to call these weights: "untrained" or "trained".
            lexical: whether to rank by lexical BM25 too, a baseline that needs no training, and by both together. This
                is slow for a large corpus, so it is best done after training.
        """
        self.encoder_folder = self.model_args.model_name_or_path
        if system == "trained" and self.trainer.args.do_train:
            self.encoder_folder = self.folder
        with_corpus = defaultdict(list)  # each corpus is encoded once
        for evaluation_set in self.sets:
            with_corpus[evaluation_set.split.corpus._fingerprint].append(evaluation_set)
        for sets in with_corpus.values():
            codes = self.trainer.embed_rows(sets[0].split.corpus, "code")
            for evaluation_set in sets:
                name = evaluation_set.name
                queries = self.trainer.embed_rows(evaluation_set.split.queries, "query")
                output = self.trainer.predict(evaluation_set.split, None, name, codes=codes, queries=queries)
                metrics = {key.removeprefix(f"{name}_"): value for key, value in output.metrics.items()}
                self._add(evaluation_set, system, dataclasses.replace(output, metrics=metrics))
                if lexical and self.on_main:
                    self._measure_lexical(evaluation_set, queries, codes)

    def _measure_lexical(self, evaluation_set: EvaluationSet, embedded: Tensor, codes: Tensor) -> None:
        """Ranks by lexical BM25, and by BM25 and the encoder together. A corpus without words is skipped."""
        profile = self.trainer.encoder
        split = evaluation_set.split
        columns = profile.code_columns
        if profile.data_flow_length:
            # GraphCodeBERT reads `original_string` without its comments. As it is, it contains the query.
            columns = [name for name in ("code_tokens", "code", *columns) if name != "original_string"]
        queries = _words(split.queries, profile.query_columns, "query")
        words = _words(split.corpus, columns, "code")
        rows, targets = answer_pairs(split.judgments)
        asked = [queries[row] for row in rows.tolist()]
        try:
            rankings = lexical_rankings(asked, words, targets, (embedded.cpu()[rows], codes))
        except UserError as error:
            print_on_main(f"{evaluation_set.name}: no results for lexical BM25. {error}")
            return
        for system, of_pairs in rankings.items():
            ranking, measured = by_query(of_pairs, split.judgments)
            metrics = retrieval_metrics(ranking.ranks, len(split.corpus)) | means(measured)
            self._add(evaluation_set, system, RetrievalOutput(ranking, metrics, by_query=measured))

    def follow(self) -> None:
        """Logs the MRR on each evaluation set during training, and its change since the start."""
        for evaluation_set in self.evaluation_sets:
            name = evaluation_set.name
            output = self.trainer.predict(evaluation_set.split, metric_key_prefix=f"eval_{name}")
            metrics = {"mrr": output.metrics[f"eval_{name}_mrr"]}
            if name in self.ranks_before:
                metrics |= change_of_mrr(self.ranks_before[name], output.ranks)
            self.trainer.log({f"eval_{name}_{metric}": value for metric, value in metrics.items()})

    def finish(self) -> None:
        """Writes the results and the model card, and prints a table of the results and some examples."""
        if not self.on_main:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        record = self.record()
        has_encoder = (self.folder / PROFILE_FILE).is_file()
        # A run that only measures keeps the card of an encoder that an earlier training left in the folder.
        if has_encoder and self.trainer.args.do_train:
            draw_training(self.folder, self.trainer.state.log_history)
            if self.data_args.model_card:
                write_model_card(self.folder, record)
        self.write(record, train=training_numbers(self.trainer.state))
        if self.results:
            print_on_main(f"\n{metrics_table(self.results)}\n")
        if self.rankings and self.data_args.examples:
            self._print_examples()
        print_on_main(f"Written to {self.folder}")
        if checkpoints := list(self.folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
            size = sum(path.stat().st_size for folder in checkpoints for path in folder.rglob("*"))
            print_on_main(
                f"{self.folder}/{PREFIX_CHECKPOINT_DIR}-* takes {size / 2**20:,.0f} MiB, optimizer included: keep it "
                f"for {name_option('resume_from_checkpoint', 'last')}, or delete it"
            )
        if (source := self.data_args.source_dir or self.data_args.history) and has_encoder:
            command = shlex.join(["soft-trainer", "search", "--folder", source, "--model", str(self.folder)])
            print_on_main(f'Search the same tree: {command} "what it does"')

    def write(self, record: Mapping, **parts: Mapping[str, float]) -> None:
        """Writes the metrics, and finally the record with the list of the run's files."""
        write_results(self.folder, lambda: self.files.record(record), **parts, eval=flat_results(self.results))

    def _print_examples(self) -> None:
        """Prints sample queries with their best codes, from test if it was measured."""
        shown = min(self.sets, key=lambda each: not each.name.startswith("test"))
        split = shown.split
        profile = self.trainer.encoder
        query = text_column(split.queries, profile.query_columns, "query")
        code = text_column(split.corpus, ("code", *profile.code_columns), "code")
        text = examples(split, self.rankings[shown.name], self.data_args.examples, query, code)
        title = f"Queries of {shown.name}, each with its top three functions (=> is the true one)"
        print_on_main(f"{title}:\n\n{text}\n")

    def record(self) -> dict:
        """Returns the record from which the model card and the report are written; see `hub.model_card`."""
        trainer = self.trainer
        args = self.trainer.args
        model = self.model_args
        data = self.data_args
        callback = trainer.estimator_callback
        histogram = callback.histogram if callback else None
        named = {"name": model_label(model), "profile": trainer.encoder.name, "from_scratch": model.from_scratch}
        estimator = {"name": "none"}
        if callback and trainer.plan.objective.needs_similarity:
            estimator = {"name": data.estimator, "estimator_model": data.estimator_model}
            for name, value in changed_options(data).items():
                if name.startswith("bm25_"):
                    estimator[name] = value
        described = trainer.describe()
        options = option_values(model, data, args)
        places = local_names((model, data, args), options)
        for name in (described.get("merging", {}).get("base"), trainer.encoder.teacher):
            if name:
                places = {name: shared_name(name)} | places
        # The trainer knows the rows and the encoder that were loaded, but only some of the options.
        known = self.identity | trainer.identity
        identity = {group: names | self.identity.get(group, {}) for group, names in known.items()}
        return described | {
            PLACES: places,
            "base_model": None if model.from_scratch else model_name(model),
            "dataset": data.rows_name,
            "languages": self.languages,
            "options": self.identity["options"],
            IDENTITY: identity,
            "encoder": dataclasses.asdict(trainer.encoder) | named,
            "estimator": estimator,
            "results": self.results,
            "statistics": self.statistics,
            "weights": histogram,
            "samples": self._samples(),
        }

    def _samples(self) -> list[tuple[str, str]]:
        """Returns the first training pairs, shortened, for the card. Rows that are not on the Hub stay private."""
        split = self.trainer.train_split
        if split is None or not self.data_args.from_hub:
            return []
        pairs = split.judgments.pairs()[:CARD_SAMPLES]
        profile = self.trainer.encoder
        queries = side_texts(split.queries.select(pairs[:, 0]), "query", profile)
        codes = side_texts(split.corpus.select(pairs[:, 1]), "code", profile)
        return [(shortened(query), shortened(code)) for query, code in zip(queries, codes, strict=True)]

    def _add(self, evaluation_set: EvaluationSet, system: str, output: RetrievalOutput) -> None:
        """Stores a ranking and its metrics, and writes each query's rank to a file."""
        ranking = output.ranking
        metrics = output.metrics
        name = evaluation_set.name
        profile = self.trainer.encoder
        if system == "untrained":
            self.ranks_before[name] = ranking.ranks
        if system == "trained" and name in self.ranks_before:
            metrics |= change_of_mrr(self.ranks_before[name], ranking.ranks)
        self.results[name][system] = metrics
        if system not in ("lexical", "combined"):
            self.rankings[name] = ranking
        if self.on_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"ranks-{name}-{system}.parquet"
            code_columns = ("code", *profile.code_columns)
            columns = profile.query_columns, code_columns
            encoder = None if system == "lexical" else self.encoder_folder
            save_ranks(path, evaluation_set.split, ranking, *columns, output.by_query, encoder)


class FollowOtherQueries(TrainerCallback):
    """Measures a run's evaluation sets at every evaluation during training."""

    def __init__(self, run: Run):
        self.run = run

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        """Measures the run's evaluation sets if training is in progress."""
        if self.run.trainer.is_in_train:
            self.run.follow()


def split_sets(args: SoftInfoNCETrainingArguments, data: RunData, languages: list[str]) -> list[EvaluationSet]:
    """Returns valid and test if they exist and are wanted. With several languages, each is a set with its corpus."""
    sets = []
    for name, asked in {"valid": args.do_eval, "test": args.do_predict}.items():
        if not asked:
            continue
        split = data.evaluated(name, languages)
        if isinstance(split, Split):
            sets.append(EvaluationSet(name, split))
        elif split is not None:
            sets += [EvaluationSet(f"{name}-{language}", part) for language, part in split.items()]
    return sets


def _words(rows: Dataset, columns: Sequence[str], side: str) -> list[list[str]]:
    return [text.split() for text in column_texts(rows, text_column(rows, columns, side))]
