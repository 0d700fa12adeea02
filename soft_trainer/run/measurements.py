"""Measures an encoder before and after training, with lexical BM25 for comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from soft_trainer.data.columns import row_texts, text_column
from soft_trainer.data.split import Split
from soft_trainer.data.statistics import data_statistics, statistics_table
from soft_trainer.errors import UserError
from soft_trainer.evaluation.figures import draw_training
from soft_trainer.evaluation.lexical import lexical_rankings
from soft_trainer.evaluation.ranking import retrieval_metrics
from soft_trainer.evaluation.results import change_of_mrr
from soft_trainer.evaluation.retrieval import RetrievalOutput, answer_pairs, by_corpus, by_query, means
from soft_trainer.options.fields import CODESEARCHNET
from soft_trainer.run.model_card import write_model_card
from soft_trainer.run.record import training_numbers, write_run
from soft_trainer.run.reporting import print_results
from soft_trainer.system import distributed
from soft_trainer.system.files import PROFILE_FILE, TRAINING_PICTURE
from soft_trainer.system.terminal import print_on_main


class Measurements(TrainerCallback):
    """Ranks evaluation sets with a trainer's encoder and with BM25.

    As a callback, it measures the sets that `followed` names at every evaluation during training.

    Args:
        trainer: a `SoftInfoNCETrainer`, whose `details` name the sets, and whose `folder` gets the results.

    Attributes:
        outputs: `{set: {system: RetrievalOutput}}`. A system is "untrained" (before training), "trained", "lexical"
            (BM25) or "combined" (the encoder with BM25).
        step: the step of the weights that were measured last, or None.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.measured = dict(trainer.details.measured or {})
        self.folder = trainer.folder
        self.outputs: dict[str, dict[str, RetrievalOutput]] = {name: {} for name in self.measured}
        self.step: int | None = None
        self.statistics: dict[str, dict] = {}
        if getattr(trainer.args, "report", False):
            self._measure_rows()
        trainer.pop_callback(Measurements)  # of an earlier training
        trainer.add_callback(self)

    def _measure_rows(self) -> None:
        """Computes the lengths and duplicates of the rows, and prints them as a table."""
        trainer = self.trainer
        args = trainer.args
        splits = {} if trainer.train_split is None else {"train": trainer.train_split}
        splits |= {name: split for name, split in self.measured.items() if name not in trainer.details.followed}
        with args.main_process_first(desc="tokenising"):
            self.statistics = data_statistics(splits, trainer.encoder, trainer.processing_class)
        about = trainer.details.about
        published = about.get("dataset") == CODESEARCHNET and len(about["languages"]) == 1
        paper = about["languages"][0] if published else None
        complete = args.from_command_line and args.do_eval and args.do_predict
        print_on_main(statistics_table(self.statistics, paper, complete))

    @property
    def results(self) -> dict[str, dict[str, dict]]:
        """The metrics, as `{set: {system: metrics}}`."""
        results = {}
        for name, outputs in self.outputs.items():
            results[name] = {system: output.metrics for system, output in outputs.items()}
        return results

    def measure(self, system: str, lexical: bool = False, top_k: int = 10) -> None:
        """Ranks the queries of all sets with the encoder's current weights.

        Args:
            system: the name of these weights in the results: "untrained" or "trained".
            lexical: whether to also rank with lexical BM25, a baseline that needs no training, and with both combined.
                This is slow for a large corpus, so do it only once.
            top_k: the number of top functions to keep for each query.
        """
        self.step = self.trainer.state.global_step
        for sets in by_corpus(self.measured):
            codes = self.trainer.embed_rows(next(iter(sets.values())).corpus, "code")
            for name, split in sets.items():
                queries = self.trainer.embed_rows(split.queries, "query")
                output = self.trainer.predict(split, None, name, codes, queries, top_k)
                metrics = {key.removeprefix(f"{name}_"): value for key, value in output.metrics.items()}
                if system == "trained":
                    metrics |= self._change(name, output)
                self.outputs[name][system] = dataclasses.replace(output, metrics=metrics)
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
        rows, targets = answer_pairs(split.judgments)
        asked = [queries[row] for row in rows.tolist()]
        excluded = None
        if (unranked := split.unranked()) is not None:
            excluded = torch.from_numpy(unranked)[rows]
        both = (embedded[rows.to(embedded.device)], codes)
        try:
            words = _words(split.corpus, columns, "code")
            rankings = lexical_rankings(asked, words, targets, both, excluded=excluded)
        except UserError as error:
            print_on_main(f"{name}: skipped lexical BM25. {error}")
            return
        for system, of_pairs in rankings.items():
            ranking, measured = by_query(of_pairs, split.judgments)
            metrics = retrieval_metrics(ranking.ranks, len(split.corpus)) | means(measured)
            self.outputs[name][system] = RetrievalOutput(ranking, metrics, by_query=measured)

    def _change(self, name: str, output: RetrievalOutput) -> dict[str, float]:
        """Returns the change in a set's MRR since the start, or {} if the encoder was not measured then."""
        if "untrained" not in self.outputs[name]:
            return {}
        return change_of_mrr(self.outputs[name]["untrained"].ranks, output.ranks)

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        """Logs the MRR on each additional evaluation set during training, and the change since the start."""
        if not self.trainer.is_in_train:
            return
        followed = {name: self.measured[name] for name in self.trainer.details.followed}
        outputs = self.trainer.predict_sets(followed, "eval")
        for name, output in outputs.items():
            metrics = {"mrr": output.metrics[f"eval_{name}_mrr"]} | self._change(name, output)
            self.trainer.log({f"eval_{name}_{metric}": value for metric, value in metrics.items()})

    def finish(self) -> None:
        """Writes the results and the model card, and prints a table of results and example queries."""
        if not distributed.is_main():
            return
        path = self.folder.path
        state = self.trainer.state
        record = self.trainer.record()
        # A run that only evaluates keeps the card of an encoder that an earlier run left in the folder.
        if (path / PROFILE_FILE).is_file() and self.folder.trains:
            draw_training({"run": [state.log_history]}, path / TRAINING_PICTURE)
            if getattr(self.trainer.args, "model_card", True):
                write_model_card(path, record)
        write_run(self, record, train=training_numbers(state))
        print_results(self)

    @property
    def chosen_on(self) -> list[str]:
        """The names of the sets on which evaluations chose the weights, so that their metrics are too high."""
        if not self.trainer.metrics_choose or not self.folder.trains:
            return []
        used = self.trainer.eval_dataset
        used = used.values() if isinstance(used, Mapping) else [used]
        known = {split.fingerprint() for split in used if split is not None}
        return [name for name, split in self.measured.items() if split.fingerprint() in known]


def _words(rows: Dataset, columns: Sequence[str], side: str) -> list[list[str]]:
    return [text.split() for text in row_texts(rows, text_column(rows, columns, side))]
