"""The training script end to end, and its error messages."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import forked
import pytest

from soft_trainer import SoftInfoNCETrainer
from soft_trainer.options.parse import as_argv
from soft_trainer.run.folder import mark_complete
from soft_trainer.run.interruption import how_to_continue

SCRIPT = Path(__file__).parents[1] / "run_codesearch.py"
TINY = {
    "language": "python",
    "from_scratch": "32x1",
    "vocabulary_size": 400,
    "query_length": 16,
    "code_length": 32,
    "per_device_train_batch_size": 8,
    "num_train_epochs": 2,
    "learning_rate": 1e-3,
    "use_cpu": "true",
}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    """Keeps caches out of the home folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def folder(data_dir, tmp_path):
    """A copy of the tiny data set that tests may change."""
    return Path(shutil.copytree(data_dir, tmp_path / "data"))


def test_ctrl_c_is_one_line_and_exit_code_130(script, data_dir, monkeypatch):
    def interrupt(self, model, inputs, num_items_in_batch=None):
        if self.state.global_step == 2:
            raise KeyboardInterrupt
        return step(self, model, inputs, num_items_in_batch)

    step = SoftInfoNCETrainer.training_step
    monkeypatch.setattr(SoftInfoNCETrainer, "training_step", interrupt)
    options = TINY | {"data_dir": data_dir, "output_dir": "out", "save_strategy": "steps", "save_steps": 1}
    code, lines = script(**options)
    assert code == 130 and not any("Traceback" in line for line in lines)
    assert lines[-1].startswith("interrupted at step 2: to continue from out/checkpoint-2, run ")
    assert "resume_from_checkpoint='last'" in lines[-1]


def test_an_interruption_tells_how_to_continue_a_run_that_overwrites(tmp_path):
    mark_complete(tmp_path / "checkpoint-2", {})
    args = SimpleNamespace(output_dir=str(tmp_path), overwrite=True)
    assert how_to_continue(args, step=0) == "the output folder is unchanged"
    assert "checkpoint-2, run the same command without --overwrite true; in Python" in how_to_continue(args, step=2)
    args.overwrite = False
    assert "checkpoint-2, run the same command; in Python" in how_to_continue(args, step=2)


@pytest.mark.parametrize("before", ["shell.opening.load_data", "run.measurements.Measurements.measure"])
def test_ctrl_c_outside_of_training_is_one_line_too(script, data_dir, monkeypatch, before):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"soft_trainer.{before}", interrupt)
    code, lines = script(**TINY, data_dir=data_dir, output_dir="out")
    assert code == 130 and lines[-1].startswith("interrupted") and not any("Traceback" in line for line in lines)


def rows_of(folder: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def write(folder: Path, split: str, rows: list[dict]) -> None:
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- As a process ----


def start(*argv: str, folder: Path) -> subprocess.CompletedProcess:
    return forked.run([SCRIPT, *argv], os.environ | {"HF_DATASETS_CACHE": str(folder / "cache")}, folder)


def start_interpreter(*argv: str, folder: Path) -> subprocess.CompletedProcess:
    """Starts the script in a new interpreter without earlier imports and with another hash seed."""
    environment = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "PYTHONPATH": str(SCRIPT.parent)}
    command = [sys.executable, str(SCRIPT), *argv]
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=300)


@pytest.fixture(scope="module")
def finished(data_dir, tmp_path_factory):
    """The output and the output folder of a whole run in a separate process."""
    folder = tmp_path_factory.mktemp("run")
    recipe = folder / "recipe.yaml"
    recipe.write_text("".join(f"{name}: {value}\n" for name, value in TINY.items()))
    argv = ["--config", str(recipe), "--data_dir", str(data_dir), "--output_dir", "out", "--examples", "2"]
    argv += ["--score_function", "cosine", "--score_scale", "20", "--bf16", "false"]  # forked runs are in float32
    done = start_interpreter(*argv, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stderr, folder / "out"


@pytest.mark.slow
def test_a_run_prints_what_is_in_the_data_what_it_trains_and_what_came_of_it(finished):
    printed, _ = finished
    for words in ("functions compared per query", "BM25Estimator", "cosine x 20", "float32"):
        assert words in printed
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()]
    settings = {cells[0]: cells[1] for cells in lines if len(cells) == 2}
    assert [float(settings[name]) for name in ("alpha", "beta", "temperature")] == [1.5, 0.5, 1.0]
    systems = [(cells[0], cells[1]) for cells in lines if cells[0] in ("valid", "test") and len(cells) == 8]
    assert systems == [
        (split, f"{system}")
        for split in ("valid", "test")
        for system in ("encoder before training", "BM25", "encoder after training", "encoder + BM25")
    ]
    assert "find the largest element" in printed and "flatten a nested list" in printed
    assert "merge two dictionaries" not in printed


@pytest.mark.slow
def test_a_run_writes_its_results_and_every_rank(finished, data_dir):
    import pyarrow.parquet as pq

    _, out = finished
    results = json.loads((out / "run.json").read_text())["results"]
    assert set(results) == {"valid", "test"}
    for split, systems in results.items():
        assert set(systems) == {"untrained", "lexical", "trained", "combined"}
        for system, metrics in systems.items():
            ranks = pq.read_table(out / f"ranks-{split}-{system}.parquet")
            assert ranks["url"].to_pylist() == [row["url"] for row in rows_of(data_dir, split)]
            reciprocal = [1 / rank for rank in ranks["rank"].to_pylist()]
            assert metrics["mrr"] == pytest.approx(sum(reciprocal) / 4)
            assert metrics["pool_size"] == 24
    assert not list(out.rglob("*.tmp")) and not list(out.glob("*.bin"))


@pytest.mark.slow
def test_the_same_run_again_gives_the_same_figures(finished, data_dir, tmp_path):
    _, out = finished
    first = json.loads((out / "run.json").read_text())["results"]["test"]["trained"]["mrr"]
    argv = as_argv(TINY | {"data_dir": data_dir, "score_function": "cosine", "score_scale": 20, "lexical": "false"})
    again = start(*argv, "--output_dir", str(tmp_path / "again"), folder=tmp_path)
    assert again.returncode == 0, again.stderr
    results = json.loads((tmp_path / "again/run.json").read_text())["results"]
    assert results["test"]["trained"]["mrr"] == first and set(results["test"]) == {"untrained", "trained"}


@pytest.mark.slow
def test_the_default_output_folder_is_named_after_the_run(script, data_dir, tmp_path):
    options = TINY | {"data_dir": data_dir, "max_steps": 1, "lexical": "false", "save_strategy": "no"}
    assert script(**options)[0] == 0
    assert (tmp_path / "outputs/scratch-32x1-python-soft_info_nce-bm25/model.safetensors").is_file()
    assert script(**options, estimator="none")[0] == 0
    assert (tmp_path / "outputs/scratch-32x1-python-info_nce-none/model.safetensors").is_file()


@pytest.mark.slow
def test_several_languages_train_together_are_measured_apart_and_their_mean_chooses(script, folder, tmp_path):
    for language in ("ruby", "go"):
        (tmp_path / language).mkdir()
        for split in ("train", "valid", "test", "codebase"):
            own = rows_of(folder, split)
            # A query of the smaller corpus is not compared with the codes of the larger one.
            own = own[:8] + own[16:] if (language, split) == ("go", "codebase") else own
            own = own[:2] if (language, split) == ("go", "valid") else own
            changed = [row | {"url": f"{language}/{row['url']}", "language": language} for row in own]
            write(tmp_path / language, split, changed)
    options = TINY | {"language": "ruby,go", "data_dir": tmp_path / "{language}", "output_dir": tmp_path / "out"}
    options |= {"train_sampling_strategy": "one_language", "eval_strategy": "epoch", "load_best_model_at_end": "true"}
    code, lines = script(**options, lexical="false")
    assert code == 0, lines
    state = json.loads((tmp_path / "out/trainer_state.json").read_text())
    record = json.loads((tmp_path / "out/run.json").read_text())
    results = record["results"]
    assert record["languages"] == ["ruby", "go"]
    assert set(results) == {"valid-ruby", "valid-go", "test-ruby", "test-go"}
    assert results["test-ruby"]["trained"]["pool_size"] == 24
    reported = [results[f"valid-{language}"]["trained"] for language in ("ruby", "go")]
    assert [metrics["pool_size"] for metrics in reported] == [24, 16]
    assert state["best_metric"] == pytest.approx(sum(metrics["mrr"] for metrics in reported) / 2, abs=1e-9)
    logged = next(entry for entry in state["log_history"] if "eval_mrr" in entry)
    assert logged["eval_mrr"] == pytest.approx((logged["eval_ruby_mrr"] + logged["eval_go_mrr"]) / 2, abs=1e-9)
