# /// script
# requires-python = ">=3.11"
# dependencies = ["soft-trainer[mteb]"]
# ///
"""Evaluates an encoder with mteb on your own rows.

    python examples/mteb_own_rows.py MODEL ROWS

ROWS is anything that `soft_trainer.load_rows` reads: a folder, a file or a data set on the Hub. For every query in the
test split, the encoder ranks the whole corpus. Change `OwnRows` to evaluate other queries, corpora or grades.
"""

import argparse
import sys

import mteb
from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.retrieval_dataset_loaders import RetrievalSplitData
from mteb.abstasks.task_metadata import TaskMetadata
from sentence_transformers import SentenceTransformer

from soft_trainer import load_rows
from soft_trainer.data.split import Split


class OwnRows(AbsTaskRetrieval):
    """A retrieval task for mteb, made from a split. mteb requires grades that are whole numbers.

    Args:
        split: queries with a column `docstring`, a corpus with a column `code`, and judgments of which code answers
            which query.
    """

    metadata = TaskMetadata(
        name="OwnRows",
        description="Ranks the whole corpus for each query.",
        type="Retrieval",
        category="t2t",
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="ndcg_at_10",
        dataset={"path": "own/rows", "revision": "1"},
    )

    def __init__(self, split: Split):
        super().__init__()
        self.split = split

    def load_data(self, *args, **kwargs) -> None:
        """Sets `self.dataset` to the queries, the corpus, and the relevant functions of each query."""
        queries = self.split.queries["docstring"][:]
        codes = self.split.corpus["code"][:]
        relevant = {str(query): {} for query in range(len(queries))}
        judged = self.split.judgments.relevant.tocoo()
        for query, code, grade in zip(judged.row, judged.col, judged.data, strict=True):
            relevant[str(query)][str(code)] = int(grade)
        data = RetrievalSplitData(
            corpus=Dataset.from_dict({"id": [str(row) for row in range(len(codes))], "text": codes}),
            queries=Dataset.from_dict({"id": list(relevant), "text": queries}),
            relevant_docs=relevant,
            top_ranked=None,
        )
        self.dataset = {"default": {"test": data}}
        self.data_loaded = True


def measure(model: str, rows: str) -> dict[str, float]:
    """Returns the scores of the encoder by name, such as `ndcg_at_10`."""
    split = load_rows(rows)["test"]
    results = mteb.evaluate(SentenceTransformer(model), OwnRows(split), cache=None, co2_tracker=False)
    return results[0].scores["test"][0]


def main() -> None:
    """Evaluates the encoder and prints three metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name on the Hub")
    parser.add_argument("rows", help="a folder, a file or a data set on the Hub")
    arguments = parser.parse_args()
    scores = measure(arguments.model, arguments.rows)
    for name in ("mrr_at_1000", "ndcg_at_10", "recall_at_10"):
        sys.stdout.write(f"{name}: {scores[name]:.4f}\n")


if __name__ == "__main__":
    main()
