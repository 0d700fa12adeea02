"""A study starts runs with several seeds, skips finished runs, and detects changed settings."""

import json
import os
from pathlib import Path

import pytest
import yaml
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.files import DEPENDS_ON, LISTED, write_json
from soft_trainer.options.defaults import apply_defaults
from soft_trainer.options.recipes import RECIPES, read_recipe
from soft_trainer.run.building import build_encoder
from soft_trainer.studies.study import _command, _mrr, check_options, read_study, state_of_run
from soft_trainer.training.output_folder import DONE, NEW, OTHER, STOPPED, lock, lock_file, mark_complete
from soft_trainer.training.run_fingerprint import run_fingerprint

STUDIES = [path for path in sorted(RECIPES.rglob("*.yaml")) if "runs" in read_recipe(path)]


@pytest.fixture
def study_file(tmp_path):
    """Returns a function that writes a study of two methods and two seeds, changed by keywords."""

    def write(**changes):
        content = {
            "output_dir": str(tmp_path / "out" / "{language}"),
            "seeds": [1, 2],
            "options": {"language": "python", "data_dir": str(tmp_path / "rows"), "from_scratch": "32x1"},
            "runs": {
                "infonce": {"loss": "info_nce", "estimator": "none"},
                "frozen": {"estimator": "trained_model", "estimator_model": "{infonce}"},
            },
        }
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(content | changes, sort_keys=False))
        return path

    return write


def fingerprint_of(run):
    """Returns the run fingerprint that a run of a study stores in its record."""
    model_args, data_args, args = check_options(run)
    apply_defaults(args, build_encoder(model_args), trains=args.do_train)
    return run_fingerprint(model_args, data_args, args)


def finish(study, run, mrr=0.5, **changes):
    """Writes the files that a finished run leaves in its folder."""
    folder = study.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_text("weights")
    write_json(folder / "study.json", {"launcher": study.launcher})
    record = {"results": {"test": {"trained": {"mrr": mrr}}}, LISTED: {}}
    record[DEPENDS_ON] = fingerprint_of(run) | changes
    write_json(folder / "run.json", record)


def state(study, number=0):
    """Returns the state of a run, and the settings that changed."""
    found = state_of_run(study, study.runs[number])
    return found.name, list(found.changes)


def test_every_run_has_its_options_and_a_folder_for_each_seed(study_file, tmp_path):
    study = read_study(study_file(), {"num_train_epochs": "3"})
    assert [run.name for run in study.runs] == ["infonce/1", "frozen/1", "infonce/2", "frozen/2"]
    frozen = study.runs[3]
    assert frozen.options["seed"] == 2
    assert frozen.options["num_train_epochs"] == "3"
    assert frozen.options["output_dir"] == str(tmp_path / "out" / "python" / "frozen" / "2")
    assert frozen.options["estimator_model"] == str(tmp_path / "out" / "python" / "infonce" / "2")


def test_a_run_starts_from_a_recipe_whose_options_the_others_override(study_file, tmp_path):
    (tmp_path / "base.yaml").write_text("learning_rate: 0.5\nlanguage: go\noutput_dir: elsewhere\n")
    (run, _) = read_study(study_file(runs={"a": {"config": "base.yaml"}})).runs
    assert run.options["learning_rate"] == 0.5
    assert run.options["language"] == "python"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grid": {}}, "unknown key 'grid'"),
        ({"runs": []}, "runs: expected a mapping"),
        ({"seeds": 3}, "seeds: expected a list"),
        ({"output_dir": None}, "set output_dir, the parent"),
        ({"launcher": ["python"]}, "launcher: expected a command line"),
        ({"options": ["seed"]}, "options: expected a mapping of options"),
        ({"runs": {"a": "b"}}, "a: expected a mapping of options"),
        ({"runs": {"a": {"config": 3}}}, "cannot be read"),
        ({"runs": {"a": {"data_dir": "{nothing}"}}}, "no option or run has this name"),
        ({"runs": {"a": {"seed": 7}}}, "a has seed; set the study's `seeds` instead"),
        ({"runs": {"a": {"output_dir": "b"}}}, "a has output_dir; set the study's `output_dir` instead"),
    ],
)
def test_what_is_no_study_is_refused(study_file, changes, words):
    with refused(words):
        read_study(study_file(**changes))


def test_the_name_of_a_run_may_be_a_number(study_file, tmp_path):
    (run, _) = read_study(study_file(runs={0.5: {"learning_rate": 0.5}})).runs
    assert run.name == "0.5/1"


def test_a_launcher_that_is_no_command_line_is_refused(study_file, tmp_path):
    with refused("launcher=", "No closing quotation"):
        _command(read_study(study_file(launcher="python 'a")), tmp_path, overwrite=False)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.relative_to(RECIPES).as_posix())
def test_the_studies_of_the_package_have_options_that_exist(path):
    study = read_study(path, {"model_name_or_path": "encoder", "data_dir": "rows"} if "smoke" in path.parts else {})
    for run in study.runs:
        check_options(run)


def test_an_unknown_option_is_named_with_its_run(study_file):
    study = read_study(study_file(runs={"a": {"learning_rat": 1}}))
    with refused("a/1: unknown option 'learning_rat'"):
        check_options(study.runs[0])


def test_a_finished_run_is_done_until_its_options_or_its_rows_change(study_file, tmp_path):
    (tmp_path / "rows").mkdir()
    rows = tmp_path / "rows" / "train.jsonl"
    rows.write_text("{}\n")
    study = read_study(study_file())
    assert state(study) == (NEW, [])
    finish(study, study.runs[0])
    assert state(study) == (DONE, [])
    assert state(read_study(study_file(), {"learning_rate": "1"})) == (OTHER, ["learning_rate was 0.001, is now 1.0"])
    rows.write_text('{"code": "changed"}\n')
    assert state(study) == (OTHER, ["data_dir changed"])


def test_a_cell_that_more_processes_have_overwritten_is_not_done(study_file):
    study = read_study(study_file())
    finish(study, study.runs[0], processes=2)
    made = study.folder(study.runs[0]) / "study.json"
    write_json(made, {"launcher": study.launcher, "processes": 2, "precision": "no"})
    assert state(study) == (DONE, [])
    write_json(made, {"launcher": study.launcher, "processes": 1, "precision": "no"})
    assert state(study) == (OTHER, ["processes was 2, is now 1"])


def test_a_run_replaces_the_language_in_its_rows_itself(study_file):
    study = read_study(study_file(), {"data_dir": "rows/{language}", "language": "python,ruby"})
    assert {run.options["data_dir"] for run in study.runs} == {"rows/{language}"}


def test_the_mrr_of_several_tests_is_their_mean(tmp_path):
    results = {
        "test-a": {"trained": {"mrr": 0.5}},
        "test-b": {"trained": {"mrr": 0.7}},
        "valid-a": {"trained": {"mrr": 1}},
    }
    write_json(tmp_path / "run.json", {"results": results})
    assert _mrr(tmp_path) == pytest.approx(0.6)


def test_a_stopped_run_continues_and_one_without_a_checkpoint_is_new(study_file):
    study = read_study(study_file())
    folder = study.folder(study.runs[0])
    folder.mkdir(parents=True)
    (folder / "log.txt").write_text("started")
    assert state(study) == (NEW, [])
    mark_complete(folder / "checkpoint-3", fingerprint_of(study.runs[0]) | {"processes": 8})
    assert state(study) == (STOPPED, [])


def test_a_run_is_changed_if_its_launcher_changes(study_file):
    study = read_study(study_file())
    finish(study, study.runs[0])
    other = read_study(study_file(launcher="accelerate launch --num_processes 2"))
    changed = ["launcher was 'accelerate launch', is now 'accelerate launch --num_processes 2'"]
    assert state(other) == (OTHER, changed)


def test_a_redo_that_fails_leaves_the_results_of_the_earlier_launcher_to_make_again(study_file, capsys):
    finish(read_study(study_file()), read_study(study_file()).runs[0], mrr=0.125)
    path = study_file(launcher="false", seeds=[1])
    assert run_command(["study", "--config", str(path), "--only", "infonce", "--redo"]) == 1
    printed = "".join(capsys.readouterr())
    assert "failed" in printed
    assert "0.125" not in printed
    assert state(read_study(path))[0] == OTHER


def test_changed_runs_are_refused_before_anything_starts(study_file):
    study = read_study(study_file())
    finish(study, study.runs[3])
    with refused("was made with other settings (learning_rate was 0.001, is now 1.0", "--redo"):
        run_command(["study", "--config", str(study_file()), "--set", "learning_rate=1"])


def test_a_run_that_another_process_has_open_is_skipped(study_file, capsys):
    study = read_study(study_file())
    folder = study.folder(study.runs[0])
    folder.mkdir(parents=True)
    held = lock(folder)
    words = ["study", "--config", str(study_file(seeds=[1])), "--only", "infonce"]
    assert run_command(words) == 1
    assert "skipped: another study or run has it open" in "".join(capsys.readouterr())
    os.close(held)
    with (folder / "log.txt").open("ab") as log:
        assert lock_file(log)
        assert run_command(words) == 1
        assert lock(folder) is not None  # the run that the other study starts can lock it
    assert not (folder / "recipe.yaml").exists()


def test_the_plan_and_a_choice_of_runs(study_file, capsys):
    study = read_study(study_file())
    finish(study, study.runs[0])
    assert run_command(["study", "--config", str(study_file()), "--only", "infonce", "--dry_run"]) == 0
    printed = capsys.readouterr().out
    assert "| infonce/1 | done" in printed
    assert "| infonce/2 | new" in printed
    assert "frozen" not in printed
    assert run_command(["study", "--config", str(study_file()), "--only", "frozen, infonce", "--dry_run"]) == 0
    printed = capsys.readouterr().out
    assert "| frozen/1 " in printed
    with refused("only=infonc: no such run; did you mean 'infonce'?"):
        run_command(["study", "--config", str(study_file()), "--only", "infonc", "--dry_run"])
    with refused("seed; set the study's `seeds` instead"):
        run_command(["study", "--config", str(study_file()), "--set", "seed=7", "--dry_run"])


@pytest.mark.slow
def test_a_study_runs_resumes_and_skips(data_dir, tmp_path, capsys):
    tiny = {"from_scratch": "32x1", "vocabulary_size": 400, "max_steps": 2, "per_device_train_batch_size": 5}
    tiny |= {"use_cpu": True, "language": "python", "data_dir": str(data_dir), "examples": 0, "lexical": False}
    tiny["bf16"] = False  # the study starts new processes, which see what the processor computes in
    runs = {"infonce": {"estimator": "none"}, "broken": {"data_dir": str(tmp_path / "nothing")}}
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "o"), "seeds": [1], "options": tiny, "runs": runs}))
    words = ["study", "--config", str(path)]
    assert run_command(words) == 1
    printed = capsys.readouterr()
    shown = printed.out + printed.err
    assert "infonce/1 | done" in shown
    assert "failed: error: " in shown and "no such folder" in shown
    assert (tmp_path / "o" / "infonce" / "1" / "model.safetensors").is_file()
    assert run_command([*words, "--only", "infonce"]) == 0
    shown = "".join(capsys.readouterr())
    assert "done before" in shown
    cell = tmp_path / "o" / "infonce" / "1"
    made = json.loads((cell / "study.json").read_text())
    assert made == {"launcher": "accelerate launch", "processes": 1, "precision": "no"}
    (cell / "run.json").unlink()  # as if it had been stopped after its last checkpoint
    assert run_command([*words, "--only", "infonce"]) == 0
    shown = "".join(capsys.readouterr())
    assert "infonce/1: continues" in shown and "infonce/1 | done" in shown
    changed = [*words, "--only", "infonce", "--set", "learning_rate=0.5"]
    with refused("was made with other settings (learning_rate was 0.001, is now 0.5"):
        run_command(changed)
    before = (cell / "model.safetensors").read_bytes()
    assert run_command([*changed, "--redo"]) == 0
    assert "infonce/1: starts again" in "".join(capsys.readouterr())
    assert (cell / "model.safetensors").read_bytes() != before
    assert Path(tmp_path / "o" / "infonce" / "1" / "log.txt").is_file()
