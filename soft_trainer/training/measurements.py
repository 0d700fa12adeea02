"""Measures an encoder before and after training, with lexical BM25 for comparison, and writes the results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from soft_trainer import distributed
from soft_trainer.data.split import Split
from soft_trainer.data.statistics import data_statistics, statistics_table
from soft_trainer.data.tokens import column_texts, text_column
from soft_trainer.errors import UserError
from soft_trainer.evaluation.lexical import lexical_rankings
from soft_trainer.evaluation.ranking import Ranking, retrieval_metrics
from soft_trainer.evaluation.results import CHANGE, MARGIN, change_of_mrr, examples, metrics_table, save_ranks
from soft_trainer.evaluation.retrieval import RetrievalOutput, answer_pairs, by_corpus, by_query, means
from soft_trainer.files import LISTED, PROFILE_FILE, write_results
from soft_trainer.hub.model_card import write_model_card
from soft_trainer.hub.push import written_files
from soft_trainer.options.fields import CODESEARCHNET
from soft_trainer.options.option_spec import unread_lines
from soft_trainer.terminal import print_on_main
from soft_trainer.training.record import draw_training, flat_results, trainer_record
from soft_trainer.training.reporting import training_numbers


class Measurements(TrainerCallback):
    """Ranks evaluation sets with a trainer's encoder and with BM25, and writes ranks, results, record and model card.

    As a callback, it measures the sets that the trainer's `followed` names at every evaluation during training.

    Args:
        trainer: a `SoftInfoNCETrainer`, whose `measured` names the sets, and whose `folder` gets the results.

    Attributes:
        results: `{set: {system: metrics}}`. A system is "untrained" (before training), "trained", "lexical" (BM25) or
            "combined" (the encoder with BM25).
        rankings: the encoder's latest ranking of each set.
        ranks_before: for each set, the ranks of the relevant functions before training, int64[Q].
        written, step: the record that was written last, or None, and the step of its weights.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.measured = dict(trainer.measured or {})
        self.folder = trainer.folder
        self.results: dict[str, dict[str, dict]] = {name: {} for name in self.measured}
        self.rankings: dict[str, Ranking] = {}
        self.ranks_before: dict[str, Tensor] = {}
        self.written: dict | None = None
        self.step: int | None = None
        self._encoder_folder: str | None = None  # the folder of the encoder that was measured last
        self._ranks: dict[str, tuple] = {}  # the arguments of `save_ranks` for each file
        self.statistics = self._statistics()
        for options in trainer.options:
            for line in unread_lines(options, options.unread):
                print_on_main(line)
        trainer.pop_callback(Measurements)  # of an earlier training
        trainer.add_callback(self)

    def _statistics(self) -> dict[str, dict]:
        """Computes the lengths and duplicates of the rows, and prints them as a table."""
        trainer = self.trainer
        args = trainer.args
        if not getattr(args, "report", False):
            return {}
        splits = {} if trainer.train_split is None else {"train": trainer.train_split}
        splits |= {name: split for name, split in self.measured.items() if name not in trainer.followed}
        with args.main_process_first(desc="tokenising"):
            statistics = data_statistics(splits, trainer.encoder, trainer.processing_class)
        about = trainer.about
        published = about.get("dataset") == CODESEARCHNET and len(about["languages"]) == 1
        paper = about["languages"][0] if published else None
        several = trainer.train_split is not None and trainer.train_split.sources
        print_on_main(statistics_table(statistics, paper, args.do_eval and args.do_predict and not several))
        return statistics

    def measure(self, system: str, lexical: bool = False, top_k: int = 10) -> None:
        """Ranks the queries of all sets with the encoder's current weights.

        Args:
            system: the name of these weights in the results: "untrained" or "trained".
            lexical: whether to also rank with lexical BM25, a baseline that needs no training, and with both combined.
                This is slow for a large corpus, so do it only once.
            top_k: the number of top functions to keep in `rankings`.
        """
        self._encoder_folder = self.trainer.starting.name
        if system == "trained" and self.folder.trains:
            self._encoder_folder = str(self.folder.path)
        for sets in by_corpus(self.measured):
            codes = self.trainer.embed_rows(next(iter(sets.values())).corpus, "code")
            for name, split in sets.items():
                queries = self.trainer.embed_rows(split.queries, "query")
                output = self.trainer.predict(split, None, name, codes, queries, top_k)
                metrics = {key.removeprefix(f"{name}_"): value for key, value in output.metrics.items()}
                self.add(name, system, dataclasses.replace(output, metrics=metrics))
                if lexical and distributed.is_main():
                    self._measure_lexical(name, split, queries, codes)

    def _measure_lexical(self, name: str, split: Split, embedded: Tensor, codes: Tensor) -> None:
        """Ranks a corpus with lexical BM25, and with BM25 and the encoder combined. Skips a corpus without words."""
        profile = self.trainer.encoder
        columns = profile.code_columns
        if profile.data_flow_length:
            # `original_string` contains the query as a docstring, which GraphCodeBERT removes but BM25 would match.
            columns = [name for name in ("code_tokens", "code", *columns) if name != "original_string"]
        queries = _words(split.queries, profile.query_columns, "query")
        words = _words(split.corpus, columns, "code")
        rows, targets = answer_pairs(split.judgments)
        asked = [queries[row] for row in rows.tolist()]
        try:
            excluded = None
            if (unranked := split.unranked()) is not None:
                excluded = torch.from_numpy(unranked)[rows]
            both = (embedded[rows.to(embedded.device)], codes)
            rankings = lexical_rankings(asked, words, targets, both, excluded=excluded)
        except UserError as error:
            print_on_main(f"{name}: skipped lexical BM25. {error}")
            return
        for system, of_pairs in rankings.items():
            ranking, measured = by_query(of_pairs, split.judgments)
            metrics = retrieval_metrics(ranking.ranks, len(split.corpus)) | means(measured)
            self.add(name, system, RetrievalOutput(ranking, metrics, by_query=measured))

    def add(self, name: str, system: str, output: RetrievalOutput) -> None:
        """Stores a set's ranking and metrics. After training, also adds the change in MRR to the metrics."""
        metrics = output.metrics
        if system == "untrained":
            self.ranks_before[name] = output.ranking.ranks
        if system == "trained" and name in self.ranks_before:
            metrics |= change_of_mrr(self.ranks_before[name], output.ranking.ranks)
        self.results[name][system] = metrics
        if system not in ("lexical", "combined"):
            self.rankings[name] = output.ranking
        profile = self.trainer.encoder
        made_by = None if system == "lexical" else self._encoder_folder
        columns = profile.query_columns, ("code", *profile.code_columns)
        ranks = (self.measured[name], output.ranking, *columns, output.by_query, made_by)
        self._ranks[f"ranks-{name}-{system}.parquet"] = ranks

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        """Logs the MRR on each additional evaluation set during training, and the change since the start."""
        if not self.trainer.is_in_train:
            return
        outputs = self.trainer.predict_sets({name: self.measured[name] for name in self.trainer.followed}, "eval")
        for name, output in outputs.items():
            metrics = {"mrr": output.metrics[f"eval_{name}_mrr"]}
            if name in self.ranks_before:
                metrics |= change_of_mrr(self.ranks_before[name], output.ranks)
            self.trainer.log({f"eval_{name}_{metric}": value for metric, value in metrics.items()})

    def finish(self) -> None:
        """Writes the results and the model card, and prints a table of results and example queries."""
        if not distributed.is_main():
            return
        path = self.folder.path
        args = self.trainer.args
        record = self.record()
        has_encoder = (path / PROFILE_FILE).is_file()
        # A run that only evaluates keeps the card of an encoder that an earlier run left in the folder.
        if has_encoder and self.folder.trains:
            draw_training(path, self.trainer.state.log_history)
            if getattr(args, "model_card", True):
                write_model_card(path, record)
        self.write(record, train=training_numbers(self.trainer.state))
        if self.results:
            print_on_main(f"\n{self.table()}\n")
        if self.rankings and args.examples:
            self.print_examples()
        print_on_main(f"Written to {path}")
        if checkpoints := list(path.glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
            size = sum(file.stat().st_size for folder in checkpoints for file in folder.rglob("*"))
            print_on_main(
                f"{path}/{PREFIX_CHECKPOINT_DIR}-* takes {size / 2**20:,.0f} MiB with the optimizer; keep it "
                "for resume_from_checkpoint=last, or delete it"
            )

    def write(self, record: Mapping, **parts: Mapping[str, float]) -> None:
        """Writes the ranks and the metrics, and then the record, which lists the run's files.

        Args:
            record: the record to write, without the list of files.
            parts: metrics in addition to the evaluation metrics, keyed by part, such as `train`.
        """
        path = self.folder.path
        if not self.folder.trains:
            self.folder.clear()
        for name, ranks in self._ranks.items():
            save_ranks(path / name, *ranks)
        parts["eval"] = flat_results(self.results)
        write_results(path, lambda: {**record, LISTED: written_files(path)}, **parts)
        self.written = dict(record)
        self.step = self.trainer.state.global_step

    def print_examples(self) -> None:
        """Prints some queries with their top functions. The queries come from test if test was measured."""
        name = min(self.rankings, key=lambda each: not each.startswith("test"))
        split = self.measured[name]
        profile = self.trainer.encoder
        query = text_column(split.queries, profile.query_columns, "query")
        code = text_column(split.corpus, ("code", *profile.code_columns), "code")
        text = examples(split, self.rankings[name], self.trainer.args.examples, query, code)
        title = f"Queries from {name} with their top three functions (=> marks relevant ones)"
        print_on_main(f"{title}:\n\n{text}\n")

    def record(self) -> dict:
        """Returns the run's record, which the model card and the report are written from (see `hub.model_card`)."""
        record = trainer_record(self.trainer, self.statistics)
        return record | {"results": self.results, "chosen_on": self.chosen_on}

    @property
    def chosen_on(self) -> list[str]:
        """The names of the sets on which evaluations chose the weights, so that their metrics are too high."""
        if not self.trainer.metrics_choose or not self.folder.trains:
            return []
        used = self.trainer.eval_dataset
        used = used.values() if isinstance(used, Mapping) else [used]
        known = {split.fingerprint() for split in used if split is not None}
        return [name for name, split in self.measured.items() if split.fingerprint() in known]

    def table(self) -> str:
        """Returns all results as a table, with a note for each set that is too small to show its change in MRR."""
        lines = [metrics_table(self.results, chosen_on=self.chosen_on)]
        for name, systems in self.results.items():
            metrics = systems.get("trained", {})
            if "untrained" in systems and metrics.get("queries") == 1:
                lines.append(f"{name}: one query is too few to show any change")
            # Where hardly a rank has changed, the interval says nothing about what so many queries can show.
            if CHANGE in metrics and abs(metrics[CHANGE]) < metrics[MARGIN] >= 0.001:
                lines.append(
                    f"{name}: {metrics['queries']:,} queries are too few to show a change below {metrics[MARGIN]:.3f}"
                )
        return "\n".join(lines)


def _words(rows: Dataset, columns: Sequence[str], side: str) -> list[list[str]]:
    return [text.split() for text in column_texts(rows, text_column(rows, columns, side))]
