"""Killed at any moment, resumed, and nothing is different in the end."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "kill_and_resume.py"


@pytest.mark.slow
def test_three_kills_leave_the_weights_of_a_run_that_was_never_stopped(data_dir):
    options = ["--data_dir", str(data_dir), "--batch_size", "8", "--kills", "3", "--on_two", "1"]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("equal") == 3
