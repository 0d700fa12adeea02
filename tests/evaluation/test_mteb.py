"""mteb evaluates saved encoders with the same results, on its own tasks and on the example's rows."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from soft_trainer.cli.__main__ import run_command
from soft_trainer.encoders.encoding import comparable
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.evaluation.ranking import rank_codes
from soft_trainer.evaluation.retrieval import answer_pairs, by_query
from soft_trainer.options.fields import DataArguments
from soft_trainer.shell.evaluation_sets import load_evaluation_sets

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "mteb_own_rows.py"
HERE = ["--use_cpu", "true", "--disable_tqdm", "true"]


@pytest.fixture(scope="module")
def example():
    """The example, imported as a module only here, because importing mteb takes three seconds."""
    spec = importlib.util.spec_from_file_location("mteb_own_rows", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_measures_own_rows_as_we_do(example, encoder_dir, data_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(encoder_dir), str(data_dir)])
    example.main()
    theirs = dict(re.findall(r"^(\w+): ([\d.]+)$", capsys.readouterr().out, re.MULTILINE))
    words = ["--data_dir", str(data_dir), "--output_dir", str(tmp_path / "out"), "--lexical", "false", *HERE]
    assert run_command(["evaluate", str(encoder_dir), *words]) == 0
    ours = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert ours["test_mrr"] == pytest.approx(float(theirs["mrr_at_1000"]), abs=1e-4)
    assert ours["test_recall@10"] == pytest.approx(float(theirs["recall_at_10"]), abs=1e-4)


def ndcg_of_mteb(example, split, model, folder):
    """Computes the unrounded nDCG@10 of every query from mteb's rankings."""
    mteb = example.mteb
    task = example.OwnRows(split)
    options = {"cache": None, "co2_tracker": False, "prediction_folder": folder}
    (result,) = mteb.evaluate(example.SentenceTransformer(str(model), device="cpu"), task, **options)
    (file,) = folder.rglob("OwnRows*.json")
    rankings = json.loads(file.read_text())["default"]["test"]
    task.load_data()
    metrics = importlib.import_module("mteb._evaluators.retrieval_metrics")
    relevant = task.dataset["default"]["test"]["relevant_docs"]
    scores = metrics.calculate_retrieval_scores(rankings, relevant, (10,)).all_scores
    return [scores[str(query)]["ndcg_cut_10"] for query in range(len(split.queries))], result.scores["test"][0]


def write_beir(folder, texts, codes, answers):
    """Writes a BEIR folder with judgments, (query, code, grade)."""
    (folder / "qrels").mkdir(parents=True)
    for name, rows in (("queries", texts), ("corpus", codes)):
        lines = [json.dumps({"_id": f"{name}{number}", "text": text}) for number, text in enumerate(rows)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    lines = [f"queries{query}\tcorpus{code}\t{grade}" for query, code, grade in answers]
    (folder / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]))


def test_ndcg_is_that_of_mteb(example, encoder_dir, rows, tmp_path):
    texts = [row["docstring"] for row in rows]
    names = [row["code"].split("(")[0].split()[1] for row in rows]
    codes = [f"def {first}_{second}(x): return {first}" for first in names[:4] for second in names]
    encoder = load_encoder(encoder_dir, device="cpu")
    embeddings = encoder.encode_queries(texts), encoder.encode_codes(codes)
    embedded, embedded_codes = (comparable(encoder.profile, side) for side in embeddings)
    assert len(np.unique(embedded_codes, axis=0)) == len(codes)  # so there are no ties
    order = (embedded @ embedded_codes.T).argsort(dim=1, descending=True)
    generator = np.random.default_rng(0)
    pairs = [(query, column) for query in range(24) for column in generator.permutation(20)[: 1 + query % 4]]
    answers = [(query, int(order[query, column]), int(generator.integers(1, 4))) for query, column in pairs]
    write_beir(tmp_path / "set", texts, codes, answers)
    (split,) = load_evaluation_sets(DataArguments(eval_data_dir=str(tmp_path / "set")), encoder.profile).values()
    judgments = split.judgments
    rows_of, targets = answer_pairs(judgments)
    _, ours = by_query(rank_codes(embedded[rows_of], embedded_codes, targets), judgments)
    theirs, scores = ndcg_of_mteb(example, split, encoder_dir, tmp_path)
    assert 0.1 < np.mean(theirs) < 0.8
    np.testing.assert_allclose(ours["ndcg@10"], theirs, atol=1e-6)
    assert scores["ndcg_at_10"] == pytest.approx(ours["ndcg@10"].mean(), abs=1e-5)  # rounded to five digits
    assert scores["map_at_1000"] == pytest.approx(ours["map"].mean(), abs=1e-5)
