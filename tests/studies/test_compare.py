"""Comparing two runs by their files of ranks."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.evaluation.results import RankedQueries, load_ranks
from soft_trainer.studies.compare import Pairing
from soft_trainer.studies.significance import compare_paired, reciprocal_ranks


def shuffled(ranked: RankedQueries, seed: int) -> RankedQueries:
    order = np.random.default_rng(seed).permutation(len(ranked.urls))
    return RankedQueries(ranked.path, ranked.rows.take(order))


@pytest.fixture
def ranked(make_run):
    """Writes runs with these ranks, and reads each back from its folder."""

    def make(*runs, **options):
        folders = [make_run(f"run-{number}", ranks, **options) for number, ranks in enumerate(runs)]
        return [load_ranks(folder / "ranks-test-trained.parquet") for folder in folders]

    return make


def test_the_command_says_how_much_how_sure_and_which_queries(make_run, capsys):
    a, b = make_run("a", [1, 2, 1, 9, 5] * 4), make_run("b", [1, 1, 4, 9, 5] * 4)
    run_command(["compare", str(a), str(b), "--number", "5"])
    out = capsys.readouterr().out
    expected = compare_paired(reciprocal_ranks([1, 2, 1, 9, 5] * 4), reciprocal_ranks([1, 1, 4, 9, 5] * 4))
    assert f"delta MRR {expected.delta:+.4f}" in out and "wins 4, losses 4, ties 12 of 20 queries" in out
    assert f"{expected.interval.low:+.4f} to {expected.interval.high:+.4f}, p = {expected.p:.3f}" in out
    assert "5 largest changes" in out and "+0.750  query 2" in out and "-0.500  query 1" in out
    block = out[out.index("+0.750  query 2") :].split("\n\n")[0].splitlines()
    assert block[1:3] == ["  A: rank 1", "    => 1. def f2(): pass"] and block[5] == "  B: rank 4"
    assert not any("=>" in line for line in block[5:])


def test_queries_are_paired_by_url_whatever_their_order(ranked):
    a, b = ranked([1, 2, 3, 4], [2, 2, 1, 8])
    plain, mixed = Pairing([a], [b]), Pairing([a], [shuffled(b, 1)])
    assert mixed.differences.tolist() == plain.differences.tolist() == pytest.approx([0.5, 0, -2 / 3, 1 / 8])
    assert mixed.changes() == plain.changes()
    assert [change.query for change in mixed.changes(9, -1)] == ["query 2"]


def test_several_seeds_are_averaged_by_query(ranked):
    runs = ranked([1, 2], [2, 4], [4, 1], [4, 2])
    pairing = Pairing(runs[:2], runs[2:])
    assert pairing.differences.tolist() == pytest.approx([0.75 - 0.25, 0.375 - 0.75])
    assert pairing.changes(1)[0].ranks == ((1, 2), (4, 4))


def test_without_texts_the_urls_are_shown(ranked):
    a, b = ranked([1, 2], [2, 2], texts=False)
    (change,) = Pairing([a], [b]).changes()
    assert change.query == "u0" and change.tops[0][0] == (True, "u0")


def test_what_cannot_be_paired_is_refused(make_run, write_ranks, tmp_path):
    folder = make_run("a", [1, 2, 3])
    write_ranks(tmp_path / "more.parquet", [1, 2, 3, 4])
    write_ranks(tmp_path / "pool.parquet", [1, 2, 3], pool=70)
    write_ranks(tmp_path / "ids.parquet", [1, 2, 3], other=1)
    (tmp_path / "text.parquet").write_text("no parquet")
    for name, says in {
        "more.parquet": "the queries differ (3 and 4, 3 in both)",
        "pool.parquet": "the corpora differ: 60 and 70 codes",
        "ids.parquet": "the corpora differ: 60 codes in each, but not the same",
        "text.parquet": "cannot be read",
        "nowhere": "no such folder or file",
    }.items():
        with refused(says):
            run_command(["compare", str(folder), str(tmp_path / name)])
    with refused("no ranks of valid by the trained encoder; files of ranks: ranks-test-trained"):
        run_command(["compare", str(folder), str(folder), "--split", "valid"])


def test_a_file_of_ranks_stands_for_a_run_even_if_it_does_not_name_its_codes(make_run, write_ranks, tmp_path, capsys):
    folder, old = make_run("a", [1, 2, 3]), tmp_path / "old.parquet"
    run_command(["compare", str(folder), str(folder / "ranks-test-trained.parquet")])
    assert "delta MRR +0.0000" in capsys.readouterr().out
    write_ranks(old, [1, 2, 3], other=1)
    rows = pq.read_table(old)
    pq.write_table(rows.replace_schema_metadata({"pool_size": rows.schema.metadata[b"pool_size"]}), old)
    run_command(["compare", str(folder), str(old)])
    printed = capsys.readouterr()
    assert "delta MRR +0.0000" in printed.out
    assert "warning: old.parquet does not say which codes it ranked" in printed.err.replace(f"{tmp_path}/", "")
