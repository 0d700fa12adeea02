"""Compares the MRR of mteb with ours, on the same encoder and rows.

    python benchmarks/mteb_mrr.py --model MODEL --data_dir DIR --language ruby

A code that scores the same as a query's own counts against us; mteb orders such codes by their ids. So the second line
leaves out the queries whose own code ties with another.
"""

import argparse
import dataclasses
import logging

import mteb
import numpy as np
from mteb.types import PromptType

from soft_trainer.data.codesearchnet import load_folder, target_rows
from soft_trainer.encoders.encoding import comparable
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.evaluation.evaluation_sets import EvaluationSet
from soft_trainer.evaluation.ranking import rank_codes, retrieval_metrics
from soft_trainer.mteb import EvaluationSetTask, MtebEncoder
from soft_trainer.mteb.tasks import measure
from soft_trainer.terminal import table


class KeepingEncoder(MtebEncoder):
    """Encodes the corpus once, and keeps the first embeddings of both sides."""

    def __init__(self, encoder):
        super().__init__(encoder)
        self.kept = {}

    def encode(self, inputs, *, prompt_type=None, **options):
        """Computes the embeddings, or returns those of the corpus."""
        if prompt_type == PromptType.document and prompt_type in self.kept:
            return self.kept[prompt_type]
        embeddings = super().encode(inputs, prompt_type=prompt_type, **options)
        self.kept.setdefault(prompt_type, embeddings)
        return embeddings

    def ranks_and_ties(self, rows: EvaluationSet):
        """Our ranks, and True for each query whose own code has the embedding of another."""
        queries, codes = (comparable(self.encoder.profile, self.kept[side]) for side in PromptType)
        targets = target_rows(rows.queries, rows.codebase)
        _, groups, counts = np.unique(codes.numpy(), axis=0, return_inverse=True, return_counts=True)
        return rank_codes(queries, codes, targets).ranks, counts[groups.reshape(-1)][targets.numpy()] > 1


def main():
    """Prints the table of one data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--language", required=True)
    parser.add_argument("--code_length", type=int, help="tokens of a code; few make codes tie")
    arguments = parser.parse_args()
    logging.getLogger("mteb").setLevel(logging.ERROR)
    data = load_folder(arguments.data_dir, ("test", "codebase"))
    loaded = load_encoder(arguments.model, device="cpu")
    profile, lines = loaded.profile.replace(code_length=arguments.code_length), []
    encoder = KeepingEncoder(dataclasses.replace(loaded, profile=profile))
    name, kept = f"{arguments.language}-test", np.ones(len(data["test"]), bool)
    rows = EvaluationSet(name, data["test"], data["codebase"])
    for label in ("all queries", "queries without a tie"):
        chosen = EvaluationSet(name, rows.queries.select(np.flatnonzero(kept)), rows.codebase)
        task = EvaluationSetTask(chosen, profile, arguments.language)
        ((_, _, scores, _),) = measure(encoder, task).scores()
        if label == "all queries":
            ranks, ties = encoder.ranks_and_ties(rows)
        whole, ours = (retrieval_metrics(ranks[kept], len(rows.codebase), cut)["mrr"] for cut in (None, 1000))
        theirs, sizes = scores["mrr_at_1000"], (len(chosen.queries), len(rows.codebase))
        lines.append([arguments.language, label, *sizes, whole, ours, theirs, abs(theirs - ours)])
        kept = ~ties
    headers = ["rows", "queries", "number", "codes", "ours", "ours, max_rank=1000", "mteb", "difference"]
    print(f"mteb {mteb.__version__}\n{table(headers, lines, '.7f')}")


if __name__ == "__main__":
    main()
