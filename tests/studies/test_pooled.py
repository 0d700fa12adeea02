"""Two methods over several sets and seeds: pairs by pattern, and a bootstrap over seeds and queries."""

import numpy as np
import pytest
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.studies.pooled import compare_patterns
from soft_trainer.studies.significance import paired_bootstrap, stratified_bootstrap


@pytest.fixture
def study(make_run, tmp_path):
    """Two methods, two seeds, and two sets, of which the second has one more query."""
    ranks = {
        ("ruby", "ours"): ([1, 2, 4], [1, 1, 4]),
        ("ruby", "other"): ([1, 4, 4], [2, 2, 4]),
        ("go", "ours"): ([1, 1, 2, 2], [1, 1, 1, 2]),
        ("go", "other"): ([1, 2, 2, 2], [1, 1, 1, 2]),
    }
    for (language, method), seeds in ranks.items():
        for seed, values in enumerate(seeds):
            make_run(f"{language}/{method}/{seed}", values, language=language)
    return tmp_path / "outputs"


def patterns(study) -> tuple[str, str]:
    return f"{study}/*/ours/*", f"{study}/*/other/*"


def test_runs_are_paired_by_the_text_in_place_of_the_stars(study):
    pooled = compare_patterns(*patterns(study))
    sets = [(each.name, each.seeds, each.differences.shape) for each in pooled.sets]
    assert sets == [("go/test", 2, (2, 4)), ("ruby/test", 2, (2, 3))]
    assert pooled.sets[1].differences.tolist() == [[0, 1 / 4, 0], [1 / 2, 1 / 2, 0]]
    ours = [1, 1, 3 / 4, 1 / 2, 1, 3 / 4, 1 / 4]
    assert pooled.means[0] == pytest.approx(np.mean(ours))


def test_the_command_prints_a_line_for_each_set_and_one_for_all(study, capsys):
    run_command(["compare", *patterns(study)])
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]
    assert [row[0] for row in rows] == ["go/test", "ruby/test", "all"]
    assert rows[-1][2] == "7" and rows[-1][-1].startswith("+0.1250 (")
    assert lines[-1].startswith("p ")


def test_corpora_of_equal_size_are_sets_apart_and_a_run_without_a_partner_is_named(study, make_run, write_ranks):
    for method in ("ours", "other"):
        write_ranks(study / f"go/{method}/1/ranks-test-trained.parquet", [1, 1, 1, 2], other=1)
    sets = [(each.name, each.seeds) for each in compare_patterns(*patterns(study)).sets]
    assert sets == [("go/0/test", 1), ("go/1/test", 1), ("ruby/test", 2)]
    make_run("php/ours/0", [1, 2])
    for other, words in (
        ("*/other/*", ["php/ours/0: no run of ", "other", " is its partner"]),
        ("*/nothing/*", ["nothing/", ": no such folders"]),
        ("ruby/other/0", ["write * in place"]),
    ):
        with refused(*words):
            compare_patterns(f"{study}/*/ours/*", f"{study}/{other}")


def test_a_set_that_some_runs_have_is_taken_from_those(study, write_ranks):
    for method, ranks in (("ours", [1, 2]), ("other", [2, 2])):
        for seed in (0, 1):
            write_ranks(study / f"go/{method}/{seed}/ranks-valid-trained.parquet", ranks)
    pooled = compare_patterns(*patterns(study), split="valid,test")
    assert [each.name for each in pooled.sets] == ["go/valid", "go/test", "ruby/test"]
    (study / "go/ours/0/ranks-valid-trained.parquet").unlink()
    with refused("go/ours/0: no ranks of valid"):
        compare_patterns(*patterns(study), split="valid,test")


def test_the_interval_is_over_queries_and_seeds_and_a_larger_set_counts_for_more():
    differences = np.random.default_rng(0).normal(0.1, 1, 300)
    alone = stratified_bootstrap([differences[None]])
    assert np.allclose(alone[:2], paired_bootstrap(differences, np.zeros(300))[:2], atol=0.01)
    # With equal queries and seeds of +1 and -1 only the seeds vary, so the mean is -1, 0 or 1.
    for second, expected in ((-1.0, (-1, 1)), (1.0, (1, 1))):
        interval = stratified_bootstrap([np.array([[1.0] * 50, [second] * 50])])
        assert (interval.low, interval.high) == expected
    interval = stratified_bootstrap([np.full((3, 30), 1.0), np.full((3, 10), 0.0)])
    assert interval.low == interval.high == pytest.approx(0.75)
