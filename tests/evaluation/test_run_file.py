"""Run files, compared with what pytrec_eval computes from them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from refusals import refused

from soft_trainer import load_rows
from soft_trainer.data.split import Split
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.evaluation.retrieval import rank_corpus

pytrec_eval = pytest.importorskip("pytrec_eval")


def graded(queries=30, codes=40, ids="f{}", seed=0):
    """Returns a split with grades from 0 to 3 and embeddings for its two sides."""
    generator = np.random.default_rng(seed)
    grades = generator.integers(0, 4, (queries, codes)) * (generator.random((queries, codes)) < 0.2)
    grades[:, 0] = np.maximum(grades[:, 0], 1)
    pairs = np.argwhere(grades)
    texts = Dataset.from_dict({"docstring": [f"query {number}" for number in range(queries)]})
    corpus = Dataset.from_dict(
        {"code": [f"def f{number}(): ..." for number in range(codes)], "url": [ids.format(n) for n in range(codes)]}
    )
    embeddings = [torch.from_numpy(generator.standard_normal((size, 8))) for size in (queries, codes)]
    return Split.from_grades(texts, corpus, pairs, grades[tuple(pairs.T)]), embeddings


def evaluated(path: Path) -> dict:
    """Returns the means of what pytrec_eval computes from a run file and its judgments."""
    with open(path) as run, open(f"{path}.qrels") as judgments:
        measures = {"recip_rank", "map", "ndcg_cut_10"}
        by_query = pytrec_eval.RelevanceEvaluator(pytrec_eval.parse_qrel(judgments), measures).evaluate(
            pytrec_eval.parse_run(run)
        )
    return {name: np.mean([values[name] for values in by_query.values()]) for name in measures}


@pytest.mark.parametrize("ids", ["f{}", "https://example.org/a.py#L{}", "code:{}", "same"])
def test_pytrec_eval_computes_the_same_metrics_from_the_files(tmp_path, ids):
    split, embeddings = graded(ids=ids)
    output = rank_corpus(*embeddings, split, EncoderProfile(), (), top_k=40)
    assert "the first 40 of 40 functions" in output.write_run_file(tmp_path / "run", split)
    found = evaluated(tmp_path / "run")
    expected = [output.metrics[name] for name in ("mrr", "map", "ndcg@10")]
    assert [found[name] for name in ("recip_rank", "map", "ndcg_cut_10")] == pytest.approx(expected, abs=1e-6)


def test_queries_whose_documents_are_all_absent_are_counted_and_neither_measured_nor_judged(tmp_path, capsys):
    (tmp_path / "qrels").mkdir()
    for name in ("corpus", "queries"):
        rows = [json.dumps({"_id": f"{name[0]}{n}", "text": f"text {n}"}) + "\n" for n in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    published = [("q0", "c0"), ("q1", "c2"), ("q1", "gone"), ("q2", "gone"), ("q3", "lost")]
    (tmp_path / "qrels" / "test.tsv").write_text("".join(f"{query}\t{code}\t1\n" for query, code in published))
    split = load_rows(tmp_path)["test"]
    line = "test.tsv: 2 of 4 queries are not measured: none of their relevant documents is in the corpus"
    assert line in capsys.readouterr().err
    queries = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 3.0, 2.0, 1.0]])
    output = rank_corpus(queries, torch.eye(4), split, EncoderProfile(), (), top_k=4)
    output.write_run_file(tmp_path / "run", split)
    assert evaluated(tmp_path / "run")["recip_rank"] == pytest.approx(output.metrics["mrr"]) == 0.75
    assert (tmp_path / "run.qrels").read_text() == "q0 0 c0 1\nq1 0 c2 1\n"


def test_ties_are_counted_and_a_short_list_is_reported(tmp_path):
    split, (queries, codes) = graded(queries=3)
    codes[1:] = codes[0]
    output = rank_corpus(queries, codes, split, EncoderProfile(), (), top_k=20)
    line = output.write_run_file(tmp_path / "run", split)
    assert "20 of 40 functions for each query, so MAP will be too low; 3 of 3 queries have a" in line


@pytest.mark.parametrize("bad", ["a b{}", "{}\u00a0", "\t{}"])
def test_ids_with_blanks_are_refused(tmp_path, bad):
    split, embeddings = graded(ids=bad)
    output = rank_corpus(*embeddings, split, EncoderProfile(), ())
    with refused("set --id_column"):
        output.write_run_file(tmp_path / "run", split)


def test_a_grade_that_is_not_an_integer_is_refused(tmp_path):
    split, embeddings = graded()
    split.judgments.relevant.data[0] = 0.5
    output = rank_corpus(*embeddings, split, EncoderProfile(), ())
    with refused("integer grades, but a grade is 0.5"):
        output.write_run_file(tmp_path / "run", split)
