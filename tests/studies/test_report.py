"""A report reads finished runs, and compares methods over the seeds that both methods have."""

import sys
from itertools import chain

import pytest
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.studies.report import (
    choose_baseline,
    compare_with,
    find_runs,
    results_table,
    runs_table,
    write_report,
)

GOOD = [1, 2, 1, 1] * 6
BAD = [2, 4, 3, 1] * 6


@pytest.fixture
def study(make_run, tmp_path, soft):
    """Writes runs of two methods, one of which lacks a seed."""
    for seed in (1, 2, 3):
        make_run(f"infonce/{seed}", BAD, seed=seed)
    for seed in (1, 2):
        make_run(f"bm25/{seed}", GOOD, soft(), seed=seed)
    return tmp_path / "outputs"


def test_a_method_is_the_folder_of_its_seeds(study):
    methods = find_runs([study])[0]
    assert {name: [run.seed for run in runs] for name, runs in methods.items()} == {
        "bm25": [1, 2],
        "infonce": [1, 2, 3],
    }
    assert choose_baseline(methods, None) == "infonce"
    assert choose_baseline(methods, "bm25") == "bm25"
    with refused("baseline=nothing: no such method; the methods are bm25, infonce"):
        choose_baseline(methods, "nothing")


def test_only_seeds_that_both_have_are_compared_and_the_others_are_named(study):
    methods = find_runs([study])[0]
    (difference,), problems = compare_with("infonce", methods, "test")
    assert not problems
    assert difference.comparison.differences.shape == (2, 24)
    assert difference.missing == ("3",)


def test_the_page_has_tables_tests_and_pictures(study, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_command(["report", str(study)])
    page = (tmp_path / "report" / "report.md").read_text()
    assert not (study / "report").exists()
    assert capsys.readouterr().out == page
    assert "Runs: 5. Methods: 2, compared with infonce." in page
    row = next(line for line in page.splitlines() if line.startswith("| bm25"))
    assert "0.8750" in row and "+0.3542" in row and "< 0.001" in row and row.rstrip(" |").endswith("3")
    assert "(training.png)" in page
    assert (tmp_path / "report" / "training.png").stat().st_size > 1000


def test_options_that_differ_have_a_column(make_run):
    shared = {"learning_rate": 2e-5, "alpha": 1.3, "weight_decay": 0.0}
    folder = make_run(
        "a/1", GOOD, options=shared | {"train_sampling_strategy": "similar", "negatives_per_query": None}
    )
    make_run("b/1", GOOD, options=shared | {"train_sampling_strategy": "random", "negatives_per_query": 2, "seed": 3})
    make_run("c/1", GOOD)  # of an earlier version
    header, _, first, second, third = runs_table(list(chain(*find_runs([folder.parents[1]])[0].values()))).splitlines()
    assert [name.strip() for name in header.split("|")][-4:-1] == [
        "weight_decay",
        "train_sampling_strategy",
        "negatives_per_query",
    ]
    assert [cell.strip() for cell in second.split("|")][-3:-1] == ["random", "2"]


def test_without_matplotlib_the_page_has_the_tables(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_command(["report", str(study)]) == 0
    assert "| bm25" in (tmp_path / "report" / "report.md").read_text()


def test_runs_that_cannot_be_read_are_named(make_run, tmp_path):
    make_run("a/1", GOOD)
    broken = make_run("b/1", GOOD)
    (broken / "run.json").write_text("{")
    unfinished = make_run("c/1", GOOD)
    (unfinished / "run.json").unlink()
    methods, excluded = find_runs([tmp_path / "outputs"])
    assert [*methods] == ["a"]
    assert len(excluded) == 2
    with refused("no such folder"):
        find_runs([tmp_path / "nothing"])
    with refused("no finished run found"):
        find_runs([unfinished])
    with refused(f"output_dir={broken}/run.json: {broken}/run.json is a file, not a folder"):
        write_report([tmp_path / "outputs"], broken / "run.json")


def test_encoders_that_begin_differently_have_a_row_each(make_run, tmp_path):
    def results(mrr):
        return {"test": {"untrained": {"mrr": mrr}, "trained": {"mrr": 0.9}}}

    make_run("a", [1, 2], results=results(0.25))
    make_run("b", [1, 2], results=results(0.25))
    runs = find_runs([tmp_path / "outputs"])[0]
    assert "encoder before training of" not in results_table("test", runs, [], {})
    make_run("c", [1, 2], results=results(0.75))
    table = results_table("test", find_runs([tmp_path / "outputs"])[0], [], {})
    assert "encoder before training of a" in table and "encoder before training of c" in table and "0.75" in table
