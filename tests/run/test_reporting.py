"""Progress is reported as lines, and as a bar only on a terminal."""

import re
import subprocess
import sys

import pytest
from transformers.utils.notebook import NotebookProgressCallback

from soft_trainer.run import reporting
from soft_trainer.system import terminal


def test_lines_show_the_step_the_loss_and_the_mrr(trainer_of, capsys):
    options = {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 4, "disable_tqdm": None, "logging_steps": 4}
    trainer_of(**options).train()
    output = capsys.readouterr()
    assert re.search(r"^step 4 of 8: loss \d+\.\d+, \d+ s left$", output.err, re.MULTILINE)
    assert re.search(r"^step 8 of 8: eval_mrr ", output.err, re.MULTILINE)
    assert "{" not in output.err and not output.out


METRICS = {"mrr": 0.5, "recall@1": 0.4, "recall@5": 0.6, "recall@10": 0.7, "pool_size": 10}


@pytest.mark.parametrize(
    ("queries", "change", "margin", "line"),
    [
        (120, 0.017, 0.0312, "120 queries are too few to show a change below 0.031"),
        (120, -0.04, 0.0312, None),
        (120, 0.0002, 0.0009, None),  # hardly a rank has changed
        (1200, 0.0002, 0.001, "1,200 queries are too few to show a change below 0.001"),
        (1, None, None, "one query is too few to show any change"),
    ],
)
def test_a_line_below_the_table_names_a_set_that_is_too_small(queries, change, margin, line):
    trained = METRICS | {"queries": queries}
    if change is not None:
        trained |= {"mrr_change": change, "mrr_change_margin": margin}
    text = reporting.results_text({"own": {"untrained": METRICS, "trained": trained}})
    below = [each for each in text.splitlines() if not each.startswith("|")]
    assert below == ([f"own: {line}"] if line else [])


def test_a_terminal_has_lines_above_its_bar_and_no_dictionaries(trainer_of, monkeypatch, capsys):
    monkeypatch.setattr("soft_trainer.run.reporting.shows_bars", lambda: True)
    trainer = trainer_of(max_steps=1, disable_tqdm=False, logging_steps=1)
    trainer.train()
    output = capsys.readouterr()
    assert "1/1" in output.err and "step 1 of 1: loss" in output.err
    assert any("loss" in entry for entry in trainer.state.log_history)
    assert "{" not in output.err + output.out


def test_a_notebook_keeps_its_table(trainer_of, monkeypatch):
    monkeypatch.setattr("transformers.trainer.DEFAULT_PROGRESS_CALLBACK", NotebookProgressCallback)
    monkeypatch.setattr("soft_trainer.run.reporting.shows_bars", lambda: True)
    callbacks = [type(one).__name__ for one in trainer_of(max_steps=1, disable_tqdm=False).callback_handler.callbacks]
    assert "NotebookProgressCallback" in callbacks and "ProgressLines" not in callbacks


def test_many_items_are_counted_by_a_bar_of_the_main_process(capsys):
    with terminal.progress_bar("Encoding code", 2000, "text") as bar:
        bar.update(200)
    assert bar.n == 200 and capsys.readouterr().err == ""  # without a terminal, not at once
    assert terminal.progress_bar(None, 2000, "text").disable


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", ["", "import run_codesearch"]
)  # importing the script's options imports the Hub's client
def test_libraries_show_no_bars_without_a_terminal(first):
    code = (
        f"{first}\nfrom soft_trainer.system.terminal import quiet_libraries; quiet_libraries()\n"
        "from datasets import Dataset; from transformers.utils import logging\n"
        "Dataset.from_list([{'a': 1}]).map(lambda row: row, desc='Tokenising'); list(logging.tqdm([1]))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
