"""Negatives mined by a command: the nearest codes, in a file that training reads, and never codes of test."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
from datasets import Dataset
from refusals import refused

from soft_trainer import BM25Estimator
from soft_trainer.cli.__main__ import run_command
from soft_trainer.data.negative_files import load_negatives
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.estimators.bm25 import split_identifiers
from soft_trainer.estimators.frozen_encoder import TrainedModelEstimator
from soft_trainer.training.hard_batches import training_texts

FURTHER = {"code": "def sort_quickly(items): return sorted(items)", "url": "https://example.org/further"}


@pytest.fixture
def folder(data_dir, own_cache):
    return ["--data_dir", str(data_dir), "--language", "python"]


def read(path, rows):
    return load_negatives(path, training_texts(Dataset.from_list(rows[:16]), EncoderProfile()))


def test_bm25_finds_the_codes_whose_words_the_query_has(folder, rows, tmp_path, capsys):
    output = tmp_path / "negatives.jsonl.gz"
    assert run_command(["mine-negatives", str(output), *folder, "--negative_candidates", "5"]) == 0
    negatives = read(output, rows)
    columns = {"query": "docstring_tokens", "code": "code_tokens"}
    words = {side: [split_identifiers(row[name]) for row in rows[:16]] for side, name in columns.items()}
    estimator = BM25Estimator("query", "code", idf="lucene", scope="corpus")
    estimator.fit(Dataset.from_dict(words))
    scores = estimator.similarity(range(16), range(16)).numpy()
    assert negatives.own == pytest.approx(scores.diagonal(), abs=1e-4)
    np.fill_diagonal(scores, 0.0)
    for row in range(16):
        own = slice(negatives.starts[row], negatives.starts[row + 1])
        assert negatives.scores[own] == pytest.approx(np.sort(scores[row][scores[row] > 0])[::-1][:5], abs=1e-4)
    assert negatives.counts.sum() > 8
    # "sort a list with quick sort" has words of bubble_sort, which no token of its code is.
    assert negatives.codes[0] == 1
    assert "rows without a candidate" in capsys.readouterr().out


def test_further_codes_are_mined_but_none_of_the_corpus(folder, rows, tmp_path, capsys):
    codes, output = tmp_path / "more.jsonl", tmp_path / "negatives.jsonl"
    codes.write_text("".join(json.dumps(row) + "\n" for row in (FURTHER, rows[22], rows[3])))
    assert run_command(["mine-negatives", str(output), *folder, "--codes", str(codes)]) == 0
    negatives = read(output, rows)
    assert [row["url"] for row in negatives.code_only] == [FURTHER["url"]]
    assert 16 in negatives.codes[: negatives.starts[2]]
    assert "2 of 3 further codes are left out" in capsys.readouterr().err


def test_functions_of_a_source_tree_are_further_codes(folder, rows, tmp_path):
    tree, output = tmp_path / "tree", tmp_path / "negatives.jsonl"
    tree.mkdir()
    (tree / "sorting.py").write_text(
        "def sort_with_bubbles(items):\n    result = sorted(items)\n    return result\n\n\n"
        "def unlike(x, y):\n    total = x * y\n    return total\n"
    )
    assert run_command(["mine-negatives", str(output), *folder, "--code_dir", str(tree)]) == 0
    assert [row["url"] for row in read(output, rows).code_only] == ["sorting.py#L1-L3"]


@pytest.mark.slow
def test_an_encoder_mines_and_training_reads_the_file(folder, encoder_dir, rows, tmp_path, script):
    output = tmp_path / "negatives.jsonl"
    words = ["--estimator", "trained_model", "--estimator_model", str(encoder_dir)]
    limits = ["--no_estimator_cache", "true", "--negative_candidates", "6", "--negative_margin", "0"]
    assert run_command(["mine-negatives", str(output), *folder, *words, *limits]) == 0
    negatives = read(output, rows)
    estimator = TrainedModelEstimator(encoder_dir, cache_dir=None)
    estimator.fit(Dataset.from_list(rows[:16]))
    scores = estimator.similarity(range(16), range(16)).numpy()
    assert negatives.own == pytest.approx(scores.diagonal(), abs=1e-4)
    owners = negatives.owners
    assert negatives.scores == pytest.approx(scores[owners, negatives.codes], abs=1e-4)
    assert (negatives.scores <= negatives.own[owners] + 1e-6).all()
    options = {"data_dir": folder[1], "language": "python", "use_cpu": True, "max_steps": 1, "examples": 0}
    options |= {"model_name_or_path": encoder_dir, "per_device_train_batch_size": 8, "lexical": False}
    options |= {"negatives": output, "negatives_per_query": 1, "output_dir": tmp_path / "run"}
    code, said = script(**options)
    assert code == 0 and any(line.startswith("own negatives: ") for line in said)
    code, said = script(**options, max_train_rows=12, overwrite=True)
    assert code == 2 and "made for other rows (16 rows" in said[-1]


def test_a_mixture_compares_all_pairs(folder, encoder_dir, rows, tmp_path):
    words = ["--estimator", "bm25+trained_model", "--estimator_model", str(encoder_dir)]
    output = tmp_path / "negatives.jsonl"
    assert run_command(["mine-negatives", str(output), *folder, *words, "--estimator_cache_dir", str(tmp_path)]) == 0
    negatives = read(output, rows)
    assert negatives.counts.tolist() == [15] * 16
    assert (np.diff(negatives.scores[:15]) <= 0).all()


@pytest.mark.parametrize(
    "words, says",
    [
        (["--estimator", "none"], "estimator=none: use bm25"),
        (["--estimator", "bm25+initial_model"], "use bm25, or the encoder"),
        (["--codes", "somewhere/codebase.jsonl.gz"], "a codebase holds the codes of test"),
        (["--codes", "absent.jsonl"], "codes=absent.jsonl: no such file"),
        (["--code_dir", "absent"], "code_dir=absent: no such folder"),
        (["--negative_candidates", "0"], "negative_candidates=0"),
        (["--negative_ranks", "9"], "write FIRST,LAST"),
        (["--negative_max_score", "-1"], "candidate negatives is left by negative_max_score=-1.0"),
        (["--estimator", "test_mine_negatives:Queries", "--codes", "more.jsonl"], "not training rows (1 of them)"),
    ],
)
def test_what_cannot_be_mined_is_one_line(folder, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.jsonl").write_text(json.dumps(FURTHER) + "\n")
    with refused(says):
        run_command(["mine-negatives", "negatives.jsonl", *folder, *words])
    assert not (tmp_path / "negatives.jsonl").exists()


def test_the_folder_of_the_output_is_made_or_refused_at_once(folder, tmp_path, monkeypatch):
    assert run_command(["mine-negatives", str(tmp_path / "new" / "negatives.jsonl"), *folder]) == 0
    assert (tmp_path / "new" / "negatives.jsonl").is_file()
    monkeypatch.setattr("soft_trainer.data.sources.load_data", Mock(side_effect=AssertionError))
    (tmp_path / "file").touch()
    with refused("file/negatives.jsonl:", "is a file, not a folder"):
        run_command(["mine-negatives", str(tmp_path / "file" / "negatives.jsonl"), *folder])


class Queries(BM25Estimator):
    """An estimator that compares queries with queries."""
