"""mteb measures our folders as sentence-transformers loads them: its own tasks, and the example's own rows."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.data.judgments import Split

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "mteb_own_rows.py"
HERE = ["--use_cpu", "true", "--disable_tqdm", "true"]


@pytest.fixture(scope="module")
def example():
    """The example as a module, imported here because mteb takes three seconds."""
    spec = importlib.util.spec_from_file_location("mteb_own_rows", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def benchmarks():
    return importlib.import_module("soft_trainer.evaluation.benchmarks")


def test_the_example_measures_own_rows_as_we_do(example, encoder_dir, data_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(encoder_dir), str(data_dir)])
    example.main()
    theirs = dict(re.findall(r"^(\w+): ([\d.]+)$", capsys.readouterr().out, re.MULTILINE))
    words = ["--data_dir", str(data_dir), "--output_dir", str(tmp_path / "out"), "--lexical", "false", *HERE]
    assert run_command(["evaluate", str(encoder_dir), *words]) == 0
    ours = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert ours["test_mrr"] == pytest.approx(float(theirs["mrr_at_1000"]), abs=1e-4)
    assert ours["test_recall@10"] == pytest.approx(float(theirs["recall_at_10"]), abs=1e-4)


def test_the_example_names_what_it_needs():
    header = re.search(r"^# /// script\n(.*?)^# ///$", EXAMPLE.read_text(), re.MULTILINE | re.DOTALL)[1]
    assert 'dependencies = ["soft-trainer[mteb]"]' in header


def test_the_command_prints_a_table_and_keeps_each_result(
    benchmarks, example, encoder_dir, data_dir, tmp_path, monkeypatch, capsys
):
    data = example.load_rows(data_dir)
    own = example.OwnRows(Split.from_urls(data["test"], data["codebase"]))
    monkeypatch.setattr(benchmarks.mteb, "get_task", lambda name: own)
    words = ["evaluate", str(encoder_dir), "--mteb", "Own", "--output_dir", str(tmp_path / "out"), *HERE]
    assert run_command(words) == 0
    [*_, line] = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in line.split("|")][1:3] == ["OwnRows", "ndcg_at_10"]
    assert len(list((tmp_path / "out").rglob("OwnRows.json"))) == 1


def test_names_are_found_and_unknown_ones_and_data_out_of_reach_are_one_line(benchmarks, encoder_dir):
    names = [task.metadata.name for task in benchmarks.find_tasks("CosQA, MTEB(Code, v1)")]
    assert len(names) == 13 and names[0] == "CosQA"
    for name in ("NoSuchTask", "MTEB(Code)"):
        with refused(f"mteb={name}: no task or benchmark"):
            run_command(["evaluate", str(encoder_dir), "--mteb", name, *HERE])
    with refused("CosQA: mteb cannot load its data", "needs the network once"):
        run_command(["evaluate", str(encoder_dir), "--mteb", "CosQA", *HERE])
