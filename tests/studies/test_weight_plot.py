import sys
from pathlib import Path

import pytest
import torch
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.studies import weight_plot
from soft_trainer.studies.weight_plot import Estimate, WeightPlotArguments

CASE_STUDY = Path(__file__).parents[2] / "recipes" / "paper" / "case_study.jsonl"


@pytest.fixture
def run(capsys, tmp_path):
    """Runs the command and returns its standard output; the picture is `tmp_path / "w.png"`."""

    def call(*options: str) -> str:
        run_command(["weights", "--output", str(tmp_path / "w.png"), *map(str, options)])
        return capsys.readouterr().out

    return call


def estimates(*similarities: torch.Tensor) -> list[Estimate]:
    return [Estimate("e", f"e{number}", one, (2 - one).exp()) for number, one in enumerate(similarities)]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.slow
def test_the_paper_s_case_study_under_bm25(run, tmp_path):
    out = run("--pairs", CASE_STUDY)
    assert out.startswith("Query: Extracts encoded genotype data from binary formatted file.")
    rows = [cells(line) for line in out.splitlines()[4:]]
    assert len(rows) == 8
    assert rows[0][0] == "=> Extracts encoded genotype data from binary formatted file." and rows[0][2] == "1.000"
    assert float(rows[0][1]) == max(float(row[1]) for row in rows)
    weight = {row[0]: float(row[2]) for row in rows[1:]}
    # Appendix D.2: BM25 takes the second negative for the most similar.
    assert min(weight, key=weight.get) == "Read the specified number of bytes from the stream."
    assert all(0.1 <= value < 2 for value in weight.values())
    assert (tmp_path / "w.png").read_bytes()[:4] == b"\x89PNG"


def test_each_estimator_s_own_settings_and_model(run, data_dir, encoder_dir):
    names, models = "bm25,simcse,trained_model", ",".join([str(encoder_dir)] * 2)
    rows = ("--data_dir", data_dir, "--batch_size", 12, "--query", 3, "--negatives", 5)
    header, _, *lines = run(*rows, "--estimators", names, "--estimator_model", models).splitlines()[2:]
    assert cells(header)[1::2] == [f"{name} similarity" for name in names.split(",")]
    assert len(lines) == 5 and all(len(cells(line)) == 7 for line in lines)
    arguments = WeightPlotArguments(estimators="simcse,trained_model", estimator_model=f"{encoder_dir},{encoder_dir}")
    kinds = {name: type(estimator).__name__ for name, estimator in weight_plot.choose_estimators(arguments).items()}
    assert kinds == {"simcse": "SimCSEEstimator", "trained_model": "TrainedModelEstimator"}


def test_weights_are_those_of_training(dataset):
    from soft_trainer import BM25Estimator, negative_weights

    one = weight_plot.estimate("bm25", BM25Estimator(), dataset)
    assert one.label == "bm25 (α 1.5, β 0.5, t 1)"
    assert torch.equal(one.weights, negative_weights(one.similarity, 1.5, 0.5, 1.0, floor=0.1))


def test_the_batch_is_drawn_by_the_seed(data_dir):
    def drawn(seed):
        arguments = WeightPlotArguments(data_dir=str(data_dir), batch_size=8, seed=seed)
        return weight_plot.batch_rows(arguments)["url"][:]

    assert drawn(0) == drawn(0) != drawn(1) and len(set(drawn(0))) == 8


def test_shown_are_the_query_whose_weights_differ_most_and_negatives_that_some_estimator_finds_similar():
    similarity = torch.zeros(4, 4)
    similarity[2, 3] = 5.0
    assert weight_plot.most_varied_query(estimates(similarity)) == 2
    first, second = torch.zeros(6, 6), torch.zeros(6, 6)
    first[0], second[0] = torch.tensor([9.0, 1, 5, 2, 3, 0]), torch.tensor([9.0, 1, 0, 2, 3, 5])
    assert set(weight_plot.chosen_negatives(estimates(first, second), 0, 2)) == {2, 5}
    assert weight_plot.chosen_negatives(estimates(first), 0, 3) == [2, 4, 3]
    assert 0 not in weight_plot.chosen_negatives(estimates(first, second), 0, 10)


def test_long_texts_and_signs_of_formulas_are_drawn_as_they_are():
    texts = ["sets $name to $value | " + "word " * 200, "a" * 500, "x_{", "short"]
    figure = weight_plot.draw_weights(estimates(torch.rand(4, 4)), texts, 0, [1, 2, 3])
    left, right = figure.axes
    labels = [label.get_text() for label in right.get_yticklabels()]
    assert labels[1:] == ["x_{", "short"] and labels[0].endswith("…")
    assert all(len(line) <= 60 for text in (*labels, right.get_title("left")) for line in text.splitlines())
    figure.canvas.draw()  # a formula that does not parse raises here
    box = figure.get_tightbbox()
    assert box.width <= figure.get_figwidth() + 0.01 and box.x0 >= -0.01
    table = weight_plot.negatives_table(estimates(torch.rand(4, 4)), texts, 1, [0])
    assert r"sets $name to $value \| word" in table


PAIRS = ["--pairs", CASE_STUDY]


@pytest.mark.parametrize(
    "options, says",
    [
        ([], "data_dir and pairs: give one of them"),
        (["--pairs", "no.jsonl"], "no.jsonl: cannot be read"),
        ([*PAIRS, "--query", "8"], "query=8: use 0 to 7"),
        ([*PAIRS, "--estimators", "bm26"], "estimator='bm26'"),
        ([*PAIRS, "--estimators", "none"], "none gives no weights"),
        ([*PAIRS, "--estimators", "bm25,bm25"], "different names"),
        ([*PAIRS, "--output", "/proc/w.png"], "cannot be written"),
        ([*PAIRS, "--negatives", "0"], "negatives=0: must be 1 or more"),
        (["--data_dir", "DATA", "--batch_size", "-3"], "batch_size=-3: must be 1 or more"),
        (["--data_dir", "DATA", "--seed", "-1"], "seed=-1: must be 0 or more"),
        (["--data_dir", "DATA"], "16 training rows, batch_size=32"),
        (["--pairs", "three.jsonl"], "3 rows are too few for bm25: take at least 5"),
        (["--pairs", "nameless.jsonl"], "no column for the query"),
    ],
)
def test_what_is_wrong_is_named(run, options, says, data_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("three.jsonl").write_text("".join(f'{{"docstring": "text {n}", "code": "x"}}\n' for n in range(3)))
    Path("nameless.jsonl").write_text('{"code": "x"}\n')
    with refused(says):
        run(*(data_dir if word == "DATA" else word for word in options))


def test_without_matplotlib_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with refused("soft-trainer[plots]"):
        run(*PAIRS)
    assert "| => Extracts encoded" in run(*PAIRS, "--output", "none")
