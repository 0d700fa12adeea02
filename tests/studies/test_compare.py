"""Two runs are compared by their files of ranks, and two methods over several sets and seeds."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from refusals import refused
from scipy import sparse

from soft_trainer.cli.__main__ import run_command
from soft_trainer.data.split import Judgments, Split
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.evaluation.ranked_queries import RankedQueries, load_ranks
from soft_trainer.evaluation.ranking import Ranking
from soft_trainer.evaluation.results import save_ranks
from soft_trainer.evaluation.retrieval import RetrievalOutput
from soft_trainer.evaluation.significance import Comparison, Interval, compare_paired, reciprocal_ranks
from soft_trainer.studies.compare import Pairing, verdict
from soft_trainer.system.terminal import shortened


def shuffled(ranked: RankedQueries, seed: int) -> RankedQueries:
    order = np.random.default_rng(seed).permutation(len(ranked.ranks))
    return RankedQueries(ranked.path, ranked.rows.take(order))


@pytest.fixture
def ranked(make_run):
    """Writes runs with these ranks, and reads the ranks back from each folder."""

    def make(*runs, **options):
        folders = [make_run(f"run-{number}", ranks, **options) for number, ranks in enumerate(runs)]
        return [load_ranks(folder / "ranks-test-trained.parquet") for folder in folders]

    return make


def test_the_command_says_how_much_how_sure_and_which_queries(make_run, capsys):
    a, b = make_run("a", [1, 2, 1, 9, 5] * 4), make_run("b", [1, 1, 4, 9, 5] * 4)
    run_command(["compare", str(a), str(b), "--number", "5"])
    out = capsys.readouterr().out
    expected = compare_paired(reciprocal_ranks([1, 2, 1, 9, 5] * 4), reciprocal_ranks([1, 1, 4, 9, 5] * 4))
    assert f"A - B: MRR {expected.delta:+.4f}" in out and "wins 4, losses 4, ties 12 of 20 queries" in out
    assert f"({expected.interval.low:+.4f} to {expected.interval.high:+.4f}), p = {expected.p:.3f}" in out
    assert out.startswith("Neither is clearly better: A ")
    assert "5 largest changes" in out and "+0.750  query 2" in out and "-0.500  query 1" in out
    block = out[out.index("+0.750  query 2") :].split("\n\n")[0].splitlines()
    assert block[1:3] == ["  A: rank 1", "    => 1. def f2(): pass"] and block[5] == "  B: rank 4"
    assert not any("=>" in line for line in block[5:])


@pytest.mark.parametrize(
    "a, b, interval, p, changed, line",
    [
        (
            0.5,
            0.4,
            (0.05, 0.15),
            0.01,
            20,
            "For this seed, A is better: 0.500 against 0.400, +0.100 (+0.050",
        ),
        (
            0.166,
            0.376,
            (-0.241, -0.18),
            0,
            99,
            "For this seed, B is better: 0.376 against 0.166, +0.210 (+0.180",
        ),
        (0.5, 0.4, (-0.01, 0.21), 0.07, 20, "Neither is clearly better: A 0.500, B 0.400, A - B +0.100 (-0.010 to"),
        (0.5, 0.4, (0.01, 0.19), 0.06, 20, "Neither is clearly better: A 0.500, B 0.400"),
        (0.5, 0.4, (0.01, 0.19), 0.04, 9, "Only 9 queries changed rank, too few to tell"),
    ],
)
def test_a_comparison_begins_with_its_verdict(a, b, interval, p, changed, line):
    assert line in verdict(a, b, Comparison(a - b, Interval(*interval), p, changed, 0, 100))


def test_queries_are_paired_by_url_whatever_their_order(ranked):
    a, b = ranked([1, 2, 3, 4], [2, 2, 1, 8])
    plain, mixed = Pairing([a], [b]), Pairing([a], [shuffled(b, 1)])
    assert mixed.differences.tolist() == plain.differences.tolist() == pytest.approx([0.5, 0, -2 / 3, 1 / 8])
    assert mixed.changes() == plain.changes()


def test_several_seeds_are_averaged_by_query(ranked):
    runs = ranked([1, 2], [2, 4], [4, 1], [4, 2])
    pairing = Pairing(runs[:2], runs[2:])
    assert pairing.differences.tolist() == pytest.approx([0.75 - 0.25, 0.375 - 0.75])
    assert "A: rank 1, 2\n" in pairing.changes(1)[0] and "B: rank 4, 4\n" in pairing.changes(1)[0]


def test_a_shortened_text_ends_with_a_word_or_a_part_of_one():
    assert shortened("sort a list", 6) == "sort…"
    assert shortened("sort a list", 8) == "sort a…"
    assert shortened(" sort\na  list ", 11) == "sort a list"
    assert shortened("查询" * 200, 300) == ("查询" * 200)[:299] + "…"  # without spaces


def test_what_cannot_be_paired_is_refused(make_run, write_ranks, tmp_path):
    folder = make_run("a", [1, 2, 3])
    write_ranks(tmp_path / "more.parquet", [1, 2, 3, 4])
    write_ranks(tmp_path / "pool.parquet", [1, 2, 3], pool=70)
    write_ranks(tmp_path / "ids.parquet", [1, 2, 3], other=1)
    (tmp_path / "text.parquet").write_text("no parquet")
    for name, says in {
        "more.parquet": "the queries differ (3 and 4, 3 in both)",
        "pool.parquet": "the corpora of 60 and 70 functions differ",
        "ids.parquet": "the corpora of 60 and 60 functions differ",
        "text.parquet": "cannot be read",
        "nowhere": "no such folder or file",
    }.items():
        with refused(says):
            run_command(["compare", str(folder), str(tmp_path / name)])
    with refused("no ranks of valid by trained (files of ranks: ranks-test-trained"):
        run_command(["compare", str(folder), str(folder), "--split", "valid"])


def test_a_file_of_ranks_stands_for_a_run_but_not_that_of_another_version(make_run, tmp_path, capsys):
    folder, old = make_run("a", [1, 2, 3]), tmp_path / "old.parquet"
    run_command(["compare", str(folder), str(folder / "ranks-test-trained.parquet")])
    assert "A - B: MRR +0.0000" in capsys.readouterr().out
    pq.write_table(pq.read_table(folder / "ranks-test-trained.parquet").drop_columns(["key"]), old)
    with refused("old.parquet: not the ranks of a run, or written by another version"):
        run_command(["compare", str(folder), str(old)])


def saved(path, columns=("docstring",), **changes):
    """Writes the ranks of three queries and reads them. `changes` replaces columns of the queries or the corpus."""
    urls = {"url": ["a", "b", "c"]}
    queries = urls | {"docstring": ["read a", "read b", "read c"], "docstring_tokens": [["read"], ["b"], ["c"]]}
    corpus = urls | {"code": ["def a(): 1", "def b(): 2", "def c(): 3"]}
    queries |= {name: values for name, values in changes.items() if name in queries}
    corpus |= {name: values for name, values in changes.items() if name in corpus}
    split = Split.from_urls(Dataset.from_dict(queries), Dataset.from_dict(corpus))
    ranking = Ranking(torch.ones(3), torch.eye(3).long(), torch.ones(3, 3))
    save_ranks(path, split, RetrievalOutput(ranking, {}), EncoderProfile(query_columns=columns))
    return load_ranks(path)


def test_every_relevant_function_is_marked(tmp_path):
    texts = ["read a", "read b", "read c"]
    queries = Dataset.from_dict({"_id": texts, "docstring": texts})
    corpus = Dataset.from_dict({"url": ["a", "b", "c"], "code": ["def a(): 1", "def b(): 2", "def c(): 3"]})
    split = Split(queries, corpus, Judgments(sparse.csr_matrix(np.float32([[2, 0, 1], [0, 1, 0], [1, 1, 1]]))))
    for name, rank in (("a", 1), ("b", 2)):
        top = torch.tensor([[2, 1, 0], [1, 0, 2], [0, 1, 2]])
        ranking = Ranking(torch.tensor([rank] * 3), top, torch.ones(3, 3))
        save_ranks(tmp_path / f"{name}.parquet", split, RetrievalOutput(ranking, {}), EncoderProfile())
    pairing = Pairing(*([load_ranks(tmp_path / f"{name}.parquet")] for name in "ab"))
    first, second, third = pairing.changes()
    assert "    => 1. def c(): 3\n       2. def b(): 2\n    => 3. def a(): 1" in first
    assert second.count("=>") == 2 and third.count("=>") == 6  # the same functions for each system


def test_equal_urls_with_other_texts_are_another_set(tmp_path):
    a = saved(tmp_path / "a.parquet")
    long = "read " * 100
    with refused("the queries differ (3 and 3, 2 in both)"):
        Pairing([a], [saved(tmp_path / "b.parquet", docstring=["read a", "read b", "another"])])
    with refused("the queries differ (3 and 3, 2 in both)"):  # after the part that a report shows
        pair = [saved(tmp_path / name, docstring=[long + name, "read b", "read c"]) for name in ("d", "e")]
        Pairing(pair[:1], pair[1:])
    with refused("the corpora of 3 and 3 functions differ"):
        Pairing([a], [saved(tmp_path / "b.parquet", code=["def a(): 1", "def b(): 2", "def c(): 4"])])


def test_encoders_that_read_other_columns_are_compared_on_the_same_queries(tmp_path):
    Pairing([saved(tmp_path / "a.parquet")], [saved(tmp_path / "b.parquet", columns=("docstring_tokens",))])
