"""BEIR folders are read as splits of queries, a corpus and judgments."""

import gzip
import json

import numpy as np
import pytest
import torch
from refusals import refused

from soft_trainer import load_rows
from soft_trainer.data.folders import list_files
from soft_trainer.data.layouts import BEIR
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.evaluation.lexical import lexical_rankings
from soft_trainer.evaluation.results import metrics_table
from soft_trainer.evaluation.retrieval import rank_corpus
from soft_trainer.options.fields import DataArguments
from soft_trainer.shell.evaluation_sets import load_evaluation_sets
from soft_trainer.shell.rows import load_data


@pytest.fixture
def folder(tmp_path):
    """A BEIR folder with four codes, three queries, and graded judgments for train and test."""
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    corpus = [
        {"_id": f"c{n}", "title": "f" if n else "", "text": f"return x + {n}", "language": "go"} for n in range(4)
    ]
    queries = [{"_id": f"q{n}", "text": f"adds {n} to x"} for n in range(3)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in corpus))
    with gzip.open(folder / "queries.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in queries)
    head = "query-id\tcorpus-id\tscore\n"
    (folder / "qrels" / "train.tsv").write_text(f"{head}q0\tc1\t1\nq0\tc3\t0\n")
    (folder / "qrels" / "test.tsv").write_text(f"{head}q2\tc2\t2\nq1\tc0\t1\nq2\tc0\t1\nq0\tc0\t0\n")
    return folder


def test_the_judgments_of_each_file_are_a_split(folder, capsys):
    assert BEIR.finds(list_files(folder)) and not BEIR.finds(list_files(folder.parent))
    splits = load_rows(folder)
    assert list(splits) == ["train", "test"]
    test = splits["test"]
    assert test.queries["docstring"][:] == ["adds 1 to x", "adds 2 to x"]
    assert test.corpus["code"][:2] == ["return x + 0", "f return x + 1"] and test.corpus["url"][:] == [
        "c0",
        "c1",
        "c2",
        "c3",
    ]
    assert test.judgments.relevant.toarray().tolist() == [[1, 0, 0, 0], [1, 0, 2, 0]]
    assert test.judgments.graded
    assert "1 of 3 queries have no relevant function" in capsys.readouterr().err
    train = splits["train"]
    assert train.corpus["url"][:] == ["c1", "c3"] and train.corpus["code_tokens"][0] == "f return x + 1".split()
    assert train.judgments.pairs().tolist() == [[0, 0]]
    assert (
        train.judgments.negatives[0, 1] == 2
        and train.judgments.named_negatives() is None
        and train.judgments.negatives.nnz == 1
    )


def test_judgments_for_train_are_no_evaluation_set(folder):
    (folder / "qrels" / "test.tsv").unlink()
    with refused("judgments only for train,"):
        load_evaluation_sets(DataArguments(eval_data_dir=str(folder)), EncoderProfile())


def test_a_folder_is_the_rows_of_a_run(folder):
    arguments = DataArguments(data_dir=str(folder), max_train_rows=1)
    (folder / "qrels" / "train.tsv").write_text("q0\tc1\t1\nq0\tc3\t1\n")
    data = load_data(arguments, EncoderProfile(), needed=("train", "test", "codebase"))
    assert data["train"].judgments.pairs().tolist() == [[0, 0]]
    assert data["train"].corpus["code"][:] == ["f return x + 1"] and len(data["test"].corpus) == 4
    assert [*data] == ["train", "test"] and data["test"].judgments.relevant.nnz == 3
    with refused("no rows of valid"):
        load_data(arguments, EncoderProfile(), needed=("train", "valid"))


def test_options_for_columns_are_refused_and_a_language_is_that_of_the_rows(folder):
    for name in ("query_column", "code_column", "id_column"):
        with refused(f"{name}=x: ", "have fixed names; omit"):
            load_data(DataArguments(data_dir=str(folder), **{name: "x"}), EncoderProfile(), ("test",))
    with refused("language=java: the rows of", "are in go; omit language"):
        load_data(DataArguments(data_dir=str(folder), language="java"), EncoderProfile(), ("test",))
    text = (folder / "corpus.jsonl").read_text()
    (folder / "corpus.jsonl").write_text(text.replace('"language": "go"', '"language": null'))
    graphs = EncoderProfile(data_flow_length=8)  # data flow needs the language
    data = load_data(DataArguments(data_dir=str(folder), language="java"), graphs, ("test",))
    assert {*data["test"].corpus["language"], *data["test"].queries["language"]} == {"java"}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("qrels/test.tsv", "q9\tc0\t1\nq0\tc9\t1\n", "test.tsv: no query has a relevant function"),
        ("qrels/test.tsv", "q0 c0 1\n", "test.tsv, line 1: expected query-id, corpus-id and score"),
        ("qrels/test.tsv", "q0\tc0\tgood\n", "test.tsv, line 1: the score 'good' is not a number"),
        ("qrels/test.tsv", "q0\tc0\tinf\n", "test.tsv, line 1: the score 'inf' is not a number"),
        ("qrels/test.tsv", "q0\tc0\tnan\n", "test.tsv, line 1: the score 'nan' is not a number"),
        ("qrels/test.tsv", "q0\tc0\t0\n", "test.tsv: no query has a relevant function"),
        ("corpus.jsonl", "", "corpus.jsonl: no rows"),
    ],
)
def test_what_cannot_be_read_is_named(folder, name, text, words):
    (folder / name).write_text(text)
    with refused(words):
        load_rows(folder)


@pytest.mark.parametrize(
    ("line", "ignored"),
    [
        ("q0\tc9\t1\n", "ignored 1 judged ids that have no text, such as document 'c9'"),
        ("q2\tc9\t2\nq1\tc8\t1\n", "ignored 2 judged ids that have no text, such as document 'c9'"),
        ("q9\tc0\t1\nq9\tc1\t1\n", "ignored 1 judged ids that have no text, such as query 'q9'"),
        ("q2\tc9\t0\n", None),  # of no matter
    ],
)
def test_judged_ids_without_a_text_are_counted_and_skipped(folder, capsys, line, ignored):
    before = load_rows(folder)["test"]
    path = folder / "qrels" / "test.tsv"
    path.write_text(path.read_text() + line)
    capsys.readouterr()
    test = load_rows(folder)["test"]
    assert test.fingerprint() == before.fingerprint()
    assert (ignored or "test.tsv: 1 of 3") in (err := capsys.readouterr().err) and ("ignored" in err) == bool(ignored)


def searched_by_itself(folder, judged: str) -> None:
    """Writes a folder whose corpus contains the queries, as in a search for similar functions."""
    (folder / "qrels").mkdir(parents=True)
    rows = "".join(json.dumps({"_id": f"d{n}", "text": f"return x + {n}"}) + "\n" for n in range(4))
    (folder / "corpus.jsonl").write_text(rows)
    (folder / "queries.jsonl").write_text(rows)
    (folder / "qrels" / "test.tsv").write_text(judged)


def test_a_querys_own_document_is_not_ranked_unless_it_is_relevant(tmp_path):
    searched_by_itself(tmp_path, "d0\td1\t1\nd1\td2\t1\nd2\td2\t1\n")
    split = load_rows(tmp_path)["test"]
    assert split.unranked().tolist() == [0, 1, -1]
    assert split.select(queries=np.array([2, 1]), codes=np.array([1, 2])).unranked().tolist() == [-1, 0]
    queries = torch.eye(4)[:3]
    # Each document is most similar to itself, and then to the document before it.
    codes = torch.eye(4) + 0.5 * torch.eye(4).roll(-1, dims=1)
    output = rank_corpus(queries, codes, split, EncoderProfile(), [])
    assert output.ranks.tolist() == [1, 1, 1]
    assert (output.metrics["mrr"], output.metrics["queries_in_corpus"]) == (1.0, 2)
    assert "queries in the corpus, not ranked for themselves" in metrics_table({"test": {"trained": output.metrics}})
    words = [["return", str(n)] for n in range(4)]
    excluded = torch.tensor([0, 1, -1])
    rankings = lexical_rankings(words[:3], words, [1, 2, 2], (queries, codes), excluded=excluded)
    assert all(0 not in ranking.top_indices[0, :3].tolist() for ranking in rankings.values())


def test_ids_of_queries_that_no_document_has_change_nothing(folder):
    assert all(split.unranked() is None for split in load_rows(folder).values())
