"""Studies: runs in order, started by a stand-in for `accelerate launch`, skipped, stopped, failed and resumed."""

import fcntl
import json
import os
import re
import signal
import sys
import threading
import time

import pytest
import yaml
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.errors import UserError
from soft_trainer.options.recipes import read_recipe
from soft_trainer.studies import execution
from soft_trainer.studies.grid import read_study

# Starts the stand-in for a run as a child, as `accelerate launch` does, and fails as that does.
LAUNCHER = """
import os, subprocess, sys
code = subprocess.Popen([sys.executable, "-IS", os.path.dirname(__file__) + "/run.py", *sys.argv[1:]]).wait()
if code:
    raise subprocess.CalledProcessError(code, "run.py")
"""
# Does what behaviour.json says for its run; when told to stop, leaves a complete checkpoint.
RUN = """
import json, os, signal, sys, time
words, here = sys.argv[1:], os.path.dirname(__file__)
folder = os.path.dirname(words[words.index("--config") + 1])
with open(here + "/calls.txt", "a") as calls:
    calls.write(json.dumps(words) + "\\n")
told = json.load(open(here + "/behaviour.json"))
told = next((value for name, value in told.items() if folder.endswith(name)), "train")
if told == "fail":
    print("step 1")
    print("error: beta must be above alpha")
    sys.exit(2)
if told == "hang":
    def save(*_):
        os.mkdir(folder + "/checkpoint-7")
        open(folder + "/checkpoint-7/complete.json", "w").write("{}")
        sys.exit(143)
    signal.signal(signal.SIGINT, save)
    with open(here + "/hangs.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(here + "/hangs.new", here + "/hangs")
    time.sleep(60)
if told != "nothing":
    os.makedirs(folder + "/checkpoint-9", exist_ok=True)
    systems = {"untrained": {"mrr": 0.1}, "trained": {"mrr": 0.5}}
    results = {"train": {"test": systems}, "zero-shot": {"test": {"untrained": {"mrr": 0.1}}}}.get(told, {})
    json.dump({"results": results, "training": {"steps": 10}}, open(folder + "/all_results.json", "w"))
"""
STUDY = {
    "grid": {
        "language": ["ruby", "go"],
        "method": [
            {"name": "trained_model", "estimator": "trained_model", "needs": "infonce"},
            {"name": "infonce", "loss": "info_nce", "estimator": "none"},
            {"name": "simcse", "estimator": "simcse", "needs": "simcse-encoder"},
        ],
        "seed": [1, 2],
    },
    "once": {"simcse-encoder": {"module": "soft_trainer.simcse", "config": "simcse.yaml"}},
    "options": {"num_train_epochs": 3, "data_dir": "rows/{language}", "save_strategy": "no"},
}


class Here:
    """A study in an empty folder."""

    def __init__(self, folder):
        self.folder, self.outputs = folder, folder / "outputs"
        (folder / "launch.py").write_text(LAUNCHER)
        (folder / "run.py").write_text(RUN)
        (folder / "simcse.yaml").write_text("temperature: 0.05\noutput_dir: elsewhere\n")
        launcher = f"{sys.executable} -IS {folder / 'launch.py'}"
        study = STUDY | {"output_dir": str(self.outputs), "launcher": launcher}
        (folder / "study.yaml").write_text(yaml.safe_dump(study))
        self.behave()

    def behave(self, **runs: str) -> None:
        behaviour = {name.replace("__", "/"): told for name, told in runs.items()}
        (self.folder / "behaviour.json").write_text(json.dumps(behaviour))

    def main(self, *words: str) -> int:
        return run_command(["study", "--config", str(self.folder / "study.yaml"), *words])

    def study(self, **changes):
        return read_study(self.folder / "study.yaml", changes)

    def calls(self) -> list[list[str]]:
        """Returns the commands started since the last call, as the words after the launcher."""
        path = self.folder / "calls.txt"
        calls = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        path.unlink(missing_ok=True)
        return calls

    def made(self) -> list[str]:
        """Returns the runs started since the last call."""
        recipes = [words[words.index("--config") + 1] for words in self.calls()]
        return [recipe.removeprefix(f"{self.outputs}/").removesuffix("/recipe.yaml") for recipe in recipes]

    def recipe(self, run: str) -> dict:
        return yaml.safe_load((self.outputs / run / "recipe.yaml").read_text())


@pytest.fixture
def here(tmp_path):
    return Here(tmp_path)


def test_what_is_needed_comes_first_and_only_the_rest_keeps_the_order_of_the_grid(here):
    study = here.study()
    names = [run.name for run in study.chosen()]
    assert names[:4] == ["ruby/infonce/1", "ruby/trained_model/1", "ruby/infonce/2", "ruby/trained_model/2"]
    assert names[4:6] == ["simcse-encoder", "ruby/simcse/1"]
    assert len(names) == 13 and len(set(names)) == 13
    chosen = [run.name for run in study.chosen("method=trained_model,seed=2,language=go")]
    assert chosen == ["go/infonce/2", "go/trained_model/2"]
    assert len(study.chosen("method=infonce,method=simcse,seed=1")) == 5


def test_a_run_has_the_options_of_its_entries_over_those_of_the_study(here):
    study = here.study(data_dir="other/{language}")
    run = study.runs["go/trained_model/2"]
    own = {"language": "go", "estimator": "trained_model", "seed": 2, "num_train_epochs": 3, "save_strategy": "no"}
    folders = {"output_dir": "go/trained_model/2", "estimator_model": "go/infonce/2"}
    folders = {option: str(here.outputs / folder) for option, folder in folders.items()}
    assert execution.recipe(study, run) == own | folders | {"data_dir": "other/go"}
    encoder = here.study(**{"simcse-encoder.max_steps": "5"}).runs["simcse-encoder"]
    assert encoder.options == {"temperature": 0.05, "max_steps": "5"}
    assert "max_steps" not in study.runs["go/infonce/2"].options


CIRCLE = [{"name": "b", "needs": "c"}, {"name": "c", "needs": "b"}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grids": {}}, "unknown key 'grids'"),
        ({"grid": None}, "no grid"),
        ({"grid": {"seed": 1}}, "seed: a list of entries"),
        ({"grid": {"seed": [{"seed": 1}]}}, "give it a name"),
        ({"grid": {"a": [{"name": "b", "needs": "c"}]}, "options": None}, "b needs c, which is neither"),
        ({"options": {"data_dir": "rows/{lang}"}}, r"no option 'lang' is given: --set lang="),
        ({"output_dir": None}, "name an output_dir"),
        ({"grid": {"a": CIRCLE}, "options": None}, "b needs c needs b: no order"),
        ({"options": ["seed"]}, "options: a mapping is expected"),
        ({"once": ["encoder"]}, "once: a mapping is expected"),
        ({"once": {"encoder": "simcse"}}, "encoder: a mapping is expected"),
        ({"once": {"options": {}}, "options": ["seed"]}, "options: a mapping is expected"),
        ({"output_dir": ""}, "name an output_dir"),
        # Folders of others, which --redo would delete.
        ({"grid": {"model_name_or_path": ["/models/a"]}}, "'/models/a' cannot be a folder of the study"),
        ({"grid": {"data_dir": ["../rows"]}}, "'../rows' cannot be a folder"),
        ({"grid": {"query_prefix": [""], "seed": [1]}}, "'' cannot be a folder"),
        ({"grid": {"a": [{"name": "b"}, {"name": "b"}]}, "options": None}, "b: two runs have this name"),
        ({"grid": {"a": ["simcse-encoder"]}, "options": None}, "simcse-encoder: two runs have this name"),
    ],
)
def test_a_study_that_cannot_be_is_refused_by_name(here, change, message):
    path = here.folder / "study.yaml"
    content = {key: value for key, value in (read_recipe(path) | change).items() if value is not None}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=message):
        here.study().chosen()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "seed=3"], r"only=seed=3: write AXIS=NAME of language=ruby\|go; method="),
        (["--set", "seed=3"], "set seed: it is an axis"),
        (["--set", "seed"], "set seed: write OPTION=VALUE"),
        (["--set", "learning_rat=1"], "unknown option 'learning_rat|unknown option --learning_rat"),
        (["--set", "loss=softer"], "ruby/infonce/1: loss='softer': use one of"),
        (["--set", "beta=-1"], "beta"),
        (["--launcher", "no-such-launcher"], "launcher='no-such-launcher': no command"),
    ],
)
def test_what_no_run_can_run_with_is_refused_before_the_first(here, words, message):
    with pytest.raises(UserError, match=message):
        here.main(*words)
    assert here.made() == []


def test_a_study_runs_its_runs_each_with_its_own_options_and_log(here, capsys):
    assert here.main("--only", "language=ruby,seed=1") == 0
    calls = here.calls()
    names = ["ruby/infonce/1", "ruby/trained_model/1", "simcse-encoder", "ruby/simcse/1"]
    assert [words[-2:] for words in calls] == [
        ["--config", str(here.outputs / name / "recipe.yaml")] for name in names
    ]
    assert [words[:3] for words in calls[:3:2]] == [["-m", "soft_trainer.cli", name] for name in ("train", "simcse")]
    assert here.recipe(names[1])["estimator_model"] == here.recipe(names[0])["output_dir"]
    assert here.recipe(names[0])["data_dir"] == "rows/ruby"
    said = capsys.readouterr().err
    assert "[2/4] ruby/trained_model/1: starts" in said
    assert re.search(r"ruby/infonce/1 +\| done +\| +0\.500", said)


def test_what_is_done_is_skipped_and_its_checkpoints_are_gone(here, capsys):
    assert here.main("--only", "language=ruby,method=infonce,seed=1") == 0
    assert here.made() == ["ruby/infonce/1"]
    assert not list(here.outputs.rglob("checkpoint-*"))
    chosen = here.study().chosen("language=ruby,method=infonce")
    assert here.main("--only", "language=ruby,method=infonce", "--keep_checkpoints") == 0
    assert here.made() == ["ruby/infonce/2"]
    assert [path.name for path in here.outputs.rglob("checkpoint-*")] == ["checkpoint-9"]
    # As if another study had made them after this one had chosen them.
    assert execution.run_all(here.study(), chosen) == 0
    assert capsys.readouterr().err.count("done before") == 3
    assert execution.execute(here.study(), chosen[0]) is None and here.made() == []


def test_a_failed_run_is_told_of_and_the_others_go_on(here, capsys):
    here.behave(ruby__infonce__1="fail", ruby__simcse__2="nothing")
    assert here.main("--only", "language=ruby") == 1
    assert len(here.made()) == 6
    said = capsys.readouterr().err
    assert re.search(r"ruby/infonce/1 +\| failed .* error: beta must be above alpha", said)
    assert re.search(r"ruby/trained_model/1 +\| not run .* needs ruby/infonce/1, which is failed", said)
    assert re.search(r"ruby/simcse/2 +\| failed .* ended with exit code 0 and no results", said)
    assert re.search(r"ruby/trained_model/2 +\| done", said)
    here.behave()
    assert here.main("--only", "language=ruby") == 0
    assert here.made() == ["ruby/infonce/1", "ruby/trained_model/1", "ruby/simcse/2"]


def test_a_run_that_measured_nothing_or_did_not_train_is_done(here, capsys):
    here.behave(ruby__infonce__1="unmeasured", ruby__infonce__2="zero-shot")
    assert here.main("--only", "language=ruby,method=infonce,method=trained_model") == 0
    assert len(here.made()) == 4
    assert here.main("--only", "language=ruby,method=infonce") == 0 and here.made() == []


def test_after_ctrl_c_the_same_command_resumes_the_run(here, capsys):
    """Ctrl-C reaches the study and the run, as they share a terminal."""
    here.behave(ruby__infonce__1="hang")

    def press():
        deadline = time.monotonic() + 30
        while not (here.folder / "hangs").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        os.kill(int((here.folder / "hangs").read_text()), signal.SIGINT)

    threading.Thread(target=press).start()
    assert here.main("--only", "language=ruby,method=infonce") == 130
    assert here.made() == ["ruby/infonce/1"]
    said = capsys.readouterr().err
    assert re.search(r"ruby/infonce/1 +\| stopped ", said) and "the same command continues from here" in said
    assert (here.outputs / "ruby/infonce/1/checkpoint-7/complete.json").exists()
    here.behave()
    assert here.main("--only", "language=ruby,method=infonce") == 0
    resumed, other = here.calls()
    assert resumed[-2:] == ["--resume_from_checkpoint", "last"] and "--resume_from_checkpoint" not in other
    assert "ruby/infonce/1: resumes" in capsys.readouterr().err


def test_other_options_are_refused_and_redo_makes_the_run_again(here):
    chosen = ("--only", "language=ruby,method=trained_model,seed=1")
    assert here.main(*chosen) == 0
    kept = here.outputs / "ruby/infonce/1/all_results.json"
    with pytest.raises(UserError, match="2 runs .*num_train_epochs was 3, is 4.*--redo"):
        here.main(*chosen, "--set", "num_train_epochs=4")
    assert kept.exists() and len(here.calls()) == 2
    assert here.main(*chosen, "--set", "num_train_epochs=4", "--redo") == 0
    assert here.made() == ["ruby/infonce/1", "ruby/trained_model/1"]
    assert here.recipe("ruby/infonce/1")["num_train_epochs"] == "4"


def test_redo_leaves_a_run_that_goes_on_alone(here):
    chosen = ("--only", "language=ruby,method=infonce,seed=1", "--redo")
    assert here.main(*chosen) == 0
    folder = here.outputs / "ruby/infonce/1"
    with (folder / "log.txt").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with refused("ruby/infonce/1: its run goes on"):
            here.main(*chosen, "--set", "num_train_epochs=4")
    assert (folder / "all_results.json").exists() and len(here.calls()) == 1
    assert here.main(*chosen, "--set", "num_train_epochs=4") == 0 and here.made() == ["ruby/infonce/1"]


def test_a_run_has_changed_when_its_options_or_those_of_what_it_needs_have(here):
    def progress(name, **changes):
        study = here.study(**changes)
        return execution.progress(study, study.runs[name])

    assert here.main("--only", "language=ruby,seed=1", "--set", "learning_rate=2e-5") == 0
    assert progress("ruby/infonce/1", learning_rate="0.00002", num_train_epochs="3.0").state == "done"
    assert progress("ruby/infonce/1", learning_rate="0.00003").state == "changed"
    (difference,) = progress("ruby/simcse/1", learning_rate="2e-5", **{"simcse-encoder.temperature": "0.1"}).changes
    assert difference == "simcse-encoder: temperature was 0.05, is 0.1"
    here.outputs.rename(here.folder / "moved")
    moved = read_study(here.folder / "study.yaml", {"learning_rate": "2e-5"}, output_dir=str(here.folder / "moved"))
    assert execution.progress(moved, moved.runs["ruby/trained_model/1"]).state == "done"


def test_folders_of_others_are_left_alone(here, capsys):
    folder = here.outputs / "ruby/infonce/1"
    folder.mkdir(parents=True)
    with (folder / "log.txt").open("ab") as log:  # as long as the run runs elsewhere
        fcntl.flock(log, fcntl.LOCK_EX)
        assert here.main("--only", "language=ruby,method=infonce") == 1
    assert here.made() == ["ruby/infonce/2"]
    assert "holds it now" in capsys.readouterr().err
    (folder / "all_results.json").write_text("{}")
    with pytest.raises(UserError, match="made without the study"):
        here.main("--only", "language=ruby,method=infonce")


def test_the_plan_lists_the_runs_and_runs_nothing(here, capsys):
    assert here.main("--dry_run", "--only", "language=ruby,method=trained_model,seed=1") == 0
    printed = capsys.readouterr().out
    assert re.search(r"2 \| ruby/trained_model/1 +\| new +\| ruby/infonce/1", printed)
    assert f"2 runs, 0 of them done; output in {here.outputs}" in printed
    assert here.calls() == [] and not here.outputs.exists()


def test_the_last_error_of_a_log_is_the_runs_and_not_the_launchers(tmp_path):
    log = tmp_path / "log.txt"
    old = "error: of the time before\n"
    log.write_text(
        old + "50%|###|\rTraceback (most recent call last):\n  File\n"
        "soft_trainer.training.finite.NotFiniteError: the loss is nan\n"
        "Traceback\nsubprocess.CalledProcessError: Command died\n"
    )
    assert execution.last_error(log, len(old)) == "soft_trainer.training.finite.NotFiniteError: the loss is nan"
    log.write_text(old + "Killed\n")
    assert execution.last_error(log, len(old)) == "Killed"


# ---- Lists, joined by commas as in a recipe ----


@pytest.fixture
def write_study(tmp_path):
    def write(**content):
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "out")} | content))
        return read_study(path)

    return write


def test_a_list_of_an_option(write_study, tmp_path):
    (tmp_path / "recipe.yaml").write_text("lora_r: 4\nlora_target_modules: [query, value]\nreport_to: [none]\n")
    entry = {"name": "a", "config": "recipe.yaml", "matryoshka_dims": [32, 8]}
    study = write_study(grid={"method": [entry]}, options={"estimator": "none", "filters": ["short_functions"]})
    (run,) = study.chosen()
    model, data, args = execution.check(study, run)
    assert args.matryoshka_dims == "32,8" and model.lora_target_modules == "query,value"
    assert data.filters == "short_functions" and args.report_to == []
    written = execution.recipe(study, run) | {"use_cpu": True}
    assert execution.parse(execution.OURS, [], options=written)[2].matryoshka_dims == "32,8"


def test_an_axis_of_lists_and_placeholders_in_a_list(write_study):
    study = write_study(grid={"matryoshka_dims": [[32, 8], 32]}, options={"estimator": "none", "lora_r": 2})
    (run,) = study.chosen("matryoshka_dims=32-8")
    assert list(study.runs) == ["32-8", "32"] and run.name == "32-8"
    assert execution.check(study, run)[2].matryoshka_dims == "32,8"
    options = {"estimator": "none", "eval_data_dir": ["a/{language}", "b/{filters}"], "filters": ["x", "y"]}
    study = write_study(grid={"language": ["ruby"]}, options=options)
    assert study.runs["ruby"].options["eval_data_dir"] == ["a/ruby", "b/x,y"]
    with refused("no option 'place' is given"):
        write_study(grid={"language": ["ruby"]}, options={"eval_data_dir": ["{place}"]})
