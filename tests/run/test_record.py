"""A run evaluates its splits and additional sets, and writes the results to its folder."""

import dataclasses
import json
import math
import sys

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from torch.nn.functional import normalize

from soft_trainer import SoftInfoNCETrainer, SoftInfoNCETrainingArguments
from soft_trainer.data.load import make_splits
from soft_trainer.data.split import Split
from soft_trainer.evaluation.figures import draw_training
from soft_trainer.run.measurements import Measurements
from soft_trainer.run.record import setup_table
from soft_trainer.run.setup import RunDetails


@pytest.fixture
def graded(rows, dataset):
    """A split with all codes and two queries: the first has grades 3 and 1, the second has a grade of 2."""
    queries = Dataset.from_list([rows[0], rows[7]])
    return Split.from_grades(queries, dataset, [(0, 0), (0, 1), (1, 7)], [3.0, 1.0, 2.0])


@pytest.fixture
def make_run(model, tokenizer, profile, tmp_path):
    def make(data, others=None, **more):
        args = SoftInfoNCETrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **more)
        args.disable_tqdm = True
        args.report = True
        splits = make_splits(data) if data else {}
        measured = {name: split for name, split in splits.items() if name != "train"}
        others = others or {}
        trainer = SoftInfoNCETrainer(
            model=model,
            args=args,
            processing_class=tokenizer,
            encoder=profile,
            _details=RunDetails(
                measured=measured | others,
                followed=[*others],
                about={"dataset": "rows", "languages": ["python"]},
            ),
        )
        trainer.folder.trains = args.do_train
        trainer.report = Measurements(trainer)
        return trainer.report

    return make


def test_a_graded_set_is_measured_by_query(make_run, graded, tmp_path, capsys):
    run = make_run({}, {"human": graded}, matryoshka_dims="8")
    run.measure("untrained", lexical=True)
    run.finish()
    queries, codes = (run.trainer.embed_rows(graded.corpus, side) for side in ("query", "code"))

    def ranked(scores):
        return {code: int((scores[query] >= scores[query, code]).sum()) for query, code in ((0, 0), (0, 1), (1, 7))}

    rank_of = ranked(queries[[0, 7]] @ codes.T)
    best = min(rank_of[0], rank_of[1])
    found = json.loads((tmp_path / "run.json").read_text())["results"]["human"]["untrained"]
    assert found["mrr"] == pytest.approx((1 / best + 1 / rank_of[7]) / 2)
    assert (found["queries"], found["pool_size"]) == (2, 24)
    short = ranked(normalize(queries[[0, 7], :8]) @ normalize(codes[:, :8]).T)
    assert found["mrr_8"] == pytest.approx((1 / min(short[0], short[1]) + 1 / short[7]) / 2)

    def gain(grade, rank):
        return grade / math.log2(rank + 1) * (rank <= 10)

    ndcg = [(gain(3, rank_of[0]) + gain(1, rank_of[1])) / (gain(3, 1) + gain(1, 2)), gain(2, rank_of[7]) / gain(2, 1)]
    assert found["ndcg@10"] == pytest.approx(sum(ndcg) / 2)
    # Two relevant codes rank at or above the second relevant code.
    average = [(1 / best + 2 / max(rank_of[0], rank_of[1])) / 2, 1 / rank_of[7]]
    assert found["map"] == pytest.approx(sum(average) / 2)
    ranks = pq.read_table(tmp_path / "ranks-human-untrained.parquet").to_pydict()
    assert ranks["map"] == pytest.approx(average)
    assert ranks["ndcg@10"] == pytest.approx(ndcg) and ranks["rank"] == [best, rank_of[7]]
    # The code with the highest grade represents the query, whatever its rank, so that runs can be compared.
    assert ranks["url"] == [graded.corpus["url"][0], graded.corpus["url"][7]]
    assert run.results["human"]["lexical"]["ndcg@10"] > 0.5
    said = capsys.readouterr().err
    assert "MAP" in said and "nDCG@10" in said


def test_other_queries_are_followed_during_training(make_run, graded, dataset):
    run = make_run({}, {"human": graded})
    run.measure("untrained")
    run.trainer.evaluate(dataset, codebase=dataset)
    assert not any("eval_human_mrr" in entry for entry in run.trainer.state.log_history)
    run.trainer.is_in_train = True
    with torch.no_grad():
        for parameter in run.trainer.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    run.trainer.evaluate(dataset, codebase=dataset)
    (entry,) = [entry for entry in run.trainer.state.log_history if "eval_human_mrr" in entry]
    before = run.results["human"]["untrained"]["mrr"]
    assert entry["eval_human_mrr_change"] == pytest.approx(entry["eval_human_mrr"] - before)
    assert entry["eval_human_mrr_change_margin"] >= 0 and "eval_valid_mrr" not in entry


def test_the_record_has_the_batch_that_fitted_and_the_optimizer(make_run, dataset, tmp_path):
    options = {"lr_scheduler_type": "cosine", "auto_find_batch_size": True}
    run = make_run({}, {"set": Split.from_urls(dataset, dataset)}, **options)
    run.trainer._train_batch_size = 4  # like after `auto_find_batch_size`
    run.trainer.resolve()
    training = run.trainer.record()["training"]
    assert training["pairs per batch and process"] == training["functions compared per query"] == 4


@pytest.mark.parametrize(
    "batch_size, processes, gathers, expected",
    [
        (32, 1, False, (24, 24)),
        (8, 1, False, (8, 8)),
        (8, 2, True, (8, 16)),
        (16, 2, True, (12, 24)),
        (16, 2, False, (12, 12)),
    ],
)
def test_the_table_shows_what_a_batch_of_24_pairs_really_holds(trainer_of, batch_size, processes, gathers, expected):
    trainer = trainer_of()
    changes = {"batch_size": batch_size, "processes": processes, "gathers": gathers}
    trainer.plan = dataclasses.replace(trainer.plan, **changes)
    table = setup_table(trainer)
    assert (table["pairs per batch and process"], table["functions compared per query"]) == expected


def test_a_run_that_only_measures_leaves_the_card_of_the_training(make_run, tmp_path):
    make_run({}).trainer.save_model()
    (tmp_path / "README.md").write_text("trained")
    make_run({}, do_predict=True).finish()
    assert (tmp_path / "README.md").read_text() == "trained"
    make_run({}, do_train=True).finish()
    assert (tmp_path / "README.md").read_text() != "trained"


def test_the_size_of_checkpoints_that_stay_is_printed(make_run, tmp_path, capsys):
    run = make_run({})
    run.finish()
    assert "checkpoint-*" not in capsys.readouterr().err
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3/optimizer.pt").write_bytes(bytes(3 * 2**20))
    run.finish()
    assert f"{tmp_path}/checkpoint-* takes 3 MiB" in capsys.readouterr().err


def test_codes_without_a_word_have_no_lexical_line(make_run, dataset, capsys):
    signs = dataset.map(lambda row: {"code": "+ - +", "code_tokens": ["+", "-", "+"]})
    sets = {"signs": signs, "words": dataset}
    run = make_run({}, {name: Split.from_urls(dataset, corpus) for name, corpus in sets.items()})
    run.measure("trained", lexical=True)
    assert list(run.results["signs"]) == ["trained"]
    assert list(run.results["words"]) == ["trained", "lexical", "combined"]
    assert "signs: skipped lexical BM25. None of the 24 functions contains a word" in capsys.readouterr().err


@pytest.fixture
def folders(tmp_path, rows):
    """Folders: `pairs` has only train, `human` has a codebase and judgments."""
    pairs, human = tmp_path / "pairs", tmp_path / "human"
    pairs.mkdir()
    human.mkdir()
    (pairs / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:16]))
    (human / "codebase.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = [{"query": row["docstring"], "url": row["url"], "relevance": 1} for row in rows[16:]]
    (human / "relevance.jsonl").write_text("".join(json.dumps(row) + "\n" for row in judged))
    return pairs, human


HERE = {"language": "python", "use_cpu": "true", "disable_tqdm": "true"}
SYSTEMS = ["untrained", "trained", "lexical", "combined"]
SMALL = {"from_scratch": "32x1", "vocabulary_size": 400, "query_length": 16, "code_length": 32, "output_dir": "out"}


def test_what_a_run_lacks_is_told_before_a_model_is_built(script, folders):
    pairs, human = folders
    code, lines = script(dataset_name="none", eval_data_dir=human, **SMALL, **HERE)
    assert code == 2 and "error: no rows of train: set data_dir to a folder" in lines[-1]
    empty = human / "empty"
    empty.mkdir()
    code, lines = script(data_dir=pairs, eval_data_dir=empty, **SMALL, **HERE)
    assert code == 2 and str(empty) in lines[-1] and "The folder contains nothing" in lines[-1]


@pytest.mark.slow
def test_train_alone_and_human_queries_and_then_the_queries_alone(script, folders, tmp_path):
    pairs, human = folders
    code, lines = script(
        data_dir=pairs, eval_data_dir=human, per_device_train_batch_size=8, num_train_epochs=1, **SMALL, **HERE
    )
    assert code == 0, lines
    results = json.loads((tmp_path / "out/run.json").read_text())["results"]
    assert {name: list(systems) for name, systems in results.items()} == {"human": SYSTEMS}
    assert results["human"]["trained"]["pool_size"] == 24 and "Queries from human with" in "\n".join(lines)
    card = (tmp_path / "out/README.md").read_text()
    assert "name: human" in card and "MRR over 24 functions" in card
    again = {"dataset_name": "none", "do_predict": "true", "model_name_or_path": "out", "output_dir": "again"}
    code, lines = script(eval_data_dir=human, **again, **HERE)
    assert code == 0, lines
    measured = json.loads((tmp_path / "again/run.json").read_text())["results"]["human"]
    assert measured["untrained"]["mrr"] == results["human"]["trained"]["mrr"]
    assert (
        list(measured) == ["untrained", "lexical", "combined"] and not (tmp_path / "again/model.safetensors").exists()
    )


def test_the_course_of_a_training_is_drawn_from_two_values_on(tmp_path, monkeypatch):
    log = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5, "eval_mrr": 0.2}]
    path = draw_training({"run": [log]}, tmp_path / "training.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert draw_training({"run": [log[:1]]}, path) is None
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw_training({"run": [log]}, path) is None
