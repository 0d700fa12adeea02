"""mteb measures our folders as sentence-transformers loads them: its own tasks, and the example's own rows."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.data.judgments import Split
from soft_trainer.encoders.encoding import comparable
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.evaluation.ranking import rank_codes
from soft_trainer.evaluation.retrieval import answer_pairs, by_query

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "mteb_own_rows.py"
HERE = ["--use_cpu", "true", "--disable_tqdm", "true"]


@pytest.fixture(scope="module")
def example():
    """The example as a module, imported here because mteb takes three seconds."""
    spec = importlib.util.spec_from_file_location("mteb_own_rows", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def benchmarks():
    return importlib.import_module("soft_trainer.evaluation.benchmarks")


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
    """Returns mteb's nDCG@10 of every query, unrounded, from its own rankings."""
    mteb = example.mteb
    task = example.OwnRows(split)
    options = {"cache": None, "co2_tracker": False, "prediction_folder": folder}
    (result,) = mteb.evaluate(example.SentenceTransformer(str(model), device="cpu"), task, **options)
    (file,) = folder.rglob("*.json")
    rankings = json.loads(file.read_text())["default"]["test"]
    task.load_data()
    metrics = importlib.import_module("mteb._evaluators.retrieval_metrics")
    relevant = task.dataset["default"]["test"]["relevant_docs"]
    scores = metrics.calculate_retrieval_scores(rankings, relevant, (10,)).all_scores
    return [scores[str(query)]["ndcg_cut_10"] for query in range(len(split.queries))], result.scores["test"][0]


def test_ndcg_by_relevance_is_that_of_mteb(example, encoder_dir, rows, tmp_path):
    texts = [row["docstring"] for row in rows]
    names = [row["code"].split("(")[0].split()[1] for row in rows]
    codes = [f"def {first}_{second}(x): return {first}" for first in names[:4] for second in names]
    queries = Dataset.from_list([{"docstring": text} for text in texts])
    corpus = Dataset.from_list([{"code": code, "url": f"u{number}"} for number, code in enumerate(codes)])
    encoder = load_encoder(encoder_dir, device="cpu")
    embeddings = encoder.encode_queries(texts), encoder.encode_codes(codes)
    embedded, embedded_codes = (comparable(encoder.profile, side) for side in embeddings)
    assert len(np.unique(embedded_codes, axis=0)) == 96  # nothing ties
    order = (embedded @ embedded_codes.T).argsort(dim=1, descending=True)
    generator = np.random.default_rng(0)
    places = [(query, place) for query in range(24) for place in generator.permutation(20)[: 1 + query % 4]]
    pairs = [(query, int(order[query, place])) for query, place in places]
    split = Split.from_grades(queries, corpus, pairs, generator.integers(1, 4, len(pairs)))
    rows_of, targets = answer_pairs(split.judgments)
    ranking = rank_codes(embedded[rows_of], embedded_codes, targets)
    _, ours = by_query(ranking, split.judgments)
    theirs, scores = ndcg_of_mteb(example, split, encoder_dir, tmp_path)
    assert 0.2 < np.mean(theirs) < 0.8
    np.testing.assert_allclose(ours["ndcg@10"], theirs, atol=1e-6)
    assert scores["ndcg_at_10"] == pytest.approx(ours["ndcg@10"].mean(), abs=1e-5)  # rounded to five digits
    assert scores["map_at_1000"] == pytest.approx(ours["map"].mean(), abs=1e-5)


def test_the_example_names_what_it_needs():
    header = re.search(r"^# /// script\n(.*?)^# ///$", EXAMPLE.read_text(), re.MULTILINE | re.DOTALL)[1]
    assert 'dependencies = ["soft-trainer[mteb]"]' in header


def test_the_command_prints_a_table_and_keeps_each_result(
    benchmarks, example, encoder_dir, data_dir, tmp_path, monkeypatch, capsys
):
    data = example.load_rows(data_dir)
    own = example.OwnRows(Split.from_urls(data["test"], data["codebase"]))
    monkeypatch.setattr(benchmarks.mteb, "get_task", lambda name: own)
    words = ["evaluate", str(encoder_dir), "--mteb", "Own", "--output_dir", str(tmp_path / "out"), *HERE]
    assert run_command(words) == 0
    [*_, line] = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in line.split("|")][1:3] == ["OwnRows", "ndcg_at_10"]
    assert len(list((tmp_path / "out").rglob("OwnRows.json"))) == 1


def test_names_are_found_and_unknown_ones_and_data_out_of_reach_are_one_line(benchmarks, encoder_dir):
    names = [task.metadata.name for task in benchmarks.find_tasks("CosQA, MTEB(Code, v1)")]
    assert len(names) == 13 and names[0] == "CosQA"
    for name in ("NoSuchTask", "MTEB(Code)"):
        with refused(f"mteb={name}: no task or benchmark"):
            run_command(["evaluate", str(encoder_dir), "--mteb", name, *HERE])
    with refused("CosQA: mteb cannot load its data", "needs the network once"):
        run_command(["evaluate", str(encoder_dir), "--mteb", "CosQA", *HERE])
