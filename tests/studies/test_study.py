"""A study makes a list of runs under several seeds, skips what is done, and notices what changed."""

import fcntl
import json
from pathlib import Path

import pytest
import yaml
from git_repositories import Repository
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.files import write_json
from soft_trainer.options.recipes import RECIPES, read_recipe
from soft_trainer.studies.study import check_options, identity_of, read_study, state_of

STUDIES = [path for path in sorted(RECIPES.rglob("*.yaml")) if "runs" in read_recipe(path)]


@pytest.fixture
def study_file(tmp_path):
    """Writes a study of two methods and two seeds, changed by keywords."""

    def write(**changes):
        content = {
            "output_dir": str(tmp_path / "out" / "{language}"),
            "seeds": [1, 2],
            "options": {"language": "python", "data_dir": str(tmp_path / "rows")},
            "runs": {
                "infonce": {"loss": "info_nce", "estimator": "none"},
                "frozen": {"estimator": "trained_model", "estimator_model": "{infonce}"},
            },
        }
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(content | changes, sort_keys=False))
        return path

    return write


def finish(study, run, mrr=0.5):
    """Writes what a finished run leaves in its folder."""
    folder = study.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "study.json", identity_of(study, run))
    write_json(folder / "run.json", {"training": {}, "results": {"test": {"trained": {"mrr": mrr}}}})


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
        ({"runs": []}, "runs: a mapping is expected"),
        ({"seeds": 3}, "seeds: a list is expected"),
        ({"output_dir": None}, "name an output_dir"),
        ({"runs": {"a": {"data_dir": "{nothing}"}}}, "no option or run has this name"),
        ({"runs": {"a": {"seed": 7}}}, "a: seed: the study's `seeds` decide"),
        ({"runs": {"a": {"output_dir": "b"}}}, "a: output_dir: the study's `output_dir` decides"),
    ],
)
def test_what_is_no_study_is_refused(study_file, changes, words):
    with refused(words):
        read_study(study_file(**changes))


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
    run = study.runs[0]
    assert state_of(study, run)[0] == "new"
    finish(study, run)
    assert state_of(study, run)[0] == "done"
    other = read_study(study_file(), {"learning_rate": "1"})
    assert state_of(other, other.runs[0])[0] == "changed"
    rows.write_text('{"code": "changed"}\n')
    state, changes = state_of(study, run)
    assert state == "changed"
    assert "the content of data_dir" in changes[0]


def test_a_run_is_changed_if_the_run_that_it_reads_was_made_again_with_other_options(study_file):
    study = read_study(study_file())
    for run in study.runs[:2]:
        finish(study, run)
    assert state_of(study, study.runs[1])[0] == "done"
    made_with = study.folder(study.runs[0]) / "study.json"
    write_json(made_with, json.loads(made_with.read_text()) | {"options": {"learning_rate": 9}})
    assert state_of(study, study.runs[1])[0] == "changed"


OWN = "from helper import scaled\nWEIGHT = 1\ndef plain(scores, positives):\n    return scaled(scores.mean())\n"


@pytest.mark.parametrize("file", ["own.py", "helper.py"])
def test_a_run_is_changed_if_its_own_code_changes(study_file, tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "helper.py").write_text("def scaled(value):\n    return value\n")
    (tmp_path / "other.py").write_text("")
    study = read_study(study_file(runs={"a": {"loss": "own:plain"}, "b": {"estimator": "own:Estimator"}}))
    for run in study.runs:
        finish(study, run)
    (tmp_path / "other.py").write_text("changed = 1")
    assert [state_of(study, run)[0] for run in study.runs] == ["done"] * 4
    (tmp_path / file).write_text((tmp_path / file).read_text() + "\nSCALE = 2\n")
    (_, loss), (_, estimator) = [state_of(study, run) for run in study.runs[:2]]
    assert loss == ["the content of loss changed"] and estimator == ["the content of estimator changed"]


def test_a_run_is_changed_if_its_launcher_or_a_file_of_it_changes(study_file, tmp_path):
    config = tmp_path / "two.yaml"
    config.write_text("num_processes: 2")
    study = read_study(study_file(launcher=f"accelerate launch --config_file {config}"))
    finish(study, study.runs[0])
    assert state_of(study, study.runs[0])[0] == "done"
    config.write_text("num_processes: 4")
    changed = ["processes was 2, is 4", "the launcher's config_file changed"]
    assert state_of(study, study.runs[0]) == ("changed", changed)


def test_a_run_is_changed_if_a_commit_of_its_history_is_amended(study_file, tmp_path):
    repository = Repository(tmp_path / "repository")
    repository.commit("add a", {"a.py": "def a():\n    return 1\n"})
    study = read_study(study_file(options={"language": "python", "history": str(tmp_path / "repository")}))
    finish(study, study.runs[0])
    assert state_of(study, study.runs[0])[0] == "done"
    repository.commit("add b", {"b.py": "def b():\n    return 1\n"})
    assert "the content of history changed" in state_of(study, study.runs[0])[1]


def test_a_study_in_the_tree_that_it_mines_continues(study_file, tmp_path):
    (tmp_path / "a.py").write_text("def a():\n    return 1\n")
    study = read_study(
        study_file(options={"language": "python", "source_dir": str(tmp_path), "data_dir": str(tmp_path)})
    )
    run = study.runs[0]
    study.folder(run).mkdir(parents=True)
    (study.folder(run) / "custom.py").write_text("an encoder's own code")
    finish(study, run)
    assert state_of(study, run)[0] == "done"
    (tmp_path / "a.py").write_text("def a():\n    return 2\n")
    assert "the content of source_dir changed" in state_of(study, run)[1]


def test_the_standard_library_has_content(study_file, tmp_path, monkeypatch):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "os.py").write_text("old = 1")
    monkeypatch.setattr("os.__file__", str(tmp_path / "library" / "os.py"))
    study = read_study(study_file(options={"language": "python", "source_dir": "stdlib"}))
    finish(study, study.runs[0])
    assert state_of(study, study.runs[0])[0] == "done"
    (tmp_path / "library" / "os.py").write_text("new = 1")
    assert state_of(study, study.runs[0]) == ("changed", ["the content of source_dir changed"])


def test_changed_runs_are_refused_before_anything_starts(study_file, capsys):
    study = read_study(study_file())
    finish(study, study.runs[3])
    with refused("was made with other settings: learning_rate is new or gone"):
        run_command(["study", "--config", str(study_file()), "--set", "learning_rate=1"])


def test_redo_leaves_a_run_alone_that_goes_on(study_file):
    study = read_study(study_file())
    finish(study, study.runs[0])
    words = ["study", "--config", str(study_file()), "--set", "learning_rate=1", "--redo"]
    with (study.folder(study.runs[0]) / "log.txt").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with refused("its run is still in progress in another study"):
            run_command(words)
    assert (study.folder(study.runs[0]) / "run.json").is_file()


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
    with refused("seed: the study's `seeds` decide"):
        run_command(["study", "--config", str(study_file()), "--set", "seed=7", "--dry_run"])


@pytest.mark.slow
def test_a_study_runs_resumes_and_skips(data_dir, tmp_path, capsys):
    tiny = {"from_scratch": "32x1", "vocabulary_size": 400, "max_steps": 2, "per_device_train_batch_size": 5}
    tiny |= {"use_cpu": True, "language": "python", "data_dir": str(data_dir), "examples": 0, "lexical": False}
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
    assert Path(tmp_path / "o" / "infonce" / "1" / "log.txt").is_file()
