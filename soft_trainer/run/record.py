"""Evaluates a run and writes its results: metrics, ranks, the record `run.json`, and the model card."""

from __future__ import annotations

import dataclasses
import importlib.util
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from soft_trainer import distributed
from soft_trainer.data.languages import languages_in
from soft_trainer.data.layouts.published import is_public
from soft_trainer.data.split import Split
from soft_trainer.data.tokens import side_texts, text_column
from soft_trainer.encoders.hub_files import public_name
from soft_trainer.evaluation.figures import COLORS, new_figure, save_png
from soft_trainer.evaluation.results import change_of_mrr, examples, save_ranks
from soft_trainer.evaluation.retrieval import RetrievalOutput
from soft_trainer.files import DEPENDS_ON, LISTED, PROFILE_FILE, RECORD_FORMAT, TRAINING_PICTURE, write_results
from soft_trainer.fingerprints import plain_settings
from soft_trainer.hub.model_card import license_of, write_model_card
from soft_trainer.hub.push import written_files
from soft_trainer.options.fields import CODESEARCHNET, DataArguments
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.option_spec import changed_options, references
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.run.building import model_label, model_name
from soft_trainer.run.evaluation_sets import EvaluationSet
from soft_trainer.run.folder import RunFolder
from soft_trainer.run.opening import Rows
from soft_trainer.terminal import print_on_main, shortened
from soft_trainer.trainer import SoftInfoNCETrainer
from soft_trainer.training.measurements import Measurements
from soft_trainer.training.reporting import training_numbers
from soft_trainer.training.run_fingerprint import KINDS, affects_results, option_values

CARD_SAMPLES = 3  # training pairs on the model card
PLOTTED = {"loss": "training loss", "eval_mrr": "MRR on valid"}  # keys of the trainer's log, with titles of plots


def public_options(*options) -> dict[str, object]:
    """Returns the options that affect results, in a form to publish: a local path is reduced to its last part."""
    values = {name: value for name, value in option_values(*options).items() if affects_results(name)}
    for reference in references(KINDS, values):
        on_hub = reference.kind in ("rows", "encoder")
        values[reference.option] = ",".join(public_name(value, on_hub) for value in reference.values)
    return plain_settings(values)


def flat_results(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Flattens `{set: {system: metrics}}` to keys `SET_SYSTEM_METRIC`, or `SET_METRIC` for the trained encoder."""
    flat = {}
    for name, systems in results.items():
        for system, metrics in systems.items():
            prefix = name if system == "trained" else f"{name}_{system}"
            for metric, value in metrics.items():
                flat[f"{prefix}_{metric}"] = value
    return flat


class Run(Measurements):
    """Evaluates an encoder before and after training, and writes the results to the output folder.

    Args:
        trainer: the trainer, which has the encoder.
        rows: the run's rows.
        model_args, data_args: the run's options.
        statistics: the result of `data_statistics`.
        files: the output folder.
    """

    def __init__(
        self,
        trainer: SoftInfoNCETrainer,
        rows: Rows,
        model_args: ModelArguments,
        data_args: DataArguments,
        statistics: dict,
        files: RunFolder,
    ):
        self.evaluation_sets = rows.evaluation_sets
        self.sets = [*split_sets(trainer.args, rows.splits), *rows.evaluation_sets]
        super().__init__(trainer, {evaluation_set.name: evaluation_set.split for evaluation_set in self.sets})
        self.statistics = statistics
        self.model_args = model_args
        self.data_args = data_args
        self.folder = files.path
        self.files = files
        self.on_main = distributed.rank_and_world_size()[0] == 0
        corpora = {name: split.corpus for name, split in rows.splits.items()}
        self.languages = data_args.languages or languages_in(corpora)
        self.encoder_folder: str | Path | None = None  # the folder of the encoder that was measured last
        self._ranks: dict[str, tuple] = {}  # the arguments of `save_ranks` for each file
        trainer.add_callback(FollowOtherQueries(self))

    def measure(self, system: str, lexical: bool = False) -> None:
        """Ranks the queries of all sets with the encoder's current weights.

        Args:
            system: the name of these weights in the results: "untrained" or "trained".
            lexical: whether to also rank with lexical BM25, a baseline that needs no training, and with both combined.
                This is slow for a large corpus, so do it only once.
        """
        self.encoder_folder = self.model_args.model_name_or_path
        if system == "trained" and self.trainer.args.do_train:
            self.encoder_folder = self.folder
        super().measure(system, lexical)

    def follow(self) -> None:
        """Logs the MRR on each additional evaluation set during training, and the change since the start."""
        for evaluation_set in self.evaluation_sets:
            name = evaluation_set.name
            output = self.trainer.predict(evaluation_set.split, metric_key_prefix=f"eval_{name}")
            metrics = {"mrr": output.metrics[f"eval_{name}_mrr"]}
            if name in self.ranks_before:
                metrics |= change_of_mrr(self.ranks_before[name], output.ranks)
            self.trainer.log({f"eval_{name}_{metric}": value for metric, value in metrics.items()})

    def finish(self) -> None:
        """Writes the results and the model card, and prints a table of results and example queries."""
        if not self.on_main:
            return
        record = self.record()
        has_encoder = (self.folder / PROFILE_FILE).is_file()
        # A run that only evaluates keeps the card of an encoder that an earlier run left in the folder.
        if has_encoder and self.trainer.args.do_train:
            draw_training(self.folder, self.trainer.state.log_history)
            if self.data_args.model_card:
                write_model_card(self.folder, record)
        self.write(record, train=training_numbers(self.trainer.state))
        if self.results:
            print_on_main(f"\n{self.table()}\n")
        if self.rankings and self.data_args.examples:
            self._print_examples()
        print_on_main(f"Written to {self.folder}")
        if checkpoints := list(self.folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
            size = sum(path.stat().st_size for folder in checkpoints for path in folder.rglob("*"))
            print_on_main(
                f"{self.folder}/{PREFIX_CHECKPOINT_DIR}-* takes {size / 2**20:,.0f} MiB with the optimizer; keep it "
                "for resume_from_checkpoint=last, or delete it"
            )
        if (source := self.data_args.source_dir or self.data_args.history) and has_encoder:
            command = shlex.join(["soft-trainer", "search", "--folder", source, "--model", str(self.folder)])
            print_on_main(f'To search the same tree: {command} "what the code does"')

    def write(self, record: Mapping, **parts: Mapping[str, float]) -> None:
        """Writes the ranks and the metrics, and then the record, which lists the run's files.

        Args:
            record: the record to write, without the list of files.
            parts: metrics in addition to the evaluation metrics, keyed by part, such as `train`.
        """
        if not self.files.trains:
            self.files.clear()
        for name, ranks in self._ranks.items():
            save_ranks(self.folder / name, *ranks)
        parts["eval"] = flat_results(self.results)
        write_results(self.folder, lambda: {**record, LISTED: written_files(self.folder)}, **parts)

    def _print_examples(self) -> None:
        """Prints some queries with their top functions. The queries come from test if test was measured."""
        shown = min(self.sets, key=lambda each: not each.name.startswith("test"))
        split = shown.split
        profile = self.trainer.encoder
        query = text_column(split.queries, profile.query_columns, "query")
        code = text_column(split.corpus, ("code", *profile.code_columns), "code")
        text = examples(split, self.rankings[shown.name], self.data_args.examples, query, code)
        title = f"Queries from {shown.name} with their top three functions (=> marks relevant ones)"
        print_on_main(f"{title}:\n\n{text}\n")

    def record(self) -> dict:
        """Returns the run's record, which the model card and the report are written from (see `hub.model_card`)."""
        trainer = self.trainer
        args = self.trainer.args
        model = self.model_args
        data = self.data_args
        callback = trainer.estimator_callback
        histogram = callback.histogram if callback else None
        named = {"name": model_label(model), "profile": trainer.encoder.name, "from_scratch": model.from_scratch}
        if trainer.encoder.teacher:
            named["teacher"] = public_name(trainer.encoder.teacher)
        estimator = {"name": "none"}
        if callback and trainer.plan.criterion.needs_similarity:
            named_model = args.estimator_model and public_name(args.estimator_model)
            estimator = {"name": args.estimator, "estimator_model": named_model}
            for name, value in changed_options(args).items():
                if name.startswith("bm25_"):
                    estimator[name] = value
        described = trainer.describe()
        merging = described.get("merging")
        if merging:
            described["merging"] = merging | {"base": public_name(merging["base"])}
        return described | {
            "format": RECORD_FORMAT,
            "base_model": None if model.from_scratch else public_name(model_name(model)),
            "license": None if model.from_scratch else license_of(model_name(model)),
            "dataset": data.rows_name,
            "languages": self.languages,
            "options": public_options(model, data, args),
            DEPENDS_ON: trainer.run_fingerprint | self.files.fingerprint,
            "encoder": dataclasses.asdict(trainer.encoder) | named,
            "estimator": estimator,
            "results": self.results,
            "statistics": self.statistics,
            "weights": histogram,
            "samples": self._samples(),
        }

    def _samples(self) -> list[tuple[str, str]]:
        """Returns the first training pairs, shortened for the model card, or [] if the data set is not public."""
        split = self.trainer.train_split
        if split is None or not self.data_args.from_hub:
            return []
        data_set = self.data_args.data_dir or self.data_args.dataset_name
        if data_set != CODESEARCHNET and not is_public(data_set):
            return []
        pairs = split.judgments.pairs()[:CARD_SAMPLES]
        profile = self.trainer.encoder
        queries = side_texts(split.queries.select(pairs[:, 0]), "query", profile)
        codes = side_texts(split.corpus.select(pairs[:, 1]), "code", profile)
        return [(shortened(query), shortened(code)) for query, code in zip(queries, codes, strict=True)]

    def add(self, name: str, system: str, output: RetrievalOutput) -> None:
        """Stores a ranking and its metrics. `write` later writes each query's rank to a file."""
        super().add(name, system, output)
        profile = self.trainer.encoder
        encoder = None if system == "lexical" else self.encoder_folder
        columns = profile.query_columns, ("code", *profile.code_columns)
        ranks = (self.measured[name], output.ranking, *columns, output.by_query, encoder)
        self._ranks[f"ranks-{name}-{system}.parquet"] = ranks


class FollowOtherQueries(TrainerCallback):
    """A callback that measures a run's additional evaluation sets at every evaluation during training."""

    def __init__(self, run: Run):
        self.run = run

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        """Measures the additional evaluation sets if training is in progress."""
        if self.run.trainer.is_in_train:
            self.run.follow()


def split_sets(args: SoftInfoNCETrainingArguments, splits: Mapping[str, Split]) -> list[EvaluationSet]:
    """Returns valid (if `do_eval`) and test (if `do_predict`) as evaluation sets, one per language or source."""
    sets = []
    for name, asked in {"valid": args.do_eval, "test": args.do_predict}.items():
        for key, split in splits.items():
            if asked and key.split("-")[0] == name:
                sets.append(EvaluationSet(key, split))
    return sets


def draw_training(folder: Path, history: Sequence[Mapping]) -> Path | None:
    """Draws `training.png`: the loss and the MRR at each step.

    Args:
        history: the trainer's log.

    Returns:
        The path of the file, or None if matplotlib (the extra `plots`) is missing, or if the log has fewer than two
        losses and fewer than two MRRs.
    """
    points = {name: [(entry["step"], entry[name]) for entry in history if name in entry] for name in PLOTTED}
    drawn = [name for name in PLOTTED if len(points[name]) > 1]
    if not drawn or importlib.util.find_spec("matplotlib") is None:
        return None
    figure = new_figure(4 * len(drawn), 3)
    for place, name in enumerate(drawn, 1):
        axes = figure.add_subplot(1, len(drawn), place)
        axes.plot(*zip(*points[name], strict=True), color=COLORS[place - 1], marker=".")
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_title(PLOTTED[name])
    return save_png(figure, folder / TRAINING_PICTURE)
