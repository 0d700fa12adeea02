"""Guard sets: measured before, during and after training, sampled if they are large, and named if they drop."""

import numpy as np
import pytest
from datasets import Dataset
from refusals import refused

from soft_trainer import UserError
from soft_trainer.evaluation.evaluation_sets import EvaluationSet
from soft_trainer.studies.significance import paired_bootstrap
from soft_trainer.training.guard_sets import GuardSets, best_ranks, difference, sampled


def guards_of(dataset):
    return {"human": (dataset.select(range(6)), dataset), "old": ([dataset[7], dataset[9]], dataset)}


def test_guards_are_measured_before_in_each_evaluation_and_at_the_end(trainer_of, dataset, capsys):
    trainer = trainer_of(
        arguments={"guards": guards_of(dataset)}, eval_strategy="steps", eval_steps=2, learning_rate=1e-2
    )
    direct = trainer.predict(dataset.select(range(6)), dataset, "x").metrics["x_mrr"]
    trainer.train()
    assert trainer.guards.mrr("untrained")["human"] == pytest.approx(direct)
    logged = [entry for entry in trainer.state.log_history if "eval_mrr" in entry]
    assert logged and {"eval_guard_human_mrr", "eval_guard_old_mrr"} <= logged[0].keys()
    after = trainer.predict(dataset.select(range(6)), dataset, "x").metrics["x_mrr"]
    assert trainer.guards.mrr("trained")["human"] == pytest.approx(after)
    assert after != direct
    assert "before training" in capsys.readouterr().err


@pytest.mark.parametrize("tolerance, warns", [(0.1, True), (0.2, False)])
def test_a_line_warns_of_a_guard_that_fell(trainer_of, dataset, capsys, monkeypatch, tolerance, warns):
    trainer = trainer_of(arguments={"guards": guards_of(dataset)})
    before = {"human": np.full(4, 0.5), "old": np.full(1, 0.5)}
    after = {"human": np.array([0.5, 0.5, 0.2, 0.2]), "old": np.full(1, 0.6)}
    monkeypatch.setattr(trainer.guards, "reciprocal_ranks", {"untrained": before, "trained": after}.get)
    trainer.guards.report(tolerance)
    printed = capsys.readouterr().err
    assert ("warning: the guard human fell from 0.5000 to 0.3500" in printed) == warns
    assert "-0.1500 ± 0.1697" in printed and "+0.1000 ± inf" in printed


def test_a_difference_has_the_interval_that_a_bootstrap_finds():
    generator = np.random.default_rng(0)
    before, after = generator.random(400), generator.random(400)
    mean, half = map(float, difference(before, after).split(" ± "))
    low, high = paired_bootstrap(after - before)
    assert mean == pytest.approx((after - before).mean(), abs=1e-4)
    assert half == pytest.approx((high - low) / 2, rel=0.05)


def test_a_large_guard_is_sampled_with_its_own_codes_and_says_so(capsys):
    corpus = Dataset.from_list([{"url": f"u{number}", "code": f"code {number}"} for number in range(100)])
    queries = [{"url": f"u{number}", "docstring": f"query {number}"} for number in range(0, 80, 2)]
    some = sampled(EvaluationSet("large", Dataset.from_list(queries), corpus), queries=10, codes=30)
    assert len(some.queries) == 10 and len(some.codebase) == 30
    assert set(some.queries["url"]) <= set(some.codebase["url"])
    assert "10 of 40 queries over 30 of 100 codes" in capsys.readouterr().err
    again = sampled(EvaluationSet("large", Dataset.from_list(queries), corpus), queries=10, codes=30)
    assert again.codebase["url"] == some.codebase["url"]


def test_judged_queries_keep_all_their_right_codes(capsys):
    corpus = Dataset.from_list([{"url": f"u{number}", "code": f"code {number}"} for number in range(60)])
    pairs = [(query, code) for query in range(12) for code in (query, query + 20)]
    queries = Dataset.from_list(
        [
            {"url": f"u{code}", "docstring": f"query {query}", "query_number": query, "relevance": 2.0}
            for query, code in pairs
        ]
    )
    some = sampled(EvaluationSet("judged", queries, corpus), queries=5, codes=20)
    numbers = np.asarray(some.queries["query_number"])
    assert np.array_equal(np.unique(numbers), np.arange(5)) and len(numbers) == 10
    for number in range(5):
        texts = {text for text, own in zip(some.queries["docstring"], numbers, strict=True) if own == number}
        assert len(texts) == 1


def test_of_several_right_codes_the_best_counts(trainer_of, dataset):
    trainer = trainer_of()
    rows = [dataset[row] | {"query_number": 0, "relevance": 1.0, "docstring": "sort"} for row in (0, 1)]
    judged = EvaluationSet("judged", Dataset.from_list(rows), dataset)
    output = trainer.predict(judged.queries, dataset, "judged")
    places = sorted(output.ranks.tolist())
    assert best_ranks(judged, output).tolist() == [places[0]]


@pytest.mark.parametrize(
    "made_of, words",
    [
        (lambda rows: [(rows, rows)], "guards: a dict {name: (queries, corpus)} is expected, not list"),
        (lambda rows: {"human": rows}, "guards['human']: a pair (queries, corpus) is expected"),
        (lambda rows: {"human": (rows, None)}, "guards['human']: a pair (queries, corpus) is expected"),
    ],
)
def test_guards_of_another_form_are_refused(dataset, made_of, words):
    with refused(words):
        GuardSets(made_of(dataset), predict=None)


def test_a_guard_whose_query_has_no_code_is_refused_before_training(trainer_of, dataset):
    trainer = trainer_of(arguments={"guards": {"human": (dataset, dataset.select(range(5)))}})
    with pytest.raises(UserError, match=r"guards\['human'\]"):
        trainer.train()
