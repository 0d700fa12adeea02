"""The benchmarks run at their smallest size, on a few rows and without a GPU."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
PARTS = ("machine", "step", "step_of_model", "packed", "waits", "memory", "processes")  # all would take minutes
NEED_CUDA = ("waits", "memory")


def run(tmp_path: Path, script: str, *options: object) -> tuple[int, str]:
    """Runs a benchmark, and returns its exit code and what it printed."""
    command = [sys.executable, BENCHMARKS / script, *options, "--device", "cpu", "--tiny"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        list(map(str, command)), cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, timeout=3000
    )
    return done.returncode, done.stdout


@pytest.fixture
def parts(monkeypatch):
    """The module with the parts."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_parts

    return gpu_parts


@pytest.mark.slow
def test_parts_run_and_a_failed_one_does_not_stop_the_others(data_dir, tmp_path):
    options = ["--data_dir", data_dir, "--model", tmp_path / "missing", "--output", "out/gpu.json", "--patience", "20"]
    options += ["--parts", ",".join(PARTS)]
    code, printed = run(tmp_path, "gpu.py", *options)
    page = json.loads((tmp_path / "out/gpu.json").read_text())
    parts = page["parts"]
    expected = dict.fromkeys(parts, "done") | dict.fromkeys(NEED_CUDA, "skipped: no CUDA")
    expected["step_of_model"] = "failed with exit code 1"
    assert {name: part["status"] for name, part in parts.items()} == expected, printed
    assert {*parts} == {*PARTS} and code == 1
    assert page["goals"] == [], "a tiny encoder has no goals"
    assert not any(part.get("wrong") for part in parts.values()), printed
    assert "missing" in "\n".join(parts["step_of_model"]["log"])
    assert parts["machine"]["tables"][0]["rows"][-1] == ["passes", "packed"]
    for words in (
        "## processes: done",
        "| ours padded ",
        "not done: step_of_model; wrong results: none",
    ):
        assert words in printed, printed


@pytest.mark.slow
def test_a_part_that_takes_too_long_is_stopped(data_dir, tmp_path):
    options = ["--data_dir", data_dir, "--parts", "machine", "--patience", "0.02", "--output", tmp_path / "gpu.json"]
    code, printed = run(tmp_path, "gpu.py", *options)
    assert code == 1 and "## machine: stopped after 2 s" in printed, printed


@pytest.mark.slow
def test_the_goals_are_those_that_the_parts_measured(parts):
    import gpu

    result = parts.Result()
    result.goal("waits for the GPU in a step", "0", 0.5)
    assert gpu.goals({"machine": {}, "waits": result}) == [["waits for the GPU in a step", "0", 0.5]]


@pytest.mark.slow
def test_waits_are_counted_by_line(parts, monkeypatch):
    modes = []
    monkeypatch.setattr(parts.torch.cuda, "set_sync_debug_mode", modes.append)
    counter = parts.Waits(first=2, steps=3)

    def wait():
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    for step in range(8):
        counter.on_step_begin(None, SimpleNamespace(global_step=step), None)
        if 2 <= step < 5:
            wait()
            warnings.warn("something else", stacklevel=2)
        counter.on_step_end(None, SimpleNamespace(global_step=step + 1), None)
    assert modes == ["warn", "default"]
    ((line, number),) = counter.calls.items()
    assert number == 3 and line.startswith("tests/test_benchmarks.py:")


SMALLEST = {
    "step.py": (
        ["--data_dir", "ROWS", "--size", "32x1", "--lengths", "16,24", "--batch_sizes", "8"],
        "largest difference",
    ),
    "search.py": (["--folder", "TREE"], "query"),
    "kill_and_resume.py": (["--data_dir", "ROWS", "--batch_size", "4", "--kills", "1", "--on_two", "0"], "equal"),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SMALLEST)
def test_the_commands_of_the_pages_run(script, data_dir, tmp_path):
    options, expected = SMALLEST[script]
    where = {"ROWS": str(data_dir), "TREE": str(tmp_path / "tree")}
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "dates.py").write_text("def parse_date(text):\n    return text.split('-')\n")
    if script == "step.py":
        options = [
            *options,
            "--repetitions",
            "1",
            "--ways",
            "ours,sentence-transformers",
            "--dtype",
            "float32,bfloat16",
        ]
    command = [sys.executable, str(BENCHMARKS / script), *(where.get(option, option) for option in options)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr
