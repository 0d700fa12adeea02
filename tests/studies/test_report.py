"""The report: which runs are read, what a cell is, what it is compared with, and the three files."""

import contextlib
import csv
import importlib.util
import io
import json
import re
import sys
from collections import Counter, defaultdict
from functools import partial
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import DatasetDict
from pandas import DataFrame
from refusals import refused

from soft_trainer import EstimatorCallback, SoftInfoNCETrainer, SoftInfoNCETrainingArguments
from soft_trainer.cli.__main__ import run_command
from soft_trainer.estimators.bm25 import BM25Estimator
from soft_trainer.evaluation.results import load_ranks
from soft_trainer.hub.model_card import write_model_card
from soft_trainer.options import fields
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.model import ModelArguments
from soft_trainer.record import Run
from soft_trainer.studies.compare import Pairing
from soft_trainer.studies.report.cells import PAPER, Cell, paper_mrr
from soft_trainer.studies.report.pictures import alpha_beta, pictures
from soft_trainer.studies.report.report import Best, make_report, markdown, mrr_table, sections
from soft_trainer.studies.significance import compare_paired, holm

GOOD, FAIR, BAD = [1, 1, 2, 1] * 10, [1, 2, 2, 1] * 10, [3, 2, 5, 4] * 10


def texts(table: DataFrame) -> list[list[str]]:
    """The entries without their notes and marks."""
    return [[entry.split(" (paper")[0].rstrip("†") for entry in row] for row in table.to_numpy().tolist()]


def write_study(make_run, soft):
    """Writes two seeds of InfoNCE and Soft-InfoNCE, another language, and an evaluation set of human queries."""
    for seed in (1, 2):
        make_run(f"info-{seed}", BAD if seed == 1 else FAIR, seed=seed)
        make_run(f"soft-{seed}", GOOD, soft(), seed=seed)
    make_run("go", FAIR, language="go")
    make_run("soft-go", GOOD, soft(), language="go", weights={"edges": [0, 0.5, 1.0], "counts": [3, 9]})
    return make_run("cosqa", FAIR, split="cosqa", seed=3).parent


@pytest.fixture
def study(make_run, soft):
    return write_study(make_run, soft)


@pytest.fixture
def report(tmp_path):
    """Reports on the runs of `make_run`."""
    return lambda: make_report([tmp_path / "outputs"])


# ---- What is read ----


def test_runs_are_found_below_folders_once_and_what_is_wrong_is_named(study, make_run, soft):
    make_run("soft-1-again", BAD, soft(), seed=1)
    (make_run("begun", GOOD) / "all_results.json").unlink()
    (make_run("broken", GOOD) / "all_results.json").write_text('{"half')
    (make_run("foreign", GOOD) / "all_results.json").write_text('{"train_loss": 1}')
    found = make_report([study, study / "info-1"])
    names = ["cosqa", "go", "info-1", "info-2", "soft-1", "soft-2", "soft-go"]
    assert sorted(run.folder.name for run in found.runs) == names
    reasons = {line.split(": ")[0].rsplit("/", 1)[-1]: line for line in found.left_out}
    assert "not finished" in reasons["begun"] and "cannot be read" in reasons["broken"]
    assert "it lacks 'results'" in reasons["foreign"]
    again = f"{study}/soft-1-again: the settings and the seed of {study}/soft-1"
    assert reasons["soft-1-again"] == again and len(reasons) == 4


@pytest.mark.parametrize(
    ("name", "words"), [("nowhere", "no such folder"), ("empty", "no finished run"), ("outputs", "measured nothing")]
)
def test_nothing_to_report_is_an_error(make_run, tmp_path, name, words):
    (tmp_path / "empty").mkdir()
    make_run("a", GOOD, results={"test": {}})
    with refused(words):
        make_report([tmp_path / name])


# ---- Cells ----


def test_seeds_are_averaged_settings_make_rows_and_languages_columns(study, make_run, soft, report):
    make_run("alpha", FAIR, soft(alpha=1.0), seed=1)
    table = mrr_table(report().main_cells)
    assert list(table) == ["Encoder", "Loss", "Estimator", "Settings", "Ruby", "Go"]
    mrr = {name: np.mean(1 / np.array(ranks)) for name, ranks in (("good", GOOD), ("fair", FAIR), ("bad", BAD))}
    assert texts(table) == [
        ["unixcoder-base", "InfoNCE", "", "", f"{(mrr['bad'] + mrr['fair']) / 2:.3f}", f"{mrr['fair']:.3f}"],
        ["unixcoder-base", "Soft-InfoNCE", "BM25", "alpha 1", f"{mrr['fair']:.3f}", ""],
        ["unixcoder-base", "Soft-InfoNCE", "BM25", "alpha 1.5", f"{mrr['good']:.3f}", f"{mrr['good']:.3f}"],
    ]
    best = [[isinstance(entry, Best) for entry in row[4:]] for row in table.to_numpy()]
    assert best == [[False] * 2, [False] * 2, [True] * 2]


def test_settings_that_differ_with_the_language_and_estimators_that_differ_with_the_seed_are_one_row(
    make_run, soft, report
):
    for language, rate in (("ruby", 1e-6), ("go", 2e-5)):
        make_run(language, GOOD, language=language, training={"learning rate": rate, "seed": 1})
    for seed in (1, 2):
        estimator = {"name": "trained_model", "estimator_model": f"outputs/info-{seed}"}
        make_run(f"t{seed}", GOOD, soft(), seed=seed, estimator=estimator)
    cells = report().main_cells
    assert len(texts(mrr_table(cells))) == 2
    (trained,) = (cell for cell in cells if len(cell.runs) > 1)
    assert [run.seed for run in trained.runs] == [1, 2]


def test_untrained_and_lexical_are_rows_without_comparison(make_run, report):
    make_run("plain", FAIR)
    make_run("lexical", BAD, system="lexical")
    assert [row[1] for row in texts(mrr_table(report().main_cells))] == ["none (lexical BM25)", "InfoNCE"]
    assert not report().compared


def test_data_sets_and_pools_of_one_language_are_columns_of_their_own(make_run, report):
    make_run("one", GOOD)
    make_run("two", GOOD, dataset="mined")
    assert mrr_table(report().main_cells).columns.tolist()[-2:] == ["Ruby (csn)", "Ruby (mined)"]


def test_a_run_in_several_languages_stands_in_the_columns_of_each(make_run, report):
    metrics = json.loads((make_run("ruby", BAD) / "all_results.json").read_text())["results"]["test"]
    fair = json.loads((make_run("both", FAIR) / "all_results.json").read_text())["results"]["test"]
    make_run("both", FAIR, languages=["ruby", "go"], results={"test-ruby": fair, "test-go": fair})
    found = report()
    assert {cell.evaluation for cell in found.cells} == {"test"}
    assert texts(mrr_table(found.main_cells)) == [
        ["unixcoder-base", "InfoNCE", "", "trained on ruby", f"{metrics['trained']['mrr']:.3f}", ""],
        ["unixcoder-base", "InfoNCE", "", "trained on ruby+go", "0.750", "0.750"],
    ]
    assert {cell.paper for cell in found.main_cells if len(cell.runs[0].record["languages"]) > 1} == {None}


# ---- The paper's figures ----


DEFAULT = {"alpha": 1.5, "beta": 0.5, "temperature": 1.0, "floor": 0.1}


@pytest.mark.parametrize(
    ("cell", "settings", "figure"),
    [
        ("unixcoder ruby soft_info_nce bm25", DEFAULT, 0.753),
        ("unixcoder ruby soft_info_nce bm25", DEFAULT | {"alpha": 1.0}, None),
        ("unixcoder ruby soft_info_nce bm25", DEFAULT | {"cancel": "top_k"}, None),
        ("graphcodebert go info_nce none", {}, 0.896),
        ("codebert overall kl_regularization simcse", {"infonce_weight": 1.3, "kl_weight": 0.7}, 0.648),
        ("graphcodebert python info_nce bm25", {"cancel": "ratio", "cancel_ratio": 0.7}, 0.689),
        ("auto ruby info_nce none", {}, None),
    ],
)
def test_the_paper_s_figure_is_found_by_encoder_language_loss_estimator_and_settings(cell, settings, figure):
    profile, language, loss, estimator = cell.split()
    runs = (SimpleNamespace(profile=profile, settings=settings),)
    made = Cell("test", "an encoder", "trained", loss, "", estimator, (), language, "csn", 60, runs)
    assert paper_mrr(made, language) == figure


def test_the_paper_s_tables_agree_with_one_another():
    rows = list(csv.DictReader(PAPER.open()))
    tables = {"overall": 72, "compareloss": 12, "appendixloss": 84, "table:fn": 6}
    assert Counter(row["table"] for row in rows) == tables
    key = ("encoder", "language", "loss", "estimator", "settings")
    figures = {tuple(row[name] for name in key): row["mrr"] for row in rows}
    assert all(figures[tuple(row[name] for name in key)] == row["mrr"] for row in rows)
    averaged = defaultdict(list)
    for row in rows:
        if row["table"] == "appendixloss":
            averaged[row["encoder"], row["loss"]].append(float(row["mrr"]))
    for *six, overall in averaged.values():
        assert len(six) == 6 and overall == pytest.approx(np.mean(six), abs=6e-4)
    assert len(averaged) == 12


def test_it_stands_beside_ours_but_not_beside_random_weights(make_run, report):
    make_run("one", GOOD)
    make_run("two", GOOD, base_model=None, encoder={"name": "unixcoder-64x1", "profile": "unixcoder"})
    assert mrr_table(report().main_cells).iloc[:, -1].tolist() == ["0.875 (paper 0.740)", "0.875"]


# ---- Differences ----


def test_each_cell_is_compared_with_infonce_over_the_seeds_of_both(study, make_run, soft, report):
    make_run("soft-3", BAD, soft(), seed=3)
    compared = report().compared
    (cell,) = (cell for cell in compared if cell.language == "ruby")
    ruby, every = cell.difference, [cell.difference for cell in compared]
    assert ruby.seeds == (1, 2) and len(cell.runs) == 3
    base = (1 / np.array(BAD) + 1 / np.array(FAIR)) / 2
    assert ruby.comparison == compare_paired(1 / np.array(GOOD), base)
    assert len(every) == 2 and [one.p for one in every] == holm([one.comparison.p for one in every]).tolist()
    assert [change.ranks for change in ruby.gained[:1]] == [((1, 1), (2, 2))] and not ruby.lost


def test_cancellation_is_compared_with_infonce_and_is_none_itself(make_run, report):
    make_run("plain", FAIR)
    make_run("cancelled", GOOD, {"loss": "info_nce", "estimator": "BM25Estimator", "cancel": "top_k", "cancel_k": 3})
    (cell,) = report().compared
    assert cell.cancel == "top_k 3" and cell.difference.baseline.runs[0].folder.name == "plain"


def test_the_baseline_with_the_same_training_is_taken_and_a_difference_is_named(make_run, soft, report):
    other = {"codes that each query meets": 64, "epochs": 30.0, "learning rate": 2e-5, "seed": 1}
    make_run("long", BAD, training=other)
    make_run("soft", GOOD, soft())
    assert [cell.difference.also for cell in report().compared] == [("epochs",)]
    assert "Also differs in" in sections(report())[1].table
    make_run("short", FAIR)
    (cell,) = report().compared
    assert cell.difference.baseline.runs[0].folder.name == "short" and not cell.difference.also


@pytest.mark.parametrize("change", [{"seed": 2}, {"dataset": "mined"}, {"language": "go"}])
def test_without_a_baseline_the_cell_is_named(make_run, soft, report, change):
    make_run("plain", FAIR)
    make_run("soft", GOOD, soft(), **change)
    assert not report().compared and "is not compared with InfoNCE" in report().left_out[0]


def test_lost_ranks_cost_the_comparison_not_the_report(study, report):
    (study / "soft-go" / "ranks-test-trained.parquet").unlink()
    assert len(report().compared) == 1 and "no ranks of test" in report().left_out[0]


# ---- The files ----


class Page(HTMLParser):
    """Tags, attributes and text of a page, and whether every tag is closed."""

    VOID = {"meta", "img", "br", "link"}

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def written(write_run, soft, tmp_path_factory):
    """The three files by suffix; "out" and "err" are what the command printed."""
    folder, printed = tmp_path_factory.mktemp("report"), (io.StringIO(), io.StringIO())
    study = write_study(partial(write_run, folder / "outputs"), soft)
    with contextlib.redirect_stdout(printed[0]), contextlib.redirect_stderr(printed[1]):
        run_command(["report", str(study), "--output_dir", str(folder / "report")])
    files = {path.suffix[1:]: path.read_text() for path in (folder / "report").iterdir()}
    return files | {"out": printed[0].getvalue(), "err": printed[1].getvalue()}


@pytest.mark.slow
def test_the_page_is_one_file_with_pictures_and_words_for_them(written):
    page = Page(written["html"])
    assert not page.open
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) >= 6
    assert all(one["src"].startswith("data:image/png;base64,") and len(one["alt"]) > 30 for one in images)
    addresses = {value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href")}
    assert all(one.startswith(("data:", "#")) for one in addresses)
    assert {one[1:] for one in addresses if one.startswith("#")} <= {attrs.get("id") for _, attrs in page.tags}
    assert not re.search(r"https?://|@import|url\(", written["html"])
    for words in ("prefers-color-scheme: dark", "MRR on cosqa", "Queries gained and lost most", "paper 0.740"):
        assert words in written["html"]
    assert any(one["alt"].startswith("Weights of the last logged step") for one in images)


@pytest.mark.slow
def test_the_csv_holds_every_cell_in_full(written):
    rows = list(csv.DictReader(written["csv"].splitlines()))
    ruby = next(row for row in rows if row["language"] == "ruby" and row["loss"] == "soft_info_nce")
    assert (ruby["seeds"], float(ruby["mrr"]), ruby["paper_mrr"]) == ("1 2", 0.875, "0.753")
    assert float(ruby["low"]) < float(ruby["delta"]) < float(ruby["high"]) and float(ruby["p_holm"]) < 0.01
    assert {row["evaluation"] for row in rows} == {"test", "cosqa"}


@pytest.mark.slow
def test_markdown_has_the_tables_and_the_queries_and_the_table_is_printed(written):
    assert "| unixcoder-base | Soft-InfoNCE | BM25" in written["md"] and "**0.875†** (paper 0.753)" in written["md"]
    assert "    +0.500  query 1\n      Soft-InfoNCE, BM25: rank 1, 1\n        => 1. def f1(): pass" in written["md"]
    assert "**0.875†** (paper 0.753)" in written["out"] and "report.html" in written["err"]


@pytest.mark.slow
def test_texts_are_never_markup(make_run, soft, tmp_path):
    evil = "<script>alert(1)</script> *a* | `b` $x_{"
    encoder = {"name": evil, "profile": "auto"}
    make_run("plain", FAIR, encoder=encoder, dataset=evil)
    folder = make_run("soft", GOOD, soft(estimator=evil), encoder=encoder, dataset=evil)
    run_command(["report", str(folder.parent), "--output_dir", str(tmp_path)])
    page = Page((tmp_path / "report.html").read_text())
    assert "script" not in {tag for tag, _ in page.tags} and evil in page.text
    table = markdown(DataFrame({"a": [evil]}))
    assert r"\<script>alert(1)\</script> \*a\* \| \`b\` $x\_{" in table and len(table.splitlines()) == 3


def test_what_cannot_be_written_is_named(study, tmp_path, monkeypatch):
    with refused("/proc/report: cannot be written"):
        run_command(["report", str(study), "--output_dir", "/proc/report"])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with refused("pip install 'soft-trainer[plots]'"):
        run_command(["report", str(study), "--output_dir", str(tmp_path / "report")])
    assert not (tmp_path / "report").exists()


def test_all_six_languages_get_an_overall_column_and_a_language_may_be_added(make_run, report, monkeypatch):
    for language in ("ruby", "python", "java", "javascript", "php", "go"):
        make_run(language, GOOD if language == "go" else FAIR, language=language)
    table = mrr_table(report().main_cells)
    assert list(table)[-3:] == ["PHP", "Go", "Overall"]
    assert texts(table)[0][-1] == f"{(5 * np.mean(1 / np.array(FAIR)) + 0.875) / 6:.3f}"
    monkeypatch.setattr(fields, "LANGUAGES", (*fields.LANGUAGES, "typescript"))
    spec = importlib.util.find_spec("soft_trainer.studies.report.report")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # as a new process imports it
    make_run("rust", GOOD, language="rust")
    assert list(module.mrr_table(report().main_cells))[-4:] == ["PHP", "Go", "Rust", "Overall"]


def test_alpha_and_beta_make_a_curve(make_run, soft, report):
    for alpha in (0.5, 1.0, 1.5):
        make_run(f"a{alpha}", GOOD if alpha == 1.0 else FAIR, soft(alpha=alpha, beta=2 - alpha))
    picture = alpha_beta(report().main_cells)
    assert "α + β = 2: 0.750 at α 0.5, 0.875 at α 1, 0.750 at α 1.5" in picture.alt
    assert alpha_beta(make_report([make_run("other", GOOD, soft(), language="go")]).main_cells) is None


# ---- The folder of a real run ----


@pytest.fixture
def run(model, tokenizer, profile, dataset, tmp_path):
    """Two steps of the tiny encoder on twenty rows, measured before and after."""
    data = DatasetDict(train=dataset.select(range(20)), test=dataset.select(range(20, 24)), codebase=dataset)
    args = SoftInfoNCETrainingArguments(
        output_dir=str(tmp_path / "run"), per_device_train_batch_size=10, num_train_epochs=1, logging_steps=1,
        save_strategy="no", use_cpu=True, report_to="none", disable_tqdm=True, seed=7,
        do_train=True, do_predict=True, cancel="top_k", cancel_k=1,
    )  # fmt: skip
    trainer = SoftInfoNCETrainer(
        model=model, args=args, train_dataset=data["train"], codebase=dataset, processing_class=tokenizer,
        encoder=profile, callbacks=[EstimatorCallback(BM25Estimator())],
    )  # fmt: skip
    made = Run(trainer, data, ModelArguments(model_name_or_path="a/tiny"), DataArguments(data_dir="some/rows"), {})
    made.measure("untrained")
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    made.measure("trained")
    made.finish()
    return tmp_path / "run"


def test_a_run_s_folder_is_reported(run):
    record = json.loads((run / "run.json").read_text())
    assert record["encoder"] | {"name": "tiny", "code_length": 32, "score_function": "cosine"} == record["encoder"]
    assert record["loss"] | {"loss": "soft_info_nce", "alpha": 1.5, "cancel": "top_k", "cancel_k": 1} == record["loss"]
    assert record["estimator"] == {"name": "bm25", "estimator_model": None}
    assert record["training"]["seconds a step"] == pytest.approx(record["training"]["train runtime, s"] / 2, abs=0.05)
    report = make_report([run])
    rows = [(cell.system, cell.cancel, cell.estimator) for cell in report.main_cells]
    assert rows == [("untrained", "", ""), ("trained", "top_k 1", "bm25")]
    assert [section.name for section in sections(report)] == ["results", "data", "runs", "left-out"]
    titles = [picture.title for (group,) in [pictures(report.main_cells).values()] for picture in group]
    assert titles[0] == "Training loss" and any(title.startswith("Weights") for title in titles)
    assert write_model_card(run, record) and "seconds a step" in (run / "README.md").read_text()


def test_its_ranks_show_their_texts(run, rows):
    ranked = load_ranks(run / "ranks-test-trained.parquet")
    assert ranked.pool_size == 24 and ranked.query(0) == rows[20]["docstring"]
    codes = {row["url"]: row["code"] for row in rows}
    assert ranked.rows["code"].to_pylist() == [codes[url] for url in ranked.urls]
    for row, urls in enumerate(ranked.rows["top_urls"].to_pylist()):
        assert ranked.top(row) == [(url == ranked.urls[row], codes[url]) for url in urls[:3]]
    assert len(Pairing([ranked], [load_ranks(run / "ranks-test-untrained.parquet")]).differences) == 4


def test_the_histogram_counts_the_negatives_alone():
    callback = EstimatorCallback(BM25Estimator())
    weights = torch.tensor([[1.0, 0.1, 0.9, 0.0], [1.3, 1.0, 0.1, 0.5]])
    callback.observe(weights, 0.1, torch.zeros(2, 4), torch.tensor([0, 1]))
    assert callback.histogram is None and callback.statistics()["weight_at_floor"] == pytest.approx(2 / 5)
    counts, edges = (np.array(callback.histogram[name]) for name in ("counts", "edges"))
    negatives = np.histogram([0.1, 0.9, 1.3, 0.1, 0.5], edges)[0]
    assert counts.tolist() == negatives.tolist() and edges[0] == 0 and edges[-1] == pytest.approx(1.3)
