"""Compares our MRR and nDCG@10 with mteb's, query by query, for one encoder on evaluation sets.

    OMP_NUM_THREADS=1 python benchmarks/mteb_agreement.py MODEL FOLDER [FOLDER ...]

mteb loads MODEL with `SentenceTransformer` and ranks the codes. Because mteb rounds its mean, this script calls
mteb's function for single queries on these rankings. In our figures, a code that ties with a relevant one ranks
before it; mteb orders tied codes by their ids.
"""

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

import mteb
import numpy as np
import torch
from mteb._evaluators.retrieval_metrics import calculate_retrieval_scores
from sentence_transformers import SentenceTransformer

from soft_trainer.data.split import Split
from soft_trainer.encoders.encoding import comparable
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.evaluation.ranking import Corpus, rank_codes
from soft_trainer.evaluation.retrieval import answer_pairs, by_query
from soft_trainer.options.fields import DataArguments
from soft_trainer.shell.evaluation_sets import load_evaluation_sets
from soft_trainer.terminal import table

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from mteb_own_rows import OwnRows  # noqa: E402


def measure_ours(encoder, split) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns our reciprocal rank and nDCG@10 of every query, and the number of queries with a tied relevant code."""
    queries = comparable(encoder.profile, encoder.encode_queries(split.queries["docstring"][:], 64, True))
    codes = comparable(encoder.profile, encoder.encode_codes(split.corpus["code"][:], "python", 64, True))
    rows, targets = answer_pairs(split.judgments)
    ranking, measured = by_query(rank_codes(queries[rows], codes, targets), split.judgments)
    scores = Corpus(codes).scores(queries[rows])
    own = scores.gather(1, targets[:, None])
    tied = torch.unique(rows[(scores == own).sum(1) > 1])
    return 1 / ranking.ranks.double().numpy(), measured["ndcg@10"], len(tied)


def measure_theirs(model: str, split) -> tuple[np.ndarray, np.ndarray, dict]:
    """Returns mteb's reciprocal rank up to rank 1,000 and nDCG@10 of every query, and its scores."""
    task = OwnRows(split)
    with tempfile.TemporaryDirectory() as folder:
        options = {"cache": None, "co2_tracker": False, "prediction_folder": folder}
        result = mteb.evaluate(SentenceTransformer(model, device="cpu"), task, **options)
        (file,) = Path(folder).rglob("*.json")
        rankings = json.loads(file.read_text())["default"]["test"]
    task.load_data()
    relevant = task.dataset["default"]["test"]["relevant_docs"]
    by_id = calculate_retrieval_scores(rankings, relevant, (10,)).all_scores
    ndcg = np.array([by_id[str(query)]["ndcg_cut_10"] for query in range(len(split.queries))])
    reciprocal = []
    for query in range(len(split.queries)):
        order = sorted(rankings[str(query)].items(), key=lambda pair: -pair[1])
        ranks = [rank for rank, (code, _) in enumerate(order, 1) if code in relevant[str(query)]]
        reciprocal.append(1 / ranks[0] if ranks else 0.0)
    return np.array(reciprocal), ndcg, result[0].scores["test"][0]


def compare(model: str, encoder, name: str, split: Split) -> list:
    """Returns a row of the table."""
    ours_mrr, ours, ties = measure_ours(encoder, split)
    theirs_mrr, theirs, scores = measure_theirs(model, split)
    cut = np.where(ours_mrr >= 1 / 1000, ours_mrr, 0)
    return [
        *(name, len(split.queries), len(split.corpus), split.judgments.relevant.nnz, ties),
        *(cut.mean(), theirs_mrr.mean(), ours.mean(), theirs.mean(), scores["ndcg_at_10"]),
        *(abs(ours.mean() - theirs.mean()), np.abs(ours - theirs).max()),
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folders", nargs="+")
    arguments = parser.parse_args()
    logging.getLogger("mteb").setLevel(logging.ERROR)
    encoder = load_encoder(arguments.model, device="cpu")
    options = DataArguments(language="python", eval_data_dir=",".join(arguments.folders))
    sets = load_evaluation_sets(options, encoder.profile)
    headers = [
        "set",
        "queries",
        "functions",
        "relevant functions",
        "queries with ties",
        "our MRR, cut at 1,000",
        "mteb's",
    ]
    headers += ["our nDCG@10", "mteb's", "as mteb prints it", "difference", "largest of a query"]
    print(table(headers, [compare(arguments.model, encoder, *each) for each in sets.items()], ".7f"))


if __name__ == "__main__":
    main()
