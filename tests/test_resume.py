"""Runs that are killed at any moment and resumed give the same results as uninterrupted runs."""

import contextlib
import importlib.util
import os
import signal
import sys
from pathlib import Path

import forked
import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "kill_and_resume.py"


class ForkedRun:
    """The processes of a run, with the interface of `psutil.Popen` that the benchmark uses."""

    def __init__(self, argv: list[str], processes: int, log: Path):
        self.processes = forked.start_training(argv, [log] * processes)

    def poll(self) -> int | None:
        codes = [process.exitcode for process in self.processes]
        return None if None in codes else max(map(abs, codes))

    def wait(self) -> int:
        for process in self.processes:
            process.join(200)
        return self.poll()

    def children(self, recursive: bool) -> list:
        return []

    def suspend(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


@pytest.fixture
def benchmark(monkeypatch, tmp_path):
    """The benchmark, imported as a module. Its runs are forked processes with files in `tmp_path`."""
    spec = importlib.util.spec_from_file_location("kill_and_resume", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def start(folder, data, processes):
        return ForkedRun(module.argv_of(folder, data, processes), processes, folder / "log.txt")

    monkeypatch.setattr(module, "start", start)
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    return module


@pytest.mark.slow
def test_twelve_kills_leave_the_weights_of_a_run_that_was_never_stopped(benchmark, data_dir, monkeypatch, capsys):
    options = ["--data_dir", str(data_dir), "--batch_size", "8", "--kills", "12", "--on_two", "4"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    with pytest.raises(SystemExit) as stopped:
        benchmark.main()
    printed = capsys.readouterr()
    assert not stopped.value.code, stopped.value.code
    assert printed.out.count("equal") == 12, printed
    assert printed.out.count("killed after") >= 6, printed  # the other runs had ended before
